"""A small SWE-bench, whole, on any machine with a Docker daemon: images, agents, containers, harness, verdict, report.

    python examples/tiny_swe/demo.py --runs runs        (or: make swe-demo)

Two scripted models stand in for a reference and a candidate, so that what must come out is known. What is shown is the path,
not a model: the checkpoints are scripts, and the report's numbers are theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from build_suite import BUILD, build_dataset, build_images
from own_docker import NoDocker, docker_daemon
from scripted_model import CAREFUL, HASTY, Behaviour, ScriptedModel, load_scripts

from assay.callbacks import Say
from assay.errors import AssayError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.serving import Fingerprint
from assay.records.verdict import GateReport
from assay_cli.shown.verdicts import print_summary
from assay_cli.terminal import console, results
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import Server, ServerSpec
from assay_pipeline.gate_choice import ChosenGates, load_gates, register_gates
from assay_pipeline.judging import judge, load_measurements

MODEL = "tiny-swe"
SCRIPTS: dict[str, dict[str, Behaviour]] = {"careful": CAREFUL, "hasty": HASTY}


def write_scripts(folder: Path) -> list[Candidate]:
    """What stands for the checkpoints: a folder each whose "weights" are its script."""
    candidates = []
    for name, behaviours in SCRIPTS.items():
        checkpoint = folder / name
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "config.json").write_text(json.dumps({"model_type": "scripted"}) + "\n", encoding="utf-8")
        (checkpoint / "script.safetensors").write_text(json.dumps(behaviours, sort_keys=True) + "\n", encoding="utf-8")
        candidates.append(Candidate(name, checkpoint, is_reference=name == "careful"))
    return candidates


@contextmanager
def serve_script(spec: ServerSpec, on_progress: Say) -> Iterator[Server]:
    """In place of vLLM."""
    behaviours = json.loads((spec.checkpoint / "script.safetensors").read_text(encoding="utf-8"))
    with ScriptedModel(load_scripts(behaviours)) as model:
        on_progress(f"a scripted model answers for {spec.checkpoint.name} at {model.base_url}")
        fingerprint = Fingerprint(
            server="scripted", versions={}, hardware={}, profile=spec.profile.name, flags={}, environment={}, speculation=None,
            checkpoint_flags={}, emulated=None, kernels=(), system_fingerprint=model.fingerprint,
        )  # fmt: skip
        yield Server(model.base_url, model.model, model.max_model_len, fingerprint, None)


def run_demo(runs: Path, dataset: Path) -> GateReport:
    """Measure both scripts on the suite and judge; the report is written to RUNS/tiny-swe/report."""
    run_dir = runs / MODEL
    suite = load_recipe(SuiteRecipe, "swe-tiny")
    task = suite.tasks[0].model_copy(update={"dataset": str(dataset)})
    gates = register_gates(ChosenGates(load_gates("swe-tiny", suite), "swe-tiny"), run_dir)
    measured = evaluate(
        MODEL,
        write_scripts(run_dir / "scripts"),
        suite=suite.model_copy(update={"tasks": (task,)}),
        profile=load_recipe(ProfileRecipe, "cpu-emulated"),
        serving=Serving(tool_call_parser="scripted"),
        run_dir=run_dir,
        on_progress=lambda line: console.print(line, markup=False),
        start_server=serve_script,
        foresee=lambda spec: None,
    )
    return judge(run_dir, gates, measurements=measured)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        with docker_daemon(options.runs / "docker"):
            BUILD.mkdir(parents=True, exist_ok=True)
            dataset = build_dataset()
            made = build_images(dataset)
            console.print(f"images: {sum(made.values())} made, {len(made) - sum(made.values())} there already, {_since(began)}")
            gates = run_demo(options.runs, dataset)
            print_summary(gates, load_measurements(options.runs / MODEL), results())
    except (AssayError, NoDocker) as error:
        console.print(f"error: {error}", markup=False)
        return 2
    console.print(f"report: {options.runs / MODEL / 'report' / 'index.html'}, {_since(began)}")
    return 0


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
