"""Every default cell of the shipped recipes can be split and held; docs/models.md says so and why the others are not there."""

from __future__ import annotations

import models_page
import pytest
from models_page import Cell, default_cells

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return list(default_cells())


def test_every_default_cell_passes(cells: list[Cell]) -> None:
    assert {one.model for one in cells} == set(models_page.CONTEXTS)
    assert [one.problem for one in cells if one.problem is not None] == []


def test_only_the_candidate_fits_a_profile_for_deployment() -> None:
    for name in models_page.models():
        stored = models_page.stored_of(name)
        assert all(stored.cell(profile, "", "reference").problem for profile in stored.recipe.deployment_profiles), name


def test_the_first_half_of_the_page_is_up_to_date() -> None:
    """The second is what vLLM says: tests/evaluate/serving/test_models_loaded.py."""
    made = models_page.first_half()
    assert models_page.PAGE.read_text(encoding="utf-8").startswith(made), "run tests/support/models/models_replayed.py"
