"""KL against bytes: the best mix of every size as a line, uniform and shipped recipes as marks, what is proposed in green.

A file of its own, so its style is inside.
"""

from __future__ import annotations

import math

from markupsafe import Markup

from assay.quantities import size
from assay.records.choice.mix import Mix, MixPoint
from assay_reports.page.svg import Picture, Scale, axis_below, axis_left, decades, steps

_STYLE = Markup(
    "<style>svg{background:#fff;font-family:system-ui,sans-serif;font-size:12px;fill:#222}"
    ".grid{stroke:#e3e3e3}.limit{stroke:#b3261e;stroke-dasharray:4 3}.limit-name{fill:#b3261e}"
    ".best{fill:none;stroke:#0072b2;stroke-width:2}.mix{fill:#0072b2}.uniform{fill:#e69f00;stroke:#7a5400}"
    ".shipped{fill:#fff;stroke:#666}.taken{fill:#009e73;stroke:#004d38}.tick,.axis{fill:#555}.tick{font-size:11px}"
    ".name{font-size:11px}.unfit{opacity:.4}</style>"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHAPES = {"mix": 0, "uniform": 1, "shipped": 3}


def frontier_svg(mix: Mix) -> Markup:
    """The picture of a mix; damages on a logarithmic scale. A point that loses nothing stands on the lower edge.

    It ends a little behind the largest recipe that has a name; names stand beside it, under the letters of their marks.
    """
    named = sorted([mix.point, *mix.controls], key=lambda one: (one.bytes, one.name))
    end = named[-1].bytes + (named[-1].bytes - named[0].bytes) // 8
    best = [one for one in mix.frontier if one.bytes <= end] or list(mix.frontier[:1])
    lossy = [one.damage_nats for one in (*named, *best) if one.damage_nats > 0] or [1e-6, 1.0]
    unit, each = ("GB", 1e9) if named[-1].bytes >= 1e9 else ("MB", 1e6)
    low, high = 10 ** math.floor(math.log10(min(lossy))), 10 ** math.ceil(math.log10(max(lossy) * 1.001))
    left, right = min(one.bytes for one in (*named, *best)) / each, max(one.bytes for one in (*named, *best)) / each
    room = 0.04 * (right - left) or 0.1 * right
    to = Picture(860, max(400, 84 + 17 * len(named)), _said(mix))
    base, edge = to.height - 52, 600
    across, up = Scale(left - room, right + room, 64, edge), Scale(low, high, base, 44, is_log=True)
    axis_left(to, up, 64, decades(low, high), lambda v: f"{v:g}", "expected KL, nats a token (sum over parts)", edge)
    axis_below(to, across, base, steps(left - room, right + room), lambda v: f"{v:g}", f"size of the checkpoint, {unit}", 44)
    if mix.budget_bytes is not None and left - room <= mix.budget_bytes / each <= right + room:
        x = across(mix.budget_bytes / each)
        to.line(x, 44, x, base, "limit")
        to.text(x + 4, 56, mix.budget, "limit-name")
    to.path([(across(one.bytes / each), up(max(one.damage_nats, low))) for one in best], "best")
    for one in best:
        _mark(to, across(one.bytes / each), up(max(one.damage_nats, low)), one, "mix", 3)
    for number, (letter, one) in enumerate(zip(_LETTERS, named, strict=False)):
        css, large = ("taken", 6.5) if one is mix.point else (one.kind, 4.5)
        x, y = across(one.bytes / each), up(max(one.damage_nats, low))
        _mark(to, x, y, one, css, large)
        to.text(x + 8, y - 4, letter, "name")
        line = 52 + 17 * number
        _mark(to, edge + 32, line - 4, one, css, 4.5)
        to.text(edge + 18, line, letter, "name", "end")
        to.text(edge + 44, line, f"{one.name}, {size(one.bytes)}{'' if one.fits else ', does not fit'}", "name")
    return Markup(str(to.drawn()).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{_STYLE}", 1))


def _mark(to: Picture, x: float, y: float, one: MixPoint, css: str, large: float) -> None:
    hint = f"{one.name}: {size(one.bytes)}, {one.damage_nats:.4g} nats{'' if one.fits else '; does not fit the hardware'}"
    to.mark(x, y, f"{css}{'' if one.fits else ' unfit'}", _SHAPES[one.kind], hint, large)


def _said(mix: Mix) -> str:
    named = [f"{one.name} {size(one.bytes)} {one.damage_nats:.3g} nats" for one in (mix.point, *mix.controls)]
    return f"Expected KL against size of {mix.model}. {'. '.join(named)}."
