"""vLLM's loaders take every default cell of the shipped recipes, and docs/models.md says with which kernels."""

from __future__ import annotations

import models_page
import models_replayed
import pytest
from models_replayed import Asked

from assay.recipes.load import load_recipe
from assay.recipes.profile import ProfileRecipe
from assay.records.preflight.replay import Replay

pytestmark = [pytest.mark.slow, pytest.mark.serve]


@pytest.fixture(scope="module")
def said() -> dict[Asked, Replay]:
    """Of default cells and of those that are out because of the split."""
    return models_replayed.replay_all([*models_replayed.default_cells(), *models_replayed.cut_groups()])


def test_every_default_cell_loads(said: dict[Asked, Replay]) -> None:
    defaults = {cell: said[cell] for cell in models_replayed.default_cells()}
    assert list(models_replayed.not_passed(defaults)) == []
    assert {cell: record.asked for cell, record in defaults.items() if record.asked} == {}
    for cell, record in defaults.items():
        ranks = load_recipe(ProfileRecipe, cell.profile).hardware.num_gpus
        assert {part.num_ranks for part in record.parts} == {ranks}, cell


def test_every_model_with_an_mtp_block_drafts(said: dict[Asked, Replay]) -> None:
    without = {cell.model for cell in models_replayed.default_cells() if len(said[cell].parts) == 1}
    assert without == {"qwen3-30b-a3b"} and not any(record.undrafted for record in said.values())


KERNELS = {
    "8xh200": {
        ("attention", None, "FLASHMLA_SPARSE"), ("experts", "w4a16", "MARLIN (MarlinExperts)"),
        ("linear", "w4a16", "MacheteLinearKernel"), ("linear", "w4a16", "MarlinLinearKernel"),
    },
    "8xb200": {
        ("attention", None, "FLASHINFER_MLA_SPARSE"), ("experts", "w4a16", "MARLIN (MarlinExperts)"),
        ("linear", "w4a16", "MarlinLinearKernel"),
    },
    "8xrtx-pro-6000": {
        ("attention", None, "FLASHINFER_MLA_SPARSE_SM120"), ("experts", "w4a16", "MARLIN (MarlinExperts)"),
        ("linear", "w4a16", "MarlinLinearKernel"),
    },
}  # fmt: skip
"""Of the target of GLM-5 W4A16: what vLLM 0.32.0 chooses on each profile."""


@pytest.mark.parametrize("profile", KERNELS)
def test_kernels_follow_the_gpu(said: dict[Asked, Replay], profile: str) -> None:
    modules = said[Asked("glm-5", profile, "w4a16")].parts[0].modules
    assert {(row.what, row.scheme, row.kernel) for row in modules if row.kernel is not None} == KERNELS[profile]


def test_what_would_cut_a_group_is_still_refused(said: dict[Asked, Replay]) -> None:
    out = models_replayed.cut_groups()
    assert len(out) > 10 and {finding.kind for cell in out for finding in said[cell].every_finding} == {"group size"}
    assert [cell for cell in out if not said[cell].every_finding] == []


def test_the_page_is_up_to_date(said: dict[Asked, Replay]) -> None:
    made = models_page.first_half() + models_replayed.second_half(said)
    assert models_page.PAGE.read_text(encoding="utf-8") == made, "run tests/support/models/models_replayed.py"
