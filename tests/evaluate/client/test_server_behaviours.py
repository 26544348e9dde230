"""Whatever a server does to one request ends neither the run nor the other requests, and a rerun completes."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_behaviours import BAD, BEHAVIOURS, Behaviour, MisbehavingServer

from assay_evaluate.client import sending
from assay_evaluate.client.client import Address, Client
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.sending import PUT_OFF

WHO = Identity("checkpoint", "fingerprint", "suite")
PROMPTS = ("one", BAD, "two", "three")
MOST_ATTEMPTS = 2


def requests() -> list[Request]:
    return [Request("t", prompt, 0, "/v1/completions", {"prompt": prompt}) for prompt in PROMPTS]


def ask(server: MisbehavingServer, journal: Journal) -> dict[str, Reply]:
    endpoint = Address(server.base_url, "model")
    timeout_s = 0.4 if server.behaviour.why.startswith("TimeoutError") else 60.0
    with Client(
        endpoint, journal, WHO, concurrency=2, max_attempts=MOST_ATTEMPTS, backoff_s=0.0, timeout_s=timeout_s
    ) as client:
        return dict(zip(PROMPTS, client.ask(requests()), strict=True))


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.name)
def test_behaviours(behaviour: Behaviour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MOST_REPLY_BYTES", 2**20)
    with MisbehavingServer(behaviour) as server, Journal(tmp_path / "j.db") as journal:
        first = ask(server, journal)
        times_asked = server.asked.count(BAD)
        server.is_healed = True
        server.asked.clear()
        second = ask(server, journal)
        asked_again = server.asked
    assert {prompt: reply.text for prompt, reply in first.items() if prompt != BAD} == {p: p for p in PROMPTS if p != BAD}
    reply = first[BAD]
    status, times = {
        "answered": ("answered", 1), "again": ("failed", MOST_ATTEMPTS), "once": ("failed", 1), "refused": ("refused", 1)
    }[behaviour.outcome]  # fmt: skip
    more = len(PROMPTS) - 1 if reply.http_status in PUT_OFF else 0  # put off while others are answered: that is no attempt
    assert reply.status == status and times <= times_asked <= times + more, reply.error
    if status == "answered":
        assert (reply.text, reply.error) == (behaviour.why, None)
    else:
        assert str(reply.error).startswith(behaviour.why) and len(str(reply.error)) < 600 and str(reply.error).isprintable()
    assert asked_again == ([BAD] if status == "failed" else [])
    assert second[BAD].text == (BAD if status == "failed" else reply.text)
