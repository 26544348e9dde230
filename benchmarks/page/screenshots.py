"""Pictures of the page for the documentation: `python benchmarks/page/screenshots.py` writes docs/report*.png.

The first screen of the sample's page in both themes, on a phone and on paper; the browser of items from a synthetic run, as the
sample has no journal.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "tests" / "support"), str(REPOSITORY / "tests" / "support" / "evaluation")]

from browser import Browser  # noqa: E402
from journals import write_journal  # noqa: E402
from PIL import Image  # noqa: E402
from synthetic_run import make_run  # noqa: E402

from assay_reports.report import render_html, render_markdown, write_report  # noqa: E402
from assay_reports.schema import Report  # noqa: E402

SAMPLE = REPOSITORY / "reports" / "samples" / "tiny-glm"
DOCS = REPOSITORY / "docs"
ITEMS_SHOWN = "document.getElementById('item-reply-other').textContent.includes('says')"


def main() -> None:
    """The sample's page and text are written again from its report.json first."""
    report = Report.load(SAMPLE / "report.json")
    report.save(SAMPLE / "report.json")
    (SAMPLE / "index.html").write_text(render_html(report), encoding="utf-8")
    (SAMPLE / "report.md").write_text(render_markdown(report), encoding="utf-8")
    with Browser() as browser, tempfile.TemporaryDirectory() as folder:
        browser.open(SAMPLE / "index.html")
        for name, width, height, dark, is_print in (
            ("report", 1280, 960, False, False), ("report-dark", 1280, 960, True, False),
            ("report-phone", 390, 844, False, False), ("report-print", 794, 1123, False, True),
        ):  # fmt: skip
            browser.look(width=width, height=height, dark=dark, is_print=is_print)
            shoot(browser, DOCS / f"{name}.png")
        run_dir = make_run(Path(folder))
        write_journal(run_dir)
        browser.look(width=1280, height=900)
        browser.open(write_report(run_dir))
        browser.run("document.getElementById('items').scrollIntoView()")
        browser.wait_for("items.index !== null")
        browser.run("document.getElementById('item-outcome').value = 'lost'; filter()")
        browser.wait_for(ITEMS_SHOWN)
        browser.run("document.getElementById('items').scrollIntoView()")
        shoot(browser, DOCS / "report-items.png")


def shoot(browser: Browser, place: Path) -> None:
    """A PNG of 256 colours: small enough to keep."""
    time.sleep(0.3)  # until it is painted
    browser.screenshot(place)
    with Image.open(place) as seen:
        seen.convert("RGB").quantize(256, kmeans=4, dither=Image.Dither.NONE).save(place, optimize=True)


if __name__ == "__main__":
    main()
