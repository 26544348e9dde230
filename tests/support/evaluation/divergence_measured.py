"""A measurement of which only the divergence matters."""

from __future__ import annotations

from blank_records import blank_fingerprint

from assay.records.measurement import Divergence, Measurement


def measured(divergence: Divergence | None, **not_measured: str) -> Measurement:
    fingerprint = blank_fingerprint(server="e")
    return Measurement(
        model="m", label="w4a16", is_reference=False, is_noise_floor=False, checkpoint="c", checkpoint_sha256="c",
        checkpoint_bytes=1, suite="s", suite_sha256="s", suite_recipe={}, fingerprint=fingerprint, tasks=(),
        divergence=divergence, acceptance=None, not_measured=not_measured, started="2026-01-01", seconds=1,
    )  # fmt: skip
