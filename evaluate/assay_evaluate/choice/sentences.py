"""The recommendation in one clause, and what would change it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from assay.records.choice.record import Flip, Pick, Quality
from assay_evaluate.choice import english
from assay_evaluate.choice.curves import NOBODY, Envelope

SURE = 0.8
"""A change to another setup and back is said if each of the two is in so many of the draws, or if the setup before is beaten in
so many at some number of streams between them."""
LEAST_LIKELY = 0.1
"""Share of the draws in which a setup is the best from which it is named among those that cannot be told apart."""


def recommendation(
    names: Sequence[str], best: Envelope, flips: Sequence[Flip], points: Sequence[int], origin: str, *,
    assumed: bool, limited: bool, picks: Sequence[Pick],
) -> str:  # fmt: skip
    """`w4a16 with MTP up to about 15 streams, then nvfp4 with MTP`; before it what was not measured.

    limited: there is an objective.
    """
    prefix = english.QUALITY_ASSUMED if assumed else ""
    ties = [] if origin == "predicted" else _alike(names, best, flips, points)
    return "; ".join([f"{prefix}{english.FROM[origin]}{_clause(names, best, flips, points, picks, limited)}", *ties])


def _alike(names: Sequence[str], best: Envelope, flips: Sequence[Flip], points: Sequence[int]) -> list[str]:
    """Where the setup that is recommended is not known to be the fastest: `at 4 and 8 streams b may be as fast as a`."""
    numbers, between, _ = _without_noise(best, flips)
    places: dict[tuple[int, ...], list[int]] = {}
    for at in points:
        number = numbers[sum(flip.at < at for flip in between)]
        drawn = best.at(at)[1:][best.passed[1:]]
        if number == NOBODY or not len(drawn) or (drawn == number).mean() >= SURE:
            continue
        rivals = [rival for rival in range(len(names)) if rival != number and (drawn == rival).mean() >= LEAST_LIKELY]
        if rivals:
            places.setdefault((number, *rivals), []).append(at)
    clauses = []
    for (number, *rivals), streams in places.items():
        where, setups = english.and_list(list(map(str, streams))), english.and_list([names[rival] for rival in rivals])
        clauses.append(english.AS_FAST.format(streams=english.streams(where), setups=setups, chosen=names[number]))
    return clauses


def _clause(
    names: Sequence[str], best: Envelope, flips: Sequence[Flip], points: Sequence[int], picks: Sequence[Pick], limited: bool
) -> str:  # fmt: skip
    if picks and all(pick.setup is None for pick in picks):
        return english.NOTHING.format(reason=picks[0].why_none)
    numbers, flips, _ = _without_noise(best, flips)
    if len(numbers) == 1:
        few, many = min(points), max(points)
        where = f"at {few}" if few == many else f"from {few} to {many}"
        return f"{names[numbers[0]]} {where} stream{'s' * (many != 1)}"
    parts = []
    for place, (number, flip) in enumerate(itertools.zip_longest(numbers, flips)):
        what = nothing(flips[max(0, place - 1) : place + 1], limited) if number == NOBODY else names[number]
        until = english.UP_TO.format(streams=about(flip)) if flip else ""
        parts.append(f"{english.THEN if place else ''}{what}{until}")
    return ", ".join(parts)


def within_noise(names: Sequence[str], best: Envelope, flips: Sequence[Flip]) -> tuple[str, ...]:
    """What the recommendation leaves out, one clause each."""
    return tuple(
        english.AHEAD_WITHIN_NOISE.format(where=_place(to, fro), setup=names[number])
        for number, to, fro in _without_noise(best, flips)[2]
    )


def _place(to: Flip, fro: Flip) -> str:
    low, high = f"{to.at:.0f}", f"{fro.at:.0f}"
    if low == high:
        return english.ABOUT.format(streams=english.streams(low))
    return english.ABOUT_FROM.format(low=low, high=high)


def _without_noise(best: Envelope, flips: Sequence[Flip]) -> tuple[list[int], list[Flip], list[tuple[int, Flip, Flip]]]:
    """Setups in order and the flips between them, without those to a setup and back that noise may have made; and these."""
    runs = [(int(number), len(list(run))) for number, run in itertools.groupby(best.best[0])]
    kept, between, left_out, at = [number for number, _ in runs], list(flips), [], 1
    begins = [0, *itertools.accumulate(length for _, length in runs)]
    while at < len(kept) - 1:
        to, fro = between[at - 1 : at + 1]
        unsure = any(flip.chance is not None and flip.chance < SURE for flip in (to, fro))
        is_back = kept[at - 1] == kept[at + 1] and NOBODY not in kept[at - 1 : at + 1]
        if is_back and unsure and _may_be_best(best, kept[at - 1], begins[at], begins[at + 1]):
            left_out.append((kept[at], to, fro))
            del kept[at : at + 2], between[at - 1 : at + 1], begins[at : at + 2]
            at = max(1, at - 1)  # what lies around it may be within the noise as well
        else:
            at += 1
    return kept, between, left_out


def _may_be_best(best: Envelope, number: int, begin: int, end: int) -> bool:
    """Whether at all these places it is best in more draws of speeds than would be left if it were surely beaten."""
    drawn = best.best[1:, begin:end][best.passed[1:]]
    return len(drawn) > 0 and bool(((drawn == number).mean(axis=0) > 1 - SURE).all())


def nothing(beside: Sequence[Flip], limited: bool) -> str:
    """What to call nobody, between these flips."""
    if not limited:
        return english.NONE_FOR_QUALITY
    return english.NONE_KNOWN_FOR_LIMITS if any(flip.gap is not None for flip in beside) else english.NONE_FOR_LIMITS


def about(flip: Flip) -> str:
    """`15 streams`, or `15 streams (12 to 18)`, or `8 streams, beyond which nothing is known of w4a16`."""
    text = english.streams(f"{flip.at:.0f}")
    if flip.gap is not None:
        return f"{text}, {flip.gap}"
    if flip.low is None or flip.high is None or round(flip.low) == round(flip.high):
        return text
    return f"{text} ({flip.low:.0f} to {flip.high:.0f})"


def without_speed(quality: Quality) -> str:
    """Of a checkpoint that is undecided, and has no row either."""
    return english.NO_SPEED_EITHER.format(undecided=_undecided(quality))


def _undecided(quality: Quality) -> str:
    run = english.TO_DECIDE.format(what="; ".join(quality.to_run)) if quality.to_run else ""
    return english.UNDECIDED.format(checkpoint=quality.checkpoint, status=quality.word, run=run)


def if_passed(
    quality: Quality, names: Sequence[str], then: Envelope, flips: Sequence[Flip], points: Sequence[int], *, changes: bool,
    limited: bool,
) -> str:  # fmt: skip
    """What to run, and whether it matters."""
    if not changes:
        return english.NOT_CHOSEN_ANYWAY.format(undecided=_undecided(quality))
    clause = _clause(names, then, flips, points, [], limited)
    return english.IF_PASSED.format(undecided=_undecided(quality), recommendation=clause)
