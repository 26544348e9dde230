"""KL against bytes: the best mix of every size as a line, uniform and shipped recipes as marks, what is proposed in green.

A file of its own, so its style is inside.
"""

from __future__ import annotations

import math
import string

from markupsafe import Markup

from assay.quantities import size
from assay.records.choice.mix import Mix, MixPoint
from assay_reports.page.svg import Picture, Scale, axis_below, axis_left, decades, steps
from assay_reports.sentences import page as english

_STYLE = Markup(
    "<style>svg{background:#fff;font-family:system-ui,sans-serif;font-size:12px;fill:#222}"
    ".grid{stroke:#e3e3e3}.limit{stroke:#b3261e;stroke-dasharray:4 3}.limit-name{fill:#b3261e}"
    ".best{fill:none;stroke:#0072b2;stroke-width:2}.mix{fill:#0072b2}.uniform{fill:#e69f00;stroke:#7a5400}"
    ".shipped{fill:#fff;stroke:#666}.taken{fill:#009e73;stroke:#004d38}.tick,.axis{fill:#555}.tick{font-size:11px}"
    ".name{font-size:11px}.unfit{opacity:.4}</style>"
)
_SHAPES = {"mix": 0, "uniform": 1, "shipped": 3}


def frontier_svg(mix: Mix) -> Markup:
    """The picture of a mix; damages on a logarithmic scale. A point that loses nothing stands on the lower edge.

    It ends a little behind the largest recipe that has a name; names stand beside it, under the letters of their marks.
    """
    named = sorted([mix.point, *mix.controls], key=lambda point: (point.bytes, point.name))
    end = named[-1].bytes + (named[-1].bytes - named[0].bytes) // 8
    best = [point for point in mix.frontier if point.bytes <= end] or list(mix.frontier[:1])
    lossy = [point.damage_nats for point in (*named, *best) if point.damage_nats > 0] or [1e-6, 1.0]
    unit, each = ("GB", 1e9) if named[-1].bytes >= 1e9 else ("MB", 1e6)
    low, high = 10 ** math.floor(math.log10(min(lossy))), 10 ** math.ceil(math.log10(max(lossy) * 1.001))
    sizes = [point.bytes / each for point in (*named, *best)]
    room = 0.04 * (max(sizes) - min(sizes)) or 0.1 * max(sizes)
    first, last = min(sizes) - room, max(sizes) + room
    points = [f"{point.name} {size(point.bytes)} {point.damage_nats:.3g} nats" for point in (mix.point, *mix.controls)]
    label = english.FRONTIER.format(model=mix.model, points=". ".join(points))
    picture = Picture(860, max(400, 84 + 17 * len(named)), label)
    base, edge = picture.height - 52, 600
    across, up = Scale(first, last, 64, edge), Scale(low, high, base, 44, is_log=True)
    axis_left(picture, up, 64, decades(low, high), lambda v: f"{v:g}", english.FRONTIER_AXIS, edge)
    axis_below(picture, across, base, steps(first, last), lambda v: f"{v:g}", english.SIZE_AXIS.format(unit=unit), 44)
    if mix.budget_bytes is not None and first <= mix.budget_bytes / each <= last:
        x = across(mix.budget_bytes / each)
        picture.line(x, 44, x, base, "limit")
        picture.text(x + 4, 56, mix.budget, "limit-name")

    def place(point: MixPoint) -> tuple[float, float]:
        return across(point.bytes / each), up(max(point.damage_nats, low))

    def mark(x: float, y: float, point: MixPoint, css: str, radius: float) -> None:
        fits = "" if point.fits else english.FITS_NOT_THE_HARDWARE
        hint = f"{point.name}: {size(point.bytes)}, {point.damage_nats:.4g} nats{fits}"
        picture.mark(x, y, f"{css}{'' if point.fits else ' unfit'}", _SHAPES[point.kind], hint, radius)

    picture.path([place(point) for point in best], "best")
    for point in best:
        mark(*place(point), point, "mix", 3)
    for number, (letter, point) in enumerate(zip(string.ascii_letters, named, strict=False)):
        css, radius = ("taken", 6.5) if point is mix.point else (point.kind, 4.5)
        (x, y), line = place(point), 52 + 17 * number
        mark(x, y, point, css, radius)
        picture.text(x + 8, y - 4, letter, "name")
        mark(edge + 32, line - 4, point, css, 4.5)
        picture.text(edge + 18, line, letter, "name", "end")
        fits = "" if point.fits else english.FITS_NOT
        picture.text(edge + 44, line, f"{point.name}, {size(point.bytes)}{fits}", "name")
    drawn = str(picture.drawn()).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return Markup(drawn.replace(">", f">{_STYLE}", 1))
