"""Error and power of the effective length: how often a lost length is claimed, and how often a lossless candidate passes.

    python benchmarks/verdicts/effective_length.py > benchmarks/verdicts/effective_length.md

Paired items, independent; of each length the counts (right in the reference only, in the candidate only) are drawn, and the
sequence of tests is followed as `assay_evaluate.verdicts.long_context` does it.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from assay_evaluate.statistics.decisions import holm
from assay_evaluate.statistics.paired import exact_tail, score_statistic

NUM_RUNS = 100_000
NUM_LENGTHS = 5
ALPHA = 0.025
SEED = 11
DESIGNS = ((104, 0.10, 0.05), (104, 0.10, 0.10), (325, 0.05, 0.05), (650, 0.05, 0.10))
"""(items a length, margin, discordance without any loss)."""


def run(
    n: int, margin: float, discordance: float, losses: list[float], draw: np.random.Generator
) -> tuple[float, float, float]:
    """Shares of runs: a length is claimed that is lost (loss >= margin); PASS; FAIL."""
    within, p_beyond = [], []
    for loss in losses:
        shares = [(discordance + loss) / 2, (discordance - loss) / 2] if loss <= discordance else [loss, 0.0]
        counts = draw.multinomial(n, [*shares, 1 - sum(shares)], size=NUM_RUNS)[:, :2]
        unique, index = np.unique(counts, axis=0, return_inverse=True)
        index = index.reshape(-1)
        b, c = unique[:, 0], unique[:, 1]
        z = score_statistic(margin, b, c, n)
        p = stats.norm.sf(z)
        p[p < 0.05] = exact_tail(margin, b[p < 0.05], c[p < 0.05], n)  # above it neither tail decides
        within.append((stats.norm.cdf(z) < ALPHA)[index])
        p_beyond.append(p[index])
    claimed = np.logical_and.accumulate(np.array(within), axis=0)
    lost = [number for number, loss in enumerate(losses) if loss >= margin]
    false = claimed[lost].any(axis=0).mean() if lost else 0.0
    least = np.array(p_beyond).min(axis=0)
    fails = least * len(losses) < ALPHA  # Holm's smallest
    assert holm([0.001] * len(losses))[0] == 0.001 * len(losses)
    return float(false), float((claimed[-1] & ~fails).mean()), float(fails.mean())


def main() -> None:
    draw = np.random.default_rng(SEED)
    print("# Effective length: errors and power\n")
    print(
        f"{NUM_RUNS:,} runs, {NUM_LENGTHS} lengths, one-sided level {100 * ALPHA:g} % at each, independent items; seed {SEED}."
    )
    print("From the length named on the candidate loses the share named; before it, nothing. Discordance: without any loss.\n")
    print("| items a length | margin | discordance | loses | from length | claims a lost length | PASS | FAIL |")
    print("|---|---|---|---|---|---|---|---|")
    for n, margin, discordance in DESIGNS:
        cases = [(0.0, 1), (margin, 1), (margin, 3), (margin, 5), (2 * margin, 4)]
        for loss, first in cases:
            losses = [loss if number + 1 >= first else 0.0 for number in range(NUM_LENGTHS)]
            false, passed, failed = run(n, margin, discordance, losses, draw)
            what = f"{100 * loss:g} points" if loss else "nothing"
            print(
                f"| {n} | {100 * margin:g} points | {100 * discordance:g} % | {what} | {first if loss else '–'} | "
                f"{f'{100 * false:.2f} %' if loss else '–'} | {100 * passed:.1f} % | {100 * failed:.1f} % |"
            )


if __name__ == "__main__":
    main()
