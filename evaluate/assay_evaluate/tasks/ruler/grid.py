"""The needle grid: one needle at every depth of every length, often enough for an interval in each cell.

One question per cell proves next to nothing: 1 of 1 right only bounds the rate of failure below 0.975, 20 of 20 below 0.17.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from assay.records.base import Interval
from assay_evaluate.statistics.proportions import clopper_pearson
from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.haystacks import generated
from assay_evaluate.tasks.ruler.items import RulerItem, Style, size_item
from assay_evaluate.tasks.ruler.languages import LANGUAGES, RulerLanguage
from assay_evaluate.tasks.ruler.niah import grid_blueprint
from assay_evaluate.tasks.ruler.tasks import GENERATED_HAYSTACK, Sources, essay_haystack, item_seed
from assay_evaluate.tasks.ruler.tokens import CountTokens

GRID_TASK = "needle_grid"
REPLY_TOKENS = 128
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class GridCell:
    """All items of one length, depth and language. `accuracy`: share answered, with its exact (Clopper-Pearson) interval."""

    length_tokens: int
    depth: float
    language: str
    accuracy: Interval


def grid_item(
    length_tokens: int,
    depth: float,
    index: int,
    *,
    seed: str,
    style: Style,
    count_tokens: CountTokens,
    language: RulerLanguage = "en",
    sources: Sources | None = None,
    reply_tokens: int = REPLY_TOKENS,
) -> RulerItem:
    """Item `index` of one cell. A folder of texts is used for English only. RulerError as for `ruler_item`."""
    if not 0 <= depth <= 1:
        raise RulerError(f"depth {depth}: not between 0 (the front) and 1 (the end)")
    if language not in LANGUAGES:
        raise RulerError(f"language {language!r}: unknown to the needle grid; there are {', '.join(LANGUAGES)}")
    task = f"{GRID_TASK}/{language}/{depth:g}"
    own_seed = item_seed(seed, task, length_tokens, index)
    essays, why_not = generated(own_seed, language), GENERATED_HAYSTACK
    if sources is not None and sources.essays is not None and language == "en":
        essays, why_not = essay_haystack(sources, own_seed)[0], "the needle grid is not one of the published tasks"
    item = size_item(
        replace(grid_blueprint(language, depth, own_seed, essays), why_not_comparable=why_not),
        task=task,
        length_tokens=length_tokens,
        index=index,
        language=language,
        style=style,
        seed=seed,
        reply_tokens=reply_tokens,
        count_tokens=count_tokens,
    )
    return replace(item, facts={**item.facts, "depth": depth})


def needle_grid(
    lengths_tokens: Sequence[int],
    num_items: int,
    *,
    seed: str,
    style: Style,
    count_tokens: CountTokens,
    depths: Sequence[float] = DEPTHS,
    languages: Sequence[RulerLanguage] = ("en",),
    sources: Sources | None = None,
    reply_tokens: int = REPLY_TOKENS,
) -> Iterator[RulerItem]:
    """`num_items` for every cell of length x depth x language."""
    for length_tokens in lengths_tokens:
        for depth in depths:
            for language in languages:
                for index in range(num_items):
                    yield grid_item(
                        length_tokens,
                        depth,
                        index,
                        seed=seed,
                        style=style,
                        count_tokens=count_tokens,
                        language=language,
                        sources=sources,
                        reply_tokens=reply_tokens,
                    )


def grid_cells(scored: Iterable[tuple[RulerItem, float]], level: float = 0.95) -> tuple[GridCell, ...]:
    """The cells of scored grid items, by length, depth and language. RulerError for an item of another task."""
    scores: dict[tuple[int, float, str], list[float]] = defaultdict(list)
    for item, value in scored:
        if not item.task.startswith(f"{GRID_TASK}/"):
            raise RulerError(f"{item.id}: not an item of the needle grid; only those have a cell")
        scores[item.length_tokens, item.facts["depth"], item.language].append(value)
    return tuple(
        GridCell(*place, clopper_pearson(sum(value == 1 for value in values), len(values), level))
        for place, values in sorted(scores.items())
    )
