"""Headers are read as safetensors reads them, and whatever is wrong with a checkpoint folder is one line that says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hollow import write_hollow_shard, write_index
from safetensors import safe_open
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import CheckpointError
from assay.safetensors_index import INDEX_NAME
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.headers import parse_header
from assay_quantize.checkpoint.torch_tensors import read_tensor

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_headers_and_bytes_are_those_safetensors_reads(tiny_glm: Path) -> None:
    checkpoint = open_checkpoint(tiny_glm)
    seen = {}
    for shard in checkpoint.shards:
        with safe_open(tiny_glm / shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor, header = file.get_tensor(name), checkpoint.tensors[name]
                seen[name] = shard
                assert header.shape == tuple(tensor.shape)
                assert header.dtype == file.get_slice(name).get_dtype()
                assert torch.equal(*(each.view(-1).view(torch.uint8) for each in (read_tensor(checkpoint, name), tensor)))
    assert seen == {name: header.shard for name, header in checkpoint.tensors.items()}
    assert checkpoint.shards == {name: (tiny_glm / name).stat().st_size for name in (FIRST, SECOND)}
    assert checkpoint.files == ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert checkpoint.notes == ()
    assert checkpoint.config == json.loads((tiny_glm / "config.json").read_text())


def test_a_file_that_became_shorter_is_an_error_not_a_crash(tiny_glm: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_glm, tmp_path / "source"))
    checkpoint = open_checkpoint(folder)
    before = read_tensor(checkpoint, "lm_head.weight")
    header = checkpoint.tensors["lm_head.weight"]
    with (folder / header.shard).open("r+b") as file:
        file.truncate(header.end - 1)
    with pytest.raises(CheckpointError, match=r"safetensors: truncated: ends inside lm_head\.weight; download it again"):
        read_tensor(checkpoint, "lm_head.weight")
    (folder / header.shard).unlink()
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be read: No such file or directory"):
        read_tensor(checkpoint, "lm_head.weight")
    assert before.nbytes == header.num_bytes


def test_identity_follows_headers_not_data(tmp_path: Path) -> None:
    first = open_checkpoint(make_tiny_glm4_moe(tmp_path / "a", seed=0))
    other_data = open_checkpoint(make_tiny_glm4_moe(tmp_path / "b", seed=1))
    other_cut = open_checkpoint(make_tiny_glm4_moe(tmp_path / "c", seed=0, shards=3))
    assert first.sha256 == other_data.sha256
    assert first.sha256 != other_cut.sha256


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_glm4_moe(tmp_path, shards=1))
    assert list(checkpoint.shards) == ["model.safetensors"]
    assert len(checkpoint.tensors) == 107


def test_a_file_that_the_index_does_not_name_is_taken_in_and_noted(tmp_path: Path) -> None:
    """GLM-4.7 keeps its MTP block in mtp.safetensors."""
    whole = open_checkpoint(make_tiny_glm4_moe(tmp_path / "whole", mtp_file=True))
    folder = make_tiny_glm4_moe(tmp_path / "unlisted", mtp_file=True)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != "mtp.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    write_hollow_shard(folder / "copy.safetensors", [("model.norm.weight", "BF16", (256,))])
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors == whole.tensors
    assert list(checkpoint.shards) == [FIRST, SECOND, "mtp.safetensors"]
    assert checkpoint.notes == (
        f"copy.safetensors is not in {INDEX_NAME} and holds nothing new: left out",
        f"mtp.safetensors is not in {INDEX_NAME}: its 34 tensors are taken in",
    )


# ------------------------------------------------------------------------------------------------ what a user can do wrong
def _edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX_NAME).read_text())
        change(index["weight_map"])
        (folder / INDEX_NAME).write_text(json.dumps(index))

    return edit


def _edit_config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return edit


def _only_bin(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"x")
    (folder / "pytorch_model-00002-of-00002.bin").write_bytes(b"x")


def _nothing(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def _truncate(folder: Path) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-1000])


def _fp8_without_a_word(folder: Path) -> None:
    _nothing(folder)
    write_hollow_shard(folder / "model.safetensors", [("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (2, 2))])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder),
         "{folder}: no such folder; give a folder with config.json and *.safetensors, or a hub id"),
        (lambda folder: (shutil.rmtree(folder), folder.write_text("")),
         "{folder}: is a file; give the checkpoint's folder (with config.json and *.safetensors)"),
        (lambda folder: (folder / "config.json").unlink(),
         "{folder}: has no config.json; a checkpoint folder holds config.json and *.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"),
         "{folder}/config.json: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); "
         "download the file again"),
        (lambda folder: (folder / "config.json").write_text("[]"),
         "{folder}/config.json: holds a JSON list, an object was expected; download it again"),
        (_only_bin,
         "{folder}: no *.safetensors, only pytorch_model-00001-of-00002.bin and 1 more; convert it first (transformers: "
         "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)), or download the safetensors release"),
        (_nothing, "{folder}: no *.safetensors; download the weights into this folder"),
        (lambda folder: (folder / INDEX_NAME).unlink(),
         "{folder}: holds model-00001-of-00002.safetensors and 1 more and no model.safetensors.index.json; only a single "
         "model.safetensors needs no index: without one vLLM reads every *.safetensors; download the index as well, or move "
         "away what is not the model's"),
        (lambda folder: (folder / SECOND).unlink(),
         "{folder}: model.safetensors.index.json names model-00002-of-00002.safetensors, not there; complete the download"),
        (_edit_index(lambda where: where.update({"model.norm.weight": FIRST})),
         "{folder}: model.safetensors.index.json puts model.norm.weight in model-00001-of-00002.safetensors, but it is in "
         "model-00002-of-00002.safetensors; download index and shards again"),
        (_edit_index(lambda where: where.update({"model.layers.9.x": FIRST})),
         "{folder}: model.safetensors.index.json puts model.layers.9.x in model-00001-of-00002.safetensors, but no shard has "
         "it; download index and shards again"),
        (_edit_index(lambda where: where.pop("model.norm.weight")),
         "{folder}: model-00002-of-00002.safetensors holds model.norm.weight, which model.safetensors.index.json does not "
         "list; vLLM loads it all the same; list it, or write the shard again without it"),
        (_edit_index(lambda where: where.update({"model.norm.weight": "../evil.safetensors"})),
         "{folder}: model.safetensors.index.json: '../evil.safetensors' is not the name of a safetensors file in the same "
         "folder"),
        (_edit_index(lambda where: where.update({"model.norm.weight": "/etc/passwd"})),
         "{folder}: model.safetensors.index.json: '/etc/passwd' is not the name of a safetensors file in the same folder"),
        (_edit_index(lambda where: where.clear()),
         "{folder}: model.safetensors.index.json: key weight_map must map tensor names to file names; download the index "
         "again"),
        (_truncate,
         "{folder}/model-00002-of-00002.safetensors: truncated: 3096104 bytes expected, 3095104 there; download it again"),
        (_edit_config(quantization_config={"quant_method": "gptq", "bits": 4}),
         "{folder}: is quantized already (config.json says quant_method 'gptq'); a BF16, FP16, FP32 or FP8 source is needed"),
        (_edit_config(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
         "{folder}: is quantized already (config.json says quant_method 'compressed-tensors', format 'pack-quantized'); a "
         "BF16, FP16, FP32 or FP8 source is needed"),
        (_edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
         "{folder}: config.json: weight_block_size must be [rows, columns], got [128]"),
        (_fp8_without_a_word,
         "{folder}: model.layers.0.mlp.up_proj.weight is FP8, but there is no weight_scale_inv, weight_scale or scale beside "
         "it; complete the download"),
    ],
)  # fmt: skip
def test_a_bad_folder_is_one_line(
    tiny_glm: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:  # fmt: skip
    folder = tmp_path / "source"
    shutil.copytree(tiny_glm, folder)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(caught.value) == message.format(folder=folder)


def test_the_release_to_take_instead_is_named(tiny_glm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "GLM-5.3"
    shutil.copytree(tiny_glm, folder)
    _edit_config(quantization_config={"quant_method": "awq"})(folder)
    with pytest.raises(CheckpointError, match=r"for this model that is zai-org/GLM-5.3-BF16"):
        open_checkpoint(folder)


def test_a_tensor_in_two_listed_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_hollow_shard(tmp_path / FIRST, [("a", "BF16", (2,)), ("b", "BF16", (2,))])
    write_hollow_shard(tmp_path / SECOND, [("b", "BF16", (2,)), ("c", "BF16", (2,))])
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND}, 12)
    with pytest.raises(CheckpointError, match=f"b is in {FIRST} and in {SECOND}"):
        open_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------------ damaged headers
def _file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def _one(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> bytes:
    return json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


TWO = {"dtype": "U8", "shape": [4]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc", "f: 3 bytes are no safetensors file; download it again"),
        (_file(b"{}", length=200_000_000),
         "f: not a safetensors file: its header would be 200000000 bytes (allowed: 2 to 100000000)"),
        (_file(b"{}", length=5000), "f: truncated inside the header (10 bytes); download it again"),
        (_file(b"not json"),
         "f: header: not JSON: Expecting value: line 1 column 1 (char 0); download the file again"),
        (_file(_one(), b"1234567"), "f: truncated: 77 bytes expected, 76 there; download it again"),
        (_file(_one(), b"123456789"), "f: longer than its header says: 77 bytes expected, 78 there; download it again"),
        (_file(_one(shape=(3,)), b"12345678"),
         "f: x F32 [3] needs 12 bytes, its header gives it 8; the file is damaged, download it again"),
        (_file(_one(dtype="F4"), b"12345678"),
         "f: x has dtype F4, known are BOOL, U8, I8, F8_E4M3, F8_E5M2, F8_E8M0, U16, I16, F16, BF16, U32, I32, F32, U64, I64, "
         "F64"),
        (_file(_one(shape=(-2,)), b"12345678"),
         "f: the header of x is damaged: {'dtype': 'F32', 'shape': [-2], 'data_offsets': [0, 8]}; download it again"),
        (_file(_one(offsets=(0,)), b"12345678"),
         "f: the header of x is damaged: {'dtype': 'F32', 'shape': [2], 'data_offsets': [0]}; download it again"),
        (_file(json.dumps({"a": {**TWO, "data_offsets": [0, 4]}, "b": {**TWO, "data_offsets": [2, 6]}}).encode(), b"123456"),
         "f: b overlaps the tensor before it; the file is damaged, download it again"),
        (_file(json.dumps({"a": {**TWO, "data_offsets": [0, 4]}, "b": {**TWO, "data_offsets": [6, 10]}}).encode(), b"1" * 10),
         "f: b leaves a gap before it; the file is damaged, download it again"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_one_line(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_header("f", "f", len(data), lambda begin, end: data[begin:end])
    assert str(caught.value) == message
