"""A candidate on a deployment profile, against scripted servers, where everything is known; on a real vLLM it is deployed in
tests/end_to_end/test_deployed.py."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_server import Scripted
from given_servers import sampled_text
from probe_reports import ALARM, CLEAN, probed, result
from scripted_world import OF_CANDIDATE, PROFILE, World, make_folders, pair_of
from small_suite import SERVING, solve
from small_suite import SUITE as SMALL

from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe
from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.deployment.record import Deployment, load_deployments
from assay.records.measurement import Measurement
from assay.records.probe import ProbeReport
from assay_evaluate.divergence.documents import own_suite
from assay_evaluate.run import deployment
from assay_evaluate.verdicts.gates import judge

pytestmark = pytest.mark.slow


assert SMALL.divergence is not None
SUITE = SMALL.model_copy(update={"divergence": SMALL.divergence.model_copy(update={"num_documents": 10})})
"""Twenty texts, in two languages: fewer are not judged."""
ELSEWHERE = PROFILE.model_copy(update={"name": "elsewhere", "concurrency": 2})
GATES = GateRecipe.model_validate(
    {
        "schema": 1,
        "name": "small",
        "gates": [
            {"kind": "score", "task": "arithmetic", "max_drop": 0.05},
            {"kind": "divergence", "metric": "kl_mean", "max": 0.10},
            {"kind": "divergence", "metric": "top1_agreement", "min": 0.90},
            {"kind": "acceptance", "max_drop": 0.3},
        ],
    }
)


class Deployed(World):
    """Texts are drafted as well; a share of it that depends on the profile is accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted = 15
        self.reply["reference"] = functools.partial(self.answer, 1.0)
        self.reply["candidate"] = functools.partial(self.answer, OF_CANDIDATE)

    def answer(self, scale: float, body: dict[str, Any]) -> Scripted:
        found = solve(body)
        if found.speculation:
            return found
        text = sampled_text(body["messages"][-1]["content"], scale, body["max_tokens"])
        return Scripted(text, finish_reason="length", speculation=(20, 20, self.accepted))


@dataclass(frozen=True)
class Case:
    """A run that was measured, in a folder of its own, and the servers of the test."""

    world: Deployed
    folders: dict[str, Path]
    measured: list[Measurement]

    @property
    def run_dir(self) -> Path:
        return self.folders["reference"].parent / "run"

    def measure(self, *, own_texts: bool = True, suite: SuiteRecipe = SUITE) -> list[Measurement]:
        return measure(self.world, self.folders, suite, own_texts=own_texts)

    def deploy(
        self,
        checkpoint: str = "candidate",
        *,
        profile: ProfileRecipe = ELSEWHERE,
        gates: GateRecipe = GATES,
        of: Measurement | None = None,
        probed: ProbeReport | None = None,
    ) -> Deployment:
        return deployment.deploy(
            of or self.measured[2],
            self.folders[checkpoint],
            judge(self.measured, gates, model="tiny"),
            profile=profile,
            run_dir=self.run_dir,
            probed=probed,
            start_server=self.world.start,
        )

    def num_replies_asked(self) -> int:
        servers = self.world.servers.get("candidate", [])
        return sum(server.count("/v1/chat/completions") for server in servers)


def measure(world: World, folders: dict[str, Path], suite: SuiteRecipe, *, own_texts: bool) -> list[Measurement]:
    run_dir = folders["reference"].parent / "run"
    return world.measure(run_dir, pair_of(folders), suite, serving=SERVING, own_texts=own_texts)


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints and their run, without own texts."""
    place = tmp_path_factory.mktemp("measured")
    measure(Deployed(), make_folders(place), SUITE, own_texts=False)
    return place


@pytest.fixture
def case(measured_once: Path, tmp_path: Path) -> Case:
    place = tmp_path / "case"
    shutil.copytree(measured_once, place)
    measured = [Measurement.load(place / "run" / "measurements" / f"{label}.json") for label in ("fp8", "fp8-repeat", "w4a16")]
    return Case(Deployed(), {name: place / name for name in ("reference", "candidate")}, measured)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[ProbeReport]:
    """What the probes of the deployed server find; the last one counts."""
    found = [probed("w4a16", *CLEAN)]
    monkeypatch.setattr(deployment, "probe_served", lambda *_, **__: found[-1])
    return found


def statuses(record: Deployment) -> dict[str, str]:
    return {one.gate: one.status for one in record.checks}


ALL_PASS = {"divergence kl_mean": "PASS", "divergence top1_agreement": "PASS", "acceptance": "PASS", "probes": "PASS"}


def test_own_texts_are_written_later_and_the_verdict_travels(case: Case, probes: list[ProbeReport]) -> None:
    """First without them, where nothing is claimed; then they are written, and no task is asked again."""
    without = case.deploy()
    assert statuses(without) == {**dict.fromkeys(ALL_PASS, "NOT MEASURED"), "probes": "PASS"}
    assert (without.divergence, without.noise_floor, without.acceptance, without.outcome) == (None, None, None, "NOT MEASURED")
    assert without.sentence == (
        "whether the verdict UNDERPOWERED also holds on elsewhere is not known: "
        "divergence kl_mean: No divergence for w4a16: w4a16 wrote no "
        "texts of its own on cpu-emulated; `assay evaluate --own-texts` there writes them and measures nothing again"
    )
    assert case.measure() == case.measured == case.measure()
    assert case.num_replies_asked() == 20
    assert len(case.world.servers["candidate"]) == 2, "one deployed, one to write; once they are written, none"
    record = case.deploy()
    assert statuses(record) == ALL_PASS
    assert record.sentence == (
        "the verdict UNDERPOWERED also holds on elsewhere: 4 checks passed "
        "(divergence kl_mean; divergence top1_agreement; acceptance; probes)"
    )
    judged = judge(case.measured, GATES, model="tiny")
    assert (record.outcome, record.verdict) == ("PASS", judged.overall["w4a16"])
    assert record.served_differently == ("profile (cpu-emulated, elsewhere elsewhere)",)
    for one in (record.divergence, record.noise_floor):
        assert one is not None
        assert (one.num_documents, one.kl_max, one.top1_agreement.value) == (20, 0.0, 1.0)
        assert one.reference_checkpoint_sha256 == case.measured[2].checkpoint_sha256
    drafts = {
        "num_drafts": 400, "num_draft_tokens": 400, "num_accepted_tokens": 300, "rate": 0.75, "mean_length": 1.75,
        "num_replies": 20, "rate_standard_error": 0.0,
    }  # fmt: skip
    for accepted in (record.acceptance, record.acceptance_judged):
        assert accepted is not None and accepted.model_dump() == drafts
    assert (record.alarms, record.alarms_judged, record.not_measured) == ((), None, {})

    assert Deployment.load(case.run_dir / "deployment" / "elsewhere" / "w4a16.json") == record
    assert load_deployments(case.run_dir, case.measured, judged) == ((record,), ())
    for changed in ({"gate_recipe_sha256": "0" * 64}, {"overall": {"w4a16": "FAIL"}}):
        assert load_deployments(case.run_dir, case.measured, judged.model_copy(update=changed)) == ((), (record,))


def other_logits(world: Deployed, probes: list[ProbeReport]) -> None:
    world.scale = {"elsewhere": 1.3}


def no_drafts(world: Deployed, probes: list[ProbeReport]) -> None:
    world.accepted = 1


def an_alarm(world: Deployed, probes: list[ProbeReport]) -> None:
    probes.append(probed("w4a16", *ALARM))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "failed", "words"),
    [
        (other_logits, {"divergence kl_mean"}, "The limit is a tenth of the gate's 0.1; its own repeat on cpu-emulated: 0"),
        (no_drafts, {"acceptance"}, "75 % of drafted tokens accepted in cpu-emulated, 5 % in elsewhere"),
        (an_alarm, {"probes"}, "garble: 3 of 2000 replies are garbled"),
    ],
)
def test_a_deployment_that_serves_something_else_fails(
    case: Case, probes: list[ProbeReport], fault: Callable[[Deployed, list[ProbeReport]], None], failed: set[str], words: str
) -> None:
    """Also after it served the right thing: what an earlier deployment answered is not taken for this one's."""
    case.measure()
    assert case.deploy().outcome == "PASS"
    fault(case.world, probes)
    record = case.deploy()
    assert {gate for gate, status in statuses(record).items() if status == "FAIL"} == failed
    assert {gate for gate, status in statuses(record).items() if status == "PASS"} == ALL_PASS.keys() - failed
    assert record.outcome == "FAIL"
    assert record.sentence.startswith("the verdict UNDERPOWERED does not hold on elsewhere: ") and words in record.sentence


def test_an_alarm_that_was_there_before_is_no_reason(case: Case, probes: list[ProbeReport]) -> None:
    probes.append(probed("w4a16", *ALARM))
    record = case.deploy(probed=probes[-1])
    assert (record.checks[-1].status, record.alarms, record.alarms_judged) == ("PASS", ("garble",), ("garble",))
    assert record.checks[-1].detail == "No new alarm in 2 probes, 2,400 requests; on cpu-emulated garble alarmed as well."
    probes.append(probed("w4a16", CLEAN[0], result("garble", None, None, "no streams")))
    check = case.deploy(probed=probed("w4a16", *CLEAN)).checks[-1]
    assert (check.status, check.detail) == ("NOT MEASURED", "Ran on cpu-emulated and could not here: garble.")


def test_own_texts_are_fewer_than_the_references() -> None:
    full = load_recipe(SuiteRecipe, "full")
    own = own_suite(full)
    assert own is not None and own.divergence is not None and full.divergence is not None
    assert (own.divergence.num_documents, own.divergence.suite_documents) == (24, 20)
    assert (full.divergence.num_documents, full.divergence.suite_documents) == (100, 20)
    assert own_suite(full.model_copy(update={"divergence": None})) is None


def test_a_suite_without_divergence_has_nothing_to_compare(case: Case, probes: list[ProbeReport]) -> None:
    without = SUITE.model_copy(update={"divergence": None})
    gates = GATES.model_copy(update={"gates": (GATES.gates[0],)})
    measured = case.measured[2].model_copy(update={"suite_recipe": without.model_dump(mode="json", by_alias=True)})
    record = case.deploy(of=measured, gates=gates)
    assert statuses(record) == {"divergence": "NOT MEASURED", "acceptance": "NOT MEASURED", "probes": "PASS"}
    assert record.outcome == "NOT MEASURED"


def test_another_checkpoint_or_the_same_profile_is_refused(case: Case, probes: list[ProbeReport]) -> None:
    with pytest.raises(MeasureError, match=r"reference: is not the checkpoint that was measured as w4a16 \("):
        case.deploy("reference")
    with pytest.raises(MeasureError, match="w4a16: was judged on cpu-emulated itself"):
        case.deploy(profile=PROFILE)
    given = case.measured[2].fingerprint.model_copy(update={"server": "external"})
    with pytest.raises(MeasureError, match="w4a16: was measured at a server that ran already"):
        case.deploy(of=case.measured[2].model_copy(update={"fingerprint": given}))
    assert case.world.servers == {}


def test_the_model_is_served_as_it_was_measured_and_the_hardware_as_the_profile_says(case: Case) -> None:
    one = case.measured[2]
    flags = {
        "reasoning-parser": "glm45", "tool-call-parser": "glm47", "enable-auto-tool-choice": True, "max-model-len": 4096,
        "tensor-parallel-size": 8, "kv-cache-dtype": "fp8", "max-logprobs": 128,
    }  # fmt: skip
    drafting = {"method": "mtp", "num_speculative_tokens": 3}
    fingerprint = one.fingerprint.model_copy(update={"flags": flags, "speculation": drafting})
    serving = deployment.serving_of(one.model_copy(update={"fingerprint": fingerprint}))
    assert serving.model_dump(exclude_defaults=True) == {
        "reasoning_parser": "glm45",
        "tool_call_parser": "glm47",
        "max_model_len": 4096,
        "vllm": {
            "enable-auto-tool-choice": True, "reasoning-parser": "glm45", "tool-call-parser": "glm47",
            "speculative-config": drafting,
        },
    }  # fmt: skip
