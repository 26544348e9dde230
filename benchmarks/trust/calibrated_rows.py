"""`make calibrated-rows`: GPTQ weights that are right, of odd sources and odd texts, and damages of each, against the rules of
`assay verify` for rows; writes calibrated_rows.md.

    python benchmarks/trust/calibrated_rows.py --rounds 2 --write benchmarks/trust/calibrated_rows.md

Weights are drawn, and rounded by llm-compressor's own `quantize_weight` with Hessians of inputs that are drawn, in its order of
activations; verification sees source and codes. Exits 1 when a right weight is called damaged.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import ActivationOrdering
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq import gptq_quantize

from assay.records.plan import TensorPlan
from assay_quantize.calibration.methods import _factorized
from assay_quantize.formats.schemes import SCHEMES, compressed_tensors_scheme
from assay_quantize.kernels.rows import Array
from assay_quantize.verify.calibrated.rows import FAR_SPREADS, LEAST_GAIN, measure
from assay_quantize.verify.calibrated.steps import Measured, StepRows, Weight, step_rows

ROWS, COLUMNS = 256, 256
Draw = Callable[[torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Held(Weight):
    """A weight in memory. w_OI: BF16 bits."""

    w_OI: Array = dataclasses.field(default_factory=lambda: np.zeros((1, 8), np.uint16))
    codes_OI: Array = dataclasses.field(default_factory=lambda: np.zeros((1, 8), np.int64))
    scale_OG: Array = dataclasses.field(default_factory=lambda: np.zeros((1, 1), np.uint16))

    def rows(self, begin: int, end: int) -> tuple[StepRows, dict[str, Array], Array]:
        nibbles = (self.codes_OI[begin:end] + 8).astype(np.uint8)
        packed = np.ascontiguousarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(np.int32)
        parts = {"weight_packed": packed, "weight_scale": np.ascontiguousarray(self.scale_OG[begin:end])}
        return step_rows(parts, self.w_OI[begin:end], True, None), parts, self.w_OI[begin:end]


def bits(values: torch.Tensor) -> Array:
    made: Array = values.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return made


def rounded(weight: torch.Tensor, inputs: torch.Tensor, scheme: str, *, ordered: bool = True) -> Held:
    """By GPTQ. weight: [O, I], BF16 numbers. inputs: [tokens, I]."""
    row, args = SCHEMES[scheme], compressed_tensors_scheme(scheme).weights
    assert args is not None
    args = args.model_copy(update={"actorder": ActivationOrdering.STATIC if ordered else None})
    group = weight.shape[1] if row.group_size is None else row.group_size
    groups = weight.to(torch.bfloat16).reshape(len(weight), -1, group)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    hessian = (2 * inputs.T @ inputs / len(inputs)).float()[None]
    before, gptq_quantize.factorize_hessian = gptq_quantize.factorize_hessian, _factorized
    try:
        made, _, _ = gptq_quantize.quantize_weight(weight.float()[None].clone(), hessian, scale[None], zero[None], None, args)
    finally:
        gptq_quantize.factorize_hessian = before
    codes = (made[0].float() / scale.float().repeat_interleave(group, 1)).round().clamp(-8, 7)
    shape = tuple(weight.shape)
    tensor = TensorPlan("w.weight", "", "", "", "quantize", scheme, None, "BF16", shape, 2 * weight.numel(), "s", "s", ())
    return Held(
        tensor, None, None, "corrected", "minmax",  # type: ignore[arg-type]
        w_OI=bits(weight), codes_OI=codes.long().numpy(), scale_OG=bits(scale),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is drawn
def normal(g: torch.Generator, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=g) * 0.02).bfloat16().float()


def edited(edit: Callable[[torch.Tensor, torch.Generator], object]) -> Draw:
    def draw(g: torch.Generator) -> torch.Tensor:
        made = normal(g)
        edit(made, g)
        return made.bfloat16().float()

    return draw


def heavy_tails(g: torch.Generator) -> torch.Tensor:
    """Student's t of 3 degrees."""
    z, chi = torch.randn(ROWS, COLUMNS, generator=g), torch.randn(3, ROWS, COLUMNS, generator=g).square().mean(0).sqrt()
    return (z / chi * 0.02).bfloat16().float()


WEIGHTS: dict[str, Draw] = {
    "normal": normal,
    "heavy tails": heavy_tails,
    "a group of each tenth row 50 times larger": edited(lambda w, g: w[::10, :128].mul_(50)),
    "the first group of nine rows of ten 50 times larger": edited(lambda w, g: w[torch.arange(ROWS) % 10 != 0, :128].mul_(50)),
    "one weight of each group 100 times larger": edited(lambda w, g: w[:, ::128].mul_(100)),
    "1 % of columns 30 times larger": edited(lambda w, g: w[:, ::100].mul_(30)),
    "95 % zeros": edited(lambda w, g: w.mul_(torch.rand(w.shape, generator=g) < 0.05)),
    "nine rows of ten are zeros": edited(lambda w, g: w[torch.arange(ROWS) % 10 != 0].zero_()),
    "equal rows": edited(lambda w, g: w.copy_(w[:1].expand_as(w).clone())),
    "rows of sizes from 1 to 1e-6": edited(lambda w, g: w.mul_(torch.logspace(0, -6, ROWS)[:, None])),
    "all weights positive": edited(lambda w, g: w.abs_()),
    "sixteen rows": lambda g: normal(g, 16),
    "1,024 columns": lambda g: normal(g, ROWS, 1024),
}


def tokens(count: int, columns: int, g: torch.Generator, power: float = 0.0, outliers: float = 1.0) -> torch.Tensor:
    """Inputs with a spectrum that falls as k ** -power; every 64th channel `outliers` times as large."""
    mixed = torch.randn(count, columns, generator=g) * torch.arange(1, columns + 1).float() ** -power
    rotation = torch.linalg.qr(torch.randn(columns, columns, generator=g))[0]
    made = mixed @ rotation * columns**0.5
    made[:, ::64] *= outliers
    return made


INPUTS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "independent": lambda n, g: tokens(4096, n, g),
    "correlated": lambda n, g: tokens(4096, n, g, power=1.0),
    "8 tokens": lambda n, g: tokens(8, n, g, power=0.5),
    "one token": lambda n, g: tokens(1, n, g),
    "channels 100 times as large": lambda n, g: tokens(4096, n, g, power=0.5, outliers=100.0),
    "half of the channels zero": lambda n, g: tokens(512, n, g, power=0.5) * (torch.arange(n) % 2),
}
SCHEMES_TRIED = ("w4a16", "w4a16_g32", "w4a16_channel")


def right_ones(rounds: int) -> Iterator[tuple[str, str, str, Held]]:
    """weight, inputs, scheme, and the rounded weight."""
    for number in range(rounds):
        for of_weight, (what, draw) in enumerate(WEIGHTS.items()):
            for of_inputs, (which, inputs) in enumerate(INPUTS.items()):
                generator = torch.Generator().manual_seed(1_000_000 * number + 1000 * of_weight + of_inputs)
                scheme = SCHEMES_TRIED[(number + of_weight + of_inputs) % len(SCHEMES_TRIED)]
                weight = draw(generator)
                made = rounded(weight, inputs(weight.shape[1], generator), scheme, ordered=(number + of_weight) % 4 != 3)
                yield what, which, scheme, made


# ------------------------------------------------------------------------------------------------ damages
def turned(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    codes[rng.integers(len(codes))] *= -1


def zeroed(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    codes[rng.integers(len(codes))] = 0


def block_turned(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    begin = rng.integers(codes.shape[1] // 128) * 128
    codes[rng.integers(len(codes)), begin : begin + 128] *= -1


def columns_exchanged(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    first, second = rng.choice(codes.shape[1], 2, replace=False)
    codes[:, [first, second]] = codes[:, [second, first]]


def column_turned(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    codes[:, rng.integers(codes.shape[1])] *= -1


def off_in_a_row(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    codes[rng.integers(len(codes))] += rng.choice([-1, 1], codes.shape[1])


def some_off(share: float) -> Callable[[Array, Array, np.random.Generator], None]:
    def change(codes: Array, scale: Array, rng: np.random.Generator) -> None:
        codes += np.where(rng.random(codes.shape) < share, rng.choice([-1, 1], codes.shape), 0)

    return change


def other_ends(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    rows = np.arange(len(codes))
    columns = rng.integers(0, codes.shape[1], len(codes))
    codes[rows, columns] = -1 - codes[rows, columns]


def one_code(codes: Array, scale: Array, rng: np.random.Generator) -> None:
    codes[rng.integers(len(codes)), rng.integers(codes.shape[1])] += 1


DAMAGES = {
    "a row negated": turned,
    "a row to zero": zeroed,
    "128 columns of a row negated": block_turned,
    "two columns exchanged": columns_exchanged,
    "a column negated": column_turned,
    "every code of a row one off": off_in_a_row,
    "a code of each row to the other end": other_ends,
    "2 % of codes one off": some_off(0.02),
    "0.2 % of codes one off": some_off(0.002),
    "one code one off": one_code,
}


def damaged(held: Held, name: str, rng: np.random.Generator) -> Held:
    codes, scale = held.codes_OI.copy(), held.scale_OG.copy()
    DAMAGES[name](codes, scale, rng)
    return dataclasses.replace(held, codes_OI=codes.clip(-8, 7), scale_OG=scale)


# ------------------------------------------------------------------------------------------------ the table
@dataclass
class Worst:
    """Of right weights. far: spreads. below: standard deviations of a gain below 1, where it is below LEAST_GAIN. error: of a
    row, over what is allowed. first: codes of the best column that are not the nearest."""

    count: int = 0
    alarms: int = 0
    far: float = 0.0
    gain: float = 1.0
    below: float = 0.0
    error: float = 0.0
    first: int = 0

    def add(self, found: Measured) -> None:
        self.count += 1
        self.alarms += bool(found.problems)
        self.far = max(self.far, found.farthest[0])
        self.gain = min(self.gain, found.smallest_gain[0])
        if found.smallest_gain[0] < LEAST_GAIN:
            self.below = max(self.below, found.smallest_gain[1])
        self.error = max(self.error, found.largest_error)
        self.first = max(self.first, found.best_column)

    def row(self, name: str) -> str:
        return (
            f"| {name} | {self.count} | {self.alarms} | {self.far:.1f} | {self.gain:.2f} | {self.below:.1f} | {self.error:.2f} "
            f"| {self.first} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the tables go; without it, they are printed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    by_weight: dict[str, Worst] = {name: Worst() for name in WEIGHTS}
    by_inputs: dict[str, Worst] = {name: Worst() for name in INPUTS}
    total, found_of = Worst(), {name: [0, 0, 0, 0] for name in DAMAGES}
    rng = np.random.default_rng(0)
    for what, which, scheme, held in right_ones(arguments.rounds):
        result = measure(held)
        for worst in (total, by_weight[what], by_inputs[which]):
            worst.add(result)
        if result.problems:
            print(f"{what}, {which}, {scheme}: {result.problems}", flush=True)
        is_ordinary = what in ("normal", "heavy tails", "1,024 columns") and which in ("independent", "correlated")
        for name in DAMAGES if held.shape[0] > 16 and not result.problems else ():
            damage = damaged(held, name, rng)
            if np.array_equal(damage.codes_OI, held.codes_OI):
                continue
            is_found = bool(measure(damage).problems)
            counts = found_of[name]
            counts[0 if is_ordinary else 2] += is_found
            counts[1 if is_ordinary else 3] += 1
    lines = ["# Rows of calibrated weights: what is right, and what is found", ""]
    command = f"`{Path(__file__).name} --rounds {arguments.rounds}`"
    lines += [f"{total.count:,} weights, most of {ROWS} rows, rounded by GPTQ ({command}).", ""]
    limits = f"{FAR_SPREADS:g} spreads; a gain below {LEAST_GAIN:g} that is {FAR_SPREADS:g} deviations below"
    lines += [
        f"Limits: {limits}; a row's error of 1.00 of what is allowed; in the best column no code that is not the nearest.",
        "",
    ]
    header = "| weights | false alarms | farthest code, spreads | least gain | deviations, of gains below the limit |"
    header += " largest error | best column |"
    for first, table in (("source", by_weight), ("inputs", by_inputs), ("", {"all": total})):
        lines += [f"| {first} {header}", "|---" * 8 + "|", *(worst.row(name) for name, worst in table.items()), ""]
    lines += ["| damage of one weight | found, ordinary weights and inputs | found, odd ones |", "|---|---|---|"]
    lines += [f"| {name} | {a} of {b} | {c} of {d} |" for name, (a, b, c, d) in found_of.items()]
    text = "\n".join(lines) + "\n"
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    print(text)
    return int(total.alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
