"""Would vLLM load this checkpoint on that profile's GPUs? Asked of its own loaders, in the serving environment, without a GPU.

    record, = replay([Candidate("glm-5 w4a16", planned(plan, config_json(plan)), profile, serving)])
    print(record.outcome, record.every_finding)

The program that answers is `assay_vllm.replay`; it is installed beside vLLM like the rest of the plugin. All candidates of one
GPU and environment are replayed by one process, one after the other: starting vLLM takes longer than most replays. For large
ones it divides itself into several.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from assay.errors import AssayError
from assay.foreign_text import one_line, shown
from assay.installation import setup_command
from assay.recipes.family_names import names_of
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.text_config import text_of
from assay.records.plan import Plan
from assay.records.preflight.replay import Finding, Modules, RankMemory, Replay, ReplayedPart
from assay.safetensors_index import INDEX_NAME, name_in_file, tensor_names
from assay_evaluate.serving.gpus import GpuFacts, facts_of
from assay_evaluate.serving.hardware import num_cores
from assay_evaluate.serving.kernel_evidence import tail
from assay_evaluate.serving.process import SupervisedProcess, activated_environment
from assay_evaluate.serving.server import find_interpreter
from assay_evaluate.serving.vllm_command import VllmCommand, vllm_command

PACKAGES = {"flashinfer": "0.7.0.post1", "tilelang": "0.1.12"}
"""What vLLM 0.32.0 installs beside itself on a machine with CUDA, and its models or its choices of kernels depend on."""
CUDA = "13.0"
"""Version of CUDA of the torch that vLLM 0.32.0 pins."""
_LARGE_TENSORS = 100_000
"""So many together are loaded by several processes, which takes memory: loading so many takes a core 20 s."""
_MOST_PROCESSES = 4
"""About 0.7 GB each."""
_LOADING_TIMEOUT_S, _START_TIMEOUT_S = 300, 300
_POLL_S = 0.1


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A checkpoint that is not on this disk. schemes: module -> scheme of its weight, None: 16 or 32 bits; None: not known."""

    config: Mapping[str, Any]
    shards: Mapping[str, Mapping[str, tuple[str, Sequence[int]]]]
    """Shard -> tensor -> (dtype, shape)."""
    schemes: Mapping[str, str | None] | None = None


@dataclass(frozen=True)
class Candidate:
    """A checkpoint, on disk or not, and how it would be served. speculate: as in `ServerSpec`."""

    name: str
    checkpoint: Path | PlannedCheckpoint
    profile: ProfileRecipe
    serving: Serving
    speculate: bool = True


def planned(plan: Plan, config: Mapping[str, Any]) -> PlannedCheckpoint:
    """The checkpoint that a plan will make. config: its config.json."""
    shards: dict[str, dict[str, tuple[str, Sequence[int]]]] = {}
    schemes: dict[str, str | None] = {}
    as_vllm = names_of(plan.family).packed_as_vllm
    for tensor in plan.tensors:
        for output in tensor.outputs:
            assert tensor.shard_out is not None, tensor.name
            name = name_in_file(output.name, packed_as_vllm=as_vllm)
            shards.setdefault(tensor.shard_out, {})[name] = (output.dtype, output.shape)
        if tensor.outputs and tensor.name.endswith(".weight") and len(tensor.shape) > 1:
            schemes[tensor.module] = tensor.scheme
    return PlannedCheckpoint(config, shards, schemes)


def replay(candidates: Sequence[Candidate], *, on_progress: Callable[[str], None] | None = None) -> tuple[Replay, ...]:
    """One record for each candidate, in their order.

    AssayError: no serving environment, a vLLM whose sources were
    not compared with those for CUDA, an unknown GPU. What stands against a checkpoint is no error, but a finding of its record.
    """
    report = on_progress or (lambda line: None)
    by_key: dict[str, list[int]] = {}
    for number, candidate in enumerate(candidates):
        profile, hardware = candidate.profile, candidate.profile.hardware
        process = [profile.interpreter, facts_of(profile), hardware.num_gpus, hardware.memory_bytes_each, profile.environment]
        by_key.setdefault(json.dumps(process), []).append(number)
    groups = list(by_key.values())
    for numbers in groups:
        group = [candidates[number] for number in numbers]
        report(f"vLLM's loaders for {group[0].profile.hardware.gpu}: {', '.join(candidate.name for candidate in group)}")
    given_up = threading.Event()
    with ThreadPoolExecutor(max_workers=num_cores()) as pool:
        answers = pool.map(lambda numbers: _replay_group([candidates[number] for number in numbers], given_up), groups)
        try:
            records = {
                number: record
                for numbers, group_records in zip(groups, answers, strict=True)
                for number, record in zip(numbers, group_records, strict=True)
            }
        finally:
            given_up.set()  # after Ctrl-C, or when another group failed: the pool waits for its threads
    return tuple(records[number] for number in range(len(candidates)))


def _num_processes(group: Sequence[Candidate]) -> int:
    """How many candidates are replayed side by side; more than there are cores, so that these end their work together."""
    num_tensors = 0
    for candidate in group:
        if isinstance(candidate.checkpoint, PlannedCheckpoint):
            num_tensors += sum(map(len, candidate.checkpoint.shards.values()))
        else:
            num_tensors += len(tensor_names(candidate.checkpoint) or ())
    return min(len(group), _MOST_PROCESSES) if num_tensors >= _LARGE_TENSORS else 1


def _replay_group(group: Sequence[Candidate], given_up: threading.Event) -> list[Replay]:
    with tempfile.TemporaryDirectory(prefix="assay-replay-") as temporary:
        folder = Path(temporary)
        hardware = group[0].profile.hardware
        commands, cells = zip(*(_cell(each, folder / str(number)) for number, each in enumerate(group)), strict=True)
        request = {
            "machine": machine(facts_of(group[0].profile), hardware.num_gpus, hardware.memory_bytes_each),
            "cells": cells,
            "num_processes": _num_processes(group),
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        _run(group, commands[0].environment, folder, given_up)
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return [
        _record(candidate, command, cell, answer["sources"])
        for candidate, command, cell in zip(group, commands, answer["cells"], strict=True)
    ]


def machine(facts: GpuFacts, num_gpus: int, memory_bytes: int | None = None) -> dict[str, Any]:
    """The machine as the program reads it. memory_bytes: of each GPU, where it is not what its kind has."""
    return {
        "name": facts.driver_name, "capability": facts.capability, "num_gpus": num_gpus,
        "memory_bytes": memory_bytes or facts.memory_bytes, "num_multiprocessors": facts.num_multiprocessors,
        "shared_memory_bytes": facts.shared_memory_bytes, "cuda": CUDA, "packages": PACKAGES,
    }  # fmt: skip


def _cell(candidate: Candidate, folder: Path) -> tuple[VllmCommand, dict[str, Any]]:
    """(the command of its server, the cell as the program reads it). What is not on disk gets config and index in `folder`."""
    checkpoint = candidate.checkpoint
    cell: dict[str, Any] = {"name": candidate.name, "headers": None, "schemes": None}
    if isinstance(checkpoint, PlannedCheckpoint):
        folder.mkdir()
        weight_map = {name: shard for shard, tensors in checkpoint.shards.items() for name in tensors}
        (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
        (folder / "headers.json").write_text(json.dumps(checkpoint.shards), encoding="utf-8")
        write_head(folder, checkpoint.config, checkpoint.shards)
        cell |= {"headers": str(folder / "headers.json"), "schemes": checkpoint.schemes}
        checkpoint = folder
    command = vllm_command(
        checkpoint, candidate.profile, candidate.serving, speculate=candidate.speculate, port=8000, served_model_name="model"
    )
    arguments = command.arguments[2:]  # behind `-m vllm...`
    return command, {**cell, "folder": str(checkpoint.resolve()), "arguments": arguments}


def write_head(
    folder: Path, config: Mapping[str, Any], shards: Mapping[str, Mapping[str, tuple[str, Sequence[int]]]]
) -> None:  # fmt: skip
    """The header, without data, of a planned shard that holds an output head which config.json ties to the embedding.

    vLLM 0.32 then looks for a head in the files themselves, and takes it (`checkpoint_has_lm_head`).
    """
    if not (config.get("tie_word_embeddings") or text_of(config).get("tie_word_embeddings")):
        return
    for shard, tensors in shards.items():
        if any(name.endswith("lm_head.weight") for name in tensors):
            entries = {n: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for n, (dtype, shape) in tensors.items()}
            header = json.dumps(entries).encode()
            (folder / shard).write_bytes(len(header).to_bytes(8, "little") + header)


def _run(group: Sequence[Candidate], environment: Mapping[str, str], folder: Path, given_up: threading.Event) -> None:
    """Run the program; AssayError with the end of what it printed if it gave no answer. It ends with us, however that is."""
    profile = group[0].profile
    interpreter = find_interpreter(profile)
    if interpreter is None:
        raise AssayError(
            f"profile {profile.name}: no interpreter with vLLM ({profile.interpreter or '.venv-serve'}); "
            f"run `{setup_command()}`"
        )
    words = [str(interpreter), "-m", "assay_vllm.replay", str(folder / "request.json"), str(folder / "answer.json")]
    timeout_s = _START_TIMEOUT_S + _LOADING_TIMEOUT_S * len(group)
    deadline = time.monotonic() + timeout_s
    process = SupervisedProcess(
        words, activated_environment({**environment, "VLLM_LOGGING_LEVEL": "WARNING"}, interpreter), folder / "log", folder
    )
    try:
        while (status := process.exit_status()) is None and time.monotonic() < deadline:
            if given_up.wait(_POLL_S):
                raise AssayError("the replay of vLLM's loaders was given up")
    finally:
        process.stop()
    failed = f"was not done after {timeout_s} s" if status is None else f"ended with status {status}" if status else None
    if failed is not None:
        lines = process.log_lines()
        cause = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        raise AssayError(f"{interpreter}: the replay of vLLM's loaders {failed}: {shown(cause, 500)}\n{tail(lines)}".rstrip())


# ------------------------------------------------------------------------------------------------ the answer
def _record(candidate: Candidate, command: VllmCommand, cell: dict[str, Any], sources: dict[str, Any]) -> Replay:
    """The program's answer about one candidate. vLLM's words may quote the checkpoint: what does not print is escaped."""
    flags = {**command.flags, **command.checkpoint_flags} | ({"speculative-config": s} if (s := command.speculation) else {})
    try:
        return Replay(
            checkpoint=candidate.name,
            profile=candidate.profile.name,
            gpu=candidate.profile.hardware.gpu or "",
            vllm=sources["vllm"],
            cuda_wheel=sources["wheel"],
            different_sources=tuple(sorted({*sources["different"]} & {*sources["used"]})),
            flags=flags,
            undrafted=command.reason_undrafted,
            num_tensors=cell["num_tensors"],
            num_shards=cell["num_shards"],
            parts=tuple(
                ReplayedPart(
                    **{**part, "modules": tuple(Modules(**each) for each in _printable(part["modules"]))}
                    | {"findings": _findings(part["findings"]), "layers": tuple(part["layers"] or ())}
                )
                for part in cell["parts"]
            ),
            findings=_findings(cell["findings"]),
            memory=None if cell["memory"] is None else RankMemory(**cell["memory"]),
            asked=tuple(map(one_line, cell["asked"])),
            cpu_s=cell["cpu_s"],
            max_memory_bytes=cell["max_memory_bytes"],
        )
    except (KeyError, ValidationError) as error:
        raise AssayError(
            f"the replay of vLLM's loaders answers in another form than this version of assay reads ({shown(error)}); install "
            f"this version beside vLLM as well: `{setup_command()}`"
        ) from None


def _findings(findings: Sequence[dict[str, Any]]) -> tuple[Finding, ...]:
    return tuple(Finding(**each) for each in _printable(findings))


def _printable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: one_line(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]
