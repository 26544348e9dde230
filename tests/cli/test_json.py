"""Every command: with --json its record alone on stdout; without it the result on stdout, not on stderr."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Run
from deployments import make_deployment
from probe_reports import CLEAN, probed
from sensitivities import sensitivity
from synthetic_run import make_fingerprint, make_measurements, make_run
from tiny_checkpoints import make_tiny_glm4_moe

import assay_cli as cli
from assay.errors import AssayError
from assay.records.base import Interval, Record
from assay.records.calibration import Calibration, Nvfp4Inputs
from assay.records.choice.mix import Mix
from assay.records.choice.record import Choice
from assay.records.diagnosis.blame import Blame
from assay.records.diagnosis.lever import LeverReport, Observation
from assay.records.diagnosis.locate import LocateReport
from assay.records.diagnosis.sensitivity import Sensitivity
from assay.records.inspection import Inspection
from assay.records.pack import Pack
from assay.records.plan import Plan
from assay.records.preflight.power import PowerReport
from assay.records.preflight.report import PreflightReport
from assay.records.screening import Screening
from assay.records.speed import SpeedRecord, SpeedRepeat, SpeedRow
from assay.records.upgrade import Engine, UpgradeCheck
from assay.records.verdict import GateReport
from assay.records.verification import Verification
from assay_evaluate.serving.family_draft import Draft
from assay_evaluate.verdicts.run_comparison import RunComparison
from assay_pipeline.upgrading.upgrade import Checked
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_reports.publish.record import Publication
from assay_reports.schema import Report

NOTHING = Observation(setting={}, num_requests=1, rate=Interval(value=0, low=0, high=1, n=1), passes=((),), seconds=1.0)
LEVERS = LeverReport(
    label="x", baseline=NOTHING, effects=(), lever=None, also=(), smallest=(), bundle=None, sentence="nothing failed",
    seconds=1.0,
)  # fmt: skip
LOCATED = LocateReport(
    how="servers", a="a", b="b", tensor_parallel_size=1, num_prompts=1, num_tokens=1, first=None, outlier=None, remedy=None,
    sentence="they do not part", points=(), not_compared=(), seconds=1.0,
)  # fmt: skip
OLD, NEW = (Engine(label=f"vllm-{version}", where=f"/{version}", version=version) for version in ("0.32.0", "0.33.0"))
UPGRADED = UpgradeCheck(model="m", suite="quick", before=OLD, after=NEW, status="PASS", reason="nothing was lost")
CALIBRATED = Calibration(
    model="m", source="s", text=(), num_tokens=1, length=8, min_tokens=1, weights=1, starved={}, tokens_by_expert=None,
    nvfp4_inputs=Nvfp4Inputs(
        num_groups=1, num_cut_off=0, num_coarse=0, num_zeroed=0,
        largest=1.0, largest_at="w", most_zeroed=0.0, most_zeroed_at="w",
    ),
    file="w", file_sha256="0", seconds=1.0,
)  # fmt: skip


def measures(model: str, candidates: Any, *, suite: Any, run_dir: Path, on_progress: Callable[[str], None], **_: Any) -> None:
    """In place of the servers: the synthetic run's measurements, of the suite and model that were asked for."""
    on_progress("measuring")
    recipe = suite.model_dump(mode="json", by_alias=True)
    for one in make_measurements():
        changes = {"model": model, "suite": suite.name, "suite_sha256": suite.sha256, "suite_recipe": recipe}
        one.model_copy(update=changes).save(run_dir / "measurements" / f"{one.label}.json")


def speeds(self: Any) -> SpeedRecord:
    self.on_progress("measuring")
    row = SpeedRow(
        checkpoint="fp8", origin="measured", source="a benchmark", hardware="a CPU", num_gpus=0, speculation=0, prompts="chat",
        concurrency=1, repeats=(SpeedRepeat(output_tokens_s=1.0),),
    )  # fmt: skip
    return SpeedRecord(rows=(row,))


@contextlib.contextmanager
def serves(spec: Any, on_progress: Callable[[str], None]) -> Iterator[Any]:
    on_progress("vLLM loads")

    def stop() -> None:
        raise KeyboardInterrupt

    fingerprint = make_fingerprint(quantized=True)
    yield SimpleNamespace(model="m", base_url="http://127.0.0.1:1", fingerprint=fingerprint, check_alive=stop)


def returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def not_replayed(candidates: Any, **_: Any) -> Any:
    raise AssayError("no interpreter with vLLM")


STAND_INS: dict[str, Callable[..., Any]] = {
    "assay_evaluate.run.evaluate.evaluate": measures,
    "assay_evaluate.run.deployment.deploy": lambda *_, **__: make_deployment(),
    "assay_evaluate.run.deployment.check_deployable": returning(None),
    "assay_evaluate.speed.measure.LadderRun.run": speeds,
    "assay_evaluate.run.identity.checkpoint_sha256": lambda *_: "0" * 64,
    "assay_evaluate.serving.server.serve": serves,
    "assay_evaluate.serving.server.find_interpreter": returning(Path(sys.executable)),
    "assay_evaluate.serving.server.environment_for": returning((Path(sys.executable), {"vllm": "0.32.0"})),
    "assay_evaluate.serving.hardware.find_gpus": returning(()),
    "assay_evaluate.diagnosis.endpoint.find_endpoint": returning(SimpleNamespace(model="m", headers={})),
    "assay_evaluate.diagnosis.probes.run_probes.run_probes": returning(probed("m", *CLEAN, sha256="0" * 64)),
    "assay_evaluate.diagnosis.levers.search.find_levers": returning((LEVERS, None)),
    "assay_evaluate.diagnosis.locate.locate.locate_servers": returning(LOCATED),
    "assay_quantize.calibration.calibrate.calibrate": returning(CALIBRATED),
    "assay_cli.commands.measure.upgrade_check.check": returning(Checked(Path("runs/tiny-glm"), UPGRADED)),
    "assay_pipeline.serving_setup.build_serving_environment": lambda *_, **__: Path("serve"),
    "assay_evaluate.preflight.loading.replay": not_replayed,  # imported first: it has the function by name
    "assay_evaluate.serving.replay.replay": not_replayed,
    "assay_evaluate.diagnosis.gpu_check.widened.widen": lambda source, folder, widths: make_tiny_glm4_moe(folder),
    "assay_evaluate.serving.family_draft.draft_family": returning(
        Draft("mine", "MineForCausalLM", "0.32.0", {}, "model.layers", ("num_experts",))
    ),
}
"""What needs a server, a GPU or minutes; every command is otherwise the real one."""

PUBLISHED = str(Path(__file__).resolve().parents[2] / "examples" / "glm-5.2-speed" / "published.yaml")
COMMANDS: dict[str, tuple[tuple[str, ...], type[Record] | None, tuple[int, ...]]] = {
    "run": (("source", "--precisions", "w4a16", "--suite", "quick", "--no-preflight"), Report, (0, 1)),
    "preflight": (("source", "--precisions", "w4a16", "--suite", "quick"), PreflightReport, (0, 1)),
    "power": (("quick", "--model", "source"), PowerReport, (0,)),
    "plan": (("source", "-p", "w4a16"), Plan, (0,)),
    "recipe": (("source", "--budget", "5bpw", "--sensitivity", "sensitivity.json"), Mix, (0,)),
    "quantize": (("source", "-p", "w4a16"), None, (0,)),
    "inspect": (("made",), Inspection, (0,)),
    "screen": (("source", "made", "--text", "source/config.json", "--length", "16"), Screening, (0, 1)),
    "blame": (("source", "made", "--text", "source/config.json", "--length", "16", "--out", "blamed"), Blame, (0, 1)),
    "pack": (("source", "--text", "source/config.json", "--length", "16", "--out", "pack"), Pack, (0,)),
    "verify": (("made",), Verification, (0,)),
    "calibrate": (("source", "--out", "w"), Calibration, (0,)),
    "serve": (("source",), None, (130,)),
    "evaluate": (("--reference", "source", "--candidate", "made", "--suite", "quick"), Report, (0,)),
    "judge": (("source", "made", "--suite", "quick"), Report, (0, 1)),
    "upgrade-check": (("source", "--from", "old", "--to", "new", "--suite", "quick", "--no-speed"), UpgradeCheck, (0, 1)),
    "deployment": (("tiny-glm", "--profile", "cpu-emulated", "--precisions", "w4a16"), None, (0,)),
    "speed": (("tiny-glm",), SpeedRecord, (0,)),
    "probe": (("http://127.0.0.1:1",), None, (0,)),
    "lever": (("http://127.0.0.1:1",), LeverReport, (0,)),
    "locate": (("http://127.0.0.1:1", "http://127.0.0.1:2"), LocateReport, (0,)),
    "sensitivity": (("source", "--proxy", "weights", "--schemes", "w4a16"), Sensitivity, (0,)),
    "gpu-check": (("--dry-run", "--formats", "w4a16"), None, (0,)),
    "status": ((), None, (0,)),
    "choose": (("--speed", PUBLISHED, "--quality", "assumed"), Choice, (0,)),
    "compare": (("runs/tiny-glm", "others/tiny-glm"), RunComparison, (0,)),
    "gate": (("tiny-glm",), GateReport, (0, 1)),
    "report": (("tiny-glm",), Report, (0,)),
    "card": (("tiny-glm",), None, (0,)),
    "publish": (("tiny-glm/w4a16", "me/model", "--dry-run"), Publication, (1,)),
    "doctor": ((), None, (0, 1)),
    "recipes": ((), None, (0,)),
    "init": (("source", "--force"), None, (0,)),
    "setup": ((), None, (0,)),
    "family": (("source",), None, (0,)),
}
"""Command -> its words, the record that it prints (None: a list, or no record), exit codes."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of one name."""
    folder = tmp_path_factory.mktemp("json")
    make_run(folder / "runs")
    make_run(folder / "others")
    return folder


@pytest.fixture
def prepared(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """In the working directory: a source, and the two runs."""
    shutil.copytree(runs, ".", dirs_exist_ok=True)
    make_tiny_glm4_moe(Path("source"))
    for path, stand_in in STAND_INS.items():
        module, name = path.rsplit(".", 1)
        *above, last = module.rsplit(".", 1)
        holder = getattr(importlib.import_module(*above), last) if last[0].isupper() else importlib.import_module(module)
        monkeypatch.setattr(holder, name, stand_in)
    return run


def test_no_command_is_forgotten() -> None:
    registered = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    assert registered == COMMANDS.keys()


WRITES_REPORTS = {"run", "evaluate", "judge", "deployment", "report", "card"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[pytest.mark.slow] if one in WRITES_REPORTS else []) for one in COMMANDS]
)
def test_the_record_alone(prepared: Run, command: str) -> None:
    words, record, codes = COMMANDS[command]
    if "made" in words:
        assert prepared("quantize", "source", "-p", "w4a16", "--out", "made")[0] == 0
    if "sensitivity.json" in words:
        sensitivity(open_checkpoint(Path("source"))).save(Path("sensitivity.json"))
    code, out, err = prepared(command, *words, "--json")
    assert code in codes, err
    data = json.loads(out)
    if record is not None:
        record.model_validate(data)
    code, out, err = prepared(command, *words)
    assert code in codes and out, "the result is on stdout"
    with pytest.raises(json.JSONDecodeError):
        json.loads(out)
    assert not set(out.splitlines()) & set(err.splitlines())
