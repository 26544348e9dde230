"""The journal: every request before it is sent, every reply as it comes. SQLite in WAL mode, one file per run.

A reply is found again by the SHA-256 of everything that could change it: suite, task, item, sample, the request itself with
all its sampling parameters, the checkpoint's hash and the serving fingerprint. A reply of another checkpoint, other flags or
other sampling therefore has another key and can never be taken for this one's. Killing the program loses nothing that was
answered. Each reply is kept with a SHA-256 of its own: one that is not as it was written is not believed, and asked for again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from assay.errors import MeasureError
from assay.foreign_text import one_line
from assay.records.base import canonical_json, sha256_of, sha256_of_file

LONG_TEXT = 4096
"""Characters above which a request or reply is stored compressed (zlib) instead of as readable text."""
MOST_KEYS = 500
"""Keys looked up in one statement; SQLite takes at most 999 values in its older versions."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    key TEXT PRIMARY KEY, suite TEXT NOT NULL DEFAULT '', task TEXT NOT NULL, item TEXT NOT NULL, sample INTEGER NOT NULL,
    checkpoint_sha256 TEXT NOT NULL, fingerprint_sha256 TEXT NOT NULL, path TEXT NOT NULL, body NOT NULL,
    status TEXT NOT NULL, num_attempts INTEGER NOT NULL DEFAULT 0, asked_at REAL NOT NULL,
    http_status INTEGER, latency_s REAL, finish_reason TEXT, prompt_tokens INTEGER, output_tokens INTEGER,
    error TEXT, reply, logprobs BLOB, reply_sha256 TEXT
);
CREATE TABLE IF NOT EXISTS items (key TEXT PRIMARY KEY, what TEXT NOT NULL, items NOT NULL);
CREATE TABLE IF NOT EXISTS counters (key TEXT PRIMARY KEY, counters TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS hashes_of_files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL);
"""

STORED_REPLY = "typeof(reply), CAST(reply AS BLOB), CAST(logprobs AS BLOB)"
"""As bytes: text that was damaged need not be UTF-8 any more."""

ReplyStatus = Literal["answered", "refused", "failed"]


@dataclass(frozen=True)
class Identity:
    """Who is asked: the checkpoint's hash, and what of the serving fingerprint could change a reply; and for which suite."""

    checkpoint_sha256: str
    fingerprint_sha256: str
    suite: str = ""
    """Its name."""


@dataclass(frozen=True)
class Request:
    """One request of a suite. `sample` tells repeats of an item apart; the noise-floor pass counts as another sample."""

    task: str
    item: str
    sample: int
    path: str
    """API path, such as /v1/chat/completions."""
    body: dict[str, Any]
    """What is sent, but for `model`, which names the server's copy and not what is asked."""
    logprobs_from: int = 0
    """Prompt log-probabilities are kept from this position on (only the reply's count, not the question's)."""

    @functools.cached_property
    def body_json(self) -> str:
        """`body` as canonical JSON: what is hashed, kept and sent is one text, made once. `body` must not change after that.

        A lone surrogate in a question, which is no UTF-8, is written as JSON escapes it.
        """
        text = canonical_json(self.body)
        return text if text.isascii() else text.encode(errors="backslashreplace").decode()

    def key(self, who: Identity) -> str:
        """SHA-256 (hex) under which the reply is kept: of these values as one list in canonical JSON."""
        before = canonical_json([self.task, self.item, self.sample, self.path])[:-1]
        return hashlib.sha256(f"{before},{self.body_json},{_end_of_key(self.logprobs_from, who)}".encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _end_of_key(logprobs_from: int, who: Identity) -> str:
    """What the keys of a task's requests end in: the same text for thousands of them."""
    return canonical_json([logprobs_from, who.checkpoint_sha256, who.fingerprint_sha256, who.suite])[1:]


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Prompt log-probabilities at P positions of a text, each with its K most likely ids (natural log).

    tokens_P: the ids that stand there. ids_PK: most likely first, -1 where there are fewer. logprobs_PK: theirs, NaN where
    there are fewer. chosen_P: log-probability of `tokens_P`, whether or not among the K. NaN: the server gave none.
    """

    tokens_P: npt.NDArray[np.int32]
    ids_PK: npt.NDArray[np.int32]
    logprobs_PK: npt.NDArray[np.float32]
    chosen_P: npt.NDArray[np.float32]

    def pack(self) -> bytes:
        """Shape and arrays as compressed bytes."""
        arrays = (self.tokens_P, self.ids_PK, self.logprobs_PK, self.chosen_P)
        head = np.asarray(self.ids_PK.shape, np.int32).tobytes()
        return zlib.compress(head + b"".join(array.tobytes() for array in arrays), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Inverse of `pack`."""
        data = zlib.decompress(packed)
        p, k = (int(n) for n in np.frombuffer(data, np.int32, 2))
        ids = np.frombuffer(data, np.int32, p + p * k, 8)
        values = np.frombuffer(data, np.float32, p * k + p, 8 + ids.nbytes)
        return cls(ids[:p], ids[p:].reshape(p, k), values[: p * k].reshape(p, k), values[p * k :])


@dataclass(frozen=True)
class Reply:
    """What came back for one request. `refused`: the server said no for good (4xx). `failed`: infrastructure; asked again."""

    status: ReplyStatus
    text: str = ""
    reasoning: str | None = None
    has_tool_calls: bool = False
    tool_calls: tuple[dict[str, Any], ...] | None = None
    """As the server's parser found them, in the API's own shape. None: no call, or kept before calls were."""
    finish_reason: str | None = None
    """Why it ended, by OpenAI's names (`replies.ENDED`); of a failed one, the server's own word."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    thinking_tokens: int | None = None
    """Part of `output_tokens`; only servers with a reasoning parser count it."""
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    usage: dict[str, Any] | None = None
    """All that the server counted, in the API's own shape."""
    usage_problem: str | None = None
    """How these counts cannot be true; `output_tokens` is then None. None: they may be, or kept before they were looked at."""
    speculation: dict[str, int] | None = None
    """num_drafts, num_draft_tokens, num_accepted_tokens of this reply, where the server says."""
    http_status: int | None = None
    """Of an error told with status 200, the status that it names."""
    latency_s: float | None = None
    error: str | None = None
    reply_id: str | None = None
    """The server's own `id` of the reply. None: it gives none, or kept before ids were."""
    model: str | None = None
    """Which model the reply says it is of. None: as above."""
    system_fingerprint: str | None = None
    """Which server configuration the reply says it is of. None: as above."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended the reply, where one did."""
    cache_header: str | None = None
    """The header that says that a cache gave the reply. None: none does, or kept before headers were looked at."""
    logprobs: TokenLogprobs | None = None


_DEFAULTS = tuple((f.name, f.default) for f in dataclasses.fields(Reply) if f.name != "logprobs")
_values_of = operator.attrgetter(*(name for name, _ in _DEFAULTS))
"""A reply's values, in the order of `_DEFAULTS`."""


class Journal:
    """The file `journal.db` of a run; safe to use from several threads of one process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        self.num_changed = 0
        """Replies found so far that are not as they were written."""
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")  # survives a killed process; one fsync per checkpoint of the WAL
            self._db.executescript(SCHEMA)
            self._bring_up_to_date()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorname == "SQLITE_NOTADB":
                raise MeasureError(f"{path}: not a journal ({error}); move the file away to start a new one") from None
            raise _unusable(path, error) from None

    def _bring_up_to_date(self) -> None:
        """Columns that a journal of an earlier version lacks; its replies are taken as they are."""
        columns = {row[1] for row in self._db.execute("PRAGMA table_info(requests)")}
        if "suite" not in columns:
            self._db.execute("ALTER TABLE requests ADD COLUMN suite TEXT NOT NULL DEFAULT ''")
        if "reply_sha256" in columns:
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("ALTER TABLE requests ADD COLUMN reply_sha256 TEXT")
        self._db.create_function("sha256_of_reply", 5, _sha256_of_reply, deterministic=True)
        self._db.execute(
            f"UPDATE requests SET reply_sha256 = sha256_of_reply(key, status, {STORED_REPLY}) WHERE reply IS NOT NULL"
        )
        self._db.execute("COMMIT")

    @property
    def path(self) -> Path:
        """The file; what a run keeps outside of it lies beside it."""
        return self._path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; everything written so far stays."""
        with self._lock:
            self._db.close()

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock, self._errors_named():
            return self._db.execute(statement, values).fetchall()

    def _execute_for(self, keys: Sequence[str], statement: str) -> Iterator[Any]:
        """Rows of many keys; the statement ends in `key IN`."""
        for first in range(0, len(keys), MOST_KEYS):
            batch = keys[first : first + MOST_KEYS]
            yield from self._execute(f"{statement} ({','.join('?' * len(batch))})", batch)

    def _execute_all(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """The statement for every row, in one transaction: all of them or none."""
        with self._lock, self._errors_named():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(statement, rows)
                self._db.execute("COMMIT")
            except sqlite3.Error:
                if self._db.in_transaction:  # a full disk has rolled it back already
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise _unusable(self._path, error) from None

    # -------------------------------------------------------------------------------------------- requests
    def find(self, key: str) -> Reply | None:
        """The final reply under `key`, or None: never asked, asked but not answered, or failed."""
        return self.find_all([key]).get(key)

    def find_all(self, keys: Sequence[str]) -> dict[str, Reply]:
        """Final replies by key; what was never asked, not answered, or failed is left out, and what is not as it was written.

        Such a reply gets the status `changed`; it is asked for again.
        """
        replies, changed = {}, []
        for key, sha256, *written in self._execute_for(
            keys,
            f"SELECT key, CAST(reply_sha256 AS BLOB), status, {STORED_REPLY} FROM requests"
            " WHERE status IN ('answered', 'refused') AND key IN",
        ):
            if sha256 == _sha256_of_reply(key, *written).encode():
                replies[key] = read_reply(*written[1:])
            else:
                changed.append(key)
        if changed:
            self.num_changed += len(changed)
            self._execute_all("UPDATE requests SET status = 'changed' WHERE key = ?", [(key,) for key in changed])
        return replies

    def find_last(self, keys: Sequence[str]) -> dict[str, Reply]:
        """The last reply to each request, final or not, by key: with failed ones, of which only the error is known."""
        failed = self._execute_for(keys, "SELECT key, error FROM requests WHERE status = 'failed' AND key IN")
        return self.find_all(keys) | {key: Reply("failed", error=error) for key, error in failed}

    def write_requests(self, requests: Sequence[tuple[str, Request]], who: Identity) -> None:
        """Note, in one transaction, that these requests are about to be sent, each under its key."""
        now = time.time()
        rows = [
            (
                *(key, who.suite, request.task, request.item, request.sample, who.checkpoint_sha256, who.fingerprint_sha256),
                *(request.path, _pack(request.body_json), now),
            )
            for key, request in requests
        ]
        self._execute_all(
            "INSERT INTO requests (key, suite, task, item, sample, checkpoint_sha256, fingerprint_sha256, path, body,"
            " status, asked_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'asked', ?)"
            " ON CONFLICT (key) DO UPDATE SET status = 'asked', asked_at = excluded.asked_at"
            " WHERE status NOT IN ('answered', 'refused')",
            rows,
        )

    def write_replies(self, replies: Sequence[tuple[str, Reply, int]]) -> None:
        """Keep, in one transaction, what came back: (key, reply, how often it was sent for that; attempts add up)."""
        rows = []
        for key, reply, num_attempts in replies:
            packed, logprobs = _pack(_reply_json(reply)), None if reply.logprobs is None else reply.logprobs.pack()
            stored = ("text", packed.encode()) if isinstance(packed, str) else ("blob", packed)
            rows.append((
                *(reply.status, reply.http_status, reply.latency_s, reply.finish_reason, reply.prompt_tokens),
                *(reply.output_tokens, reply.error, packed, logprobs),
                *(_sha256_of_reply(key, reply.status, *stored, logprobs), num_attempts, key),
            ))  # fmt: skip
        self._execute_all(
            "UPDATE requests SET status = ?, http_status = ?, latency_s = ?, finish_reason = ?, prompt_tokens = ?,"
            " output_tokens = ?, error = ?, reply = ?, logprobs = ?, reply_sha256 = ?, num_attempts = num_attempts + ?"
            " WHERE key = ?",
            rows,
        )

    def count(self, status: str, task: str | None = None) -> int:
        """How many requests have `status` (asked, answered, refused, failed), of one task or of all."""
        rows = self._execute("SELECT count(*) FROM requests WHERE status = ? AND (? IS NULL OR task = ?)", (status, task, task))
        return int(rows[0][0])

    def answered_items(self, who: Identity) -> dict[str, list[tuple[str, str]]]:
        """Task -> (item, key) of every request of the first sample that `who` answered, in order of items."""
        by_task: dict[str, list[tuple[str, str]]] = {}
        for task, item, key in self._execute(
            "SELECT task, item, key FROM requests WHERE status = 'answered' AND sample = 0"
            " AND checkpoint_sha256 = ? AND fingerprint_sha256 = ? AND suite = ? ORDER BY task, item, key",
            (who.checkpoint_sha256, who.fingerprint_sha256, who.suite),
        ):
            by_task.setdefault(task, []).append((item, key))
        return by_task

    def count_failed(self, who: Identity, tasks: Sequence[str]) -> int:
        """How many requests of these tasks `who` never answered, and may answer when it is asked again."""
        rows = self._execute(
            "SELECT count(*) FROM requests WHERE status = 'failed' AND task IN (SELECT value FROM json_each(?))"
            " AND checkpoint_sha256 = ? AND fingerprint_sha256 = ? AND suite = ?",
            (json.dumps(list(tasks)), who.checkpoint_sha256, who.fingerprint_sha256, who.suite),
        )
        return int(rows[0][0])

    def request_of(self, key: str) -> tuple[str, dict[str, Any]]:
        """API path and body of the request under `key`, which must be there."""
        path, body = self._execute("SELECT path, body FROM requests WHERE key = ?", (key,))[0]
        return str(path), dict(self._load("a request", body))

    # -------------------------------------------------------------------------------------------- items, counters
    def find_items(self, what: str, made_from: Any) -> list[Any] | None:
        """The items kept under `what` and `made_from` (anything JSON can hold), or None."""
        rows = self._execute("SELECT items FROM items WHERE key = ?", (sha256_of([what, made_from]),))
        return None if not rows else list(self._load(what, rows[0][0]))

    def keep_items(self, what: str, made_from: Any, items: Sequence[Any]) -> None:
        """Keep generated items, so that every checkpoint of the run gets the same text."""
        key = sha256_of([what, made_from])
        self._execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", (key, what, _pack(canonical_json(list(items)))))

    def counters(self, key: str) -> dict[str, float]:
        """Sums kept by `add_counters` under `key`."""
        rows = self._execute("SELECT counters FROM counters WHERE key = ?", (key,))
        return {} if not rows else dict(self._load("counters", rows[0][0]))

    def _load(self, what: str, stored: str | bytes) -> Any:
        """MeasureError: it is not as it was written."""
        try:
            return json.loads(unpacked(stored))
        except (ValueError, TypeError, zlib.error) as error:
            raise MeasureError(
                f"{self._path}: damaged ({what}: {one_line(str(error))}); move the file away to start a new one"
            ) from None

    def add_counters(self, key: str, more: dict[str, float]) -> None:
        """Add to the sums under `key`: what a server counted while one phase of a suite ran."""
        total = self.counters(key)
        for name, value in more.items():
            total[name] = total.get(name, 0.0) + value
        self._execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (key, canonical_json(total)))

    def file_sha256(self, path: Path) -> str:
        """SHA-256 (hex) of a file, remembered until it is written to or another takes its place, whatever its times say."""
        stat = path.stat()
        stamp = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}"
        rows = self._execute("SELECT stamp, sha256 FROM hashes_of_files WHERE path = ?", (str(path),))
        if rows and rows[0][0] == stamp:
            return str(rows[0][1])
        digest = sha256_of_file(path)
        self._execute("INSERT OR REPLACE INTO hashes_of_files VALUES (?, ?, ?)", (str(path), stamp, digest))
        return digest


def _unusable(path: Path, error: sqlite3.Error) -> MeasureError:
    """The disk is full or fails, another process holds the file, or it is damaged."""
    return MeasureError(f"{path}: cannot be read or written: {one_line(str(error))}")


def _sha256_of_reply(key: str, status: str, kind: str, reply: bytes | None, logprobs: bytes | None) -> str:
    """SHA-256 (hex) of a reply as it is stored (`STORED_REPLY`), and of the request that it answers."""
    reply = reply or b""
    digest = hashlib.sha256(f"{key} {status} {kind} {len(reply)} ".encode() + reply)
    digest.update(logprobs or b"")
    return digest.hexdigest()


def _reply_json(reply: Reply) -> str:
    """What differs from a reply of which nothing is known; `read_reply` gives the rest its defaults back."""
    values = zip(_DEFAULTS, _values_of(reply), strict=True)
    return canonical_json({name: value for (name, default), value in values if value is not default and value != default})


def read_reply(kind: str, stored: bytes, logprobs: bytes | None) -> Reply:
    """A reply as it was before it was stored (`STORED_REPLY`). ValueError, TypeError, zlib.error: it is damaged."""
    values = json.loads(stored if kind == "text" else zlib.decompress(stored))
    data = {name: values[name] for name, _ in _DEFAULTS if name in values}  # a later version may have written more
    for name in ("token_ids", "prompt_token_ids", "tool_calls"):
        data[name] = None if data.get(name) is None else tuple(data[name])
    return Reply(**data, logprobs=None if logprobs is None else TokenLogprobs.unpack(logprobs))


def _pack(text: str) -> str | bytes:
    return text if len(text) <= LONG_TEXT else zlib.compress(text.encode(), 6)


def unpacked(stored: str | bytes) -> str:
    """A request, a reply or items as they were before they were stored."""
    return stored if isinstance(stored, str) else zlib.decompress(stored).decode()
