"""Our description of the families against vLLM's own: which folders it drafts with, what it fuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import hollow
import pytest
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.family_names import family_names, forms, names_of
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.runtime_names import packed_modules
from assay_evaluate.serving.server import find_interpreter
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan

pytestmark = pytest.mark.serve

DRAFT_TOKENS = 2
WRAPS = {"KimiK25ForConditionalGeneration": "DeepseekV2ForCausalLM"}
"""Class of vLLM's that has no mapping -> the one that it builds its language model of (kimi_k25.py)."""
WITHOUT_MAPPING = {
    "DeepseekV41ForCausalLM", "KimiK3ForConditionalGeneration", "Step3p7ForConditionalGeneration", "Dots1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
}  # fmt: skip
"""Nor has the language model of these one by which vLLM would look; of the last two vLLM has no class."""
ARCHITECTURES = {
    WRAPS.get(name, name): family
    for family in family_names()
    for name in names_of(family).architectures
    if name not in WITHOUT_MAPPING
}
GATE_UP, QKV = {"gate_up_proj": ("gate_proj", "up_proj")}, {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
DIFFERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # the family fuses the indexer's projections with these three, the mapping does not
    "MiniMaxM3SparseForConditionalGeneration": ({"qkv_proj": (*QKV["qkv_proj"], "index_q_proj", "index_k_proj")}, QKV),
    # vLLM names q, k and v with and without what is fused with them, and not what its class fuses of latent attention
    "BailingMoeV3ForCausalLM": ({"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}, QKV),
    # its model takes q, k and v as well, and what wraps it asks by the name of the fused module (recipes/families/mimo_v2.yaml)
    "MiMoV2ForCausalLM": (QKV, {}),
    # what its model fuses of latent attention stays in 16 bits
    "BailingMoeV2_5ForCausalLM": ({"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}, {}),
    # a dense MLP's names, which these models do not have
    "OlmoeForCausalLM": (GATE_UP, {}),
    "Qwen3VLMoeForConditionalGeneration": (GATE_UP, {}),
    # q, k and v are fused with what chooses keys, under another name, and stay in 16 bits (recipes/families/qwen4_exp.yaml)
    "Qwen4ExpForConditionalGeneration": (QKV, {"kv_proj": ("key_proj", "value_proj")}),
}
"""What the family fuses and vLLM's mapping does not say, and the other way round. The replay loads all of them."""


VLLM_SAYS = Path(__file__).resolve().parents[2] / "support" / "serving" / "vllm_says.py"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of vLLM's own functions, asked in one process."""
    folder = tmp_path_factory.mktemp("vllm")
    questions = {"tokens": DRAFT_TOKENS, "drafts": [str(path) for path in draft_folders(folder)], "packed": list(ARCHITECTURES)}
    (folder / "questions.json").write_text(json.dumps(questions))
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    quiet = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [str(interpreter), str(VLLM_SAYS), str(folder / "questions.json")],
        env={**os.environ, **quiet}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def draft_folders(folder: Path) -> list[Path]:
    """Sources, and the config.json of their candidates with the MTP block kept and dropped."""
    made = []
    hollow.hollow_model(folder / "qwen3-next", "qwen3-next-80b-a3b")
    make_tiny_glm4_moe(folder / "glm4")
    for model in ("qwen3-next", "glm4"):
        source = folder / model
        made.append(source)
        for name in ("w4a16", "w4a16-nomtp"):
            plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, name), model="m", family=None)
            candidate = folder / f"{model}-{name}"
            candidate.mkdir()
            (candidate / "config.json").write_text(json.dumps(config_json(plan)))
            made.append(candidate)
    return made


def test_vllm_drafts_with_a_kept_block_and_refuses_a_dropped_one(answers: dict[str, Any]) -> None:
    """Qwen3-Next's config says nothing of its block: vLLM takes one layer. 0 layers it refuses, in its own way."""
    said = {Path(folder).name: answer for folder, answer in answers["drafts"].items()}
    refused = "ZeroDivisionError: integer modulo by zero"
    assert said == {
        "qwen3-next": ["Qwen3NextMTP", 1],
        "qwen3-next-w4a16": ["Qwen3NextMTP", 1],
        "qwen3-next-w4a16-nomtp": refused,
        "glm4": ["Glm4MoeMTPModel", 1],
        "glm4-w4a16": ["Glm4MoeMTPModel", 1],
        "glm4-w4a16-nomtp": refused,
    }


# ------------------------------------------------------------------------------------------------ names
def test_what_vllm_fuses(answers: dict[str, Any]) -> None:
    """Its mapping may name modules that a family does not have (DeepSeek-V2 without MLA), fuses of one member, and what gets no
    quantization config all the same (the compressors of DeepSeek-V4)."""
    for architecture, theirs in answers["packed"].items():
        family = ARCHITECTURES[architecture]
        members = [(name.split(".")[-2], form.kind) for name, form in forms(family).items() if "." in name]
        known, bare = {part for part, _ in members}, {part for part, kind in members if kind == "bare"}
        real = {
            fused: tuple(parts)
            for fused, parts in theirs.items()
            if len(parts) > 1 and known.issuperset(parts) and not bare.issuperset(parts)
        }
        of_family = dict(packed_modules(family))
        only_family = {fused: parts for fused, parts in of_family.items() if real.get(fused) != parts}
        only_vllm = {fused: parts for fused, parts in real.items() if of_family.get(fused) != parts}
        assert (only_family, only_vllm) == DIFFERS.get(architecture, ({}, {})), architecture
    assert answers["packed"].keys() == ARCHITECTURES.keys()
