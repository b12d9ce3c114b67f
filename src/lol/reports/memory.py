"""The table of what a run needs on each GPU, which `lol cost` and `lol recipe show` print."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from lol.train.config import TrainConfig
from lol.train.memory import TrainingMemory, training_memory
from lol.train.progress import shorten

WORLD_SIZES = (1, 8)
"""GPUs for which the need is shown."""


def memory_numbers(config: TrainConfig) -> dict[str, Any]:
    """Bytes on each GPU, by number of GPUs and precision; and the same with activation checkpointing."""
    return {
        "rows_on_a_gpu": _rows(config),
        "gpus": {
            str(world_size): {
                "bf16" if bf16 else "float32": asdict(memory)
                | {"total": memory.total, "total_with_activation_checkpointing": checkpointed.total}
                for bf16 in (False, True)
                for memory, checkpointed in [_both(config, world_size, bf16)]
            }
            for world_size in WORLD_SIZES
        },
    }


def memory_table(config: TrainConfig) -> Table:
    """The same as a table, at most 80 columns wide."""
    table = Table(box=None, pad_edge=False)
    table.add_column("memory\nof a GPU")
    columns = [(world_size, bf16) for world_size in WORLD_SIZES for bf16 in (False, True)]
    for world_size, bf16 in columns:
        gpus = "1 GPU" if world_size == 1 else f"each of {world_size}"
        table.add_column(f"{gpus},\n{'bf16' if bf16 else 'float32'}", justify="right")
    both = [_both(config, *column) for column in columns]
    for part in asdict(both[0][0]):
        table.add_row(part, *(shorten(getattr(memory, part), "B") for memory, _ in both))
    table.add_row("together", *(shorten(memory.total, "B") for memory, _ in both))
    table.add_row("  checkpointing", *(shorten(memory.total, "B") for _, memory in both))
    return table


def memory_note(config: TrainConfig) -> str:
    """What the table takes for granted."""
    rows, most = _rows(config), WORLD_SIZES[-1]
    step = config.batch_size * config.accumulation
    noun = "row" if rows == 1 else "rows"
    note = f"FSDP2, an estimate for {rows:,} {noun} of {config.data.context_length:,} tokens in a pass on each GPU"
    if rows == config.batch_size or step % rows:
        return note
    return f"{note}: batch_size / {most}. On 1 GPU: --batch-size {rows} --accumulation {step // rows}"


def _rows(config: TrainConfig) -> int:
    """Rows of a pass on a GPU: those of the largest world, so that all columns have the same."""
    return -(-config.batch_size // WORLD_SIZES[-1])


def _both(config: TrainConfig, world_size: int, bf16: bool) -> tuple[TrainingMemory, TrainingMemory]:
    """Without and with activation checkpointing."""
    rows = _rows(config)
    return (
        training_memory(config, world_size, rows, bf16=bf16),
        training_memory(config, world_size, rows, bf16=bf16, checkpointing=True),
    )
