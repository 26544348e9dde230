"""Syscall sweep: every call that changes the disk goes wrong once, and so does every read.

    python benchmarks/trust/sweep.py --write benchmarks/trust/sweep.md
    python benchmarks/trust/sweep.py --only report --fault KILL --at 7

A shim (tests/support/syscalls/faulty_calls.c, loaded by LD_PRELOAD) counts the calls of a command under its folder. Then, for
every call and fault, the folder is as it was, the command runs, and at that call it is killed, the disk is full, or the device
fails. It must end killed or with one line that names the path; under its own name no file is half-written; nothing that was
said to be done is missing. The same command is then run undisturbed: all files are those of a run that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SMALL_MODEL = HERE.parents[1] / "examples" / "tiny_glm" / "checkpoint"
SUPPORT = HERE.parents[1] / "tests" / "support"
PATHS = [HERE, SUPPORT / "evaluation", SUPPORT / "quantization", SUPPORT / "syscalls"]
sys.path[:0] = [str(path) for path in PATHS]

import swept_jobs  # noqa: E402
from faulty_calls import Call, Fault, build, why_not  # noqa: E402
from forking import Ended, Forking  # noqa: E402
from synthetic_run import make_run  # noqa: E402
from tiny_checkpoints import make_tiny_glm4_moe  # noqa: E402

CHANGES = (Fault.KILL, Fault.TORN, Fault.NO_SPACE, Fault.SHORT, Fault.IO_ERROR)
READS = (Fault.READ_ERROR, Fault.READ_SHORT)
WRITES_BYTES = {"write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range"}


class Place(NamedTuple):
    """Where a subject works. work: as `prepare` left it, before every command. beside: what stays as it is.

    told: a file in which a job says, before it ends, what is done for good.
    """

    work: Path
    beside: Path
    told: Path


Contents = dict[str, str]


@dataclass(frozen=True)
class Subject:
    """A command, and what must hold of its folder.

    prepare: makes `work` and `beside` once. words: the job of `swept_jobs` and its arguments. under: the folder whose calls go
    wrong. whole: files of `work` by name, without what differs from run to run. between: what is wrong after a disturbed run.
    code: of an undisturbed run. says_damaged: a disturbed one may say, and keep, that what it cannot read is damaged.
    harmless: calls that may fail without a word, by name or by name and file, if the result is that of an undisturbed run.
    """

    prepare: Callable[[Place], None]
    words: Callable[[Place], tuple[str, list[str]]]
    faults: tuple[Fault, ...] = CHANGES
    under: Callable[[Place], Path] = lambda place: place.work
    whole: Callable[[Place], Contents] = lambda place: contents(place.work)
    between: Callable[[Place, Ended, Contents, Contents], list[str]] = lambda place, ended, before, whole: half_files(
        place, before, whole
    )
    code: int = 0
    says_damaged: bool = False
    harmless: Collection[str] = ("unlink", "rmdir", "mkdir")


class Outcome(NamedTuple):
    """Of one case. how: killed, refused in a line, done. problems: what does not hold; empty: all does."""

    fault: Fault
    at: int
    hit: Call | None
    how: str
    problems: tuple[str, ...]


# ------------------------------------------------------------------------------------------------ files
def contents(folder: Path) -> Contents:
    """Every file and folder -> what is in it, but for times and what follows from them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = "folder" if path.is_dir() else hashlib.sha256(lasting(path)).hexdigest()
    return found


def lasting(path: Path) -> bytes:
    """The bytes of a file; of a record only what is the same in two runs."""
    data = path.read_bytes()
    if path.name not in ("assay_manifest.json", "assay_verify.json", "verify.json", "gates.json", "channels.safetensors.json"):
        return data
    try:
        record = json.loads(data)
    except ValueError:
        return data
    if path.name == "assay_manifest.json":
        record["shards"] = [{**shard, "seconds": 0} for shard in record["shards"]]
    if "verif" in path.name:  # of shards that were checked meanwhile, the header is looked at instead of the hash
        record["checks"]["hashes"] = sum(record["checks"].pop(name, 0) for name in ("hashes", "headers"))
        record["files"] = sorted(record["files"])
    record.pop("seconds", None)
    return json.dumps(record).encode()


def half_files(place: Place, before: Contents, whole: Contents) -> list[str]:
    """Files under their own names that are neither as they were before the command nor as it would have left them."""
    there = contents(place.work)
    return [
        f"{name}: neither as it was before nor as it should be"
        for name, digest in there.items()
        if not is_temporary(name) and digest not in (before.get(name), whole.get(name))
    ]


def is_temporary(name: str) -> bool:
    """Hidden, with whatever is in it; or the journal of a quantization, which grows."""
    return any(part.startswith(".") for part in Path(name).parts) or name.endswith("assay_journal.jsonl")


# ------------------------------------------------------------------------------------------------ quantize
def small_source(place: Place) -> None:
    place.work.mkdir()
    make_tiny_glm4_moe(
        place.beside / "model", num_layers=1, first_dense=0, num_experts=2, hidden=128, vocab_size=128, mtp=False
    )  # fmt: skip


def quantize_in_run(place: Place) -> tuple[str, list[str]]:
    return "assay", ["quantize", str(place.beside / "model"), "-p", "w4a16", "--runs", "runs", "--workers", "1"]


def quantize_out(place: Place) -> tuple[str, list[str]]:
    return "assay", ["quantize", str(place.beside / "model"), "-p", "nvfp4a16", "--out", "made/here", "--workers", "1"]


def unfinished_or_whole(place: Place, ended: Ended, before: Contents, whole: Contents) -> list[str]:
    """A checkpoint with a config has all its files; one with a manifest or a verification too; each as it should be."""
    there, problems = contents(place.work), half_files(place, before, whole)
    folders = {str(Path(name).parent) for name in whole if name.endswith("/config.json")}
    for folder in folders:
        of_loader = [
            name
            for name in whole
            if name.startswith(f"{folder}/") and not name.endswith(("README.md", "assay_verify.json", "assay_plan.json"))
        ]
        marks = [f"{folder}/config.json", f"{folder}/assay_manifest.json"]
        for mark in marks:
            if mark in there:
                missing = [name for name in of_loader if name not in there and (mark != marks[0] or name != marks[1])]
                problems += [f"{mark} is there, {missing[0]} is not"] if missing else []
    return problems


def but_for_what_is_said(place: Place, ended: Ended, before: Contents, whole: Contents) -> list[str]:
    """The same; verification and card may say that the checkpoint is damaged."""
    found = unfinished_or_whole(place, ended, before, whole)
    is_said = ended.status == 1
    return [problem for problem in found if not (is_said and problem.startswith(SAID))]


SAID = ("runs/model/w4a16/verify.json: neither", "runs/model/w4a16/checkpoint/README.md: neither")


# ------------------------------------------------------------------------------------------------ report and cards
def judged_run(place: Place) -> None:
    """A run that was judged and reported on, and of which one measurement is another since."""
    place.work.mkdir()
    make_run(place.work / "runs")
    swept_jobs.in_folder(place.work, "gate", "tiny-glm")
    make_run(place.work / "other", seed=1)
    name = "measurements/w4a16.json"
    shutil.move(place.work / "other/tiny-glm" / name, place.work / "runs/tiny-glm" / name)
    shutil.rmtree(place.work / "other")


# ------------------------------------------------------------------------------------------------ replies
CHECKPOINT = ("unlink", "mkdir", "pwrite", "fdatasync", "ftruncate")
"""SQLite says nothing of a checkpoint of its log that fails: all stays in the log. Nor of a log that fails: it does without."""


def asked(place: Place) -> tuple[str, list[str]]:
    return "ask", [str(place.work / "journal.db"), str(place.told)]


def no_journal(place: Place) -> None:
    place.work.mkdir()


def old_journal(place: Place) -> None:
    place.work.mkdir()
    swept_jobs.journal_of_an_earlier_version(place.work / "journal.db")


def rows(place: Place) -> Contents:
    """Nothing but what the journal says."""
    path = place.work / "journal.db"
    return {"journal.db": swept_jobs.rows_of(path)} if path.exists() else {}


def kept(place: Place, ended: Ended, before: Contents, whole: Contents) -> list[str]:
    """Looks at a copy: opening a journal tidies it up."""
    lines = place.told.read_text().split() if place.told.exists() else []
    said = ["a disk that fails is called no journal"] if "not a journal" in ended.err else []
    copy = place.work.parent / "copy"
    shutil.copytree(place.work, copy)
    try:
        return said + swept_jobs.wrong_in_journal(copy / "journal.db", set(lines), lines.count("counted"))
    finally:
        shutil.rmtree(copy)


def kept_all(place: Place, ended: Ended, before: Contents, whole: Contents) -> list[str]:
    """Every reply was there before."""
    keys = [request.key(swept_jobs.WHO) for request in swept_jobs.REQUESTS]
    place.told.write_text("\n".join([*keys, "items", *["counted"] * 3]))
    return kept(place, ended, before, whole)


# ------------------------------------------------------------------------------------------------ hub, calibration, probes
def quantize_from_hub(place: Place) -> tuple[str, list[str]]:
    return "quantize_from_hub", [str(place.beside / "model"), str(place.beside / "home")]


def model_and_text(place: Place) -> None:
    place.work.mkdir()
    shutil.copytree(SMALL_MODEL, place.beside / "model")
    (place.beside / "text.txt").write_text("The gold is in the metal. " * 40, encoding="utf-8")


def calibrate(place: Place) -> tuple[str, list[str]]:
    return "calibrate", [str(place.beside / "model"), str(place.beside / "text.txt")]


def probed(place: Place) -> Contents:
    """What a record and its ledger say, without times and the port of the server."""
    found = {}
    for path in sorted(place.work.rglob("swept*.json*")):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            found[path.name] = json.dumps(json.loads(text)["results"])
        else:
            lines = [json.loads(line) for line in text.split("\n")[:-1]]
            found[path.name] = json.dumps([[line["id"], line["body"], line["text"]] for line in lines])
    return found


def whole_lines(place: Place, ended: Ended, before: Contents, whole: Contents) -> list[str]:
    """The record is there when the ledger is whole; of the ledger at most the last line is torn."""
    problems = []
    for path in sorted(place.work.rglob("swept*.json*")):
        *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
        if path.suffix == ".json":
            problems += [] if probed(place) == whole else [f"{path.name}: there, and the ledger is not whole"]
            continue
        for line in lines:
            json.loads(line)
        problems += [f"{path.name}: a torn line"] if rest and not ended.hit else []
    return problems


SUBJECTS: dict[str, Subject] = {
    "quantize in a run": Subject(small_source, quantize_in_run, between=unfinished_or_whole),
    "quantize --out": Subject(small_source, quantize_out, (Fault.KILL, Fault.NO_SPACE), between=unfinished_or_whole),
    "quantize, reading the source": Subject(
        small_source, quantize_in_run, READS, under=lambda place: place.beside, between=unfinished_or_whole
    ),
    "quantize, reading what it wrote": Subject(
        small_source, quantize_in_run, READS, between=but_for_what_is_said, says_damaged=True
    ),
    "journal of replies": Subject(no_journal, asked, whole=rows, between=kept, harmless=CHECKPOINT),
    "journal, reading it": Subject(no_journal, asked, READS, whole=rows, between=kept),
    "journal of an earlier version": Subject(old_journal, asked, whole=rows, between=kept_all, harmless=CHECKPOINT),
    "gate, report and cards": Subject(judged_run, lambda place: ("assay", ["gate", "tiny-glm"]), code=1),
    "quantize --stream-from hub": Subject(
        small_source, quantize_from_hub, (Fault.KILL, Fault.NO_SPACE), between=unfinished_or_whole
    ),
    # Python's tempfile opens the folder itself for a file without a name, and where that fails makes one with a name
    "calibrate": Subject(model_and_text, calibrate, harmless=("unlink", "rmdir", "mkdir", "open made")),
    "probe": Subject(no_journal, lambda place: ("probe", []), whole=probed, between=whole_lines),
}


# ------------------------------------------------------------------------------------------------ cases
class Sweep:
    """One subject, prepared in an empty folder."""

    def __init__(self, name: str, folder: Path, forking: Forking) -> None:
        self.subject, self._forking = SUBJECTS[name], forking
        self._place = Place(folder / "work", folder / "beside", folder / "told")
        self._pristine = folder / "pristine"
        self._place.beside.mkdir(parents=True)
        self.subject.prepare(self._place)
        shutil.move(self._place.work, self._pristine)
        self._restore()
        self._before = self.subject.whole(self._place)
        ended = self._run()
        assert ended.status == self.subject.code, f"undisturbed, {name} ends with {ended.status}: {ended.err}"
        self._whole = self.subject.whole(self._place)
        self._restore()
        fault = Fault.READ_SHORT if self.subject.faults == READS else Fault.COUNT
        self.calls = self._run(fault).calls
        """Of an undisturbed run; with several threads another may order them a little differently."""

    def cases(self) -> list[tuple[Fault, int]]:
        """(fault, number of the call); half a write only where bytes are written."""
        numbered = list(enumerate(self.calls, 1))
        return [
            (fault, at)
            for fault in self.subject.faults
            for at, call in numbered
            if fault not in (Fault.TORN, Fault.SHORT) or call.name in WRITES_BYTES
            if fault != Fault.READ_SHORT or call.name != "open"
        ]

    def outcome(self, fault: Fault, at: int) -> Outcome:
        """Disturb the command, look, and run it again."""
        self._restore()
        ended = self._run(fault, at)
        how, problems = judged(ended, fault, self.subject)
        problems += self.subject.between(self._place, ended, self._before, self._whole)
        if how == "done" and (other := differing(self.subject.whole(self._place), self._whole)):
            problems.append(f"it says that it is done: {other}")
        again = self._run()
        if again.status != self.subject.code:
            problems.append(f"run again, it ends with {again.status}: {last_line(again)}")
        elif other := differing(self.subject.whole(self._place), self._whole):
            problems.append(f"run again: {other}")
        return Outcome(fault, at, ended.hit, how, tuple(problems))

    def _restore(self) -> None:
        self._place.told.unlink(missing_ok=True)
        shutil.rmtree(self._place.work, ignore_errors=True)
        shutil.copytree(self._pristine, self._place.work)

    def _run(self, fault: Fault = Fault.COUNT, at: int = 0) -> Ended:
        job, arguments = self.subject.words(self._place)
        under = self.subject.under(self._place)
        return self._forking.run(
            f"swept_jobs:{job}", arguments, under=under, cwd=self._place.work, fault=fault, at=at
        )  # fmt: skip


def judged(ended: Ended, fault: Fault, subject: Subject) -> tuple[str, list[str]]:
    """How a disturbed command ended, and what is wrong with that."""
    code = subject.code
    said = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    if ended.status is None:
        return "hangs", ["it hangs"]
    if ended.hit is None:  # the calls of other threads came earlier
        return "not reached", [] if ended.status == code else [
            f"exit {ended.status}, and no call went wrong: {last_line(ended)}"
        ]
    if ended.status < 0:
        return "killed", [] if fault.kills and ended.status == -9 else [f"ended by signal {-ended.status}"]
    problems = [f"it prints {word!r}" for word in ("Traceback", "Exception ignored") if word in ended.err]
    if fault.kills:
        return "lives on", [*problems, f"exit {ended.status}: it was not killed"]
    if ended.status == code:
        of_this_file = f"{ended.hit.name} {Path(ended.hit.path).name}"
        is_harmless = fault.reads or ended.hit.name in subject.harmless or of_this_file in subject.harmless
        return "done", problems if is_harmless else [*problems, f"a failed {ended.hit.name} of {ended.hit.path} was not told"]
    if ended.status == 1 and subject.says_damaged and re.search(r"cannot be read|Input/output error", ended.out):
        return "called damaged", problems
    if ended.status != 2 or len(said) != 1 or not ended.err.rstrip().endswith(said[0]):
        problems.append(f"exit {ended.status}, {len(said)} lines of error: {last_line(ended)}")
    elif not names(said[0], ended.hit.path):
        problems.append(f"names no path of {ended.hit.name} {ended.hit.path}: {said[0]}")
    return "refused", problems


def names(line: str, path: str) -> bool:
    """Whether a line has the path that a call was about, or the one that the file was to have, or its folder."""
    final = re.sub(r"\.(.+?)(\.[0-9a-f]{8})?\.partial$", r"\1", Path(path).name)
    folder = Path(path).parent
    if "/.download/" in path:  # under a name of the hub's library; it is for this checkpoint, which may have no room either
        return "checkpoint" in line
    return any(re.search(rf"{re.escape(name)}(?![\w.])", line) for name in (final, folder.name, folder.parent.name))


def differing(there: Contents, whole: Contents) -> str:
    """One file in which two folders differ; empty: none."""
    for name in sorted({*there, *whole}):
        if there.get(name) != whole.get(name):
            return f"{name} {'is left' if name not in whole else 'is missing' if name not in there else 'is another'}"
    return ""


def last_line(ended: Ended) -> str:
    lines = ended.err.strip().splitlines() or ended.out.strip().splitlines() or [""]
    return lines[-1][:300]


def forked(folder: Path) -> Forking:
    """The process that forks for all subjects."""
    folder.mkdir(parents=True, exist_ok=True)
    return Forking(build(folder), modules=["swept_jobs"], paths=PATHS, folder=folder)


def outcomes(name: str, sweep: Sweep, options: argparse.Namespace) -> Iterator[Outcome]:
    cases = sweep.cases()
    if options.fault:
        cases = [case for case in cases if case[0].name == options.fault]
    if options.at:
        cases = [case for case in cases if case[1] == options.at]
    if options.cases:
        cases = sampled(name, cases, options.cases)
    for fault, at in cases:
        yield sweep.outcome(fault, at)


def sampled(name: str, cases: list[tuple[Fault, int]], count: int) -> list[tuple[Fault, int]]:
    """So many of the cases of a subject, the same every time."""
    return random.Random(name).sample(cases, min(count, len(cases)))


def main() -> int:
    options = argparse.ArgumentParser(description="Let every call that changes the disk go wrong once.")
    options.add_argument("--only", default="", help="subjects whose name holds this")
    options.add_argument("--fault", default="", help="this fault alone: KILL, TORN, NO_SPACE, ...")
    options.add_argument("--at", type=int, default=0, help="this call alone")
    options.add_argument("--cases", type=int, default=0, help="a seeded sample of so many of each subject")
    options.add_argument("--write", type=Path, help="write the table there")
    told = options.parse_args()
    if (why := why_not()) is not None:
        print(f"nothing swept: {why}")
        return 2
    found: dict[str, tuple[tuple[Call, ...], list[Outcome]]] = {}
    with tempfile.TemporaryDirectory() as place, forked(Path(place).resolve() / "printed") as forking:
        for name in (name for name in SUBJECTS if told.only in name):
            begun = time.monotonic()
            sweep = Sweep(name, Path(place).resolve() / "swept" / name.replace(" ", "-"), forking)
            made = []
            for outcome in outcomes(name, sweep, told):
                made.append(outcome)
                for problem in outcome.problems:
                    hit = "-" if outcome.hit is None else f"{outcome.hit.name} {Path(outcome.hit.path).name}"
                    print(f"    {outcome.fault.name} at {outcome.at} ({hit}): {problem}", flush=True)
            found[name] = (sweep.calls, made)
            print(f"{table_row(name, *found[name])}  {time.monotonic() - begun:.0f} s", flush=True)
    if told.write is not None:
        told.write.write_text(page(found), encoding="utf-8")
    return int(any(outcome.problems for _, made in found.values() for outcome in made))


COLUMNS = ("killed", "refused", "called damaged", "done", "not reached")


def table_row(name: str, calls: tuple[Call, ...], made: list[Outcome]) -> str:
    how = Counter(outcome.how for outcome in made)
    wrong = sum(bool(outcome.problems) for outcome in made)
    columns = [len(calls), len(made), *(how[column] for column in COLUMNS), wrong]
    return f"| {name} | {' | '.join(f'{count:,}' for count in columns)} |"


def page(found: dict[str, tuple[tuple[Call, ...], list[Outcome]]]) -> str:
    every = [outcome for _, made in found.values() for outcome in made]
    return "\n".join([
        "# Every call that fails", "", "`make sweep`", "",
        f"{len(every):,} runs, each disturbed at one call and then repeated undisturbed; "
        f"{sum(bool(outcome.problems) for outcome in every):,} did not hold.", "",
        "Killed: with SIGKILL, before the call or in the middle of it. Refused: one line, exit 2, with the path. Called",
        "damaged: `verify` could not read the checkpoint and says so, exit 1. Done: as if nothing had been (half a read, a",
        "failed clean-up, a checkpoint of SQLite's log that is made up for later). Not reached: other threads made fewer.", "",
        f"| command | calls | runs | {' | '.join(COLUMNS)} | did not hold |", f"|---{'|---' * (len(COLUMNS) + 3)}|",
        *(table_row(name, *one) for name, one in found.items()), "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
