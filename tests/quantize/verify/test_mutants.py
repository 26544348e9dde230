"""The planner, the header parser or a kernel deliberately broken, in quantizing *and* in verifying: verification has to see it.

Each mutant makes a checkpoint that agrees with itself: its manifest, index, config and plan are those of the broken code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay_quantize import kernels
from assay_quantize.checkpoint import checkpoint as checkpoint_module
from assay_quantize.checkpoint import headers as headers_module
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.engine import slab_work
from assay_quantize.engine.quantize import quantize
from assay_quantize.formats import schemes
from assay_quantize.kernels.rows import QuantizedRows
from assay_quantize.plan import planner
from assay_quantize.verify import headers as verify_headers
from assay_quantize.verify import judged
from assay_quantize.verify import slabs as verify_slabs
from assay_quantize.verify.finished import FinishedShards
from assay_quantize.verify.verify import verify

Patch = pytest.MonkeyPatch
EXPERT = "model.layers.1.mlp.experts.1"


def broken_kernel(patch: Patch, change: Callable[[QuantizedRows], QuantizedRows]) -> None:
    """In all places that round rows with the fused kernels."""
    sound = kernels.quantize_rows

    def quantize_rows(*arguments: Any, **options: Any) -> QuantizedRows:
        return change(sound(*arguments, **options))

    for module in (kernels, verify_slabs):
        patch.setattr(module, "quantize_rows", quantize_rows)


def no_kernels_of_its_own(patch: Patch) -> None:
    """Verification left with the engine's kernels and the tiles, as for the schemes that `codes.py` does not cover."""
    for module in (verify_slabs, judged):
        patch.setattr(module, "is_what_rounding_gives", lambda *arguments, **options: None)


def with_part(made: QuantizedRows, name: str, change: Callable[[Any], Any]) -> QuantizedRows:
    return dataclasses.replace(made, parts={**made.parts, name: np.ascontiguousarray(change(made.parts[name]))})


# ------------------------------------------------------------------------------------------------ the mutants
def rounds_down(patch: Patch) -> None:
    """Every code one too low, where it is not the lowest."""

    def lower(packed: Any) -> Any:
        codes = packed.view(np.uint8)
        low, high = codes & 15, codes >> 4
        return ((low - (low > 0)) | ((high - (high > 0)) << 4)).astype(np.uint8).view(np.int32)

    broken_kernel(patch, lambda made: with_part(made, "weight_packed", lower))


def scales_in_another_order(patch: Patch) -> None:
    broken_kernel(patch, lambda made: with_part(made, "weight_scale", lambda scale: scale[::-1]))


def magnitudes_too_large(patch: Patch) -> None:
    """The global scales of NVFP4 from twice the largest weight."""
    sound = kernels.amax_rows
    patch.setattr(kernels, "amax_rows", lambda rows, dtype: 2 * sound(rows, dtype))


def groups_of_64(patch: Patch) -> None:
    """The table of schemes says 64 columns where the recipe means 128; config.json says so, too."""
    patch.setitem(schemes.SCHEMES, "w4a16", dataclasses.replace(schemes.SCHEMES["w4a16"], group_size=64))


def a_tensor_is_forgotten(patch: Patch) -> None:
    sound = planner._tensor_plans

    def tensor_plans(*arguments: Any) -> Any:
        return tuple(plan for plan in sound(*arguments) if plan.name != "model.layers.1.self_attn.q_norm.weight")

    patch.setattr(planner, "_tensor_plans", tensor_plans)


def an_ignore_list_too_wide(patch: Patch) -> None:
    """A pattern that hits more than it says, with the planner's and the replay's matcher blind to it."""
    sound = planner._ignore
    patch.setattr(planner, "_ignore", lambda *arguments: (*sound(*arguments), "re:.*experts"))
    patch.setattr(planner, "check_ignore", lambda plan: None)


def rows_read_in_another_order(patch: Patch) -> None:
    sound = SourceReader.read_rows
    patch.setattr(SourceReader, "read_rows", lambda *arguments: np.ascontiguousarray(sound(*arguments)[::-1]))


def offsets_off_by_one(patch: Patch) -> None:
    """The header parser puts one tensor two bytes too far in front."""
    sound = headers_module.read_shard_header

    def read_shard_header(folder: Path, shard: str) -> Any:
        found = sound(folder, shard)
        name = "model.layers.1.input_layernorm.weight"
        if name in found:
            found[name] = found[name]._replace(begin=found[name].begin - 2, end=found[name].end - 2)
        return found

    for module in (headers_module, checkpoint_module, verify_headers):
        patch.setattr(module, "read_shard_header", read_shard_header)


def casts_cut_off(patch: Patch) -> None:
    """FP32 to BF16 without rounding."""
    from assay_quantize.formats import casting

    def cast_rows(values: Any, dtype: str, output_dtype: str, name: str) -> Any:
        wide = casting.float_rows(values, dtype)
        return wide if output_dtype == "F32" else (wide.view(np.uint32) >> 16).astype(np.uint16)

    patch.setattr(slab_work, "cast_rows", cast_rows)


def rounds_down_in_a_tile(patch: Patch) -> None:
    no_kernels_of_its_own(patch)
    rounds_down(patch)


def scales_in_another_order_in_a_tile(patch: Patch) -> None:
    no_kernels_of_its_own(patch)
    scales_in_another_order(patch)


MUTANTS = (
    (rounds_down, "w4a16", "bf16", {"weights"}),
    (rounds_down_in_a_tile, "w4a16", "bf16", {"definition"}),
    (rounds_down, "w4a16", "fp32", {"definition"}),
    (scales_in_another_order, "w4a16", "bf16", {"weights"}),
    (scales_in_another_order, "fp8-channel", "bf16", {"weights"}),
    (scales_in_another_order, "fp8", "bf16", {"weights"}),
    (scales_in_another_order, "nvfp4a16", "bf16", {"weights"}),
    (scales_in_another_order_in_a_tile, "w4a16", "bf16", {"definition"}),
    (scales_in_another_order_in_a_tile, "fp8-channel", "bf16", {"definition"}),
    (magnitudes_too_large, "nvfp4a16", "bf16", {"recomputed"}),
    (groups_of_64, "w4a16", "bf16", {"targets"}),
    (a_tensor_is_forgotten, "w4a16", "bf16", {"lost"}),
    (an_ignore_list_too_wide, "w4a16", "bf16", {"targets", "ignore", "runtime"}),
    (rows_read_in_another_order, "w4a16", "bf16", {"definition"}),
    (offsets_off_by_one, "w4a16", "bf16", {"library"}),
    (casts_cut_off, "w4a16", "fp32", {"kept"}),
)


MEANWHILE = {rows_read_in_another_order: {"source"}}
"""Where what was found while it was made says more."""


@pytest.mark.parametrize(("mutant", "precision", "dtype", "found_by"), MUTANTS)
def test_a_mistake_is_not_shared(
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: Patch,
    mutant: Callable[[Patch], None],
    precision: str,
    dtype: str,
    found_by: set[str],
) -> None:
    mutant(monkeypatch)
    source, out = sources[dtype], tmp_path / "made"
    plan = planner.make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="tiny", family=None)
    with FinishedShards(plan, out, source, workers=2) as finished:
        quantize(plan, source, out, on_shard=finished.add, on_slab=finished.judge)
        meanwhile = verify(out, source=source, finished=finished)
    afterwards = verify(out, source=source)
    for result, checks in ((meanwhile, MEANWHILE.get(mutant, found_by)), (afterwards, found_by)):
        assert not result.passed
        assert {damage.check for damage in result.damages} == checks
