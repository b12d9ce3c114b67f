"""`TrainConfig`: everything that decides a training run, typed, and its form as JSON."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from lol.errors import UserError
from lol.model.config import LoLConfig

Parallel = Literal["none", "ddp", "fsdp2", "hsdp"]
Precision = Literal["float32", "bf16"]
Tracker = Literal["tensorboard", "wandb"]
_SOURCES = "SOURCE | SOURCE[=WEIGHT] SOURCE[=WEIGHT] ..."


@dataclass(frozen=True)
class DataConfig:
    """What is trained on. (See `lol.data`.)"""

    source: Annotated[str | tuple[str, ...], tyro.conf.arg(aliases=["--data"], metavar=_SOURCES)] = "stdlib"
    """Text file, folder, .jsonl, .parquet, hf:NAME[:CONFIG][:SPLIT], or stdlib (the running Python's own library).
    Several are mixed: in equal shares of tokens, or by weights."""
    held_out_source: Annotated[str | tuple[str, ...] | None, tyro.conf.arg(metavar=_SOURCES)] = None
    """Evaluate on this source, or several; without it, a share of the documents of every source is held out."""
    held_out_fraction: float = 0.05
    """Share of the documents' groups that is held out, of every source."""
    text_column: str = "text"
    """Column of the text in .jsonl, .parquet and hub data sets."""
    router_only_column: str | None = None
    """Column of text that the router alone reads, at the beginning of each document: a puzzle's strategy, say. Wants
    model.router_only_tokens."""
    scored_after: str | None = None
    """Learn, and measure, only what follows this word in each document: the answer behind a question, say. It must be
    one token of the tokenizer."""
    document_chars: int = 2000
    """A plain text file is cut at blank lines into documents of at least so many characters."""
    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer; without it, a byte-level BPE of model.vocab_size tokens is trained."""
    context_length: int = 1024
    """Tokens in a row."""
    shuffle_buffer: int = 2048
    """Documents that are shuffled together, of every source."""
    num_workers: int = 0
    """Processes that read and tokenize beside the training."""
    shard_by: Literal["rows", "documents"] = "rows"
    """What processes that train together share out: rows of one stream, which each reads as a whole, so that any number
    of them takes the same steps; or documents, of which each reads its own."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon, with linear warm-up and a cosine down to a floor."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon is for the blocks' projections, each block's by itself; everything else keeps AdamW."""
    learning_rate: float = 3e-4
    """At its peak, after the warm-up."""
    final_learning_rate: float = 0.1
    """Share of the learning rate that is left at the last step."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    momentum: float = 0.95
    """Muon's, by Nesterov's rule."""
    weight_decay: float = 0.1
    """On matrices only: norms, biases, depth embeddings, FiLM and injection take none."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient; 0 clips nothing."""


@dataclass(frozen=True)
class BalanceConfig:
    """How the library's blocks are kept in use. (Article; see `lol.train.balance`.)"""

    strategy: Literal["loss_free", "aux_loss", "none"] = "loss_free"
    """A bias on the choice moved after every step, a loss over the whole batch, or nothing."""
    rate: float = 0.001
    """How far the bias moves in a step."""
    limit: float = 16.0
    """The bias stays within ± limit."""
    stop: float = 0.966
    """Share of the steps after which the bias rests."""
    centre: bool = False
    """Take the mean out of each move of the bias."""
    sequence_aux: float = 1e-4
    """Coefficient of the loss that balances each document, beside the bias."""
    global_aux: float = 0.02
    """Coefficient of the loss of strategy aux_loss."""
    count: Literal["chosen", "unbiased"] = "chosen"
    """What the losses count: the blocks that ran, or the blocks of highest probability (as DeepSeek-V3 does)."""


@dataclass(frozen=True)
class GrowthConfig:
    """Depth in training: how much of the core runs at a step, and how much of it learns. (Article.)"""

    initial_depth: int | None = None
    """Depths run at the first step; without it, all depths run from the start."""
    until: float = 0.75
    """Share of the steps after which all depths run."""
    sampled: bool = False
    """Draw each step's depth around the scheduled one (log-normal Poisson, as Huginn), from the seed and the step."""
    sigma: float = 0.5
    """Spread of the drawn depths: standard deviation of the logarithm of the Poisson rate."""
    unit: int = 1
    """Depths that are drawn together: the blocks of one loop in a looped model."""
    backprop_depth: int | None = None
    """Only the last so many of the depths that run get gradients; without it, all do."""
    first_window_full_backprop: bool = False
    """Each document's first window gets gradients at every depth all the same."""


@dataclass(frozen=True)
class BudgetConfig:
    """What a run may use up. It ends before the first step that would exceed a budget; schedules end there too."""

    tokens: int | None = None
    """Tokens to train on; without it, as many as the steps take."""
    flops: int | float | None = None
    """Floating-point operations of training, as `lol cost` counts them; without it, as many as the steps take."""


@dataclass(frozen=True)
class EvalConfig:
    """Measuring on held-out rows."""

    every: int = 100
    """Steps between evaluations; 0 measures only at the end."""
    rows: int = 64
    """Held-out rows that are measured."""
    ngrams: bool = False
    """At the end, count a unigram and a bigram model on all training tokens and report their held-out losses too."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    recipe: str = ""
    """Recipe whose values the other flags replace; `lol recipe list` shows them."""
    model: LoLConfig = field(default_factory=LoLConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    steps: int = 1000
    """Optimizer steps; a budget may end the run before."""
    batch_size: int = 16
    """Rows in a forward pass, of all processes together."""
    accumulation: int = 1
    """Forward passes in an optimizer step."""
    seed: int = 0
    """Decides initial weights, data order and noise."""
    init: str | None = None
    """Start from the weights and with the tokenizer of this model, which must have the same configuration: a run, a
    checkpoint, or a transformers folder. The optimizer and the steps begin anew."""
    parallel: Parallel = "none"
    """How processes that torchrun started share the work: the whole model on each (ddp), its weights in slices (fsdp2),
    or in slices inside each machine (hsdp)."""
    precision: Precision = "float32"
    """bf16 computes products in bfloat16; weights, moments, routing, norms and attention on a CPU stay float32."""
    activation_checkpointing: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compute layers and depths again in the backward pass, in place of keeping what they computed."""
    compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compile prelude, coda and the library's elementwise work with torch.compile; the first steps take longer."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; 0 writes only the last one."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    tracking: tuple[Tracker, ...] = ()
    """Where the metrics go beside metrics.jsonl: tensorboard, wandb (Weights & Biases; offline unless WANDB_MODE says
    otherwise) or both, each an extra of the package."""

    def __post_init__(self) -> None:
        for place, (least, most) in _RANGES.items():
            value = _at(self, place)
            if not least <= value <= most:
                fix = f"at least {least}" if most == math.inf else f"{least} to {most}"
                raise UserError(f"{place} must be {fix}, not {value}")
        if not all(0 <= beta < 1 for beta in self.optim.betas):
            raise UserError(f"optim.betas must be two numbers from 0 to below 1, not {self.optim.betas}")
        if not 0 <= self.optim.momentum < 1:
            raise UserError(f"optim.momentum must be from 0 to below 1, not {self.optim.momentum}")
        for name, budget in dataclasses.asdict(self.budget).items():
            if budget is not None and not 0 < budget < math.inf:
                raise UserError(f"budget.{name} must be positive and finite, or None for no budget, not {budget}")
        if self.data.router_only_column is not None:
            self._check_router_only()
        if self.data.scored_after is not None and self.eval.ngrams:
            raise UserError("eval.ngrams counts and measures whole texts: leave it out, or data.scored_after")
        self._check_growth()

    def _check_router_only(self) -> None:
        if not self.model.router_only_tokens:
            raise UserError(
                "data.router_only_column needs a model that hides its tokens: model.router_only_tokens=True"
            )
        if self.model.routing != "learned" or not self.model.num_routed_depths:
            raise UserError("data.router_only_column needs a router: this model has none, so leave it out")

    def _check_growth(self) -> None:
        depths, initial = self.model.num_routed_depths, self.growth.initial_depth
        if initial is not None and not 1 <= initial <= max(depths, 1):
            raise UserError(f"growth.initial_depth={initial}, but the model has {depths} routed depths: 1 to {depths}")
        kept = self.growth.backprop_depth
        if kept is not None and kept < 1:
            raise UserError(f"growth.backprop_depth={kept}, but the last depth always has gradients: at least 1")
        if self.growth.sampled and depths % self.growth.unit:
            raise UserError(
                f"growth.unit={self.growth.unit} does not divide the model's {depths} routed depths: give the number "
                "of blocks in a loop, or 1"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.accumulation * self.data.context_length


def _at(config: Any, place: str) -> Any:
    return functools.reduce(getattr, place.split("."), config)


# The lowest and the highest value of what has one. What the data and the model check is not in it.
_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, math.inf),
    "batch_size": (1, math.inf),
    "accumulation": (1, math.inf),
    "checkpoint_every": (0, math.inf),
    "keep_checkpoints": (1, math.inf),
    "seed": (0, 2**32 - 1),
    "optim.learning_rate": (0, math.inf),
    "optim.final_learning_rate": (0, 1),
    "optim.warmup_steps": (0, math.inf),
    "optim.eps": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.clip_norm": (0, math.inf),
    "balance.rate": (0, math.inf),
    "balance.limit": (0, math.inf),
    "balance.stop": (0, 1),
    "growth.until": (0, 1),
    "growth.sigma": (0, math.inf),
    "growth.unit": (1, math.inf),
    "eval.every": (0, math.inf),
    "eval.rows": (1, math.inf),
}


# The run itself decides these (tokenizer, context) or they are about the use of a trained model.
_NOT_OF_A_RUN = {
    "max_position_embeddings", "output_router_logits", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
}  # fmt: skip
MODEL_FIELDS = tuple(name for name in LoLConfig.__annotations__ if name not in _NOT_OF_A_RUN)
"""The fields of `LoLConfig` that are part of a run's configuration."""


def as_json(config: TrainConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries of JSON values."""
    sections = {
        item.name: dataclasses.asdict(getattr(config, item.name))
        for item in dataclasses.fields(config)
        if dataclasses.is_dataclass(getattr(config, item.name)) and item.name != "model"
    }
    model = {name: getattr(config.model, name) for name in MODEL_FIELDS}
    plain = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return plain | sections | {"model": model}


def from_json(values: dict[str, Any]) -> TrainConfig:
    """The inverse of `as_json`.

    Raises:
        UserError: a field that does not exist.
    """
    sections = {"data": DataConfig, "optim": OptimConfig, "balance": BalanceConfig, "growth": GrowthConfig}
    sections |= {"budget": BudgetConfig, "eval": EvalConfig}
    try:
        built = {
            name: sections[name](**_with_tuples(value)) if name in sections else value for name, value in values.items()
        }
        if "model" in values:
            built["model"] = LoLConfig(**values["model"])
        return TrainConfig(**_with_tuples(built))
    except TypeError as error:
        raise UserError(
            f"this configuration is of another version of lol ({error}): use the lol that wrote it"
        ) from error


def _with_tuples(section: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and no field of a configuration is a list."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}
