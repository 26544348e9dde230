"""Real evaluations of a lossless candidate, in which no serving rule may speak: two vLLM servers, each on a copy of tiny-glm.

MTP on, prefix caching on, 64 requests in flight; other questions each time. Called by `alike.py --real N`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay.records.verdict import GateReport

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
READY_S = 600.0
SUITE = """\
schema: 1
name: suite-{number}
seed: eval-real-{number}
acceptance: false
gates: gates.yaml
tasks:
  - {{kind: arithmetic, name: greedy sums, num_items: 60, num_steps: [2, 3], max_tokens: 256}}
  - {{kind: needle, name: lookup, num_items: 20, num_needles: 3, lengths_tokens: [400, 900], max_tokens: 128}}
  - {{kind: arithmetic, name: sampled sums, languages: [en], num_items: 30, num_steps: [2], max_tokens: 256, temperature: 0.7,
     num_samples: 2}}
  - {{kind: tools, name: calls, num_items: 6, num_tools: [1, 3], prompt_tokens: [0], max_tokens: 128}}
"""
SHOWN_TOOLS = "{%- if tools %}<|system|>\n{{ tools | tojson }}\n{% endif -%}\n{%- for message in messages"
"""tiny-glm's own template shows the model no tools, so `assay` would not ask for calls."""
GATES = "schema: 1\nname: gates\ndefault_max_drop: 0.2\nmin_items: 10\ngates: []\n"


def profile() -> dict[str, object]:
    """cpu-emulated, with the prefix cache, 64 sequences at a time and a parser of tool calls."""
    recipe = load_recipe(ProfileRecipe, "cpu-emulated").model_dump(
        mode="json", exclude_defaults=True, exclude={"schema_version"}
    )
    vllm = {name: value for name, value in recipe["vllm"].items() if name != "no-enable-prefix-caching"}
    vllm |= {"max-num-seqs": 64, "max-model-len": 2048, "enable-prefix-caching": True}
    vllm |= {"tool-call-parser": "glm45", "enable-auto-tool-choice": True}
    return {**recipe, "schema": 1, "name": "busy", "vllm": vllm, "concurrency": 64}


@contextmanager
def served(checkpoint: Path, work: Path) -> Iterator[str]:
    """The URL of a server on a checkpoint, as `assay serve` starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        "serve",
        str(checkpoint),
        "--profile",
        str(work / "busy.yaml"),
        "--port",
        str(port),
        "--out",
        str(work / f"at-{port}"),
    )
    with (work / f"{port}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "assay", *command], stdout=log, stderr=log, env=_environment())
    try:
        deadline = time.monotonic() + READY_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no server: see {work / f'{port}.log'}")
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def _answers(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).status == 200)
    except OSError:
        return False


def evaluations(num: int, work: Path | None) -> Iterator[tuple[int, GateReport, float]]:
    """(number, its verdicts, seconds) of each evaluation."""
    with ExitStack() as stack:
        place = work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(parents=True, exist_ok=True)
        (place / "busy.yaml").write_text(json.dumps(profile()))
        (place / "gates.yaml").write_text(GATES)
        urls = {}
        for label in ("first", "copy"):
            shutil.copytree(CHECKPOINT, place / label, dirs_exist_ok=True)
            template = place / label / "chat_template.jinja"
            template.write_text(template.read_text().replace("{%- for message in messages", SHOWN_TOOLS, 1))
            urls[label] = stack.enter_context(served(place / label, place))
        for number in range(num):
            started = time.monotonic()
            suite = place / f"suite-{number}.yaml"
            suite.write_text(SUITE.format(number=number))
            runs = place / f"runs-{number}"
            words = ("--reference", f"first={urls['first']}", "--candidate", f"copy={urls['copy']}", "--same-weights")
            done = subprocess.run(
                [sys.executable, "-m", "assay", "evaluate", *words, "--suite", str(suite), "--runs", str(runs)],
                cwd=place, env=_environment(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode not in {0, 1}:
                raise SystemExit(done.stderr)
            [path] = runs.glob("*/gates.json")
            yield number, GateReport.load(path), time.monotonic() - started


def page(num: int, work: Path | None) -> str:
    """The section of the page."""
    rows: list[str] = []
    unmeasured: Counter[str] = Counter()
    num_tasks = num_findings = 0
    seconds = 0.0
    for _, report, took in evaluations(num, work):
        scores = [one for one in report.verdicts if one.gate.startswith("score ")]
        num_tasks, seconds = num_tasks + len(scores), seconds + took
        num_findings += len(report.serving)
        unmeasured.update(f"{score.gate}: {score.detail}" for score in scores if score.status == "NOT MEASURED")
        rows += [f"- {finding.candidate}, {finding.task}: {finding.clause}" for finding in report.serving]
        print(f"{num_findings} findings so far, {num_tasks} tasks, {unmeasured.total()} not measured", file=sys.stderr)
    rows += [f"- {times} not measured, {reason}" for reason, times in unmeasured.most_common()]
    summary = (
        f"{num} evaluations of tiny-glm against a copy of itself, on two vLLM servers with MTP and prefix caching, 64\n"
        f"requests in flight, other questions each time: {num_tasks} tasks (of the copy and of the reference's repeat),\n"
        f"**{num_findings} findings**, {unmeasured.total()} scores not measured; {seconds / num:.0f} s each."
    )
    return "\n".join(["## Real servers", "", summary, *rows, ""])
