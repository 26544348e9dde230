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
from assay_evaluate.run.suite import task_notes
from assay_evaluate.serving_faults.rules import check_serving
from assay_evaluate.statistics.item_pairs import find_task
from assay_evaluate.tasks.looks import Look, has_second_replies, planned_looks, task_at_look
from assay_evaluate.verdicts.scores import judge_scores
from assay_evaluate.verdicts.whole import tasks_to_ask_further

DueLooks = dict[str, tuple[Look, str]]
"""Task -> the look at which it is asked next, and the reason."""
FIRST = "every task is asked at first"
AHEAD = "the reference's server is up now, and a candidate may need as many items"


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
    def first_tasks(self, *, of_reference: bool, is_noise_floor: bool = False) -> list[TaskBase]:
        """The suite's tasks as round one asks them."""
        tasks: list[TaskBase] = []
        for task in self.suite.tasks:
            look = self.looks(task)[0]
            if not task.is_adaptive:
                tasks.append(task)
            elif is_noise_floor:
                tasks.append(task_at_look(task, 1 if has_second_replies(task) else look.reference_samples, look.limit))
            else:
                tasks.append(self.task_at(task.name, look, of_reference=of_reference))
        return tasks

    def due_ahead(self, reference: Measurement, repeat: Measurement) -> DueLooks:
        """Generated tasks at their last look: what the reference is asked at once, where the first look can be judged at all.

        Their replies are short: all of them take less time than one more start of the reference and of each candidate.
        """
        verdicts = self._verdicts(repeat, reference)
        due = {}
        for task in self.suite.tasks:
            can_be_judged = verdicts is None or (task.name in verdicts and verdicts[task.name].status != "NOT MEASURED")
            last = self.looks(task)[-1]
            grows = isinstance(task, GeneratedTask) and last.limit is not None
            if grows and can_be_judged and not self.holds(reference, task.name, last):
                due[task.name] = last, AHEAD
        return due

    def due(self, candidate: Measurement, reference: Measurement) -> DueLooks:
        """The next look of the tasks that can still change this candidate's verdict and have looks left."""
        verdicts, open_tasks = self._verdicts(candidate, reference), {task.name for task in self.suite.tasks}
        if self.gates is not None and verdicts is not None:
            open_tasks = tasks_to_ask_further(self.gates, verdicts, candidate.label)
        due = {}
        for task in self.suite.tasks:
            result = find_task(candidate, task.name)
            if task.name not in open_tasks or result is None or result.accuracy is None or not task.is_adaptive:
                continue
            left = [look for look in self.looks(task) if not _holds(result, look.candidate_samples, look.limit)]
            if left:
                due[task.name] = left[0], _reason(candidate.label, None if verdicts is None else verdicts[task.name])
        return due

    def due_now(self, candidate: Measurement, reference: Measurement) -> DueLooks:
        """Those for which the reference has replies enough."""
        due = self.due(candidate, reference)
        return {name: (look, reason) for name, (look, reason) in due.items() if self.holds(reference, name, look)}

    def due_of_reference(self, reference: Measurement, candidates: Sequence[Measurement]) -> DueLooks:
        """The nearest look at each task that some candidate waits for."""
        nearest: DueLooks = {}
        for candidate in candidates:
            for name, (look, reason) in self.due(candidate, reference).items():
                if name not in nearest or look < nearest[name][0]:
                    nearest[name] = look, reason
        return nearest

    def _verdicts(self, candidate: Measurement, reference: Measurement) -> dict[str, Verdict] | None:
        """Of its score gates. None: nothing is judged."""
        if self.gates is None:
            return None
        score_gates = [gate for gate in self.gates.gates if isinstance(gate, ScoreGate)]
        faults = check_serving(reference, candidate, None).by_task
        return judge_scores(score_gates, reference, candidate, self.gates, faults=faults)

    def holds(self, reference: Measurement, name: str, look: Look) -> bool:
        """Whether the reference has the replies that a look needs."""
        task = find_task(reference, name)
        return task is not None and _holds(task, look.reference_samples, look.limit)

    def task_at(self, name: str, look: Look, *, of_reference: bool) -> TaskBase:
        task = next(task for task in self.suite.tasks if task.name == name)
        return task_at_look(task, look.reference_samples if of_reference else look.candidate_samples, look.limit)

    # ------------------------------------------------------------------------------------------------ what is recorded
    def with_round(
        self,
        results: Sequence[TaskResult],
        asked_tasks: Sequence[TaskBase],
        earlier: Mapping[str, TaskResult],
        reasons: Mapping[str, str],
    ) -> list[TaskResult]:
        """The results with the round that they are of. earlier: of earlier rounds. reasons: task -> clause; else FIRST."""
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        limited = {task.name: self.looks(task)[0].limit is not None for task in self.suite.tasks if task.is_adaptive}
        noted = []
        for result, task in zip(results, asked_tasks, strict=True):
            if task.name in limited:
                rounds = earlier[task.name].rounds if task.name in earlier else ()
                limit = task.most_items if limited[task.name] else None
                reason = reasons.get(task.name, FIRST)
                now = Round(started=started, num_samples=task.fewest_samples, limit=limit, why=reason)
                result = result.model_copy(update={"rounds": (*rounds, now)})
            noted.append(result)
        return noted


def extend_measurement(measurement: Measurement, results: Sequence[TaskResult], seconds: float) -> Measurement:
    """The measurement with some tasks asked further; everything else stays as round one found it."""
    new = {result.task: result for result in results}
    tasks = tuple(new.get(task.task, task) for task in measurement.tasks)
    old_notes = {note for task in measurement.tasks for note in task_notes(task)}
    notes = [note for note in measurement.notes if note not in old_notes]
    kept = {name: reason for name, reason in measurement.not_measured.items() if name not in new}
    return measurement.model_copy(
        update={
            "tasks": tasks,
            "notes": (*notes, *(note for task in tasks for note in task_notes(task))),
            "not_measured": kept | {name: result.note or "" for name, result in new.items() if result.accuracy is None},
            "seconds": None if measurement.seconds is None else round(measurement.seconds + seconds, 3),
        }
    )


def _holds(task: TaskResult, num_samples: int, limit: int | None) -> bool:
    """Whether a task was asked so much."""
    return bool(task.rounds) and task.rounds[-1].num_samples >= num_samples and (task.rounds[-1].limit or 0) >= (limit or 0)


def _reason(label: str, verdict: Verdict | None) -> str:
    """What is undecided, and what would have decided."""
    if verdict is None:
        return f"{label}: without gates every task is asked up to its max"
    if not verdict.looks:
        return f"{label}: undecided"
    last = verdict.looks[-1]
    replies = (
        ""
        if (last.reference_samples, last.candidate_samples) == (1, 1)
        else f" with {last.reference_samples} replies of the reference and {last.candidate_samples} of the candidate to each"
    )
    return (
        f"{label}: undecided at {last.num_items} items{replies}: p {last.p_pass:.2g} for PASS and {last.p_fail:.2g} for FAIL; "
        f"PASS needs p < {last.level:.2g}"
    )


def describe_look(look: Look, *, of_reference: bool) -> str:
    """3 replies to each item; of 400 items of each part."""
    num_samples = look.reference_samples if of_reference else look.candidate_samples
    replies = "1 reply" if num_samples == 1 else f"{num_samples} replies"
    return f"{replies} to each item" if look.limit is None else f"{replies} to each of {look.limit} items of each part"
