"""Speed and the choice that rests on it."""

from assay.records.speed import SpeedRow
from assay_reports.limits.entries import with_entries
from assay_reports.run import Run
from assay_reports.sentences import limits as english
from assay_reports.text import and_list, grouped


def speed_unmeasured(run: Run) -> str | None:
    """Of everybody, or of those that have no row that may be compared."""
    if not run.measurements:
        return None
    known = {row.checkpoint for row in _comparable(run) if row.origin != "predicted"}
    measured = [m for m in run.measurements if not m.is_noise_floor]
    missing = [m.label for m in measured if m.label not in known and not (m.is_reference and "reference" in known)]
    if not missing:
        return None
    if not known:
        return english.NO_SPEED.format(what=english.NOTHING_SAYS if run.choice is None else english.CHOSEN_BY)
    reasons = {} if run.speed is None else {gap.checkpoint: gap.reason for gap in run.speed.not_measured}
    by_reason = grouped((reasons.get(label, english.NOBODY_MEASURED), label) for label in missing)
    return with_entries(
        english.SPEED_UNMEASURED,
        (english.SPEED_UNMEASURED_ENTRY.format(labels=and_list(labels), reason=reason) for reason, labels in by_reason.items()),
    )


def speed_conditions(run: Run) -> str | None:
    """What the measured rows do not reach beyond."""
    rows = [row for row in _comparable(run) if row.origin == "measured"]
    if not rows:
        return None
    conditions = [
        and_list(sorted({row.hardware for row in rows})),
        english.PROMPT_KINDS.format(kinds=and_list(sorted({row.prompts for row in rows}))),
    ]
    for template, lengths in (
        (english.PROMPT_LENGTH, [row.prompt_tokens for row in rows]),
        (english.REPLY_LENGTH, [row.output_tokens for row in rows]),
    ):
        if known := [length for length in lengths if length is not None]:
            conditions.append(template.format(lengths=_range(f"{min(known):,.0f}", f"{max(known):,.0f}")))
    streams = [row.concurrency for row in rows]
    repeats = [len(row.repeats) for row in rows]
    starts = [len({repeat.server_start for repeat in row.repeats}) for row in rows]
    return english.SPEED_CONDITIONS.format(
        conditions=", ".join(conditions),
        in_flight=_range(f"{min(streams)}", f"{max(streams)}"),
        starts=(english.SEVERAL_STARTS if min(starts) > 1 else english.ONE_START).format(
            repeats=_at_least(repeats), starts=_at_least(starts)
        ),
        cpu=english.ON_A_CPU if any(row.num_gpus == 0 for row in rows) else "",
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _at_least(counts: list[int]) -> str:
    return f"{min(counts)}{english.OR_MORE if len(set(counts)) > 1 else ''}"


def speed_from_elsewhere(run: Run) -> str | None:
    by_origin = grouped(
        (f"{row.origin} ({row.source})", row.checkpoint) for row in _comparable(run) if row.origin != "measured"
    )
    return with_entries(
        english.SPEED_FROM_ELSEWHERE,
        (f"{and_list(list(dict.fromkeys(labels)))}: {origin}" for origin, labels in by_origin.items()),
    )


def speed_outdated(run: Run) -> str | None:
    return english.SPEED_OUTDATED.format(labels=and_list(run.old_speeds)) if run.old_speeds else None


def choice_outdated(run: Run) -> str | None:
    return None if run.choice_outdated is None else english.CHOICE_OUTDATED.format(reason=run.choice_outdated)


def _comparable(run: Run) -> list[SpeedRow]:
    return [row for row in (() if run.speed is None else run.speed.rows) if row.is_comparable]
