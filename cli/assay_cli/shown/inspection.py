"""What a checkpoint is, and what is wrong with it."""

from __future__ import annotations

from rich.console import Console

from assay.quantities import size
from assay.records.inspection import CheckpointFacts, Finding, Inspection
from assay_cli.terminal import escape, print_rows

SHOWN_PLACES = 5
_COLOURS = {"fails": "bold red", "wrong": "bold red", "risk": "yellow", "note": "dim"}
_WORDS = {"fails": "does not load", "wrong": "served wrong", "risk": "risk", "note": "note"}
_MENDING = {
    "text": "an edit of small files", "tensors": "stored tensors written anew", "base": "files or tensors of the base",
    "requantize": "quantizing anew", "nothing": "cannot be mended",
}  # fmt: skip


def print_inspection(result: Inspection, out: Console) -> None:
    """Facts first, then findings by severity, then what was not looked at."""
    facts = result.facts
    what = facts.family or facts.architecture or facts.model_type or "unknown architecture"
    revision = f" at {result.revision[:12]}" if result.revision else ""
    out.print(escape(f"{result.checkpoint}{revision}: {what}, {_size_of(facts)}"))
    for label, told in _lines(facts):
        out.print(escape(f"  {label:12} {told}"))
    rows = []
    for form in facts.forms:
        bits = _bits(form.num_bytes, form.num_elements)
        rows.append((form.role, form.form, f"{form.num_weights:,}", bits, size(form.num_bytes), form.layers))
    print_rows(("role", "stored as", "weights", "bits", "size", "layers"), [tuple(map(escape, row)) for row in rows], out)
    for finding in result.findings:
        _print_finding(finding, out)
    for skipped in result.not_checked:
        out.print(escape(f"not checked: {skipped}"))
    defects = [finding for finding in result.findings if finding.severity != "note"]
    if defects:
        told = "1 defect" if len(defects) == 1 else f"{len(defects)} defects"
        out.print(f"[bold red]{told}[/] in {escape(result.checkpoint)}")
    else:
        out.print(f"no defect found: {len(result.checked)} kinds were looked for")


def _size_of(facts: CheckpointFacts) -> str:
    experts = f", {facts.num_experts} experts" if facts.num_experts else ""
    layers = f"{facts.num_layers} layers" if facts.num_layers else "no number of layers"
    elements = (
        f"{facts.num_elements / 1e9:,.1f} billion weights" if facts.num_elements >= 1e8 else f"{facts.num_elements:,} weights"
    )
    return f"{layers}{experts}, {elements} in {size(facts.num_bytes)}, {facts.bits_per_weight:.2f} bits each"


def _bits(num_bytes: int, num_elements: int) -> str:
    return f"{8 * num_bytes / num_elements:.2f}" if num_elements else "-"


def _lines(facts: CheckpointFacts) -> list[tuple[str, str]]:
    mtp = facts.mtp
    declared = "nothing declared" if mtp.declared is None else f"{mtp.declared} declared"
    stored = "not known" if mtp.stored is None else f"{mtp.stored} layers stored"
    lines = [
        ("method", facts.method or "none claimed"),
        ("made by", facts.producer),
        ("activations", facts.activations),
        ("KV cache", facts.kv_cache),
        ("MTP", f"{declared}, {stored}" + (f" as {mtp.form}" if mtp.form else "")),
        ("base model", facts.base_model),
        ("licence", facts.licence),
    ]
    return [(label, told) for label, told in lines if told is not None]


def _print_finding(finding: Finding, out: Console) -> None:
    colour, word = _COLOURS[finding.severity], _WORDS[finding.severity]
    out.print(f"[{colour}]{word}[/]: {escape(finding.defect)}")
    for place in finding.places[:SHOWN_PLACES]:
        out.print(escape(f"  {place.where}: {place.what}"))
    if finding.num_places > SHOWN_PLACES:
        listed = "all" if finding.num_places == len(finding.places) else f"the first {len(finding.places)}"
        out.print(escape(f"  ... and {finding.num_places - SHOWN_PLACES:,} more; --json lists {listed}"))
    out.print(escape(f"  served: {finding.served}"))
    out.print(escape(f"  mend ({_MENDING[finding.mend_by]}): {finding.mend}"))
    out.print(escape(f"  see {finding.source}"))
