"""Statistics that compare paths, mode paths, forced writing and its confusion matrix: all by hand on small cases."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lol import UserError, force_path, record_paths
from lol.paths.agreement import mode_path
from lol.paths.force import (
    TIED,
    Attribution,
    attribute,
    confusion,
    edit_distance,
    force_mode,
    generate_rows,
)
from lol.paths.mode import ModePath, mode_paths, mode_paths_of
from lol.paths.record import path_statistics
from lol.paths.statistics import block_agreement, draw_utilisation, label_distances, reused_share
from model_cases import bounded


def table_of(experts: list[list[list[int]]], num_experts: int) -> pd.DataFrame:
    """[document][depth][window] → a table of windows of one token, the block's probability 0.6, the others' equal."""
    rest = 0.4 / (num_experts - 1)
    lines = [
        (k, k, window, depth, window, window + 1, block, [0.6 if m == block else rest for m in range(num_experts)])
        for k, depths in enumerate(experts)
        for depth, windows in enumerate(depths)
        for window, block in enumerate(windows)
    ]
    return pd.DataFrame(
        lines, columns=["row", "document", "window", "depth", "start", "end", "expert", "probabilities"]
    )


def test_reused_share_by_hand():
    # Paths 0→0→1 (a third comes back), 1→1→1 (two thirds) and twice 0→1→2 (none).
    table = table_of([[[0, 1, 0, 0], [0, 1, 1, 1], [1, 1, 2, 2]]], 3)
    assert reused_share(path_statistics(table, 3)) == pytest.approx((1 / 3 + 2 / 3) / 4)


def test_agreement_by_hand():
    one = table_of([[[0, 0, 1, 1], [0, 0, 0, 0]]], 2)
    other = table_of([[[1, 1, 0, 2], [1, 1, 1, 0]]], 3)
    found = block_agreement(one, other)
    # Block 0 runs with 1 five times of six, block 1 once each with 0 and 2.
    assert found.matching[0] == 1
    assert found.matching[1] in (0, 2)
    assert found.share == 6 / 8
    # At depth 0 a half of one meets a half of other's block 1, and a half a quarter; at depth 1, all of it ¾.
    assert found.by_chance == pytest.approx((4 * (1 / 2 * 1 / 2 + 1 / 2 * 1 / 4) + 4 * 3 / 4) / 8)
    back = block_agreement(other, one)
    assert sorted(back.matching) == [-1, 0, 1]
    assert back.share == found.share
    with pytest.raises(UserError, match="same windows"):
        block_agreement(one, table_of([[[0, 0, 1], [0, 0, 0]]], 2))


@bounded(20)
@given(seed=st.integers(0, 1000), num_experts=st.integers(2, 6))
def test_a_library_in_another_order_agrees_wholly(seed, num_experts):
    draw = np.random.default_rng(seed)
    experts = draw.integers(0, num_experts, (3, 4, 10))
    order = draw.permutation(num_experts)
    found = block_agreement(table_of(experts.tolist(), num_experts), table_of(order[experts].tolist(), num_experts))
    assert found.share == 1
    used = np.unique(experts)
    assert np.array(found.matching)[used].tolist() == order[used].tolist()
    assert found.by_chance < 1


def test_distances_by_hand(tmp_path):
    # L = 2: at 0.6 to 0.4 two blocks are 0.2 apart; b differs from a at one depth of two, c at both.
    table = table_of([[[0], [0]], [[0], [1]], [[1], [1]]], 2)
    names, distances = label_distances(table, ["a", "b", "c"])
    assert names == ("a", "b", "c")
    assert np.allclose(distances, [[0, 0.1, 0.2], [0.1, 0, 0.1], [0.2, 0.1, 0]])
    draw_utilisation(np.array([[0.25, 0.75], [1.0, 0.0]]), tmp_path / "use.svg")
    picture = (tmp_path / "use.svg").read_text()
    assert [share for share in ("25%", "75%", "100%", "0%") if f">{share}<" not in picture] == []


def test_mode_paths_by_hand():
    # Of a's documents the first has four windows and the second one, and each counts once: 0 and 1 are equal there.
    table = table_of([[[0, 0, 0, 0], [1, 1, 1, 1]], [[1], [1]], [[1], [0]]], 3)
    modes = mode_paths_of(table, {0: "a", 1: "a", 2: "b"})
    assert (modes["b"].blocks, modes["b"].num_examples) == ((1, 0), 1)
    assert modes["b"].probabilities == (pytest.approx(0.6), pytest.approx(0.6))
    assert modes["a"].blocks == (0, 1)
    assert modes["a"].probabilities == (pytest.approx(0.4), pytest.approx(0.6))
    assert modes["a"].num_examples == 2
    # As counts are read, so are probabilities.
    assert mode_path(torch.tensor([[[1, 3, 2]]])).tolist() == mode_path(torch.tensor([[[0.1, 0.6, 0.3]]])).tolist()


def test_mode_paths_of_a_model(model):
    draw = torch.Generator().manual_seed(0)
    rows = {name: [torch.randint(0, 257, (40,), generator=draw) for _ in range(3)] for name in ("x", "y")}
    modes = mode_paths(model, rows)
    for name, own in rows.items():
        table = record_paths(model, own)
        for depth in range(6):
            lines = table[table["depth"] == depth]
            mean = np.mean(lines["probabilities"].to_list(), axis=0)
            assert modes[name].blocks[depth] == mean.argmax()
            assert modes[name].probabilities[depth] == pytest.approx(mean.max(), abs=1e-5)
    with pytest.raises(UserError, match="label 'x': there is nothing to record"):
        mode_paths(model, {"x": []})


def prompts() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(2)
    rows = []
    for length in (12, 19, 5):
        ids = torch.randint(0, 250, (length,), generator=draw).tolist()
        rows.append({"input_ids": [ids[0], ids[0], *ids[1:]], "router_only_ids": [-1, 7, *[-1] * (length - 1)]})
    return rows


@torch.no_grad()
def write_alone(model, row: dict[str, list[int]], told: bool, count: int, path=None, weight=None) -> list[int]:
    """Greedy text of one prompt without cache, batch or hooks; untold, the filler comes in as an embedding."""
    ids, hidden = torch.tensor([row["input_ids"]]), torch.tensor([row["router_only_ids"]])
    for _ in range(count):
        if told:
            behind = ids.shape[1] - hidden.shape[1]
            given = {"input_ids": ids, "router_only_ids": torch.nn.functional.pad(hidden, (0, behind), value=-1)}
        else:
            embeds = model.model.embed_tokens(ids)
            embeds[:, 1] = model.model.filler_embedding
            given = {"inputs_embeds": embeds}
        logits = model(**given, path=path, path_weight=weight).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(row["input_ids"]) :].tolist()


@pytest.mark.slow
def test_writing_at_once_is_writing_alone(make_model):
    model = make_model(router_only_tokens=True)
    # What the router is told has to matter, and so have the blocks and the filler.
    model.model.embed_tokens.weight.data[7] *= 100
    for weights in model.model.library.parameters():
        weights.data.mul_(10)
    model.model.filler_embedding.data.fill_(0.5)
    rows = prompts()
    texts = {}
    for told in (True, False):
        texts[told] = generate_rows(model, rows, told=told, max_new_tokens=4, end=256, batch_size=2)
        assert texts[told][1:] == [write_alone(model, row, told, 4) for row in rows[1:]]
    assert texts[True] != texts[False]
    forced = torch.tensor([4, 0, 3, 2, 1, 0])
    for weight, number in (("router", None), (1.0, 1.0)):
        with force_mode(model, forced.tolist(), weight):
            written = generate_rows(model, rows[:2], told=False, max_new_tokens=3, end=256)
        assert written[1] == write_alone(model, rows[1], False, 3, forced, number)
    assert written[1] != texts[False][1][:3]
    stop = texts[False][0][3]
    ended = generate_rows(model, rows[:1], told=False, max_new_tokens=4, end=stop)[0]
    assert ended == texts[False][0][: texts[False][0].index(stop)]
    with pytest.raises(UserError, match="at least one prompt"):
        generate_rows(model, [], max_new_tokens=1, end=256)


def test_a_mode_path_is_forced_with_its_weights(model):
    ids = list(range(40))
    mode = ModePath((4, 0, 3, 2, 1, 0), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4), 1)
    with force_mode(model, mode, "mode"):
        table = record_paths(model, [ids])
    for depth, lines in table.groupby("depth"):
        assert set(lines["expert"]) == {mode.blocks[depth]}
        assert np.allclose(lines["weight"], mode.probabilities[depth])
    with force_mode(model, mode), force_path(model, 1, depths=[2]):
        assert set(record_paths(model, [ids]).query("depth == 2")["expert"]) == {1}
    with pytest.raises(UserError, match="what mode_paths returned"), force_mode(model, mode.blocks, "mode"):
        pass


def slow_distance(one: str, other: str) -> int:
    if not one or not other:
        return len(one) + len(other)
    return min(
        slow_distance(one[1:], other[1:]) + (one[0] != other[0]),
        slow_distance(one[1:], other) + 1,
        slow_distance(one, other[1:]) + 1,
    )


@bounded(40)
@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_edit_distance_is_its_definition(one, other):
    assert edit_distance(one, other) == slow_distance(one, other)


def test_attribution_and_confusion_by_hand():
    own = {"up": "abcd", "down": "dcba", "same": "aaaa"}
    assert attribute("abcd", own) == Attribution("up", 0)
    assert attribute("dcb", own) == Attribution("down", 1)
    assert attribute("", own) == Attribution(TIED, 4)
    found = confusion(["up", "up", "up", "down"], ["up", "down", TIED, None], ["up", "down"])
    assert found.counts == ((1, 1), (0, 0))
    assert (found.tied, found.unattributed, found.totals) == ((1, 0), (0, 1), (3, 1))
    assert found.diagonal == (pytest.approx(1 / 3), 0)
    with pytest.raises(UserError, match="'left' is not among"):
        confusion(["left"], ["up"], ["up"])
    with pytest.raises(UserError, match="1 forced labels, 2 produced"):
        confusion(["up"], ["up", "up"], ["up"])
