"""`assay diagnose locate` on numbers: made-up readings of known answer, sketches against exact distances, a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.runtime_names import role_of
from assay.records.diagnosis.locate import LocateReport, PointDifference
from assay_cli.commands.diagnose.locate import show
from assay_evaluate.diagnosis.locate.compare import (
    compare,
    compare_ranks,
    find_first_parting,
    find_outlier,
    find_rank_parting,
    relative_distance,
    shares_of_error,
)
from assay_evaluate.diagnosis.locate.locate import bytes_to_keep, explain_role, remedy_for
from assay_evaluate.diagnosis.locate.reading import SKETCH_WIDTH, PointReading, Reading
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.plan.planner import make_plan
from assay_vllm.activations import Point, projection

RANDOM = np.random.default_rng(7)
TOKENS = 50


def point(name: str, kind: str, sketch: Any, *, partial: bool = False, rms: float = 1.0, **more: Any) -> PointReading:
    """Figures that do not matter to the test are made up."""
    figures = {"max_abs": 3 * rms, "mean": 0.0, "non_finite": 0, "input_TS": None, "chosen_TK": None, "row_T": None} | more
    return PointReading(name=name, kind=kind, partial=partial, num_tokens=TOKENS, rms=rms, sketch_TS=sketch, **figures)


def draw(size: float = 1.0) -> np.ndarray:
    return (RANDOM.standard_normal((TOKENS, SKETCH_WIDTH)) * size).astype(np.float32)


BASE = {f"model.layers.{layer}.mlp.down_proj": (draw(), draw()) for layer in range(6)}
"""Name -> (input, output) of a healthy model."""


def reading(errors: dict[int, float], ranks: int = 1, noisy: float = 0.0) -> Reading:
    """Six layers; layer i adds an error of errors[i] of its size, and every later one sees it at its input."""
    result: Reading = {}
    for rank in range(ranks):
        points: dict[str, PointReading] = {}
        carried = noisy
        for layer, (name, (given, output)) in enumerate(BASE.items()):
            own = errors.get(layer, 0.0)
            leaving = (carried**2 + own**2) ** 0.5
            points[name] = point(name, "linear", output + draw(leaving), partial=ranks > 1, input_TS=given + draw(carried))
            carried = leaving
        result[rank] = points
    return result


def test_the_first_place_that_differs_is_named_and_nothing_where_nothing_does() -> None:
    healthy, broken = reading({}), reading({3: 0.2})
    points, missing = compare(healthy, healthy, healthy)
    assert find_first_parting(points) is None and find_outlier(points) is None and missing == []
    result = find_first_parting(compare(healthy, broken, healthy)[0])
    assert result is not None
    assert (result.name, result.layer, result.role, result.rank) == ("model.layers.3.mlp.down_proj", 3, "dense_mlp", None)
    assert result.why.startswith("outputs differ by 0.")


def test_noise_of_the_first_side_is_no_difference() -> None:
    healthy, again = reading({}), reading({}, noisy=0.01)
    assert find_first_parting(compare(healthy, reading({}, noisy=0.02), again)[0]) is None
    result = find_first_parting(compare(healthy, reading({4: 0.4}, noisy=0.01), again)[0])
    assert result is not None and result.layer == 4


def test_where_every_layer_differs_a_little_the_one_that_adds_most_stands_out() -> None:
    even = dict.fromkeys(range(6), 0.05)
    healthy = reading({})
    assert find_outlier(compare(healthy, reading(even), healthy)[0]) is None
    points = compare(healthy, reading(even | {4: 0.6}), healthy)[0]
    result = find_outlier(points)
    assert result is not None and result.layer == 4
    first = find_first_parting(points)
    assert first is not None and first.layer == 0


def test_a_fault_of_one_rank_is_laid_at_its_door() -> None:
    healthy = reading({}, ranks=2)
    broken = {0: healthy[0], 1: {**healthy[1]}}
    name = "model.layers.2.mlp.down_proj"
    own = healthy[1][name]
    assert own.sketch_TS is not None
    broken[1][name] = point(name, "linear", own.sketch_TS * 2, partial=True, rms=2.0, input_TS=own.input_TS)
    result = find_first_parting(compare(healthy, broken, healthy)[0])
    assert result is not None and (result.layer, result.rank) == (2, 1)
    assert result.why == "outputs differ by 0.5 of their size (RMS 1 and 2) on rank 1"


def test_non_finite_values_and_other_experts_count_whatever_the_distance() -> None:
    sketch, chosen = draw(), np.tile(np.array([[0, 3]], np.int32), (TOKENS, 1))
    other = chosen.copy()
    other[:5] = [1, 3]
    healthy: Reading = {0: {
        "a": point("a", "linear", sketch),
        "b.router": point("b.router", "router", None, chosen_TK=chosen),
    }}  # fmt: skip
    rerouted: Reading = {0: {**healthy[0], "b.router": point("b.router", "router", None, chosen_TK=other)}}
    points = compare(healthy, rerouted)[0]
    assert [one.agreement for one in points] == [None, 0.9]
    result = find_first_parting(points)
    assert result is not None and result.why == "other experts are chosen for 10.0% of the tokens"
    infinite: Reading = {0: {**healthy[0], "a": point("a", "linear", sketch, non_finite=4)}}
    result = find_first_parting(compare(healthy, infinite)[0])
    assert result is not None and result.why == "0 non-finite values on side A, 4 on side B"


def test_experts_are_compared_on_the_tokens_both_sides_sent_them() -> None:
    sketch = draw()
    rows = np.arange(TOKENS, dtype=np.int32)
    a: Reading = {0: {"e.1": point("e.1", "expert", sketch[:40], row_T=rows[:40])}}
    b: Reading = {0: {"e.1": point("e.1", "expert", sketch[10:], row_T=rows[10:])}}
    assert [one.distance for one in compare(a, b)[0]] == [0.0]
    nothing_in_common: Reading = {0: {"e.1": point("e.1", "expert", sketch[40:], row_T=rows[40:])}}
    assert [one.distance for one in compare(a, nothing_in_common)[0]] == [None]


def test_what_one_side_lacks_is_told() -> None:
    one, two = reading({}), reading({}, ranks=2)
    missing = compare(one, two)[1]
    assert missing == ["shares of single ranks: A has 1, B has 2; only rank 0's sums are compared"]
    shorter: Reading = {0: dict(list(one[0].items())[:5])}
    assert compare(one, shorter)[1] == ["model.layers.5.mlp.down_proj: only on side A (rank 0)"]
    assert compare(shorter, one)[1] == ["model.layers.5.mlp.down_proj: only on side B"]


def test_error_is_laid_on_the_roles_that_bring_it_in() -> None:
    """Attention brings 0.3 of 4 (squared: 0.09 of the stream's 0.25), the experts the rest; what cancels is nobody's."""
    at_first, apart = draw(), draw()
    sizes = {
        "model.layers.0.self_attn.o_proj": ("linear", 0.3),
        "model.layers.0.post_attention_layernorm.residual": ("residual", 0.3),
        "model.layers.0.mlp.gate": ("linear", 9.0), "model.layers.0.mlp.experts": ("experts", 0.4),
        "model.layers.0.mlp.experts.3": ("expert", 7.0), "model.layers.1.input_layernorm.residual": ("residual", 0.5),
        "model.layers.1.self_attn.o_proj": ("linear", 0.2), "model.norm.residual": ("residual", 0.45),
    }  # fmt: skip
    a: Reading = {0: {name: point(name, kind, at_first) for name, (kind, _) in sizes.items()}}
    b: Reading = {0: {}}
    for name, (kind, size) in sizes.items():
        away = apart * size * np.linalg.norm(at_first) / np.linalg.norm(apart)
        direction = away - at_first * float((away * at_first).sum() / (at_first * at_first).sum())
        rms = float(np.linalg.norm(at_first + direction) / np.linalg.norm(at_first))
        b[0][name] = point(name, kind, at_first + direction, rms=rms)
    points = compare(a, b)[0]
    result = shares_of_error(points, ["attention", "routed_expert"])
    assert list(result) == ["routed_expert", "attention"]
    assert result["attention"] == pytest.approx(0.36, abs=0.02) and sum(result.values()) == pytest.approx(1)
    assert shares_of_error(points, ["attention"]) == {"attention": 1.0}  # the experts are not quantized: they hand it on
    assert shares_of_error(compare(a, a)[0], ["attention", "routed_expert"]) == {}


# ------------------------------------------------------------------------------------------------ ranks
def shares(scaled: tuple[int, int, int] | None, factor: float = 4.0, num_ranks: int = 2) -> Reading:
    """Three layers of eight experts whose weights differ a little between ranks; `scaled`: (rank, layer, expert)."""
    draw_size = np.random.default_rng(3)
    result: Reading = {}
    for rank in range(num_ranks):
        points: dict[str, PointReading] = {}
        for layer in range(3):
            stream = f"model.layers.{layer}.input_layernorm"
            points[stream] = point(stream, "norm", BASE["model.layers.0.mlp.down_proj"][0])
            for expert in range(8):
                name = f"model.layers.{layer}.mlp.experts.{expert}"
                rms = 0.3 * (1 + layer) * float(np.exp(draw_size.normal(0, 0.02)))
                rms *= factor if (rank, layer, expert) == scaled else 1.0
                points[name] = point(name, "expert", None, partial=True, rms=float(np.exp(draw_size.normal(0, 2))))
                points[f"{name}.w2_weight"] = point(f"{name}.w2_weight", "weight", None, partial=True, rms=rms)
        result[rank] = points
    return result


def test_healthy_ranks_do_not_stand_out() -> None:
    for num_ranks in (2, 4):
        points, missing = compare_ranks(shares(None, num_ranks=num_ranks))
        assert find_rank_parting(points) is None and missing == []


@pytest.mark.parametrize("where", [(0, 1, 2), (1, 1, 2), (1, 2, 7), (0, 0, 0)])
def test_weights_of_the_wrong_size_name_their_rank(where: tuple[int, int, int]) -> None:
    rank, layer, expert = where
    for factor in (4.0, 0.2, 1.5):
        result = find_rank_parting(compare_ranks(shares(where, factor))[0])
        assert result is not None
        assert (result.rank, result.layer, result.expert, result.role) == (rank, layer, expert, "routed_expert")


def test_a_share_that_is_not_finite_names_its_rank() -> None:
    broken = shares(None)
    name = "model.layers.1.mlp.experts.4"
    broken[1][name] = point(name, "expert", None, partial=True, non_finite=12)
    result = find_rank_parting(compare_ranks(broken)[0])
    assert result is not None and (result.name, result.rank, result.why) == (name, 1, "12 non-finite values")


def test_ranks_must_hold_the_same_residual_stream() -> None:
    broken = shares(None)
    name = "model.layers.2.input_layernorm"
    broken[1][name] = point(name, "norm", draw())
    result = find_rank_parting(compare_ranks(broken)[0])
    assert result is not None and (result.name, result.rank) == (name, None)  # two ranks cannot tell which of them is right
    four = shares(None, num_ranks=4)
    for rank in (0, 2):
        one = {**four, rank: {**four[rank], name: point(name, "norm", draw())}}
        lonely = find_rank_parting(compare_ranks(one)[0])
        assert lonely is not None and (lonely.name, lonely.rank) == (name, rank)
    assert result.why.startswith("ranks hold different values of what they must hold alike: outputs differ by")


# ------------------------------------------------------------------------------------------------ sketches, roles, remedy
def test_a_sketch_estimates_the_distance_of_what_it_stands_for() -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(200, 256, generator=generator)
    b = a + 0.1 * torch.randn(200, 256, generator=generator)
    exact = float((a - b).norm() / b.norm())
    sketched = relative_distance((a @ projection(256, 16)).numpy(), (b @ projection(256, 16)).numpy())
    assert abs(sketched - exact) < 0.05 * exact


def test_statistics_of_a_point_are_those_of_all_its_calls_together() -> None:
    values = torch.tensor([[1.0, -2.0], [3.0, float("nan")], [0.5, float("inf")]])
    whole = Point("x", "linear", False)
    whole.add(values[:1], 4)
    whole.add(values[1:], 4)
    reported = whole.summary()
    clean = torch.tensor([1.0, -2.0, 3.0, 0.0, 0.5, 0.0])
    assert (reported["num_tokens"], reported["max_abs"], reported["non_finite"]) == (3, 3.0, 2)
    assert reported["mean"] == pytest.approx(float(clean.mean())) and reported["rms"] == pytest.approx(
        float(clean.square().mean().sqrt())
    )


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.embed_tokens", "embedding"),
        ("model.layers.1.self_attn.qkv_proj", "attention"),
        ("model.layers.1.self_attn.q_norm", "norm"),
        ("model.layers.1.input_layernorm.residual", "norm"),
        ("model.layers.0.mlp.down_proj.sum", "dense_mlp"),
        ("model.layers.2.mlp.gate", "router"),
        ("model.layers.2.mlp.experts", "routed_expert"),
        ("model.layers.2.mlp.experts.5", "routed_expert"),
        ("model.layers.2.mlp.experts.router", "router"),
        ("model.layers.2.mlp.shared_experts.down_proj", "shared_expert"),
        ("model.layers.3.self_attn.indexer.wq_b", "indexer"),
        ("model.layers.3.self_attn.indexer.wk_weights_proj", "indexer"),
        ("model.layers.3.self_attn.indexer.k_norm", "norm"),
        ("model.layers.3.self_attn.attn", "attention"),
        ("model.layers.3.self_attn.fused_qkv_a_proj", "attention"),
        ("model.layers.3.linear_attn.in_proj_qkvz", "attention"),
        ("model.layers.2.mlp.experts.5.w13_weight", "routed_expert"),
        ("model.layers.2.mlp.shared_expert.gate_up_proj", "shared_expert"),
        ("model.layers.2.mlp.shared_expert_gate", "router"),
        ("model.layers.2.pre_feedforward_layernorm", "norm"),
        ("model.layers.4.eh_proj", "mtp"),
        ("model.layers.4.shared_head.head", "mtp"),
        ("model.layers.4.mtp_block.self_attn.o_proj", "attention"),
        ("model.layers.2.block_sparse_moe.experts.5.w13_weight", "routed_expert"),
        ("model.layers.2.block_sparse_moe.gate", "router"),
        ("language_model.model.layers.3.linear_attn.in_proj_ba", "attention"),
        ("model.layers.28.mtp_linear_proj", "mtp"),
        ("model.norm.residual", "norm"),
        ("lm_head", "lm_head"),
        ("mtp.fc", "mtp"),
        ("logits_processor", "lm_head"),
        ("model.layers.2.mlp", "dense_mlp"),  # in some families a router's bias lies in it
        ("model.layers.2.block_sparse_moe", None),
        ("model.layers.2.something_else", None),
        ("something.else", None),
    ],
)
def test_roles_of_places(name: str, role: str | None) -> None:
    assert role_of(name) == role


def test_the_remedy_is_a_recipe_that_can_be_read(tmp_path: Path) -> None:
    recipe = load_recipe(PrecisionRecipe, "w4a16")
    remedy = remedy_for(recipe, "routed_expert")
    assert remedy is not None and remedy.recipe is not None
    path = tmp_path / "w4a16-routed-expert-bf16.yaml"
    path.write_text(remedy.recipe)
    changed = load_recipe(PrecisionRecipe, str(path))
    assert changed.name == "w4a16-routed-expert-bf16"
    assert changed.quantize == ("attention", "dense_mlp", "shared_expert")
    assert changed.keep["bf16"] == ("mtp", "lm_head", "embedding", "router", "indexer", "routed_expert")
    again = remedy_for(changed, "routed_expert")
    assert again is not None and again.keep == "fp32"
    assert remedy_for(recipe, "router_bias") is None  # FP32 already
    assert list(yaml.safe_load(remedy.recipe)) == ["schema", "name", "description", "keep", "quantize", "scheme"]


def test_the_remedy_says_why_and_what_a_byte_brings(tmp_path: Path, tiny_glm: Path) -> None:
    recipe = load_recipe(PrecisionRecipe, "w4a16")
    plan = make_plan(open_checkpoint(tiny_glm), recipe, model="tiny", family="glm4_moe")
    assert bytes_to_keep(tmp_path) == {}
    plan.save(tmp_path / "assay_plan.json")
    more = bytes_to_keep(tmp_path)
    quantized = {tensor.role for tensor in plan.tensors if tensor.action == "quantize"}
    assert set(more) == quantized == {"attention", "dense_mlp", "shared_expert", "routed_expert"}
    saved = sum(
        tensor.num_bytes - sum(output.num_bytes for output in tensor.outputs)
        for tensor in plan.tensors
        if tensor.action == "quantize"
    )
    assert sum(more.values()) == saved > 0
    shares = {"routed_expert": 0.6, "attention": 0.2}
    experts, attention = (more[role] / 1e6 for role in shares)
    gains = f"`routed_expert` 60% for {experts:.3g} MB ({0.6 / experts:.2%} per MB), `attention` 20% for {attention:.3g} MB"
    assert explain_role("attention", "layer 2 stands out", shares, tmp_path).startswith(
        f"layer 2 stands out; error that keeping a role in BF16 would spare, for its bytes: {gains} ("
    )
    assert explain_role("routed_expert", None, shares, tmp_path / "x") == "`routed_expert` brings most of the error in"


def test_numbers_have_headers(capsys: pytest.CaptureFixture[str]) -> None:
    place = PointDifference(
        name="model.layers.2.mlp.experts", kind="moe", layer=2, expert=None, role="routed_expert", rank=0, partial=False,
        distance=0.25, added=0.125, noise=0.0, max_abs=(3.0, 4.0), mean=(0.0, 0.0), rms=(1.0, 1.5), non_finite=(0, 0),
    )  # fmt: skip
    result = LocateReport(
        how="servers", a="A", b="B", tensor_parallel_size=1, num_prompts=1, num_tokens=9, first=None, outlier=None, remedy=None,
        sentence="they differ", points=(place,), not_compared=(), seconds=0.0,
    )  # fmt: skip
    show(result, Console(soft_wrap=True, width=200))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[2:] == [
        "place rank adds apart by RMS A, B largest A, B",
        "2.mlp.experts 0 0.125 0.25 1 1.5 3 4",
        "they differ",
    ]
