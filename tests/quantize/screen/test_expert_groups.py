"""A layer whose experts are held in groups computes the bits of the whole layer, and memory is bounded by the groups."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import deepseek_v3, glm4_moe, glm_moe_dsa, make_tiny, qwen3_next

from assay.errors import QuantizeError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.decoding.activations import RoundedInputs
from assay_quantize.decoding.open_stored import StoredCheckpoint, open_stored
from assay_quantize.screen import layer_runs
from assay_quantize.screen.draft import DraftModel
from assay_quantize.screen.estimate import estimate_pass
from assay_quantize.screen.forward import ScreenPass, run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.memory import FOR_WEIGHTS, Groups, Parts, groups_of
from assay_quantize.sensitivity.texts import ScoredText

Cut = Callable[[int], None]


def texts(count: int = 3) -> list[ScoredText]:
    draw = np.random.default_rng(0)
    return [ScoredText(tuple(map(int, draw.integers(7, 800, 20 + 9 * number))), 1 + 4 * number) for number in range(count)]


def stored_at(folder: Path) -> StoredCheckpoint:
    return open_stored(open_checkpoint(folder, allow_quantized=True))


def passed(model: LayerModel, work: Path, num_doubled: int = 0) -> dict[str, str]:
    """Hashes of what a pass leaves."""
    run_pass(model, texts(), work, "one", lambda _line: None, num_doubled=num_doubled)
    return files_of(work)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Call it with the number of experts that are held at once; 0: the layer is whole."""

    def cut_into(at_once: int) -> None:
        def groups(parts: Parts, _left_bytes: int) -> Groups:
            firsts = range(0, parts.num_experts, at_once) if at_once else ()
            experts = tuple(range(first, min(first + at_once, parts.num_experts)) for first in firsts)
            return Groups(experts, is_read_ahead=at_once == 1)

        monkeypatch.setattr("assay_quantize.screen.layer_model.groups_of", groups)
        monkeypatch.setattr(LayerModel, "has_room_for", lambda self, layer: False)

    return cut_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [glm4_moe(), deepseek_v3(), glm_moe_dsa(), qwen3_next()], ids=lambda config: str(config["model_type"])
)
def test_groups_give_the_bits_of_the_whole_layer(tmp_path: Path, config: dict[str, Any], dtype: torch.dtype, cut: Cut) -> None:
    """States and chosen experts, for groups of 1, 3 and all."""
    stored = stored_at(make_tiny(tmp_path / "source", config))
    whole = passed(LayerModel(stored, dtype), tmp_path / "whole", num_doubled=1)
    assert sum(name.startswith("experts-") for name in whole) == config["num_hidden_layers"] - (
        config.get("first_k_dense_replace", 0)
    )
    for at_once in (1, 3, 8):
        cut(at_once)
        assert passed(LayerModel(stored, dtype), tmp_path / str(at_once), num_doubled=1) == whole


@pytest.mark.parametrize("precision", ["nvfp4", "fp8-channel"])
def test_inputs_of_experts_are_rounded_in_groups_too(
    tmp_path: Path, precision: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay_pipeline.quantizing import quantize

    made = tmp_path / "made"
    quantize(str(make_tiny(tmp_path / "source", glm4_moe())), precision=precision, out=made)
    whole = passed(LayerModel(stored_at(made)), tmp_path / "whole")
    cut(3)
    assert passed(LayerModel(stored_at(made)), tmp_path / "groups") == whole
    monkeypatch.setattr("assay_quantize.screen.expert_groups.RoundedInputs", lambda _roundings: RoundedInputs({}))
    assert passed(LayerModel(stored_at(made)), tmp_path / "unrounded") != whole


def test_the_mtp_layer_runs_in_groups_too(tmp_path: Path, cut: Cut) -> None:
    stored = stored_at(make_tiny(tmp_path / "source", glm4_moe()))
    states = run_pass(LayerModel(stored), texts(), tmp_path / "decoder", "one", lambda _line: None)
    whole = DraftModel(stored).drafted(texts(), states, tmp_path / "whole")
    cut(3)
    groups = DraftModel(stored).drafted(texts(), states, tmp_path / "groups")
    assert all(torch.equal(whole.state(number)[0], groups.state(number)[0]) for number in range(len(texts())))


class Killed(BaseException):
    pass


def killed_pass(stored: StoredCheckpoint, work: Path, num_files: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A pass that is killed while it writes its next file after so many; whether it was."""
    left = itertools.count(num_files, -1)

    def patched(write: Callable[..., None]) -> Callable[..., None]:
        def write_or_die(*args: Any) -> None:
            if next(left) == 0:
                path = args[0] / "half.safetensors" if args[0].is_dir() else args[0]
                path.with_suffix(".partial").write_bytes(b"half")
                raise Killed
            write(*args)

        return write_or_die

    with monkeypatch.context() as patch:
        patch.setattr("assay_quantize.screen.layer_runs._save", patched(layer_runs._save))
        patch.setattr("assay_quantize.screen.forward.save_state", patched(run_pass.__globals__["save_state"]))
        try:
            run_pass(LayerModel(stored), texts(), work, "one", lambda _line: None)
        except Killed:
            return True
    return False


def test_killed_anywhere_it_goes_on_with_the_same_bytes(tmp_path: Path, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every file in turn, and resumed with groups of other sizes or none."""
    stored = stored_at(make_tiny(tmp_path / "source", glm4_moe()))
    whole = passed(LayerModel(stored), tmp_path / "whole")
    num_files = 3 + 2 * (3 + 2 * 3 + 3)  # a dense layer; two of calls, sums of two groups, and states
    for number, resumed in zip(range(num_files), itertools.cycle([1, 3, 0]), strict=False):
        cut(2)
        work = tmp_path / str(number)
        assert killed_pass(stored, work, number, monkeypatch)
        cut(resumed)
        assert passed(LayerModel(stored), work) == whole
    cut(2)
    assert not killed_pass(stored, tmp_path / "not killed", num_files, monkeypatch)
    work, kills = tmp_path / "often", 0
    while killed_pass(stored, work, 4, monkeypatch):  # what was done before a kill is not done again
        kills += 1
    assert kills < num_files / 2 and files_of(work) == whole


def test_weights_stay_within_the_memory_and_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_at(make_tiny(tmp_path / "source", glm4_moe(n_routed_experts=16, moe_intermediate_size=256)))
    held: dict[int, int] = {}
    peak_bytes = 0
    value_of = LayerModel._value

    def counted(self: LayerModel, *args: Any) -> Any:
        nonlocal peak_bytes
        value, roundings = value_of(self, *args)
        array = np.empty(value.numel() * value.element_size(), np.uint8)
        held[id(array)] = array.nbytes
        weakref.finalize(array, held.pop, id(array))
        peak_bytes = max(peak_bytes, sum(held.values()))
        return torch.from_numpy(array).view(value.dtype).reshape(value.shape).copy_(value), roundings

    monkeypatch.setattr(LayerModel, "_value", counted)
    reads: Counter[str] = Counter()
    read_weight = StoredCheckpoint.read_weight
    monkeypatch.setattr(
        StoredCheckpoint, "read_weight", lambda self, name, rows=None: reads.update([name]) or read_weight(self, name, rows)
    )
    whole = passed(LayerModel(stored), tmp_path / "whole")
    whole_bytes, peak_bytes = peak_bytes, 0
    parts = LayerModel(stored).parts(1)
    assert whole_bytes >= parts.whole_bytes
    memory_bytes = int((parts.rest_bytes + 6.5 * parts.expert_bytes) / FOR_WEIGHTS)
    reads.clear()
    asked: list[int] = []
    has_room_for = LayerModel.has_room_for
    monkeypatch.setattr(LayerModel, "has_room_for", lambda self, layer: asked.append(layer) or has_room_for(self, layer))
    assert passed(LayerModel(stored, memory_bytes=memory_bytes), tmp_path / "groups") == whole
    assert asked == [1]  # no layer is read beside groups of another
    assert 3 * parts.expert_bytes < peak_bytes <= FOR_WEIGHTS * memory_bytes < 0.5 * whole_bytes
    assert {name for name, count in reads.items() if count > 1} <= {"model.embed_tokens.weight"}
    assert not held

    memory_bytes = int((parts.rest_bytes + parts.expert_bytes / 2) / FOR_WEIGHTS)
    with pytest.raises(QuantizeError, match=r"layer 1, one expert at a time, take .* of memory, and 1.* more of --memory"):
        passed(LayerModel(stored, memory_bytes=memory_bytes), tmp_path / "none")


def test_fewest_groups_of_which_two_fit() -> None:
    parts = Parts(rest_bytes=100, expert_bytes=10, num_experts=8)
    assert groups_of(parts, 181) == Groups()
    assert groups_of(parts, 180) == Groups((range(4), range(4, 8)), is_read_ahead=True)
    assert groups_of(parts, 165) == Groups((range(3), range(3, 6), range(6, 8)), is_read_ahead=True)
    assert groups_of(parts, 119) == Groups(tuple(range(each, each + 1) for each in range(8)), is_read_ahead=False)
    assert groups_of(parts, 109) is None
    assert groups_of(Parts(100), 100) is None


def test_the_estimate_knows_of_groups(tmp_path: Path, cut: Cut) -> None:
    stored = stored_at(make_tiny(tmp_path / "source", glm_moe_dsa()))
    cost = estimate_pass(LayerModel(stored), texts(), tmp_path, has_draft=False)
    cut(3)
    in_groups = estimate_pass(LayerModel(stored), texts(), tmp_path, has_draft=False)
    assert (cost.num_groups, in_groups.num_groups) == (1, 3)
    assert (in_groups.kept_bytes, in_groups.layer_bytes) == (cost.kept_bytes, cost.layer_bytes)
    lying: list[int] = []
    keep = layer_runs._save

    def watched(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        keep(path, tensors)
        lying.append(sum(file.stat().st_size for file in (tmp_path / "pass").rglob("*.safetensors")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("assay_quantize.screen.layer_runs._save", watched)
        states = run_pass(LayerModel(stored), texts(), tmp_path / "pass", "x", lambda _line: None)
    assert isinstance(states, ScreenPass)
    assert max(lying) == pytest.approx(in_groups.kept_bytes + in_groups.working_bytes, rel=0.1)


def test_experts_that_are_computed_otherwise_are_refused(tmp_path: Path, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, where they must be in groups; whole they run."""
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

    stored = stored_at(make_tiny(tmp_path / "source", glm4_moe()))

    def all_at_once(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up = torch.einsum("th,eih->tei", hidden, self.gate_up_proj)
        return hidden + 0 * up.sum()

    monkeypatch.setattr(Glm4MoeExperts, "forward", all_at_once)
    passed(LayerModel(stored), tmp_path / "whole")
    cut(3)
    with pytest.raises(QuantizeError, match=r"layer 1 does not fit .*transformers .* its experts"):
        passed(LayerModel(stored), tmp_path / "groups")
