"""Pictures of sensitivity: what each layer's roles cost where they alone are quantized, one map for each scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from assay.records.diagnosis.sensitivity import Sensitivity, SensitivityPart
from assay_reports.page.svg import Picture

NUMBERED = 24
"""Layers up to which each cell has its number; with more, cells are lower and a hint has it."""
SHADES = ("heat0", "lost1", "lost2", "lost3", "lost4")


@dataclass(frozen=True)
class Map:
    """Of one scheme. shares: (role, its share of the sum of all parts), largest first. together: what all at once cost."""

    scheme: str
    picture: Markup
    shares: tuple[tuple[str, float], ...]
    together: str

    @property
    def shares_said(self) -> str:
        return ", ".join(f"{role.replace('_', ' ')} {share:.0%}" for role, share in self.shares)


def maps(found: Sensitivity) -> list[Map]:
    """In the order in which schemes were measured; colours mean the same in all of them."""
    measured = [part for part in found.parts if part.scheme != "bf16" and part.damage_nats is not None]
    positive = [part.damage_nats for part in measured if part.damage_nats]
    if not positive:
        return []
    ends = min(positive), max(positive)
    whole = {one.scheme: one for one in found.uniform}
    made = []
    for scheme in dict.fromkeys(part.scheme for part in measured):
        mine = [part for part in measured if part.scheme == scheme]
        uniform = whole.get(scheme)
        together = "" if uniform is None else (
            f"All parts at once: {uniform.damage_nats:.3g} nats; the parts sum to {uniform.sum_of_parts_nats:.3g}."
        )  # fmt: skip
        made.append(Map(scheme, _map(found, scheme, mine, ends), _shares(mine), together))
    return made


def _map(found: Sensitivity, scheme: str, parts: Sequence[SensitivityPart], ends: tuple[float, float]) -> Markup:
    roles = list(dict.fromkeys(part.role for part in parts))
    layers = sorted({part.layer for part in parts if part.layer is not None})
    is_numbered = len(layers) <= NUMBERED
    left, side, tall = 46, 100, 26 if is_numbered else 9
    to = Picture(
        left + side * len(roles) + 8,
        30 + tall * len(layers),
        f"{scheme}, one part at a time: " + "; ".join(hint(found, part) for part in parts),
    )
    for number, role in enumerate(roles):
        to.text(left + side * (number + 0.5), 18, role.replace("_", " "), "tick", "middle")
    for number, layer in enumerate(layers):
        if is_numbered or number % 5 == 0:
            to.text(left - 8, 26 + tall * (number + 0.5) + 5, layer, "tick", "end")
    for part in parts:
        assert part.layer is not None and part.damage_nats is not None, "MTP blocks have no damage"
        x, y = left + side * roles.index(part.role), 26 + tall * layers.index(part.layer)
        css = shade(part.damage_nats, ends)
        mark = '<rect x="{x}" y="{y}" width="{w}" height="{h}" class="{css}"><title>{t}</title></rect>'
        to.add(mark, x=x + 1, y=y + 1, w=side - 2, h=tall - (2 if is_numbered else 1), css=css, t=hint(found, part))
        if is_numbered:
            to.text(x + side / 2, y + tall / 2 + 5, f"{part.damage_nats:.2g}", f"cell {css}", "middle")
    return to.drawn()


def shade(value: float, ends: tuple[float, float]) -> str:
    """Even steps of the logarithm from the smallest to the largest figure."""
    if value <= 0 or ends[0] == ends[1]:
        return SHADES[0]
    place = math.log(value / ends[0]) / math.log(ends[1] / ends[0])
    return SHADES[min(len(SHADES) - 1, int(len(SHADES) * place))]


def hint(found: Sensitivity, part: SensitivityPart) -> str:
    unit = "nats" if found.in_nats else "(only the order means something)"
    served = f", served {part.served_nats.value:.3g}" if part.served_nats is not None else ""
    return f"layer {part.layer} {part.role} in {part.scheme}: {part.damage_nats:.3g} {unit}{served}"


@dataclass(frozen=True)
class Shown:
    """What the page says of a record."""

    heading: str
    maps: tuple[Map, ...]
    worst: tuple[SensitivityPart, ...]
    is_served: bool


def shown(found: Sensitivity | None) -> Shown | None:
    """None: there is no record."""
    if found is None:
        return None
    is_served = any(one.beside == "served" for one in found.correlations)
    return Shown(heading(found), tuple(maps(found)), tuple(worst(found)), is_served)


def _shares(parts: Sequence[SensitivityPart]) -> tuple[tuple[str, float], ...]:
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.role] = sums.get(part.role, 0.0) + (part.damage_nats or 0.0)
    total = sum(sums.values())
    return tuple(sorted(((role, value / total) for role, value in sums.items()), key=lambda one: -one[1])) if total else ()


def worst(found: Sensitivity, count: int = 10) -> list[SensitivityPart]:
    """Parts that cost most, in any scheme."""
    return sorted((part for part in found.parts if part.damage_nats), key=lambda part: -(part.damage_nats or 0))[:count]


def heading(found: Sensitivity) -> str:
    """The part that costs most, and of how much."""
    if not (first := worst(found, 1)):
        return "No part costs anything that was measured"
    part = first[0]
    where = f"{part.role.replace('_', ' ')} of layer {part.layer}"
    figure = f"{part.damage_nats:.3g} nats a token" if found.in_nats else f"a relative squared error of {part.damage_nats:.3g}"
    return f"Most costly by itself: {where} in {part.scheme}, {figure}"
