"""The tables of drift: few texts, the sign of a change, and structural tokens."""

from __future__ import annotations

from pathlib import Path

from synthetic_run import make_drift, make_run

from assay.records.divergence import Estimate
from assay.records.measurement import Measurement
from assay_reports.report import write_report


def markdown(folder: Path, change_of_probability: Estimate | None) -> list[str]:
    def change(measurement: Measurement) -> Measurement:
        if measurement.divergence is None:
            return measurement
        drift = make_drift("all", 0.1, 0.9)
        if change_of_probability is not None:
            drift = drift.model_copy(update={"probability_change_mean": change_of_probability})
        return measurement.model_copy(update={"divergence": measurement.divergence.model_copy(update={"drift": (drift,)})})

    run_dir = make_run(folder, change=change)
    write_report(run_dir)
    return (run_dir / "report" / "report.md").read_text(encoding="utf-8").splitlines()


def test_a_change_of_probability_has_its_own_sign(tmp_path: Path) -> None:
    """Candidate minus reference already: 2.0 points less. With few texts it has no interval."""
    row = next(line for line in markdown(tmp_path, None) if line.startswith("| w4a16 | sampled texts |"))
    assert "| -2.0 [-2.6, -1.4] |" in row
    row = next(line for line in markdown(tmp_path, Estimate(value=-0.02, n=12)) if line.startswith("| w4a16 | sampled texts |"))
    assert "| -2.0 (12 texts) |" in row


def test_structural_tokens_have_a_table_and_a_sentence(tmp_path: Path) -> None:
    lines = markdown(tmp_path, None)
    at = lines.index("### Structural tokens")
    table = [line for line in lines[at:] if line.startswith("| w4a16 |")][:3]
    assert [line.split(" | ")[1] for line in table] == ["all", "end", "thinking"]
    sentence = next(line for line in lines[at:] if line.startswith("- w4a16: "))
    assert sentence.startswith("- w4a16: stops less often than the reference where that stopped: ")
    assert sentence.endswith(" points); elsewhere the chance is 0.00065 against 0.00065 a token.")
