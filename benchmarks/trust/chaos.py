"""Chaos of the whole way: `make quantize eval` of tiny-glm killed in every stage, its server killed, disks full, clock jumping.

    python benchmarks/trust/chaos.py --write benchmarks/trust/chaos.md

One run of a reference and a candidate is disturbed at seeded random moments until it is judged; another is left alone. Both
must end with the same verdicts and the same checkpoints. After every accident the same command goes on; every reply that the
journal had before must be there afterwards as it was: not asked again, not sent again, not changed. Servers of killed
evaluations must end by themselves. The commands are those that the Makefile calls, without its preflight, which writes nothing.
Exit 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chaos_attempt import ORPHAN_S, PRECISIONS, STAGES, Answers, Attempt, answers, begin
from chaos_machine import DAY_S, JOURNAL, RUNS, Machine, machine
from chaos_result import compare

from assay.records.run import RUN_RECORD
from assay_evaluate.serving.process import group_members

MODEL = Path(__file__).with_name("chaos_model.yaml")
KILLS = {"quantize": 4, "verify": 3, "start": 3, "measure": 4, "judge": 3, "report": 3}
SIGNALS = (signal.SIGKILL,) * 14 + (signal.SIGTERM,) * 3 + (signal.SIGINT,) * 3
ENDS_WITH = {signal.SIGKILL: {-9}, signal.SIGTERM: {-15}, signal.SIGINT: {130, -2}}
"""-2: Python itself, while it shuts down after the command's last word."""
TRIES = 6
"""Of a moment that came too late: the stage was over before the signal. Each waits half as long."""
SHORTEST_S = 0.002
WATCH_EVERY_S = 0.1
COLD_START_S = 60.0
"""Of vLLM on a CPU: what a kill in its start is drawn from where the undisturbed run had warm servers."""
LIMIT_S = 900.0
"""Of one attempt: one that takes longer hangs."""


@dataclass(frozen=True)
class Accident:
    """What is to happen. number: of the signal that `kill` sends."""

    what: str
    stage: str
    number: int = 0

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name} to the command" if self.number else self.what


@dataclass(frozen=True)
class Row:
    """What happened. hit: the stage it was in. num_kept: replies in the journal afterwards."""

    accident: str
    wanted: str
    hit: str
    ended: int
    num_kept: int
    clock_s: int
    seconds: float
    says: str = ""


@dataclass
class Scene:
    """The run that is disturbed, and what was seen of it."""

    at: Machine
    target: Path
    """Recipe of the model."""
    folder: Path
    draw: random.Random
    seconds: dict[str, float]
    """How long each stage takes when it is left alone."""
    all_replies: int
    """Of a run that is left alone."""
    most_replies: int = 4
    """Between two accidents while measuring: later ones must find questions that are open."""
    rows: list[Row] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    orphans: dict[int, float] = field(default_factory=dict)
    """Process group of a server whose evaluation is gone -> when that was (monotonic)."""
    orphan_s: list[float] = field(default_factory=list)
    num_left: int = 0
    num_missed: int = 0
    missed: list[Accident] = field(default_factory=list)
    """Those that came too late every time."""
    kept: Answers = field(default_factory=dict)
    is_made: bool = False

    @property
    def journal(self) -> Path:
        return self.at.run_dir / "journal.db"

    # -------------------------------------------------------------------------------------------- attempts
    def begin(self, command: str, *, is_cold: bool = False) -> Attempt:
        """is_cold: where no warm serving environment is found."""
        log = self.folder / f"attempt-{len(list(self.folder.glob('attempt-*')))}.log"
        place = self.folder / "cold" if is_cold else self.folder
        place.mkdir(exist_ok=True)
        return begin(command, self.target, self.at.runs, self.at.run_dir, log, self.at.environment, place)

    def end(self, attempt: Attempt, accident: str, wanted: str, expected: set[int], hit: str | None = None) -> Row:
        """Wait for the command; hold what it left against what was there."""
        begun = time.monotonic()
        while not attempt.is_over():
            attempt.look_for_servers()
            if time.monotonic() - begun > LIMIT_S:
                self.broken.append(f"{accident} in {wanted}: the command hangs")
                attempt.kill(signal.SIGKILL)
            time.sleep(0.1)
        code, text = attempt.process.returncode, attempt.text()
        hit = hit or attempt.stage()
        self.orphans |= {group: time.monotonic() for group in attempt.groups}
        where = f"{accident} in {hit}: "
        if code not in expected:
            self.broken.append(f"{where}ended with {code}, not {sorted(expected)}: {tail(text)}")
        if "Traceback" in text.split("last lines of")[0]:
            self.broken.append(f"{where}a traceback: {tail(text)}")
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        if len(errors) != (code == 2):
            self.broken.append(f"{where}{len(errors)} lines of error with exit {code}: {tail(text)}")
        now = answers(self.journal)
        changed = [key for key, row in self.kept.items() if now.get(key) != row]
        if changed:
            self.broken.append(f"{where}{len(changed)} of {len(self.kept)} replies were lost, changed or asked for again")
        self.kept = now
        seconds, says = time.time() - attempt.begun_ns / 1e9, errors[0] if errors else ""
        row = Row(accident, wanted, hit, code, len(now), self.at.clock_s, seconds, says)
        self.rows.append(row)
        print(row, flush=True)
        return row

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look for what is left of servers, whatever the caller waits for; at the end, until all are gone."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(is_over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _watch(self, is_over: threading.Event) -> None:
        while self.orphans or not is_over.wait(WATCH_EVERY_S):
            for group, since in list(self.orphans.items()):
                waited = time.monotonic() - since
                if not group_members(group):
                    self.orphan_s.append(waited)
                    del self.orphans[group]
                elif waited > ORPHAN_S:
                    self.broken.append(f"a server is left {waited:.0f} s after the end of its evaluation")
                    self.num_left += 1
                    del self.orphans[group]
            time.sleep(WATCH_EVERY_S)

    def make(self) -> None:
        """Both checkpoints, undisturbed."""
        if not self.is_made:
            self.end(self.begin("quantize"), "none", "quantize", {0})
            self.is_made = True

    def finish(self, accident: str = "none") -> None:
        """Everything that is missing, undisturbed."""
        self.make()
        self.end(self.begin("evaluate"), accident, "all", {0})

    # -------------------------------------------------------------------------------------------- accidents
    def cause(self, accident: Accident) -> None:
        """Let it happen; several times, where it comes too late."""
        for number in range(TRIES):
            self.at.set_clock(self.draw.choice((0, 0, -DAY_S, DAY_S)))  # between attempts the clock is set
            if self.happens(accident, 0.5**number):
                return
            self.num_missed += 1
        self.missed.append(accident)

    def happens(self, accident: Accident, share: float) -> bool:
        """False: the stage was over, or the command, before it could."""
        if accident.stage in ("quantize", "verify"):
            self.make_room()
            attempt = self.begin("quantize")
        else:
            self.make()
            if accident.stage in ("start", "measure"):
                self.make_questions()
            attempt = self.begin("evaluate", is_cold=accident.stage == "start")
        reached = attempt.wait_for(lambda: attempt.stage() == accident.stage)
        if reached and accident.stage == "measure":
            reached = attempt.wait_for_replies(self.draw.randint(1, self.most_replies))
        if not reached:
            self.end(attempt, f"{accident}: too late", accident.stage, {0})
            return False
        if accident.what == "disk full" and accident.stage == "quantize":
            attempt.wait_for(lambda: any(self.at.run_dir.glob("*/checkpoint/.model*.partial")))
        elif accident.what == "disk full":
            pass  # at once: later the stage has written all
        elif accident.stage in ("quantize", "verify"):  # of a second each, or a tenth: most of the time goes into imports
            time.sleep(SHORTEST_S * (self.seconds[accident.stage] * share / SHORTEST_S) ** self.draw.random())
        else:
            time.sleep(share * self.draw.uniform(0, 0.3 if accident.stage == "measure" else self.seconds[accident.stage]))
        hit = attempt.stage()
        return getattr(self, f"_{accident.what.replace(' ', '_')}")(attempt, accident, hit)

    def _kill(self, attempt: Attempt, accident: Accident, hit: str) -> bool:
        attempt.kill(accident.number)
        code = attempt.process.wait(LIMIT_S)
        if code == 0:
            self.end(attempt, f"{accident}: too late", accident.stage, {0})
            return False
        hit = attempt.stage()
        self.end(attempt, str(accident), accident.stage, ENDS_WITH[signal.Signals(accident.number)], hit)
        return hit == accident.stage

    def _vLLM_killed(self, attempt: Attempt, accident: Accident, hit: str) -> bool:
        if not attempt.wait_for(attempt.kill_server):
            self.end(attempt, f"{accident}: too late", accident.stage, {0})
            return False
        # the last server dies unnoticed once its evaluation is being judged
        self.end(attempt, str(accident), accident.stage, {2} if hit == accident.stage else {0, 2}, hit)
        return hit == accident.stage

    def _disk_full(self, attempt: Attempt, accident: Accident, hit: str) -> bool:
        return self._full(RUNS, self.at.runs, attempt, accident, hit)

    def _journals_disk_full(self, attempt: Attempt, accident: Accident, hit: str) -> bool:
        return self._full(JOURNAL, self.journal, attempt, accident, hit)

    def _full(self, disk: int, place: Path, attempt: Attempt, accident: Accident, hit: str) -> bool:
        self.at.fill(disk)
        try:
            row = self.end(attempt, str(accident), accident.stage, {0, 2}, hit)
        finally:
            self.at.empty(disk)
        if row.ended == 2 and str(place) not in row.says:
            self.broken.append(f"{accident} in {hit}: the error names no path below {place}: {row.says}")
        return row.ended == 2

    def _clock_jumped(self, attempt: Attempt, accident: Accident, hit: str) -> bool:
        """A day back in the middle, and two forward: the command must end as if nothing had happened."""
        before = self.at.clock_s
        for offset in (-DAY_S, DAY_S):
            self.at.set_clock(before + offset)
            attempt.wait_for_replies(self.draw.randint(1, self.most_replies))
        self.end(attempt, "clock jumped a day back, then two forward", accident.stage, {0}, hit)
        return True

    def make_room(self) -> None:
        """Something must be left to make: begin anew once both checkpoints are there."""
        if all((self.at.run_dir / precision / "verify.json").exists() for precision in PRECISIONS):
            for precision in PRECISIONS:
                shutil.rmtree(self.at.run_dir / precision)

    def make_questions(self) -> None:
        """Something must be left to ask, also where an accident comes too late: else all but the checkpoints goes."""
        if self.all_replies - len(self.kept) > 3 * self.most_replies:
            return
        for path in self.at.run_dir.iterdir():
            if path == self.journal:  # a link to another disk
                for file in path.resolve().parent.glob("journal.db*"):
                    file.unlink()
            elif path.name not in (*PRECISIONS, RUN_RECORD):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.kept = {}


def tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:])[-600:]


# ------------------------------------------------------------------------------------------------ the whole
def undisturbed(folder: Path, target: Path) -> tuple[Path, dict[str, float], list[str]]:
    """(the run, how long each stage takes, what went wrong). seconds of quantize and verify: of one precision."""
    runs, seconds, problems = folder / "calm", Counter[str](), []
    run_dir = runs / target.stem
    for command in ("quantize", "evaluate"):
        attempt = begin(command, target, runs, run_dir, folder / f"calm-{command}.log", {}, folder)
        last = time.monotonic()
        while not attempt.is_over():
            stage, now = attempt.stage(), time.monotonic()
            seconds[stage] += now - last
            last = now
            time.sleep(0.01)
        if attempt.process.returncode != 0:
            problems.append(f"undisturbed {command} ended with {attempt.process.returncode}: {tail(attempt.text())}")
    for stage in ("quantize", "verify", "start"):
        seconds[stage] /= len(PRECISIONS)
    return run_dir, dict(seconds), problems


def accidents(draw: random.Random) -> Iterator[Accident]:
    """All of them, in the order of the stages; within a stage, and between start and measuring, at random."""
    signals = list(SIGNALS)
    draw.shuffle(signals)
    kills = {stage: [Accident("kill", stage, signals.pop()) for _ in range(number)] for stage, number in KILLS.items()}
    others = [
        Accident("disk full", "quantize"),
        Accident("vLLM killed", "start"),
        *[Accident("vLLM killed", "measure")] * 2,
        Accident("disk full", "measure"),
        Accident("journals disk full", "measure"),
        Accident("disk full", "judge"),
        Accident("disk full", "report"),
    ]
    for stages in (("quantize", "verify"), ("start", "measure")):
        some = [one for stage in stages for one in (*kills[stage], *(other for other in others if other.stage == stage))]
        draw.shuffle(some)
        yield from some
    yield Accident("clock jumped", "measure")
    for stage in ("judge", "report"):
        yield from (*kills[stage], *(other for other in others if other.stage == stage))


def disturb(scene: Scene, planned: list[Accident], limit_s: float) -> list[Accident]:
    """Those that were caused; after `limit_s` none that needs a server. Ends with an attempt that is left alone."""
    ends, tried = time.monotonic() + limit_s, list[Accident]()
    with scene.watching():
        for accident in planned:
            if time.monotonic() > ends and accident.stage in ("start", "measure") and accident.what != "clock jumped":
                continue  # of all others each costs seconds, not a start of vLLM
            scene.cause(accident)
            tried.append(accident)
        scene.at.set_clock(0)
        scene.is_made = False
        scene.finish()
    for one in scene.missed:
        tried.remove(one)
    return tried


def table(
    scene: Scene, planned: list[Accident], caused: list[Accident], common: list[str], seconds: float, how: argparse.Namespace
) -> str:
    """The result in Markdown."""
    happened = Counter((one.what, one.stage) for one in caused)
    kills = sum(number for (what, _), number in happened.items() if what == "kill")
    servers = "forks of one vLLM, but for those disturbed in their start" if how.warm else "vLLM, started anew each time"
    by_signal = Counter(signal.Signals(one.number).name for one in caused if one.number)
    signals = ", ".join(f"{name} {number}" for name, number in by_signal.items())
    disks = "tmpfs that were full" if scene.at.mounted else "a shim that answers ENOSPC (nothing can be mounted here)"
    lines = [
        "# Chaos: `make quantize eval` of tiny-glm, disturbed in every stage", "",
        f"Written by `make chaos` (benchmarks/trust/chaos.py), seed {how.seed}, {seconds / 60:.0f} minutes.",
        f"Servers: {servers}. Disks: {disks}.",
        "Clock: a shim, for the command and its server; stamps of files stay the kernel's. Rows are in the run's order.", "",
        f"- {len(caused)} of {len(planned)} planned accidents: {kills} kills of {sum(KILLS.values())} ({signals}), "
        f"{len(caused) - kills} others; {scene.num_missed} came too late and were repeated",
        *(f"- {line}" for line in common),
        f"- servers whose evaluation ended or was killed: {len(scene.orphan_s)}, all gone after "
        f"{max(scene.orphan_s, default=0):.1f} s at most; {scene.num_left} left",
        f"- attempts with the clock a day off: {sum(row.clock_s != 0 for row in scene.rows)} of {len(scene.rows)}",
        "", "Broken promises: " + ("none." if not scene.broken else ""), *(f"- {line}" for line in scene.broken), "",
        "| stage | accidents | kills |", "|---|---|---|",
    ]  # fmt: skip
    for stage in STAGES:
        number = sum(n for (_, where), n in happened.items() if where == stage)
        lines.append(f"| {stage} | {number} | {happened['kill', stage]} |")
    lines += [
        "",
        "| accident | hit in | exit | replies kept | clock, days off | s | it says |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in scene.rows:
        says = row.says.replace(str(scene.folder), "").replace("|", "\\|")
        lines.append(
            f"| {row.accident} | {row.hit if row.ended else '-'} | {row.ended} | {row.num_kept} | {row.clock_s / DAY_S:+.0f} | "
            f"{row.seconds:.0f} | {says[:200]} |"
        )
    return "\n".join(lines) + "\n"


def warm_servers(folder: Path, at: Machine, stack: ExitStack) -> None:
    """Let commands in `folder` find a Python that has imported vLLM (tests/support/serving): a start takes 3 s of a core."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support" / "serving"))
    from warm import WarmVllm

    os.environ.update(at.environment, OMP_NUM_THREADS="1")
    warm = WarmVllm()
    stack.callback(warm.close)
    warm.link(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the table goes; it is printed as well")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=90.0, help="after which no server is disturbed any more")
    parser.add_argument(
        "--warm", action="store_true", help="servers are forks of one vLLM, but for those killed in their start"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work there, and leave all files")
    options = parser.parse_args()
    began, draw = time.monotonic(), random.Random(options.seed)
    planned = list(accidents(draw))
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary, ExitStack() as stack:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        at = stack.enter_context(machine(folder, MODEL.stem))
        if options.warm:
            warm_servers(folder, at, stack)
        calm, seconds, problems = undisturbed(folder, MODEL)
        print({stage: round(spent, 2) for stage, spent in seconds.items()}, *problems, flush=True)
        seconds["start"] = max(seconds["start"], COLD_START_S if options.warm else 0)
        scene = Scene(at, MODEL, folder, draw, seconds, len(answers(calm / "journal.db")), broken=problems)
        caused = disturb(scene, planned, options.minutes * 60)
        common, broken = compare(at.run_dir, calm)
        scene.broken += broken
        if options.keep:
            shutil.copytree(at.run_dir, folder / "disturbed")
        text = table(scene, planned, caused, common, time.monotonic() - began, options)
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    return int(bool(scene.broken))


if __name__ == "__main__":
    sys.exit(main())
