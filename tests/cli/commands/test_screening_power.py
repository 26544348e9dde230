"""`assay power --screening`: tokens that would decide and half-widths, from what a screening saw."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from command_errors import one_error
from command_line import Run
from screenings import make_screened, make_screening, mean

from assay.records.base import Interval
from assay.records.divergence import Estimate
from assay.records.preflight.power import HalfWidth, RankingPower, ScreenedPower, ScreeningPower
from assay.records.screening import AppliedFloor, Surprise
from assay_pipeline.comparison.screen_power import screening_power, tokens_that_decide

OPEN = make_screened("open", mean(0.070, 0.064, 0.082), word="UNDERPOWERED")
BEYOND = make_screened("beyond", mean(0.100, 0.060, 0.160), word="UNDERPOWERED")
CLOSE = make_screened("close", mean(0.080, 0.070, 0.090), word="UNDERPOWERED")
DECIDED = make_screened("decided", mean(0.020, 0.018, 0.022))


@pytest.mark.parametrize(
    ("kl", "limit", "floor", "needed"),
    [
        (mean(0.070, 0.064, 0.082), 0.08, None, 14_400),  # the upper end has 12 to come to 10: (12 / 10)^2
        (mean(0.100, 0.060, 0.160), 0.08, None, 40_000),  # and the lower one 40 to 20
        (mean(0.080, 0.070, 0.090), 0.08, None, None),
        (mean(0.020, 0.018, 0.022), 0.08, None, 12),
        (mean(0.0, 0.0, 0.0), 0.08, None, 0),
        (mean(0.04, 0.0225, 0.0729), 0.0625, 0.0004, 30_422),  # up to 0.25^2 without the floor, limit at 0.23^2: (225 / 129)^2
        (mean(0.05, 0.04, 0.0729), 0.0625, 0.0016, None),  # roots of limit and KL are 0.04 apart at most
    ],
)
def test_tokens_that_decide(kl: Interval, limit: float, floor: float | None, needed: int | None) -> None:
    applied = None if floor is None else AppliedFloor(cause="arithmetic", kl=floor)
    decides = tokens_that_decide(kl, 10_000, limit, applied)
    assert (decides is None) == (needed is None)
    assert needed is None or decides == pytest.approx(needed, abs=1)


def test_an_undecided_candidate_needs_more_tokens_than_it_had() -> None:
    """Of a skewed interval the mean of both ends said 3,600 of 10,000, at which it was undecided."""
    needed = tokens_that_decide(mean(0.0700, 0.0690, 0.0801), 10_000, 0.08)
    assert needed == 10_202


def test_the_whole_record() -> None:
    kl = [mean(0.0625, 0.046875, 0.09375), mean(0.125, 0.0625, 0.1875)]
    record = make_screening(*(make_screened(label, of) for label, of in zip("ab", kl, strict=True)), ratio=mean(0.5, 0.25, 1.5))
    assert screening_power(record, limit=0.09375, tokens=[40_000]) == ScreeningPower(
        reference="/data/models/GLM-4.5-Air", num_texts=100, num_tokens=10_000, is_foreign=False,
        candidates=(
            ScreenedPower(
                label="a", kl=kl[0], limit=0.09375, tokens_needed=10_000,
                half_widths=(HalfWidth(num_tokens=40_000, nats=0.01171875, share=0.1875),),
            ),
            ScreenedPower(
                label="b", kl=kl[1], limit=0.09375, tokens_needed=40_000,
                half_widths=(HalfWidth(num_tokens=40_000, nats=0.03125, share=0.25),),
            ),
        ),
        rankings=(RankingPower(first="a", second="b", ratio=mean(0.5, 0.25, 1.5), tokens_needed=40_000),),
    )  # fmt: skip


def test_a_floor_stays_however_many_tokens_there_are() -> None:
    kl = mean(0.04, 0.0225, 0.0729)
    record = make_screening(make_screened("w4a16", kl, floor=AppliedFloor(cause="arithmetic", kl=0.0004)))
    (now,) = screening_power(record, tokens=[10_000]).candidates[0].half_widths
    (much,) = screening_power(record, tokens=[10**12]).candidates[0].half_widths
    assert now.nats == pytest.approx((0.0729 - 0.0225) / 2)
    assert much.nats == pytest.approx(((0.2 + 0.02) ** 2 - (0.2 - 0.02) ** 2) / 2, rel=1e-3)


def test_what_is_printed(run: Run) -> None:
    few = make_screened("few", Estimate(value=0.03, n=12), word="UNDERPOWERED")
    record = make_screening(OPEN, CLOSE, DECIDED, few, ratio=mean(0.875, 0.8, 0.95))
    record.save(Path("out/screening.json"))
    code, out, err = run("power", "--screening", "out")
    assert (code, err) == (0, "")
    assert [re.split(r" {2,}", line.rstrip()) for line in out.splitlines()] == [
        ["screened against /data/models/GLM-4.5-Air: 100 texts, 10,000 tokens"],
        ["candidate", "KL, nats", "limit", "decides at", "± at 10,000", "± at 20,000", "± at 40,000", "± at 100,000"],
        [
            "open", "0.0700 (0.0640 to 0.0820)", "0.08", "14,401 tokens",
            "0.0090 (12.9 %)", "0.0064 (9.1 %)", "0.0045 (6.4 %)", "0.0028 (4.1 %)",
        ],
        [
            "close", "0.0800 (0.0700 to 0.0900)", "0.08", "no number of tokens",
            "0.0100 (12.5 %)", "0.0071 (8.8 %)", "0.0050 (6.2 %)", "0.0032 (4.0 %)",
        ],
        [
            "decided", "0.0200 (0.0180 to 0.0220)", "0.08", "decided",
            "0.0020 (10.0 %)", "0.0014 (7.1 %)", "0.00100 (5.0 %)", "0.00063 (3.2 %)",
        ],
        ["few", "0.0300", "0.08", "not known", "no interval", "no interval", "no interval", "no interval"],
        ["open against close: 0.88 (0.80 to 0.95) times its KL; told apart"],
        [
            "About, of more texts like these: half-widths fall with the root of their number, and a rare text that loses much "
            "changes them. What decides does so if the KL seen is the true one."
        ],
    ]  # fmt: skip
    assert ScreeningPower.model_validate_json(run("power", "--screening", "out", "--json")[1]) == screening_power(record)
    _, out, _ = run("power", "--screening", "out/screening.json", "--kl-limit", "0.02", "--tokens", "20000", "--json")
    power = ScreeningPower.model_validate_json(out)
    assert [(one.limit, one.tokens_needed, len(one.half_widths)) for one in power.candidates] == [
        (0.02, 10_000, 1), (0.02, 10_000, 1), (0.02, None, 1), (0.02, None, 0),
    ]  # fmt: skip


def test_foreign_texts_fail_nobody(run: Run) -> None:
    make_screening(BEYOND, surprise=Surprise(nll=4.0, entropy=1.0)).save(Path("out/screening.json"))
    out = run("power", "--screening", "out")[1]
    assert "The texts are foreign to the reference: no number of such texts fails a candidate." in out.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "power: name a suite, or with --screening what `assay screen` wrote"),
        (("quick", "--screening", "out"), "SUITE: does not go with --screening; leave one of them out"),
        (("--screening", "out", "--reply-noise", "0"), "--reply-noise: does not go with --screening; leave one of them out"),
        (("quick", "--kl-limit", "0.1"), "--kl-limit: does not go with suite quick; leave one of them out"),
        (("--screening", "out", "--kl-limit", "nan"), "--kl-limit nan: is no number; give a finite one"),
        (("--screening", "out", "--kl-limit", "0"), "--kl-limit 0: must be a number of nats above 0"),
        (
            ("--screening", "out", "--tokens", "5000"),
            "--tokens 5000: 10000 were screened, and of fewer nothing is foretold; name 10000 or more",
        ),
        (("--screening", "few"), "--screening: 100 texts have no interval and tell nothing of more; screen 20 texts or more"),
        (("--screening", "no"), "no: no such file (a screening record was expected)"),
    ],
)
def test_what_is_refused(run: Run, words: tuple[str, ...], message: str) -> None:
    make_screening(OPEN).save(Path("out/screening.json"))
    make_screening(make_screened("few", Estimate(value=0.03, n=12))).save(Path("few/screening.json"))
    assert one_error(run("power", *words)) == message


def test_the_root_is_what_halves_of_a_panel_have() -> None:
    """Of independent texts: an interval over four times as many is half as wide."""
    (now, four) = screening_power(make_screening(OPEN), tokens=[10_000, 40_000]).candidates[0].half_widths
    assert math.isclose(now.nats, 2 * four.nats)
