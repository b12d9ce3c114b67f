"""Balance under transformers' `Trainer`: what `trainer.py` does around each step, as a callback."""

# ruff: noqa: ARG002 -- the signatures are those that transformers and torch call.

import inspect
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lol.errors import UserError
from lol.model.base import LoLModel
from lol.model.lm import IGNORED_LABEL, LoLForCausalLM, next_tokens
from lol.model.outputs import LoLCausalLMOutput, LoLModelOutput
from lol.train.balance import auxiliary_coefficient, batch_loss, document_losses, update_biases
from lol.train.config import BalanceConfig
from lol.train.parallel import World


class BalanceCallback(TrainerCallback):
    """Moves the balancing bias after every optimizer step, and adds the auxiliary losses to the model's.

    `Trainer(model, …, callbacks=[BalanceCallback()])`. The load is summed over the micro-batches of a step and over all
    ranks; evaluation never counts. The bias is part of the model's weights: a resumed run goes on from it. Logged
    training losses contain the auxiliary loss, evaluation losses do not. Models without a router are left alone.

    Args:
        config: As for `lol train`; default: the paper's. Under gradient accumulation the auxiliary loss of a
            micro-batch counts by its share of the step's targets, as its other losses do.

    Raises:
        UserError: at the start of training, for a bias that could not be saved: that of a model under an adapter.
    """

    def __init__(self, config: BalanceConfig | None = None):
        self.config = config or BalanceConfig()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._loads: list[Tensor] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Listen to the model."""
        # An earlier training that ended by an exception has left its hooks.
        self._stop_listening()
        base = _find(model, LoLModel)
        if base is None:
            raise UserError(f"{type(model).__name__} holds no LoLModel: leave BalanceCallback out")
        if base.router is None and not base.moe_layers:
            return
        if self.config.strategy == "loss_free" and _has_adapter(model):
            raise UserError(
                "the balancing bias is part of the base model, and an adapter's checkpoint does not hold it: use "
                "BalanceCallback(BalanceConfig(strategy='aux_loss')), or leave the callback out"
            )
        self._hooks.append(base.register_forward_hook(self._count))
        scorer = _find(model, LoLForCausalLM)
        if scorer is not None and auxiliary_coefficient(self.config) != 0:
            self._hooks.append(scorer.register_forward_pre_hook(_ask_for_logits, with_kwargs=True))
            self._hooks.append(scorer.register_forward_hook(self._add_loss, with_kwargs=True))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """One step, one sum over the ranks, one move of the bias."""
        loads, self._loads = self._loads, []
        base = _find(model, LoLModel)
        if not loads or base is None:
            return
        if dist.is_available() and dist.is_initialized():
            loads = World(dist.get_rank(), dist.get_world_size()).add_up(*loads)
        load, moe_load = (*loads, None)[:2]
        assert load is not None
        update_biases(base, load, moe_load, self.config, state.global_step, state.max_steps)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was."""
        self._stop_listening()

    def _stop_listening(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._loads = [], []

    def _count(self, model: nn.Module, args: Any, output: Any) -> None:
        if not _is_training(model) or not isinstance(output, LoLModelOutput):
            return
        assert output.routing is not None
        moe_load = None if output.moe_routing is None else output.moe_routing.load
        loads = [load for load in (output.routing.load, moe_load) if load is not None]
        before = self._loads or [torch.zeros_like(load) for load in loads]
        self._loads = [one + other for one, other in zip(before, loads, strict=True)]

    def _add_loss(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not _is_training(model) or not isinstance(output, LoLCausalLMOutput) or output.loss is None:
            return
        loss = self._auxiliary_loss(output) * _share_of_step(model, args, kwargs)
        output.loss = output.loss + loss.to(output.loss.device)

    def _auxiliary_loss(self, output: LoLCausalLMOutput) -> Float[Tensor, ""]:
        if self.config.strategy == "aux_loss":
            return auxiliary_coefficient(self.config) * batch_loss(output, self.config)
        return auxiliary_coefficient(self.config) * document_losses(output, self.config).mean()


def _ask_for_logits(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    return (args, kwargs | {"output_router_logits": True}) if _is_training(model) else None


def _share_of_step(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor | float:
    """This batch's share of the targets that the step's loss is divided by; 1 where it is divided by its own."""
    given = inspect.signature(LoLForCausalLM.forward).bind(model, *args, **kwargs).arguments
    total = given.get("kwargs", {}).get("num_items_in_batch")
    if total is None:
        return 1.0
    targets = next_tokens(
        given["labels"], given.get("position_ids"), given.get("attention_mask"), given.get("router_only_ids")
    )
    return (targets != IGNORED_LABEL).sum() / total


def _is_training(model: nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


def _has_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)


def _find(model: nn.Module, kind: type) -> Any:
    return next((module for module in model.modules() if isinstance(module, kind)), None)
