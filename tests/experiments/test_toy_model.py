"""The toy's encoder beside its literal form, and what each setting lets through."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from lol import UserError
from lol.experiments.toy.config import MODELS, ToyConfig
from lol.experiments.toy.model import Mixture, ToyModel
from lol.experiments.toy.train import draw, forward_in_training, given_path, sequence_balance
from lol.model.layers import rms_normalize, rotary_angles, rotate

PROGRAMS = ToyConfig().task.programs


def made(name: str, seed: int = 0) -> ToyModel:
    torch.manual_seed(seed)
    model = ToyModel(replace(MODELS[name], hidden_size=16, num_heads=2, intermediate_size=24)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.2)
    return model


def block(model: ToyModel, number: int, x: Tensor) -> Tensor:
    """One block on the tokens of one example, each seeing all."""
    w = {name: getattr(model.library, name).weight[number] for name in (
        "attn_norm", "q_proj", "k_proj", "v_proj", "o_proj", "mlp_norm", "gate_proj", "up_proj", "down_proj"
    )}  # fmt: skip
    eps, heads = model.config.rms_norm_eps, model.toy.num_heads
    normed = rms_normalize(x, eps) * w["attn_norm"]
    angles = rotary_angles(torch.arange(len(x)), 8, model.config.rope_theta, torch.float64)
    joined = []
    for head in range(heads):
        own = slice(8 * head, 8 * head + 8)
        q, k, v = ((normed @ w[f"{part}_proj"].t())[:, own] for part in "qkv")
        scores = rotate(q, angles) @ rotate(k, angles).t() / 8**0.5
        joined.append(scores.softmax(-1) @ v)
    h = x + torch.cat(joined, -1) @ w["o_proj"].t()
    normed = rms_normalize(h, eps) * w["mlp_norm"]
    return h + (F.silu(normed @ w["gate_proj"].t()) * (normed @ w["up_proj"].t())) @ w["down_proj"].t()


@pytest.mark.parametrize("name", ["dense", "given", "given-step-primitive", "given-blind", "learned", "router-only"])
def test_the_encoder_is_its_literal_form(name: str):
    model = made(name)
    examples = draw(model.toy, PROGRAMS, 5, torch.Generator().manual_seed(1))
    output = model(examples.digits, examples.program, path=given_path(model.toy, examples.program))
    for row in range(5):
        instruction = torch.stack(
            [model.program_embedding.weight[4 * step + int(examples.program[row, step])] for step in range(3)]
        )
        x = model.digit_embedding.weight[examples.digits[row]]
        x = x if model.toy.blind else torch.cat([x, instruction])
        x = x + model.place_embedding.weight
        for step in range(3):
            number, weight = int(output.experts[row, step]), 1.0
            if model.router is not None:
                features = (x.mean(0) + model.depth_embedding.weight[step]) / 2
                features = features + instruction.mean(0) if model.toy.blind else features
                probability = (model.router.weight.float() @ features.float() + model.router.bias.float()).softmax(-1)
                assert int(probability.argmax()) == number
                weight = probability[number].double()
            x = x + weight * (block(model, number, x) - x)
        normed = rms_normalize(x[:8], model.config.rms_norm_eps) * model.norm.weight
        # The router computes in float32.
        tolerance = 1e-6 if model.router is not None else 1e-12
        assert_close(
            output.logits[row], normed @ model.head.weight.t() + model.head.bias, atol=tolerance, rtol=tolerance
        )


def test_torchs_block_comes_in_two_ways():
    ours, defaults = (ToyModel(MODELS[f"given-{choice}"]) for choice in ("torch-block", "torch-defaults"))
    for model, is_default in ((ours, False), (defaults, True)):
        layer = model.library.layers[0]
        x = torch.randn(2, 11, 64)
        assert torch.equal(layer(x), layer(x)) != is_default
        # Behind a norm that comes last every token has the norm's own scale.
        scale = layer.eval()(x).pow(2).mean(-1)
        assert torch.allclose(scale, torch.ones(2, 11), atol=1e-3) == is_default


@pytest.mark.parametrize("name", ["given", "learned"])
def test_torchs_block_runs_on_the_examples_that_chose_it(name: str):
    torch.manual_seed(0)
    model = ToyModel(MODELS[f"{name}-torch-block"])
    examples = draw(model.toy, PROGRAMS, 5, torch.Generator().manual_seed(1))
    output = model(examples.digits, examples.program, path=given_path(model.toy, examples.program))
    for row in range(5):
        for step, number in enumerate(output.experts[row].tolist()):
            x, after = (output.states[place][row] for place in (step, step + 1))
            weight = output.router_logits[step][row].softmax(-1)[number] if model.router else 1.0
            expected = x + weight * (model.library.layers[number](x[None])[0] - x)
            assert after.shape[0] == (8 if step == 2 else 11)
            assert_close(after, expected[: len(after)], atol=1e-5, rtol=1e-5)
    output.logits.sum().backward()
    used = {number for path in output.experts.tolist() for number in path}
    assert {number for number, layer in enumerate(model.library.layers) if layer.linear1.weight.grad is None} == (
        set(range(4)) - used
    )


def test_torchs_block_has_the_articles_parameters():
    """The article: 203k with four blocks, 603k with twelve; the library's block has fewer."""

    def count(name: str, **changes: object) -> int:
        model = ToyModel(replace(MODELS[name], **changes))
        return round(sum(parameter.numel() for parameter in model.parameters()) / 1000)

    assert [count(name, block="torch") for name in ("given", "given-step-primitive")] == [203, 603]
    assert [count(name) for name in ("given", "given-step-primitive")] == [198, 588]


def test_choices_decide_the_first_weights():
    torch.manual_seed(0)
    ours, wider, smaller, placed, torchs = (
        ToyModel(MODELS[f"given{choice}"])
        for choice in ("", "-init0.09", "-embedding0.02", "-place0.02", "-torch-block")
    )
    assert [_deviation(m.library.q_proj) for m in (ours, wider, smaller)] == [0.02, 0.09, 0.02]
    assert [_deviation(m.program_embedding) for m in (ours, wider, torchs, smaller)] == pytest.approx(
        [1.0, 1.0, 1.0, 0.02], rel=0.1
    )
    places = [_deviation(model.place_embedding) for model in (ours, smaller, placed, torchs)]
    assert places == pytest.approx([1.0, 0.02, 0.02, 1.0], rel=0.15)
    # torch's own: uniform, up to 1 / sqrt(64).
    for linear in (torchs.library.layers[3].linear1, torchs.head):
        assert 0.12 < float(linear.weight.detach().abs().max()) <= 0.125


def _deviation(module: nn.Module) -> float:
    return round(float(module.weight.detach().std()), 2)


@pytest.mark.parametrize("name", ["given-blind", "router-only"])
def test_blind_blocks_see_the_program_by_the_path_alone(name: str):
    model = made(name)
    examples = draw(model.toy, PROGRAMS, 4, torch.Generator().manual_seed(1))
    other = (examples.program + 1) % 4
    path = torch.tensor([[0, 1, 2]]).expand(4, -1)
    if model.router is not None:
        # The weight of a block is the router's, and so a way to the program: taken out here.
        model.router.register_forward_hook(lambda _module, _args, out: (out[0], torch.ones_like(out[1]), out[2]))
    logits = [model(examples.digits, program, path=path).logits for program in (examples.program, other)]
    assert torch.equal(*logits)
    sighted = made("given")
    logits = [sighted(examples.digits, program, path=path).logits for program in (examples.program, other)]
    assert not torch.equal(*logits)


def test_given_paths():
    program = torch.tensor([[0, 1, 2], [3, 3, 0]])
    paths = {name: given_path(MODELS[name], program) for name in MODELS if MODELS[name].routing != "learned"}
    assert paths["dense"].tolist() == [[0, 1, 2]] * 2
    assert paths["looped"].tolist() == [[0, 0, 0]] * 2
    assert paths["given"].tolist() == program.tolist()
    assert paths["given-step-primitive"].tolist() == [[0, 5, 10], [3, 7, 8]]
    assert paths["given-relabelled"].tolist() == [[0, 2, 0], [3, 0, 2]]
    every = given_path(MODELS["given-program"], torch.tensor(PROGRAMS))
    assert len({tuple(path) for path in every.tolist()}) > 32
    assert torch.equal(every[5], given_path(MODELS["given-program"], torch.tensor([PROGRAMS[5]]))[0])
    assert given_path(MODELS["learned"], program) is None


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("setting", [{"blind": True}, {}, {"blind": True, "between": "digits"}, {"block": "torch"}])
def test_paths_that_begin_alike_are_run_once(setting: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch):
    config = ToyConfig(routing="by primitive", hidden_size=16, num_heads=2, **setting)
    torch.manual_seed(0)
    model = ToyModel(config).double()
    model.packs_shelf = packs
    digits, program = torch.randint(10, (3, 8)), torch.randint(4, (3, 3))
    # Of the second example two paths are the same; of the third all go on differently from the start.
    paths = torch.tensor(
        [
            [[0, 1, 2], [0, 1, 3], [0, 2, 2]],
            [[3, 3, 3], [3, 3, 3], [3, 0, 3]],
            [[0, 1, 2], [1, 1, 2], [2, 1, 2]],
        ]
    )
    counts = []
    run = ToyModel._run

    def count(self: ToyModel, stream: Any, shelf: Any, expert: Tensor, *rest: Any) -> Tensor:
        counts.append(len(expert))
        return run(self, stream, shelf, expert, *rest)

    each = (part.repeat_interleave(3, 0) for part in (digits, program))
    literal = model(*each, path=paths.flatten(0, 1)).logits
    monkeypatch.setattr(ToyModel, "_run", count)
    logits = model.try_paths(digits, program, paths, config.between)
    assert counts == [1 + 1 + 3, 2 + 2 + 3, 3 + 2 + 3]
    above = torch.randn_like(literal)
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(literal, used, above, allow_unused=True)
    found = torch.autograd.grad(logits.flatten(0, 1), used, above, allow_unused=True)
    assert_close(logits.flatten(0, 1), literal)
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            assert_close(own, other)


def test_a_mixture_weighs_all_blocks():
    model = made("learned-soft")
    examples = draw(model.toy, PROGRAMS, 3, torch.Generator().manual_seed(2))
    output = model(examples.digits, examples.program, mixture=Mixture(0.5))
    for row in range(3):
        x, shares = output.states[0][row], (output.router_logits[0][row] / 0.5).softmax(-1).double()
        expected = x + sum(shares[number] * (block(model, number, x) - x) for number in range(4))
        assert_close(output.states[1][row], expected, atol=1e-6, rtol=1e-6)
    sharp = model(examples.digits, examples.program, mixture=Mixture(1e-6))
    assert_close(sharp.experts, sharp.router_logits and torch.stack(sharp.router_logits, 1).argmax(-1))


def test_gumbel_gets_cold():
    model = made("learned-gumbel").float()
    examples = draw(model.toy, PROGRAMS, 64, torch.Generator().manual_seed(2))
    entropies = []
    for step in (0, model.toy.train_steps - 1):
        seen = []
        handle = model.dispatch.register_forward_hook(
            lambda _module, args, _out, seen=seen: seen.append(args[4].detach())
        )
        forward_in_training(model, examples, step, torch.Generator().manual_seed(3))
        handle.remove()
        shares = seen[0].view(4, 64).t()
        assert_close(shares.sum(-1), torch.ones(64))
        entropies.append(float(-(shares * shares.clamp(min=1e-30).log()).sum(-1).mean()))
    assert entropies[1] < 0.5 * entropies[0]


def test_sequence_balance_by_hand():
    model = made("learned")
    examples = draw(model.toy, PROGRAMS, 2, torch.Generator().manual_seed(2))
    output = model(examples.digits, examples.program, path=torch.tensor([[0, 0, 1], [2, 2, 2]]))
    probability = torch.stack(output.router_logits, 1).softmax(-1).mean(1)
    by_hand = [4 * (2 / 3 * probability[0, 0] + 1 / 3 * probability[0, 1]), 4 * probability[1, 2]]
    assert_close(sequence_balance(output), sum(by_hand) / 2)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="needs more blocks"):
        ToyConfig(routing="by step and primitive", num_blocks=4)
    with pytest.raises(UserError, match="is for routing='learned'"):
        ToyConfig(routing="by primitive", router_training="soft")
