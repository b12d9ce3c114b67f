"""Discoveries with one thing taken away, and discoveries of which more is asked: what `docs/discovery.md` reports.

Each is `ord` (or `mix`) but for what its line says, so that its row stands beside theirs.
"""

from dataclasses import replace

from lol.experiments.toy.discovery.config import RULES, DiscoverConfig, digits_settling
from lol.experiments.toy.discovery.crossfit import RepairConfig
from lol.experiments.toy.task import ARTICLE, DISTINCT

_ORD, _MIX = RULES["ord"], RULES["mix"]
_OTHER_LENGTHS = (1, 2, 4, 5, 6, 8, 9, 16)
_TIED = replace(_ORD, rule="pc", tied=True, lengths_tested=_OTHER_LENGTHS)
_FOUR_STEPS = replace(_ORD, toy=replace(_ORD.toy, steps=4, num_held_out=64), explore_steps=2400, settle_steps=2100)
_NOISE = replace(_ORD.toy, between="noise")
_AT_RANDOM = replace(_ORD.toy, between="digits at random")
_SETTLING = replace(digits_settling(_ORD), lengths_tested=_OTHER_LENGTHS)
_SHARP = replace(_MIX, rule="sum", entropy=0.0, first_spread=1.0, path_balance=0.3)
_WITH_SAME = replace(_ORD.toy, primitives=(*ARTICLE, "same"), num_blocks=5, num_held_out=32)

TAKEN_AWAY: dict[str, DiscoverConfig] = {
    "ord-path-credit": replace(_ORD, credit="whole path"),
    "mix-path-credit": replace(_MIX, credit="whole path"),
    "ord-weight-credit": replace(_ORD, credit="weight"),
    "mix-weight-credit": replace(_MIX, credit="weight"),
    "sum": replace(_MIX, rule="sum"),
    "ord-order-first": replace(_ORD, order_from=0.0),
    "pc-given": replace(_ORD, rule="pc", table="given"),
    "ord-given": replace(_ORD, table="given"),
}
"""Credit of whole paths; the article's gradient of the weight; a router that adds up what all instructions say; the
order learned from the start; each primitive's own block given, read in order, and under orders that are learned as
`ord` learns them: is `ord` above its given routing because of the routing, or of the random orders?"""

BEYOND: dict[str, DiscoverConfig] = {
    "sum-sharp": _SHARP,
    "sum-repaired": replace(_SHARP, repair=RepairConfig()),
    "mix-8": replace(_MIX, toy=replace(_MIX.toy, num_blocks=8)),
    "ord-four-steps": _FOUR_STEPS,
    "ord-four-steps-tied": replace(_FOUR_STEPS, tied=True),
    "ord-four-steps-tied-digits-settling": replace(digits_settling(_FOUR_STEPS), tied=True),
    "ord-maps": replace(_ORD, readings="maps"),
    "ord-maps-same": replace(_ORD, readings="maps", toy=_WITH_SAME),
    "ord-lengths-tested": replace(_ORD, lengths_tested=_OTHER_LENGTHS),
    "pc-tied": _TIED,
    "pc-lengths": replace(_TIED, lengths=(1, 2, 3)),
    "pc-two-lengths": replace(_TIED, lengths=(2, 3)),
    "pc-digits-at-random": replace(_TIED, toy=_AT_RANDOM),
    "pc-hard-digits-at-random": replace(_TIED, toy=replace(_ORD.toy, between="hard digits at random")),
    "pc-two-lengths-digits-at-random": replace(_TIED, lengths=(2, 3), toy=_AT_RANDOM),
    "ord-noise": replace(_ORD, toy=_NOISE, lengths_tested=_OTHER_LENGTHS),
    "ord-digits": replace(_ORD, toy=replace(_ORD.toy, between="digits"), lengths_tested=_OTHER_LENGTHS),
    "ord-digits-at-random": replace(_ORD, toy=_AT_RANDOM, lengths_tested=_OTHER_LENGTHS),
    "ord-tied": replace(_ORD, tied=True, lengths_tested=_OTHER_LENGTHS),
    "ord-digits-settling": _SETTLING,
    "ord-tied-digits-settling": replace(_SETTLING, tied=True),
    "ord-tied-hard-digits-settling": replace(
        digits_settling(_ORD, "hard digits at random"), tied=True, lengths_tested=_OTHER_LENGTHS
    ),
    "ord-noise-distinct": replace(_ORD, toy=replace(_NOISE, primitives=DISTINCT), lengths_tested=_OTHER_LENGTHS),
    "ord-digits-at-random-distinct": replace(
        _ORD, toy=replace(_AT_RANDOM, primitives=DISTINCT), lengths_tested=_OTHER_LENGTHS
    ),
    "pc-given-noise": replace(TAKEN_AWAY["pc-given"], toy=_NOISE, lengths_tested=_OTHER_LENGTHS),
    "pc-given-digits-at-random": replace(TAKEN_AWAY["pc-given"], toy=_AT_RANDOM, lengths_tested=_OTHER_LENGTHS),
}
"""A router that adds up all instructions, sharp from the start and rewarded for using all paths, and the same with its
paths repaired by what fresh libraries make of them.

More blocks than primitives; programs of four steps (192 of 256 trained, half as many steps again), also with one
table for all places, and with the state written as digits once the router is frozen; any reading map, on the
article's task and with a primitive that does nothing; programs of other lengths than the trained ones; and a code of
the state that all steps share: by training on other lengths, by noise, or by writing the state as digits, from the
start or once the router is frozen, as probabilities or as hard digits, under one table for all places or one each; on
the distinct primitives and under the given table too.

Programs of one length S alone leave the code of the state after 1 to S - 1 steps free. Written as digits, it is the
input's again after S steps: blocks may then work for lengths that S divides, and no others. Two lengths without a
common divisor leave nothing free, without a single step among them."""
