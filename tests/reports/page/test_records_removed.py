"""Every record of a run is taken away once: what the page says because of it is gone, and nothing ends in a traceback."""

from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path

import pytest
from deployments import make_deployment
from probe_reports import CLEAN, probed
from synthetic_run import MODEL, make_run

from assay.errors import AssayError
from assay.records.calibration import Calibration, Nvfp4Inputs
from assay.records.choice.record import Choice
from assay.records.diagnosis.sensitivity import Sensitivity, SensitivityPart
from assay.records.manifest import MANIFEST, Manifest
from assay.records.plan import Plan
from assay.records.run import RunRecord
from assay.records.speed import SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.verdict import GateReport
from assay_evaluate.choice.choose import ChoiceRequest, choose
from assay_reports.report import write_report
from assay_reports.run import load_run

DEPLOY = "Deploy w4a16 from 1 to 8 streams"


def row(label: str, sha256: str, concurrency: int, tokens_s: float) -> SpeedRow:
    return SpeedRow(
        checkpoint=label, checkpoint_sha256=sha256, origin="measured", source="vllm bench serve 0.32.0", hardware="8xH200",
        num_gpus=8, speculation=0, prompts="chat", concurrency=concurrency, engine="vllm 0.32.0", emulated=False,
        repeats=tuple(SpeedRepeat(output_tokens_s=tokens_s * factor) for factor in (1.1, 1.0, 0.9)),
    )  # fmt: skip


def sensitivity() -> Sensitivity:
    part = SensitivityPart(layer=0, role="attention", scheme="w4a16", num_weights=4096, bytes=2128, damage_nats=0.001)
    return Sensitivity(
        model=MODEL, family="glm4_moe", source="s", source_sha256="a" * 64, data_sha256="b" * 64, method="proxy:kl",
        texts="replies", texts_sha256="c" * 64, num_texts=24, num_tokens=5000, seed="0", layers=1, weights=4096, other_bytes=0,
        parts=(part,), cpu_seconds=1.5,
    )  # fmt: skip


def calibration() -> Calibration:
    inputs = Nvfp4Inputs(
        num_groups=10, num_cut_off=0, num_coarse=1, num_zeroed=0, largest=12.0, largest_at="a", most_zeroed=0.0,
        most_zeroed_at="a",
    )  # fmt: skip
    return Calibration(
        model=MODEL, source="s", text=("chats.jsonl",), num_tokens=1024, length=64, min_tokens=1, weights=9, starved={},
        tokens_by_expert=(0, 25, 400), nvfp4_inputs=inputs, file="w", file_sha256="f" * 64, seconds=1.0,
    )  # fmt: skip


def choose_from(run_dir: Path) -> Choice:
    """What `assay choose` says of the records that are there."""
    run = load_run(run_dir)
    gates = GateReport.load(run_dir / "gates.json")
    return choose(() if run.speed is None else run.speed.rows, gates, ChoiceRequest(), model=run.model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(tmp_path_factory.mktemp("removed"))
    of = {one.label: one.checkpoint_sha256 for one in load_run(run_dir).measurements}
    rows = [row(label, of[label], at, at * speed) for label, speed in (("w4a16", 412.0), ("nvfp4a16", 470.0)) for at in (1, 8)]
    SpeedRecord(rows=tuple(rows)).save(run_dir / "speed.json")
    choose_from(run_dir).save(run_dir / "choice.json")
    make_deployment().save(run_dir / "deployment" / "4xh200" / "w4a16.json")
    probed("w4a16", *CLEAN).save(run_dir / "probes" / "w4a16.json")
    sensitivity().save(run_dir / "sensitivity.json")
    calibration().save(run_dir / "w4a16" / "calibration.json")
    for kind, file in ((Manifest, f"checkpoint/{MANIFEST}"), (Plan, "plan.json")):  # it was made with that file
        made = run_dir / "w4a16" / file
        kind.load(made).model_copy(update={"importance_sha256": calibration().file_sha256}).save(made)
    RunRecord(model=MODEL, choices=("groups of 64, for widths that 128 does not divide",)).save(run_dir / "run.json")
    return run_dir


def page_of(run_dir: Path) -> str:
    """The words of the page, script and style left out."""
    text = write_report(run_dir).read_text(encoding="utf-8")
    return " ".join(unescape(re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", text, flags=re.S)).split())


JUDGED = (
    DEPLOY, "At 1 stream: w4a16", "bf16 (PASS) could be deployed too", "w4a16 PASS 6.3 MB",
    "nvfp4a16 UNDERPOWERED 6.7 MB", "bf16 PASS 14.6 MB",
    "Noise floor (fp8 against its own repeat): PASS", "nvfp4a16 seems to lose what is allowed or more on needle",
    "divergence kl_mean PASS",
)  # fmt: skip
"""What the verdicts say, the recommendation among it; a deployment is compared with them too."""
CLAIMS: dict[str, tuple[str, ...]] = {
    "choice.json": (
        DEPLOY, "At 1 stream: w4a16, 410.6 tokens/s measured, 411 expected",
        "could be deployed too",
    ),
    "gates.json": JUDGED,
    "measurements/w4a16.json": (*JUDGED, "w4a16, needle", "arithmetic w4a16", "w4a16 0.021"),
    "measurements/nvfp4a16.json": (*JUDGED, "nvfp4a16, needle", "arithmetic nvfp4a16"),
    "measurements/bf16.json": (*JUDGED, "bf16, needle", "arithmetic bf16"),
    "measurements/fp8-repeat.json": (*JUDGED, "80x 0.323"),
    "speed.json": (
        "Speed nvfp4a16 and w4a16 cannot be told apart at 1 stream (468.4 tokens/s)", "w4a16, 8 in flight: 3,285.0 tokens/s",
        "Speed holds for 8xH200",
    ),
    "deployment/4xh200/w4a16.json": ("Candidates on other hardware than they were judged on", "w4a16 on 4xh200 PASS"),
    "probes/w4a16.json": ("2 probes of w4a16, no alarm", "0 of 4,000 requests"),
    "sensitivity.json": ("attention of layer 0 in w4a16, 0.001 nats a token",),
    "run.json": ("groups of 64, for widths that 128 does not divide",),
    "w4a16/calibration.json": ("w4a16 was calibrated on 1,024 tokens",),
    **{
        f"{label}/verify.json": (f"{label} PASS 604", "fp8, nvfp4a16 and w4a16: 1,812 checks, all passed")
        for label in ("fp8", "nvfp4a16", "w4a16")
    },
    **{
        f"{label}/plan.json": (f"quantized to {scheme}", f"{label} PASS 604", "1,812 checks")
        for label, scheme in (("fp8", "fp8_block"), ("nvfp4a16", "nvfp4a16"), ("w4a16", "w4a16"))
    },
}  # fmt: skip
"""Record -> what the page says because of it."""
INSTEAD = {
    "gates.json": ("there are no verdicts now; run it again", "w4a16 NOT MEASURED", "Judge the run"),
    "measurements/w4a16.json": ("there are no verdicts now; run it again", "bf16 NOT MEASURED"),
    "speed.json": ("Speed was not measured", "those behind the recommendation are in choice.json only"),
    "probes/w4a16.json": ("Serving was not probed for faults under load",),
    "w4a16/verify.json": ("w4a16: not verified at all",),
    "choice.json": ("Use w4a16: it passes",),
}
"""Record -> what it says without it."""
NO_PAGE = {"measurements/fp8.json": "a run needs exactly one reference measurement, found: none"}
NOTHING = {"gates.registered.json", *(f"{label}/checkpoint/assay_manifest.json" for label in ("fp8", "nvfp4a16", "w4a16"))}
"""The page claims nothing by them: `gates.json` has its own copy of the first, measurements the hashes of the others."""


def without(whole: Path, folder: Path, record: str) -> Path:
    copy = shutil.copytree(whole, folder / MODEL)
    (copy / record).unlink()
    return copy


def test_every_record_is_taken_away_once(whole: Path) -> None:
    there = {path.relative_to(whole).as_posix() for path in whole.rglob("*.json") if path.parent.name != "report"}
    assert there == CLAIMS.keys() | NO_PAGE.keys() | NOTHING


@pytest.mark.slow
def test_what_rests_on_a_record_is_gone_without_it(whole: Path, tmp_path: Path) -> None:
    there = page_of(whole)
    for number, record in enumerate(CLAIMS):
        assert [claim for claim in CLAIMS[record] if claim not in there] == [], record
        page = page_of(without(whole, tmp_path / str(number), record))
        assert [claim for claim in CLAIMS[record] if claim in page] == [], record
        assert [said for said in INSTEAD.get(record, ()) if said not in page] == [], record


def test_records_that_the_page_does_not_rest_on(whole: Path, tmp_path: Path) -> None:
    there = page_of(whole)
    for number, record in enumerate(sorted(NOTHING)):
        assert page_of(without(whole, tmp_path / str(number), record)) == there, record


@pytest.mark.parametrize("record", NO_PAGE)
def test_without_the_reference_there_is_no_page(whole: Path, tmp_path: Path, record: str) -> None:
    with pytest.raises(AssayError, match=NO_PAGE[record]):
        write_report(without(whole, tmp_path, record))
