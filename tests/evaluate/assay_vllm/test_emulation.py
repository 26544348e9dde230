"""The emulation plugin: its arithmetic against compressed-tensors and vLLM, its layers against transformers."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as reference_fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from one_process import ask_in_one_process
from quantized_checkpoints import dense_weight, quantize_checkpoint, quantize_weight, scheme_of, write_dense
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay_evaluate.serving.server import ServerSpec, find_interpreter, planned_fingerprint
from assay_vllm.census import ExpertCensus
from assay_vllm.dequantize import Dequantizer
from assay_vllm.fake_quant import check_supported, fake_quantize

PRESETS = (
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "FP8_BLOCK",
    "FP8_DYNAMIC",
    "W8A8",
    "NVFP4A16",
    "NVFP4",
    "MXFP4A16",
    "MXFP4",
    "MXFP8",
)
SCRIPTS = Path(__file__).resolve().parents[2] / "support" / "quantization"
ROWS, COLUMNS = 192, 384  # rows are not a multiple of 128: the last block of FP8_BLOCK is a part


def config_of(scheme: QuantizationScheme) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": json.loads(scheme.model_dump_json())}}


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    """Preset -> stored parts of one module."""
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(ROWS, COLUMNS, generator=generator) * 0.05).bfloat16()
    return {preset: quantize_weight(weight, scheme_of(preset), preset) for preset in PRESETS}


@pytest.fixture(scope="module")
def activations() -> torch.Tensor:
    """[tokens, features] with outliers, an all-zero token and a block of denormal size."""
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(2))
    x[:, 7] *= 30
    x[3] = 0
    x[5, 16:32] = 1e-30
    return x


# ------------------------------------------------------------------------------------------------ weights
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("backwards", [False, True])
def test_weights_are_what_compressed_tensors_says(preset: str, backwards: bool, weights: dict[str, Any]) -> None:
    parts, scheme = weights[preset], scheme_of(preset)
    stream = [
        ("norm.weight", torch.ones(3)),
        *((f"a.b.{name}", part) for name, part in parts.items()),
        ("a.b.bias", torch.ones(2)),
    ]
    dequantizer = Dequantizer(config_of(scheme), torch.float32)
    out = dict(dequantizer(stream[::-1] if backwards else stream))
    assert set(out) == {"norm.weight", "a.b.bias", "a.b.weight"}
    assert torch.equal(out["a.b.weight"], dense_weight(parts, scheme).float())
    assert dequantizer.num_modules == 1
    assert set(dequantizer.input_scales) == ({"a.b.input_global_scale"} if preset == "NVFP4" else set())


def test_an_incomplete_module_is_named() -> None:
    scheme = scheme_of("W4A16")
    parts = quantize_weight(torch.randn(128, 128).bfloat16(), scheme)
    stream = [(f"layers.0.mlp.experts.3.up_proj.{n}", p) for n, p in parts.items() if n != "weight_scale"]
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.experts\.3\.up_proj lacks weight_scale \(has weight_packed, weight_shape\)"
    ):
        list(Dequantizer(config_of(scheme), torch.float32)(stream))


def test_quantized_tensors_no_target_matches_are_named() -> None:
    scheme = scheme_of("FP8_BLOCK", ["re:.*experts.*"])
    parts = quantize_weight(torch.randn(128, 128).bfloat16(), scheme)
    with pytest.raises(ValueError, match=r"^lm_head: holds quantized tensors, but no target"):
        list(Dequantizer(config_of(scheme), torch.float32)((f"lm_head.{n}", p) for n, p in parts.items()))


def test_unequal_global_scales_of_fused_projections_are_reported() -> None:
    scheme = scheme_of("NVFP4A16")
    stream = []
    for module, size in (("e.0.gate_proj", 1.0), ("e.0.up_proj", 1.2), ("e.1.gate_proj", 1.0), ("e.1.up_proj", 1.0)):
        weight = torch.linspace(-1, 1, 16 * 32).reshape(16, 32).bfloat16() * size
        stream += [(f"{module}.{n}", p) for n, p in quantize_weight(weight, scheme).items()]
    dequantizer = Dequantizer(config_of(scheme), torch.float32)
    list(dequantizer(stream))
    assert dequantizer.unequal_global_scales() == ["e.0.gate_proj and e.0.up_proj"]


def test_missing_experts_are_named() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.{p}.weight" for i in (1, 2) for e in range(4) for p in ("up_proj", "down_proj")]
    whole = ExpertCensus()
    assert len(list(whole.watch((n, torch.ones(1)) for n in [*names, "model.norm.weight"]))) == len(names) + 1
    whole.check(4)
    census = ExpertCensus()
    list(census.watch((n, torch.ones(1)) for n in names if n != "model.layers.2.mlp.experts.3.up_proj.weight"))
    with pytest.raises(ValueError, match=r"incomplete .*: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight missing$"):
        census.check(4)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.4\.up_proj\.weight, .* and 2 more missing"):
        census.check(5)


# ------------------------------------------------------------------------------------------------ activations
@pytest.mark.parametrize("preset", ["FP8_BLOCK", "FP8_DYNAMIC", "NVFP4"])
def test_activations_are_rounded_as_compressed_tensors_rounds_them(
    preset: str, weights: dict[str, Any], activations: torch.Tensor
) -> None:
    args = scheme_of(preset).input_activations
    global_scale = weights[preset].get("input_global_scale")
    # compressed-tensors means [batch, tokens, features] when it says "token"
    scale, zero_point = compute_dynamic_scales_and_zp(activations[None], args, torch.nn.Module(), global_scale)
    expected = reference_fake_quantize(activations[None], scale, zero_point, args, global_scale=global_scale)[0]
    assert torch.equal(fake_quantize(activations, args, global_scale=global_scale), expected)
    assert not torch.equal(expected, activations)


def test_mxfp4_activations_are_rounded_as_blackwell_rounds_them(activations: torch.Tensor) -> None:
    """Number by number: the least power of two that keeps a block of 32 within 6, then the nearest of E2M1, ties to even."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

    def nearest(size: float) -> float:
        return min(numbers, key=lambda one: (abs(one - size), numbers.index(one) % 2))

    expected = []
    for value_block in activations.reshape(-1, 32).double().tolist():
        fraction, exponent = math.frexp(max(map(abs, value_block)) / 6)
        step = 2.0 ** (exponent - (fraction == 0.5))
        expected.append([math.copysign(nearest(abs(value) / step) * step, value) for value in value_block])
    got = fake_quantize(activations, scheme_of("MXFP4").input_activations)
    assert torch.equal(got, torch.tensor(expected).reshape(got.shape).float())
    assert 0.05 < (got - activations).norm() / activations.norm() < 0.2


def test_a_static_scale_saturates() -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    x = torch.tensor([[0.0, 0.26, 1.0, 500.0, -500.0]])
    assert fake_quantize(x, args, static_scale=torch.tensor([0.5])).tolist() == [[0.0, 0.25, 1.0, 224.0, -224.0]]


@pytest.mark.parametrize(
    ("change", "what"),
    [({"symmetric": False}, "asymmetric"), ({"num_bits": 4, "type": "int"}, "int4"), ({"num_bits": 4, "group_size": 32}, "32")],
)
def test_activations_that_cannot_be_emulated_are_refused(change: dict[str, Any], what: str) -> None:
    base = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True}
    with pytest.raises(NotImplementedError, match=rf"{what}.* cannot be emulated"):
        check_supported(QuantizationArgs(**{**base, **change}))


def test_groups_that_do_not_divide_a_rank_are_refused(activations: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="64 features per rank cannot be cut into quantization groups of 128"):
        fake_quantize(activations[:, :64], scheme_of("FP8_BLOCK").input_activations)


@pytest.mark.slow
def test_the_serving_environment_computes_the_same(weights: dict[str, Any], activations: torch.Tensor, tmp_path: Path) -> None:
    """Its compressed-tensors is another version, and vLLM has references of its own."""
    stored = {f"{preset}.{name}": part for preset, parts in weights.items() for name, part in parts.items()}
    save_file({"x": activations, **stored}, tmp_path / "in.safetensors")
    schemes = {preset: config_of(scheme_of(preset))["config_groups"]["group_0"] for preset in PRESETS}
    (tmp_path / "cases.json").write_text(json.dumps({"schemes": schemes}))
    script = SCRIPTS / "emulation_in_serving_env.py"
    command = [serving_python(), str(script), *(str(tmp_path / n) for n in ("in.safetensors", "cases.json", "out.safetensors"))]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # compressed-tensors has its arithmetic compiled, for ten seconds
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out = load_file(tmp_path / "out.safetensors")
    for preset in PRESETS:
        dense = dense_weight(weights[preset], scheme_of(preset)).float()
        assert torch.equal(out[f"dense {preset}.weight"], dense), preset
    for preset in ("FP8_BLOCK", "FP8_DYNAMIC", "NVFP4"):
        assert torch.equal(out[f"ours {preset}"], out[f"compressed-tensors {preset}"]), preset
    assert torch.equal(out["ours MXFP8"], out["vllm MXFP8"])
    # vLLM multiplies with a reciprocal where we divide: a value exactly between two steps may go the other way
    for preset, share in (("W8A8", 1e-3), ("NVFP4", 5e-3)):
        assert (out[f"ours {preset}"] - out[f"vllm {preset}"]).abs().gt(1e-6).float().mean() < share, preset


# ------------------------------------------------------------------------------------------------ served
PROMPTS = [[10 + (37 * i + 11 * k) % 480 for i in range(120)] for k in range(3)]
PRESETS_OF_W4A16 = {r"model\.layers\.\d+\..*\b(gate|up|down|q|k|v|o)_proj": "W4A16"}
MIXED = {
    r"model\.layers\.\d+\.self_attn\.[qkvo]_proj": "FP8_BLOCK",
    r"model\.layers\.0\.mlp\.(gate|up|down)_proj": "FP8_DYNAMIC",
    r"model\.layers\.1\.mlp\.experts\.\d+\.(gate|up|down)_proj": "NVFP4",
    r"model\.layers\.2\.mlp\.experts\.\d+\.(gate|up|down)_proj": "FP8_BLOCK",
    r"model\.layers\.[12]\.mlp\.shared_experts\.(gate|up|down)_proj": "NVFP4",
}
"""Regex -> preset: every kind of quantized activation in one checkpoint."""


class Served(NamedTuple):
    """dense, schemes, input_scales: as `quantize_checkpoint` gives them; nothing is quantized in `plain`. answer: of
    served_in_one_process.py, with log-probabilities of prompts and of greedy tokens, and what the MTP head achieved."""

    folder: Path
    dense: dict[str, torch.Tensor]
    schemes: dict[str, QuantizationScheme]
    input_scales: dict[str, torch.Tensor]
    answer: dict[str, Any]


def spec_of(checkpoint: Path) -> ServerSpec:
    """On the CPU profile with MTP on."""
    profile, serving = load_recipe(ProfileRecipe, "cpu-emulated"), Serving(num_speculative_tokens=1)
    return ServerSpec(checkpoint=checkpoint, profile=profile, serving=serving, speculate=True, log_path=checkpoint / "log")


@pytest.fixture(scope="module")
def served(tiny_glm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """`w4a16`, the same as `plain` weights, and `mixed`, one after the other in one process."""
    folder = tmp_path_factory.mktemp("served")
    w4a16 = quantize_checkpoint(tiny_glm, folder / "w4a16", PRESETS_OF_W4A16)
    write_dense(tiny_glm, folder / "plain", w4a16[0])
    mixed = quantize_checkpoint(make_tiny_glm4_moe(folder / "source", seed=5), folder / "mixed", MIXED)
    answers = ask_in_one_process(
        {name: spec_of(folder / name) for name in ("w4a16", "plain", "mixed")}, PROMPTS, folder, num_tokens=16
    )
    made = {"w4a16": w4a16, "plain": (w4a16[0], {}, {}), "mixed": mixed}
    return {name: Served(folder / name, *made[name], answer) for name, answer in answers.items()}


@pytest.mark.serve
def test_w4a16_is_bit_identical_to_its_dequantized_checkpoint(served: dict[str, Served]) -> None:
    """Also inside the MTP block, whose eh_proj stays dense: drafts and acceptance must be the same."""
    emulated, plain = served["w4a16"], served["plain"]
    assert any(module.startswith("model.layers.3.mlp.experts.") for module in emulated.schemes)
    assert {t.dtype for n, t in emulated.dense.items() if n.removesuffix(".weight") in emulated.schemes} == {torch.bfloat16}
    for what in ("replies", "drafted", "accepted"):
        assert emulated.answer[what] == plain.answer[what]
    assert emulated.answer["drafted"] > 0
    assert (
        f"assay-emulate: Glm4MoeForCausalLM: {len(emulated.schemes)} modules dequantized to float32; activations: not quantized"
    ) in emulated.answer["said"]
    assert not any("assay-emulate" in line for line in plain.answer["said"])
    foreseen = {name: planned_fingerprint(spec_of(served[name].folder)) for name in ("w4a16", "plain")}
    assert {name: one.emulated for name, one in foreseen.items()} == {"w4a16": True, "plain": None}
    assert foreseen["w4a16"].checkpoint_flags == {"quantization": "assay-emulate", "load-format": "assay-emulate"}
    assert foreseen["plain"].checkpoint_flags == {"load-format": "assay-strict"}
    assert foreseen["w4a16"].comparable_sha256 == foreseen["plain"].comparable_sha256


@pytest.mark.serve
def test_quantized_activations_agree_with_transformers(served: dict[str, Served]) -> None:
    """FP8 and NVFP4, in linear layers and inside experts, against another model fake-quantized by compressed-tensors."""
    folder, dense, schemes, input_scales, answer = served["mixed"]
    source = folder.parent / "source"
    expected = reference_logprobs(source, dense, schemes, input_scales)
    weights_only = reference_logprobs(source, dense, {}, {})
    error, distance = [], []
    for reply, reference, other in zip(answer["replies"], expected, weights_only, strict=True):
        error += worst_errors(reply["prompt"], reference)
        distance += worst_errors(reply["prompt"], other)
    # Sums in another order flip a rounding here and there, and every later token sees it. Before the first flip of a prompt
    # the models agree to float32's last digits; without quantized activations they agree nowhere.
    assert sum(e < 1e-4 for e in error) > 0.2 * len(error)
    assert min(distance) > 1e-3
    assert sum(error) < 0.3 * sum(distance)
    (line,) = [said for said in answer["said"] if said.startswith("assay-emulate: Glm4MoeForCausalLM")]
    _, _, activations = line.partition("activations: ")
    assert activations.split(", ") == [
        "5 modules float4 tensor_group 16 dynamic",  # experts of layer 1, two linear layers in both shared experts
        "7 modules float8 group 128 dynamic",  # two linear layers in three attention blocks, experts of layer 2
        "2 modules float8 token dynamic",
    ]


def worst_errors(likely: list[dict[str, float]], reference_TV: torch.Tensor) -> list[float]:
    """Per position, the largest difference among the log-probabilities that vLLM returned."""
    return [
        max(abs(logprob - float(reference_TV[position, int(token)])) for token, logprob in tokens.items())
        for position, tokens in enumerate(likely)
    ]


def reference_logprobs(
    source: Path, dense: dict[str, torch.Tensor], schemes: dict[str, QuantizationScheme], input_scales: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Per prompt, log-probabilities [tokens, vocabulary] of transformers' GLM-4-MoE in float32 with fake-quantized inputs."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(**json.loads((source / "config.json").read_text()), attn_implementation="eager")
    model = Glm4MoeForCausalLM(config).float().eval()
    state = {name: t.float() for name, t in dense.items() if not name.startswith(f"model.layers.{config.num_hidden_layers}.")}
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        expert = {
            p: [state.pop(f"{prefix}.{e}.{p}_proj.weight") for e in range(config.n_routed_experts)]
            for p in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(expert["gate"], expert["up"], strict=True)]
        state |= {f"{prefix}.gate_up_proj": torch.stack(gate_up), f"{prefix}.down_proj": torch.stack(expert["down"])}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    fused = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name in schemes:
            parent, _, last = name.rpartition(".")
            siblings = next((group for group in fused.values() if last in group), (last,))
            # vLLM gives the projections of a fused layer one global scale, the largest
            scales = [input_scales[f"{parent}.{s}"] for s in siblings if f"{parent}.{s}" in input_scales]
            module.register_forward_pre_hook(_quantize_input(schemes[name], torch.cat(scales).max() if scales else None))
        if name.endswith("mlp.experts") and f"{name}.0.gate_proj" in schemes:
            module.forward = _experts(module, schemes[f"{name}.0.gate_proj"], name, input_scales)
    with torch.no_grad():
        return [F.log_softmax(model(torch.tensor([prompt])).logits[0], -1) for prompt in PROMPTS]


def _fake_quantize(x_TI: torch.Tensor, scheme: QuantizationScheme, global_scale: torch.Tensor | None) -> torch.Tensor:
    args = scheme.input_activations
    scale, zero_point = compute_dynamic_scales_and_zp(x_TI[None], args, torch.nn.Module(), global_scale)
    return reference_fake_quantize(x_TI[None], scale, zero_point, args, global_scale=global_scale)[0]


def _quantize_input(scheme: QuantizationScheme, global_scale: torch.Tensor | None) -> Callable[..., Any]:
    def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (x,) = inputs
        return (_fake_quantize(x.flatten(0, -2), scheme, global_scale).view(x.shape),)

    return hook


def _experts(module: Any, scheme: QuantizationScheme, name: str, input_scales: dict[str, torch.Tensor]) -> Callable[..., Any]:
    def smallest(*projections: str) -> torch.Tensor | None:
        # vLLM gives all experts of a layer the scale of the widest range, the smallest global scale
        found = [s for module, s in input_scales.items() if module.startswith(f"{name}.") and module.endswith(projections)]
        return torch.cat(found).min() if found else None

    def forward(x_TH: torch.Tensor, chosen_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        rounded_TH = _fake_quantize(x_TH, scheme, smallest("gate_proj", "up_proj"))
        out_TH = torch.zeros_like(x_TH)
        for token in range(len(x_TH)):
            for expert, weight in zip(chosen_TK[token].tolist(), weight_TK[token], strict=True):
                gate, up = (module.gate_up_proj[expert] @ rounded_TH[token]).chunk(2)
                inner = _fake_quantize((F.silu(gate) * up)[None], scheme, smallest("down_proj"))[0]
                out_TH[token] += weight * (module.down_proj[expert] @ inner)
        return out_TH

    return forward


def serving_python() -> str:
    interpreter = find_interpreter(None)
    assert interpreter is not None, "no .venv-serve here: run `make setup`"
    return str(interpreter)
