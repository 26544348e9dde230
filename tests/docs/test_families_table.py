"""The committed table of docs/families.md against what can be told without a replay."""

from __future__ import annotations

import families_replayed

from assay.recipes.family_names import family_names

KINDS = {"loads", "group size", "shape", "refused", "arguments", "missing tensor", "no class", "no plan"}


def test_every_family_has_its_row() -> None:
    rows = families_replayed.rows_on_page()
    assert [row[0].strip("`") for row in rows] == sorted(family_names())
    assert len(rows) >= 40


def test_what_needs_no_replay() -> None:
    for row in families_replayed.rows_on_page():
        family = row[0].strip("`")
        assert row[:4] == families_replayed.known_cells(family)
        assert row[-1] == families_replayed.drafts_of(family)
        said = {word for cell in row[4:7] for word in cell.split(", ")}
        assert said <= KINDS, family
        assert (said == {"no class"}) == (family in families_replayed.NO_CLASS), family
