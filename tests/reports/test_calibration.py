"""The report shows what a calibrated checkpoint was calibrated on, and which experts saw nothing."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Run
from synthetic_run import make_run
from tiny_checkpoints import make_tiny_glm4_moe

from assay.records.base import sha256_of_file
from assay.records.calibration import (
    CalibratedLayers,
    Calibration,
    LayerCoverage,
    Nvfp4Inputs,
    TextSource,
    WithheldItems,
    record_of,
)
from assay.records.manifest import MANIFEST, Manifest
from assay.records.plan import Plan
from assay_reports.numbers import plan_numbers
from assay_reports.report import write_report


def calibration(file_sha256: str = "f" * 64) -> Calibration:
    inputs = Nvfp4Inputs(
        num_groups=10,
        num_cut_off=0,
        num_coarse=1,
        num_zeroed=0,
        largest=12.0,
        largest_at="a",
        most_zeroed=0.0,
        most_zeroed_at="a",
    )
    sources = (TextSource(source="chats<1>.jsonl", kind="tools", weight=1.0, num_texts=7, num_tokens=1200, num_dropped=2),)
    return Calibration(
        model="tiny-glm", source="s", text=("chats<1>.jsonl",), num_tokens=1024, length=64, min_tokens=1, weights=9, starved={},
        tokens_by_expert=(0, 25, 400), nvfp4_inputs=inputs, file="w", file_sha256=file_sha256, seconds=1.0, sources=sources,
        coverage=(LayerCoverage(layer=1, tokens=(0, 1, 100, 400)), LayerCoverage(layer=12, tokens=(25, 400, 400, 50))),
    )  # fmt: skip


def test_text_and_tokens_of_the_experts_are_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_report(run)
    assert "calibrations" not in json.loads((run / "report" / "report.json").read_text())
    calibration().save(run / "w4a16" / "calibration.json")
    write_report(run)
    # it is of a file that the checkpoint was not made with: left there by one made before, or put there
    assert "calibrations" not in json.loads((run / "report" / "report.json").read_text())
    file = run / "w4a16" / "checkpoint" / MANIFEST
    Manifest.load(file).model_copy(update={"importance_sha256": calibration().file_sha256}).save(file)
    write_report(run)
    page = (run / "report" / "index.html").read_text()
    assert "   1 ·▁▅█ 0 to 400\n  12 ▃██▃ 25 to 400\n" in page
    assert "<b>w4a16</b> was calibrated on 1,024 tokens; an expert saw 0 to 400, 1 saw none" in page
    assert "chats&lt;1&gt;.jsonl (tools): 7 texts, 1,200 tokens; 2 left out because they hold items of an evaluation" in page
    assert "No token reached layer 1 expert 0: their static scales are the largest of their layer." in page
    assert "was calibrated on 1,024 tokens" in (run / "report" / "report.md").read_text()
    assert list(json.loads((run / "report" / "report.json").read_text())["calibrations"]) == ["w4a16"]


def test_the_record_goes_with_the_checkpoint_if_it_is_about_its_file(run: Run, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    source = make_tiny_glm4_moe(tmp_path / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    file = tmp_path / "w.safetensors"
    amax = {f"model.layers.{n}.self_attn.{leaf}_amax": np.ones(1, np.float32) for n in range(2) for leaf in "kv"}
    save_file(amax, file)
    calibration().save(record_of(file))
    command = ("quantize", source, "-p", "fp8-kv", "--importance", file)
    assert run(*command, "--out", tmp_path / "a")[0] == 0 and not (tmp_path / "a" / "assay_calibration.json").exists()
    calibration(sha256_of_file(file)).save(record_of(file))
    assert run(*command, "--out", tmp_path / "b")[0] == 0
    assert Calibration.load(tmp_path / "b" / "assay_calibration.json") == Calibration.load(record_of(file))
    assert run("verify", tmp_path / "b", "--source", source, "--importance", file)[0] == 0
    assert run(*command, "--runs", tmp_path / "runs")[0] == 0
    (kept,) = (tmp_path / "runs").glob("*/fp8-kv/calibration.json")
    assert Calibration.load(kept) == Calibration.load(record_of(file))


def test_what_was_rounded_by_text_and_what_is_mixed_is_a_clause(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    plan = Plan.load(run / "w4a16" / "plan.json")
    one = next(tensor for tensor in plan.tensors if tensor.scheme is not None and tensor.role == "routed_expert")
    mixed = (*plan.tensors, one._replace(name=one.name.replace(".layers.6.", ".layers.1."), scheme="fp8_block"))
    items = (
        WithheldItems(suite="quick", task="sums", num_items=9, dropped=3),
        WithheldItems(suite="full", task="x", num_items=None),
    )
    made = CalibratedLayers(
        method="gptq", asked_sha256="a", text=("own",), num_tokens=65_536, length=512, tokens_sha256="t", layers={0: "d"},
        versions={}, seconds=1.0, withheld=items,
        sources=(TextSource(source="own", weight=1.0, num_texts=5, num_tokens=70_000, num_dropped=3),),
    )  # fmt: skip
    plan.model_copy(update={"calibrated": made, "tensors": mixed}).save(run / "w4a16" / "plan.json")
    write_report(run)
    said = (run / "report" / "report.md").read_text()
    assert "; calibrated: gptq on 65,536 tokens of text, checked against the items of 1 task (3 texts left out)" in said
    assert "routed_expert fp8_block in 1 of 2 layers, w4a16 in 1" in said
    page = (run / "report" / "index.html").read_text()
    assert "; calibrated: gptq on 65,536 tokens" in page and "; mixed: " in page
    assert page.count("; mixed: ") == 1, "a precision of one scheme is none"

    smoothed = plan.model_copy(update={"calibrated": made.model_copy(update={"method": "awq+gptq"})})
    treated = {role.role: role.what for role in plan_numbers(smoothed).roles if role.role in ("norm", "router", "mtp")}
    assert treated["norm"] == "kept in BF16, some scaled by AWQ" and treated["router"].endswith(", some scaled by AWQ")
    assert "scaled" not in treated["mtp"]
