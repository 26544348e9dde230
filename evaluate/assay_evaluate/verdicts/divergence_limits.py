"""The limit that a divergence gate holds a candidate against: by the bits of its weights and the reference's own repeat.

A single limit for all formats lets through what is broken for its own: good checkpoints of 8-bit weights lie near 0.01 nats, of
4-bit weights near 0.05 (docs/decisions/113-limits-by-format.md has the sources). Serving that is itself that noisy cannot show
less, so the limit is at least a multiple of the repeat's distance; `max` or `min` stands above both.
"""

from __future__ import annotations

from dataclasses import dataclass

from assay.recipes.gate import DivergenceGate


@dataclass(frozen=True)
class Limit:
    """why: ends the clause "allowed at most 0.02 nats" in the verdict's sentence."""

    value: float
    why: str = ""


def limit_for(gate: DivergenceGate, weight_bits: int | None, floor: float | None) -> Limit:
    """floor: the gate's number of the reference's own repeat, on the same texts and positions. None: there is none."""
    last = gate.max if gate.max is not None else gate.min
    assert last is not None
    if not gate.expect:
        return Limit(last)
    if weight_bits is None:
        return Limit(last, " for any format (the bits of its weights are not known)")
    entries = [bits for bits in gate.expect if bits <= weight_bits]
    if not entries:
        return Limit(last, f" for any format (nothing is expected of {weight_bits}-bit weights)")
    expected = Limit(gate.expect[max(entries)], f" for {weight_bits}-bit weights")
    if gate.times_noise_floor is None or floor is None:
        return expected
    same = 0.0 if gate.max is not None else 1.0
    by_noise = same + gate.times_noise_floor * (floor - same)
    if (by_noise <= expected.value) if gate.max is not None else (by_noise >= expected.value):
        return expected
    noise = f"{gate.times_noise_floor:g} times the reference's own repeat, {floor:.4g}"
    if (by_noise > last) if gate.max is not None else (by_noise < last):
        return Limit(last, f" for any format ({noise}, would be more)")
    return Limit(by_noise, f" ({noise}; {expected.value:g}{expected.why} with less noise)")
