"""GGUF files, written and decoded by the package `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from stored_checkpoints import QWEN3_MOE, assert_slabs_agree

from assay.errors import CheckpointError
from assay_quantize.decoding.gguf_files import BLOCK_TYPES, PLAIN_TYPES, open_gguf

ENCODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
"""Types that the package encodes too; of the others random bytes are decoded."""
HIDDEN, INTERMEDIATE, EXPERTS = 256, 64, 3


def blocks(kind: str, *shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A tensor as the file holds it: bytes [..., blocks of a row]."""
    generator = np.random.default_rng(seed)
    type_ = GGMLQuantizationType[kind]
    if kind in ENCODED:
        made: np.ndarray[Any, Any] = quants.quantize(generator.standard_normal(shape).astype(np.float32), type_)
        return made
    # scales are halves at different places of a block: bytes below 0x40 are small finite ones wherever they lie
    return generator.integers(0, 0x3C, quants.quant_shape_to_byte_shape(shape, type_), dtype=np.uint8)


def write_gguf(path: Path, tensors: dict[str, tuple[str, np.ndarray[Any, Any]]], architecture: str = "qwen3moe") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoded(kind: str, data: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[kind]).astype(np.float32))


def test_every_type_decodes_to_the_librarys_values(tmp_path: Path) -> None:
    tensors = {f"blk.0.{kind}.weight": (kind, blocks(kind, 6, 512, seed=seed)) for seed, kind in enumerate(sorted(BLOCK_TYPES))}
    with open_gguf([write_gguf(tmp_path / "model.gguf", tensors)]) as stored:
        assert stored.problems == () and len(stored.weights) == len(BLOCK_TYPES)
        for name, (kind, data) in tensors.items():
            weight = stored.weight(name)
            assert torch.equal(stored.read_weight(name), decoded(kind, data)), kind
            assert_slabs_agree(stored, name)
            assert (weight.format, weight.number, weight.shape) == (f"GGUF {kind}", kind, (6, 512))
            assert weight.bits_per_weight == 8 * data.nbytes / (6 * 512)


def test_names_and_experts_of_a_family(tmp_path: Path) -> None:
    """With the config.json of the model that was converted, weights have its names, one for each expert."""
    gate, down = blocks("Q8_0", EXPERTS, INTERMEDIATE, HIDDEN), blocks("Q4_0", EXPERTS, HIDDEN, INTERMEDIATE)
    embedding = np.random.default_rng(1).standard_normal((8, HIDDEN)).astype(np.float16)
    tensors = {
        "token_embd.weight": ("F16", embedding), "blk.0.attn_q.weight": ("Q5_1", blocks("Q5_1", 64, HIDDEN)),
        "blk.0.ffn_gate_exps.weight": ("Q8_0", gate), "blk.0.ffn_down_exps.weight": ("Q4_0", down),
        "blk.0.attn_norm.weight": ("F32", np.ones(HIDDEN, np.float32)),
    }  # fmt: skip
    config = QWEN3_MOE | {"hidden_size": HIDDEN, "num_experts": EXPERTS}
    layer = "model.layers.0"
    with open_gguf([write_gguf(tmp_path / "model.gguf", tensors)], config) as stored:
        assert {weight.name: weight.format for weight in stored.weights} == {
            "model.embed_tokens.weight": "plain", f"{layer}.self_attn.q_proj.weight": "GGUF Q5_1",
            **{f"{layer}.mlp.experts.{expert}.gate_proj.weight": "GGUF Q8_0" for expert in range(EXPERTS)},
            **{f"{layer}.mlp.experts.{expert}.down_proj.weight": "GGUF Q4_0" for expert in range(EXPERTS)},
        }  # fmt: skip
        for expert in range(EXPERTS):
            assert torch.equal(stored.read_weight(f"{layer}.mlp.experts.{expert}.gate_proj"), decoded("Q8_0", gate[expert]))
            assert torch.equal(stored.read_weight(f"{layer}.mlp.experts.{expert}.down_proj"), decoded("Q4_0", down[expert]))
        assert torch.equal(stored.read_weight("model.embed_tokens.weight"), torch.from_numpy(embedding).float())
        assert list(stored.others) == ["blk.0.attn_norm.weight"]
        assert stored.what == "GGUF (Q4_0, Q5_1, Q8_0)"


def test_of_an_architecture_whose_values_are_changed_names_stay(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": ("Q8_0", blocks("Q8_0", 4, HIDDEN))}, "llama")
    with open_gguf([path], QWEN3_MOE) as stored:
        assert [weight.name for weight in stored.weights] == ["blk.0.attn_q.weight"]
        assert [problem.subject for problem in stored.problems] == ["architecture llama"]
        assert stored.problems[0].what.startswith("keeps llama.cpp's names of weights; those of deepseek2, dots1,")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    one, two = blocks("Q8_0", 4, HIDDEN, seed=1), blocks("Q8_0", 4, HIDDEN, seed=2)
    paths = [
        write_gguf(tmp_path / "m-00001-of-00002.gguf", {"blk.0.attn_q.weight": ("Q8_0", one)}),
        write_gguf(tmp_path / "m-00002-of-00002.gguf", {"blk.0.attn_k.weight": ("Q8_0", two)}),
    ]
    with open_gguf(paths, QWEN3_MOE) as stored:
        assert torch.equal(stored.read_weight("model.layers.0.self_attn.q_proj"), decoded("Q8_0", one))
        assert torch.equal(stored.read_weight("model.layers.0.self_attn.k_proj"), decoded("Q8_0", two))


def test_types_that_are_not_decoded_are_problems(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    integers = ("I8", np.zeros((4, 32), np.int8))
    write_gguf(path, {"blk.0.attn_q.weight": integers, "blk.0.attn_k.weight": ("Q8_0", blocks("Q8_0", 4, HIDDEN))})
    with open_gguf([path]) as stored:
        assert [weight.name for weight in stored.weights] == ["blk.0.attn_k.weight"]
        assert stored.problems[0].subject == "blk.0.attn_q.weight"
        assert stored.problems[0].what.startswith("is I8, which is not decoded; IQ1_M, ")


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": ("Q8_0", blocks("Q8_0", 4, HIDDEN))})
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=r"m\.gguf: is not a whole GGUF file \(.*\); download it again"):
        open_gguf([path])
    path.write_bytes(b"GGUX" + whole[4:])
    with pytest.raises(CheckpointError, match=r"m\.gguf: is not a whole GGUF file \(GGUF magic invalid\)"):
        open_gguf([path])
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
        open_gguf([path])


def test_the_table_of_types_is_the_librarys() -> None:
    known = {kind.name for kind in quants._type_traits}
    assert known - PLAIN_TYPES == BLOCK_TYPES


def test_names_of_weights_that_a_converter_transposes_stay(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_k_b.weight": ("Q8_0", blocks("Q8_0", 2, 4, HIDDEN)),
        "blk.0.attn_q_a.weight": ("Q8_0", blocks("Q8_0", 4, HIDDEN)),
    }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 1, "n_routed_experts": 2,
    }  # fmt: skip
    with open_gguf([write_gguf(tmp_path / "m.gguf", tensors, "deepseek2")], config) as stored:
        assert [weight.name for weight in stored.weights] == [
            "blk.0.attn_k_b.0.weight", "blk.0.attn_k_b.1.weight", "model.layers.0.self_attn.q_a_proj.weight",
        ]  # fmt: skip
        assert stored.problems == ()
