"""The numbers of every route, held against the package or a direct computation."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lol
from lol.generate import stream_text
from lol.model.config import LoLConfig
from lol.model.cost import cache_bytes, count_flops, count_parameters
from lol.model.windows import find_documents, lay_windows
from lol.paths.colors import block_colors
from lol.paths.record import record_paths, token_texts
from lol.studio.branches import kl_divergence
from lol.studio.dial import turn_dial
from lol.studio.layout import lay_out
from lol.train.budget import checkpoint_bytes
from lol.train.progress import shorten
from lol.train.published import PUBLISHED
from model_cases import bounded
from small_run import Lol
from studio_cases import Client

TEXT = "router of layers window shelf token path block depth library of tokens"
ID = "model:loud"
PER_WINDOW = [[0, -1, 2], [2], [-1, 1, 1, 0], []]


def windows_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [window for depth in trace["depths"] for window in depth["windows"]]


# --- trace


@pytest.mark.parametrize("weight", [None, 0.25])
@pytest.mark.parametrize("path", [None, [2, -1, 0, 1], PER_WINDOW])
def test_a_trace_is_what_record_paths_says(client: Client, loud: Any, path: Any, weight: float | None) -> None:
    model, tokenizer = loud
    trace = client.json("POST", "/api/trace", json={"model": ID, "text": TEXT, "path": path, "path_weight": weight})
    rows = [[]] * 4 if path is None else [[block] for block in path] if path == [2, -1, 0, 1] else path
    with ExitStack() as forced:
        for depth, row in enumerate(rows):
            for window, block in enumerate(row):
                places = None if path != PER_WINDOW else [window]
                how = {"depths": [depth], "windows": places, "weight": "router" if weight is None else weight}
                if block >= 0:
                    forced.enter_context(lol.force_path(model, block, **how))
        table = record_paths(model, TEXT, tokenizer)
    got = windows_of(trace)
    assert len(got) == len(table)
    assert len({window["expert"] for window in got}) == 3
    for window, (_, line) in zip(got, table.iterrows(), strict=True):
        for name in ("depth", "window", "start", "end", "expert"):
            assert window[name] == line[name]
        assert window["weight"] == pytest.approx(float(line["weight"]), abs=1e-5)
        assert window["probabilities"] == pytest.approx(line["probabilities"], abs=1e-5)
        row, number = rows[window["depth"]], window["window"]
        asked = row[0:1] if path == [2, -1, 0, 1] else row[number : number + 1]
        assert window["forced"] == (asked not in ([], [-1]))
        first = {"start": 0, "end": 1, "windows": 0}
        assert window["input"] == ({"start": 0, "end": window["start"], "windows": number} if number else first)
    ids = tokenizer(TEXT)["input_ids"]
    assert [token["id"] for token in trace["tokens"]] == ids
    assert [token["text"] for token in trace["tokens"]] == token_texts(tokenizer, ids)
    assert [depth["shift"] for depth in trace["depths"]] == [0, 4, 0, 4]


def test_the_input_of_a_window_is_what_its_router_reads(client: Client, loud: Any) -> None:
    """The probabilities of a window follow from the states that `input` names, at the first depth."""
    model, tokenizer = loud
    base = model.model
    trace = client.json("POST", "/api/trace", json={"model": ID, "text": TEXT})
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        state = base(ids, num_depths=1, output_hidden_states=True).hidden_states[1][0]
        for window in trace["depths"][0]["windows"]:
            place = window["input"]
            read = state[place["start"] : place["end"]]
            if place["windows"]:
                parts = read.tensor_split(place["windows"])
                assert len({len(part) for part in parts}) == 1
                read = torch.stack([part.mean(0) for part in parts]).mean(0)
            else:
                read = (read[0] + base.depth_embedding[0]) / 2
            logits, _, _ = base.router(read[None], 0, base.expert_bias)
            assert window["probabilities"] == pytest.approx(logits[0].softmax(-1).tolist(), abs=1e-5)


def test_models_without_a_router_or_windows(make_client: Callable[..., Client], loud: Any, tmp_path: Path) -> None:
    _, tokenizer = loud
    shape = {"vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_experts": 3}
    shape |= {
        "num_routed_depths": 2,
        "num_prelude_layers": 1,
        "num_coda_layers": 1,
        "window_size": 8,
        "window_stride": 4,
    }
    fixed = {"routing": "fixed", "fixed_path": [2, 0], "core_attention": "full"}
    for name, config in (("fixed", shape | fixed), ("none", shape | {"num_routed_depths": 0})):
        lol.LoLForCausalLM(LoLConfig(**config)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    client = make_client(tmp_path / "fixed", tmp_path / "none")
    models = client.json("GET", "/api/about")["models"]
    assert [(model["id"], model["window_size"]) for model in models] == [("model:fixed", None), ("model:none", 8)]
    ask = {"model": "model:fixed", "text": TEXT, "path": [-1, 1]}
    windows = windows_of(client.json("POST", "/api/trace", json=ask))
    length = len(tokenizer(TEXT)["input_ids"])
    facts = [(one["expert"], one["weight"], one["forced"], one["probabilities"], one["end"]) for one in windows]
    assert facts == [(2, 1.0, False, None, length), (1, 1.0, True, None, length)]
    told = client.events(model="model:fixed", text=TEXT, branches=[{}], max_new_tokens=3)
    assert {window["end"] for window in told[0]["windows"]} == {length + 3}
    assert client.json("POST", "/api/trace", json={"model": "model:none", "text": TEXT})["depths"] == []


# --- generate


def test_a_free_branch_is_stream_text(client: Client, loud: Any) -> None:
    settings = {"max_new_tokens": 16, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 4}
    events = client.events(model=ID, text=TEXT, branches=[{}], top=3, **settings)
    pieces = [piece for piece in stream_text(*loud, TEXT, **settings) if not piece.given]
    tokens = [event for event in events if event["type"] == "token"]
    assert [(one["id"], one["position"], one["text"]) for one in tokens] == [
        (piece.token, piece.position, piece.text) for piece in pieces
    ]
    assert len({one["id"] for one in tokens}) > 5
    assert [event["type"] for event in events[-2:]] == ["end", "done"]
    assert events[-2]["reason"] == ("length" if len(tokens) == 16 else "stop")
    assert [len(one["windows"]) for one in tokens] == [len(piece.windows) for piece in pieces]


def test_branches_run_what_they_are_told(client: Client, loud: Any) -> None:
    """Chances, candidates and divergence against whole passes of the model; windows against the trace of the end."""
    model, tokenizer = loud
    ids = tokenizer(TEXT)["input_ids"]
    width = 10
    paths = [None, [1, 1, 1, 1], [[*row, *[-1] * (width - len(row))] for row in PER_WINDOW]]
    branches = [{"path": path, "path_weight": None if path is None else 0.5} for path in paths]
    events = client.events(model=ID, text=TEXT, branches=branches, max_new_tokens=6, top=4)
    order = [event["branch"] for event in events if event["type"] == "token"]
    assert order == [0, 1, 2] * 6
    first = None
    for number, path in enumerate(paths):
        own = [event for event in events if event.get("branch") == number]
        prompt, *tokens, end = own
        assert (prompt["type"], prompt["tokens"], end["type"]) == ("prompt", len(ids), "end")
        whole = torch.tensor([[*ids, *(token["id"] for token in tokens)]])
        given = {} if path is None else {"path": fitted(path, model, whole.shape[1]), "path_weight": 0.5}
        with torch.no_grad():
            shares = model(whole, **given).logits[0].double().softmax(-1)[len(ids) - 1 :]
        for event, share in zip([prompt, *tokens], [shares[0], *shares[:-1]], strict=True):
            best, which = share.topk(4)
            assert [one["id"] for one in event["next"]] == which.tolist()
            assert [one["p"] for one in event["next"]] == pytest.approx(best.tolist(), abs=1e-5)
            if event["type"] == "token":
                assert event["p"] == pytest.approx(float(share[event["id"]]), abs=1e-5)
                assert event["id"] == which[0]
        first = shares[0] if first is None else first
        divergence = float((first * (first / shares[0]).log()).sum())
        assert (
            prompt["divergence"] is None if number == 0 else prompt["divergence"] == pytest.approx(divergence, abs=1e-5)
        )
        assert number == 0 or divergence > 1e-3
        text = "".join(token["text"] for token in tokens)
        assert text == tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True)
        check_windows(own, model, whole, given)


def fitted(path: Any, model: Any, num_tokens: int) -> torch.Tensor:
    blocks = torch.as_tensor(path)
    return blocks if blocks.ndim == 1 else lol.model.core.fit_path(blocks, model.config.windows_in(num_tokens))


def check_windows(own: list[dict[str, Any]], model: Any, whole: torch.Tensor, given: dict[str, Any]) -> None:
    """All windows that were told are those of a pass over the text without its last token, each told once."""
    told = [window for event in own for window in event.get("windows", [])]
    places = [(window["depth"], window["window"]) for window in told]
    assert len(set(places)) == len(places)
    run = whole[:, :-1]
    if given and given["path"].ndim == 2:
        given = given | {"path": fitted(given["path"][:, :10], model, run.shape[1])}
    with torch.no_grad():
        routing = model(run, **given).routing
    experts = {place: int(routing.experts[0, place[0], place[1]]) for place in places}
    assert {place: window["expert"] for place, window in zip(places, told, strict=True)} == experts
    assert len(places) == int((routing.experts >= 0).sum())
    assert {(window["depth"], window["end"] - window["start"]) for window in told if window["window"] == 1} >= {(0, 8)}
    for event in own:
        for window in event.get("windows", []):
            assert event["type"] == "prompt" or window["start"] == event["position"] - 1


def test_a_document_that_ends(client: Client, loud: Any) -> None:
    """At a high temperature the end of text is drawn some time; nothing follows it."""
    settings = {"max_new_tokens": 12, "temperature": 5.0, "top_k": None, "seed": 39}
    events = client.events(model=ID, text="path", branches=[{}, {"path": [0, 0, 0, 0]}], top=0, **settings)
    reasons = {event["branch"]: event["reason"] for event in events if event["type"] == "end"}
    for number, reason in reasons.items():
        ids = [event["id"] for event in events if event["type"] == "token" and event["branch"] == number]
        ended = loud[1].eos_token_id in ids
        assert reason == ("stop" if ended else "length")
        assert not ended or ids.index(loud[1].eos_token_id) == len(ids) - 1
    assert "stop" in reasons.values()
    assert {event["next"] == [] for event in events if event["type"] == "token"} == {True}


def test_divergence() -> None:
    first, other = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    expected = 0.5 * torch.tensor(2.0).log() + 0.25 * torch.tensor(0.5).log()
    assert kl_divergence(first, other) == pytest.approx(float(expected))
    assert kl_divergence(first, first) == 0


# --- windows and dial


@bounded(60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12), st.integers(1, 6))
def test_layout(num_tokens: int, size: int, stride: int, depths: int) -> None:
    stride = min(stride, size)
    config = LoLConfig(window_size=size, window_stride=stride, num_routed_depths=depths, hidden_size=32)
    documents = find_documents((1, num_tokens), None, None, torch.device("cpu"))
    layout = lay_out(num_tokens, size, stride, depths, None)
    sees = []
    for depth, got in enumerate(layout.depths):
        expected = lay_windows(documents, config.window_shift(depth), size)
        starts = expected.windows.start.tolist()
        assert got.shift == config.window_shift(depth)
        assert got.windows == list(zip(starts, [*starts[1:], num_tokens], strict=True))
        owner = expected.window_of_token
        sees.append((owner[:, None] == owner[None]) & torch.ones(num_tokens, num_tokens).tril().bool())
    for token in range(num_tokens):
        reached = torch.zeros(num_tokens, dtype=torch.bool)
        reached[token] = True
        starts = []
        for sight in reversed(sees):
            reached = sight[reached].any(0)
            starts.append(int(reached.nonzero()[0]))
        found = lay_out(num_tokens, size, stride, depths, token).reach
        assert found is not None
        assert [one.start for one in found] == starts[::-1]
    core = count_flops(config, num_tokens).core.attention // (4 * 32)
    full = count_flops(LoLConfig(core_attention="full", num_routed_depths=depths, hidden_size=32), num_tokens)
    assert layout.pairs.core == core
    assert layout.pairs.full == full.core.attention // (4 * 32)
    assert layout.pairs.ratio == core / layout.pairs.full


def test_layout_route(client: Client) -> None:
    body = {"num_tokens": 20, "window_size": 8, "window_stride": 4, "num_depths": 2}
    layout = client.json("POST", "/api/layout", json=body | {"token": 17})
    assert [depth["windows"] for depth in layout["depths"]] == [
        [[0, 8], [8, 16], [16, 20]],
        [[0, 4], [4, 12], [12, 20]],
    ]
    assert layout["reach"] == [{"start": 8}, {"start": 12}]
    assert client.json("POST", "/api/layout", json=body)["reach"] is None
    refused = client.message("POST", "/api/layout", 400, json=body | {"window_stride": 9})
    assert "window_stride is 9: choose at most window_size, 8" in refused
    assert "tokens 0 to 19" in client.message("POST", "/api/layout", 400, json=body | {"token": 20})


DIAL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_prelude_layers": 1,
    "num_coda_layers": 2,
    "num_routed_depths": 6,
    "window_size": 16,
    "window_stride": 8,
    "vocab_size": 500,
}


@pytest.mark.parametrize(("blocks", "dtype"), [(1, "float32"), (3, "bfloat16"), (9, "float32")])
def test_dial(client: Client, blocks: int, dtype: str) -> None:
    context = 100
    body = DIAL | {"num_experts": blocks, "context": context, "dtype": dtype}
    dial = client.json("POST", "/api/dial", json=body)
    assert [point["num_experts"] for point in dial["points"]] == list(range(1, max(6, blocks) + 1))
    for point in dial["points"]:
        config = LoLConfig(**DIAL, num_experts=point["num_experts"])
        counts, flops = count_parameters(config), count_flops(config, context)
        assert point == {
            "num_experts": config.num_experts,
            "stored": counts.stored,
            "active": counts.active,
            "total": counts.total,
            "flops_per_token": flops.training / context,
            "forward_flops_per_token": flops.forward / context,
            "cache_bytes": cache_bytes(config, context, 1, getattr(torch, dtype)),
            "checkpoint_bytes": checkpoint_bytes(config),
        }
    assert dial["chosen"] == dial["points"][blocks - 1]
    marks = {mark["name"]: mark for mark in dial["marks"]}
    assert marks.keys() == PUBLISHED.keys() - {"moe-360m-moe"}
    math = PUBLISHED["math-1b"]().model
    assert marks["math-1b"]["stored"] == count_parameters(math).stored
    assert dial["recipe"]["config"].pop("model_type") == LoLConfig.model_type
    assert LoLConfig(**dial["recipe"]["config"]).to_diff_dict() == LoLConfig(**DIAL, num_experts=blocks).to_diff_dict()


def test_the_dial_s_recipe_is_a_command(client: Client, lol: Lol) -> None:
    command = client.json("POST", "/api/dial", json=DIAL | {"num_experts": 3, "context": 100})["recipe"]["command"]
    words = command.replace("lol train --recipe demo --run runs/mine", "cost demo").split()
    code, out, err = lol(*words)
    assert (code, err) == (0, "")
    stored = count_parameters(LoLConfig(**DIAL, num_experts=3)).stored
    assert out.split("non-embedding")[1].split()[:2] == shorten(stored).split()


def test_a_dial_that_cannot_be(client: Client) -> None:
    refused = client.message("POST", "/api/dial", 400, json=DIAL | {"num_experts": 2, "context": 8, "hidden_size": 6})
    assert "num_attention_heads=4 does not divide" in refused
    many = DIAL | {"num_experts": 2, "context": 2**20, "window_size": 1, "window_stride": 0}
    assert "choose larger windows" in client.message("POST", "/api/dial", 400, json=many)
    with pytest.raises(lol.errors.UserError):
        turn_dial(DIAL | {"num_experts": 0}, 8, torch.float32)


def test_about(client: Client, loud: Any) -> None:
    about = client.json("GET", "/api/about")
    (model,) = about["models"]
    config = loud[0].config
    assert (model["id"], model["name"], model["colors"]) == (ID, "loud", block_colors(3))
    for name in ("num_experts", "num_routed_depths", "window_size", "window_stride", "core_attention", "routing"):
        assert model[name] == getattr(config, name)
    assert model["num_parameters"] == sum(one.numel() for one in loud[0].parameters())
    limits = {"max_text_tokens": 4096, "max_new_tokens": 512, "queue": 32, "max_saved_paths": 1000}
    assert (about["runs"], about["results"], about["limits"]) == (True, True, limits)
    assert client.json("GET", "/api/model", params={"id": ID}) == model
