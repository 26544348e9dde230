"""What verification has seen so far, shared by all its checks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from assay.records.verification import Damage


@dataclass
class Findings:
    """damages: what is wrong. checks: name of a check -> how many things it looked at. errors: (role, scheme) -> relative
    error of every quantized weight."""

    damages: list[Damage] = field(default_factory=list)
    checks: Counter[str] = field(default_factory=Counter)
    not_checked: list[str] = field(default_factory=list)
    errors: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def errors_by_role(self) -> dict[str, list[float]]:
        """Role -> errors; a role whose layers have several schemes is listed once for each: `routed_expert (nvfp4a16)`."""
        roles = Counter(role for role, _ in self.errors)
        return {role if roles[role] == 1 else f"{role} ({scheme})": found for (role, scheme), found in self.errors.items()}

    def look(self, check: str, count: int = 1) -> None:
        self.checks[check] += count

    def is_damaged(self, where: str) -> bool:
        """Whether something is known to be wrong there."""
        return any(damage.where == where for damage in self.damages)

    def take(self, other: Findings) -> None:
        """Add what was found elsewhere."""
        self.damages += other.damages
        self.checks += other.checks
        self.not_checked += other.not_checked
        for which, found in other.errors.items():
            self.errors[which] += found

    def damage(self, check: str, where: str, what: str) -> None:
        self.damages.append(Damage(check=check, where=where, what=what))
