"""What is read ahead of a layer on a CPU: its stored bytes, in another thread, which decodes nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import glm4_moe, make_tiny

from assay.errors import CheckpointError
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.shard_files import OpenShards
from assay_quantize.decoding.open_stored import PREFETCHED_BYTES, ByteRange, StoredCheckpoint, open_stored
from assay_quantize.screen.forward import run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.layer_runs import read_ahead
from assay_quantize.sensitivity.texts import ScoredText

Reads = list[tuple[str, int, int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """(shard, begin, end) of everything that is read."""
    made: Reads = []
    read_into = OpenShards.read_into

    def noted(self: OpenShards, view: memoryview, name: str, begin: int, if_shorter: str) -> None:
        made.append((name, begin, begin + len(view)))
        read_into(self, view, name, begin, if_shorter)

    monkeypatch.setattr(OpenShards, "read_into", noted)
    return made


def bytes_of(reads: Reads) -> set[tuple[str, int]]:
    return {(shard, place) for shard, begin, end in reads for place in range(begin, end)}


def stored_at(folder: Path) -> StoredCheckpoint:
    return open_stored(open_checkpoint(folder, allow_quantized=True))


def quantized(source: Path, precision: str) -> Path:
    from assay_pipeline.quantizing import quantize

    quantize(str(source), precision=precision, out=source.parent / precision)
    return source.parent / precision


@pytest.mark.parametrize("precision", [None, "w4a16-g32", "nvfp4", "fp8"])
def test_a_layers_bytes_are_read_once_and_no_others(tmp_path: Path, precision: str | None, reads: Reads) -> None:
    source = make_tiny(tmp_path / "source", glm4_moe())
    with stored_at(quantized(source, precision) if precision else source) as stored:
        model = LayerModel(stored)
        reads.clear()
        for layer in range(model.num_layers):
            model.load(layer)
            loaded = bytes_of(reads)
            reads.clear()
            model.prefetch(layer)
            assert bytes_of(reads) >= loaded  # and the shapes of packed weights, which `load` knows from the config
            assert len(bytes_of(reads) - loaded) < 0.001 * len(loaded) + 4096
            assert sum(end - begin for _, begin, end in reads) == len(bytes_of(reads))
            reads.clear()


def test_a_groups_bytes_are_those_of_its_experts(tmp_path: Path, reads: Reads) -> None:
    with stored_at(make_tiny(tmp_path / "source", glm4_moe())) as stored:
        model = LayerModel(stored)
        reads.clear()
        model.load_group(1, range(1, 3))
        loaded = bytes_of(reads)
        reads.clear()
        model.prefetch(1, range(1, 3))
        assert bytes_of(reads) == loaded


def test_experts_in_one_tensor_are_read_by_rows(tmp_path: Path, reads: Reads) -> None:
    """As Qwen3-VL's: `gate_up_proj` [E, H, 2I] of all experts is one stored tensor."""
    import transformers

    settings: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 96, "vocab_size": 800, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "num_experts": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip
    tower = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128, "patch_size": 16}
    config = transformers.CONFIG_MAPPING["qwen3_vl_moe"].from_dict(
        {"text_config": settings, "vision_config": tower | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}}
    )
    torch.manual_seed(0)
    whole = transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, dtype=torch.float32)
    whole.save_pretrained(tmp_path / "model")
    with stored_at(tmp_path / "model") as stored:
        model = LayerModel(stored)
        reads.clear()
        model.load(0)
        of_layer = bytes_of(reads)
        reads.clear()
        model.prefetch(0)
        assert bytes_of(reads) == of_layer
        reads.clear()
        model.load_group(0, range(1, 3))
        of_group = bytes_of(reads)
        reads.clear()
        model.prefetch(0, range(1, 3))
        assert of_group <= bytes_of(reads) <= of_layer
        assert len(of_group) == 2 * 3 * 128 * 48 * 4


def test_pieces_of_overlapping_ranges(tmp_path: Path, reads: Reads) -> None:
    with stored_at(make_tiny(tmp_path / "source", glm4_moe())) as stored:
        (shard,) = {header.shard for header in stored.others.values()}
        size, reads[:] = (tmp_path / "source" / shard).stat().st_size, []
        end = min(size, PREFETCHED_BYTES + 100)
        stored.prefetch(
            [ByteRange(shard, 50, end), ByteRange(shard, 0, 100), ByteRange(shard, 60, 70), ByteRange(shard, 0, 100)]
        )
        assert sum(end - begin for _, begin, end in reads) == end
        assert bytes_of(reads) == {(shard, place) for place in range(end)}
        assert max(end - begin for _, begin, end in reads) <= PREFETCHED_BYTES
        with pytest.raises(CheckpointError, match="truncated"):
            stored.prefetch([ByteRange(shard, size - 10, size + 1)])


def test_a_cpu_decodes_in_one_thread_and_reads_ahead_in_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads with OpenMP teams of their own slow down what runs beside them."""
    draw = np.random.default_rng(0)
    texts = [ScoredText(tuple(map(int, draw.integers(7, 800, 20))))]
    events: list[tuple[str, int, bool]] = []
    for name in ("load", "prefetch"):
        method = getattr(LayerModel, name)

        def noted(self: LayerModel, layer: int, *args: Any, name: str = name, method: Any = method) -> Any:
            events.append((name, layer, threading.current_thread() is threading.main_thread()))
            return method(self, layer, *args)

        monkeypatch.setattr(LayerModel, name, noted)
    with stored_at(make_tiny(tmp_path / "source", glm4_moe())) as stored:
        run_pass(LayerModel(stored), texts, tmp_path / "work", "one", lambda _line: None)
    assert sorted(events) == [
        ("load", 0, True), ("load", 1, True), ("load", 2, True), ("prefetch", 1, False), ("prefetch", 2, False),
    ]  # fmt: skip


def test_an_error_of_reading_ahead_comes_when_the_item_is_due() -> None:
    worked: list[int] = []

    def prefetch(item: int) -> None:
        raise CheckpointError(f"{item} is truncated")

    with pytest.raises(CheckpointError, match="1 is truncated"):
        worked += read_ahead([0, 1], lambda item: item, lambda *_: True, prefetch)
    assert list(read_ahead([0, 1], lambda item: item, lambda *_: False, prefetch)) == [0, 1]
