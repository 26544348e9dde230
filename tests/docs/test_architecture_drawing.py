"""The drawing of docs/architecture.md has every room that pyproject.toml has."""

from __future__ import annotations

import architecture_drawing


def test_every_room_has_its_words() -> None:
    for package, does in architecture_drawing.DOES.items():
        assert {room for row in architecture_drawing.layers_of(package) for room in row} == does.keys()


def test_the_drawing_is_the_programs() -> None:
    made = architecture_drawing.DRAWING.read_text(encoding="utf-8")
    assert made == architecture_drawing.drawing(), "run python tests/support/pages/architecture_drawing.py"
