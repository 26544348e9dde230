"""The drawing of docs/architecture.md, from the layers in pyproject.toml.

`python tests/support/pages/architecture_drawing.py` writes it anew.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

REPOSITORY = Path(__file__).resolve().parents[3]
DRAWING = REPOSITORY / "docs" / "architecture.svg"
WIDTH, MARGIN, ROW = 1160, 30, 54
COLOURS = {"quantize": "#dcebf7", "evaluate": "#e3f1dc", "reports": "#fbe9d0", "assay": "#ececec"}
DOES = {
    "quantize": {
        "preflight": "disk, memory, GPUs: what would fail", "remote": "Ray; hub", "estimate": "hours, bytes",
        "screen": "layer by layer",
        "sensitivity": "what parts cost", "inspection": "what is wrong", "engine": "plan → files", "verify": "reopens all",
        "calibration": "what enters", "mixing": "a scheme each", "plan": "headers + precision → what happens to every tensor",
        "decoding": "any published format → values in FP32", "checkpoint": "what is read: headers, rows, stamps",
        "kernels": "rows of a weight → packed rows", "formats": "tables: schemes, config.json", "storage": "the disk",
    },
    "evaluate": {
        "choice": "what to deploy", "speed": "how fast it is", "sensitivity": "intervals of parts", "run": "an evaluation",
        "preflight": "what would fail", "verdicts": "limits → verdicts", "divergence": "next-token KL",
        "diagnosis": "serving failures", "reached": "right answers lost", "tasks": "questions and their scoring",
        "asking": "questions → requests",
        "client": "replies, journal", "serving": "vLLM as a process", "serving_faults": "who answered what",
        "harnesses": "others' scores",
        "transport": "HTTP", "statistics": "intervals; no I/O", "roofline": "bytes → floors",
    },
}  # fmt: skip
"""Package -> room -> what it does, in as few words as its box has place for."""
STEPS = [
    ("recipe", "assay/", "recipes"), ("plan", "quantize/", "plan"), ("shards", "quantize/", "engine"),
    ("checkpoint", "quantize/", "engine, verify"), ("server", "evaluate/", "serving"), ("journal", "evaluate/", "client"),
    ("measurements", "evaluate/", "run"), ("verdicts", "evaluate/", "verdicts"), ("report, card", "reports/", "assay_reports"),
]  # fmt: skip
"""What is made, and the room that makes it."""


def layers_of(package: str) -> list[list[str]]:
    """Rooms of a package as import-linter holds them; those of a row may not import each other."""
    contracts: list[dict[str, Any]] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    rows: list[str] = next(contract["layers"] for contract in contracts if contract["id"] == package)
    return [[room.strip() for room in row.split("|")] for row in rows]


def text(x: float, y: float, words: str, *, size: float = 12, anchor: str = "middle", bold: bool = False) -> str:
    weight, colour = (' font-weight="bold"', "#1b1b1b") if bold else ("", "#333")
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {where} rx="6" fill="{fill}" stroke="#444" stroke-width="1.2"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#444" stroke-width="1.6" marker-end="url(#head)"/>'


def labelled(x: float, y: float, width: float, height: float, fill: str, name: str, does: str) -> list[str]:
    middle = x + width / 2
    name_y = y + height / 2 - 3
    return [
        box(x, y, width, height, fill),
        text(middle, name_y, name, size=13, bold=True),
        text(middle, name_y + 16, does, size=11),
    ]


def package(name: str, title: str, x: float, y: float, width: float, height: float) -> list[str]:
    """A package with its rooms, a row for each layer, the uppermost first."""
    lines = [box(x, y, width, height, "#fff"), text(x + width / 2, y + 22, title, size=14, bold=True)]
    for number, rooms in enumerate(layers_of(name)):
        each = (width - 20 - 8 * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(rooms):
            left = x + 10 + place * (each + 8)
            lines += labelled(left, y + 34 + number * ROW, each, ROW - 8, COLOURS[name], room, DOES[name][room])
    return lines


def drawing() -> str:
    top, rows = 180, max(len(layers_of(name)) for name in DOES)
    height = 34 + rows * ROW + 4
    bottom, right = top + height, WIDTH - MARGIN
    quantize, evaluate, side = (30, 432), (478, 432), (926, right - 926)
    cli = "the command line: words in, one call of the pipeline, printing out"
    pipeline = "the stages as functions; knows the layout of a run's folder"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 310}" width="{WIDTH}" height="{bottom + 310}" '
        'font-family="Helvetica, Arial, sans-serif">',
        "<title>Packages, rooms and data flow of assay</title>",
        '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{bottom + 310}" fill="#ffffff"/>',
        text(30, 28, "Which package imports which: arrows point at what is imported", size=16, anchor="start", bold=True),
        *labelled(30, 44, right - 30, 46, COLOURS["assay"], "cli/assay_cli", cli),
        arrow(WIDTH / 2, 90, WIDTH / 2, 104),
        *labelled(30, 106, right - 30, 46, COLOURS["assay"], "pipeline/assay_pipeline", pipeline),
        *package("quantize", "quantize/assay_quantize", quantize[0], top, quantize[1], height),
        *package("evaluate", "evaluate/assay_evaluate", evaluate[0], top, evaluate[1], height),
    ]  # fmt: skip
    reports = ("report, model card, limits:", "from records only; of", "evaluate: statistics only")
    plugin = (
        "the vLLM plugin: runs inside",
        "the server that serving",
        "starts, in .venv-serve;",
        "imports none of the others",
    )
    for y, width, title, fill, words in (
        (top, side[1], "reports/assay_reports", COLOURS["reports"], reports),
        (top + 116, side[1] - 24, "evaluate/assay_vllm", COLOURS["evaluate"], plugin),
    ):
        lines += [box(side[0], y, width, 38 + 18 * len(words), fill)]
        lines += [text(side[0] + width / 2, y + 24, title, size=13, bold=True)]
        lines += [text(side[0] + width / 2, y + 44 + 17 * number, line) for number, line in enumerate(words)]
    middles = [left + width / 2 for left, width in (quantize, evaluate, side)]
    lines += [arrow(x, 152, x, top - 2) for x in middles]
    lines += [arrow(x, bottom, x, bottom + 34) for x in middles[:2]]
    lines += [arrow(right - 10, top + 92, right - 10, bottom + 34)]
    between = "inside a package: a room imports rooms in rows below its own"
    lines += [text((middles[0] + middles[1]) / 2, bottom + 22, between)]
    lines += _contract(bottom + 36, right)
    lines += _data_flow(bottom + 186, right)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _contract(y: float, right: float) -> list[str]:
    lines = [box(30, y, right - 30, 106, "#fff")]
    lines += [text(45, y + 22, "assay: the contract (neither torch nor vllm)", size=14, anchor="start", bold=True)]
    parts = [
        ("recipes", "what a person writes; families of architectures"),
        ("records", "what one stage hands to the next, versioned"),
        ("errors, safe_files, quantities, ...", "small modules that any room may import"),
    ]
    width = (right - 30 - 30 - 60) / 3
    for number, (name, does) in enumerate(parts):
        x = 45 + number * (width + 30)
        lines += labelled(x, y + 34, width, 58, COLOURS["assay"], name, does)
        lines += [arrow(x + width, y + 63, x + width + 28, y + 63)] if number < 2 else []
    return lines


def _data_flow(y: float, right: float) -> list[str]:
    title = "Which way the data goes, and the room that makes each step"
    lines = [text(30, y, title, size=16, anchor="start", bold=True)]
    width = (right - 30 - 24 * (len(STEPS) - 1)) / len(STEPS)
    for number, (made, root, room) in enumerate(STEPS):
        x = 30 + number * (width + 24)
        lines += [box(x, y + 16, width, 76, COLOURS[root.rstrip("/")]), text(x + width / 2, y + 44, made, size=13, bold=True)]
        lines += [text(x + width / 2, y + 66, root, size=10.5), text(x + width / 2, y + 80, room, size=10.5)]
        lines += [arrow(x + width + 2, y + 54, x + width + 22, y + 54)] if number < len(STEPS) - 1 else []
    return lines


if __name__ == "__main__":
    DRAWING.write_text(drawing(), encoding="utf-8")
