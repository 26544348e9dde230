"""Kinds of text that the suite fixes, as strata of an interval.

A suite asks for so many texts of each kind: replies to its own questions, to each task's, held-out text, in each language.
Kinds may differ in KL by ten thousand times, and how many there are of each is no chance. A stratum has at least
`FEWEST_TEXTS` texts, as an interval has: over fewer, what lies far off in a kind is not seen. Kinds with fewer are joined by
what they are, never by their values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from assay.records.divergence import FEWEST_TEXTS

Kind = tuple[str, ...]
"""From coarse to fine: the set of texts, its domain or task, the language."""


def strata_of(kinds: Sequence[Kind]) -> list[Kind]:
    """The stratum of each text: its kind, or the first so many parts of it.

    From the finest parts up: kinds with fewer than FEWEST_TEXTS texts are joined with the other small ones of the same coarser
    part, or, if they are still too few together, with all texts of that part. Fewer than FEWEST_TEXTS in all are one stratum.
    """
    strata = list(kinds)
    for depth in reversed(range(max(map(len, kinds), default=0))):
        sizes = Counter(strata)
        joined = Counter(kind[:depth] for kind in strata if sizes[kind] < FEWEST_TEXTS)
        for i, kind in enumerate(strata):
            part = kind[:depth]
            if part in joined and (sizes[kind] < FEWEST_TEXTS or joined[part] < FEWEST_TEXTS):
                strata[i] = part
    return strata
