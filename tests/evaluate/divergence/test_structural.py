"""Structural tokens apart: which they are, their KL and agreement, the chance to stop, and their gate; whole sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from divergence_measured import measured
from pydantic import ValidationError

from assay.recipes.gate import DivergenceGate
from assay.records.base import Interval
from assay.records.divergence import Estimate
from assay.records.measurement import Divergence
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.client.journal import TokenLogprobs
from assay_evaluate.divergence import ScoredDocument, summarize
from assay_evaluate.divergence.structural import StructuralIds, structural_ids
from assay_evaluate.verdicts.divergence import judge_divergence
from assay_reports.text import stop_sentence

END, THINK, TEXT, OTHER_END = 0, 1, 2, 3
IDS = {END: "end", OTHER_END: "end", THINK: "thinking"}
TINY = Path(__file__).resolve().parents[3] / "examples" / "tiny_glm" / "checkpoint"


def side(tokens: list[int], chances: list[dict[int, float]]) -> TokenLogprobs:
    """chances: at each position token -> probability, of the three likeliest; the rest is a tail."""
    ids = np.full((len(tokens), 3), -1, np.int32)
    logprobs = np.full((len(tokens), 3), np.nan, np.float32)
    for row, listed in enumerate(chances):
        for column, (token, p) in enumerate(sorted(listed.items(), key=lambda item: -item[1])[:3]):
            ids[row, column], logprobs[row, column] = token, np.log(p)
    chosen = np.log([listed.get(token, 0.001) for token, listed in zip(tokens, chances, strict=True)]).astype(np.float32)
    return TokenLogprobs(tokens_P=np.array(tokens, np.int32), ids_PK=ids, logprobs_PK=logprobs, chosen_P=chosen)


def text(number: int, stop: float, *, ended: bool = True) -> ScoredDocument:
    """<think>, five words, and an end. The candidate stops there with probability `stop`, the reference with 0.90 + 0.05."""
    tokens = [THINK] + 5 * [TEXT] + ([END] if ended else [TEXT])
    word = {TEXT: 0.9, 5: 0.05, END: 0.01}
    last = {END: 0.90, OTHER_END: 0.05, TEXT: 0.04} if ended else word
    reference = [{THINK: 0.8, TEXT: 0.1}, *[word] * 5, last]
    going_on = {TEXT: 0.99 - stop, END: stop - 0.02, OTHER_END: 0.02} if ended else word
    candidate = [{THINK: 0.6, TEXT: 0.3}, *[{TEXT: 0.9, 5: 0.06, END: 0.02}] * 5, going_on]
    return ScoredDocument(
        f"t{number}", "en", side(tokens, reference), side(tokens, candidate), texts="replies", domain="writing"
    )  # fmt: skip


def record(texts: list[ScoredDocument], ids: StructuralIds | str = IDS) -> Divergence:
    return summarize(texts, reference_checkpoint_sha256="r", top_k=3, position_buckets=(0,), structural_ids=ids)


def gate(**fields: Any) -> DivergenceGate:
    return DivergenceGate(kind="divergence", max=0.10, **fields)


def test_ids_of_the_small_glm() -> None:
    assert structural_ids(TINY) == {
        0: "end", 4: "end", 6: "end", 1: "other", 2: "other", 3: "other", 5: "other", 7: "thinking", 8: "thinking"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "kinds"),
    [
        (
            {
                "tokenizer.json": {"added_tokens": [{"id": 7, "content": "<tool_call>"}, {"id": 8, "content": "<arg_key>"}]},
                "generation_config.json": {"eos_token_id": 9},
            },
            {9: "end", 7: "tools", 8: "tools"},
        ),
        (
            {
                "tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "</think>"}, "9": {"content": "[EOS]"}}},
                "config.json": {"text_config": {"eos_token_id": [9]}},
            },
            {9: "end", 7: "thinking"},
        ),
    ],
)
def test_ids_of_other_folders(tmp_path: Path, files: dict[str, Any], kinds: dict[int, str]) -> None:
    for name, data in files.items():
        (tmp_path / name).write_text(json.dumps(data))
    assert structural_ids(tmp_path) == kinds


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "model: no added tokens in tokenizer.json or tokenizer_config.json"),
        ({"tokenizer.json": {"added_tokens": [{"id": 1, "content": "a"}]}}, "model: no eos_token_id in its config files"),
    ],
)
def test_what_is_not_known_is_said(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    (folder := tmp_path / "model").mkdir()
    for name, data in files.items():
        (folder / name).write_text(json.dumps(data))
    with pytest.raises(NotMeasured, match=words):
        structural_ids(folder)


def test_positions_and_the_chance_to_stop_by_hand() -> None:
    """A candidate that goes on where the reference stopped: hidden in the mean over all tokens, plain here."""
    stops = [0.5 + 0.01 * (i % 5) for i in range(24)]
    kept = record([text(i, stop) for i, stop in enumerate(stops)] + [text(99, 0.0, ended=False)])
    apart = kept.structural
    assert apart is not None and (apart.num_documents, apart.num_positions) == (25, 49)
    assert [(group.name, group.num_positions, group.num_documents) for group in apart.groups] == [
        ("end", 24, 24), ("thinking", 25, 25)
    ]  # fmt: skip
    thinking = 0.8 * np.log(0.8 / 0.6) + 0.1 * np.log(0.1 / 0.3) + 0.1 * np.log(0.1 / 0.1)
    assert apart.groups[1].kl_mean == pytest.approx(thinking, rel=1e-5)
    assert apart.groups[0].top1_agreement == pytest.approx(np.mean([stop - 0.02 >= 0.99 - stop for stop in stops]))
    assert apart.kl_mean.value > 3 * kept.kl_mean.value
    stop = apart.stop
    assert (stop.num_stops, stop.reference_at_stops) == (24, pytest.approx(0.95, rel=1e-6))
    assert stop.candidate_at_stops == pytest.approx(np.mean(stops), rel=1e-6)
    assert isinstance(stop.change_at_stops, Interval) and stop.change_at_stops.high < -0.4
    # of 121 ends and words: the first tokens list no end on either side
    words = 24 * 5 + 6
    assert stop.reference_elsewhere == pytest.approx(0.01 * words / (words + 25), rel=1e-6)
    assert stop.candidate_elsewhere == pytest.approx((0.02 * (words - 1) + 0.01) / (words + 25), rel=1e-6)


def test_an_end_outside_the_top_k_counts_where_it_stands() -> None:
    entry = text(0, 0.5)
    far = side([THINK] + 5 * [TEXT] + [END], [{THINK: 0.6, TEXT: 0.3}] * 6 + [{TEXT: 0.9, 5: 0.05, 6: 0.01}])
    texts = [ScoredDocument(**vars(entry) | {"item": f"t{i}", "candidate": far}) for i in range(2)]
    apart = record(texts).structural
    assert apart is not None and apart.stop.candidate_at_stops == pytest.approx(0.001, rel=1e-4)
    assert isinstance(apart.stop.change_at_stops, Estimate)


def test_gate_over_structural_tokens() -> None:
    kl = gate(metric="kl_mean", over="structural")
    kept = record([text(i, 0.5 + 0.01 * (i % 5)) for i in range(24)])
    verdict = judge_divergence(kl, measured(kept))
    observed = kept.structural and kept.structural.kl_mean
    assert isinstance(observed, Interval)
    assert (verdict.gate, verdict.status) == ("divergence kl_mean, structural tokens", "FAIL")
    assert verdict.detail == (
        f"KL, lower bound, on structural tokens: {observed.value:.4g} nats (interval of at least 95 %: {observed.low:.4g} to "
        f"{observed.high:.4g}); allowed at most 0.1 nats."
    )
    near = measured(record([text(i, 0.95) for i in range(24)]))
    verdict = judge_divergence(kl, near)
    assert (verdict.status, verdict.observed, verdict.has_say) == ("NOT MEASURED", None, True)
    assert verdict.detail.endswith(
        "nats; a lower bound can fail a candidate and not pass one: positions that are chosen by the token that stands there "
        "have no unbiased mean; `decides: fail` asks for no more."
    )
    assert not judge_divergence(kl.model_copy(update={"decides": "fail"}), near).has_say


def test_few_texts_or_none_are_not_judged() -> None:
    kl = gate(metric="kl_mean", over="structural")
    few = record([text(i, 0.5) for i in range(19)] + [text(99, 0.0, ended=False)], {END: "end"})
    value = few.structural and few.structural.kl_mean.value
    verdict = judge_divergence(kl, measured(few))
    detail = f"Not judged: KL, lower bound, on structural tokens: {value:.4g} nats over 19 texts; 20 are needed."
    assert (verdict.status, verdict.detail) == ("NOT MEASURED", detail)
    unknown = record([text(i, 0.5) for i in range(20)], "model: no eos_token_id in its config files")
    assert unknown.structural is None
    assert judge_divergence(kl, measured(unknown)).detail == "Structural tokens: model: no eos_token_id in its config files."
    none = record([text(i, 0.5) for i in range(20)], {77: "end"})
    assert judge_divergence(kl, measured(none)).detail == "Structural tokens: no structural token stands in the texts."


def test_gate_that_has_no_number() -> None:
    for fields in ({"metric": "kl_p99"}, {"metric": "kl_mean", "texts": "held_out"}):
        with pytest.raises(ValidationError, match="`over: structural` judges kl_mean or top1_agreement of sampled texts"):
            gate(over="structural", **fields)


def test_sentences_of_the_report() -> None:
    less = record([text(i, 0.5 + 0.01 * (i % 5)) for i in range(24)]).structural
    assert less is not None and isinstance(less.stop.change_at_stops, Interval)
    low, high = less.stop.change_at_stops.low, less.stop.change_at_stops.high
    assert stop_sentence(less.stop) == (
        "end-of-text probability where the reference stopped: 51.9 % vs 95.0 % (significantly lower: "
        f"-43.1 [{100 * low:+.1f}, {100 * high:+.1f}] points over 24 ends); elsewhere 0.017 vs 0.0083 a token."
    )
    small = Interval(value=0.0002, low=0.000002, high=0.001, n=108)
    assert "no significant difference" in stop_sentence(less.stop.model_copy(update={"change_at_stops": small}))
    few = record([text(i, 0.5) for i in range(3)]).structural
    assert few is not None and stop_sentence(few.stop) == (
        "end-of-text probability where the reference stopped: 50.0 % vs 95.0 % (too few texts to compare: "
        "-45.0 (3 texts) points over 3 ends); elsewhere 0.017 vs 0.0083 a token."
    )
    never = record([text(i, 0.0, ended=False) for i in range(3)]).structural
    assert never is not None and stop_sentence(never.stop) == "no reply of the reference ended by itself."
