"""A small record of `assay sensitivity`."""

from __future__ import annotations

from assay.records.base import Interval
from assay.records.diagnosis.sensitivity import RankCorrelation, Sensitivity, SensitivityPart, UniformDamage, WorstTensor

DAMAGE = {(0, "attention"): 1e-5, (0, "dense_mlp"): 1e-4, (1, "attention"): 1e-3, (1, "routed_expert"): 0.1}


def record(layers: int = 2, **changes: object) -> Sensitivity:
    damage = DAMAGE if layers == 2 else {(layer, "attention"): 1e-5 * (layer + 1) for layer in range(layers)}
    parts = []
    for (layer, role), nats in damage.items():
        same = {"layer": layer, "role": role, "num_weights": 4096}
        parts.append(SensitivityPart(**same, scheme="bf16", bytes=8192, damage_nats=0.0))  # type: ignore[arg-type]
        parts.append(
            SensitivityPart(
                **same, scheme="w4a16", bytes=2128, damage_nats=nats,  # type: ignore[arg-type]
                interval=Interval(value=nats, low=nats / 2, high=nats * 2, n=24),
                worst=(WorstTensor(name=f"model.layers.{layer}.{role}.weight", share=0.75),),
            )
        )  # fmt: skip
    parts.append(SensitivityPart(layer=None, role="mtp", scheme="w4a16", num_weights=64, bytes=34, damage_nats=None))
    fields = {
        "model": "tiny", "family": "glm4_moe", "source": "s", "source_sha256": "a" * 64, "data_sha256": "b" * 64,
        "method": "proxy:kl", "texts": "replies", "texts_sha256": "c" * 64, "num_texts": 24, "num_tokens": 5000, "seed": "0",
        "layers": layers, "weights": 20_000, "other_bytes": 640, "parts": tuple(parts), "cpu_seconds": 1.5,
        "uniform": (UniformDamage(scheme="w4a16", bytes=9152, damage_nats=0.08, sum_of_parts_nats=0.10111),),
        "correlations": (
            RankCorrelation(of="proxy:weights", beside="proxy:kl", spearman=Interval(value=0.8, low=0.2, high=0.9, n=4)),
        ),
        "not_measured": {"long context": "no text is longer than 256 tokens"},
    }  # fmt: skip
    return Sensitivity.model_validate(fields | changes)
