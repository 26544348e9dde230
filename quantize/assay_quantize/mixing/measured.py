"""What a mix and uniform recipes lost with all their parts quantized at once, by whom it was measured, and who wins by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from assay.quantities import size
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of
from assay.records.choice.mix import KEPT, PredictedMeasured
from assay.records.diagnosis.sensitivity import Sensitivity, UniformDamage, WholeDamage
from assay_quantize.mixing.choose import Choices

Control = tuple[str, tuple[int, ...]]
SENSITIVITY = "sensitivity"
"""Who measured, where it was not a run."""


@dataclass(frozen=True)
class Duel:
    """The mix and the uniform recipe that lost least, both measured by the same with all parts quantized at once."""

    mine: PredictedMeasured
    rival: Control
    theirs: PredictedMeasured

    @property
    def where(self) -> str:
        if self.theirs.source == SENSITIVITY:
            which = "texts that it was not" if self.theirs.on_other_texts else "the texts that it was"
            return f"with all parts quantized at once, on {which} chosen on,"
        return f"measured in {self.theirs.source},"

    @property
    def uniform_wins(self) -> str | None:
        """Why the uniform recipe is proposed; None: the mix is."""
        if self.mine.measured_nats < self.theirs.measured_nats:
            return None
        return (
            f"{self.rival[0]} is proposed: {self.where} it loses {self.theirs.measured_nats:.4g} nats a token, and the mix "
            f"{self.mine.measured_nats:.4g}."
        )

    def mix_wins(self, their_size: str) -> str:
        where = self.where[0].upper() + self.where[1:]
        return (
            f"{where} it loses {self.mine.measured_nats:.4g} nats a token, and {self.rival[0]} ({their_size}), the best "
            f"uniform recipe of at most this size, {self.theirs.measured_nats:.4g}."
        )


def duel_of(
    base: PrecisionRecipe,
    choices: Choices,
    uniforms: Sequence[Control],
    strongest: Control | None,
    picks: Sequence[int],
    known: Mapping[str, PredictedMeasured],
) -> Duel | None:
    """None: the mix is one of the uniform recipes, or was not measured; or no uniform recipe was measured that lost less, and
    not the strongest."""
    mine = known.get(meaning_of(base, choices.schemes(picks)))
    found = [(one, known.get(meaning_of(base, choices.schemes(one[1])))) for one in uniforms]
    theirs = [(one, nats) for one, nats in found if nats is not None]
    if mine is None or not theirs or tuple(picks) in {at for _, at in uniforms}:
        return None
    rival, least = min(theirs, key=lambda one: one[1].measured_nats)
    if mine.measured_nats < least.measured_nats and strongest not in [one for one, _ in theirs]:
        return None  # ahead of others says nothing
    return Duel(mine, rival, least)


def strongest_of(
    base: PrecisionRecipe,
    choices: Choices,
    uniforms: Sequence[Control],
    rival: Control | None,
    wholes: Mapping[str, PredictedMeasured],
) -> Control | None:
    """The uniform recipe that lost least as a whole, where `rival`, which the sums favour, was measured so; else that."""
    found = [(one, wholes.get(meaning_of(base, choices.schemes(one[1])))) for one in uniforms]
    lost = {one[0]: (whole.measured_nats, one) for one, whole in found if whole is not None}
    return rival if rival is None or rival[0] not in lost else min(lost.values(), key=lambda each: each[0])[1]


def wholes_of(base: PrecisionRecipe, choices: Choices, sensitivity: Sensitivity) -> dict[str, PredictedMeasured]:
    """Meaning of a choice -> what it lost with all its parts quantized at once, on the texts of the sensitivities."""
    parts = {(part.layer, part.role): part for part in choices.parts}
    found: dict[str, PredictedMeasured] = {}

    def take(chosen: Mapping[tuple[int, str], str], one: UniformDamage | WholeDamage, name: str | None = None) -> None:
        if not chosen.keys() <= parts.keys() or any(scheme not in parts[key].num_bytes for key, scheme in chosen.items()):
            return
        schemes = {key: chosen.get(key, KEPT) for key in parts}
        total = choices.stored.other_bytes + sum(parts[key].num_bytes[scheme] for key, scheme in schemes.items())
        found.setdefault(
            meaning_of(base, schemes),
            PredictedMeasured(
                name=name or f"mix of {size(total)}",
                source=SENSITIVITY,
                predicted_nats=one.sum_of_parts_nats,
                measured_nats=one.damage_nats,
                interval=one.interval,
                on_other_texts=sensitivity.num_texts_of_wholes is not None,
            ),
        )

    for uniform in sensitivity.uniform:
        of = uniform.scheme
        rows = [part for part in sensitivity.parts if part.scheme == of and part.damage_nats is not None]
        take({(row.layer, row.role): of for row in rows if row.layer is not None}, uniform, f"uniform {of}")
    for whole in sensitivity.wholes:
        take({(layer, role): scheme for layer, role, scheme in whole.schemes}, whole)
    return found


def meaning_of(base: PrecisionRecipe, schemes: Mapping[tuple[int, str], str]) -> str:
    """What a choice and the plan of a checkpoint can be compared by: the scheme of each part, and how scales were found."""
    calibration = base.calibration if base.calibration == "none" else base.calibration.model_dump(mode="json")
    chosen = [[layer, role, scheme] for (layer, role), scheme in sorted(schemes.items())]
    return sha256_of([base.observer, base.mtp, calibration, chosen])
