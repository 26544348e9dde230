"""What the page says of a choice (`RUN/choice.json`, which `assay choose` writes). Its English is in `sentences/choice.py`."""

from __future__ import annotations

from collections.abc import Collection

from assay.quantities import capital, percent_of_events
from assay.records.choice.record import Cell, Choice, Pick
from assay_reports.schema import ChoiceWords
from assay_reports.sentences import choice as english
from assay_reports.text import and_list, count_of, grouped

MOST_LINES = 4
"""Of what is not known, on the first screen; the rest is counted."""


def choice_words(record: Choice, undecided: Collection[str] = ()) -> ChoiceWords:
    """undecided: checkpoints of which the page says by itself what would decide them."""
    cells = {(cell.setup, cell.concurrency): cell for cell in record.cells}
    unknown = [english.QUALITY_ASSUMED] if record.quality_assumed else []
    unknown += [] if record.noise is None else [english.NOISE.format(noise=record.noise)]
    unknown += [] if record.origin == "measured" else [english.SPEEDS_FROM_ELSEWHERE.format(origin=record.origin)]
    missing = [*_missing(record), *record.refused, *record.set_aside]
    if len(missing) > MOST_LINES:
        missing = [*missing[:MOST_LINES], english.MORE.format(number=len(missing) - MOST_LINES)]
    return ChoiceWords(
        sentence=_sentence(record),
        picks=tuple(_pick(pick, cells) for pick in record.picks),
        reasons=(*map(capital, record.within_noise), *_without_speed(record), *record.if_passed[:MOST_LINES]),
        not_known=(*unknown, *missing),
        next_steps=tuple(
            english.TO_DECIDE.format(
                checkpoint=quality.checkpoint, action=line if line.startswith("measure ") else english.RUN.format(what=line)
            )
            for quality in record.quality
            if quality.checkpoint not in undecided
            for line in quality.to_run
        ),
    )


def _sentence(record: Choice) -> str:
    """Words that stand before a recommendation (`predicted, not measured: `) stay before it; nothing cannot be deployed."""
    is_none = record.recommendation.startswith("nothing ") or all(pick.setup is None for pick in record.picks)
    if record.quality_assumed or record.origin == "predicted" or is_none:
        return capital(record.recommendation)
    return english.DEPLOY.format(recommendation=record.recommendation)


def _pick(pick: Pick, cells: dict[tuple[str, int], Cell]) -> str:
    """`At 8 streams: w4a16 with MTP, 495.7 tokens/s measured, 488 expected (best with a chance of 93 %)`"""
    streams = count_of(pick.concurrency, "stream")
    if pick.setup is None:
        return english.NO_PICK.format(streams=streams, reason=pick.why_none or english.NOTHING_KNOWN)
    cell, speed = cells.get((pick.setup, pick.concurrency)), ""
    if cell is not None and cell.output_tokens_s is not None:
        speed = english.PICK_SPEED.format(speed=f"{cell.output_tokens_s:,.1f}")
        if cell.state != "predicted" and (expected := pick.expected_tokens_s) is not None:
            speed += english.PICK_EXPECTED.format(state=cell.state, expected=f"{expected.value:,.4g}")
    chance = pick.chance_best
    sure = "" if chance is None else english.PICK_CHANCE.format(chance=percent_of_events(chance))
    return english.PICK.format(streams=streams, setup=pick.setup, speed=speed, chance=sure)


def _without_speed(record: Choice) -> list[str]:
    """Who may be chosen and is not, because nobody knows how fast it is: the recommendation was made without it."""
    with_speed = sorted({setup.checkpoint for setup in record.setups})
    others = [
        english.WITH_QUALITY.format(
            checkpoint=quality.checkpoint if quality.variant is None else f"{quality.checkpoint}, which is {quality.variant},",
            quality=english.THE_REFERENCE if quality.word == "REFERENCE" else quality.word,
        )
        for quality in record.quality
        if quality.may_be_chosen and quality.checkpoint not in with_speed
    ]
    if not others:
        return []
    return [english.WITHOUT_SPEED.format(chosen=and_list(with_speed) or english.NOTHING, others=and_list(others))]


def _missing(record: Choice) -> list[str]:
    """Setups without a number, each with the numbers of streams, if they are not all, and the reason."""
    gaps = []
    for cell in record.cells:
        if cell.state == "missing":
            gaps.append(((cell.setup, cell.why or english.NO_ROW), cell.concurrency))
        elif cell.state == "predicted" and record.origin != "predicted":
            reason = english.ONLY_PREDICTED.format(source=cell.source or english.NOBODY_SAYS)
            gaps.append(((cell.setup, reason), cell.concurrency))
    lines = []
    for (setup, reason), streams in grouped(gaps).items():
        noun, numbers = "stream" if streams == [1] else "streams", ", ".join(map(str, streams))
        is_everywhere = set(streams) == set(record.concurrency)
        lines.append((("" if is_everywhere else english.MISSING_AT.format(streams=numbers, noun=noun), reason), setup))
    return [
        english.MISSING.format(setups=and_list(setups), at=at, reason=reason) for (at, reason), setups in grouped(lines).items()
    ]
