"""Which checkpoints are the model itself, and which are a quantized copy of it: by true names and declarations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hollow
import pytest
import torch
from tiny_checkpoints import read_shards, store_as_fp8, store_as_int4, write_json, write_shards

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.native import foreign_quantization, is_candidate
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan

CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
EXPERT = "model.layers.1.mlp.experts.0.down_proj"


def how(folder: Path) -> str | None:
    return foreign_quantization(open_checkpoint(folder, allow_quantized=True))


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy whose config.json has other entries; None removes one."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | changes
    write_json(to / "config.json", {key: value for key, value in config.items() if value is not None})
    return to


def test_a_model_type_that_is_no_text_names_no_family(tmp_path: Path) -> None:
    """Of DeepSeek-V3 a form of storage is native to some `model_type` only."""
    source = hollow.hollow_model(tmp_path, "deepseek-v3")
    config = json.loads((source / "config.json").read_text())
    for declared in (["deepseek_v3"], {"a": 1}, 7):
        write_json(source / "config.json", config | {"model_type": declared})
        assert how(source) is None


@pytest.mark.parametrize("model", sorted(hollow.MODELS))
def test_what_the_makers_release_is_a_source(tmp_path: Path, model: str) -> None:
    assert how(hollow.hollow_model(tmp_path, model)) is None


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("glm-5", None),
        ("glm-5.2", None),
        ("glm-4.7", "config.json says quant_method 'compressed-tensors', format 'float-quantized'"),
        ("qwen3-30b-a3b", "config.json says quant_method 'fp8'"),
    ],
)
def test_fp8_is_a_source_only_where_the_family_is_released_so(tmp_path: Path, model: str, expected: str | None) -> None:
    assert how(hollow.hollow_model(tmp_path, model, release=True)) == expected


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory: pytest.TempPathFactory, tiny_glm: Path) -> Path:
    """A checkpoint that assay made."""
    folder = tmp_path_factory.mktemp("made") / "w4a16"
    plan = make_plan(open_checkpoint(tiny_glm), load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family=None)
    quantize(plan, tiny_glm, folder)
    return folder


def test_what_assay_made_is_a_candidate_with_its_manifest_and_without(w4a16: Path, tiny_glm: Path, tmp_path: Path) -> None:
    assert how(w4a16) == f"assay made it from {tiny_glm.name}, as w4a16"
    bare = shutil.copytree(w4a16, tmp_path / "bare")
    (bare / "assay_manifest.json").write_text("no manifest")
    assert how(bare) == "assay_manifest.json says that assay made it"
    (bare / "assay_manifest.json").unlink()
    assert how(bare) == "config.json says quant_method 'compressed-tensors', format 'pack-quantized'"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"quantization_config": None}, "model.layers.0.mlp.down_proj.weight_packed is I32"),
        ({"quantization_config": {}}, "model.layers.0.mlp.down_proj.weight_packed is I32"),
        ({"quantization_config": None, "text_config": {"quantization_config": CT}},
         "config.json says quant_method 'compressed-tensors', format 'pack-quantized'"),
        ({"quantization_config": None, "old_quantization_config": CT},
         "config.json says in old_quantization_config: quant_method 'compressed-tensors', format 'pack-quantized'"),
        ({"quantization_config": None, "compression_config": {"format": "pack-quantized"}},
         "config.json says in compression_config: quant_method 'unknown', format 'pack-quantized'"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "config.json says quant_method 'NVFP4', ModelOpt's 'NVFP4'"),
    ],
)  # fmt: skip
def test_a_declaration_that_is_gone_or_elsewhere_changes_nothing(
    w4a16: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    folder = edited(w4a16, tmp_path / "edited", **changes)
    (folder / "assay_manifest.json").unlink()
    assert how(folder) == expected


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_declarations_in_files_of_other_tools(tiny_glm: Path, tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(tiny_glm, tmp_path / "model")
    assert how(folder) is None
    (folder / file).write_text('{"bits": 4}')
    assert how(folder) == f"{file} lies beside it"


def as_modelopt(source: Path, to: Path, algorithm: str, scale_shape: tuple[int, ...], *more: str) -> Path:
    """Every projection in FP8 with scales of ones, and other scales beside keys; declared in hf_quant_config.json alone."""
    shards = read_shards(source)
    for tensors in shards.values():
        for name in [name for name in tensors if name.endswith("_proj.weight") and "eh_proj" not in name]:
            rows, columns = tensors[name].shape
            shape = scale_shape and (-(-rows // 128), 1, -(-columns // 128), 1)
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.ones(shape)
            if name.endswith("k_proj.weight"):
                tensors |= {name.replace("weight", leaf): torch.tensor(0.5) for leaf in more}
    to.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, to / path.name)
    write_shards(to, shards)
    write_json(to / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}})
    return to


def test_what_modelopt_wrote_is_named_with_what_judges_it(tiny_glm: Path, tmp_path: Path) -> None:
    """Blocks whose scales have four dimensions (vllm-project/vllm#50617), scales of the KV cache (vllm-project/vllm#35656)."""
    blocks = as_modelopt(tiny_glm, tmp_path / "blocks", "FP8_PB_WO", (1, 1, 1, 1))
    assert how(blocks) == "hf_quant_config.json says ModelOpt's 'FP8_PB_WO' with scales of blocks in 4-D"
    cache = as_modelopt(tiny_glm, tmp_path / "cache", "FP8", (), "k_scale")
    count = sum(name.endswith("k_scale") for tensors in read_shards(cache).values() for name in tensors)
    assert how(cache) == f"hf_quant_config.json says ModelOpt's 'FP8' with {count} scales of the KV cache"
    config = json.loads((cache / "config.json").read_text())
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    write_json(cache / "config.json", config | {"quantization_config": quantization})
    (cache / "hf_quant_config.json").unlink()
    told = how(cache)
    assert told == f"config.json says quant_method 'modelopt', ModelOpt's 'FP8' with {count} scales of the KV cache"
    assert str(is_candidate(str(cache), told, open_checkpoint(cache, allow_quantized=True))) == (
        f"{cache}: is quantized already, a candidate and no source ({told}, which is not native to family glm4_moe); judge it: "
        f"`assay judge REFERENCE {cache}`, REFERENCE being the model that it was made of; what is wrong with it: "
        f"`assay inspect {cache}`"
    )


Tensors = list[tuple[str, str, tuple[int, ...]]]


@pytest.mark.parametrize(
    ("tensor", "is_candidate"),
    [
        ((f"{EXPERT}.weight", "BF16", (64, 32)), False),
        ((f"{EXPERT}.weight", "F32", (64, 32)), False),
        (("model.layers.1.mlp.gate.tid2eid", "I64", (64, 2)), False),
        ((f"{EXPERT}.weight", "I8", (64, 32)), True),
        ((f"{EXPERT}.weight", "U8", (64, 16)), True),
        ((f"{EXPERT}.weight", "I32", (64, 4)), True),
        ((f"{EXPERT}.weight", "F8_E4M3", (64, 32)), True),
        ((f"{EXPERT}.weight", "F8_E5M2", (64, 32)), True),
        (("model.layers.1.mlp.experts.gate_up_proj_blocks", "U8", (4, 64, 16)), True),
        ((f"{EXPERT}.weight_scale", "BF16", (64, 1)), True),
        ((f"{EXPERT}.weight_scale_inv", "F32", (1, 1)), True),
        ((f"{EXPERT}.input_scale", "F32", (1,)), True),
        ((f"{EXPERT}.qweight", "I32", (4, 64)), True),
        ((f"{EXPERT}.weight.absmax", "F32", (64,)), True),
        ((f"{EXPERT}.weight.quant_state.bitsandbytes__nf4", "I64", (64,)), True),
    ],
)  # fmt: skip
def test_tensors_without_a_declaration(tmp_path: Path, tensor: tuple[str, str, tuple[int, ...]], *, is_candidate: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    hollow.write_hollow_shard(tmp_path / "model.safetensors", [tensor])
    assert how(tmp_path) == (f"{tensor[0]} is {tensor[1]}" if is_candidate else None)


def of_family(folder: Path, architecture: str, model_type: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"architectures": [architecture], "model_type": model_type})
    return folder


def test_int4_is_native_to_the_experts_of_one_model_in_its_own_groups(tiny_glm: Path, tmp_path: Path) -> None:
    kimi = ("DeepseekV3ForCausalLM", "kimi_k2")
    own = of_family(store_as_int4(tiny_glm, tmp_path / "own"), *kimi)
    assert how(own) is None
    wide = of_family(store_as_int4(tiny_glm, tmp_path / "wide", group_size=64), *kimi)
    assert how(wide) == f"{EXPERT}.weight is INT4 with one scale for 1 x 64 values"
    every = of_family(store_as_int4(tiny_glm, tmp_path / "every", packed=r".*(mlp\.experts\.\d+|self_attn\.o)_?.*"), *kimi)
    assert how(every) == "model.layers.0.self_attn.o_proj.weight is INT4 with one scale for 1 x 32 values"
    other = of_family(store_as_int4(tiny_glm, tmp_path / "other"), "DeepseekV3ForCausalLM", "deepseek_v3")
    assert how(other) == "config.json says quant_method 'compressed-tensors', format 'pack-quantized'"


def test_fp8_of_a_family_that_is_released_in_fp8(tiny_glm: Path, tmp_path: Path) -> None:
    """In blocks and declared as the release declares it; another tool's channels are a copy, as are blocks nobody declares."""
    deepseek = ("DeepseekV3ForCausalLM", "deepseek_v3")
    blocks = of_family(store_as_fp8(tiny_glm, tmp_path / "blocks"), *deepseek)
    assert how(blocks) is None
    channels = of_family(store_as_fp8(tiny_glm, tmp_path / "channels", per="channel", leaf="weight_scale"), *deepseek)
    assert how(channels) == "config.json says quant_method 'compressed-tensors', format 'float-quantized'"
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    declared = edited(channels, tmp_path / "declared", quantization_config=fp8)
    found = how(declared)
    assert found is not None and found.endswith("is F8_E4M3 with one scale for 1 x 256 values")
    bare = edited(blocks, tmp_path / "bare", quantization_config=None)
    assert how(bare) == "model.layers.0.mlp.down_proj.weight_scale_inv is F32"


def test_weights_that_were_rounded_and_stored_as_bf16_with_their_scales(tiny_glm: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_glm, tmp_path / "rounded")
    files = read_shards(folder)
    first = next(iter(files))
    files[first]["model.layers.0.mlp.down_proj.weight_scale"] = torch.ones(1)
    write_shards(folder, files)
    assert how(folder) == "model.layers.0.mlp.down_proj.weight_scale is F32"
