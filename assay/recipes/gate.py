"""Gate recipes: limits, written down before the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from assay.recipes.base import Recipe, Section
from assay.records.probe import ProbeName


class ScoreGate(Section):
    """Non-inferiority: the upper end of the paired interval of the drop must stay below `max_drop`."""

    kind: Literal["score"]
    task: str
    max_drop: float = Field(gt=0, lt=1)
    """In accuracy: 0.02 = two points."""
    claim: Literal["non_inferior", "equivalent"] = "non_inferior"
    """equivalent: a gain of `max_drop` must be excluded too (TOST)."""
    max_truncated: float | None = Field(default=None, ge=0, le=1)
    """Share of replies cut off, on either side, above which this task is NOT MEASURED. Default: the truncation gate's; without
    one, 5 %."""
    required: bool = True
    """False: where the *reference* cannot do the task (no score, hardly ever right, cut off), the gate is shown without a say
    in the overall verdict. A candidate that cannot do what the reference can is judged all the same."""


class DivergenceGate(Section):
    """Can fail a candidate, never certify it."""

    kind: Literal["divergence"]
    metric: Literal[
        "kl_mean", "kl_p99", "top1_agreement", "kl_unbiased_mean", "kl_p999", "kl_cvar95", "perplexity_ratio", "kl_exact_mean",
    ]  # fmt: skip
    max: float | None = None
    min: float | None = None
    texts: Literal["sampled", "held_out", "every"] = "sampled"
    """every: sampled and held-out ones, the worse of the two."""
    over: Literal["all", "spans"] = "all"
    """spans: every span of positions by itself, the worst of them: short texts cannot dilute what goes wrong in long ones."""

    def _contradictions(self) -> Iterator[str]:
        if (self.max is None) == (self.min is None):
            yield "say either `max` or `min`"
        if self.over == "spans" and self.metric != "kl_mean":
            yield "`over: spans` judges kl_mean"
        if self.texts != "sampled" and self.metric in {"kl_unbiased_mean", "kl_exact_mean"}:
            yield f"{self.metric} is of sampled texts"


class AcceptanceGate(Section):
    kind: Literal["acceptance"]
    max_drop: float = Field(gt=0, lt=1)
    """Of the acceptance rate, against the reference."""


class TruncationGate(Section):
    kind: Literal["truncation"]
    max_share: float = Field(ge=0, le=1)
    """Above it a score is NOT MEASURED, not low."""


class ProbesGate(Section):
    """Serving-fidelity probes (`assay probe`, or `probes:` in the suite): one alarm fails the candidate."""

    kind: Literal["probes"]
    required: tuple[ProbeName, ...] = ()
    """Probes that must have run; one that could not makes the candidate NOT MEASURED."""
    max_rate: dict[ProbeName, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    """Probe -> rate of events that must be excluded; UNDERPOWERED while the upper bound is above it."""


class GateRecipe(Recipe):
    gates: tuple[
        Annotated[
            ScoreGate | DivergenceGate | AcceptanceGate | TruncationGate | ProbesGate, Field(discriminator="kind")
        ], ...
    ]  # fmt: skip
    level: float = Field(default=0.95, gt=0.5, lt=1)
    """Of every interval. The chance of a PASS when the margin is truly lost is about (1 - level) / 2 at most."""
    adjust: Literal["holm", "none"] = "holm"
    """Over the score gates of one candidate, for what can fail it. A PASS needs every gate, so nothing is adjusted there."""
    max_excluded: float = Field(default=0.01, ge=0, lt=1)
    """Share of items without a reply on either side above which a task is NOT MEASURED."""
    min_items: int = Field(default=30, ge=1)
    """Fewer paired items never PASS, whatever the margin."""

    def _contradictions(self) -> Iterator[str]:
        tasks = [gate.task for gate in self.gates if isinstance(gate, ScoreGate)]
        for twice in sorted({task for task in tasks if tasks.count(task) > 1}):
            yield f"two score gates for task {twice}; write one margin and one claim per task"
