"""Hollow copies of checkpoints as other tools publish them: true names, shapes, dtypes and claims, a few layers and experts.

    config, tensors = of_model("glm-4.7", experts=4)
    folder = publish(tmp_path, modelopt_nvfp4(config, tensors, is_expert))

Weights are holes in the files; scales are written, as ones, so that what is read of the data is as it should be.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hollow
import numpy as np
from tiny_families import TOKENIZER

from assay_quantize.checkpoint.headers import TensorHeader, read_shard_header
from assay_quantize.formats.schemes import DTYPE_BYTES
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.inspect import inspect

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype, shape."""
Chosen = Callable[[str], bool]
"""Whether the weight of this name is quantized."""
SCALE_LEAVES = {
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale", "scales",
    "k_scale", "v_scale",
}  # fmt: skip
ONE = {"F32": np.uint32(0x3F80_0000), "BF16": np.uint16(0x3F80), "F16": np.uint16(0x3C00), "F8_E4M3": np.uint8(0x38),
       "U8": np.uint8(127), "F8_E8M0": np.uint8(127)}  # fmt: skip
"""dtype -> bits of 1.0."""


class Published(NamedTuple):
    """What is uploaded: config.json, tensors, other files by name."""

    config: dict[str, Any]
    tensors: Tensors
    files: dict[str, Any] = {}  # noqa: RUF012  # replaced, never changed


def of_model(model: str, *, layers: int = 4, experts: int = 4, dense: int | None = None) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a model recipe's BF16 source, cut to a few layers and experts, which are stored one by one."""
    base, shapes_of = hollow.MODELS[model]
    key = hollow._experts_key(base)
    config = hollow.changed(hollow.hollow_hybrids.cut_to(base, layers), num_hidden_layers=layers, **{key: experts})
    if dense is not None:
        config["first_k_dense_replace"] = dense
    every = list(hollow.one_by_one(shapes_of(config)))
    in_fp32 = hollow.in_fp32(model, every)
    return config, {name: (in_fp32.get(name, hollow.dtype_of(name)), shape) for name, shape in every}


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith("_proj.weight")


def is_linear(name: str) -> bool:
    """Projections of attention, experts and MLPs; neither routers, nor eh_proj, nor embeddings."""
    return name.endswith(("_proj.weight", "_with_mqa.weight")) and not name.endswith(("eh_proj.weight", "weights_proj.weight"))


def outside_mtp(chosen: Chosen, layers: int) -> Chosen:
    """The same without layers from `layers` on and without `mtp.*`."""

    def is_chosen(name: str) -> bool:
        at = re.search(r"layers\.(\d+)\.", name)
        return chosen(name) and not name.startswith("mtp.") and (at is None or int(at[1]) < layers)

    return is_chosen


# ------------------------------------------------------------------------------------------------ producers
def modelopt_nvfp4(
    config: dict[str, Any], tensors: Tensors, chosen: Chosen, exclude: list[str], *, inputs: bool = True
) -> Published:  # fmt: skip
    """ModelOpt's layout: codes in `weight` U8, group scales F8_E4M3, `weight_scale_2` and `input_scale` FP32 scalars."""
    made: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if not chosen(name):
            made[name] = (dtype, shape)
            continue
        module, (rows, columns) = name.removesuffix(".weight"), shape
        made |= {name: ("U8", (rows, columns // 2)), f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
                 f"{module}.weight_scale_2": ("F32", ())}  # fmt: skip
        if inputs:
            made[f"{module}.input_scale"] = ("F32", ())
    claim = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": exclude}
    files = {"hf_quant_config.json": {"producer": {"name": "modelopt", "version": "0.39.0"}, "quantization": claim}}
    arguments = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments, "input_activations": arguments if inputs else None}}
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": exclude, "config_groups": groups,
                    "producer": files["hf_quant_config.json"]["producer"]}  # fmt: skip
    return Published({**config, "quantization_config": quantization}, made, files)


def modelopt_mixed(
    config: dict[str, Any], tensors: Tensors, algorithm_of: Callable[[str], str | None], exclude: list[str]
) -> Published:  # fmt: skip
    """ModelOpt's MIXED_PRECISION: NVFP4 or FP8 by tensor, as `algorithm_of` says; None: plain."""
    nvfp4 = modelopt_nvfp4(config, tensors, lambda name: algorithm_of(name) == "NVFP4", exclude)
    made: Tensors = {}
    layers: dict[str, Any] = {}
    for name, told in nvfp4.tensors.items():
        algorithm, module = algorithm_of(name), name.removesuffix(".weight")
        made[name] = told
        if name not in tensors or algorithm is None:
            continue
        layers[module] = {"quant_algo": algorithm} | ({"group_size": 16} if algorithm == "NVFP4" else {})
        if algorithm == "FP8":
            made |= {name: ("F8_E4M3", told[1]), f"{module}.weight_scale": ("F32", ()), f"{module}.input_scale": ("F32", ())}
    claim = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    files = {"hf_quant_config.json": {"producer": {"name": "modelopt", "version": "0.41.0"},
                                      "quantization": {**claim, "exclude_modules": exclude}}}  # fmt: skip
    quantization = {**claim, "quant_method": "modelopt", "ignore": exclude}
    return Published({**config, "quantization_config": quantization}, made, files)


def compressed(
    config: dict[str, Any], tensors: Tensors, chosen: Chosen, ignore: list[str], form: str, *, inputs: bool = False
) -> Published:  # fmt: skip
    """compressed-tensors' layouts. form: `int4` in groups of 128, `nvfp4`."""
    made: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if not chosen(name):
            made[name] = (dtype, shape)
            continue
        module, (rows, columns) = name.removesuffix(".weight"), shape
        if form == "int4":
            made |= {f"{module}.weight_packed": ("I32", (rows, columns // 8)), f"{module}.weight_shape": ("I64", (2,)),
                     f"{module}.weight_scale": ("BF16", (rows, columns // 128))}  # fmt: skip
        else:
            made |= {f"{module}.weight_packed": ("U8", (rows, columns // 2)), f"{module}.weight_global_scale": ("F32", (1,)),
                     f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16))}  # fmt: skip
            if inputs:
                made[f"{module}.input_global_scale"] = ("F32", (1,))
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
    if form == "nvfp4":
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "symmetric": True,
            "dynamic": False,
        }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {**weights, "dynamic": "local"} if inputs else None,
    }
    formats = {"int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
    quantization = {"quant_method": "compressed-tensors", "format": formats[form], "ignore": ignore, "version": "0.12.3",
                    "quantization_status": "compressed", "config_groups": {"group_0": group}}  # fmt: skip
    return Published({**config, "quantization_config": quantization}, made)


def gptq(config: dict[str, Any], tensors: Tensors, chosen: Chosen, **claim: Any) -> Published:
    """GPTQ's layout in 4 bits, groups of 128, symmetric, version 1."""
    made: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if not chosen(name):
            made[name] = (dtype, shape)
            continue
        module, (rows, columns) = name.removesuffix(".weight"), shape
        made |= {f"{module}.qweight": ("I32", (columns // 8, rows)), f"{module}.scales": ("F16", (columns // 128, rows)),
                 f"{module}.qzeros": ("I32", (columns // 128, rows // 8)), f"{module}.g_idx": ("I32", (columns,))}  # fmt: skip
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False,
                    "meta": {"quantizer": ["gptqmodel:4.2.5"]}, **claim}  # fmt: skip
    return Published({**config, "quantization_config": quantization}, made)


def awq(config: dict[str, Any], tensors: Tensors, chosen: Chosen, kept: list[str]) -> Published:
    """AutoAWQ's GEMM layout in 4 bits, groups of 128."""
    made: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if not chosen(name):
            made[name] = (dtype, shape)
            continue
        module, (rows, columns) = name.removesuffix(".weight"), shape
        made |= {f"{module}.qweight": ("I32", (columns, rows // 8)), f"{module}.scales": ("F16", (columns // 128, rows)),
                 f"{module}.qzeros": ("I32", (columns // 128, rows // 8))}  # fmt: skip
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
                    "modules_to_not_convert": kept}  # fmt: skip
    return Published({**config, "quantization_config": quantization}, made)


def fp8_blocks(config: dict[str, Any], tensors: Tensors, chosen: Chosen, kept: list[str] | None = None) -> Published:
    """FP8 in blocks of 128 x 128, as DeepSeek and GLM publish it."""
    made: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        made[name] = ("F8_E4M3" if chosen(name) else dtype, shape)
        if chosen(name):
            made[f"{name}_scale_inv"] = ("F32", (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)))
    quantization = hollow.FP8_BLOCKS if kept is None else {**hollow.FP8_BLOCKS, "modules_to_not_convert": kept}
    return Published({**config, "quantization_config": quantization}, made)


# ------------------------------------------------------------------------------------------------ on disk
def two_shards(name: str) -> str:
    at = re.search(r"layers\.(\d+)\.", name)
    return f"model-0000{1 if at is None or int(at[1]) < 2 else 2}-of-00002.safetensors"


def plain(config: dict[str, Any], tensors: Tensors) -> Published:
    """As it was trained."""
    return Published(config, tensors)


def publish(folder: Path, published: Published, *, shard_of: Callable[[str], str] | None = None, scales: bool = True) -> Path:
    """Write it: sparse shards with an index, tokenizer, chat template, card.

    shard_of: tensor -> the file that it goes to; None: layers 0 and 1 and what is in no layer, then the rest. scales: as ones.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published.config, indent=1))
    weight_map = {name: (shard_of or two_shards)(name) for name in published.tensors}
    for shard in sorted(set(weight_map.values())):
        of_shard = [(name, *published.tensors[name]) for name in published.tensors if weight_map[name] == shard]
        hollow.write_hollow_shard(folder / shard, of_shard)
    num_bytes = sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in published.tensors.values())
    hollow.write_index(folder, weight_map, num_bytes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: someone/model\n---\n# A model\n")
    for name, content in published.files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    if scales:
        write_ones(folder, published.tensors)
    return folder


def write_ones(folder: Path, tensors: Tensors) -> None:
    """What describes codes, as a healthy checkpoint has it."""
    for path in sorted(folder.glob("*.safetensors")):
        headers = read_shard_header(folder, path.name)
        with path.open("r+b") as file:
            for name, header in headers.items():
                if (values := _healthy(name, header, tensors)) is not None:
                    file.seek(header.begin)
                    file.write(values.tobytes())


def _healthy(name: str, header: TensorHeader, tensors: Tensors) -> np.ndarray[Any, Any] | None:
    """What a tensor that describes codes holds; None: it describes none."""
    leaf = name.rpartition(".")[2]
    if leaf in SCALE_LEAVES:
        return np.full(max(1, math.prod(header.shape)), ONE[header.dtype])
    if leaf == "weight_shape":
        rows, words = tensors[name.replace("weight_shape", "weight_packed")][1]
        return np.array([rows, words * 8], np.int64)
    if leaf == "qzeros":
        return np.full(math.prod(header.shape), 0x7777_7777, np.uint32)
    return np.arange(header.shape[0], dtype=np.int32) // 128 if leaf == "g_idx" else None


def put(folder: Path, name: str, values: np.ndarray[Any, Any]) -> None:
    """Write the bytes of a tensor where they belong."""
    for path in sorted(folder.glob("*.safetensors")):
        header = read_shard_header(folder, path.name).get(name)
        if header is not None:
            assert values.nbytes == header.num_bytes, f"{name}: {values.nbytes} bytes for {header.num_bytes}"
            with path.open("r+b") as file:
                file.seek(header.begin)
                file.write(values.tobytes())
            return
    raise KeyError(name)


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes one out."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def defects_of(folder: Path, *, source: Path | None = None, weights: bool = False) -> dict[str, list[str]]:
    """Defect -> where it is; without notes."""
    base = None if source is None else FolderFiles(source)
    result = inspect(FolderFiles(folder), source=base, weights=weights)
    return {f.defect: [place.where for place in f.places] for f in result.findings if f.severity != "note"}
