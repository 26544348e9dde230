"""The bar of long work: names of tensors and precisions are text, whatever a checkpoint or a recipe calls them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from assay_cli.progress import ByteProgress

HOSTILE = "[/x] [red]a[/red] \x1b[31mb \u202ec"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_are_neither_markup_nor_control_codes(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_cli.progress.LOG_INTERVAL_S", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, color_system=None, width=200)
    with ByteProgress(console, HOSTILE, 10) as progress:
        progress(HOSTILE, 5)
        progress(HOSTILE, 5)
    assert out.getvalue().count("[/x] [red]a[/red] \\u001b[31mb \\u202ec") >= 2
    assert "\x1b[31m" not in out.getvalue() and "\u202e" not in out.getvalue()
