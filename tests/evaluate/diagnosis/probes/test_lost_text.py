"""Gateways that lose, cut or change some replies of a healthy server: each kind is an alarm, and none is there without.

The kinds are those of public reports on gateways, proxies and caches; shares are 1 in 16 unless the kind touches every reply.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from lossy_gateways import (
    BreaksOff,
    Change,
    Gateway,
    Swapping,
    edited,
    ends_early,
    finish_renamed,
    in_the_middle,
    more_billed,
    rows_swapped,
    token_lost,
)
from probe_stub import StubServer

from assay.records.probe import ProbeResult, ProbeSettings
from assay_evaluate.diagnosis.endpoint import find_endpoint
from assay_evaluate.diagnosis.probes.run_probes import run_probes
from assay_evaluate.diagnosis.probes.temperature import LIMIT_Z
from assay_evaluate.statistics.rates import lower_bound

pytestmark = pytest.mark.slow
SETTINGS = ProbeSettings(
    num_requests=64, num_garble_requests=40, num_alone=4, num_neighbours=0, num_scored=48, long_tokens=120, concurrency=8,
    max_tokens=96, num_tools=(1,), num_tool_requests=2,
)  # fmt: skip


def probed(gateway: Gateway, *names: str, **options: Any) -> list[ProbeResult]:
    with StubServer(drafts=False, **options) as server:
        endpoint = find_endpoint(server.base_url)
        server.gateway = gateway
        return list(run_probes(endpoint, SETTINGS, names).results)


def alarms(results: list[ProbeResult]) -> dict[str, str]:
    return {result.name: str(result.reason) for result in results if result.status == "alarm"}


TEXT_ALONE: dict[str, tuple[Change, str]] = {
    "the last third": (edited(lambda text: text[: len(text) * 2 // 3]), "characters are lost"),
    "the last letter": (edited(lambda text: text[:-1]), "its last 1 of "),
    "everything": (edited(lambda text: ""), "it is empty, and its ids decode to "),
    "three letters": (in_the_middle(lambda text: text[3:]), "they part at character "),
    "eight letters twice": (in_the_middle(lambda text: text[:8] + text), "they part at character "),
    "a letter that looks alike": (in_the_middle(lambda text: "\u0430" + text[1:]), "they part at character "),
    "another letter": (in_the_middle(lambda text: ("b" if text[0] != "b" else "c") + text[1:]), "they part at character "),
    "white space": (edited(lambda text: text.replace(" ", "")), "its white space or line ends are changed"),
    "a sign that is spelt out": (edited(lambda text: text.replace(",", "and")), "they part at character "),
}  # fmt: skip


@pytest.mark.parametrize("what", TEXT_ALONE)
def test_text_that_is_not_what_its_ids_decode_to(what: str) -> None:
    change, sentence = TEXT_ALONE[what]
    gateway = Gateway(change, 16)
    result = alarms(probed(gateway, "text"))
    assert gateway.hits > 0 and sentence in result["text"], result
    assert result["text"].startswith(f"{gateway.hits} of ") and " replies contradict themselves (text " in result["text"]


@pytest.mark.parametrize("what", ["white space", "a sign that is spelt out", "everything", "the last third"])
def test_what_is_done_to_every_reply_is_seen(what: str) -> None:
    """The server's own tokenizer can write the texts, so that they are not the texts of those ids."""
    gateway = Gateway(TEXT_ALONE[what][0], 1)
    assert TEXT_ALONE[what][1] in alarms(probed(gateway, "text"))["text"]


def test_a_detokenizer_that_writes_in_another_way_is_not_believed() -> None:
    """Its texts do not come back through /tokenize and /detokenize, whoever wrote them."""
    with StubServer(drafts=False) as server:
        server.detokenized = lambda text: text.replace(" ", "")
        results = list(run_probes(find_endpoint(server.base_url), SETTINGS, ["text"]).results)
    [text] = results
    assert (text.status, text.events) == ("ok", 0)
    assert text.reason == (
        "the text of 16 of 32 replies is not what /detokenize makes of their ids, and /detokenize writes their text otherwise "
        "as well: it is not believed"
    )


OTHERS: dict[str, tuple[Change, str, str]] = {
    "an end that was cut everywhere": (ends_early("stop"), "text", "it says `stop`, and its last token, "),
    "a cap": (ends_early("length"), "text", "it ends with `length` after "),
    "`length` that says `stop`": (finish_renamed, "text", "it says `stop` after 96 tokens, all that were allowed, and none "),
    "a bill": (more_billed, "text", " ids came"),
    "log-probabilities of the next token": (rows_swapped, "text", "(row 2); the first: a token "),
    "a token that was lost everywhere": (token_lost(), "garble", "not_written"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_replies_that_contradict_themselves(what: str) -> None:
    change, probe, sentence = OTHERS[what]
    gateway = Gateway(change, 16 if change is not finish_renamed else 3)
    result = alarms(probed(gateway, probe, least_tokens=70 if change is finish_renamed else 40))
    assert gateway.hits > 0 and sentence in result[probe], result


def test_replies_to_other_requests() -> None:
    gateway = Swapping(16)
    result = alarms(probed(gateway, "recompute", "garble"))
    assert gateway.hits > 0 and "garble" in result and "recompute" in result


@pytest.mark.parametrize("extras", [True, False])
def test_a_temperature_that_is_forced(extras: bool) -> None:
    with StubServer(drafts=False, extras=extras, logprobs=True) as server:
        endpoint = find_endpoint(server.base_url)
        server.asked = lambda body: {**body, "temperature": 0}
        [result] = run_probes(endpoint, SETTINGS, ["temperature"]).results
    assert result.status == "alarm"
    assert str(result.reason).startswith("at temperature 1 the ")
    assert " drawn tokens have a mean log-probability of " in str(result.reason)
    assert str(result.reason).endswith("a lower temperature, top_p or top_k was used")


def test_where_the_first_replies_leave_a_doubt_as_many_again_are_drawn() -> None:
    with StubServer(drafts=False) as server:
        endpoint = find_endpoint(server.base_url)
        [healthy] = run_probes(endpoint, SETTINGS, ["temperature"]).results
        server.temperature = 1.05
        [warmer] = run_probes(endpoint, SETTINGS, ["temperature"]).results
    assert (healthy.status, healthy.num_requests) == ("ok", 64)
    assert (warmer.status, warmer.num_requests) == ("alarm", 128)
    assert warmer.details["standard_errors"] < -LIMIT_Z


def test_a_higher_temperature() -> None:
    with StubServer(drafts=False) as server:
        endpoint = find_endpoint(server.base_url)
        server.temperature = 1.3
        [result] = run_probes(endpoint, SETTINGS, ["temperature"]).results
    assert result.status == "alarm" and str(result.reason).endswith("a higher temperature was used")
    assert re.fullmatch(
        r"[\d,]+ tokens drawn as at temperature 1\.[23]\d \(1\.[23]\d to 1\.[234]\d at 95 %\); 1 was asked for", result.sentence
    )


def test_what_is_reported_of_the_temperature_where_it_is_right() -> None:
    with StubServer(drafts=False) as server:
        [result] = run_probes(find_endpoint(server.base_url), SETTINGS, ["temperature"]).results
    low, high = result.details["temperature_interval"]
    assert result.status == "ok" and 0.9 < low < 1 < high < 1.1
    assert result.sentence.endswith(
        f" tokens drawn as at temperature {result.details['temperature']:.2f} ({low:.2f} to {high:.2f} at 95 %); 1 was "
        "asked for"
    )


@pytest.mark.parametrize("announces_whole", [True, False])
def test_replies_that_break_off(announces_whole: bool) -> None:
    """Whichever probe asked for them: 2 % of the scan's requests alone would not surely be more than 1 %."""
    with StubServer(drafts=False) as server:
        endpoint = find_endpoint(server.base_url)
        server.breaks_off = gateway = BreaksOff(40, announces_whole=announces_whole)
        [garble] = run_probes(endpoint, SETTINGS, ["garble", "determinism"]).results[1:]
    assert (garble.name, garble.status, garble.details["num_broken_off"]) == ("garble", "alarm", gateway.hits)
    assert str(garble.reason) == f"the bodies of {gateway.hits} of {garble.details['num_asked']} replies broke off"


def test_a_single_reply_that_breaks_off_is_no_alarm() -> None:
    """A network loses one now and then."""
    with StubServer(drafts=False) as server:
        endpoint = find_endpoint(server.base_url)
        server.breaks_off = BreaksOff(20, most=1)
        [garble] = run_probes(endpoint, SETTINGS, ["garble"]).results
    assert (garble.status, garble.details["num_broken_off"]) == ("ok", 1)


def test_requests_without_a_reply_count_whichever_probe_sent_them() -> None:
    """HTTP 500 to one in twenty: 2 of the scan's 40 requests are not surely more than 1 %, those of both probes are."""
    with StubServer(drafts=False) as server:
        endpoint = find_endpoint(server.base_url)
        numbers = itertools.count(1)

        def busy(body: dict[str, Any], answered: tuple[int, Any]) -> tuple[int, Any]:
            is_for_a_reader = body["max_tokens"] > 1 and not {"stream", "prompt_logprobs"} & body.keys()
            return (500, {"error": {"message": "busy"}}) if is_for_a_reader and not next(numbers) % 20 else answered

        server.gateway = busy
        [_, garble] = run_probes(endpoint, SETTINGS, ["argmax", "garble"]).results
    num_failed, num_wanted = garble.details["num_failed"], garble.details["num_wanted"]
    assert lower_bound(40 - garble.details["num_of_the_scan"], 40) < 0.01 < lower_bound(num_failed, num_wanted)
    assert (garble.status, garble.reason) == ("alarm", f"{num_failed} of {num_wanted} requests had no reply")


# ------------------------------------------------------------------------------------------------ plainer servers
PLAIN: dict[str, tuple[Change, bool, str, str]] = {
    "the last third": (TEXT_ALONE["the last third"][0], True, "text", "log-probabilities"),
    "another letter": (TEXT_ALONE["another letter"][0], True, "text", "log-probabilities"),
    "a bill": (more_billed, True, "text", " log-probabilities came"),
    "rows": (rows_swapped, True, "text", "a token"),
    "the last third, of texts alone": (TEXT_ALONE["the last third"][0], False, "garble", "thin"),
    "everything, of texts alone": (TEXT_ALONE["everything"][0], False, "garble", "thin"),
    "letters, of texts alone": (TEXT_ALONE["a letter that looks alike"][0], False, "garble", "wrong_script"),
    "`length` that says `stop`, of texts alone": (finish_renamed, False, "garble", "end_at_limit"),
    "a cap, of texts alone": (ends_early("length"), False, "text", "cut_early"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLAIN)
def test_servers_without_ids(what: str) -> None:
    """With log-probabilities, and with nothing but texts and counts."""
    change, logprobs, probe, sentence = PLAIN[what]
    gateway = Gateway(change, 16 if change is not finish_renamed else 3)
    result = alarms(
        probed(gateway, "garble", "text", extras=False, logprobs=logprobs, least_tokens=70 if change is finish_renamed else 40)
    )
    assert gateway.hits > 0 and sentence in result.get(probe, ""), result


def test_swapped_replies_of_texts_alone() -> None:
    result = alarms(probed(Swapping(16), "garble", extras=False, logprobs=False))
    assert "repeated" in result["garble"], result


@pytest.mark.parametrize(("extras", "logprobs"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("seed", ["eval-a", "eval-b"])
def test_a_clean_server_alarms_nothing(seed: str, extras: bool, logprobs: bool) -> None:
    with StubServer(drafts=False, extras=extras, logprobs=logprobs) as server:
        settings = SETTINGS.model_copy(update={"seed": seed, "num_requests": 24})
        report = run_probes(find_endpoint(server.base_url), settings)
    assert alarms(list(report.results)) == {}
    assert [result.undecided for result in report.results if result.undecided] == []
