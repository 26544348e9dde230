"""`assay sensitivity` as a user runs it: a planted weak layer comes first, what was measured is kept, mistakes are one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import Run
from planted_outliers import plant_outliers

from assay.records.choice.mix import Mix
from assay.records.diagnosis.sensitivity import Sensitivity
from assay_cli.shown.sensitivity import shade_of, shares_by_role, worst_parts
from assay_pipeline.sensitivity.measure import spread
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.sensitivity.parts import Key

TRAINED = Path(__file__).parents[3] / "examples" / "tiny_glm" / "checkpoint"
PROMPTS = "\n".join(json.dumps({"text": f"{i} + {i + 7} = {2 * i + 7}. The garden has {i} trees."}) for i in range(60))


MIX = """schema: 1
name: mine
mtp: keep
keep:
  source: [norm]
  bf16: [mtp, dense_mlp, shared_expert, routed_expert, lm_head, embedding, router, indexer]
  fp32: [router_bias]
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model of this repository, the experts of layer 2 with outliers."""
    return plant_outliers(TRAINED, tmp_path_factory.mktemp("planted") / "weak", layer=2)


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["kl", "weights"])
def test_a_planted_weak_layer_comes_first(run: Run, planted: Path, tmp_path: Path, proxy: str) -> None:
    """By every proxy; in the unplanted model it does not."""
    (tmp_path / "text.jsonl").write_text(PROMPTS)
    common = ("--schemes", "w4a16", "--proxy", proxy, "--text", tmp_path / "text.jsonl", "--tokens", 640, "--length", 32)
    code, out, _ = run("sensitivity", planted, *common, "--out", tmp_path / "found")
    assert code == 0
    found = Sensitivity.load(tmp_path / "found" / "sensitivity.json")
    first = worst_parts(found)[0]
    assert (first.layer, first.role) == (2, "routed_expert")
    rows = [line for line in out.splitlines() if "routed_expert" in line and "model.layers.2.mlp.experts." in line]
    assert rows and out.index(rows[0]) > out.index("w4a16: ")
    assert out.splitlines()[1].startswith("w4a16: ") and out.splitlines()[2].split() == [
        "layer", "attention", "dense_mlp", "shared_expert", "routed_expert",
    ]  # fmt: skip
    assert out.splitlines()[5].startswith("2") and "█" in out.splitlines()[5], "layer 2 has the darkest shade"
    if proxy == "kl":
        assert "rank correlation of proxy:weights with proxy:kl: " in out
        assert "rank correlation with what is served: NOT MEASURED; --served N serves N parts" in out
        code, _, _ = run("sensitivity", TRAINED, *common, "--out", tmp_path / "plain")
        plain = worst_parts(Sensitivity.load(tmp_path / "plain" / "sensitivity.json"))[0]
        assert (plain.layer, plain.role) != (2, "routed_expert")


@pytest.mark.slow
def test_a_planted_weak_layer_is_first_and_kept_in_more_bits(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    """From the weights to the recipe: a budget with room for one layer's experts in 8 bits gives it to the planted layer."""
    weak = plant_outliers(tiny_glm, tmp_path / "weak", layer=2)
    (tmp_path / "text.jsonl").write_text(PROMPTS)
    code, _, told = run(
        "sensitivity", weak, "--schemes", "w4a16,fp8_block", "--text", tmp_path / "text.jsonl", "--tokens", 640, "--length", 32,
        "--out", tmp_path / "found",
    )  # fmt: skip
    assert code == 0, told
    record = tmp_path / "found" / "sensitivity.json"
    found = Sensitivity.load(record)
    first = worst_parts(found)[0]
    assert (first.layer, first.role, first.scheme) == (2, "routed_expert", "w4a16")
    [uniform] = [one for one in found.uniform if one.scheme == "w4a16"]
    of_weak = found.by_part[2, "routed_expert"]
    budget = uniform.bytes + of_weak["fp8_block"].bytes - of_weak["w4a16"].bytes
    code, out, told = run("recipe", weak, "--budget", f"{budget}B", "--sensitivity", record, "--no-replay", "--json")
    assert code == 0, told
    mix = Mix.model_validate_json(out)
    assert mix.proposes == "mix", mix.reason
    assert {part.layer: part.scheme for part in mix.parts if part.role == "routed_expert"} == {1: "w4a16", 2: "fp8_block"}


@pytest.mark.slow
def test_whole_record(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(PROMPTS)
    arguments = (
        "sensitivity", tiny_glm, "--schemes", "w4a16,nvfp4", "--text", tmp_path / "text.jsonl", "--tokens", 640, "--length", 32,
        "--out", tmp_path / "found", "--json",
    )  # fmt: skip
    code, out, told = run(*arguments)
    assert code == 0
    found = Sensitivity.model_validate_json(out)
    assert found == Sensitivity.load(tmp_path / "found" / "sensitivity.json")
    assert (found.method, found.in_nats, found.num_texts, found.num_tokens, found.layers) == ("proxy:kl", True, 20, 620, 3)
    assert found.source_sha256 == open_checkpoint(tiny_glm).sha256
    assert found.noise_nats == 0.0
    parts = found.by_part
    assert [len(parts[key]) for key in parts] == [3] * 9
    assert all(one["bf16"].damage_nats == 0.0 for (_, role), one in parts.items() if role != "mtp")
    assert [one.damage_nats for one in parts[(None, "mtp")].values()] == [None, None, None]
    measured = [part for part in found.parts if part.scheme != "bf16" and part.role != "mtp"]
    assert len(measured) == 16
    for part in measured:
        assert part.damage_nats is not None and part.interval is not None and part.worst
        assert part.interval.value == part.damage_nats and part.interval.n == 20
        assert 0 < part.bytes < parts[(part.layer, part.role)]["bf16"].bytes
    of_attention = parts[(0, "attention")]["w4a16"]
    assert of_attention.routing is not None and of_attention.routing.layer in (1, 2)
    assert [one.scheme for one in found.uniform] == ["w4a16", "nvfp4"]
    kept = sum(one["bf16"].bytes for key, one in parts.items() if key[1] == "mtp") + found.other_bytes
    for one in found.uniform:
        assert one.bytes == kept + sum(p[one.scheme].bytes for key, p in parts.items() if key[1] != "mtp")
        assert [routing.layer for routing in one.routing] == [1, 2]
        assert one.sum_of_parts_nats == pytest.approx(sum(p.damage_nats or 0 for p in measured if p.scheme == one.scheme))
    assert {(one.of, one.beside) for one in found.correlations} == {("proxy:weights", "proxy:kl")}
    assert found.not_measured == {
        "long context": "no text is longer than 32 tokens",
        "acceptance by precision of the MTP block": "say --run",
    }
    assert "1 of 16: layer 0 attention, w4a16: " in told
    assert sum(shares_by_role(found, "w4a16").values()) == pytest.approx(1)

    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"{MIX}quantize: {{attention: w4a16}}\ncalibration: none\n"
        "layers: {'1': {attention: nvfp4}, '2': {attention: bf16}}\n"
    )
    code, out, told = run(*arguments[:-1], "--mix", recipe)
    assert "1 of 16" not in told and "a mix as a whole" in told, "what was measured is kept"
    again = Sensitivity.load(tmp_path / "found" / "sensitivity.json")
    assert again.model_copy(update={"cpu_seconds": found.cpu_seconds, "wholes": ()}) == found
    (whole,) = again.wholes
    assert whole.schemes == ((0, "attention", "w4a16"), (1, "attention", "nvfp4")) and whole.interval is not None
    sums = (parts[0, "attention"]["w4a16"].damage_nats or 0) + (parts[1, "attention"]["nvfp4"].damage_nats or 0)
    assert whole.sum_of_parts_nats == pytest.approx(sums) and whole.damage_nats == pytest.approx(sums, rel=0.5)
    (line,) = [line for line in out.splitlines() if line.startswith("as a whole: ")]
    assert line.startswith("as a whole: 1 part in w4a16, 1 part in nvfp4: ") and line.endswith(f"sum to {sums:.3g}")


@pytest.mark.serve
def test_served_parts_agree_with_the_proxy(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    """On the same replies. Random weights spread over 512 ids, of which a server tells 64: its KL, a lower bound, is less."""
    arguments = (
        "sensitivity", tiny_glm, "--schemes", "nvfp4", "--tokens", 480, "--length", 24, "--served", 2,
        "--profile", "cpu-emulated", "--out", tmp_path / "found", "--json",
    )  # fmt: skip
    code, out, _ = run(*arguments)
    assert code == 0
    found = Sensitivity.model_validate_json(out)
    assert found.texts == "replies that the served source wrote"
    served = [part for part in found.parts if part.served_nats is not None]
    ranked = worst_parts(found, 100)
    assert served == [part for part in found.parts if part in (ranked[0], ranked[-1])]
    for part in served:
        assert part.served_nats is not None and part.served_nats.n == found.num_texts
        assert part.damage_nats is not None and part.damage_nats / 6 < part.served_nats.value < 1.05 * part.damage_nats
    by_rank = [next(part.served_nats for part in served if part == one) for one in (ranked[0], ranked[-1])]
    assert by_rank[0] is not None and by_rank[1] is not None and by_rank[0].value > 2 * by_rank[1].value
    assert [one.why_not for one in found.correlations if one.beside == "served"] == ["2 parts in both; 4 are needed"] * 2
    assert not [*tmp_path.glob("found/sensitivity/served-*/*/checkpoint")], "checkpoints go once they are measured"


def test_the_cost_is_said_before(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    code, out, told = run("sensitivity", tiny_glm, "--proxy", "weights", "--estimate", "--out", tmp_path / "found")
    assert (code, out) == (0, "")
    assert "estimate: " in told and "of weights are read and rounded, no model is run" in told
    assert not (tmp_path / "found").exists()


def test_the_cost_of_passes_is_estimated_without_the_texts(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    options = ("--schemes", "w4a16", "--tokens", 640, "--length", 32, "--estimate", "--out", tmp_path / "found")
    code, out, told = run("sensitivity", tiny_glm, *options)
    assert (code, out) == (0, "")
    assert re.search(r"^estimate: the model first writes its texts, about \d+\.\d minutes of one core$", told, re.M)
    assert re.search(
        r"^estimate: \d+ passes over the texts, about \d+\.\d minutes of one core beside the rounding of weights; "
        r"[\d.]+ kB to keep$",
        told, re.M,
    )  # fmt: skip
    assert "replies: " not in told and not (tmp_path / "found").exists()


@pytest.mark.slow
def test_one_layer_at_a_time_it_is_the_same_order(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(PROMPTS)
    common = ("--schemes", "w4a16", "--text", tmp_path / "text.jsonl", "--tokens", 320, "--length", 32)
    code, out, _ = run("sensitivity", tiny_glm, *common, "--by-layer", "--out", tmp_path / "layers")
    assert code == 0 and "rank correlation of proxy:hidden with proxy:kl: " in out
    by_layer = Sensitivity.load(tmp_path / "layers" / "sensitivity.json")
    assert by_layer.method == "proxy:kl" and by_layer.in_nats and by_layer.noise_nats is None
    code, _, _ = run("sensitivity", tiny_glm, *common, "--whole", "--out", tmp_path / "whole")
    whole = Sensitivity.load(tmp_path / "whole" / "sensitivity.json")
    assert [(p.layer, p.role, p.scheme, p.worst) for p in by_layer.parts if p.scheme != "bf16"]
    for ours, theirs in zip(by_layer.parts, whole.parts, strict=True):
        assert (ours.layer, ours.role, ours.scheme, ours.bytes) == (theirs.layer, theirs.role, theirs.scheme, theirs.bytes)
        assert ours.damage_nats == (
            None if theirs.damage_nats is None else pytest.approx(theirs.damage_nats, rel=1e-3, abs=1e-6)
        )
    code, _, _ = run("sensitivity", tiny_glm, *common, "--proxy", "hidden", "--out", tmp_path / "hidden")
    hidden = Sensitivity.load(tmp_path / "hidden" / "sensitivity.json")
    assert code == 0 and hidden.method == "proxy:hidden" and not hidden.in_nats
    assert hidden.not_measured["divergence"] == "proxy hidden goes no further than a part's own layer"


@pytest.mark.slow
def test_languages_of_rows_stand_apart(run: Run, tiny_glm: Path, tmp_path: Path) -> None:
    """Each has sequences of its own and as many tokens, in whatever order and files the rows come."""
    rows = [{"text": f"{i} + {i} = {2 * i}. The garden has trees.", "language": "en"} for i in range(60)]
    rows += [{"text": f"{i} + {i} = {2 * i}. Der Garten hat Baeume.", "language": "de"} for i in range(20)]
    (tmp_path / "one.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "two.jsonl").write_text("\n".join(json.dumps(row | {"language": "de"}) for row in rows[:30]))
    asked = ("--schemes", "w4a16", "--tokens", 640, "--length", 32, "--out", tmp_path / "found", "--json")
    code, out, told = run("sensitivity", tiny_glm, "--text", f"{tmp_path}/one.jsonl,{tmp_path}/two.jsonl", *asked)
    assert code == 0, told
    found = Sensitivity.model_validate_json(out)
    assert found.num_texts == 20
    part = found.by_part[1, "attention"]["w4a16"]
    languages = {kind.name: kind for kind in part.by_kind if kind.kind == "language"}
    assert {name: one.num_positions for name, one in languages.items()} == {"en": 310, "de": 310}
    assert part.damage_nats == pytest.approx(sum(one.damage_nats for one in languages.values()) / 2)
    assert languages["en"].damage_nats != languages["de"].damage_nats
    said = f"{tmp_path}/one.jsonl (en), {tmp_path}/one.jsonl (de) (50%), {tmp_path}/two.jsonl (de) (50%)"
    assert found.texts == said

    few = {"text": "Le jardin.", "language": "fr"}
    (tmp_path / "one.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, few]))
    code, _, told = run("sensitivity", tiny_glm, "--text", tmp_path / "one.jsonl", *asked)
    problem = f"{tmp_path}/one.jsonl (fr): less than one sequence of 32 tokens; give more text or a smaller --length"
    assert (code, told.splitlines()[-1]) == (2, f"error: {problem}")


def test_hours_elsewhere_are_said_from_shapes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ("--schemes", "w4a16", "--proxy", "hidden", "--estimate", "--hardware", "server")
    code, out, told = run("sensitivity", "qwen3-30b-a3b", *arguments)
    assert code == 0 and "planned from the shapes that ship with assay" in told
    names = [line.split("  ")[1].strip() for line in out.splitlines()[1:] if line.startswith("  ")]
    assert out.startswith("proxy hidden, extrapolated, not measured, on the cores of server:")
    assert names[:9] == ["tokens", "source", "round", "layers", "passes", "states", "together", "disk", "memory"]


def test_hours_elsewhere_count_mixes(run: Run, tiny_glm: Path) -> None:
    arguments = ("sensitivity", tiny_glm, "--schemes", "w4a16,nvfp4", "--estimate", "--hardware", "server")
    passes = [
        int(next(line for line in run(*arguments, *more)[1].splitlines() if line.startswith("  passes ")).split()[3])
        for more in ((), ("--mix", "w4a16,nvfp4"))
    ]
    assert passes[1] == passes[0] + 2 * 3, "every layer of each mix"
    code, _, told = run(*arguments, "--mix", "w4a16-g32")
    assert code == 2 and "--mix w4a16-g32: has layer 0 attention in w4a16_g32, which --schemes has not" in told


@pytest.mark.parametrize(
    ("lines", "options", "problem"),
    [
        ("calibration: none\nobserver: mse", (), "has `observer: mse`, and minmax is measured; say --observer mse"),
        ("calibration: {method: gptq}", (), "has `calibration: gptq`, and none is measured; say --method gptq"),
        ("calibration: {method: awq}", (), "has `calibration: awq`, and parts are measured by gptq or data-free"),
        (
            "calibration: none\nkv_cache: fp8",
            (),
            "scales of activations and of the KV cache are not measured here; name one without them",
        ),
        ("calibration: none", (), "has layer 0 attention in w4a16_g32, which --schemes has not; name that too"),
        (
            "calibration: none",
            ("--proxy", "weights"),
            "--mix measures a whole model, and --proxy weights does not; say --proxy kl",
        ),
    ],
)
def test_a_mix_of_what_is_not_measured_is_refused(
    run: Run, tiny_glm: Path, tmp_path: Path, lines: str, options: tuple[str, ...], problem: str
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{MIX}quantize: {{attention: w4a16_g32}}\n{lines}\n")
    code, out, told = run("sensitivity", tiny_glm, "--schemes", "w4a16,nvfp4", "--mix", recipe, *options)
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", 1) and problem in errors[0], told


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--mix", "none.yaml"), "error: none.yaml: cannot be read: No such file or directory"),
        (("--schemes", "w3a16"), "--schemes w3a16: did you mean w4a16? it takes one of: w4a16, w4a16_g64"),
        (("--proxy", "hessian"), "--proxy hessian: it takes one of: kl, hidden, weights"),
        (("--schemes", "w4a16", "--map", "nvfp4"), "--map nvfp4: is not measured; say one of --schemes (w4a16)"),
        (
            ("--served", "2", "--text", "x.txt"),
            "--served measures on replies that the served source writes, and --text does without",
        ),
        (("--served", "2", "--proxy", "weights"), "and --proxy weights does without: leave one out"),
        (("--hardware", "8xh200"), "--hardware says what another machine would take: say --estimate as well"),
        (("--by-layer", "--proxy", "weights"), "--by-layer is for --proxy kl and hidden; --proxy weights does without"),
        (("--by-layer",), "cannot write replies; give --text FILE, or --run RUN for those of its reference"),
        (("--method", "gptq", "--proxy", "weights"), "--method gptq: --proxy weights says nothing of calibrated weights"),
        (("--method", "gptq", "--schemes", "nvfp4"), "--method gptq: is for INT4, and --schemes has none of it; name one of"),
        (
            ("--method", "gptq", "--text", "own"),
            "--seed 0: the model's own text of this seed is what INT4 weights are calibrated",
        ),
        (("--text", "x.txt", "--run", "r"), "--text gives other texts than --run has: say one of them"),
        (("--run", "r", "--out", "o"), "--run puts what is found into a run, --out into any folder: say one of them"),
    ],
)
def test_mistakes(run: Run, tiny_glm: Path, arguments: tuple[str, ...], problem: str) -> None:
    code, out, told = run("sensitivity", tiny_glm, *arguments)
    assert (code, out) == (2, "")
    assert problem in told and "Traceback" not in told
    assert told.count("error:") == 1


def test_parts_to_serve_are_spread_over_the_order() -> None:
    order = {(Key(layer, "attention"), "w4a16"): float(layer) for layer in range(9)}
    assert [key.layer for key, _ in spread(order, 3)] == [8, 4, 0]
    assert [key.layer for key, _ in spread(order, 1)] == [8]
    assert len(spread(order, 20)) == 9


def test_shades_are_steps_of_the_logarithm() -> None:
    values = [1e-5, 1e-4, 1e-3, 1e-2, 1.0]
    assert [shade_of(value, values) for value in values] == [0, 1, 2, 3, 4]
    assert (shade_of(0.0, values), shade_of(0.5, [0.5, 0.5])) == (0, 0)
