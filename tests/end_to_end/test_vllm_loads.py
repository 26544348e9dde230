"""What vLLM itself makes of our folders: it refuses every unfinished one, and reads FP8 weights that were carried over."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
from killed_runs import killed_at
from tiny_checkpoints import make_tiny_glm4_moe, read_shards, store_as_fp8
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.manifest import MANIFEST
from assay.records.plan import Plan
from assay.safetensors_index import INDEX_NAME
from assay_evaluate.serving.server import Server, ServerSpec, find_interpreter, serve
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.file_names import CONFIG
from assay_quantize.engine.quantize import quantize
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify.verify import verify

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
QUIET = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def vllm_python() -> str:
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    return str(interpreter)


def run_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **QUIET}
    return subprocess.run(
        [vllm_python(), *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


# ------------------------------------------------------------------------------------------------ unfinished
MOMENTS = {
    "in the first shard": ("tensor", 20),
    "in the second shard": ("tensor", 60),
    "all shards, before the tokenizer": ("rename", 3),
    "before the index": ("rename", 6),
    "index, but no config.json": ("rename", 7),
    "before the manifest": ("rename", 8),
}
"""See `killed_at`: two shards, three copied files, index, config.json, manifest."""


@dataclass(frozen=True)
class Answers:
    """Of vLLM's own functions, asked in one process: folders as `vllm_accepts.py` says, by their names here."""

    folders: dict[str, Path]
    said: dict[str, str | None]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("vllm")
    source = make_tiny_glm4_moe(folder / "source", num_layers=2, num_experts=2)
    (source / "params.json").write_text('{"dim": 256}')  # vLLM's other name for a config; it must not get there
    plan = plan_of(source, load_recipe(PrecisionRecipe, "w4a16"))
    folders = {**killed_at(MOMENTS, plan, source, folder), "whole": folder / "whole"}
    quantize(plan, source, folder / "whole")
    script = str(Path(__file__).resolve().parents[1] / "support" / "serving" / "vllm_accepts.py")
    done = run_vllm(script, *map(str, folders.values()))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return Answers(folders, {name: said[str(path)] for name, path in folders.items()})


def plan_of(source: Path, recipe: PrecisionRecipe) -> Plan:
    return make_plan(open_checkpoint(source), recipe, model="tiny", family=None)


@pytest.mark.serve
def test_vllm_refuses_every_unfinished_folder(answers: Answers) -> None:
    """Before the manifest, all that a loader reads is in place, and is what the finished folder holds: that one may load."""
    folders, said = answers.folders, answers.said
    assert said["whole"] is None, "vLLM refuses the finished one as well: the others prove nothing"
    for moment in MOMENTS.keys() - {"before the manifest"}:
        assert "Invalid repository ID or local directory" in str(said[moment]), f"{moment}: vLLM would load it"
    assert [(folders["index, but no config.json"] / name).exists() for name in (INDEX_NAME, CONFIG)] == [True, False]
    almost = folders["before the manifest"]
    assert [(almost / name).exists() for name in (CONFIG, MANIFEST)] == [True, False]
    assert said["before the manifest"] is None and loadable_files(almost) == loadable_files(folders["whole"])


@pytest.mark.serve
def test_a_real_start_on_an_unfinished_folder_fails(answers: Answers) -> None:
    folder = answers.folders["index, but no config.json"]
    done = run_vllm("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    assert done.returncode != 0
    assert "ensure the presence of a 'config.json'" in done.stderr


def loadable_files(folder: Path) -> dict[str, str]:
    """What a loader can find: name -> SHA-256 of every visible file but our own two."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if not path.name.startswith((".", "assay_"))
    }


# ------------------------------------------------------------------------------------------------ carried over
TEXTS = [
    "A farmer has 12 apples and buys 7 more. How many apples are there now? Think step by step, then answer.",
    "The secret number of the blue house is 4821. What is the secret number of the blue house?",
    "Sort these numbers from small to large: 14, 3, 27, 9, 21. Then add the first two.",
]


@pytest.mark.serve
def test_fp8_weights_that_were_carried_over_are_served(tmp_path: Path) -> None:
    """The trained model as an FP8-block release, its weights carried over bit for bit and its MTP block made BF16, against
    the BF16 original in transformers: as far off as FP8 weights are, and the MTP block drafts."""
    release = store_as_fp8(TRAINED, tmp_path / "release")
    plan = plan_of(release, load_recipe(PrecisionRecipe, "fp8"))
    made = tmp_path / "made"
    quantize(plan, release, made)
    assert verify(made, source=release).damages == ()
    before, after = (stored(folder) for folder in (release, made))
    carried = [tensor.module for tensor in plan.tensors if tensor.scheme is not None]
    assert {tensor.action for tensor in plan.tensors if tensor.scheme is not None} == {"keep"}
    for module in carried:
        assert torch.equal(after[f"{module}.weight"].view(torch.uint8), before[f"{module}.weight"].view(torch.uint8))
        assert torch.equal(after[f"{module}.weight_scale"], before[f"{module}.weight_scale_inv"])
    mtp = {tensor.dtype for name, tensor in after.items() if name.startswith("model.layers.4.") and "router" not in name}
    assert torch.float8_e4m3fn not in mtp and torch.bfloat16 in mtp

    prompts = [AutoTokenizer.from_pretrained(TRAINED)(text)["input_ids"] for text in TEXTS]
    original = logprobs_of(TRAINED, prompts, {})
    rounded = logprobs_of(TRAINED, prompts, {m: dense(before, m) for m in carried})
    profile = load_recipe(ProfileRecipe, "cpu-emulated")
    spec = ServerSpec(made, profile, Serving(num_speculative_tokens=1), speculate=True, log_path=tmp_path / "server.log")
    with serve(spec) as server:
        replies = [ask(server, prompt) for prompt in prompts]
        metrics = server.metrics()
    served = [mean_distance(reply, reference) for reply, reference in zip(replies, original, strict=True)]
    weights = [mean_distance(reply, reference) for reply, reference in zip(replies, rounded, strict=True)]
    fp8 = [mean_distance(as_reply(own), reference) for own, reference in zip(rounded, original, strict=True)]
    assert 0 < sum(fp8) / 3 < 0.1, "FP8 blocks are no small change here: the comparison would prove nothing"
    assert sum(served) < 2.5 * sum(fp8), f"{served} from the original, FP8 weights alone are {fp8} away"
    assert sum(weights) < 2 * sum(fp8), "with its own weights, only the rounding of activations is left"
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
    assert drafted > 20 and accepted / drafted > 0.3, f"{accepted} of {drafted} drafts were accepted"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for tensors in read_shards(folder).values() for name, tensor in tensors.items()}


def dense(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """float(w) * scale of a weight in blocks of 128 x 128, by PyTorch."""
    weight_OI = tensors[f"{module}.weight"].float()
    scale = tensors[f"{module}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight_OI * scale[: weight_OI.shape[0], : weight_OI.shape[1]]


def logprobs_of(folder: Path, prompts: list[list[int]], replaced: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Per prompt, log-probabilities [tokens, vocabulary] in FP32 by transformers; `replaced`: module -> another weight."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for module, weight_OI in replaced.items():
            prefix, dot, rest = module.partition(".mlp.experts.")
            if not dot:
                parameters[f"{module}.weight"].copy_(weight_OI)
                continue
            expert, projection = rest.split(".")
            fused = parameters[f"{prefix}.mlp.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"]
            half = fused.shape[1] // 2
            rows = {"down_proj": slice(None), "gate_proj": slice(half), "up_proj": slice(half, None)}[projection]
            fused[int(expert), rows].copy_(weight_OI)
        return [F.log_softmax(model(torch.tensor([prompt])).logits[0], -1) for prompt in prompts]


def ask(server: Server, prompt: list[int]) -> list[dict[str, float]]:
    """Log-probabilities of the twenty likeliest tokens behind every token of the prompt; asks for a reply as well."""
    request: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt,
        "prompt_logprobs": 20,
        "max_tokens": 48,
        "temperature": 0,
    }
    reply = httpx.post(
        f"{server.base_url}/v1/completions", json=request | {"ignore_eos": True}, headers=server.headers, timeout=300
    )
    reply.raise_for_status()
    positions = reply.json()["choices"][0]["prompt_logprobs"][1:]
    return [{token: entry["logprob"] for token, entry in position.items()} for position in positions]


def as_reply(logprobs_TV: torch.Tensor) -> list[dict[str, float]]:
    """The same of a model in hand."""
    values, tokens = logprobs_TV[:-1].topk(20)
    return [
        {str(token): value for token, value in zip(*pair, strict=True)}
        for pair in zip(tokens.tolist(), values.tolist(), strict=True)
    ]


def mean_distance(reply: list[dict[str, float]], reference_TV: torch.Tensor) -> float:
    """Mean of p * |log p - log q| over positions and the tokens of the reply, summed over tokens."""
    sums = [
        sum(abs(value - float(reference_TV[at, int(token)])) * float(torch.tensor(value).exp()) for token, value in top.items())
        for at, top in enumerate(reply)
    ]
    return sum(sums) / len(sums)
