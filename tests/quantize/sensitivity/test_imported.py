"""Scores of AutoRound and ModelOpt, in the forms that their sources write, summed to our parts; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay.errors import QuantizeError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.sensitivity.imported import MODELOPT_SCHEMES, read_scores
from assay_quantize.sensitivity.parts import Key, Layout, find_parts

EXPERTS = "model.layers.1.mlp.experts"
W4A16: dict[str, Any] = {
    "bits": 4, "group_size": 128, "sym": True, "data_type": "int", "act_bits": 16, "act_group_size": None, "act_sym": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def layout(tiny_glm: Path) -> Layout:
    return find_parts(open_checkpoint(tiny_glm), ["w4a16", "nvfp4", "fp8_block"], model="tiny")


def written(folder: Path, data: Any, name: str = "scores.json") -> Path:
    (folder / name).write_text(json.dumps(data))
    return folder / name


def autoround(scheme: Any, scores: dict[str, list[float]]) -> dict[str, Any]:
    """As `_save_autoscheme_scores` writes it."""
    return {
        "version": 1, "score_granularity": "per_op", "cache_key": "0" * 16, "cache_config": {}, "scheme_index": 0,
        "scheme": scheme, "created_at": "2026-11-01T00:00:00", "layer_scores": scores,
        "total_loss_for_scheme": sum(score[-1] for score in scores.values()), "total_params": 1,
    }  # fmt: skip


def test_autoround(tmp_path: Path, layout: Layout) -> None:
    scores = {
        f"{EXPERTS}.0.gate_proj": [135168, 0.5], f"{EXPERTS}.3.down_proj": [135168, 0.25],
        "model.layers.0.self_attn.q_proj": [270336, 2.0], "lm_head": [1, 9.0],
    }  # fmt: skip
    imported = read_scores(written(tmp_path, autoround(W4A16, scores)), layout)
    assert imported.tool == "autoround"
    assert imported.scores == {(Key(1, "routed_expert"), "w4a16"): 0.75, (Key(0, "attention"), "w4a16"): 2.0}
    assert imported.notes == ("1 modules are no part of this model, lm_head among them",)
    block = {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp", "act_bits": 8}
    again = read_scores(written(tmp_path, autoround(block, scores)), layout)
    assert again.scores == {(Key(1, "routed_expert"), "fp8_block"): 0.75, (Key(0, "attention"), "fp8_block"): 2.0}
    assert read_scores(written(tmp_path, autoround("NVFP4", scores)), layout).scores == {
        (Key(1, "routed_expert"), "nvfp4"): 0.75, (Key(0, "attention"), "nvfp4"): 2.0,
    }  # fmt: skip


def test_modelopt(tmp_path: Path, layout: Layout) -> None:
    """Groups of modules, and a module that holds all experts of a layer."""
    formats = ["NVFP4_DEFAULT_CFG(effective-bits: 4.5)", "FP8_DEFAULT_CFG(effective-bits: 8.0)", "NONE(effective-bits: 16.0)"]
    data = {
        "model.layers.0.self_attn.q_proj.quant_recipe": {
            "formats": formats, "scores": [3.0, 1.0, 0.0], "costs": [1, 2, 4],
            "module_names": [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"],
        },
        "model.layers.0.self_attn.o_proj.quant_recipe": {
            "formats": formats, "scores": [0.5, 0.25, 0.0], "module_names": ["model.layers.0.self_attn.o_proj"],
        },
        "model.layers.1.mlp.experts.quant_recipe": {"formats": formats, "scores": [7.0, 1.0, 0.0], "module_names": [EXPERTS]},
        "vision.quant_recipe": {"formats": formats, "scores": [1.0, 1.0, 0.0], "module_names": ["vision.blocks.0"]},
    }  # fmt: skip
    imported = read_scores(written(tmp_path, data), layout)
    assert imported.tool == "modelopt"
    assert imported.scores == {(Key(0, "attention"), "nvfp4"): 3.5, (Key(1, "routed_expert"), "nvfp4"): 7.0}
    assert imported.notes == (
        "1 groups are no part of this model, vision.quant_recipe among them",
        "formats without a scheme of ours: FP8_DEFAULT_CFG",
    )


def test_formats_are_schemes_of_ours() -> None:
    from typing import get_args

    from assay.recipes.precision import SchemeName

    assert set(MODELOPT_SCHEMES.values()) <= set(get_args(SchemeName))


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("state.pth", {}, "is a pickle, which could run code and is not read; where it was made, write its scores as JSON"),
        ("scores.json", {"a": 1}, "is neither a score file of AutoRound's AutoScheme"),
        ("scores.json", autoround(W4A16 | {"bits": 3}, {"x": [1, 1.0]}), "is none of ours"),
        ("scores.json", autoround(W4A16, {"model.layers.9.mlp.up_proj": [1, 1.0]}), "holds no score of a part"),
        ("scores.json", autoround(W4A16, {f"{EXPERTS}.0.up_proj": [1.0]}), r"up_proj: not \[bits, loss\]"),
        (
            "scores.json",
            {"g": {"formats": ["NONE"], "scores": [1.0, 2.0], "module_names": [EXPERTS]}},
            "g: 1 formats and 2 scores",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, layout: Layout, name: str, data: Any, problem: str) -> None:
    with pytest.raises(QuantizeError, match=problem):
        read_scores(written(tmp_path, data, name), layout)
