"""The model without its head: embedding → prelude → routed core → coda → norm, as a transformers citizen."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import ModelOutput

from lol.errors import UserError
from lol.model.cache import documents_of_pass, open_memory
from lol.model.config import LoLConfig
from lol.model.core import Backprop, CoreParts, Steering, broadcast_path, lay_depths, run_core
from lol.model.layers import (
    Block,
    DiagonalInjection,
    FilmTable,
    Float32Bias,
    OutputLinear,
    RMSNorm,
    Rotary,
    rotary_angles,
)
from lol.model.library import Dispatch, Library, StackedLinear, StackedNorm, StackedOutputLinear
from lol.model.moe import MoEBlock, MoERouter
from lol.model.outputs import (
    LoLModelOutput,
    MoEChoice,
    collect_moe_logits,
    collect_moe_routing,
    collect_router_logits,
    collect_routing,
)
from lol.model.remote_code import is_own
from lol.model.router import Router
from lol.model.windows import Documents, WindowLayout


class LoLPreTrainedModel(PreTrainedModel):
    """What the two model classes share with transformers: names, dtypes, initial weights."""

    config: LoLConfig
    config_class = LoLConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block", "MoEBlock", "Library"]
    _keep_in_fp32_modules_strict = ["expert_bias"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """As `LoLConfig.register_for_auto_class`: only for classes that a user derives."""
        if not is_own(cls):
            super().register_for_auto_class(auto_class)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values, in one place.

        | tensor | start |
        |---|---|
        | embedding, head, filler, depth embeddings, projections, routers' weights | normal, `initializer_range` |
        | o_proj, down_proj | the same, divided by sqrt(2 (P + D + C)) |
        | norms | 1 |
        | router bias, noise weight and bias, balancing bias, FiLM | 0 |
        | injection | A = B = 1, decay sqrt(1/5) |
        """
        # transformers calls this for every module that holds tensors of its own, and for no other.
        std = self.config.initializer_range
        output_std = std / (2 * max(self.config.num_hidden_layers, 1)) ** 0.5
        if isinstance(module, RMSNorm | StackedNorm):
            init.ones_(module.weight)
        elif isinstance(module, OutputLinear | StackedOutputLinear):
            init.normal_(module.weight, std=output_std)
        elif isinstance(module, nn.Embedding | nn.Linear | StackedLinear):
            init.normal_(module.weight, std=std)
        elif isinstance(module, Router):
            init.normal_(module.weight, std=std)
            for parameter in (module.bias, module.noise_weight, module.noise_bias):
                init.zeros_(parameter)
        elif isinstance(module, MoERouter):
            init.normal_(module.weight, std=std)
        elif isinstance(module, FilmTable):
            for parameter in module.parameters():
                init.zeros_(parameter)
        elif isinstance(module, DiagonalInjection):
            init.constant_(module.delta, DiagonalInjection.START_DELTA)
            init.zeros_(module.log_decay)
            init.ones_(module.input_scale)
        elif isinstance(module, LoLModel):
            for parameter in (module.depth_embedding, module.filler_embedding):
                if parameter is not None:
                    init.normal_(parameter, std=std)
        if isinstance(module, Float32Bias) and module.expert_bias is not None:
            init.zeros_(module.expert_bias)

    def in_asked_form(self, output: ModelOutput, return_dict: bool | None) -> Any:
        """The output itself, or the tuple of its fields that are not `None`."""
        as_it_is = self.config.return_dict if return_dict is None else return_dict
        return output if as_it_is else output.to_tuple()


class LoLModel(Float32Bias, LoLPreTrainedModel):
    """Embedding, prelude, routed core, coda and final norm."""

    depth_embedding: nn.Parameter | None
    filler_embedding: nn.Parameter | None

    def __init__(self, config: LoLConfig):
        super().__init__(config)
        config.check()
        d, depths = config.hidden_size, config.num_routed_depths
        learned = config.routing == "learned" and depths > 0
        first_coda = config.num_prelude_layers + depths
        layer = Block if config.moe_num_experts is None else MoEBlock
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.prelude = nn.ModuleList(layer(config, index) for index in range(config.num_prelude_layers))
        self.library = Library(config) if depths else None
        self.dispatch = Dispatch(config)
        self.router = Router(config) if learned else None
        self.film = FilmTable(depths, d) if config.depth_film and depths else None
        self.injection = DiagonalInjection(d) if config.input_injection == "diagonal" and depths else None
        self.coda = nn.ModuleList(layer(config, first_coda + index) for index in range(config.num_coda_layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.depth_embedding = nn.Parameter(torch.empty(depths, d)) if learned else None
        self.filler_embedding = nn.Parameter(torch.empty(d)) if config.router_only_tokens else None
        bias_shape = (config.num_experts,) if config.balance_scope == "global" else (depths, config.num_experts)
        self.register_buffer("expert_bias", torch.zeros(bias_shape, dtype=torch.float32) if learned else None)
        self.post_init()

    @property
    def moe_layers(self) -> list[MoEBlock]:
        """The mixture-of-experts layers in the order in which they run."""
        return [layer for layer in (*self.prelude, *self.coda) if isinstance(layer, MoEBlock)]

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Int[Tensor, "B n"] | None = None,
        attention_mask: Int[Tensor, "B _"] | Bool[Tensor, "B _"] | None = None,
        position_ids: Int[Tensor, "_ n"] | None = None,
        inputs_embeds: Float[Tensor, "B n d"] | None = None,
        router_only_ids: Int[Tensor, "B n"] | None = None,
        path: Int[Tensor, "..."] | list | tuple | None = None,
        path_weight: float | None = None,
        num_depths: int | None = None,
        backprop_depth: int | None = None,
        first_window_full_backprop: bool = False,
        generator: torch.Generator | None = None,
        output_router_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> LoLModelOutput | tuple:
        """Run the model.

        Args:
            input_ids: Token ids; or give `inputs_embeds`.
            attention_mask: 1 at tokens, 0 at padding, on either side. Padding is in no window, mean or load.
            position_ids: Positions inside the document. Where they restart at 0 a new document begins, and nothing
                crosses that border: each document gets what it would get alone. Default: one document a row.
            inputs_embeds: Embeddings in place of ids.
            router_only_ids: The id of a router-only token at each place that holds one, -1 elsewhere. The embedding is
                added to the router's input of every window of its document; everything else sees the filler embedding
                there. It conditions the whole document, so it belongs at its beginning.
            path: Blocks to run: (D,), (D, windows) or (batch, D, windows), -1 where the router stays free.
            path_weight: Weight of a forced block's update; `None` takes the router's own probability of that block.
            num_depths: Run only the first so many depths (growing). Default: all.
            backprop_depth: Let only the last so many of the depths that run have gradients (`Backprop` says what that
                means for each part); earlier ones keep no activations. Default: all have.
            first_window_full_backprop: Let each document's first window have gradients at every depth all the same.
            generator: Source of the router's training noise: per depth, in order, one standard normal (windows, L).
                Default: torch's global generator.
            output_router_logits: Return the router's raw logits. Default: as the config says, like the next.
            output_hidden_states: Return the state after every layer.
            cache: `DynamicCache(config=model.config)`; what earlier passes have put into it goes on. The attention mask
                then covers those tokens too.
            use_cache: Make and return a cache where none is given. Default: no.
            return_dict: False returns a tuple of the fields that are not `None`. Default: as the config says.

        Raises:
            UserError: an input that cannot be run; the message names the fix.
        """
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if kwargs.pop("output_attentions", None):
            raise UserError("attention weights are not returned: leave output_attentions out")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        embeds, documents = self._embed(input_ids, inputs_embeds, attention_mask, position_ids, cache)
        embeds, router_only = self._hide_router_only(embeds, documents, router_only_ids)
        batch = documents.shape[0]
        layouts = lay_depths(self.config, documents, self._check_depths(num_depths))
        # Whatever is refused is refused before the first layer has put anything into the cache.
        backprop = _check_backprop(backprop_depth, first_window_full_backprop, cache)
        steering = Steering(
            self._forced_path(path, path_weight, batch, layouts), path_weight, router_only, generator, backprop
        )
        memory = None
        if cache is not None:
            if self.training and self.is_activation_checkpointing:
                raise UserError(
                    "gradient checkpointing runs layers twice, which a cache does not survive: leave one out"
                )
            memory = open_memory(self.config, cache, documents, len(layouts), router_only)

        layer_inputs = self.layer_inputs(embeds, documents, attention_mask, cache)
        states = [embeds] if output_hidden_states else None
        choices: list[MoEChoice] = []
        x = _run_layers(self.prelude, embeds, layer_inputs, cache, states, choices)
        stream, routes = documents.gather(x), []
        if layouts:
            stream, routes = run_core(
                self._core_parts(), stream, layouts, steering, self.training, memory, keep_states=states is not None
            )
        x = documents.scatter(stream)
        if states is not None:
            states.extend(documents.scatter(route.state) for route in routes if route.state is not None)
        x = self.norm(_run_layers(self.coda, x, layer_inputs, cache, states, choices))
        if states is not None:
            states[-1] = x
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        output = LoLModelOutput(
            last_hidden_state=x,
            cache=cache,
            hidden_states=None if states is None else tuple(states),
            router_logits=collect_router_logits(routes) if output_router_logits else None,
            routing=collect_routing(routes, batch, self.config.num_experts, x.device),
            moe_router_logits=collect_moe_logits(choices, documents) if output_router_logits and choices else None,
            moe_routing=collect_moe_routing(choices, documents) if choices else None,
        )
        return self.in_asked_form(output, return_dict)

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Documents]:
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None
        if given.ndim < 2:
            raise UserError(f"input_ids has shape {tuple(given.shape)}: give (batch, tokens), as in input_ids[None]")
        batch, columns = given.shape[0], given.shape[1]
        if position_ids is not None and position_ids.shape[-1] != columns:
            raise UserError(
                f"position_ids has {position_ids.shape[-1]} columns, the input {columns}: give one per token"
            )
        documents = documents_of_pass((batch, columns), position_ids, attention_mask, given.device, cache)
        if inputs_embeds is not None:
            return inputs_embeds, documents
        assert input_ids is not None
        check_ids(documents.gather(input_ids), self.config.vocab_size)
        # Whatever stands at padding must not matter, not even an id that does not exist.
        ids = input_ids if documents.grid_index is None else input_ids * (documents.grid_document >= 0)
        return self.embed_tokens(ids), documents

    def _hide_router_only(
        self, embeds: Tensor, documents: Documents, router_only_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Put the filler where router-only tokens stand; return their embeddings summed per document."""
        if router_only_ids is None:
            return embeds, None
        if self.filler_embedding is None:
            raise UserError("router_only_ids needs a model with router_only_tokens=True in its config")
        if self.router is None:
            raise UserError("router_only_ids needs a router: this model's routing is 'fixed'")
        ids = documents.gather(router_only_ids)
        check_ids(ids, self.config.vocab_size, lowest=-1)
        hidden = ids >= 0
        read = self.embed_tokens(ids.clamp(min=0)) * hidden[:, None]
        summed = read.new_zeros(documents.num_documents, read.shape[1]).index_add(0, documents.document, read)
        filled = torch.where(documents.scatter(hidden)[..., None], self.filler_embedding.to(embeds.dtype), embeds)
        return filled, summed

    def layer_inputs(
        self,
        embeds: Float[Tensor, "B n d"],
        documents: Documents,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Rotary, Any, Tensor]:
        """What the prelude's and coda's layers need beside the state: rotary angles, the attention mask in the form
        that the chosen attention implementation wants, and positions."""
        packed = documents.is_packed
        padded = attention_mask is not None and not bool(attention_mask.all())
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeds,
            attention_mask=attention_mask.bool() if padded and attention_mask is not None else None,
            cache=cache,
            # Without padding transformers finds the documents by their positions. It then calls an and_mask_function
            # with positions in place of columns, so documents by column may only be given where it does not look.
            position_ids=documents.grid_position if packed and not padded else None,
            and_mask_function=packed_sequence_mask_function(documents.grid_document) if packed and padded else None,
        )
        rotary = rotary_angles(
            documents.grid_position[:, None], self.config.head_dim, self.config.rope_theta, embeds.dtype
        )
        return rotary, mask, documents.grid_position

    def _core_parts(self) -> CoreParts:
        assert self.library is not None
        return CoreParts(
            config=self.config,
            library=self.library,
            dispatch=self.dispatch,
            router=self.router,
            depth_embedding=self.depth_embedding,
            expert_bias=self.expert_bias,
            film=self.film,
            injection=self.injection,
        )

    def _check_depths(self, num_depths: int | None) -> int:
        if num_depths is None:
            return self.config.num_routed_depths
        if not 0 <= num_depths <= self.config.num_routed_depths:
            raise UserError(f"num_depths={num_depths}, but the model has {self.config.num_routed_depths} routed depths")
        return num_depths

    def _forced_path(
        self, path: Any, path_weight: float | None, batch: int, layouts: list[WindowLayout]
    ) -> Tensor | None:
        if path is None and path_weight is not None:
            raise UserError("path_weight is the weight of a forced block: give a path too, or leave it out")
        if path_weight is not None and not math.isfinite(path_weight):
            raise UserError(f"path_weight={path_weight}: give a finite number")
        if path is None:
            return None
        width = max((layout.max_in_row for layout in layouts), default=0)
        blocks = torch.as_tensor(path, device=self.embed_tokens.weight.device)
        if blocks.is_floating_point():
            raise UserError("path holds fractions: give numbers of blocks, which are integers")
        return broadcast_path(blocks, batch, len(layouts), self.config.num_experts, width)


def _run_layers(
    layers: nn.ModuleList,
    x: Tensor,
    layer_inputs: tuple[Rotary, Any, Tensor],
    cache: Cache | None,
    states: list[Tensor] | None,
    choices: list[MoEChoice],
) -> Tensor:
    """Prelude or coda; adds the state after each layer, and what those with a choice chose."""
    for layer in layers:
        x = layer(x, *layer_inputs, cache=cache)
        if isinstance(layer, MoEBlock):
            x, *choice = x
            choices.append(MoEChoice(*choice))
        if states is not None:
            states.append(x)
    return x


def _check_backprop(depth: int | None, first_windows: bool, cache: Cache | None) -> Backprop:
    if depth is not None and depth < 1:
        raise UserError(f"backprop_depth={depth}, but the last depth always has gradients: give at least 1, or None")
    if depth is not None and cache is not None:
        raise UserError("backprop_depth is for training, which has no cache: leave one of them out")
    return Backprop(depth, first_windows)


def check_ids(ids: Int[Tensor, "..."], vocab_size: int, lowest: int = 0) -> None:
    """Raise `UserError` for a token id that the vocabulary does not have."""
    if ids.numel() and (int(ids.min()) < lowest or int(ids.max()) >= vocab_size):
        wrong = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
        raise UserError(
            f"token id {wrong} is outside of the vocabulary (0 to {vocab_size - 1}): the text was encoded with another "
            "tokenizer than the model's"
        )
