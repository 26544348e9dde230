"""What is swept (sweep.py), as functions that a forked process calls; imports all that they need, before the forks."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from local_hub import Hub
from probe_stub import StubServer

import assay_quantize.calibration.calibrate
import assay_quantize.checkpoint.hub
import assay_quantize.engine.local_runner
import assay_quantize.engine.quantize
import assay_quantize.plan.planner
import assay_quantize.remote.hub_stream
import assay_quantize.verify.config
import assay_quantize.verify.finished
import assay_quantize.verify.headers
import assay_quantize.verify.verify  # noqa: F401
import assay_reports.card
import assay_reports.report
from assay.errors import AssayError
from assay_cli import root
from assay_cli.terminal import say_error
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.tasks.lm_eval import load
from assay_quantize.kernels import error_rows, quantize_rows

# What every command does again, and takes longest: loading kernels, its own options, the parsing of templates, and the index of
# lm-eval's thousands of tasks, which `calibrate` asks for what no text may hold.
zeros = np.zeros((16, 128), np.uint16)
for scheme, amax in (("w4a16", None), ("nvfp4a16", 1.0)):
    error_rows(quantize_rows(zeros, "BF16", scheme, amax=amax).parts, zeros, "BF16", scheme)
assay_reports.card.environment(html=False).get_template("card.md.j2")
assay_reports.report.environment(html=False).get_template("report.md.j2")
assay_reports.report.environment(html=True).get_template("report.html.j2")
root.all_commands()
load._manager(None, True)


def assay(*words: str) -> None:
    """The command `assay WORDS`."""
    sys.argv = ["assay", *words]
    root.main()


def in_folder(folder: Path, *words: str) -> None:
    """The same in this process, without what it prints; anything but exit 2 is well."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assay(*words)
    except SystemExit as ended:
        assert ended.code != 2, words
    finally:
        os.chdir(before)


# ------------------------------------------------------------------------------------------------ with a hub or a server
def quantize_from_hub(served: str, home: str) -> None:
    """From a hub on loopback that serves the folder `served` as org/model; home: of the hub's library."""
    hub = Hub(Path(served))
    hub.use(pytest.MonkeyPatch(), Path(home))
    assay("quantize", "org/model", "-p", "w4a16", "--stream-from", "hub", "--runs", "runs", "--workers", "1")


def calibrate(folder: str, text: str) -> None:
    """Writes channel weights; the text is a file, so that no tokens are sampled."""
    given = ("--text", text, "--tokens", "64", "--length", "16", "--min-tokens", "1")
    assay("calibrate", folder, "--out", "made/channels.safetensors", *given)


def probe() -> None:
    """Two probes of a scripted server, one after the other: their requests and replies are kept in a ledger."""
    with StubServer() as server:
        asked = ("--requests", "4", "--garble", "4", "--concurrency", "1", "--max-tokens", "8")
        assay("probe", server.base_url, "--probes", "argmax,garble", *asked, "--label", "swept", "--out", "made")


# ------------------------------------------------------------------------------------------------ replies
WHO = Identity("c" * 64, "f" * 64, "swept")
REQUESTS = [Request("codes", str(item), 0, "/v1/completions", {"prompt": f"question {item}"}) for item in range(9)]
BATCH = 3
ITEMS = [{"id": str(item), "prompt": "x"} for item in range(3)]


def reply_to(request: Request) -> Reply:
    """Every third one is longer than a page."""
    text = os.fsencode(request.item).hex() * (3000 if int(request.item) % 3 else 1)
    return Reply("answered", text=text, output_tokens=len(text), token_ids=(1, 2), finish_reason="stop")


def ask(path: str, told: str) -> int:
    """Journal a reply to every request that has none, as the client does; each line of the file `told` is what was kept.

    A line of `told` is written when the journal has returned.
    """
    lines = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(what: str) -> None:
        os.write(lines, f"{what}\n".encode())

    def ask_batch(journal: Journal, batch: list[tuple[str, Request]]) -> None:
        found = journal.find_all([key for key, _ in batch])
        missing = [(key, request) for key, request in batch if key not in found]
        if missing:
            journal.write_requests(missing, WHO)
            journal.write_replies([(key, reply_to(request), 1) for key, request in missing])
            for key, _ in missing:
                tell(key)
            journal.add_counters("phase", {"drafts": 1.0})
            tell("counted")

    errors = []
    try:
        with Journal(Path(path)) as journal:
            if journal.find_items("codes", [1]) is None:
                journal.keep_items("codes", [1], ITEMS)
                tell("items")
            keyed = [(request.key(WHO), request) for request in REQUESTS]
            for first in range(0, len(keyed), BATCH):
                try:
                    ask_batch(journal, keyed[first : first + BATCH])
                except AssayError as error:  # other threads go on, until they hear of it
                    errors.append(error)
    except AssayError as error:
        errors.append(error)
    if errors:
        say_error(str(errors[0]))
    return 2 if errors else 0


def wrong_in_journal(path: Path, told: set[str], num_counted: int) -> list[str]:
    """What was told to be kept and is not there, or is another; what is there of what was never asked; counts too high."""
    replies = {request.key(WHO): reply_to(request) for request in REQUESTS}
    problems = []
    with Journal(path) as journal:
        found = journal.find_all(list(replies))
        problems += [f"the reply to {key[:8]} was told to be kept and is gone" for key in told & replies.keys() - found.keys()]
        problems += [f"the reply to {key[:8]} is another" for key, reply in found.items() if reply != replies[key]]
        if "items" in told and journal.find_items("codes", [1]) != ITEMS:
            problems.append("the items are gone")
        counted = journal.counters("phase").get("drafts", 0.0)
        if not num_counted <= counted <= num_counted + 1:
            problems.append(f"{counted:g} were counted, {num_counted} were told")
        if journal.num_changed:
            problems.append(f"{journal.num_changed} replies are not as they were written")
    return problems


def rows_of(path: Path) -> str:
    """Every row of a journal, without times, attempts, and the columns that an earlier version lacks."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        columns = "key, task, item, sample, path, body, status, reply, logprobs"
        rows = db.execute(f"SELECT {columns} FROM requests ORDER BY key").fetchall()
        return repr([rows, db.execute("SELECT * FROM items ORDER BY key").fetchall()])


def journal_of_an_earlier_version(path: Path) -> None:
    """Every reply is there; the columns that came later are not."""
    assert ask(str(path), os.devnull) == 0
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE requests DROP COLUMN suite")
        db.execute("ALTER TABLE requests DROP COLUMN reply_sha256")


# ------------------------------------------------------------------------------------------------ the shim
def every_call(other: str) -> None:
    """Every kind of call that is counted, in the working directory; `other`, outside of it, is only read."""
    os.mkdir("new")
    folder = os.open("new", os.O_RDONLY)
    file = os.open("a", os.O_RDWR | os.O_CREAT, dir_fd=folder)
    os.write(file, b"12")
    os.pwrite(file, b"12", 0)
    os.writev(file, [b"1", b"2"])
    os.pwritev(file, [b"1", b"2"], 0)
    os.fsync(file)
    os.fdatasync(file)
    os.ftruncate(file, 1)
    os.posix_fallocate(file, 0, 8)
    os.truncate("new/a", 8)
    source = os.open(other, os.O_RDONLY)
    os.sendfile(file, source, 0, 8)
    os.copy_file_range(source, file, 8)
    os.rename("a", "b", src_dir_fd=folder, dst_dir_fd=folder)
    os.link("new/b", "new/c")
    os.symlink("b", "new/d")
    os.unlink("c", dir_fd=folder)
    os.unlink("new/d")
    Path("x").write_text("x")
    os.unlink("new/b")
    os.rmdir("new")


def three_writes() -> None:
    file = os.open("file", os.O_WRONLY | os.O_CREAT)
    rest = b"0123456789"
    first = _tried(lambda: os.write(file, rest))
    rest = rest[first if isinstance(first, int) else 0 :]
    print(first, _tried(lambda: os.write(file, rest)), _tried(lambda: os.write(file, b"next")))


def two_reads() -> None:
    file = os.open("file", os.O_RDONLY)
    print(*(_tried(lambda read=read: read().decode()) for read in (lambda: os.read(file, 10), lambda: os.pread(file, 10, 0))))


def _tried(call: Callable[[], object]) -> object:
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
