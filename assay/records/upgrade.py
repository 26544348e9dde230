"""An engine upgrade: one checkpoint on two engines, the verdict between them, and between which two a loss came in."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Interval, Part, Record
from assay.records.verdict import Overall

UPGRADE_RECORD = "upgrade.json"


class Engine(Part):
    """What serves the checkpoint."""

    label: str
    """Of its measurement."""
    where: str
    """Path of a Python, or a server's URL."""
    version: str | None
    """vLLM's. None: the server does not tell."""
    code: str | None = None
    """Hash of vLLM's Python files, which tells a patched copy from what was patched. None: a server that runs already."""


class UpgradeSpeed(Part):
    """Output tokens a second at one operating point, on both engines."""

    prompts: str
    concurrency: int
    speculation: int | None
    before_tokens_s: float
    after_tokens_s: float
    ratio: float
    """After over before."""
    interval: Interval | None = None
    """Of the ratio, at 95 %. None: one repeat."""


class UpgradeStep(Part):
    """An engine in between, compared with the first one on what the last one lost."""

    engine: Engine
    status: Overall | None
    """None: it could not be tried."""
    reason: str
    """With the numbers; or why it could not be tried."""


class UpgradeCheck(Record):
    """`RUN/upgrade.json`."""

    kind: Literal["upgrade"] = "upgrade"
    model: str
    suite: str
    before: Engine
    after: Engine
    status: Overall
    reason: str
    """One line with the numbers, as `GateReport.reasons` has it."""
    speeds: tuple[UpgradeSpeed, ...] = ()
    speeds_not_measured: str | None = None
    """Why there are none, or not of every point. None: all were measured."""
    tried_on: tuple[str, ...] = ()
    """Tasks that engines in between were asked. Empty: there was no bisection, or the divergence alone told."""
    steps: tuple[UpgradeStep, ...] = ()
    """In the order in which they were tried."""
    last_good: Engine | None = None
    first_bad: Engine | None = None
    """The neighbours between which the loss came in, of those that could be told. None: nothing was lost."""
    num_untold: int = 0
    """Engines between these two of which it could not be told."""
    bisected_in: str | None = None
    """Name of the run's folder that holds the steps."""
