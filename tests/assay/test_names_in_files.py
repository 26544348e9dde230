"""Names of tensors in the files of a checkpoint, where they are others than everywhere else: packed experts of gpt-oss."""

from __future__ import annotations

import json

import pytest

from assay.errors import CheckpointError
from assay.safetensors_index import header_entries, name_in_file, name_of_part, weight_map

EXPERT = "model.layers.3.mlp.experts.17"
IN_FILES = {
    f"{EXPERT}.gate_up_proj.weight_packed": f"{EXPERT}.w13_weight_packed",
    f"{EXPERT}.down_proj.weight_packed": f"{EXPERT}.w2_weight_packed",
    f"{EXPERT}.down_proj.weight_scale": f"{EXPERT}.down_proj.weight_scale",
    "model.layers.3.mlp.shared_expert.down_proj.weight_packed": "model.layers.3.mlp.shared_expert.down_proj.weight_packed",
}


@pytest.mark.parametrize(("name", "stored"), IN_FILES.items())
def test_there_and_back(name: str, stored: str) -> None:
    assert name_in_file(name, packed_as_vllm=True) == stored
    assert name_of_part(stored) == name
    assert name_in_file(name, packed_as_vllm=False) == name


def test_headers_and_an_index_are_read_by_the_names_of_parts() -> None:
    stored = f"{EXPERT}.w13_weight_packed"
    text = json.dumps({stored: {"dtype": "I32"}, "__metadata__": {}}).encode()
    file = len(text).to_bytes(8, "little") + text
    entries, begin = header_entries("f", len(file), lambda begin, end: file[begin:end])
    assert (entries, begin) == ({f"{EXPERT}.gate_up_proj.weight_packed": {"dtype": "I32"}}, len(file))
    assert weight_map("i", {"weight_map": {stored: "a.safetensors"}}) == {
        f"{EXPERT}.gate_up_proj.weight_packed": "a.safetensors"
    }


def test_both_names_of_one_tensor_are_refused() -> None:
    both = dict.fromkeys((f"{EXPERT}.w2_weight_packed", f"{EXPERT}.down_proj.weight_packed"), "a.safetensors")
    with pytest.raises(CheckpointError) as caught:
        weight_map("index", {"weight_map": both})
    assert str(caught.value) == (
        f"index: {EXPERT}.w2_weight_packed and {EXPERT}.down_proj.weight_packed are one tensor; write it again with one of them"
    )
