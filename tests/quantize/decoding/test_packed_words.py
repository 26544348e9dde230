"""GPTQ, AWQ and AutoRound: integers packed by the libraries' own code, or by its published layout, decode to its values.

GPTQModel and AutoAWQ are not in this environment. Their layouts are written here by independent loops: GPTQ's as in gptqmodel
7.7.0 (utils/model_dequant.py), and AWQ's is held against compressed-tensors' converter. AutoRound packs with its own classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM
from auto_round_extension.torch.qlinear_torch import QuantLinear
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as QuantLinearV1
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from stored_checkpoints import assert_slabs_agree, normal, opened, write_stored

from assay.errors import CheckpointError
from assay_quantize.decoding.stored_weight import ActivationRule, Problem

ROWS, COLUMNS, GROUP = 64, 128, 32


def numbers(bits: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [O, I], zero points [O, G], scales [O, G]), as a quantizer finds them; every zero point fits after 1 is taken
    off."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=generator)
    zeros = torch.randint(1, 1 << bits, (ROWS, COLUMNS // GROUP), generator=generator)
    return codes, zeros, (torch.rand(ROWS, COLUMNS // GROUP, generator=generator) + 0.1).half()


def values(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_of: list[int] | None = None) -> torch.Tensor:
    """What the numbers mean, column by column."""
    made = torch.empty(codes.shape)
    for column in range(codes.shape[1]):
        group = column // GROUP if group_of is None else group_of[column]
        made[:, column] = (codes[:, column] - zeros[:, group]).float() * scales[:, group].float()
    return made


def packed_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n * bits / 32, columns] of codes [n, columns]: code i of a column at bit i * bits, counted over its words."""
    words = torch.zeros(codes.shape[0] * bits // 32, codes.shape[1], dtype=torch.int64)
    for row in range(codes.shape[0]):
        for bit in range(bits):
            place = row * bits + bit
            words[place // 32] |= ((codes[row] >> bit) & 1) << (place % 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq_tensors(bits: int, stored_zeros: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "m.qweight": packed_bits(codes.t(), bits),
        "m.qzeros": packed_bits(stored_zeros, bits).t(),
        "m.scales": scales.t(),
    }


def declared_gptq(bits: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, "desc_act": False, **changes}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
def test_gptq_decodes_to_its_numbers(tmp_path: Path, bits: int, version: str | None) -> None:
    """v1, which is also meant where nothing is said, stores zero points less one."""
    codes, zeros, scales = numbers(bits)
    tensors = gptq_tensors(bits, zeros if version == "gptq_v2" else zeros - 1, codes, scales)
    stated = {} if version is None else {"checkpoint_format": version}
    with opened(write_stored(tmp_path, tensors, declared_gptq(bits, **stated))) as stored:
        assert stored.problems == ()
        assert torch.equal(stored.read_weight("m.weight"), values(codes, zeros, scales))
        assert_slabs_agree(stored, "m.weight")
        weight = stored.weights[0]
        assert weight.bits_per_weight == bits + (16 + bits) / GROUP
        assert (weight.shape, weight.number, weight.shares) == ((ROWS, COLUMNS), f"int{bits}", (1, GROUP))
        assert (weight.format, weight.symmetric) == ("GPTQ v2" if version == "gptq_v2" else "GPTQ", False)
        assert weight.activations == ActivationRule()


def test_gptq_with_columns_in_the_order_of_activations(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4)
    group_of = torch.randint(0, COLUMNS // GROUP, (COLUMNS,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    tensors = gptq_tensors(4, zeros - 1, codes, scales) | {"m.g_idx": group_of}
    with opened(write_stored(tmp_path / "whole", tensors, declared_gptq(4, desc_act=True))) as stored:
        assert torch.equal(stored.read_weight("m"), values(codes, zeros, scales, group_of.tolist()))
        assert_slabs_agree(stored, "m")
    tensors["m.g_idx"] = torch.where(torch.arange(COLUMNS) == 7, 4, group_of).int()
    with (
        opened(write_stored(tmp_path / "damaged", tensors, declared_gptq(4, desc_act=True))) as stored,
        pytest.raises(CheckpointError, match="cannot be decoded as GPTQ: g_idx runs from 0 to 4, there are 4 groups"),
    ):
        stored.read_weight("m")


def test_gptqmodels_dynamic_rules(tmp_path: Path) -> None:
    """Patterns give single modules other bits; one that begins with `-:` names modules that are not quantized."""
    codes, zeros, scales = numbers(8)
    tensors = gptq_tensors(8, zeros - 1, codes, scales) | {"gate.weight": normal(4, 128)}
    dynamic = {"-:gate": {}, "+:^m$": {"bits": 8, "sym": False}}
    with opened(write_stored(tmp_path, tensors, declared_gptq(4, sym=True, dynamic=dynamic))) as stored:
        assert [(weight.name, weight.number) for weight in stored.weights] == [("gate.weight", "BF16"), ("m.weight", "int8")]
        assert torch.equal(stored.read_weight("m"), values(codes, zeros, scales))


def awq_tensors(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """As AutoAWQ 0.2.9 packs them (awq/modules/linear/gemm.py): the eight codes of a word are rows 0, 2, 4, 6, 1, 3, 5, 7."""

    def words(numbers_XO: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(numbers_XO.shape[0], numbers_XO.shape[1] // 8, dtype=torch.int64)
        for place, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            made |= numbers_XO[:, row::8].long() << (4 * place)
        return torch.where(made >= 1 << 31, made - (1 << 32), made).int()

    return {"m.qweight": words(codes.t()), "m.qzeros": words(zeros.t()), "m.scales": scales.t().contiguous()}


def test_awq_decodes_to_its_numbers_and_as_compressed_tensors_converts_it(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4)
    tensors = awq_tensors(codes, zeros, scales)
    declared = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    with opened(write_stored(tmp_path, tensors, declared)) as stored:
        made = stored.read_weight("m")
        assert_slabs_agree(stored, "m")
        weight = stored.weights[0]
    assert torch.equal(made, values(codes, zeros, scales))
    converted = AutoAWQConverter(bits=4, group_size=GROUP).process(dict(tensors))
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = {name.removeprefix("m."): tensor for name, tensor in converted.items()}
    decompressed = BaseCompressor.get_value_from_registry("pack-quantized").decompress(parts, scheme)["weight"]
    assert torch.equal(made.half(), decompressed)
    assert (weight.format, weight.shape, weight.bits_per_weight) == ("AWQ GEMM", (ROWS, COLUMNS), 4.625)


@pytest.mark.parametrize(
    ("packing", "packer", "bits"),
    [
        ("auto_round:auto_gptq", QuantLinearV1, 4), ("auto_round:auto_gptq", QuantLinearV1, 2),
        ("auto_round:auto_gptq", QuantLinearV1, 8), ("auto_round:auto_gptq", QuantLinearV1, 3),
        ("auto_round", QuantLinear, 4), ("auto_round", QuantLinear, 2),
    ],
)  # fmt: skip
def test_autorounds_own_packing(tmp_path: Path, packing: str, packer: Any, bits: int) -> None:
    codes, zeros, scales = numbers(bits)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = values(codes, zeros, scales)
    layer = packer(bits, GROUP, COLUMNS, ROWS, False)
    layer.device = torch.device("cpu")  # its own exporter sets it
    layer.pack(linear, scales.float(), zeros.float() if bits != 3 else zeros.clone(), None, "cpu")
    tensors = {f"m.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    stated = {"bits": bits, "group_size": GROUP, "sym": False, "data_type": "int"}
    declared = {"quant_method": "auto-round", "packing_format": packing, **stated}
    with opened(write_stored(tmp_path, tensors, declared)) as stored:
        made = stored.read_weight("m")
        assert stored.weights[0].format == "AutoRound GPTQ"
    assert torch.equal(made, values(codes, zeros, scales))
    as_it_computes = layer.float()(torch.eye(COLUMNS)).t()
    torch.testing.assert_close(made, as_it_computes.float(), rtol=0, atol=1e-3)


def test_autorounds_awq_packing_and_its_rules_for_modules(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = values(codes, zeros, scales)
    scales_GO, zeros_GO = scales.t().contiguous(), zeros.t().contiguous()
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales_GO, zeros=zeros_GO, device="cpu")
    tensors = {f"m.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    declared = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 128, "sym": True,
        "data_type": "int", "extra_config": {"^m$": {"group_size": GROUP, "sym": False}},
    }  # fmt: skip
    with opened(write_stored(tmp_path, tensors, declared)) as stored:
        assert torch.equal(stored.read_weight("m"), values(codes, zeros, scales))
        assert (stored.weights[0].format, stored.weights[0].symmetric) == ("AutoRound AWQ", False)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (declared_gptq(4, checkpoint_format="marlin"), "GPTQ's checkpoint_format marlin: gptq, gptq_v2 are read"),
        (declared_gptq(5), "5 bits are not read; 2, 3, 4, 8 are"),
        (declared_gptq(4, group_size="all"), "group_size must be a number of columns, or -1 for all"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "AWQ version gemv is not read, only gemm"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:nv_fp", "data_type":
        "nv_fp"},
         "AutoRound's packing_format auto_round:nv_fp, data_type nv_fp, act_bits 16: integers in"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "rotation_config": {"hadamard_type": "x"}},
         "act_bits 16, rotation_config: integers in"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, declared: dict[str, Any], message: str) -> None:
    codes, zeros, scales = numbers(4)
    with pytest.raises(CheckpointError) as error:
        opened(write_stored(tmp_path, gptq_tensors(4, zeros - 1, codes, scales), declared))
    assert str(error.value).startswith(f"{tmp_path}: config.json: ") and message in str(error.value)


def test_shapes_that_do_not_fit_are_problems_of_the_module(tmp_path: Path) -> None:
    codes, zeros, scales = numbers(4)
    tensors = gptq_tensors(4, zeros - 1, codes, scales)
    tensors["m.scales"] = tensors["m.scales"][:3]
    with opened(write_stored(tmp_path, tensors, declared_gptq(4))) as stored:
        assert stored.weights == ()
        assert stored.problems == (Problem("m", "has scales of shape [3, 64]; [4, 64] is read"),)
