"""Every shipped precision of the trained tiny-glm is loaded by vLLM and emulated. Its log-probabilities differ from the
source's by about as much as its format implies, activations are quantized as its config declares, and its MTP head drafts.

One process serves all checkpoints, one after the other, each with the arguments that a server would be started with.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoTokenizer

from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving.server import find_interpreter
from assay_evaluate.serving.vllm_command import VllmCommand, vllm_command
from assay_evaluate.tasks.items import LANGUAGES, arithmetic_item, writing_item
from assay_quantize.calibration.calibrate import calibrate
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.importance import load_importance
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan

pytestmark = pytest.mark.serve

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
PRECISIONS = [name for name in recipe_names("precisions") if load_recipe(PrecisionRecipe, name).calibration == "none"]
"""Calibrated ones store the same formats."""
SCHEMES = {name: " + ".join(load_recipe(PrecisionRecipe, name).schemes) for name in PRECISIONS}
DISTANCE = {
    "w8a8": (0.001, 0.006), "mxfp8": (0.001, 0.006), "fp8_block": (0.001, 0.006), "fp8_channel": (0.001, 0.007),
    "w4a16_g64": (0.004, 0.02), "w4a16_g32": (0.004, 0.02), "w4a16_asym": (0.004, 0.02), "nvfp4a16": (0.004, 0.02),
    "w4a16": (0.004, 0.025), "w4a16_channel": (0.005, 0.025), "mxfp4": (0.01, 0.035), "nvfp4": (0.004, 0.035),
    "fp8_block + nvfp4": (0.004, 0.035), "fp8_block + w4a16": (0.004, 0.025), "fp8_block + fp8_static": (0.001, 0.007),
}  # fmt: skip
"""Schemes of a precision -> bounds of the mean change of a token's log-probability, in nats, on prompts and on replies of
the source. Seen: 0.003 with 8 bits, 0.008 to 0.014 with INT4 and NVFP4, 0.019 with MXFP4, which rounds activations to 4 bits as
well."""
_EVERY = "19 modules"  # two linears each: four attention blocks, a dense MLP, three shared experts; three layers of experts
ACTIVATIONS = {
    **dict.fromkeys(("w4a16", "w4a16_g64", "w4a16_g32", "w4a16_channel", "w4a16_asym", "nvfp4a16"), "not quantized"),
    "fp8_channel": f"{_EVERY} float8 token dynamic", "fp8_block": f"{_EVERY} float8 group 128 dynamic", 
    "mxfp8": f"{_EVERY} float8 group 32 dynamic", "mxfp4": f"{_EVERY} float4 group 32 dynamic",
    "w8a8": f"{_EVERY} int8 token dynamic",
    "nvfp4": "11 modules float4 tensor_group 16 dynamic", "fp8_block + w4a16": "8 modules float8 group 128 dynamic",
    "fp8_block + nvfp4": "11 modules float4 tensor_group 16 dynamic, 8 modules float8 group 128 dynamic",
    "fp8_block + fp8_static": "3 modules float8 group 128 dynamic, 16 modules float8 tensor static",
}  # fmt: skip
"""Schemes of a precision -> what the plugin says of activations."""


KV_CACHE = "w4a16-kv8"
"""w4a16 with keys and values in FP8 as well."""


CPU = load_recipe(ProfileRecipe, "cpu-emulated")
PROFILE = CPU.model_copy(
    update={
        "vllm": {**CPU.vllm, "kv-cache-memory-bytes": 64 << 20},
        "environment": {name: value for name, value in CPU.environment.items() if name != "VLLM_CPU_KVCACHE_SPACE"},
    }
)
"""As shipped, but for the gigabyte of keys and values that each of two dozen engines would fill with zeros."""


def command(folder: Path) -> VllmCommand:
    """How `assay serve` would start a server on a CPU."""
    return vllm_command(folder, PROFILE, Serving(num_speculative_tokens=1), speculate=True, port=1, served_model_name="m")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What served_in_one_process.py answers, of `source` and of every precision."""
    folder, checkpoint = tmp_path_factory.mktemp("served"), open_checkpoint(TRAINED)
    commands = {"source": command(TRAINED)}
    seen = folder / "seen.safetensors"
    calibrate(TRAINED, seen, Text(seed=7), model_name="tiny-glm", num_tokens=8192, length=256, min_tokens=1)
    recipes = {name: load_recipe(PrecisionRecipe, name) for name in PRECISIONS}
    recipes[KV_CACHE] = recipes["w4a16"].model_copy(update={"name": KV_CACHE, "kv_cache": "fp8"})
    for name, recipe in recipes.items():
        plan = make_plan(checkpoint, recipe, model="tiny-glm", family=None)
        file = seen if recipe.needs_calibration else None
        if file is not None:
            plan = plan.model_copy(update={"importance_sha256": load_importance(file).sha256})
        quantize(plan, TRAINED, folder / name, importance=file)
        commands[name] = command(folder / name)
    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    items = [item for language in LANGUAGES for item in (
        writing_item("eval-served", 0, language), arithmetic_item("eval-served", 1, language, 4)
    )]  # fmt: skip
    chats = [[{"role": "user", "content": item.prompt}] for item in items]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]
    request = {"prompts": prompts, "num_tokens": 96, "servers": {name: one.arguments for name, one in commands.items()}}
    (folder / "request.json").write_text(json.dumps(request))
    script, interpreter = (
        Path(__file__).resolve().parents[1] / "support" / "quantization" / "served_in_one_process.py",
        find_interpreter(None),
    )
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    done = subprocess.run(
        [str(interpreter), str(script), str(folder / "request.json"), str(folder / "answers.jsonl")],
        env={**os.environ, **commands["source"].environment}, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {answer["name"]: answer for answer in answers}


def text_logprobs(answer: dict[str, Any]) -> list[float]:
    return [value for text in answer["logprobs"] for value in text]


def test_the_source_drafts(served: dict[str, dict[str, Any]]) -> None:
    """Otherwise the drafts of the others would prove nothing."""
    source = served["source"]
    assert len(text_logprobs(source)) > 500 and source["drafted"] > 150 and source["accepted"] > 0.9 * source["drafted"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_distance_from_the_source_is_that_of_the_format(served: dict[str, dict[str, Any]], precision: str) -> None:
    answer, scheme = served[precision], SCHEMES[precision]
    values, wanted = text_logprobs(answer), text_logprobs(served["source"])
    assert all(map(math.isfinite, values))
    low, high = DISTANCE[scheme]
    assert low < fmean(abs(x - y) for x, y in zip(values, wanted, strict=True)) < high
    cache = "; KV cache: 4 layers float8 tensor static, 4 by scales of theirs" if precision == "fp8-kv" else ""
    assert answer["said"][0].endswith(f"; activations: {ACTIVATIONS[scheme]}{cache}")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_mtp_head_is_loaded_and_drafts(served: dict[str, dict[str, Any]], precision: str) -> None:
    answer = served[precision]
    loaded = [said.split(":")[1].strip() for said in answer["said"] if said.startswith("assay-strict: ")]
    if load_recipe(PrecisionRecipe, precision).mtp == "drop":
        assert (loaded, answer["drafted"]) == (["Glm4MoeForCausalLM"], 0)
    else:
        assert loaded == ["Glm4MoeForCausalLM", "Glm4MoeMTP"]
        assert answer["drafted"] > 150 and answer["accepted"] > 0.85 * answer["drafted"]


def test_keys_and_values_in_fp8_are_emulated(served: dict[str, dict[str, Any]]) -> None:
    """Of target and draft, and beside the weights: the change is more than theirs alone, and far less than another order."""
    plain, answer = served["w4a16"], served[KV_CACHE]
    said = [line.split("; ")[-1] for line in answer["said"] if line.startswith("assay-emulate: ")]
    assert said == ["KV cache: 4 layers float8 tensor static", "KV cache: 1 layers float8 tensor static"]
    change = fmean(abs(x - y) for x, y in zip(text_logprobs(answer), text_logprobs(plain), strict=True))
    assert 0.0005 < change < 0.01
    assert answer["drafted"] > 150 and answer["accepted"] > 0.85 * answer["drafted"]


def test_calibrated_scales_change_what_is_served(served: dict[str, dict[str, Any]]) -> None:
    """Each against the same weights with dynamic, constant or absent scales: not nothing, and far less than a format."""
    for name, other in (("fp8-kv", "fp8"), ("nvfp4-calibrated", "nvfp4"), ("fp8-static", "fp8")):
        pairs = zip(text_logprobs(served[name]), text_logprobs(served[other]), strict=True)
        assert 0 < fmean(abs(x - y) for x, y in pairs) < 0.02, name
