"""Two runs side by side: the scores of both, and what was lost from the first to the second where the questions were the same.

No verdict: whether a loss is allowed is decided within a run, against its reference. Differences are first minus second: + is
a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from assay.errors import MeasureError
from assay.records.base import Interval, Part, Record
from assay.records.comparable import asked_differently, find_reference, questions_differ, served_differently
from assay.records.divergence import TextMean
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport, Status
from assay_evaluate.statistics.item_pairs import find_task, pair_items

OTHER = "second"
"""What the second run is called where a field differs."""


@dataclass(frozen=True)
class MeasuredRun:
    """What is compared of a run: its measurements, which belong together, and its verdicts, if there are any."""

    name: str
    measurements: Sequence[Measurement]
    gates: GateReport | None


class RunSide(Part):
    """One of the two runs."""

    run: str
    model: str
    reference: str
    reference_sha256: str
    suite: str
    suite_sha256: str
    gate_recipe_sha256: str | None
    """Of the limits that its verdicts are from. None: not judged, or judged before hashes were."""
    only_here: tuple[str, ...]
    """Checkpoints that the other run does not have."""


class TaskComparison(Part):
    """One task on one checkpoint of both runs."""

    task: str
    scores: tuple[Interval | None, Interval | None]
    """Of the first run, of the second. None: not measured."""
    num_pairs: int | None
    """Items that both answered, where the questions were the same. None: nothing is paired."""
    lost: Interval | None
    """First minus second over these pairs: + is a loss."""
    discordant: tuple[int, int] | None
    """(right in the first only, right in the second only)."""
    p_value: float | None
    """Two-sided: is one side right more often? Mid-p McNemar; of several samples, a t corrected for skewness."""
    not_paired: str | None
    """Why there is no difference. None: there is one."""


class CheckpointComparison(Part):
    """One label that both runs have."""

    label: str
    checkpoint_sha256: tuple[str, str]
    checkpoint_bytes: tuple[int | None, int | None]
    is_reference: tuple[bool, bool]
    verdicts: tuple[Status | None, Status | None]
    tasks: tuple[TaskComparison, ...]
    kl_mean: tuple[TextMean | None, TextMean | None]
    """Lower bound in nats, each against the reference of its own run."""
    kl_not_compared: str | None
    """Why the two are no numbers of one kind. None: same reference and texts."""
    acceptance: tuple[float | None, float | None]
    """Share of drafted tokens that were accepted."""
    kl_unbiased_mean: tuple[TextMean | None, TextMean | None] = (None, None)
    """The same, unbiased."""


class RunComparison(Record):
    """`assay compare`."""

    schema_version: Literal[2] = 2  # type: ignore[assignment]
    kind: Literal["comparison"] = "comparison"
    first: RunSide
    second: RunSide
    served_differently: tuple[str, ...]
    """Fields in which the references were served differently: a difference below may come from them."""
    asked_differently: tuple[str, ...]
    """The same of how they were asked: nothing is paired then."""
    checkpoints: tuple[CheckpointComparison, ...]


# ------------------------------------------------------------------------------------------------ comparing
def compare_runs(first: MeasuredRun, second: MeasuredRun) -> RunComparison:
    """MeasureError: the runs have no checkpoint of one label, or a run has no reference."""
    ours, theirs = ({m.label: m for m in run.measurements if not m.is_noise_floor} for run in (first, second))
    labels = [label for label in ours if label in theirs]
    if not labels:
        raise MeasureError(
            f"{first.name} and {second.name} have no checkpoint of one name, so nothing can be compared: "
            f"{', '.join(ours)} in the first, {', '.join(theirs)} in the second"
        )
    references = find_reference(first.measurements), find_reference(second.measurements)
    return RunComparison(
        first=_side(first, references[0], [label for label in ours if label not in theirs]),
        second=_side(second, references[1], [label for label in theirs if label not in ours]),
        served_differently=tuple(served_differently(*references, other=OTHER)),
        asked_differently=tuple(asked_differently(*references, other=OTHER)),
        checkpoints=tuple(_checkpoint(ours[label], theirs[label], first.gates, second.gates) for label in labels),
    )


def _side(run: MeasuredRun, reference: Measurement, only_here: list[str]) -> RunSide:
    return RunSide(
        run=run.name,
        model=reference.model,
        reference=reference.label,
        reference_sha256=reference.checkpoint_sha256,
        suite=reference.suite,
        suite_sha256=reference.suite_sha256,
        gate_recipe_sha256=None if run.gates is None else run.gates.gate_recipe_sha256,
        only_here=tuple(only_here),
    )


def _checkpoint(
    ours: Measurement, theirs: Measurement, our_gates: GateReport | None, their_gates: GateReport | None
) -> CheckpointComparison:
    tasks = dict.fromkeys([*(task.task for task in ours.tasks), *(task.task for task in theirs.tasks)])
    kl = tuple(None if m.divergence is None else m.divergence.kl_mean for m in (ours, theirs))
    unbiased = tuple(None if m.divergence is None else m.divergence.kl_corrected_mean for m in (ours, theirs))
    rates = tuple(None if m.acceptance is None else m.acceptance.rate for m in (ours, theirs))
    verdicts = tuple(
        None if gates is None else gates.overall.get(m.label) for gates, m in ((our_gates, ours), (their_gates, theirs))
    )
    return CheckpointComparison(
        label=ours.label,
        checkpoint_sha256=(ours.checkpoint_sha256, theirs.checkpoint_sha256),
        checkpoint_bytes=(ours.checkpoint_bytes, theirs.checkpoint_bytes),
        is_reference=(ours.is_reference, theirs.is_reference),
        verdicts=(verdicts[0], verdicts[1]),
        tasks=tuple(_task(ours, theirs, task) for task in tasks),
        kl_mean=(kl[0], kl[1]),
        kl_unbiased_mean=(unbiased[0], unbiased[1]),
        kl_not_compared=_why_not_one_kl(ours, theirs) if None not in kl else None,
        acceptance=(rates[0], rates[1]),
    )


def _why_not_one_kl(ours: Measurement, theirs: Measurement) -> str | None:
    if ours.reference_checkpoint_sha256 != theirs.reference_checkpoint_sha256:
        return "against another reference"
    same = all(ours.suite_recipe.get(key) == theirs.suite_recipe.get(key) for key in ("divergence", "tasks", "seed"))
    return None if same else "over other texts"


def _task(ours: Measurement, theirs: Measurement, name: str) -> TaskComparison:
    one, two = find_task(ours, name), find_task(theirs, name)
    scores = (None if one is None else one.accuracy, None if two is None else two.accuracy)

    def alone(why: str) -> TaskComparison:
        return TaskComparison(
            task=name, scores=scores, num_pairs=None, lost=None, discordant=None, p_value=None, not_paired=why
        )  # fmt: skip

    for which, measurement, task in (("first", ours, one), ("second", theirs, two)):
        if task is None:
            return alone(f"the {which} run did not ask it")
        if task.accuracy is None:
            return alone(f"no score in the {which}: {task.note or measurement.not_measured.get(name, 'not measured')}")
    if fields := questions_differ(ours, theirs, name, other=OTHER):
        return alone(f"other questions: {'; '.join(fields)}")
    if fields := asked_differently(ours, theirs, other=OTHER):
        return alone(f"asked differently: {'; '.join(fields)}")
    assert one is not None and two is not None
    pairs = pair_items(one, two)
    if pairs.n == 0:
        return alone("no item was answered in both")
    return TaskComparison(
        task=name, scores=scores, num_pairs=pairs.n, lost=pairs.drop(0.95), discordant=pairs.discordant,
        p_value=pairs.p_difference, not_paired=None,
    )  # fmt: skip
