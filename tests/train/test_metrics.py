"""metrics.jsonl: every line is strict JSON, and a resumed run's file equals an uninterrupted one's."""

import json
import math
from pathlib import Path
from typing import NoReturn

import pytest

from lol.errors import UserError
from lol.train.metrics import MetricsLog, MetricsTail, read_metrics, trim_metrics


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def records(start: int, stop: int) -> list[dict[str, object]]:
    return [{"step": step, "loss": 1 / (step + 1), "load": [[1, 2], [3, 4]]} for step in range(start, stop)]


def test_records_come_back_with_nan_and_infinity_on_strict_json_lines(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1, "loss": math.nan, "nested": {"a": (math.inf, -math.inf, 0.1)}, "note": "sample: π"})
        # Readable before the file is closed, and through a second handle.
        (record,) = read_metrics(tmp_path)
        log.sync()
    assert math.isnan(record.pop("loss"))
    assert record == {"step": 1, "nested": {"a": [math.inf, -math.inf, 0.1]}, "note": "sample: π"}
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] == "nan"
    assert line["nested"]["a"][:2] == ["inf", "-inf"]


@pytest.mark.parametrize("torn", [b"", b'{"step": 13, "lo', b'{"step": 2}', b"\x00\x00\n", b"[7]\n", b"{}\n"])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, torn: bytes) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run, stop in ((whole, 20), (killed, 13)):
        run.mkdir()
        with MetricsLog(run) as log:
            for record in records(1, stop):
                log.write(record)
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert trim_metrics(killed, step=10) == 2 + bool(torn)
    with MetricsLog(killed) as log:
        for record in records(11, 20):
            log.write(record)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_half_line_is_cut_even_when_no_record_is_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]
    assert trim_metrics(tmp_path, step=5) == 1
    assert path.read_text() == '{"step": 1}\n'
    path.write_text('{"step": 1}\n{"step": 2}')
    assert trim_metrics(tmp_path, step=5) == 1
    path.write_text('{"step": 1}\n{"step": 9}\n{"step": 2}\n')
    assert trim_metrics(tmp_path, step=5) == 2
    assert path.read_text() == '{"step": 1}\n'
    assert trim_metrics(tmp_path, step=0) == 1
    assert path.read_text() == ""
    assert trim_metrics(tmp_path / "none", step=0) == 0


def test_bad_records_and_files_are_named(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        with pytest.raises(ValueError, match='needs an int "step"'):
            log.write({"loss": 1.0})
        with pytest.raises(TypeError, match="not JSON serializable"):
            log.write({"step": 1, "loss": object()})
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\noops\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is not JSON"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(tmp_path / "none")


def test_a_tail_reads_what_grows_is_cut_or_is_another_file(tmp_path: Path) -> None:
    path, tail = tmp_path / "metrics.jsonl", MetricsTail(tmp_path)
    assert tail.poll() == ([], False)
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert tail.poll() == ([{"step": 1}], False)
    assert tail.poll() == ([], False)
    with path.open("a") as file:
        file.write('ss": "nan"}\n{"step": 3}\n{"st')
    records, again = tail.poll()
    assert ([record["step"] for record in records], again) == ([2, 3], False)
    # Cut, and longer than it was before anybody looked; cut to a whole record less; gone, and another one.
    trim_metrics(tmp_path, 1)
    with path.open("a") as file:
        file.writelines(f'{{"step": {step}, "note": "another"}}\n' for step in (2, 3))
    records, again = tail.poll()
    assert ([record["step"] for record in records], again) == ([1, 2, 3], True)
    trim_metrics(tmp_path, 2)
    records, again = tail.poll()
    assert ([record["step"] for record in records], again) == ([1, 2], True)
    path.unlink()
    assert tail.poll() == ([], True)
    path.write_text('{"step": 1}\noops\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is not JSON"):
        tail.poll()
