"""Drift against position, as a plain plotly figure: a model that is fine at 1K tokens and lost at 30K is seen here."""

from __future__ import annotations

import math

from assay.records.divergence import DriftSpan
from assay_reports.plot_layout import Figure, axis, base_layout
from assay_reports.schema import Report

SMALLEST_NATS = 1e-9
"""What the logarithmic axis begins at: log-probabilities in single precision tell nothing below."""
LINES = {"all": ("", "solid"), "held_out": (", held-out text", "dot")}
"""Kinds of text that are drawn -> what the legend adds, and the line."""
POSITION_TICKS = [2**power for power in range(3, 21)]
POSITION_NAMES = [f"{tick >> 10}K" if tick >= 1024 else str(tick) for tick in POSITION_TICKS]
DECADES = range(-9, 3)


def drift_by_position(report: Report, colours: dict[str, str]) -> Figure | None:
    """Mean KL (nats) with intervals against the position in the text (tokens, prompt included), both logarithmic.

    One line per checkpoint and kind of text; None for records of before drift was.
    """
    data: list[Figure] = []
    for row in report.rows:
        for drift in row.divergence.drift if row.divergence else ():
            if drift.texts not in LINES:
                continue
            spans = [span for span in drift.curve if span.kl_mean > SMALLEST_NATS]
            if spans:
                name, dash = LINES[drift.texts]
                floor = row.kind == "noise floor"
                data.append(_line(spans, colours[row.label], f"{row.label}{name}", "dash" if floor else dash))
    if not data:
        return None
    layout = base_layout(height=420)
    layout["xaxis"] = axis(
        "position in the text, tokens", type="log", tickmode="array", tickvals=POSITION_TICKS, ticktext=POSITION_NAMES
    )
    layout["yaxis"] = axis(
        "mean KL, nats per token", type="log", tickmode="array", tickvals=[10.0**power for power in DECADES],
        ticktext=[f"{10.0**power:g}" for power in DECADES],
    )  # fmt: skip
    return {"data": data, "layout": layout}


def _line(spans: list[DriftSpan], colour: str, name: str, dash: str) -> Figure:
    # In the middle of a span, as a logarithmic axis has it; the first span begins at 0, which such an axis does not have.
    middles = [math.sqrt(max(span.first, span.last / 4, 1) * (span.last + 1)) for span in spans]
    intervals = [span.kl_mean_interval for span in spans]
    ups = [i.high - s.kl_mean if i else 0.0 for i, s in zip(intervals, spans, strict=True)]
    # A lower end at or below zero has no place on a logarithmic axis; the bar then ends at a hundredth of the mean.
    downs = [s.kl_mean - max(i.low, s.kl_mean / 100) if i else 0.0 for i, s in zip(intervals, spans, strict=True)]
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": middles, "y": [span.kl_mean for span in spans],
        "line": {"color": colour, "width": 2, "dash": dash}, "marker": {"size": 7},
        "error_y": {"type": "data", "symmetric": False, "array": ups, "arrayminus": downs, "thickness": 1, "width": 3},
        "customdata": [f"{span.first}–{span.last}, {span.num_documents} texts" for span in spans],
        "hovertemplate": f"{name}, tokens %{{customdata}}: %{{y:.3g}} nats<extra></extra>",
    }  # fmt: skip
