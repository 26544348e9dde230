"""Probes against a scripted model behind real HTTP: healthy with and without vLLM's extras, and with one planted fault each."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from probe_stub import BEGIN, HAN, IDS, LATIN, OTHER, Call, Fault, StubServer, encode
from scipy.stats import fisher_exact
from statsmodels.stats.proportion import proportion_confint

from assay.errors import MeasureError
from assay.records.probe import ProbeReport, ProbeResult, ProbeSettings
from assay_evaluate.client.client import Address, Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.client.journal import Reply, TokenLogprobs
from assay_evaluate.client.logprobs import TokenRow, read_rows
from assay_evaluate.diagnosis.endpoint import find_endpoint
from assay_evaluate.diagnosis.probes import garble
from assay_evaluate.diagnosis.probes.determinism import compare_replies
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply
from assay_evaluate.diagnosis.probes.ranking import positions_of
from assay_evaluate.diagnosis.probes.run_probes import PROBES, run_probes, run_session
from assay_evaluate.diagnosis.probes.signs import longest_loop, signs_in
from assay_evaluate.statistics.rates import exceeds_p, lower_bound, sentence, trials_needed, trials_to_tell, upper_bound
from assay_evaluate.statistics.trends import find_step

pytestmark = pytest.mark.slow


Run = Callable[..., tuple[int, str, str]]
SMALL = ProbeSettings(num_requests=24, num_garble_requests=40, num_alone=4, long_tokens=200, concurrency=8, num_tools=(1, 8))
ALL = dict.fromkeys(PROBES, "ok")


def probed(settings: ProbeSettings = SMALL, names: list[str] | None = None, gather: int = 1, **options: object) -> ProbeReport:
    """gather: as in StubServer, but only once the endpoint is known."""
    with StubServer(**options) as server:  # type: ignore[arg-type]
        endpoint = find_endpoint(server.base_url)
        server.gather = gather
        return run_probes(endpoint, settings, names)


def statuses(report: ProbeReport) -> dict[str, str]:
    return {result.name: result.status for result in report.results}


# ------------------------------------------------------------------------------------------------ rates
def test_bounds_are_clopper_pearson() -> None:
    """Against statsmodels: a one-sided bound at 95 % is an end of the two-sided interval at 90 %."""
    for events, trials in ((0, 1), (0, 2000), (3, 2000), (7, 9), (50, 50)):
        low, high = proportion_confint(events, trials, alpha=0.1, method="beta")
        assert upper_bound(events, trials) == pytest.approx(high, rel=1e-9)
        assert lower_bound(events, trials) == pytest.approx(low, rel=1e-9, abs=1e-12)
    with pytest.raises(ValueError, match="3 events in 2 trials"):
        upper_bound(3, 2)


def test_sentence_says_what_none_bounds() -> None:
    assert trials_needed(4e-4) == 7488 and 1 - (1 - 4e-4) ** 7488 >= 0.95 > 1 - (1 - 4e-4) ** 7487
    assert sentence(0, 2000, "request") == (
        "0 of 2,000 requests at fault: below 0.15 % at 95 %; to see a fault of 4 in 10,000 requests takes 7,500"
    )
    assert sentence(0, 2000, "token") == "0 of 2,000 tokens at fault: below 0.15 % at 95 %"
    assert sentence(0, 7500, "request") == "0 of 7,500 requests at fault: below 0.04 % at 95 %"
    assert sentence(3, 2000, "token") == "3 of 2,000 tokens at fault: 0.15 %, between 0.041 % and 0.39 %"


def test_rates_of_two_sides() -> None:
    """Against scipy's own Fisher test; and the trials that tell have the power that they say, by drawing."""
    for table in ((1, 7500, 0, 7500), (6, 7500, 0, 7500), (60, 2000, 3, 2000), (3, 24, 1, 40), (0, 5, 3, 9)):
        events, trials, other, other_trials = table
        fisher = fisher_exact([[events, trials - events], [other, other_trials - other]], "greater").pvalue
        assert exceeds_p(*table) == pytest.approx(fisher, rel=1e-9)
    assert trials_to_tell(1 / 7500, 0.0, 0.025) == 60_000 and trials_to_tell(1 / 24, 0.0, 0.025) == 190
    assert trials_to_tell(0.1, 0.1, 0.025) is trials_to_tell(1e-7, 0.0, 0.025) is None
    needed = trials_to_tell(0.02, 0.005, 0.025)
    assert needed is not None
    draw = np.random.default_rng(4)
    pairs = zip(draw.binomial(needed, 0.02, 2000), draw.binomial(needed, 0.005, 2000), strict=True)
    reported = np.mean([exceeds_p(int(a), needed, int(b), needed) <= 0.025 for a, b in pairs])
    assert 0.78 < reported < 0.86
    with pytest.raises(ValueError, match="3 events in 2 trials"):
        exceeds_p(3, 2, 0, 2)


# ------------------------------------------------------------------------------------------------ a healthy server
@pytest.mark.slow
def test_a_healthy_server_alarms_nothing(tmp_path: Path) -> None:
    with StubServer() as server, StubServer(drafts=False) as undrafted:
        endpoint = find_endpoint(server.base_url)
        pair = find_endpoint(undrafted.base_url)
        report = run_probes(endpoint, SMALL, without_speculation=pair, ledger=tmp_path / "ledger.jsonl", label="here")
        assert server.hung_up > 0, "nobody was hung up on"
    assert statuses(report) == ALL
    assert (report.label, report.num_failed, report.errors) == ("here", 0, {})
    assert [result.events for result in report.results] == [0] * len(PROBES)
    found = {result.name: result for result in report.results}
    assert (found["garble"].details["num_of_the_scan"], found["garble"].details["num_aborted"]) == (40, 4)
    assert found["garble"].trials == found["text"].trials == found["text"].details["num_decoded"] + 32, "all but calls of tools"
    assert found["recompute"].details["mean_exp_delta"] == pytest.approx(1, abs=1e-6)
    assert found["consensus"].details["top1_agreement"] == 1
    assert found["routing"].details["mean_agreement"] == 1
    assert found["determinism"].trials == 4 * 4 + 2 * 4
    assert found["tools"].details["valid_calls"] == {"1 short": 1, "1 long": 1, "8 short": 1, "8 long": 1}
    assert found["speculation"].details["num_parted"] == 0
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert len(lines) == report.num_requests == found["nonfinite"].num_requests + 4, "all but those hung up on"
    report.save(tmp_path / "report.json")
    assert ProbeReport.load(tmp_path / "report.json") == report


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [True, False])
def test_a_plain_endpoint_is_probed_as_far_as_it_goes(logprobs: bool) -> None:
    """No ids, no prompt log-probabilities, no counters: what can run runs, the rest says what is missing."""
    report = probed(extras=False, logprobs=logprobs)
    assert {name for name, status in statuses(report).items() if status == "ok"} == (
        {"determinism", "garble", "text", "tools", "nonfinite"} | ({"argmax", "temperature"} if logprobs else set())
    )
    reasons = {result.name: result.reason for result in report.results if result.status == "not_run"}
    missing = (
        "no token ids and no prompt_logprobs" if logprobs else "no log-probabilities and no token ids and no prompt_logprobs"
    )
    assert reasons["recompute"] == reasons["consensus"] == f"the endpoint returns {missing}"
    assert "--enable-return-routed-experts" in str(reasons["routing"])
    assert reasons["acceptance"] == reasons["speculation"] == "the endpoint drafts nothing, or does not say so"
    assert not report.offer.is_vllm and report.checkpoint_sha256 is None and report.max_model_len is None


@pytest.mark.slow
def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    """But for cache salts, which must be new in every run."""
    bodies = []
    for number in range(2):
        with StubServer() as server:
            run_probes(find_endpoint(server.base_url), SMALL, ["argmax", "determinism"], ledger=tmp_path / f"{number}")
        lines = [json.loads(line) for line in (tmp_path / f"{number}").read_text().splitlines()]
        salts = {line["body"].pop("cache_salt") for line in lines if "cache_salt" in line["body"]}
        assert len(salts) == 1
        bodies.append(sorted((line["id"], json.dumps(line["body"])) for line in lines))
    assert bodies[0] == bodies[1]


# ------------------------------------------------------------------------------------------------ one fault each
def drop_best(call: Call, position: int, token: int, logits: np.ndarray) -> int:
    """The sampler overlooks the best token in one of 50 steps."""
    return int(np.argsort(-logits)[1]) if (call.number * 7 + position) % 50 == 13 and position < 15 else token


def drop_best_before_reporting(call: Call, position: int, logits: np.ndarray) -> np.ndarray:
    """An approximate top-k: the best token is gone from logits and report alike. Of the same prompts in every run."""
    if sum(call.prompt_ids) % 3 == 1 and position % 4 == 1 and position < 15:
        logits = logits.copy()
        logits[int(np.argmax(logits))] = -100
    return logits


def stale_slots(call: Call, position: int, logits: np.ndarray) -> np.ndarray:
    """Requests in slots from 5 on read another request's cache."""
    return np.where(logits > -20, np.roll(logits, 1), logits) if call.slot >= 5 and 2 < position < 15 else logits


def shifted(call: Call, position: int, logprobs: np.ndarray) -> np.ndarray:
    return logprobs - 0.2 if position >= 32 else logprobs


def rounded(call: Call, position: int, logits: np.ndarray) -> np.ndarray:
    """BF16: 8 bits of mantissa."""
    bits = np.ascontiguousarray(logits, np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)


def nan_once(call: Call, position: int, logits: np.ndarray) -> np.ndarray:
    return np.full_like(logits, math.nan) if call.number % 40 == 25 else logits


def foreign(call: Call, position: int, token: int, logits: np.ndarray) -> int:
    return OTHER if call.in_flight > 1 and call.number % 5 == 4 and position == 7 else token


def looping(call: Call, position: int, token: int, logits: np.ndarray) -> int:
    return IDS["abc"[position % 3]] if call.in_flight > 1 and call.number % 5 == 4 and position > 4 else token


def loaded(call: Call, position: int, logits: np.ndarray) -> np.ndarray:
    """Whoever shares the batch gets other numbers."""
    return np.where(logits > -20, -logits, logits) if call.in_flight > 3 and position == 3 else logits


FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "the best token is overlooked": (Fault(choose=drop_best), {"argmax", "determinism"}),
    "the best token is missing": (Fault(decode=drop_best_before_reporting), {"consensus", "recompute"}),
    "stale cache above a slot": (Fault(decode=stale_slots), {"consensus", "recompute"}),
    "shifted past a position": (Fault(report=shifted), {"recompute"}),
    "BF16 before ranking": (Fault(decode=rounded), {"consensus"}),
    "NaN": (Fault(decode=nan_once), {"nonfinite"}),
    "foreign letters under load": (Fault(choose=foreign), {"argmax", "garble"}),
    "loops under load": (Fault(choose=looping), {"argmax", "garble"}),
    "neighbours": (Fault(decode=loaded), {"consensus", "recompute", "determinism"}),
    "nothing accepted": (Fault(accepted=lambda call, drafts: 0), {"acceptance"}),
    "some accept little": (Fault(accepted=lambda c, n: 0 if sum(c.prompt_ids) % 3 == 1 else round(0.9 * n)), {"acceptance"}),
    "other experts": (Fault(experts=lambda call, experts: (experts + (call.slot > 3)) % 8), {"routing"}),
    "calls break with eight tools": (Fault(called=lambda call, num_tools: num_tools < 8), {"tools"}),
}


CROWDED = {"stale cache above a slot", "foreign letters under load", "loops under load", "neighbours", "other experts"}
FEW = {"some accept little": 125}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    """By the probes that are made for it, and not by two that cannot show it."""
    fault, expected = FAULTS[name]
    crowd = SMALL.concurrency if name in CROWDED else 1
    report = probed(SMALL, [*expected, "acceptance", "routing"], fault=fault, gather=crowd, least_tokens=FEW.get(name, 40))
    observed = {result.name for result in report.alarms}
    assert expected <= observed, [
        (r.name, r.sentence, r.reason, r.details) for r in report.results if r.name in expected - observed
    ]
    assert observed <= expected
    for result in report.alarms:
        assert result.reason and (result.events == 0 or result.first_event_at is not None or result.name == "determinism")


@pytest.mark.slow
def test_figures_of_a_stale_slot(tmp_path: Path) -> None:
    """The probe names the slot from which on the cache is stale. Which prompt is in which slot is known from a healthy run."""
    settings = SMALL.model_copy(update={"num_requests": 48})
    with StubServer() as server:
        run_probes(find_endpoint(server.base_url), settings, ["recompute"], ledger=tmp_path / "healthy")
    lines = [json.loads(line) for line in (tmp_path / "healthy").read_text().splitlines()]
    asked = [line for line in lines if line["id"].startswith(("greedy", "sampled"))]
    slots = {(*encode(line["body"]["messages"][-1]["content"]), BEGIN): line["slot"] for line in asked}
    assert len(slots) == len(asked) == 48
    first: dict[tuple[int, ...], int] = {}

    def stale(call: Call, position: int, logits: np.ndarray) -> np.ndarray:
        prompt = tuple(call.prompt_ids)
        if first.setdefault(prompt, call.number) < call.number:  # asked again, alone
            return logits
        return np.where(logits > -20, np.roll(logits, 1), logits) if slots.get(prompt, 0) >= 5 and 2 < position < 15 else logits

    [result] = probed(settings, ["recompute"], fault=Fault(decode=stale)).results
    step = result.details["step_slot"]
    assert isinstance(step, dict)
    assert (step["threshold"], step["is_structural"]) == (5.0, True)
    assert {w.slot for w in result.witnesses} == {5, 6, 7} and result.events == 48 * 3 // 8
    assert "nats from slot 5 on" in str(result.reason)


@pytest.mark.slow
def test_figures_of_a_shift() -> None:
    """The probe names the position, to a stretch of 16 tokens, and how much."""
    [result] = probed(SMALL, ["recompute"], fault=Fault(report=shifted)).results
    step = result.details["step_reply_position"]
    assert isinstance(step, dict) and step["is_structural"] is True
    assert step["threshold"] == 32 and step["above_nats"] == pytest.approx(0.2, abs=1e-5)


def test_a_model_habit_is_no_alarm() -> None:
    """Every fifth prompt makes the model itself write a foreign letter, alone or not; without ids it is asked again to know."""

    def habit(call: Call, position: int, token: int, logits: np.ndarray) -> int:
        return OTHER if sum(call.prompt_ids) % 5 == 0 and position == 3 else token

    [result] = probed(SMALL, ["garble"], fault=Fault(choose=habit), extras=False).results
    assert (result.status, result.events) == ("ok", 0)
    habits = result.details["habits"]
    assert isinstance(habits, dict) and set(habits) == {"surprise", "wrong_script"}
    assert result.details["num_habits"] == habits["wrong_script"]


# ------------------------------------------------------------------------------------------------ behind the server
def garbling(every: int, letters: str = "жш") -> Callable[[dict[str, Any], tuple[int, Any]], tuple[int, Any]]:
    """A gateway that writes other letters into the text of one reply of so many; ids and log-probabilities pass."""
    numbers = itertools.count()

    def gateway(body: dict[str, Any], answered: tuple[int, Any]) -> tuple[int, Any]:
        status, data = answered
        message = data["choices"][0].get("message") if status == 200 else None
        is_kept = message is not None and body["max_tokens"] > 1 and not body.get("stream")
        if is_kept and next(numbers) % every == every // 2:
            message["content"] = message["content"][:9] + letters + message["content"][11:]
        return status, data

    return gateway


def behind(
    gateway: Callable[[dict[str, Any], tuple[int, Any]], tuple[int, Any]], names: list[str], *, detokenizes: bool = True
) -> list[ProbeResult]:
    with StubServer(drafts=False) as server:
        server.detokenizes = detokenizes
        endpoint = find_endpoint(server.base_url)
        server.gateway = gateway
        return list(run_probes(endpoint, SMALL, names).results)


@pytest.mark.parametrize(("letters", "kind"), [("жш", "wrong_script"), ("\ufffd\ufffd", "replacement_character")])
def test_text_that_is_garbled_behind_its_ids_is_no_habit(letters: str, kind: str) -> None:
    """Prefill would have chosen the same ids, and says nothing about the text; alone it is not odd."""
    [result] = behind(garbling(10, letters), ["garble"], detokenizes=False)
    assert result.status == "alarm" and kind in str(result.reason)
    [healthy] = behind(lambda body, answered: answered, ["garble"], detokenizes=False)
    assert (healthy.status, healthy.events, healthy.undecided) == ("ok", 0, ())


@pytest.mark.parametrize(("is_always", "status"), [(True, "ok"), (False, "alarm")])
def test_text_in_another_script_is_a_habit_only_if_it_is_written_alone_too(
    is_always: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although prefill would have chosen the very ids."""

    def choose(call: Call, position: int, token: int, logits: np.ndarray) -> int:
        is_odd = position == 3 and sum(call.prompt_ids) % 5 == 0 and (is_always or call.in_flight > 1)
        return OTHER if is_odd else token

    monkeypatch.setattr(garble, "is_own", lambda scored, temperature: True)
    [result] = probed(SMALL, ["garble"], fault=Fault(choose=choose), gather=SMALL.concurrency).results
    assert result.status == status, result.reason
    assert bool(result.details["num_habits"]) is is_always


def late(every: int, kinds: set[str]) -> Callable[[dict[str, Any], tuple[int, Any]], tuple[int, Any]]:
    """A gateway that answers one request of so many with the reply to the one before. kinds: of requests (`id`s of a probe)."""
    numbers, before = itertools.count(), [None]

    def gateway(body: dict[str, Any], answered: tuple[int, Any]) -> tuple[int, Any]:
        is_score = "prompt_logprobs" in body
        if answered[0] != 200 or body["max_tokens"] == 1 != is_score or ("score" in kinds) != is_score or "tools" in body:
            return answered
        result, before[0] = (before[0] if next(numbers) % every == every - 1 else None), answered  # type: ignore[assignment]
        return result or answered

    return gateway


def test_a_reply_to_another_request_is_an_alarm_wherever_it_comes() -> None:
    results = {witnesse.name: witnesse for witnesse in behind(late(4, {"generated"}), ["argmax", "swapped"])}
    assert (results["swapped"].status, results["swapped"].events) == ("alarm", 3)
    assert results["swapped"].reason == "3 of 12 replies answer another request's prompt"
    assert {witnesse.what for witnesse in results["swapped"].witnesses} == {"its prompt's ids are those of another prompt"}
    results = {witnesse.name: witnesse for witnesse in behind(late(8, {"score"}), ["recompute", "swapped"])}
    assert results["swapped"].status == "alarm" and results["swapped"].events is not None and results["swapped"].events >= 3
    assert all("AnothersReply: " in witnesse.what for witnesse in results["swapped"].witnesses)


def test_a_drawn_token_outside_the_top_is_not_missing_there() -> None:
    """vLLM puts the token that was drawn among the top k, in the place of the last: what it displaced is not missing."""
    ids, logprobs = np.array([[7, 8, 9, 5]], np.int32), np.log(np.array([[0.5, 0.3, 0.1, 0.05]], np.float32))
    top = tuple((int(i), float(v)) for i, v in zip(ids[0], logprobs[0], strict=True))
    reply = Reply("answered", text="x")
    for rows, k in (
        (TokenRow(3, -9.0, (*top[:3], (3, -9.0))), 3),
        (TokenRow(7, top[0][1], top), 4),
        (TokenRow(5, top[3][1], top), 3),  # it was the last by itself; nobody can tell
    ):
        exchange = Exchange(Ask("sampled/0", "/v1/completions", {}), 0, 1, "answered", reply, (rows,))
        prefill = TokenLogprobs(np.array([rows.token], np.int32), ids, logprobs, np.array([rows.logprob], np.float32))
        [ranks] = positions_of(RescoredReply(exchange, prefill)).values()
        assert list(ranks.decode) == list(ranks.prefill) == [7, 8, 9, 5][:k]


def test_expected_acceptance_is_held() -> None:
    """The stub accepts 0.53 drafts a step: 5 % below what is expected is too little, 4 % is not."""
    for expected, alarm in ((1.9, "1.533 tokens per step over all (at most 1.536), expected 1.900"), (1.56, None)):
        settings = SMALL.model_copy(update={"expected_acceptance_length": expected})
        [result] = probed(settings, ["acceptance"]).results
        assert (result.status, result.reason) == ("ok" if alarm is None else "alarm", alarm)


def test_acceptance_by_counters() -> None:
    """A server that tells no reply's drafts is judged as a whole."""
    for accepted, status in ((0.7, "ok"), (0.0, "alarm")):
        with StubServer(fault=Fault(accepted=lambda call, drafts, share=accepted: round(share * drafts))) as server:
            server.tells_drafts = False
            [result] = run_probes(find_endpoint(server.base_url), SMALL, ["acceptance"]).results
        assert (result.status, result.trials, result.unit) == (status, 1, "server")
        assert result.details["mean_length"] == pytest.approx(1.54 if accepted else 1, abs=0.02)


def test_speculation_pair_sees_another_token() -> None:
    """The server that drafts takes another token at position 9 of every second reply."""
    fault = Fault(choose=lambda call, position, token, logits: int(np.argsort(-logits)[5]) if position == 9 else token)
    with StubServer(fault=fault) as server, StubServer(drafts=False) as undrafted:
        found = find_endpoint(server.base_url), find_endpoint(undrafted.base_url)
        [result] = run_probes(found[0], SMALL, ["speculation"], without_speculation=found[1]).results
        [refused] = run_probes(found[0], SMALL, ["speculation"], without_speculation=found[0]).results
    assert result.status == "alarm" and result.details["first_parting"] == 9
    assert result.trials == 12 and {witness.position for witness in result.witnesses} == {9}
    assert refused.status == "not_run" and "drafts, too" in str(refused.reason)


# ------------------------------------------------------------------------------------------------ parts
def signs(text: str, prompt: str = "Write a note.", **more: object) -> set[str]:
    return {sign.kind for sign in signs_in(prompt, text, **more)}  # type: ignore[arg-type]


def test_detectors() -> None:
    fine = "The fox waits near the river, and then it runs home to its den. #### 12"
    assert signs(fine) == set()
    assert signs(fine + " 河") == {"wrong_script"} and signs("狐狸在河边。", "写一条笔记。") == set()
    assert signs("狐狸 x + y 在河边等待，然后回家。", "写一条笔记。") == set(), "a formula"
    assert signs("the fox waits", "写一条笔记。") == {"wrong_script"}
    assert signs(fine + "\ufffd") == {"replacement_character"}
    assert signs(fine + "\ufffd", finish_reason="length") == set(), "cut in the middle of a character"
    assert signs(fine + "\x07") == {"control_character"} and signs("a\n\tb\r\n") == set()
    assert signs("no " * 40) == {"loop"} and signs("-" * 200) == set() and signs("-" * 300) == {"loop"}
    assert signs("x", token_ids=[5, 6, 7] * 9) == {"loop"} and signs("x", token_ids=list(range(90))) == set()
    assert signs("x", token_ids=[9, 0, 0, 0, 0]) == {"id_zero"} and signs("!" * 20) == {"id_zero"}
    assert signs("x", rows=[TokenRow(1, -15.5, ())]) == {"surprise"} and signs("x", rows=[TokenRow(1, -14.5, ())]) == set()
    assert signs("", finish_reason="stop") == {"empty"}
    assert signs("", reasoning="hm", finish_reason="stop") == {"open_thinking"}
    assert signs("<think>hm", finish_reason="stop") == {"open_thinking"}
    assert signs("<think>hm</think> 4", finish_reason="stop") == set()
    assert signs(fine, finish_reason="length", is_end_expected=True) == {"missing_end"}


def test_longest_loop_against_brute_force() -> None:
    """Every start and period, on strings of two letters."""
    draw = np.random.default_rng(3)
    for _ in range(200):
        text = "".join(draw.choice(list("ab"), 24))
        best = 0
        for period in range(1, 7):
            for start in range(len(text)):
                end = start + period
                while end < len(text) and text[end] == text[end - period]:
                    end += 1
                if end - start >= 4 * period and end - start > period:
                    best = max(best, end - start)
        start, length, period = longest_loop(text)
        assert length == best
        assert all(text[i] == text[i - period] for i in range(start + period, start + length)) if length else True


def test_find_step() -> None:
    draw = np.random.default_rng(0)
    xs = np.tile(np.arange(16), 8)
    noise = draw.exponential(0.01, len(xs))
    flat = find_step(xs.tolist(), noise.tolist())
    assert flat is not None and not flat.is_structural
    stepped = find_step(xs.tolist(), (noise + 0.2 * (xs >= 11)).tolist())
    assert stepped is not None and stepped.is_structural and stepped.threshold == 11
    growing = find_step(xs.tolist(), (noise + 0.001 * xs).tolist())
    assert growing is not None and not growing.is_structural, "slow growth is no step"
    assert find_step([1.0] * 9, [0.0] * 9) is None and find_step([], []) is None


def exchange(ids: list[int], rows: list[TokenRow]) -> Exchange:
    from assay_evaluate.client.journal import Reply

    return Exchange(Ask("x", "/v1/completions", {}), 0, 1, "answered", Reply("answered", token_ids=tuple(ids)), tuple(rows))


def test_part_tells_near_ties_from_decisions() -> None:
    reference = exchange(
        [4, 5, 6],
        [TokenRow(4, -0.1, ((4, -0.1), (9, -3.0))), TokenRow(5, -0.7, ((5, -0.7), (8, -0.75))), TokenRow(6, -0.2, ())],
    )
    near = compare_replies(reference, exchange([4, 8, 6], [TokenRow(4, -0.1, ())]))
    assert (near.position, near.lead_nats, near.deltas) == (1, pytest.approx(0.05), (0.0,))
    far = compare_replies(reference, exchange([7, 5, 6], []))
    assert (far.position, far.lead_nats) == (0, pytest.approx(2.9)), "not listed: at least as far as the last listed"
    assert compare_replies(reference, exchange([4, 5, 6], [])).position is None
    assert dataclasses.astuple(compare_replies(reference, exchange([4, 5], [])))[2:4] == (2, None), "one ends earlier"


def test_read_rows_of_both_apis() -> None:
    seven, eight = {"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -2.0}
    chat = {"content": [{**seven, "top_logprobs": [eight, seven]}]}
    text = {"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:8": -2.0, "token_id:7": -0.5}]}
    expected = (TokenRow(7, -0.5, ((7, -0.5), (8, -2.0))),)
    assert read_rows({"logprobs": chat}) == read_rows({"logprobs": text}) == expected
    [row] = read_rows({"logprobs": {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": None}})
    assert row.token == "a" and math.isnan(row.logprob) and row.top == ()
    assert read_rows({"logprobs": None}) == ()


def test_slots_are_places_in_a_wave() -> None:
    texts = ["a" * number for number in range(1, 8)]
    asks = [Ask(text, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}) for text in texts]
    with StubServer() as server, Client(Address(server.base_url, "stub")) as client:
        result = client.ask_together(asks, 3, in_waves=True)
        assert [one.slot for one in client.ask_together(asks, 1)] == [0] * 7
    assert [one.slot for one in result] == [0, 1, 2, 0, 1, 2, 0] and {one.status for one in result} == {"answered"}
    assert set(client.tally.exchanges) == set(texts)


# ------------------------------------------------------------------------------------------------ command line, errors
def test_command_line(run: Run) -> None:
    with StubServer(extras=False) as server:
        code, out, err = run(
            "probe", server.base_url, "--requests", 4, "--garble", 8, "--concurrency", 4, "--probes", "garble,argmax",
            "--out", "out",
        )  # fmt: skip
        assert code == 0, err
        assert "argmax       ok       0 of " in out and "garble       ok       0 of 10 requests" in out
        record = ProbeReport.load(Path("out/stub.json"))
        assert statuses(record) == {"argmax": "ok", "garble": "ok"}
        assert Path("out/stub.requests.jsonl").read_text().count("\n") == record.num_requests
        server.fault = Fault(choose=drop_best)
        code, out, err = run("probe", server.base_url, "--probes", "argmax", "--label", "bad", "--run", "here", "--json")
    assert (code, json.loads(out)["results"][0]["status"]) == (1, "alarm")
    assert ProbeReport.load(Path("here/probes/bad.json")).alarms[0].name == "argmax"


def test_an_api_key_is_sent_and_not_written_down(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_STUB", "abracadabra")
    with StubServer() as server:
        server.key = "abracadabra"
        code, _, err = run("probe", server.base_url)
        assert code == 2 and "answers 401" in err
        few = ("--requests", 4, "--garble", 4, "--concurrency", 2, "--probes", "argmax,garble,speculation")
        code, _, err = run(
            "probe", server.base_url, *few, "--api-key-env", "OF_THE_STUB", "--out", "out",
            "--without-speculation", server.base_url,
        )  # fmt: skip
        assert code == 0, err
    assert ProbeReport.load(Path("out/stub.json")).num_failed == 0
    assert all("abracadabra" not in path.read_text() for path in Path("out").iterdir())
    code, _, err = run("probe", server.base_url, "--api-key-env", "NOT_THERE")
    assert code == 2 and "--api-key-env NOT_THERE: no such environment variable" in err


def test_log_probabilities_of_a_scan_are_kept_only_of_odd_replies() -> None:
    odd = Fault(choose=lambda call, position, token, logits: OTHER if call.number % 8 == 3 and position == 7 else token)
    with StubServer(fault=odd) as server:
        endpoint = find_endpoint(server.base_url)
        with Client(endpoint) as client:
            [result] = run_session(ProbeSession(endpoint, SMALL, client), ["garble"], has_pair=False).results
            scanned = [one for name, one in client.tally.exchanges.items() if name.startswith("garble/")]
    assert result.status == "alarm" and len(scanned) == 40
    assert {one.id for one in scanned if one.rows} == {witness.request for witness in result.witnesses}


def test_errors_are_one_line(run: Run) -> None:
    code, _, err = run("probe", "http://127.0.0.1:9")
    assert code == 2 and err.count("\n") == 1 and "does not answer at http://127.0.0.1:9/v1/models" in err
    with StubServer() as server:
        code, _, err = run("probe", server.base_url, "--model", "other")
        assert code == 2 and "has no model 'other'; it lists stub" in err
    code, _, err = run("probe", ".", "--model", "x")
    assert code == 2 and "--served-model-name is not used with a checkpoint, which is served here" in err


def test_a_server_that_dies_stops_the_run() -> None:
    with StubServer() as server:
        endpoint = find_endpoint(server.base_url)
    with pytest.raises(MeasureError, match="8 requests in a row had no reply"):
        run_probes(endpoint, SMALL, ["garble"])


def test_the_stub_is_what_it_says() -> None:
    """Replies are in the prompt's script and do not loop, else the tests above prove little."""
    with StubServer() as server:
        report_client = Client(Address(server.base_url, "stub"))
        for text, letters in (("write a note", LATIN), ("写一条狗的笔记", HAN)):
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 200,
                "temperature": 0,
                "return_token_ids": True,
            }
            one = report_client.exchange(Ask("x", "/v1/chat/completions", body))
            assert set(one.text) <= set(letters) and one.reply.finish_reason == "stop"
            assert longest_loop(one.reply.token_ids or ())[1] < 24


def test_a_server_does_not_choose_whose_probes_it_replaces(run: Run) -> None:
    with StubServer(extras=False) as server:
        code, _, err = run("probe", server.base_url, "--probes", "argmax", "--requests", 24, "--run", "here")
        assert code == 2 and "--run with a URL: say --label as well" in err
        for _ in range(2):
            code, _, err = run(
                "probe", server.base_url, "--probes", "argmax", "--requests", 24, "--label", "w4a16", "--run", "here"
            )
    assert "w4a16: the earlier probes are of a server that may hold another checkpoint; moved to here/probes/earlier/" in err
    assert len(list(Path("here/probes/earlier").glob("w4a16.unknown.*.json"))) == 1
