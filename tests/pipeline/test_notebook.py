"""examples/notebook.py as it is: a checkpoint planned, made and verified, two servers judged by their URLs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gateways import given

ROOT = Path(__file__).resolve().parents[2]
SUITE = """\
schema: 1
name: first-look
seed: eval-notebook
acceptance: false
gates: gates.yaml
tasks:
  - {kind: arithmetic, name: sums, languages: [en], num_items: 48, num_steps: [3], max_tokens: 400}
"""
GATES = "schema: 1\nname: gates\ndefault_max_drop: 0.4\nmin_items: 10\ngates: []\n"


@pytest.mark.slow
def test_the_notebook_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "first-look.yaml").write_text(SUITE)
    (tmp_path / "gates.yaml").write_text(GATES)
    source = ROOT / "examples" / "tiny_glm" / "checkpoint"
    with given(fp8="healthy", w4a16="healthy") as servers:
        urls = [servers.by_label[label].base_url for label in ("fp8", "w4a16")]
        command = [sys.executable, str(ROOT / "examples" / "notebook.py"), str(source), *urls]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "183 tensors, 11,957,632 -> 6,268,352 bytes"
    assert "verified" in lines
    assert [line.partition(";")[0] for line in lines[-3:-1]] == ["fp8-repeat: PASS", "w4a16: PASS"]
    assert (tmp_path / lines[-1]).is_file()
