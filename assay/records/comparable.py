"""Which measurements may stand beside each other: in a verdict, in a row of a report, on a card. One rule for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from assay.errors import MeasureError
from assay.records.declared import NOT_COMPARED, difference_words, differences, undeclared, untrue, without_address
from assay.records.measurement import Measurement
from assay.records.serving import Fingerprint


def check_measurements(measurements: Sequence[Measurement]) -> Measurement:
    """The reference of a run's measurements; MeasureError naming the first that does not belong to it, and what to do.

    There must be one reference, one model, every label once, and every candidate asked and served as the reference was.
    """
    reference = find_reference(measurements)
    labels = [m.label for m in measurements]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise MeasureError(f"two measurements are labelled {twice[0]}; labels are keys of the verdicts")
    for measurement in measurements:
        if measurement.model != reference.model:
            raise MeasureError(
                f"measurement {measurement.label} is of model {measurement.model}, not of {reference.model}; "
                "remove it from the run"
            )
        if measurement is not reference:
            check_comparable(reference, measurement)
    return reference


def find_reference(measurements: Iterable[Measurement]) -> Measurement:
    """The one measurement that the others are compared with."""
    references = [m for m in measurements if m.is_reference and not m.is_noise_floor]
    if len(references) != 1:
        names = ", ".join(m.label for m in references) or "none"
        raise MeasureError(f"a run needs exactly one reference measurement, found: {names}; run `assay evaluate` again")
    return references[0]


def other_reference(reference: Measurement, candidate: Measurement) -> tuple[str, str] | None:
    """(why a measurement is not one against this reference, what to do): other questions, serving, checkpoint. None: it is."""
    if candidate.suite_sha256 != reference.suite_sha256:
        fields = _differences(reference.suite_recipe, candidate.suite_recipe, "suite")
        return f"other questions: {'; '.join(fields) or 'another suite'}", "measure both again"
    if (other := _other_serving(reference, candidate)) is not None:
        return other
    compared_with = [candidate.reference_checkpoint_sha256]
    if candidate.divergence is not None:
        compared_with.append(candidate.divergence.reference_checkpoint_sha256)
    for sha256 in compared_with:
        if sha256 is not None and sha256 != reference.checkpoint_sha256:
            reason = f"measured against checkpoint {sha256[:12]}, the reference is {reference.checkpoint_sha256[:12]}"
            return reason, "measure the candidate again"
    return None


def _other_serving(reference: Measurement, candidate: Measurement) -> tuple[str, str] | None:
    """The same of how the two were served: they must differ in what is declared, and in nothing else."""
    declared = candidate.declared
    if not candidate.is_variant:
        if candidate.fingerprint.comparable_sha256 == reference.fingerprint.comparable_sha256:
            return None
        fields = "; ".join(served_differently(reference, candidate))
        return f"served differently: {fields}", "measure both again with one profile"
    is_one_checkpoint = candidate.checkpoint_sha256 == reference.checkpoint_sha256
    sides = reference.fingerprint, candidate.fingerprint
    if leaves := undeclared(*sides, declared, is_one_checkpoint=is_one_checkpoint):
        return (
            f"served differently in more than is declared ({difference_words(declared)}): {'; '.join(_lines(leaves))}",
            "declare that too, or measure both again with one profile",
        )
    if (clause := untrue(*sides, declared)) is not None:
        return f"not served as declared: {clause}", "measure it again, or declare what is so"
    return None


def check_comparable(reference: Measurement, candidate: Measurement) -> None:
    """MeasureError naming every field in which the two were served, or asked, differently."""
    where = f"{candidate.label} cannot be compared with {reference.label}"
    if (other := other_reference(reference, candidate)) is not None:
        raise MeasureError(f"{where}: {other[0]}; {other[1]}")
    if fields := asked_differently(reference, candidate):
        raise MeasureError(
            f"{where}: asked differently: {'; '.join(fields)}; the same questions gave other prompts; give both "
            "checkpoints one chat template and measure both again"
        )


def served_differently(first: Measurement, second: Measurement, *, other: str = "candidate") -> list[str]:
    """A line for every field of the serving fingerprint that should be alike and is not. other: what the second is called."""
    return fingerprints_differ(first.fingerprint, second.fingerprint, other=other)


def declared_differently(first: Measurement, second: Measurement, *, other: str = "candidate") -> list[str]:
    """The same of what two measurements of one label declare: `fp8-kv: declared kv-cache-dtype (fp8, candidate auto)`."""
    leaves = differences(without_address(first.declared), without_address(second.declared))
    return [f"{first.label}: declared {line}" for line in _lines(leaves, other)]


def fingerprints_differ(first: Fingerprint, second: Fingerprint, *, other: str = "candidate") -> list[str]:
    """The same of two fingerprints."""
    first_data, second_data = (
        fingerprint.model_dump(mode="json", exclude=set(NOT_COMPARED)) for fingerprint in (first, second)
    )
    return _differences(first_data, second_data, "", other)


def asked_differently(first: Measurement, second: Measurement, *, other: str = "candidate") -> list[str]:
    """The same of what stands between a question and the model: template, parsers. Empty where it was not recorded."""
    if first.asked_with is None or second.asked_with is None:
        return []
    first_data, second_data = (asked.model_dump(mode="json") for asked in (first.asked_with, second.asked_with))
    if first.checkpoint_bytes is None or second.checkpoint_bytes is None:  # of a server alone no template is known
        first_data, second_data = ({**side, "chat_template_sha256": None} for side in (first_data, second_data))
    return _differences(first_data, second_data, "", other)


def questions_differ(first: Measurement, second: Measurement, task: str, *, other: str = "candidate") -> list[str]:
    """A line for everything that makes a task's questions others: its recipe, seed and files, and what they were made for.

    Needles, RULER and tools are generated to the length of the reference's tokens: of another reference they are other texts.
    """
    first_data, second_data = (_asked_of(m, task) for m in (first, second))
    lines = _differences(first_data, second_data, "", other)
    if not lines and first_data["task"].get("kind") in MADE_FOR_THE_REFERENCE:
        first_sha256, second_sha256 = (m.reference_checkpoint_sha256 or "" for m in (first, second))
        if first_sha256 != second_sha256:
            lines = [f"made for the tokens of another reference ({first_sha256[:12]}, {other} {second_sha256[:12]})"]
    return lines


MADE_FOR_THE_REFERENCE = frozenset({"needle", "ruler", "tools"})


def _asked_of(measurement: Measurement, task: str) -> dict[str, Any]:
    """What decides which questions a task asks, out of the suite's recipe."""
    recipe = measurement.suite_recipe
    task_recipe: dict[str, Any] = next((entry for entry in recipe.get("tasks", ()) if entry.get("name") == task), {})
    return {
        "task": task_recipe, "seed": recipe.get("seed"), "files_sha256": recipe.get("files_sha256"),
        "sources": next((result.sources for result in measurement.tasks if result.task == task), {}),
    }  # fmt: skip


def _differences(reference: Any, candidate: Any, path: str, other: str = "candidate") -> list[str]:
    """`flags.max-model-len (4096, candidate 2048)` for every leaf that differs."""
    return _lines(differences(reference, candidate, path), other)


def _lines(leaves: Iterable[tuple[str, Any, Any]], other: str = "candidate") -> list[str]:
    return [f"{path} ({before}, {other} {after})" for path, before, after in leaves]
