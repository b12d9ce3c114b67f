"""transformers' `Trainer` trains the model, with our balance as a callback; it stops, resumes and evaluates."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ecosystem_cases import build_model, differing, packed_row, some_ids, tensors_of
from lol import LoLForCausalLM, UserError
from lol.data.collate import collate_packed
from lol.train.balance import global_auxiliary_loss, sequence_auxiliary_losses, update_bias
from lol.train.callback import BalanceCallback
from lol.train.config import BalanceConfig, OptimConfig
from lol.train.optim import make_optimizer

pytestmark = pytest.mark.filterwarnings(
    # transformers' new name is activation_checkpointing; everybody's scripts have the old one.
    "ignore:.*activation_checkpointing:FutureWarning",
)
ROWS = [packed_row(seed) for seed in range(12)]
FAST = BalanceConfig(rate=0.05, sequence_aux=0.1)


def make_trainer(
    folder: Path, model: Any, *, rows: Any = ROWS, steps: int = 6, collator: Any = collate_packed, **given: Any
) -> Trainer:
    """Plain SGD-like settings: a constant rate, no shuffling. `given` goes to TrainingArguments, or to the Trainer."""
    for_trainer = {key: given.pop(key) for key in ("callbacks", "optimizers", "eval_dataset") if key in given}
    settings = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    arguments = TrainingArguments(**settings | given)
    return Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator, **for_trainer)


def constant_adamw(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = make_optimizer(model, OptimConfig(learning_rate=1e-2))
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def our_loop(
    model: LoLForCausalLM, rows: list[dict[str, Tensor]], steps: int, accumulation: int, balance: BalanceConfig
):
    """What `lol train` does in a step, written out: losses over all targets, one move of the bias."""
    optimizer, _ = constant_adamw(model)
    model.train()
    losses = []
    for step in range(steps):
        first = step * 2 * accumulation
        batches = [collate_packed(rows[first + 2 * i : first + 2 * i + 2]) for i in range(accumulation)]
        targets = sum(int((batch["position_ids"] > 0).sum()) for batch in batches)
        load, total = torch.zeros(4, 3, dtype=torch.long), 0.0
        for batch in batches:
            output = model(**batch, output_router_logits=True, num_items_in_batch=targets)
            if balance.strategy == "aux_loss":
                auxiliary = balance.global_aux * global_auxiliary_loss(output.router_logits, output.routing, balance)
            else:
                per_document = sequence_auxiliary_losses(output.router_logits, output.routing, balance)
                auxiliary = balance.sequence_aux * per_document.mean()
            loss = output.loss + auxiliary / accumulation
            loss.backward()
            load += output.routing.load
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_bias(model.model.expert_bias, load, balance, step, steps)
        losses.append(total)
    return losses


GLOBAL = BalanceConfig(strategy="aux_loss", global_aux=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balance", "accumulation", "checkpointing"),
    [(FAST, 1, False), (FAST, 2, True), (GLOBAL, 2, False)],
    ids=["bias", "bias, accumulated and checkpointed", "loss, accumulated"],
)
def test_the_trainer_with_the_callback_is_our_own_loop(
    tmp_path: Path, balance: BalanceConfig, accumulation: int, checkpointing: bool
):
    """Weights, bias and logged losses; gradient accumulation and checkpointing count nothing twice. No noise: our
    trainer draws it from a generator of its own."""
    ours, theirs = build_model(router_noise_max=0), build_model(router_noise_max=0)
    expected = our_loop(ours, ROWS, 3, accumulation, balance)
    trainer = make_trainer(
        tmp_path,
        theirs,
        steps=3,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=checkpointing,
        optimizers=constant_adamw(theirs),
        callbacks=[BalanceCallback(balance)],
    )
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert_close(torch.tensor(logged), torch.tensor(expected), atol=1e-4, rtol=0)
    for name, tensor in tensors_of(ours).items():
        assert_close(tensors_of(theirs)[name], tensor, atol=2e-5, rtol=0, msg=name)
    moved = not torch.equal(theirs.model.expert_bias, build_model().model.expert_bias)
    assert moved == (balance.strategy == "loss_free")
    # The hooks are gone: the model's own loss has nothing added.
    batch = collate_packed(ROWS[:2])
    with_hooks, without = theirs.train()(**batch), build_model(router_noise_max=0).train()
    without.load_state_dict(theirs.state_dict())
    assert torch.equal(with_hooks.loss, without(**batch).loss)


def test_without_the_callback_the_bias_stays(tmp_path: Path):
    model = build_model()
    before = tensors_of(model)
    make_trainer(tmp_path, model, steps=1).train()
    changed = differing(model, before)
    assert "model.expert_bias" not in changed
    assert {"model.router.weight", "model.library.q_proj.weight", "lm_head.weight"} <= set(changed)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["packed", "plain"])
def test_resuming_is_the_uninterrupted_run(tmp_path: Path, rows: str):
    """With noise, a schedule, the moving bias and evaluations in between."""
    given: dict[str, Any] = {"lr_scheduler_type": "linear", "train_sampling_strategy": "random", "save_steps": 3}
    given |= {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 2}
    if rows == "plain":
        plain = [{"input_ids": ids, "labels": ids} for ids in some_ids(12, 20)]
        given |= {"rows": plain, "collator": None, "eval_dataset": plain[:3]}
    else:
        given |= {"eval_dataset": ROWS[:3]}
    whole = build_model()
    make_trainer(tmp_path / "whole", whole, callbacks=[BalanceCallback(FAST)], **given).train()
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert (checkpoint / "modeling_lol.py").exists()

    resumed = build_model()
    with torch.no_grad():
        for tensor in [*resumed.parameters(), *resumed.buffers()]:
            tensor.add_(1)
    trainer = make_trainer(tmp_path / "resumed", resumed, callbacks=[BalanceCallback(FAST)], **given)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 6
    assert differing(resumed, tensors_of(whole)) == []
    assert not torch.equal(resumed.model.expert_bias, LoLForCausalLM.from_pretrained(checkpoint).model.expert_bias)


def test_evaluation_loss_and_predictions(tmp_path: Path):
    """The loss is cross-entropy alone, whatever the callback adds in training; logits come back for metrics."""
    model = build_model()
    trainer = make_trainer(
        tmp_path, model, steps=1, callbacks=[BalanceCallback(FAST)], eval_dataset=ROWS[:4],
        per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.train()
    batch = collate_packed(ROWS[:4])
    with torch.no_grad():
        output = model.eval()(**batch)
    during = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(during) == 1
    for loss in (*during, trainer.evaluate()["eval_loss"]):
        assert math.isclose(loss, float(output.loss), rel_tol=1e-6)
    predicted = trainer.predict(ROWS[:4])
    assert_close(torch.from_numpy(predicted.predictions), output.logits)


def test_the_first_tokens_of_documents_are_no_labels():
    """So that the Trainer divides by the number of targets."""
    batch = collate_packed(ROWS[:2])
    assert batch["labels"].shape == batch["input_ids"].shape == batch["position_ids"].shape == (2, 24)
    assert ((batch["labels"] == -100) == (batch["position_ids"] == 0)).all()
    kept = batch["labels"] != -100
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])


def test_transformers_own_flattening_collator_is_packing_too():
    """A batch laid out as one row by transformers gives the loss of its documents, each alone."""
    model = build_model()
    documents = [ids.tolist() for ids in (some_ids(1, 9)[0], some_ids(1, 5)[0], some_ids(1, 14)[0])]
    flat = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": ids} for ids in documents])
    with torch.no_grad():
        loss = model(**flat, num_items_in_batch=1).loss
        alone = [model(torch.tensor([ids]), labels=torch.tensor([ids]), num_items_in_batch=1).loss for ids in documents]
    assert_close(loss, torch.stack(alone).sum())


def test_a_model_without_a_router_is_left_alone(tmp_path: Path):
    plain, called = (build_model(routing="fixed", fixed_path=[0, 1, 2, 1]) for _ in range(2))
    make_trainer(tmp_path, plain, steps=2).train()
    make_trainer(tmp_path, called, steps=2, callbacks=[BalanceCallback(FAST)]).train()
    assert differing(called, tensors_of(plain)) == []


def test_a_training_that_broke_off_leaves_nothing_in_the_next(tmp_path: Path):
    callback = BalanceCallback(FAST)
    model, untouched = build_model(router_noise_max=0), build_model(router_noise_max=0)
    broken = [*ROWS[:2], {"input_ids": torch.tensor([99]), "position_ids": torch.tensor([0])}]
    with pytest.raises(UserError, match="token id 99"):
        make_trainer(
            tmp_path, model, rows=broken, steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=3,
            callbacks=[callback],
        ).train()  # fmt: skip
    assert differing(model, tensors_of(untouched)) == []
    make_trainer(tmp_path, model, steps=2, callbacks=[callback]).train()
    make_trainer(tmp_path, untouched, steps=2, callbacks=[BalanceCallback(FAST)]).train()
    assert differing(model, tensors_of(untouched)) == []


def test_training_another_kind_of_model_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="leave BalanceCallback out"):
        make_trainer(tmp_path, torch.nn.Linear(2, 2), callbacks=[BalanceCallback()]).train()
