"""kill -9 of the client at ten random moments and of a real vLLM twice: what is lost, what is asked again, is the end the same.

    python benchmarks/evaluate/kill_vllm.py

tests/evaluate/client/test_kill.py does this against a scripted server in seconds; here tiny-glm answers, in minutes. A proxy
between client and vLLM, which nobody kills, notes every request that goes in and every reply that comes out. Greedy, no
speculation, no sampled texts: the measurements must be the same bytes as those of an undisturbed run. Prints a table in
Markdown; exit 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from assay.errors import AssayError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.records.base import canonical_json
from assay.records.measurement import Measurement
from assay_evaluate.client.journal import _unpack
from assay_evaluate.run.candidate import Candidate
from assay_evaluate.run.evaluate import evaluate
from assay_evaluate.serving.server import Server, ServerSpec, serve

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
CLIENT_KILLS, SERVER_KILLS, CONCURRENCY = 10, 2, 8
VOLATILE = {"started", "seconds", "requests_in_flight_share", "mean_requests_in_flight"}
SUITE = SuiteRecipe.model_validate(
    {
        "schema": 1, "name": "killed", "seed": "eval-killed", "acceptance": False,
        "tasks": [
            {"kind": "arithmetic", "name": "arithmetic", "num_items": 100, "num_steps": [3, 4, 5], "max_tokens": 128},
            {"kind": "needle", "name": "needle", "num_items": 20, "num_needles": 3, "max_tokens": 64, "lengths_tokens": [256]},
        ],
    }
)  # fmt: skip


class Proxy(ThreadingHTTPServer):
    """Hands requests on to the server at `target` and notes those of the suite; 503 while nobody is there."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target: int | None = None
        self.lock = threading.Lock()
        self.events: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def note(self, event: str, body: bytes) -> None:
        data = json.loads(body) if body else {}
        data.pop("model", None)
        if data.get("max_tokens", 1) > 1:  # the others ask about the server
            with self.lock:
                self.events.append((event, canonical_json(data)))

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections of killed clients break; that is what is tried."""

    def num_replied(self, since: int = 0) -> int:
        return sum(event == "replied" for event, _ in self.events[since:])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        self.forward(b"")

    def do_POST(self) -> None:
        self.forward(self.rfile.read(int(self.headers["Content-Length"])))

    def forward(self, body: bytes) -> None:
        self.server.note("asked", body)
        status, payload = 503, b'{"message": "no server"}'
        if self.server.target is not None:
            there = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=600)
            try:
                there.request(self.command, self.path, body or None, {"Content-Type": "application/json"})
                reply = there.getresponse()
                status, payload = reply.status, reply.read()
            except (OSError, http.client.HTTPException):
                pass  # killed meanwhile
            finally:
                there.close()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
            self.wfile.flush()
        except OSError:
            self.close_connection = True
            return
        if status == 200:
            self.server.note("replied", body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class Vllm:
    """A real vLLM behind the proxy, started as often as it is killed."""

    def __init__(self, proxy: Proxy, folder: Path) -> None:
        self.proxy, self.folder = proxy, folder
        self.open: AbstractContextManager[Server] | None = None
        self.num_started = 0

    def start(self) -> None:
        profile = load_recipe(ProfileRecipe, "cpu-emulated")
        log = self.folder / f"vllm-{self.num_started}.log"
        spec = ServerSpec(CHECKPOINT, profile, Serving(), speculate=False, log_path=log, is_open=True)  # the proxy has no key
        self.open = serve(spec)
        server = self.open.__enter__()
        self.num_started += 1
        self.proxy.target = int(server.base_url.rsplit(":", 1)[1].split("/")[0])

    def kill(self) -> None:
        """Every process that listens on its port or was started by it, at once."""
        port, self.proxy.target = self.proxy.target, None
        for pid in _processes_with(f"--port {port}"):
            os.kill(pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        assert self.open is not None
        self.open.__exit__(None, None, None)


def _processes_with(words: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if words in line and "vllm" in line:
                found.append(int(folder.name))
    return found


def run_client(url: str, run_dir: Path) -> None:
    profile = ProfileRecipe(schema=1, name="running", hardware=Hardware(device="cpu"), concurrency=CONCURRENCY)
    candidate = Candidate("bf16", CHECKPOINT, is_reference=True, endpoint=GivenServer(url=url))
    try:
        evaluate("tiny-glm", [candidate], suite=SUITE, profile=profile, serving=Serving(), run_dir=run_dir)
    except AssayError as error:
        raise SystemExit(str(error)) from None


def started(url: str, run_dir: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--client", url, "--run", str(run_dir)])


def answered(run_dir: Path) -> Counter[str]:
    """Bodies that the journal has replies to -> how many: both passes ask the same."""
    if not (run_dir / "journal.db").exists():
        return Counter()
    with sqlite3.connect(run_dir / "journal.db") as db:
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
        rows = db.execute("SELECT body FROM requests WHERE status = 'answered'").fetchall() if "requests" in tables else []
    return Counter(_unpack(row[0]) for row in rows)


def finished(run_dir: Path) -> bytes:
    found = [Measurement.load(run_dir / "measurements" / f"{label}.json") for label in ("bf16", "bf16-repeat")]
    return canonical_json([one.model_dump(mode="json", exclude=VOLATILE) for one in found]).encode()


def wait_for(proxy: Proxy, since: int, wanted: int, client: subprocess.Popen[bytes]) -> bool:
    """Whether so many replies came before the client ended."""
    while proxy.num_replied(since) < wanted:
        if client.poll() is not None:
            return False
        time.sleep(0.005)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        run_client(options.client, options.run)
        return
    proxy = Proxy()
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        raise SystemExit(0 if _disturb(proxy, Vllm(proxy, Path(name)), Path(name)) else 1)


def _disturb(proxy: Proxy, vllm: Vllm, folder: Path) -> bool:
    vllm.start()
    calm, run_dir = folder / "calm", folder / "run"
    assert started(proxy.url, calm).wait() == 0
    passes = Counter(body for event, body in proxy.events if event == "asked")
    total = sum(passes.values())
    draw, begun_at = random.Random(5), len(proxy.events)
    kinds = ["client"] * CLIENT_KILLS + ["server"] * SERVER_KILLS
    draw.shuffle(kinds)
    repeated, resent = 0, 0
    for kind in [*kinds, None]:
        before, begun = answered(run_dir), len(proxy.events)
        client = started(proxy.url, run_dir)
        if kind is not None:
            assert wait_for(proxy, begun, draw.randint(5, total // 16), client), "a client finished before it was to be killed"
            time.sleep(draw.uniform(0, 0.2))
        if kind == "server":
            vllm.kill()
            vllm.start()  # meanwhile the client gives up, or goes on
        if kind is not None:
            client.kill()
        code = client.wait()
        print(
            f"{kind or 'end'}: client ended with {code}, {sum(answered(run_dir).values())} of {total} in the journal",
            flush=True,
        )
        time.sleep(2)  # replies on their way to the dead client
        again = Counter(body for event, body in proxy.events[begun:] if event == "replied")
        repeated += sum(max(0, before[body] + number - passes[body]) for body, number in again.items())
        resent += sum(again.values()) - sum((answered(run_dir) - before).values())
    vllm.close()
    same = finished(run_dir) == finished(calm)
    asked = sum(event == "asked" for event, _ in proxy.events[begun_at:])
    columns = ("killed", "requests", "asked in all", "on their way when a client died", "asked again though kept", "same bytes")
    killed = f"client {CLIENT_KILLS} times, vLLM {SERVER_KILLS} times"
    for row in (columns, ["---"] * 6, (killed, total, asked, resent, repeated, same)):
        print(f"| {' | '.join(map(str, row))} |")
    return same and repeated == 0


if __name__ == "__main__":
    main()
