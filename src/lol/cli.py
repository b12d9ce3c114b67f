"""`lol …`: what the command line shows, finds and complains of; the verbs are in `verbs/`."""

import os
import sys
from collections.abc import Sequence

from huggingface_hub.errors import StrictDataclassError

from lol.errors import UserError, is_whole_text
from lol.verbs import VERBS

USAGE = """\
usage: lol VERB [flags]          lol VERB --help lists a verb's flags

  train          train a model: lol train --run runs/mine --data my-text.txt
  watch          draw a run while it trains: lol watch runs/demo
  recipe list|show   the recipes; all that one decides: lol recipe show math-1b
  generate       continue a prompt, or what you type; --path forces blocks
  serve          OpenAI's completions, with paths: lol serve --model runs/demo
  studio         a page: see a path, change it, watch what happens
  paths show     print the block of every window and depth of a text
  paths report   write a run's report.html: lol paths report --run runs/demo
  paths utilisation|map|probe|mode|force   what paths tell of labelled text
  export         write a run's newest model as a folder for transformers
  tokenizer      train a byte-level BPE
  cost           parameters, FLOPs, bytes: lol cost demo --model.num-experts 16
  toy run        train a model of the article's toy: lol toy run given --seed 1
  toy all        all runs of the toy that are not done, side by side
  toy table      the toy's table and figures, beside the article's numbers
  toy discover   train a router that finds the primitives: pc, mix, ord
  toy play|codes   see a program's path and states; what states say of digits
  experiment     do one of the article's: lol experiment huginn --fast
  experiment list   which there are, the data each wants, what was published
  bench core|decode|train|toy   time a part against its alternatives
  bench gpu      check a GPU against the CPU, and run all of this on it
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code.

    0, also where the reader of the output has left (`lol … | head`); 2 after a mistake in the input, whose message has
    gone to standard error; 130 after Ctrl-C, 143 after a training run that SIGTERM stopped. Raises SystemExit for
    --help (0) and for flags that cannot be read (2).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run_verb(args)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", code=130)
    except BrokenPipeError:
        # Nobody reads what is still buffered, and the interpreter would complain of it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run_verb(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    asks = args[1:2] in (["-h"], ["--help"])
    if asks and tuple(args[:1]) not in VERBS and any(args[0] == words[0] for words in VERBS):
        print(USAGE)
        return 0
    broken = [arg for arg in args if not is_whole_text(arg)]
    if broken:
        return _complain(f"{broken[0]!r} is not UTF-8 text: write it in UTF-8")
    for words, verb in VERBS.items():
        if tuple(args[: len(words)]) == words:
            try:
                return verb(args[len(words) :])
            except UserError as error:
                return _complain(str(error))
            except StrictDataclassError as error:
                return _complain(f"{error.__cause__ or error} ({error})")
            except OSError as error:
                if error.filename is None or isinstance(error, BrokenPipeError):
                    raise
                return _complain(f"{error.filename}: {error.strerror}; choose a file that can be read or written there")
    return _complain(f"there is no verb {' '.join(args[:2])!r}\n\n{USAGE}")


def _complain(message: str, code: int = 2) -> int:
    print(f"lol: {message}", file=sys.stderr)
    return code
