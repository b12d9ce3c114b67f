"""Where windows lie: hand-made cases, and every index of a layout against a literal loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lol import LoLConfig, UserError
from lol.model import core
from lol.model.windows import Documents, WindowLayout, count_windows, find_documents, lay_windows, take_rows
from model_cases import Spec, bounded, make_model

CPU = torch.device("cpu")


def documents_of(grid: list[list[int | None]]) -> Documents:
    """From the position of every place of a grid, `None` at padding."""
    mask = torch.tensor([[place is not None for place in row] for row in grid])
    positions = torch.tensor([[7 if place is None else place for place in row] for row in grid])
    return find_documents((len(grid), len(grid[0])), positions, mask, CPU)


# --- Documents ------------------------------------------------------------------------------------------------------


def test_documents_by_hand():
    documents = documents_of(
        [
            [0, 1, 0, 1, 2],
            [None, None, 0, 1, None],
            [None, None, None, None, None],
            [0, None, 1, None, 0],  # padding inside of a document counts for nothing
        ]
    )
    assert documents.position.tolist() == [0, 1, 0, 1, 2, 0, 1, 0, 1, 0]
    assert documents.document.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4]
    assert documents.document_row.tolist() == [0, 0, 1, 3, 3]
    assert documents.num_documents == 5
    assert documents.grid_index is not None
    assert documents.grid_index.tolist() == [0, 1, 2, 3, 4, 7, 8, 15, 17, 19]
    assert documents.grid_document.tolist() == [
        [0, 0, 1, 1, 1],
        [-1, -1, 2, 2, -1],
        [-1] * 5,
        [3, -1, 3, -1, 4],
    ]
    assert documents.grid_position.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 0], [0] * 5, [0, 0, 1, 0, 0]]


def test_without_positions_a_row_is_a_document():
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    documents = find_documents((2, 3), None, mask, CPU)
    assert documents.grid_document.tolist() == [[-1, 0, 0], [1, 1, -1]]
    assert documents.grid_position.tolist() == [[0, 0, 1], [0, 1, 0]]
    plain = find_documents((2, 3), None, None, CPU)
    assert plain.grid_index is None
    assert plain.grid_position.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_one_row_of_positions_stands_for_all():
    documents = find_documents((2, 4), torch.tensor([[0, 1, 0, 1]]), None, CPU)
    assert documents.grid_document.tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_a_full_mask_is_no_mask():
    assert find_documents((2, 3), None, torch.ones(2, 3, dtype=torch.long), CPU).grid_index is None


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1, 3]], "in row 0 a position is 3 where 2 was expected"),
        ([[5, 6, 7]], "in row 0 a position is 5 where 0 was expected"),
        ([[0, 1, 2], [0, 1, 1]], "in row 1 a position is 1 where 2 was expected"),
        ([[0, 1, 2], [3, 4, 5]], "in row 1 a position is 3 where 0 was expected"),
        ([[0, -1, 0]], "in row 0 a position is -1 where 1 was expected"),
    ],
)
def test_positions_that_do_not_count_are_refused(positions: list[list[int]], message: str):
    with pytest.raises(UserError, match=f"must count 0, 1, 2, … inside each document.*{message}"):
        find_documents((len(positions), 3), torch.tensor(positions), None, CPU)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_without_a_token_is_refused(shape: tuple[int, int]):
    with pytest.raises(UserError, match="no real token"):
        find_documents(shape, None, torch.zeros(shape, dtype=torch.long), CPU)


# --- Layouts against a literal loop ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """One window as the loop finds it: its tokens are numbers in the stream."""

    row: int
    document: int
    document_in_row: int
    index_in_document: int
    index_in_row: int
    tokens: tuple[int, ...]


def windows_by_loop(grid: list[list[int | None]], shift: int, size: int | None) -> list[Window]:
    found: list[Window] = []
    stream, document = -1, -1
    for row, places in enumerate(grid):
        in_row, document_in_row, in_document, number = -1, -1, -1, -1
        for position in places:
            if position is None:
                continue
            stream += 1
            begins = False
            if position == 0:
                document, document_in_row, in_document = document + 1, document_in_row + 1, -1
                begins = True
            own = 0 if size is None else (position + shift) // size
            if begins or own != number:
                number, in_document, in_row = own, in_document + 1, in_row + 1
                found.append(Window(row, document, document_in_row, in_document, in_row, ()))
            last = found.pop()
            found.append(Window(**(vars(last) | {"tokens": (*last.tokens, stream)})))
    return found


@st.composite
def grids(draw: st.DrawFn) -> list[list[int | None]]:
    """Rows of packed documents with padding left, right and in holes; some rows are empty, but not all."""
    rows = draw(st.lists(st.lists(st.integers(1, 13), max_size=3), min_size=1, max_size=4).filter(any))
    columns = max(map(sum, rows)) + draw(st.integers(0, 3))
    grid = []
    for lengths in rows:
        places = draw(st.permutations(range(columns))) if draw(st.booleans()) else range(columns)
        row: list[int | None] = [None] * columns
        positions = [position for length in lengths for position in range(length)]
        for place, position in zip(sorted(places[: len(positions)]), positions, strict=True):
            row[place] = position
        grid.append(row)
    return grid


sizes = st.integers(1, 6) | st.none()


@bounded(200)
@given(grid=grids(), size=sizes, data=st.data())
def test_layouts_are_what_a_loop_over_tokens_finds(grid: list[list[int | None]], size: int | None, data: st.DataObject):
    shift = data.draw(st.integers(0, size - 1)) if size is not None else 0
    expected = windows_by_loop(grid, shift, size)
    layout = lay_windows(documents_of(grid), shift, size)
    assert layout.num_windows == len(expected)
    assert layout.batch == len(grid)
    assert layout.windows.start.tolist() == [window.tokens[0] for window in expected]
    assert layout.windows.length.tolist() == [len(window.tokens) for window in expected]
    assert layout.windows.total == sum(len(window.tokens) for window in expected)
    for name in ("row", "document", "document_in_row", "index_in_document", "index_in_row"):
        assert getattr(layout, name).tolist() == [getattr(window, name) for window in expected], name
    assert layout.num_documents == expected[-1].document + 1
    assert layout.place_in_document.tolist() == layout.index_in_document.tolist()
    assert layout.width == layout.max_in_row
    assert layout.kept is None
    assert layout.max_in_row == 1 + max(window.index_in_row for window in expected)
    assert layout.window_of_token.tolist() == [k for k, window in enumerate(expected) for _ in window.tokens]


@bounded(100)
@given(grid=grids(), size=sizes, seed=st.integers(0, 999), experts=st.integers(1, 4))
def test_windows_in_the_order_of_their_blocks(grid: list[list[int | None]], size: int | None, seed: int, experts: int):
    shift = 0 if size is None else size // 2
    windows = windows_by_loop(grid, shift, size)
    layout = lay_windows(documents_of(grid), shift, size)
    chosen = torch.randint(0, experts, (len(windows),), generator=torch.Generator().manual_seed(seed))
    order = layout.group(chosen)
    expected = [
        token
        for block in range(experts)
        for window, own in zip(windows, chosen.tolist(), strict=True)
        if own == block
        for token in window.tokens
    ]
    assert order.rows.tolist() == expected
    for k, window in enumerate(windows):
        start, length = order.windows.start[k], order.windows.length[k]
        assert order.rows[start : start + length].tolist() == list(window.tokens)
    stream = torch.randn(layout.windows.total, 2)
    assert torch.equal(order.arrange(stream), stream[expected])
    assert torch.equal(order.restore(order.arrange(stream)), stream)


@bounded(100)
@given(grid=grids(), size=sizes)
def test_rows_and_windows_convert_both_ways(grid: list[list[int | None]], size: int | None):
    layout = lay_windows(documents_of(grid), 0, size)
    windows = windows_by_loop(grid, 0, size)
    values = torch.arange(layout.num_windows) + 100
    rows = layout.to_rows(values, layout.max_in_row + 1, -1)
    expected = [[-1] * (layout.max_in_row + 1) for _ in grid]
    for value, window in zip(values.tolist(), windows, strict=True):
        expected[window.row][window.index_in_row] = value
    assert rows.tolist() == expected
    assert torch.equal(layout.from_rows(rows), values)


@bounded(100)
@given(n=st.integers(1, 40), size=sizes, data=st.data())
def test_counting_windows_is_laying_them(n: int, size: int | None, data: st.DataObject):
    shift = data.draw(st.integers(0, size - 1)) if size is not None else 0
    layout = lay_windows(find_documents((1, n), None, None, CPU), shift, size)
    assert count_windows(n, shift, size) == layout.num_windows


@bounded(50)
@given(grid=grids())
def test_gathering_and_scattering_tokens(grid: list[list[int | None]]):
    documents = documents_of(grid)
    values = torch.arange(1, 1 + len(grid) * len(grid[0])).view(len(grid), -1)
    real = [[place is not None for place in row] for row in grid]
    assert documents.gather(values).tolist() == values[torch.tensor(real)].tolist()
    assert torch.equal(documents.scatter(documents.gather(values)), values * torch.tensor(real))


# --- The published layout, and how often it is computed -------------------------------------------------------------


def test_the_published_layout():
    config = LoLConfig(num_routed_depths=4)
    documents = find_documents((1, 1024), None, None, CPU)
    lengths = [layout.windows.length.tolist() for layout in core.lay_depths(config, documents, 4)]
    assert lengths[0] == lengths[2] == [128] * 8
    assert lengths[1] == lengths[3] == [64] + [128] * 7 + [64]


@pytest.mark.parametrize(("stride", "distinct"), [(4, 2), (0, 1), (2, 4), (3, 6), (8, 1)])
def test_a_layout_is_computed_once_per_distinct_shift(monkeypatch: pytest.MonkeyPatch, stride: int, distinct: int):
    shifts = []

    def counted(documents: Documents, shift: int, window_size: int | None) -> WindowLayout:
        shifts.append(shift)
        return lay_windows(documents, shift, window_size)

    monkeypatch.setattr(core, "lay_windows", counted)
    model = make_model(Spec(8, 2, 1, 1, 2, 6, 8, stride), 0)
    model(torch.zeros(2, 20, dtype=torch.long))
    assert shifts == list(dict.fromkeys(depth * stride % 8 for depth in range(6)))
    assert len(shifts) == distinct


# --- Attention groups -----------------------------------------------------------------------------------------------


def test_half_windows_are_split_off():
    layout = lay_windows(find_documents((3, 1024), None, None, CPU), 64, 128)
    groups = {group.length: group.windows.tolist() for group in layout.windows.groups}
    assert groups == {
        64: [0, 8, 9, 17, 18, 26],
        128: [k for k in range(27) if k % 9 not in (0, 8)],
    }
    token, slot_of_token, is_real = layout.windows.slots
    assert is_real is None
    assert token.numel() == 3 * 1024
    assert torch.equal(token[slot_of_token], torch.arange(3 * 1024))


@bounded(100)
@given(rows=st.integers(1, 3), n=st.integers(1, 40), size=st.integers(1, 9), data=st.data())
def test_rows_of_one_length_need_no_padded_slot(rows: int, n: int, size: int, data: st.DataObject):
    shift = data.draw(st.integers(0, size - 1))
    windows = lay_windows(find_documents((rows, n), None, None, CPU), shift, size).windows
    for group in windows.groups:
        assert (windows.length[group.windows] == group.length).all()
    assert windows.slots[2] is None
    assert (windows.equal_length is None) == (len(windows.groups) > 1)


@bounded(100)
@given(grid=grids(), size=st.integers(1, 9) | st.none())
def test_every_window_has_slots_of_its_own(grid: list[list[int | None]], size: int | None):
    layout = lay_windows(documents_of(grid), 0, size)
    windows = layout.windows
    grouped = sorted(k for group in windows.groups for k in group.windows.tolist())
    assert grouped == list(range(layout.num_windows))
    token, slot_of_token, is_real = windows.slots
    real = torch.ones_like(token, dtype=torch.bool) if is_real is None else is_real
    at = 0
    for group in windows.groups:
        for k in group.windows.tolist():
            length = int(windows.length[k])
            assert length <= group.length <= 2 * length
            slots = slice(at, at + group.length)
            assert real[slots].tolist() == [True] * length + [False] * (group.length - length)
            start = int(windows.start[k])
            assert token[slots][:length].tolist() == list(range(start, start + length))
            at += group.length
    assert at == token.numel()
    assert torch.equal(token[slot_of_token], torch.arange(windows.total))
    assert real[slot_of_token].all()


def ragged_layout() -> WindowLayout:
    """Windows of so many lengths that they are padded."""
    positions = torch.cat([torch.arange(length) for length in (3, 8, 1, 6, 5, 7)])[None]
    layout = lay_windows(find_documents((1, positions.shape[1]), positions, None, CPU), 0, 8)
    assert layout.windows.slots[2] is not None
    return layout


def test_the_gradient_of_taking_rows():
    windows = ragged_layout().windows
    token, slot_of_token, is_real = windows.slots
    assert is_real is not None
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(windows.total, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    slots = torch.randn(token.numel(), 2, generator=generator, dtype=torch.float64, requires_grad=True)

    def to_slots(x: Tensor) -> Tensor:
        return take_rows(x, token, slot_of_token)[is_real]

    def from_slots(x: Tensor) -> Tensor:
        return take_rows(x, slot_of_token, token, is_real)

    assert torch.autograd.gradcheck(to_slots, stream)
    assert torch.autograd.gradcheck(from_slots, slots)
    (gradient,) = torch.autograd.grad(from_slots(slots).square().sum(), slots)
    assert (gradient[~is_real] == 0).all()
    assert (gradient[is_real] != 0).all()
    assert torch.equal(from_slots(take_rows(stream, token, slot_of_token)), stream)


def test_the_gradient_of_bringing_windows_into_order():
    layout = ragged_layout()
    order = layout.group(torch.tensor([2, 0, 1, 0, 2, 1]))
    stream = torch.randn(layout.windows.total, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: order.arrange(x) ** 2, stream)
    assert torch.autograd.gradcheck(lambda x: order.restore(x) ** 2, stream)
