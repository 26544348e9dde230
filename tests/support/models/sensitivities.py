"""Sensitivity records with damages that a test chooses: bytes are those of the planner, so that they are of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import Interval
from assay.records.diagnosis.sensitivity import Sensitivity, SensitivityPart
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.mixing.parts import StoredParts, stored_parts

SCHEMES = ("w4a16", "w4a16_g32", "fp8_channel")
BITS = {
    "w4a16": 4.125,
    "w4a16_g32": 4.5,
    "fp8_channel": 8.1,
    "fp8_block": 8.0,
    "nvfp4": 4.4,
    "nvfp4a16": 4.5,
    "w4a16_g64": 4.25,
}
Damage = Callable[[int, str, str], float | None]
"""Layer, role, scheme -> nats; None: not measured."""


def by_bits(layer: int, role: str, scheme: str) -> float:
    """Four times less for each bit more, alike in all parts."""
    return 0.01 * 4.0 ** (4.0 - BITS[scheme])


def parts_of(checkpoint: Checkpoint, schemes: Sequence[str] = SCHEMES, base: str = "w4a16") -> StoredParts:
    recipe = load_recipe(PrecisionRecipe, base)
    return stored_parts(checkpoint, recipe, schemes, whole=lambda model: model, machine=None)


def sensitivity(
    checkpoint: Checkpoint,
    damage: Damage = by_bits,
    schemes: Sequence[str] = SCHEMES,
    *,
    error: float | None = 0.01,
    texts: str = "24 replies",
    observer: str = "minmax",
) -> Sensitivity:
    """error: half of every interval, as a share of its damage; None: no intervals."""
    stored = parts_of(checkpoint, schemes)
    rows = []
    for part in stored.parts:
        for scheme, num_bytes in part.num_bytes.items():
            nats = 0.0 if scheme == "bf16" else damage(part.layer, part.role, scheme)
            if nats is None:
                continue
            ends = None if error is None or scheme == "bf16" else (nats - error * abs(nats), nats + error * abs(nats))
            rows.append(
                SensitivityPart(
                    layer=part.layer,
                    role=part.role,  # type: ignore[arg-type]
                    scheme=scheme,
                    num_weights=part.num_weights,
                    bytes=num_bytes,
                    damage_nats=nats,
                    interval=None if ends is None else Interval(value=nats, low=ends[0], high=ends[1], n=24),
                )
            )
    return Sensitivity(
        model="tiny", family=stored.family, source=checkpoint.location, source_sha256=checkpoint.sha256, data_sha256="b" * 64,
        method="proxy:kl", observer=observer, texts=texts, texts_sha256="c" * 64, num_texts=24, num_tokens=1000, seed="0",
        layers=3, weights=0, other_bytes=stored.other_bytes, parts=tuple(rows), cpu_seconds=1.0,
    )  # type: ignore[arg-type]  # fmt: skip
