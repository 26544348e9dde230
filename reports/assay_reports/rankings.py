"""Which candidate loses less than which by its divergence, in sentences: of a screening, or of a suite that asks no task."""

from __future__ import annotations

from collections.abc import Iterable

from assay.records.base import Interval
from assay.records.divergence import Ranking
from assay_reports.sentences import screening as english


def ranked(rankings: Iterable[Ranking]) -> list[str]:
    """Each candidate against the next, in a sentence."""
    sentences = []
    for ranking in rankings:
        names = {"first": ranking.first, "second": ranking.second}
        if ranking.ratio is None:
            sentences.append(english.NO_RANKING.format(**names))
        else:
            template = english.RANKED if ranking.is_ranked else english.NOT_RANKED
            sentences.append(template.format(**names, ratio=ratio_of(ranking.ratio)))
    return sentences


def ratio_of(ratio: Interval) -> str:
    """`0.62 (0.55 to 0.70)`."""
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
