"""Documents with a label, for measuring what a model makes of it: read from the sources of `text.py`, and as rows.

Without a column of labels, several sources are the labels: `de.txt fr.txt` are documents of "de" and "fr".
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lol.data.text import open_documents
from lol.data.tokenizer import encode_texts, start_id
from lol.errors import UserError


@dataclass(frozen=True)
class LabelledText:
    """A document."""

    text: str
    label: str | None
    router_only: str
    """What only the router reads of it; empty where nothing is."""
    group: str
    """Equal for documents that must not be on two sides of a split: equal texts, parts of one file."""


def read_labelled(
    sources: Sequence[str],
    *,
    text_column: str = "text",
    label_column: str | None = None,
    router_only_column: str | None = None,
    document_chars: int = 2000,
    most: int | None = None,
) -> list[LabelledText]:
    """Read documents in the order of the sources.

    Args:
        sources: As `open_documents` takes them.
        text_column: Column of the text, in rows.
        label_column: Column of the label. Without one, the label is the name of the source where there are several,
            and `None` where there is one.
        router_only_column: Column of what only the router reads.
        document_chars: Where text files are cut.
        most: Keep the first so many of each label; the sources are read to their ends all the same, as a label may
            begin late. Without labels, reading stops after so many.

    Raises:
        UserError: two sources of one name, or what `open_documents` refuses.
    """
    names = [Path(source).stem if len(sources) > 1 else None for source in sources]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice and label_column is None:
        raise UserError(f"two sources are named {twice[0]!r}, and the names are the labels: rename one")
    documents: list[LabelledText] = []
    kept: Counter[str | None] = Counter()
    for source, name in zip(sources, names, strict=True):
        opened = open_documents(
            source,
            text_column=text_column,
            document_chars=document_chars,
            router_only_column=router_only_column,
            label_column=label_column,
        )
        for row in opened:
            label = row.get("label", name)
            if most is None or kept[label] < most:
                documents.append(LabelledText(row["text"], label, row.get("router_only", ""), row["group"]))
                kept[label] += 1
            elif label_column is None:
                break
    return documents


def encode_row(
    tokenizer: PreTrainedTokenizerFast, text: str, router_only: str = "", most: int | None = None
) -> dict[str, list[int]]:
    """The beginning of a document as a row: `input_ids` and, where the router is told something, `router_only_ids`.

    As in packed rows, the document's first token comes first and the router-only ones behind it, which are that first
    token in `input_ids`.

    Args:
        tokenizer: Of `load_tokenizer`.
        text: The document's text; no end is added.
        router_only: What only the router reads.
        most: Keep the first so many tokens.
    """
    ids, told = encode_texts(tokenizer, [text, router_only])
    first = start_id(tokenizer)
    row = {"input_ids": [first, *[first] * len(told), *ids][:most]}
    if told:
        row["router_only_ids"] = [-1, *told, *[-1] * len(ids)][:most]
    return row
