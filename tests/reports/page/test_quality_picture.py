"""Quality against size: no name leaves the picture or covers another, however many or long; nothing is drawn beyond it."""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path

import pytest

from assay.records.base import Interval
from assay_reports.page.charts import Point, deciding_gate, points_of, quality_and_size, quality_caption
from assay_reports.page.report_rows import candidates
from assay_reports.page.svg import ABOVE, BELOW, LETTER
from assay_reports.schema import Report, Row

WIDTH, HEIGHT = 560, 330
REFERENCE = Point("fp8", "sref", 8_000_000_000, None, "what the others are compared with")


def point(name: str, value: float = 0.5, num_bytes: int = 4_000_000_000, *, half: float = 0.3, css: str = "s0") -> Point:
    return Point(name, css, num_bytes, Interval(value=value, low=value - half, high=value + half, n=100), "loses some")


RUNS = [
    point(f"runs/2026-11-2{run}/tiny-glm: {name}", value, num_bytes, css=f"s{run}")
    for run in range(3)
    for name, num_bytes, value in (
        ("w4a16", 4_300_000_000, 0.5),
        ("nvfp4", 4_500_000_000, 0.7),
        ("w4a16-gptq", 4_310_000_000, 0.45),
    )
]
"""As `assay compare` names them."""


@pytest.mark.parametrize(
    "points",
    [
        [point("w4a16")],
        [point(f"candidate-{number}") for number in range(12)],
        [point(f"w4a16-gptq-{number}", 0.3 + 0.02 * number, 4_000_000_000 + 10**8 * number) for number in range(12)],
        [point("a-precision-whose-name-has-more-letters-than-any-picture-of-this-width-can-show")],
        [point("a" * 34, num_bytes=4_400_000_000), point("b" * 34, num_bytes=4_300_000_000)],
        [point('<b>"&1</b>')],
        RUNS,
    ],
    ids=["one", "twelve alike", "twelve near", "long", "two long", "markup", "runs"],
)
@pytest.mark.parametrize(("number", "width"), [(0, WIDTH), (1, 360)], ids=["screen", "phone"])
def test_names_stay_inside_and_apart(points: list[Point], number: int, width: int) -> None:
    drawn = str(quality_and_size([REFERENCE, *points])).split("</svg>")[number]
    found = re.findall(r'<text x="([-.0-9]+)" y="([-.0-9]+)" class="name" text-anchor="(start|end)">(.*?)</text>', drawn)
    names = [html.unescape(name) for *_, name in found]
    if width == WIDTH or points is not RUNS:  # on a phone colours tell the runs apart
        assert len(set(names)) == len(points) + 1, "also what was cut can be told apart"
    boxes = []
    for (x, y, anchor, _), name in zip(found, names, strict=True):
        wide = LETTER * len(name)
        left = float(x) - (wide if anchor == "end" else 0.0)
        boxes.append((left, float(y) - ABOVE, left + wide, float(y) + BELOW))
    assert all(left >= 0 and top >= 0 and right <= width and bottom <= HEIGHT for left, top, right, bottom in boxes)
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize(("value", "half"), [(20.0, 5.0), (-5.0, 3.0), (3.0, 30.0)])
def test_what_lies_beyond_the_picture_stands_on_its_edge(value: float, half: float) -> None:
    drawn = str(quality_and_size([REFERENCE, point("w4a16", value, half=half)]))
    heights = [float(y) for y in re.findall(r' (?:y|y1|y2|cy)="([-.0-9]+)"', drawn)]
    assert min(heights) >= 0 and max(heights) <= HEIGHT


# ------------------------------------------------------------------------------------------------ what is drawn
@pytest.fixture(scope="module")
def sample() -> Report:
    return Report.load(Path(__file__).parents[3] / "reports" / "samples" / "tiny-glm" / "report.json")


def test_the_gate_that_decides_is_drawn_whatever_its_kind(sample: Report) -> None:
    """auto-4.5bpw is held up by accepted drafts alone; all of its tasks lie far below what is allowed."""
    gates = {row.label: decider for row in candidates(sample) if (decider := deciding_gate(sample, row)) is not None}
    assert {label: decider.verdict.gate for label, decider in gates.items()} == {
        "bf16": "acceptance", "nvfp4a16": "score codes-zh", "auto-4.5bpw": "acceptance", "w4a16": "score codes-zh",
        "w4a16-gptq": "score codes-en",
    }  # fmt: skip
    for row in candidates(sample):
        assert gates[row.label].verdict.status == row.status
        assert (gates[row.label].use.high < 1) == (row.status == "PASS")
    agreement = next(v for v in sample.verdicts if (v.candidate, v.gate) == ("bf16", "divergence top1_agreement"))
    alone = deciding_gate(sample.model_copy(update={"verdicts": (agreement,)}), candidates(sample)[0])
    assert alone is not None and agreement.limit == 0.97 and agreement.observed is not None
    assert alone.use.high == pytest.approx((1 - agreement.observed.low) / 0.03)
    assert [point.name for point in points_of(sample)] == ["fp8", *gates]


def test_the_caption_says_no_rule_that_a_mark_breaks_and_who_is_missing(sample: Report) -> None:
    rule = "To pass, the whole bar must lie below 100 %."
    assert quality_caption(sample).endswith(rule)

    def changed(label: str, **changes: object) -> Report:
        rows: list[Row] = [row.model_copy(update=changes) if row.label == label else row for row in sample.rows]
        return sample.model_copy(update={"rows": tuple(rows)})

    passed = [v.model_copy(update={"status": "PASS"}) if v.candidate == "w4a16" else v for v in sample.verdicts]
    assert rule not in quality_caption(changed("w4a16", status="PASS").model_copy(update={"verdicts": tuple(passed)}))
    unmeasured = quality_caption(changed("w4a16", status="NOT MEASURED"))
    assert unmeasured.endswith(f"{rule} Not drawn, because what decides has no such share: w4a16.")
