"""The `assay upgrade-check` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay_cli.options import (
    ApiKeyOption,
    FamilyOption,
    GatesOption,
    JsonOption,
    LimitOption,
    NameOption,
    ProfileOption,
    RunsOption,
    TasksOption,
    TensorParallelOption,
    completes,
    named,
    recipe,
)
from assay_cli.shown.upgrade import print_upgrade
from assay_cli.terminal import emit, results, say
from assay_pipeline.upgrading.upgrade import SUITE, Question
from assay_pipeline.upgrading.upgrade import upgrade_check as check


def upgrade_check(
    before: Annotated[
        str,
        typer.Option(
            "--from", metavar="ENGINE",
            help="The engine of today: the Python of an environment that has vLLM, its folder, or a server's URL.",
        ),
    ],
    after: Annotated[str, typer.Option("--to", metavar="ENGINE", help="The engine to change to, named alike.")],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", autocompletion=completes("models"),
            help="The checkpoint that both engines serve: a folder, a model recipe's name, or a Hugging Face id. Not needed "
            "for servers that run already.",
        ),
    ] = None,
    between: Annotated[
        list[str] | None,
        typer.Option(
            "--between", metavar="ENGINE",
            help="An engine in between, tried if something was lost; several from old to new. Default: those installed here.",
        ),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            "--suite", metavar="NAME|FILE", callback=recipe("suites"), autocompletion=completes("suites"),
            help=f"What is measured. {named('suites')}",
        ),
    ] = SUITE,
    tasks: TasksOption = None,
    limit: LimitOption = None,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Measure tokens per second on both.")] = True,
    gates: GatesOption = None,
    api_key_env: ApiKeyOption = None,
    profile: ProfileOption = None,
    family: FamilyOption = None,
    tensor_parallel_size: TensorParallelOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Whether another vLLM answers as well as today's, with the same checkpoint; after a loss, which version brought it.

    Exit 1 unless the verdict is PASS, 2 on an error. The last line is one for a changelog.

    Example: assay upgrade-check /data/GLM-5-FP8 --from /opt/vllm-0.32 --to /opt/vllm-0.33
    """
    question = Question(
        target, suite=suite, tasks=None if tasks is None else tuple(tasks), limit=limit, gates=gates, profile=profile,
        tensor_parallel_size=tensor_parallel_size, api_key_env=api_key_env,
    )  # fmt: skip
    checked = check(question, before, after, between=between or (), with_speed=speed, runs=runs, name=name, say=say)
    if as_json:
        emit(checked.record)
    else:
        print_upgrade(checked.record, results())
    say(f"report: {checked.run_dir / 'report' / 'index.html'}")
    if checked.record.status != "PASS":
        raise typer.Exit(1)
