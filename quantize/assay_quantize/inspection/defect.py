"""What a row of a table of defects is, and how a checkpoint is held against one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from assay.records.inspection import Finding, MendBy, Needs, Severity
from assay.records.inspection import Place as PlaceRecord

MOST_PLACES = 100
"""Of one defect in the record; all are counted."""
WORST_FIRST: tuple[Severity, ...] = ("fails", "wrong", "risk", "note")

Subject = TypeVar("Subject")


class Place(NamedTuple):
    """Where something is wrong, and what."""

    where: str
    what: str


@dataclass(frozen=True)
class Defect(Generic[Subject]):
    """key: its name. looks_at: what is checked. served: what it does. mend: how it is mended. source: public report or rule.
    needs: what has to be read. find: the places where a checkpoint has it."""

    key: str
    severity: Severity
    looks_at: str
    served: str
    mend_by: MendBy
    mend: str
    source: str
    find: Callable[[Subject], Iterator[Place]]
    needs: Needs = "headers"


def findings_of(defects: Iterable[Defect[Subject]], subject: Subject) -> tuple[Finding, ...]:
    """The defects that it has, worst first."""
    findings = [finding for defect in defects if (finding := _finding(defect, subject)) is not None]
    return tuple(sorted(findings, key=lambda finding: WORST_FIRST.index(finding.severity)))


def _finding(defect: Defect[Subject], subject: Subject) -> Finding | None:
    places = defect.find(subject)
    first = list(itertools.islice(places, MOST_PLACES))
    if not first:
        return None
    return Finding(
        defect=defect.key,
        severity=defect.severity,
        places=tuple(PlaceRecord(where=place.where, what=place.what) for place in first),
        num_places=len(first) + sum(1 for _ in places),
        served=defect.served,
        mend_by=defect.mend_by,
        mend=defect.mend,
        source=defect.source,
    )
