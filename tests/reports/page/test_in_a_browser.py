"""The page in headless Chromium: no request, no console message, keyboard, filters, definitions, themes, a phone's width."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from journals import write_journal
from sensitivity_record import record
from swe_run import make_swe_run
from synthetic_run import make_run

from assay_reports.report import render_html, write_report
from assay_reports.schema import Report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")]
SAMPLE = Path(__file__).parents[3] / "reports" / "samples" / "tiny-glm"
LOADED = "items.index !== null && !document.getElementById('item-shown').hidden"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = make_run(tmp_path_factory.mktemp("page"))
    write_journal(run_dir)
    return write_report(run_dir)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    """The page anew, with nothing said yet."""
    browser.look(width=1280, height=800)
    browser.console.clear()
    browser.requests.clear()
    browser.open(page)
    return browser


@pytest.fixture
def full_page(browser: Browser, tmp_path: Path) -> Browser:
    """The sample's page with a map of sensitivity: every picture that there is."""
    report = Report.load(SAMPLE / "report.json").model_copy(update={"sensitivity": record()})
    page = tmp_path / "index.html"
    page.write_text(render_html(report), encoding="utf-8")
    browser.open(page)
    return browser


def text(browser: Browser, name: str) -> str:
    return str(browser.run(f"document.getElementById({json.dumps(name)}).textContent"))


def load_items(browser: Browser) -> None:
    browser.run("document.getElementById('items').scrollIntoView()")
    browser.wait_for(LOADED)


def test_nothing_is_asked_for_and_nothing_complained_of(opened: Browser, page: Path) -> None:
    assert opened.run("items.index") is None, "items are not unpacked before they are looked at"
    load_items(opened)
    opened.run("document.getElementById('theme').click()")
    assert opened.console == []
    assert opened.requests == [page.absolute().as_uri()]


def test_the_policy_stops_a_script_that_got_in(opened: Browser) -> None:
    opened.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.got = 1'; document.body.append(s); })()"
    )
    assert opened.run("window.got === undefined")
    assert any("Content Security Policy" in line for line in opened.console)


def test_items_are_filtered_and_shown_side_by_side(opened: Browser) -> None:
    load_items(opened)
    assert text(opened, "item-count") == "840 of 840 answers"
    opened.run("document.getElementById('item-outcome').value = 'lost'; filter()")
    opened.wait_for("document.getElementById('item-reply-other').textContent.includes('says')")
    number = opened.run("items.shown.length")
    lost = opened.run("[...items.index.rows.flags].filter(f => (f & 15) === 11).length")
    assert number == lost > 0 and text(opened, "item-count") == f"{number} of 840 answers"
    assert text(opened, "item-reference") == "fp8: right" and text(opened, "item-other").endswith(": wrong")
    ours, theirs = text(opened, "item-reply"), text(opened, "item-reply-other")
    same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    assert text(opened, "item-where") == f"The replies differ from character {same + 1} on (marked)."
    marks = opened.run("[...document.querySelectorAll('pre mark')].map(one => one.textContent)")
    assert marks == ["right", "wrong"]
    opened.run(
        "document.getElementById('item-task').value = '1'; document.getElementById('item-language').value = '1'; filter()"
    )
    shown = opened.run("[...items.shown].map(i => [items.index.rows.task[i], items.index.rows.language[i]])")
    assert shown and all(one == [1, 1] for one in shown)


def test_items_are_walked_with_the_keyboard(opened: Browser) -> None:
    load_items(opened)
    opened.run("document.getElementById('item-list').focus()")
    opened.press("ArrowDown")
    opened.press("ArrowDown")
    assert opened.run("items.at") == 2
    chosen = "document.getElementById(document.getElementById('item-list').getAttribute('aria-activedescendant'))"
    assert opened.run(f"{chosen}.getAttribute('aria-selected')") == "true"
    assert opened.run(f"{chosen}.getAttribute('aria-posinset')") == "3"
    opened.press("End")
    assert opened.run("items.at") == 839
    assert opened.run("document.querySelectorAll('#item-window .item').length") < 40, "only what is seen is there"


def test_tab_goes_from_the_top_to_the_words(opened: Browser) -> None:
    """Everything that takes the focus does so in the order in which it is read."""
    seen = []
    for _ in range(6):
        opened.press("Tab")
        seen.append(opened.run("document.activeElement.textContent.trim() || document.activeElement.id"))
    assert seen[:3] == ["Skip to the results", "Dark", "PASS"]
    assert opened.run("[...document.querySelectorAll('[tabindex]')].every(one => one.tabIndex === 0)")
    unnamed = (
        "[...document.querySelectorAll('[tabindex], button, select, input')].filter(one => !(one.getAttribute('aria-label')"
    )
    unnamed += " || one.getAttribute('aria-labelledby') || one.textContent.trim() || one.labels?.length)).length"
    assert opened.run(unnamed) == 0


def test_definitions_come_with_the_focus_and_go_with_escape(opened: Browser) -> None:
    opened.run("document.querySelector('a.term[href=\"#word-kl\"]').focus()")
    assert opened.run("!document.getElementById('tip').hidden")
    assert text(opened, "tip") == text(opened, "word-kl")
    opened.press("Escape")
    assert opened.run("document.getElementById('tip').hidden")


def test_the_theme_is_the_systems_until_the_switch_is_used(opened: Browser) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    assert opened.run(paper) == "rgb(255, 255, 255)"
    opened.look(width=1280, height=800, dark=True)
    assert opened.run(paper) == "rgb(20, 23, 29)"
    opened.run("document.getElementById('theme').click()")
    assert opened.run(paper) == "rgb(255, 255, 255)" and text(opened, "theme") == "Dark"
    opened.run("document.getElementById('theme').click()")
    opened.look(width=1280, height=800, dark=True, is_print=True)
    assert opened.run(paper) == "rgb(255, 255, 255)", "paper is white"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_narrow_screen(opened: Browser, width: int) -> None:
    opened.look(width=width, height=800)
    load_items(opened)
    assert opened.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.parametrize("section", ["scores", "divergence", "speed", "sensitivity", "tensors", "long-context"])
def test_pictures_fit_a_phone(full_page: Browser, width: int, section: str) -> None:
    """Every mark and every word of them, and letters stay legible; a wide screen has the other drawing."""
    full_page.look(width=width, height=800)
    full_page.run(f"document.getElementById('{section}').scrollIntoView()")
    places = full_page.run(
        f"[...document.querySelectorAll('#{section} .chart > svg, #{section} .chart > svg *')]"
        ".map(part => part.getBoundingClientRect()).filter(box => box.width || box.height).map(box => [box.left, box.right])"
    )
    assert len(places) > 8 and min(left for left, _ in places) >= 0 and max(right for _, right in places) <= width
    letters = full_page.run(f"document.querySelector('#{section} svg.narrow text').getBoundingClientRect().height")
    assert letters >= 11
    shown = f"[...document.querySelectorAll('#{section} .chart > svg')].slice(0, 2).map(one => getComputedStyle(one).display)"
    assert full_page.run(shown) == ["none", "block"]
    full_page.look(width=1280, height=800)
    assert full_page.run(shown) == ["block", "none"]


HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"


def test_markup_in_a_reply_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    with sqlite3.connect(write_journal(run_dir)) as db:
        db.execute("UPDATE requests SET reply = json_object('text', ?), body = json_object('prompt', ?)", (HOSTILE, HOSTILE))
    browser.look(width=1280, height=800)
    browser.open(write_report(run_dir))
    load_items(browser)
    browser.wait_for("document.getElementById('item-prompt').textContent !== ''")
    assert text(browser, "item-prompt") == text(browser, "item-reply") == HOSTILE
    assert browser.run("document.title") == "assay: tiny-glm" and browser.run("document.querySelectorAll('img').length") == 0


def test_trajectories_stand_side_by_side_and_their_markup_is_text(browser: Browser, tmp_path: Path) -> None:
    """Steps of both sides in rows, the first that differs marked and open, gaps said, patches below; a phone's width."""
    theirs = [(f"Step {i}: {HOSTILE}", f"echo {i} {HOSTILE}", f"{i}\u202e\u2028\x1b[31m{HOSTILE}") for i in range(60)]
    ours = [*theirs[:2], ("Something else.", "rm -r .", HOSTILE), *theirs[3:59]]
    problem = f"</pr_description>{HOSTILE}"
    told = {"fp8": {"a__a-1": (theirs, HOSTILE + "x"), "b__b-1": (theirs[:1], "")}, "w4a16": {"a__a-1": (ours, HOSTILE + "y")}}
    told["w4a16"]["b__b-1"] = (theirs[:1], "")
    browser.look(width=1280, height=800)
    browser.console.clear()
    browser.open(write_report(make_swe_run(tmp_path, told, problem)))
    load_items(browser)
    browser.run("document.getElementById('item-name').value = 'a__a-1'; filter()")
    browser.wait_for("document.querySelectorAll('.step').length > 0")
    assert text(browser, "item-prompt") == problem
    assert text(browser, "item-where") == "The trajectories differ from step 3 on (marked)."
    assert text(browser, "item-reference") == "fp8: resolved (Submitted after 60 steps). Patch:"
    assert text(browser, "item-other") == "w4a16: resolved (Submitted after 59 steps). Patch:"
    heads, *rows = browser.run("[...document.querySelectorAll('#item-steps > *')].map(one => one.textContent.slice(0, 8))")
    assert heads == "fp8w4a16" and rows[:3] == ["Step 1$ ", "Step 2$ ", "Step 3$ "]
    assert rows[30] == "Steps 31" and len(rows) == 30 + 1 + 9
    gap = browser.run("document.querySelector('#item-steps > p').textContent")
    assert gap == "Steps 31 to 51 are left out of this page."
    assert browser.run("[...document.querySelectorAll('.step')].map(one => one.open).indexOf(true)") == 2
    summary = browser.run(
        "[...document.querySelectorAll('.step[open] > summary > *')].map(one => one.tagName + one.textContent)"
    )
    assert summary == ["MARKStep 3", f"SPAN$ echo 2 {HOSTILE}", "SPAN$ rm -r ."]
    last = browser.run("[...document.querySelectorAll('.step:last-child pre')].map(one => one.textContent)")
    assert last == [f"Step 59: {HOSTILE}\n\n$ echo 59 {HOSTILE}\n\n59\u202e\u2028\x1b[31m{HOSTILE}", "It had ended."]
    assert [text(browser, "item-reply"), text(browser, "item-reply-other")] == [HOSTILE + "x", HOSTILE + "y"]
    assert browser.run("[...document.querySelectorAll('.replies > div > pre mark')].map(one => one.textContent)") == ["x", "y"]
    browser.look(width=320, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= 320
    browser.run("document.getElementById('item-name').value = 'b__b-1'; filter()")
    browser.wait_for("document.getElementById('item-where').textContent === 'Both sides say and do the same in all steps.'")
    assert text(browser, "item-reply") == "No patch." and browser.run("document.querySelectorAll('.step').length") == 1
    browser.run("document.getElementById('item-name').value = 'arithmetic'; filter()")
    browser.wait_for("document.getElementById('item-steps').hidden")
    assert text(browser, "item-reply") == "Not in this page."
    assert browser.run("document.title") == "assay: tiny-glm" and browser.run("document.querySelectorAll('img').length") == 0
    assert browser.console == []
