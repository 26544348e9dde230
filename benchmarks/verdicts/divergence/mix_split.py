"""A mix of schemes measured on the texts that it was chosen on, and on others: how much too good it looks.

    python benchmarks/verdicts/divergence/mix_split.py [--draws 2000]

No model: parts whose damages differ, texts whose KL is heavy-tailed, a choice of 8 instead of 4 bits for a third of the parts
by the damage that they show. The committed result is mix_split.md beside this file, and the program prints it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PARTS, KEPT = 60, 20
"""KEPT: in 8 bits, where hardly anything is lost."""
LEFT = 0.02
"""Of a part's damage, in 8 bits."""
SPREADS = {"even": 0.5, "as of tiny-glm": 1.0, "heavy": 1.5}
"""Standard deviation of the logarithm of a text's KL; texts are heavy in all parts alike and in each by itself."""


def shown(rng: np.random.Generator, true_P: Floats, texts: int, sigma: float) -> Floats:
    """KL of each text with only this part in 4 bits [T, P]."""
    shared_T1, own_TP = (np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2) for shape in ((texts, 1), (texts, PARTS)))
    return np.asarray(true_P * np.sqrt(shared_T1) * own_TP / np.exp(-(sigma**2) / 8))


def lost(damage_P: Floats, kept: NDArray[np.intp]) -> float:
    """Of the mix, over that of all parts in 4 bits."""
    return 1 - (1 - LEFT) * float(damage_P[kept].sum()) / float(damage_P.sum())


def ratios(rng: np.random.Generator, texts: int, sigma: float) -> tuple[float, ...]:
    """What the mix loses over the uniform recipe. Chosen and measured on all texts, and its truth; chosen on one half and
    measured on the other, and its truth."""
    true_P = np.exp(0.5 * rng.standard_normal(PARTS))
    kl_TP = shown(rng, true_P, texts, sigma)
    chosen = np.argsort(-kl_TP.mean(axis=0))[:KEPT]
    first, second = kl_TP[::2].mean(axis=0), kl_TP[1::2].mean(axis=0)
    of_half = np.argsort(-first)[:KEPT]
    return lost(kl_TP.mean(axis=0), chosen), lost(true_P, chosen), lost(second, of_half), lost(true_P, of_half)


def lines(draws: int) -> Iterator[str]:
    yield "# A mix measured on the texts that it was chosen on"
    yield ""
    yield f"`python benchmarks/verdicts/divergence/mix_split.py --draws {draws}`"
    yield ""
    yield f"{PARTS} parts, {KEPT} of them in 8 bits, {draws:,} draws a row. Medians of the KL of the mix over that of the"
    yield "uniform recipe: as measured, in truth, and the first over the second: below 1 the mix looks better than it is."
    yield "*all*: chosen and measured on all texts (before). *split*: chosen on one half, measured on the other"
    yield "(`assay sensitivity`, from 40 texts on)."
    yield ""
    yield "| texts | KL of a text | all: measured | true | looks | split: measured | true | looks |"
    yield "|---|---|---|---|---|---|---|---|"
    for texts in (16, 64, 256):
        for name, sigma in SPREADS.items():
            rng = np.random.default_rng(texts + int(10 * sigma))
            found = np.array([ratios(rng, texts, sigma) for _ in range(draws)])
            shown_all, true_all, shown_half, true_half = np.median(found, axis=0)
            looks = (np.median(found[:, 0] / found[:, 1]), np.median(found[:, 2] / found[:, 3]))
            cells = [shown_all, true_all, looks[0], shown_half, true_half, looks[1]]
            yield f"| {texts} | {name} (sigma {sigma:g}) | {' | '.join(f'{value:.2f}' for value in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    for line in lines(parser.parse_args().draws):
        print(line, flush=True)


if __name__ == "__main__":
    main()
