"""The report holds every window, fetches nothing, and lets nothing of the corpus run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
import torch

from lol import UserError, record_paths
from lol.paths.record import stretches, token_texts
from lol.paths.report import write_report

HOSTILE = 'x = "</script><script>alert(1)</script>" & <img src=x onerror=alert(2)> \u2028 <!-- é'
PLAIN = "def read(self, size=-1):\n    return self.buffer[:size]\n" * 3


class Page(HTMLParser):
    """The elements of a page, its scripts, and the text inside of each class."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.scripts, self.documents = [], [], [], []
        self.pieces = []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        given = dict(attrs)
        if tag not in ("meta", "input"):
            self.open.append((tag, given.get("class", "")))
        if given.get("class") == "text":
            self.documents.append("")
        if given.get("class", "").startswith("piece"):
            self.pieces.append(given)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[-1] += data
        elif any(name == "text" for _, name in self.open):
            self.documents[-1] += data


@pytest.fixture
def written(tmp_path, tokenizer, metrics, make_model):
    def write(model=None, **changes):
        texts = [PLAIN, HOSTILE]
        rows = [tokenizer(text)["input_ids"] for text in texts]
        arguments = {
            "title": "a <title>",
            "facts": [("command", "lol train --note '<script>'")],
            "metrics": metrics,
            "table": record_paths(model or make_model(), rows),
            "texts": [token_texts(tokenizer, row) for row in rows],
            "names": ["plain.py", "<script>alert(3)</script>"],
            "sample": "\n</pre><script>alert(4)</script>",
            "prompt": "def <b>",
        }
        arguments |= changes
        write_report(tmp_path / "report.html", **arguments)
        assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
        return (tmp_path / "report.html").read_text(encoding="utf-8"), arguments

    return write


def test_holds_every_window_and_every_token(written):
    text, arguments = written()
    page, table = Page(text), arguments["table"]
    assert page.documents == [PLAIN, HOSTILE]
    lines = [[int(line) for line in piece["data-lines"].split()] for piece in page.pieces]
    assert {line for piece in lines for line in piece} == set(range(len(table)))
    expected = [list(piece.lines) for document in (0, 1) for piece in stretches(table, document)]
    assert lines == expected
    windows = json.loads(page.scripts[0])
    assert [window[:5] for window in windows] == table[
        ["depth", "window", "start", "end", "expert"]
    ].to_numpy().tolist()
    assert windows[3][5] == pytest.approx(table["weight"][3], abs=1e-3)
    assert windows[3][6] == pytest.approx([1000 * share for share in table["probabilities"][3]], abs=0.51)


def test_a_path_has_one_color_and_shows_its_blocks(written):
    text, arguments = written()
    by_class = {}
    pieces = [piece for document in (0, 1) for piece in stretches(arguments["table"], document)]
    for shown, piece in zip(Page(text).pieces, pieces, strict=True):
        name = shown["class"].split()[1]
        assert by_class.setdefault(name, piece.path) == piece.path
        rule = re.search(rf"^\.{name} {{(.*?)}}$", text, re.MULTILINE).group(1)
        for depth, block in enumerate(piece.path):
            assert f"--d{depth}: var(--block-{block});" in rule
    assert len(set(by_class.values())) == len(by_class) > 2
    hues = re.findall(r"^\.p\d+ { --hue: ([\d.]+);", text, re.MULTILINE)
    assert len(set(hues)) == len(hues) == len(by_class)


def test_text_of_the_corpus_never_becomes_markup(written):
    page = Page(written()[0])
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert not any("alert(" in script for script in page.scripts)
    json.loads(page.scripts[0])


def test_only_the_script_of_the_page_may_run(written):
    text, _ = written()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    digest = base64.b64encode(hashlib.sha256(Page(text).scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_fetches_nothing(written):
    text, _ = written()
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not [entry for entry in Page(text).attributes if entry[1] in ("src", "href", "srcset")]


def test_losses_and_shares_are_in_the_page(written):
    text, _ = written()
    assert re.findall(r'<td class="number">(\d\.\d{3})</td>', text) == ["5.500", "4.500", "4.200"]
    assert text.count('<polyline class="held-out"') == 0  # one evaluation is a point
    assert text.count('<circle class="held-out"') == 2
    shares = re.findall(r'<td style="--share: ([\d.]+)%"', text)
    assert len(shares) == 6 * 5
    assert sum(map(float, shares)) == pytest.approx(600, abs=1)


def test_a_run_without_metrics_or_sample(written):
    text, _ = written(metrics=[], sample=None, prompt="")
    page = Page(text)
    assert "svg" not in page.tags
    assert "<h2>Sample</h2>" not in text
    assert page.documents == [PLAIN, HOSTILE]


def test_one_block_and_a_fixed_path(written, make_model):
    model = make_model(num_experts=1, routing="fixed", fixed_path=[0] * 6)
    assert Page(written(model)[0]).documents == [PLAIN, HOSTILE]


def test_a_bfloat16_model(written, make_model):
    assert Page(written(make_model().to(torch.bfloat16))[0]).documents == [PLAIN, HOSTILE]


def test_texts_and_names_must_fit_the_table(written):
    with pytest.raises(UserError, match=r"documents have \[\d+, \d+\] tokens, the texts \[1\]"):
        written(texts=[["x"]])
    with pytest.raises(UserError, match="1 names for 2 documents"):
        written(names=["x"])
