"""A loss or a gradient that is no number stops the run before the weights are touched, and says where it begins."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lol.errors import UserError
from lol.train.metrics import read_metrics
from lol.train.session import prepare
from lol.train.step import take_step
from lol.train.trainer import train
from small_run import small_config


def test_a_loss_that_is_no_number_stops_the_run_at_the_last_checkpoint(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = small_config(corpus, checkpoint_every=1, optim={"learning_rate": 1e30, "warmup_steps": 0})
    told = (
        r"step 2: the loss is nan .* before the weights are touched, and .* is \S+step-00000001. Where .*: rank 0, mic"
    )
    with pytest.raises(UserError, match=told):
        train(config, run)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
    assert [record["step"] for record in read_metrics(run)] == [1]


@pytest.mark.parametrize("changes", [{}, {"model": {"moe_num_experts": 2, "moe_intermediate_size": 8}}])
def test_the_row_is_found(corpus: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    session = prepare(small_config(corpus, batch_size=4, **changes), tmp_path / "run", None)
    session.model.train()
    rows = iter(session.loader)
    batches = [next(rows), next(rows)]
    before = [parameter.detach().clone() for parameter in session.model.parameters()]

    def spoil(_module: Any, _args: Any, output: Any) -> None:
        output[2].mul_(float("nan"))

    hook = session.model.model.embed_tokens.register_forward_hook(spoil)
    with pytest.raises(UserError) as caught:
        take_step(session, batches)
    hook.remove()
    begin = session.tokenizer.decode(batches[0]["input_ids"][2, :5].tolist())
    assert "and no checkpoint was written before" in str(caught.value)
    assert f'rank 0, micro-batch 1 of 2: the loss, row 3 of its 4, the first of which begins "{begin}' in str(
        caught.value
    )
    after = list(session.model.parameters())
    assert all(torch.equal(own, wanted) for own, wanted in zip(after, before, strict=True))
    # What was looked at leaves nothing behind: the step can be taken.
    assert all(parameter.grad is None for parameter in after)
    assert torch.isfinite(torch.tensor(take_step(session, batches)["loss"]))


def test_a_gradient_that_only_the_sum_makes_infinite(corpus: Path, tmp_path: Path) -> None:
    session = prepare(small_config(corpus), tmp_path / "run", None)
    session.model.train()
    weight = session.model.lm_head.weight
    hook = weight.register_hook(lambda gradient: gradient * float("inf"))
    rows = iter(session.loader)
    with pytest.raises(UserError, match=re.escape("in no row by itself, but in a sum over rows, passes or ranks")):
        take_step(session, [next(rows), next(rows)])
    hook.remove()
