"""Every defect of GGUF files is planted once and found by name; the same model without it raises nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from gguf_models import BLOCKS, EXPERTS, HIDDEN, INNER, Keys, Shapes, put, small_keys, small_shapes, write

from assay.errors import CheckpointError
from assay.records.inspection import Inspection, StoredForm
from assay_pipeline.comparison.inspecting import inspect as inspect_target
from assay_quantize.decoding.gguf_files import BLOCK_TYPES
from assay_quantize.decoding.gguf_header import read_header
from assay_quantize.inspection.files import FolderFiles
from assay_quantize.inspection.gguf.defects import GGUF_DEFECTS
from assay_quantize.inspection.gguf.values import KNOWN_BLOCKS, look_at_blocks
from assay_quantize.inspection.inspect import inspect

Found = dict[str, list[tuple[str, str]]]
MTP = BLOCKS - 1


def small(
    folder: Path,
    *,
    keys: Keys | None = None,
    shapes: Shapes | None = None,
    without: str = "",
    split: int = 0,
    architecture: str = "glm4moe",
) -> Path:
    """The small model; keys and shapes: instead of its own, a key that is None is left out. without: names that are."""
    told = {key: value for key, value in (small_keys(architecture) | (keys or {})).items() if value is not None}
    stored = {name: kind for name, kind in (small_shapes() | (shapes or {})).items() if not without or without not in name}
    write(folder / "model.gguf", architecture, told, stored, split=split)
    return folder


def found(result: Inspection) -> Found:
    return {f.defect: [(place.where, place.what) for place in f.places] for f in result.findings}


def of_folder(folder: Path, *, deep: bool = False) -> Found:
    return found(inspect(FolderFiles(folder), weights=deep))


# ------------------------------------------------------------------------------------------------ healthy
def test_a_healthy_model_and_what_it_is(tmp_path: Path) -> None:
    result = inspect(FolderFiles(small(tmp_path)), weights=True)
    assert result.findings == ()
    assert result.checked == tuple(defect.key for defect in GGUF_DEFECTS)
    assert result.not_checked == ("kept tensors and errors against the base: GGUF is not compared with one",)
    facts = result.facts
    assert (facts.family, facts.architecture, facts.num_layers, facts.num_experts) == ("glm4_moe", "glm4moe", MTP, EXPERTS)
    assert (facts.method, facts.producer, facts.base_model) == ("GGUF, Q8_0", "Somebody", "zai-org/GLM-4.5-Air")
    assert (facts.licence, facts.mtp.declared, facts.mtp.stored, facts.mtp.form) == ("mit", 1, 1, "F32, Q8_0")
    layers, stack = "1-3", EXPERTS * INNER * HIDDEN
    square, q8 = HIDDEN * HIDDEN, 34 / 32
    of_mtp = 4 * square + 3 * stack + 3 * INNER * HIDDEN + 2 * HIDDEN * HIDDEN
    assert facts.forms == tuple(
        StoredForm(
            role=role, form=form, layers=where, num_weights=count, num_elements=elements, num_bytes=int(elements * bytes_each)
        )
        for role, form, where, count, elements, bytes_each in (
            ("attention", "Q8_0", "0-3", 16, 16 * square, q8), ("dense_mlp", "Q8_0", "0", 3, 3 * square, q8),
            ("embedding", "Q8_0", "", 1, 16 * HIDDEN, q8), ("lm_head", "Q8_0", "", 1, 16 * HIDDEN, q8),
            ("mtp", "F32", "4", 1, EXPERTS * HIDDEN, 4), ("mtp", "Q8_0", "4", 11, of_mtp, q8),
            ("routed_expert", "Q8_0", layers, 9, 9 * stack, q8), ("router", "F32", layers, 3, 3 * EXPERTS * HIDDEN, 4),
            ("shared_expert", "Q8_0", layers, 9, 9 * INNER * HIDDEN, q8),
        )
    )  # fmt: skip
    tensors = read_header(tmp_path / "model.gguf").tensors
    num_bytes, num_elements = sum(t.num_bytes for t in tensors), sum(t.num_elements for t in tensors)
    assert (facts.num_bytes, facts.num_elements) == (num_bytes, num_elements)
    assert facts.bits_per_weight == 8 * num_bytes / num_elements


def test_a_split_model_is_the_same_by_folder_and_by_any_part(tmp_path: Path) -> None:
    folder = small(tmp_path, split=30)
    parts = sorted(folder.glob("*.gguf"))
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    one = inspect(FolderFiles(small(tmp_path / "whole")))
    for place in (folder, *parts):
        result = inspect(FolderFiles(place))
        assert (result.checkpoint, result.findings, result.facts) == (str(place), (), one.facts)


def test_without_an_mtp_block_nothing_is_missing(tmp_path: Path) -> None:
    keys = {"glm4moe.block_count": MTP, "glm4moe.nextn_predict_layers": None}
    assert of_folder(small(tmp_path, keys=keys, without=f"blk.{MTP}.")) == {}


def test_deepseeks_architecture_says_how_experts_are_weighted(tmp_path: Path) -> None:
    """https://github.com/ikawrakow/ik_llama.cpp/pull/1174: GLM-4.7-Flash without it. Without a bias softmax is right."""
    sigmoid: Keys = {"deepseek2.expert_gating_func": 2}
    assert of_folder(small(tmp_path / "told", architecture="deepseek2", keys=sigmoid)) == {}
    assert of_folder(small(tmp_path / "v2", architecture="deepseek2", without="exp_probs_b")) == {}


def test_a_draft_head_alone_is_one(tmp_path: Path) -> None:
    """`convert_hf_to_gguf.py --mtp` keeps the MTP block, embedding, norm and head."""
    shapes = {name: kind for name, kind in small_shapes().items() if not name.startswith(("blk.0", "blk.1", "blk.2", "blk.3"))}
    write(tmp_path / "mtp-model.gguf", "glm4moe", small_keys(), shapes)
    assert of_folder(tmp_path) == {}


def test_the_last_norm_has_two_names(tmp_path: Path) -> None:
    shapes: Shapes = {"token_embd_norm.weight": ("F32", (HIDDEN,))}
    assert of_folder(small(tmp_path, shapes=shapes, without="output_norm.")) == {}


def test_files_beside_the_model_are_named(tmp_path: Path) -> None:
    folder = small(tmp_path)
    (folder / "mmproj-F16.gguf").write_bytes(b"")
    result = inspect(FolderFiles(folder))
    assert (result.findings, result.not_checked[1]) == ((), "mmproj-F16.gguf: is no language model by its name; give the file")


# ------------------------------------------------------------------------------------------------ planted in the header
def patched(folder: Path, name: str, *, kind: int | None = None, offset: int | None = None) -> Path:
    """The small model with another type or offset of a tensor in its header."""
    path = small(folder) / "model.gguf"
    raw = bytearray(path.read_bytes())
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    at += 4 + 8 * struct.unpack_from("<I", raw, at)[0]
    if kind is not None:
        struct.pack_into("<I", raw, at, kind)
    if offset is not None:
        struct.pack_into("<Q", raw, at + 4, offset)
    path.write_bytes(raw)
    return folder


def renamed_key(folder: Path, key: str) -> Path:
    path = small(folder) / "model.gguf"
    path.write_bytes(path.read_bytes().replace(key.encode(), key.upper().encode(), 1))
    return folder


def truncated(folder: Path) -> Path:
    path = small(folder) / "model.gguf"
    tensors = sorted(read_header(path).tensors, key=lambda tensor: tensor.begin)
    path.write_bytes(path.read_bytes()[: tensors[-3].begin + 5])
    return folder


def without_part(folder: Path) -> Path:
    """The MTP block and its neighbour are in the second and third part."""
    (small(folder, split=30) / "model-00003-of-00003.gguf").unlink()
    return folder


def without_first_part(folder: Path) -> Path:
    """What describes the model is in it."""
    (small(folder, split=30) / "model-00001-of-00003.gguf").unlink()
    return folder


def joined(folder: Path) -> Path:
    """One part under a name of its own."""
    path = small(folder, split=1000) / "model.gguf"
    write(path, "glm4moe", {**small_keys(), "split.no": 0, "split.count": 2}, small_shapes())
    return folder


def miscounted(folder: Path) -> Path:
    write(folder / "model.gguf", "glm4moe", {**small_keys(), "split.tensors.count": 90}, small_shapes())
    return folder


def twice(folder: Path) -> Path:
    """The second part holds a tensor of the first."""
    first, second = (folder / f"model-0000{n}-of-00002.gguf" for n in (1, 2))
    told = {"split.count": 2, "split.tensors.count": len(small_shapes()) + 1}
    write(first, "glm4moe", {**small_keys(), **told, "split.no": 0}, small_shapes())
    write(second, "glm4moe", {**told, "split.no": 1}, {"output_norm.weight": ("F32", (HIDDEN,))})
    return folder


def stacks(number: int, count: int) -> Shapes:
    return {
        f"blk.{number}.ffn_gate_exps.weight": ("Q8_0", (count, INNER, HIDDEN)),
        f"blk.{number}.ffn_up_exps.weight": ("Q8_0", (count, INNER, HIDDEN)),
        f"blk.{number}.ffn_down_exps.weight": ("Q8_0", (count, HIDDEN, INNER)),
    }


def single_experts(folder: Path) -> Path:
    """Mixtral's, as they were written until April 2024."""
    shapes = {name: kind for name, kind in small_shapes().items() if not (name.startswith("blk.1.") and "_exps" in name)}
    shapes |= {
        f"blk.1.ffn_{part}.{expert}.weight": ("Q8_0", (INNER, HIDDEN)) for expert in range(EXPERTS) for part in ("gate", "up")
    }
    shapes |= {f"blk.1.ffn_down.{expert}.weight": ("Q8_0", (HIDDEN, INNER)) for expert in range(EXPERTS)}
    write(folder / "model.gguf", "glm4moe", small_keys(), shapes)
    return folder


COUNT = "glm4moe.expert_count is 4"
PLANTED: dict[str, tuple[Callable[[Path], Path], Found]] = {
    "shard_unreadable": (truncated, {"shard_unreadable": [(
        "model.gguf", "ends at byte 254,533; 3 tensors lie behind it (blk.4.nextn.enorm.weight, ...)",
    )]}),
    "shard_missing": (without_part, {
        "shard_missing": [("model-*-of-00003.gguf", "part 3 of 3 is not there")],
        "mtp_absent": [("glm4moe.nextn_predict_layers", "is 1, and no file has a tensor of an MTP block")],
    }),
    "shard_missing-first": (without_first_part, {"shard_missing": [("model-*-of-00003.gguf", "part 1 of 3 is not there")]}),
    "split_name": (joined, {"split_name": [
        ("model.gguf", "is part 1 of 2 by split.no and split.count, and has another name"),
    ]}),
    "split_tensors": (miscounted, {"split_tensors": [
        ("model.gguf", "says split.tensors.count 90; the files hold 72 tensors"),
    ]}),
    "tensor_twice": (twice, {"tensor_twice": [
        ("output_norm.weight", "is in model-00001-of-00002.gguf and in model-00002-of-00002.gguf"),
    ]}),
    "tensors_overlap": (lambda folder: patched(folder, "output_norm.weight", offset=1024), {"tensors_overlap": [
        ("token_embd.weight", "takes 64 bytes of output_norm.weight, which begins inside it"),
    ]}),
    "tensor_type_unknown": (lambda folder: patched(folder, "blk.1.attn_q.weight", kind=137), {"tensor_type_unknown": [
        ("blk.1.attn_q.weight", "is stored as type 137"),
    ]}),
    "key_missing-architecture": (lambda folder: renamed_key(folder, "general.architecture"), {
        "key_missing": [("general.architecture", "is not there")],
    }),
    "key_missing": (lambda folder: small(folder, keys={"glm4moe.context_length": None, "glm4moe.expert_used_count": None}), {
        "key_missing": [("glm4moe.context_length", "is not there"), ("glm4moe.expert_used_count", "is not there")],
    }),
    "tokenizer_absent": (lambda folder: small(folder, keys={"tokenizer.ggml.model": None}), {
        "tokenizer_absent": [("tokenizer.ggml.model", "is not there")],
    }),
    "pre_tokenizer_absent": (lambda folder: small(folder, keys={"tokenizer.ggml.pre": None}), {
        "pre_tokenizer_absent": [("tokenizer.ggml.pre", "is not there, and the tokenizer is one of byte pairs")],
    }),
    "gating_absent": (lambda folder: small(folder, architecture="deepseek2"), {
        "gating_absent": [("deepseek2.expert_gating_func", "is not there, and experts are chosen with a bias, which goes with "
                           "sigmoids")],
    }),
    "special_token_outside": (lambda folder: small(folder, keys={"tokenizer.ggml.eos_token_id": 16}), {
        "special_token_outside": [("tokenizer.ggml.eos_token_id", "is 16; the vocabulary has 16 tokens")],
    }),
    "chat_template_absent": (lambda folder: small(folder, keys={"tokenizer.chat_template": None}), {
        "chat_template_absent": [("tokenizer.chat_template", "is not there")],
    }),
    "licence_absent": (lambda folder: small(folder, keys={"general.license": None}), {
        "licence_absent": [("general.license", "is not there")],
    }),
    "base_model_absent": (lambda folder: small(folder, keys={
        "general.base_model.0.name": None, "general.base_model.0.repo_url": None,
    }), {"base_model_absent": [("general.base_model.0.repo_url", "is not there")]}),
    "layers_missing": (lambda folder: small(folder, without="blk.2."), {
        "layers_missing": [("block 2", "no file has a tensor of it; glm4moe.block_count is 5")],
    }),
    "unknown_tensor": (lambda folder: small(folder, shapes={"blk.5.attn_norm.weight": ("F32", (HIDDEN,))}), {
        "unknown_tensor": [("block 5", "has 1 tensors; glm4moe.block_count is 5")],
    }),
    "tensors_missing": (lambda folder: small(folder, without="blk.2.ffn_up_shexp."), {
        "tensors_missing": [("blk.2.ffn_up_shexp.weight", "is missing; 3 like blocks have it")],
    }),
    "tensors_missing-outside": (lambda folder: small(folder, without="token_embd."), {
        "tensors_missing": [("token_embd.weight", "is in no file")],
    }),
    "experts_not_stacked": (single_experts, {
        "experts_not_stacked": [("block 1", "has 12 weights of single experts (blk.1.ffn_down.0.weight, ...)")],
    }),
    "experts_missing": (lambda folder: small(folder, shapes=stacks(2, 3)), {"experts_missing": [
        (f"blk.2.ffn_{part}_exps.weight", f"holds 3 experts; {COUNT}") for part in ("gate", "up", "down")
    ]}),
    "dense_layers": (lambda folder: small(folder, keys={"glm4moe.leading_dense_block_count": 2}), {
        "dense_layers": [("block 1", "has experts; glm4moe.leading_dense_block_count is 2")],
    }),
    "router_rows": (lambda folder: small(folder, shapes={
        "blk.1.ffn_gate_inp.weight": ("F32", (8, HIDDEN)), "blk.1.exp_probs_b.bias": ("F32", (8,)),
    }), {"router_rows": [
        ("blk.1.ffn_gate_inp.weight", f"has 8 rows; {COUNT}"), ("blk.1.exp_probs_b.bias", f"has 8 values; {COUNT}"),
    ]}),
    "vocabulary_rows": (lambda folder: small(folder, shapes={"token_embd.weight": ("Q8_0", (24, HIDDEN))}), {
        "vocabulary_rows": [("token_embd.weight", "has 24 rows; the vocabulary has 16 tokens")],
    }),
    "width_unlike_metadata": (lambda folder: small(folder, shapes={
        "blk.3.ffn_up_exps.weight": ("Q8_0", (EXPERTS, 64, HIDDEN)), "blk.3.ffn_gate_inp.weight": ("F32", (EXPERTS, 96)),
    }), {"width_unlike_metadata": [
        ("blk.3.ffn_gate_inp.weight", "is [4, 96]; glm4moe.embedding_length is 64"),
        ("blk.3.ffn_up_exps.weight", "is [4, 64, 64]; glm4moe.expert_feed_forward_length is 32"),
    ]}),
    "router_quantized": (lambda folder: small(folder, shapes={"blk.2.ffn_gate_inp.weight": ("Q8_0", (EXPERTS, HIDDEN))}), {
        "router_quantized": [("blk.2.ffn_gate_inp.weight", "is Q8_0")],
    }),
    "router_bias_in_16_bits": (lambda folder: small(folder, shapes={"blk.2.exp_probs_b.bias": ("F16", (EXPERTS,))}), {
        "router_bias_in_16_bits": [("blk.2.exp_probs_b.bias", "is F16")],
    }),
    "mtp_absent": (lambda folder: small(folder, without=f"blk.{MTP}."), {
        "mtp_absent": [("glm4moe.nextn_predict_layers", "is 1, and no file has a tensor of an MTP block")],
    }),
    "mtp_undeclared": (lambda folder: small(folder, keys={"glm4moe.nextn_predict_layers": 0}), {
        "mtp_undeclared": [("block 4", "MTP block; glm4moe.nextn_predict_layers is 0")],
    }),
    "mtp_incomplete": (lambda folder: small(folder, without=f"blk.{MTP}.nextn.eh_proj."), {
        "mtp_incomplete": [("blk.4.nextn.eh_proj.weight", "is missing")],
    }),
    "mtp_incomplete-attention": (lambda folder: small(folder, without=f"blk.{MTP}.attn_"), {
        "mtp_incomplete": [("block 4", "has no attn_* weights")],
    }),
    "mtp_incomplete-tensor": (lambda folder: small(folder, without=f"blk.{MTP}.attn_k."), {
        "mtp_incomplete": [("blk.4.attn_k.weight", "is missing; 3 like blocks have it")],
    }),
    "mtp_experts_missing": (lambda folder: small(folder, without=f"blk.{MTP}.ffn_up_exps."), {
        "mtp_experts_missing": [("block 4", "has a router, and no ffn_up_exps.weight")],
    }),
}  # fmt: skip
"""Defect -> what has it, and everything that is found."""


@pytest.mark.parametrize("defect", PLANTED)
def test_what_headers_show(tmp_path: Path, defect: str) -> None:
    make, expected = PLANTED[defect]
    assert of_folder(make(tmp_path)) == expected


def test_every_row_is_planted() -> None:
    assert {defect.key for defect in GGUF_DEFECTS if defect.needs == "headers"} == {name.split("-")[0] for name in PLANTED}


# ------------------------------------------------------------------------------------------------ planted in the data
@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_blocks_are_not_finite_or_zero_where_the_library_decodes_them_so(kind: str) -> None:
    """Of blocks with random bytes, with scales of zero, of all bits, and of zeros throughout."""
    assert KNOWN_BLOCKS == BLOCK_TYPES
    type_ = GGMLQuantizationType[kind]
    per_block, block_bytes = GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(0).integers(0, 256, (4096, block_bytes), np.uint8)
    blocks[::5] = 0
    blocks[1::64, :] = 0xFF
    # scales lie at the ends of blocks: words of it are NaN, infinite and zero in turn
    for at in (0, 2, block_bytes - 2, block_bytes - 4):
        for first, word in enumerate((0x7E00, 0x7C00, 0xFC00, 0)):
            blocks[10 + 4 * at + first :: 97, at : at + 2] = np.frombuffer(struct.pack("<H", word), np.uint8)
    with np.errstate(all="ignore"):
        values = quants.dequantize(blocks, type_).reshape(len(blocks), per_block)
    not_finite, zero = look_at_blocks(blocks, kind)
    assert np.array_equal(not_finite, ~np.isfinite(values).all(axis=1))
    assert np.array_equal(zero[::5], (values[::5] == 0).all(axis=1)) and zero[::5].sum() > 700
    assert not zero[(values != 0).any(axis=1)].any()


def test_block_scales_that_are_not_numbers(tmp_path: Path) -> None:
    """A NaN in one block of expert 2 and an infinity in one of expert 3; as of gemma-4-26B-A4B, Q6_K, a block of zeros."""
    folder = small(tmp_path)
    path, name, expert_bytes = folder / "model.gguf", "blk.2.ffn_down_exps.weight", HIDDEN * INNER // 32 * 34
    put(path, name, np.array([0x7E00], np.uint16), at=2 * expert_bytes + 34)
    put(path, name, np.array([0xFC00], np.uint16), at=3 * expert_bytes)
    put(path, "blk.1.attn_norm.weight", np.array([np.inf, np.nan], np.float32), at=8)
    assert of_folder(folder) == {}
    assert of_folder(folder, deep=True) == {"weight_not_finite": [
        ("blk.1.attn_norm.weight", "2 of 64 values are NaN or infinite"),
        (name, "2 of 256 block scales are NaN or infinite (expert 2-3)"),
    ]}  # fmt: skip


def test_weights_of_zeros(tmp_path: Path) -> None:
    folder = small(tmp_path)
    path, expert_bytes = folder / "model.gguf", HIDDEN * INNER // 32 * 34
    put(path, "blk.1.ffn_gate_inp.weight", np.zeros((EXPERTS, HIDDEN), np.float32))
    put(path, "blk.3.ffn_up_exps.weight", np.zeros(expert_bytes, np.uint8), at=expert_bytes)
    put(path, "blk.3.exp_probs_b.bias", np.zeros(EXPERTS, np.float32))  # as models that were trained without have it
    assert of_folder(folder, deep=True) == {"weight_all_zero": [
        ("blk.1.ffn_gate_inp.weight", "all values are zero"), ("blk.3.ffn_up_exps.weight", "all values are zero (expert 1)"),
    ]}  # fmt: skip


def test_data_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small(tmp_path)
    put(folder / "model.gguf", "blk.0.attn_q.weight", np.array([0x7E00], np.uint16), at=127 * 34)
    monkeypatch.setattr("assay_quantize.inspection.gguf.values.PIECE_BYTES", 100)
    assert of_folder(folder, deep=True) == {
        "weight_not_finite": [("blk.0.attn_q.weight", "1 of 128 block scales are NaN or infinite")]
    }


def test_a_hollow_file_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "glm4moe", small_keys(), small_shapes(), hollow=True)
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.truncate(8 << 20)
    result = inspect(FolderFiles(tmp_path), weights=True)
    assert result.findings == ()
    assert "values: 1 files have headers and no data (nothing was ever written to them)" in result.not_checked


# ------------------------------------------------------------------------------------------------ what is not inspected
def refusal(place: object, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        inspect_target(str(place), **options)
    return str(caught.value)


def test_what_cannot_be_inspected_is_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text" / "model.gguf"
    text.parent.mkdir()
    text.write_text("I am no model\n")
    assert refusal(text) == refusal(text.parent) == (
        f"{text}: is not a whole GGUF file (GGUF magic invalid); download it again"
    )  # fmt: skip
    cut = small(tmp_path / "cut") / "model.gguf"
    cut.write_bytes(cut.read_bytes()[:200])
    assert refusal(cut) == f"{cut}: is not a whole GGUF file (the file ends inside its header); download it again"
    two = small(tmp_path / "two")
    (two / "model.gguf").rename(two / "model-Q8_0.gguf")
    small(two)
    assert refusal(two) == f"{two}: holds 2 GGUF models (model-Q8_0.gguf and 1 more); give the file of one"
    assert found(inspect_target(str(two / "model.gguf"))) == {}
    assert refusal(two / "model.gguf", source=str(two)) == (
        f"{two / 'model.gguf'}: is GGUF, which is not compared with a base; leave --source out"
    )
    tower = write(tmp_path / "mmproj.gguf", "clip", {"general.type": "mmproj"}, {"v.patch_embd.weight": ("F32", (4, 4))})
    assert refusal(tower) == f"{tower}: is no language model (general.type mmproj); give the file of one"
    assert refusal("https://example.org/org/model.gguf") == (
        "https://example.org/org/model.gguf: GGUF is inspected in a folder only; download the files and give the folder"
    )


@pytest.mark.parametrize(
    ("what", "raw"),
    [
        ("an array that is longer than the file", struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 1 << 60)),
        ("strings that are more than the file holds", struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 60)),
        ("a string that is longer than the file", struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 1 << 62)),
        ("a key that is longer than the file", struct.pack("<Q", 1 << 63)),
    ],
)
def test_no_length_in_a_header_is_believed(tmp_path: Path, what: str, raw: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + raw)
    assert refusal(path) == f"{path}: is not a whole GGUF file (the file ends inside its header); download it again"
