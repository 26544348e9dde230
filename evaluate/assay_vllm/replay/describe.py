"""Which module of vLLM takes each tensor of a checkpoint, and what vLLM does with it: the material of a family's table.

    python -m assay_vllm.replay.describe REQUEST.json ANSWER.json

The request is that of a replay, with two cells for each checkpoint: it with plain weights, which is loaded by rank 0, and it
with a quantization config that quantizes every linear, which is only built. What has no quantized method there cannot have one.
Where the request names no headers there is only a config, and the tensors are those that the loaders would take
(`derived_names.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay_vllm.replay.foreseen_gpu import pretend_gpu
from assay_vllm.replay.request import Cell, read_request
from assay_vllm.replay.sources import check_sources

if TYPE_CHECKING:
    from assay_vllm.replay.findings import Finding


def main(request_path: str, answer_path: str) -> None:
    request = read_request(Path(request_path))
    sources = check_sources()
    pretend_gpu(request.machine)

    pairs = zip(request.cells[::2], request.cells[1::2], strict=True)
    answer = {"vllm": sources["vllm"], "checkpoints": [_described(plain, quantized) for plain, quantized in pairs]}
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


def _described(plain: Cell, quantized: Cell) -> dict[str, Any]:
    """`parts`: target or draft -> its class, its tensors, and without headers `unknown`, parameters of which no name is known;
    `findings`: why a part could not be built or loaded."""
    from assay_vllm.replay.cells import Part, configured, drafts_itself, load_part
    from assay_vllm.replay.headers import planned_shards
    from assay_vllm.replay.ranks import become_rank, ranks_of

    answer: dict[str, Any] = {}
    findings: list[Finding] = []
    shards = None if plain.headers is None else planned_shards(plain.headers)
    config, other = configured(plain, findings), configured(quantized, findings)
    if config is None or other is None:
        return {"parts": answer, "findings": [asdict(finding) for finding in findings]}
    for name in ("target", "draft") if drafts_itself(config) else ("target",):
        become_rank(next(ranks_of(config.parallel_config)), config.parallel_config)
        for vllm_config in (config, other):
            vllm_config.compilation_config.static_forward_context.clear()
            vllm_config.compilation_config.static_all_moe_layers.clear()
        if shards is None:
            answer |= _derived(config, other, name, findings)
            continue
        part = Part(name)
        loaded = load_part(config, part, next(ranks_of(config.parallel_config)), shards, {})
        findings += [finding for _, finding in part.findings]
        if loaded is not None:
            methods = _methods(other, name)
            answer[name] = {"model_class": part.model_class, "tensors": _tensors(loaded.model, loaded.taken, methods)}
    return {"parts": answer, "findings": [asdict(finding) for finding in findings]}


def _derived(config: Any, other: Any, part: str, findings: list[Finding]) -> dict[str, Any]:
    """`part` -> what a checkpoint of this config would be asked for; nothing if vLLM cannot build it."""
    from assay_vllm.replay.derived_names import names_taken, stored_ndim
    from assay_vllm.replay.findings import finding_of

    try:
        model, methods = _built(config, part), _methods(other, part)
    except Exception as error:  # noqa: BLE001 (whatever vLLM says against a config is an answer)
        findings.append(finding_of(error, None))
        return {}
    layers = config.model_config.hf_text_config.num_hidden_layers
    taken, unknown = names_taken(model, first_mtp_layer=None if part == "target" else layers)
    tensors = _tensors(model, taken, methods)
    for tensor, (parameter, *_) in taken.items():
        tensors[tensor]["ndim"] = stored_ndim(model, parameter)
    kind = type(model)
    return {part: {"model_class": f"{kind.__module__}.{kind.__name__}", "tensors": tensors, "unknown": unknown}}


def _methods(config: Any, part: str) -> dict[str, str]:
    """Module -> class of its method, where every linear is to be quantized."""
    return {
        name: type(module.quant_method).__name__
        for name, module in _built(config, part).named_modules()
        if hasattr(module, "quant_method")
    }


def _built(config: Any, part: str) -> Any:
    """Target or draft on the meta device."""
    from assay_vllm.replay.cells import build, part_config

    with part_config(config, part) as configs:
        return build(*configs)


def _tensors(model: Any, taken: Mapping[str, Sequence[str]], methods: Mapping[str, str]) -> dict[str, Any]:
    """Tensor of the checkpoint -> where it goes. ranks: over how many its module is split; method: None: it has none."""
    modules = dict(model.named_modules())
    answer = {}
    for tensor, parameters in taken.items():
        parameter = parameters[0]
        owner, _, leaf = parameter.rpartition(".")
        module = modules[owner]
        answer[tensor] = {
            "module": owner,
            "parameter": leaf,
            "classes": [kind.__name__ for kind in type(module).__mro__[:-1]],
            "ranks": getattr(module, "tp_size", 1),
            "method": methods.get(owner),
        }
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
