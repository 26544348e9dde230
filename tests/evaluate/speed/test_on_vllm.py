"""Two points of tiny-glm, measured: a real server, and vLLM's own benchmark in the serving environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from assay.errors import MeasureError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.speed import SpeedRecord
from assay_evaluate.serving.server import Server
from assay_evaluate.speed.bench import Job, benchmark, write_prompts
from assay_evaluate.speed.ladder import Ladder
from assay_evaluate.speed.measure import LadderRun, Subject
from assay_evaluate.speed.prompts import Prompts
from assay_evaluate.speed.rows import repeat_of

pytestmark = pytest.mark.serve
TINY_GLM = Path(__file__).parents[3] / "examples" / "tiny_glm" / "checkpoint"
LADDER = Ladder(concurrency=(1, 2), speculation=(1,), repeats=1, num_requests=3, output_tokens=16, objective={"ttft_s": 600.0})
PROFILE = load_recipe(ProfileRecipe, "cpu-emulated")
SERVING = Serving(reasoning_parser="glm45", num_speculative_tokens=1)


def measuring(folder: Path, lines: list[str]) -> LadderRun:
    prompts = Prompts(load_recipe(SuiteRecipe, "quick"), 0, 256, {})
    return LadderRun([Subject("bf16", TINY_GLM, "0" * 64, "bf16")], LADDER, prompts, PROFILE, SERVING, folder, lines.append)


def test_two_points(tmp_path: Path) -> None:
    lines: list[str] = []
    record = measuring(tmp_path, lines).run()
    assert record.not_measured == () and sorted(row.concurrency for row in record.rows) == [1, 2]
    for row in record.rows:
        (entry,) = row.repeats
        assert (row.emulated, row.speculation, row.num_gpus, row.engine) == (None, 1, 0, "vllm 0.32.0")
        assert row.kernels and row.fingerprint_sha256 and row.startup_s is not None and row.startup_s > 0
        assert (entry.num_completed, entry.num_failed, entry.energy_j) == (3, 0, None)
        assert row.output_tokens is not None and 2 <= row.output_tokens <= 16
        assert row.prompt_tokens is not None and 10 <= row.prompt_tokens <= 200
        assert entry.duration_s is not None and entry.total_tokens_s is not None
        assert entry.output_tokens_s == pytest.approx(3 * row.output_tokens / entry.duration_s)
        assert entry.total_tokens_s == pytest.approx(3 * (row.output_tokens + row.prompt_tokens) / entry.duration_s)
        assert entry.ttft_s is not None and entry.tpot_s is not None and entry.end_to_end_s is not None
        assert 0 < entry.tpot_s.mean < entry.end_to_end_s.mean and entry.ttft_s.p50 < entry.end_to_end_s.p50
        assert entry.acceptance_length is not None and 1 <= entry.acceptance_length <= 2
        assert entry.goodput_requests_s == pytest.approx(3 / entry.duration_s), "all are good"
        # Of a forked server it is that of the process in its place: the fork belongs to the session of its parent.
        assert entry.memory_bytes is not None and entry.memory_bytes > 1 << 20
    assert SpeedRecord.load(tmp_path / "speed.json") == record
    assert measuring(tmp_path, lines).run() == record and lines[-1] == "bf16: speculation 1: measured already"


def test_a_job_that_fails(tmp_path: Path) -> None:
    """What vLLM refuses before it asks anything ends its own job only: the same process answers the next."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    nobody = SimpleNamespace(base_url="http://127.0.0.1:9", model="model", headers={}, check_alive=lambda: None)
    job = Job(folder / "nothing.jsonl", 2, 1, 4, TINY_GLM, is_chat=True)
    with benchmark(cast(Server, nobody), PROFILE, folder, tmp_path / "bench.log") as bench:
        for entry in (job, replace(job, tokenizer=folder / "nowhere")):
            with pytest.raises(MeasureError, match=r"^vllm bench serve failed \(.*\); its log is .*bench\.log$"):
                bench.run(entry)
        job = replace(job, prompts=write_prompts(folder / "prompts.jsonl", ["How many?"]), num_requests=1)
        with pytest.raises(MeasureError, match=r"^vllm bench serve: no request was answered \(1 failed\)$"):
            repeat_of(bench.run(job), "vllm bench serve")
