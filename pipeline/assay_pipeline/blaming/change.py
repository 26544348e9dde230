"""The cheapest change of a candidate that is within the limit: which causes have to be the reference's, and what that costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.errors import PlanError
from assay.quantities import number_ranges
from assay.recipes.families import family_of, num_experts
from assay.recipes.text_config import text_of
from assay.records.base import Interval
from assay.records.diagnosis.blame import Cause, Change, LayerRange
from assay_pipeline.blaming.experiment import in_layers
from assay_pipeline.blaming.factors import Factor

if TYPE_CHECKING:
    from assay_quantize.screen.mixed_model import MixedModel, Place

MEASURED_AT_MOST = 4
"""Changes that are predicted to be enough."""
LEAST_SHARE, LEAST_OF_LIMIT = 0.02, 0.1
"""Of the whole, or of the limit, of a cause that is worth restoring."""
KlInterval = Callable[[Sequence[Factor]], Interval]
"""Mean KL with these factors the candidate's."""


@dataclass(frozen=True)
class Restored:
    """A cause, or some layers of it, that is the reference's in a change. share: of the whole; added_bytes: of weights."""

    factor: Factor
    what: str
    share: float
    added_bytes: int


def options_of(
    factors: Sequence[Factor], causes: Sequence[Cause], layers: Sequence[LayerRange], whole: float, limit: float,
    model: MixedModel,
) -> list[Restored]:  # fmt: skip
    """What may be restored: every cause with a share that matters, and the layers of it that lose most."""
    by_name = {factor.name: factor for factor in factors}
    shares = {cause.name: cause.share.value for cause in causes if cause.share is not None}
    options = []
    for name, share in shares.items():
        if share < LEAST_SHARE and share * whole < LEAST_OF_LIMIT * limit:
            continue
        factor = by_name[name]
        for span in layers:
            part = in_layers(factor, range(span.first_layer, span.last_layer + 1))
            if span.cause == name and part.places != factor.places:
                where = number_ranges(range(span.first_layer, span.last_layer + 1))
                what = f"{factor.what} of layer{'s' if span.last_layer > span.first_layer else ''} {where}"
                options.append(Restored(part, what, share * span.share, _added_bytes(model, part.places)))
        options.append(Restored(factor, factor.what, share, _added_bytes(model, factor.places)))
    return options


def cheapest(
    options: Sequence[Restored], factors: Sequence[Factor], whole: Interval, limit: float, kl_of: KlInterval, model: MixedModel
) -> tuple[Change, list[Restored]] | None:
    """The change with the fewest added bytes whose KL is measured within the limit; else, of those tried, that of the least KL.

    None: nothing may be restored.
    """
    best: tuple[Change, list[Restored]] | None = None
    for restored in itertools.islice(_predicted(options, whole.value, limit), MEASURED_AT_MOST):
        kl = kl_of([rest for factor in factors if (rest := _without(factor, restored)) is not None])
        added_bytes = sum(option.added_bytes for option in restored)
        places = frozenset().union(*(option.factor.places for option in restored))
        change = Change(
            restored=tuple(option.what for option in restored), kl=kl, is_within=kl.high <= limit, added_bytes=added_bytes,
            weights_bytes=_stored_bytes(model, model.places.values()) + added_bytes, read_ratio=_read_ratio(model, places),
        )  # fmt: skip
        if best is None or change.is_within or kl.value < best[0].kl.value:
            best = change, list(restored)
        if change.is_within:
            break
    return best


def _predicted(options: Sequence[Restored], whole: float, limit: float) -> Iterator[tuple[Restored, ...]]:
    """Sets that leave no more than the limit, by shares, cheapest first; then everything that may be restored."""
    sets = [
        chosen
        for count in range(1, len(options) + 1)
        for chosen in itertools.combinations(options, count)
        if len({option.factor.name for option in chosen}) == count
    ]
    enough = [chosen for chosen in sets if whole * (1 - sum(option.share for option in chosen)) <= limit]
    yield from sorted(enough, key=_cost)
    if sets:
        largest = max(sets, key=lambda chosen: (sum(option.share for option in chosen), -_cost(chosen)[0]))
        if largest not in enough:
            yield largest


def _cost(chosen: tuple[Restored, ...]) -> tuple[int, int]:
    return sum(option.added_bytes for option in chosen), len(chosen)


def _without(factor: Factor, restored: Iterable[Restored]) -> Factor | None:
    """What is left of a factor; None: nothing."""
    for option in restored:
        if option.factor.name == factor.name:
            left = factor.places - option.factor.places
            return factor.within(left) if left else None
    return factor


# ------------------------------------------------------------------------------------------------ bytes
def _stored_bytes(model: MixedModel, places: Iterable[Place]) -> int:
    """Of weights of the candidate in these places."""
    return sum(model.stored_bytes(place) for place in set(places))


def _added_bytes(model: MixedModel, places: Iterable[Place]) -> int:
    """By their being in 16 bits, where they are in fewer."""
    return sum(max(0, 2 * model.num_weights(place) - model.stored_bytes(place)) for place in set(places))


def _read_ratio(model: MixedModel, restored: frozenset[Place]) -> float:
    """Of the weights that a token reads: of routed experts those it is sent to, of the embedding none."""
    before = after = 0.0
    share_of_experts = _share_of_experts(model)
    for place in set(model.places.values()):
        if place.role == "embedding":
            continue
        share = share_of_experts if place.role == "routed_expert" else 1.0
        before += share * model.stored_bytes(place)
        after += share * (model.stored_bytes(place) + (_added_bytes(model, [place]) if place in restored else 0))
    return after / before


def _share_of_experts(model: MixedModel) -> float:
    config = model.stored.config
    try:
        count = num_experts(family_of(config), config)
    except PlanError:
        return 1.0
    chosen = text_of(config).get("num_experts_per_tok")
    return min(1.0, chosen / count) if isinstance(chosen, int) and count else 1.0
