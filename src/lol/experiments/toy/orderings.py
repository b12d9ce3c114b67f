"""Which of the article's orderings hold, split by split, counted from the records."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from lol.experiments.toy.config import distinct_name
from lol.experiments.toy.records import Record


class Ordering(NamedTuple):
    """Two models, of which the article found the second to be the better one on held-out programs."""

    lower: str
    higher: str
    article: str
    """Its two numbers, held-out %."""


ORDERINGS = (
    Ordering("dense", "given", "25.5 < 38.4"),
    Ordering("given", "given-step-primitive", "38.4 < 60.0"),
    Ordering("given-relabelled", "given", "15.2 < 38.4"),
    Ordering("given-relabelled", "dense", "15.2 < 25.5"),
    Ordering("given-program", "given-relabelled", "0.0 < 15.2"),
    Ordering("learned", "dense", "12.3 < 25.5"),
    Ordering("learned-untied", "dense", "8.3 < 9.8 (round one)"),
    Ordering("learned-8", "dense", "6.6 < 9.8 (round one)"),
    Ordering("looped", "dense", "8.0 < 9.8 (round one)"),
    Ordering("learned", "router-only", "4.2 < 14.8 (round one)"),
    Ordering("router-only", "given", "14.8 < 44.0 (round one)"),
    Ordering("learned-sequence-balance", "dense", "12.4 < 25.5"),
    Ordering("learned-balance-per-depth", "dense", "11.2 < 25.5"),
    Ordering("learned-soft", "learned", "0.2 < 12.3"),
    Ordering("learned-gumbel", "learned", "1.3 < 12.3"),
    Ordering("dense-lr1e-3", "given-lr1e-3", "12.8 < 19.4"),
    Ordering("learned-lr1e-3", "dense-lr1e-3", "9.0 < 12.8"),
    Ordering("dense-wd0.1", "given-wd0.1", "23.8 < 40.5"),
)


class Outcome(NamedTuple):
    """An ordering on the records of one split, seed against the same seed."""

    holds: int
    """In how many seeds."""
    seeds: int
    difference: float
    """Mean of higher minus lower, in points."""

    @property
    def words(self) -> str:
        count = f"{self.holds} of {self.seeds} seeds, {self.difference:+.1f}"
        if self.holds == self.seeds:
            return f"holds ({count})"
        return f"on average ({count})" if self.difference > 0 else f"**does not hold** ({count})"


def compare(ordering: Ordering, records: Sequence[Record]) -> Outcome | None:
    """What the records of one set of primitives and one split say of an ordering; `None` without a common seed."""
    lower, higher = (_by_seed(model, records) for model in ordering[:2])
    differences = [higher[seed] - lower[seed] for seed in lower.keys() & higher.keys()]
    if not differences:
        return None
    return Outcome(sum(d > 0 for d in differences), len(differences), statistics.mean(differences))


def orderings_section(groups: dict[str, Sequence[Record]]) -> str:
    """A row for each ordering, a column for each group of records, and what comes of them in words."""
    columns = list(groups)
    lines = [
        "## The article's orderings",
        "",
        "Held-out accuracy of two models, seed by seed; the mean difference in points.",
        "",
        f"| article | its numbers | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    tally: dict[str, list[Outcome]] = {name: [] for name in columns}
    for ordering in ORDERINGS:
        outcomes = {name: compare(ordering, records) for name, records in groups.items()}
        for name, outcome in outcomes.items():
            tally[name] += [outcome] if outcome else []
        cells = [outcome.words if outcome else "–" for outcome in outcomes.values()]
        if any(outcomes.values()):
            lines.append(f"| {ordering.lower} < {ordering.higher} | {ordering.article} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(_sum_up(name, tally[name], groups[name]) for name in columns), ""])


def _sum_up(name: str, outcomes: Sequence[Outcome], records: Sequence[Record]) -> str:
    whole = sum(outcome.holds == outcome.seeds for outcome in outcomes)
    average = sum(outcome.difference > 0 for outcome in outcomes)
    said = f"- {name}: of {len(outcomes)} orderings {average} hold on average, {whole} of them in every seed."
    separations = [r["trained"]["separation"] for r in records if r["config"]["routing"] == "learned"]
    if separations:
        said += f" Separation of the learned routers {min(separations):.2f}-{max(separations):.2f} (article 0.34-0.51)."
    return said


def _by_seed(model: str, records: Sequence[Record]) -> dict[int, float]:
    """Held-out accuracy of each seed; on distinct programs the model has a name of its own."""
    names = (model, distinct_name(model))
    return {record["seed"]: record["held_out"]["accuracy"] for record in records if record["model"] in names}
