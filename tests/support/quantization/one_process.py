"""Checkpoints served one after the other by one vLLM process (`served_in_one_process.py`), as servers of assay would."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay_evaluate.serving.server import ServerSpec, find_interpreter
from assay_evaluate.serving.vllm_command import VllmCommand, vllm_command

SCRIPT = Path(__file__).with_name("served_in_one_process.py")


def command_of(spec: ServerSpec) -> VllmCommand:
    return vllm_command(
        spec.checkpoint, spec.profile, spec.serving, speculate=spec.speculate, port=1, served_model_name=spec.served_model_name
    )  # fmt: skip


def ask_in_one_process(
    specs: Mapping[str, ServerSpec], prompts: Sequence[Sequence[int]], folder: Path, *, num_tokens: int
) -> dict[str, dict[str, Any]]:
    """Name of a server -> what the script answers of it, `replies` included. folder: for request and answers."""
    commands = {name: command_of(spec) for name, spec in specs.items()}
    servers = {name: command.arguments for name, command in commands.items()}
    request = {"prompts": prompts, "num_tokens": num_tokens, "likely": 20, "servers": servers}
    (folder / "request.json").write_text(json.dumps(request))
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    environment = {**os.environ, **next(iter(commands.values())).environment}
    done = subprocess.run(
        [str(interpreter), str(SCRIPT), str(folder / "request.json"), str(folder / "answers.jsonl")],
        env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {answer["name"]: answer for answer in answers}
