"""The `assay` command. Thin: resolves TARGET, calls one stage, prints its record.

Exit codes: 0 = done and passed, 1 = done and failed (a verdict, a verification), 2 = could not (usage, input, machine).
Progress goes to stderr; with `--json` stdout holds the record and nothing else. Stages are imported inside the commands, so
that `assay --help` needs neither torch nor lm-eval.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from assay import __version__
from assay.calibrate_command import calibrate
from assay.errors import AssayError, PlanError
from assay.locate_command import locate
from assay.probe_command import probe
from assay.recipes import PrecisionRecipe, load_recipe, recipe_names
from assay.stages import (
    check_budgets_of,
    estimate_for,
    judge_and_write,
    load_measurements,
    plan_for,
    precision_names,
    profile_for,
    quantize_one,
    quantize_options,
    register_gates,
    registered_gates,
    run_candidates,
    run_folder,
    suite_for,
    two_checkpoints,
    verify_one,
    with_importance,
    write_cards,
)
from assay.suite_files import with_swe_options
from assay.terminal import console, emit, escape, print_verdicts, print_verification

app = typer.Typer(
    name="assay",
    help="Quantize a mixture-of-experts checkpoint for vLLM, and measure what was lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="A model recipe's name, a checkpoint folder, or a Hugging Face id.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder (runs/tiny-glm), or a model's name under --runs.")
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of all runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The record as JSON on stdout.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads; default: every core this process may use.")
]
PrecisionsOption = Annotated[
    str | None,
    typer.Option("--precisions", help="Comma-separated names of recipes/precisions/; default: the model's list."),
]


def main() -> None:
    """Entry point: user errors become one line and exit 2, never a traceback."""
    try:
        app()
    except AssayError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("interrupted; what was finished is kept, the same command goes on from there")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno is None:
            raise
        console.print(f"[bold red]error:[/] {escape(str(error.filename or 'system'))}: {error.strerror}")
        sys.exit(2)


def _version(value: bool) -> None:
    if value:
        print(f"assay {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


# ------------------------------------------------------------------------------------------------ plan, quantize, verify
@app.command()
def plan(
    target: TargetArgument,
    precision: Annotated[str, typer.Option("--precision", "-p", help="A name of recipes/precisions/, or a YAML file.")],
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Hours and bytes on a machine, extrapolated: workstation, server, cloud, 8xh200, 8xb200, `this` (measures two "
            "seconds), or cores=64,read=6.5,write=3,network=1.2 (rates in GB per second).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The layer map: what will happen to every tensor, bytes per role, and where the result fits. Reads headers only.

    With --json and --hardware: an object with the keys `plan` and `estimate`.
    """
    from assay.targets import resolve_target
    from assay_quantize.show import print_plan

    made = plan_for(resolve_target(target), load_recipe(PrecisionRecipe, precision))
    estimate = None if hardware is None else estimate_for(made, hardware)
    if as_json:
        emit(made if estimate is None else {"plan": made.model_dump(mode="json"), "estimate": asdict(estimate)})
        return
    out = Console(highlight=False)
    print_plan(made, out)
    if estimate is not None:
        from assay_quantize.show_hardware import print_estimate

        print_estimate(estimate, out)


@app.command()
def quantize(
    target: TargetArgument,
    precision: Annotated[
        str | None, typer.Option("--precision", "-p", help="One precision; with --out, the checkpoint goes there.")
    ] = None,
    precisions: PrecisionsOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the new checkpoint; default RUNS/MODEL/PRECISION/checkpoint."),
    ] = None,
    runs: RunsOption = Path("runs"),
    device: Annotated[
        str, typer.Option("--device", help="cpu (auto is the same); cuda-untested: CUDA code that has never been run on a GPU.")
    ] = "auto",
    engine: Annotated[str, typer.Option("--engine", help="local: this machine; ray: a Ray cluster.")] = "local",
    workers: WorkersOption = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Bound of this process's memory, e.g. 1.5GiB, 800MB; default 2GiB, 8GiB with cuda-untested."
        ),
    ] = None,
    importance: Annotated[
        Path | None, typer.Option("--importance", help="Channel weights for precisions that search scales (observer: mse).")
    ] = None,
    stream_from: Annotated[
        str | None,
        typer.Option(
            "--stream-from", help="hub: download a shard, quantize it, delete it; two shards of the source on disk at most."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make quantized checkpoints, shard by shard, and verify each. Killed at any point, the same command goes on from there."""
    from assay.targets import resolve_target

    options = quantize_options(device, engine, workers, memory, importance, stream_from)
    aim = resolve_target(target)
    names = precision_names(aim, precision, precisions, with_reference=out is None and precision is None)
    if out is not None and len(names) != 1:
        raise PlanError("--out takes one checkpoint: say --precision P as well")
    # Every plan is made before the first byte is written: what cannot work fails at once.
    plans = {name: with_importance(plan_for(aim, load_recipe(PrecisionRecipe, name)), importance) for name in names}
    records = []
    for name, made in plans.items():
        folder = out if out is not None else runs / aim.recipe.name / Path(name).stem / "checkpoint"
        records.append(quantize_one(aim, made, folder, options))
    if as_json:
        emit([record.model_dump(mode="json") for record in records])
    if not all(record.passed for record in records):
        raise typer.Exit(1)


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a quantized checkpoint.")],
    source: Annotated[Path | None, typer.Option("--source", help="Folder of the checkpoint it was made from.")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Threads; default: the cores this process may use.")
    ] = None,
    hashes_only: Annotated[
        bool, typer.Option("--hashes-only", help="Files, headers, config and hashes, but not the contents of tensors.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Reopen a quantized checkpoint and trust nothing. Exit 1 names every tensor that is wrong."""
    result = verify_one(checkpoint, source, workers=workers, contents=not hashes_only)
    if as_json:
        emit(result)
    else:
        print_verification(result)
    if not result.passed:
        raise typer.Exit(1)


app.command()(calibrate)


# ------------------------------------------------------------------------------------------------ serve, evaluate
@app.command()
def serve(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    profile: Annotated[
        str | None, typer.Option("--profile", help="A name of recipes/profiles/; default: from the hardware.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1; default: a free one.")
    ] = None,
) -> None:
    """vLLM in the foreground, exactly as an evaluation would run it. Ctrl-C stops it."""
    import time

    from assay.targets import resolve_target
    from assay_evaluate.serve import ServerSpec
    from assay_evaluate.serve import serve as start

    aim = resolve_target(str(checkpoint))
    chosen = profile_for(aim, profile)
    log_path = Path("runs") / "serve" / f"{checkpoint.resolve().name}.log"
    spec = ServerSpec(
        checkpoint=checkpoint, profile=chosen, serving=aim.recipe.serving, speculate=True, log_path=log_path, port=port
    )
    with start(spec, on_progress=console.print) as server:
        console.print(f"serving {checkpoint} as '{server.model}' at {server.base_url}/v1; log: {log_path}; Ctrl-C stops it")
        while True:
            server.check_alive()
            time.sleep(1)


@app.command()
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="A model recipe's name, a checkpoint folder, or a Hugging Face id."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="Any two checkpoints: the folder compared with.")
    ] = None,
    candidate: Annotated[
        list[Path] | None,
        typer.Option("--candidate", help="Any two checkpoints: a folder to judge; may be given again."),
    ] = None,
    precisions: PrecisionsOption = None,
    suite: Annotated[str | None, typer.Option("--suite", help="A name of recipes/suites/, or a YAML file.")] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="A name of recipes/profiles/, or a YAML file.")] = None,
    runs: RunsOption = Path("runs"),
    budget_check: Annotated[
        bool,
        typer.Option(
            "--budget-check",
            help="Only ask the reference twenty items of every task, and say whether the token budgets suffice; exit 1 if not.",
        ),
    ] = False,
    swe_slice: Annotated[
        str | None, typer.Option("--slice", help="SWE-bench: Python's slice over the instances sorted by id, 0:50.")
    ] = None,
    swe_filter: Annotated[
        str | None, typer.Option("--filter", help="SWE-bench: instances whose id begins with a match of this expression.")
    ] = None,
    swe_repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="SWE-bench: trajectories per instance.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the reference and every candidate alike, measure, judge; report and cards are written from the records.

    Exits 0 when everything was measured, whatever the verdicts: `assay gate` is the one that fails.
    """
    from assay.targets import gates_for, resolve_target
    from assay_evaluate.run import evaluate as run_suite

    if (target is None) == (reference is None) or (reference is None) != (not candidate):
        raise AssayError("say what to measure: `assay evaluate TARGET`, or `assay evaluate --reference DIR --candidate DIR`")
    if target is not None:
        aim = resolve_target(target)
        run_dir = runs / aim.recipe.name
        candidates = run_candidates(aim, run_dir, precisions)
    else:
        assert reference is not None and candidate
        aim = resolve_target(str(reference))
        run_dir = runs / aim.recipe.name
        candidates = two_checkpoints(reference, candidate)
    chosen = profile_for(aim, profile)
    chosen_suite = with_swe_options(
        suite_for(aim, suite, chosen), slice_=swe_slice, filter_=swe_filter, num_repeats=swe_repeats
    )  # fmt: skip
    if budget_check:
        checked = check_budgets_of(aim, candidates[0], chosen_suite, chosen, run_dir)
        if as_json:
            emit(checked)
        if not checked.suffices:
            raise typer.Exit(1)
        return
    gates_name = gates_for(aim.recipe, chosen_suite.name)
    register_gates(gates_name, run_dir)
    measurements = run_suite(
        aim.recipe.name,
        candidates,
        suite=chosen_suite,
        profile=chosen,
        serving=aim.recipe.serving,
        run_dir=run_dir,
        on_progress=lambda line: console.print(escape(line)),
    )
    gates = judge_and_write(gates_name, run_dir, measurements)
    print_verdicts(gates)
    console.print(f"report: {run_dir / 'report' / 'index.html'}")
    if as_json:
        emit(gates)


app.command()(probe)
app.command()(locate)


# ------------------------------------------------------------------------------------------------ gate, report, card
@app.command()
def gate(
    run: RunArgument,
    gates: Annotated[
        str | None, typer.Option("--gates", help="A name of recipes/gates/, or a YAML file. Default: the run's own.")
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Verdicts from the records of a run. Exit 1 unless every candidate is PASS."""
    run_dir = run_folder(run, runs)
    report = judge_and_write(gates or registered_gates(run_dir) or "default", run_dir, load_measurements(run_dir))
    if as_json:
        emit(report)
    else:
        print_verdicts(report)
    if any(status != "PASS" for status in report.overall.values()):
        raise typer.Exit(1)


@app.command()
def report(run: RunArgument, runs: RunsOption = Path("runs")) -> None:
    """Write report/{index.html,report.json,report.md} of a run again, from its records only."""
    from assay_reports.report import write_report

    print(write_report(run_folder(run, runs)))


@app.command()
def card(run: RunArgument, runs: RunsOption = Path("runs")) -> None:
    """Write the model card (README.md) of every candidate of a run again, from its records only."""
    run_dir = run_folder(run, runs)
    for path in write_cards(run_dir):
        print(path)


# ------------------------------------------------------------------------------------------------ doctor
@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """What this machine can do, what is missing, how to get it. Exit 1 when something needed is missing."""
    from assay.doctor import examine

    findings = examine()
    if as_json:
        emit([finding.model_dump() for finding in findings])
    else:
        for finding in findings:
            mark = {"ok": "[green]ok     [/]", "missing": "[red]missing[/]", "note": "[yellow]note   [/]"}[finding.state]
            console.print(f"{mark} {finding.what:22} {escape(finding.detail)}")
            if finding.remedy:
                console.print(f"        {'':22} -> {escape(finding.remedy)}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


@app.command("recipes")
def list_recipes() -> None:
    """Names of all recipes that ship with assay."""
    for kind in ("models", "precisions", "profiles", "suites", "gates"):
        print(f"{kind:11} {', '.join(recipe_names(kind))}")
