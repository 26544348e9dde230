"""Figures of GLM-5 on the pages: the program's own, from headers of its true shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run
from hollow import hollow_glm5
from page_commands import ROOT, blocks_of


@pytest.mark.slow
def test_the_plan_of_glm_5(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows `assay plan glm-5` without the hub's headers being here: number by number."""
    monkeypatch.setenv("COLUMNS", "200")
    source = hollow_glm5(tmp_path / "GLM-5", own_indexers=True)
    code, out, _ = run("plan", source, "--precision", "w4a16", "--hardware", "8xh200")
    assert code == 0
    block = next(one for one in blocks_of("docs/how-to/glm-5.md") if one.text.startswith("assay plan glm-5"))
    assert block.output is not None and block.text == "assay plan glm-5 --precision w4a16 --hardware 8xh200"
    printed = [line.split() for line in out.splitlines()]
    assert [line for line in block.output.splitlines() if line.split() not in printed] == []


def test_sums_of_the_page() -> None:
    """Disk and money of the table, from its own rows: GB and hours as the preflight says them."""
    page = (ROOT / "docs/how-to/glm-5.md").read_text(encoding="utf-8")
    w4a16, nvfp4a16, reference, rest, source = 408, 442, 756, 10, 1508
    assert f"{(w4a16 + nvfp4a16 + reference + rest) / 1000:.2f} TB with `--stream-from hub`" in page
    assert f"{(w4a16 + nvfp4a16 + reference + rest + source) / 1000:.1f} TB with the source" in page
    assert f"{60 * 3.5:,.0f} to {620 * 3.5:,.0f} (60 to 620 GPU-hours)" in page
