"""What a run came to, for reading: the report of a run folder, and the paths of a text on the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from lol.data.packing import Row
from lol.data.tokenizer import encode_prompt
from lol.errors import UserError
from lol.generate import generate_text
from lol.model.cost import count_parameters
from lol.model.lm import LoLForCausalLM
from lol.paths.colors import block_colors
from lol.paths.record import record_paths, token_texts
from lol.paths.report import write_report
from lol.train.config import TrainConfig
from lol.train.corpus import open_held_out
from lol.train.loading import load_model
from lol.train.metrics import read_metrics
from lol.train.run_folder import read_config

SAMPLE_PROMPT = "def read(self, size=-1):"


def report_run(run: Path, *, out: Path | None = None, num_rows: int = 6) -> Path:
    """Write the report of a run; returns its file.

    Args:
        run: The run folder.
        out: The file to write; without it, report.html in the run folder.
        num_rows: Held-out rows to show.

    Raises:
        UserError: the folder holds no run, or no whole checkpoint; there is no folder to write to.
    """
    config = read_config(run)
    path = run / "report.html" if out is None else out
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first, or choose another file")
    model, tokenizer = load_model(run)
    rows = open_held_out(config, tokenizer, num_rows)
    documents = [part for row in rows for part in _documents(row)]
    metrics = read_metrics(run)
    room = max(1, config.data.context_length - len(tokenizer(SAMPLE_PROMPT)["input_ids"]))
    sample = generate_text(model, tokenizer, SAMPLE_PROMPT, max_new_tokens=min(120, room))
    write_report(
        path,
        title=f"{run.name}: a library of {model.config.num_experts} blocks",
        facts=_facts(config, model, metrics),
        metrics=metrics,
        table=record_paths(model, documents),
        texts=[token_texts(tokenizer, _read_by_somebody(document)) for document in documents],
        sample=sample.removeprefix(SAMPLE_PROMPT),
        prompt=SAMPLE_PROMPT,
    )
    return path


def show_paths(model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Print a line for every window of every depth: where it lies, its block and weight, its text."""
    ids = encode_prompt(tokenizer, text)
    table = record_paths(model, [ids])
    tokens = token_texts(tokenizer, ids)
    colors = block_colors(model.config.num_experts)
    shown = Table(box=None, pad_edge=False)
    for name in ("depth", "window", "tokens", "block", "weight", "text"):
        shown.add_column(name, justify="left" if name == "text" else "right", no_wrap=name != "text")
    columns = ["depth", "window", "start", "end", "expert", "weight"]
    for depth, window, start, end, expert, weight in table[columns].itertuples(index=False):
        passage = repr("".join(tokens[start:end]))[1:-1]
        shown.add_row(
            str(depth),
            str(window),
            f"{start}-{end - 1}",
            Text(str(expert), style=f"bold {colors[expert]}"),
            f"{weight:.2f}",
            Text(passage, style=colors[expert]),
        )
    console = Console()
    # Printed by Python: rich would end the process itself where the reader of the output has left.
    with console.capture() as lines:
        console.print(shown)
    print(lines.get(), end="")


def _documents(row: Row) -> list[dict[str, list[int]]]:
    """The documents, or their parts, that a packed row holds, each as a row of its own."""
    positions = row["position_ids"].tolist()
    begins = [place for place, position in enumerate(positions) if position == 0]
    ends = [*begins[1:], len(positions)]
    return [
        {name: tensor[begin:end].tolist() for name, tensor in row.items()}
        for begin, end in zip(begins, ends, strict=True)
    ]


def _read_by_somebody(document: dict[str, list[int]]) -> list[int]:
    """The token at each place: where only the router reads one, that."""
    hidden = document.get("router_only_ids", [-1] * len(document["input_ids"]))
    return [own if only < 0 else only for own, only in zip(document["input_ids"], hidden, strict=True)]


def _facts(config: TrainConfig, model: LoLForCausalLM, metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    shape, counts = model.config, count_parameters(model.config)
    last = metrics[-1] if metrics else {}
    seconds = last.get("seconds")
    facts = [
        ("parameters", f"{counts.total / 1e6:.1f} M"),
        ("library", f"{shape.num_experts} blocks over {shape.num_routed_depths} depths"),
        ("fixed layers", f"{shape.num_prelude_layers} + {shape.num_coda_layers}"),
        ("windows", f"{shape.window_size} tokens, shifted by {shape.window_stride}"),
        ("text", config.data.source),
        ("tokens seen", f"{last.get('tokens', 0):,}"),
        ("seed", str(config.seed)),
    ]
    if seconds is not None:
        facts.append(("training time", f"{int(seconds) // 60}:{int(seconds) % 60:02d}"))
    if "busiest_block_share" in last:
        facts.append(("busiest block", f"{100 * last['busiest_block_share']:.0f} % of held-out windows"))
    return facts
