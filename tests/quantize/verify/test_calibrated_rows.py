"""Rows that GPTQ rounded, of odd sources and odd texts: no damage; and damages of each (`make calibrated-rows` has more)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "trust"))

from calibrated_rows import DAMAGES, INPUTS, WEIGHTS, Held, damaged, rounded

from assay_quantize.verify.calibrated.rows import measure

pytestmark = pytest.mark.slow

ODD = (
    ("normal", "8 tokens", "w4a16"), ("normal", "one token", "w4a16_g32"), ("normal", "half of the channels zero", "w4a16"),
    ("heavy tails", "channels 100 times as large", "w4a16_g32"), ("equal rows", "correlated", "w4a16"),
    ("a group of each tenth row 50 times larger", "channels 100 times as large", "w4a16"),
    ("1 % of columns 30 times larger", "independent", "w4a16_channel"), ("sixteen rows", "correlated", "w4a16_channel"),
    ("95 % zeros", "channels 100 times as large", "w4a16_g32"), ("nine rows of ten are zeros", "correlated", "w4a16"),
)  # fmt: skip
SEEN = sorted(DAMAGES.keys() - {"0.2 % of codes one off", "one code one off"})


def drawn(weight: str, inputs: str, scheme: str) -> Held:
    generator = torch.Generator().manual_seed(7)
    w_OI = WEIGHTS[weight](generator)
    return rounded(w_OI, INPUTS[inputs](w_OI.shape[1], generator), scheme)


@pytest.mark.parametrize(("weight", "inputs", "scheme"), ODD)
def test_what_gptq_makes_of_odd_weights_is_no_damage(weight: str, inputs: str, scheme: str) -> None:
    found = measure(drawn(weight, inputs, scheme))
    assert found.problems == [] and found.best_column == 0


def test_every_damage_of_ordinary_weights_is_found_and_named() -> None:
    held, rng = drawn("normal", "correlated", "w4a16"), np.random.default_rng(0)
    assert measure(held).problems == []
    found = {name: measure(damaged(held, name, rng)).problems for name in SEEN}
    assert [name for name in SEEN if not found[name]] == []
    checks = {name: {check for check, _ in found[name]} for name in SEEN}
    assert "rows" in checks["a row negated"] and "columns" in checks["two columns exchanged"]
    assert found["2 % of codes one off"][0][1].startswith("no column is rounded to the nearest, as the first one of GPTQ is: ")


def test_one_code_next_to_its_own_is_what_another_text_gives() -> None:
    """Beyond what the source shows: the digest of the layer shows it."""
    held = drawn("normal", "correlated", "w4a16")
    assert measure(damaged(held, "one code one off", np.random.default_rng(0))).problems == []
