"""Jobs, each a child process of its own; rounds of them, A B A B; what came out. A job that fails is a result that says so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Job:
    """One thing to measure.

    name: key of its results. kind, arguments: see child.py. num_bytes: what a rate is counted in (bytes of BF16 source,
    or of the files read). cold: evict the folders it reads from the page cache first. keep: leave the output there.
    rounds: at most so many. timeout_s: then it is killed, and has failed. group: heading of the table it is a row of.
    """

    name: str
    kind: str
    arguments: dict[str, Any]
    num_bytes: int
    group: str = ""
    tiny: Path | None = None
    cold: bool = False
    keep: bool = False
    rounds: int = 99
    timeout_s: float = 900.0


@dataclass
class Result:
    """Every value of one job, in the order of the rounds. error: why the last attempt failed; None if none did."""

    name: str
    group: str
    num_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    startup_s: list[float] = field(default_factory=list)
    peak_rss_bytes: list[int] = field(default_factory=list)
    out_bytes: int | None = None
    error: str | None = None

    @property
    def best_s(self) -> float | None:
        return min(self.seconds) if self.seconds and self.error is None else None

    @property
    def best_cpu_s(self) -> float | None:
        return min(self.cpu_s) if self.cpu_s and self.error is None else None

    @property
    def gb_per_s(self) -> float | None:
        return None if self.best_s is None else self.num_bytes / 1e9 / self.best_s

    @property
    def peak_bytes(self) -> int | None:
        """The largest of the rounds."""
        return max(self.peak_rss_bytes) if self.peak_rss_bytes and self.error is None else None


@dataclass
class Results:
    """All results by name, saved after every process, so that an interrupted run keeps what it has."""

    path: Path
    say: Callable[[str], None]
    by_name: dict[str, Result] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)

    def get(self, name: str) -> Result | None:
        return self.by_name.get(name)

    def save(self) -> None:
        data = {"results": [asdict(result) for result in self.by_name.values()], "comparisons": self.comparisons}
        self.path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def fail(self, job: Job, error: str) -> None:
        result = self.by_name.setdefault(job.name, Result(job.name, job.group, job.num_bytes))
        result.error = error = error.replace(str(self.path.parent), "FOLDER")
        self.say(f"{job.name:44} FAILED: {error}")
        self.save()

    def measure(self, job: Job) -> None:
        """Run one job once and add what came out."""
        out = Path(job.arguments["out"]) if "out" in job.arguments else None
        if out is not None:
            shutil.rmtree(out, ignore_errors=True)
        os.sync()
        if job.cold:
            for key in ("source", "checkpoint"):
                if job.arguments.get(key):
                    evict(Path(job.arguments[key]))
        report = run_child(job)
        if isinstance(report, str):
            self.fail(job, report)
            return
        result = self.by_name.setdefault(job.name, Result(job.name, job.group, job.num_bytes))
        result.seconds.append(report["seconds"])
        result.cpu_s.append(report["cpu_s"])
        result.startup_s.append(report["startup_s"])
        result.peak_rss_bytes.append(report["peak_rss_bytes"])
        if out is not None:
            result.out_bytes = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
            if not job.keep:
                shutil.rmtree(out)
        rate = job.num_bytes / 1e9 / report["seconds"]
        peak = report["peak_rss_bytes"] / 2**20
        self.say(f"{job.name:44} {report['seconds']:8.2f} s  {rate:7.3f} GB/s  {peak:7.0f} MiB  {report['cpu_s']:7.1f} CPU s")
        self.save()

    def interleave(self, jobs: Sequence[Job], *, rounds: int, until: float) -> None:
        """Each job once, then again, at most `rounds` times; a new round begins only if it should end before `until`
        (of time.monotonic), by what its jobs took before. A job that failed is not tried again."""
        took_s: dict[str, float] = {}
        for number in range(rounds):
            due = [job for job in jobs if number < job.rounds and not self.has_failed(job.name)]
            expected_s = sum(took_s.get(job.name, 0.0) for job in due)
            if number and time.monotonic() + expected_s > until:
                self.say(f"({number} of {rounds} rounds: the next would take {expected_s:.0f} s, too long)")
                return
            for job in due:
                began = time.monotonic()
                self.measure(job)
                took_s[job.name] = time.monotonic() - began

    def has_failed(self, name: str) -> bool:
        result = self.by_name.get(name)
        return result is not None and result.error is not None


def run_child(job: Job) -> dict[str, Any] | str:
    """The report of one child process, or in one line why there is none."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        command = [sys.executable, str(CHILD), str(report), job.kind, json.dumps(job.arguments)]
        if job.tiny is not None:
            command += ["--tiny", str(job.tiny)]
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, env=environment, timeout=job.timeout_s, capture_output=True, text=True, errors="replace", check=False
            )
        except subprocess.TimeoutExpired:
            return f"did not end in {job.timeout_s:.0f} s"
        if done.returncode == 0 and report.is_file():
            loaded: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
            return loaded
    return f"exit {done.returncode}: {last_words(done.stderr)}"


def last_words(stderr: str) -> str:
    """The last line of a traceback; when it has no message, after the place it comes from."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if not lines:
        return "no message"
    places = re.findall(r'File ".*?([^/"]+)", line (\d+), in (\S+)', stderr)
    where = "" if ":" in lines[-1] or not places else "{}:{} {}: ".format(*places[-1])
    return where + lines[-1][:300]


def evict(folder: Path) -> None:
    """Ask the kernel to forget the pages of every file in `folder`. Works without root, for pages that are not dirty."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
