"""Our strict check of weights against the classes that vLLM has for GPUs: it takes whole checkpoints, and nothing less.

The classes are vLLM's own, on the meta device (`vllm_on_meta.py`), the loader is ours, the files are tiny.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import hollow
import pytest
import torch
from quantized_checkpoints import quantize_checkpoint
from tiny_checkpoints import make_tiny_glm4_moe, read_shards, write_shards, write_tokenizer

from assay_evaluate.serving.server import find_interpreter

pytestmark = pytest.mark.slow

GLM5: dict[str, Any] = {
    **hollow.GLM5_CONFIG, "num_hidden_layers": 4, "first_k_dense_replace": 1, "hidden_size": 256, "intermediate_size": 256,
    "moe_intermediate_size": 128, "vocab_size": 512, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 128, "index_n_heads": 4, "index_topk": 128, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
"""GLM-5 in small: one dense layer, three with experts, and layer 4 is the MTP block."""
HEAD = "model.layers.4.shared_head.head.weight"
CUTS = ("model.layers.1.input_layernorm.weight", "model.layers.3.mlp.experts.5.up_proj.weight")
"""First tensors of the second and third shard: the third holds what the MTP block needs, and a part of layer 3."""

EXPERTS = r"model\.layers\.{layers}\.mlp\.experts\.\d+\.(gate|up|down)_proj"
NVFP4A16 = {EXPERTS.format(layers="[123]"): "NVFP4A16"}
NVFP4 = {EXPERTS.format(layers="[123]"): "NVFP4"}
MIXED = {EXPERTS.format(layers="1"): "NVFP4A16", EXPERTS.format(layers="[23]"): "NVFP4"}
LAYER_2 = "model.layers.2.mlp.experts.routed_experts"
"""vLLM's name for the experts of layer 2."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Case -> what our loader says against it; None: loaded. One process for all cases."""
    folder = tmp_path_factory.mktemp("strict")
    cases = [*glm5_cases(folder), *nvfp4_cases(folder)]
    (folder / "cases.json").write_text(json.dumps(cases))
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    command = [
        str(interpreter),
        str(Path(__file__).resolve().parents[2] / "support" / "quantization" / "vllm_on_meta.py"),
        str(folder / "cases.json"),
    ]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def not_initialized(message: str | None) -> set[str]:
    """The parameters that vLLM's own check names."""
    assert message is not None, "it was loaded"
    start, _, names = message.partition(": ")
    assert start == "Following weights were not initialized from checkpoint", message
    return set(ast.literal_eval(names))


# ------------------------------------------------------------------------------------------------ GLM-5 and its draft
def glm5_cases(folder: Path) -> Iterable[tuple[str, str, str]]:
    def glm5(name: str, *without: str, head: bool = True, cuts: tuple[str, ...] = ()) -> str:
        return str(write_glm5(folder / name, without, head=head, cuts=cuts))

    headless, headed = glm5("no-head", head=False), glm5("head")
    cut = glm5("cut", cuts=CUTS)
    yield "no head stored", headless, "dsa draft"
    yield "no head stored, target", headless, "dsa target"
    yield "head stored", headed, "dsa draft"
    yield "head stored, not loaded", headed, "dsa draft, head not loaded"
    yield "no head stored, none shared", headless, "dsa draft, head not shared"
    yield "no norm stored", glm5("no-norm", "model.layers.4.shared_head.norm.weight", head=False), "dsa draft"
    yield "cut", cut, "dsa draft"
    yield "cut, target", cut, "dsa target"
    target_expert = glm5("no-expert", "model.layers.3.mlp.experts.6.up_proj.weight", cuts=CUTS)
    yield "expert of layer 3 missing", target_expert, "dsa draft"
    yield "expert of layer 3 missing, target", target_expert, "dsa target"
    draft_expert = glm5("no-draft-expert", "model.layers.4.mlp.experts.2.down_proj.weight", cuts=CUTS)
    yield "expert of the draft missing", draft_expert, "dsa draft"
    yield "module cut, emulated", str(write_glm5_w4a16(Path(headed), folder / "w4a16")), "dsa draft, emulated"


def write_glm5(folder: Path, without: tuple[str, ...], *, head: bool, cuts: tuple[str, ...]) -> Path:
    """GLM5 without some tensors; `cuts` are the first tensors of all shards but the first."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GLM5))
    shapes = dict(hollow.glm5_shapes(GLM5, {0, 1, 2, 3})) | ({HEAD: (512, 256)} if head else {})
    shards = cut_at(cuts, list(shapes))
    for file, names in shards.items():
        tensors = [(name, hollow.dtype_of(name), shapes[name]) for name in names if name not in without]
        hollow.write_hollow_shard(folder / file, tensors)
    hollow.write_index(folder, {name: file for file, names in shards.items() for name in names if name not in without}, 0)
    return folder


def write_glm5_w4a16(source: Path, folder: Path) -> Path:
    """`source` with W4A16 experts; a shard ends between the weight and the scales of a matrix in layer 3."""
    write_tokenizer(source, GLM5["vocab_size"])
    (source / "generation_config.json").write_text("{}")
    quantize_checkpoint(source, folder, {EXPERTS.format(layers="[1-4]"): "W4A16"})
    ((whole, tensors),) = read_shards(folder).items()
    (folder / whole).unlink()
    cuts = (CUTS[0], CUTS[1].replace("weight", "weight_scale"))
    files = cut_at(cuts, sorted(tensors))
    write_shards(folder, {file: {name: tensors[name] for name in names} for file, names in files.items()})
    return folder


def cut_at(cuts: tuple[str, ...], names: list[str]) -> dict[str, list[str]]:
    """File name -> names of its tensors: a file begins with each of `cuts`."""
    places = [0, *map(names.index, cuts), len(names)]
    return {
        f"model-{i + 1:05d}-of-{len(places) - 1:05d}.safetensors": names[first:last]
        for i, (first, last) in enumerate(pairwise(places))
    }


@pytest.mark.serve
def test_a_draft_head_that_no_release_stores_may_be_missing(said: dict[str, str | None]) -> None:
    """GLM-5: vLLM registers a head for the draft, loads, and puts the target's in its place."""
    assert said["no head stored"] is None
    assert said["no head stored, target"] is None
    assert said["head stored"] is None


@pytest.mark.serve
def test_a_draft_head_that_is_not_shared_or_was_stored_may_not(said: dict[str, str | None]) -> None:
    assert not_initialized(said["head stored, not loaded"]) == {HEAD}
    assert not_initialized(said["no head stored, none shared"]) == {HEAD}
    assert not_initialized(said["no norm stored"]) == {"model.layers.4.shared_head.norm.weight"}


@pytest.mark.serve
def test_a_draft_answers_for_its_own_layers_only(said: dict[str, str | None]) -> None:
    """vLLM hands a draft whole shards: those with a tensor it wants, and with it a part of a layer of the target."""
    assert said["cut"] is None
    assert said["cut, target"] is None
    assert said["module cut, emulated"] is None
    assert said["expert of layer 3 missing"] is None
    incomplete = "experts are incomplete in the checkpoint: model.layers.{}.weight missing"
    assert said["expert of layer 3 missing, target"] == incomplete.format("3.mlp.experts.6.up_proj")
    assert said["expert of the draft missing"] == incomplete.format("4.mlp.experts.2.down_proj")


# ------------------------------------------------------------------------------------------------ NVFP4 experts
def nvfp4_cases(folder: Path) -> Iterable[tuple[str, str, str]]:
    source = make_tiny_glm4_moe(folder / "glm4")

    def quantized(name: str, presets: dict[str, str]) -> Path:
        quantize_checkpoint(source, folder / name, presets)
        return folder / name

    def without(checkpoint: Path, name: str, pattern: str) -> str:
        return str(copy_without(checkpoint, folder / name, pattern))

    a16, w4a4, mixed = quantized("nvfp4a16", NVFP4A16), quantized("nvfp4", NVFP4), quantized("mixed", MIXED)
    scales = r"model\.layers\.2\.mlp\.experts\.{}\..*input_global_scale"
    yield "nvfp4a16", str(a16), "target"
    yield "nvfp4a16, draft", str(a16), "draft"
    weight_scales = without(a16, "a16-no-scales", r"model\.layers\.2\.mlp\.experts\.\d\.down_proj\.weight_global_scale")
    yield "nvfp4a16, weight scales missing", weight_scales, "target"
    yield "nvfp4a16, expert missing", without(a16, "a16-no-expert", r"model\.layers\.2\.mlp\.experts\.3\..*"), "target"
    yield "nvfp4", str(w4a4), "target"
    yield "nvfp4, input scales missing", without(w4a4, "no-scales", scales.format(r"\d")), "target"
    yield "nvfp4, input scale of one missing", without(w4a4, "no-scale", scales.format(r"1\.up_proj")), "target"
    yield "mixed", str(mixed), "target"
    yield "mixed, input scales missing", without(mixed, "mixed-no-scales", scales.format(r"\d")), "target"


def copy_without(source: Path, folder: Path, pattern: str) -> Path:
    """`source` without the tensors whose names match."""
    shutil.copytree(source, folder)
    files = read_shards(source)
    kept: dict[str, dict[str, torch.Tensor]] = {
        file: {name: tensor for name, tensor in tensors.items() if not re.fullmatch(pattern, name)}
        for file, tensors in files.items()
    }
    assert sum(map(len, kept.values())) < sum(map(len, files.values()))
    write_shards(folder, kept)
    return folder


@pytest.mark.serve
def test_weight_only_nvfp4_experts_need_no_input_scales(said: dict[str, str | None]) -> None:
    assert said["nvfp4a16"] is None
    assert said["nvfp4a16, draft"] is None
    assert not_initialized(said["nvfp4a16, weight scales missing"]) == {f"{LAYER_2}.w2_weight_global_scale"}
    incomplete = "experts are incomplete in the checkpoint: model.layers.2.mlp.experts.3.down_proj."
    assert str(said["nvfp4a16, expert missing"]).startswith(incomplete)


@pytest.mark.serve
def test_nvfp4_experts_with_quantized_activations_need_them(said: dict[str, str | None]) -> None:
    """Also beside layers that are weight-only."""
    assert said["nvfp4"] is None
    assert said["mixed"] is None
    missing = {f"{LAYER_2}.w13_input_global_scale", f"{LAYER_2}.w2_input_global_scale"}
    assert not_initialized(said["nvfp4, input scales missing"]) == missing
    assert not_initialized(said["mixed, input scales missing"]) == missing
    assert said["nvfp4, input scale of one missing"] == (
        "experts are incomplete in the checkpoint: model.layers.2.mlp.experts.1.up_proj.input_global_scale missing"
    )
