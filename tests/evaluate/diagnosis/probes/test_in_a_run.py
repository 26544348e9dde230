"""Probes as part of a run: a checkpoint that is served for them, and a suite that asks for them. Scripted servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from probe_stub import Fault, StubServer

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.probe import ProbeReport, ProbeSettings, load_probes
from assay.records.serving import Fingerprint
from assay_evaluate.diagnosis.probes.run_probes import PROBES, probe_checkpoint
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import Server, ServerSpec

FEW = ProbeSettings(num_requests=8, num_garble_requests=8, num_alone=2, long_tokens=100, concurrency=4, num_tools=(1,))
PROFILE = load_recipe(ProfileRecipe, "cpu-emulated").model_copy(update={"concurrency": 3})


@dataclass
class World:
    """Serves every spec by a stub that drafts if it is told to."""

    fault: Fault = field(default_factory=Fault)
    """Of servers that draft."""
    specs: list[ServerSpec] = field(default_factory=list)
    most_at_once: int = 0

    def fingerprint(self, spec: ServerSpec) -> Fingerprint:
        return Fingerprint(
            server="scripted", versions={}, hardware={}, profile=spec.profile.name, flags={},
            environment=dict(spec.profile.environment), speculation={"method": "mtp"} if spec.speculate else None,
            checkpoint_flags={}, emulated=None, kernels=(),
        )  # fmt: skip

    @contextmanager
    def start(self, spec: ServerSpec, on_progress: Callable[[str], None]) -> Iterator[Server]:
        self.specs.append(spec)
        running = len(self.specs) - self.most_at_once
        assert running == 1, "two servers at once fit on no machine that is sized for one"
        fault = self.fault if spec.speculate else None
        with StubServer(fault=fault, drafts=spec.speculate) as stub:
            yield Server(stub.base_url, "stub", 1024, self.fingerprint(spec), None)
        self.most_at_once += 1


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 60}')
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    return folder


def probe(world: World, folder: Path, names: list[str] | None = None) -> ProbeReport:
    spec = ServerSpec(make_checkpoint(folder / "made"), PROFILE, Serving(), True, folder / "vllm.log")
    return probe_checkpoint(
        spec, FEW, names, label="w4a16", checkpoint_sha256="a" * 64, ledger=folder / "ledger.jsonl", start_server=world.start
    )


@pytest.mark.slow
def test_a_checkpoint_is_served_with_and_then_without_speculation(tmp_path: Path) -> None:
    world = World()
    report = probe(world, tmp_path)
    assert [(spec.speculate, spec.log_path.name) for spec in world.specs] == [(True, "vllm.log"), (False, "vllm-undrafted.log")]
    assert all(spec.profile.environment["VLLM_COMPUTE_NANS_IN_LOGITS"] == "1" for spec in world.specs)
    assert [result.name for result in report.results] == list(PROBES)
    pair = report.result("speculation")
    assert pair is not None and (pair.status, pair.trials, pair.events) == ("ok", 4, 0)
    assert (report.label, report.checkpoint_sha256) == ("w4a16", "a" * 64)
    assert report.fingerprint == world.fingerprint(world.specs[0])


def test_the_pair_is_only_made_when_asked_for(tmp_path: Path) -> None:
    world = World()
    report = probe(world, tmp_path, ["argmax"])
    assert [spec.speculate for spec in world.specs] == [True]
    assert [result.name for result in report.results] == ["argmax"]


def test_drafts_that_change_the_text(tmp_path: Path) -> None:
    """What is reported agrees with what is chosen, so only the server without drafts shows it."""
    world = World(Fault(decode=lambda call, position, logits: -logits if position == 5 else logits))
    pair = probe(world, tmp_path, ["speculation"]).result("speculation")
    assert pair is not None and pair.status == "alarm" and pair.details["first_parting"] == 5


@pytest.mark.slow
def test_a_suite_asks_for_probes(tmp_path: Path) -> None:
    """The reference and every candidate are probed while they are served, the repeat is not; a second run starts nothing."""
    suite = SuiteRecipe.model_validate(
        {
            "schema": 1, "name": "small", "description": "probed", "seed": "eval-small", "acceptance": False,
            "tasks": [{"kind": "arithmetic", "name": "arithmetic", "num_items": 2, "num_steps": [2], "max_tokens": 16}],
            "probes": FEW.model_dump(),
        }
    )  # fmt: skip
    world = World()
    candidates = [
        Candidate("fp8", make_checkpoint(tmp_path / "reference"), is_reference=True),
        Candidate("w4a16", make_checkpoint(tmp_path / "candidate")),
    ]

    def run() -> list[str]:
        lines: list[str] = []
        measured = evaluate(
            "tiny", candidates, suite=suite, profile=PROFILE, serving=Serving(num_speculative_tokens=1),
            run_dir=tmp_path / "run", on_progress=lines.append, start_server=world.start, foresee=world.fingerprint,
        )  # fmt: skip
        assert [m.label for m in measured] == ["fp8", "fp8-repeat", "w4a16"]
        return lines

    lines = run()
    found = load_probes(tmp_path / "run")
    assert [report.label for report in found] == ["fp8", "w4a16"]
    assert {report.settings.concurrency for report in found} == {3}, "the profile's"
    assert [result.name for result in found[0].results] == [name for name in PROBES if name != "speculation"]
    assert len({report.checkpoint_sha256 for report in found}) == 2 and not any(report.alarms for report in found)
    assert any(line.startswith("w4a16: garble: 0 of ") for line in lines)
    assert any(line.startswith("w4a16: probes send at most ") for line in lines)
    assert len(world.specs) == 2
    run()
    assert len(world.specs) == 2


def test_settings_of_a_suite_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_requests"):
        SuiteRecipe.model_validate(
            {"schema": 1, "name": "x", "description": "x", "seed": "eval-x", "tasks": [], "probes": {"num_requests": 1}}
        )
