"""`LoLConfig`: every number that shapes a Library-of-Layers model, and every check with the fix in its message."""

import math
from typing import Literal, no_type_check

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from lol.errors import UserError
from lol.model.remote_code import is_own, point_to_shim, put_shim
from lol.model.windows import count_windows


# transformers hands its own keys on through **kwargs, which the type checks of the tests would refuse; `strict` checks
# the fields.
@no_type_check
@strict
class LoLConfig(PreTrainedConfig):
    r"""Configuration of `LoLModel` and `LoLForCausalLM`. The defaults are the published 360M layout with 8 blocks.

    A model is: embedding → `num_prelude_layers` ordinary layers → `num_routed_depths` depths, each running one of
    `num_experts` blocks per window → `num_coda_layers` ordinary layers → norm → head.

    Args:
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width d of the residual stream.
        intermediate_size: Hidden width of SwiGLU. `None` applies the rule `8 d / 3` rounded up to a multiple of 256
            (article; it fits every published size): read the result from `mlp_size`.
        num_attention_heads: Heads of every attention; must divide `hidden_size` into even head sizes.
        num_prelude_layers: P, ordinary layers before the core.
        num_coda_layers: C, ordinary layers after the core.
        num_experts: L, blocks stored in the library.
        num_routed_depths: D, depths executed. 0: there is no core and no library, whatever `num_experts` says.
        window_size: W, tokens in a window.
        window_stride: S, by which window borders shift from depth to depth: depth l = 0 … D-1 shifts by
            `(l S) mod W`.
        routing: `"learned"`: a router picks the block of each window. `"fixed"`: depth l runs block `fixed_path[l]`
            with weight 1, and there is no router, no depth embedding and no balancing bias.
        fixed_path: The D block indices of `routing="fixed"`.
        core_attention: `"windowed"`: causal inside the window (the paper's). `"full"`: each document is one window at
            every depth, so a block attends to the whole past and a document takes one path. `"sliding"`: the same,
            but a query sees only the last `window_size` tokens, itself included. The latter two are the baselines.
        tie_router: One router for all depths (the paper's default), or one per depth.
        router_noise_max: Ceiling of the learned standard deviation of the router's training noise. 0 turns noise off.
        balance_scope: `"global"`: one balancing bias for all depths (the paper's). `"depth"`: one per depth.
        moe_num_experts: Feed-forward experts of every prelude and coda layer; `None` makes them ordinary layers. With
            `num_routed_depths=0` all layers are such: the mixture-of-experts baseline.
        moe_top_k: Experts that a token's feed-forward goes through, weighted by their renormalised probabilities.
        moe_intermediate_size: Hidden width of one expert. `None`: `mlp_size / moe_top_k` rounded up, so that a token
            meets as many parameters as in an ordinary layer (the article's 1,408 at width 1,024): read the result from
            `moe_size`.
        depth_film: Per-depth scale and shift after each norm of a routed block (zero, so neutral, at the start).
        input_injection: `"diagonal"` mixes the prelude's output back into the state before every depth; or `"none"`.
        router_only_tokens: Store the filler embedding that takes the place of tokens which only the router may read
            (`router_only_ids` of the forward pass).
        rope_theta: Base of the rotary embedding.
        rms_norm_eps: Epsilon of every RMSNorm.
        tie_word_embeddings: Share the embedding with the head.
        max_position_embeddings: The context the model is trained on. Nothing is sized by it; evaluation tools read it.
        initializer_range: Standard deviation of the initial weights; those of `o_proj` and `down_proj` are divided by
            `sqrt(2 (P + D + C))` (decided here).
        output_router_logits: Return `router_logits` from every forward pass.

    Raises:
        UserError: a value that cannot work; the message names the field and the fix.
    """

    model_type = "lol"
    keys_to_ignore_at_inference = [
        "cache",
        "router_logits",
        "routing",
        "moe_router_logits",
        "moe_routing",
    ]  # the Trainer joins it to a list

    vocab_size: int = 32_000
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_attention_heads: int = 16
    num_prelude_layers: int = 4
    num_coda_layers: int = 4
    num_experts: int = 8
    num_routed_depths: int = 16
    window_size: int = 128
    window_stride: int = 64
    routing: Literal["learned", "fixed"] = "learned"
    fixed_path: list[int] | None = None
    core_attention: Literal["windowed", "full", "sliding"] = "windowed"
    tie_router: bool = True
    router_noise_max: int | float = 10.0
    balance_scope: Literal["global", "depth"] = "global"
    moe_num_experts: int | None = None
    moe_top_k: int = 2
    moe_intermediate_size: int | None = None
    depth_film: bool = False
    input_injection: Literal["none", "diagonal"] = "none"
    router_only_tokens: bool = False
    rope_theta: int | float = 10_000.0
    rms_norm_eps: int | float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1024
    initializer_range: int | float = 0.02
    output_router_logits: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        for name in kwargs:
            derived = getattr(type(self), name, None)
            if isinstance(derived, property) and derived.fset is None:
                raise UserError(f"{name} follows from the other fields of LoLConfig: leave it out")
        super().__post_init__(**kwargs)
        self.check()

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """Write config.json, and beside it the file that opens the folder with `trust_remote_code=True`."""
        if is_own(type(self)):
            self.auto_map = point_to_shim(getattr(self, "auto_map", None))
            put_shim(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Keeps transformers, which calls this for what `trust_remote_code` has loaded, from copying our source into
        checkpoints; they carry their own file. Classes that a user derives are registered as anywhere."""
        if not is_own(cls):
            super().register_for_auto_class(auto_class)

    @property
    def mlp_size(self) -> int:
        """Hidden width of SwiGLU: `intermediate_size`, or the rule."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-8 * self.hidden_size // (3 * 256)) * 256

    @property
    def moe_size(self) -> int:
        """Hidden width of one expert of a mixture-of-experts layer: `moe_intermediate_size`, or the rule."""
        return self.moe_intermediate_size or -(-self.mlp_size // self.moe_top_k)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_hidden_layers(self) -> int:
        """Executed layers: prelude, routed depths and coda."""
        return self.num_prelude_layers + self.num_routed_depths + self.num_coda_layers

    @property
    def layer_types(self) -> list[str]:
        """What each executed layer keeps in a cache: `DynamicCache(config=…)` builds its layers by this."""
        fixed = "full_attention"
        routed = ["routed_window"] * self.num_routed_depths
        return [fixed] * self.num_prelude_layers + routed + [fixed] * self.num_coda_layers

    def validate_layer_type(self) -> None:
        """transformers knows a closed list of layer types; ours are derived and always right."""

    @property
    def num_key_value_heads(self) -> int:
        """Every query head has its own key and value head."""
        return self.num_attention_heads

    @property
    def core_window(self) -> int | None:
        """Tokens in a window of the core; `None` where a whole document is one window."""
        return self.window_size if self.core_attention == "windowed" else None

    def window_shift(self, depth: int) -> int:
        """Shift of the window borders at `depth` (0-based), in tokens: `(depth · S) mod W`."""
        return depth * self.window_stride % self.window_size if self.core_attention == "windowed" else 0

    def windows_in(self, num_tokens: int, num_depths: int | None = None) -> int:
        """The most windows that a document of `num_tokens` tokens is cut into at any of its depths."""
        depths = self.num_routed_depths if num_depths is None else num_depths
        shifts = [self.window_shift(depth) for depth in range(depths)]
        return max((count_windows(num_tokens, shift, self.core_window) for shift in shifts), default=0)

    def check(self) -> None:
        """Raise `UserError` for values that cannot work together."""
        self._check_sizes()
        self._check_numbers()
        self._check_windows()
        self._check_moe()
        if self.routing == "fixed":
            self._check_fixed_path()
        elif self.fixed_path is not None:
            raise UserError("fixed_path is only read with routing='fixed': set routing='fixed' or leave fixed_path out")

    def _check_sizes(self) -> None:
        minimum = {"num_prelude_layers": 0, "num_coda_layers": 0, "num_routed_depths": 0, "window_stride": 0}
        positive = ("vocab_size", "hidden_size", "num_attention_heads", "num_experts", "window_size")
        minimum |= dict.fromkeys((*positive, "max_position_embeddings"), 1)
        for name, least in minimum.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise UserError(
                f"intermediate_size must be at least 1 (or None for the rule), not {self.intermediate_size}"
            )
        # Heads are rotated in pairs of channels.
        if self.hidden_size % 2:
            raise UserError(f"hidden_size must be even, not {self.hidden_size}: a head rotates pairs of channels")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise UserError(
                f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size} into "
                f"heads of an even size: choose one of {_divisors(self.hidden_size // 2)}"
            )

    def _check_numbers(self) -> None:
        for name in ("rope_theta", "rms_norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be positive and finite, not {getattr(self, name)}")
        for name, use in {"initializer_range": "weights start at 0", "router_noise_max": "noise is off"}.items():
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be 0 ({use}) or positive and finite, not {getattr(self, name)}")

    def _check_windows(self) -> None:
        if self.window_stride > self.window_size:
            raise UserError(
                f"window_stride={self.window_stride} is larger than window_size={self.window_size}: "
                f"choose a stride of at most {self.window_size} (the paper's is half a window)"
            )

    def _check_moe(self) -> None:
        experts, size = self.moe_num_experts, self.moe_intermediate_size
        if experts is None:
            if size is not None:
                raise UserError("moe_intermediate_size is only read with moe_num_experts: set it, or leave both out")
            return
        if experts < 2:
            raise UserError(f"moe_num_experts must be at least 2 (or None for ordinary layers), not {experts}")
        if not 1 <= self.moe_top_k <= experts:
            raise UserError(f"moe_top_k={self.moe_top_k}, but a layer has {experts} experts: choose 1 to {experts}")
        if size is not None and size < 1:
            raise UserError(f"moe_intermediate_size must be at least 1 (or None for the rule), not {size}")

    def _check_fixed_path(self) -> None:
        if self.fixed_path is None:
            raise UserError(f"routing='fixed' needs fixed_path, a list of {self.num_routed_depths} block indices")
        if len(self.fixed_path) != self.num_routed_depths:
            raise UserError(
                f"fixed_path has {len(self.fixed_path)} blocks but num_routed_depths={self.num_routed_depths}: "
                "give one block per depth"
            )
        outside = [block for block in self.fixed_path if not 0 <= block < self.num_experts]
        if outside:
            raise UserError(
                f"fixed_path names block {outside[0]} but num_experts={self.num_experts}: "
                f"use blocks 0 to {self.num_experts - 1}"
            )


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
