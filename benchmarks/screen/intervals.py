"""How often the interval of a screening's KL holds the truth, and how often it ranks two candidates that lose the same.

    python benchmarks/screen/intervals.py screened/values.npz [--draws 2000] [--seed 1]

The texts are real: sums of KL and numbers of tokens of every text of a screening (`real_values.py` writes them). They stand for
all texts there are: panels are drawn from them with replacement, and the truth is their ratio of sums. Two candidates that lose
the same are made of two real ones by exchanging, text by text, which is which. Stopping: a screening that looks at some of the
texts first, as `screen_looks.py` does, where the limit is a multiple of the truth.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt

from assay_evaluate.statistics.skewed import skewed_mean, skewed_ratio
from assay_pipeline.comparison.screen_figures import with_higher_low
from assay_pipeline.comparison.screen_looks import ERROR, PRECISE, looks_of

PANELS = (20, 40, 100, 200)
LIMITS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the truth."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("values", type=Path)
    arguments.add_argument("--draws", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    with np.load(options.values) as arrays:
        tokens_T = arrays["tokens"]
        sums = {name: arrays[name] for name in arrays.files if name != "tokens"}
    rng = np.random.default_rng(options.seed)
    print("# Intervals and rankings of a screening, simulated from real texts\n")
    print(f"{len(tokens_T):,} texts, {int(tokens_T.sum()):,} tokens; {options.draws:,} panels of each size.\n")
    print("| candidate | texts | interval holds the truth | lies above it | below it | half-width of the KL |")
    print("|---|---|---|---|---|---|")
    for name, sums_T in sums.items():
        truth = sums_T.sum() / tokens_T.sum()
        for size in PANELS:
            above = below = 0
            widths = []
            for _ in range(options.draws):
                drawn = rng.integers(0, len(tokens_T), size)
                texts = np.repeat(np.arange(size), tokens_T[drawn])
                values = np.repeat(sums_T[drawn] / tokens_T[drawn], tokens_T[drawn])
                interval = with_higher_low(skewed_mean(values, texts, least=0.0), sums_T[drawn], tokens_T[drawn])
                above += interval.low > truth
                below += interval.high < truth
                widths.append((interval.high - interval.low) / 2 / interval.value)
            held = 1 - (above + below) / options.draws
            print(
                f"| {name} | {size} | {held:.1%} | {above / options.draws:.1%} | {below / options.draws:.1%} "
                f"| {np.median(widths):.0%} |"
            )
    print("\n| two that lose the same, made of | texts | the one is ranked ahead | the other |")
    print("|---|---|---|---|")
    names = list(sums)
    for first, second in itertools.pairwise(names):
        pair_2T = np.stack([sums[first], sums[second]])
        for size in PANELS:
            ahead = [0, 0]
            for _ in range(options.draws):
                drawn = rng.integers(0, len(tokens_T), size)
                order = rng.integers(0, 2, size)
                a, b = pair_2T[order, drawn], pair_2T[1 - order, drawn]
                ratio = skewed_ratio(a, b)
                ahead[0] += ratio is not None and ratio.high < 1
                ahead[1] += ratio is not None and ratio.low > 1
            print(f"| {first}, {second} | {size} | {ahead[0] / options.draws:.1%} | {ahead[1] / options.draws:.1%} |")
    _print_stopping(tokens_T, sums, rng, options.draws)


def _print_stopping(
    tokens_T: npt.NDArray[np.int64], sums: dict[str, npt.NDArray[np.float64]], rng: np.random.Generator, draws: int
) -> None:
    print("\n| candidate | texts | limit, of the truth | wrongly decided | rightly decided | texts looked at, mean |")
    print("|---|---|---|---|---|---|")
    for name, sums_T in sums.items():
        truth = sums_T.sum() / tokens_T.sum()
        for size in PANELS[1:]:
            looks = looks_of(size)
            level = 1 - ERROR / len(looks)
            for multiple in LIMITS:
                limit, wrong, right, looked_at = multiple * truth, 0, 0, 0
                for _ in range(draws):
                    drawn = rng.integers(0, len(tokens_T), size)
                    numbers: list[int] = []
                    for new in looks:
                        numbers += new
                        texts = drawn[numbers]
                        values = np.repeat(sums_T[texts] / tokens_T[texts], tokens_T[texts])
                        clusters = np.repeat(np.arange(len(texts)), tokens_T[texts])
                        mean = skewed_mean(values, clusters, least=0.0, level=level)
                        interval = with_higher_low(mean, sums_T[texts], tokens_T[texts])
                        is_decided = interval.low > limit or interval.high <= limit
                        if is_decided or (interval.high - interval.low) / 2 <= PRECISE * interval.value:
                            break
                    looked_at += len(numbers)
                    is_right = (interval.low > limit and truth > limit) or (interval.high <= limit and truth <= limit)
                    right += is_decided and is_right and multiple != 1
                    wrong += is_decided and (not is_right or multiple == 1)
                print(
                    f"| {name} | {size} | {multiple:g} | {wrong / draws:.1%} | {right / draws:.1%} | {looked_at / draws:.0f} |"
                )


if __name__ == "__main__":
    main()
