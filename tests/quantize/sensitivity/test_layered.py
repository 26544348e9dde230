"""One layer in memory at a time gives what the whole model gives; killed, it goes on; what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.errors import QuantizeError
from assay_quantize.calibration.calibrate import load_model
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.sensitivity import layered as module
from assay_quantize.sensitivity.direct import Direct, Divergence, DivergenceStore, Runner
from assay_quantize.sensitivity.layered import Layered, check_memory, needed_bytes, states_bytes, whole_bytes
from assay_quantize.sensitivity.parts import Key, Layout, find_parts
from assay_quantize.sensitivity.rounded import Rounder, relative_error
from assay_quantize.sensitivity.texts import ScoredText, batched

pytestmark = pytest.mark.slow

DRAWN = np.random.default_rng(0)
TEXTS = [ScoredText(tuple(int(x) for x in DRAWN.integers(0, 512, 12 + 5 * i)), first=1 + i % 3) for i in range(4)]
Pair = tuple[Key | None, str]


class Opened:
    def __init__(self, reader: SourceReader, schemes: Sequence[str] = ("w4a16", "nvfp4")) -> None:
        self.reader = reader
        layout = find_parts(reader.checkpoint, schemes, model="tiny")
        mix = {Key(0, "attention"): "w4a16", Key(1, "shared_expert"): schemes[-1], Key(2, "routed_expert"): "w4a16"}
        self.layout: Layout = replace(layout, mixes={"mix": mix})
        self.rounder = Rounder(self.layout, reader)

    def layered(self, keep: Path) -> Layered:
        return Layered(self.layout, self.rounder, self.reader, TEXTS, keep, lambda line: None)


@pytest.fixture(scope="module")
def opened(tiny_glm: Path) -> Iterator[Opened]:
    with SourceReader(open_checkpoint(tiny_glm)) as reader:
        yield Opened(reader)


@pytest.fixture(scope="module")
def whole(opened: Opened, tiny_glm: Path) -> dict[Pair, Divergence]:
    """What the whole model in transformers gives, part by part."""
    model: Any = load_model(opened.reader.checkpoint, tiny_glm, "cpu")
    direct = Direct(opened.layout, opened.rounder, Runner(model, batched(TEXTS, 64)), TEXTS, None, lambda line: None)
    divergences: dict[Pair, Divergence] = {(None, scheme): divergence for scheme, divergence in direct.wholes()}
    return divergences | {(key, scheme): divergence for key, scheme, divergence in direct.parts(opened.layout.pairs())}


def check_alike(pair: Pair, actual: Divergence, expected: Divergence) -> None:
    """Where activations are rounded, another last bit can become another code: there only the mean is near."""
    assert actual.kl_N.shape == expected.kl_N.shape
    if pair[1] == "w4a16":
        np.testing.assert_allclose(actual.kl_N, expected.kl_N, rtol=1e-3, atol=1e-5)
        assert actual.other_experts == expected.other_experts
    else:
        assert float(actual.kl_N.mean()) == pytest.approx(float(expected.kl_N.mean()), rel=0.1)
        assert actual.other_experts.keys() == expected.other_experts.keys()


def test_it_is_what_the_whole_model_gives(opened: Opened, whole: dict[Pair, Divergence], tmp_path: Path) -> None:
    layered = opened.layered(tmp_path)
    layered.run(to_the_end=True)
    by_layer = {(key, scheme): divergence for key, scheme, divergence in layered.divergences()}
    assert by_layer.keys() == whole.keys()
    for pair, divergence in by_layer.items():
        check_alike(pair, divergence, whole[pair])
    pairs = opened.layout.pairs()
    assert set(layered.hidden) == set(pairs) and all(0 < value < 1 for value in layered.hidden.values())
    assert layered.weights == {pair: relative_error(opened.rounder.weights(*pair)) for pair in pairs}
    assert not list(tmp_path.rglob("*.npy")), "states go once all is found"
    again = opened.layered(tmp_path)
    again.run(to_the_end=True)
    assert (again.hidden, again.weights) == (layered.hidden, layered.weights)
    only_hidden = opened.layered(tmp_path / "hidden")
    only_hidden.run(to_the_end=False)
    assert only_hidden.hidden == layered.hidden


def test_hidden_is_the_error_behind_the_parts_own_layer(opened: Opened, tiny_glm: Path, tmp_path: Path) -> None:
    """In the whole model of transformers, with that layer's part rounded."""
    layered = opened.layered(tmp_path)
    layered.run(to_the_end=False)
    model: Any = load_model(opened.reader.checkpoint, tiny_glm, "cpu")
    runner, key = Runner(model, batched(TEXTS, 64)), Key(1, "attention")

    def behind() -> torch.Tensor:
        states: list[torch.Tensor] = []
        handle = runner.layers[1].register_forward_hook(lambda _module, _args, output: states.append(output[0]))
        with torch.no_grad():
            for text in TEXTS:
                model(input_ids=torch.tensor([text.ids]), use_cache=False)
        handle.remove()
        return torch.cat(states).double()

    plain = behind()
    for name, _, back in opened.rounder.weights(key, "w4a16"):
        runner.views[name].copy_(back)
    error = (behind() - plain).square().sum(-1) / plain.square().sum(-1)
    assert layered.hidden[key, "w4a16"] == pytest.approx(float(error.mean()), rel=1e-4)


@pytest.mark.parametrize("at", [1, 2])
def test_killed_behind_a_layer_it_goes_on(
    opened: Opened, whole: dict[Pair, Divergence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    layer, done = Layered._layer, list[int]()

    def until(self: Layered, number: int, *args: Any) -> Path:
        if number == at:
            raise KeyboardInterrupt
        done.append(number)
        return layer(self, number, *args)

    monkeypatch.setattr(Layered, "_layer", until)
    with pytest.raises(KeyboardInterrupt):
        opened.layered(tmp_path).run(to_the_end=True)

    def on(self: Layered, number: int, *args: Any) -> Path:
        done.append(number)
        return layer(self, number, *args)

    monkeypatch.setattr(Layered, "_layer", on)
    layered = opened.layered(tmp_path)
    layered.run(to_the_end=True)
    assert done == list(range(opened.layout.num_layers)), "no layer twice"
    for key, scheme, divergence in layered.divergences():
        check_alike((key, scheme), divergence, whole[key, scheme])


@pytest.mark.parametrize("name", ["reference.00000-0.npy", "told.json", None])
def test_states_that_are_cut_off_are_made_again(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """As a crash of the machine leaves them: their name is there, and not all they held. None: they are of other schemes."""
    layer, done = Layered._layer, list[int]()

    def until(self: Layered, number: int, *args: Any) -> Path:
        done.append(number)
        if done == [0, 1]:
            raise KeyboardInterrupt
        return layer(self, number, *args)

    monkeypatch.setattr(Layered, "_layer", until)
    with pytest.raises(KeyboardInterrupt):
        fewer = opened if name else Opened(opened.reader, ["w4a16"])
        fewer.layered(tmp_path).run(to_the_end=False)
    for cut in tmp_path.rglob(name) if name else ():
        cut.write_bytes(cut.read_bytes()[:-7])
    layered = opened.layered(tmp_path)
    layered.run(to_the_end=False)
    assert done == [0, 1, *range(opened.layout.num_layers)] and set(layered.hidden) == set(opened.layout.pairs())


def test_a_figure_with_a_bit_flipped_is_measured_again(tmp_path: Path) -> None:
    kept, divergences = DivergenceStore(tmp_path, 3), Divergence(np.array([0.5, 0.25, 1.0], np.float32), {1: 0.125})
    kept.save("part", divergences)
    again = kept.load("part")
    assert again is not None and again.kl_N.tolist() == [0.5, 0.25, 1.0] and again.other_experts == {1: 0.125}
    data = bytearray((tmp_path / "part.safetensors").read_bytes())
    data[-2] ^= 1
    (tmp_path / "part.safetensors").write_bytes(data)
    assert kept.load("part") is None


def test_what_does_not_fit_is_refused(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = opened.layout.plans["w4a16"]
    needed = needed_bytes(plan, 32)
    check_memory(plan, 32, needed, "--memory 1GiB")
    with pytest.raises(QuantizeError, match=r"--memory 1GiB: one layer at a time takes .* are left; at least .* weights"):
        check_memory(plan, 32, needed - 1, "--memory 1GiB")
    assert whole_bytes(plan) > 4 * sum(opened.layout.num_weights.values()) * 0.5
    tokens = sum(batch.ids_BT.numel() for batch in batched(TEXTS, module.BATCH_TOKENS))
    hidden = int(opened.reader.checkpoint.config["hidden_size"])
    streams = 1 + len(opened.layout.pairs()) + 2 + 1  # the reference, parts, schemes, the mix
    assert states_bytes(opened.layout, tokens, 32, to_the_end=True) == 2 * tokens * 4 * hidden * streams
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(QuantizeError, match=r"states take up to .* 10 B are free on its disk; fewer --tokens or --schemes"):
        opened.layered(tmp_path).run(to_the_end=True)
