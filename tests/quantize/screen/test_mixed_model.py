"""Models of which some parts are the candidate's: beside checkpoints that are put together of the two, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_families import deepseek_v3, glm4_moe, make_tiny
from torch import Tensor

from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import StoredCheckpoint, open_stored
from assay_quantize.screen.forward import ScreenPass, run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.memory import Groups, Parts
from assay_quantize.screen.mixed_model import MixedModel, Place, Switches
from assay_quantize.sensitivity.texts import ScoredText

TEXTS = [ScoredText(tuple(range(7, 60)), 1), ScoredText(tuple(range(400, 430)), 4)]
ROLES = ["attention", "dense_mlp", "routed_expert", "shared_expert"]
"""That the precisions here quantize."""


def opened(folder: Path) -> StoredCheckpoint:
    return open_stored(open_checkpoint(folder, allow_quantized=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mixed") / "source", glm4_moe())


def made(source: Path, precision: str) -> Path:
    from assay_pipeline.quantizing import quantize

    out = source.parent / precision
    if not out.is_dir():
        quantize(str(source), precision=precision, out=out)
    return out


def states_of(model: LayerModel, work: Path) -> list[Tensor]:
    result = run_pass(model, TEXTS, work, "one", lambda _line: None)
    assert isinstance(result, ScreenPass)
    return [result.state(number)[0] for number in range(len(TEXTS))]


def mixed(source: Path, candidate: Path, switches: Switches) -> MixedModel:
    return MixedModel(opened(candidate), LayerModel(opened(source)), switches)


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(state, other) for state, other in zip(first, second, strict=True))


def put_together(source: Path, candidate: Path, taken: set[Place], folder: Path) -> Path:
    """The source with the values of these weights of the candidate, by names."""
    shutil.copytree(source, folder)
    stored = opened(candidate)
    words = {"attention": "self_attn", "routed_expert": ".experts.", "shared_expert": "shared_experts"}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in tensors:
            quantized = {weight.name for weight in stored.weights}
            is_taken = any(f".layers.{place.layer}." in name and words[place.role] in name for place in taken)
            if is_taken and name in quantized:
                tensors[name] = stored.read_values(name)
        save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("precision", ["w4a16-g32", "nvfp4"])
def test_nothing_is_the_reference_and_everything_the_candidate(source: Path, precision: str, tmp_path: Path) -> None:
    candidate = made(source, precision)
    nothing = mixed(source, candidate, Switches())
    assert same(states_of(nothing, tmp_path / "a"), states_of(LayerModel(opened(source)), tmp_path / "b"))
    places = frozenset(nothing.differing())
    kept = {"attention"} if precision == "nvfp4" else set()
    assert {place.role for place in places} == set(ROLES) - kept and {place.layer for place in places} == {0, 1, 2}
    everything = mixed(source, candidate, Switches(places, activations=True, kv_cache=True, config=True))
    assert same(states_of(everything, tmp_path / "c"), states_of(LayerModel(opened(candidate)), tmp_path / "d"))
    assert nothing.rounds_otherwise() is (precision == "nvfp4") and not nothing.caches_otherwise()


def test_weights_of_one_role_in_one_layer(source: Path, tmp_path: Path) -> None:
    candidate = made(source, "w4a16-g32")
    for number, place in enumerate((Place("attention", 2), Place("routed_expert", 1), Place("shared_expert", 2))):
        model = mixed(source, candidate, Switches(frozenset({place})))
        plain = put_together(source, candidate, {place}, tmp_path / f"plain-{number}")
        own = states_of(model, tmp_path / f"m{number}")
        assert same(own, states_of(LayerModel(opened(plain)), tmp_path / f"p{number}"))
        assert not same(own, states_of(LayerModel(opened(source)), tmp_path / f"s{number}"))


def test_activations_are_rounded_with_the_reference_s_weights(source: Path, tmp_path: Path) -> None:
    """As a candidate whose codes are the reference's weights would: FP8 of weights that FP8 holds."""
    from assay_pipeline.quantizing import quantize

    candidate = made(source, "fp8-channel") if (source.parent / "fp8-channel").exists() else source.parent / "fp8-channel"
    if not candidate.is_dir():
        quantize(str(source), precision="fp8-channel", out=candidate)
    exact = tmp_path / "exact"  # a reference whose weights are what the candidate's codes stand for
    stored = opened(candidate)
    shutil.copytree(source, exact)
    quantized = {weight.name for weight in stored.weights}
    for path in exact.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(
            {name: stored.read_values(name) if name in quantized else tensor for name, tensor in tensors.items()}, path,
            {"format": "pt"},
        )  # fmt: skip
    only_rounded = mixed(exact, candidate, Switches(activations=True))
    assert same(states_of(only_rounded, tmp_path / "a"), states_of(LayerModel(opened(candidate)), tmp_path / "b"))


def test_config_and_head(source: Path, tmp_path: Path) -> None:
    candidate = shutil.copytree(made(source, "w4a16-g32"), tmp_path / "candidate")
    config = json.loads((candidate / "config.json").read_text())
    config["rms_norm_eps"] = 0.1
    (candidate / "config.json").write_text(json.dumps(config))
    plain = shutil.copytree(source, tmp_path / "plain")
    own = json.loads((plain / "config.json").read_text()) | {"rms_norm_eps": 0.1}
    (plain / "config.json").write_text(json.dumps(own))
    by_config = states_of(mixed(source, candidate, Switches(config=True)), tmp_path / "a")
    assert same(by_config, states_of(LayerModel(opened(plain)), tmp_path / "b"))
    assert same(
        states_of(mixed(source, candidate, Switches()), tmp_path / "c"), states_of(LayerModel(opened(source)), tmp_path / "d")
    )


def test_experts_in_groups_change_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = made(source, "w4a16-g32")
    switches = Switches(frozenset({Place("routed_expert", 1), Place("routed_expert", 2)}))
    whole = states_of(mixed(source, candidate, switches), tmp_path / "a")

    def groups(parts: Parts, _left_bytes: int) -> Groups:
        return Groups(tuple(range(first, min(first + 3, parts.num_experts)) for first in range(0, parts.num_experts, 3)))

    monkeypatch.setattr("assay_quantize.screen.layer_model.groups_of", groups)
    assert len(mixed(source, candidate, switches).load(1).groups.experts) == 2
    assert same(whole, states_of(mixed(source, candidate, switches), tmp_path / "b"))


def test_bytes_of_places(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source", deepseek_v3())
    candidate = made(source, "w4a16-g32")
    model = mixed(source, candidate, Switches())
    places = set(model.places.values())
    stored = opened(candidate)
    experts = [weight for weight in stored.weights if ".layers.1.mlp.experts." in weight.name]
    place = Place("routed_expert", 1)
    assert place in places and model.stored_bytes(place) == sum(weight.num_bytes for weight in experts)
    assert model.num_weights(place) == sum(weight.shape[0] * weight.shape[1] for weight in experts)
    outside = {place.role for place in places if place.layer is None}
    assert outside == {"embedding", "lm_head", "norm"}
