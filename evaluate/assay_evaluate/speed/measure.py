"""The ladder, measured: a server for each checkpoint and speculation, a benchmark process beside it, a row for each point.

`speed.json` is written after every repeat, so that an interrupted ladder resumes. What is there is not measured
again while checkpoint, serving fingerprint and settings are the same.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from assay.callbacks import Say
from assay.errors import AssayError, MeasureError, ServeError
from assay.foreign_text import one_line
from assay.recipes.model import Serving
from assay.recipes.profile import ProfileRecipe
from assay.recipes.variant import Variant
from assay.records.serving import Fingerprint
from assay.records.speed import SPEED_RECORD, NotMeasured, SpeedRecord, SpeedRepeat, SpeedRow
from assay_evaluate.serving.hardware import describe_hardware, find_gpus
from assay_evaluate.serving.server import Server, ServerSpec, planned_fingerprint, serve
from assay_evaluate.speed.bench import Job, benchmark, write_prompts
from assay_evaluate.speed.ladder import Ladder, Point, deal_repeats, shuffled, shuffled_servers
from assay_evaluate.speed.prompts import LONG, Prompts, has_chat_template, token_counter
from assay_evaluate.speed.rows import WHERE, count, repeat_of, tokens_each
from assay_evaluate.speed.watch import Watch
from assay_evaluate.tasks.ruler.draft import RulerError

StartServer = Callable[[ServerSpec, Say], AbstractContextManager[Server]]
EMULATED = "emulated: profile {profile} computes this format without its kernels, which says nothing about their speed"
_SPECULATIVE = "speculative-config"
_TEMPLATE_TOKENS = 64
"""Left for a chat template around a prompt."""


class Bench(Protocol):
    def run(self, job: Job) -> dict[str, Any]: ...


StartBenchmark = Callable[[Server, ProfileRecipe, Path, Path], AbstractContextManager[Bench]]


@dataclass(frozen=True)
class Subject:
    """A checkpoint to measure. scheme: what its experts are stored as; None: nobody says. sha256: `checkpoint_sha256`.
    variant: the way of serving it that is measured; None: the profile's."""

    label: str
    checkpoint: Path
    sha256: str
    scheme: str | None = None
    variant: Variant | None = None

    def depths(self, ladder: Ladder) -> tuple[int, ...]:
        """Tokens drafted a step at which it is measured: those of the ladder, unless the variant says how many."""
        if self.variant is None or self.variant.speculation is None:
            return ladder.speculation
        drafting = self.variant.drafting
        return (0,) if drafting is None else (int(drafting.get("num_speculative_tokens", 1)),)


@dataclass(frozen=True)
class _Served:
    """A subject behind a server and a benchmark. folder: for the prompts. start: of this server, from 0."""

    subject: Subject
    speculation: int
    start: int
    server: Server
    bench: Bench
    folder: Path
    count_tokens: Callable[[str], int]
    startup_s: float


@dataclass
class LadderRun:
    """One call of `measure`: what is wanted, and what was found so far."""

    subjects: Sequence[Subject]
    ladder: Ladder
    prompts: Prompts
    profile: ProfileRecipe
    serving: Serving
    run_dir: Path
    on_progress: Say = lambda line: None
    start_server: StartServer = serve
    foresee: Callable[[ServerSpec], Fingerprint] = planned_fingerprint
    start_benchmark: StartBenchmark = benchmark
    rows: dict[tuple[object, ...], SpeedRow] = field(default_factory=dict)
    left_out: list[NotMeasured] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def run(self) -> SpeedRecord:
        """Measure what is missing; the record, as it lies in the run's folder."""
        self._take_over()
        missing: dict[tuple[str, int], list[list[tuple[int, Point]]]] = {}
        subjects = {subject.label: subject for subject in self.subjects}
        for subject in self.subjects:
            for speculation in subject.depths(self.ladder):
                if starts := self._missing(subject, speculation):
                    missing[subject.label, speculation] = starts
        record = self._save()
        if missing:
            counts = {len(starts) for starts in missing.values()}
            each = f"{min(counts)}{f' to {max(counts)}' if len(counts) > 1 else ''} of each of {len(missing)} setups"
            self.on_progress(f"{sum(map(len, missing.values()))} starts of servers, {each}")
        broken: set[tuple[str, int]] = set()
        # Every server once, then every server again: what drifts over hours is not the effect of one start.
        for turn in range(max(map(len, missing.values()), default=0)):
            servers = [key for key, starts in missing.items() if turn < len(starts) and key not in broken]
            for label, speculation in shuffled_servers(servers, self.ladder.seed, turn):
                try:
                    self._measure_server(subjects[label], speculation, missing[label, speculation][turn])
                except ServeError as error:
                    reason = f"its server did not serve: {one_line(str(error).splitlines()[0])}"
                    self.on_progress(f"{label}: {reason}")
                    self.left_out.append(NotMeasured(checkpoint=label, speculation=speculation, reason=reason))
                    broken.add((label, speculation))
                record = self._save()
        return record

    # -------------------------------------------------------------------------------------------- what is there
    def _take_over(self) -> None:
        """Rows of an earlier call that still hold, and everything about other checkpoints."""
        before = SpeedRecord.load_if_there(self.run_dir / SPEED_RECORD)
        if before is None:
            return
        labels = {subject.label: subject for subject in self.subjects}
        same = all(before.settings.get(name) == value for name, value in self.ladder.same_points().items())
        for row in before.rows:
            is_ours = row.origin == "measured" and row.checkpoint in labels
            if is_ours and (staleness := self._why_stale(row, labels[row.checkpoint], same=same)) is not None:
                self.on_progress(f"{row.checkpoint}: {row.prompts} at {row.concurrency} is measured again: {staleness}")
            else:
                self.rows[_key(row)] = row
        self.left_out = [entry for entry in before.not_measured if entry.checkpoint not in labels]
        self.versions = dict(before.versions)

    def _why_stale(self, row: SpeedRow, subject: Subject, *, same: bool) -> str | None:
        if row.checkpoint_sha256 != subject.sha256:
            return "the checkpoint is another"
        planned = None if row.speculation is None else self.foresee(self.spec(subject, row.speculation))
        if planned is None or row.fingerprint_sha256 != planned.comparable_sha256:
            return "it would be served differently now"
        return None if same else "requests, lengths, objective or seed are others"

    def _missing(self, subject: Subject, speculation: int) -> list[list[tuple[int, Point]]]:
        """(repeat, point) that each start of its server is to measure, in order. What cannot be is noted."""
        planned = self.foresee(self.spec(subject, speculation))
        self.versions |= planned.versions
        reason = None
        if planned.emulated:
            reason = EMULATED.format(profile=self.profile.name)
        elif speculation and planned.speculation is None:
            reason = "nothing drafts: the checkpoint has no MTP head, or the model's recipe no other speculation"
        if reason is not None:
            # Emulation is of the format, with drafts and without: said once.
            drafts = None if planned.emulated else speculation
            noted = NotMeasured(checkpoint=subject.label, speculation=drafts, reason=reason)
            if noted not in self.left_out:
                self.on_progress(f"{subject.label}: not measured: {reason}")
                self.left_out.append(noted)
            return []
        repeats: dict[Point, list[range]] = {}
        for point in self.ladder.points:
            row = self.rows.get(("measured", subject.label, speculation, point.prompts, point.concurrency))
            done = () if row is None else row.repeats
            repeats[point] = deal_repeats(len(done), len({earlier.server_start for earlier in done}), self.ladder)
        seed = f"{self.ladder.seed}:{subject.label}:{speculation}"
        starts = [
            list(shuffled({point: repeat[start] for point, repeat in repeats.items() if start < len(repeat)}, seed))
            for start in range(max(map(len, repeats.values()), default=0))
        ]
        if not starts:
            self.on_progress(f"{subject.label}: speculation {speculation or 'off'}: measured already")
        return starts

    def _next_start(self, label: str, speculation: int) -> int:
        """Number of the next start of a server; those of rows from before starts were told are one, and have none."""
        numbers = [
            repeat.server_start
            for row in self.rows.values() if (row.origin, row.checkpoint, row.speculation) == ("measured", label, speculation)
            for repeat in row.repeats if repeat.server_start is not None
        ]  # fmt: skip
        return max(numbers, default=-1) + 1

    # -------------------------------------------------------------------------------------------- one server
    def spec(self, subject: Subject, speculation: int, start: int = 0) -> ServerSpec:
        """How a checkpoint is served: as an evaluation serves it, but for the number of drafts. start: for the log's name."""
        serving, profile = drafting(self.serving, self.profile.served_as(subject.variant), speculation)
        return ServerSpec(
            checkpoint=subject.checkpoint,
            profile=profile,
            serving=serving,
            speculate=speculation > 0,
            log_path=self.run_dir / "logs" / f"vllm-{subject.label}-speed-{speculation}{_of_start(start)}.log",
        )

    def _measure_server(self, subject: Subject, speculation: int, runs: Sequence[tuple[int, Point]]) -> None:
        """All missing repeats of one checkpoint with one speculation. ServeError: its server did not start, or died."""
        started, start = time.monotonic(), self._next_start(subject.label, speculation)
        spec = self.spec(subject, speculation, start)
        log_path = self.run_dir / "logs" / f"bench-{subject.label}-{speculation}{_of_start(start)}.log"
        name = f"{subject.label}: speculation {speculation or 'off'}"
        self.on_progress(f"{name}: start {start + 1} of its server, {len(runs)} runs")
        count_tokens, failed = token_counter(subject.checkpoint), set[Point]()
        folder = Path(tempfile.mkdtemp(prefix="assay-speed-"))
        try:
            with self.start_server(spec, self.on_progress) as server:
                startup_s = round(time.monotonic() - started, 3)
                with self.start_benchmark(server, spec.profile, folder, log_path) as bench:
                    served = _Served(subject, speculation, start, server, bench, folder, count_tokens, startup_s)
                    self._warm_up(served, runs)
                    for number, (repeat, point) in enumerate(runs, 1):
                        if point in failed:
                            continue
                        try:
                            row = self._row(served, repeat, point)
                        except MeasureError as error:
                            failed.add(point)
                            noted = NotMeasured(
                                checkpoint=subject.label, speculation=speculation, concurrency=point.concurrency,
                                prompts=point.prompts, reason=one_line(str(error)),
                            )  # fmt: skip
                            self.left_out += [noted] if noted not in self.left_out else []
                            self.on_progress(f"{name}: {point.prompts} at {point.concurrency}: {error}")
                            continue
                        self.rows[_key(row)] = row
                        self._save()
                        rate = row.repeats[-1].output_tokens_s
                        where = f"{point.prompts} at {point.concurrency} in flight"
                        self.on_progress(f"{name}: {number}/{len(runs)} {where}: {rate:.1f} tokens/s")
                        if row.why_not_chosen is not None:
                            self.on_progress(f"{name}: {where}: never chosen: it {row.why_not_chosen}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _warm_up(self, served: _Served, runs: Sequence[tuple[int, Point]]) -> None:
        """As many requests as are ever in flight, of every kind, asked and forgotten: compilation, caches, connections."""
        most = max(point.concurrency for _, point in runs)
        for kind in sorted({point.prompts for _, point in runs}):
            if self._too_long(served.server, kind) is None:
                texts = self.prompts.of(kind, "warm-up", most, served.count_tokens)
                served.bench.run(self._job(served, most, texts, f"warm-up-{kind}.jsonl"))

    def _job(self, served: _Served, concurrency: int, texts: Sequence[str], name: str) -> Job:
        return Job(
            prompts=write_prompts(served.folder / name, texts),
            num_requests=len(texts),
            concurrency=concurrency,
            output_tokens=self.ladder.output_tokens,
            tokenizer=served.subject.checkpoint.resolve(),
            is_chat=has_chat_template(served.subject.checkpoint),
            objective=self.ladder.objective,
            trust_remote_code=bool(served.server.fingerprint.flags.get("trust-remote-code")),
        )

    def _too_long(self, server: Server, kind: str) -> str | None:
        needed = self.ladder.output_tokens + _TEMPLATE_TOKENS + (self.ladder.prompt_tokens if kind == LONG else 0)
        if needed <= server.max_model_len:
            return None
        return f"{needed} tokens of prompt and reply do not fit the server's {server.max_model_len}"

    def _row(self, served: _Served, repeat: int, point: Point) -> SpeedRow:
        """The point's row with one repeat more. MeasureError: it has none."""
        if (reason := self._too_long(served.server, point.prompts)) is not None:
            raise MeasureError(reason)
        part, num = f"{point.concurrency}:{repeat}", self.ladder.requests_of(point)
        try:
            texts = self.prompts.of(point.prompts, part, num, served.count_tokens)
        except (ValueError, RulerError) as error:  # a haystack that does not fit, no tokenizer.json
            raise MeasureError(f"no prompts: {error}") from None
        job = self._job(served, point.concurrency, texts, f"{point.prompts}-{point.concurrency}-{repeat}.jsonl")
        subject, fingerprint = served.subject, served.server.fingerprint
        num_gpus, parallelism = ranks_of(fingerprint, self.profile)
        with Watch(served.server.pid, on_gpus=num_gpus > 0) as watch:
            result = served.bench.run(job)
        new_repeat = repeat_of(
            result, WHERE, memory_bytes=watch.memory_bytes, energy_j=watch.energy_j, server_start=served.start
        )
        before = self.rows.get(("measured", subject.label, served.speculation, point.prompts, point.concurrency))
        if before is not None:
            return _with_repeat(before, new_repeat, result)
        version = fingerprint.server.removeprefix("vllm ")
        return SpeedRow(
            checkpoint=subject.label,
            scheme=subject.scheme,
            checkpoint_sha256=subject.sha256,
            origin="measured",
            source=f"vllm bench serve {version}",
            hardware=hardware_of(num_gpus, self.profile),
            num_gpus=num_gpus,
            parallelism=parallelism,
            speculation=served.speculation,
            prompts=point.prompts,
            prompt_tokens=tokens_each(result, "total_input_tokens"),
            output_tokens=tokens_each(result, "total_output_tokens"),
            concurrency=point.concurrency,
            emulated=fingerprint.emulated,
            kernels=fingerprint.kernels,
            fingerprint_sha256=fingerprint.comparable_sha256,
            engine=fingerprint.server,
            startup_s=served.startup_s,
            objective=dict(self.ladder.objective),
            repeats=(new_repeat,),
        )

    def _save(self) -> SpeedRecord:
        record = SpeedRecord(
            rows=tuple(self.rows.values()),
            not_measured=tuple(self.left_out),
            seed=self.ladder.seed,
            versions=dict(sorted(self.versions.items())),
            settings=self.ladder.settings() | {"profile": self.profile.name},
        )
        record.save(self.run_dir / SPEED_RECORD)
        return record


def _of_start(start: int) -> str:
    return f"-start-{start + 1}" if start else ""


def _key(row: SpeedRow) -> tuple[object, ...]:
    """Of a measured row its point; of others everything that tells them apart."""
    if row.origin == "measured":
        return ("measured", row.checkpoint, row.speculation, row.prompts, row.concurrency)
    return row.point


def _with_repeat(row: SpeedRow, new_repeat: SpeedRepeat, result: dict[str, Any]) -> SpeedRow:
    """The row with one repeat more; its mean lengths over the requests of all."""
    changes: dict[str, Any] = {"repeats": (*row.repeats, new_repeat)}
    before, now = sum(repeat.num_completed or 0 for repeat in row.repeats), count(result, "completed") or 0
    for name, total in (("prompt_tokens", "total_input_tokens"), ("output_tokens", "total_output_tokens")):
        mean, more = getattr(row, name), tokens_each(result, total)
        if mean is not None and more is not None and before + now:
            changes[name] = (mean * before + more * now) / (before + now)
    return row.model_copy(update=changes)


def drafting(serving: Serving, profile: ProfileRecipe, speculation: int) -> tuple[Serving, ProfileRecipe]:
    """The same with so many drafts a step. Who drafts stays: what recipe or profile spell out, else the MTP head."""
    vllm = {name.removeprefix("--").replace("_", "-"): value for name, value in serving.vllm.items()}
    spelt = profile.flags.get(_SPECULATIVE) or vllm.get(_SPECULATIVE)
    vllm.pop(_SPECULATIVE, None)
    others = {name: value for name, value in profile.flags.items() if name != _SPECULATIVE}
    if isinstance(spelt, dict) and speculation:
        vllm[_SPECULATIVE] = {**spelt, "num_speculative_tokens": speculation}
    changed = serving.model_copy(update={"vllm": vllm, "num_speculative_tokens": speculation or None})
    return changed, profile.model_copy(update={"vllm": others})


def ranks_of(fingerprint: Fingerprint, profile: ProfileRecipe) -> tuple[int, dict[str, int]]:
    """(GPUs, ranks of each kind of parallelism) that a server uses; no GPU on a CPU."""
    flags = fingerprint.flags
    by_kind = {
        kind: int(flags[f"{kind}-parallel-size"])
        for kind in ("tensor", "data", "pipeline")
        if isinstance(flags.get(f"{kind}-parallel-size"), int)
    }
    num = by_kind.get("tensor", 1) * by_kind.get("data", 1) * by_kind.get("pipeline", 1)
    if flags.get("enable-expert-parallel"):
        by_kind["expert"] = by_kind.get("tensor", 1) * by_kind.get("data", 1)
    return (num if profile.hardware.device == "cuda" else 0), {kind: ranks for kind, ranks in by_kind.items() if ranks > 1}


def hardware_of(num_gpus: int, profile: ProfileRecipe) -> str:
    """`8xH200`, or `AMD EPYC (2 cores)`."""
    if num_gpus:
        gpus = find_gpus()
        return f"{num_gpus}x{profile.hardware.gpu or (gpus[0].name if gpus else 'GPU')}"
    described = describe_hardware()
    return f"{described['cpu']} ({described['cores']} core{'s' if described['cores'] != '1' else ''})"


def check_concurrency(ladder: Ladder, profile: ProfileRecipe) -> None:
    """AssayError: the ladder asks for more requests in flight than the server takes at once."""
    most = profile.flags.get("max-num-seqs")
    if isinstance(most, int) and (above := [streams for streams in ladder.concurrency if streams > most]):
        raise AssayError(
            f"--concurrency {above[0]}: profile {profile.name} serves at most {most} at once (max-num-seqs); others would "
            "wait in its queue; ask for less, or raise it there"
        )
