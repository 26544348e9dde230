"""Pictures of sensitivity: what each layer's roles cost where they alone are quantized, one map for each scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from assay.records.diagnosis.sensitivity import Sensitivity, SensitivityPart
from assay_reports.page.svg import PHONE, Picture, on_screen_and_phone
from assay_reports.sentences import page as english
from assay_reports.text import grouped

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
    def caption(self) -> str:
        shares = ", ".join(f"{role.replace('_', ' ')} {share:.0%}" for role, share in self.shares)
        return english.MAP.format(scheme=self.scheme, shares=shares, together=self.together)


@dataclass(frozen=True)
class Shown:
    """What the page says of a record. worst: parts that cost most."""

    heading: str
    maps: tuple[Map, ...]
    worst: tuple[SensitivityPart, ...]
    is_served: bool


def shown(record: Sensitivity | None) -> Shown | None:
    """None: there is no record."""
    if record is None:
        return None
    is_served = any(correlation.beside == "served" for correlation in record.correlations)
    return Shown(heading(record), tuple(maps(record)), tuple(_worst(record)), is_served)


def heading(record: Sensitivity) -> str:
    """The part that costs most, and of how much."""
    if not (worst := _worst(record)):
        return english.NOTHING_COSTS
    template = english.COSTS_NATS if record.in_nats else english.COSTS_SQUARED_ERROR
    cost = template.format(cost=worst[0].damage_nats)
    role = worst[0].role.replace("_", " ")
    return english.MOST_COSTLY.format(role=role, layer=worst[0].layer, scheme=worst[0].scheme, cost=cost)


def _worst(record: Sensitivity) -> list[SensitivityPart]:
    """Ten parts that cost most, in any scheme."""
    return sorted((part for part in record.parts if part.damage_nats), key=lambda part: -(part.damage_nats or 0))[:10]


def maps(record: Sensitivity) -> list[Map]:
    """In the order in which schemes were measured; colours mean the same in all of them."""
    measured = [part for part in record.parts if part.scheme != "bf16" and part.damage_nats is not None]
    positive = [part.damage_nats for part in measured if part.damage_nats]
    if not positive:
        return []
    uniform = {damage.scheme: damage for damage in record.uniform}
    drawn = []
    for scheme, parts in grouped((part.scheme, part) for part in measured).items():
        all_at_once = uniform.get(scheme)
        together = "" if all_at_once is None else english.TOGETHER.format(
            together=all_at_once.damage_nats, sum=all_at_once.sum_of_parts_nats
        )  # fmt: skip
        by_role = grouped((part.role, part.damage_nats or 0.0) for part in parts)
        sums = sorted(((role, sum(damages)) for role, damages in by_role.items()), key=lambda entry: -entry[1])
        total = sum(damage for _, damage in sums)
        shares = tuple((role, damage / total) for role, damage in sums) if total else ()
        drawn.append(Map(scheme, _map(record, scheme, parts, (min(positive), max(positive))), shares, together))
    return drawn


def _map(record: Sensitivity, scheme: str, parts: Sequence[SensitivityPart], ends: tuple[float, float]) -> Markup:
    roles = list(dict.fromkeys(part.role for part in parts))
    layers = sorted({part.layer for part in parts if part.layer is not None})
    is_numbered = len(layers) <= NUMBERED
    tall, top = 26 if is_numbered else 9, 16 * max(len(role.split("_")) for role in roles) + 8
    hints = [_hint(record, part) for part in parts]
    label = english.ONE_PART_AT_A_TIME.format(scheme=scheme, parts="; ".join(hints))

    def draw(width: int, css: str) -> Markup:
        left, side = (34, max(56, (width - 40) // len(roles))) if css == PHONE else (46, 100)
        picture = Picture(left + side * len(roles) + 4, top + 4 + tall * len(layers), label, css)
        for number, role in enumerate(roles):
            for line, word in enumerate(role.split("_")):
                picture.text(left + side * (number + 0.5), 14 + 16 * line, word, "tick", "middle")
        for number, layer in enumerate(layers):
            if is_numbered or number % 5 == 0:
                picture.text(left - 8, top + tall * (number + 0.5) + 5, layer, "tick", "end")
        for part, hint in zip(parts, hints, strict=True):
            assert part.layer is not None and part.damage_nats is not None, "MTP blocks have no damage"
            x, y = left + side * roles.index(part.role), top + tall * layers.index(part.layer)
            cell = shade(part.damage_nats, ends)
            picture.rect(x + 1, y + 1, side - 2, tall - (2 if is_numbered else 1), cell, hint)
            if is_numbered:
                picture.text(x + side / 2, y + tall / 2 + 5, f"{part.damage_nats:.2g}", f"cell {cell}", "middle")
        return picture.drawn()

    return on_screen_and_phone(draw)


def shade(value: float, ends: tuple[float, float]) -> str:
    """Even steps of the logarithm from the smallest to the largest figure."""
    if value <= 0 or ends[0] == ends[1]:
        return SHADES[0]
    place = math.log(value / ends[0]) / math.log(ends[1] / ends[0])
    return SHADES[min(len(SHADES) - 1, int(len(SHADES) * place))]


def _hint(record: Sensitivity, part: SensitivityPart) -> str:
    template = english.PART_NATS if record.in_nats else english.PART_ORDER
    served = "" if part.served_nats is None else english.PART_SERVED.format(nats=part.served_nats.value)
    return template.format(layer=part.layer, role=part.role, scheme=part.scheme, cost=part.damage_nats) + served
