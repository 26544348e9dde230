"""`run --screened`: which candidates are left, and why the others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from screenings import make_screened, make_screening, mean

from assay.records.run import RunRecord
from assay_evaluate.run.candidate import Candidate
from assay_pipeline.comparison import first_stage
from assay_pipeline.comparison.checkpoints import Comparison


def test_what_is_refused_is_left_out_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ("fine", "far", "damaged", "another", "undecided")
    words = {"far": "FAIL", "undecided": "UNDERPOWERED"}
    candidates = tuple(make_screened(label, mean(0.1234, 0.11, 0.14), word=words.get(label, "not failed")) for label in labels)
    record = make_screening(
        *candidates,
        damages={"damaged": "scale_zero in 1 place, first `a.weight_scale`"},
        unlike_reference={"another": ("rope_theta 1e4 instead of 1e6", "another tokenizer")},
    )
    calls = []

    def screen(*arguments: object, **options: object) -> object:
        calls.append((arguments, options))
        return record, tmp_path / "screening.json"

    monkeypatch.setattr(first_stage, "screen", screen)
    reference = Candidate("fp8", Path("/data/fp8"), is_reference=True)
    compared = Comparison(
        [reference, *(Candidate(label, Path(f"/data/{label}")) for label in labels)],
        RunRecord(model="tiny"),
    )
    lines: list[str] = []
    left, kept = first_stage.without_refused(compared, tmp_path, [Path("text.jsonl")], 1 << 30, lines.append)
    assert (kept, [candidate.label for candidate in left.candidates]) == (record, ["fp8", "fine", "undecided"])
    assert left.about.screened_out == {
        "far": "a screening fails it: KL 0.1234 (0.1100 to 0.1400) nats over 100 texts, 0.08 allowed for 4-bit weights",
        "damaged": "it is damaged: scale_zero in 1 place, first `a.weight_scale`",
        "another": "another model by its own files: rope_theta 1e4 instead of 1e6; another tokenizer",
    }
    assert lines == [f"{label}: not measured: {reason}" for label, reason in left.about.screened_out.items()]
    ((arguments, options),) = calls
    assert arguments == (["/data/fp8", *(f"/data/{label}" for label in labels)],)
    assert options == {
        "text": [Path("text.jsonl")], "memory_bytes": 1 << 30, "out": tmp_path / "screened", "say": lines.append,
    }  # fmt: skip
