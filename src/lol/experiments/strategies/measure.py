"""What a model trained on strategies writes when its router is told one, told none, and when a path is forced.

All writing is greedy. Puzzles that were trained on, under whichever strategy, are left out, and so are those on which
two strategies write the same: there a trace does not say whose it is. Both are counted.

- **told**: the router reads the strategy's token.
- **untold**: the filler in the token's place, and the router is told nothing.
- **forced**: as untold, with the strategy's mode path forced on every window.
- **mixed**: as forced, by the first depths of one strategy's mode path and the last ones of another's. If paths are
  built of parts that mean something by themselves, what comes out is a mixture, or either's; if only whole paths do,
  nothing does.

The article does not say how much a forced block weighs. Here each of `WEIGHTS` is tried: the router's own probability
of it, though the router is told nothing; its mean probability where the strategy was told; and 1.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from lol.data.tokenizer import encode_documents, encode_texts, start_id
from lol.experiments.harness import Numbers
from lol.experiments.strategies.corpus import CorpusConfig, puzzles_of, trained_on
from lol.experiments.strategies.grading import Grade, grade, tally
from lol.experiments.strategies.puzzle import Puzzle, distinct
from lol.model.lm import LoLForCausalLM
from lol.paths.force import force_mode, generate_rows
from lol.paths.mode import ModePath, mode_paths
from lol.train.loading import load_model

WEIGHTS: tuple[Literal["router", "mode"] | float, ...] = ("router", "mode", 1.0)
# Puzzles on which each mixture of two paths is tried, and what its blocks weigh.
_MIXED_PUZZLES, _MIXED_WEIGHT = 20, "mode"
ANOTHER, UNSOLVED = "(another way)", "(unsolved)"
_BATCH = 128
Row = dict[str, list[int]]


@dataclass(frozen=True)
class Case:
    """A puzzle that tells strategies apart."""

    instance: Any
    prompt: list[int]
    traces: Mapping[str, list[str]]


def measure_run(puzzle: Puzzle, corpus: CorpusConfig, folder: Path, run: Path, num_mixtures: int) -> Numbers:
    """Measure a finished run.

    Args:
        puzzle, corpus, folder: What it was trained on, and where that lies.
        run: Its folder.
        num_mixtures: So many mixtures of two mode paths are forced, drawn from all of them.
    """
    model, tokenizer = load_model(run)
    writer = Writer(puzzle, model, tokenizer)
    drawn = puzzles_of(puzzle, corpus, "test")
    fresh = [one for one, seen in zip(drawn, trained_on(folder, puzzle, drawn), strict=True) if not seen]
    cases = [case for case in map(writer.case, fresh) if distinct(list(case.traces.values()))]
    validation = puzzles_of(puzzle, corpus, "validation")
    examples = {name: [writer.document(one, name) for one in validation] for name in puzzle.strategies}
    modes = mode_paths(model, examples, batch_size=_BATCH)
    numbers: Numbers = {
        "puzzle": repr(puzzle),
        "strategies": list(puzzle.strategies),
        "drawn": len(drawn),
        "trained_on": len(drawn) - len(fresh),
        "alike": len(fresh) - len(cases),
        "kept": len(cases),
        "mode_paths": {
            name: {"blocks": mode.blocks, "probabilities": mode.probabilities} for name, mode in modes.items()
        },
    }
    if not cases:
        return numbers
    asked = [name for name in puzzle.strategies for _ in cases]
    all_cases = cases * len(puzzle.strategies)
    told = writer.write(all_cases, asked)
    untold = writer.write(cases, None)
    forced = {}
    for weight in WEIGHTS:
        grades = [one for name in puzzle.strategies for one in writer.force(cases, modes[name], weight)]
        forced[str(weight)] = tally(asked, grades, puzzle.strategies)
    return numbers | {
        "told": tally(asked, told, puzzle.strategies),
        "untold": tally(asked, untold * len(puzzle.strategies), puzzle.strategies),
        "forced": forced,
        "mixed": _mix(writer, cases[:_MIXED_PUZZLES], modes, num_mixtures),
    }


class Writer:
    """A model that is asked to solve puzzles."""

    def __init__(self, puzzle: Puzzle, model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast):
        self.puzzle = puzzle
        self.model = model
        self.tokenizer = tokenizer
        self.start = start_id(tokenizer)
        self.end: int = encode_documents(tokenizer, [""])[0][-1]
        self.token_of = {name: encode_texts(tokenizer, [name])[0][0] for name in puzzle.strategies}

    def case(self, instance: Any) -> Case:
        [prompt] = encode_texts(self.tokenizer, [" ".join(self.puzzle.prompt(instance))])
        traces = {name: self.puzzle.trace(instance, name) for name in self.puzzle.strategies}
        return Case(instance, prompt, traces)

    def document(self, instance: Any, strategy: str) -> Row:
        """The whole document as training has it."""
        words = [*self.puzzle.prompt(instance), *self.puzzle.trace(instance, strategy)]
        [ids] = encode_documents(self.tokenizer, [" ".join(words)])
        return self._row(ids[1:], strategy)

    def prompt_row(self, case: Case, strategy: str) -> Row:
        """The beginning of that document, as far as the puzzle is stated."""
        return self._row(case.prompt, strategy)

    def write(self, cases: Sequence[Case], asked: Sequence[str] | None) -> list[Grade]:
        """Let the model solve each puzzle by the strategy asked for, or with none told, and judge what it writes."""
        # Some name has to stand behind the filler's place; nobody reads it.
        names = [self.puzzle.strategies[0]] * len(cases) if asked is None else asked
        rows = [self.prompt_row(case, name) for case, name in zip(cases, names, strict=True)]
        written = generate_rows(
            self.model,
            rows,
            told=asked is not None,
            # One more than needed: whoever writes it has not ended in time.
            max_new_tokens=self.puzzle.longest_trace + 1,
            end=self.end,
            batch_size=_BATCH,
        )
        words = [self.tokenizer.convert_ids_to_tokens(ids) for ids in written]
        return [grade(self.puzzle, case.instance, own, case.traces) for case, own in zip(cases, words, strict=True)]

    def force(self, cases: Sequence[Case], path: ModePath, weight: Literal["router", "mode"] | float) -> list[Grade]:
        """The same with a path forced and nothing told."""
        with force_mode(self.model, path, weight=weight):
            return self.write(cases, None)

    def _row(self, ids: Sequence[int], strategy: str) -> Row:
        """A document's beginning with the router-only token where `lol.data.packing` has it."""
        return {
            "input_ids": [self.start, self.start, *ids],
            "router_only_ids": [-1, self.token_of[strategy], *[-1] * len(ids)],
        }


def _came_out(one: Grade) -> str:
    """The strategy whose trace it is to the word, `ANOTHER` that solves the puzzle, or `UNSOLVED`."""
    if one.strategy is None:
        return UNSOLVED
    return one.strategy if one.exact else ANOTHER


def _mix(writer: Writer, cases: Sequence[Case], modes: Mapping[str, ModePath], number: int) -> list[Numbers]:
    """Force the first depths of one mode path and the rest of another, and count what comes out."""
    depths = len(next(iter(modes.values())).blocks)
    own = {mode.blocks for mode in modes.values()}
    found = []
    for front, back in itertools.permutations(modes, 2):
        for cut in range(1, depths):
            first, last = modes[front], modes[back]
            blocks = first.blocks[:cut] + last.blocks[cut:]
            probabilities = first.probabilities[:cut] + last.probabilities[cut:]
            # A mixture that is some strategy's own path would show nothing.
            if blocks not in own:
                found.append((front, back, cut, ModePath(blocks, probabilities, 0)))
    chosen = sorted(np.random.default_rng(0).permutation(len(found))[:number].tolist())
    results = []
    for front, back, cut, path in (found[place] for place in chosen):
        grades = writer.force(cases, path, _MIXED_WEIGHT)
        produced = Counter(_came_out(one) for one in grades)
        results.append(
            {
                "front": front,
                "back": back,
                "cut": cut,
                "blocks": path.blocks,
                "produced": dict(sorted(produced.items())),
            }
        )
    return results
