"""Sources as DeepSeek-V4 is published: FP8 in blocks and FP4 in groups of 32, with scales that are powers of two."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import hollow
import hollow_deepseek_v4
import numpy as np
import pytest
import torch
from deepseek_v4_checkpoints import decode_fp4, decoded_deepseek_v4, spread, store_as_deepseek_v4
from hollow import write_hollow_shard
from safetensors.torch import save_file
from small_models import make_tiny_model
from tiny_checkpoints import read_shards

from assay.errors import CheckpointError, PlanError, QuantizeError
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.stored import stored_by, stored_in
from assay_quantize.verify.verify import verify

X = "layers.0.ffn.experts.0.w1"
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def plan_of(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    return store_as_deepseek_v4(make_tiny_model(folder / "plain", "deepseek-v4-flash"), folder / "published")


# ------------------------------------------------------------------------------------------------ what is read
def read_weight(folder: Path, weight: torch.Tensor, scale: torch.Tensor) -> np.ndarray[Any, Any]:
    save_file({f"{X}.weight": weight, f"{X}.scale": scale}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(folder)
    header = checkpoint.tensors[f"{X}.weight"]
    tensor = TensorPlan(
        header.name, "routed_expert", "routed_expert", X, "quantize", "w4a16", None, header.dtype, header.shape,
        header.num_bytes, header.shard, header.shard, (), f"{X}.scale",
    )  # fmt: skip
    with SourceReader(checkpoint) as reader:
        return np.concatenate([reader.read_rows(tensor, begin, min(begin + 9, 255)) for begin in range(0, 255, 9)])


def test_fp4_rows_are_codes_times_powers_of_two(tmp_path: Path) -> None:
    """Every byte of two codes with every exponent but NaN: into BF16's denormals, and up to where a product overflows."""
    packed = torch.randint(0, 256, (255, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed[:, :16] = torch.arange(256, dtype=torch.uint8).reshape(16, 16).repeat(16, 1)[:255]
    exponents = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 4)
    made = read_weight(tmp_path, packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu))
    wanted = decode_fp4(packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu))
    np.testing.assert_array_equal(made, wanted.view(torch.uint16).numpy(), strict=True)
    # and once more without torch: value = (-1)^sign * 2^(exponent - 127) * code
    low, high = packed.numpy() & 15, packed.numpy() >> 4
    codes = np.stack([low, high], 2).reshape(255, 128)
    magnitude = np.array([0, 1, 2, 3, 4, 6, 8, 12])[codes & 7] * np.where(codes & 8, -0.5, 0.5)
    exact = np.ldexp(magnitude, np.arange(255)[:, None] - 127)
    bits = made.astype(np.uint32) << 16
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bits.view(np.float32), exact.astype(np.float32))


def test_fp8_rows_are_what_torch_computes(tmp_path: Path) -> None:
    codes = torch.randint(0, 256, (255, 256), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    exponents = torch.tensor([[0, 110], [127, 254]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    made = read_weight(tmp_path, codes.view(torch.float8_e4m3fn), exponents)
    wanted = (codes.view(torch.float8_e4m3fn).float() * spread(exponents)[:255]).to(torch.bfloat16)
    np.testing.assert_array_equal(made, wanted.view(torch.uint16).numpy(), strict=True)


def test_an_exponent_that_is_nan_is_damage(tmp_path: Path) -> None:
    exponents = torch.full((255, 4), 127, dtype=torch.uint8)
    exponents[3, 2] = 255
    with pytest.raises(QuantizeError, match=r"w1\.scale: 1 scales are NaN or infinite; the source is damaged"):
        read_weight(tmp_path, torch.zeros(255, 64, dtype=torch.int8), exponents.view(torch.float8_e8m0fnu))


SCALE = (f"{X}.scale", "F8_E8M0", (8, 4))
FP4 = (f"{X}.weight", "I8", (8, 64))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([FP4, (f"{X}.scale", "F8_E8M0", (8, 8))],
         f"{X}.scale [8, 8] does not fit {X}.weight [8, 128]: one exponent for 32 columns of a row is read; the checkpoint is "
         "damaged, download it again"),
        ([FP4, (f"{X}.weight_scale", "F8_E8M0", (8, 4))],
         f"is quantized already ({X}.weight is I8); a BF16, FP16, FP32 or FP8 source is needed"),
        ([FP4, (f"{X}.weight_scale", "F32", (8, 1))],
         f"is quantized already ({X}.weight is I8); a BF16, FP16, FP32 or FP8 source is needed"),
        ([SCALE], f"is quantized already ({X}.scale is F8_E8M0); a BF16, FP16, FP32 or FP8 source is needed"),
        ([(f"{X}.weight", "F8_E4M3", (8, 128))],
         f"{X}.weight is FP8, but there is no weight_scale_inv, weight_scale or scale beside it; complete the download"),
    ],
)  # fmt: skip
def test_what_is_stored_otherwise_is_refused(tmp_path: Path, tensors: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_hollow_shard(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {message}"


def test_something_else_may_be_called_scale(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plain = [("layers.0.gate.weight", "BF16", (8, 64)), ("layers.0.gate.scale", "BF16", (8,))]
    write_hollow_shard(tmp_path / "model.safetensors", plain)
    assert open_checkpoint(tmp_path).notes == ()


# ------------------------------------------------------------------------------------------------ what is made of it
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["nvfp4a16", "fp8-channel"])
def test_a_published_source_gives_the_checkpoint_of_the_weights_it_stands_for(
    source: Path, tmp_path: Path, precision: str
) -> None:
    plain = decoded_deepseek_v4(source, tmp_path / "plain")
    made: list[dict[str, torch.Tensor]] = []
    for number, origin in enumerate((source, plain)):
        folder = tmp_path / str(number)
        quantize(plan_of(origin, precision), origin, folder)
        assert verify(folder, source=origin).damages == ()
        made.append(stored(folder))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(tensor.view(torch.uint8), made[1][name].view(torch.uint8)) for name, tensor in made[0].items())


@pytest.mark.slow
def test_experts_in_mxfp4_keep_their_bytes(source: Path, tmp_path: Path) -> None:
    """What is FP4 in groups of 32 is compressed-tensors' MXFP4 under other names; the MTP block is kept in BF16."""
    plan = plan_of(source, "mxfp4")
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert by_name[f"{X}.weight"].outputs == (OutputTensor(f"{X}.weight_packed", "U8", (128, 128), 128 * 128),)
    assert by_name[f"{X}.scale"].outputs == (OutputTensor(f"{X}.weight_scale", "U8", (128, 8), 128 * 8),)
    assert Counter(t.action for t in plan.tensors if t.dtype == "FP4") == {"keep": 36, "dequantize": 12}
    quantize(plan, source, tmp_path / "made")
    assert verify(tmp_path / "made", source=source).damages == verify(tmp_path / "made").damages == ()
    before, after = stored(source), stored(tmp_path / "made")
    for tensor in (t for t in plan.tensors if t.dtype == "FP4" and t.action == "keep"):
        assert torch.equal(after[f"{tensor.module}.weight_packed"], before[tensor.name].view(torch.uint8))
        assert torch.equal(after[f"{tensor.module}.weight_scale"], before[f"{tensor.module}.scale"].view(torch.uint8))


def test_fp8_blocks_keep_their_codes_and_have_their_scales_as_bf16(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source, "fp8")
    quantize(plan, source, tmp_path / "made")
    assert verify(tmp_path / "made", source=source).damages == verify(tmp_path / "made").damages == ()
    before, after = stored(source), stored(tmp_path / "made")
    carried = [tensor for tensor in plan.tensors if tensor.action == "keep" and tensor.scheme == "fp8_block"]
    assert Counter(tensor.part for tensor in carried) == {"attention": 12, "shared_expert": 9}
    for tensor in carried:
        assert torch.equal(after[tensor.name].view(torch.uint8), before[tensor.name].view(torch.uint8))
        scale = after[f"{tensor.module}.weight_scale"]
        assert scale.dtype == torch.bfloat16 and torch.equal(scale.float(), before[f"{tensor.module}.scale"].float())


def test_what_is_small_and_exact_stays_so_in_a_kept_mtp_block(source: Path) -> None:
    plan = plan_of(source, "w4a16")
    kept = {t.name.removeprefix("mtp.0."): t.action for t in plan.tensors if t.name.startswith("mtp.0.") and t.dtype == "F32"}
    hyper = {f"hc_{part}_{leaf}" for part in ("attn", "ffn", "head") for leaf in ("base", "fn", "scale")}
    assert kept == dict.fromkeys([*hyper, "attn.attn_sink", "ffn.gate.bias"], "keep")


def test_what_a_server_loads_has_the_shapes_of_its_weights(source: Path) -> None:
    published = stored_in(open_checkpoint(source, allow_quantized=True), "deepseek_v4", "the source")
    of = {weight.name: weight for weight in published.weights}
    assert (of[f"{X}.weight"].shape, of[f"{X}.weight"].group, of[f"{X}.weight"].block_rows) == ((128, 256), 32, 1)
    wq_b = of["layers.0.attn.wq_b.weight"]
    assert (wq_b.shape, wq_b.group, wq_b.block_rows) == ((1024, 128), 128, 128)
    assert sum(weight.num_bytes for weight in published.weights) == sum(
        header.num_bytes for header in open_checkpoint(source).tensors.values()
    )
    made = plan_of(source, "mxfp4")
    assert sum(weight.num_bytes for weight in stored_by(made).weights) == made.bytes_out


# ------------------------------------------------------------------------------------------------ what is missing
@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("layers.2.attn.compressor.ape", r"layer 2 has no attn.compressor.ape, which layer 3 has"),
        ("mtp.0.ffn.gate.bias", r"mtp.0.ffn.gate.bias is missing from the MTP block"),
        ("mtp.0.e_proj.weight", r"mtp.0.e_proj.weight is missing from the MTP block"),
        ("layers.1.ffn.experts.2.w3.weight", r"layer 1 has no w3 of expert 2"),
    ],
)
def test_a_source_that_lacks_something_is_refused(tmp_path: Path, gone: str, message: str) -> None:
    config, shapes_of = hollow.MODELS["deepseek-v4-flash"]
    config = {**hollow_deepseek_v4.cut_to(config, 4), "compress_ratios": [0, 4, 128, 128, 0], "n_routed_experts": 4}
    shapes = [(name, shape) for name, shape in shapes_of(config) if name != gone]
    source = hollow.write_hollow(tmp_path / "lacking", config, iter(shapes), shards=1)
    with pytest.raises(PlanError, match=message):
        plan_of(source, "w4a16")


def test_a_draft_of_another_kind_is_left_out_or_refused(tmp_path: Path) -> None:
    """Flash-0731 drafts by three stages, with a projection before the first and heads behind the last (DSpark)."""
    config, shapes_of = hollow.MODELS["deepseek-v4-flash"]
    config = {**hollow_deepseek_v4.cut_to(config, 4), "n_routed_experts": 4, "num_nextn_predict_layers": 3}
    config |= {"compress_ratios": [0, 4, 128, 4, 0, 0, 0], "dspark_markov_rank": 256}
    hidden = config["hidden_size"]
    of_mtp = ("e_proj.", "h_proj.", "enorm.", "hnorm.", "norm.", "hc_head_")
    shapes = [
        item for item in shapes_of(config) if not item[0].startswith(tuple(f"mtp.{n}.{p}" for n in range(3) for p in of_mtp))
    ]
    shapes += [
        ("mtp.0.main_proj.weight", (hidden, 3 * hidden)), ("mtp.0.main_norm.weight", (hidden,)),
        ("mtp.2.norm.weight", (hidden,)), ("mtp.2.hc_head_base", (config["hc_mult"],)), ("mtp.2.hc_head_scale", (1,)),
        ("mtp.2.hc_head_fn", (config["hc_mult"], config["hc_mult"] * hidden)),
        ("mtp.2.markov_head.markov_w1.weight", (config["vocab_size"], 256)),
        ("mtp.2.markov_head.markov_w2.weight", (config["vocab_size"], 256)),
        ("mtp.2.confidence_head.proj.weight", (1, hidden + 256)),
    ]  # fmt: skip
    config["quantization_config"] = hollow_deepseek_v4.QUANTIZATION
    published, dtypes = hollow_deepseek_v4.as_published(iter(shapes))
    source = hollow.write_hollow(tmp_path / "0731", config, published, shards=1, dtypes=dtypes)
    with pytest.raises(PlanError) as caught:
        plan_of(source, "w4a16")
    assert str(caught.value) == (
        f"{source}: mtp.0.main_proj.weight is of a DSpark draft, which is not kept; leave it out with `--mtp drop`"
    )
    plan = plan_of(source, "w4a16-nomtp")
    assert {tensor.action for tensor in plan.tensors if tensor.name.startswith("mtp.")} == {"drop"}
    assert {tensor.action for tensor in plan.tensors if ".experts." in tensor.name and tensor.name.endswith(".w1.weight")} == {
        "quantize", "drop"
    }  # fmt: skip
