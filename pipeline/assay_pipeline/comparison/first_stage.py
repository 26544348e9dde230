"""`assay run --screened`: what a screening fails is not asked anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.callbacks import Say
from assay.errors import AssayError
from assay.records.screening import SCREENED, Screened, Screening
from assay_pipeline.comparison.checkpoints import Comparison
from assay_pipeline.comparison.screening import screen


def without_failed(compared: Comparison, run_dir: Path, text: Sequence[Path], say: Say) -> tuple[Comparison, Screening]:
    """What is compared without the candidates whose divergence surely exceeds their limit, which its record names.

    text: as of `screen`. AssayError: the reference, or a candidate, is a server whose folder is not known.
    """
    folders = {}
    for candidate in compared.candidates:
        if candidate.checkpoint is None:
            raise AssayError(
                f"--screened: {candidate.label} is known by its server alone; name its folder, or leave the option out"
            )
        folders[candidate.label] = str(candidate.checkpoint)
    record, _ = screen(list(folders.values()), text=text, out=run_dir / SCREENED, say=say)
    failed = {screened.location: _reason(record, screened) for screened in record.candidates if screened.word == "FAIL"}
    excluded = {label: failed[folder] for label, folder in folders.items() if folder in failed}
    for label, reason in excluded.items():
        say(f"{label}: not measured: {reason}")
    left = [candidate for candidate in compared.candidates if candidate.label not in excluded]
    return replace(compared, candidates=left, about=compared.about.model_copy(update={"screened_out": excluded})), record


def _reason(record: Screening, screened: Screened) -> str:
    from assay_reports.screening import nats

    return (
        f"a screening fails it: KL {nats(screened.drift.kl_mean)} nats over {record.panel.num_texts} texts, "
        f"{screened.limit:g} allowed{screened.limit_for}"
    )
