"""What stands at the end of `run`, `evaluate` and `gate`: a line for each checkpoint. The rest is in the report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from assay import quantities
from assay.records.declared import variant_note
from assay.records.measurement import Measurement
from assay.records.serving import EXTERNAL
from assay.records.verdict import GateReport, Overall
from assay_cli.terminal import escape, print_rows

COLOURS: dict[Overall, str] = {
    "PASS": "green", "FAIL": "red", "UNDERPOWERED": "yellow", "NOT MEASURED": "yellow", "not failed": "yellow",
}  # fmt: skip


def print_summary(gates: GateReport, measurements: Sequence[Measurement], out: Console) -> None:
    """Verdict, checkpoint, size and its share of the reference's, and why; the reference first, which has no verdict.

    A table on a terminal; in a log, whose width nobody knows, a line each.
    """
    from assay_reports.page.first_screen import loss_of_reference
    from assay_reports.rankings import ranked

    measured = {m.label: m for m in measurements}
    reference = measured[gates.reference]
    size = "" if reference.checkpoint_bytes is None else f", {quantities.size(reference.checkpoint_bytes)}"
    model = "" if gates.model == reference.label else f"{gates.model}: "
    out.print(escape(f"{model}reference {reference.label}{size}; suite {reference.suite}"))
    rows = [
        (
            f"[bold {COLOURS[status]}]{status}[/]",
            *map(escape, (label, _size(measured[label], reference), _why(measured[label], reference, gates))),
        )
        for label, status in gates.overall.items()
    ]
    print_rows(("verdict", "checkpoint", "size", "why"), rows, out)
    tasks = [verdict for verdict in gates.verdicts if verdict.gate.startswith("score ") and verdict.status != "NOT MEASURED"]
    drops = ((task.candidate, task.title or task.gate.removeprefix("score "), task.observed) for task in tasks)
    if (note := loss_of_reference(gates.reference, drops)) is not None:
        out.print(escape(f"{note}."))
    for sentence in ranked(gates.rankings):
        out.print(escape(f"{sentence}."))
    if gates.late is not None:
        out.print(f"[yellow]{escape(gates.late)}[/]")


def _why(measurement: Measurement, reference: Measurement, gates: GateReport) -> str:
    """The reason of the verdict; of another way of serving first what it is."""
    reason = gates.reasons.get(measurement.label, "")
    if not measurement.is_variant:
        return reason
    is_stated = measurement.fingerprint.server == EXTERNAL
    return f"{variant_note(reference.label, measurement.declared, is_stated=is_stated)}: {reason}"


def _size(measurement: Measurement, reference: Measurement) -> str:
    """6.31 MB (77 %): bytes, and the share of the reference's; nothing, if only servers are known."""
    if measurement.checkpoint_bytes is None:
        return ""
    if reference.checkpoint_bytes is None:
        return quantities.size(measurement.checkpoint_bytes)
    share = measurement.checkpoint_bytes / max(reference.checkpoint_bytes, 1)
    return f"{quantities.size(measurement.checkpoint_bytes)} ({100 * share:.0f} %)"
