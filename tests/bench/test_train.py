"""The training benchmark: its ratios are those of its times, its models do as much work as it says, its bytes are those
of tensors."""

import json
from pathlib import Path

import pytest
import torch

from lol.bench.measure import peak_bytes
from lol.bench.train import BenchTrain, Trained, _make_model
from lol.cli import main
from lol.model.cost import count_parameters

SMALL = {
    "hidden_size": 32, "num_attention_heads": 2, "num_fixed_layers": 1, "num_experts": 3, "num_routed_depths": 3,
    "window_size": 8, "window_stride": 4, "vocab_size": 16,
}  # fmt: skip


@pytest.mark.slow
def test_ratios_are_those_of_the_medians(tmp_path: Path):
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    file = tmp_path / "train.json"
    assert main(["bench", "train", *flags, "--lengths", "32", "48", "--repeats", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    # Six settings at the first length, LoL and Llama at the second; each in two precisions.
    seconds = result["seconds"]
    assert len(seconds) == 2 * (6 + 2)
    assert set(result["peak_bytes_beyond"]) == set(result["tokens_per_second"]) == set(seconds)
    assert len(result["ratios"]) == 2 * (5 + 1) + 2
    (lol,), (llama,), (half,) = (seconds[f"{name}, n=48"] for name in ("LoL, float32", "Llama, float32", "LoL, bf16"))
    assert result["ratios"]["tokens/s of LoL over Llama's, float32, n=48"] == llama / lol
    assert result["ratios"]["tokens/s of LoL in bf16 over float32, n=48"] == lol / half
    assert result["tokens_per_second"]["LoL, float32, n=48"] == 48 / lol


def test_nothing_to_time_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "train", "--repeats", "0"]) == 2
    assert "--repeats" in capsys.readouterr().err


def test_every_model_runs_as_many_layers_of_the_same_shape():
    """5 layers of one size for a token, whatever is stored."""
    options = BenchTrain(**(SMALL | {"hidden_size": 64, "num_experts": 5}))
    layer = 4 * 64**2 + 3 * 64 * 256
    # What is stored, and what the core attends to.
    others = {
        "LoL": (2 + 5, "windowed"),
        "LoL, loop": (2 + 5, "windowed"),
        "dense": (2 + 3, "full"),
        "sliding": (2 + 3, "sliding"),
    }
    for setting, (stored, attention) in others.items():
        config = _make_model(setting, options).config
        size = count_parameters(config).body
        assert (size.active_matrices, size.matrices, config.core_attention) == (5 * layer, stored * layer, attention)
    assert _make_model("LoL, loop", options).model.dispatch.form == "loop"
    config = _make_model("MoE", options).config
    size = count_parameters(config).body
    assert (size.active_matrices, size.matrices) == (5 * layer, 5 * (4 * 64**2 + 3 * 3 * 64 * 128))
    llama = _make_model("Llama", options)
    assert sum(p.numel() for n, p in llama.named_parameters() if p.ndim == 2 and "layers" in n) == 5 * layer


def test_a_step_learns_nothing_and_updates_everything():
    """The rate is 0, so that every round finds the same weights; moments show that the optimizer did work."""
    trained = Trained(_make_model("LoL", BenchTrain(**SMALL)), torch.device("cpu"))
    before = {name: weight.clone() for name, weight in trained.model.state_dict().items()}
    ids = torch.randint(16, (2, 24))
    assert trained.step("float32", input_ids=ids, labels=ids)().item() > 0
    assert all(torch.equal(weight, before[name]) for name, weight in trained.model.state_dict().items())
    states = list(trained.optimizer.state.values())
    assert len(states) == len(list(trained.model.parameters()))
    assert sum(float(state["exp_avg"].abs().sum()) for state in states) > 0
    # Weights, two moments, and a count of steps for each parameter.
    weights = sum(parameter.nbytes for parameter in trained.model.parameters())
    assert trained.stored_bytes == 3 * weights + 4 * len(states)


def test_peak_bytes_by_hand():
    x = torch.zeros(1000, requires_grad=True)

    def step() -> None:
        y = x * 2  # 4,000
        z = y.view(10, 100).exp()  # 8,000: a view adds nothing
        del y  # exp keeps its own result, so 4,000 again
        x.detach().add_(z.detach().flatten())  # in place
        z.sum().backward()  # a sum, a gradient of exp, one of the product; an expanded gradient is one number

    step()
    # z, its gradient, that of y (the same storage, as a view), that of x; of one number: the sum, its gradient.
    x.grad = None
    assert 3 * 4000 <= peak_bytes(step) <= 3 * 4000 + 100
    x.grad = None
    assert peak_bytes(lambda: x.detach().view(-1).add_(1)) == 0
    assert peak_bytes(lambda: [torch.zeros(1000).sum() for _ in range(5)]) == 4004 + 4 * 4
