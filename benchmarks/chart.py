"""GB/s by scheme as an SVG of bars: both tools, on a logarithmic axis, and a line for the copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, ROW, LEFT, TOP, RIGHT = 760, 44, 110, 56, 70
COLOURS = {"assay": "#2f6f9f", "llm-compressor": "#b8643c"}


def bars(rows: Sequence[tuple[str, float | None, float | None]], copy: float | None) -> str:
    """SVG text. rows: (scheme, GB/s of assay, of llm-compressor), None where there is none. copy: GB/s of `cp`."""
    values = [value for row in rows for value in (*row[1:], copy) if value]
    low = 10 ** math.floor(math.log10(min(values, default=0.01)))
    high = 10 ** math.ceil(math.log10(max(values, default=1.0) * 1.01))
    height = TOP + ROW * len(rows) + 40

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="22" font-size="15">GB of BF16 per second (logarithmic)</text>',
    ]
    for number, (name, colour) in enumerate(COLOURS.items()):
        left = WIDTH - 300 + 90 * number
        parts.append(f'<rect x="{left}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17}" y="22">{name}</text>')
    tick = low
    while tick <= high * 1.001:
        parts.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 8}" y2="{height - 32}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 14}" text-anchor="middle">{tick:g}</text>')
        tick *= 10
    for index, (scheme, *pair) in enumerate(rows):
        y = TOP + ROW * index
        parts.append(f'<text x="{LEFT - 8}" y="{y + 22}" text-anchor="end">{escape(scheme)}</text>')
        for offset, value, colour in zip((2, 19), pair, COLOURS.values(), strict=True):
            if value is None:
                parts.append(f'<text x="{LEFT + 4}" y="{y + offset + 12}" fill="#888888">none</text>')
                continue
            parts.append(
                f'<rect x="{LEFT}" y="{y + offset}" width="{max(1.0, x(value) - LEFT):.1f}" height="15" fill="{colour}"/>'
            )
            parts.append(f'<text x="{x(value) + 5:.1f}" y="{y + offset + 12}">{value:.3g}</text>')
    if copy:
        parts.append(
            f'<line x1="{x(copy):.1f}" x2="{x(copy):.1f}" y1="{TOP - 8}" y2="{height - 32}" stroke="#444444" '
            'stroke-dasharray="4 3"/>'
        )
        parts.append(f'<text x="{x(copy):.1f}" y="{TOP - 12}" text-anchor="middle">cp {copy:.3g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
