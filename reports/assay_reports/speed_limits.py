"""Honest limits of speed and of the choice: what was not measured, under which conditions the rest holds, what is outdated."""

from __future__ import annotations

from assay.records.speed import SpeedRow
from assay_reports.choice import and_
from assay_reports.run import Run

NO_SPEED = "nothing here says which checkpoint is faster, or what its tokens cost"
CHOSEN_BY = "speed.json has no row, and those of the recommendation stand in choice.json alone"


def speed_unmeasured(run: Run) -> str | None:
    """Of everybody, or of those that have no row that may be compared."""
    if not run.measurements:
        return None
    known = {row.checkpoint for row in _rows(run) if row.origin != "predicted"}
    labels = [m.label for m in run.measurements if not m.is_noise_floor]
    missing = [label for label in labels if label not in known and not (label == _reference(run) and "reference" in known)]
    if not missing:
        return None
    if not known:
        return f"Speed was not measured: {NO_SPEED if run.choice is None else CHOSEN_BY}."
    reasons = {} if run.speed is None else {one.checkpoint: one.reason for one in run.speed.not_measured}
    grouped: dict[str, list[str]] = {}
    for label in missing:
        grouped.setdefault(reasons.get(label, "nobody measured it"), []).append(label)
    return f"Speed was not measured of {'; '.join(f'{and_(names)} ({why})' for why, names in grouped.items())}."


def speed_conditions(run: Run) -> str | None:
    """What the measured rows do not reach beyond."""
    rows = [row for row in _rows(run) if row.origin == "measured"]
    if not rows:
        return None
    streams = sorted({row.concurrency for row in rows})
    flight = f"{streams[0]}" if len(streams) == 1 else f"{streams[0]} to {streams[-1]}"
    parts = [and_(sorted({row.hardware for row in rows})), f"{and_(sorted({row.prompts for row in rows}))} prompts"]
    lengths = [
        f"about {min(found):,.0f}{f' to {max(found):,.0f}' if round(min(found)) != round(max(found)) else ''} tokens of {what}"
        for what, found in (("prompt", _told(rows, "prompt_tokens")), ("reply", _told(rows, "output_tokens")))
        if found
    ]
    few = min(len(row.repeats) for row in rows)
    cpu = " On a CPU the benchmark's client computes on the same cores." if any(row.num_gpus == 0 for row in rows) else ""
    more = " or more" if any(len(row.repeats) != few for row in rows) else ""
    starts = {len({repeat.server_start for repeat in row.repeats}) for row in rows}
    shared = (
        f"Repeats ({few}{more} a point) are of {min(starts)}{' or more' if len(starts) > 1 else ''} starts of each server."
        if min(starts) > 1
        else f"Repeats ({few}{more} a point) share a start of their server: by how much starts differ is assumed (3 %)."
    )
    return (
        f"Speed is of {', '.join([*parts, *lengths])}, {flight} in flight: nothing is known of other hardware, lengths or "
        f"loads. {shared}{cpu}"
    )


def _told(rows: list[SpeedRow], name: str) -> list[float]:
    return [value for row in rows if (value := getattr(row, name)) is not None]


def speed_from_elsewhere(run: Run) -> str | None:
    found: dict[str, list[str]] = {}
    for row in _rows(run):
        if row.origin != "measured":
            found.setdefault(f"{row.origin} ({row.source})", []).append(row.checkpoint)
    said = [f"{and_(list(dict.fromkeys(labels)))}: {how}" for how, labels in found.items()]
    return f"Speeds that were not measured here: {'; '.join(said)}." if said else None


def speed_outdated(run: Run) -> str | None:
    if not run.old_speeds:
        return None
    labels = and_(list(run.old_speeds))
    return f"Speeds of {labels} were measured of other bytes than these and are left out; `assay speed` measures again."


def choice_outdated(run: Run) -> str | None:
    why = run.choice_outdated
    return f"What `assay choose` recommended is left out: {why}; run it again." if why is not None else None


def _rows(run: Run) -> list[SpeedRow]:
    return [row for row in (() if run.speed is None else run.speed.rows) if row.is_comparable]


def _reference(run: Run) -> str | None:
    return None if run.reference is None else run.reference.label
