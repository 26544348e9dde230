"""Scale search: the fused kernels against the definition byte for byte, what it promises, and channel weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import KINDS, assert_same_parts, weight
from safetensors.numpy import save_file

from assay.errors import PlanError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize.checkpoint.importance import load_importance
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.kernels import amax_rows, needs_amax, quantize_rows, reference, row_multiple
from assay_quantize.kernels.reference import dequantize_rows
from assay_quantize.kernels.rows import Array, QuantizedRows
from assay_quantize.kernels.search_fused import Int, _sum_errors
from assay_quantize.kernels.search_grids import INT_FACTORS
from assay_quantize.kernels.search_reference import fold

pytestmark = pytest.mark.slow

DTYPES = ("BF16", "F16", "F32")


def shapes(scheme: str) -> tuple[tuple[int, int], ...]:
    """Shapes that end inside a tile, a chunk, a block, a piece, and inside the rows that share an int32 of zero points."""
    row = SCHEMES[scheme]
    if row.block_rows > 1:
        return (128, 128), (200, 300)
    if row.group_size is None:
        return (6, 40), (11, 264)
    return (6, row.group_size), (13, 7 * row.group_size)


def channel_weights(columns: int) -> Array:
    """Heavy-tailed, some of them zero."""
    draw = np.random.default_rng(3)
    made: Array = (np.exp(3 * draw.standard_normal(columns)) * (draw.random(columns) > 0.1)).astype(np.float32)
    return made


def quantized(w: Array, dtype: str, scheme: str, importance: Array | None = None, **how: str) -> QuantizedRows:
    amax = amax_rows(w, dtype) if needs_amax(scheme) else None
    weights = importance if how.get("observer", "mse") == "mse" else None
    return quantize_rows(w, dtype, scheme, amax=amax, importance_I=weights, **{"observer": "mse", **how})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_search_is_the_reference_bit_for_bit(scheme: str, dtype: str) -> None:
    for number, kind in enumerate(KINDS):
        shape = shapes(scheme)[number % 2]
        w = weight(kind, shape, dtype)
        for importance in (None, channel_weights(shape[1])):
            want = quantized(w, dtype, scheme, importance, kernels="reference")
            got = quantized(w, dtype, scheme, importance)
            assert_same_parts(got, want, f"{kind} {shape} {importance is not None}")


@pytest.mark.parametrize("scheme", ["w4a16_channel", "w8a8", "fp8_channel"])
def test_rows_of_more_than_one_piece(scheme: str) -> None:
    w = weight("normal", (6, 128 * 128 + 136), "BF16")
    for importance in (None, channel_weights(w.shape[1])):
        want = quantized(w, "BF16", scheme, importance, kernels="reference")
        assert_same_parts(quantized(w, "BF16", scheme, importance), want, scheme)


def weighted_errors(
    made: QuantizedRows, w: Array, scheme: str, importance: Array | None
) -> np.ndarray[tuple[int, ...], np.dtype]:
    """What the search minimises, in FP64, for each set of weights with one scale."""
    row = SCHEMES[scheme]
    wide = reference.to_torch(w, "BF16").double()
    height = row.block_rows
    width = w.shape[1] if row.group_size is None else row.group_size
    u = torch.ones_like(wide) if importance is None else torch.from_numpy(importance).double().expand_as(wide)
    if row.weight_dtype in ("I32", "I8"):
        mean = wide.square().reshape(len(w), -1, width).mean(-1).repeat_interleave(width, 1)
        u = u * (wide.square() + (0 if importance is None else mean))
    error = ((dequantize_rows(made.parts, w, "BF16", scheme).double() - wide).square() * u).numpy()
    return error.reshape(len(w) // height, height, w.shape[1] // width, width).sum((1, 3))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_scale_is_worse_than_min_max_and_most_are_better(scheme: str, weighted: bool) -> None:
    w = weight("normal", (256, 512), "BF16")
    importance = channel_weights(512) if weighted else None
    before = weighted_errors(quantized(w, "BF16", scheme, observer="minmax"), w, scheme, importance)
    after = weighted_errors(quantized(w, "BF16", scheme, importance), w, scheme, importance)
    assert (after <= before * (1 + 1e-6)).all()
    # an MX scale is a power of two: twice or half of it is rarely better, and for FP8 never
    assert (after < before).mean() > {"mxfp4": 0.03, "mxfp8": -1}.get(scheme, 0.5)


def test_the_chosen_int4_scale_is_the_best_of_a_brute_force() -> None:
    """Every factor by hand in FP64, from the quotient to the sum; near ties are allowed to differ."""
    w = weight("normal", (8, 256), "BF16")
    made = quantized(w, "BF16", "w4a16")
    groups = reference.to_torch(w, "BF16").double().reshape(8, 2, 128)
    first = (groups.abs().amax(-1) / 7.5).bfloat16().double()
    errors = []
    for factor in (1.0, *INT_FACTORS):
        scale = (first * factor).bfloat16().double()[..., None]
        codes = (groups / scale).bfloat16().double().round().clamp(-8, 7)
        errors.append((((codes * scale).bfloat16().double() - groups).square() * groups.square()).sum(-1))
    least = torch.stack(errors).amin(0).numpy()
    found = weighted_errors(made, w, "w4a16", None)
    np.testing.assert_allclose(found, least, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16_asym", "fp8_block", "nvfp4a16", "mxfp4"])
def test_slabs_of_rows_choose_the_same_scales(scheme: str) -> None:
    w = weight("normal", (256, 256), "BF16")
    importance = channel_weights(256)
    amax = amax_rows(w, "BF16") if needs_amax(scheme) else None
    whole = quantize_rows(w, "BF16", scheme, amax=amax, observer="mse", importance_I=importance)
    cut = row_multiple(scheme)
    halves = [
        quantize_rows(rows, "BF16", scheme, amax=amax, observer="mse", importance_I=importance) for rows in (w[:cut], w[cut:])
    ]
    for name, part in whole.parts.items():
        if name != "weight_global_scale":
            assert np.array_equal(np.concatenate([half.parts[name] for half in halves]), part), name


def test_fold_is_a_tree_of_neighbours() -> None:
    """2^24 + 1 is no FP32: in order, every 1 would be lost."""
    assert float(fold(torch.tensor([2.0**24, 1, 1, 1, 1]))) == 2.0**24 + 4  # (2^24 + 1 -> 2^24) + (1 + 1), then + 1 -> even
    assert float(fold(torch.tensor([1.0, 2.0, 3.0]))) == 6


@pytest.mark.parametrize("num_rows", [2, 6, 16, 30, 128])
def test_fused_sums_add_in_the_order_of_the_definition(num_rows: int) -> None:
    """The order decides between candidates that are as good as each other, so it is compared on sums that it changes."""
    draw = np.random.default_rng(num_rows)
    x, u = (np.exp(3 * draw.standard_normal((num_rows, 32))).astype(np.float32) for _ in range(2))
    scale = np.full(32, 0.7, np.float32)
    made, scratch = np.empty((num_rows // 2, 32), np.float32), np.empty((num_rows // 2, 32), np.float32)
    _sum_errors(Int(np.float32(7.5)), x, x, u, scale, np.zeros(32, np.int16), made, scratch)
    x_JL = torch.from_numpy(x)
    stored = (x_JL / torch.tensor(0.7)).round().clamp(-8, 7) * torch.tensor(0.7)
    errors = (stored - x_JL).square() * torch.from_numpy(u)
    assert made[0].tolist() == fold(errors.T).tolist()
    assert num_rows < 16 or made[0].tolist() != errors.numpy().sum(0).tolist()


def test_an_outlier_on_a_busy_channel_is_kept() -> None:
    """Channel weights move the error to where it does not matter."""
    w = weight("normal", (1, 128), "BF16")
    importance = np.ones(128, np.float32)
    importance[:4] = 1e4
    plain, weighted = (quantized(w, "BF16", "nvfp4a16", i) for i in (None, importance))
    wide = reference.to_torch(w, "BF16").float()
    errors = [((dequantize_rows(made.parts, w, "BF16", "nvfp4a16") - wide)[0, :4]).square().sum() for made in (plain, weighted)]
    assert errors[1] < errors[0]


# ------------------------------------------------------------------------------------------------ recipes, channel weights
def test_recipes_differ_from_their_min_max_only_in_the_observer() -> None:
    for name in ("w4a16", "nvfp4a16"):
        plain, searched = (load_recipe(PrecisionRecipe, which) for which in (name, f"{name}-mse"))
        assert searched.observer == "mse" and plain.observer == "minmax"
        same = {"name": "", "description": "", "observer": "minmax"}
        assert searched.model_copy(update=same) == plain.model_copy(update=same)
        assert searched.sha256 != plain.sha256


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "importance.safetensors"
    save_file({"a.weight": np.array([0, 0.5, 2], np.float32), "b.weight": np.array([1], np.float32)}, path)
    return path


def test_channel_weights_by_name(calibration: Path) -> None:
    found = load_importance(calibration)
    values = found.for_weight("a.weight", 3)
    assert values is not None and values.tolist() == [0, 0.5, 2]
    assert found.for_weight("c.weight", 3) is None
    assert found.coverage(["a.weight", "b.weight"]) == "importance.safetensors: channel weights for 2 of 2 quantized weights"
    assert found.coverage(["a.weight", "c.weight", "d.weight"]) == (
        "importance.safetensors: channel weights for 1 of 3 quantized weights; searched unweighted: c.weight and 1 more"
    )
    before = found.sha256
    save_file({"a.weight": np.array([0, 0.5, 3], np.float32)}, calibration)
    assert load_importance(calibration).sha256 != before


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda f: f.for_weight("a.weight", 4), "a.weight has shape [3], the weight has 4 columns"),
        (lambda f: f.for_weight("bad.weight", 2), "bad.weight has values that are negative or not finite"),
        (lambda f: f.for_weight("nan.weight", 2), "nan.weight has values that are negative or not finite"),
        (lambda f: f.coverage(["x.weight"]), "names none of the 1 quantized weights (the first is x.weight"),
    ],
)
def test_channel_weights_that_do_not_fit(tmp_path: Path, use: Callable[[object], object], message: str) -> None:
    path = tmp_path / "importance.safetensors"
    vectors = {"a.weight": [0, 0.5, 2], "bad.weight": [1, -1], "nan.weight": [np.inf, 1]}
    save_file({name: np.array(values, np.float32) for name, values in vectors.items()}, path)
    with pytest.raises(PlanError) as raised:
        use(load_importance(path))
    assert message in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_are_no_channel_weights(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(PlanError) as raised:
            load_importance(path)
        assert "\n" not in str(raised.value) and path.name in str(raised.value)
        return str(raised.value)

    assert "there is no such file" in refused(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text(json.dumps({"a": 1}))
    assert "--importance takes a safetensors file" in refused(tmp_path / "text.safetensors")
    save_file({"a.weight": np.ones((2, 2), np.float32)}, tmp_path / "matrix.safetensors")
    assert "a.weight is F32 [2, 2]; every tensor must be an F32 vector" in refused(tmp_path / "matrix.safetensors")
    save_file({"a.weight": np.ones(2, np.float16)}, tmp_path / "half.safetensors")
    assert "a.weight is F16 [2]" in refused(tmp_path / "half.safetensors")
