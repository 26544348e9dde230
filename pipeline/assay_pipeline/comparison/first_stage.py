"""`assay run --screened`: what a screening fails, or finds damaged, is not asked anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.callbacks import Say
from assay.errors import AssayError
from assay.records.screening import SCREENED, Screened, Screening
from assay_pipeline.comparison.checkpoints import Comparison
from assay_pipeline.comparison.screening import screen


def without_refused(
    compared: Comparison, run_dir: Path, text: Sequence[Path], memory_bytes: int | None, say: Say
) -> tuple[Comparison, Screening]:
    """What is compared without the candidates that a screening refuses, which its record names.

    text, memory_bytes: as of `screen`. AssayError: the reference, or a candidate, is a server whose folder is not known.
    """
    folders = {}
    for candidate in compared.candidates:
        if candidate.checkpoint is None:
            raise AssayError(
                f"--screened: {candidate.label} is known by its server alone; name its folder, or leave the option out"
            )
        folders[candidate.label] = str(candidate.checkpoint)
    record, _ = screen(list(folders.values()), text=text, memory_bytes=memory_bytes, out=run_dir / SCREENED, say=say)
    refused = {
        candidate.location: _reason(record, candidate) for candidate in record.candidates if candidate.label in record.refused
    }
    excluded = {label: refused[folder] for label, folder in folders.items() if folder in refused}
    for label, reason in excluded.items():
        say(f"{label}: not measured: {reason}")
    left = [candidate for candidate in compared.candidates if candidate.label not in excluded]
    return replace(compared, candidates=left, about=compared.about.model_copy(update={"screened_out": excluded})), record


def _reason(record: Screening, candidate: Screened) -> str:
    from assay_reports.screening import nats

    if candidate.word == "FAIL":
        return (
            f"a screening fails it: KL {nats(candidate.drift.kl_mean)} nats over {record.panel.num_texts} texts, "
            f"{candidate.limit:g} allowed{candidate.limit_for}"
        )
    if (damage := record.damages.get(candidate.label)) is not None:
        return f"it is damaged: {damage}"
    return f"another model by its own files: {'; '.join(record.unlike_reference[candidate.label])}"
