"""One attempt at `make quantize eval`: the two commands, the stage that they are in, and what is done to them there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from assay_evaluate.client.journal_reading import count_replies
from assay_evaluate.serving.process import group_members

STAGES = ("quantize", "verify", "start", "measure", "judge", "report")
"""Of the way. start: until vLLM answers. judge: until gates.json is there; report: until the command ends."""
COMMANDS = ("quantize", "evaluate")
PRECISIONS = ("fp8", "w4a16")
ORPHAN_S = 20.0
"""A server whose evaluation was killed notices in 0.25 s and has 10 s to end."""
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # ignored in the background of a script
    "from assay_cli import main; main()"
)
POLL_S = 0.02


@dataclass
class Attempt:
    """One of COMMANDS under way. Output of both streams is in `log`."""

    process: subprocess.Popen[bytes]
    command: str
    log: Path
    run_dir: Path
    begun_ns: int
    groups: set[int] = field(default_factory=set)
    """Process groups of the servers that it started, as far as they were seen."""

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def stage(self) -> str:
        """Where it is; of one that was killed, where it was hit. `before`: in none of STAGES yet."""
        return self._of_quantize() if self.command == "quantize" else self._of_evaluate()

    def _of_quantize(self) -> str:
        text = self.text()
        for precision in PRECISIONS:
            place, checkpoint = self.run_dir / precision, self.run_dir / precision / "checkpoint"
            if self._is_new(place / "verify.json") or re.search(
                rf"^{precision} .*done before and verified", text, re.MULTILINE
            ):
                continue
            if re.search(rf"^{precision} .* -> ", text, re.MULTILINE):
                return "verify"
            there = [checkpoint, *checkpoint.iterdir()] if checkpoint.exists() else []
            return "quantize" if any(map(self._is_new, there)) else "before"
        return "before"  # the first byte, or the end

    def _of_evaluate(self) -> str:
        if self._is_new(self.run_dir / "gates.json"):
            return "report"
        text = self.text()
        num_served = text.count("vLLM serves")
        if sum(self._is_new(path) for path in (self.run_dir / "logs").glob("*.log")) > num_served:
            return "start"
        if max(text.rfind(f"{PRECISIONS[-1]}: measured {how}") for how in ("in", "already")) > text.rfind(" is asked further"):
            return "judge"
        return "measure" if num_served else "before"

    def _is_new(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime_ns >= self.begun_ns
        except FileNotFoundError:
            return False

    def look_for_servers(self) -> None:
        """Supervisors are children of the command, and lead the group of their server."""
        mark = b"_supervisor.py\0%d\0" % self.process.pid
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "cmdline").read_bytes():
                    self.groups.add(int(folder.name))

    def kill(self, number: int) -> None:
        """The signal to the command and what else is in its group, as a terminal or an impatient user sends it."""
        self.look_for_servers()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill_server(self) -> bool:
        """SIGKILL to vLLM, not to its supervisor. False: there is none."""
        self.look_for_servers()
        members = {pid for group in self.groups for pid in group_members(group) if pid != group}
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(members)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Whether it came true before the command ended."""
        while not self.is_over():
            if condition():
                return True
            time.sleep(POLL_S)
        return False

    def num_replies(self) -> int:
        """Kept in the journal by now."""
        return sum(count_replies(self.run_dir / "journal.db").values())

    def wait_for_replies(self, more: int) -> bool:
        """Whether so many more are kept before the command ends."""
        begun = self.num_replies()
        return self.wait_for(lambda: self.num_replies() >= begun + more)


def begin(
    command: str, target: Path, runs: Path, run_dir: Path, log: Path, environment: dict[str, str], place: Path
) -> Attempt:  # fmt: skip
    """Start one of COMMANDS in the folder `place` as the Makefile calls it, in a process group of its own."""
    arguments = [sys.executable, "-c", PROGRAM, command, str(target), "--profile", "cpu-emulated", "--runs", str(runs)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=place,
            env={**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "250", **environment},
        )  # fmt: skip
    return Attempt(process, command, log, run_dir, time.time_ns() - 10_000_000)  # stamps of files are a tick behind


Answers = dict[str, tuple[object, ...]]


def answers(journal: Path) -> Answers:
    """Key of a request -> all that is kept of its reply, of those answered or refused. Read from a copy: as it was left."""
    if not journal.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        for end in ("", "-wal"):
            place = Path(f"{journal.resolve()}{end}")
            if place.exists():
                shutil.copy(place, Path(folder) / f"copy{end}")
        with contextlib.closing(sqlite3.connect(Path(folder) / "copy")) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'requests'").fetchall():
                return {}
            rows = db.execute(
                "SELECT key, task, reply, reply_sha256, num_attempts, asked_at, status FROM requests"
                " WHERE status IN ('answered', 'refused')"
            ).fetchall()
    found = {row[0]: tuple(row[1:]) for row in rows}
    assert len(found) == len(rows)
    return found
