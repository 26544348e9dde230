"""How often the interval of the gate on verbosity covers the true increase, and how often it decides wrongly: by simulation.

    python benchmarks/verdicts/verbosity_coverage.py            # prints the table of verbosity_coverage.md
    python benchmarks/verdicts/verbosity_coverage.py --draws 300

Lengths are log-normal: an item's own length varies by `between`, a reply's around it by `within` (standard deviations of the
log), equally on both sides; the candidate's are 5 % longer, the limit of the gate. Seeded: the same draws give the same table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from assay_evaluate.verdicts.replies.verbosity import Lengths, length_ratio

LIMIT = 0.05
DESIGNS = (
    (30, 1, 0.5, 0.3), (30, 1, 1.0, 0.5), (100, 1, 0.5, 0.3), (100, 1, 1.0, 0.5), (100, 4, 1.0, 0.5), (400, 1, 1.0, 0.5),
    (400, 1, 1.0, 0.3), (2000, 1, 1.0, 0.5),
)  # fmt: skip
"""Items, samples of each, between, within."""


def draw(items: int, samples: int, between: float, within: float, rng: np.random.Generator) -> list[Lengths]:
    own = np.repeat(rng.normal(6, between, items), samples)
    ours = np.exp(own + rng.normal(0, within, len(own)))
    theirs = np.exp(own + rng.normal(0, within, len(own))) * (1 + LIMIT)
    return [
        Lengths(str(at // samples), max(1, round(a)), max(1, round(b)), None)
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]


def rows(num_draws: int) -> Iterator[str]:
    for design in DESIGNS:
        rng, found = np.random.default_rng([1, *map(int, design[:2])]), []
        for _ in range(num_draws):
            seen = length_ratio(draw(*design, rng), LIMIT)
            at = seen.increase
            found.append((at.low <= LIMIT <= at.high, seen.p_fail < 0.025, at.high < LIMIT, (at.high - at.low) / 2))
        covers, fails, passes, half = np.array(found, dtype=np.float64).mean(axis=0)
        items, samples, between, within = design
        shares = " | ".join(f"{100 * share:.1f} %" for share in (covers, fails, passes, half))
        yield f"| {items} x {samples} | {between} | {within} | {shares} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    num_draws = parser.parse_args().draws
    print(f"{num_draws:,} draws each; nominal 95 %, 2.5 %, 2.5 %.\n")
    print("| items x samples | between | within | covers | FAIL at the limit | PASS at the limit | half-width |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows(num_draws)))
