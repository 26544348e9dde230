"""What `assay sensitivity` prints: a map of layers and roles, the worst parts, shares of roles, and how far proxies agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console

from assay.quantities import size
from assay.records.base import Interval
from assay.records.diagnosis.sensitivity import Sensitivity, SensitivityPart, WholeDamage
from assay.records.plan import Role
from assay_cli.terminal import escape, print_rows

WORST = 8
"""Parts that are named."""
SHADES = (("grey85", "black"), ("#f8ddc8", "black"), ("#f0b78c", "black"), ("#d97a36", "black"), ("#a84300", "white"))
"""From little to much damage; as in the report."""
MARKS = "·░▒▓█"
"""The same where there are no colours."""

Place = tuple[int | None, Role]


def show(record: Sensitivity, out: Console, scheme: str | None = None) -> None:
    """scheme: of the map; None: the first that was measured."""
    schemes = list(dict.fromkeys(part.scheme for part in record.parts if part.scheme != "bf16"))
    mapped = scheme or schemes[0]
    texts = f"{record.num_texts:,} texts, {record.num_tokens:,} tokens ({record.texts})" if record.num_texts else "no text"
    out.print(escape(f"{record.model}: {record.method} over {texts}; {record.cpu_seconds:,.0f} s of CPU time"))
    _map(record, mapped, out)
    out.print("worst parts" if record.in_nats else "largest relative errors")
    print_rows(
        ("layer", "role", "scheme", _unit(record), "served", "bytes", "worst tensor", "worst router"), _worst(record), out
    )
    out.print("share of each role in the sum over its parts")
    _shares(record, schemes, out)
    for line in _lines(record):
        out.print(escape(line))


def _unit(record: Sensitivity) -> str:
    return "KL, nats a token" if record.in_nats else "relative squared error"


# ------------------------------------------------------------------------------------------------ the map
def _map(record: Sensitivity, scheme: str, out: Console) -> None:
    """Rows: layers; columns: roles. Shades are even steps of the logarithm between the smallest and the largest figure."""
    values = {(p.layer, p.role): p.damage_nats for p in record.parts if p.scheme == scheme and p.damage_nats is not None}
    roles = list(dict.fromkeys(role for _, role in values))
    layers = sorted({layer for layer, _ in values if layer is not None})
    out.print(escape(f"{scheme}: {_unit(record)}, one part quantized at a time"))
    rows = []
    for layer in layers:
        rows.append([str(layer), *(_cell(values.get((layer, role)), values, out) for role in roles)])
    print_rows(("layer", *roles), rows, out)


def _cell(value: float | None, values: Mapping[Place, float], out: Console) -> str:
    if value is None:
        return ""
    shade = shade_of(value, list(values.values()))
    text = f"{value:.2g}"
    if out.is_terminal and out.color_system is not None:
        back, ink = SHADES[shade]
        return f"[{ink} on {back}] {text:>8} [/]"
    return f"{MARKS[shade]} {text}"


def shade_of(value: float, values: Sequence[float]) -> int:
    """0 to 4: where the value lies between the smallest and the largest, by the logarithm."""
    positive = [other for other in values if other > 0]
    if value <= 0 or not positive or max(positive) == min(positive):
        return 0
    low, high = math.log(min(positive)), math.log(max(positive))
    return min(4, int(5 * (math.log(value) - low) / (high - low)))


# ------------------------------------------------------------------------------------------------ tables
def worst_parts(record: Sensitivity, count: int = WORST) -> list[SensitivityPart]:
    """The parts that cost most in any scheme, the largest first."""
    measured = [part for part in record.parts if part.damage_nats]
    return sorted(measured, key=lambda part: -(part.damage_nats or 0))[:count]


def _worst(record: Sensitivity) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for part in worst_parts(record):
        tensor = f"{part.worst[0].name} ({part.worst[0].share:.0%})" if part.worst else ""
        figure = _figure(part.interval) if part.interval else f"{part.damage_nats:.3g}"
        served = _figure(part.served_nats) if part.served_nats else ""
        router = f"layer {part.routing.layer}: {part.routing.other_experts:.1%}" if part.routing else ""
        named = str(part.layer), part.role, part.scheme
        rows.append((*named, escape(figure), escape(served), size(part.bytes), escape(tensor), router))
    return rows


def _figure(interval: Interval) -> str:
    return f"{interval.value:.3g} [{interval.low:.2g}, {interval.high:.2g}]"


def shares_by_role(record: Sensitivity, scheme: str) -> dict[str, float]:
    """Role -> its share of the sum of all parts' figures in a scheme."""
    sums: dict[str, float] = {}
    for part in record.parts:
        if part.scheme == scheme and part.damage_nats is not None:
            sums[part.role] = sums.get(part.role, 0.0) + part.damage_nats
    total = sum(sums.values())
    return {role: value / total for role, value in sums.items()} if total else sums


def _shares(record: Sensitivity, schemes: Sequence[str], out: Console) -> None:
    shares = {scheme: shares_by_role(record, scheme) for scheme in schemes}
    roles = list(dict.fromkeys(role for share_by_role in shares.values() for role in share_by_role))
    whole = {share_by_role.scheme: share_by_role for share_by_role in record.uniform}
    rows = []
    for scheme in schemes:
        uniform = whole.get(scheme)
        together = ""
        if uniform is not None:
            together = f"{uniform.damage_nats:.3g}, parts sum to {uniform.sum_of_parts_nats:.3g}"
        rows.append((scheme, *(f"{shares[scheme].get(role, 0):.0%}" for role in roles), together))
    print_rows(("scheme", *roles, "all at once, nats"), rows, out)


def _lines(record: Sensitivity) -> list[str]:
    lines = []
    if record.num_texts_of_wholes is not None:
        lines.append(
            f"parts are measured on {record.num_texts - record.num_texts_of_wholes} texts, all at once on "
            f"{record.num_texts_of_wholes} others: a mix is not measured on what it is chosen on"
        )
    for correlation in record.correlations:
        if correlation.spearman is None:
            lines.append(f"rank correlation of {correlation.of} with {correlation.beside}: NOT MEASURED: {correlation.why_not}")
        else:
            rho = correlation.spearman
            lines.append(
                f"rank correlation of {correlation.of} with {correlation.beside}: {rho.value:.2f} "
                f"[{rho.low:.2f}, {rho.high:.2f}] over {rho.n} parts"
            )
    if not any(correlation.beside == "served" for correlation in record.correlations):
        lines.append("rank correlation with what is served: NOT MEASURED; --served N serves N parts")
    for whole in record.uniform:
        if whole.routing:
            most = max(whole.routing, key=lambda routing: routing.other_experts)
            each = ", ".join(f"{routing.layer}: {routing.other_experts:.1%}" for routing in whole.routing[:12])
            more = f"; most in layer {most.layer}: {most.other_experts:.1%}" if len(whole.routing) > 12 else ""
            lines.append(f"routers, {whole.scheme} everywhere: tokens with other experts by layer: {each}{more}")
    lines += [f"as a whole: {whole_said(whole)}" for whole in record.wholes]
    for drafts in record.mtp_acceptance:
        lines.append(
            f"MTP block in {drafts.scheme} ({drafts.label}): {drafts.accepted_share:.1%} of {drafts.num_drafted:,} drafted "
            "tokens accepted"
        )
    lines += _kinds(record)
    for left in record.left_out[:5]:
        lines.append(
            f"left out: {left.role}{'' if left.layer is None else f' of layer {left.layer}'} in {left.scheme}: {left.why}"
        )
    lines += [f"NOT MEASURED: {what}: {reason}" for what, reason in record.not_measured.items()]
    return lines


def whole_said(whole: WholeDamage) -> str:
    """How many parts of a mix are in which scheme, and what it loses."""
    counts = Counter(scheme for _, _, scheme in whole.schemes)
    parts = ", ".join(f"{number} part{'s' if number > 1 else ''} in {scheme}" for scheme, number in counts.most_common())
    figure = f"{whole.damage_nats:.3g}" if whole.interval is None else _figure(whole.interval)
    return f"{parts}: {figure} nats a token; the parts sum to {whole.sum_of_parts_nats:.3g}"


def _kinds(record: Sensitivity) -> list[str]:
    """Mean over parts of each kind's damage beside that of all positions, by scheme: where it shows more, and where less."""
    sums: dict[tuple[str, str, str], float] = {}
    whole: dict[str, float] = {}
    for part in record.parts:
        if part.by_kind:
            whole[part.scheme] = whole.get(part.scheme, 0.0) + (part.damage_nats or 0.0)
        for kind in part.by_kind:
            key = part.scheme, kind.kind, kind.name
            sums[key] = sums.get(key, 0.0) + kind.damage_nats
    lines = []
    for scheme, total in whole.items():
        of_part = [(kind, name, value / total) for (at, kind, name), value in sums.items() if at == scheme and total]
        if of_part:
            kinds_text = ", ".join(f"{kind} {name} x{times:.2g}" for kind, name, times in of_part)
            lines.append(f"{scheme}, sum over parts beside all positions: {kinds_text}")
    return lines
