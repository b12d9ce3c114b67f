"""Forcing a path is the model's own `path` argument, for as long as the block lasts."""

import pytest
import torch

from lol import UserError, force_path, record_paths
from lol.paths.steer import _as_blocks

PATH = [4, 0, 3, 1, 2, 2]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 257, (2, 70), generator=torch.Generator().manual_seed(3))


def hooks(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("weight", ["router", 1.0, 0.25])
def test_equals_the_path_argument(model, ids, weight):
    number = None if weight == "router" else weight
    expected = model(ids, path=PATH, path_weight=number)
    with force_path(model, PATH, weight=weight):
        forced = model(ids)
        alone = model.model(ids)
    assert torch.equal(forced.logits, expected.logits)
    assert torch.equal(forced.routing.weights, expected.routing.weights)
    assert torch.equal(alone.routing.experts, expected.routing.experts)
    assert not torch.equal(model(ids).logits, expected.logits)


def test_only_the_named_depths(model, ids):
    with force_path(model, 3, depths=[1, 4]):
        forced = model(ids).routing.experts
    expected = model(ids, path=[-1, 3, -1, -1, 3, -1]).routing.experts
    assert torch.equal(forced, expected)
    assert (forced[:, 0] != 3).any()


def test_only_the_named_windows_of_padded_and_packed_rows(model, ids):
    positions = torch.cat([torch.arange(30), torch.arange(40)]).expand(2, -1)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :21] = 0
    positions = (
        torch.where(mask == 1, (mask.cumsum(1) - 1), 0) * (torch.arange(2) == 1)[:, None]
        + positions * (torch.arange(2) == 0)[:, None]
    )
    call = {"attention_mask": mask, "position_ids": positions}
    width = model(ids, **call).routing.experts.shape[-1]
    path = torch.full((6, width), -1)
    path[:, [1, 4]] = torch.tensor(PATH)[:, None]
    expected = model(ids, path=path, **call)
    with force_path(model, PATH, windows=[1, 4, 99]):
        forced = model(ids, **call)
        positional = model.model(ids, mask, positions)
    assert torch.equal(forced.routing.experts, expected.routing.experts)
    assert torch.equal(forced.logits, expected.logits)
    assert torch.equal(positional.routing.experts, expected.routing.experts)
    assert (forced.routing.experts[:, :, 0] != torch.tensor(PATH)).any()


def test_blocks_nest_and_the_inner_one_wins(model, ids):
    with force_path(model, 0, weight=1.0):
        with force_path(model, 2, depths=[1], windows=[0]):
            both = model(ids).routing
        outer = model(ids).routing
    free = model(ids).routing
    real = free.experts >= 0
    assert (outer.experts[real] == 0).all()
    assert (outer.weights[real] == 1).all()
    assert (both.experts[:, 1, 0] == 2).all()
    assert (both.weights[:, 1, 0] < 1).all()
    both.experts[:, 1, 0] = 0
    assert torch.equal(both.experts, outer.experts)


def test_overrides_the_argument_of_the_pass(model, ids):
    with force_path(model, 2, depths=[0]):
        experts = model(ids, path=[1] * 6).routing.experts
    assert (experts[:, 0][experts[:, 0] >= 0] == 2).all()
    assert (experts[:, 1][experts[:, 1] >= 0] == 1).all()


def test_everything_is_put_back_after_an_exception(model, ids):
    before = model(ids)
    with pytest.raises(RuntimeError, match="on purpose"), force_path(model, PATH, windows=[0]):
        raise RuntimeError("on purpose")
    assert hooks(model) == 0
    assert torch.equal(model(ids).logits, before.logits)


@pytest.mark.parametrize("windows", [None, [0, 2]], ids=["all windows", "some windows"])
def test_an_exception_in_the_inner_block_leaves_the_outer_one_in_force(model, ids, windows):
    free = model(ids).logits

    def break_inside():
        with force_path(model, 0, windows=windows, weight=1):
            assert not torch.equal(model(ids).logits, forced)
            raise RuntimeError("on purpose")

    with force_path(model, PATH, weight=1):
        forced = model(ids).logits
        with pytest.raises(RuntimeError, match="on purpose"):
            break_inside()
        assert torch.equal(model(ids).logits, forced)
    assert hooks(model) == 0
    assert torch.equal(model(ids).logits, free)
    assert not torch.equal(free, forced)


@pytest.mark.parametrize("fixed", [False, True], ids=["router", "no router"])
def test_everything_is_put_back_after_a_generation_that_breaks(make_model, ids, fixed):
    model = make_model(**({"routing": "fixed", "fixed_path": [0, 1, 2, 3, 4, 0]} if fixed else {}))
    options = {"max_new_tokens": 8, "do_sample": False}
    free = model.generate(ids[:1, :20], **options)
    passes = []

    def break_at_the_third(_module, _args):
        passes.append(1)
        if len(passes) == 3:
            raise RuntimeError("on purpose")

    handle = model.model.coda[0].register_forward_pre_hook(break_at_the_third)
    with pytest.raises(RuntimeError, match="on purpose"), force_path(model, PATH, windows=[1, 2], weight=1):
        model.generate(ids[:1, :20], **options)
    handle.remove()
    assert len(passes) == 3
    assert hooks(model) == 0
    assert torch.equal(model.generate(ids[:1, :20], **options), free)


def test_blocks_may_be_left_in_any_order(model, ids):
    outer, inner = force_path(model, 0), force_path(model, 2, depths=[1])
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    expected = model(ids, path=[-1, 2, -1, -1, -1, -1])
    assert torch.equal(model(ids).logits, expected.logits)
    inner.__exit__(None, None, None)
    assert hooks(model) == 0


def test_a_pass_of_fewer_depths_takes_its_part(model, ids):
    with force_path(model, PATH, windows=[0]):
        experts = model(ids, num_depths=2).routing.experts
    assert experts[:, :, 0].tolist() == [PATH[:2]] * 2


def test_generation_runs_the_path(model, ids):
    prompt = ids[:1, :20]
    free = model.generate(prompt, max_new_tokens=16, do_sample=False)
    steered = {"path": torch.tensor(PATH), "path_weight": 1.0}
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False, **steered)
    with force_path(model, PATH, weight=1):
        assert torch.equal(model.generate(prompt, max_new_tokens=16, do_sample=False), expected)
    assert not torch.equal(free, expected)
    # Window 2 begins with token 32 or 24: the text before its first token cannot know of it.
    with force_path(model, PATH, windows=[2], weight=1):
        late = model.generate(prompt, max_new_tokens=16, do_sample=False)
    assert torch.equal(late[:, :25], free[:, :25])
    assert not torch.equal(late, free)


def test_recording_shows_what_was_forced(model, ids):
    with force_path(model, 4, windows=[1]):
        table = record_paths(model, ids)
    assert (table[table["window"] == 1]["expert"] == 4).all()
    assert (table[table["window"] == 0]["expert"] != 4).any()


def test_models_without_a_router(make_model, ids):
    model = make_model(routing="fixed", fixed_path=[0, 1, 2, 3, 4, 0])
    expected = model(ids, path=PATH)
    with force_path(model, PATH):
        assert torch.equal(model(ids).logits, expected.logits)
    with force_path(model, 4, windows=[1]), force_path(model, 3, depths=[0]):
        experts = model(ids, path=[-1, 2, -1, -1, -1, -1]).routing.experts
    assert experts[0, :, 0].tolist() == [3, 2, 2, 3, 4, 0]
    assert experts[0, :, 1].tolist() == [3, 4, 4, 4, 4, 4]
    with force_path(model, PATH):
        assert model(ids, num_depths=2).routing.experts[0, :, 0].tolist() == PATH[:2]
    with pytest.raises(UserError, match="no router"), force_path(model, PATH, weight=0.5):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": [0, 0, 0, 0, 0, 5]}, "blocks 0 to 4"),
        ({"path": 5}, "blocks 0 to 4"),
        ({"path": [0, 0]}, "2 blocks for 6 depths"),
        ({"path": [0, 1], "depths": [6, 0]}, "depths 0 to 5"),
        ({"path": PATH, "windows": [-1]}, "counted from 0"),
    ],
)
def test_mistakes_name_the_fix(model, arguments, message):
    with pytest.raises(UserError, match=message), force_path(model, **arguments):
        pass
    assert hooks(model) == 0


@pytest.mark.parametrize("path", [None, "000000", [0.5] * 6, torch.zeros(6, 9, dtype=torch.long), torch.zeros(1, 6, 1)])
def test_what_is_no_list_of_blocks_is_refused(path):
    # Not through force_path, whose annotations refuse these under the tests, but not for a user.
    with pytest.raises(UserError, match="no list of blocks"):
        _as_blocks(path)
