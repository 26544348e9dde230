"""vLLM's rules and our config.json against vLLM itself."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import PlanError
from assay.recipes.family_names import classify, family_names, forms, ignore_patterns, names_of
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.runtime_names import packed_modules
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.config_groups import config_json, quantization_config
from assay_quantize.formats.schemes import SCHEMES
from assay_quantize.formats.targets import kept_in_some_layers, targets_by_scheme
from assay_quantize.formats.vllm_rules import MixedSchemes, group_of, is_ignored, runtime_modules
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.tensor_plans import scheme_of

ROOT = Path(__file__).resolve().parents[3]
SERVE_PYTHON = ROOT / ".venv-serve" / "bin" / "python"
VLLM_SCRIPT = """
import json, sys, torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target, should_ignore_layer
from compressed_tensors.quantization import QuantizationConfig

class ColumnParallelLinear(torch.nn.Module): pass
class RoutedExperts(torch.nn.Module): pass
class ParallelLMHead(torch.nn.Module): pass
class VocabParallelEmbedding(torch.nn.Module): pass
LAYERS = {c.__name__: c() for c in (ColumnParallelLinear, RoutedExperts, ParallelLMHead, VocabParallelEmbedding)}

import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors as linears
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as experts)

def linear_class(config):
    # the class that loads it on a GPU that has everything; its constructor wants that GPU, its name does not
    found = []
    for name in [n for n in vars(linears) if n.startswith("CompressedTensorsW")]:
        setattr(linears, name, lambda *a, _name=name, **k: found.append(_name) or _name)
        getattr(linears, name).get_min_capability = lambda: 0
    config._check_scheme_supported = lambda *a, **k: True
    group = config.target_scheme_map["Linear"]
    return config._get_scheme_from_parts(group["weights"], group["input_activations"], format=config.quant_format)

def experts_refused(config):
    # only of FP8: the assertion in its constructor, before a kernel is looked for
    group = config.target_scheme_map["Linear"]
    if not config._is_fp8_w8a8(group["weights"], group["input_activations"]) or config._is_mxfp8(group["weights"]):
        return False
    experts.CompressedTensorsMoEMethod.__init__ = lambda self, moe: setattr(self, "moe", moe)
    experts.select_fp8_moe_backend = lambda **k: (None, None)
    try:
        experts.CompressedTensorsW8A8Fp8MoEMethod(group["weights"], group["input_activations"], None)
    except AssertionError:
        return True
    return False

asked = json.load(open(sys.argv[1]))
answers = {"ignored": [], "quantized": [], "configs": {}, "mixes": []}
for name, ignore, fused in asked["ignored"]:
    try:
        answers["ignored"].append(should_ignore_layer(name, ignore=ignore, fused_mapping=fused))
    except ValueError:
        answers["ignored"].append("refused")
for names, layer, ignore, targets, fused in asked["quantized"]:
    # as get_scheme_dict and get_moe_method: expert 0 by its three names, "RoutedExperts" standing for "Linear"
    targets = targets + (["RoutedExperts"] if "Linear" in targets else [])
    try:
        made = [not should_ignore_layer(n, ignore=ignore, fused_mapping=fused)
                and find_matched_target(n, LAYERS[layer], targets, fused) is not None for n in names]
        answers["quantized"].append(made[0] if len(set(made)) == 1 else "refused")
    except ValueError:
        answers["quantized"].append("refused")
for scheme, config in asked["configs"].items():
    read = CompressedTensorsConfig.from_config(json.loads(json.dumps(config)))
    parsed = QuantizationConfig.model_validate({k: v for k, v in config.items() if k not in ("version", "transform_config")})
    weights = read.target_scheme_map["Linear"]["weights"]
    answers["configs"][scheme] = {
        "ignore": read.ignore, "format": read.quant_format, "same": weights == parsed.config_groups["group_0"].weights,
        "bits": weights.num_bits, "type": str(weights.type), "group": weights.group_size, "block": weights.block_structure,
        "strategy": str(weights.strategy), "linear": linear_class(read), "experts_refused": experts_refused(read),
        "symmetric": weights.symmetric,
        "activations": parsed.config_groups["group_0"].input_activations is not None,
    }
for config, fused, modules in asked["mixes"]:
    # get_scheme_dict itself, for every module: which group's arguments it finds
    read = CompressedTensorsConfig.from_config(json.loads(json.dumps(config)))
    read.packed_modules_mapping = fused
    read._add_fused_moe_to_target_scheme_map()
    group = {t: name for name, g in config["config_groups"].items() for t in g["targets"]}
    found = []
    for names, layer in modules:
        got = [read.get_scheme_dict(LAYERS[layer], n) for n in names]
        of = [next((group[t] for t, s in read.target_scheme_map.items() if t in group and s is g), None) for g in got]
        found.append(of[0] if len(set(of)) == 1 else "refused")
    answers["mixes"].append(found)
json.dump(answers, open(sys.argv[2], "w"))
"""
FAMILY_CONFIG: dict[str, dict[str, Any]] = {"glm_moe_dsa": {"q_lora_rank": 2048}, "deepseek_v3": {"q_lora_rank": 1536}}
MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_a_proj", "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.indexer.wq_b", "self_attn.indexer.wk", "mlp.gate",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj",
    "mlp.experts.0.down_proj", "mlp.experts.1.gate_proj", "mlp.experts.1.up_proj", "mlp.experts.1.down_proj",
    "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj", "eh_proj",
    "shared_head.head", "embed_tokens", "linear_attn.in_proj_qkvz", "mlp.shared_expert_gate",
)  # fmt: skip
PATTERNS = (
    "lm_head", "re:.*lm_head$", "re:model.layers.1.", r"re:model\.layers\.1\..*", r"re:.*\.mlp\.gate$", "re:.*mlp.gate",
    r"re:.*\.q_proj$", "re:.*q_proj", r"re:.*\.(q|k|v)_proj$", r"re:.*\.self_attn\..*", "model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.qkv_proj", r"re:.*\.experts\.0\.up_proj$", r"re:.*\.experts\.\d+\.(gate|up|down)_proj$",
    r"re:.*layers\.10\..*", r"re:.*\.(q_a_proj|kv_a_proj_with_mqa)$", r"re:.*\.kv_a_proj_with_mqa$", "re:eh_proj",
    r"re:.*eh_proj$",
    r"re:.*\.gate_up_proj$", r"re:(.*\.)?mtp\..*$", r"re:.*layers\.\d+\.(eh_proj|head)$", "gate_proj", r"re:.*gate_proj$",
)  # fmt: skip
MIXES = 11
"""Seed of the random mixes."""
LAYER_CLASS = {
    "linear": "ColumnParallelLinear", "experts": "RoutedExperts", "lm_head": "ParallelLMHead",
    "embedding": "VocabParallelEmbedding",
}  # fmt: skip


def modules_of(family: str, config: dict[str, Any]) -> list[str]:
    """Modules of layers 0, 1 and 10 (an MTP layer, where those are inlined), with two experts, that hold a 2-D weight."""
    numbers = [(layer, expert) for layer in (0, 1, 10) for expert in (0, 1)]
    matrices = [form for form, what in forms(family).items() if form.endswith(".weight") and what.kind != "vector"]
    names = dict.fromkeys(form.format(layer=layer, expert=expert) for form in matrices for layer, expert in numbers)
    found = []
    for name in names:
        with contextlib.suppress(PlanError):  # outside an MTP layer
            classify(family, name, config)
            found.append(name.removesuffix(".weight"))
    return found


def mixes(rng: random.Random) -> Iterator[tuple[dict[str, Any], dict[str, list[str]], list[Any], list[str | None]]]:
    """(quantization_config, fused, vLLM's modules, the scheme of each), random recipes for every family."""
    for family in family_names():
        config = {"num_hidden_layers": 10, **FAMILY_CONFIG.get(family, {})}
        modules = modules_of(family, config)
        fused = {name: list(parts) for name, parts in packed_modules(family).items()}
        names = names_of(family)
        rename = names.runtime_namer(config)
        behind = [10, 11, 20] if names.mtp_runtime_layers else [10]  # numbers of MTP layers behind the others, in vLLM
        mtp_layers = [] if names.mtp_layers and not names.mtp_runtime_layers else behind
        for _ in range(6):
            recipe = random_mix(rng)
            tensors = [tensor_of(family, f"{module}.weight", config, recipe) for module in modules]
            patterns = ignore_patterns(family, recipe.quantize, mtp=recipe.mtp, mtp_layers=mtp_layers)
            ignore = patterns + kept_in_some_layers(tensors, rename)
            plan = SimpleNamespace(
                tensors=tensors, ignore=ignore, precision="", source="", precision_recipe={}, family=family, config=config
            )
            written = quantization_config(cast(Plan, plan))
            schemes = {tensor.module: tensor.scheme for tensor in tensors}
            groups = dict(zip(targets_by_scheme(tensors, rename), written["config_groups"], strict=True))
            runtime = [m for m in runtime_modules(family, modules, config) if m.kind in ("linear", "experts")]
            expected = [schemes[m.members[0]] for m in runtime]
            asked = [(list(m.judged_by), LAYER_CLASS[m.kind]) for m in runtime]
            yield written, fused, asked, [None if scheme is None else groups[scheme] for scheme in expected]


def random_mix(rng: random.Random) -> PrecisionRecipe:
    """Two to four schemes over the roles, in some layers others."""
    base = load_recipe(PrecisionRecipe, "w4a16").model_dump(by_alias=True)
    some = rng.sample(sorted(SCHEMES), 4)
    of_experts = [scheme for scheme in some if scheme != "fp8_static"]
    roles = {role: rng.choice(of_experts if role == "routed_expert" else some) for role in base["quantize"]}
    differ = rng.sample(sorted(roles), 2)
    layers = {"1": {role: rng.choice([*(of_experts if role == "routed_expert" else some), "bf16"]) for role in differ}}
    mtp = rng.choice(("keep", "quantize"))
    return PrecisionRecipe.model_validate({**base, "scheme": None, "quantize": roles, "layers": layers, "mtp": mtp})


def tensor_of(family: str, name: str, config: dict[str, Any], recipe: PrecisionRecipe) -> TensorPlan:
    what = classify(family, name, config)
    return TensorPlan(
        name, what.role, what.part, what.module, "keep", scheme_of(what, recipe), what.fused_group, "BF16", (128, 128), 0,
        "", "", (),
    )  # fmt: skip


@pytest.fixture(scope="module")
def vllm_answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what was asked, what vLLM said), from one process of the serving environment."""
    if not SERVE_PYTHON.is_file():
        pytest.skip(f"no serving environment at {SERVE_PYTHON}; `make setup` builds it")
    folder = tmp_path_factory.mktemp("vllm")
    rng = random.Random(5)
    names = ["lm_head", *(f"{root}.layers.{i}.{m}" for root in ("model", "mtp") for i in (1, 10) for m in MODULES)]
    names += [f"model.layers.1.{m}" for m in ("self_attn.qkv_proj", "self_attn.fused_qkv_a_proj", "mlp.gate_up_proj", "head")]
    ignored, quantized = [], []
    for family in family_names():
        fused = {name: list(parts) for name, parts in packed_modules(family).items()}
        config = {"num_hidden_layers": 10, **FAMILY_CONFIG.get(family, {})}
        runtime = runtime_modules(family, modules_of(family, config), config)
        for _ in range(40):
            ignore = rng.sample(PATTERNS, rng.randint(0, 4))
            targets = rng.choice((["Linear"], ["Linear", "re:.*lm_head$"], ["re:.*experts.*"], [r"re:.*\.mlp\..*"]))
            ignored += [(name, ignore, fused) for name in rng.sample(names, 12)]
            for module in rng.sample(runtime, min(12, len(runtime))):  # Nemotron has fewer
                if module.kind != "plain":
                    quantized.append((list(module.judged_by), LAYER_CLASS[module.kind], ignore, targets, fused))
    source = make_tiny_glm4_moe(folder / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, load_recipe(PrecisionRecipe, "w4a16"), model="tiny", family=None)
    configs = {}
    for scheme in SCHEMES:
        tensors = tuple(t._replace(scheme=scheme) if t.scheme else t for t in plan.tensors)
        configs[scheme] = config_json(plan.model_copy(update={"tensors": tensors}))["quantization_config"]
    asked = {
        "ignored": ignored,
        "quantized": quantized,
        "configs": configs,
        "mixes": [mix[:3] for mix in mixes(random.Random(MIXES))],
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(SERVE_PYTHON), "-c", VLLM_SCRIPT, str(folder / "asked.json"), str(folder / "answers.json")],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return asked, json.loads((folder / "answers.json").read_text())


@pytest.mark.slow
def test_ignore_rules_are_vllms(vllm_answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    asked, answers = vllm_answers
    said = []
    for name, ignore, fused in asked["ignored"]:
        try:
            said.append(is_ignored(name, ignore, fused))
        except MixedSchemes:
            said.append("refused")
    assert [(a, s, t) for a, s, t in zip(asked["ignored"], said, answers["ignored"], strict=True) if s != t] == []
    assert {True, False, "refused"} == set(said)


@pytest.mark.slow
def test_quantized_or_not_is_vllms(vllm_answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    asked, answers = vllm_answers
    from assay_quantize.formats.vllm_rules import ModuleKind, RuntimeModule

    kinds: dict[str, ModuleKind] = {
        "ColumnParallelLinear": "linear", "RoutedExperts": "experts", "ParallelLMHead": "lm_head",
        "VocabParallelEmbedding": "embedding",
    }  # fmt: skip
    said = []
    for names, layer, ignore, targets, fused in asked["quantized"]:
        module = RuntimeModule(names[0], kinds[layer], tuple(names), ())
        try:
            said.append(group_of(module, ignore, dict.fromkeys(targets, "group_0"), fused) is not None)
        except MixedSchemes:
            said.append("refused")
    assert [(a, s, t) for a, s, t in zip(asked["quantized"], said, answers["quantized"], strict=True) if s != t] == []
    assert {True, False, "refused"} == set(said)


VLLM_LINEAR = {
    ("int4", "I32"): "CompressedTensorsWNA16", ("plain", "F8_E4M3"): "CompressedTensorsW8A8Fp8",
    ("plain", "I8"): "CompressedTensorsW8A8Int8", ("nvfp4", "U8"): "CompressedTensorsW4A4Fp4",
    ("mxfp4", "U8"): "CompressedTensorsW4A4Mxfp4", ("mxfp8", "F8_E4M3"): "CompressedTensorsW8A8Mxfp8",
}  # fmt: skip


def strategy_of(scheme: str) -> str:
    row = SCHEMES[scheme]
    if row.layout == "nvfp4":
        return "tensor_group"
    if row.group_size is None:
        return "channel"
    return "block" if row.block_rows > 1 else "group"


@pytest.mark.slow
def test_vllm_finds_the_planned_group_of_every_module_of_a_mix(vllm_answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    asked, answers = vllm_answers
    for (_, _, modules, expected), found in zip(mixes(random.Random(MIXES)), answers["mixes"], strict=True):
        assert list(zip(modules, found, strict=True)) == list(zip(modules, expected, strict=True))
    assert len(answers["mixes"]) == len(asked["mixes"]) > 20
    assert {None, "group_0", "group_1", "group_2", "group_3"} == {one for found in answers["mixes"] for one in found}


@pytest.mark.slow
def test_every_config_parses_in_the_serving_environment(vllm_answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    asked, answers = vllm_answers
    for scheme, row in SCHEMES.items():
        read = answers["configs"][scheme]
        assert read["ignore"] == asked["configs"][scheme]["ignore"] != []
        assert (read["format"], read["same"], read["symmetric"]) == (row.format, True, row.symmetric)
        assert read["bits"] == (4 if row.layout in ("int4", "nvfp4", "mxfp4") else 8)
        assert read["block"] == ([128, 128] if scheme == "fp8_block" else None)
        assert read["group"] == (None if scheme == "fp8_block" else row.group_size)
        assert read["strategy"] == strategy_of(scheme)
        assert read["linear"] == VLLM_LINEAR[row.layout, row.weight_dtype], scheme
        assert bool(read["experts_refused"]) == (scheme == "fp8_static"), scheme
        assert read["activations"] == ("a16" not in scheme)


def test_runtime_modules_of_glm() -> None:
    """The whole answer for a small list: fused names, experts as one, the MTP head under vLLM's name."""
    modules = [
        "lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.0.gate_proj",
        "model.layers.0.mlp.experts.1.down_proj", "model.layers.1.eh_proj", "model.layers.1.shared_head.head",
    ]  # fmt: skip
    experts = "model.layers.0.mlp.experts"
    assert runtime_modules("glm4_moe", modules, {"num_hidden_layers": 1}) == (
        ("lm_head", "lm_head", ("lm_head",), ("lm_head",)),
        ("model.embed_tokens", "embedding", ("model.embed_tokens",), ("model.embed_tokens",)),
        ("model.layers.0.self_attn.qkv_proj", "linear", ("model.layers.0.self_attn.qkv_proj",), tuple(modules[2:5])),
        ("model.layers.0.mlp.gate", "plain", ("model.layers.0.mlp.gate",), ("model.layers.0.mlp.gate",)),
        (experts, "experts", tuple(f"{experts}.0.{p}_proj" for p in ("gate", "up", "down")), tuple(modules[6:8])),
        ("model.layers.1.eh_proj", "plain", ("model.layers.1.eh_proj",), ("model.layers.1.eh_proj",)),
        ("model.layers.1.head", "lm_head", ("model.layers.1.head",), ("model.layers.1.shared_head.head",)),
    )
