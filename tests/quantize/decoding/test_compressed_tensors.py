"""compressed-tensors: checkpoints made by llm-compressor decode to what compressed-tensors decompresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from llmcompressor.entrypoints.model_free import model_free_ptq
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from stored_checkpoints import assert_slabs_agree, normal, opened, write_stored
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import CheckpointError
from assay_quantize.decoding.stored_weight import ActivationRule, Problem

TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
WEIGHTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "int4_asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, None),
    "int4_channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, None),
    "int3_asymmetric": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False}, None),
    "int8_weights": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}, None),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, TOKEN_FP8),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKEN_FP8),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "fp8_naive": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        None,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        None,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    ),
}
"""Module -> (format, weights, input_activations)."""
EXPECTED = {
    "int4": ("int4", (1, 32), 4.5),
    "int4_asymmetric": ("int4", (1, 32), 4.625),
    "int4_channel": ("int4", (1, 128), 4.125),
    "int3_asymmetric": ("int3", (1, 32), 3.6),
    "int8_weights": ("int8", (1, 64), 8.25),
    "int8": ("int8", (1, 128), 8.125),
    "fp8_tensor": ("fp8_e4m3", (80, 128), 8.0015625),
    "fp8_channel": ("fp8_e4m3", (1, 128), 8.125),
    "fp8_block": ("fp8_e4m3", (32, 32), 8.01875),
    "fp8_naive": ("fp8_e4m3", (1, 128), 8.125),
    "nvfp4": ("fp4_e2m1", (1, 16), 4.503125),
    "mxfp4": ("fp4_e2m1", (1, 32), 4.25),
    "mxfp8": ("fp8_e4m3", (1, 32), 8.25),
}
"""Module -> (number, weights that share a scale, bits per weight without `weight_shape`) of a weight of 80 x 128."""
SHAPE_BITS = 2 * 64 / (80 * 128)


def scheme(module: str) -> QuantizationScheme:
    format_, weights, activations = WEIGHTS[module]
    args = None if activations is None else QuantizationArgs(**activations)
    return QuantizationScheme(
        targets=[f"re:.*{module}$"], weights=QuantizationArgs(**weights), input_activations=args, format=format_
    )


def config_of(*modules: str) -> QuantizationConfig:
    return QuantizationConfig(config_groups={module: scheme(module) for module in modules}, ignore=["lm_head"])


def made(tensors: dict[str, torch.Tensor], config: QuantizationConfig) -> dict[str, torch.Tensor]:
    """By llm-compressor, without data."""
    return dict(ModelFreePtqConverter(config).process(dict(tensors)))


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """One checkpoint of mixed groups, and its tensors."""
    plain = {f"model.layers.0.{module}.weight": normal(80, 128, seed=seed) for seed, module in enumerate(WEIGHTS)}
    config = config_of(*WEIGHTS)
    tensors = made(plain | {"lm_head.weight": normal(8, 128), "model.norm.weight": normal(128)}, config)
    return write_stored(tmp_path_factory.mktemp("mixed"), tensors, config.model_dump(mode="json")), tensors


@pytest.mark.parametrize("module", WEIGHTS)
def test_every_format_decodes_to_the_librarys_values(
    every_format: tuple[Path, dict[str, torch.Tensor]], module: str
) -> None:  # fmt: skip
    folder, tensors = every_format
    prefix = f"model.layers.0.{module}."
    parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    expected = BaseCompressor.get_value_from_registry(WEIGHTS[module][0]).decompress(parts, scheme(module))["weight"]
    with opened(folder) as stored:
        assert stored.problems == ()
        weight = stored.weight(f"{prefix}weight")
        values = stored.read_weight(weight.name)
        assert values.dtype == torch.float32
        assert torch.equal(values.to(expected.dtype), expected)
        assert_slabs_agree(stored, weight.name)
    number, shares, bits = EXPECTED[module]
    bits += SHAPE_BITS if WEIGHTS[module][0] == "pack-quantized" else 0
    assert (weight.number, weight.shares, weight.shape) == (number, shares, (80, 128))
    assert weight.bits_per_weight == pytest.approx(bits)
    assert weight.format == f"compressed-tensors {WEIGHTS[module][0]}"
    assert weight.symmetric == ("asymmetric" not in module)


def test_what_is_kept_and_which_rules_activations_have(every_format: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with opened(every_format[0]) as stored:
        rules = {weight.module.rpartition(".")[2]: weight.activations for weight in stored.weights}
        assert rules["int4"] == rules["lm_head"] == ActivationRule()
        assert rules["int8"] == ActivationRule("dynamic", "int8", "token")
        assert rules["fp8_channel"] == ActivationRule("dynamic", "fp8_e4m3", "token")
        assert rules["fp8_block"] == ActivationRule("dynamic", "fp8_e4m3", "group", 32)
        assert stored.weight("lm_head").is_plain
        assert torch.equal(stored.read_weight("lm_head.weight"), normal(8, 128).float())
        assert list(stored.others) == ["model.norm.weight"]
        assert stored.method == "compressed-tensors"


def test_static_activations_and_the_kv_cache(tmp_path: Path) -> None:
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS["fp8_channel"][1], "input_activations": static}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": normal(8, 128).to(torch.float8_e4m3fn),
        "model.layers.0.self_attn.q_proj.weight_scale": normal(8, 1).abs(),
        "model.layers.0.self_attn.q_proj.input_scale": torch.tensor([0.25]),
        "model.layers.0.self_attn.k_scale": torch.tensor([0.5], dtype=torch.bfloat16),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.5], dtype=torch.bfloat16),
    }
    with opened(write_stored(tmp_path, tensors, config)) as stored:
        weight = stored.weights[0]
        assert weight.activations == ActivationRule("static", "fp8_e4m3", "tensor", scale="input_scale")
        assert stored.read_activation_scale(weight.name) == torch.tensor([0.25])
        assert (stored.kv.number, stored.kv.granularity, stored.kv.dynamic) == ("fp8_e4m3", "tensor", False)
        assert stored.kv.scales == {
            "model.layers.0.self_attn.k_scale": "key", "model.layers.0.self_attn.v_scale": "value"
        }  # fmt: skip
        assert stored.others == {}


def test_nvfp4_activations_have_a_scale_that_divides(tmp_path: Path) -> None:
    tensors = made({"model.nvfp4.weight": normal(16, 128)}, config_of("nvfp4"))
    tensors["model.nvfp4.input_global_scale"] = torch.tensor([4.0])
    local = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    config = config_of("nvfp4").model_dump(mode="json")
    config["config_groups"]["nvfp4"]["input_activations"] = local
    with opened(write_stored(tmp_path / "with", tensors, config)) as stored:
        assert stored.weights[0].activations == ActivationRule(
            "dynamic", "fp4_e2m1", "group", 16, "input_global_scale", scale_divides=True
        )
        assert stored.read_activation_scale("model.nvfp4") == torch.tensor([0.25])
    del tensors["model.nvfp4.input_global_scale"]
    with (
        opened(write_stored(tmp_path / "without", tensors, config)) as stored,
        pytest.raises(CheckpointError, match=r"model\.nvfp4 has no input_global_scale, which its activations need"),
    ):
        stored.read_activation_scale("model.nvfp4")


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_in_another_order(tmp_path: Path, symmetric: bool) -> None:
    """`weight_g_idx` says the group of every column."""
    codes = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    zeros = torch.randint(-8, 8, (16, 2), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scale, index = normal(16, 2).abs(), torch.tensor([1, 0] * 32, dtype=torch.int32)
    tensors = {
        "m.weight_packed": pack_to_int32(codes, 4), "m.weight_scale": scale, "m.weight_g_idx": index,
        "m.weight_shape": torch.tensor([16, 64]),
    }  # fmt: skip
    if not symmetric:
        tensors["m.weight_zero_point"] = pack_to_int32(zeros, 4, packed_dim=0)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric, "actorder": "group"}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    declared = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    expected = torch.empty(16, 64)
    for row in range(16):
        for column in range(64):
            group = 1 - column % 2
            zero = 0 if symmetric else int(zeros[row, group])
            expected[row, column] = (int(codes[row, column]) - zero) * float(scale[row, group])
    with opened(write_stored(tmp_path, tensors, declared)) as stored:
        assert torch.equal(stored.read_weight("m"), expected)
        assert_slabs_agree(stored, "m")


def test_targets_under_other_names(tmp_path: Path) -> None:
    """The only group that a module's codes fit is its group; of two unlike ones neither is guessed."""
    tensors = made({"model.int4.weight": normal(16, 128)}, config_of("int4"))
    declared = config_of("int4", "int4_channel", "nvfp4").model_dump(mode="json")
    for group in declared["config_groups"].values():
        group["targets"] = ["language_model.q_proj"]
    with opened(write_stored(tmp_path / "two", tensors, declared)) as stored:
        what = "is quantized, but no target of config.json matches it: language_model.q_proj and 1 more"
        assert stored.problems == (Problem("model.int4", what),)
    del declared["config_groups"]["int4_channel"]
    with opened(write_stored(tmp_path / "one", tensors, declared)) as stored:
        assert (stored.problems, stored.weights[0].shares) == ((), (1, 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16", "FP8_DYNAMIC"])
def test_a_folder_that_llm_compressor_wrote(tmp_path: Path, name: str) -> None:
    """A whole model with its index and config.json, as `model_free_ptq` leaves them; each weight is near the source's."""
    source = make_tiny_glm4_moe(tmp_path / "source")
    ignore = ["lm_head", "re:.*embed_tokens$", r"re:.*mlp\.gate$", "re:.*eh_proj$", "re:.*shared_head.*"]
    model_free_ptq(str(source), str(tmp_path / "made"), scheme=name, ignore=ignore)
    with opened(source) as plain, opened(tmp_path / "made") as stored:
        assert stored.problems == ()
        assert [weight.name for weight in stored.weights] == [weight.name for weight in plain.weights]
        kinds = {weight.name: weight.is_plain for weight in stored.weights}
        assert kinds["lm_head.weight"] and not kinds["model.layers.1.mlp.experts.0.up_proj.weight"]
        for weight in stored.weights:
            values, original = stored.read_weight(weight.name), plain.read_weight(weight.name)
            limit = 0 if weight.is_plain else {"FP8_DYNAMIC": 0.04}.get(name, 0.15)
            assert float((values - original).norm() / original.norm()) <= limit, weight.name


def test_a_module_that_no_group_describes_is_a_problem_and_the_others_are_read(tmp_path: Path) -> None:
    plain = {f"model.{module}.weight": normal(16, 128) for module in ("int4", "fp8_channel")}
    tensors = made(plain, config_of("int4", "fp8_channel"))
    tensors["model.lost.weight_scale"] = normal(16, 1)
    with opened(write_stored(tmp_path, tensors, config_of("int4").model_dump(mode="json"))) as stored:
        assert [weight.name for weight in stored.weights] == ["model.int4.weight"]
        assert set(stored.problems) == {
            Problem("model.fp8_channel", "has weight of dtype F8_E4M3, which no config group describes: int4 (pack-quantized)"),
            Problem("model.lost", "has scales, but neither weight nor weight_packed"),
        }
        with pytest.raises(CheckpointError, match=r"model\.fp8_channel\.weight has weight of dtype F8_E4M3"):
            stored.read_weight("model.fp8_channel.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: weights stored without their zeros"),
        ({"transform_config": {"config_groups": {}, "x": 1}}, "transform_config: weights stored rotated"),
        ({"config_groups": None}, "compressed-tensors without config_groups; complete the download"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 6}}}},
         "config group g: weights of type float with 6 bits are not read"),
        ({"config_groups": {"g": {"targets": ["re:(open"], "weights": {}}}},
         "config group g: re:(open is no pattern: missing ),"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    declared = config_of("int4").model_dump(mode="json") | change
    tensors = made({"model.int4.weight": normal(16, 128)}, config_of("int4"))
    with pytest.raises(CheckpointError) as error:
        opened(write_stored(tmp_path, tensors, declared))
    assert str(error.value).startswith(f"{tmp_path}: config.json: ") and message in str(error.value)
