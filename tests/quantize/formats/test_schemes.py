"""The scheme table and the kernels against llm-compressor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from kernel_cases import relative_error
from llmcompressor.entrypoints.model_free import model_free_ptq
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from safetensors.torch import load_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import SCHEMES, check_shape, compressed_tensors_scheme, output_tensors
from assay_quantize.kernels.reference import dequantize_weight, magnitude, quantize_weight
from assay_quantize.plan.planner import make_plan

RAGGED = {
    "fp8_block": (200, 256), "fp8_channel": (70, 100), "w8a8": (70, 100), "w4a16_asym": (60, 256), "w4a16_g64": (61, 192),
    "w4a16_g32": (61, 96), "w4a16_channel": (61, 104),
}  # fmt: skip
"""Shapes that no block or pack size divides, where the scheme allows them."""


def bytes_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def sample(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if kind == "zero":
        w = torch.zeros(shape)
    elif kind == "constant":
        w = torch.full(shape, -0.37)
    elif kind == "holes":
        w[3], w[:, : shape[1] // 2] = 0, 0
    elif kind == "outlier":
        w[5, 5] = 3000
    elif kind == "small":
        w *= 1e-6
    elif kind == "positive":
        w = w.abs()
    elif kind == "denormal":
        w *= torch.finfo(dtype).smallest_normal / 8
    elif kind == "huge":
        w *= torch.finfo(dtype).max / w.abs().max() / 2
    return w.to(dtype)


NO_FP16_POWER = ("zero", "holes", "small", "denormal")
"""Where llm-compressor rounds an MX scale to FP16, in which it is 0 and becomes 1: a difference that is meant (see below)."""
KINDS = ("normal", "zero", "constant", "holes", "outlier", "small", "positive", "denormal", "huge")


def llm_compressor(w: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    if scheme == "nvfp4":  # it refuses without data; the weights are the same, and ModelOpt's input_scale is 1
        return llm_compressor(w, "nvfp4a16") | {"input_global_scale": torch.ones(1)}
    if scheme == "fp8_static":  # it refuses without data; the weights are those with dynamic activations
        return llm_compressor(w, "fp8_channel")
    config = QuantizationConfig(config_groups={"group_0": compressed_tensors_scheme(scheme)})
    made = ModelFreePtqConverter(config).process({"m.proj.weight": w.clone()})
    return {name.removeprefix("m.proj."): value for name, value in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_weights_are_those_of_llm_compressor_and_of_the_table(scheme: str, dtype: str) -> None:
    """Same names, dtypes, shapes and bytes; sizes as the planner computes them; scales finite and never zero."""
    for kind in KINDS:
        shape = RAGGED.get(scheme, (96, 256))
        w = sample(kind, shape, TORCH_DTYPES[dtype])
        got, want = quantize_weight(w, scheme), llm_compressor(w, scheme)
        assert sorted(got) == sorted(want)
        if dtype == "F16" and SCHEMES[scheme].layout in ("mxfp4", "mxfp8") and kind in NO_FP16_POWER:
            continue
        assert [part for part in want if not bytes_equal(got[part], want[part])] == [], kind
        table = {
            o.name: (TORCH_DTYPES[o.dtype], o.shape, o.num_bytes)
            for o in output_tensors(scheme, "m.proj.weight", shape, dtype)
            if not o.name.endswith(".input_scale")  # of no weight
        }
        assert table == {f"m.proj.{name}": (part.dtype, tuple(part.shape), part.nbytes) for name, part in got.items()}
        scale = got["weight_scale"]
        assert bool(torch.isfinite(scale.float()).all()), kind
        assert scale.dtype == torch.uint8 or bool((scale.float() > 0).all()), kind


@pytest.mark.parametrize(
    ("scheme", "low", "high"),
    [
        ("w4a16", 0.10, 0.12), ("w4a16_g64", 0.09, 0.11), ("w4a16_g32", 0.09, 0.10), ("w4a16_channel", 0.11, 0.13),
        ("w4a16_asym", 0.09, 0.11), ("fp8_block", 0.025, 0.029), ("fp8_channel", 0.025, 0.029), ("nvfp4a16", 0.09, 0.10),
        ("fp8_static", 0.025, 0.029), ("nvfp4", 0.09, 0.10), ("mxfp4", 0.10, 0.12), ("mxfp8", 0.025, 0.029),
        ("w8a8", 0.006, 0.009),
    ],
)  # fmt: skip
def test_dequantized_weights_are_near_their_own_source_and_far_from_another(scheme: str, low: float, high: float) -> None:
    w, other = sample("normal", (256, 256), torch.bfloat16), sample("normal", (256, 256), torch.bfloat16).flip(0)
    back = dequantize_weight(quantize_weight(w, scheme), scheme, torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert low < relative_error(back, w) < high < SCHEMES[scheme].max_relative_error
    assert relative_error(back, other) == pytest.approx(2**0.5, rel=0.02)


def test_fp16_small_weights_keep_their_mx_scale() -> None:
    """llm-compressor rounds the power-of-two scale to FP16, where it becomes 0 and then 1; ours does not."""
    w = sample("small", (64, 256), torch.float16)
    assert relative_error(dequantize_weight(quantize_weight(w, "mxfp8"), "mxfp8", torch.float32), w) < 0.03


def test_shared_global_scale_is_that_of_the_largest_member() -> None:
    gate, up = sample("normal", (128, 256), torch.bfloat16), 3 * sample("normal", (128, 256), torch.bfloat16).flip(1)
    amax = torch.maximum(magnitude(gate), magnitude(up))
    shared = [quantize_weight(w, "nvfp4a16", global_scale_amax=amax)["weight_global_scale"] for w in (gate, up)]
    alone = [quantize_weight(w, "nvfp4a16")["weight_global_scale"] for w in (gate, up)]
    assert shared[0].item() == shared[1].item() == alone[1].item() < alone[0].item()


@pytest.mark.parametrize(
    ("scheme", "shape", "merged", "message"),
    [
        ("w4a16", (64, 192), False, r"m\.proj\.weight: shape \[64, 192\] .*192 columns .*group size 128"),
        ("nvfp4a16", (64, 100), False, "100 columns are not a multiple of the group size 16"),
        ("mxfp4", (64, 48), False, "48 columns are not a multiple of the group size 32"),
        ("fp8_block", (64, 192), False, "192 columns are not a multiple of the group size 128"),
        ("fp8_block", (192, 256), True, "192 rows are not a multiple of the block size 128, and vLLM loads another"),
        ("w4a16", (4, 64, 128), False, "only matrices are quantized, this one has 3 dimensions"),
        ("w4a16", (0, 128), False, "it is empty"),
        ("w4a16_channel", (64, 100), False, "100 columns are not a multiple of 8, the codes in an int32"),
        ("w4a16_asym", (60, 128), True, "60 rows are not a multiple of 8, the zero points in an int32, and vLLM loads another"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(scheme: str, shape: tuple[int, ...], merged: bool, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_shape(scheme, "m.proj.weight", shape, merged=merged)


def test_shapes_that_fit_and_a_dtype_that_does_not() -> None:
    check_shape("fp8_block", "m.proj.weight", (576, 256))  # ragged rows at the end of a parameter are fine
    check_shape("fp8_channel", "m.proj.weight", (7, 13))
    with pytest.raises(PlanError, match=r"m\.proj\.weight: dtype I8 cannot be quantized; the source must be one of BF16"):
        output_tensors("w4a16", "m.proj.weight", (64, 128), "I8")


# ------------------------------------------------------------------------------------------------ a whole checkpoint
@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16"])
def test_a_checkpoint_is_the_one_llm_compressor_makes(precision: str, tmp_path: Path) -> None:
    """Every tensor bit for bit, but NVFP4's global scales of fused groups that llm-compressor does not know (experts)."""
    from assay_quantize.engine.quantize import quantize

    source = make_tiny_glm4_moe(tmp_path / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
    quantize(plan, source, tmp_path / "ours")
    scheme = next(tensor.scheme for tensor in plan.tensors if tensor.scheme is not None)
    model_free_ptq(
        str(source),
        str(tmp_path / "theirs"),
        scheme=SCHEMES[scheme].preset,
        ignore=list(plan.ignore),
        max_workers=1,
        device="cpu",
    )
    ours, theirs = ({n: t for f in sorted(d.glob("*.safetensors")) for n, t in load_file(f).items()}
                    for d in (tmp_path / "ours", tmp_path / "theirs"))  # fmt: skip
    assert sorted(ours) == sorted(theirs)
    differ = {name.rpartition(".")[0] for name in ours if not bytes_equal(ours[name], theirs[name])}
    pairs = [f"model.layers.1.mlp.{e}" for e in ("experts.0", "experts.1", "shared_experts")]
    assert {module.rpartition(".")[0] for module in differ} <= (set(pairs) if precision == "nvfp4a16" else set())
    assert bool(differ) == (precision == "nvfp4a16")
    for pair in pairs if precision == "nvfp4a16" else []:
        scales = [[t[f"{pair}.{p}_proj.weight_global_scale"].item() for p in ("gate", "up")] for t in (ours, theirs)]
        assert scales[0] == [min(scales[1])] * 2  # the larger magnitude has the smaller scale
        weights = [load_file(source / t.shard_in)[t.name] for t in plan.tensors if t.fused_group == f"{pair}.gate_up_proj"]
        amax = torch.stack([magnitude(w) for w in weights]).max()
        for projection, w in zip(("gate", "up"), weights, strict=True):
            want = quantize_weight(w, "nvfp4a16", global_scale_amax=amax)
            assert all(bytes_equal(ours[f"{pair}.{projection}_proj.{part}"], value) for part, value in want.items())


@pytest.mark.parametrize("scheme", ["w4a16_g64", "w4a16_g32", "w4a16_channel"])
def test_schemes_without_a_preset_go_through_and_verify(scheme: str, tmp_path: Path) -> None:
    from assay_quantize.engine.quantize import quantize
    from assay_quantize.verify.verify import verify

    source = make_tiny_glm4_moe(tmp_path / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    recipe = load_recipe(PrecisionRecipe, "w4a16").model_copy(update={"scheme": scheme})
    plan = make_plan(open_checkpoint(source), recipe, model="tiny", family=None)
    quantize(plan, source, tmp_path / "out")
    assert verify(tmp_path / "out", source=source).damages == ()
    ours = {n: t for f in sorted((tmp_path / "out").glob("*.safetensors")) for n, t in load_file(f).items()}
    weights = {n: t for f in sorted(source.glob("*.safetensors")) for n, t in load_file(f).items()}
    for tensor in plan.tensors:
        if tensor.scheme is not None:
            want = llm_compressor(weights[tensor.name], scheme)
            assert all(bytes_equal(ours[f"{tensor.module}.{part}"], value) for part, value in want.items()), tensor.name
