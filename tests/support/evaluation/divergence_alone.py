"""A suite that asks no task, and measurements with it. For tests only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from synthetic_run import MODEL, make_run

from assay.recipes.gate import GateRecipe, gates_on
from assay.recipes.load import load_recipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import sha256_of
from assay.records.measurement import Measurement
from assay.records.verdict import RegisteredGates
from assay_evaluate.verdicts.gates import judge

SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "kl", "seed": "eval-kl", "tasks": [], "acceptance": False,
        "divergence": {"num_documents": 48, "max_tokens": 128, "held_out_documents": 24},
    }
)  # fmt: skip
GATES = gates_on(load_recipe(GateRecipe, "default"), SUITE)


def without_tasks(measurement: Measurement) -> Measurement:
    return measurement.model_copy(
        update={
            "tasks": (), "acceptance": None, "weight_bits": 4, "suite": SUITE.name, "suite_sha256": SUITE.sha256,
            "suite_recipe": SUITE.model_dump(mode="json", by_alias=True),
        }
    )  # fmt: skip


def run_of_divergence_alone(folder: Path, change: Callable[[Measurement], Measurement]) -> Path:
    """A run of these, judged by gates that were registered for the suite. change: of each measurement."""
    run_dir = make_run(folder, change=change)
    measurements = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    recipe = GATES.model_dump(mode="json", by_alias=True)
    registered = RegisteredGates(named="default", recipe=recipe, sha256=sha256_of(recipe))
    registered.save(run_dir / "gates.registered.json")
    judge(measurements, GATES, model=MODEL, registered=registered).save(run_dir / "gates.json")
    return run_dir
