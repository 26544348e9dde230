"""What all figures share: margins, fonts, the legend, axes."""

from __future__ import annotations

from typing import Any

Figure = dict[str, Any]


def base_layout(*, height: int) -> Figure:
    return {
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 10, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"align": "left"},
    }


def axis(title: str | None, **more: Any) -> Figure:
    made: Figure = {"automargin": True, "zeroline": False, "ticks": "outside", "ticklen": 4, **more}
    if title:
        made["title"] = {"text": title, "standoff": 8}
    return made
