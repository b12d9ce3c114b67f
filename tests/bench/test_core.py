"""The benchmark measures what it says: every row, on the same tokens, as ratios to the dense block."""

import json
from pathlib import Path

from lol.bench.core import BenchCore, bench
from lol.cli import main

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_experts": 3, "window_size": 8, "window_stride": 4}


def test_every_row_is_measured_in_every_round():
    result = bench(BenchCore(**SMALL, length=32, batch_size=2, repeats=3))
    assert set(result["seconds"]) == {
        "dense block",
        "routed, grouped",
        "routed, grouped, half windows",
        "routed, loop",
        "routed, loop, half windows",
        "every block on everything",
    }
    assert all(len(times) == 3 and min(times) > 0 for times in result["seconds"].values())
    assert result["median_over_dense"]["dense block"] == 1.0


def test_the_numbers_go_to_a_file(tmp_path: Path):
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    file = tmp_path / "core.json"
    assert (
        main(["bench", "core", *flags, "--length", "32", "--batch-size", "2", "--repeats", "1", "--json", str(file)])
        == 0
    )
    saved = json.loads(file.read_text())
    assert saved["options"]["num_experts"] == 3
    assert saved["threads"] >= 1
