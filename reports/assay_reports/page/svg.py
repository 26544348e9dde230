"""SVG by hand: scales, axes and marks as strings. Colours are classes of the style sheet, so both themes and print have theirs.

Lengths are in the units of the view box, which are CSS pixels where a picture is as wide as it was drawn. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

SERIES = 6
"""Colours of checkpoints; a seventh takes the first again, and has its name beside it."""


@dataclass(frozen=True)
class Scale:
    """Values to places, linear or logarithmic. `begin`, `end`: places of `low` and `high`."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, self.low)), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


@dataclass
class Picture:
    """Marks in the order in which they are drawn."""

    width: int
    height: int
    title: str
    """What a screen reader says instead of the picture: what it shows, in a sentence."""
    css: str = ""
    """`wide` or `narrow`, where the style sheet shows one of two drawings."""
    marks: list[Markup] = field(default_factory=list)

    def add(self, mark: str, **values: object) -> None:
        """A mark; what stands in braces is escaped."""
        self.marks.append(Markup(mark).format(**values))

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.add('<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" class="{css}"/>', a=x1, b=y1, c=x2, d=y2, css=css)

    def text(self, x: float, y: float, text: object, css: str = "", anchor: str = "start") -> None:
        mark = '<text x="{x}" y="{y}" class="{css}" text-anchor="{anchor}">{text}</text>'
        self.add(mark, x=round(x, 1), y=round(y, 1), css=css, anchor=anchor, text=text)

    def rect(self, x: float, y: float, width: float, height: float, css: str, hint: str | None = None) -> None:
        mark = '<rect x="{x}" y="{y}" width="{w}" height="{h}" class="{css}"'
        end = "/>" if hint is None else "><title>{hint}</title></rect>"
        self.add(mark + end, x=x, y=y, w=round(width, 1), h=round(height, 1), css=css, hint=hint)

    def mark(self, x: float, y: float, css: str, shape: int, hint: str, size: float = 5) -> None:
        """Shapes differ as well as colours: circle, square, triangle, diamond."""
        a, b, s = round(x, 1), round(y, 1), size
        shapes = (
            f'<circle cx="{a}" cy="{b}" r="{s}"',
            f'<rect x="{a - s:.1f}" y="{b - s:.1f}" width="{2 * s}" height="{2 * s}"',
            f'<path d="M{a} {b - s - 1:.1f}L{a + s + 1:.1f} {b + s:.1f}L{a - s - 1:.1f} {b + s:.1f}Z"',
            f'<path d="M{a} {b - s - 2:.1f}L{a + s + 2:.1f} {b}L{a} {b + s + 2:.1f}L{a - s - 2:.1f} {b}Z"',
        )
        self.add(
            shapes[shape % len(shapes)] + ' class="{css}"><title>{hint}</title>' + _END[shape % len(shapes)], css=css, hint=hint
        )

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        self.add('<polyline points="{points}" class="{css}"/>', points=" ".join(f"{x},{y}" for x, y in points), css=css)

    def drawn(self) -> Markup:
        """The element, with its title as its name."""
        css = Markup(' class="{}"').format(self.css) if self.css else ""
        head = Markup('<svg viewBox="0 0 {w} {h}" width="{w}" height="{h}"{css} role="img" aria-label="{title}">').format(
            w=self.width, h=self.height, css=css, title=self.title
        )
        return head + Markup("").join(self.marks) + Markup("</svg>")


PHONE = "narrow"
"""Class of a drawing that the style sheet shows on screens of at most 600 pixels."""


def on_screen_and_phone(draw: Callable[[int, str], Markup], width: int = 760) -> Markup:
    """Both drawings of a picture; the style sheet shows one. draw: of a width and a class. 360 pixels: with letters of full
    size on a phone, where a wide picture would be shrunk to half."""
    return draw(width, "wide") + draw(360, PHONE)


_END = ("</circle>", "</rect>", "</path>", "</path>")


# ------------------------------------------------------------------------------------------------ names
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
LETTER, ABOVE, BELOW = 8.5, 11.0, 3.0
"""Width of a letter of a name, and its height over and under the line that it stands on."""
AWAY, LINE = 10, 13
"""From the middle of a mark to its name, and from one height of a name to the next."""


def place_names(
    marks: Sequence[tuple[float, float, str]], inside: Box, taken: Iterable[Box]
) -> list[tuple[float, float, str, str]]:
    """(x, y of the line, anchor, name) of the name of every mark (x, y, name): beside it, at the nearest height at which it
    touches no mark, no other name and nothing of `taken`; where there is none, at the one at which it covers least of these.
    No name leaves `inside`: one that is too long for the wider side of its mark is cut."""
    held = [*taken, *((x - 7, y - 7, x + 7, y + 7) for x, y, _ in marks)]
    lines = range(math.ceil((inside[3] - inside[1]) / LINE))
    room = [max(inside[2] - x, x - inside[0]) - AWAY for x, _, _ in marks]  # on the wider side
    names = _cut([name for *_, name in marks], [int(width / LETTER) for width in room])
    places = []
    for (x, y, _), name in zip(marks, names, strict=True):
        width = LETTER * len(name)
        tries: list[tuple[float, float, str]] = [
            (x + away, y + down, anchor)
            for line in lines
            for down in (4 + LINE * line, -9 - LINE * line)
            for away, anchor in ((AWAY, "start"), (-AWAY, "end"))
            if _is_inside(_box(x + away, y + down, anchor, width), inside)
        ] or [(x + AWAY, y + 4, "start")]
        covered = [_covered(_box(*place, width), held) for place in tries]
        place = tries[covered.index(min(covered))]  # of several the first, which is the nearest
        held.append(_box(*place, width))
        places.append((*place, name))
    return places


def _cut(names: Sequence[str], most: Sequence[int]) -> list[str]:
    """Names of at most so many letters each, with as much of their beginnings and ends as leaves them apart."""
    cuts: list[list[str]] = []
    for share in (0.25, 0.0, 0.5, 1.0):
        heads = [round(share * (number - 1)) for number in most]
        cuts.append(
            [
                name if len(name) <= number else f"{name[:head]}…{name[len(name) - (number - 1 - head) :]}"
                for name, number, head in zip(names, most, heads, strict=True)
            ]
        )
    return next((cut for cut in cuts if len(set(cut)) == len(set(names))), cuts[0])


def _box(x: float, y: float, anchor: str, width: float) -> Box:
    left = x if anchor == "start" else x - width
    return left, y - ABOVE, left + width, y + BELOW


def _is_inside(box: Box, outer: Box) -> bool:
    return box[0] >= outer[0] and box[1] >= outer[1] and box[2] <= outer[2] and box[3] <= outer[3]


def _covered(box: Box, held: Iterable[Box]) -> float:
    """Area of what lies under it."""
    return sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0])) * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in held
    )


# ------------------------------------------------------------------------------------------------ axes
def axis_below(
    picture: Picture, scale: Scale, y: float, ticks: Iterable[float], name: Callable[[float], str], title: str, top: float
) -> None:
    """Ticks with grid lines up to `top`, and a title."""
    for tick in ticks:
        picture.line(scale(tick), top, scale(tick), y, "grid")
        picture.text(scale(tick), y + 16, name(tick), "tick", "middle")
    picture.text((scale.begin + scale.end) / 2, y + 36, title, "axis", "middle")


def axis_left(
    picture: Picture, scale: Scale, x: float, ticks: Iterable[float], name: Callable[[float], str], title: str, right: float
) -> None:
    """Ticks with grid lines to `right`; the title stands above the axis, where it need not be turned."""
    for tick in ticks:
        picture.line(x, scale(tick), right, scale(tick), "grid")
        picture.text(x - 6, scale(tick) + 4, name(tick), "tick", "end")
    picture.text(0, min(scale.begin, scale.end) - 12, title, "axis")


def steps(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most `most`."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) + 0.0 for k in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float, base: int = 10) -> list[float]:
    """Powers of `base` from low to high; both ends are positive."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [float(base) ** power for power in range(first, last + 1)]


# ------------------------------------------------------------------------------------------------ legends
def legend(names: Sequence[tuple[str, str, int]]) -> Markup:
    """A list of (name, class, shape): what colours and shapes mean."""
    entries = []
    for name, css, shape in names:
        sample = Picture(16, 14, "")
        sample.mark(8, 7, css, shape, "", 4.5)
        drawn = Markup("").join(sample.marks)
        entries.append(
            Markup('<li><svg viewBox="0 0 16 14" width="16" height="14" aria-hidden="true">{}</svg> {}</li>').format(
                drawn, name
            )
        )
    return Markup('<ul class="legend">') + Markup("").join(entries) + Markup("</ul>")


def shape_of(css: str) -> int:
    """The shape that goes with a colour."""
    return 3 if css == "sref" else int(css[1:]) % 3
