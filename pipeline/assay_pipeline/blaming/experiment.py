"""The designed experiment of `assay blame`: shares of causes, what they do together, and the layers that lose most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.records.diagnosis.blame import Cause, Interaction, LayerRange
from assay_pipeline.blaming.factors import Factor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

KlOf = Callable[[Sequence[Factor]], "Floats"]
"""KL summed over the tokens of each text, [T], with these factors the candidate's."""
STRONG = 0.1
"""Share of the whole from which an interaction of two is told, and a cause's layers are searched."""
ONE_SIDED = 2 / 3
"""Share of both halves from which the layers of one are searched on."""


@dataclass(frozen=True)
class Experiment:
    """causes: largest share first. unexplained: as in `Blame`."""

    causes: list[Cause]
    interactions: list[Interaction]
    unexplained: float | None


def run_design(factors: Sequence[Factor], kl_of: KlOf) -> Experiment:
    """Over all settings of a two-level design, and what tells interactions apart that it mixes."""
    import numpy as np

    from assay_evaluate.statistics.factorial import design, main_effects, mixed_pairs, pair_effect, share, strong_pairs

    settings_RF = design(len(factors))

    def chosen(on_F: Sequence[bool]) -> list[Factor]:
        return [factor for factor, on in zip(factors, on_F, strict=True) if on]

    kl_RT = np.array([kl_of(chosen(on_F)) for on_F in settings_RF])
    whole_T = kl_RT[-1] - kl_RT[0]
    effects_FT = main_effects(settings_RF, kl_RT)
    shares = [share(effect_T, whole_T) for effect_T in effects_FT]
    values = [float(effect_T.sum()) for effect_T in effects_FT]
    total = float(whole_T.sum())
    interactions = []
    if total > 0:
        alone_in_set = {pairs[0] for pairs in mixed_pairs(settings_RF) if len(pairs) == 1}
        for first, second in strong_pairs(settings_RF, kl_RT, [value / total for value in values], STRONG):
            if (first, second) in alone_in_set:
                effect_T = pair_effect(settings_RF, kl_RT, first, second)
            else:
                alone = [kl_of([factors[number]]) for number in (first, second)]
                effect_T = kl_of([factors[first], factors[second]]) - alone[0] - alone[1] + kl_RT[0]
            interval = share(effect_T, whole_T)
            if interval is not None and abs(interval.value) >= STRONG and not interval.low <= 0 <= interval.high:
                interactions.append(Interaction(first=factors[first].name, second=factors[second].name, share=interval))
    order = sorted(range(len(factors)), key=lambda number: -values[number])
    causes = [
        Cause(kind=factors[number].kind, name=factors[number].name, what=factors[number].what, share=shares[number])
        for number in order
    ]
    return Experiment(causes, interactions, 1 - sum(values) / total if total > 0 else None)


def narrow(factor: Factor, kl_of: KlOf) -> LayerRange | None:
    """The layers in which the weights of a factor lose most, by halving; each half is tried alone.

    None: the factor has one layer, or none.
    """
    layers = sorted({place.layer for place in factor.places if place.layer is not None})
    if len(layers) < 2:
        return None
    of_alone = 1.0
    while len(layers) > 1:
        halves = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        sums = [float(kl_of([in_layers(factor, half)]).sum()) for half in halves]
        most = 0 if sums[0] >= sums[1] else 1
        if sum(sums) <= 0 or sums[most] < ONE_SIDED * sum(sums):
            break
        of_alone *= sums[most] / sum(sums)
        layers = halves[most]
    return LayerRange(cause=factor.name, first_layer=layers[0], last_layer=layers[-1], share=of_alone)


def in_layers(factor: Factor, layers: Sequence[int]) -> Factor:
    """Its weights in these layers."""
    return factor.within(place for place in factor.places if place.layer in layers)
