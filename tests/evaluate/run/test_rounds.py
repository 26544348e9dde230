"""Tasks that are asked again while the gates cannot decide: whole runs against scripted servers that sample."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import Scripted
from scripted_world import PROFILE, World, make_folders

from assay.errors import MeasureError
from assay.recipes.gate import GateRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.suite_files import as_model_asks
from assay.records.measurement import Measurement
from assay.records.serving import Fingerprint
from assay.records.verdict import GateReport
from assay_evaluate.run import reply_evidence
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.serving.server import ServerSpec
from assay_evaluate.statistics.item_pairs import find_task, pair_items
from assay_evaluate.tasks.generated import arithmetic_items
from assay_evaluate.verdicts.gates import judge
from assay_reports.numbers import task_numbers

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1,
        "name": "sampled",
        "seed": "eval-rounds",
        "tasks": [
            {"kind": "arithmetic", "name": "sums", "languages": ["en"], "num_items": 60, "max_tokens": 64, "temperature": 1.0,
             "num_samples": {"min": 1, "max": 5}},
            {"kind": "arithmetic", "name": "greedy", "languages": ["zh"], "num_items": 4, "max_tokens": 64},
        ],
        "acceptance": False,
    }
)  # fmt: skip
GATES = GateRecipe.model_validate(
    {"schema": 1, "name": "sampled", "gates": [{"kind": "score", "task": "sums", "max_drop": 0.15}]}
)
ANSWERS = {item.prompt: item.answer for task in SUITE.tasks for item in arithmetic_items(task, SUITE.seed)}  # type: ignore[arg-type]


def sampled(chance: float, salt: str = "") -> Callable[[dict[str, Any]], Scripted]:
    """A model that is right in this share of its replies; the same request, seed included, gets the same reply."""

    def reply(body: dict[str, Any]) -> Scripted:
        drawn = int(hashlib.sha256(f"{salt}{json.dumps(body, sort_keys=True)}".encode()).hexdigest()[:8], 16) / 16**8
        prompt = body["messages"][-1]["content"]
        is_right = body["temperature"] == 0 or drawn < chance
        return Scripted(f"#### {ANSWERS[prompt] if is_right else -1}")

    return reply


@pytest.fixture(autouse=True)
def rounds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked twice, to see whether a server does as it is told, belongs to no round."""
    monkeypatch.setattr(reply_evidence, "FIRST_QUESTIONS", 0)


class Seeded(World):
    """On GPUs requests carry a seed: two samples of an item are two requests."""

    def fingerprint(self, spec: ServerSpec) -> Fingerprint:
        return super().fingerprint(spec).model_copy(update={"hardware": {"gpus": "x"}})


class Run:
    """One run's folder, its servers, and what was said."""

    def __init__(self, place: Path, candidates: tuple[str, ...] = ("candidate",)) -> None:
        self.world, self.lines = Seeded(), list[str]()
        self.folders = make_folders(place)
        for name in candidates:
            if name not in self.folders:
                self.folders[name] = place / name
                self.folders[name].mkdir()
                (self.folders[name] / "config.json").write_text(json.dumps({"vocab_size": 128}))
                (self.folders[name] / "model.safetensors").write_bytes(f"weights of {name}".encode())
        self.candidates, self.run_dir = candidates, place / "run"
        self.world.reply["reference"] = sampled(0.7, "reference")

    def __call__(self, suite: SuiteRecipe = SUITE, gates: GateRecipe | None = GATES) -> dict[str, Measurement]:
        self.lines.clear()
        compared = [Candidate(name, self.folders[name]) for name in self.candidates]
        candidates = [Candidate("fp8", self.folders["reference"], is_reference=True), *compared]
        found = self.world.measure(self.run_dir, candidates, suite, gates=gates, on_progress=self.lines.append)
        return {one.label: one for one in found}

    def num_starts(self, name: str) -> int:
        return len(self.world.servers.get(name, []))

    def num_asked(self, name: str) -> int:
        """Sampled questions, on all servers of the checkpoint."""
        bodies = [body for server in self.world.servers.get(name, []) for path, body in server.requests]
        return sum(body.get("temperature") == 1.0 for body in bodies if "messages" in body)


def judged(found: dict[str, Measurement], gates: GateRecipe = GATES) -> GateReport:
    return judge(list(found.values()), gates, model="tiny")


def rounds_of(measurement: Measurement, task: str = "sums") -> list[int]:
    found = find_task(measurement, task)
    assert found is not None
    return [one.num_samples for one in found.rounds]


@pytest.mark.slow
def test_a_copy_stops_early_and_the_reference_is_its_own_noise_floor(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.world.reply["reference"] = sampled(0.99, "reference")
    run.world.reply["candidate"] = sampled(0.99, "candidate")
    found = run()
    report = judged(found)
    assert report.overall["candidate"] == "PASS"
    assert (rounds_of(found["fp8"]), rounds_of(found["candidate"])) == ([2], [1])
    assert (run.num_asked("reference"), run.num_asked("candidate")) == (2 * 60, 60)
    looks = report.verdicts[-1].looks
    assert [(look.reference_samples, look.candidate_samples, look.num_items) for look in looks] == [(2, 1, 60)]
    assert looks[0].p_pass < looks[0].level < looks[0].alpha_spent + 1e-12 < 0.025

    repeat, reference = found["fp8-repeat"], found["fp8"]
    ours, again = find_task(reference, "sums"), find_task(repeat, "sums")
    assert ours is not None
    assert again is not None
    second = {one.item: one.correct for one in ours.items if one.sample == 1}
    assert {one.item: one.correct for one in again.items} == second
    first = ours.model_copy(update={"items": tuple(one for one in ours.items if one.sample == 0)})
    assert report.verdicts[0].candidate == "fp8-repeat"
    assert report.verdicts[0].observed == pair_items(first, again).drop(0.95)
    greedy = [body for _, body in run.world.servers["reference"][0].requests if body.get("temperature") == 0]
    assert Counter(body["messages"][0]["content"] for body in greedy if "messages" in body).most_common()[-1][1] == 2


@pytest.mark.slow
def test_a_clear_loss_fails_early(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.world.reply["reference"] = sampled(0.95, "reference")
    run.world.reply["candidate"] = sampled(0.4, "candidate")
    found = run()
    assert judged(found).overall["candidate"] == "FAIL"
    assert (rounds_of(found["candidate"]), run.num_starts("reference")) == ([1], 1)


@pytest.mark.slow
def test_what_stays_undecided_goes_to_its_max_and_says_why(tmp_path: Path) -> None:
    """A true loss of the margin: nothing decides. Three rounds of the reference, four looks, one start of a server each."""
    run = Run(tmp_path)
    run.world.reply["candidate"] = sampled(0.55, "candidate")
    found = run()
    report = judged(found)
    assert report.overall["candidate"] == "UNDERPOWERED"
    assert (rounds_of(found["fp8"]), rounds_of(found["candidate"])) == ([2, 3, 5], [1, 2, 3, 5])
    assert (run.num_starts("reference"), run.num_starts("candidate")) == (3, 3)
    assert (run.num_asked("reference"), run.num_asked("candidate")) == (5 * 60, 5 * 60)
    looks = report.verdicts[-1].looks
    shares = [look.share for look in looks]
    assert shares == pytest.approx([2 / 3 / 2.5, 1 / 2.5, 1.5 / 2.5, 1.0])
    assert looks[-1].alpha_spent == pytest.approx(0.9 * 0.025)
    task = find_task(found["candidate"], "sums")
    assert task is not None
    assert task.rounds[0].why == "every task is asked at first"
    first = looks[0]
    assert task.rounds[1].why == (
        f"candidate: undecided at 60 items with 2 replies of the reference and 1 of the candidate to each: p "
        f"{first.p_pass:.2g} for PASS and {first.p_fail:.2g} for FAIL; PASS needs p < {first.level:.2g}"
    )
    assert any(
        line.startswith("candidate: sums is still undecided, asking more (2 replies to each item): candidate: u")
        for line in run.lines
    )
    ours, gate = find_task(found["fp8"], "sums"), report.verdicts[-1]
    shown = task_numbers(ours, task, 0.95, gate)  # the report's row is what was judged
    assert (shown.drop, shown.discordant, shown.mcnemar_midp) == (gate.observed, gate.discordant, gate.p_value)
    # Nothing is asked again, and nothing is decided otherwise.
    assert run() == found
    assert (run.num_starts("reference"), run.num_starts("candidate")) == (3, 3)
    assert judged({label: Measurement.load(run.run_dir / "measurements" / f"{label}.json") for label in found}) == report


@pytest.mark.slow
def test_two_candidates_share_the_replies_of_the_reference(tmp_path: Path) -> None:
    """The copy is not asked again when the other one is; its verdict is that of a run without the other."""
    alone = Run(tmp_path / "alone") if (tmp_path / "alone").mkdir() is None else None
    assert alone is not None
    alone.world.reply |= {"reference": sampled(0.9, "reference"), "candidate": sampled(0.9, "candidate")}
    by_itself = judged(alone()).verdicts[-1]
    (tmp_path / "both").mkdir()
    run = Run(tmp_path / "both", ("candidate", "lossy"))
    run.world.reply |= alone.world.reply | {"lossy": sampled(0.76, "lossy")}
    found = run()
    assert rounds_of(found["candidate"]) in ([1], [1, 2])
    assert rounds_of(found["lossy"]) == [1, 2, 3, 5]
    assert rounds_of(found["fp8"]) == [2, 3, 5]
    assert (run.num_starts("reference"), run.num_starts("candidate"), run.num_starts("lossy")) == (3, 1, 3)
    report = judged(found)
    assert [one for one in report.verdicts if one.candidate == "candidate"] == [by_itself]
    assert by_itself.status == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "dies_after"), [("reference", 150), ("candidate", 90), ("candidate", 200)])
def test_killed_between_and_within_rounds_the_decision_is_the_same(tmp_path: Path, victim: str, dies_after: int) -> None:
    """Servers die in the second round of the reference, and in the second and third look at the candidate."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = Run(tmp_path / "whole")
    whole.world.reply["candidate"] = sampled(0.55, "candidate")
    expected = judged(whole())
    run, num_replies = Run(tmp_path / "killed"), 0
    answer = sampled(0.7, "reference") if victim == "reference" else sampled(0.55, "candidate")

    def reply(body: dict[str, Any]) -> Scripted:
        nonlocal num_replies
        num_replies += 1
        if num_replies == dies_after:
            run.world.servers[victim][-1].die()
        return answer(body)

    run.world.reply["candidate"] = sampled(0.55, "candidate")
    run.world.reply[victim] = reply
    with pytest.raises(MeasureError, match="Engine core died"):
        run()
    found = run()
    assert rounds_of(found["fp8"]) == [2, 3, 5]
    assert rounds_of(found["candidate"]) == [1, 2, 3, 5]
    assert judged(found) == expected
    asked = run.num_asked("reference") + run.num_asked("candidate")
    assert asked <= 600 + 2 * PROFILE.concurrency  # again only what was in flight


def test_a_run_from_before_there_were_rounds_is_read_and_judged(tmp_path: Path) -> None:
    task = SUITE.tasks[0].model_copy(update={"num_samples": 2})
    run = Run(tmp_path)
    run.world.reply["candidate"] = sampled(0.7, "candidate")
    found = run(SUITE.model_copy(update={"tasks": (task,)}))
    before = {}
    for label, measurement in found.items():
        written = json.loads(measurement.model_dump_json())
        for result in written["tasks"]:
            assert (result.pop("rounds"), result.pop("is_second_replies")) == ([], False)
        before[label] = Measurement.model_validate(written)
    assert before == found
    report = judged(before)
    assert report.verdicts[-1].looks == ()
    ours, theirs = find_task(before["fp8"], "sums"), find_task(before["candidate"], "sums")
    assert ours is not None and theirs is not None
    assert report.verdicts[-1].observed == pair_items(ours, theirs).drop(0.95)


def test_without_gates_every_task_goes_to_its_max(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.world.reply["candidate"] = sampled(0.7, "candidate")
    found = run(gates=None)
    assert rounds_of(found["candidate"]) == [1, 2, 3, 5]


def test_other_gates_after_the_run_take_what_there_is_as_one_look(tmp_path: Path) -> None:
    """Their looks were not asked: alpha is spent for the share that was, and the limits are said to be chosen late."""
    run = Run(tmp_path)
    run.world.reply |= {"reference": sampled(0.99, "reference"), "candidate": sampled(0.99, "candidate")}
    found = run()
    stopping = GATES.stopping.model_copy(update={"looks": ((4, 4), (5, 5))})
    looks = judged(found, GATES.model_copy(update={"stopping": stopping})).verdicts[-1].looks
    assert [(look.reference_samples, look.candidate_samples) for look in looks] == [(2, 1)]
    assert looks[0].share == pytest.approx(2 / 3 / 2.5)


def test_a_model_that_is_asked_greedily_is_asked_once(tmp_path: Path) -> None:
    """The suite takes the model's sampling, and the model's recipe has none: whatever the range, a second reply is the same."""
    task = SUITE.tasks[0].model_copy(update={"temperature": 0.0, "sampling": "model"})
    suite = as_model_asks(SUITE.model_copy(update={"tasks": (task,)}), None)
    assert suite.tasks[0].num_samples == 1
    run = Run(tmp_path)
    run.world.reply["candidate"] = sampled(0.7, "candidate")
    assert [one.num_samples for measured in run(suite).values() for one in measured.tasks] == [1, 1, 1]


# ------------------------------------------------------------------------------------------------ new items of generated tasks
FRESH = SuiteRecipe.model_validate(
    {
        "schema": 1,
        "name": "fresh",
        "seed": "eval-fresh",
        "tasks": [
            {"kind": "arithmetic", "name": "sums", "languages": ["en"], "num_items": {"min": 60, "max": 240}, "max_tokens": 64},
            {"kind": "arithmetic", "name": "other", "languages": ["zh"], "num_items": {"min": 4, "max": 40}, "max_tokens": 64},
        ],
        "acceptance": False,
    }
)  # fmt: skip
PROMPTS = [item.prompt for item in arithmetic_items(FRESH.tasks[0], FRESH.seed)]  # type: ignore[arg-type]
ANSWERS |= {item.prompt: item.answer for task in FRESH.tasks for item in arithmetic_items(task, FRESH.seed)}  # type: ignore[arg-type]


def wrong_in(num_first: int, num_later: int) -> Callable[[dict[str, Any]], Scripted]:
    """Wrong in so many of the first 60 sums, and in so many of the other 180, evenly spread."""
    wrong = {PROMPTS[place * 60 // num_first] for place in range(num_first)} if num_first else set()
    wrong |= {PROMPTS[60 + place * 180 // num_later] for place in range(num_later)} if num_later else set()

    def reply(body: dict[str, Any]) -> Scripted:
        prompt = body["messages"][-1]["content"]
        return Scripted(f"#### {-1 if prompt in wrong else ANSWERS[prompt]}")

    return reply


class Fresh(Run):
    """A reference without a fault, asked greedily."""

    def __init__(self, place: Path, candidates: tuple[str, ...] = ("candidate",)) -> None:
        place.mkdir(exist_ok=True)
        super().__init__(place, candidates)
        self.world.reply["reference"] = wrong_in(0, 0)

    def prompts(self, name: str) -> list[str]:
        """Sums, in the order in which they were asked, on all servers of the checkpoint."""
        requests = [request for server in self.world.servers.get(name, []) for request in server.requests]
        asked = [body["messages"][-1]["content"] for path, body in requests if path == "/v1/chat/completions"]
        return [prompt for prompt in asked if prompt in set(PROMPTS)]


def items_of(measurement: Measurement) -> list[tuple[int, int | None]]:
    """(items that there are, items of a part as the round says), by round."""
    found = find_task(measurement, "sums")
    assert found is not None
    return [(found.num_items, one.limit) for one in found.rounds]


@pytest.mark.slow
def test_an_undecided_task_is_asked_new_items_and_no_server_is_started_again(tmp_path: Path) -> None:
    """7 of 60 lost, 15 allowed: undecided at 60; then nothing more is lost, and 120 pass."""
    run = Fresh(tmp_path)
    run.world.reply["candidate"] = wrong_in(7, 0)
    found = run(FRESH)
    report = judged(found)
    assert report.overall["candidate"] == "PASS"
    assert items_of(found["fp8"]) == [(240, 60), (240, 240)]
    assert items_of(found["fp8-repeat"]) == [(60, 60)]
    assert items_of(found["candidate"]) == [(120, 60), (120, 120)]
    assert (run.num_starts("reference"), run.num_starts("candidate")) == (1, 1)
    assert sorted(run.prompts("candidate")) == sorted(PROMPTS[:120])  # each once
    assert sorted(run.prompts("candidate")[:60]) == sorted(PROMPTS[:60])
    assert Counter(run.prompts("reference")) == Counter([*PROMPTS, *PROMPTS[:60]])
    verdict = report.verdicts[-1]
    assert [(look.num_items, look.share, look.drop) for look in verdict.looks] == [
        (60, 0.25, pytest.approx(7 / 60)), (120, 0.5, pytest.approx(7 / 120)),
    ]  # fmt: skip
    assert verdict.p_pass is not None and verdict.p_pass < 0.025
    ours, theirs = find_task(found["fp8"], "sums"), find_task(found["candidate"], "sums")
    assert ours is not None and theirs is not None
    assert ours.rounds[1].why == "the reference's server is up now, and a candidate may need as many items"
    assert [line.partition(" (")[0] for line in run.lines if "asking all items" in line or "undecided, asking" in line] == [
        "fp8: sums: asking all items at once", "candidate: sums is still undecided, asking more",
    ]  # fmt: skip
    assert theirs.rounds[1].why.startswith("candidate: undecided at 60 items: p 0.")
    shown = task_numbers(ours, theirs, 0.95, verdict)  # the report's row is what was judged
    assert (shown.drop, shown.discordant) == (verdict.observed, verdict.discordant)
    # Judged again from the records; run again, nothing is asked.
    assert judged({label: Measurement.load(run.run_dir / "measurements" / f"{label}.json") for label in found}) == report
    assert run(FRESH) == found
    assert run.num_starts("reference") == 1


def test_a_task_without_a_gate_is_asked_its_min(tmp_path: Path) -> None:
    run = Fresh(tmp_path)
    found = run(FRESH)
    tasks = [find_task(measured, "other") for measured in found.values()]
    assert [task.num_items for task in tasks if task is not None] == [4, 4, 4]


@pytest.mark.slow
def test_a_loss_of_the_margin_is_asked_to_the_max_and_a_copy_beside_it_is_not(tmp_path: Path) -> None:
    run = Fresh(tmp_path, ("candidate", "lossy"))
    run.world.reply |= {"candidate": wrong_in(0, 0), "lossy": wrong_in(9, 27)}
    found = run(FRESH)
    report = judged(found)
    assert (report.overall["candidate"], report.overall["lossy"]) == ("PASS", "UNDERPOWERED")
    assert items_of(found["candidate"]) == [(60, 60)]
    assert items_of(found["lossy"]) == [(240, 60), (240, 120), (240, 240)]
    assert report.verdicts[-1].looks[-1].alpha_spent == pytest.approx(0.9 * 0.025)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "dies_after"), [("reference", 100), ("reference", 200), ("candidate", 90), ("candidate", 200)]
)
def test_killed_among_new_items_the_decision_is_the_same(tmp_path: Path, victim: str, dies_after: int) -> None:
    """Servers die in the reference's repeat, while it is asked ahead, and in the second and third look at the candidate."""
    whole = Fresh(tmp_path / "whole")
    whole.world.reply["candidate"] = wrong_in(9, 27)
    expected = judged(whole(FRESH))
    run, num_replies = Fresh(tmp_path / "killed"), 0
    answer = wrong_in(0, 0) if victim == "reference" else wrong_in(9, 27)

    def reply(body: dict[str, Any]) -> Scripted:
        nonlocal num_replies
        num_replies += 1
        if num_replies == dies_after:
            run.world.servers[victim][-1].die()
        return answer(body)

    run.world.reply["candidate"] = wrong_in(9, 27)
    run.world.reply[victim] = reply
    with pytest.raises(MeasureError, match="Engine core died"):
        run(FRESH)
    found = run(FRESH)
    assert [items_of(found[label])[-1] for label in ("fp8", "candidate")] == [(240, 240), (240, 240)]
    assert judged(found) == expected
    assert len(run.prompts("reference")) + len(run.prompts("candidate")) <= 300 + 240 + 2 * PROFILE.concurrency
