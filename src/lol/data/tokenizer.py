"""Tokenizers: a byte-level BPE trained here, one of whole words, or any fast Hugging Face tokenizer from a folder.

The one convention about the ends of a text, everywhere in this package: **a document is BOS + tokens + EOS, and
`tokenizer(text)` gives BOS + tokens**. So a prompt is the beginning of a document. Packing adds the EOS
(`encode_documents`). Where a tokenizer has no BOS, its EOS stands in both places: it separates documents, and a prompt
begins as if a document had just ended. `load_tokenizer` sets a tokenizer to this convention whatever its own was.

Text that looks like a special token ("<|eos|>" in a document) is text: `encode_documents` never makes a special token
of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lol.errors import UserError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# 256 bytes and three special tokens.
MIN_VOCAB_SIZE = 259
# A BPE changes little with more text than this, and training stays at seconds.
SAMPLE_CHARS = 20_000_000


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: every text can be written in it, and decoding gives the text back exactly.

    Args:
        texts: read until `SAMPLE_CHARS` characters are seen, the rest is not.
        vocab_size: tokens in all, the three special ones included (ids 0 <|bos|>, 1 <|eos|>, 2 <|pad|>) and the 256
            bytes. Little text may yield fewer: `len(tokenizer)` is what the model needs.

    Raises:
        UserError: `vocab_size` has no room for every byte, or there is no text.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"the vocabulary size is {vocab_size}; a byte-level one needs at least {MIN_VOCAB_SIZE}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = _Sample(texts)
    backend.train_from_iterator(sample, trainer)
    if sample.chars == 0:
        raise UserError("there is no text to train a tokenizer on; give a source that holds some")
    return _with_convention(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    )


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, each a token, which text has between white space; for languages with few words.

    The ids are those of `train_tokenizer` for the special tokens, then 3, 4, … for the words in their order. Text with
    another word cannot be written in it: the tokenizer raises.

    Raises:
        UserError: a word twice, or one that white space would cut.
    """
    vocabulary = {word: index for index, word in enumerate((BOS, EOS, PAD, *words))}
    odd = next((word for word in words if word.split() != [word]), None)
    if odd is not None or len(vocabulary) != len(words) + 3:
        raise UserError(f"{odd!r} is no single word" if odd is not None else "a word is given twice: give each once")
    backend = Tokenizer(models.WordLevel(vocabulary))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_convention(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder, ours or any fast Hugging Face one, offline and without running its code.

    It comes back set to this module's convention: `tokenizer(text)` begins with BOS (EOS where there is none) and
    never ends with EOS.

    Raises:
        UserError: no such folder, no fast tokenizer in it, or one without an EOS token.
    """
    if not Path(path).is_dir():
        raise UserError(f"{path}: no such folder; give one that holds a tokenizer.json, or train one: lol tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception, and broken files raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path}: no tokenizer can be loaded from it ({reason}); it must hold tokenizer.json and"
            " tokenizer_config.json, as save_pretrained writes them"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{path}: {type(tokenizer).__name__} has no fast version (tokenizer.json); save one first")
    if tokenizer.eos_token is None:
        raise UserError(
            f'{path}: this tokenizer has no EOS token, which ends a document; add "eos_token": "<a token of its'
            ' vocabulary>" to tokenizer_config.json'
        )
    return _with_convention(tokenizer)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str, *, begins: bool = True) -> list[int]:
    """The token ids of a text to go on from: BOS before them where it begins a document.

    Raises:
        UserError: the text has words that the tokenizer cannot write.
    """
    try:
        return list(tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"])
    # tokenizers raises nothing narrower.
    except Exception as error:
        raise UserError(
            f"this model's tokenizer cannot write the text ({error}): use the words that the model was trained on"
        ) from error


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of whole documents, BOS + tokens + EOS each; one call of the tokenizer for all of them.

    Raises:
        UserError: the tokenizer has no EOS token.
    """
    start, end = start_id(tokenizer), _id_of(tokenizer, "eos_token")
    return [[start, *ids, end] for ids in encode_texts(tokenizer, texts)]


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of texts, nothing added; one call of the tokenizer for all of them."""
    if not texts:
        return []
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        verbose=False,
    )
    return list(encoded["input_ids"])


class _Sample:
    """The first `SAMPLE_CHARS` characters of some texts, and how many there were."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = texts
        self.chars = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.chars += len(text)
            yield text
            if self.chars >= SAMPLE_CHARS:
                return


def start_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that begins a document: BOS, or EOS where there is none."""
    return _id_of(tokenizer, "eos_token" if tokenizer.bos_token is None else "bos_token")


def _id_of(tokenizer: PreTrainedTokenizerFast, name: str) -> int:
    token = getattr(tokenizer, name)
    found = tokenizer.backend_tokenizer.token_to_id(str(token))
    if found is None:
        raise UserError(f"the tokenizer's {name} is {token}, which its vocabulary does not hold; use load_tokenizer")
    return found


def _with_convention(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer in the plain class, which keeps the post-processor as it is set (model classes rebuild theirs)."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: str(getattr(tokenizer, name)) for name in names if getattr(tokenizer, name) is not None}
    start = special.get("bos_token", special["eos_token"])
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, start_id(tokenizer))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], padding_side="left", **special
    )
