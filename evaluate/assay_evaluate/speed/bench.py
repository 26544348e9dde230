"""vLLM's own benchmark, `vllm bench serve`, as it is: its arguments, its process, its JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import CheckpointError, MeasureError
from assay.foreign_text import one_line, shown
from assay.recipes.profile import ProfileRecipe
from assay.records.base import write_text_atomically
from assay.safe_files import read_json_object
from assay_evaluate.serving.process import SupervisedProcess, activated_environment
from assay_evaluate.serving.server import Server, interpreter_for
from assay_evaluate.serving.vllm_command import server_environment
from assay_evaluate.speed.ladder import VLLM_NAMES

_DRIVER = Path(__file__).with_name("_driver.py")
START_S = 600.0
"""Within which vLLM is imported and the first job is done, on top of the job's own time."""
JOB_S = 3600.0
"""Within which any job is done."""
CLIENT_KEY = "OPENAI_API_KEY"
"""From which `vllm bench serve` takes the key that it sends (vllm/benchmarks/lib/endpoint_request_func.py)."""


@dataclass(frozen=True)
class Job:
    """One run of the benchmark against a server.

    prompts: a JSONL file, `prompt` of each line. is_chat: asked through the checkpoint's chat template.
    """

    prompts: Path
    num_requests: int
    concurrency: int
    output_tokens: int
    tokenizer: Path
    is_chat: bool
    objective: Mapping[str, float] = field(default_factory=dict)
    trust_remote_code: bool = False


def words_of(job: Job, server_url: str, model: str, result: Path) -> list[str]:
    """Arguments of `vllm bench serve`. Replies end where the model ends them; sampling is the server's default."""
    backend, endpoint = ("openai-chat", "/v1/chat/completions") if job.is_chat else ("openai", "/v1/completions")
    words = [
        *("--backend", backend, "--endpoint", endpoint, "--base-url", server_url),
        *("--model", model, "--served-model-name", model, "--tokenizer", str(job.tokenizer)),
        # The server applies the chat template; applied here as well it would be there twice.
        *("--dataset-name", "custom", "--dataset-path", str(job.prompts), "--skip-chat-template", "--disable-shuffle"),
        *("--custom-output-len", str(job.output_tokens), "--num-prompts", str(job.num_requests)),
        *("--max-concurrency", str(job.concurrency), "--request-rate", "inf", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90,99"),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]
    if job.objective:
        limits = (f"{VLLM_NAMES[name]}:{1000 * seconds:g}" for name, seconds in sorted(job.objective.items()))
        words += ["--goodput", *limits]
    return [*words, "--trust-remote-code"] if job.trust_remote_code else words


class Benchmark:
    """A process of the serving environment that runs one job after the other. Made by `benchmark`."""

    def __init__(self, process: SupervisedProcess, folder: Path, server: Server) -> None:
        self._process, self._folder, self._server, self._num_jobs = process, folder, server, 0

    def run(self, job: Job) -> dict[str, Any]:
        """What `vllm bench serve` saves. MeasureError: it failed, did not end in time, or saved something else."""
        number, self._num_jobs = self._num_jobs, self._num_jobs + 1
        result, done = self._folder / f"result-{number}.json", self._folder / f"job-{number}.done"
        words = words_of(job, self._server.base_url, self._server.model, result)
        write_text_atomically(self._folder / f"job-{number}.json", json.dumps(words))
        deadline = time.monotonic() + JOB_S + (START_S if number == 0 else 0)
        while not done.is_file():
            if (status := self._process.exit_status()) is not None:
                lines = [line for line in self._process.log_lines() if line.strip()]
                last = one_line(lines[-1]) if lines else f"its log {self._process.log_path} is empty"
                raise MeasureError(f"vllm bench serve stopped (exit status {status}): {last}")
            self._server.check_alive()
            if time.monotonic() > deadline:
                raise MeasureError(f"vllm bench serve did not end within {JOB_S:.0f} s; its log is {self._process.log_path}")
            time.sleep(0.05)
        if (error := read_json_object(self._folder, done.name).get("error")) is not None:
            raise MeasureError(f"vllm bench serve failed ({shown(error, 300)}); its log is {self._process.log_path}")
        try:
            return read_json_object(self._folder, result.name)
        except CheckpointError as error:  # safe_files speaks of checkpoints
            raise MeasureError(f"vllm bench serve saved no result: {error}") from None


@contextmanager
def benchmark(server: Server, profile: ProfileRecipe, folder: Path, log_path: Path) -> Iterator[Benchmark]:
    """A benchmark process for `server`, gone afterwards. folder: empty, for jobs and results. ServeError: no interpreter."""
    interpreter = interpreter_for(profile)
    key = server.headers.get("Authorization", "").removeprefix("Bearer ")
    environment = server_environment(profile) | ({CLIENT_KEY: key} if key else {})
    command = (str(interpreter), "-I", str(_DRIVER), str(folder))
    process = SupervisedProcess(command, activated_environment(environment, interpreter), log_path)
    try:
        yield Benchmark(process, folder, server)
    finally:
        process.stop()


def write_prompts(path: Path, prompts: Sequence[str]) -> Path:
    """The prompts as `--dataset-name custom` reads them."""
    write_text_atomically(path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path
