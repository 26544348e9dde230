"""A choice from rows and verdicts: the published table of GLM-5.2, gates, objectives, cost, regret, what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError
from assay.records.base import Interval
from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay.records.verdict import GateReport, Status, Verdict, WholeClaim
from assay_evaluate.choice.choose import ChoiceRequest, choose
from assay_evaluate.choice.rows import on_hardware
from assay_evaluate.speed.imported import read_imported
from assay_evaluate.speed.stated import Stated

PUBLISHED = Path(__file__).parents[3] / "examples" / "glm-5.2-speed" / "published.yaml"


def published() -> list[SpeedRow]:
    return read_imported(PUBLISHED, None, Stated())


def verdict(candidate: str, status: Status, value: float, half: float, *, needed: int | None = 400) -> Verdict:
    return Verdict(
        gate="score gsm8k", candidate=candidate, status=status, title="GSM8K", limit=0.05, detail="d", items_needed=needed,
        observed=Interval(value=value, low=value - half, high=value + half, n=250),
    )  # fmt: skip


def gates(**statuses: Status) -> GateReport:
    losses = {"PASS": (0.0, 0.02), "FAIL": (0.2, 0.05), "UNDERPOWERED": (0.0, 0.08), "NOT MEASURED": (0.0, 0.02)}
    return GateReport(
        model="glm-5.2", reference="fp8", gate_recipe={"name": "full"}, overall=dict(statuses),
        verdicts=tuple(verdict(name, status, *losses[status]) for name, status in statuses.items()),
        reasons={name: f"why {name}" for name in statuses},
    )  # fmt: skip


def row(checkpoint: str, concurrency: int, *speeds: float, speculation: int | None = 0, **more: Any) -> SpeedRow:
    given = {"origin": "measured", "prompts": "chat", "hardware": "1xH100", "num_gpus": 1, "source": "assay speed"} | more
    tpot, ttft = given.pop("tpot", None), given.pop("ttft", None)
    parts = {
        name: Quantiles(mean=value, p50=value) for name, value in (("tpot_s", tpot), ("ttft_s", ttft)) if value is not None
    }  # fmt: skip
    repeats = tuple(SpeedRepeat(output_tokens_s=speed, **parts) for speed in speeds)
    return SpeedRow(checkpoint=checkpoint, concurrency=concurrency, speculation=speculation, repeats=repeats, **given)


# ------------------------------------------------------------------------------------------------ the published table
def test_the_published_table_of_glm52() -> None:
    """W4A16 with MTP at 1 and 8 streams, NVFP4 with MTP at 32; rows without MTP are of another table and stay out."""
    choice = choose(published(), None, ChoiceRequest(usd_per_gpu_hour=3.5), model="glm-5.2")
    assert choice.recommendation == (
        "quality was not measured (--quality assumed): w4a16 with MTP up to about 15 streams (2 to 28), then nvfp4 with MTP; "
        "at 1 and 8 streams nvfp4 with MTP may be as fast as w4a16 with MTP; at 32 streams fp8 with MTP may be as fast as "
        "nvfp4 with MTP"
    )
    assert [(pick.concurrency, pick.setup, pick.next_best) for pick in choice.picks] == [
        (1, "w4a16 with MTP", "nvfp4 with MTP"), (8, "w4a16 with MTP", "nvfp4 with MTP"),
        (32, "nvfp4 with MTP", "fp8 with MTP"),
    ]  # fmt: skip
    assert [pick.ratio for pick in choice.picks] == pytest.approx([125.7 / 116.3, 495.7 / 455.5, 925.2 / 921.4])
    assert [pick.chance_best for pick in choice.picks] == pytest.approx([0.79, 0.80, 0.47], abs=0.03)
    expected = [pick.expected_tokens_s for pick in choice.picks]
    assert all(
        entry is not None and entry.low < entry.value < cell
        for entry, cell in zip(expected, (125.7, 495.7, 925.2), strict=True)
    )
    assert [entry.n for entry in expected if entry is not None] == [3, 3, 3]
    assert choice.noise == (
        "no setup was measured in two starts of its server: that starts differ by 3 % is assumed, and repeats by 2 %"
    )
    (flip,) = choice.flips
    assert (flip.before, flip.after, flip.between) == ("w4a16 with MTP", "nvfp4 with MTP", (8, 32))
    assert flip.at == pytest.approx(14.6, abs=0.1) and flip.low == pytest.approx(2.3, abs=0.4) and (flip.high or 0) > 25
    assert choice.origin == "imported" and choice.hardware == "8xH200" and choice.num_draws == 2000
    cells = {(cell.setup, cell.concurrency): cell for cell in choice.cells}
    assert cells["nvfp4 with MTP", 32].usd_per_million_tokens == pytest.approx(3.5 / (3.6e-3 * 925.2 / 8))
    assert cells["w4a16 with MTP", 1].tpot_s == pytest.approx((512 / 125.7 - 0.215) / 511)
    assert cells["w4a16 with MTP", 1].tpot_derived
    assert {cell.setup for cell in choice.cells if cell.state == "missing"} == {"awq-int4"}
    assert choice.one_for_all is not None
    assert (choice.one_for_all.setup, choice.one_for_all.at) == ("nvfp4 with MTP", 8)
    assert choice.one_for_all.worst_tokens_s == pytest.approx(495.7 - 455.5)
    assert choice.one_for_all.relative == pytest.approx(1 - 455.5 / 495.7)


def test_the_claim_of_79_percent_is_refused() -> None:
    """It held W4A16 with MTP against NVFP4 and AWQ without: one line says so, and no ratio of these rows is anywhere."""
    choice = choose(published(), None, ChoiceRequest(), model="glm-5.2")
    assert choice.refused == (
        "no ratio of w4a16 (132 tokens/s, drafting not stated) to awq-int4 (78, nothing drafted) and nvfp4 (74, nothing "
        "drafted) at 1 stream: a ratio would be of drafting and checkpoint together",
    )
    ratios = [pick.ratio for pick in choice.picks if pick.ratio is not None]
    assert max(ratios) < 1.1
    assert choice.set_aside == (
        "6 rows of awq-int4, nvfp4: under other conditions (prompts not stated, engine not stated)",
        "6 rows of fp8, w4a16: nobody states whether they drafted",
    )


def test_an_objective_that_nothing_meets_at_32_streams() -> None:
    choice = choose(published(), None, ChoiceRequest(objective={"ttft_s": 2.0, "tpot_s": 0.025}))
    assert choice.recommendation.endswith(
        "w4a16 with MTP up to about 15 streams (2 to 17), then nvfp4 with MTP up to about 18 streams (16 to 20), then nothing "
        "that meets the objective; at 1 and 8 streams nvfp4 with MTP may be as fast as w4a16 with MTP"
    )
    assert [pick.setup for pick in choice.picks] == ["w4a16 with MTP", "w4a16 with MTP", None]
    assert choice.picks[2].why_none == "none meets the objective; nvfp4 with MTP, the fastest, misses it: TPOT 33.9 ms"


def test_a_change_to_and_fro_within_the_noise_is_none() -> None:
    """At 4 streams `b` is ahead by less than its repeats vary: the sentence does not send anybody there and back."""
    rows = [
        row("a", 1, 125.0, 130.0, 135.0), row("a", 4, 350.0, 389.0, 428.0), row("a", 8, 700.0, 715.0, 730.0),
        row("b", 1, 105.0, 113.0, 121.0), row("b", 4, 380.0, 400.0, 420.0), row("b", 8, 640.0, 650.0, 660.0),
    ]  # fmt: skip
    choice = choose(rows, None, ChoiceRequest())
    first, second = choice.flips
    assert [pick.setup for pick in choice.picks] == ["a", "b", "a"] and min(first.chance or 0, second.chance or 0) < 0.8
    assert choice.recommendation == (
        "quality was not measured (--quality assumed): a from 1 to 8 streams; at 4 streams b may be as fast as a"
    )
    assert choice.within_noise == (f"from about {first.at:.0f} to {second.at:.0f} streams b is ahead, within the noise",)
    surely = [
        row("b", 4, 599.0, 600.0, 601.0) if (entry.checkpoint, entry.concurrency) == ("b", 4) else entry for entry in rows
    ]
    there_and_back = choose(surely, None, ChoiceRequest())
    assert there_and_back.recommendation.count(", then ") == 2 and there_and_back.within_noise == ()


def test_who_is_surely_ahead_is_not_taken_for_noise() -> None:
    """At 1 stream the two are alike, so half of the draws lack the first flip; at 4 `b` is ahead by two thirds in all."""
    rows = [
        row("a", 1, 90.0, 100.0, 112.0), row("a", 4, 300.0, 301.0, 302.0), row("a", 8, 900.0, 901.0, 902.0),
        row("b", 1, 89.0, 99.0, 111.0), row("b", 4, 500.0, 501.0, 502.0), row("b", 8, 600.0, 601.0, 602.0),
    ]  # fmt: skip
    choice = choose(rows, None, ChoiceRequest())
    assert choice.picks[1].setup == "b" and choice.picks[1].chance_best == 1.0 and (choice.flips[0].chance or 0) < 0.8
    assert choice.within_noise == ()
    assert choice.recommendation.endswith(
        ": a up to about 1 stream, then b up to about 6 streams (5 to 7), then a; at 1 stream b may be as fast as a"
    )


def test_a_doubtful_pass_is_no_noise_of_speeds() -> None:
    """`b` is surely the faster one at 4 streams; that its PASS has one chance in four not to hold makes no speed uncertain."""
    rows = [
        row("a", 1, 120.0, 121.0, 122.0), row("a", 4, 300.0, 301.0, 302.0), row("a", 8, 900.0, 901.0, 902.0),
        row("b", 1, 90.0, 91.0, 92.0), row("b", 4, 500.0, 501.0, 502.0), row("b", 8, 600.0, 601.0, 602.0),
    ]  # fmt: skip
    doubtful = gates(a="PASS", b="PASS")
    verdicts = (doubtful.verdicts[0], verdict("b", "PASS", 0.05 - 0.6745 * 0.02, 1.96 * 0.02))
    choice = choose(rows, doubtful.model_copy(update={"verdicts": verdicts}), ChoiceRequest())
    assert [flip.chance for flip in choice.flips] == [pytest.approx(0.75, abs=0.03)] * 2
    assert choice.within_noise == ()
    assert choice.recommendation == "a up to about 2 streams (1 to 2), then b up to about 6 streams (5 to 6), then a"


def test_changes_within_the_noise_inside_each_other() -> None:
    """a, b, c, b, a: from 2 to 8 streams the three are alike, so the sentence goes nowhere; before it kept a, b, a."""
    alike = {2: 1000.0, 4: 1050.0, 8: 2000.0}
    ahead = {"a": {2: 0.0, 4: 0.0, 8: 0.0}, "b": {2: 10.0, 4: 6.0, 8: 10.0}, "c": {2: 0.0, 4: 10.0, 8: 0.0}}
    rows = [row(name, at, *(mean + ahead[name][at] + off for off in (-50.0, 0.0, 50.0)))
            for name in ahead for at, mean in alike.items()]  # fmt: skip
    rows += [row("a", 1, 1200.0, 1210.0, 1220.0), row("a", 16, 3000.0, 3010.0, 3020.0)]
    rows += [row(name, at, mean - 10.0, mean, mean + 10.0) for name in "bc" for at, mean in ((1, 910.0), (16, 2010.0))]
    choice = choose(rows, None, ChoiceRequest())
    assert [(flip.before, flip.after) for flip in choice.flips] == [("a", "b"), ("b", "c"), ("c", "b"), ("b", "a")]
    assert choice.recommendation == (
        "quality was not measured (--quality assumed): a from 1 to 16 streams; at 2, 4 and 8 streams b and c may be as "
        "fast as a"
    )
    assert choice.within_noise == (
        "from about 3 to 5 streams c is ahead, within the noise", "from about 2 to 8 streams b is ahead, within the noise",
    )  # fmt: skip


def test_a_lead_at_one_place_within_the_noise() -> None:
    rows = [
        row("a", 1, 125.0, 130.0, 135.0), row("a", 4, 350.0, 389.0, 428.0), row("a", 8, 900.0, 915.0, 930.0),
        row("b", 1, 105.0, 113.0, 121.0), row("b", 4, 350.0, 390.0, 428.0), row("b", 8, 640.0, 650.0, 660.0),
    ]  # fmt: skip
    assert choose(rows, None, ChoiceRequest()).within_noise == ("at about 4 streams b is ahead, within the noise",)


def test_who_is_ahead_where_nobody_measured_it_is_no_pick() -> None:
    """Between its rows at 1 and 32 streams `a` is ahead of what was measured at 8; no objective is missed by anything."""
    rows = [row("a", 1, 120.0), row("a", 32, 1200.0), row("b", 1, 90.0), row("b", 8, 200.0), row("b", 32, 900.0)]
    choice = choose(rows, None, ChoiceRequest())
    assert choice.recommendation.endswith(": a from 1 to 32 streams") and choice.picks[1].setup is None
    assert choice.picks[1].why_none == "a was not measured there, which is ahead by its speeds at 1 and 32 streams"
    alone = choose(rows, None, ChoiceRequest(concurrency=(7,)))
    assert alone.recommendation == (
        "quality was not measured (--quality assumed): nothing can be recommended: a was not measured there, which is ahead by "
        "its speeds at 1 and 32 streams"
    )


def test_where_rows_end_no_curves_cross() -> None:
    """Of `a` nothing is known beyond 8 streams, of anything beyond 32: no speeds cross there, nor is an objective missed."""
    rows = [row("a", 1, 120.0, 121.0), row("a", 8, 500.0, 501.0), row("b", 1, 90.0, 91.0), row("b", 8, 400.0, 401.0),
            row("b", 32, 900.0, 901.0)]  # fmt: skip
    choice = choose(rows, None, ChoiceRequest(concurrency=(1, 8, 32, 64)))
    assert choice.recommendation == (
        "quality was not measured (--quality assumed): a up to about 8 streams, beyond which nothing is known of a, then b up "
        "to about 32 streams, beyond which nothing is known of b, then nothing that may be chosen"
    )
    late = choose([*rows[:2], row("b", 4, 900.0, ttft=1.0), row("b", 8, 990.0, ttft=1.0)], None, ChoiceRequest())
    assert late.recommendation.endswith(": a up to about 4 streams, below which nothing is known of b, then b")
    limited = choose([row("b", 8, 400.0, ttft=1.0)], None, ChoiceRequest(concurrency=(4, 8), objective={"ttft_s": 2.0}))
    assert limited.recommendation.endswith(
        ": nothing known to meet the objective up to about 8 streams, below which nothing is known of b, then b"
    )


def test_a_row_without_what_is_limited_is_no_pick() -> None:
    rows = [row("a", 1, 120.0, ttft=0.1), row("a", 8, 500.0), row("a", 32, 1200.0, ttft=0.2)]
    choice = choose(rows, None, ChoiceRequest(objective={"ttft_s": 2.0}))
    assert [pick.setup for pick in choice.picks] == ["a", None, "a"]
    assert choice.picks[1].why_none == "TTFT not known of a there, which is ahead by its speeds at 1 and 32 streams"


def test_an_objective_that_is_just_met() -> None:
    """0.1 * 3 is more than 0.3 in its last digit: curve and row agree that it is 300 ms."""
    choice = choose([row("a", 1, 120.0, ttft=0.1 * 3)], None, ChoiceRequest(objective={"ttft_s": 0.3}))
    assert (choice.picks[0].setup, choice.cells[0].meets_objective, choice.cells[0].misses) == ("a", True, None)


def test_a_time_per_token_below_nothing_is_not_derived() -> None:
    """10 tokens at 100 tokens/s end after 0.1 s, and the first is said to come after 5 s: nothing follows from that."""
    rows = [row("a", 1, 100.0, ttft=5.0, output_tokens=10.0), row("b", 1, 90.0, ttft=0.01, output_tokens=10.0)]
    choice = choose(rows, None, ChoiceRequest(objective={"tpot_s": 0.025}))
    assert [(cell.tpot_s, cell.misses) for cell in choice.cells] == [
        (None, "TPOT not known"), (pytest.approx((10 / 90 - 0.01) / 9), None),
    ]  # fmt: skip
    assert choice.picks[0].setup == "b"


# ------------------------------------------------------------------------------------------------ quality
ROWS = [
    row("fp8", 1, 90.0, 91.0, 92.0), row("fp8", 32, 900.0, 905.0, 910.0),
    row("w4a16", 1, 120.0, 121.0, 122.0), row("w4a16", 32, 800.0, 805.0, 810.0),
    row("nvfp4", 1, 110.0, 111.0, 112.0), row("nvfp4", 32, 1000.0, 1005.0, 1010.0),
]  # fmt: skip


def test_underpowered_quality_is_no_quality() -> None:
    choice = choose(ROWS, gates(w4a16="PASS", nvfp4="UNDERPOWERED"), ChoiceRequest())
    assert [pick.setup for pick in choice.picks] == ["w4a16", "fp8"]
    assert choice.if_passed == (
        "nvfp4 is UNDERPOWERED, so its quality is unknown; to decide it: GSM8K: 400 paired items (250 were asked); if it "
        f"passed: w4a16 up to about {found_flip(ROWS):.0f} streams, then nvfp4",
    )
    assert not choice.quality_assumed and choice.recommendation.startswith("w4a16 up to about ")


def found_flip(rows: list[SpeedRow]) -> float:
    (flip,) = choose(rows, None, ChoiceRequest()).flips
    return flip.at


@pytest.mark.parametrize(
    ("status", "picks"), [("PASS", ["w4a16", "nvfp4"]), ("FAIL", ["w4a16", "fp8"]), ("NOT MEASURED", ["w4a16", "fp8"])]
)
def test_only_a_pass_may_be_chosen(status: Status, picks: list[str]) -> None:
    choice = choose(ROWS, gates(w4a16="PASS", nvfp4=status), ChoiceRequest())
    assert [pick.setup for pick in choice.picks] == picks
    word = {entry.checkpoint: (entry.word, entry.may_be_chosen) for entry in choice.quality}
    assert word == {"fp8": ("REFERENCE", True), "w4a16": ("PASS", True), "nvfp4": (status, status == "PASS")}
    fronts = {cell.setup for cell in choice.cells if cell.on_front}
    assert ("nvfp4" in fronts) == (status == "PASS")


def test_what_no_run_knows_is_not_chosen() -> None:
    choice = choose([*ROWS, row("int4", 1, 999.0), row("int4", 32, 9999.0)], gates(w4a16="PASS", nvfp4="PASS"), ChoiceRequest())
    assert "int4" not in {pick.setup for pick in choice.picks}
    (quality,) = (entry for entry in choice.quality if entry.checkpoint == "int4")
    assert (quality.word, quality.detail) == ("NOT MEASURED", "no candidate of this run (w4a16, nvfp4)")


def test_nothing_may_be_chosen() -> None:
    rows = [entry for entry in ROWS if entry.checkpoint != "fp8"]
    choice = choose(rows, gates(w4a16="FAIL", nvfp4="FAIL"), ChoiceRequest())
    assert choice.recommendation == "nothing can be recommended: no checkpoint that has rows may be chosen: see quality"
    assert [pick.setup for pick in choice.picks] == [None, None] and choice.flips == () and choice.one_for_all is None


def test_items_that_would_decide() -> None:
    """At the loss seen where that is known; more items than were asked; else nothing helps."""
    base = gates(w4a16="UNDERPOWERED")
    for at_loss, needed, text in (
        (1819, 400, "GSM8K: 1,819 paired items (250 were asked)"),
        (None, 400, "GSM8K: 400 paired items (250 were asked)"),
        (None, 114, "GSM8K: no number of items would decide if the observed loss is the true one (250 were asked)"),
    ):
        entry = base.verdicts[0].model_copy(update={"items_needed_at_loss": at_loss, "items_needed": needed})
        choice = choose(ROWS, base.model_copy(update={"verdicts": (entry,)}), ChoiceRequest())
        (quality,) = (each for each in choice.quality if each.checkpoint == "w4a16")
        assert quality.to_run == (text,)


# ------------------------------------------------------------------------------------------------ unlike rows
def test_speculation_is_part_of_the_choice_and_of_no_ratio() -> None:
    """MTP on wins at 1, off at 32: best against best, and without a ratio between them."""
    rows = [
        row("w4a16", 1, 80.0, 81.0), row("w4a16", 32, 950.0, 951.0),
        row("w4a16", 1, 125.0, 126.0, speculation=5), row("w4a16", 32, 800.0, 801.0, speculation=5),
    ]  # fmt: skip
    choice = choose(rows, gates(w4a16="PASS"), ChoiceRequest())
    assert [pick.setup for pick in choice.picks] == ["w4a16 with MTP", "w4a16 without MTP"]
    assert [pick.ratio for pick in choice.picks] == [None, None]
    assert choice.picks[0].no_ratio == "w4a16 drafted 5 tokens a step, w4a16 nothing"
    assert choice.one_for_all is not None and choice.one_for_all.relative is None


def test_emulated_rows_are_missing_and_predictions_fill_no_pick() -> None:
    rows = [
        row("fp8", 1, 90.0, 91.0), row("w4a16", 1, 500.0, emulated=True),
        row("w4a16", 1, 200.0, origin="predicted", source="assay roofline", prompts="decoding at 8,192 tokens"),
    ]  # fmt: skip
    choice = choose(rows, gates(w4a16="PASS"), ChoiceRequest())
    assert [(cell.setup, cell.state, cell.why, cell.output_tokens_s) for cell in choice.cells] == [
        ("fp8", "measured", None, pytest.approx((90.0 * 91.0) ** 0.5)),
        ("w4a16", "predicted", "emulated here, which says nothing about speed", pytest.approx(200.0)),
    ]  # fmt: skip
    assert choice.picks[0].setup == "fp8" and choice.set_aside == ("1 row of w4a16: emulated, which says nothing about speed",)


def test_predictions_alone_are_said_to_be_predictions() -> None:
    rows = [row(name, at, speed, origin="predicted") for name, at, speed in
            (("w4a16", 1, 200.0), ("w4a16", 32, 2000.0), ("fp8", 1, 150.0), ("fp8", 32, 1800.0))]  # fmt: skip
    choice = choose(rows, gates(w4a16="PASS"), ChoiceRequest())
    assert choice.recommendation == "predicted, not measured: w4a16 from 1 to 32 streams"
    assert choice.picks[0].chance_best is not None and 0.5 < choice.picks[0].chance_best < 0.9


def test_measured_before_imported_and_other_hardware_stays_out() -> None:
    rows = [*ROWS, row("nvfp4", 1, 9999.0, origin="imported"), row("nvfp4", 1, 9999.0, hardware="8xB200", num_gpus=8)]
    guess = row("nvfp4", 1, 9999.0, origin="predicted", hardware="8xH200", num_gpus=8)
    assert on_hardware([*ROWS, guess], None) == ROWS
    here = on_hardware(rows, "1XH100")
    choice = choose(here, None, ChoiceRequest(concurrency=(1,)))
    assert choice.picks[0].setup == "w4a16" and choice.origin == "measured"
    with pytest.raises(AssayError, match=r"^there are speeds on 1xH100, 8xB200: say which with --hardware$"):
        on_hardware(rows, None)
    with pytest.raises(AssayError, match=r"^--hardware 8xB300: did you mean 8xB200\? there are speeds on 1xH100, 8xB200$"):
        on_hardware(rows, "8xB300")
    with pytest.raises(AssayError, match=r"^--prompts cat: did you mean chat\? there are speeds for chat$"):
        choose(here, None, ChoiceRequest(prompts="cat"))
    with pytest.raises(AssayError, match=r"^no speeds to choose by: 1 row of a: nobody states whether they drafted; measure"):
        choose([row("a", 1, 1.0, speculation=None)], None, ChoiceRequest())


def test_noise_of_repeats_and_quality_is_in_flips() -> None:
    """Leads of a quarter, repeats within 1 %: each pick holds in nearly all draws; a doubtful PASS takes its share of them."""
    apart = {"fp8": (60.0, 600.0), "w4a16": (130.0, 700.0), "nvfp4": (100.0, 1000.0)}
    far = [
        row(name, at, speed, 1.01 * speed) for name, speeds in apart.items() for at, speed in zip((1, 32), speeds, strict=True)
    ]
    choice = choose(far, gates(w4a16="PASS", nvfp4="PASS"), ChoiceRequest())
    (flip,) = choice.flips
    assert flip.low is not None and flip.high is not None and flip.low < flip.at < flip.high < 4 * flip.low
    assert flip.chance is not None and flip.chance > 0.98
    assert choice.picks[1].chance_best is not None and choice.picks[1].chance_best > 0.99
    doubtful = gates(w4a16="PASS", nvfp4="PASS")
    verdicts = (doubtful.verdicts[0], verdict("nvfp4", "PASS", 0.03, 0.0196))  # a standard error of 1 point, 2 below the margin
    choice = choose(far, doubtful.model_copy(update={"verdicts": verdicts}), ChoiceRequest())
    (quality,) = (entry for entry in choice.quality if entry.checkpoint == "nvfp4")
    assert quality.chance_of_failing == pytest.approx(0.02275, abs=2e-4)
    assert choice.flips[0].chance == pytest.approx(0.977 * flip.chance, abs=0.01)


def test_the_front_has_what_nothing_beats() -> None:
    rows = [row("fp8", 1, 100.0, ttft=0.5), row("w4a16", 1, 120.0, ttft=0.6), row("nvfp4", 1, 110.0, ttft=0.7)]
    choice = choose(rows, gates(w4a16="PASS", nvfp4="PASS"), ChoiceRequest())
    assert {cell.setup for cell in choice.cells if cell.on_front} == {"fp8", "w4a16"}


# ------------------------------------------------------------------------------------------------ what a PASS leaves open
def test_the_whole_and_undecided_tasks_may_fail_as_well() -> None:
    """A PASS by the whole leaves a task undecided alone: it may lose two margins, and the whole has a limit of its own."""
    known = gates(w4a16="PASS")
    claim = WholeClaim(
        candidate="w4a16", status="PASS", mean_use=None, max_mean_use=0.5, max_task=2.0, p_value=None, tasks=(), left_out=(),
        detail="d",
    )  # fmt: skip
    one_error = 0.0196 / 1.96
    undecided = verdict("w4a16", "UNDERPOWERED", 0.07, 0.0196).model_copy(
        update={"has_say": False}
    )  # 3 errors below two margins
    whole = Verdict(
        gate="whole", candidate="w4a16", status="PASS", detail="d", limit=0.5,
        observed=Interval(value=0.3, low=0.3 - 0.196, high=0.3 + 0.196, n=3),  # 2 errors below its limit
    )  # fmt: skip
    choice = choose(ROWS, known.model_copy(update={"verdicts": (undecided, whole), "wholes": (claim,)}), ChoiceRequest())
    (quality,) = (entry for entry in choice.quality if entry.checkpoint == "w4a16")
    assert (0.10 - 0.07) / one_error == pytest.approx(3) and quality.chance_of_failing == pytest.approx(0.0241, abs=2e-4)


def test_one_name_in_two_schemes_is_two_setups() -> None:
    rows = [row("glm", 1, 100.0, scheme="fp8"), row("glm", 1, 160.0, scheme="nvfp4"), row("other", 1, 125.0)]
    choice = choose(rows, None, ChoiceRequest())
    assert [setup.name for setup in choice.setups] == ["glm (fp8)", "glm (nvfp4)", "other"] and choice.picks[
        0
    ].setup == "glm (nvfp4)"
    assert [setup.name for setup in choose([rows[0], row("glm", 8, 400.0)], None, ChoiceRequest()).setups] == ["glm"]


def test_settings_of_a_sweep_tell_setups_apart() -> None:
    rows = [row("glm", 1, 100.0, settings={"max_num_seqs": "128"}), row("glm", 1, 130.0, settings={"max_num_seqs": "256"})]
    assert [setup.name for setup in choose(rows, None, ChoiceRequest()).setups] == [
        "glm (max_num_seqs 128)",
        "glm (max_num_seqs 256)",
    ]
