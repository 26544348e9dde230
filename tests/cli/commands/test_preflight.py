"""`assay preflight`: lines, exit codes, and the first step of a run."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import get_args

import datasets.config
import hollow
import pytest
from command_line import Run
from huggingface_hub import constants
from local_hub import Hub
from synthetic_run import make_measurement
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import CheckpointError
from assay.records.preflight.report import Check, CheckName, PreflightReport
from assay_evaluate.serving.hardware import Gpu
from assay_pipeline import preflight
from assay_pipeline.comparison.planned_run import PlannedRun, planned_run

EIGHT_H200 = tuple(Gpu("NVIDIA H200", 143_771 << 20, "580") for _ in range(8))
MINE = ("hardware", "plan", "disk", "memory", "split")
ALL_CHECKS = preflight.CHECKS
GLM = """schema: 1
name: small
description: "x"
source: {path: SOURCE}
family: glm4_moe
reference: {precision: fp8}
precisions: [w4a16]
suite: quick
profiles: [8xb200, 8xh200, 4xh200]
serving: {num_speculative_tokens: 1}
"""


@pytest.fixture(autouse=True)
def _only_these_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others ask the hub and the serving environment, and have tests of their own."""
    monkeypatch.setattr(preflight, "CHECKS", tuple(one for one in preflight.CHECKS if one[0] in MINE))


@pytest.fixture(autouse=True)
def _free_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on GPUs is allowed more than some machines that run these tests have free."""
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**12))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model recipe for GLM-4.7's true widths, few layers and experts."""
    source = hollow.hollow_model(tmp_path / "source", "glm-4.7")
    (tmp_path / "small.yaml").write_text(GLM.replace("SOURCE", str(source)))
    return str(tmp_path / "small.yaml")


def with_gpus(monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...]) -> None:
    for module in ("assay_evaluate.serving.hardware", "assay_pipeline.comparison.planned_run"):
        monkeypatch.setattr(f"{module}.find_gpus", lambda: gpus)


def found(out: str) -> dict[tuple[str, str | None], Check]:
    return {(check.check, check.subject): check for check in PreflightReport.model_validate_json(out).checks}


def test_a_line_for_each_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, ())
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**10))
    monkeypatch.setattr("assay_evaluate.serving.hardware.usable_memory_bytes", lambda: 4 << 30)
    make_tiny_glm4_moe(Path("tuned"))
    code, out, err = run("preflight", "tuned", "--precisions", "w4a16", "--profile", "cpu-emulated")
    lines = out.splitlines()
    assert (code, err, lines[0].split()[:3]) == (0, "", ["PASS", "hardware", "cpu-emulated"])
    assert lines[1:-1] == [
        "PASS    plan     fp8          107 tensors, 6.24 MB -> 4.47 MB",
        "PASS    plan     w4a16        107 tensors, 6.24 MB -> 3.62 MB",
        "PASS    disk     runs/tuned   1.01 GB still to be written (fp8 4.47 MB, w4a16 3.62 MB, journal, logs and report "
        "(allowed) 1 GB), 10 GB free",
        *(
            f"PASS    memory   {label:12} 3.0 GiB needed, 4.0 usable in this machine: weights 0.0 (4 bytes each), KV cache 1.0 "
            "(VLLM_CPU_KVCACHE_SPACE), allowed for the rest 2"
            for label in ("fp8", "bf16", "w4a16")
        ),
    ]
    assert lines[-1].startswith("preflight of tuned on cpu-emulated, suite quick: 7 PASS in ") and not Path("runs").exists()


def test_a_profile_that_is_not_here(run: Run, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, it is a machine elsewhere; as the first step of a run it must be here."""
    with_gpus(monkeypatch, ())
    code, out, _ = run("preflight", small, "--profile", "4xh200", "--json")
    assert (code, found(out)["hardware", "4xh200"].outcome) == (0, "UNKNOWN")
    code, out, err = run("preflight", small, "--profile", "4xh200", "--first", "--json")
    first = found(out)["hardware", "4xh200"]
    assert (code, first.outcome, first.detail.partition(",")[0]) == (
        1, "FAIL", "profile 4xh200: 4x H200 of 150 GB; this machine has no GPU",
    )  # fmt: skip
    assert first.remedy == (
        "begin the run where these GPUs are, or leave --profile out (make: PROFILE) to have one chosen for this machine; "
        "`assay preflight --profile 4xh200` alone checks the run for a machine elsewhere"
    )
    assert err.splitlines()[-1].endswith("or skip it with PREFLIGHT=0")
    code, out, _ = run("preflight", small, "--json")
    there = found(out)
    assert (code, there["hardware", "4xh200"].outcome) == (1, "FAIL"), "the first on which groups can be shared"
    assert there["hardware", "4xh200"].remedy == (
        "--profile 4xh200 checks the run for that machine; known profiles: `assay recipes`"
    )


def test_a_profile_that_cannot_serve_it_is_not_chosen(run: Run, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, EIGHT_H200)
    assert planned_run(small, here=True).profile.name == "4xh200", "8xh200 comes first and cannot share its groups"
    Path(small).write_text(Path(small).read_text().replace(", 4xh200]", "]"))
    code, _, err = run("run", small)
    assert (code, Path("runs").exists()) == (2, False)
    assert err.startswith(
        "error: model recipe small: this machine has the GPUs of 8xh200, which cannot serve it (8xh200: precision fp8 cannot "
        "be served on profile 8xh200: shared_expert down_proj: 192 inputs on each of 8 ranks are not a multiple of 128, the "
    )


def test_broken_groups_and_a_full_disk(run: Run, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, ())
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, out, _ = run("preflight", small, "--profile", "8xh200")
    lines = [line.strip() for line in out.splitlines()]
    fails = [pair for pair in itertools.pairwise(lines) if pair[0].startswith("FAIL")]
    assert (code, fails) == (
        1,
        [
            (
                "FAIL    disk     runs/small 19.3 GB still to be written (fp8 4.95 GB, w4a16 4.35 GB, journal, logs and report "
                "(allowed) 10 GB), 1 kB free",
                "-> free 19.6 GB, or put the runs on another disk (--runs DIR; make: RUNS=DIR)",
            ),
            (
                "FAIL    split    fp8        shared_expert down_proj: 192 inputs on each of 8 ranks are not a multiple of 128, "
                "the block that shares a scale (model.layers.3.mlp.shared_experts.down_proj.weight); not divisible "
                "either: shared_expert gate_proj, shared_expert up_proj, routed_expert down_proj and 2 more",
                "-> what fits: one scale per row (fp8-channel), or a profile with tensor-parallel-size 4",
            ),
            (
                "FAIL    split    w4a16      shared_expert down_proj: 192 inputs on each of 8 ranks are not a multiple of 128, "
                "the group that shares a scale (model.layers.3.mlp.shared_experts.down_proj.weight); not divisible "
                "either: routed_expert down_proj",
                "-> what fits: a group size of 64 (w4a16-g64) or 32 (w4a16-g32) or 16 (nvfp4a16), or a profile with "
                "tensor-parallel-size 4",
            ),
        ],
    )


def test_a_precision_that_cannot_be_made(run: Run, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert of the MTP block is missing in the source."""
    with_gpus(monkeypatch, ())
    folder = Path(small).parent / "source"
    config = hollow.GLM47_CONFIG | {"num_hidden_layers": 4, "n_routed_experts": 4}
    shutil.rmtree(folder)
    gone = "model.layers.4.mlp.experts.2.down_proj.weight"
    shapes = ((name, shape) for name, shape in hollow.glm4_shapes(config, mtp_head=False) if name != gone)
    hollow.write_hollow(folder, config, shapes, shards=3)
    code, out, _ = run("preflight", small, "--profile", "4xh200", "--json")
    assert code == 1
    assert found(out)["plan", "w4a16"] == Check(
        check="plan", subject="w4a16", outcome="FAIL",
        detail=f"{folder}: {gone} is missing from the MTP block: vLLM would load it and draft noise",
        remedy="complete the download, or leave the block out with `--mtp drop`",
    )  # fmt: skip


def test_a_run_stops_at_its_first_step(run: Run, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, EIGHT_H200)
    monkeypatch.setattr("assay_evaluate.serving.server.environment_for", lambda profile: (Path("python"), {}))
    fails = Check(check="disk", subject=None, outcome="FAIL", detail="full", remedy="free some")
    monkeypatch.setattr(preflight, "CHECKS", (("disk", lambda run, on_progress: [fails]),))
    code, out, err = run("run", small)
    assert (code, Path("runs").exists()) == (1, False)
    assert err == "nothing was written: the preflight failed; mend what it names, or skip it with --no-preflight\n"
    assert [line.split() for line in out.splitlines()[:2]] == [["FAIL", "disk", "full"], ["->", "free", "some"]]
    assert PreflightReport.model_validate_json(run("run", small, "--json")[1]).checks == (fails,)
    code, out, err = run("preflight", small, "--first")
    assert code == 1 and err.splitlines()[-1].endswith("or skip it with PREFLIGHT=0")


def test_a_run_on_gpus_that_are_not_here(run: Run, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step says so; without it the run itself does."""
    with_gpus(monkeypatch, ())
    monkeypatch.setattr("assay_evaluate.serving.server.environment_for", lambda profile: (Path("python"), {}))
    code, out, err = run("run", small, "--profile", "4xh200")
    assert (code, out.split()[:3], Path("runs").exists()) == (1, ["FAIL", "hardware", "4xh200"], False)
    code, _, err = run("run", small, "--profile", "4xh200", "--no-preflight")
    assert (code, Path("runs").exists()) == (2, False)
    assert err.startswith("error: profile 4xh200 needs 4x H200, this machine has no GPU; leave --profile out")


def test_servers_that_run_already(run: Run, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, ())
    (tmp_path / "mine.yaml").write_text(
        "schema: 1\nname: mine\ndescription: x\nhardware: {device: cuda}\n"
        "endpoints: {fp8: {url: 'http://localhost:1'}, w4a16: {url: 'http://localhost:2'}}\n"
    )
    code, out, _ = run("preflight", small, "--profile", str(tmp_path / "mine.yaml"), "--json")
    there = found(out)
    assert (code, sorted(check for check, _ in there)) == (0, ["disk", "hardware", "plan", "plan"])
    assert there["hardware", "mine"] == Check(
        check="hardware", subject="mine", outcome="UNKNOWN",
        detail="the servers of its endpoints (fp8, w4a16) run already: their GPUs, environment, context, memory, tensor "
        "parallelism and loaders are not looked at",
        remedy="`assay preflight` with a profile for their machine, without `endpoints`, looks at these",
    )  # fmt: skip


@pytest.mark.slow
def test_nothing_is_looked_at_when_all_is_made_and_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, ())
    looked: list[str] = []
    monkeypatch.setattr(preflight, "CHECKS", (("disk", lambda run, on_progress: looked.append(run.name or "run") or ()),))
    make_tiny_glm4_moe(Path("tuned"))
    first = ("preflight", "tuned", "--precisions", "w4a16", "--profile", "cpu-emulated", "--first")
    assert run("quantize", "tuned", "--precisions", "fp8,w4a16")[0] == 0
    planned = planned_run("tuned", precisions=["w4a16"], profile="cpu-emulated")
    measurements = planned.run_dir / "measurements"
    for number, one in enumerate(planned.checkpoints):
        assert run(*first)[0] == 0 and len(looked) == number + 1, "something is not measured yet"
        make_measurement(one.label, planned.suite).save(measurements / f"{one.label}.json")
    code, out, err = run(*first)
    assert (code, out, err, len(looked)) == (
        0, "", "preflight: nothing is looked at, runs/tuned is made and measured already\n", 3,
    )  # fmt: skip
    code, out, err = run(*first, "--json")
    found = PreflightReport.model_validate_json(out)
    assert (code, found.checks, found.outcome, found.precisions, len(looked)) == (0, (), "PASS", ("fp8", "w4a16"), 3)
    assert run(*first[:-1])[0] == 0 and len(looked) == 4, "the command alone always looks"
    run(*first, "--suite", "full")
    assert len(looked) == 5, "another suite is not measured"
    (planned.run_dir / "w4a16" / "checkpoint" / "assay_manifest.json").unlink()
    run(*first)
    assert len(looked) == 6, "a checkpoint is gone"


def test_a_reference_on_the_hub_is_judged_before_it_is_downloaded(
    run: Run, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its headers: eight ranks cannot share the FP8 blocks of its shared expert."""
    with_gpus(monkeypatch, EIGHT_H200)
    config = {**hollow.GLM47_CONFIG, "num_hidden_layers": 4, "n_routed_experts": 4}
    shapes, dtypes = hollow.fp8_blocks(hollow.glm4_shapes(config, mtp_head=False))
    released = {**config, "quantization_config": hollow.FP8_BLOCKS}
    hub = Hub(hollow.write_hollow(tmp_path / "release", released, shapes, shards=2, dtypes=dtypes))
    hub.is_hollow = True
    hub.use(monkeypatch, tmp_path / "home")
    text = Path(small).read_text().replace("{precision: fp8}", "{release: {hub: org/model}}")
    Path(small).write_text(text)
    try:
        named = run("evaluate", small, "--profile", "8xh200")
        Path(small).write_text(text.replace(", 4xh200]", "]"))
        chosen = run("evaluate", small)
    finally:
        hub.close()
    why = "reference cannot be served on profile 8xh200: shared_expert down_proj: 192 inputs on each of 8 ranks"
    assert named[0] == chosen[0] == 2
    assert named[2].startswith(f"error: {why}")
    assert chosen[2].startswith("error: model recipe small: this machine has the GPUs of 8xh200, which cannot serve it")
    assert why in chosen[2]
    shards = {name: num for name, num in hub.bytes_of.items() if name.endswith(".safetensors")}
    assert shards and max(shards.values()) < 10**6, "headers only"
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_every_check_is_made() -> None:
    """In the order in which they are shown; each has the name under which it is recorded."""
    assert sorted(name for name, _ in ALL_CHECKS) == sorted(get_args(CheckName))
    assert {look.__name__ for _, look in ALL_CHECKS} == {name for name in vars(preflight) if name.startswith("check_")}


SUITE = """schema: 1
name: mine
description: "x"
seed: eval-1
tasks: [{kind: lm_eval, name: gpqa, tasks: [ours], include_path: FOLDER, max_tokens: 65536}]
"""


def test_what_a_suite_needs_of_checkpoint_and_hub(
    run: Run, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Tokenizer, data sets, context and sampling, through the command: the words are those of the stage's own tests."""
    with_gpus(monkeypatch, ())
    wanted = ("tokenizer", "data sets", "context", "sampling")
    monkeypatch.setattr(preflight, "CHECKS", tuple(one for one in ALL_CHECKS if one[0] in wanted))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ours.yaml").write_text("task: ours\ndataset_path: Idavidrein/gpqa\noutput_type: generate_until\n")
    (tmp_path / "mine.yaml").write_text(SUITE.replace("FOLDER", str(tmp_path / "tasks")))
    thinks = {"num_speculative_tokens: 1": "num_speculative_tokens: 1, reasoning_parser: glm45, max_model_len: 65536"}
    Path(small).write_text(Path(small).read_text().replace(*next(iter(thinks.items()))))
    code, out, _ = run("preflight", small, "--profile", "4xh200", "--suite", str(tmp_path / "mine.yaml"), "--json")
    assert (code, [(check.check, check.subject, check.outcome) for check in found(out).values()]) == (
        1,
        [
            ("tokenizer", "source", "PASS"),
            ("data sets", "Idavidrein/gpqa", "UNKNOWN"),
            ("context", "gpqa", "FAIL"),
            ("sampling", None, "FAIL"),
        ],
    )


def test_what_cannot_be_looked_at_is_unknown(run: Run, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(run: PlannedRun, on_progress: object) -> list[Check]:
        raise CheckpointError("org/model: gated\nand more")

    with_gpus(monkeypatch, ())
    monkeypatch.setattr(preflight, "CHECKS", (("tokenizer", look),))
    code, out, _ = run("preflight", small, "--profile", "4xh200", "--json")
    assert (code, list(found(out).values())) == (
        0, [Check(check="tokenizer", subject=None, outcome="UNKNOWN", detail="could not be looked at: org/model: gated")],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("head_dim", "64", "head_dim must be a whole number RANGE, got '64'; correct the config"),
        ("num_experts_per_tok", [2], "num_experts_per_tok must be a whole number RANGE, got [2]; correct the config"),
        ("num_experts_per_tok", 9, "num_experts_per_tok is 9, and a layer has 4 experts; correct the config"),
        ("num_experts_per_tok", -1, "num_experts_per_tok must be a whole number RANGE, got -1; correct the config"),
    ],
)  # fmt: skip
def test_a_number_of_config_json_that_cannot_be(
    run: Run, monkeypatch: pytest.MonkeyPatch, key: str, value: object, line: str
) -> None:
    with_gpus(monkeypatch, ())
    checks = (("cost", preflight.check_cost), ("memory", preflight.check_memory))
    monkeypatch.setattr(preflight, "CHECKS", checks)
    config = Path(make_tiny_glm4_moe(Path("tuned")), "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), key: value}))
    code, out, _ = run("preflight", "tuned", "--precisions", "w4a16", "--suite", "quick", "--profile", "4xh200", "--json")
    subject = "cost" if key == "num_experts_per_tok" else "memory"
    assert (code, found(out)[subject, None].detail) == (
        0, f"could not be looked at: config.json: {line.replace('RANGE', 'from 1 to 1000000000')}",
    )  # fmt: skip


def test_a_profile_that_does_not_say_how_many_gpus(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, ())
    monkeypatch.setattr(preflight, "CHECKS", (("cost", preflight.check_cost),))
    make_tiny_glm4_moe(Path("tuned"))
    (tmp_path / "mine.yaml").write_text("schema: 1\nname: mine\nhardware: {device: cuda, gpu: H200}\n")
    profile = str(tmp_path / "mine.yaml")
    code, out, err = run("preflight", "tuned", "--precisions", "w4a16", "--suite", "quick", "--profile", profile, "--json")
    assert (code, err, {check.outcome for check in found(out).values()}) == (0, "", {"UNKNOWN"})
