"""What `assay preflight` found out before a run costs anything: one `Check` for each thing that was looked at."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from assay.records.base import Part, Record
from assay.records.preflight.replay import Outcome

CheckName = Literal[
    "hardware", "plan", "disk", "memory", "split", "loading", "tokenizer", "data sets", "environment", "context", "sampling",
    "cost", "power",
]  # fmt: skip
"""`hardware`: the GPUs of the profile; `plan`: whether a precision can be made of the source; `disk`: one sum of all that
will be written; `memory`: weights, KV cache and workspace of one GPU; `split`: groups and blocks against tensor parallelism;
`loading`: vLLM's own loaders (`Replay`); `environment`: driver, CUDA, compilers, packages of the server; `context`:
`max-model-len` against the suite's lengths and budgets; `sampling`: against the model's card."""


class Check(Part):
    """One thing that was looked at, in words that stand by themselves."""

    check: CheckName
    subject: str | None
    """What it is about: `reference`, a precision, a task, a program. None: the run as a whole."""
    outcome: Outcome
    """FAIL: the run would fail or measure something else. UNKNOWN: cannot be told here, and `detail` says why."""
    detail: str
    """What was found, in one line, with the numbers."""
    remedy: str | None = None
    """What to do, in one line; every FAIL has one."""

    @model_validator(mode="after")
    def _one_line_and_a_remedy(self) -> Self:
        if self.outcome == "FAIL" and not self.remedy:
            raise ValueError(f"{self.check} {self.subject}: FAIL without a remedy")
        if any("\n" in text for text in (self.detail, self.remedy or "")):
            raise ValueError(f"{self.check} {self.subject}: detail and remedy are one line each")
        return self


class PreflightReport(Record):
    """All checks of a run that was not begun. Part of no verdict."""

    kind: Literal["preflight"] = "preflight"
    model: str
    source: str
    """Folder or hub id."""
    profile: str
    suite: str
    precisions: tuple[str, ...]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def outcome(self) -> Outcome:
        outcomes = {check.outcome for check in self.checks}
        return "FAIL" if "FAIL" in outcomes else "UNKNOWN" if "UNKNOWN" in outcomes else "PASS"
