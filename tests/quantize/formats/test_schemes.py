"""The scheme table and the kernels against llm-compressor; vLLM's rules and our config.json against vLLM itself."""

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
import torch
from compressed_tensors.quantization import QuantizationConfig
from llmcompressor.entrypoints.model_free import model_free_ptq
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from safetensors.torch import load_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.errors import PlanError
from assay.recipes.families import classify, family_names, forms, ignore_patterns, names_of
from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.runtime_names import packed_modules
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.config_groups import config_json, quantization_config
from assay_quantize.formats.schemes import SCHEMES, check_shape, compressed_tensors_scheme, output_tensors
from assay_quantize.formats.targets import kept_in_some_layers, targets_by_scheme
from assay_quantize.formats.vllm_rules import MixedSchemes, group_of, is_ignored, runtime_modules
from assay_quantize.kernels import dequantize_weight, magnitude, quantize_weight, relative_error
from assay_quantize.plan.planner import make_plan
from assay_quantize.plan.tensor_plans import scheme_of

ROOT = Path(__file__).resolve().parents[3]
SERVE_PYTHON = ROOT / ".venv-serve" / "bin" / "python"
RAGGED = {
    "fp8_block": (200, 256), "fp8_channel": (70, 100), "w8a8": (70, 100), "w4a16_asym": (60, 256), "w4a16_g64": (61, 192),
    "w4a16_g32": (61, 96), "w4a16_channel": (61, 104),
}  # fmt: skip
"""Shapes that no block or pack size divides, where the scheme allows them."""


def bytes_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def sample(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if kind == "zero":
        w = torch.zeros(shape)
    elif kind == "constant":
        w = torch.full(shape, -0.37)
    elif kind == "holes":
        w[3], w[:, : shape[1] // 2] = 0, 0
    elif kind == "outlier":
        w[5, 5] = 3000
    elif kind == "small":
        w *= 1e-6
    elif kind == "positive":
        w = w.abs()
    elif kind == "denormal":
        w *= torch.finfo(dtype).smallest_normal / 8
    elif kind == "huge":
        w *= torch.finfo(dtype).max / w.abs().max() / 2
    return w.to(dtype)


NO_FP16_POWER = ("zero", "holes", "small", "denormal")
"""Where llm-compressor rounds an MX scale to FP16, in which it is 0 and becomes 1: a difference that is meant (see below)."""
KINDS = ("normal", "zero", "constant", "holes", "outlier", "small", "positive", "denormal", "huge")


def llm_compressor(w: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    if scheme == "nvfp4":  # it refuses without data; the weights are the same, and ModelOpt's input_scale is 1
        return llm_compressor(w, "nvfp4a16") | {"input_global_scale": torch.ones(1)}
    config = QuantizationConfig(config_groups={"group_0": compressed_tensors_scheme(scheme)})
    made = ModelFreePtqConverter(config).process({"m.proj.weight": w.clone()})
    return {name.removeprefix("m.proj."): value for name, value in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_weights_are_those_of_llm_compressor_and_of_the_table(scheme: str, dtype: str) -> None:
    """Same names, dtypes, shapes and bytes; sizes as the planner computes them; scales finite and never zero."""
    for kind in KINDS:
        shape = RAGGED.get(scheme, (96, 256))
        w = sample(kind, shape, TORCH_DTYPES[dtype])
        got, want = quantize_weight(w, scheme), llm_compressor(w, scheme)
        assert sorted(got) == sorted(want)
        if dtype == "F16" and SCHEMES[scheme].layout in ("mxfp4", "mxfp8") and kind in NO_FP16_POWER:
            continue
        assert [part for part in want if not bytes_equal(got[part], want[part])] == [], kind
        table = {
            o.name: (TORCH_DTYPES[o.dtype], o.shape, o.num_bytes) for o in output_tensors(scheme, "m.proj.weight", shape, dtype)
        }
        assert table == {f"m.proj.{name}": (part.dtype, tuple(part.shape), part.nbytes) for name, part in got.items()}
        scale = got["weight_scale"]
        assert bool(torch.isfinite(scale.float()).all()), kind
        assert scale.dtype == torch.uint8 or bool((scale.float() > 0).all()), kind


@pytest.mark.parametrize(
    ("scheme", "low", "high"),
    [
        ("w4a16", 0.10, 0.12), ("w4a16_g64", 0.09, 0.11), ("w4a16_g32", 0.09, 0.10), ("w4a16_channel", 0.11, 0.13),
        ("w4a16_asym", 0.09, 0.11), ("fp8_block", 0.025, 0.029), ("fp8_channel", 0.025, 0.029), ("nvfp4a16", 0.09, 0.10),
        ("nvfp4", 0.09, 0.10), ("mxfp4", 0.10, 0.12), ("mxfp8", 0.025, 0.029), ("w8a8", 0.006, 0.009),
    ],
)  # fmt: skip
def test_dequantized_weights_are_near_their_own_source_and_far_from_another(scheme: str, low: float, high: float) -> None:
    w, other = sample("normal", (256, 256), torch.bfloat16), sample("normal", (256, 256), torch.bfloat16).flip(0)
    back = dequantize_weight(quantize_weight(w, scheme), scheme, torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert low < relative_error(back, w) < high < SCHEMES[scheme].max_relative_error
    assert relative_error(back, other) == pytest.approx(2**0.5, rel=0.02)


def test_fp16_small_weights_keep_their_mx_scale() -> None:
    """llm-compressor rounds the power-of-two scale to FP16, where it becomes 0 and then 1; ours does not."""
    w = sample("small", (64, 256), torch.float16)
    assert relative_error(dequantize_weight(quantize_weight(w, "mxfp8"), "mxfp8", torch.float32), w) < 0.03


def test_shared_global_scale_is_that_of_the_largest_member() -> None:
    gate, up = sample("normal", (128, 256), torch.bfloat16), 3 * sample("normal", (128, 256), torch.bfloat16).flip(1)
    amax = torch.maximum(magnitude(gate), magnitude(up))
    shared = [quantize_weight(w, "nvfp4a16", global_scale_amax=amax)["weight_global_scale"] for w in (gate, up)]
    alone = [quantize_weight(w, "nvfp4a16")["weight_global_scale"] for w in (gate, up)]
    assert shared[0].item() == shared[1].item() == alone[1].item() < alone[0].item()


@pytest.mark.parametrize(
    ("scheme", "shape", "merged", "message"),
    [
        ("w4a16", (64, 192), False, r"m\.proj\.weight: shape \[64, 192\] .*192 columns .*group size 128"),
        ("nvfp4a16", (64, 100), False, "100 columns are not a multiple of the group size 16"),
        ("mxfp4", (64, 48), False, "48 columns are not a multiple of the group size 32"),
        ("fp8_block", (64, 192), False, "192 columns are not a multiple of the group size 128"),
        ("fp8_block", (192, 256), True, "192 rows are not a multiple of the block size 128, and vLLM loads another"),
        ("w4a16", (4, 64, 128), False, "only matrices are quantized, this one has 3 dimensions"),
        ("w4a16", (0, 128), False, "it is empty"),
        ("w4a16_channel", (64, 100), False, "100 columns are not a multiple of 8, the codes in an int32"),
        (
            "w4a16_asym",
            (60, 128),
            True,
            "60 rows are not a multiple of 8, the zero points in an int32, and vLLM loads another",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(scheme: str, shape: tuple[int, ...], merged: bool, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_shape(scheme, "m.proj.weight", shape, merged=merged)


def test_shapes_that_fit_and_a_dtype_that_does_not() -> None:
    check_shape("fp8_block", "m.proj.weight", (576, 256))  # ragged rows at the end of a parameter are fine
    check_shape("fp8_channel", "m.proj.weight", (7, 13))
    with pytest.raises(PlanError, match=r"m\.proj\.weight: dtype I8 cannot be quantized; the source must be one of BF16"):
        output_tensors("w4a16", "m.proj.weight", (64, 128), "I8")


# ------------------------------------------------------------------------------------------------ a whole checkpoint
@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16"])
def test_a_checkpoint_is_the_one_llm_compressor_makes(precision: str, tmp_path: Path) -> None:
    """Every tensor bit for bit, but NVFP4's global scales of fused groups that llm-compressor does not know (experts)."""
    from assay_quantize.engine.quantize import quantize

    source = make_tiny_glm4_moe(tmp_path / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
    quantize(plan, source, tmp_path / "ours", device="cpu")
    scheme = next(tensor.scheme for tensor in plan.tensors if tensor.scheme is not None)
    model_free_ptq(
        str(source),
        str(tmp_path / "theirs"),
        scheme=SCHEMES[scheme].preset,
        ignore=list(plan.ignore),
        max_workers=1,
        device="cpu",
    )
    ours, theirs = ({n: t for f in sorted(d.glob("*.safetensors")) for n, t in load_file(f).items()}
                    for d in (tmp_path / "ours", tmp_path / "theirs"))  # fmt: skip
    assert sorted(ours) == sorted(theirs)
    differ = {name.rpartition(".")[0] for name in ours if not bytes_equal(ours[name], theirs[name])}
    pairs = [f"model.layers.1.mlp.{e}" for e in ("experts.0", "experts.1", "shared_experts")]
    assert {module.rpartition(".")[0] for module in differ} <= (set(pairs) if precision == "nvfp4a16" else set())
    assert bool(differ) == (precision == "nvfp4a16")
    for pair in pairs if precision == "nvfp4a16" else []:
        scales = [[t[f"{pair}.{p}_proj.weight_global_scale"].item() for p in ("gate", "up")] for t in (ours, theirs)]
        assert scales[0] == [min(scales[1])] * 2  # the larger magnitude has the smaller scale
        weights = [load_file(source / t.shard_in)[t.name] for t in plan.tensors if t.fused_group == f"{pair}.gate_up_proj"]
        amax = torch.stack([magnitude(w) for w in weights]).max()
        for projection, w in zip(("gate", "up"), weights, strict=True):
            want = quantize_weight(w, "nvfp4a16", global_scale_amax=amax)
            assert all(bytes_equal(ours[f"{pair}.{projection}_proj.{part}"], value) for part, value in want.items())


@pytest.mark.parametrize("scheme", ["w4a16_g64", "w4a16_g32", "w4a16_channel"])
def test_schemes_without_a_preset_go_through_and_verify(scheme: str, tmp_path: Path) -> None:
    from assay_quantize.engine.quantize import quantize
    from assay_quantize.verify.verify import verify

    source = make_tiny_glm4_moe(tmp_path / "source", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)
    recipe = load_recipe(PrecisionRecipe, "w4a16").model_copy(update={"scheme": scheme})
    plan = make_plan(open_checkpoint(source), recipe, model="tiny", family=None)
    quantize(plan, source, tmp_path / "out", device="cpu")
    assert verify(tmp_path / "out", source=source).damages == ()
    ours = {n: t for f in sorted((tmp_path / "out").glob("*.safetensors")) for n, t in load_file(f).items()}
    weights = {n: t for f in sorted(source.glob("*.safetensors")) for n, t in load_file(f).items()}
    for tensor in plan.tensors:
        if tensor.scheme is not None:
            want = llm_compressor(weights[tensor.name], scheme)
            assert all(bytes_equal(ours[f"{tensor.module}.{part}"], value) for part, value in want.items()), tensor.name


# ------------------------------------------------------------------------------------------------ vLLM itself
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
    roles = {role: rng.choice(some) for role in base["quantize"]}
    layers = {"1": {role: rng.choice([*some, "bf16"]) for role in rng.sample(sorted(roles), 2)}}
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
        assert not read["experts_refused"], scheme
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
