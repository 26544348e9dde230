"""`assay blame` of tiny-glm with one thing planted: activations, KV cache, one layer's experts, two at once, config.json."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_errors import one_error
from command_line import Run
from safetensors import safe_open
from safetensors.torch import save_file
from synthetic_run import make_run
from tiny_families import glm4_moe, make_tiny
from torch import Tensor

from assay.errors import AssayError
from assay.recipes.load import load_recipe, parse_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.diagnosis.blame import Blame, Cause
from assay.records.screening import Screening
from assay.records.verdict import GateReport
from assay_evaluate.tasks.items import arithmetic_item
from assay_pipeline.blaming.blame import Question, blame
from assay_pipeline.blaming.changed_recipe import changed_recipe
from assay_pipeline.blaming.factors import Factor, weight_factors
from assay_quantize.screen.mixed_model import Place

TINY_GLM = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
sys.path.insert(0, str(TINY_GLM.parent))
from data import solution  # noqa: E402

LAYERS = range(4)


def made(precision: str, folder: Path) -> Path:
    from assay_pipeline.quantizing import quantize

    out = folder / precision
    if not out.is_dir():
        quantize(str(TINY_GLM), precision=precision, out=out)
    return out


def edited(
    candidate: Path, folder: Path, change: Callable[[str, Tensor], Tensor], added: dict[str, Tensor] | None = None
) -> Path:  # fmt: skip
    shutil.copytree(candidate, folder)
    (folder / "assay_manifest.json").unlink()  # its hashes are not those of the files any more
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        with safe_open(path, "pt") as file:
            tensors = {name: change(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        save_file(tensors | (added or {} if number == 0 else {}), path, {"format": "pt"})
        if number == 0 and added:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            index["weight_map"] |= dict.fromkeys(added, path.name)
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def as_it_is(_name: str, tensor: Tensor) -> Tensor:
    return tensor


def clipped_inputs(name: str, tensor: Tensor) -> Tensor:
    """Scales of NVFP4 inputs that saturate."""
    return tensor * 400 if name.endswith("input_global_scale") else tensor


def with_fp8_cache(folder: Path) -> Path:
    """It asks for an FP8 KV cache."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
                                                         "symmetric": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def clipping(step: float) -> dict[str, Tensor]:
    """Scales that cut off keys and values above 448 steps."""
    leaves = ("k_scale", "v_scale")
    return {f"model.layers.{layer}.self_attn.{leaf}": torch.tensor(step) for layer in LAYERS for leaf in leaves}


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> Question:
    """Sums and their solutions, as the model writes them."""
    file, draw = tmp_path_factory.mktemp("texts") / "replies.jsonl", random.Random(0)
    sums = [arithmetic_item("blame", number, ("en", "zh")[number % 2], 2 + number % 3) for number in range(32)]
    entries = [json.dumps({"prompt": item.prompt, "reply": solution(item, draw)}, ensure_ascii=False) for item in sums]
    file.write_text("\n".join(entries))
    return Question(text=(file,), num_tokens=1_500)


@pytest.fixture(scope="module")
def precisions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precisions")


def asked(candidate: Path, out: Path, question: Question, lines: list[str] | None = None) -> Blame:
    record, path = blame([str(TINY_GLM), str(candidate)], question, out=out, say=(lines if lines is not None else []).append)
    assert Blame.load(path) == record
    return record


def shares(record: Blame) -> dict[str, float]:
    assert all(cause.share is not None for cause in record.causes)
    return {cause.name: cause.share.value for cause in record.causes if cause.share is not None}


def first_of(record: Blame) -> Cause:
    return record.causes[0]


# ------------------------------------------------------------------------------------------------ planted
def test_activations(question: Question, precisions: Path, tmp_path: Path) -> None:
    record = asked(edited(made("nvfp4", precisions), tmp_path / "planted", clipped_inputs), tmp_path / "out", question)
    assert record.word == "blamed" and first_of(record).name == "activations"
    assert first_of(record).share is not None and first_of(record).share.low > 0.8  # type: ignore[union-attr]
    change = record.change
    assert change is not None and change.is_within and change.kl.high <= record.limit
    assert "rounding of activations" in change.restored


def test_kv_cache(question: Question, precisions: Path, tmp_path: Path) -> None:
    planted = with_fp8_cache(edited(made("w4a16-g32", precisions), tmp_path / "planted", as_it_is, clipping(0.001)))
    record = asked(planted, tmp_path / "out", question)
    assert record.word == "blamed" and first_of(record).name == "kv_cache"
    assert first_of(record).share is not None and first_of(record).share.low > 0.8  # type: ignore[union-attr]
    change = record.change
    assert change is not None and change.restored == ("FP8 KV cache",) and change.is_within
    assert change.variant == "kv-cache-dtype=bfloat16" and change.recipe is None


@pytest.mark.parametrize("layer", [1, 3])
def test_one_layer_s_experts(question: Question, precisions: Path, tmp_path: Path, layer: int) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor * 4 if f".layers.{layer}.mlp.experts." in name and name.endswith("weight_scale") else tensor

    candidate = made("w4a16-g32", precisions)
    planted = edited(candidate, tmp_path / "planted", change)
    shutil.copy(candidate / "assay_manifest.json", planted)
    record = asked(planted, tmp_path / "out", question)
    assert record.word == "blamed" and first_of(record).name == "routed_expert"
    assert first_of(record).share is not None and first_of(record).share.low > 0.8  # type: ignore[union-attr]
    span = record.layers[0]
    assert (span.cause, span.first_layer, span.last_layer) == ("routed_expert", layer, layer) and span.share > 0.8
    proposed = record.change
    assert proposed is not None and proposed.restored == (f"weights of routed experts of layer {layer}",)
    assert proposed.is_within and proposed.added_bytes > 0 and 1 < proposed.read_ratio < 2 and proposed.recipe is not None
    recipe = load_recipe(PrecisionRecipe, proposed.recipe)
    told = {number: recipe.scheme_of("routed_expert", number) for number in LAYERS}
    assert told == {number: None if number == layer else "w4a16_g32" for number in LAYERS}
    assert recipe.scheme_of("attention", layer) == "w4a16_g32"
    what = f"w4a16-g32, but weights of routed experts of layer {layer} as in the reference: by `assay blame`."
    assert recipe.description == what


def test_kv_cache_and_activations_together(question: Question, precisions: Path, tmp_path: Path) -> None:
    planted = with_fp8_cache(edited(made("nvfp4", precisions), tmp_path / "planted", clipped_inputs, clipping(0.002)))
    record = asked(planted, tmp_path / "out", question)
    assert {cause.name for cause in record.causes[:2]} == {"kv_cache", "activations"}
    both = shares(record)
    assert both["kv_cache"] + both["activations"] > 0.8 and min(both["kv_cache"], both["activations"]) > 0.15
    pair = next(pair for pair in record.interactions if {pair.first, pair.second} == {"kv_cache", "activations"})
    assert pair.share.high < -0.3  # either alone loses most of what both do
    assert record.change is not None and {"FP8 KV cache", "rounding of activations"} <= set(record.change.restored)


def test_config(question: Question, precisions: Path, tmp_path: Path) -> None:
    planted = edited(made("w4a16-g32", precisions), tmp_path / "planted", as_it_is)
    config = json.loads((planted / "config.json").read_text())
    (planted / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 10.0}))
    record = asked(planted, tmp_path / "out", question)
    assert first_of(record).name == "config" and "routed_scaling_factor is 10.0" in first_of(record).what
    assert record.change is not None and record.change.is_within and record.change.recipe is None


# ------------------------------------------------------------------------------------------------ nothing planted
def test_a_healthy_candidate_and_what_a_screening_says(question: Question, precisions: Path, tmp_path: Path) -> None:
    from assay_pipeline.comparison.screening import screen

    candidate, lines = made("fp8", precisions), list[str]()
    record = asked(candidate, tmp_path / "out", question, lines)
    assert record.word == "nothing to blame" and not record.causes and record.change is None and record.num_passes == 1
    assert any(line.startswith("estimate: about ") for line in lines)
    screened, _ = screen(
        [str(TINY_GLM), str(candidate)], text=question.text, num_tokens=1_500, all_texts=True, out=tmp_path / "screen"
    )
    assert isinstance(screened, Screening)
    assert screened.candidates[0].drift.kl_mean.value == pytest.approx(record.kl.value, rel=1e-9)
    assert (record.limit, record.limit_for) == (screened.candidates[0].limit, screened.candidates[0].limit_for)
    more = asked(candidate, tmp_path / "out", replace(question, anyway=True))
    assert more.word == "nothing to blame" and sum(shares(more).values()) == pytest.approx(1 - (more.unexplained or 0))
    assert more.change is None


def test_a_killed_command_goes_on(question: Question, precisions: Path, tmp_path: Path) -> None:
    candidate = made("w4a16", precisions)
    some = replace(question, num_tokens=500, anyway=True)

    class Killed(Exception):
        pass

    def kill(line: str) -> None:
        if line.startswith("pass 4"):
            raise Killed

    with pytest.raises(Killed):
        blame([str(TINY_GLM), str(candidate)], some, out=tmp_path / "killed", say=kill)
    resumed, _ = blame([str(TINY_GLM), str(candidate)], some, out=tmp_path / "killed")
    whole, _ = blame([str(TINY_GLM), str(candidate)], some, out=tmp_path / "whole")
    assert resumed.num_passes == whole.num_passes - 3
    assert resumed.model_copy(update={"seconds": 0, "num_passes": 0}) == whole.model_copy(
        update={"seconds": 0, "num_passes": 0, "change": resumed.change}
    )


def test_the_same_checkpoint_has_no_cause(question: Question, tmp_path: Path) -> None:
    same = shutil.copytree(TINY_GLM, tmp_path / "same")
    with pytest.raises(AssayError, match=f"^{same}: computes what {TINY_GLM} does; nothing to blame$"):
        blame([str(TINY_GLM), str(same)], question, out=tmp_path / "out")


# ------------------------------------------------------------------------------------------------ wrong words
def test_wrong_words(run: Run, question: Question, precisions: Path, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    other = make_tiny(tmp_path / "other", glm4_moe(vocab_size=960))
    source, candidate = str(TINY_GLM), str(made("w4a16-g32", precisions))
    for words, message in (
        (("nowhere",), "nowhere: no such folder; give that of a run, or those of a reference and of a candidate"),
        ((source, candidate, candidate), "give the folder of a run, or those of a reference and of a candidate"),
        ((source, candidate, "--candidate", "x"), "--candidate: is for a run; of two folders the second is the candidate"),
        ((source, "me/model"), "me/model: is read many times; download it first and give its folder"),
        ((str(run_dir), "--candidate", "w4a61"),
         f"--candidate w4a61: did you mean w4a16? {run_dir} has the candidates bf16, nvfp4a16, w4a16"),
        ((source, str(other)),
         "other: has 960 tokens in its head, the reference 896: it is another model, whose next-token distributions are over "
         "other tokens; give a candidate of this reference"),
    ):  # fmt: skip
        assert one_error(run("blame", *words)) == message
    code, _, err = run("blame", source, candidate, "--max-hours", "0", "--text", str(question.text[0]))
    assert code == 2 and err.splitlines()[-1].startswith("error: --max-hours: up to 24 passes of about ")


def test_what_the_run_failed_is_not_cleared(
    question: Question, precisions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divergence of a candidate is within its limit, and its tasks lost."""
    candidate = made("w4a16-g32", precisions)
    run_dir = make_run(tmp_path)
    gates = GateReport.load(run_dir / "gates.json")
    lost = gates.model_copy(update={"overall": gates.overall | {"w4a16": "FAIL"}, "reasons": {"w4a16": "loses 9 points"}})
    lost.save(run_dir / "gates.json")
    folders = {"fp8": TINY_GLM, "w4a16": candidate}
    monkeypatch.setattr("assay_pipeline.blaming.blame.folder_of", lambda measured, _run: folders[measured.label])
    record, path = blame([str(run_dir)], question, candidate="w4a16")
    assert path == run_dir / "blame" / "w4a16" / "blame.json"
    assert (record.word, record.run_status, record.run_reason) == ("undecided", "FAIL", "loses 9 points")
    assert record.kl.high <= record.limit and record.causes and record.change is None


# ------------------------------------------------------------------------------------------------ parts
def test_roles_are_joined_where_there_are_too_many() -> None:
    places = [Place(role, 0) for role in ("attention", "routed_expert", "norm", "router", "indexer", "dense_mlp")]
    places += [Place(role, None) for role in ("embedding", "lm_head", "norm")]
    assert [factor.name for factor in weight_factors(places, 8)] == [
        "routed_expert", "dense_mlp", "attention", "indexer", "router", "norm", "embedding", "lm_head",
    ]  # fmt: skip
    few = weight_factors(places, 4)
    assert [factor.name for factor in few] == ["routed_expert", "dense_mlp", "attention", "rest"]
    assert few[-1].places == frozenset(
        place for place in places if place.role not in {"attention", "routed_expert", "dense_mlp"}
    )
    assert few[-1].what == "embedding, norms, output head, routers, weights of indexers"


def recipe_of(text: str) -> PrecisionRecipe:
    import yaml

    return PrecisionRecipe.model_validate({"schema": 1, "name": "own", **yaml.safe_load(text)})


KEEP = "keep: {source: [norm], bf16: [embedding, lm_head, indexer, router, mtp%s], fp32: [router_bias]}"


def changed(text: str, *factors: Factor) -> PrecisionRecipe | None:
    return changed_recipe(recipe_of(text), factors, 6, "own-mended", "the rest")


def experts(*layers: int) -> Factor:
    return Factor("weights", "routed_expert", "weights of routed experts", frozenset(Place("routed_expert", n) for n in layers))


def test_recipes_with_a_change(tmp_path: Path) -> None:
    own = "scheme: nvfp4\nquantize: [routed_expert, attention, dense_mlp, shared_expert]\nactivations: calibrated\n" + KEEP % ""
    attention = Factor("weights", "attention", "attention", frozenset({Place("attention", 3)}), is_part=True)
    some = changed(own, experts(*range(6)).within(Place("routed_expert", number) for number in range(1, 6)), attention)
    assert some is not None and some.quantize == ("routed_expert", "attention", "dense_mlp", "shared_expert")
    assert [some.scheme_of("routed_expert", number) for number in range(6)] == ["nvfp4", *5 * [None]]
    assert [some.scheme_of("attention", number) for number in range(6)] == [*3 * ["nvfp4"], None, *2 * ["nvfp4"]]
    assert sorted(some.layers) == ["1-2, 4-5", "3"]
    all_layers = changed(own, experts(*range(6)))
    assert all_layers is not None and "routed_expert" not in all_layers.quantize and "routed_expert" in all_layers.keep["bf16"]
    weight_only = changed(own, Factor("activations", "activations", "rounding"))
    assert weight_only is not None and weight_only.scheme == "nvfp4a16" and weight_only.activations == "constant"
    mixed = "quantize: {routed_expert: w4a16, attention: fp8_block}\nlayers: {'0-1, 4': {routed_expert: fp8_block}}\n"
    mixed += "kv_cache: fp8\n" + KEEP % ", dense_mlp, shared_expert"
    last = experts(*range(6)).within(Place("routed_expert", number) for number in (4, 5))
    without_cache = changed(mixed, last, Factor("kv_cache", "kv_cache", "FP8 KV cache"))
    assert without_cache is not None and without_cache.kv_cache is None
    assert [without_cache.scheme_of("routed_expert", number) for number in range(6)] == [
        "fp8_block", "fp8_block", "w4a16", "w4a16", None, None,
    ]  # fmt: skip
    assert changed(mixed, Factor("activations", "activations", "rounding")) is None
    assert changed(mixed, Factor("config", "config", "config.json")) is None
    assert changed(mixed, Factor("weights", "norm", "norms", frozenset({Place("norm", 1)}))) is None
    from assay_pipeline.blaming.changed_recipe import write_recipe

    write_recipe(without_cache, tmp_path / "own-mended.yaml")
    assert parse_recipe(PrecisionRecipe, tmp_path / "own-mended.yaml").sha256 == without_cache.sha256
