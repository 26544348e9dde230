"""What a screening means: its KL beside that of the served checkpoints and beside their loss at tasks, over many candidates.

    python benchmarks/screen/meaning.py WORK [--write benchmarks/screen/meaning.md]

Candidates of both small models of this repository: shipped precisions, made and verified by `assay quantize`, and graded
damages (`damaged.py`). Each is served by vLLM on a CPU with emulated formats. First all score the replies that the served
source wrote at temperature 1, over the whole vocabulary, and `screen` runs over the very same tokens; then all answer tasks of
suite `demo`, fewer items of each. The page is written after both. Two more servers have the weights of tiny-glm and a fault
planted in their workers. WORK keeps checkpoints, replies and passes: a killed run goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support" / "serving"))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # python is run with PYTHONSAFEPATH, which leaves this folder out
from damaged import DAMAGES, make
from faults.planting import WORKER, planted
from meaning_figures import Point, loss_of, picture, summary, table
from warm import WarmVllm

from assay.callbacks import Say
from assay.recipes.load import load_recipe
from assay.recipes.model import ModelRecipe
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay_evaluate.diagnosis.locate.reading import with_watching
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import Server, ServerSpec, serve
from assay_pipeline.comparison.screening import screen
from assay_pipeline.quantizing import quantize

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
VOCABULARY = 896
"""Of both models: served KL has no tail."""
REFERENCE = "source"
CANDIDATES: Mapping[str, Sequence[str]] = {
    "tiny-glm": (
        "nvfp4", "noise-0.4", "fp8", "w4a16", "mxfp4", "nvfp4a16", "long-range", "noise-0.8", "w4a16-channel", "noise-1.6",
        "noise-3.2", "routers-2-bits", "attention-0.4",
    ),
    "tiny-qwen": ("nvfp4", "w4a16", "noise-0.4", "fp8", "layer-2-bits", "mxfp4", "noise-1.6"),
}  # fmt: skip
"""Model -> precisions and damages."""
FAULTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fault-expert": ("expert scaled", {"layer": 2, "expert": 5, "factor": 32.0}),
    "fault-batch": ("rows mixed up under load", {"row": 8}),
}
"""Of servers of tiny-glm: label -> fault of `tests/support/faults/worker.py`."""
NAMED = {"name": "meaning", "description": "Of demo, fewer items.", "seed": "eval-meaning-1", "acceptance": False}
WORDS = {
    "fault-expert": "expert 5 of layer 2 times 32 in memory, as a wrong scale of a MoE kernel would have it",
    "fault-batch": "from place 8 of the batch on each request gets its neighbour's logits, in decoding alone",
}


def candidates_of(name: str) -> tuple[str, ...]:
    """Precisions, damages and faults of a model."""
    return (*CANDIDATES[name], *(FAULTS if name == "tiny-glm" else ()))


def suite_of_texts(num_texts: int) -> SuiteRecipe:
    """`num_texts` replies of the source, scored over the whole vocabulary; no task."""
    demo = load_recipe(SuiteRecipe, "demo").model_dump(mode="json", by_alias=True)
    divergence = {**demo["divergence"], "num_documents": num_texts // 2, "top_k": VOCABULARY}  # documents are per language
    return SuiteRecipe.model_validate({**demo, **NAMED, "tasks": [], "divergence": divergence})


def suite_of_tasks(num_items: int) -> SuiteRecipe:
    """The tasks of suite `demo` with `num_items` of each."""
    demo = load_recipe(SuiteRecipe, "demo").model_dump(mode="json", by_alias=True)
    tasks = [{**task, "num_items": num_items // len(task["languages"])} for task in demo["tasks"]]  # items are per language
    return SuiteRecipe.model_validate({**demo, **NAMED, "tasks": tasks, "divergence": None})


@contextmanager
def warm_servers() -> Iterator[None]:
    """Servers inside are forks of a Python that has imported vLLM: a start takes 3 CPU seconds, not 22."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with closing(WarmVllm()) as warm, patch("assay_evaluate.serving.server.SupervisedProcess", warm.process):
        yield


@contextmanager
def serve_planted(spec: ServerSpec, say: Say | None = None) -> Iterator[Server]:
    """As `serve`; the server of a checkpoint of `FAULTS` is made to fail."""
    name, parameters = FAULTS.get(spec.checkpoint.parent.name, (None, {}))
    with serve(spec, say) as server:
        if name is None:
            yield server
            return
        with planted(server, name, **parameters):
            yield server


def made(source: Path, label: str, folder: Path) -> Path:
    """The checkpoint of a candidate, in `folder`/LABEL/checkpoint; made if it is not there."""
    checkpoint = folder / label / "checkpoint"
    if not checkpoint.is_dir():
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if label in DAMAGES or label in FAULTS:
            make(source, checkpoint, label)
        else:
            quantize(str(source), precision=label, out=checkpoint)
    return checkpoint


def measured(name: str, labels: Sequence[str], suite: SuiteRecipe, work: Path) -> tuple[list[Measurement], Path]:
    """Of the source, its repeat and the candidates; and the run's folder, one for texts and one for tasks."""
    folder = work / name
    run = folder / ("run-tasks" if suite.tasks else "run-texts")
    model = load_recipe(ModelRecipe, name)
    assert model.source.path is not None, "a model of this repository"
    source = REPOSITORY / model.source.path
    candidates = [Candidate(REFERENCE, source, is_reference=True)]
    candidates += [Candidate(path.parent.name, path) for path in (made(source, label, folder) for label in labels)]
    measurements = evaluate(
        name, candidates, suite=suite, profile=profile_of(name), serving=model.serving, run_dir=run, on_progress=tell,
        start_server=serve_planted,
    )  # fmt: skip
    return measurements, run


def profile_of(name: str) -> ProfileRecipe:
    """That of the model's recipe, with log-probabilities of the whole vocabulary and workers that a fault can be planted in."""
    shipped = load_recipe(ProfileRecipe, load_recipe(ModelRecipe, name).profiles[0])
    profile = with_watching(shipped, **{"worker-extension-cls": WORKER, "max-logprobs": VOCABULARY})
    environment = {
        **profile.environment,
        "PYTHONPATH": str(REPOSITORY / "tests" / "support"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with the client
    }
    return profile.model_copy(update={"environment": environment, "startup_timeout_s": 3600.0})  # also on a busy machine


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def points_of(name: str, labels: Sequence[str], suite: SuiteRecipe, work: Path) -> list[Point]:
    """Of every candidate, served and screened over what the source wrote; nothing is known of tasks yet."""
    (source, _, *others), run = measured(name, labels, suite, work)
    checkpoints = [measurement.checkpoint for measurement in (source, *others)]
    record, _ = screen(checkpoints, text=[run], all_texts=True, out=work / name / "screened", say=tell)
    screened = {candidate.label: candidate.drift.kl_mean for candidate in record.candidates}
    points = []
    for measurement in others:
        if measurement.divergence is None:
            raise SystemExit(f"{name} {measurement.label}: {measurement.not_measured['divergence']}")
        of_screen, served = screened[measurement.label], measurement.divergence.kl_mean
        assert isinstance(of_screen, Interval) and isinstance(served, Interval), "20 texts or more"
        points.append(Point(name, measurement.label, measurement.label in DAMAGES, of_screen, served))
    return points


def with_losses(points: Sequence[Point], labels: Sequence[str] | None, suite: SuiteRecipe, work: Path) -> Iterator[Point]:
    """The same with what each loses at tasks; of some `labels` alone, or of all."""
    for name in dict.fromkeys(point.model for point in points):
        of_model = [point for point in points if point.model == name]
        asked = [point.label for point in of_model if labels is None or point.label in labels]
        (source, _, *others), _ = measured(name, asked, suite, work)
        theirs, measurements = answers_of(source), {measurement.label: measurement for measurement in others}
        for point in of_model:
            if (measurement := measurements.get(point.label)) is None:
                yield point
                continue
            ours = answers_of(measurement)
            by_task = {
                task.task: loss_of({at: theirs[at] for at in theirs if at[0] == task.task}, ours).value
                for task in measurement.tasks
            }
            yield replace(point, loss=loss_of(theirs, ours), task_losses=by_task)


def answers_of(measurement: Measurement) -> dict[tuple[str, str], bool | None]:
    """(task, item) -> whether it was answered right; None: no reply."""
    return {(task.task, item.item): item.correct for task in measurement.tasks for item in task.items}


def page(points: Sequence[Point], num_texts: int, num_items: int) -> Iterator[str]:
    """Markdown. num_items: of all tasks; 0: they were not asked."""
    sound = [point for point in points if point.label not in FAULTS]
    yield "# What a screening means, measured\n"
    models = " and ".join(dict.fromkeys(point.model for point in sound))
    tasks = f"{num_items} items of suite `demo` each, paired with the source" if num_items else "no tasks asked"
    yield f"{len(sound)} candidates of {models}, served by vLLM on a CPU with emulated formats"
    yield f"beside their source, and screened over the same {num_texts} replies of each source, the"
    yield f"whole vocabulary on both sides; {tasks}. Intervals of KL are"
    yield "over texts, of losses over items, of correlations and slopes over candidates (resampled); 95 %.\n"
    yield "![screened KL beside served KL and task loss](meaning.svg)\n"
    yield from summary(sound)
    yield "\n## Candidates\n"
    yield from table(sound)
    faulty = [point for point in points if point.label in FAULTS]
    if faulty:
        yield "\n## What no screening sees\n"
        yield "Servers of the source's own weights with a fault planted in their workers"
        yield "(`tests/support/faults/worker.py`): " + "; ".join(f"`{label}`: {what}" for label, what in WORDS.items()) + ".\n"
        yield from table(faulty)


def write(points: Sequence[Point], options: argparse.Namespace) -> None:
    """The page and its picture."""
    num_items = max((point.loss.n for point in points if point.loss is not None), default=0)
    text = "\n".join(page(points, options.texts, num_items)) + "\n"
    print(text, flush=True)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
        sound = [point for point in points if point.label not in FAULTS]
        options.write.with_suffix(".svg").write_text(picture(sound), encoding="utf-8")


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("work", type=Path, help="folder of checkpoints, replies and passes")
    arguments.add_argument("--items", type=int, default=40, help="of each task; 0: none is asked")
    arguments.add_argument("--texts", type=int, default=40)
    arguments.add_argument("--models", nargs="+", default=list(CANDIDATES))
    arguments.add_argument("--only", nargs="+", help="these candidates alone")
    arguments.add_argument("--ask", nargs="+", metavar="CANDIDATE", help="tasks of these alone")
    arguments.add_argument("--write", type=Path, help="file of the page; the picture lies beside it, as .svg")
    options = arguments.parse_args()
    points: list[Point] = []
    with warm_servers():
        for name in options.models:
            labels = [label for label in candidates_of(name) if not options.only or label in options.only]
            points += points_of(name, labels, suite_of_texts(options.texts), options.work)
        write(points, options)
        if options.items:
            suite = suite_of_tasks(options.items)
            write(list(with_losses(points, options.ask, suite, options.work)), options)


if __name__ == "__main__":
    main()
