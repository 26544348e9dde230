"""Before anything is judged: are the replies to every task those of the weights, to the same questions, and whole?

The rules are in `alike/`. A task that breaks one has no score, whoever it favours, and no other gate looks at its replies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import ServingFinding
from assay_evaluate.alike.rules import look, not_looked_at
from assay_evaluate.alike.sides import SHORT_TOKENS, Pair, Repeated, Side
from assay_evaluate.statistics.item_pairs import find_task

MOST_SAID = 2
"""Findings in a verdict's sentence; all of them are in the record."""


@dataclass(frozen=True)
class Looked:
    """What the rules found in all tasks of one candidate."""

    findings: tuple[ServingFinding, ...]
    not_looked_at: tuple[str, ...]
    """Rules for which some task has no evidence, in their order."""

    @property
    def by_task(self) -> Mapping[str, Sequence[ServingFinding]]:
        tasks = dict.fromkeys(one.task for one in self.findings)
        return {task: [one for one in self.findings if one.task == task] for task in tasks}


def look_at_serving(reference: Measurement, candidate: Measurement, repeat: Measurement | None) -> Looked:
    """Every task that both were asked. repeat: the reference's second pass, which shows the noise of its server."""
    repeated = None if repeat is None else _repeated(reference, repeat)
    findings: list[ServingFinding] = []
    missing: dict[str, None] = {}
    for pair in _pairs(reference, candidate, repeated):
        labels = {"reference": (reference.label,), "candidate": (candidate.label,), "both": (reference.label, candidate.label)}
        findings += [
            ServingFinding(
                candidate=candidate.label, task=pair.reference.task.task, rule=rule.name, at_fault=labels[one.side],
                clause=one.clause, num=one.num, of=one.of,
            )
            for rule, one in look(pair)
        ]  # fmt: skip
        missing |= dict.fromkeys(not_looked_at(pair))
    return Looked(tuple(findings), tuple(missing))


def _pairs(reference: Measurement, candidate: Measurement, repeated: Repeated | None) -> Iterator[Pair]:
    for task in reference.tasks:
        theirs = find_task(candidate, task.task)
        if theirs is not None and task.kind != "swe" and task.items and theirs.items:
            yield Pair(_side(reference, task, repeated), _side(candidate, theirs, None))


def _side(measurement: Measurement, task: TaskResult, repeated: Repeated | None) -> Side:
    counts = [one for other in measurement.tasks if other.served is not None for one in other.served.prompt_counts]
    return Side(
        measurement.label,
        task,
        measurement.signature,
        measurement.asked_twice,
        repeated,
        uncounted_tokens=max(0, min((one.counted - one.billed for one in counts), default=0)),
        is_repeat=measurement.is_noise_floor,
    )


def _repeated(reference: Measurement, repeat: Measurement) -> Repeated:
    both = [(task, find_task(repeat, task.task)) for task in reference.tasks]
    return repeated_of([(ours, theirs) for ours, theirs in both if theirs is not None])


def repeated_of(passes: Sequence[tuple[TaskResult, TaskResult]]) -> Repeated:
    """Of all tasks at temperature 0 together; each in the first pass and in the second."""
    compared = different = short = turned = 0
    for task, again in passes:
        if task.served is None or task.served.temperature > 0:
            continue
        second = {(item.item, item.sample): item for item in again.items if item.text_key is not None}
        known = [(one, second[one.item, one.sample]) for one in task.items if (one.item, one.sample) in second]
        known = [pair for pair in known if pair[0].text_key is not None]
        few = [pair for pair in known if all(0 < (one.output_tokens or 0) <= SHORT_TOKENS for one in pair)]
        compared, short = compared + len(known), short + len(few)
        different += sum(one.text_key != other.text_key for one, other in known)
        turned += sum(one.correct != other.correct for one, other in few)
    return Repeated(compared, different, short, turned)


# ------------------------------------------------------------------------------------------------ what follows
def without_tasks(measurement: Measurement, tasks: Collection[str]) -> Measurement:
    """The measurement without some of its tasks."""
    return measurement.model_copy(update={"tasks": tuple(task for task in measurement.tasks if task.task not in tasks)})


def serving_fault(title: str, findings: Sequence[ServingFinding]) -> str:
    """`Serving fault on lookup: the same question had 686 prompt tokens at fp8 and 517 at w4a16 (...).`"""
    said = [one.clause for one in findings[:MOST_SAID]]
    more = len(findings) - len(said)
    return f"Serving fault on {title}: {'; '.join(said)}{f'; and {more} more' if more else ''}."
