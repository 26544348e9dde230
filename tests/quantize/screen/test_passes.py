"""Passes over several texts: what they leave, what a kill changes, and what two of them differ by."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr
from tiny_families import glm4_moe, make_tiny

from assay.errors import QuantizeError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.open_stored import open_stored
from assay_quantize.screen.compare import PassSide, compare_passes, other_experts
from assay_quantize.screen.forward import run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.sensitivity.texts import ScoredText


def texts(count: int = 3) -> list[ScoredText]:
    draw = np.random.default_rng(0)
    return [ScoredText(tuple(map(int, draw.integers(7, 800, 20 + 9 * number))), 1 + 4 * number) for number in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("screen") / "source", glm4_moe())


@pytest.fixture(scope="module")
def candidate(source: Path) -> Path:
    from assay_pipeline.quantizing import quantize

    quantize(str(source), precision="w4a16-g32", out=source.parent / "w4a16")
    return source.parent / "w4a16"


def open_model(folder: Path) -> LayerModel:
    return LayerModel(open_stored(open_checkpoint(folder, allow_quantized=True)))


def passed(folder: Path, work: Path) -> PassSide:
    lines: list[str] = []
    result = run_pass(open_model(folder), texts(), work, "one", lines.append)
    assert lines == ["layer 1 of 3", "layer 2 of 3", "layer 3 of 3"]
    model = open_model(folder)
    return PassSide(model.stored.location, model.head(), result)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_same_checkpoint_twice_is_zero(source: Path, tmp_path: Path) -> None:
    first, second = passed(source, tmp_path / "a"), passed(source, tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    for values in compare_passes(texts(), first, second):
        assert not values.kl_P.any() and not values.reverse_kl_P.any() and not values.js_P.any()
        assert values.agrees_P.all() and (values.top_k_shared_P == 1).all() and not values.margin_P.any()
        assert (values.ln_p_P == values.ln_q_P).all()
    assert other_experts(texts(), first.states, second.states) == {1: (0.0, 0.0), 2: (0.0, 0.0)}


def test_values_are_those_of_whole_models(source: Path, candidate: Path, tmp_path: Path) -> None:
    """By scipy, from the logits of models that are whole in memory."""
    from transformers import AutoModelForCausalLM

    plain = shutil.copytree(source, tmp_path / "plain")
    weights = open_stored(open_checkpoint(candidate, allow_quantized=True))
    whole = {
        "p": AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval(),
        "q": AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager").eval(),
    }
    with torch.no_grad():
        for name, parameter in whole["q"].named_parameters():
            if ".experts." in name:
                root, _, leaf = name.rpartition(".")
                projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
                for expert, part in enumerate(parameter):
                    part.copy_(torch.cat([weights.read_weight(f"{root}.{expert}.{each}") for each in projections]))
            elif name in {weight.name for weight in weights.weights}:
                parameter.copy_(weights.read_weight(name))
    compared = list(compare_passes(texts(), passed(source, tmp_path / "a"), passed(candidate, tmp_path / "b")))
    for text, values in zip(texts(), compared, strict=True):
        with torch.no_grad():
            logits = {
                name: model(input_ids=torch.tensor([text.ids])).logits[0].double().numpy() for name, model in whole.items()
            }
        scored = slice(text.first - 1, len(text.ids) - 1)
        ln_p, ln_q = (log_softmax(logits[name][scored], axis=1) for name in ("p", "q"))
        p, q = np.exp(ln_p), np.exp(ln_q)
        m, x = (p + q) / 2, np.array(text.ids[text.first :])
        np.testing.assert_allclose(values.kl_P, rel_entr(p, q).sum(1), rtol=1e-9)
        np.testing.assert_allclose(values.reverse_kl_P, rel_entr(q, p).sum(1), rtol=1e-9)
        np.testing.assert_allclose(values.js_P, (rel_entr(p, m).sum(1) + rel_entr(q, m).sum(1)) / 2, rtol=1e-9)
        np.testing.assert_allclose(values.entropy_P, -(p * ln_p).sum(1), rtol=1e-12)
        np.testing.assert_allclose(values.ln_p_P, ln_p[np.arange(len(x)), x], rtol=1e-12)
        np.testing.assert_allclose(values.ln_q_P, ln_q[np.arange(len(x)), x], rtol=1e-12)
        assert (values.agrees_P == (p.argmax(1) == q.argmax(1))).all() and (values.tokens_P == x).all()
    assert sum(values.kl_P.sum() for values in compared) > 0


def test_a_killed_pass_goes_on_with_its_layer(source: Path, tmp_path: Path) -> None:
    expected = files_of(passed(source, tmp_path / "whole").states.folder)

    class Killed(Exception):
        pass

    def kill_behind(layer: int) -> None:
        def say(line: str) -> None:
            if line == f"layer {layer} of 3":
                raise Killed

        with pytest.raises(Killed):
            run_pass(open_model(source), texts(), tmp_path / "killed", "one", say)

    kill_behind(1)
    kill_behind(2)
    (tmp_path / "killed" / ".behind-00002.partial").mkdir()
    (tmp_path / "killed" / ".behind-00002.partial" / "000000.safetensors").write_bytes(b"half")
    lines: list[str] = []
    run_pass(open_model(source), texts(), tmp_path / "killed", "one", lines.append)
    assert lines == ["layer 3 of 3"] and files_of(tmp_path / "killed") == expected
    run_pass(open_model(source), texts(), tmp_path / "killed", "another", lines.append)
    assert lines[1:] == ["layer 1 of 3", "layer 2 of 3", "layer 3 of 3"]


def test_a_pass_that_is_killed_behind_the_last_state_of_a_layer_keeps_the_chosen_experts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a kill between two files left is gone in the end."""
    expected = files_of(passed(source, tmp_path / "whole").states.folder)

    def killed(_path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("assay_quantize.screen.forward.replacing", killed)
        with pytest.raises(KeyboardInterrupt):
            run_pass(open_model(source), texts(), tmp_path / "killed", "one", lambda _line: None)
    for left in ("behind-00000", "groups-00001"):  # as if it were killed before it removed them
        (tmp_path / "killed" / left).mkdir(exist_ok=True)
    run_pass(open_model(source), texts(), tmp_path / "killed", "one", lambda _line: None)
    assert files_of(tmp_path / "killed") == expected
    (tmp_path / "killed" / "behind-00003").mkdir()  # killed while it computed drafts: states behind the MTP layer
    states = run_pass(open_model(source), texts(), tmp_path / "killed", "one", lambda _line: None)
    assert files_of(tmp_path / "killed") == expected and states.num_layers == 3
    assert not [path for path in (tmp_path / "killed").iterdir() if path.is_dir() and path.name != "behind-00002"]


def test_layers_are_read_ahead_where_there_is_room(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes with room for one layer, and an error before any state where there is not even that."""
    whole = files_of(passed(source, tmp_path / "whole").states.folder)
    free = itertools.cycle([10**12, 1000])  # room for a layer, and none for the next beside it
    monkeypatch.setattr("assay_quantize.screen.memory.available_bytes", lambda: next(free))
    asked: list[tuple[int, bool]] = []
    has_room_for = LayerModel.has_room_for

    def watched(self: LayerModel, layer: int) -> bool:
        asked.append((layer, has_room_for(self, layer)))
        return asked[-1][1]

    monkeypatch.setattr(LayerModel, "has_room_for", watched)
    assert files_of(passed(source, tmp_path / "one").states.folder) == whole
    assert asked == [(1, False), (2, False)]
    monkeypatch.setattr("assay_quantize.screen.memory.available_bytes", lambda: 1000)
    with pytest.raises(QuantizeError, match=r"weights of layer 0 take .* of memory, and less is free; take --arithmetic bf16"):
        passed(source, tmp_path / "none")
