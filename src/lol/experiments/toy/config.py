"""What decides a toy run, and the models of the article as settings of it."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from lol.errors import UserError
from lol.experiments.toy.task import ARTICLE, DISTINCT, Task
from lol.model.config import LoLConfig
from lol.train.config import BalanceConfig, OptimConfig

Routing = Literal["fixed", "by primitive", "by step and primitive", "relabelled per step", "by program", "learned"]
Between = Literal["nothing", "noise", "digits", "digits at random", "hard digits", "hard digits at random"]
WRITTEN: tuple[Between, ...] = ("digits", "hard digits")
"""Those that are done in use too, and draw nothing."""
RouterTraining = Literal["top-1", "soft", "gumbel"]


@dataclass(frozen=True)
class ToyConfig:
    """A toy run but for its seed. The defaults are the article's learned router.

    What the article leaves unsaid is decided here: the library's own block (SwiGLU, RMS norms, rotary angles) with
    learned embeddings of digits, of (step, primitive) and of places; weight decay on every parameter. `CHOICES` has
    other ways.
    """

    routing: Routing = "learned"
    """Where the block of a step comes from: the step ("fixed": one block after the other, over again where there are
    fewer than steps), the program in one of four given ways, or the router."""
    num_blocks: int = 4
    """L, the blocks of the library."""
    tie_router: bool = True
    """One router for all steps, or one each."""
    blind: bool = False
    """Blocks never see the program: the router alone does, as the mean of its embeddings added to its input."""
    router_training: RouterTraining = "top-1"
    """The block that the router chose; all blocks, weighted by its probabilities; or the same by a Gumbel softmax whose
    temperature falls from 1 to 0.1, in equal parts each step."""
    between: Between = "nothing"
    """What happens to the state between two blocks (of blind blocks): nothing; in training, noise of 0.3 times the size
    of each place's state; or the head writes it as digits, which are embedded as the input is, always or, in training
    alone, for a random half of the examples at each step. What is embedded is the mean embedding under the head's
    probabilities, or of hard digits the most probable one's, through which the gradient passes as through the mean."""
    balance_scope: Literal["global", "depth"] = "global"
    """One balancing bias, or one per step of the program."""
    sequence_aux: float = 0.0
    """Coefficient of the sequence balance loss."""
    primitives: tuple[str, ...] = ARTICLE
    steps: int = 3
    split: Literal["programs", "functions"] = "programs"
    """Hold out any programs, or all that compute a held-out function."""
    split_number: int = 0
    num_held_out: int = 16
    train_steps: int = 3000
    batch_size: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    clip_norm: float = 1.0
    hidden_size: int = 64
    num_heads: int = 4
    block: Literal["library", "torch", "torch as it comes"] = "library"
    """The library's block, or `torch.nn.TransformerEncoderLayer` with which a model has as many parameters as the
    article says: made like the library's (norms before the update, GELU, no dropout) or with torch's defaults. It has
    LayerNorm, biases, no rotary angles, and torch's first weights."""
    intermediate_size: int = 168
    """Of the library's block, which then has about as many parameters as torch's."""
    initializer_range: float = 0.02
    """Deviation of the library's first weights."""
    embedding_std: float = 1.0
    """Deviation of the first embeddings of digits and of (step, primitive)."""
    place_std: float = 1.0
    """Deviation of the first embeddings of places."""

    def __post_init__(self) -> None:
        needed = {"by step and primitive": len(self.primitives) * self.steps, "fixed": 1, "learned": 1}
        if self.num_blocks < needed.get(self.routing, len(self.primitives)):
            raise UserError(f"routing {self.routing} needs more blocks than num_blocks={self.num_blocks}")
        if self.between != "nothing" and not (self.blind and self.routing != "learned"):
            raise UserError(f"between={self.between} needs blind=True and a routing that is given")
        if self.router_training != "top-1" and self.routing != "learned":
            raise UserError(f"router_training={self.router_training} is for routing='learned', not {self.routing}")

    @property
    def task(self) -> Task:
        return Task(self.primitives, self.steps)

    @property
    def balance(self) -> BalanceConfig:
        return BalanceConfig(sequence_aux=self.sequence_aux)

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(
            learning_rate=self.learning_rate,
            final_learning_rate=0.0,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
        )

    def library(self) -> LoLConfig:
        """The library, router and blocks as the model's own configuration."""
        return LoLConfig(
            vocab_size=len(self.primitives) * self.steps,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_prelude_layers=0,
            num_coda_layers=0,
            num_experts=self.num_blocks,
            num_routed_depths=self.steps,
            initializer_range=self.initializer_range,
            tie_router=self.tie_router,
            balance_scope=self.balance_scope,
        )


_GIVEN = ToyConfig(routing="by primitive")
_DENSE = ToyConfig(routing="fixed", num_blocks=3)

_ARTICLE_MODELS: dict[str, ToyConfig] = {
    "dense": _DENSE,
    "looped": replace(_DENSE, num_blocks=1),
    "given": _GIVEN,
    "given-step-primitive": replace(_GIVEN, routing="by step and primitive", num_blocks=12),
    "given-relabelled": replace(_GIVEN, routing="relabelled per step"),
    "given-program": replace(_GIVEN, routing="by program"),
    "given-blind": replace(_GIVEN, blind=True),
    "learned": ToyConfig(),
    "learned-untied": ToyConfig(tie_router=False),
    "learned-8": ToyConfig(num_blocks=8),
    "router-only": ToyConfig(blind=True),
    "router-only-untied": ToyConfig(blind=True, tie_router=False),
    "learned-sequence-balance": ToyConfig(sequence_aux=0.01),
    "learned-balance-per-depth": ToyConfig(balance_scope="depth"),
    "learned-soft": ToyConfig(router_training="soft"),
    "learned-gumbel": ToyConfig(router_training="gumbel"),
    "dense-lr1e-3": replace(_DENSE, learning_rate=1e-3),
    "given-lr1e-3": replace(_GIVEN, learning_rate=1e-3),
    "learned-lr1e-3": ToyConfig(learning_rate=1e-3),
    "dense-wd0.1": replace(_DENSE, weight_decay=0.1),
    "given-wd0.1": replace(_GIVEN, weight_decay=0.1),
}
"""The models of both rounds, and the given routing with blocks that do not see the program."""

CHOICES: dict[str, dict[str, Any]] = {
    "torch-block": {"block": "torch"},
    "torch-defaults": {"block": "torch as it comes"},
    "init0.09": {"initializer_range": 0.09},
    "embedding0.02": {"embedding_std": 0.02, "place_std": 0.02},
    "place0.02": {"place_std": 0.02},
    "torch-block-embedding0.02": {"block": "torch", "embedding_std": 0.02, "place_std": 0.02},
}
"""Ways to fill what the article leaves unsaid; 0.09 is the deviation of torch's own first weights at this width."""

CHOICE_MODELS = ("dense", "given", "learned")
DISTINCT_MODELS = ("dense", "given", "given-blind", "learned")


def choice_name(model: str, choice: str) -> str:
    """A model of the article under one of `CHOICES`."""
    return f"{model}-{choice}"


def distinct_name(model: str) -> str:
    """A model of the article on the primitives whose programs all differ."""
    return f"{model}-distinct"


CHOSEN_MODELS: dict[str, ToyConfig] = {
    choice_name(name, choice): replace(_ARTICLE_MODELS[name], **changes)
    for name in CHOICE_MODELS
    for choice, changes in CHOICES.items()
}

MODELS: dict[str, ToyConfig] = (
    _ARTICLE_MODELS
    | {distinct_name(name): replace(_ARTICLE_MODELS[name], primitives=DISTINCT) for name in DISTINCT_MODELS}
    | CHOSEN_MODELS
)
"""All models by name: the article's, the main ones on distinct programs, and under each of `CHOICES`."""
