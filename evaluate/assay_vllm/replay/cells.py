"""One checkpoint, served in one way: vLLM's own configuration, then target and draft on every rank.

Rank 0 loads the whole checkpoint: every name, the census of all experts, every shard boundary. The other ranks build the whole
model, and load what lies in no layer and one layer of each kind. A kind is all that a loader can see of a layer: names, dtypes
and shapes of its tensors, names, dtypes and shapes of the parameters that vLLM built for it. Which rank it is enters only by
the slices that are cut from them, so two layers of a kind fare alike. With pipeline parallelism, where ranks have layers of
their own, every rank loads all it has.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from vllm.config import VllmConfig, replace, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.model_loader.utils import get_draft_load_config, initialize_model
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker.workspace import init_workspace_manager

from assay_vllm.replay import stand_ins
from assay_vllm.replay.findings import Finding, finding_of, merge_findings
from assay_vllm.replay.headers import Shards, layer_of, planned_shards, restrict_to_layers, stored_shards
from assay_vllm.replay.loading import ReplayLoader
from assay_vllm.replay.modules import (
    Row,
    check_modules,
    cut_scales,
    disagreement_of,
    refused_when_run,
    stored_schemes,
    unused_tensors,
)  # fmt: skip
from assay_vllm.replay.rank_memory import RankMemory, kv_cache_bytes, parameter_bytes, taken_over
from assay_vllm.replay.ranks import Rank, become_rank, ranks_of, unknown_parallelism
from assay_vllm.replay.request import Cell
from assay_vllm.replay.sources import modules_used


@dataclass
class Part:
    """What was found about target or draft. layers: of all layers those that ranks other than 0 loaded; None: all of them."""

    part: str
    model_class: str | None = None
    num_ranks: int = 0
    layers: tuple[str, ...] | None = None
    rows: list[Row] = field(default_factory=list)
    findings: list[tuple[int, Finding]] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """What rank 0 found out, for the others."""

    model: torch.nn.Module
    taken: Mapping[str, Sequence[str]]
    """Tensor of the checkpoint -> parameters that took it."""
    converted: Collection[str]
    """Modules that vLLM's loader dequantizes."""


def replay_cell(cell: Cell) -> dict[str, Any]:
    """The answer about one cell, ready for JSON. Nothing that stands against a checkpoint is raised."""
    began = time.process_time()
    stand_ins.asked.clear()
    shards, findings = (planned_shards(cell.headers), []) if cell.headers is not None else stored_shards(cell.folder)
    parts: list[Part] = []
    memory: RankMemory | None = None
    if not findings and (config := configured(cell, findings)) is not None:
        parts, memory = _replay_parts(cell, config, shards, findings)
    return {
        "name": cell.name,
        "num_tensors": sum(map(len, shards.values())),
        "num_shards": len(shards),
        "parts": [
            {
                "part": part.part,
                "model_class": part.model_class,
                "num_ranks": part.num_ranks,
                "layers": part.layers,
                "modules": [asdict(row) for row in part.rows],
                "findings": [{**asdict(finding), "ranks": list(ranks)} for ranks, finding in merge_findings(part.findings)],
            }
            for part in parts
        ],
        "findings": [{**asdict(finding), "ranks": []} for finding in findings],
        "memory": None if memory is None else asdict(memory),
        "asked": sorted(set(stand_ins.asked)),
        "cpu_s": round(time.process_time() - began, 2),
        "max_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def configured(cell: Cell, findings: list[Finding]) -> VllmConfig | None:
    """vLLM's config as its server makes it of the arguments; None: it refuses them."""
    try:
        parsed = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args([*cell.arguments])
        validate_parsed_serve_args(parsed)
        _check_parsers(parsed)
        parsed.skip_tokenizer_init = True
        parsed.reasoning_parser = ""  # asks the tokenizer for its tokens
        # how many tokens and sequences a step has by default depends on who asks
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)
        config.kernel_config.enable_jit_warmup = False  # while they are built, some models import kernels to compile
        return config
    except SystemExit:
        message = "vLLM's server does not take these arguments (see the lines above in the log)"
        findings.append(Finding("arguments", message, where=None, remedy="correct `vllm:` of the profile or the model"))
    except Exception as error:  # noqa: BLE001 (whatever vLLM says against a checkpoint is an answer)
        finding = finding_of(error, None)
        kind = "arguments" if finding.kind in ("refused", "shape") else finding.kind
        findings.append(Finding(kind, finding.message, where=None, remedy=finding.remedy))
    return None


def _check_parsers(parsed: argparse.Namespace) -> None:
    """As `validate_api_server_args` (vllm/entrypoints/launchers/launcher.py), and of the reasoning parser what the engine says
    later. A plugin is not run, so the names that it brings are not known."""
    for what, name, plugin, manager in (
        ("tool call parser", parsed.tool_call_parser, parsed.tool_parser_plugin, ToolParserManager),
        ("reasoning parser", parsed.reasoning_parser, parsed.reasoning_parser_plugin, ReasoningParserManager),
    ):
        if name and not plugin and name not in (names := manager.list_registered()):
            raise ValueError(f"invalid {what}: {name}; vLLM has {', '.join(sorted(names))}")


def _replay_parts(
    cell: Cell, config: VllmConfig, shards: Shards, findings: list[Finding]
) -> tuple[list[Part], RankMemory | None]:
    if (unknown := unknown_parallelism(config.parallel_config)) is not None:
        findings.append(Finding("unknown", f"{unknown} is not replayed", where=None, remedy=None))
        return [], None
    schemes = stored_schemes(shards, cell.schemes)
    parts = [Part("target")] + ([Part("draft")] if drafts_itself(config) else [])
    read = {part.part: shards for part in parts}
    whole: list[Part] = []
    taken: dict[str, set[str]] = {part.part: set() for part in parts}
    cut: dict[str, list[Finding]] = {}  # of each part; ranks that hold the same layers hold parts of the same size
    memory: list[RankMemory] = []
    is_one_stage = config.parallel_config.pipeline_parallel_size == 1
    for rank in ranks_of(config.parallel_config):
        become_rank(rank, config.parallel_config)
        config.compilation_config.static_forward_context.clear()
        config.compilation_config.static_all_moe_layers.clear()
        weight_bytes = 0
        for part in parts:
            part.num_ranks += 1
            loaded = load_part(config, part, rank, read[part.part], schemes)
            if loaded is not None:
                taken[part.part].update(loaded.taken)
                if rank.number == 0 or not is_one_stage:
                    cut[part.part] = cut_scales(loaded.model, loaded.taken, shards)
                weight_bytes += parameter_bytes(loaded.model, taken_over(loaded.model) if part.part == "draft" else ())
            part.findings += [(rank.number, finding) for finding in cut.get(part.part, ())]
            if rank.number > 0:
                continue
            if loaded is not None:
                whole.append(part)
                part.rows, wrong = check_modules(loaded.model, loaded.taken, schemes, loaded.converted)
                wrong += refused_when_run(part.rows, current_platform.get_device_capability().to_int())
                part.findings += [(0, finding) for finding in wrong]
            if is_one_stage:
                part.layers = layers_of_each_kind(shards, loaded)
                read[part.part] = restrict_to_layers(shards, part.layers)
        if len(whole) == len(parts) and (rank.number == 0 or not is_one_stage):
            kv_bytes = kv_cache_bytes(config, findings) if is_one_stage else None
            memory.append(RankMemory(weight_bytes, kv_bytes, config.model_config.max_model_len))
    if len(whole) == len(parts):
        every_rank_read = {layer for part in parts for layer in part.layers or ()}
        apart = config.parallel_config.enable_expert_parallel and every_rank_read  # then no rank takes all experts of a layer
        findings += unused_tensors(
            restrict_to_layers(shards, every_rank_read) if apart else shards, taken["target"], taken.get("draft")
        )
    return parts, max(memory, key=lambda rank: rank.weight_bytes, default=None)


def drafts_itself(config: VllmConfig) -> bool:
    """Whether the checkpoint's own MTP block is loaded as a draft."""
    speculative = config.speculative_config
    return speculative is not None and speculative.draft_model_config.model == config.model_config.model


@contextmanager
def part_config(config: VllmConfig, part: str) -> Iterator[tuple[VllmConfig, Any]]:
    """vLLM's configs of target or draft, under which it is built and loaded in the block."""
    model_config = config.model_config
    if part == "draft":
        model_config = config.speculative_config.draft_model_config
        load_config = get_draft_load_config(config)
        config = config.speculative_config.apply_draft_overrides(config)
        if load_config is not config.load_config:
            config = replace(config, load_config=load_config)
    torch.set_default_dtype(model_config.dtype)
    try:
        with set_current_vllm_config(config):
            yield config, model_config
    finally:
        torch.set_default_dtype(torch.float32)


def build(config: VllmConfig, model_config: Any) -> torch.nn.Module:
    """On the meta device. ValueError: vLLM has no class for the model itself."""
    if model_config.using_transformers_backend():
        named = ", ".join(model_config.architectures)
        raise ValueError(
            f"vLLM has no class of its own for {named} and falls back to the code in Transformers, which is not replayed"
        )
    if "DeepseekV41ForCausalLM" in model_config.architectures:
        stand_ins.without_tokenizer()
    with stand_ins.OnMeta():
        init_workspace_manager(torch.device("meta"))
        model: torch.nn.Module = initialize_model(vllm_config=config, model_config=model_config)
        return model


def load_part(
    config: VllmConfig, part: Part, rank: Rank, shards: Shards, schemes: Mapping[str, str | None]
) -> Loaded | None:  # fmt: skip
    """Build and load one part on one rank; what vLLM or our check says against it goes into `part`. None: refused."""
    model = loader = None
    try:
        with part_config(config, part.part) as (own_config, model_config):
            model = build(own_config, model_config)
            part.model_class = f"{type(model).__module__}.{type(model).__name__}"
            loader = ReplayLoader(own_config.load_config, shards, part.layers)
            with stand_ins.loading_on_meta():
                loader.load_weights(model, model_config)
    except Exception as error:  # noqa: BLE001 (whatever vLLM says against a checkpoint is an answer)
        tensor = None if loader is None else loader.at
        finding = finding_of(error, tensor)
        if finding.kind == "unknown tensor" and model is not None and tensor is not None:
            fused = getattr(own_config.quant_config, "packed_modules_mapping", {})
            finding = disagreement_of(model, tensor, str(error.args[0]), schemes, fused) or finding
        part.findings.append((rank.number, finding))
        return None
    return Loaded(model, loader.taken, loader.converted)


def layers_of_each_kind(shards: Shards, loaded: Loaded | None) -> tuple[str, ...]:
    """The first layer of each kind, of those that a part loads. loaded: what rank 0 made of it; None: it was refused."""
    signature: dict[str, list[tuple[Any, ...]]] = {}
    for tensors in shards.values():
        for name, header in tensors.items():
            if (place := layer_of(name)) is not None and (loaded is None or name in loaded.taken):
                signature.setdefault(place[0], []).append((place[1], *header))
    for name, parameter in loaded.model.named_parameters() if loaded is not None else ():
        if (place := layer_of(name)) is not None and place[0] in signature:
            signature[place[0]].append((place[1], str(parameter.dtype), tuple(parameter.shape)))
    first: dict[int, str] = {}
    for layer, parts in signature.items():
        first.setdefault(hash(tuple(sorted(parts))), layer)
    return tuple(first.values())


# ------------------------------------------------------------------------------------------------ side by side
def replay_cells(cells: Sequence[Cell], num_processes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """(the answer about each cell, sources of vLLM that took part). BrokenProcessPool: a process was killed.

    Processes are copies of this one, which has imported vLLM: importing it takes 10 s of a core.
    """
    gc.collect()
    gc.freeze()  # what is there stays; a collection need not look at it, nor copy it into a process of its own
    if num_processes == 1:
        return [replay_cell(cell) for cell in cells], modules_used()
    with ProcessPoolExecutor(num_processes, mp_context=get_context("fork")) as pool:
        answers = list(pool.map(_replay_with_sources, cells))
    return [answer for answer, _ in answers], sorted({*modules_used()}.union(*(used for _, used in answers)))


def _replay_with_sources(cell: Cell) -> tuple[dict[str, Any], list[str]]:
    return replay_cell(cell), modules_used()
