"""`assay blame --variant` on the real vLLM: a fault that only quantized models meet, in code that a variable passes by."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from command_errors import one_error
from command_line import Run

from assay.records.diagnosis.blame import Blame
from assay_evaluate.serving.server import find_interpreter

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKPOINT = REPOSITORY / "examples" / "tiny_glm" / "checkpoint"
SUITE = """\
schema: 1
name: short
seed: eval-short
acceptance: false
tasks: [{kind: arithmetic, name: sums, languages: [en], num_items: 60, num_steps: [2], max_tokens: 64}]
"""
GATES = """\
schema: 1
name: gates
level: 0.95
max_excluded: 0.01
min_items: 30
gates: [{kind: score, task: sums, max_drop: 0.10}]
"""
FAULT = """

import os as _os


def _halved(norm):
    def forward(self, x, residual=None):
        made = norm(self, x, residual)
        if not self._is_quantized or _os.environ.get("OTHER_BACKEND") == "1":
            return made
        return (made[0] * 0.5, made[1]) if isinstance(made, tuple) else made * 0.5
    return forward


def _seen(init):
    def __init__(self, *args, **kwargs):
        from vllm.config import get_current_vllm_config

        init(self, *args, **kwargs)
        self._is_quantized = get_current_vllm_config().quant_config is not None
    return __init__


RMSNorm.__init__ = _seen(RMSNorm.__init__)
RMSNorm.forward_native = _halved(RMSNorm.forward_native)
RMSNorm.forward_cpu = _halved(RMSNorm.forward_cpu)
"""


def patched(environment: Path, folder: Path) -> Path:
    """Another environment's files, linked, but for the code of RMSNorm."""
    subprocess.run(["cp", "-as", str(environment.absolute()), str(folder)], check=True)
    code = next(folder.glob("lib/python*/site-packages/vllm/model_executor/layers/layernorm.py"))
    text = code.read_text()
    code.unlink()
    code.write_text(text + FAULT)
    return folder


def test_a_backend_and_an_engine_are_blamed_and_not_the_weights(run: Run, tmp_path: Path) -> None:
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    faulty = patched(interpreter.parent.parent, tmp_path / "faulty")
    Path("short.yaml").write_text(SUITE)
    Path("gates.yaml").write_text(GATES)
    profile = yaml.safe_load((REPOSITORY / "recipes" / "profiles" / "cpu-emulated.yaml").read_text())
    Path("here.yaml").write_text(yaml.safe_dump({**profile, "name": "here", "interpreter": str(faulty / "bin" / "python")}))
    assert run("quantize", CHECKPOINT, "-p", "w4a16", "--out", "w4a16")[0] == 0
    words = ("judge", f"bf16={CHECKPOINT}", "w4a16", "--profile", "here.yaml", "--suite", "short.yaml", "--gates", "gates.yaml")
    code, _, err = run(*words, "--name", "lost")
    assert code == 1, err
    variants = (
        "--variant", "other-backend:env.OTHER_BACKEND=1", "--variant", f"engine:interpreter={interpreter}",
        "--variant", "cached:enable-prefix-caching=true",
    )  # fmt: skip
    blamed = ("blame", "runs/lost", "--tokens", "300", "--length", "60")
    code, out, err = run(*blamed, *variants, "--profile", "here.yaml", "--json")
    assert code == 1, err
    record = Blame.model_validate(json.loads(out))
    assert record.word == "undecided"  # of the weights: assay's own pages are foreign to tiny-glm
    assert [cause.label for cause in record.serving][2] == "cached"
    *named, cached = record.serving
    assert {cause.label for cause in named} == {"other-backend", "engine"}
    for cause in named:
        assert cause.num_lost > 40 and cause.num_again == 0 and cause.share.low > 0.8
    assert cached.share.high < 0.2
    assert Blame.load(Path("runs/lost/blame/w4a16/blame.json")) == record
    code, out, err = run(*blamed, "--variant", "same:max-num-seqs=32", "--profile", "here.yaml")
    assert code == 2, err
    error = one_error(run("blame", str(CHECKPOINT), "w4a16", "--variant", "x:mtp=off"))
    assert error == "--variant: is asked what the candidate of a run lost; give the run's folder, or leave it out"
