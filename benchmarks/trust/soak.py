"""Soak: many requests against a server that fails in every way; is anything lost, counted twice or held on to?

    python benchmarks/trust/soak.py --requests 200000 --write benchmarks/trust/soak.md

A server in a process of its own answers 95 of 100 requests, and does to each of the others one of `FAILURES`, drawn by the
request's number and attempt. The client asks through a journal, 64 at once, as an evaluation does. Every reply must be the one
to its request; every request has one row; what was refused is what the server refused. Memory and open files are those of the
client's process, every second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

CONCURRENCY = 64
PATH = "/v1/completions"
FAIL_SHARE = 0.05
TIMEOUT_S = 5.0
OK = b"HTTP/1.1 200 OK\r\n"
RARE = {"endless body": 0.02, "drop by drop": 0.1, "silence": 0.1}
"""Of what costs seconds or megabytes: how often it is drawn beside the others, which have 1."""


def reply(body: str, status: str = "200 OK", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body.encode())}", *headers, "", "")
    return ("\r\n".join(lines) + body).encode()


def completion(text: object, **more: object) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": "stop"}], **more})


FAILURES: dict[str, bytes] = {
    **{f"status {status}": reply("{}", f"{status} X") for status in (202, 206, 307, 401, 403, 404, 408, 429, 500, 502, 503)},
    "status 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "refused": reply('{"error": "no"}', "400 Bad Request"),
    "hangs up": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTML": reply("<!DOCTYPE html><p>Sign in"),
    "empty": reply(""),
    "cut": OK + b"Content-Length: 999\r\n\r\n{",
    "deep JSON": reply("[" * 100_000),
    "digits": reply("9" * 5000),
    "another shape": reply(completion(5)),
    "an empty message": reply('{"choices": [{"message": {}}]}'),
    "counts without bound": reply(completion("x", usage={"prompt_tokens": 2**70})),
    "another request's": reply(completion("x", id="cmpl-assay-0123456789abcdef-0")),
    "length 1e15": OK + b"Content-Length: 1000000000000000\r\n\r\n{}",
    "a chunk of -1": OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}",
    "a huge chunk": OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\n{}",
    "headers without end": OK + b"X: y\r\n" * 200,
    "gzip": OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "endless body": OK + b"\r\n",
    "drop by drop": OK + b"Content-Length: 999\r\n\r\n",
    "silence": b"",
}
KEPT_ALIVE = re.compile(rb"HTTP/1.1 \d+ [^\r]*\r\nContent-Length: \d+\r\n\r\n")


# ------------------------------------------------------------------------------------------------ the server
class Server(asyncio.Protocol):
    """Tells on its standard output, at the end of its input, what it did: a Counter as JSON."""

    did: ClassVar[Counter[str]] = Counter()
    asked: ClassVar[Counter[int]] = Counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""
        self.is_lost = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) if end else 0
        if end and len(rest) >= length:
            self.buffer = rest[length:]
            self.answer(int(json.loads(rest[:length])["prompt"]))

    def answer(self, number: int) -> None:
        self.asked[number] += 1
        draw = random.Random(f"{number}:{self.asked[number]}")
        if draw.random() >= FAIL_SHARE:
            self.did["answered"] += 1
            self.transport.write(reply(completion(f"to {number}")))
            return
        [name] = draw.choices(list(FAILURES), [RARE.get(name, 1.0) for name in FAILURES])
        self.did[name] += 1
        self.transport.write(FAILURES[name])
        if name in RARE:
            task = asyncio.get_running_loop().create_task(self.go_on(name))
            task.add_done_callback(lambda _: self.transport.close())
        elif not KEPT_ALIVE.match(FAILURES[name]):
            self.transport.close()

    async def go_on(self, name: str) -> None:
        while not self.is_lost:
            if name == "endless body" and self.transport.get_write_buffer_size() < 2**20:
                self.transport.write(b" " * 2**20)
            elif name == "drop by drop":
                self.transport.write(b" ")
            await asyncio.sleep(0.0 if name == "endless body" else 0.5)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    print(json.dumps(Server.did), flush=True)


# ------------------------------------------------------------------------------------------------ the client
@dataclass(frozen=True)
class Sample:
    """Of the client's process. at_share: of the requests that were sent by then."""

    at_share: float
    rss_bytes: int
    num_files: int


def watch(samples: list[Sample], done: Callable[[], float], is_over: threading.Event) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while not is_over.wait(1.0):
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * page
        samples.append(Sample(done(), rss, len(os.listdir("/proc/self/fd"))))


def soak(port: int, num_requests: int, folder: Path) -> tuple[dict[str, int], list[Sample]]:
    """(what came of the requests, the process meanwhile). AssertionError: a reply to another request, a row too many."""
    from assay_evaluate.client.client import Address, Client
    from assay_evaluate.client.journal import Identity, Journal, Request

    samples: list[Sample] = []
    is_over = threading.Event()
    found: Counter[str] = Counter()
    with (
        Journal(folder / "journal.db") as journal,
        Client(
            Address(f"http://127.0.0.1:{port}", "model"), journal, Identity("checkpoint", "fingerprint", "soak"),
            concurrency=CONCURRENCY, backoff_s=0.01, timeout_s=TIMEOUT_S, max_attempts=8,
        ) as client,
    ):  # fmt: skip
        watching = threading.Thread(target=watch, args=(samples, lambda: found.total() / num_requests, is_over))
        watching.start()
        requests = (Request("soak", str(n), 0, PATH, {"prompt": str(n), "max_tokens": 1}) for n in range(num_requests))
        try:
            for number, one in enumerate(client.ask_each(requests)):
                found[one.status] += 1
                assert one.status != "answered" or one.text == f"to {number}", f"{number}: {one.text}"
        finally:
            is_over.set()
            watching.join()
        [(rows, attempts)] = journal._execute("SELECT count(*), sum(num_attempts) FROM requests")
        assert rows == found.total() == num_requests, f"{rows} rows, {found.total()} replies for {num_requests} requests"
        for status in ("answered", "refused", "failed"):
            assert journal.count(status) == found[status], status
        assert attempts == client.flight.num_sent, f"{attempts} attempts are kept, {client.flight.num_sent} were made"
    return {**found, "sent": client.flight.num_sent}, samples


def table(found: dict[str, int], did: Counter[str], samples: list[Sample], seconds: float, num_requests: int) -> str:
    """The result in Markdown."""
    quarters = [[one for one in samples if number / 4 <= one.at_share < (number + 1) / 4] for number in range(4)]
    failures = {name: count for name, count in sorted(did.items()) if name != "answered"}
    rows = "".join(
        f"| {number + 1} | {statistics.median(one.rss_bytes for one in quarter) / 2**20:.0f} | "
        f"{max(one.rss_bytes for one in quarter) / 2**20:.0f} | {statistics.median(one.num_files for one in quarter):.0f} | "
        f"{max(one.num_files for one in quarter)} |\n"
        for number, quarter in enumerate(quarters)
        if quarter
    )
    return (
        f"# Soak: {num_requests:,} requests, a server that fails in {len(FAILURES)} ways\n\n"
        f"Written by `make soak` (benchmarks/trust/soak.py). {CONCURRENCY} requests in flight, {seconds:.0f} s.\n\n"
        f"- {found.get('answered', 0):,} answered, each with the reply to its own request; {found.get('refused', 0):,} refused "
        f"(the server refused {did['refused']:,}); {found.get('failed', 0):,} failed after 8 attempts, or with a reply that "
        "is not worth asking for again (a rerun asks them)\n"
        f"- {num_requests:,} rows in the journal; {found['sent']:,} requests sent, as many attempts kept\n"
        f"- the server answered {did['answered']:,} and failed {sum(failures.values()):,} "
        f"({100 * sum(failures.values()) / did.total():.1f} %): "
        + ", ".join(f"{name} {count:,}" for name, count in failures.items())
        + "\n\n| quarter | memory, MiB (median) | (most) | open files (median) | (most) |\n|---|---|---|---|---|\n"
        + rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--write", type=Path, help="file for the result (Markdown)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found, samples = soak(int(server.stdout.readline()), options.requests, Path(folder))
        did = Counter(json.loads(server.communicate(timeout=60)[0]))
    finally:
        server.kill()
    assert found.get("refused", 0) == did["refused"], f"{found.get('refused')} kept as refused, {did['refused']} were"
    text = table(found, did, samples, time.monotonic() - started, options.requests)
    print(text)
    if options.write is not None:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
