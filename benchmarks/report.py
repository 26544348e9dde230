"""Results into Markdown: the limits, the side-by-side table, every value. Written between markers of a file; the rest stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import Comparison
from measured import Result, Results
from targets import Seen, Target, judge

BEGIN, END = "<!-- quantize -->", "<!-- /quantize -->"
TITLE = "# Benchmarks\n\nMeasured and written by the programs in this folder. Ratios compare runs made side by side.\n"


def markdown(
    results: Results,
    *,
    machine: dict[str, str],
    how: Sequence[str],
    groups: dict[str, str],
    targets: Sequence[Target],
    schemes: Sequence[str],
    comparisons: Sequence[Comparison],
    chart: str | None,
) -> str:
    """The whole section. groups: key -> heading and explanation. chart: file name of the plot, beside the text."""
    parts = ["## Quantizing and verifying", table(("machine", ""), machine.items()), "\n".join(f"- {line}" for line in how)]
    parts += ["### Limits", limits_table([judge(target, results) for target in targets])]
    parts += ["### By scheme", by_scheme(results, schemes)]
    if chart:
        parts.append(f"![GB of BF16 per second, by scheme]({chart})")
    parts += ["### Bit by bit against llm-compressor", comparison_table(comparisons)]
    for key, heading in groups.items():
        rows = [result for result in results.by_name.values() if result.group == key]
        if rows:
            title, _, explanation = heading.partition("\n")
            parts += [f"### {title}", *([explanation] if explanation else []), values_table(rows)]
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Any) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows])


def limits_table(seen: Sequence[Seen]) -> str:
    rows = []
    for one in seen:
        sign = "at least" if one.target.at_least else "at most"
        value = "-" if one.value is None else f"{one.value:.2f}{one.target.unit}"
        status = one.status if one.status == "ok" else f"**{one.status}**"
        rows.append((one.target.what, f"{sign} {one.target.limit:g}{one.target.unit}", value, status))
    return table(("", "needed", "seen", ""), rows)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def speed(result: Result | None) -> str:
    """GB/s, or why there is none."""
    if result is None:
        return "not measured"
    return "failed" if result.error is not None else number(result.gb_per_s, ".3f")


def by_scheme(results: Results, schemes: Sequence[str]) -> str:
    """One line a scheme: both tools over the same bytes, and this engine over more of them against a copy."""
    copy, rows = results.get("cp"), []
    for scheme in schemes:
        whole, ours = results.get(f"assay {scheme}"), results.get(f"part: assay {scheme}")
        theirs = results.get(f"part: llm-compressor {scheme}")
        rows.append((
            scheme, speed(ours), speed(theirs), ratio(ours, theirs, "gb_per_s"), mib(ours), mib(theirs),
            cpu_per_gb(ours), cpu_per_gb(theirs), speed(whole), mib(whole), ratio(whole, copy, "best_s"),
        ))  # fmt: skip
    heads = (
        "scheme", "assay, GB/s", "llm-compressor, GB/s", "ratio", "assay, peak MiB", "llm-compressor, peak MiB",
        "assay, CPU s per GB", "llm-compressor, CPU s per GB", "assay, larger checkpoint, GB/s", "peak MiB", "time of `cp`",
    )  # fmt: skip
    return table(heads, rows)


def ratio(left: Result | None, right: Result | None, what: str) -> str:
    """`what` of the one by that of the other; "-" when one of them is missing or failed."""
    above, below = (None if result is None else getattr(result, what) for result in (left, right))
    return "-" if above is None or below is None else f"{above / below:.2f}x"


def mib(result: Result | None) -> str:
    return "-" if result is None or result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f}"


def cpu_per_gb(result: Result | None) -> str:
    return "-" if result is None or result.best_cpu_s is None else f"{result.best_cpu_s / (result.num_bytes / 1e9):.2f}"


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return "Nothing was compared."
    rows = [
        (c.scheme, c.num_packed[0], c.num_packed[1], f"{c.num_identical} of {c.num_tensors}", c.num_shared_scale,
         "same" if c.passed else f"**different**: {'; '.join(c.different[:2]) or 'nothing is quantized'}")
        for c in comparisons
    ]  # fmt: skip
    heads = ("scheme", "quantized weights", "llm-compressor's", "tensors bit-identical", "gate/up scales only assay shares", "")
    return table(heads, rows)


def values_table(rows: Sequence[Result]) -> str:
    """Every result of a group with all its values."""
    cells = []
    for row in rows:
        if row.error is not None:
            cells.append((row.name, "**failed**", "-", "-", "-", "-", row.error))
            continue
        every = ", ".join(f"{value:.2f}" for value in row.seconds)
        startup = number(min(row.startup_s) if row.startup_s else None, ".1f")
        out = "-" if row.out_bytes is None else f"{row.out_bytes / 1e9:.2f}"
        cells.append((row.name, speed(row), mib(row), number(row.best_cpu_s, ".2f"), out, startup, every))
    return table(("", "GB/s (best)", "peak RSS, MiB", "CPU s", "written, GB", "startup s", "every run, s"), cells)


def write_section(path: Path, section: str) -> None:
    """Put `section` between the markers of the file, which is made when missing; everything else in it stays."""
    text = path.read_text(encoding="utf-8") if path.exists() else TITLE
    block = f"{BEGIN}\n\n{section}\n{END}\n"
    if BEGIN in text and END in text:
        before, rest = text.split(BEGIN, 1)
        text = before + block + rest.split(END, 1)[1].removeprefix("\n")
    else:
        text = f"{text.rstrip()}\n\n{block}"
    path.write_text(text, encoding="utf-8")
