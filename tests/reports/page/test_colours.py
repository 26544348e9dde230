"""Contrast of the page's colours, computed from its style sheet: WCAG 2.2 AA, in both themes."""

from __future__ import annotations

import re

import pytest

from assay_reports.report import document_parts, environment

TEXT, GRAPHICS = 4.5, 3.0
"""Least contrast of text (1.4.3), and of marks and the edges of controls (1.4.11)."""
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "sref")
WRITTEN = [
    *((ink, ground) for ink in ("ink", "soft", "link", "warn", "good", "bad") for ground in ("paper", "panel")),
    ("good", "good-bg"), ("bad", "bad-bg"), ("warn", "warn-bg"), ("ink", "bad-bg"), ("mark-ink", "mark"), ("paper", "ink"),
    ("paper", "link"),
]  # fmt: skip
DRAWN = [*((name, "paper") for name in (*SERIES, "edge", "focus", "bad")), *((name, "bad-bg") for name in SERIES)]


def style() -> str:
    return document_parts(environment(html=True))["style"]


def themes() -> dict[str, dict[str, str]]:
    """light: of `:root`; dark: what the two dark rules put over it, which must be the same."""
    text = style()
    rules = {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body))
        for name, body in re.findall(r"(:root[^{,]*) \{([^}]*)\}", text)
    }
    system, switch = rules[':root:not([data-theme="light"])'], rules[':root[data-theme="dark"]']
    assert system == switch and system
    return {"light": rules[":root"], "dark": rules[":root"] | system}


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_is_wcags() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)  # the grey that is known to just pass


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out(theme: str) -> None:
    colours = themes()[theme]
    found = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in WRITTEN}
    assert {pair: round(ratio, 2) for pair, ratio in found.items() if ratio < TEXT} == {}
    found = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in DRAWN}
    assert {pair: round(ratio, 2) for pair, ratio in found.items() if ratio < GRAPHICS} == {}


def test_numbers_in_heat_maps_stand_out() -> None:
    cells = dict(re.findall(r"svg rect\.(\w+) \{ fill: (#\w{6})", style()))
    inks = dict(re.findall(r"svg text\.(\w+) \{ fill: (#\w{6})", style()))
    assert len(cells) == 9 and cells.keys() == inks.keys()
    ratios = {name: contrast(cells[name], inks[name]) for name in cells}
    assert {name: round(ratio, 2) for name, ratio in ratios.items() if ratio < TEXT} == {}
