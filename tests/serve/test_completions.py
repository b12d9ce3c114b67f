"""The real openai client against a real `lol serve` process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI

from lol.serve.completions import Served

pytestmark = pytest.mark.slow

PROMPT = "router of layers"
SEEDED = {"model": "loud", "prompt": PROMPT, "max_tokens": 40, "seed": 5, "temperature": 0.9, "top_p": 0.95}


def text_of(client: OpenAI, **changes: Any) -> str:
    return client.completions.create(**(SEEDED | changes)).choices[0].text


def ids_of(served: Served, text: str) -> torch.Tensor:
    return served.tokenizer(text, return_tensors="pt")["input_ids"]


# --- texts


def test_greedy_text_is_that_of_generate(client: OpenAI, served: Served) -> None:
    ids = ids_of(served, PROMPT)
    made = served.model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    answer = client.completions.create(model="loud", prompt=PROMPT, max_tokens=40, temperature=0)
    assert answer.choices[0].text == served.tokenizer.decode(made, skip_special_tokens=True)
    assert answer.choices[0].finish_reason == ("stop" if len(made) < 40 else "length")
    assert (answer.object, answer.model) == ("text_completion", "loud")
    assert answer.usage.prompt_tokens == ids.shape[1]
    assert answer.usage.completion_tokens == len(made)
    assert answer.usage.total_tokens == ids.shape[1] + len(made)


def test_the_seed_decides_and_samples_differ(client: OpenAI) -> None:
    first = client.completions.create(**SEEDED, n=3)
    again = client.completions.create(**SEEDED, n=3)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert text_of(client) == texts[0]
    assert text_of(client, seed=6) != texts[0]
    assert text_of(client, top_p=0.0) == text_of(client, temperature=0)


def test_prompts_in_every_form(client: OpenAI, served: Served) -> None:
    ids, other = ids_of(served, PROMPT)[0].tolist(), "library"
    expected = [text_of(client), text_of(client, prompt=other)]
    assert text_of(client, prompt=ids) == expected[0]
    for prompts in ([PROMPT, other], [ids, ids_of(served, other)[0].tolist()]):
        answer = client.completions.create(**(SEEDED | {"prompt": prompts, "n": 2}))
        assert [choice.text for choice in answer.choices][::2] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == len(ids) + len(ids_of(served, other)[0])
    assert text_of(client, prompt=PROMPT, echo=True) == PROMPT + expected[0]
    assert text_of(client, prompt=PROMPT, echo=True, max_tokens=0) == PROMPT


def test_a_text_does_not_depend_on_what_else_is_asked(client: OpenAI) -> None:
    prompts = ["router", "layers of", "path", "shelf block"]
    alone = [text_of(client, prompt=prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: text_of(client, prompt=prompt), prompts * 2))
    assert together == alone * 2


# --- streams


def test_a_stream_is_the_same_text_in_pieces(client: OpenAI) -> None:
    asked = SEEDED | {"n": 2, "logprobs": 2, "echo": True, "extra_body": {"return_path": True}}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    for index, choice in enumerate(whole.choices):
        pieces = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert len(pieces) > 10
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == choice.finish_reason
        assert pieces[-1].path == choice.path
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [entry for piece in pieces for entry in getattr(piece.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


def test_a_stream_ends_with_done_and_usage_only_on_request(address: str) -> None:
    with httpx.stream("POST", f"{address}/v1/completions", json=SEEDED | {"stream": True}, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert last["choices"][0]["logprobs"] is None
    assert last["usage"] is None
    assert "path" not in last["choices"][0]


@pytest.mark.parametrize("size", [1, 6])
def test_stop_strings_end_the_text_and_never_show(client: OpenAI, size: int) -> None:
    text = text_of(client)
    start = len(text) // 2
    stop = text[start : start + size]
    # One that almost comes, so that text is held back and let go again.
    near = text[2:5] + "~~~"
    answer = client.completions.create(**SEEDED, stop=[stop, near], logprobs=0)
    chunks = list(client.completions.create(**SEEDED, stop=[stop, near], stream=True))
    expected = text[: text.index(stop)]
    assert answer.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert all(offset < len(expected) for offset in answer.choices[0].logprobs.text_offset)
    assert len(answer.choices[0].logprobs.tokens) <= answer.usage.completion_tokens < 40


# --- log-probabilities


def test_logprobs_are_those_of_a_forward_pass(client: OpenAI, served: Served) -> None:
    # Longer than the passes in which a prompt is read.
    prompt = "library of layers " * 60
    choice = client.completions.create(**(SEEDED | {"prompt": prompt}), echo=True, logprobs=3).choices[0]
    logprobs, ids = choice.logprobs, ids_of(served, prompt)[0].tolist()
    assert len(ids) > 512
    names = {served.tokenizer.decode([token]): token for token in range(len(served.tokenizer))}
    names |= {served.tokenizer.convert_ids_to_tokens(token): token for token in range(259)}
    assert len(logprobs.tokens) == len(ids) + 40 - (
        choice.finish_reason == "stop" and 40 - len(logprobs.tokens[len(ids) :])
    )
    new = [names[name] for name in logprobs.tokens[len(ids) :]]
    with torch.no_grad():
        expected = served.model(torch.tensor([ids + new])).logits[0].log_softmax(-1)
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    for place, token in enumerate([*ids, *new][1:], start=1):
        assert logprobs.token_logprobs[place] == pytest.approx(float(expected[place - 1, token]), abs=1e-4)
        best = expected[place - 1].topk(3).values.tolist()
        given = sorted(logprobs.top_logprobs[place].values(), reverse=True)
        assert given[:3] == pytest.approx(best, abs=1e-4)
        assert logprobs.top_logprobs[place][logprobs.tokens[place]] == logprobs.token_logprobs[place]
        assert len(given) <= 4
    for name, offset in zip(logprobs.tokens[1:], logprobs.text_offset[1:], strict=True):
        if name.isascii() and name not in ("<|bos|>", "<|eos|>", "<|pad|>"):
            assert choice.text[offset : offset + len(name)] == name


# --- paths


def test_a_path_that_came_back_can_be_forced(client: OpenAI) -> None:
    free = client.completions.create(**SEEDED, extra_body={"return_path": True}).choices[0]
    assert len({window["expert"] for window in free.path}) > 1
    forced = client.completions.create(**SEEDED, extra_body={"path": free.path, "return_path": True}).choices[0]
    assert (forced.text, forced.path) == (free.text, free.path)
    # The same blocks as a list per depth.
    blocks = [[window["expert"] for window in free.path if window["depth"] == depth] for depth in range(4)]
    as_lists = client.completions.create(**SEEDED, extra_body={"path": blocks, "return_path": True}).choices[0]
    assert (as_lists.text, as_lists.path) == (free.text, free.path)
    # And that they were forced indeed: change one window late in the text.
    changed = [
        window | {"expert": (window["expert"] + 1) % 3} if window["window"] == 2 else window for window in free.path
    ]
    other = client.completions.create(**SEEDED, extra_body={"path": changed, "return_path": True}).choices[0]
    experts = {(window["depth"], window["window"]): window["expert"] for window in other.path}
    assert all(
        experts[window["depth"], window["window"]] == window["expert"] for window in changed if window["window"] < 3
    )


def test_the_returned_path_is_that_of_a_forward_pass(client: OpenAI, served: Served) -> None:
    from lol.paths.record import record_paths

    choice = client.completions.create(
        **SEEDED | {"temperature": 0}, logprobs=0, extra_body={"return_path": True}
    ).choices[0]
    ids = ids_of(served, PROMPT)
    made = served.model.generate(ids, max_new_tokens=40, do_sample=False)[0]
    # The last token is drawn and not read.
    table = record_paths(served.model, [made[:-1].tolist()])
    columns = ["depth", "window", "start", "end", "expert"]
    assert [[window[name] for name in columns] for window in choice.path] == table[columns].to_numpy().tolist()
    weights = [window["weight"] for window in choice.path]
    assert weights == pytest.approx(table["weight"].tolist(), abs=1e-4)


def test_forced_blocks_and_their_weight(client: OpenAI) -> None:
    for weight in (0.5, 1):
        body = {"path": [2, -1, 0, 1], "path_weight": weight, "return_path": True}
        path = client.completions.create(**SEEDED, extra_body=body).choices[0].path
        for depth, block in ((0, 2), (2, 0), (3, 1)):
            ran = {(window["expert"], window["weight"]) for window in path if window["depth"] == depth}
            assert ran == {(block, weight)}
    texts = [text_of(client, extra_body={"path": [block] * 4}) for block in range(3)]
    assert len(set(texts)) > 1


# --- refusals

REFUSED = [
    ({"path": [0, 1, 2]}, "path has 3 depths, but 4 are run: give one block per depth"),
    ({"path": [0, 1, 2, 3]}, "path names block 3, but the library holds blocks 0 to 2"),
    ({"path": [[0, -2], [0], [0], [0]]}, "path names block -2"),
    ({"path": []}, "path is empty: give 4 blocks"),
    ({"path": "0 1 2 3"}, "path must be a list with one block per depth"),
    ({"path": [{"depth": 4, "window": 0, "expert": 0}]}, "path names depth 4: the model has depths 0 to 3"),
    ({"path": [{"depth": 0, "window": 10**9, "expert": 0}]}, "path names window 1000000000: no text here has more"),
    ({"path": [10**30, 0, 0, 0]}, "path must be a list"),
    ({"path_weight": 1.0}, "give a path, or leave it out"),
    ({"path": [0, 0, 0, 0], "path_weight": "loud"}, 'path_weight must be "router" or a number'),
    ({"frogs": 3}, "frogs is no field of this endpoint: leave it out"),
    ({"best_of": 3}, "best_of is not supported here: leave it out"),
    ({"suffix": "end"}, "suffix is not supported here: leave it out"),
    ({"logit_bias": {"5": 1}}, "logit_bias is not supported here: leave it out"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is not supported here"),
    ({"presence_penalty": -0.5}, "presence_penalty is not supported here"),
    ({"temperature": 2.5}, "temperature: input should be less than or equal to 2"),
    ({"temperature": "hot"}, "temperature: input should be a valid number"),
    ({"top_p": 1.5}, "top_p: input should be less than or equal to 1"),
    ({"max_tokens": -1}, "max_tokens: input should be greater than or equal to 0"),
    ({"max_tokens": 2001}, "max_tokens is 2001: this server gives at most 2000"),
    ({"n": 0}, "n: input should be greater than or equal to 1"),
    ({"n": 65}, "65 texts are asked for (prompts times n): this server gives at most 64"),
    ({"logprobs": 21}, "logprobs: input should be less than or equal to 20"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop holds 5 texts: give at most 4"),
    ({"stop": ""}, "a stop text is empty"),
    ({"stop": 5}, "stop must be a text or a list of texts"),
    ({"stream_options": {"include_usage": True}}, "set stream to true"),
    ({"prompt": "router " * 2000}, "tokens: this server reads at most 1000"),
    ({"prompt": [280]}, "token id 280 is outside of the vocabulary (0 to 279)"),
    ({"prompt": [-1]}, "token id -1 is outside"),
    ({"prompt": [10**30]}, "prompt must be a text, a list of texts, a list of token ids"),
    ({"prompt": []}, "a prompt of token ids is empty"),
    ({"prompt": {"text": "a"}}, "prompt must be a text, a list of texts, a list of token ids"),
    ({"prompt": [True]}, "prompt must be a text"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes)[:50] for changes, _ in REFUSED])
def test_what_is_refused(address: str, changes: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", json=SEEDED | changes, timeout=60)
    error = answer.json()["error"]
    assert message in error["message"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")


def test_fields_that_ask_for_nothing_are_taken(client: OpenAI) -> None:
    neutral = {"best_of": 1, "frequency_penalty": 0.0, "presence_penalty": 0, "user": "me", "logit_bias": {}}
    assert text_of(client, **neutral, extra_body={"suffix": None, "path_weight": None}) == text_of(client)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": ["\\ud800"]}', "half of a surrogate pair"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: input should be"),
        (b"\xff", "body"),
    ],
)
def test_bodies_that_are_none(address: str, body: bytes, message: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert message in answer.json()["error"]["message"]
    assert answer.status_code == 400


def test_the_clients_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here: ask for 'loud'") as missing:
        text_of(client, model="gpt")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        text_of(client, best_of=2)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.chat.completions.create(model="loud", messages=[])


def test_models_and_health(client: OpenAI, address: str) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("loud", "model")
    assert client.models.retrieve("loud") == model
    assert (model.lol["num_experts"], model.lol["num_routed_depths"]) == (3, 4)
    assert httpx.get(f"{address}/health").json()["status"] == "ok"
    assert httpx.get(f"{address}/v1/completions").status_code == 405


# --- clients that leave


@pytest.fixture
def watcher(address: str) -> Iterator[httpx.Client]:
    """One connection for all looks at the line."""
    with httpx.Client(base_url=address) as client:
        yield client


def test_a_client_that_leaves_stops_the_work(address: str, watcher: httpx.Client) -> None:
    # Some minutes of work, were it done.
    long = SEEDED | {"max_tokens": 2000, "n": 64, "temperature": 2.0}

    def health() -> dict[str, Any]:
        return watcher.get("/health").json()

    def wait_until_idle() -> None:
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if (health()["running"], health()["waiting"]) == (0, 0):
                return
            time.sleep(0.05)
        pytest.fail("the work goes on")

    with httpx.stream("POST", f"{address}/v1/completions", json=long | {"stream": True}, timeout=60) as answer:
        lines: Iterator[str] = answer.iter_lines()
        assert "data: " in next(lines)
        assert health()["running"] == 1
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json=long, timeout=0.5)  # waits in the line, and leaves it
        assert health()["running"] == 1
    wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json=long, timeout=0.5)
    wait_until_idle()
