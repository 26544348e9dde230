"""Slabs that are judged while the engine holds them: what is read back, and mistakes that only the pieces see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.manifest import ShardRecord
from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine import budget, local_runner
from assay_quantize.engine.ordered_writer import OrderedWriter, Result
from assay_quantize.engine.quantize import quantize
from assay_quantize.kernels import amax_rows, needs_amax, quantize_rows
from assay_quantize.plan.planner import make_plan
from assay_quantize.verify import judged as read_back
from assay_quantize.verify import slabs
from assay_quantize.verify.findings import SlabFindings
from assay_quantize.verify.finished import FinishedShards
from assay_quantize.verify.headers import library_headers
from assay_quantize.verify.judged import PIECE_BYTES, JudgedSlabs, digest, pieces_of
from assay_quantize.verify.original import Original, open_original
from assay_quantize.verify.verify import verify

Patch = pytest.MonkeyPatch
Rows = Any
EXPERT = "model.layers.1.mlp.experts.1"
GATE, UP = f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"
ROWS = 32
"""Of a slab, where slabs are made small."""


@pytest.fixture
def small_slabs(monkeypatch: Patch) -> None:
    monkeypatch.setattr(budget, "SLAB_BYTES", ROWS * 128 * 2)


def plan_for(source: Path, precision: str) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)


class Seen:
    """Who looked at quantized weights in which way."""

    def __init__(self, patch: Patch) -> None:
        self.read_back: set[str] = set()
        self.compared: set[str] = set()
        quantized, batch = slabs.SlabChecks._quantized, read_back.ReadBack.look

        def compare(checks: slabs.SlabChecks, tensor: TensorPlan, *rest: Any) -> SlabFindings:
            self.compared.add(tensor.name)
            return quantized(checks, tensor, *rest)

        def look(reader: read_back.ReadBack, weights: Any) -> list[SlabFindings]:
            self.read_back |= {weight.tensor.name for weight in weights}
            return batch(reader, weights)

        patch.setattr(slabs.SlabChecks, "_quantized", compare)
        patch.setattr(read_back.ReadBack, "look", look)


def quantized(plan: Plan, shards: Iterable[str] | None = None) -> set[str]:
    names = None if shards is None else set(shards)
    return {t.name for t in plan.tensors if t.action == "quantize" and (names is None or t.shard_out in names)}


# ------------------------------------------------------------------------------------------------ what is read
@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("precision", ["w4a16", "w4a16-channel", "fp8-channel", "nvfp4a16"])
def test_of_judged_weights_the_source_is_not_read_again(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch, precision: str
) -> None:
    source, out, seen = sources["bf16"], tmp_path / "made", Seen(monkeypatch)
    plan = plan_for(source, precision)
    read: list[str] = []
    sound = SourceReader.read_rows
    with FinishedShards(plan, out, source, workers=2) as finished:
        ours = finished._judged._amax._source

        def read_rows(reader: SourceReader, tensor: TensorPlan, *rest: Any) -> Rows:
            if reader is ours:
                read.append(tensor.name)
            return sound(reader, tensor, *rest)

        monkeypatch.setattr(SourceReader, "read_rows", read_rows)
        quantize(plan, source, out, workers=2, on_shard=finished.add, on_slab=finished.judge)
        assert verify(out, source=source, finished=finished).passed
    assert (seen.read_back, seen.compared, read) == (quantized(plan), set(), [])
    monkeypatch.undo()
    assert verify(out, source=source).passed


@pytest.mark.parametrize(("precision", "dtype"), [("w4a16-g64", "bf16"), ("w4a16-mse", "bf16"), ("w4a16", "fp32")])
def test_what_the_kernels_do_not_cover_is_compared_afterwards(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch, precision: str, dtype: str
) -> None:
    source, out, seen = sources[dtype], tmp_path / "made", Seen(monkeypatch)
    plan = plan_for(source, precision)
    with FinishedShards(plan, out, source, workers=2) as finished:
        quantize(plan, source, out, on_shard=finished.add, on_slab=finished.judge)
        assert verify(out, source=source, finished=finished).passed
    assert (seen.read_back, seen.compared) == (set(), quantized(plan))


@pytest.mark.usefixtures("small_slabs")
def test_shards_of_a_killed_run_are_compared_with_the_source(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    """What the killed process judged is gone with it."""
    source, out, seen = sources["bf16"], tmp_path / "made", Seen(monkeypatch)
    plan = plan_for(source, "w4a16-mtp")  # its second shard is the MTP block

    class Killed(Exception):
        pass

    first: list[str] = []

    def stop(record: ShardRecord) -> None:
        first.append(record.name)
        raise Killed

    with FinishedShards(plan, out, source, workers=1) as killed, pytest.raises(Killed):
        quantize(plan, source, out, workers=1, on_shard=stop, on_slab=killed.judge)
    with FinishedShards(plan, out, source, workers=1) as finished:
        quantize(plan, source, out, workers=1, on_shard=finished.add, on_slab=finished.judge)
        assert verify(out, source=source, finished=finished).passed
    assert seen.compared == quantized(plan, first) and seen.read_back == quantized(plan) - seen.compared
    assert seen.compared and seen.read_back


@pytest.mark.parametrize("precision", ["w4a16", "fp8", "nvfp4a16"])
def test_a_bit_that_changed_on_its_way_to_the_disk_is_found(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch, precision: str
) -> None:
    """In every part of a weight, before the shard is read back."""
    source = sources["bf16"]
    plan = plan_for(source, precision)
    (tensor,) = (tensor for tensor in plan.tensors if tensor.name == GATE)
    for output in tensor.outputs:
        out = tmp_path / output.name

        def flip(record: ShardRecord, name: str = output.name, out: Path = out) -> None:
            header = library_headers(out, record.name).get(name)
            if header is not None:
                data = bytearray((out / record.name).read_bytes())
                data[header.begin] ^= 1
                (out / record.name).write_bytes(data)
            finished.add(record)

        with FinishedShards(plan, out, source, workers=2) as finished:
            quantize(plan, source, out, on_shard=flip, on_slab=finished.judge)
            result = verify(out, source=source, finished=finished)
        assert "hashes" in {damage.check for damage in result.damages}, output.name
        assert any(EXPERT in damage.where for damage in result.damages), output.name


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize(("range_bytes", "batch_bytes"), [(1, 1), (3000, 20_000), (1 << 20, 1 << 30)])
@pytest.mark.parametrize("precision", ["w4a16", "nvfp4"])
def test_ranges_and_batches_of_any_length_show_the_same(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch, precision: str, range_bytes: int, batch_bytes: int
) -> None:
    """One part of a slab at a time, some, or the whole shard: what was flipped is told of its weight, and of no other."""
    monkeypatch.setattr(read_back, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(read_back, "BATCH_BYTES", batch_bytes)
    source, out, seen = sources["bf16"], tmp_path / "made", Seen(monkeypatch)
    plan = plan_for(source, precision)
    records: list[ShardRecord] = []
    with FinishedShards(plan, out, source, workers=2) as finished:
        quantize(plan, source, out, on_shard=records.append, on_slab=finished.judge)
        for record in records:
            header = library_headers(out, record.name).get(UP.replace("weight", "weight_packed"))
            if header is None:  # the other shard
                assert finished._check(record).findings.damages == []
                continue
            data = bytearray((out / record.name).read_bytes())
            data[header.begin + header.num_bytes - 1] ^= 1  # the last of its slabs
            (out / record.name).write_bytes(data)
            found = finished._check(record).findings
            assert len(found.damages) == 1
            rows = range(ROWS * ((header.shape[0] - 1) // ROWS), header.shape[0])
            what = f"its weight_packed is not what was written, in what belongs to rows {rows[0]} to {rows[-1]}"
            assert [(damage.where, damage.what) for damage in found.damages] == [(UP, what)]
    assert seen.read_back == quantized(plan)


# ------------------------------------------------------------------------------------------------ mistakes of the engine
class Misread:
    """`read_rows` of an engine that reads one expert's weights wrongly."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._kept: dict[str, Rows] = {}

    def read_rows(
        self, sound: Callable[..., Rows], reader: SourceReader, tensor: TensorPlan, begin: int, end: int, *rest: Any
    ) -> Rows:  # fmt: skip
        if tensor.name not in (GATE, UP):
            return sound(reader, tensor, begin, end, *rest)
        if self._how in ("another tensor", "gate and up swapped"):
            names = (UP, GATE) if self._how == "gate and up swapped" else (GATE.replace("experts.1", "experts.0"),) * 2
            return sound(reader, tensor._replace(name=names[tensor.name == UP]), begin, end, *rest)
        rows = sound(reader, tensor, begin, end, *rest)
        if self._how == "bytes in another order":
            rows[:] = rows.reshape(len(rows), -1, 2)[:, :, ::-1].reshape(rows.shape)  # as numbers of 32 bits, big-endian
        elif self._how == "rows in another order":
            rows[:] = rows[::-1].copy()
        else:
            fresh, stale = rows.copy(), self._kept.get(tensor.name, np.zeros_like(rows))
            self._kept[tensor.name] = fresh
            half = len(rows) // 2 if self._how == "the end of an old buffer" else 0
            rows[half:] = stale[half : len(rows)]
        return rows


def an_element_off(patch: Patch, readers: type[SourceReader]) -> None:
    sound = readers._header

    def header(reader: SourceReader, tensor: TensorPlan) -> Any:
        found = sound(reader, tensor)
        return found._replace(begin=found.begin - 2) if tensor.name == GATE else found

    patch.setattr(readers, "_header", header)


HOW = (
    "an element off",
    "another tensor",
    "gate and up swapped",
    "an old buffer",
    "the end of an old buffer",
    "bytes in another order",
    "rows in another order",
)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("precision", ["w4a16", "nvfp4a16"])
@pytest.mark.parametrize("shared", [False, True], ids=["the engine", "engine and verification"])
@pytest.mark.parametrize("how", HOW)
def test_a_source_that_is_read_wrongly_is_found_by_the_pieces(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch, how: str, shared: bool, precision: str
) -> None:
    """In weights that have no tile. Where verification reads as wrongly as the engine, nothing else would see it."""
    source, out = sources["bf16"], tmp_path / "made"
    plan = plan_for(source, precision)

    class OfTheEngine(SourceReader):
        pass

    readers = SourceReader if shared else OfTheEngine
    monkeypatch.setattr(local_runner, "SourceReader", readers)
    if how == "an element off":
        an_element_off(monkeypatch, readers)
    else:
        misread, sound = Misread(how), SourceReader.read_rows
        monkeypatch.setattr(readers, "read_rows", lambda reader, *rest: misread.read_rows(sound, reader, *rest))
    with FinishedShards(plan, out, source, workers=1) as finished:
        assert finished._checks.definition is not None
        assert not any(finished._checks.definition.has_tile(t) for t in plan.tensors if t.name in (GATE, UP))
        quantize(plan, source, out, workers=1, on_shard=finished.add, on_slab=finished.judge)
        result = verify(out, source=source, finished=finished)
    expected = {GATE} if how == "an element off" else {GATE, UP}
    assert {damage.where for damage in result.damages if damage.check == "source"} == expected
    assert not result.passed and {damage.where.removesuffix("_global_scale") for damage in result.damages} == expected
    monkeypatch.undo()
    assert not verify(out, source=source).passed


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("wrong", ["parts of the slab before", "swapped with another weight"])
def test_bytes_that_are_not_those_that_were_judged_are_found(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch, wrong: str
) -> None:
    """After the slab was judged: a buffer that is used again too early, a result that goes to another output."""
    source, out = sources["bf16"], tmp_path / "made"
    plan = plan_for(source, "w4a16")
    packed = {name.replace("weight", "weight_packed") for name in (GATE, UP)}
    sound, before = OrderedWriter._append, dict[str, bytes]()

    def append(writer: OrderedWriter, result: Result) -> None:
        for name in packed & result.parts.keys():
            key = name if wrong == "parts of the slab before" else "any"
            stale, before[key] = before.get(key), bytes(result.parts[name])
            if stale is not None:
                result = result._replace(parts={**result.parts, name: stale})
        sound(writer, result)

    monkeypatch.setattr(OrderedWriter, "_append", append)
    with FinishedShards(plan, out, source, workers=1) as finished:
        quantize(plan, source, out, workers=1, on_shard=finished.add, on_slab=finished.judge)
        result = verify(out, source=source, finished=finished)
    assert {damage.check for damage in result.damages} == {"error"}  # whole slabs of another weight
    assert {damage.where for damage in result.damages} <= {GATE, UP}


# ------------------------------------------------------------------------------------------------ what is collected
def original_of(source: Path, plan: Plan) -> Original:
    checkpoint = open_checkpoint(source)
    headers = {name: header for shard in checkpoint.shards for name, header in library_headers(source, shard).items()}
    return open_original(checkpoint, headers, plan, None)


@pytest.mark.parametrize("precision", ["w4a16", "w4a16-channel", "fp8", "fp8-channel", "nvfp4a16"])
def test_only_whole_weights_of_right_bytes_are_taken(sources: dict[str, Path], precision: str) -> None:
    source = sources["bf16"]
    plan = plan_for(source, precision)
    (tensor,) = (tensor for tensor in plan.tensors if tensor.name == GATE)
    assert tensor.scheme is not None
    height = tensor.shape[0] // 2 if precision != "fp8" else tensor.shape[0]
    with original_of(source, plan) as original:
        rows = original.reader.read_rows(tensor, 0, tensor.shape[0])
        amax = amax_rows(rows, "BF16") if needs_amax(tensor.scheme) else None
        slabs_of_it = {
            begin: (
                rows[begin : begin + height],
                quantize_rows(rows[begin : begin + height], "BF16", tensor.scheme, amax=amax).parts,
            )
            for begin in range(0, tensor.shape[0], height)
        }

        def taken(**changes: Any) -> Any:
            judged = JudgedSlabs(plan, original)
            for begin, (w_OI, parts) in changes.get("slabs", slabs_of_it).items():
                changed = {**parts, **changes.get("parts", {}).get(begin, {})}
                name = changes.get("name", tensor.name)
                for _ in range(changes.get("times", 1)):
                    judged.judge(name, begin, begin + len(w_OI), w_OI, changed)
            return judged.take(tensor)

        found = taken()
        assert [(slab.begin, slab.end) for slab in found] == [
            (begin, begin + height) for begin in range(0, tensor.shape[0], height)
        ]
        assert all(
            slab.digests == {part: digest(value) for part, value in slabs_of_it[slab.begin][1].items()} for slab in found
        )
        for part, value in slabs_of_it[0][1].items():
            wrong = value.copy()
            wrong.reshape(-1).view(np.uint8)[-1] ^= 1
            assert taken(parts={0: {part: wrong}}) is None, part
            assert taken(parts={0: {part: value.reshape(-1)[:-1]}}) is None, part  # fewer than planned
        assert taken(parts={0: {"more": rows}}) is None
        assert taken(times=2) is None
        assert taken(slabs={}) is None
        assert taken(name="model.layers.9.mlp.gate_proj.weight") is None
        if len(slabs_of_it) > 1:
            assert taken(slabs={0: slabs_of_it[0]}) is None
            assert taken(slabs={height: slabs_of_it[height]}) is None
        twice = JudgedSlabs(plan, original)
        for begin, (w_OI, parts) in slabs_of_it.items():
            twice.judge(tensor.name, begin, begin + len(w_OI), w_OI, parts)
        assert twice.take(tensor._replace(scheme=None)) is None and twice.take(tensor) is None


def test_pieces_begin_and_end_with_the_slab() -> None:
    rows = np.random.default_rng(2).integers(0, 1 << 16, (64, 128)).astype(np.uint16)
    raw = rows.tobytes()
    first, drawn, last = pieces_of("a", 4096, rows)
    assert (first.begin, first.end, last.begin, last.end) == (
        4096,
        4096 + PIECE_BYTES,
        4096 + len(raw) - PIECE_BYTES,
        4096 + len(raw),
    )
    assert first.end - PIECE_BYTES < drawn.begin < last.begin
    for piece in (first, drawn, last):
        assert piece.digest == digest(np.frombuffer(raw[piece.begin - 4096 : piece.end - 4096], np.uint8))
    (whole,) = pieces_of("a", 0, rows[:1])
    assert (whole.begin, whole.end, whole.digest) == (0, 256, digest(rows[:1]))
