"""Where native and emulated answers part, and what of it is a failure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from synthetic_run import make_fingerprint

from assay.records.preflight.gpu_check import Drafts, ExactIds, ForeseenKernel, FormatCheck, Greedy, Kernels, Logprobs
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.diagnosis.gpu_check.judgement import BOUNDS, Bounds, compare_drafts, compare_replies, compare_scores, judge
from assay_evaluate.diagnosis.gpu_check.questions import GreedyReplies


def row(token: int, logprob: float = -0.1, **others: float) -> TokenRow:
    return TokenRow(token, logprob, ((token, logprob), *((int(name[1:]), value) for name, value in others.items())))


def test_replies_are_compared_until_they_part() -> None:
    emulated = [[row(1), row(2), row(3)], [row(1), row(2, -0.7, t9=-0.8), row(3)], [row(5, -0.1, t6=-4.0), row(7)]]
    native = [[row(1), row(2), row(3)], [row(1), row(9), row(4)], [row(6), row(7)]]
    assert compare_replies(native, emulated, 0.5) == Greedy(
        num_replies=3, num_tokens=3 + 1 + 0, num_equal=1, num_ties=1, tie_bound=0.5,
        first="reply 2 parts at token 0, where emulation prefers its own by 3.90 nats",
    )  # fmt: skip


def test_a_token_that_emulation_does_not_list_is_no_tie() -> None:
    result = compare_replies([[row(8)]], [[row(1)]], 100.0)
    assert result.num_ties == 0 and result.first == "reply 0 parts at token 0, where emulation prefers its own by inf nats"


def scored(*chosen: float) -> TokenLogprobs:
    size = len(chosen)
    return TokenLogprobs(
        np.arange(size, dtype=np.int32), np.zeros((size, 1), np.int32), np.zeros((size, 1), np.float32),
        np.asarray(chosen, np.float32),
    )  # fmt: skip


def test_unlikely_tokens_count_for_the_mean_alone() -> None:
    result = compare_scores([scored(-1.25, -0.5), scored(-12.0)], [scored(-1.0, -0.5), scored(-10.0)], Bounds(0.5, 1.0))
    assert result == Logprobs(num_tokens=3, mean_difference=0.75, max_difference=0.25, mean_bound=0.5, max_bound=1.0)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_what_is_no_number_is_far_off(wrong: float) -> None:
    result = compare_scores([scored(wrong, -0.5)], [scored(-1.0, -0.5)], Bounds(0.5, 1.0))
    assert result.mean_difference > 1e30 and result.max_difference > 1e30
    assert judge(check(logprobs=result)).outcome == "FAIL"


def test_drafts() -> None:
    emulated = GreedyReplies((), 200, 180)
    assert compare_drafts(GreedyReplies((), 100, 85), emulated) == Drafts(
        num_drafted=100, accepted_share=0.85, emulated_share=0.9, least_share=0.81
    )
    silent = compare_drafts(GreedyReplies((), 0, 0), emulated)
    assert silent is not None and judge(check(drafts=silent)).outcome == "FAIL"
    assert compare_drafts(emulated, GreedyReplies((), 0, 0)) is None


# ------------------------------------------------------------------------------------------------ outcomes
def check(**changes: Any) -> FormatCheck:
    return FormatCheck(precision="w4a16", outcome="PASS", reasons=(), fingerprint=make_fingerprint(quantized=True)).model_copy(
        update=changes
    )


NEAR = Logprobs(num_tokens=9, mean_difference=0.001, max_difference=0.1, mean_bound=0.02, max_bound=0.5)
GREEDY = Greedy(num_replies=2, num_tokens=9, num_equal=1, num_ties=1, tie_bound=0.5, first=None)
KERNELS = Kernels(
    foreseen=(ForeseenKernel(what="experts", kernel="MARLIN (MarlinExperts)", line="Using MarlinExperts"),),
    unknown=None, chosen=("Using MarlinExperts",),
)  # fmt: skip
DRAFTS = Drafts(num_drafted=100, accepted_share=0.9, emulated_share=0.95, least_share=0.855)
IDS = ExactIds(num_values=9, max_difference=0.001, bound=0.02)
GOOD = {"logprobs": NEAR, "greedy": GREEDY, "kernels": KERNELS, "drafts": DRAFTS, "exact_ids": IDS}


def test_all_within_bounds_is_a_pass() -> None:
    result = judge(check(**GOOD))
    assert (result.outcome, result.reasons) == ("PASS", ())


@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        ("logprobs", {"mean_difference": 0.021}, "log-probabilities differ by 0.021 nats on average and 0.1 at most "
         "(bounds 0.02 and 0.5)"),
        ("logprobs", {"max_difference": 0.6}, "log-probabilities differ by 0.001 nats on average and 0.6 at most "
         "(bounds 0.02 and 0.5)"),
        ("greedy", {"first": "reply 0 parts"}, "greedy replies differ: reply 0 parts (a tie is up to 0.5)"),
        ("drafts", {"accepted_share": 0.0}, "0% of 100 drafted tokens are accepted, emulation accepts 95%: look for missing or "
         "damaged weights of the MTP head"),
        ("exact_ids", {"max_difference": 3.0}, "prompt_logprob_token_ids answers other values than prompt_logprobs: 3 nats "
         "apart (bound 0.02)"),
        ("kernels", {"foreseen": (ForeseenKernel(what="linear", kernel="MacheteLinearKernel", line=None),)},
         "linear: the replay foresaw MacheteLinearKernel, which no line of the log names"),
    ],
)  # fmt: skip
def test_each_part_can_fail(part: str, changes: dict[str, Any], says: str) -> None:
    result = judge(check(**{**GOOD, part: GOOD[part].model_copy(update=changes)}))
    assert (result.outcome, result.reasons) == ("FAIL", (says,))


def test_what_could_not_be_asked_is_no_pass() -> None:
    result = judge(check(**GOOD, reasons=("prompt_logprob_token_ids: HTTP 400",)))
    assert (result.outcome, result.reasons) == ("NOT MEASURED", ("prompt_logprob_token_ids: HTTP 400",))


def test_a_failure_hides_nothing_that_was_not_measured() -> None:
    result = judge(check(**{**GOOD, "logprobs": NEAR.model_copy(update={"max_difference": 9.0})}, reasons=("not asked",)))
    assert result.outcome == "FAIL" and len(result.reasons) == 2


def test_bounds_are_wider_where_activations_are_rounded() -> None:
    assert BOUNDS[16] < BOUNDS[8] < BOUNDS[4]
    assert all(BOUNDS[bits].largest < BOUNDS[fewer].largest for bits, fewer in ((16, 8), (8, 4)))
