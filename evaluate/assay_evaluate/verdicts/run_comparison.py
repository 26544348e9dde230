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
from assay.records.comparable import (
    asked_differently,
    declared_differently,
    find_reference,
    questions_differ,
    served_differently,
)
from assay.records.divergence import TextMean
from assay.records.measurement import Measurement
from assay.records.verdict import GateReport, Overall
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
    verdicts: tuple[Overall | None, Overall | None]
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
    """Fields in which the references were served differently, and labels in what they declare to be served otherwise: a
    difference below may come from them."""
    asked_differently: tuple[str, ...]
    """The same of how they were asked: nothing is paired then."""
    checkpoints: tuple[CheckpointComparison, ...]


# ------------------------------------------------------------------------------------------------ comparing
def compare_runs(first: MeasuredRun, second: MeasuredRun) -> RunComparison:
    """MeasureError: the runs have no checkpoint of one label, or a run has no reference."""
    by_label, other_by_label = ({m.label: m for m in run.measurements if not m.is_noise_floor} for run in (first, second))
    labels = [label for label in by_label if label in other_by_label]
    if not labels:
        raise MeasureError(
            f"{first.name} and {second.name} have no checkpoint of one name, so nothing can be compared: "
            f"{', '.join(by_label)} in the first, {', '.join(other_by_label)} in the second"
        )
    references = find_reference(first.measurements), find_reference(second.measurements)
    return RunComparison(
        first=_side(first, references[0], [label for label in by_label if label not in other_by_label]),
        second=_side(second, references[1], [label for label in other_by_label if label not in by_label]),
        served_differently=(
            *served_differently(*references, other=OTHER),
            *(line for label in labels for line in declared_differently(by_label[label], other_by_label[label], other=OTHER)),
        ),
        asked_differently=tuple(asked_differently(*references, other=OTHER)),
        checkpoints=tuple(
            _checkpoint((by_label[label], other_by_label[label]), (first.gates, second.gates)) for label in labels
        ),
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
    sides: tuple[Measurement, Measurement], gates: tuple[GateReport | None, GateReport | None]
) -> CheckpointComparison:
    label, no_kl = sides[0].label, any(side.divergence is None for side in sides)
    is_one_reference = len({side.reference_checkpoint_sha256 for side in sides}) == 1
    same_texts = all(
        sides[0].suite_recipe.get(key) == sides[1].suite_recipe.get(key) for key in ("divergence", "tasks", "seed")
    )
    not_compared = None if same_texts else "over other texts"
    names = dict.fromkeys(task.task for side in sides for task in side.tasks)
    return CheckpointComparison.model_validate(
        {
            "label": label,
            "checkpoint_sha256": tuple(side.checkpoint_sha256 for side in sides),
            "checkpoint_bytes": tuple(side.checkpoint_bytes for side in sides),
            "is_reference": tuple(side.is_reference for side in sides),
            "verdicts": tuple(None if report is None else report.overall.get(label) for report in gates),
            "tasks": tuple(_task(*sides, name) for name in names),
            "kl_mean": tuple(side.divergence and side.divergence.kl_mean for side in sides),
            "kl_unbiased_mean": tuple(side.divergence and side.divergence.kl_corrected_mean for side in sides),
            "kl_not_compared": None if no_kl else not_compared if is_one_reference else "against another reference",
            "acceptance": tuple(side.acceptance and side.acceptance.rate for side in sides),
        }
    )


def _task(first: Measurement, second: Measurement, name: str) -> TaskComparison:
    tasks = find_task(first, name), find_task(second, name)
    scores = tuple(None if task is None else task.accuracy for task in tasks)

    def not_paired(reason: str) -> TaskComparison:
        return TaskComparison(
            task=name, scores=(scores[0], scores[1]), num_pairs=None, lost=None, discordant=None, p_value=None,
            not_paired=reason,
        )  # fmt: skip

    for which, measurement, task in zip(("first", "second"), (first, second), tasks, strict=True):
        if task is None:
            return not_paired(f"the {which} run did not ask it")
        if task.accuracy is None:
            reason = task.note or measurement.not_measured.get(name, "not measured")
            return not_paired(f"no score in the {which}: {reason}")
    if fields := questions_differ(first, second, name, other=OTHER):
        return not_paired(f"other questions: {'; '.join(fields)}")
    if fields := asked_differently(first, second, other=OTHER):
        return not_paired(f"asked differently: {'; '.join(fields)}")
    assert tasks[0] is not None and tasks[1] is not None
    pairs = pair_items(tasks[0], tasks[1])
    if pairs.n == 0:
        return not_paired("no item was answered in both")
    return TaskComparison(
        task=name, scores=(scores[0], scores[1]), num_pairs=pairs.n, lost=pairs.drop(0.95), discordant=pairs.discordant,
        p_value=pairs.p_difference, not_paired=None,
    )  # fmt: skip
