"""A real small loss judged twenty times, on questions that no two judgements share, beside what power foretold.

    python benchmarks/verdicts/twenty_verdicts.py runs/twenty    # quantizes and asks what is missing; prints a table

FP8 (reference) and W4A16 (candidate) of tiny-glm answer the 800 items of `twenty_suite.yaml`, each once and greedily, served
alike. Slices of them are judged as runs of their own, by `twenty_gates.yaml`. Power is that
of `assay power` (`statistics/joint`), which knows nothing of the slices.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from assay.recipes.gate import GateRecipe, ScoreGate
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.measurement import Measurement, TaskResult
from assay.records.verdict import Status
from assay_evaluate.preflight.known_tasks import CODES_DISCORDANCE
from assay_evaluate.preflight.power_designs import rules_of
from assay_evaluate.statistics.item_pairs import Pairs, accuracy_of, pair_items
from assay_evaluate.statistics.joint.chances import Chances, chances_of
from assay_evaluate.statistics.joint.drawn import Assumption, LookDesign, ScoreDesign
from assay_evaluate.verdicts.gates import judge

HERE = Path(__file__).resolve().parent
SLICES = ((20, 40), (8, 100))
"""How many judgements, items of each."""
MARGINS = (0.05, 0.10, 0.20)
STATUSES: tuple[Status, ...] = ("PASS", "FAIL", "UNDERPOWERED")
REFERENCE, CANDIDATE = "fp8", "w4a16"


# ------------------------------------------------------------------------------------------------ twenty judgements
class Judged(NamedTuple):
    """Verdicts of one candidate on slices of one task. `foretold`: at the loss and discordance of all items together."""

    num_items: int
    verdicts: list[Status]
    foretold: Chances


def slice_of(task: TaskResult, at: int, num_slices: int) -> TaskResult:
    """Every `num_slices`-th item, from `at` on: each slice has items of all depths."""
    items = task.items[at::num_slices]
    right = [item for item in items if item.correct is not None]
    return task.model_copy(
        update={
            "items": items, "num_items": len(items), "num_failed": len(items) - len(right),
            "num_truncated": sum(item.truncated for item in items), "accuracy": accuracy_of(items)[0],
        }
    )  # fmt: skip


def judge_slices(reference: Measurement, candidate: Measurement, gates: GateRecipe, num_slices: int) -> list[Status]:
    """The overall verdict of each slice of the only task, as `assay gate` finds it."""
    found: list[Status] = []
    for at in range(num_slices):
        sides = [
            side.model_copy(update={"tasks": (slice_of(side.tasks[0], at, num_slices),)}) for side in (reference, candidate)
        ]
        found.append(judge(sides, gates, model=reference.model).overall[candidate.label])
    return found


def foretell(gates: GateRecipe, num_items: int, discordance: float, loss: float) -> Chances:
    """Chances of one judgement of so many items."""
    [gate] = [one for one in gates.gates if isinstance(one, ScoreGate)]
    design = ScoreDesign(gate.task, gate.max_drop, Assumption(discordance), (LookDesign(1, 1, num_items),))
    return chances_of([design], [loss], rules_of(gates))


def judged(
    reference: Measurement, candidate: Measurement, gates: GateRecipe, slices: Sequence[tuple[int, int]]
) -> list[Judged]:
    """Each way of slicing the task. ValueError: the slices are not of as many items as they are said to be."""
    pairs = pair_items(reference.tasks[0], candidate.tasks[0])
    b, c = pairs.discordant
    found = []
    for num_slices, size in slices:
        if num_slices * size != len(reference.tasks[0].items):
            raise ValueError(f"{num_slices} slices of {size} are not the {len(reference.tasks[0].items)} items there are")
        verdicts = judge_slices(reference, candidate, gates, num_slices)
        found.append(Judged(size, verdicts, foretell(gates, size, (b + c) / pairs.n, (b - c) / pairs.n)))
    return found


# ------------------------------------------------------------------------------------------------ the table
def tables(
    reference: Measurement, candidate: Measurement, gates: GateRecipe, slices: Sequence[tuple[int, int]],
    margins: Sequence[float] = MARGINS,
) -> Iterator[str]:  # fmt: skip
    """Lines of twenty_verdicts.md. margins: each takes the place of that of the gates."""
    pairs = pair_items(reference.tasks[0], candidate.tasks[0])
    assumed = CODES_DISCORDANCE
    yield "# A real small loss, judged on disjoint items"
    yield ""
    yield _seen(pairs, gates.level)
    yield ""
    yield "| margin | judgements | items of each | | PASS | FAIL | UNDERPOWERED |"
    yield "|---|---|---|---|---|---|---|"
    for margin in margins:
        strict = with_margin(gates, margin)
        for one in judged(reference, candidate, strict, slices):
            counts, n = Counter(one.verdicts), len(one.verdicts)
            before = foretell(strict, one.num_items, assumed, 0.0)
            for what, shares in (
                ("seen", [counts[status] / n for status in STATUSES]),
                ("foretold at this loss", _shares(one.foretold)),
                (f"foretold before, nothing lost, {100 * assumed:.1f} % discordant", _shares(before)),
            ):
                cells = " | ".join(f"{100 * share:.0f} %" for share in shares)
                yield f"| {100 * margin:.0f} points | {n} | {one.num_items} | {what} | {cells} |"
    yield ""
    yield f"Level {100 * gates.level:.0f} %; at least {gates.min_items} items."


def with_margin(gates: GateRecipe, margin: float) -> GateRecipe:
    return gates.model_copy(
        update={
            "gates": tuple(
                one.model_copy(update={"max_drop": margin}) if isinstance(one, ScoreGate) else one for one in gates.gates
            )
        }
    )


def _seen(pairs: Pairs, level: float) -> str:
    drop, (b, c) = pairs.drop(level), pairs.discordant
    return (
        f"{REFERENCE} is right in {sum(pairs.reference)} of {pairs.n} items, {CANDIDATE} in {sum(pairs.candidate)}: it loses "
        f"{100 * drop.value:.1f} points [{100 * drop.low:.1f}, {100 * drop.high:.1f}]; {b} lost, {c} gained, "
        f"{100 * (b + c) / pairs.n:.1f} % discordant."
    )


def _shares(found: Chances) -> list[float]:
    return [found.passes, found.fails, 1 - found.passes - found.fails]


# ------------------------------------------------------------------------------------------------ asking
def ask(label: str, run_dir: Path, suite: SuiteRecipe, profile: ProfileRecipe) -> Measurement:
    """What the checkpoint answers to every item; from `run_dir/measurements/LABEL.json` if it is there."""
    from assay_evaluate.client.journal import Journal
    from assay_evaluate.run.identity import checkpoint_bytes, checkpoint_sha256, identity
    from assay_evaluate.run.suite import ServedCheckpoint, measure_suite
    from assay_evaluate.serving.server import ServerSpec, serve

    place = run_dir / "measurements" / f"{label}.json"
    if place.exists():
        return Measurement.load(place)
    checkpoint = run_dir / "checkpoints" / "tiny-glm" / label / "checkpoint"
    serving = Serving(reasoning_parser="glm45", num_speculative_tokens=1)
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    spec = ServerSpec(checkpoint, profile, serving, speculate=True, log_path=run_dir / "logs" / f"vllm-{label}.log")
    with Journal(run_dir / "journal.db") as journal, serve(spec, print) as server:
        sha256 = checkpoint_sha256(checkpoint, journal.file_sha256)
        who = identity(sha256, server.fingerprint, suite.name)
        served = ServedCheckpoint(suite, server, journal, who, checkpoint, serving, profile.concurrency, print)
        results = measure_suite(served, None, is_noise_floor=False)
    measurement = Measurement(
        model="tiny-glm", label=label, is_reference=label == REFERENCE, is_noise_floor=False, checkpoint=str(checkpoint),
        checkpoint_sha256=sha256, checkpoint_bytes=checkpoint_bytes(checkpoint), suite=suite.name, suite_sha256=suite.sha256,
        suite_recipe=suite.model_dump(mode="json", by_alias=True), fingerprint=server.fingerprint,
        started=started.isoformat(timespec="seconds"), seconds=round(time.monotonic() - clock, 3), **results,
    )  # fmt: skip
    measurement.save(place)
    return measurement


def main() -> int:
    from assay_cli.root import app

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run_dir = parser.parse_args().run
    suite = load_recipe(SuiteRecipe, str(HERE / "twenty_suite.yaml"))
    gates = load_recipe(GateRecipe, str(HERE / "twenty_gates.yaml"))
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    if not all((run_dir / "checkpoints" / "tiny-glm" / label / "checkpoint").exists() for label in (REFERENCE, CANDIDATE)):
        words = ["quantize", "tiny-glm", "--precisions", f"{REFERENCE},{CANDIDATE}", "--runs", str(run_dir / "checkpoints")]
        app(words, standalone_mode=False)
    reference, candidate = (ask(label, run_dir, suite, profile) for label in (REFERENCE, CANDIDATE))
    text = "\n".join(tables(reference, candidate, gates, SLICES))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
