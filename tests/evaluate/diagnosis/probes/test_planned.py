"""What probes will send is said before the first request, holds, and can be limited; what a limit hides is said as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe_stub import CHAT, COMPLETIONS, OTHER, Call, Fault, StubServer

from assay.errors import MeasureError
from assay.records.probe import ProbeReport, ProbeSettings
from assay_evaluate.client.client import Client
from assay_evaluate.diagnosis.endpoint import MOST_DISCOVERY_REQUESTS, find_endpoint
from assay_evaluate.diagnosis.probes.planned import (
    EVERYTHING,
    change_by_offer,
    cost_of_limit,
    fit_settings,
    plan_requests,
)  # fmt: skip
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession
from assay_evaluate.diagnosis.probes.run_probes import PROBES, run_session

Run = Callable[..., tuple[int, str, str]]
SMALL = ProbeSettings(num_requests=24, num_garble_requests=40, num_alone=4, long_tokens=200, concurrency=8, num_tools=(1, 8))


class Counted(StubServer):
    """Counts what is asked of the model, and what was said by then."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_asked = 0

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.num_asked += path in (CHAT, COMPLETIONS)
        return super().answer(path, body)


@pytest.mark.slow
@pytest.mark.parametrize(("extras", "logprobs"), [(True, True), (False, True), (False, False)])
def test_no_more_is_sent_than_was_said(extras: bool, logprobs: bool) -> None:
    """Of a healthy server exactly what was said, but for the room that odd replies would take."""
    text: list[str] = []
    with Counted(extras=extras, logprobs=logprobs) as server, StubServer(drafts=False) as undrafted:
        endpoint = find_endpoint(server.base_url)
        assert server.num_asked <= MOST_DISCOVERY_REQUESTS
        pair = find_endpoint(undrafted.base_url)
        planned = plan_requests(SMALL, list(PROBES), endpoint.offer, endpoint.max_model_len, has_pair=True)
        with Client(endpoint) as client:
            before = server.num_asked
            run_session(ProbeSession(endpoint, SMALL, client, pair, text.append), list(PROBES), has_pair=True)
            num_paired = SMALL.num_requests // 2 if extras else 0  # on the other server
            num_sent = server.num_asked - before + num_paired
        assert text[0] == planned.sentence(SMALL)
        assert num_sent == planned.total.num_requests - planned.odd.num_requests
        num_aborted = 4 if endpoint.offer.streams else 0
        assert planned.aborted.num_requests == num_aborted


def test_the_sentence() -> None:
    planned = plan_requests(ProbeSettings(), ["garble"], EVERYTHING, 4096)
    assert planned.sentence(ProbeSettings()) == (
        "probes send at most 798 requests (258 replies of up to 160 tokens, 192 scored again, 26 broken off midway, 322 if "
        "replies look odd or leave a doubt) with about 403,936 prompt tokens, for 55,812 tokens at most; 16 in flight"
    )


@pytest.mark.parametrize(
    ("names", "lacks", "max_model_len", "line"),
    [
        (["garble", "text"], {"routed_experts": False, "version": None}, 4096, None),
        (
            ["garble"],
            {"streams": False},
            None,
            "offers no streaming: at most 772 requests with about 393,120 prompt tokens, not 798 with 403,936",
        ),
        (["argmax", "text"], {"logprobs": None}, None, None),
        (
            ["argmax"],
            {"logprobs": None},
            4096,
            "offers no log-probabilities: at most 0 requests with about 0 prompt tokens, not 26 with 10,784",
        ),
        (
            ["garble"],
            {"prompt_logprobs": None, "token_ids": False},
            512,
            "offers no log-probabilities of prompts and no token ids, and has a context of 512 tokens: at most 348 requests "
            "with about 71,384 prompt tokens, not 798 with 403,936",
        ),
        (
            ["argmax", "speculation"],
            {"logprobs": None, "speculation": False},
            None,
            "offers less: at most 0 requests with about 0 prompt tokens, not 26 with 10,784",
        ),
    ],
)
def test_what_an_offer_changes(names: list[str], lacks: dict[str, Any], max_model_len: int | None, line: str | None) -> None:
    """Only what these probes would have asked with it is named."""
    changed = change_by_offer(ProbeSettings(), names, EVERYTHING.model_copy(update=lacks), max_model_len)
    assert changed == (None if line is None else f"the endpoint {line}")


def test_what_is_sent_is_said_once(run: Run) -> None:
    """And again what is different, once the endpoint's offer is known."""
    few = ("--requests", 4, "--garble", 8, "--concurrency", 4, "--probes", "garble,argmax", "--out", "out")
    with StubServer() as server:
        _, _, err = run("probe", server.base_url, *few)
        assert sum("at most" in line for line in err.splitlines()) == 1
    with StubServer(extras=False) as server:
        _, _, err = run("probe", server.base_url, *few)
    assert [line for line in err.splitlines() if "at most" in line] == [
        "probes send at most 45 requests (12 replies of up to 160 tokens, 8 scored again, 1 broken off midway, 24 if replies "
        "look odd or leave a doubt) with about 21,888 prompt tokens, for 3,702 tokens at most; 4 in flight; up to 17 small "
        "requests come first, to find out what the endpoint offers",
        "the endpoint offers no log-probabilities of prompts and no token ids: at most 25 requests with about 10,368 prompt "
        "tokens, not 45 with 21,888",
    ]


@pytest.mark.parametrize("most", [60, 100, 333, 2000])
@pytest.mark.parametrize("names", [list(PROBES), ["garble", "text"], ["argmax"]])
def test_settings_are_fitted_to_a_limit(most: int, names: list[str]) -> None:
    fitted = fit_settings(ProbeSettings(), most, names, has_pair=True)
    total = plan_requests(fitted, names, has_pair=True).total.num_requests + MOST_DISCOVERY_REQUESTS
    assert total <= most and fitted.most_requests == most
    assert total > 0.7 * most or most == 2000 or names == ["argmax"], "and not to much less than the limit"


def test_a_limit_that_is_too_low() -> None:
    with pytest.raises(MeasureError) as reported:
        fit_settings(ProbeSettings(), 20, list(PROBES))
    assert str(reported.value) == "--requests 20: these probes send 45 at least; name fewer of them with --probes"


def test_what_a_limit_costs() -> None:
    names = ["garble", "text"]
    fitted = fit_settings(ProbeSettings(), 200, names)
    planned, unlimited = plan_requests(fitted, names), plan_requests(ProbeSettings(), names)
    assert cost_of_limit(fitted, planned, unlimited) == (
        "--requests 200 leaves 83 replies, which show a fault of 1 in 28 with 95 %; the 282 without it show 1 in 95"
    )


@pytest.mark.slow
def test_the_command_keeps_to_the_limit(run: Run) -> None:
    with Counted(drafts=False) as server:
        code, _, err = run(
            "probe", server.base_url, "--requests", 130, "--long-tokens", 200, "--concurrency", 4, "--out", "out"
        )
        assert code == 0, err
        assert 60 < server.num_asked <= 130
        code, _, err = run("probe", server.base_url, "--requests", 9, "--out", "few")
        asked_before = server.num_asked
        assert (code, server.num_asked) == (2, asked_before), "refused before anything is sent"
    assert "--requests 9: these probes send " in err
    settings = ProbeReport.load(Path("out/stub.json")).settings
    assert settings.most_requests == 130


@pytest.mark.slow
def test_garbled_and_undecided_replies_are_shown(run: Run) -> None:
    """Three of each in the terminal. Above temperature 0 a server without log-probabilities cannot tell habits from faults."""

    def foreign(call: Call, position: int, token: int, logits: Any) -> int:
        return OTHER if call.number % 5 == 4 and position == 7 and call.in_flight > 1 else token

    few = ("--requests", 8, "--garble", 40, "--concurrency", 8, "--probes", "garble", "--out", "out")
    with StubServer(extras=False, logprobs=False, fault=Fault(choose=foreign), gather=8) as server:
        code, out, _ = run("probe", server.base_url, *few[2:])
        assert code == 1
        shown = [line for line in out.splitlines() if line.startswith("garble: reply garble/")]
        assert len(shown) == 3 and all(
            'wrong_script: 1 letters of Cyrillic, which the prompt does not use: "' in s for s in shown
        )
        code, out, _ = run("probe", server.base_url, *few[2:], "--temperature", 1)
    assert code == 0
    report = ProbeReport.load(Path("out/stub.json"))
    [garble] = report.results
    assert garble.trials == 40 - len(garble.undecided) and garble.details["num_unknown"] == len(garble.undecided) > 3
    shown = [line for line in out.splitlines() if line.startswith("garble: undecided reply garble/")]
    assert len(shown) == 3
    assert f"{len(garble.undecided)} odd replies could not be told from habits and are not counted" in out
