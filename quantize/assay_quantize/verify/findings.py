"""What verification has seen so far, shared by all its checks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from assay.records.verification import Damage


@dataclass
class Findings:
    """damages: what is wrong. checks: name of a check -> how many things it looked at. errors_by_role: relative error of every
    quantized weight, as far as it is finite."""

    damages: list[Damage] = field(default_factory=list)
    checks: Counter[str] = field(default_factory=Counter)
    not_checked: list[str] = field(default_factory=list)
    errors_by_role: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def look(self, check: str, count: int = 1) -> None:
        self.checks[check] += count

    def damage(self, check: str, where: str, what: str) -> None:
        self.damages.append(Damage(check=check, where=where, what=what))
