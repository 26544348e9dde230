"""An engine upgrade in words: the headline, the line for a changelog."""

from __future__ import annotations

from typing import NamedTuple

from assay.records.upgrade import Engine, UpgradeCheck
from assay_reports.sentences import upgrade as english
from assay_reports.text import and_list


def engine_name(engine: Engine, other: Engine) -> str:
    """`vLLM 0.33.0`; with its place, if the other engine has the same version."""
    if engine.version is None:
        return english.UNKNOWN_VERSION.format(where=engine.where)
    template = english.PATCHED if engine.version == other.version else english.VERSION
    return template.format(version=engine.version, where=engine.where)


class Shown(NamedTuple):
    """Sentences of the page's section. note: what the two have in common. heading: the verdict, and where a loss came in. line:
    for a changelog. steps: what the rows in between are; empty: nothing was lost."""

    note: str
    heading: str
    line: str
    steps: str


def shown(check: UpgradeCheck) -> Shown:
    steps = ""
    if check.steps:
        tasks = english.ON_TASKS.format(tasks=and_list(check.tried_on)) if check.tried_on else ""
        steps = english.STEPS.format(before=check.before.label, tasks=tasks, run=check.bisected_in)
    elif check.status == "FAIL":
        steps = english.NO_ENGINES_BETWEEN
    note = english.NOTE if check.before.code is not None else english.NOTE_OF_SERVERS
    return Shown(note, headline(check) + where_lost(check), changelog_line(check), steps)


def headline(check: UpgradeCheck) -> str:
    before, after = engine_name(check.before, check.after), engine_name(check.after, check.before)
    return english.HEADLINE.format(status=check.status, before=before, after=after)


def changelog_line(check: UpgradeCheck) -> str:
    """Everything that matters, in one line: engines, verdict, numbers, speed, and where a loss came in."""
    return english.LINE.format(
        before=engine_name(check.before, check.after), after=engine_name(check.after, check.before), model=check.model,
        status=check.status, suite=check.suite, reason=check.reason.rstrip("."), speed=_speed(check), found=where_lost(check),
    )  # fmt: skip


def _speed(check: UpgradeCheck) -> str:
    """At the most requests in flight that were measured."""
    if not check.speeds:
        return ""
    speed = max(check.speeds, key=lambda point: (point.concurrency, not point.speculation))
    around = speed.interval
    interval = "" if around is None else english.SPEED_INTERVAL.format(low=around.low, high=around.high)
    return english.SPEED.format(ratio=speed.ratio, concurrency=speed.concurrency, interval=interval)


def where_lost(check: UpgradeCheck) -> str:
    """Clause that names the two neighbours; nothing, if no engine in between was tried."""
    if check.last_good is None or check.first_bad is None or not check.steps:
        return ""
    good, bad = engine_name(check.last_good, check.first_bad), engine_name(check.first_bad, check.last_good)
    found = english.FOUND.format(good=good, bad=bad)
    return found + (english.UNDECIDED.format(count=check.num_untold) if check.num_untold else "")
