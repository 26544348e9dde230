"""`assay upgrade-check` on real environments: vLLM as it is, a copy of it, and a copy with a fault in one layer's code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command_line import Run

from assay_evaluate.serving.server import find_interpreter

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
SUITE = """\
schema: 1
name: short
seed: eval-short
acceptance: false
tasks:
  - {kind: arithmetic, name: sums, languages: [en], num_items: 60, num_steps: [2], max_tokens: 64}
"""
GATES = """\
schema: 1
name: gates
level: 0.95
max_excluded: 0.01
min_items: 30
gates: [{kind: score, task: sums, max_drop: 0.10}]
"""


def copy_of(environment: Path, folder: Path, *, is_faulty: bool) -> Path:
    """An environment whose files are links to those of another; is_faulty: but for the code of RMSNorm, which then halves."""
    subprocess.run(["cp", "-as", str(environment.absolute()), str(folder)], check=True)
    code = next(folder.glob("lib/python*/site-packages/vllm/model_executor/layers/layernorm.py"))
    text = code.read_text()
    code.unlink()
    code.write_text(text + (FAULT if is_faulty else "\n# a copy\n"))
    return folder


FAULT = """

def _halved(norm):
    def forward(self, x, residual=None):
        made = norm(self, x, residual)
        return (made[0] * 0.5, made[1]) if isinstance(made, tuple) else made * 0.5
    return forward


RMSNorm.forward_native = _halved(RMSNorm.forward_native)
RMSNorm.forward_cpu = _halved(RMSNorm.forward_cpu)
"""


def test_a_copy_passes_and_a_fault_is_found_between_copies(run: Run, tmp_path: Path) -> None:
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    environment = interpreter.parent.parent
    healthy, faulty, last = (
        copy_of(environment, tmp_path / name, is_faulty=name != "healthy") for name in ("healthy", "faulty", "last")
    )
    Path("short.yaml").write_text(SUITE)
    Path("gates.yaml").write_text(GATES)
    words = ("upgrade-check", str(CHECKPOINT), "--profile", "cpu-emulated", "--suite", "short.yaml", "--gates", "gates.yaml",
             "--from", str(environment), "--no-speed")  # fmt: skip
    code, out, err = run(*words, "--to", str(healthy), "--name", "same")
    assert code == 0, err
    assert ": PASS on short: " in out.splitlines()[-1]
    code, out, err = run(
        *words, "--to", str(last), "--between", str(healthy), "--between", str(faulty), "--name", "lost", "--json"
    )
    assert code == 1, err
    record = json.loads(out)
    assert [(Path(step["engine"]["where"]).parts[-3], step["status"]) for step in record["steps"]] == [
        ("healthy", "PASS"), ("faulty", "FAIL"),
    ]  # fmt: skip
    assert Path(record["last_good"]["where"]) == healthy / "bin" / "python"
    assert Path(record["first_bad"]["where"]) == faulty / "bin" / "python"
    assert len({engine["code"] for engine in (record["before"], record["last_good"], record["first_bad"])}) == 3
