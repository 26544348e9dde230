"""Arguments and options that several commands share, and the one rule for options that take several values.

`--precisions a,b`, `--precisions "a b"`, `--precisions a --precisions b` and any mixture are the same; a value
that is given twice counts once. Names are checked while the command line is read, before anything is looked up or started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.errors import AssayError, did_you_mean
from assay.foreign_text import shown
from assay.recipes.family_names import add_family
from assay.recipes.load import KINDS, recipe_file, recipe_names
from assay.recipes.model import automatic_of, is_automatic
from assay.recipes.precision import PrecisionRecipe
from assay.records.run import RUN_RECORD
from assay_pipeline.run_folders import find_run, holds_records


# ------------------------------------------------------------------------------------------------ several values, choices
def several(values: list[str] | None) -> list[str] | None:
    """All values of an option, without doubles, in the order in which they were given. None: it was not given.

    Commas and blanks separate. A text that is the path of something that exists, a weight behind it (`FILE@0.3`) or not, is one
    value, whatever is in it. AssayError: it names nothing.
    """
    if not values:
        return None
    given = list(values)
    parts = (
        part.strip()
        for value in given
        for piece in ([value] if _is_path(value) else value.split(","))
        for part in ([piece] if _is_path(piece.strip()) else piece.split())
    )
    if not (named := list(dict.fromkeys(part for part in parts if part))):
        raise AssayError(f"{shown(repr(' '.join(given)))}: names nothing; give a value, or leave the option out")
    return named


def _is_path(text: str) -> bool:
    return os.path.exists(text) or os.path.exists(text.rpartition("@")[0])


ALSO_CALLED = {"gpu": "cuda"}
"""What people say -> the word that an option takes for it."""


def one_of(param: typer.CallbackParam, value: str, allowed: Iterable[str]) -> str:
    """`value`, if it is allowed; else an AssayError that names the option and what is allowed."""
    if value not in (known := list(allowed)):
        hint = did_you_mean(ALSO_CALLED.get(value, value), known)
        raise AssayError(f"{param.opts[0]} {shown(value)}: {hint}it takes one of: {', '.join(known)}")
    return value


def choice(*allowed: str) -> Callable[[typer.CallbackParam, str | None], str | None]:
    """Callback of an option that takes one of a few words."""

    def check(param: typer.CallbackParam, value: str | None) -> str | None:
        return None if value is None else one_of(param, value, allowed)

    return check


def choices(*allowed: str) -> Callable[[typer.CallbackParam, list[str] | None], list[str] | None]:
    """Callback of an option that takes several of these words, in any order; `all` is all of them."""

    def check(param: typer.CallbackParam, values: list[str] | None) -> list[str] | None:
        names = several(values)
        if names is None or names == ["all"]:
            return None if names is None else list(allowed)
        return [one_of(param, name, allowed) for name in names]

    return check


def recipe(folder: str) -> Callable[[str | None], str | None]:
    """Callback of an option that takes the name of a recipe of recipes/FOLDER/, or the path of a YAML file."""

    def check(value: str | None) -> str | None:
        if value is not None:
            recipe_file(KINDS[folder], value)
        return value

    return check


def recipes(folder: str) -> Callable[[list[str] | None], list[str] | None]:
    """The same of an option that takes several."""

    def check(values: list[str] | None) -> list[str] | None:
        names = several(values)
        for name in names or ():
            recipe_file(KINDS[folder], name)
        return names

    return check


def _check_precision(name: str) -> None:
    automatic_of(name) if is_automatic(name) else recipe_file(PrecisionRecipe, name)


def precision_or_automatic(value: str | None) -> str | None:
    """Callback: a precision's name or file, or `auto-BUDGET`."""
    if value is not None:
        _check_precision(value)
    return value


def precisions_or_automatic(values: list[str] | None) -> list[str] | None:
    """The same of an option that takes several."""
    names = several(values)
    for name in names or ():
        _check_precision(name)
    return names


AUTOMATIC_HELP = "auto-4.5bpw or auto-405GB: a mix that the run chooses under this budget."


def named(folder: str) -> str:
    """What stands in --help of an option that takes such a recipe."""
    return f"A name of recipes/{folder}/ ({', '.join(recipe_names(folder))}), or a YAML file."


URL_FORM = "with a URL, whose server runs already"
CHECKPOINT_FORM = "with a checkpoint, which is served here"


def refuse_unused(ctx: typer.Context, form: str, *parameters: str) -> None:
    """AssayError if an option was given that a form of the command does not use: nothing is ignored in silence.

    form: which one, as it continues "is not used". parameters: names of the command's parameters.
    """
    sources = {name: ctx.get_parameter_source(name) for name in parameters}
    given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    if used := [param.opts[-1] for param in ctx.command.params if param.name in given]:
        they = "is" if len(used) == 1 else "are"
        raise AssayError(f"{' and '.join(used)} {they} not used {form}; leave {'it' if they == 'is' else 'them'} out")


# ------------------------------------------------------------------------------------------------ completion by the shell
def completes(folder: str) -> Callable[[str], list[str]]:
    """Names of the recipes of recipes/FOLDER/; of `a,b` the last. Where none fits, the shell completes files."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in recipe_names(folder) if name.startswith(last)]

    return complete


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the runs under --runs."""
    runs = Path(ctx.params.get("runs") or "runs")
    return sorted(path.parent.name for path in runs.glob(f"*/{RUN_RECORD}") if path.parent.name.startswith(incomplete))


def recipe_option(*flags: str, help: str) -> Any:
    """An option that takes one recipe: flags, the folder under recipes/ last."""
    *names, folder = flags
    return typer.Option(
        *names, metavar="NAME|FILE", callback=recipe(folder), autocompletion=completes(folder), help=help
    )  # fmt: skip


def _folder_or_nothing(param: typer.CallbackParam, value: Path) -> Path:
    """Nothing may be there yet; AssayError if a file is."""
    if os.path.exists(value) and not value.is_dir():
        raise AssayError(f"{param.opts[0]} {shown(value)}: is a file; give a folder")
    return value


# ------------------------------------------------------------------------------------------------ arguments and options
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        autocompletion=completes("models"),
        help="A model recipe's name, a checkpoint folder, or a Hugging Face id.",
    ),
]

UrlOrTargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL|TARGET",
        help="The URL of any OpenAI-compatible server; or a checkpoint folder, a model recipe's name or a Hugging Face id, "
        "which is served here.",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", autocompletion=complete_run, help="A run's folder (runs/tiny-glm), or a model's name under --runs."
    ),
]
RunsOption = Annotated[Path, typer.Option("--runs", callback=_folder_or_nothing, help="Folder of all runs.")]
ScreeningOption = Annotated[
    Path | None,
    typer.Option(
        "--screening", metavar="FOLDER|FILE",
        help="What `assay screen` wrote of these very weights, for the card. Default: RUN/screened, if it is there.",
    ),
]  # fmt: skip

NameOption = Annotated[
    str | None,
    typer.Option(
        "--name", help="Name of the run's folder under --runs. Default: the model's name, plus what tells it from other runs."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors: no progress, no notes.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Also what libraries log, and the traceback of an error.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the record as JSON on stdout.")]


def _take_up(value: Path | None) -> Path | None:
    """The family is known to the whole process from here on."""
    if value is not None:
        add_family(str(value))
    return value


FamilyOption = Annotated[
    Path | None,
    typer.Option(
        "--family", metavar="FILE", callback=_take_up, is_eager=True,
        help="A family of your own (`assay family` drafts it), for an architecture that assay does not know.",
    ),
]  # fmt: skip
"""The command itself does nothing with it: it is taken up while the command line is read."""

WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Threads. Default: every core this process may use. With Ray: threads for one shard, at most 4.",
    ),
]

PrecisionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--precisions", metavar="NAME,...", callback=precisions_or_automatic, autocompletion=completes("precisions"),
        help=f"One or several of: {', '.join(recipe_names('precisions'))}, or YAML files; {AUTOMATIC_HELP} "
        "Default: the model's list.",
    ),
]  # fmt: skip
SuiteOption = Annotated[
    str | None, recipe_option("--suite", "suites", help=f"What is measured. {named('suites')} Default: the model's.")
]
GatesOption = Annotated[
    str | None,
    recipe_option(
        "--gates", "gates", help=f"Limits, registered before the first request. {named('gates')} Default: the suite's."
    ),
]
ProfileOption = Annotated[
    str | None, recipe_option("--profile", "profiles", help=f"How vLLM is run. {named('profiles')} Default: from the hardware.")
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option(
        "-tp", "--tensor-parallel-size", min=1, metavar="GPUS",
        help="GPUs that share each layer, as in vLLM. Default: the profile's; the GPUs that it needs change with it.",
    ),
]  # fmt: skip
VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="NAME[:KEY=VALUE,...]",
        help="Compare another way of serving the reference's own checkpoint: flags of vLLM (kv-cache-dtype=fp8), mtp=off or "
        "mtp=2, env.NAME=VALUE, interpreter=PATH, or url=http://HOST:PORT of a server that runs already and is served so. NAME "
        "alone: of `variants` in the profile or the model's recipe.",
    ),
]  # fmt: skip
TasksOption = Annotated[
    list[str] | None,
    typer.Option("--tasks", metavar="NAME,...", callback=several, help="Only these tasks of the suite. Default: all."),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, metavar="N", help="At most N items of each part of a task (a language, a length): for a trial."
    ),
]
OutFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR",
        help="Folder for all that is written. Default: the run that the checkpoint belongs to, else a new temporary folder.",
    ),
]  # fmt: skip
LabelOption = Annotated[
    str | None,
    typer.Option(
        "--label", help="Name of the result. Default: the checkpoint's precision, or the server's name for its model."
    ),
]
RunOption = Annotated[Path | None, typer.Option("--run", metavar="RUN", help="Folder of the run that the result belongs to.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--served-model-name", help="With a URL: the model's name there. Default: the first that the server lists."),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key-env", metavar="VARIABLE", help="With a URL: environment variable that holds its key, sent as a bearer token."
    ),
]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", min=1, help="Requests in flight. Default: 16; for a checkpoint its profile's.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=8, help="Budget of a reply, in tokens.")]
SeedOption = Annotated[
    str, typer.Option("--seed", help="Seed for the prompts, any text: the same seed draws the same prompts.")
]  # fmt: skip
TEXT_HELP = (
    "Where text comes from: plain text, .jsonl or .parquet (text, prompt or messages), hub:OWNER/NAME[:PATTERN] (a data set), "
    "RUN (what its reference replied), own (what the model samples at temperature 1) or MIX.yaml. Several are mixed by weight, "
    "in tokens."
)
TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text", metavar="SOURCE[@WEIGHT],...", callback=several,
        help=f"For calibrated precisions. {TEXT_HELP} Default: what the precision or the model's recipe names, else own, for "
        "which the model must fit into memory whole.",
    ),
]  # fmt: skip
WithholdOption = Annotated[
    list[str] | None,
    typer.Option(
        "--withhold", metavar="SUITE|RUN,...", callback=several,
        help="No text with an item of these is taken; data sets are downloaded for it. Default: every shipped suite, as far as "
        "its data sets are on this machine, and the runs of this model in --runs.",
    ),
]  # fmt: skip
ImportanceOption = Annotated[
    Path | None,
    typer.Option(
        "--importance", metavar="FILE",
        help="What `assay calibrate` wrote, for precisions that search scales (observer: mse) or store static ones. Default: a "
        "run makes it for those that cannot do without.",
    ),
]  # fmt: skip
BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model", metavar="OWNER/NAME", help="Of a source in a folder: the model's id on the hub, which the card names."
    ),
]
MtpOption = Annotated[
    str | None,
    typer.Option(
        "--mtp", metavar="drop", callback=choice("drop"),
        help="drop: whatever the precision, leave the MTP block out and declare 0 MTP layers: of a model that lost it, or to "
        "serve without drafts.",
    ),
]  # fmt: skip
ReferenceOption = Annotated[
    str | None,
    typer.Option(
        "--reference", metavar="DIR|OWNER/NAME",
        help="What candidates are compared with, instead of the recipe's reference. Name TARGET itself to take a quantized "
        "copy of a model as it is; every page then says so.",
    ),
]  # fmt: skip
StreamOption = Annotated[
    str | None,
    typer.Option(
        "--stream-from", metavar="hub", callback=choice("hub"),
        help="hub: download a shard, quantize it, delete it; at most two shards of the source are on disk.",
    ),
]  # fmt: skip
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="auto|cpu|cuda", callback=choice("auto", "cpu", "cuda"),
        help="Where a calibration runs. auto: on a GPU, if PyTorch sees one. All else runs on CPUs.",
    ),
]  # fmt: skip
RunnerOption = Annotated[
    str,
    typer.Option(
        "--runner", metavar="local|ray", callback=choice("local", "ray"),
        help="What makes the shards. local: threads on this machine; ray: the Ray cluster that "
        " RAY_ADDRESS names, else one on this machine.",
    ),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ runs
def named_run(ctx: typer.Context, run: str, runs: Path) -> Path:
    """`find_run`; AssayError if --runs was given though `run` is itself the folder of a run."""
    refuse_runs(ctx, run)
    return find_run(run, runs)


def refuse_runs(ctx: typer.Context, *named: str) -> None:
    """AssayError if --runs was given, and every one of `named` is the folder of a run."""
    if all(holds_records(Path(run)) for run in named):
        refuse_unused(ctx, "with the folder of a run", "runs")
