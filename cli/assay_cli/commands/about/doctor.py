"""The `assay doctor` command."""

from __future__ import annotations

import typer

from assay_cli.options import JsonOption
from assay_cli.terminal import emit, escape, results


def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine can do, what is missing and how to get it. Exit 1 when something needed is missing."""
    from assay_pipeline.examine import examine

    findings = examine()
    if as_json:
        emit([finding.model_dump() for finding in findings])
    else:
        out = results()
        for finding in findings:
            mark = {"ok": "[green]ok     [/]", "missing": "[red]missing[/]", "note": "[yellow]note   [/]"}[finding.state]
            out.print(f"{mark} {finding.what:22} {escape(finding.detail)}")
            if finding.remedy:
                out.print(f"        {'':22} -> {escape(finding.remedy)}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)
