"""A measurement of which only the divergence matters."""

from __future__ import annotations

from assay.records.measurement import Divergence, Measurement
from assay.records.serving import Fingerprint


def measured(divergence: Divergence | None, **not_measured: str) -> Measurement:
    fingerprint = Fingerprint(
        server="e", versions={}, hardware={}, profile="p", flags={}, environment={}, speculation=None, checkpoint_flags={},
        emulated=None, kernels=(),
    )  # fmt: skip
    return Measurement(
        model="m", label="w4a16", is_reference=False, is_noise_floor=False, checkpoint="c", checkpoint_sha256="c",
        checkpoint_bytes=1, suite="s", suite_sha256="s", suite_recipe={}, fingerprint=fingerprint, tasks=(),
        divergence=divergence, acceptance=None, not_measured=not_measured, started="2026-01-01", seconds=1,
    )  # fmt: skip
