"""The page of `lol studio` in a real browser: Debian's Chromium, driven by Playwright, against the real server."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

from lol import LoLConfig, LoLForCausalLM
from lol.data.tokenizer import train_tokenizer
from small_run import FLAGS, MODEL, Lol, environment

ROOT = Path(__file__).parents[2]
AXE = ROOT / "studio" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIEWS = ("paths", "windows", "dial", "runs", "runs/trained", "runs/trained/with/again", "results", "results/toy")
TEXT = "router of layers window block path shelf token depth library"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="no browser here: apt-get install chromium"),
]


def _write_model(folder: Path, corpus: Path, **changes: Any) -> Path:
    """Random weights, so large that windows take different blocks and a forced block changes the text."""
    tokenizer = train_tokenizer([corpus.read_text()], MODEL["vocab_size"])
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = LoLForCausalLM(LoLConfig(**(MODEL | changes), **ends, initializer_range=changes.pop("std", 0.2)))
    assert model.model.router is not None
    torch.nn.init.normal_(model.model.router.weight, std=2.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


FOUR_MILLION = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_routed_depths": 6,
    "window_size": 32,
    "window_stride": 16,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studio") / "runs"


@pytest.fixture(scope="module")
def saved_paths(runs: Path) -> Path:
    return runs.parent / "paths"


@pytest.fixture(scope="module")
def studio(corpus: Path, trained: Path, runs: Path, saved_paths: Path) -> Iterator[str]:
    """Where `lol studio` listens."""
    for name in ("trained", "again"):
        shutil.copytree(trained, runs / name)
    loud = _write_model(runs.parent / "loud", corpus)
    large = _write_model(runs.parent / "four-million", corpus, **FOUR_MILLION)
    command = [sys.executable, "-m", "lol", "studio", "--port", "0", "--model", str(loud), str(large)]
    command += ["--runs", str(runs), "--results", str(ROOT / "results"), "--paths", str(saved_paths)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=runs.parent
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, (line, process.poll())
        yield found[0]
    finally:
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (out, err) == ("", "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, "apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Watched:
    """A page, and everything that must not happen while it is used."""

    def __init__(self, context: BrowserContext, studio: str):
        self.context, self.studio = context, studio
        self.page: Page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.problems: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._see)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _see(self, request: Request) -> None:
        if not request.url.startswith((self.studio, "blob:", "data:")):
            self.problems.append(f"request to {request.url}")

    def open(self, view: str) -> Page:
        self.page.goto(f"{self.studio}/#/{view}")
        self.page.wait_for_load_state("networkidle")
        # Sliders ask a moment after they are there.
        self.page.wait_for_timeout(200)
        expect(self.page.get_by_text(re.compile(r"^\w[\w ]*…$"))).to_have_count(0)
        return self.page


@pytest.fixture
def watched(browser: Browser, studio: str, request: pytest.FixtureRequest) -> Iterator[Watched]:
    context = browser.new_context(**getattr(request, "param", {"viewport": {"width": 1280, "height": 900}}))
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=studio)
    watched = Watched(context, studio)
    yield watched
    context.close()
    assert watched.problems == []


def _type(page: Page, text: str) -> None:
    with page.expect_response(lambda answer: "/api/trace" in answer.url and text in (answer.request.post_data or "")):
        page.get_by_label("Text", exact=True).get_by_role("textbox").fill(text)


def _force(page: Page, depth: int, window: int, block: int) -> None:
    page.locator(f'button[data-depth="{depth}"][data-window="{window}"]').click()
    page.get_by_role("button", name=f"Force block {block}").click()


def _written(page: Page, branch: str) -> str:
    expect(page.locator("[aria-busy]")).to_have_attribute("aria-busy", "false")
    return page.locator(f'[data-branch="{branch}"] [data-text]').text_content() or ""


def _events(studio: str, **request: Any) -> list[dict[str, Any]]:
    """The server's own answer."""
    body = {"model": "model:loud", "text": TEXT, "max_new_tokens": 12} | request
    lines = httpx.post(f"{studio}/api/generate", json=body, timeout=60).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def _text(events: list[dict[str, Any]], branch: int) -> str:
    return "".join(event["text"] for event in events if event["type"] == "token" and event["branch"] == branch)


def test_a_cell_is_forced_and_that_block_runs(watched: Watched, lol: Lol, saved_paths: Path) -> None:
    page = watched.open("paths")
    _type(page, TEXT)
    page.get_by_label("New tokens").fill("12")
    body = {"model": "model:loud", "text": TEXT}
    trace = httpx.post(f"{watched.studio}/api/trace", json=body, timeout=60).json()
    windows = [window for depth in trace["depths"] for window in depth["windows"]]
    expect(page.locator("button[data-depth]")).to_have_count(len(windows))
    for window in windows[:: len(windows) // 5]:
        cell = page.locator(f'button[data-depth="{window["depth"]}"][data-window="{window["window"]}"]')
        expect(cell).to_have_text(str(window["expert"]))

    # Forced by mouse: the continuation is the one that the server writes under that path, and the block ran.
    chosen = trace["depths"][1]["windows"][1]
    block = (chosen["expert"] + 1) % MODEL["num_experts"]
    _force(page, 1, 1, block)
    expect(page.locator('button[data-depth="1"][data-window="1"]')).to_have_text(str(block))
    forced = _written(page, "forced")
    path = [[-1, -1], [-1, block], [-1, -1], [-1, -1]]
    asked = _events(watched.studio, branches=[{"path": None}, {"path": path}])
    assert (_written(page, "free"), forced) == (_text(asked, 0), _text(asked, 1))
    assert _text(asked, 0) != _text(asked, 1)
    begun = [window for event in asked if event.get("branch") == 1 for window in event.get("windows", [])]
    ran = [window["expert"] for window in begun if (window["depth"], window["window"]) == (1, 1)]
    assert ran == [block]
    prompt = next(event for event in asked if event["type"] == "prompt" and event["branch"] == 1)
    expect(page.get_by_text("nats (Kullback")).to_contain_text(f"{prompt['divergence']:.4f} nats")

    # Kept under a name, the path is a file that the command line takes.
    page.get_by_label("Name").fill("one-window")
    page.get_by_role("button", name="Save path").click()
    page.get_by_role("button", name="one-window", exact=True).wait_for()
    page.get_by_role("button", name="Copy as command").click()
    command = page.evaluate("navigator.clipboard.readText()")
    assert "--path-file" in command
    flags = ["--max-new-tokens", 12, "--temperature", 0, "--path-file", saved_paths / "one-window.json"]
    code, out, err = lol("generate", "--model", saved_paths.parent / "loud", "--prompt", TEXT, *flags)
    assert code == 0, err
    assert forced.strip() in out

    # Undo by key, then another path by typing it.
    page.locator('button[data-depth="1"][data-window="1"]').focus()
    page.keyboard.press("Control+z")
    expect(page.locator('[data-branch="forced"]')).to_have_count(0)
    expect(page.locator('button[data-depth="1"][data-window="1"]')).to_have_text(str(chosen["expert"]))
    page.get_by_label("Whole path").fill("0 1 2 -")
    page.get_by_role("button", name="Force path").click()
    page.locator('[data-branch="forced"]').wait_for()
    whole = _events(watched.studio, branches=[{"path": None}, {"path": [0, 1, 2, -1]}])
    assert _written(page, "forced") == _text(whole, 1)
    page.get_by_role("button", name="Copy as Python").click()
    program = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, cwd=saved_paths.parent
    )
    assert done.stdout.endswith(_text(whole, 1) + "\n"), done.stderr


def test_keys_and_drags_choose_windows(watched: Watched) -> None:
    page = watched.open("paths")
    _type(page, TEXT)
    first = page.locator('button[data-depth="0"][data-window="0"]')
    first.focus()
    page.keyboard.press("ArrowDown")
    # The windows of depth 1 are moved by half: below the middle of the first lies the second.
    expect(page.locator('button[data-depth="1"][data-window="1"]')).to_be_focused()
    page.keyboard.press("Shift+ArrowRight")
    expect(page.locator('button[aria-pressed="true"]')).to_have_count(2)
    page.keyboard.press("2")
    for window in (1, 2):
        expect(page.locator(f'button[data-depth="1"][data-window="{window}"]')).to_have_text("2")
    page.keyboard.press("Delete")
    expect(page.get_by_role("button", name="Free all")).to_be_disabled()

    start = first.bounding_box()
    end = page.locator('button[data-depth="3"][data-window="1"]').bounding_box()
    assert start is not None and end is not None  # noqa: PT018
    page.mouse.move(start["x"] + 4, start["y"] + 4)
    page.mouse.down()
    page.mouse.move(end["x"] + 4, end["y"] + 4, steps=8)
    page.mouse.up()
    chosen = page.locator('button[aria-pressed="true"]')
    assert chosen.count() >= 6
    page.get_by_role("button", name="Force block 0").click()
    for cell in chosen.all():
        expect(cell).to_have_text("0")


def test_nothing_typed_or_forced_is_lost(watched: Watched, saved_paths: Path) -> None:
    page = watched.open("paths")
    _type(page, TEXT)
    page.get_by_label("New tokens").fill("4")
    # A window's later parts are no buttons, and keys hold for it all the same.
    page.locator('span.cell[data-depth="1"][data-window="2"]').first.click()
    page.keyboard.press("2")
    forced = page.locator('button[data-depth="1"][data-window="2"]')
    expect(forced).to_have_text("2")
    for view in ("windows", "runs"):
        page.get_by_role("link", name=view.title(), exact=True).click()
        page.get_by_role("link", name="Paths", exact=True).click()
    expect(forced).to_have_text("2")
    expect(page.get_by_label("Text", exact=True).get_by_role("textbox")).to_have_value(TEXT)
    # The model that is shown already, by its address.
    page.evaluate("location.hash = '#/paths/model%3Aloud'")
    page.evaluate("location.hash = '#/paths/%'")
    page.get_by_text("there is no model").wait_for()
    watched.problems = [problem for problem in watched.problems if "404" not in problem]
    page.evaluate("location.hash = '#/paths'")
    expect(forced).to_have_text("2")
    expect(page.get_by_text("there is no model")).to_have_count(0)

    # A path of all windows and one of them comes back from its file as it was, for longer texts too.
    page.get_by_label("Whole path").fill("1 1 - 1")
    page.get_by_role("button", name="Force path").click()
    _force(page, 0, 0, 0)
    longer = _written(page, "forced")
    page.get_by_label("Name").fill("mixed")
    page.get_by_role("button", name="Save path").click()
    page.get_by_role("button", name="Free all").click()
    page.get_by_role("button", name="mixed", exact=True).click()
    expect(page.get_by_label("Whole path")).to_have_value("1 1 - 1")
    assert _written(page, "forced") == longer

    # To overwrite one path is not to overwrite another.
    page.get_by_role("button", name="Save path").click()
    page.get_by_role("button", name="Overwrite").wait_for()
    watched.problems = [problem for problem in watched.problems if "409" not in problem]
    kept = (saved_paths / "mixed.json").read_bytes()
    page.get_by_label("Name").fill("others")
    expect(page.get_by_role("button", name="Save path")).to_be_visible()
    assert (saved_paths / "mixed.json").read_bytes() == kept

    page.get_by_label("Text", exact=True).get_by_role("textbox").fill("")
    expect(page.locator("button[data-depth]")).to_have_count(0)
    expect(page.get_by_role("button", name="Continue")).to_be_disabled()


def test_the_first_answers_are_quick(watched: Watched) -> None:
    opened = []
    for _ in range(3):
        watched.page.goto("about:blank")
        began = time.perf_counter()
        watched.page.goto(watched.studio)
        watched.page.locator("button[data-depth]").first.wait_for()
        opened.append(time.perf_counter() - began)
    print(f"\nfirst answer {min(opened):.2f} s after opening")
    assert min(opened) < 2

    page = watched.open("paths/model%3Afour-million")
    _type(page, TEXT)
    page.get_by_label("New tokens").fill("1")
    seconds, plain = [], []
    for turn in range(5):
        body = {"model": "model:four-million", "text": TEXT, "max_new_tokens": 1, "branches": [{"path": None}]}
        began = time.perf_counter()
        httpx.post(f"{watched.studio}/api/generate", json=body, timeout=60)
        plain.append(time.perf_counter() - began)
        page.locator('button[data-depth="2"][data-window="1"]').click()
        button = page.get_by_role("button", name=f"Force block {turn % 4}")
        began = time.perf_counter()
        with page.expect_response(lambda answer: "/api/generate" in answer.url):
            button.click()
        page.locator('[data-branch="forced"] .text').first.wait_for()
        seconds.append(time.perf_counter() - began)
        page.get_by_role("button", name="Free all").click()
    forced, alone = statistics.median(seconds), statistics.median(plain)
    print(
        f"first forced token after {1000 * forced:.0f} ms, {forced / alone:.1f} times a plain call's {1000 * alone:.0f}"
    )
    # Two branches and a trace are asked for. The time itself is this machine's: docs/studio.md has one.
    assert forced < 5 * alone


def test_sliders_move_windows_and_dial(watched: Watched) -> None:
    page = watched.open("windows")
    with page.expect_response(lambda answer: "/api/layout" in answer.url) as asked:
        page.get_by_label("Window W, as a number").fill("16")
        page.keyboard.press("Enter")
    assert asked.value.request.post_data_json["window_size"] == 16
    expect(page.get_by_text(f"{100 * asked.value.json()['pairs']['ratio']:.1f}").first).to_be_visible()
    page = watched.open("dial")
    with page.expect_response(lambda answer: "/api/dial" in answer.url):
        page.get_by_role("slider").first.press("ArrowRight")
    expect(page.get_by_text(re.compile("lol train"))).to_be_visible()


def test_a_run_appears_while_it_trains(watched: Watched, runs: Path, corpus: Path) -> None:
    page = watched.open("runs")
    page.get_by_text("trained", exact=True).first.wait_for()
    command = [sys.executable, "-m", "lol", "train", "--run", str(runs / "live"), "--data", str(corpus)]
    process = subprocess.Popen(
        [*command, "--steps", "100000", *FLAGS], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        page.get_by_role("link", name="live").click(timeout=60_000)
        shown = page.get_by_text(re.compile(r"\b[1-9]\d*\s+(of|/)\s+100,?000")).first
        shown.wait_for(timeout=60_000)
        before = shown.text_content()
        expect(shown).not_to_have_text(before or "", timeout=20_000)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "watched",
    [
        {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", "bypass_csp": True},
        {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "bypass_csp": True},
    ],
    ids=["wide and light", "narrow and dark"],
    indirect=True,
)
def test_every_view_fits_and_is_accessible(watched: Watched, tmp_path: Path) -> None:
    pictures = Path(os.environ.get("LOL_PICTURES", tmp_path))
    for view in VIEWS:
        page = watched.open(view)
        if view == "paths":
            _type(page, TEXT)
            _force(page, 1, 1, 0)
            _written(page, "free")
        width, shown = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width <= shown, f"{view} is {width} wide in a window of {shown}"
        name = f"{view.replace('/', '-')}-{shown}.png"
        page.screenshot(path=pictures / name, full_page=True)
        page.evaluate(AXE.read_text())
        report = page.evaluate("axe.run()")
        found = [
            (rule["id"], node["html"][:120], node["failureSummary"][:300])
            for rule in report["violations"]
            for node in rule["nodes"]
        ]
        assert found == [], (view, found)
