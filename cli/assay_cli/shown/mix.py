"""A mix as `assay recipe` prints it: what is proposed and why, roles, the frontier as a picture of characters, figures."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from assay.quantities import size
from assay.records.choice.mix import Mix, MixedPart, MixPoint
from assay_cli.terminal import escape, print_rows

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS, _LINES = 72, 16
_MARKS = "abcdefghijklmnopqrstuvwxyz"


def print_mix(mix: Mix, out: Console) -> None:
    """The answer first; then roles, picture, figures, what was not taken, checks and assumptions."""
    point = mix.point
    out.print(
        f"[bold]{escape(mix.name)}[/]: {size(point.bytes)}, {point.bits_per_weight:.2f} bits per weight, expected KL "
        f"{point.damage_nats:.4g} nats a token; least possible {mix.bound_nats:.4g}"
    )
    out.print(escape(mix.reason))
    print_rows(("role", "layers", "scheme", "bytes", "nats", "why"), [*_roles(mix)], out)
    out.print("")
    for line in plotted(mix):
        out.print(escape(line), soft_wrap=True)
    out.print("")
    rows = sorted([*mix.frontier, *mix.controls, point], key=lambda candidate: (candidate.bytes, candidate.kind))
    print_rows(
        ("checkpoint", "kind", "bytes", "bits/weight", "expected nats", "kept parts"),
        [_row(mix, candidate) for candidate in rows],
        out,
    )
    for left in mix.not_taken:
        out.print(escape(f"not taken: {left.role} {left.layers} in {left.scheme}: {left.why}"))
    for check in mix.checks:
        ends = "" if check.interval is None else f" ({check.interval.low:.3g} to {check.interval.high:.3g})"
        out.print(
            escape(
                f"sum against measured: {check.name} ({check.source}): {check.predicted_nats:.4g} expected, "
                f"{check.measured_nats:.4g}{ends} measured"
            )
        )
    out.print(escape(f"vLLM's loaders: {mix.replayed}"))
    out.print(escape(f"Assumed: {'; '.join(mix.assumptions)}."))
    out.print(escape(f"Chosen on {mix.texts or 'no texts'} (sha256 {mix.texts_sha256[:16]}): judge it on others."))


def _roles(mix: Mix) -> list[tuple[str, ...]]:
    from assay_quantize.mixing.recipe_text import layers_text, reason

    groups: dict[tuple[str, str], list[MixedPart]] = defaultdict(list)
    for part in mix.parts:
        groups[part.role, part.scheme].append(part)
    rows: list[tuple[str, ...]] = []
    for (role, scheme), parts in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        rows.append(
            (
                role, layers_text(part.layer for part in parts), scheme, size(sum(part.bytes for part in parts)),
                f"{sum(part.damage_nats for part in parts):.3g}", escape(reason(parts)),
            )
        )  # fmt: skip
    return rows


def _row(mix: Mix, mix_point: MixPoint) -> tuple[str, ...]:
    name = f"[bold]{escape(mix_point.name)}[/]" if mix_point == mix.point else escape(mix_point.name)
    kind = "proposed" if mix_point == mix.point else "best of its size" if mix_point.kind == "mix" else mix_point.kind
    return (
        name, kind if mix_point.fits else f"[red]{kind}, does not fit[/]",
        size(mix_point.bytes), f"{mix_point.bits_per_weight:.3f}",
        f"{mix_point.damage_nats:.4g}", str(mix_point.num_kept),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ a picture of characters
def plotted(mix: Mix) -> list[str]:
    """KL (logarithmic) against bytes: `.` best of a size, letters for uniform and shipped recipes, `#` what is proposed."""
    points = [*mix.frontier, *mix.controls, mix.point]
    lossy = [mix_point.damage_nats for mix_point in points if mix_point.damage_nats > 0]
    if not lossy:
        return ["nothing is expected to be lost at any of these sizes"]
    low, high = math.log10(min(lossy)), math.log10(max(lossy))
    least, most = min(mix_point.bytes for mix_point in points), max(mix_point.bytes for mix_point in points)
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]

    def put(point: MixPoint, mark: str) -> None:
        x = round((point.bytes - least) / max(1, most - least) * (_COLUMNS - 1))
        share = (math.log10(point.damage_nats) - low) / (high - low or 1.0) if point.damage_nats > 0 else 0.0
        grid[_LINES - 1 - round(share * (_LINES - 1))][x] = mark

    for mix_point in mix.frontier:
        put(mix_point, ".")
    for mark, mix_point in zip(_MARKS, mix.controls, strict=False):
        put(mix_point, mark)
    put(mix.point, "#")
    lines = ["expected KL, nats a token (logarithmic), against size"]
    for number, row in enumerate(grid):
        edge = f"{max(lossy):.2g}" if number == 0 else f"{min(lossy):.2g}" if number == _LINES - 1 else ""
        lines.append(f"{edge:>8} |{''.join(row)}".rstrip())
    lines.append(f"{'':>8} +{'-' * _COLUMNS}")
    lines.append(f"{'':>10}{size(least)}{size(most):>{_COLUMNS - len(size(least))}}")
    named = [f"{mark} {mix_point.name}" for mark, mix_point in zip(_MARKS, mix.controls, strict=False)]
    return [*lines, f"# {mix.name}   . best of its size   {'   '.join(named)}"]
