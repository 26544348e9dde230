"""What the client costs: CPU time per request beside a bare HTTP loop, and memory over the number of items.

    python benchmarks/evaluate/client_overhead.py --items 100000

A stub server in a process of its own answers at once with a reply of 1,280 characters to a prompt of 600. The bare loops post
the same bodies from 64 threads and parse the replies, nothing more: one shared `httpx.Client`, as one writes it; and one
connection of the standard library per thread, the cheapest there is. Ours journals every request and reply; `task` is a whole
task of a suite: its items are made, asked, scored and kept as records. Each measurement is a process of its own; user and
system time of all its threads is counted. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONCURRENCY = 64
PATH = "/v1/chat/completions"
REPLY_TEXT = "First 3 + 4 = 7, then we go on. " * 40
QUESTION = "A farmer has 3 fields. " * 26


def body_of(number: int) -> dict[str, Any]:
    """Request number `number`: its own question, as an evaluation asks it."""
    return {
        "messages": [{"role": "user", "content": f"{number}: {QUESTION}"}], "max_tokens": 16384, "temperature": 0.0,
        "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the server
class Stub(asyncio.Protocol):
    """Answers every POST with the same reply."""

    data = json.dumps(
        {
            "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": REPLY_TEXT, "tool_calls": []}}],
            "usage": {"prompt_tokens": 150, "completion_tokens": 300, "total_tokens": 450},
        }
    ).encode()
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) if end else 0
        if end and len(rest) >= length:
            self.buffer = rest[length:]
            self.transport.write(self.reply)


async def serve_stub() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ------------------------------------------------------------------------------------------------ what is measured
def bare_httpx(port: int) -> Callable[[], Callable[[dict[str, Any]], Any]]:
    import httpx

    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", limits=limits, trust_env=False)
    return lambda: lambda body: client.post(PATH, json=body).json()


def bare_stdlib(port: int) -> Callable[[], Callable[[dict[str, Any]], Any]]:
    def make() -> Callable[[dict[str, Any]], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port)

        def post(body: dict[str, Any]) -> Any:
            connection.request("POST", PATH, json.dumps(body).encode(), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())

        return post

    return make


def run_bare(make: Callable[[], Callable[[dict[str, Any]], Any]], num_items: int) -> None:
    numbers = itertools.count()

    def work() -> None:
        post = make()
        while (number := next(numbers)) < num_items:
            post({"model": "model", **body_of(number)})

    threads = [threading.Thread(target=work) for _ in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class Endpoint:
    base_url: str
    model: str = "model"
    max_model_len: int | None = 32768
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_urls(self) -> tuple[str, ...]:
        return (self.base_url,)

    def check_alive(self) -> None:
        """It is."""


def run_ours(port: int, num_items: int) -> None:
    from assay_evaluate.client.client import Client
    from assay_evaluate.client.journal import Identity, Journal, Request

    def requests() -> Iterator[Request]:
        return (Request("synthetic", str(number), 0, PATH, body_of(number)) for number in range(num_items))

    endpoint, who = Endpoint(f"http://127.0.0.1:{port}"), Identity("checkpoint", "fingerprint", "benchmark")
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "journal.db") as journal,
        Client(endpoint, journal, who, concurrency=CONCURRENCY) as client,
    ):
        num_answered = sum(reply.status == "answered" for reply in client.ask_each(requests()))
        assert num_answered == client.flight.num_sent == journal.count("answered") == num_items


def run_task(port: int, num_items: int) -> None:
    """A whole task of a suite: makes its items, asks, scores them and keeps a result of each; replies are forgotten."""
    from assay.recipes.suite import ArithmeticTask
    from assay_evaluate.asking.dialect import Dialect
    from assay_evaluate.asking.session import Session
    from assay_evaluate.client.client import Client
    from assay_evaluate.client.journal import Identity, Journal
    from assay_evaluate.tasks.generated import arithmetic_items, run_generated

    endpoint, who = Endpoint(f"http://127.0.0.1:{port}"), Identity("checkpoint", "fingerprint", "benchmark")
    task = ArithmeticTask(kind="arithmetic", name="arithmetic", num_items=num_items // 2, max_tokens=16384)
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder) / "journal.db") as journal,
        Client(endpoint, journal, who, concurrency=CONCURRENCY) as client,
    ):
        session = Session(client, Dialect(True, True, {}), "eval-benchmark", 0, has_reasoning_parser=False)
        result = run_generated(session, task, arithmetic_items(task, session.seed))
        assert (result.num_items, result.num_failed) == (num_items, 0)


def measure(what: str, port: int, num_items: int) -> dict[str, float]:
    """Seconds and bytes of this process while it puts `num_items` requests."""
    run = {
        "httpx": lambda n: run_bare(bare_httpx(port), n),
        "stdlib": lambda n: run_bare(bare_stdlib(port), n),
        "ours": lambda n: run_ours(port, n),
        "task": lambda n: run_task(port, n),
    }[what]
    run(500)  # imports, connections, caches
    cpu_s, wall_s = time.process_time(), time.monotonic()
    run(num_items)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    return {"cpu_s": cpu_s, "wall_s": wall_s, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def in_a_child(what: str, port: int, num_items: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", what, "--port", str(port), "--items", str(num_items)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000, help="requests of the longest run")
    parser.add_argument("--measure", choices=["httpx", "stdlib", "ours", "task"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        asyncio.run(serve_stub())
    if options.measure:
        print(json.dumps(measure(options.measure, options.port, options.items)))
        return
    stub = subprocess.Popen([sys.executable, __file__, "--stub"], stdout=subprocess.PIPE, text=True)
    try:
        assert stub.stdout is not None
        port = int(stub.stdout.readline())
        short = options.items // 10
        print(
            f"| {CONCURRENCY} in flight | requests | CPU per request, µs | against httpx | requests per s | peak memory, MiB |"
        )
        print("|---|---|---|---|---|---|")
        base_us = None
        for what, num_items in [
            ("httpx", short), ("stdlib", short), *((one, n) for one in ("ours", "task") for n in (short, options.items)),
        ]:  # fmt: skip
            found = in_a_child(what, port, num_items)
            cpu_us = found["cpu_s"] / num_items * 1e6
            base_us = base_us or cpu_us
            print(
                f"| {what} | {num_items:,} | {cpu_us:.0f} | {cpu_us / base_us - 1:+.0%} | {num_items / found['wall_s']:.0f} "
                f"| {found['rss'] / 2**20:.0f} |",
                flush=True,
            )
    finally:
        stub.kill()
        stub.wait()


if __name__ == "__main__":
    main()
