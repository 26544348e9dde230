"""`assay probe --lever`: which parameter a failure hangs on, and a folder with which anybody can see it fail."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from assay.cli.targets import url_in
from assay.cli.terminal import escape, say
from assay.errors import AssayError
from assay.foreign_text import safe_name
from assay.records.lever import STRUCTURAL, LeverReport

if TYPE_CHECKING:
    from assay_evaluate.diagnosis.levers.search import LeverSettings
    from assay_evaluate.diagnosis.levers.settings import Start
    from assay_evaluate.serving.server import ServerSpec


def parse_levers(text: str) -> tuple[str, ...] | None:
    """`all` -> None, `a,b` -> ("a", "b")."""
    names = tuple(name for name in text.replace(" ", "").split(",") if name)
    return None if names == ("all",) else names


def levers(
    target: str,
    settings: LeverSettings,
    *,
    profile: str | None = None,
    model: str | None = None,
    label: str | None = None,
    folder: Path | None = None,
    runs: Path = Path("runs"),
) -> LeverReport:
    """Search, shrink to the smallest failing set, write the bundle to `folder` (default RUNS/levers/LABEL)."""
    from assay_evaluate.diagnosis.levers.reproduction import reproduce
    from assay_evaluate.diagnosis.levers.search import find_levers
    from assay_evaluate.diagnosis.levers.settings import Setting, facts_of, running_already, served_here

    spec: ServerSpec | None = None
    start: Start
    if (url := url_in(target)) is not None:
        from assay_evaluate.diagnosis.endpoint import find_endpoint

        endpoint = find_endpoint(url, model)
        start, name = running_already(endpoint), label or safe_name(endpoint.model)
    else:
        spec = _spec_of(target, profile, runs)
        start, name = served_here(spec, say), label or spec.checkpoint.resolve().name
    facts = functools.partial(facts_of, can_restart=spec is not None)
    base = Setting(settings.concurrency)
    found, search = find_levers(start, settings, label=name, base=base, facts=facts, on_progress=say)
    if not found.baseline.failures:
        return found
    return reproduce(found, search, folder or runs / "levers" / name, spec, say)


def _spec_of(target: str, profile: str | None, runs: Path) -> ServerSpec:
    from assay.cli.stages import profile_for
    from assay.cli.targets import local_checkpoint, resolve_target
    from assay_evaluate.serving.server import ServerSpec

    aim = resolve_target(target)
    chosen = profile_for(aim, profile)
    if chosen.urls:
        raise AssayError(
            f"profile {chosen.name}: levers start servers of their own; give the URL itself, or a profile without base_url"
        )
    return ServerSpec(
        checkpoint=local_checkpoint(aim.location), profile=chosen, serving=aim.recipe.serving, speculate=True,
        log_path=runs / "levers" / "vllm.log",
    )  # fmt: skip


def print_levers(found: LeverReport, out: Console) -> None:
    """A table on a terminal, lines in a log; the sentence last."""
    if out.is_terminal:
        table = Table("lever", "from", "to", "effect", "what was seen")
        for one in found.effects:
            mark = f"[bold red]{one.effect}[/]" if one.effect in STRUCTURAL else one.effect
            table.add_row(one.lever, escape(one.before), escape(one.after), mark, escape(one.sentence))
        out.print(table)
    else:
        for one in found.effects:
            out.print(escape(f"{one.lever:16} {one.before:>10} -> {one.after:10} {one.effect:10} {one.sentence}"))
    out.print(escape(found.sentence))
    if found.smallest:
        out.print(escape(f"smallest set that fails: {len(found.smallest)} requests: {', '.join(found.smallest)}"))
    if found.bundle is not None:
        out.print(escape(f"reproduction: python {shlex.quote(f'{found.bundle}/reproduce.py')} URL"))
