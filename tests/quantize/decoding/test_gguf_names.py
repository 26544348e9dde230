"""Names of weights in GGUF files against the tables of the package `gguf`, for every architecture that is translated."""

from __future__ import annotations

import re
from typing import Any

import gguf
import hollow
import hollow_moe
import pytest

from assay_quantize.decoding.gguf_files import CHANGED, RENAMED_ONLY, Names

MODELS: dict[str, str] = {
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3-30b-a3b", "glm4moe": "glm-4.5-air", "minimax-m2": "minimax-m2",
    "ernie4_5-moe": "ernie-4.5-21b", "deepseek2": "deepseek-v3", "glm-dsa": "glm-5", "dots1": "dots1",
}  # fmt: skip
"""`general.architecture` -> a model of it, in `hollow.py` or `hollow_moe.py`."""
UNKNOWN_TO_GGUF = {
    "deepseek2": r"model\.layers\.2\.(embed_tokens|eh_proj|shared_head\.head)\.weight",
    "ernie4_5-moe": r"model\.mtp_.*",
}
"""Architecture -> weights, all of the MTP block, for which `gguf` 0.19 has no name: a converter of its time leaves them out."""


def weights_of(architecture: str) -> tuple[dict[str, Any], list[str]]:
    """Config, and the names of the weights of the model, cut to few layers and experts."""
    model = MODELS[architecture]
    if model in hollow_moe.MODELS:
        config = hollow_moe.cut(model, experts=2)
        shapes = dict(hollow_moe.MODELS[model].shapes(config))
    else:
        base, shapes_of = hollow.MODELS[model]
        changes = {"num_hidden_layers": 2, hollow._experts_key(base): 2}
        config = hollow.changed(base, **changes, **({"first_k_dense_replace": 1} if "first_k_dense_replace" in base else {}))
        shapes = dict(hollow.one_by_one(shapes_of(config)))
    return config, [name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")]


def written_name(names: gguf.TensorNameMap, name: str) -> tuple[str, int | None] | None:
    """As llama.cpp's converter names a weight: the experts of a layer are one tensor. (name, number of the expert)"""
    stacked = re.sub(r"\.experts\.(\d+)\.", ".experts.", name)
    found = names.get_name(stacked, try_suffixes=(".weight",))
    expert = re.search(r"\.experts\.(\d+)\.", name)
    return None if found is None else (found, int(expert[1]) if expert else None)


def test_every_architecture_is_held_against_the_tables() -> None:
    assert MODELS.keys() == RENAMED_ONLY


@pytest.mark.parametrize("architecture", MODELS)
def test_names_come_back(architecture: str) -> None:
    """From the published name to the one that the converter writes, by the package's own table, and back by ours."""
    config, published = weights_of(architecture)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, 3)
    ours = Names(architecture, config, 3)
    written = {name: written_name(table, name) for name in published}
    unknown = {name for name, to in written.items() if to is None}
    assert unknown == {name for name in published if re.fullmatch(UNKNOWN_TO_GGUF.get(architecture, "-"), name)}
    back = {name: ours.of(*to) for name, to in written.items() if to is not None and not to[0].endswith(CHANGED)}
    assert back == {name: name for name in back}
