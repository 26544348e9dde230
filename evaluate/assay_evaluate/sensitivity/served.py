"""What single parts cost where they are served: one checkpoint and one server for each, and the reference's replies for all.

The suite has no tasks, only divergence, and goes through `run.evaluate` like any other: texts, journal, noise floor,
fingerprints that must be alike, nothing asked twice. Drafts are left out: they change no score, and cost a longer start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from assay.callbacks import Say
from assay.errors import MeasureError
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay_evaluate.client.journal import Journal
from assay_evaluate.divergence.documents import Document
from assay_evaluate.divergence.phase import reference_text
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.run.identity import identity_of

TOP_K = 64


def suite_of(*, num_texts: int, max_tokens: int, seed: str) -> SuiteRecipe:
    """Replies of the reference to our own questions, half of them in Chinese; nothing else."""
    return SuiteRecipe.model_validate(
        {
            "schema": 1,
            "name": "sensitivity",
            "description": "Divergence of checkpoints in which one part is quantized.",
            "seed": f"eval-{seed}",
            "tasks": [],
            "divergence": {"num_documents": max(2, (num_texts + 1) // 2), "max_tokens": max_tokens, "top_k": TOP_K},
            "acceptance": False,
        }
    )


def measure_served(
    model: str,
    reference: Path,
    label: str,
    mixes: Mapping[str, Path],
    *,
    suite: SuiteRecipe,
    profile: ProfileRecipe,
    serving: Serving,
    folder: Path,
    on_progress: Say,
) -> list[Measurement]:
    """The reference, its repeat, then every mix; what was measured before is read from `folder`. Raises like `evaluate`."""
    candidates = [Candidate(label, reference, is_reference=True), *(Candidate(name, path) for name, path in mixes.items())]
    return evaluate(
        model,
        candidates,
        suite=suite,
        profile=profile,
        serving=serving.model_copy(update={"num_speculative_tokens": None}),
        run_dir=folder,
        on_progress=on_progress,
    )


def kl_of(measured: Measurement) -> Interval:
    """Mean KL, lower bound, with its interval. MeasureError: there is none, with the reason."""
    if measured.divergence is None or not isinstance(measured.divergence.kl_mean, Interval):
        reason = measured.not_measured.get("divergence", "fewer than 20 texts")
        raise MeasureError(f"{measured.label}: its divergence was not measured: {reason}")
    return measured.divergence.kl_mean


def texts_of_run(run_dir: Path) -> Sequence[Document]:
    """The texts that the run's reference wrote, from its journal. MeasureError: there are none."""
    measurements = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    reference = next(
        (measurement for measurement in measurements if measurement.is_reference and not measurement.is_noise_floor), None
    )
    if reference is None:
        raise MeasureError(f"{run_dir}: holds no measurement of a reference, so no texts; run `assay evaluate`, or say --text")
    suite = SuiteRecipe.model_validate(reference.suite_recipe)
    who = identity_of(reference)
    with Journal(run_dir / "journal.db") as journal:
        text = reference_text(journal, suite, who, reference.not_measured.get("divergence"))
    if text is None or text.why_not is not None or not text.documents:
        reason = "its journal does not hold them" if text is None else text.why_not
        raise MeasureError(f"{run_dir}: there are no texts of its reference: {reason}; run `assay evaluate`, or say --text")
    return text.documents


def structural_kinds(checkpoint: Path) -> Mapping[int, str] | str:
    """Token id -> kind of structural token, or why they are not known."""
    from assay_evaluate.client.client import NotMeasured
    from assay_evaluate.divergence.structural import structural_ids

    try:
        return dict(structural_ids(checkpoint))
    except NotMeasured as error:
        return str(error)
