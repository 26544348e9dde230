"""The journal alone: what is kept, what is found again, and what must never be found."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from assay.errors import MeasureError
from assay.records.base import sha256_of_file
from assay_evaluate.client.journal import Identity, Journal, Reply, Request, TokenLogprobs

WHO = Identity("checkpoint-a", "fingerprint-a")
REQUEST = Request("arithmetic", "en/1", 0, "/v1/chat/completions", {"messages": [], "temperature": 0.0, "seed": 1})
REPLY = Reply(
    status="answered", text="#### 7", reasoning="七", finish_reason="stop", prompt_tokens=9, output_tokens=3,
    prompt_token_ids=(1, 2), token_ids=(5, 6), speculation={"num_drafts": 2}, http_status=200, latency_s=0.5,
)  # fmt: skip


def scored(p: int, k: int) -> TokenLogprobs:
    rng = np.random.default_rng(0)
    return TokenLogprobs(
        rng.integers(0, 99, p).astype(np.int32),
        rng.integers(0, 99, (p, k)).astype(np.int32),
        rng.normal(size=(p, k)).astype(np.float32),
        np.full(p, np.nan, np.float32),
    )


def test_reply_survives_reopening(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(REQUEST.key(WHO), REQUEST)], WHO)
        journal.write_replies([(REQUEST.key(WHO), REPLY, 1)])
    with Journal(tmp_path / "journal.db") as journal:
        assert journal.find(REQUEST.key(WHO)) == REPLY


def test_log_probabilities_survive_bit_by_bit(tmp_path: Path) -> None:
    before = scored(30, 8)
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(REQUEST.key(WHO), REQUEST)], WHO)
        journal.write_replies([(REQUEST.key(WHO), dataclasses.replace(REPLY, logprobs=before), 1)])
        reply = journal.find(REQUEST.key(WHO))
    assert reply is not None
    assert reply.logprobs is not None
    for field in dataclasses.fields(before):
        assert getattr(reply.logprobs, field.name).tobytes() == getattr(before, field.name).tobytes()
        assert getattr(reply.logprobs, field.name).shape == getattr(before, field.name).shape


def test_long_text_is_kept_whole(tmp_path: Path) -> None:
    long = dataclasses.replace(REPLY, text="思考 and think " * 5000)
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(REQUEST.key(WHO), REQUEST)], WHO)
        journal.write_replies([(REQUEST.key(WHO), long, 1)])
        assert journal.find(REQUEST.key(WHO)) == long
    assert (tmp_path / "journal.db").stat().st_size < 60_000


@pytest.mark.parametrize(
    ("request_", "who"),
    [
        (dataclasses.replace(REQUEST, task="needle"), WHO),
        (dataclasses.replace(REQUEST, item="en/2"), WHO),
        (dataclasses.replace(REQUEST, sample=1), WHO),
        (dataclasses.replace(REQUEST, body={**REQUEST.body, "temperature": 1.0}), WHO),
        (dataclasses.replace(REQUEST, body={**REQUEST.body, "seed": 2}), WHO),
        (dataclasses.replace(REQUEST, body={**REQUEST.body, "messages": [{"role": "user", "content": "x"}]}), WHO),
        (REQUEST, Identity("checkpoint-b", "fingerprint-a")),
        (REQUEST, Identity("checkpoint-a", "fingerprint-b")),
        (REQUEST, Identity("checkpoint-a", "fingerprint-a", "another suite")),
    ],
)
def test_stale_reply_is_never_found(tmp_path: Path, request_: Request, who: Identity) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(REQUEST.key(WHO), REQUEST)], WHO)
        journal.write_replies([(REQUEST.key(WHO), REPLY, 1)])
        assert journal.find(request_.key(who)) is None
        same = dataclasses.replace(REQUEST, body=dict(reversed(REQUEST.body.items())))  # the order of keys means nothing
        assert journal.find(same.key(WHO)) == REPLY


def test_asked_but_unanswered_and_failed_are_asked_again_refused_is_final(tmp_path: Path) -> None:
    key = REQUEST.key(WHO)
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(key, REQUEST)], WHO)
        assert journal.find(key) is None
        journal.write_replies([(key, Reply(status="failed", error="ConnectError"), 1)])
        assert journal.find(key) is None
        assert (journal.count("failed"), journal.count("failed", "needle")) == (1, 0)
        journal.write_requests([(key, REQUEST)], WHO)
        refused = Reply(status="refused", error="HTTP 400: too long", http_status=400)
        journal.write_replies([(key, refused, 1)])
        assert journal.find(key) == refused


def test_many_threads_one_file(tmp_path: Path) -> None:
    def work(journal: Journal, thread: int) -> None:
        for i in range(50):
            request = dataclasses.replace(REQUEST, item=f"{thread}/{i}")
            journal.write_requests([(request.key(WHO), request)], WHO)
            journal.write_replies([(request.key(WHO), dataclasses.replace(REPLY, text=request.item), 1)])

    with Journal(tmp_path / "journal.db") as journal:
        threads = [threading.Thread(target=work, args=(journal, t)) for t in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert journal.count("answered") == 400
        found = journal.find(dataclasses.replace(REQUEST, item="7/49").key(WHO))
        assert found is not None
        assert found.text == "7/49"


def test_items_and_counters(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        assert journal.find_items("needle", {"seed": "a"}) is None
        journal.keep_items("needle", {"seed": "a"}, [{"id": "1", "prompt": "针"}])
        journal.add_counters("k", {"drafts": 2, "accepted": 1})
        journal.add_counters("k", {"drafts": 3})
    with Journal(tmp_path / "journal.db") as journal:
        assert journal.find_items("needle", {"seed": "a"}) == [{"id": "1", "prompt": "针"}]
        assert journal.find_items("needle", {"seed": "b"}) is None
        assert journal.counters("k") == {"drafts": 5.0, "accepted": 1.0}
        assert journal.counters("other") == {}


def test_file_hash_follows_the_file(tmp_path: Path) -> None:
    shard = tmp_path / "shard"
    shard.write_bytes(b"one")
    with Journal(tmp_path / "journal.db") as journal:
        assert journal.file_sha256(shard) == sha256_of_file(shard)
        shard.write_bytes(b"other")
        assert journal.file_sha256(shard) == sha256_of_file(shard)
        times = shard.stat()
        shard.write_bytes(b"third")  # of equal size, and its time set back, as `cp -p` and archives do
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert journal.file_sha256(shard) == sha256_of_file(shard)


def test_journal_of_an_earlier_version_is_read_and_written(tmp_path: Path) -> None:
    """It had no column for the suite; what stands in it keeps its key."""
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(REQUEST.key(WHO), REQUEST)], WHO)
        journal.write_replies([(REQUEST.key(WHO), REPLY, 1)])
        journal._execute("ALTER TABLE requests DROP COLUMN suite")
    other = dataclasses.replace(REQUEST, item="en/2")
    with Journal(tmp_path / "journal.db") as journal:
        assert journal.find(REQUEST.key(WHO)) == REPLY
        journal.write_requests([(other.key(WHO), other)], WHO)
        assert journal._execute("SELECT item, suite FROM requests ORDER BY item") == [("en/1", ""), ("en/2", "")]


def test_many_requests_in_one_transaction_and_many_replies_in_one_look(tmp_path: Path) -> None:
    requests = [dataclasses.replace(REQUEST, item=str(i)) for i in range(1203)]
    keys = [request.key(WHO) for request in requests]
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests(list(zip(keys, requests, strict=True)), WHO)
        for key in keys[::3]:
            journal.write_replies([(key, REPLY, 2)])
        journal.write_requests([(keys[0], requests[0])], WHO)  # answered already: it stays so
        assert journal.find_all(keys) == dict.fromkeys(keys[::3], REPLY)
        assert journal.find_all([]) == {}
        assert (journal.count("answered"), journal.count("asked")) == (401, 802)
        assert journal._execute("SELECT DISTINCT status, num_attempts FROM requests ORDER BY 1") == [
            ("answered", 2),
            ("asked", 0),
        ]


def test_write_ahead_log_and_a_file_that_is_no_journal(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.db").close()
    assert sqlite3.connect(tmp_path / "journal.db").execute("PRAGMA journal_mode").fetchone() == ("wal",)
    (tmp_path / "text.db").write_text("not a database, and long enough to be read as one" * 50)
    with pytest.raises(MeasureError, match=r"text\.db: not a journal"):
        Journal(tmp_path / "text.db")


def test_a_disk_that_fails_is_no_reason_to_move_the_journal_away(tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()  # as little to be opened as a file on a disk that fails
    with pytest.raises(MeasureError) as refused:
        Journal(tmp_path / "journal.db")
    assert str(refused.value) == f"{tmp_path}/journal.db: cannot be read or written: unable to open database file"


# ------------------------------------------------------------------------------------------------ damage
LONG = dataclasses.replace(REPLY, text="思考 and think " * 5000)
DAMAGES = {
    "another answer": "UPDATE requests SET reply = "
    "CASE typeof(reply) WHEN 'text' THEN replace(reply, '#### 7', '#### 8') ELSE substr(reply, 1, 99) || x'00' END",
    "another type": "UPDATE requests SET reply = "
    "CASE typeof(reply) WHEN 'text' THEN CAST(reply AS BLOB) ELSE CAST(reply AS TEXT) END",
    "no UTF-8": "UPDATE requests SET reply = CAST(x'ff' || reply AS TEXT)",
    "no reply": "UPDATE requests SET reply = NULL",
    "a number": "UPDATE requests SET reply = 7",
    "cut": "UPDATE requests SET reply = substr(reply, 1, length(reply) - 9)",
    "refused": "UPDATE requests SET status = 'refused'",
    "another's": "UPDATE requests SET reply = (SELECT reply FROM requests WHERE item = 'other')",
    "another's, hash and all": "UPDATE requests SET (reply, reply_sha256) = "
    "(SELECT reply, reply_sha256 FROM requests WHERE item = 'other')",
    "other log-probabilities": "UPDATE requests SET logprobs = zeroblob(9)",
    "no log-probabilities": "UPDATE requests SET logprobs = NULL",
    "no hash": "UPDATE requests SET reply_sha256 = NULL",
    "another hash": "UPDATE requests SET reply_sha256 = x'fffe'",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("reply", [REPLY, LONG], ids=["readable", "compressed"])
def test_a_reply_that_was_changed_is_not_believed_and_asked_again(tmp_path: Path, reply: Reply, damage: str) -> None:
    reply = dataclasses.replace(reply, logprobs=scored(3, 2))
    other = dataclasses.replace(REQUEST, item="other")
    keys = [REQUEST.key(WHO), other.key(WHO)]
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(REQUEST.key(WHO), REQUEST), (other.key(WHO), other)], WHO)
        journal.write_replies([(keys[0], reply, 1), (keys[1], dataclasses.replace(REPLY, text="#### 9"), 1)])
    with sqlite3.connect(tmp_path / "journal.db") as db:
        assert db.execute(f"{damage} WHERE item <> 'other'").rowcount == 1
    with Journal(tmp_path / "journal.db") as journal:
        assert (journal.find_all(keys).keys(), journal.num_changed) == ({keys[1]}, 1)
        assert (journal.count("changed"), journal.count("answered")) == (1, 1)
        journal.write_requests([(REQUEST.key(WHO), REQUEST)], WHO)
        journal.write_replies([(keys[0], REPLY, 1)])
        assert journal.find(keys[0]) == REPLY


def test_replies_of_a_journal_without_hashes_are_taken_as_they_are(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal.write_requests([(REQUEST.key(WHO), REQUEST)], WHO)
        journal.write_replies([(REQUEST.key(WHO), LONG, 1)])
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.execute("ALTER TABLE requests DROP COLUMN reply_sha256")
    for _ in range(2):
        with Journal(tmp_path / "journal.db") as journal:
            assert (journal.find(REQUEST.key(WHO)), journal.num_changed) == (LONG, 0)


def test_a_file_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        for number in range(200):
            request = dataclasses.replace(REQUEST, item=str(number))
            journal.write_requests([(request.key(WHO), request)], WHO)
            journal.write_replies([(request.key(WHO), REPLY, 1)])
    data = bytearray((tmp_path / "journal.db").read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    (tmp_path / "journal.db").write_bytes(data)
    with (
        pytest.raises(MeasureError, match=r"journal\.db: cannot be read or written: "),
        Journal(tmp_path / "journal.db") as journal,
    ):
        journal.find(REQUEST.key(WHO))
