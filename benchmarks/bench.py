"""The parts of the benchmark: which jobs over which checkpoint, in which order; and what is written of them."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import chart
from compare import Comparison, compare
from jobs import Jobs, num_cores
from measured import Job, Results
from report import markdown, write_section
from targets import TWO_WORKERS_SCHEMES, targets

from assay_quantize.formats.schemes import SCHEMES

GROUPS = {
    "part": "Side by side with llm-compressor\nThe same checkpoint, in four shards. `mse`: with scale search.",
    "whole": "This engine against a copy\nThe larger checkpoint. `cold`: evicted from the page cache before each run.",
    "memory": "Peak memory with giant shards\nA checkpoint of one shard; from 4 GB on it contains two tensors of 1.2 GB.",
    "verify": "Verifying\nThe w4a16 checkpoint; with hashes only, the fp8_block checkpoint, which is larger. GB/s counts the "
    "bytes of the BF16 source where errors are computed, and the bytes of the files read otherwise.",
}
"""Part -> heading and explanation. They run in this order."""
SHARES = {"part": 9, "whole": 7, "memory": 2, "verify": 2}
"""Part -> its share of the time."""
SEARCHED = MEMORY_SCHEMES = ("w4a16", "nvfp4a16")
"""Schemes for peak memory (one pass over the source, two passes), and for scale search against none."""
SLOW = ("nvfp4a16", "mxfp4")
"""Schemes that take llm-compressor a minute a GB: measured once, which is enough for ratios of that size."""
MORE_ROUNDS = 3
"""Of one worker against two, in turns: what another tenant of the machine takes from one of them weighs most there."""
TWO_WORKERS_NAME = "" if num_cores() == 2 else ", 2 workers"
"""End of the names of results with two workers; nothing where two are all there are."""


@dataclass
class Bench:
    """One run. deadline: of time.monotonic; no round begins that would end later."""

    jobs: Jobs
    results: Results
    args: argparse.Namespace
    say: Callable[[str], None]
    deadline: float
    comparisons: list[Comparison] = field(default_factory=list)

    # -------------------------------------------------------------------------------------------- parts
    def run_group(self, name: str, until: float) -> None:
        """One part. A disk that fills up or a file that cannot be made fails the part, not the run."""
        self.say(f"--- {name}")
        parts = {"part": self.part, "whole": self.whole, "memory": self.memory, "verify": self.verify}
        try:
            parts[name](until)
        except OSError as error:
            self.results.fail(Job(f"{name}: as a whole", "", {}, 0, name), f"{error.strerror or error}")

    def part(self, until: float) -> None:
        source = self.jobs.checkpoint("part", self.args.part, num_shards=4)
        self.side_by_side(source, "part", until)
        shutil.rmtree(source)

    def side_by_side(self, source: Path, group: str, until: float) -> None:
        """Every scheme with both tools over the same bytes; then their outputs, bit by bit."""
        jobs = []
        for scheme in self.args.schemes:
            name, out = f"{group}: assay {scheme}", f"{group}-ours-{scheme}"
            jobs.append(self.jobs.assay(name, group, source, scheme, out=out, keep=True))
            name, out = f"{group}: llm-compressor {scheme}", f"{group}-theirs-{scheme}"
            job = self.jobs.llmcompressor(name, group, source, SCHEMES[scheme].preset, out=out)
            jobs.append(replace(job, rounds=1 if scheme in SLOW else self.args.rounds))
        for scheme in SEARCHED:
            if scheme in self.args.schemes:
                name = f"{group}: assay {scheme} mse"
                jobs.append(self.jobs.assay(name, group, source, scheme, observer="mse"))
        self.results.interleave(jobs, rounds=self.args.rounds, until=until)
        for scheme in self.args.schemes:
            self.compare(group, scheme)

    def compare(self, group: str, scheme: str) -> None:
        """The outputs of both tools; then they are deleted."""
        ours, theirs = (self.jobs.folder / f"{group}-{whose}-{scheme}" for whose in ("ours", "theirs"))
        results = [self.results.get(f"{group}: {tool} {scheme}") for tool in ("assay", "llm-compressor")]
        if all(result is not None and result.error is None for result in results):
            made = replace(compare(scheme, ours, theirs), scheme=scheme if group == "part" else f"{scheme}, {group}")
            self.comparisons.append(made)
            self.results.comparisons.append(asdict(made))
            self.say(f"{made.scheme}: {'same as' if made.passed else 'DIFFERENT from'} llm-compressor")
        shutil.rmtree(ours, ignore_errors=True)
        shutil.rmtree(theirs, ignore_errors=True)

    def whole(self, until: float) -> None:
        source = self.jobs.checkpoint("whole", self.args.gigabytes)
        jobs = []
        for cold in (False, True):
            end = ", cold" if cold else ""
            jobs.append(self.jobs.read(f"read{end}", "whole", source, cold=cold))
            jobs.append(self.jobs.copy(f"cp{end}", "whole", source, cold=cold))
            out = "out" if cold else "to-verify"
            jobs.append(self.jobs.assay(f"assay w4a16{end}", "whole", source, "w4a16", cold=cold, out=out, keep=not cold))
        for scheme in self.args.schemes:
            if scheme != "w4a16":
                out = "to-hash" if scheme == "fp8_block" else "out"
                jobs.append(self.jobs.assay(f"assay {scheme}", "whole", source, scheme, out=out, keep=out == "to-hash"))
        scaling = []
        for scheme in TWO_WORKERS_SCHEMES:
            if scheme in self.args.schemes:
                for name, workers in ((f"assay {scheme}, 1 worker", 1), (f"assay {scheme}{TWO_WORKERS_NAME}", 2)):
                    scaling.append(self.jobs.assay(name, "whole", source, scheme, workers=workers))
        mentioned = {job.name for job in jobs}
        self.results.interleave(
            [*jobs, *(job for job in scaling if job.name not in mentioned)], rounds=self.args.rounds, until=until
        )
        self.results.interleave(scaling, rounds=MORE_ROUNDS, until=until)

    def memory(self, until: float) -> None:
        for size in self.args.giant:
            source = self.jobs.checkpoint("giant", size, num_shards=1)
            jobs = [
                self.jobs.assay(f"memory: assay {scheme}, {size:g} GB shard", "memory", source, scheme)
                for scheme in MEMORY_SCHEMES if scheme in self.args.schemes
            ]  # fmt: skip
            self.results.interleave(jobs, rounds=1, until=until)
            shutil.rmtree(source)

    def verify(self, until: float) -> None:
        source, checkpoint = self.jobs.checkpoint("whole", self.args.gigabytes), self.jobs.folder / "to-verify"
        if not checkpoint.is_dir():
            made = self.jobs.assay("making what is verified", "verify", source, "w4a16", out="to-verify", keep=True)
            self.results.measure(made)
        tiny = self.jobs.folder / "tiny"  # child.py looks for its source beside it
        setup = self.jobs.assay("making a tiny one", "verify", self.jobs.tiny, "w4a16", out="tiny", keep=True)
        self.results.measure(setup)
        if not checkpoint.is_dir() or not tiny.is_dir():
            self.results.fail(setup, "nothing to verify: quantizing failed")
            return
        self.results.by_name.pop(setup.name)  # no measurement, only what the others need
        hashed = self.jobs.folder / "to-hash"
        if not hashed.is_dir():
            hashed = checkpoint
        jobs = [
            self.jobs.verify("verify", checkpoint, tiny, source=source),
            self.jobs.verify("verify, 1 worker", checkpoint, tiny, source=source, workers=1),
        ]
        for cold in (False, True):
            end = ", cold" if cold else ""
            name = f"verify, hashes only{end}"
            jobs.append(self.jobs.verify(name, hashed, tiny, source=None, cold=cold, contents=False))
            jobs.append(self.jobs.read(f"read the checkpoint{end}", "verify", hashed, cold=cold))
        self.results.interleave(jobs, rounds=self.args.rounds, until=until)

    # -------------------------------------------------------------------------------------------- report
    def section(self, machine: dict[str, str], *, with_chart: bool) -> str:
        """The Markdown of this run."""
        memory_schemes = tuple(scheme for scheme in MEMORY_SCHEMES if scheme in self.args.schemes)
        return markdown(
            self.results,
            machine=machine,
            how=self.how(),
            groups=GROUPS,
            targets=targets(self.args.giant, memory_schemes, TWO_WORKERS_NAME),
            schemes=self.args.schemes,
            comparisons=self.comparisons,
            chart="quantize.svg" if with_chart else None,
        )

    def how(self) -> Sequence[str]:
        return (
            f"Generated GLM-4-MoE checkpoints in BF16: {self.args.gigabytes:g} GB for the engine and the copy, "
            f"{self.args.part:g} GB for the comparison with llm-compressor, whose ratios are of GB/s over those same bytes. "
            "GB means 10^9 bytes of source weights.",
            "Each measurement is a process of its own. They run one after the other, in rounds (llm-compressor's FP4 only "
            f"once); the best round counts. {num_cores()} workers unless a row says otherwise. The clock starts after a run "
            "over 2 MB in the same process; imports and compilation are counted as `startup`.",
            "Peak RSS is VmHWM of the whole process, imports included: the largest of the rounds. CPU s is user plus system "
            "time: the least of the rounds.",
            "Sources are in the page cache unless a row says `cold` (evicted by posix_fadvise before each run). Dirty pages "
            "are flushed before each run. assay and `cp` fsync what they write, llm-compressor does not; assay writes past the "
            "page cache. On a CPU llm-compressor works on one shard at a time, whatever `max_workers` says.",
        )

    def write(self, path: Path, section: str) -> None:
        """Section, plot and raw values, next to each other."""
        rows: list[tuple[str, float | None, float | None]] = []
        for scheme in self.args.schemes:
            ours, theirs = (self.results.get(f"part: {tool} {scheme}") for tool in ("assay", "llm-compressor"))
            rows.append((scheme, ours.gb_per_s if ours else None, theirs.gb_per_s if theirs else None))
        copy = self.results.get("cp")
        path.with_name("quantize.svg").write_text(chart.bars(rows, copy.gb_per_s if copy else None), encoding="utf-8")
        shutil.copyfile(self.results.path, path.with_name("quantize.json"))
        write_section(path, section)
