"""The `assay` command. Thin: resolves TARGET, calls one stage, prints its record.

Exit codes: 0 = done and passed, 1 = done and failed (a verdict, a verification), 2 = could not (usage, input, machine).
Progress goes to stderr; with `--json` stdout holds the record and nothing else. Stages are imported inside the commands, so
that `assay --help` needs neither torch nor lm-eval.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from assay import __version__
from assay.errors import AssayError, CheckpointError, PlanError
from assay.recipes import GateRecipe, PrecisionRecipe, ProfileRecipe, SuiteRecipe, load_recipe, recipe_names
from assay.records import GateReport, Measurement, Plan, Record, Verification

if TYPE_CHECKING:
    from assay.targets import Target
    from assay_evaluate.run import Candidate

app = typer.Typer(
    name="assay",
    help="Quantize a mixture-of-experts checkpoint for vLLM, and measure what was lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True, highlight=False, soft_wrap=True)

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="A model recipe's name, a checkpoint folder, or a Hugging Face id.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder (runs/tiny-glm), or a model's name under --runs.")
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of all runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The record as JSON on stdout.")]
PrecisionsOption = Annotated[
    str | None,
    typer.Option("--precisions", help="Comma-separated names of recipes/precisions/; default: the model's list."),
]


def main() -> None:
    """Entry point: user errors become one line and exit 2, never a traceback."""
    try:
        app()
    except AssayError as error:
        console.print(f"[bold red]error:[/] {_escape(str(error))}")
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
        console.print(f"[bold red]error:[/] {_escape(str(error.filename or 'system'))}: {error.strerror}")
        sys.exit(2)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _emit(record: Record | dict[str, Any] | list[Any]) -> None:
    data = record.model_dump(mode="json") if isinstance(record, Record) else record
    print(json.dumps(data, indent=1, ensure_ascii=False))


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
    as_json: JsonOption = False,
) -> None:
    """The layer map: what will happen to every tensor, bytes per role, and where the result fits. Reads headers only."""
    from assay.targets import resolve_target
    from assay_quantize.show import print_plan

    made = _make_plan(resolve_target(target), load_recipe(PrecisionRecipe, precision))
    if as_json:
        _emit(made)
    else:
        print_plan(made, Console(highlight=False))


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
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Make quantized checkpoints, shard by shard, and verify each. Killed at any point, the same command goes on from there."""
    from assay.targets import resolve_target

    if device not in {"cpu", "cuda", "auto"}:
        raise PlanError(f"--device {device}: say cpu, cuda or auto")
    aim = resolve_target(target)
    names = _precision_names(aim, precision, precisions, with_reference=out is None and precision is None)
    if out is not None and len(names) != 1:
        raise PlanError("--out takes one checkpoint: say --precision P as well")
    # Every plan is made before the first byte is written: what cannot work fails at once.
    plans = {name: _make_plan(aim, load_recipe(PrecisionRecipe, name)) for name in names}
    records = []
    for name, made in plans.items():
        folder = out if out is not None else runs / aim.recipe.name / Path(name).stem / "checkpoint"
        records.append(_quantize_one(aim, made, folder, device))
    if as_json:
        _emit([record.model_dump(mode="json") for record in records])
    if not all(record.passed for record in records):
        raise typer.Exit(1)


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a quantized checkpoint.")],
    source: Annotated[Path | None, typer.Option("--source", help="Folder of the checkpoint it was made from.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Reopen a quantized checkpoint and trust nothing. Exit 1 names every tensor that is wrong."""
    from assay_quantize.verify import verify as verify_checkpoint

    result = verify_checkpoint(checkpoint, source=source)
    if as_json:
        _emit(result)
    else:
        _print_verification(result)
    if not result.passed:
        raise typer.Exit(1)


def _make_plan(aim: Target, recipe: PrecisionRecipe) -> Plan:
    from assay_quantize.checkpoint import Checkpoint, open_checkpoint
    from assay_quantize.plan import make_plan

    location = aim.location
    checkpoint: Checkpoint
    if location.path is not None:
        checkpoint = open_checkpoint(Path(location.path))
    else:
        from assay_quantize.hub import open_hub_checkpoint

        assert location.hub is not None
        checkpoint = open_hub_checkpoint(location.hub, location.revision)
    for note in checkpoint.notes:
        console.print(f"note: {_escape(note)}")
    return make_plan(checkpoint, recipe, model=aim.recipe.name, family=aim.recipe.family)


def _quantize_one(aim: Target, made: Plan, folder: Path, device: str) -> Verification:
    from assay.progress import ShardProgress
    from assay.targets import local_checkpoint
    from assay_quantize.engine import is_complete
    from assay_quantize.engine import quantize as run_engine
    from assay_quantize.verify import verify as verify_checkpoint

    source = local_checkpoint(aim.location)
    record_path = folder.parent / "verify.json"
    if is_complete(made, folder) and record_path.is_file():
        previous = Verification.load(record_path)
        manifest_sha256 = _manifest_sha256(folder)
        if previous.passed and previous.checkpoint_sha256 == manifest_sha256:
            console.print(f"{made.precision:10} done before and verified: {folder}")
            return previous
    made.save(folder.parent / "plan.json")
    with ShardProgress(console, made) as progress:
        manifest = run_engine(made, source, folder, device=device, on_progress=progress)
    console.print(
        f"{made.precision:10} {manifest.bytes_in / 1e9:.3f} GB -> {manifest.bytes_out / 1e9:.3f} GB "
        f"in {manifest.seconds:.0f} s: {folder}"
    )
    with console.status("verifying"):
        result = verify_checkpoint(folder, source=source)
    result.save(record_path)
    _print_verification(result)
    _write_first_card(aim, folder)
    return result


def _manifest_sha256(folder: Path) -> str | None:
    from assay.records import Manifest

    path = folder / "assay_manifest.json"
    return Manifest.load(path).checkpoint_sha256 if path.is_file() else None


def _write_first_card(aim: Target, folder: Path) -> None:
    """The card without scores: it says that nothing was measured yet. Only inside a run, whose layout the card reads."""
    if folder.name == "checkpoint" and (folder.parent / "plan.json").is_file():
        from assay_reports.card import write_card

        write_card(folder.parent.parent, folder.parent.name)


def _print_verification(result: Verification) -> None:
    looked = sum(result.checks.values())
    if result.passed:
        errors = ", ".join(f"{role} {error:.4f}" for role, error in sorted(result.mean_relative_error.items()))
        console.print(f"           verified: {looked:,} checks passed; mean weight error: {errors or 'not measured'}")
    for damage in result.damages[:20]:
        console.print(f"[bold red]damaged[/] {_escape(damage.where)}: {_escape(damage.what)} ({damage.check})")
    if len(result.damages) > 20:
        console.print(f"... and {len(result.damages) - 20} more; --json lists all")
    for skipped in result.not_checked:
        console.print(f"           not checked: {_escape(skipped)}")
    if not result.passed:
        console.print(f"[bold red]verification failed[/]: {len(result.damages)} things are wrong in {result.checkpoint}")


def _precision_names(aim: Target, one: str | None, several: str | None, *, with_reference: bool) -> list[str]:
    """Precisions to make, the reference's first: nothing can be measured without it."""
    if one is not None and several is not None:
        raise PlanError("say --precision or --precisions, not both")
    names = [one] if one else [n for n in (several or ",".join(aim.recipe.precisions)).replace(" ", ",").split(",") if n]
    reference = aim.recipe.reference.precision
    if with_reference and reference is not None:
        names = [reference, *(name for name in names if name != reference)]
    return list(dict.fromkeys(names))


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
    chosen = _choose_profile(aim, profile)
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
    as_json: JsonOption = False,
) -> None:
    """Serve the reference and every candidate alike, measure, judge; report and cards are written from the records.

    Exits 0 when everything was measured, whatever the verdicts: `assay gate` is the one that fails.
    """
    from assay.targets import resolve_target
    from assay_evaluate.run import evaluate as run_suite

    if (target is None) == (reference is None) or (reference is None) != (not candidate):
        raise AssayError("say what to measure: `assay evaluate TARGET`, or `assay evaluate --reference DIR --candidate DIR`")
    if target is not None:
        aim = resolve_target(target)
        run_dir = runs / aim.recipe.name
        candidates = _run_candidates(aim, run_dir, precisions)
    else:
        assert reference is not None and candidate
        aim = resolve_target(str(reference))
        run_dir = runs / aim.recipe.name
        candidates = _two_checkpoints(reference, candidate)
    chosen = _choose_profile(aim, profile)
    chosen_suite = _choose_suite(aim, suite, chosen)
    measurements = run_suite(
        aim.recipe.name,
        candidates,
        suite=chosen_suite,
        profile=chosen,
        serving=aim.recipe.serving,
        run_dir=run_dir,
        on_progress=lambda line: console.print(_escape(line)),
    )
    gates = _judge_and_write(aim.recipe.gates, run_dir, measurements)
    _print_verdicts(gates)
    console.print(f"report: {run_dir / 'report' / 'index.html'}")
    if as_json:
        _emit(gates)


def _run_candidates(aim: Target, run_dir: Path, precisions: str | None) -> list[Candidate]:
    """Reference first, then the source (if the recipe wants it), then every candidate precision."""
    from assay.targets import local_checkpoint, source_label
    from assay_evaluate.run import Candidate
    from assay_quantize.checkpoint import open_checkpoint

    def made(name: str) -> Path:
        folder = run_dir / name / "checkpoint"
        if not (folder / "assay_manifest.json").is_file():
            raise CheckpointError(
                f"{folder}: no finished checkpoint there; make it first: assay quantize {aim.recipe.name} --precision {name}"
            )
        return folder

    recipe = aim.recipe
    if recipe.reference.precision is not None:
        reference = Candidate(recipe.reference.precision, made(recipe.reference.precision), is_reference=True)
    else:
        assert recipe.reference.release is not None
        reference = Candidate("reference", local_checkpoint(recipe.reference.release), is_reference=True)
    found = [reference]
    if recipe.include_source:
        source = local_checkpoint(aim.location)
        found.append(Candidate(source_label(open_checkpoint(source).config), source))
    names = _precision_names(aim, None, precisions, with_reference=False)
    found += [Candidate(name, made(name)) for name in names if name != reference.label]
    if len(found) == 1:
        raise CheckpointError(f"{recipe.name}: only the reference is there to measure; add a candidate with --precisions")
    return found


def _two_checkpoints(reference: Path, candidates: list[Path]) -> list[Candidate]:
    from assay_evaluate.run import Candidate

    for folder in (reference, *candidates):
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: no checkpoint there (no config.json)")
    labels = [
        folder.resolve().name if folder.name != "checkpoint" else folder.resolve().parent.name
        for folder in (reference, *candidates)
    ]
    if len(set(labels)) != len(labels):
        labels = [f"{label}-{number}" for number, label in enumerate(labels)]
    return [
        Candidate(label, folder, is_reference=number == 0)
        for number, (label, folder) in enumerate(zip(labels, (reference, *candidates), strict=True))
    ]


def _choose_profile(aim: Target, wanted: str | None) -> ProfileRecipe:
    """The profile that was named, if this machine has what it needs; else the first of the recipe's that fits."""
    from assay_evaluate.hardware import choose_profile, describe_hardware, find_gpus, fits

    if wanted is None:
        return choose_profile(aim.recipe)
    profile = load_recipe(ProfileRecipe, wanted)
    if profile.base_url is None and not fits(profile.hardware, find_gpus()):
        needed = f"{profile.hardware.num_gpus}x {profile.hardware.gpu or 'NVIDIA GPU'}"
        raise AssayError(
            f"profile {profile.name} needs {needed}, this machine has {describe_hardware().get('gpus', 'no GPU')}; "
            "leave --profile out to have one chosen, or write one under recipes/profiles/"
        )
    return profile


def _choose_suite(aim: Target, wanted: str | None, profile: ProfileRecipe) -> SuiteRecipe:
    if wanted is not None:
        return load_recipe(SuiteRecipe, wanted)
    if aim.recipe.suite != "quick" and profile.hardware.device == "cpu":
        console.print(
            f"suite quick, not {aim.recipe.suite}, which has budgets of thousands of tokens an item and needs GPUs; "
            f"--suite {aim.recipe.suite} insists"
        )
        return load_recipe(SuiteRecipe, "quick")
    return load_recipe(SuiteRecipe, aim.recipe.suite)


# ------------------------------------------------------------------------------------------------ gate, report, card
@app.command()
def gate(
    run: RunArgument,
    gates: Annotated[str, typer.Option("--gates", help="A name of recipes/gates/, or a YAML file.")] = "default",
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Verdicts from the records of a run. Exit 1 unless every candidate is PASS."""
    run_dir = _run_folder(run, runs)
    report = _judge_and_write(gates, run_dir, _measurements(run_dir))
    if as_json:
        _emit(report)
    else:
        _print_verdicts(report)
    if any(status != "PASS" for status in report.overall.values()):
        raise typer.Exit(1)


@app.command()
def report(run: RunArgument, runs: RunsOption = Path("runs")) -> None:
    """Write report/{index.html,report.json,report.md} of a run again, from its records only."""
    from assay_reports.report import write_report

    print(write_report(_run_folder(run, runs)))


@app.command()
def card(run: RunArgument, runs: RunsOption = Path("runs")) -> None:
    """Write the model card (README.md) of every candidate of a run again, from its records only."""
    run_dir = _run_folder(run, runs)
    for path in _write_cards(run_dir):
        print(path)


def _run_folder(run: str, runs: Path) -> Path:
    from assay.targets import run_name

    for folder in (Path(run), runs / run, runs / run_name(run)):
        if (folder / "measurements").is_dir() or list(folder.glob("*/plan.json")):
            return folder
    known = sorted(path.name for path in runs.glob("*") if path.is_dir()) if runs.is_dir() else []
    raise AssayError(
        f"{run}: no run of that name; runs in {runs}: {', '.join(known) or 'none'}; `make quantize eval` makes one"
    )


def _measurements(run_dir: Path) -> list[Measurement]:
    found = [Measurement.load(path) for path in sorted((run_dir / "measurements").glob("*.json"))]
    if not found:
        raise AssayError(f"{run_dir}: nothing was measured yet; run `assay evaluate` first")
    return found


def _judge_and_write(gates: str, run_dir: Path, measurements: list[Measurement]) -> GateReport:
    """Verdicts, then everything that is written from records: gates.json, report, cards."""
    from assay_evaluate.gates import judge
    from assay_reports.report import write_report

    judged = judge(measurements, load_recipe(GateRecipe, gates), model=measurements[0].model)
    judged.save(run_dir / "gates.json")
    _write_cards(run_dir)
    write_report(run_dir)
    return judged


def _write_cards(run_dir: Path) -> list[Path]:
    from assay_reports.card import write_card

    return [
        write_card(run_dir, path.parent.name)
        for path in sorted(run_dir.glob("*/plan.json"))
        if (path.parent / "checkpoint").is_dir()
    ]


def _print_verdicts(gates: GateReport) -> None:
    """A table on a terminal; in a log, whose width nobody knows, a line per verdict."""
    from rich.table import Table

    colours = {"PASS": "green", "FAIL": "red", "UNDERPOWERED": "yellow", "NOT MEASURED": "yellow"}
    console.print(f"{gates.model} against {gates.reference}")
    if console.is_terminal:
        table = Table("candidate", "gate", "verdict", "what was seen")
        for one in gates.verdicts:
            table.add_row(one.candidate, one.gate, f"[{colours[one.status]}]{one.status}[/]", _escape(one.detail))
        console.print(table)
    else:
        for one in gates.verdicts:
            console.print(f"{one.candidate:16} {one.gate:26} {one.status:12} {_escape(one.detail)}")
    for candidate, status in gates.overall.items():
        console.print(f"{candidate:16} [bold {colours[status]}]{status}[/]")


# ------------------------------------------------------------------------------------------------ doctor
@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """What this machine can do, what is missing, how to get it. Exit 1 when something needed is missing."""
    from assay.doctor import examine

    findings = examine()
    if as_json:
        _emit([finding.model_dump() for finding in findings])
    else:
        for finding in findings:
            mark = {"ok": "[green]ok     [/]", "missing": "[red]missing[/]", "note": "[yellow]note   [/]"}[finding.state]
            console.print(f"{mark} {finding.what:22} {_escape(finding.detail)}")
            if finding.remedy:
                console.print(f"        {'':22} -> {_escape(finding.remedy)}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


@app.command("recipes")
def list_recipes() -> None:
    """Names of all recipes that ship with assay."""
    for kind in ("models", "precisions", "profiles", "suites", "gates"):
        print(f"{kind:11} {', '.join(recipe_names(kind))}")
