"""Headings that say what was found, one sentence for each section, made from the numbers of a report.

A loss is named where its interval lies above zero; what was not measured is never called "no loss".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from assay import quantities
from assay.quantities import capital, points_short
from assay.records.speed import SpeedRow
from assay_evaluate.speed.noise import Noise, noise_of_rows
from assay_evaluate.speed.ratio import is_ahead, mean_of, output_tokens_s, tpot_s, ttft_s
from assay_reports.schema import PlanNumbers, Report, Row, TaskNumbers

NOISE = 1.5
"""Divergence at one place of the text over that at another, from which a heading calls it a change."""
FEW = 3
"""Names in a heading; of more their number is said."""


def candidates(report: Report) -> list[Row]:
    return [row for row in report.rows if row.kind == "candidate"]


def and_(names: Sequence[str]) -> str:
    """a, b and c"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def unjudged(report: Report, label: str, task: str) -> bool:
    """Its gate says NOT MEASURED: its numbers are no result."""
    gate = f"score {task}"
    return any(v.status == "NOT MEASURED" and (v.candidate, v.gate) == (label, gate) for v in report.verdicts)


def scored(report: Report, row: Row) -> list[TaskNumbers]:
    """Tasks of a candidate whose change is a result."""
    return [task for task in row.tasks if task.drop is not None and not unjudged(report, row.label, task.task)]


def unmeasured_tasks(report: Report) -> list[str]:
    """Names, as sentences call them, of tasks that no candidate has a result of."""
    rows = candidates(report)
    every = dict.fromkeys(name_of(task) for row in rows for task in row.tasks)
    known = {name_of(task) for row in rows for task in scored(report, row)}
    return [name for name in every if name not in known]


def name_of(task: TaskNumbers) -> str:
    return task.title or task.task


# ------------------------------------------------------------------------------------------------ scores
def tasks(report: Report) -> str:
    """`Chinese code lookup lost 25.0 points (nvfp4a16) and 10.0 (w4a16); no other loss is shown at 95 %`."""
    found: dict[str, list[tuple[float, str]]] = {}
    seen = [(row, task) for row in candidates(report) for task in scored(report, row)]
    for row, task in seen:
        if task.drop is not None and task.drop.low > 0:
            found.setdefault(name_of(task), []).append((task.drop.value, row.label))
    missing = unmeasured_tasks(report)
    left = f"; not measured: {_short(missing)}" if missing else ""
    if not seen:
        return f"No task was scored on a candidate{left}"
    if not found:
        items = sum(task.num_pairs or 0 for _, task in seen)
        return f"No task shows a loss over {items:,} paired answers{left}"
    ordered = sorted(found.items(), key=lambda one: -max(one[1])[0])
    said = "; ".join(_lost(name, losses) for name, losses in ordered[:FEW])
    rest = f"; {len(ordered) - FEW} more tasks lost" if len(ordered) > FEW else "; no other loss is shown at 95 %"
    return capital(said) + rest + left


def _lost(name: str, losses: list[tuple[float, str]]) -> str:
    ordered = sorted(losses, reverse=True)
    (most, first), others = ordered[0], ordered[1:]
    rest = [f"{points_short(value)} ({label})" for value, label in others]
    return f"{name} lost {and_([f'{points_short(most)} points ({first})', *rest])}"


def _short(names: Sequence[str]) -> str:
    return and_(list(names)) if len(names) <= FEW else f"{len(names)} tasks"


def languages(report: Report) -> str:
    worst = [
        (part.drop.value, f"{name_of(task)} in {part.language} ({row.label})")
        for row in candidates(report)
        for task in scored(report, row)
        for part in task.by_language
        if part.drop is not None and part.drop.low > 0
    ]
    spoken = dict.fromkeys(part.language for row in report.rows for task in row.tasks for part in task.by_language)
    if not worst:
        return f"No language shows a loss of its own ({', '.join(spoken) or 'none asked'})"
    most, where = max(worst)
    return f"By language: most was lost on {where}, {points_short(most)} points"


def long_context(report: Report) -> str:
    labels = {row.label for row in candidates(report)}
    cells = [
        (cell.drop.value, cell, one)
        for one in report.long_context
        if one.candidate in labels and not unjudged(report, one.candidate, one.task)
        for cell in one.by_length or one.by_depth
    ]
    if not cells:
        return "Long context was not measured"
    longest = max(cell.length_tokens for _, cell, _ in cells)
    lost = [(value, cell, one) for value, cell, one in cells if cell.drop.low > 0]
    if not lost:
        return f"No length up to {longest:,} tokens shows a loss; nothing is known beyond"
    value, cell, one = max(lost, key=lambda entry: entry[0])
    title = next((name_of(t) for row in report.rows for t in row.tasks if t.task == one.task), one.task)
    at = f"{cell.length_tokens:,} tokens"
    return f"By length: {one.candidate} lost most at {at}, {points_short(value)} points of {title}"


# ------------------------------------------------------------------------------------------------ divergence
def drift(report: Report) -> str:
    """Where along the text the furthest candidate is furthest, against the front of the same text."""
    found = {row.label: course for row in candidates(report) if (course := _course(row))}
    if not found:
        seen = any(row.divergence for row in candidates(report))
        return "Divergence was measured, its course along the text was not" if seen else "Divergence was not measured"
    label = max(found, key=lambda name: max(value for value, _ in found[name]))
    front, (most, where), last = found[label][0][0], max(found[label]), found[label][-1][0]
    if front <= 0 or most >= NOISE * front:
        many = f"{sum(map(len, found.values()))} spans of {len(found)} checkpoint{'s' if len(found) > 1 else ''}"
        return f"Drift is largest at tokens {where} ({label}: KL, lower bound, {most:.2g} nats; the highest of {many})"
    if last * NOISE <= front:
        return f"Drift is largest at the front ({label}: KL, lower bound, {front:.2g} nats there, {last:.2g} at the end)"
    return f"Drift stays level along the text ({label}: KL, lower bound, {front:.2g} nats at the front, {last:.2g} at the end)"


def _course(row: Row) -> list[tuple[float, str]]:
    """Mean KL, lower bound, and positions, from the front to the end of sampled texts. Empty: fewer than two spans."""
    if row.divergence is None:
        return []
    curve = next((one.curve for one in row.divergence.drift if one.texts == "all" and one.curve), ())
    spans = [(span.kl_mean, f"{span.first} to {span.last}") for span in curve]
    spans = spans or [(bucket.kl_mean, f"{bucket.first} to {bucket.last}") for bucket in row.divergence.by_position]
    return spans if len(spans) > 1 else []


def acceptance(report: Report) -> str:
    known = [row for row in candidates(report) if row.acceptance is not None and row.acceptance.rate is not None]
    if not known:
        return "Acceptance of drafts (MTP) was not measured"
    worse = [row for row in known if row.acceptance_drop is not None and row.acceptance_drop.low > 0]
    if worse:
        said = [f"{points_short(row.acceptance_drop.value)} points ({row.label})" for row in worse if row.acceptance_drop]
        return f"Fewer drafts are accepted: {and_(said)} less than with {report.reference}"
    start = f"No difference in accepted drafts (MTP) from {report.reference} is shown"
    highest = sorted(max(row.acceptance_drop.high, 0.0) for row in known if row.acceptance_drop is not None)
    if not highest:
        return start
    least, most = points_short(highest[0]), points_short(highest[-1])
    return f"{start}; losses of up to {most if least == most else f'{least} to {most}'} points are not excluded"


def fidelity(report: Report) -> str:
    alarms = [f"{one.label}: {result.name}" for one in report.probes for result in one.results if result.status == "alarm"]
    if not report.probes:
        return "Serving was not probed for faults under load"
    if alarms:
        return f"Probes of the servers: {len(alarms)} {'alarm' if len(alarms) == 1 else 'alarms'} ({_short(alarms)})"
    asked = sum(result.status != "not_run" for one in report.probes for result in one.results)
    return f"No fault of serving was found: {asked} probes of {and_([one.label for one in report.probes])}, no alarm"


# ------------------------------------------------------------------------------------------------ speed
def latency_s(row: SpeedRow, what: str) -> float | None:
    """`ttft` (of medians) or `tpot` (of means) of a row, as `assay speed` prints it. None: not measured."""
    found = mean_of(row, ttft_s if what == "ttft" else tpot_s)
    return None if found is None else found.value


def ladders(rows: Iterable[SpeedRow]) -> dict[tuple[object, ...], list[SpeedRow]]:
    """Rows that may stand in one picture: alike but for checkpoint and concurrency, and comparable."""
    found: dict[tuple[object, ...], list[SpeedRow]] = {}
    for row in rows:
        if row.is_comparable:
            found.setdefault(row.like[:-1], []).append(row)
    return found


def speed(report: Report) -> str:
    if report.speed is None or not report.speed.rows:
        return "Speed was not measured"
    groups = ladders(report.speed.rows)
    if not groups:
        return "Speed: every row is of an emulated format, or does not say whether it drafted, so none is compared"
    rows = max(groups.values(), key=lambda some: (any(row.origin == "measured" for row in some), len(some)))
    noise = noise_of_rows(report.speed.rows, output_tokens_s)
    low, high = min(row.concurrency for row in rows), max(row.concurrency for row in rows)
    (few, many) = (_fastest([row for row in rows if row.concurrency == at], noise) for at in (low, high))
    said = f"{few[0]} at {_streams(low)} ({few[1]:,.1f} tokens/s)"
    if high != low and few[0] == many[0]:
        said += f" and at {high} ({many[1]:,.1f})"
    elif high != low:
        said += f", {many[0]} at {high} ({many[1]:,.1f})"
    first = rows[0]
    how = "" if first.origin == "measured" else f", {first.origin}"
    draft = "speculation off" if not first.speculation else f"{first.speculation} drafted"
    return f"{said}; {first.hardware}, {first.prompts}, {draft}{how}"


def _fastest(rows: Sequence[SpeedRow], noise: Noise) -> tuple[str, float]:
    """(`fp8 is fastest`, or `fp8 and bf16 cannot be told apart`; its tokens/s). rows: of one number of streams."""
    first, *others = sorted(rows, key=lambda row: (row.tokens_s, row.checkpoint), reverse=True)
    alike = [row.checkpoint for row in others if row.checkpoint != first.checkpoint and not is_ahead(first, row, noise)]
    if alike:
        return f"{and_([first.checkpoint, *alike])} cannot be told apart", first.tokens_s
    return f"{first.checkpoint} is fastest", first.tokens_s


def _streams(number: int) -> str:
    return f"{number} stream{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------------------ checkpoints
def kept(plan: PlanNumbers) -> tuple[list[str], float]:
    """Roles that are not quantized, largest first, and their share of the bytes written."""
    others = [role for role in plan.roles if not role.what.startswith("quantized") and role.bytes_out]
    share = sum(role.bytes_out for role in others) / max(plan.bytes_out, 1)
    return [role.role.replace("_", " ") for role in others], share


def tensors(report: Report) -> str:
    if not report.plans:
        return "What was done to the tensors is not known: the checkpoints were made elsewhere"
    said = [f"{plan.precision} {quantities.percent_short(kept(plan)[1])}" for plan in report.plans]
    return f"Bytes kept unquantized: {and_(said)}"


def verification(report: Report) -> str:
    if not report.verifications:
        return "No checkpoint of this run was verified"
    broken = [f"{one.precision} ({len(one.damages)} damages)" for one in report.verifications if not one.passed]
    if broken:
        return f"Damaged: {and_(broken)}"
    other = [one.precision for one in report.verifications if one.is_measured_checkpoint is False]
    checked = sum(one.num_checked for one in report.verifications)
    tail = f"; {and_(other)} is not the checkpoint that was measured" if other else ""
    return f"{and_([one.precision for one in report.verifications])}: {checked:,} things checked, none damaged{tail}"


def serving(report: Report) -> str:
    print_ = report.fingerprint
    emulated = [row.label for row in candidates(report) if row.emulated]
    tail = f"; {and_(emulated)} emulated, so nothing is said about kernels" if emulated else ""
    return f"All were served alike, by {print_.server}, profile {print_.profile}{tail}"


def limits(report: Report) -> str:
    number = len(report.limits)
    return (
        "One thing that this run cannot tell"
        if number == 1
        else f"{number} things that this run cannot tell, or tells with a limit"
    )


def gates(report: Report) -> str:
    if not report.verdicts:
        return "Nobody has judged this run"
    labels = {row.label for row in candidates(report)}
    counts: dict[str, dict[str, int]] = {}
    for verdict in report.verdicts:
        if verdict.candidate in labels and verdict.has_say:
            own = counts.setdefault(verdict.candidate, {})
            own[verdict.status] = own.get(verdict.status, 0) + 1
    said = [
        f"{label}: {', '.join(f'{number} {status.lower()}' for status, number in own.items())}" for label, own in counts.items()
    ]
    return f"Gates that count, by candidate: {'; '.join(said) or 'none'}"
