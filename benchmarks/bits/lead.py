"""How often a mix that `assay recipe` proposes is truly worse than its control, and what its `at least` covers: simulated.

    python benchmarks/bits/lead.py

Parts have true damages: a lognormal size, times the squared error of each scheme, off that line by a fifth. What is measured
are means over texts with a long tail, half of whose logarithm all schemes of a part share; intervals and the choice are the
product's own. Damages add up exactly here: that they do not in a model comes on top. `held`: the share of proposals whose true
lead is at least what was said. `error`: median relative standard error of a damage. About half a minute of one core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from assay_evaluate.statistics.skewed import skewed_mean
from assay_quantize.mixing.choose import Choices, Option, advantage_of, mix_of
from assay_quantize.mixing.damage import SQUARED_ERROR, shrunken_damages, standard_error
from assay_quantize.mixing.parts import StoredPart, StoredParts

BITS = {"w4a16": 4.125, "w4a16_g64": 4.25, "w4a16_g32": 4.5, "nvfp4a16": 4.5, "fp8_block": 8.001}
LINE, SHARED = 0.2, 0.5
CASES = (
    # parts, texts, tail, spread of parts, bits, draws
    (12, 64, 1.5, 1.0, 6.0, 60), (60, 64, 1.0, 0.5, 4.5, 30), (60, 64, 1.5, 0.5, 4.5, 40), (60, 64, 1.5, 0.5, 6.0, 40),
    (200, 64, 1.5, 0.5, 4.5, 16), (200, 64, 1.5, 0.5, 6.0, 16), (60, 64, 2.0, 0.5, 6.0, 40), (200, 64, 2.0, 0.5, 5.0, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """said, true: the mix's damage over the control's. error: median relative standard error of a damage."""

    is_proposed: bool
    held: bool
    said: float
    true: float
    error: float


def once(seed: int, num_parts: int, texts: int, tail: float, spread: float, bits: float) -> Found:
    drawn = np.random.default_rng(seed)
    size_P = np.exp(drawn.normal(0, spread, num_parts)) * 1e-3 / SQUARED_ERROR["w4a16"]
    true_PS = np.array([[size * SQUARED_ERROR[one] * math.exp(drawn.normal(0, LINE)) for one in BITS] for size in size_P])
    of_part, of_scheme = drawn.normal(size=(texts, num_parts, 1)), drawn.normal(size=(texts, num_parts, len(BITS)))
    logs = (math.sqrt(SHARED) * of_part + math.sqrt(1 - SHARED) * of_scheme) * tail - tail**2 / 2
    seen_TPS = true_PS[None] * np.exp(logs)
    weights_P = drawn.integers(1, 9, num_parts) * 2**20
    parts, every, errors = [], [], []
    for number in range(num_parts):
        sizes = {one: int(weights_P[number] * each / 8) for one, each in {**BITS, "bf16": 16}.items()}
        role = ("attention", "routed_expert")[number % 2]
        parts.append(StoredPart(number // 2, role, int(weights_P[number]), sizes, dict.fromkeys(sizes, 0), {}))
        intervals = [skewed_mean(seen_TPS[:, number, at], np.arange(texts), least=0.0) for at in range(len(BITS))]
        known = {one: (interval.value, interval) for one, interval in zip(BITS, intervals, strict=True)}
        errors += [(standard_error(interval) or 0.0) / interval.value for interval in intervals]
        used = shrunken_damages(known)
        options = [Option(one, sizes[one], 0, *used[one], *known[one]) for one in BITS]
        every.append((Option("bf16", sizes["bf16"], 0, 0.0, 0.0, None, None), *options))
    choices = Choices(StoredParts("simulated", tuple(parts), 0, 0), tuple(every), {})
    problem = choices.problem(choices.bytes_at(bits))
    found = mix_of(choices, problem, slack=0.0)
    assert found is not None
    picks = found[0]
    uniform = [(at + 1,) * num_parts for at in range(len(BITS)) if problem.is_feasible((at + 1,) * num_parts)]
    rival = min(uniform, key=lambda one: (problem.damage(one), problem.used(one)))
    lead = advantage_of(choices, "uniform", rival, picks)
    assert lead.low_nats is not None
    mine, theirs = (sum(true_PS[part, at - 1] for part, at in enumerate(one) if at) for one in (picks, rival))
    return Found(
        is_proposed=picks != rival and lead.low_nats > 0,
        held=bool(theirs - mine >= lead.low_nats),
        said=problem.damage(picks) / problem.damage(rival),
        true=float(mine / theirs),
        error=float(np.median(errors)),
    )


def main() -> None:
    print(
        "| parts | texts | error | bits | proposed | truly worse | held | said | true |\n|---|---|---|---|---|---|---|---|---|"
    )
    for parts, texts, tail, spread, bits, draws in CASES:
        found = [once(seed, parts, texts, tail, spread, bits) for seed in range(draws)]
        taken = [one for one in found if one.is_proposed]
        worse = sum(one.true > 1 for one in taken)
        held, said, true = (np.mean([getattr(one, name) for one in taken]) for name in ("held", "said", "true"))
        error = np.mean([one.error for one in found])
        print(
            f"| {parts} | {texts} | {error:.2f} | {bits:g} | {len(taken)} of {draws} | {worse} | {held:.2f} | {said:.2f} | "
            f"{true:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
