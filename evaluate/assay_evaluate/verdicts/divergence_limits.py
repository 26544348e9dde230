"""The limit that a divergence gate holds a candidate against: by the bits of its weights and the reference's own repeat.

A single limit for all formats lets through what is broken for its own: good checkpoints of 8-bit weights lie near 0.01 nats, of
4-bit weights near 0.05 (docs/decisions/kl-gates.md, 113, has the sources). One 4-bit layer does not make an 8-bit
checkpoint a 4-bit one: the limit rises with the share of the weights that have fewer bits, up to half of them (decision 213).
Serving that is itself noisy cannot show less, so the limit is at least a
multiple of the repeat's distance; `max` or `min` stands above both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from assay.quantities import percent_of_events
from assay.recipes.gate import DivergenceGate

WHOLE_FROM = 0.5
"""Share of the weights with so few bits from which on their limit holds as a whole."""


@dataclass(frozen=True)
class Limit:
    """why: ends the clause "allowed at most 0.02 nats" in the verdict's sentence."""

    value: float
    why: str = ""


def limit_for(
    gate: DivergenceGate, weight_bits: int | None, floor: float | None, *,
    weight_shares: Mapping[int, float] = MappingProxyType({}), by_format: bool = True,
) -> Limit:  # fmt: skip
    """weight_bits: the fewest; None: not known. weight_shares: bits -> share of the weights; empty: all have the fewest.

    floor: the gate's number of the reference's own repeat, on the same texts and positions. None: there is none.

    by_format: False for a number of which nothing is known by format (a mean over texts): `max` or `min` holds.
    """
    last = gate.max if gate.max is not None else gate.min
    assert last is not None, "the recipe's own check: either max or min"
    if not gate.expect:
        return Limit(last)
    if not by_format:
        return Limit(last, " for any format")
    expected = _expected(gate, weight_bits, weight_shares, last)
    if gate.times_noise_floor is None or floor is None or expected.value == last:
        return expected
    same = 0.0 if gate.max is not None else 1.0
    by_noise = same + gate.times_noise_floor * (floor - same)
    if (by_noise <= expected.value) if gate.max is not None else (by_noise >= expected.value):
        return expected
    noise = f"{gate.times_noise_floor:g} times the reference's own repeat, {floor:.4g}"
    if (by_noise > last) if gate.max is not None else (by_noise < last):
        return Limit(last, f" for any format ({noise}, would be more)")
    return Limit(by_noise, f" ({noise}; {expected.value:.4g}{expected.why} with less noise)")


def _expected(gate: DivergenceGate, weight_bits: int | None, weight_shares: Mapping[int, float], last: float) -> Limit:
    """Of the bits of the weights, whatever the noise."""
    if weight_bits is None:
        return Limit(last, " for any format (the bits of its weights are not known)")
    shares = {bits: share for bits, share in weight_shares.items() if share > 0}
    if len(shares) < 2:
        bits = next(iter(shares), weight_bits)
        if min(gate.expect) > bits:
            return Limit(last, f" for any format (nothing is expected of {bits}-bit weights)")
        return Limit(_of_bits(gate, bits, last), f" for {bits}-bit weights")
    said = " and ".join(f"{percent_of_events(share)} {bits}-bit" for bits, share in sorted(shares.items()))
    return Limit(_of_shares(gate, shares, last), f" for {said} weights")


def _of_bits(gate: DivergenceGate, bits: int, last: float) -> float:
    return gate.expect[max(entry for entry in gate.expect if entry <= bits)] if min(gate.expect) <= bits else last


def _of_shares(gate: DivergenceGate, shares: Mapping[int, float], last: float) -> float:
    """From the limit of the most bits on, each step towards that of fewer in proportion to the share that has so few."""
    limits = list(_steps(gate, shares, last))
    found = limits[0][1]
    for (_, before), (share, limit) in pairwise(limits):
        found += min(1.0, share / WHOLE_FROM) * (limit - before)
    return found


def _steps(gate: DivergenceGate, shares: Mapping[int, float], last: float) -> Iterator[tuple[float, float]]:
    """(share of weights with at most so many bits, their limit), from the most bits to the fewest."""
    for bits in sorted(shares, reverse=True):
        yield sum(share for other, share in shares.items() if other <= bits), _of_bits(gate, bits, last)
