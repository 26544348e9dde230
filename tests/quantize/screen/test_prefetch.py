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
from assay_quantize.decoding.open_stored import StoredCheckpoint, open_stored
from assay_quantize.screen.forward import run_pass
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.screen.layer_runs import read_ahead
from assay_quantize.sensitivity.texts import ScoredText
from assay_quantize.storage.past_cache import ReadAhead, Residency

Ranges = list[tuple[str, int, int]]


class Asked:
    """Ranges (shard, begin, bytes) that were prefetched, and that were read, of all shards that are open."""

    def __init__(self) -> None:
        self.prefetched: Ranges = []
        self.read: Ranges = []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    made = Asked()
    prefetch, read_into = OpenShards.prefetch, OpenShards.read_into

    def prefetched(self: OpenShards, name: str, begin: int, num_bytes: int) -> None:
        made.prefetched.append((name, begin, num_bytes))
        prefetch(self, name, begin, num_bytes)

    def read(self: OpenShards, view: memoryview, name: str, begin: int, if_shorter: str) -> None:
        made.read.append((name, begin, len(view)))
        read_into(self, view, name, begin, if_shorter)

    monkeypatch.setattr(OpenShards, "prefetch", prefetched)
    monkeypatch.setattr(OpenShards, "read_into", read)
    return made


def stored_at(folder: Path) -> StoredCheckpoint:
    return open_stored(open_checkpoint(folder, allow_quantized=True))


def quantized(source: Path, precision: str) -> Path:
    from assay_pipeline.quantizing import quantize

    quantize(str(source), precision=precision, out=source.parent / precision)
    return source.parent / precision


@pytest.mark.parametrize("precision", [None, "w4a16-g32", "nvfp4", "fp8"])
def test_every_read_of_a_layer_was_announced(tmp_path: Path, precision: str | None, asked: Asked) -> None:
    """In one go each, as what was read ahead is handed out; and little else."""
    source = make_tiny(tmp_path / "source", glm4_moe())
    with stored_at(quantized(source, precision) if precision else source) as stored:
        model = LayerModel(stored)
        for layer in range(model.num_layers):
            asked.prefetched.clear()
            asked.read.clear()
            model.prefetch(layer)
            model.load(layer)
            assert len(asked.read) > 10 and set(asked.read) <= set(asked.prefetched)
            assert len(set(asked.prefetched)) == len(asked.prefetched)
            unread = set(asked.prefetched) - set(asked.read)  # shapes of packed weights, which the config tells
            assert sum(num_bytes for _, _, num_bytes in unread) <= 16 * len(asked.read)


def test_a_groups_reads_are_those_of_its_experts(tmp_path: Path, asked: Asked) -> None:
    with stored_at(make_tiny(tmp_path / "source", glm4_moe())) as stored:
        model = LayerModel(stored)
        model.prefetch(1, range(1, 3))
        model.load_group(1, range(1, 3))
        assert asked.read and sorted(asked.read) == sorted(asked.prefetched)


def test_experts_in_one_tensor_are_read_by_rows(tmp_path: Path, asked: Asked) -> None:
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
        model.prefetch(0, range(1, 3))
        model.load_group(0, range(1, 3))
        assert sum(num_bytes for _, _, num_bytes in asked.read) == 2 * 3 * 128 * 48 * 4
        assert set(asked.read) <= set(asked.prefetched)
        asked.prefetched.clear()
        asked.read.clear()
        model.prefetch(0)
        model.load(0)
        assert set(asked.read) <= set(asked.prefetched)


def test_what_was_read_past_the_page_cache_is_what_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are the same with everything read so; and nothing of it stays behind."""
    monkeypatch.setattr("assay_quantize.checkpoint.shard_files.LARGE_BYTES", 1)
    monkeypatch.setattr(Residency, "seems_cached", lambda *_: False)
    taken: list[bool] = []
    take = ReadAhead.take

    def counted(self: ReadAhead, descriptor: int, begin: int, out: memoryview) -> bool:
        taken.append(take(self, descriptor, begin, out))
        return taken[-1]

    monkeypatch.setattr(ReadAhead, "take", counted)
    source = make_tiny(tmp_path / "source", glm4_moe())
    with stored_at(source) as stored:
        shards = stored._shards
        assert isinstance(shards, OpenShards)
        (shard,) = {header.shard for header in stored.others.values()}
        if not shards.open(shard).has_direct:
            pytest.skip("this file system has no O_DIRECT")
        model, plain = LayerModel(stored), LayerModel(stored)
        expected = [torch.cat([value.flatten().float() for value in loaded_values(plain, layer)]) for layer in range(3)]
        assert not taken
        for layer in range(3):
            model.prefetch(layer)
            values = torch.cat([value.flatten().float() for value in loaded_values(model, layer)])
            assert torch.equal(values, expected[layer])
            assert shards._ahead is not None and not shards._ahead._reading
        assert all(taken) and len(taken) > 60


def loaded_values(model: LayerModel, layer: int) -> list[torch.Tensor]:
    with model.filled(layer, model.load(layer)) as module:
        return [parameter.data.clone() for parameter in module.parameters()]


def test_a_truncated_file_is_named_though_it_was_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_quantize.checkpoint.shard_files.LARGE_BYTES", 1)
    monkeypatch.setattr(Residency, "seems_cached", lambda *_: False)
    source = make_tiny(tmp_path / "source", glm4_moe())
    with stored_at(source) as stored:
        model = LayerModel(stored)
        model.load(0)  # opens the shard
        (shard,) = source.glob("*.safetensors")
        with shard.open("r+b") as file:
            file.truncate(4096)
        model.prefetch(1)
        with pytest.raises(CheckpointError, match=r"truncated: ends inside model\.layers\.1"):
            model.load(1)


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
