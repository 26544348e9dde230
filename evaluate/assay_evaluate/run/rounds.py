"""Which tasks are asked again, of whom, and how often: from the recipes and what was measured alone.

Round one asks everything: the reference twice where it samples, since its second replies are the noise floor. A candidate is
looked at while its server runs, as long as the reference's replies suffice; then the reference is asked once more, for all
candidates together, and the candidates that are undecided after it. A run that was killed finds its measurements and goes on.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from assay.recipes.gate import GateRecipe, ScoreGate, Stopping
from assay.recipes.suite import GeneratedTask, SuiteRecipe, TaskBase
from assay.records.measurement import Measurement, Round, TaskResult
from assay.records.verdict import Verdict
from assay_evaluate.alike.measurements import look_at_serving
from assay_evaluate.run.suite import task_notes
from assay_evaluate.statistics.item_pairs import find_task
from assay_evaluate.tasks.looks import Look, has_second_replies, planned_looks, task_at_look
from assay_evaluate.verdicts.scores import judge_scores
from assay_evaluate.verdicts.whole import tasks_to_ask_further

FIRST = "every task is asked at first"
AHEAD = "asked ahead, while the server of the reference runs: candidates may have to be asked so much"


@dataclass(frozen=True)
class Rounds:
    """How a suite is asked under gates. gates: None: nothing is judged, and every task goes to its max."""

    suite: SuiteRecipe
    gates: GateRecipe | None

    @property
    def stopping(self) -> Stopping:
        return Stopping() if self.gates is None else self.gates.stopping

    def looks(self, task: TaskBase) -> tuple[Look, ...]:
        return planned_looks(task, self.stopping)

    # ------------------------------------------------------------------------------------------------ what is asked
    def first(self, *, of_reference: bool, is_noise_floor: bool = False) -> list[TaskBase]:
        """The suite's tasks as round one asks them."""
        asked: list[TaskBase] = []
        for task in self.suite.tasks:
            look = self.looks(task)[0]
            if not task.is_adaptive:
                asked.append(task)
            elif is_noise_floor:
                asked.append(task_at_look(task, 1 if has_second_replies(task) else look.reference_samples, look.limit))
            else:
                num_samples = look.reference_samples if of_reference else look.candidate_samples
                asked.append(task_at_look(task, num_samples, look.limit))
        return asked

    def ahead(self, reference: Measurement, repeat: Measurement) -> dict[str, tuple[Look, str]]:
        """Generated task -> its last look: what the reference is asked at once, where the first look can be judged at all.

        Their replies are short: all of them take less time than one more start of the reference and of each candidate.
        """
        verdicts = self._verdicts(repeat, reference)
        found = {}
        for task in self.suite.tasks:
            can_be_judged = verdicts is None or (task.name in verdicts and verdicts[task.name].status != "NOT MEASURED")
            last = self.looks(task)[-1]
            grows = isinstance(task, GeneratedTask) and last.limit is not None
            if grows and can_be_judged and not self.holds(reference, task.name, last):
                found[task.name] = last, AHEAD
        return found

    def wanted(self, candidate: Measurement, reference: Measurement) -> dict[str, tuple[Look, str]]:
        """Task -> its next look, and why: those that can still change this candidate's verdict and have looks left."""
        verdicts, open_tasks = self._verdicts(candidate, reference), {task.name for task in self.suite.tasks}
        if self.gates is not None and verdicts is not None:
            open_tasks = tasks_to_ask_further(self.gates, verdicts, candidate.label)
        found = {}
        for task in self.suite.tasks:
            measured = find_task(candidate, task.name)
            if task.name not in open_tasks or measured is None or measured.accuracy is None or not task.is_adaptive:
                continue
            left = [look for look in self.looks(task) if not _holds(measured, look.candidate_samples, look.limit)]
            if left:
                found[task.name] = left[0], _why(candidate.label, None if verdicts is None else verdicts[task.name])
        return found

    def _verdicts(self, candidate: Measurement, reference: Measurement) -> dict[str, Verdict] | None:
        """Of its score gates. None: nothing is judged."""
        if self.gates is None:
            return None
        score_gates = [gate for gate in self.gates.gates if isinstance(gate, ScoreGate)]
        faults = look_at_serving(reference, candidate, None).by_task
        return judge_scores(score_gates, reference, candidate, self.gates, faults=faults)

    def wanted_now(self, candidate: Measurement, reference: Measurement) -> dict[str, tuple[Look, str]]:
        """Those for which the reference has replies enough."""
        found = {}
        for name, (look, why) in self.wanted(candidate, reference).items():
            if self.holds(reference, name, look):
                found[name] = look, why
        return found

    def wanted_of_reference(self, reference: Measurement, candidates: Sequence[Measurement]) -> dict[str, tuple[Look, str]]:
        """Task -> the nearest look that some candidate waits for, and why."""
        found: dict[str, tuple[Look, str]] = {}
        for candidate in candidates:
            for name, (look, why) in self.wanted(candidate, reference).items():
                before = found.get(name)
                if before is None or look < before[0]:
                    found[name] = look, why
        return found

    def holds(self, reference: Measurement, name: str, look: Look) -> bool:
        """Whether the reference has the replies that a look needs."""
        task = find_task(reference, name)
        return task is not None and _holds(task, look.reference_samples, look.limit)

    def task_at(self, name: str, look: Look, *, of_reference: bool) -> TaskBase:
        task = next(task for task in self.suite.tasks if task.name == name)
        return task_at_look(task, look.reference_samples if of_reference else look.candidate_samples, look.limit)

    # ------------------------------------------------------------------------------------------------ what is recorded
    def noted(
        self, results: Sequence[TaskResult], asked: Sequence[TaskBase], before: Mapping[str, TaskResult], why: Mapping[str, str]
    ) -> list[TaskResult]:
        """The results with the round that they are of. before: of earlier rounds. why: task -> clause; FIRST without one."""
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        adaptive = {task.name for task in self.suite.tasks if task.is_adaptive}
        noted = []
        for result, task in zip(results, asked, strict=True):
            if task.name in adaptive:
                earlier = before[task.name].rounds if task.name in before else ()
                limit = task.most_items if self._has_range_of_items(task.name) else None
                now = Round(started=started, num_samples=task.fewest_samples, limit=limit, why=why.get(task.name, FIRST))
                result = result.model_copy(update={"rounds": (*earlier, now)})
            noted.append(result)
        return noted

    def _has_range_of_items(self, name: str) -> bool:
        task = next(task for task in self.suite.tasks if task.name == name)
        return self.looks(task)[0].limit is not None


def extended(measurement: Measurement, results: Sequence[TaskResult], seconds: float) -> Measurement:
    """The measurement with some tasks asked further; everything else stays as round one found it."""
    new = {result.task: result for result in results}
    tasks = tuple(new.get(task.task, task) for task in measurement.tasks)
    old_notes = {note for task in measurement.tasks for note in task_notes(task)}
    notes = [note for note in measurement.notes if note not in old_notes]
    kept = {name: why for name, why in measurement.not_measured.items() if name not in new}
    return measurement.model_copy(
        update={
            "tasks": tasks,
            "notes": (*notes, *(note for task in tasks for note in task_notes(task))),
            "not_measured": kept | {name: result.note or "" for name, result in new.items() if result.accuracy is None},
            "seconds": round(measurement.seconds + seconds, 3),
        }
    )


def _holds(task: TaskResult, num_samples: int, limit: int | None) -> bool:
    """Whether a task was asked so much."""
    return bool(task.rounds) and task.rounds[-1].num_samples >= num_samples and (task.rounds[-1].limit or 0) >= (limit or 0)


def _why(label: str, verdict: Verdict | None) -> str:
    """What is undecided, and what would have decided."""
    if verdict is None:
        return f"{label}: without gates every task is asked up to its max"
    if not verdict.looks:
        return f"{label}: undecided"
    seen = verdict.looks[-1]
    return (
        f"{label}: undecided at {seen.num_items} items, {seen.reference_samples} and {seen.candidate_samples} replies each: "
        f"p {seen.p_pass:.2g} for PASS and {seen.p_fail:.2g} for FAIL, {seen.level:.2g} decides at this look"
    )


def said(look: Look, *, of_reference: bool) -> str:
    """3 replies to each item; of 400 items of each part."""
    num_samples = look.reference_samples if of_reference else look.candidate_samples
    replies = "1 reply" if num_samples == 1 else f"{num_samples} replies"
    return f"{replies} to each item" if look.limit is None else f"{replies} to each of {look.limit} items of each part"
