"""The written-out backward pass of short windows equals the plain loop over blocks, forward and gradient."""

import pytest
import torch
from torch.testing import assert_close

from lol.model.config import LoLConfig
from lol.model.library import Dispatch, Library
from lol.model.short_windows import Repeated, pack
from lol.model.short_windows import _normalize as normalize
from lol.model.windows import find_documents, lay_windows

WINDOWS, LENGTH, WIDTH, BLOCKS = 9, 5, 24, 4


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("idle", [None, 2])
@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("wanted", [None, 3])
# With large weights some scores are too large for an exponential function, in float64 too.
@pytest.mark.parametrize("deviation", [0.5, 12.0])
def test_packed_equals_loop(
    is_causal: bool,
    idle: int | None,
    length: int,
    wanted: int | None,
    deviation: float,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("lol.model.short_windows._WINDOWS_AT_ONCE", 2)
    torch.manual_seed(0)
    config = LoLConfig(vocab_size=8, hidden_size=WIDTH, intermediate_size=20, num_attention_heads=3, num_experts=BLOCKS)
    library, dispatch = Library(config).double(), Dispatch(config)
    dispatch.is_causal = is_causal
    for name, parameter in library.named_parameters():
        torch.nn.init.normal_(parameter, std=deviation if name.startswith(("q_proj", "k_proj")) else 0.5)
    layout = lay_windows(find_documents((WINDOWS, length), None, None, torch.device("cpu")), 0, None)
    # Every block runs but the idle one, in no order, at different places of two depths.
    experts = [torch.tensor([1, 3, 0, 2, 1, 0, 3, 2, 1]), torch.tensor([0, 0, 3, 1, 2, 2, 1, 3, 3])]
    if idle is not None:
        experts = [expert.masked_fill(expert == idle, 0) for expert in experts]
    state = torch.randn(WINDOWS * length, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(WINDOWS, dtype=torch.float64, requires_grad=True)
    above = torch.randn(WINDOWS, wanted or length, WIDTH, dtype=torch.float64)
    inputs = [state, weight, *library.parameters()]

    outcomes = {}
    for form in ("loop", "packed"):
        dispatch.form = "loop"
        packed = form == "packed"
        shelf = pack(library.stacks(), 3) if packed else library()
        result = dispatch(state, shelf, layout, experts[0], weight, None)
        result = dispatch(result, shelf, layout, experts[1], weight, None, wanted=wanted if packed else None)
        result = result.view(WINDOWS, -1, WIDTH)[:, :wanted]
        outcomes[form] = [result, *torch.autograd.grad(result, inputs, above)]
    assert outcomes["packed"][0].shape == above.shape
    assert_close(outcomes["packed"], outcomes["loop"], atol=1e-10, rtol=1e-10)
    if idle is not None:
        assert all(not grad[idle].any() for grad in outcomes["packed"][3:])


@pytest.mark.parametrize("few", [True, False])
def test_repeated_tokens_equal_the_stream_that_they_make(few: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lol.model.short_windows._WINDOWS_AT_ONCE", 4)
    normalized = []

    def count(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        normalized.append(len(x))
        return normalize(x, eps)

    monkeypatch.setattr("lol.model.short_windows._normalize", count)
    torch.manual_seed(0)
    config = LoLConfig(vocab_size=8, hidden_size=WIDTH, intermediate_size=20, num_attention_heads=3, num_experts=BLOCKS)
    library, dispatch = Library(config).double(), Dispatch(config)
    for parameter in library.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    layout = lay_windows(find_documents((WINDOWS, LENGTH), None, None, torch.device("cpu")), 0, None)
    expert = torch.tensor([1, 3, 0, 2, 1, 0, 3, 2, 1])
    # Where every token of the stream stands for itself, projecting them for all blocks would be more work, not less.
    distinct = torch.randn(6 if few else WINDOWS * LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    index = torch.randint(len(distinct), (WINDOWS, LENGTH))
    weight = torch.rand(WINDOWS, dtype=torch.float64, requires_grad=True)
    above = torch.randn(WINDOWS * 3, WIDTH, dtype=torch.float64)
    inputs = [distinct, weight, *library.parameters()]

    outcomes = []
    for stream in (distinct[index].flatten(0, 1), Repeated(distinct, index)):
        normalized.clear()
        result = dispatch(stream, pack(library.stacks(), 3), layout, expert, weight, None, wanted=3)
        outcomes.append([result, *torch.autograd.grad(result, inputs, above)])
    assert_close(outcomes[1], outcomes[0], atol=1e-10, rtol=1e-10)
    assert normalized[0] == (6 if few else WINDOWS * LENGTH)


def test_repeated_tokens_need_a_packed_shelf():
    config = LoLConfig(vocab_size=8, hidden_size=WIDTH, num_attention_heads=3, num_experts=BLOCKS)
    layout = lay_windows(find_documents((2, 5), None, None, torch.device("cpu")), 0, None)
    stream = Repeated(torch.zeros(1, WIDTH), torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(AssertionError, match="packed shelf"):
        Dispatch(config)(stream, Library(config)(), layout, stream.which[:, 0], torch.ones(2), None)


def test_a_part_of_each_window_needs_a_packed_shelf():
    config = LoLConfig(vocab_size=8, hidden_size=WIDTH, num_attention_heads=3, num_experts=BLOCKS)
    layout = lay_windows(find_documents((2, 5), None, None, torch.device("cpu")), 0, None)
    state, expert = torch.zeros(10, WIDTH), torch.zeros(2, dtype=torch.long)
    with pytest.raises(AssertionError, match="packed shelf"):
        Dispatch(config)(state, Library(config)(), layout, expert, torch.ones(2), None, wanted=3)


def test_windows_of_two_lengths_are_refused():
    config = LoLConfig(vocab_size=8, hidden_size=WIDTH, num_attention_heads=3, num_experts=BLOCKS)
    layout = lay_windows(find_documents((2, 5), None, None, torch.device("cpu")), 0, 3)
    shelf = pack(Library(config).stacks(), 3)
    with pytest.raises(AssertionError, match="one length"):
        Dispatch(config)(torch.zeros(10, WIDTH), shelf, layout, torch.zeros(4, dtype=torch.long), torch.ones(4), None)
