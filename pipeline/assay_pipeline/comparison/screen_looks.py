"""A screening looks at its candidates once or twice: first at some of the texts, and at all of them if that does not decide.

How many texts each look has is fixed before anything is computed, and every look's intervals are as wide as two looks need
(Bonferroni), so that stopping early costs no coverage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from assay.callbacks import Say
from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.screening import Panel, Screened
from assay_pipeline.comparison.screen_figures import router_changes, screened_candidate
from assay_pipeline.comparison.screen_passes import (
    MadePass,
    PassRunner,
    ScreenReference,
    joined,
    panel_like,
    reference_checkpoint,
    restricted,
)
from assay_pipeline.comparison.screen_sources import ScreenSource

if TYPE_CHECKING:
    from assay_quantize.decoding.open_stored import StoredCheckpoint
    from assay_quantize.screen.compare import TextDivergence
    from assay_quantize.screen.texts import ScreenText

FIRST_SHARE = 0.25
"""Of the texts, at the first look."""
FEWEST_FIRST = 40
"""Texts, at least: 20 would have an interval, and would miss a loss of 1 text in 5."""
MOST_FIRST_SHARE = 0.5
"""A first look at more of them would save little."""
PRECISE = 0.1
"""Half-width of an interval, as a share of the KL, at which more texts would tell little more."""
ERROR = 0.05
"""Of all looks together."""


def looks_of(num_texts: int) -> list[list[int]]:
    """The texts that each look adds, by their numbers: of the first evenly from all of them."""
    first = max(FEWEST_FIRST, round(FIRST_SHARE * num_texts))
    if first > MOST_FIRST_SHARE * num_texts:
        return [list(range(num_texts))]
    early = {index * num_texts // first for index in range(first)}
    return [sorted(early), [number for number in range(num_texts) if number not in early]]


@dataclass(frozen=True)
class Looked:
    """What is known of all candidates from the texts so far."""

    reference: ScreenReference
    screened: list[Screened]
    values: dict[str, list[TextDivergence]]

    @property
    def is_settled(self) -> bool:
        """Whether every candidate is decided, or its KL known well enough."""
        return all(candidate.word != "UNDERPOWERED" or _is_precise(candidate) for candidate in self.screened)


@dataclass
class Looks:
    """The passes of one screening. level: of each look's intervals. reference: of a pack; None: the first of the sources."""

    runner: PassRunner
    sources: Mapping[str, ScreenSource]
    stored: Mapping[str, StoredCheckpoint]
    entries: Sequence[ScreenText]
    panel: Panel
    gate: DivergenceGate
    level: float
    of_pack: ScreenReference | None
    say: Say
    _numbers: list[int] = field(default_factory=list)
    _passes: dict[str, list[tuple[MadePass, Sequence[int]]]] = field(default_factory=lambda: defaultdict(list))

    def look(self, new: Sequence[int]) -> Looked:
        """At `new` texts and those of the looks before."""
        from assay_quantize.screen.compare import compare_passes

        is_first = not self._numbers
        self._numbers = sorted([*self._numbers, *new])
        texts = [self.entries[number] for number in self._numbers]
        scored = [text.scored for text in texts]

        def made(label: str, runner: PassRunner) -> MadePass:
            folder = label if is_first else f"{label}+rest"  # `folder_name` gives no label such a name
            texts_of_pass = [self.entries[number].scored for number in new]
            made = runner.run(folder, self.stored[label], self.sources[label], texts_of_pass)
            self._passes[label].append((made, new))
            return replace(joined(self._passes[label]), model=runner.model(self.stored[label]))

        candidates = list(self.sources)
        panel = panel_like(self.panel, texts, is_whole=len(texts) == len(self.entries))
        if self.of_pack is not None:
            reference = replace(restricted(self.of_pack, self._numbers), panel=panel)
        else:
            first, runner = candidates.pop(0), replace(self.runner, kv_cache_dtype="auto")
            reference = reference_checkpoint(
                made(first, runner), self.stored[first], self.sources[first], list(texts), panel, runner
            )  # fmt: skip
        screened, values = [], {}
        for label in candidates:
            reference.check(self.stored[label])  # another model is refused before hours of work
            of_candidate = made(label, self.runner)
            self.say(f"{label}: head against head")
            side = of_candidate.side()
            values[label] = list(compare_passes(scored, reference.side_for(self.stored[label]), side))
            routers = router_changes(reference.texts, reference.states, of_candidate.states)
            screened.append(
                screened_candidate(
                    label, self.sources[label], self.stored[label], of_candidate, self.gate, reference, values[label], routers,
                    self.level,
                )
            )  # fmt: skip
        return Looked(reference, screened, values)


def _is_precise(candidate: Screened) -> bool:
    mean = candidate.drift.kl_mean
    return isinstance(mean, Interval) and (mean.high - mean.low) / 2 <= PRECISE * mean.value
