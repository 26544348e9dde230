"""What the page says of a choice (`RUN/choice.json`, which `assay choose` writes): the record, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from assay.quantities import percent_of_events
from assay.records.base import Part
from assay.records.choice.record import Cell, Choice, Pick, Quality


class ChoiceWords(Part):
    """What was recommended, in sentences."""

    sentence: str
    """The recommendation: `Deploy w4a16 with MTP up to about 20 streams, then nvfp4`."""
    picks: tuple[str, ...] = ()
    """One for each operating point."""
    reasons: tuple[str, ...] = ()
    """What was within the noise, what else may be chosen and has no speed, what would change if something undecided passed."""
    not_known: tuple[str, ...] = ()
    """What was missing or predicted."""
    next_steps: tuple[str, ...] = ()


MOST_LINES = 4
"""Of what is not known, on the first screen; the rest is counted."""


def choice_words(record: Choice, undecided: Collection[str] = ()) -> ChoiceWords:
    """undecided: checkpoints of which the page says by itself what would decide them."""
    speeds = {(cell.setup, cell.concurrency): cell for cell in record.cells}
    return ChoiceWords(
        sentence=_sentence(record),
        picks=tuple(_pick(one, speeds) for one in record.picks),
        reasons=(*_capitals(record.within_noise), *_without_speed(record), *record.if_passed[:MOST_LINES]),
        not_known=(*_unknown(record), *_few([*_missing(record), *record.refused, *record.set_aside])),
        next_steps=tuple(
            f"To decide whether {one.checkpoint} may be chosen, {line if line.startswith('measure ') else f'run {line}'}"
            for one in record.quality
            if one.checkpoint not in undecided
            for line in one.to_run
        ),
    )


def _sentence(record: Choice) -> str:
    """Words that stand before a recommendation (`predicted, not measured: `) stay before it; nothing cannot be deployed."""
    is_none = record.recommendation.startswith("nothing ")
    if record.quality_assumed or record.origin == "predicted" or is_none or all(pick.setup is None for pick in record.picks):
        return record.recommendation[:1].upper() + record.recommendation[1:]
    return f"Deploy {record.recommendation}"


def _pick(one: Pick, cells: dict[tuple[str, int], Cell]) -> str:
    """`At 8 streams: w4a16 with MTP, 495.7 tokens/s measured, 488 expected (best with a chance of 93 %)`"""
    at = f"At {one.concurrency} {'stream' if one.concurrency == 1 else 'streams'}"
    if one.setup is None:
        return f"{at}: none, {one.why_none or 'nothing is known'}"
    cell = cells.get((one.setup, one.concurrency))
    speed = "" if cell is None or cell.output_tokens_s is None else f", {cell.output_tokens_s:,.1f} tokens/s"
    if speed and cell is not None and cell.state != "predicted" and (expected := one.expected_tokens_s) is not None:
        speed += f" {cell.state}, {expected.value:,.4g} expected"
    chance = one.chance_best
    sure = "" if chance is None else f" (best with a chance of {percent_of_events(chance)})"
    return f"{at}: {one.setup}{speed}{sure}"


def _without_speed(record: Choice) -> list[str]:
    """Who may be chosen and is not, because nobody knows how fast it is: the recommendation was made without it."""
    with_speed = {setup.checkpoint for setup in record.setups}
    others = [one for one in record.quality if one.may_be_chosen and one.checkpoint not in with_speed]
    if not others:
        return []
    names = and_([f"{one.checkpoint} ({_quality(one)})" for one in others])
    chosen = and_(sorted(with_speed)) or "nothing"
    return [f"Chosen among the speeds of {chosen} alone: {names} could be deployed too, with a speed that is not known"]


def _capitals(clauses: Iterable[str]) -> list[str]:
    return [clause[:1].upper() + clause[1:] for clause in clauses]


def _quality(one: Quality) -> str:
    return "the reference" if one.word == "REFERENCE" else one.word


def and_(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _unknown(record: Choice) -> list[str]:
    noise = [] if record.noise is None else [f"Ranges and chances of speeds: {record.noise}"]
    assumed = ["Quality was assumed: nobody measured that these checkpoints answer like the reference"]
    said = assumed if record.quality_assumed else []
    return said + noise + ([f"The speeds are {record.origin}, not measured here"] if record.origin != "measured" else [])


def _missing(record: Choice) -> list[str]:
    """Setups without a number, each with the numbers of streams, if they are not all, and why."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in record.cells:
        if one.state == "missing" or (one.state == "predicted" and record.origin != "predicted"):
            why = one.why or "no row" if one.state == "missing" else f"only predicted, by {one.source or 'nobody says whom'}"
            found.setdefault((one.setup, why), []).append(one.concurrency)
    same: dict[tuple[str, str], list[str]] = {}
    for (setup, why), streams in found.items():
        every = set(streams) == set(record.concurrency)
        at = "" if every else f" at {', '.join(map(str, streams))} stream{'s' * (streams != [1])}"
        same.setdefault((at, why), []).append(setup)
    return [f"Speed of {and_(setups)}{at}: {why}" for (at, why), setups in same.items()]


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"{more} more things that `assay choose` lists"] if more > 0 else lines
