"""The report's plots as plain plotly figures (dictionaries), made from `Report` alone.

Colours belong to checkpoints and mean the same in every plot; backgrounds are transparent and text takes the page's colours
(the page's script sets them for light and dark). The palette is Okabe & Ito's, safe for colour-blind readers.
"""

from __future__ import annotations

from assay.records.base import Interval
from assay_reports.drift_plots import drift_by_position
from assay_reports.long_context_plots import long_context_figures
from assay_reports.plot_layout import Figure, axis, base_layout
from assay_reports.schema import Report, Row
from assay_reports.score_plots import losses, reply_lengths

GREY = "#8a8f98"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
ROLE_COLOURS = {
    "routed_expert": "#0072B2", "shared_expert": "#56B4E9", "attention": "#009E73", "indexer": "#7fcfb5",
    "dense_mlp": "#E69F00", "mtp": "#CC79A7", "embedding": "#8a8f98", "lm_head": "#b5bac2", "router": "#D55E00",
    "router_bias": "#7a3c00", "norm": "#5c6066",
}  # fmt: skip

SMALLEST_NATS = 1e-9
"""What logarithmic axes begin at: log-probabilities in single precision tell nothing below. A smaller floor is not drawn."""


def colours(report: Report) -> dict[str, str]:
    """Label -> colour: grey for the reference and its repeat."""
    others = [row.label for row in report.rows if row.kind == "candidate"]
    found = {label: PALETTE[i % len(PALETTE)] for i, label in enumerate(others)}
    return found | {row.label: GREY for row in report.rows if row.kind != "candidate"}


def figures(report: Report) -> dict[str, Figure]:
    """Id of the plot's place in the page -> figure. A plot without data is left out."""
    made = {
        "losses": losses(report, colours(report)),
        "reply-lengths": reply_lengths(report, colours(report)),
        "quality-size": quality_against_size(report),
        "kl": kl_with_intervals(report),
        "kl-position": kl_by_position(report),
        "drift-position": drift_by_position(report, colours(report)),
        "bytes-role": bytes_per_role(report),
    }
    drawn = {name: figure for name, figure in made.items() if figure is not None}
    return drawn | long_context_figures(report.long_context)


def quality_against_size(report: Report) -> Figure | None:
    """Accuracy (%, with intervals) against checkpoint size (decimal MB or GB), one panel per task."""
    sized = [
        (row, row.checkpoint_bytes) for row in report.rows if row.kind != "noise floor" and row.checkpoint_bytes is not None
    ]
    tasks = list(dict.fromkeys(t.task for row, _ in sized for t in row.tasks if t.accuracy is not None))
    if not tasks:
        return None
    unit, scale = ("GB", 1e9) if max(num_bytes for _, num_bytes in sized) >= 1e9 else ("MB", 1e6)
    colour = colours(report)
    traces, layout = [], base_layout(height=380)
    gap = 0.1
    width = (1 - gap * (len(tasks) - 1)) / len(tasks)
    for i, task in enumerate(tasks):
        nth = "" if i == 0 else str(i + 1)
        left = i * (width + gap)
        layout[f"xaxis{nth}"] = axis(f"{task}: size, {unit}", domain=[left, left + width], anchor=f"y{nth}", rangemode="tozero")
        layout[f"yaxis{nth}"] = axis("correct, %" if i == 0 else None, anchor=f"x{nth}")
        for row, num_bytes in sized:
            accuracy = next((t.accuracy for t in row.tasks if t.task == task), None)
            if accuracy is None:
                continue
            traces.append(
                _trace(row, colour[row.label], [num_bytes / scale], [accuracy], percent=True, first=i == 0)
                | {
                    "xaxis": f"x{nth}",
                    "yaxis": f"y{nth}",
                    "hovertemplate": f"{row.label}<br>%{{x:.3g}} {unit}<br>%{{y:.1f}} %<extra></extra>",
                }
            )
    return {"data": traces, "layout": layout}


def _trace(row: Row, colour: str, x: list[float], intervals: list[Interval], *, percent: bool, first: bool) -> Figure:
    factor = 100.0 if percent else 1.0
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{row.label} ({row.kind})" if row.kind != "candidate" else row.label,
        "legendgroup": row.label,
        "showlegend": first,
        "x": x,
        "y": [factor * interval.value for interval in intervals],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [factor * (interval.high - interval.value) for interval in intervals],
            "arrayminus": [factor * (interval.value - interval.low) for interval in intervals],
            "thickness": 1.5,
            "width": 5,
        },
        "marker": {"color": colour, "size": 10, "symbol": "diamond" if row.kind != "candidate" else "circle"},
    }


def kl_with_intervals(report: Report) -> Figure | None:
    """Mean KL (nats, logarithmic) per checkpoint with its interval, if it has one; the 99th percentile as an open mark."""
    rows = [row for row in report.rows if row.divergence is not None and row.divergence.kl_mean.value > SMALLEST_NATS]
    if not rows:
        return None
    colour = colours(report)
    rows = sorted(rows, key=lambda row: -(row.divergence.kl_mean.value if row.divergence else 0.0))
    means = [row.divergence.kl_mean for row in rows if row.divergence]
    names = [row.label for row in rows]
    shades = [colour[name] for name in names]
    # A lower end at or below zero has no place on a logarithmic axis; the bar then ends at a hundredth of the mean.
    lows = [max(mean.low, mean.value / 100) if isinstance(mean, Interval) else mean.value for mean in means]
    ups = [mean.high - mean.value if isinstance(mean, Interval) else 0.0 for mean in means]
    data: list[Figure] = [
        {
            "type": "scatter", "mode": "markers", "name": "mean", "y": names, "x": [mean.value for mean in means],
            "marker": {"color": shades, "size": 11},
            "error_x": {
                "type": "data", "symmetric": False, "array": ups,
                "arrayminus": [mean.value - low for mean, low in zip(means, lows, strict=True)], "thickness": 1.5, "width": 5,
                "color": GREY,
            },
            "hovertemplate": "%{y}: mean %{x:.3g} nats<extra></extra>",
        },
        {
            "type": "scatter", "mode": "markers", "name": "99th percentile", "y": names,
            "x": [row.divergence.kl_p99 for row in rows if row.divergence],
            "marker": {"color": shades, "size": 11, "symbol": "circle-open", "line": {"width": 2}},
            "hovertemplate": "%{y}: 99th percentile %{x:.3g} nats<extra></extra>",
        },
    ]  # fmt: skip
    layout = base_layout(height=150 + 46 * len(rows))
    layout["xaxis"] = axis("KL from the reference, nats per token", type="log", **_decades([d for t in data for d in t["x"]]))
    layout["yaxis"] = axis(None, type="category")
    return {"data": data, "layout": layout}


def kl_by_position(report: Report) -> Figure | None:
    """Mean KL (nats, logarithmic) against the position of the token in the reply; the noise floor dashed."""
    rows = [row for row in report.rows if row.divergence is not None and row.divergence.by_position]
    colour = colours(report)
    data: list[Figure] = []
    for row in rows:
        assert row.divergence is not None
        buckets = [bucket for bucket in row.divergence.by_position if bucket.kl_mean > SMALLEST_NATS]
        if not buckets:
            continue
        floor = row.kind == "noise floor"
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": f"{row.label} (noise floor)" if floor else row.label,
                "x": [_span(bucket.first, bucket.last) for bucket in buckets], "y": [bucket.kl_mean for bucket in buckets],
                "line": {"color": colour[row.label], "width": 2, "dash": "dash" if floor else "solid"}, "marker": {"size": 7},
                "hovertemplate": f"{row.label}, tokens %{{x}}: %{{y:.3g}} nats<extra></extra>",
            }
        )  # fmt: skip
    if not data:
        return None
    layout = base_layout(height=380)
    spans = dict.fromkeys(_span(b.first, b.last) for row in rows if row.divergence for b in row.divergence.by_position)
    layout["xaxis"] = axis("position in the text, tokens", type="category", categoryorder="array", categoryarray=list(spans))
    layout["yaxis"] = axis("mean KL, nats per token", type="log", **_decades([value for t in data for value in t["y"]]))
    return {"data": data, "layout": layout}


def _span(first: int, last: int) -> str:
    return f"{first}–{last}"


def bytes_per_role(report: Report) -> Figure | None:
    """Stacked bars: bytes per role of the source and of every checkpoint that was planned."""
    if not report.plans:
        return None
    source = report.plans[0]
    bars: list[tuple[str, dict[str, int]]] = []
    for name, plan, side in [("source", source, "bytes_in"), *((p.precision, p, "bytes_out") for p in report.plans)]:
        sums: dict[str, int] = {}
        for role in plan.roles:
            sums[role.role] = sums.get(role.role, 0) + getattr(role, side)
        bars.append((name, sums))
    unit, scale = ("GB", 1e9) if source.bytes_in >= 1e9 else ("MB", 1e6)
    order = sorted({role for _, sums in bars for role in sums}, key=lambda role: -bars[0][1].get(role, 0))
    data = [
        {
            "type": "bar", "orientation": "h", "name": role, "y": [name for name, _ in bars],
            "x": [sums.get(role, 0) / scale for _, sums in bars],
            "marker": {"color": ROLE_COLOURS.get(role, GREY)},
            "hovertemplate": f"{role}: %{{x:.3g}} {unit} (%{{y}})<extra></extra>",
        }
        for role in order
    ]  # fmt: skip
    layout = base_layout(height=200 + 46 * len(bars))
    layout |= {"barmode": "stack", "bargap": 0.35}
    layout["xaxis"] = axis(f"size, {unit}")
    layout["yaxis"] = axis(None, type="category", autorange="reversed")
    return {"data": data, "layout": layout}


def _decades(values: list[float]) -> Figure:
    """Ticks of a logarithmic axis that spans few decades: 1, 2, 5 per decade at most, written in full."""
    low, high = min(values), max(values)
    ticks = [m * 10.0**e for e in range(-12, 4) for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low / 2.5 <= tick <= high * 2.5]
    if len(inside) > 8:
        inside = [tick for tick in inside if f"{tick:.0e}".startswith("1")]
    return {"tickmode": "array", "tickvals": inside, "ticktext": [f"{tick:g}" for tick in inside]}
