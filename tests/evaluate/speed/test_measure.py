"""The ladder with a scripted server and benchmark, whose results are a real one's: order, rows, what is kept or left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError, MeasureError, ServeError
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.profile import Hardware, ProfileRecipe
from assay.recipes.suite import SuiteRecipe
from assay.recipes.variant import parse_variants
from assay.records.serving import Fingerprint
from assay.records.speed import NotMeasured, SpeedRecord, SpeedRow
from assay_evaluate.serving.server import Server, ServerSpec
from assay_evaluate.speed import measure, watch
from assay_evaluate.speed.bench import Job, words_of
from assay_evaluate.speed.ladder import Ladder, Point, deal_repeats, parse_objective, shuffled, shuffled_servers
from assay_evaluate.speed.measure import LadderRun, Subject, check_concurrency, drafting, ranks_of
from assay_evaluate.speed.prompts import Prompts
from assay_evaluate.speed.rows import repeat_of

DATA = Path(__file__).parent / "data"
TINY_GLM = Path(__file__).parents[3] / "examples" / "tiny_glm" / "checkpoint"
RESULT = json.loads((DATA / "vllm-bench-c4.json").read_text())
SUBJECT = Subject("bf16", TINY_GLM, "a" * 64, "bf16")
LADDER = Ladder(concurrency=(1, 4), speculation=(0, 1), repeats=3, num_requests=4, output_tokens=32)
SUITE = load_recipe(SuiteRecipe, "quick")
PROFILE = load_recipe(ProfileRecipe, "cpu-emulated")


def fingerprint(spec: ServerSpec, *, emulated: bool | None = None, drafts: bool = True) -> Fingerprint:
    tokens = spec.serving.num_speculative_tokens
    speculation = {"method": "mtp", "num_speculative_tokens": tokens} if tokens and drafts else None
    return Fingerprint(
        server="vllm 0.32.0", versions={"vllm": "0.32.0"}, hardware={}, profile=spec.profile.name,
        flags=dict(spec.profile.vllm), environment={}, speculation=speculation, checkpoint_flags={}, emulated=emulated,
        kernels=(),
    )  # fmt: skip


def lasted(rate: float) -> dict[str, Any]:
    """The result, were it so many tokens a second."""
    return RESULT | {
        "output_throughput": rate,
        "duration": RESULT["total_output_tokens"] / rate,
        "total_token_throughput": None,
    }


@dataclass
class World:
    """What was started and asked; `jobs`: (drafts, concurrency, prompts) of every job, warm-ups included."""

    folder: Path
    servers: list[tuple[str, int]] = field(default_factory=list)
    jobs: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    emulated: bool | None = None
    has_drafts: bool = True
    broken: Callable[[Job], None] = lambda job: None
    dead: str | None = None
    failed: int = 0

    def measuring(self, ladder: Ladder = LADDER, *subjects: Subject, **changes: Any) -> LadderRun:
        fields: dict[str, Any] = {
            "subjects": subjects or (SUBJECT,), "ladder": ladder, "profile": PROFILE,
            "prompts": Prompts(SUITE, ladder.seed, ladder.prompt_tokens, {}), "serving": Serving(num_speculative_tokens=1),
            "run_dir": self.folder, "on_progress": self.lines.append,
            "start_server": self.serve, "start_benchmark": self.benchmark,
            "foresee": lambda spec: fingerprint(spec, emulated=self.emulated, drafts=self.has_drafts),
        }  # fmt: skip
        return LadderRun(**(fields | changes))

    @contextmanager
    def serve(self, spec: ServerSpec, say: Any) -> Iterator[Server]:
        drafts = spec.serving.num_speculative_tokens or 0
        if self.dead is not None:
            raise ServeError(self.dead)
        assert spec.speculate is (drafts > 0)
        self.servers.append((spec.checkpoint.name, drafts))
        changed = fingerprint(spec).model_copy(update={"kernels": ("Using CPU kernels",)})
        yield Server("http://127.0.0.1:1", "model", 2048, changed, None)

    @contextmanager
    def benchmark(self, server: Server, profile: ProfileRecipe, folder: Path, log_path: Path) -> Iterator[Any]:
        speculation = server.fingerprint.speculation
        world = self

        class Bench:
            def run(self, job: Job) -> dict[str, Any]:
                prompts = tuple(json.loads(line)["prompt"] for line in job.prompts.read_text().splitlines())
                assert len(prompts) == job.num_requests and job.is_chat
                world.broken(job)
                drafts = speculation["num_speculative_tokens"] if speculation else 0
                world.jobs.append((drafts, job.concurrency, prompts))
                told = lasted(100.0 + len(world.jobs)) | {"completed": job.num_requests, "failed": world.failed}
                return {name: value for name, value in told.items() if drafts or not name.startswith("spec_decode")}

        yield Bench()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(measure, "hardware_of", lambda num, profile: "a CPU")
    return World(tmp_path)


# ------------------------------------------------------------------------------------------------ the whole ladder
def test_a_row_for_each_point(world: World) -> None:
    record = world.measuring().run()
    assert record == SpeedRecord.load(world.folder / "speed.json")
    assert {(row.speculation, row.prompts, row.concurrency): len(row.repeats) for row in record.rows} == {
        (0, "chat", 1): 3, (0, "chat", 4): 3, (1, "chat", 1): 3, (1, "chat", 4): 3,
    }  # fmt: skip
    row = next(row for row in record.rows if (row.speculation, row.concurrency) == (1, 4))
    rates = [repeat.output_tokens_s for repeat in row.repeats]
    assert row == SpeedRow(
        checkpoint="bf16", scheme="bf16", checkpoint_sha256="a" * 64, origin="measured", source="vllm bench serve 0.32.0",
        hardware="a CPU", num_gpus=0, speculation=1, prompts="chat", prompt_tokens=RESULT["total_input_tokens"] / 4,
        output_tokens=RESULT["total_output_tokens"] / 4, concurrency=4, emulated=None, kernels=("Using CPU kernels",),
        fingerprint_sha256=row.fingerprint_sha256, engine="vllm 0.32.0", startup_s=row.startup_s,
        repeats=tuple(
            repeat_of(lasted(rate) | {"completed": 4}, "", server_start=start)
            for rate, start in zip(rates, (0, 0, 1), strict=True)
        ),
    )  # fmt: skip
    assert row.startup_s is not None and row.repeats[0].acceptance_length == RESULT["spec_decode_acceptance_length"]
    assert all(repeat.acceptance_length is None for other in record.rows if other.speculation == 0 for repeat in other.repeats)
    assert record.settings == {
        "concurrency": [1, 4], "speculation": [0, 1], "prompts": ["chat"], "repeats": 3, "starts": 2, "num_requests": 4,
        "output_tokens": 32, "prompt_tokens": 1024, "objective": {}, "seed": 0, "profile": "cpu-emulated",
    }  # fmt: skip
    assert (record.seed, record.versions, record.not_measured) == (0, {"vllm": "0.32.0"}, ())


def test_order_and_prompts(world: World) -> None:
    """Two starts of a server for each speculation, in turns; in each a warm-up, then passes over all points; every repeat has
    prompts of its own."""
    world.measuring().run()
    assert [sorted(world.servers[at : at + 2]) for at in (0, 2)] == [[("checkpoint", 0), ("checkpoint", 1)]] * 2
    assert len(world.servers) == 4 and world.lines[0] == "4 starts of servers, 2 of each of 2 setups"
    for drafts in (0, 1):
        jobs = [(concurrency, prompts) for told, concurrency, prompts in world.jobs if told == drafts]
        assert len(jobs) == 8 and jobs[0][0] == jobs[5][0] == 4 and jobs[0] == jobs[5]
        assert [sorted(concurrency for concurrency, _ in jobs[at : at + 2]) for at in (1, 3, 6)] == [[1, 4]] * 3
        counts = Counter(prompt for _, prompts in jobs[:5] + jobs[6:] for prompt in prompts)
        assert max(counts.values()) <= 2  # short stories repeat by chance
        assert len({prompts for _, prompts in jobs}) == 7
    pair = [sorted(prompts for told, _, prompts in world.jobs if told == drafts) for drafts in (0, 1)]
    assert pair[0] == pair[1], "drafts or not, the same questions"


def test_an_interrupted_ladder_goes_on(world: World) -> None:
    def interrupt(job: Job) -> None:
        if len(world.jobs) == 4:
            raise KeyboardInterrupt

    world.broken = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.measuring().run()
    kept = SpeedRecord.load(world.folder / "speed.json")
    assert sum(len(row.repeats) for row in kept.rows) == 3
    world.broken, asked = lambda job: None, len(world.jobs)
    record = world.measuring().run()
    assert sorted(len(row.repeats) for row in record.rows) == [3] * 4
    assert len(world.jobs) - asked == 9 + 3, "what was missing, and a warm-up for each start of a server"
    assert {len({repeat.server_start for repeat in row.repeats}) for row in record.rows} == {2}
    before = {(row.speculation, row.concurrency): row.repeats for row in kept.rows}
    after = {(row.speculation, row.concurrency): row.repeats for row in record.rows}
    assert all(after[point][: len(repeats)] == repeats for point, repeats in before.items())
    servers = len(world.servers)
    assert world.measuring().run() == record and len(world.servers) == servers
    assert world.lines[-2:] == ["bf16: speculation off: measured already", "bf16: speculation 1: measured already"]


def test_what_changed_is_measured_again(world: World) -> None:
    record = world.measuring().run()
    jobs = len(world.jobs)
    other = replace(SUBJECT, sha256="b" * 64)
    again = world.measuring(LADDER, other).run()
    assert {row.checkpoint_sha256 for row in again.rows} == {"b" * 64} and len(world.jobs) == 2 * jobs
    assert "bf16: chat at 1 is measured again: the checkpoint is another" in world.lines
    profile = PROFILE.model_copy(update={"vllm": PROFILE.vllm | {"max-num-seqs": 16}})
    world.measuring(LADDER, other, profile=profile).run()
    assert "bf16: chat at 1 is measured again: it would be served differently now" in world.lines
    world.measuring(replace(LADDER, output_tokens=33), other, profile=profile).run()
    assert "bf16: chat at 1 is measured again: requests, lengths, objective or seed are others" in world.lines
    assert len(world.jobs) == 4 * jobs and len(record.rows) == 4


def test_more_of_the_same_ladder(world: World) -> None:
    """Further points and repeats are added to what is there; other checkpoints and imported rows stay."""
    world.measuring(replace(LADDER, speculation=(0,), concurrency=(1,), repeats=1)).run()
    second = replace(SUBJECT, label="other", sha256="c" * 64)
    world.measuring(replace(LADDER, speculation=(0,)), second).run()
    record = world.measuring(replace(LADDER, speculation=(0,))).run()
    assert sorted((row.checkpoint, row.concurrency, len(row.repeats)) for row in record.rows) == [
        ("bf16", 1, 3), ("bf16", 4, 3), ("other", 1, 3), ("other", 4, 3),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is left out
def test_emulated_checkpoints_are_not_measured(world: World) -> None:
    world.emulated = True
    record = world.measuring().run()
    reason = "emulated: profile cpu-emulated computes this format without its kernels, which says nothing about their speed"
    assert (record.rows, record.not_measured) == ((), (NotMeasured(checkpoint="bf16", reason=reason),))
    assert world.servers == [] and world.lines == [f"bf16: not measured: {reason}"]


def test_nothing_drafts(world: World) -> None:
    world.has_drafts = False
    record = world.measuring().run()
    (left,) = record.not_measured
    assert (left.speculation, left.reason.startswith("nothing drafts: ")) == (1, True)
    assert {row.speculation for row in record.rows} == {0}


def test_a_server_that_does_not_start(world: World) -> None:
    world.dead = "vLLM stopped before it was ready (exit status 1)\n  last line of its log"
    record = world.measuring(replace(LADDER, speculation=(0,))).run()
    reason = "its server did not serve: vLLM stopped before it was ready (exit status 1)"
    assert record.not_measured == (NotMeasured(checkpoint="bf16", speculation=0, reason=reason),)


def test_a_point_that_fails(world: World) -> None:
    def fail(job: Job) -> None:
        if job.concurrency == 1:
            raise MeasureError("vllm bench serve failed (ValueError: no)")

    world.broken = fail
    record = world.measuring(replace(LADDER, speculation=(0,))).run()
    assert [(row.concurrency, len(row.repeats)) for row in record.rows] == [(4, 3)]
    assert record.not_measured == (
        NotMeasured(
            checkpoint="bf16", speculation=0, concurrency=1, prompts="chat", reason="vllm bench serve failed (ValueError: no)"
        ),
    )
    world.broken = lambda job: None
    assert world.measuring(replace(LADDER, speculation=(0,))).run().not_measured == ()


def test_prompts_that_do_not_fit(world: World) -> None:
    record = world.measuring(replace(LADDER, prompts=("long",), speculation=(0,), concurrency=(1,), prompt_tokens=2000)).run()
    (left,) = record.not_measured
    assert left.reason == "2096 tokens of prompt and reply do not fit the server's 2048"


# ------------------------------------------------------------------------------------------------ parts
def test_shuffled() -> None:
    points = tuple(Point("chat", concurrency) for concurrency in range(1, 9))
    requested = dict.fromkeys(points, range(3))
    order = list(shuffled(requested, "0"))
    passes = [[point for repeat, point in order if repeat == number] for number in range(3)]
    assert [repeat for repeat, _ in order] == [0] * 8 + [1] * 8 + [2] * 8
    assert all(sorted(entry) == sorted(points) for entry in passes) and passes[0] != passes[1] != list(points)
    assert order == list(shuffled(requested, "0")) != list(shuffled(requested, "1"))
    assert list(shuffled({points[0]: range(2, 3), points[1]: range(1)}, "0")) == [(0, points[1]), (2, points[0])]
    servers = [(label, drafts) for label in "abcd" for drafts in (0, 1)]
    assert sorted(shuffled_servers(servers, 0)) == servers != shuffled_servers(servers, 0)


@pytest.mark.parametrize(
    ("num_repeats", "num_starts", "dealt_out"),
    [(0, 0, [[0, 1], [2]]), (1, 1, [[1, 2]]), (2, 1, [[2]]), (3, 2, []), (3, 1, [[3]]), (5, 1, [[5]]), (5, 2, [])],
)
def test_repeats_are_dealt_out_to_starts(num_repeats: int, num_starts: int, dealt_out: list[list[int]]) -> None:
    """Three repeats in two starts; what an earlier version measured in one start gets another."""
    assert [list(deal_repeat) for deal_repeat in deal_repeats(num_repeats, num_starts, Ladder())] == dealt_out


def test_one_repeat_is_of_one_start() -> None:
    assert [list(deal_repeat) for deal_repeat in deal_repeats(0, 0, Ladder(repeats=1))] == [[0]]
    assert [list(deal_repeat) for deal_repeat in deal_repeats(0, 0, Ladder(repeats=7, starts=3))] == [[0, 1, 2], [3, 4], [5, 6]]


def test_requests_that_failed_are_told(world: World) -> None:
    """One request in 26 failed: the row is there, and said never to be chosen."""
    world.failed = 1
    record = world.measuring(replace(LADDER, speculation=(0,), concurrency=(4,), num_requests=25)).run()
    (row,) = record.rows
    assert (row.failed_share, row.is_comparable) == (1 / 26, False)
    assert (
        "bf16: speculation off: chat at 4 in flight: never chosen: it lost requests: 3 of 78 requests failed (3.85 %); more "
        "than 1 % are too many"
    ) in world.lines


def test_words_for_vllm(tmp_path: Path) -> None:
    job = Job(tmp_path / "p.jsonl", 8, 4, 64, TINY_GLM, is_chat=True, objective={"ttft_s": 2.0, "tpot_s": 0.025})
    words = " ".join(words_of(job, "http://127.0.0.1:1", "model", tmp_path / "result.json"))
    assert words == (
        "--backend openai-chat --endpoint /v1/chat/completions --base-url http://127.0.0.1:1 --model model "
        f"--served-model-name model --tokenizer {TINY_GLM} --dataset-name custom --dataset-path {tmp_path}/p.jsonl "
        "--skip-chat-template --disable-shuffle --custom-output-len 64 --num-prompts 8 --max-concurrency 4 --request-rate inf "
        "--disable-tqdm --percentile-metrics ttft,tpot,e2el --metric-percentiles 50,90,99 --save-result "
        f"--result-dir {tmp_path} --result-filename result.json --goodput tpot:25 ttft:2000"
    )
    plain = words_of(
        replace(job, is_chat=False, objective={}, trust_remote_code=True), "http://127.0.0.1:1", "model", tmp_path / "r"
    )
    assert plain[:4] == ["--backend", "openai", "--endpoint", "/v1/completions"] and plain[-1] == "--trust-remote-code"
    assert "--goodput" not in plain


def test_objectives() -> None:
    assert parse_objective("ttft<2s tpot < 25ms, e2e<1.5s") == {"ttft_s": 2.0, "tpot_s": 0.025, "end_to_end_s": 1.5}
    for text in ("", "ttft<2", "itl<2ms", "ttft<0s", "ttft<1s ttft<2s", "fast"):
        with pytest.raises(AssayError, match=r"^--objective "):
            parse_objective(text)


def test_kinds_of_prompts() -> None:
    asked = {"gsm8k": ["How many?", "How much?", "How many?"]}
    prompts = Prompts(SUITE, 0, 512, asked)
    assert prompts.kinds == ("chat", "long", "gsm8k")
    assert sorted(prompts.of("gsm8k", "1:0", 3, len)) in (
        ["How many?", "How much?", entry] for entry in ("How many?", "How much?")
    )
    chat = prompts.of("chat", "1:0", 8, len)
    assert chat == prompts.of("chat", "1:0", 8, len) and not set(chat) & set(prompts.of("chat", "1:1", 8, len)[::2])
    assert {prompt.isascii() for prompt in chat} == {True, False}, "both languages of the suite"
    long = prompts.of("long", "1:0", 2, lambda text: len(text) // 4)
    assert all(460 <= len(text) // 4 <= 512 for text in long)
    with pytest.raises(
        AssayError, match=r"^--prompts code: there are chat, long, gsm8k; `code` needs an evaluation of a suite"
    ):
        prompts.check(["chat", "code"])


def test_drafts_replace_those_of_recipe_and_profile() -> None:
    eagle = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}
    profile = PROFILE.model_copy(update={"vllm": {"speculative_config": eagle, "dtype": "float32"}})
    serving, on = drafting(Serving(num_speculative_tokens=5), profile, 2)
    assert (serving.vllm, on.vllm) == ({"speculative-config": eagle | {"num_speculative_tokens": 2}}, {"dtype": "float32"})
    serving, on = drafting(Serving(num_speculative_tokens=5), profile, 0)
    assert (serving.vllm, serving.num_speculative_tokens, on.vllm) == ({}, None, {"dtype": "float32"})


def test_ranks() -> None:
    gpus = PROFILE.model_copy(
        update={
            "hardware": Hardware(device="cuda", gpu="H200", num_gpus=8),
            "vllm": {"tensor-parallel-size": 4, "data-parallel-size": 2, "enable-expert-parallel": True},
        }
    )
    spec = ServerSpec(TINY_GLM, gpus, Serving(), speculate=False, log_path=Path("log"))
    assert ranks_of(fingerprint(spec), gpus) == (8, {"tensor": 4, "data": 2, "expert": 8})
    assert ranks_of(fingerprint(replace(spec, profile=PROFILE)), PROFILE) == (0, {})
    with pytest.raises(AssayError, match=r"^--concurrency 64: profile cpu-emulated serves at most 32 at once"):
        check_concurrency(replace(LADDER, concurrency=(1, 64)), PROFILE)


def test_memory_and_energy_of_gpus() -> None:
    csv = "0, GPU-a, H200, 143771, 570, 1000, 300.5\n1, GPU-b, H200, 143771, 570, 2000, 100.0\n"
    assert watch.parse_state(csv, None) == (2000 << 20, 400.5)
    assert watch.parse_state(csv, "0") == (1000 << 20, 300.5)
    assert watch.parse_state(csv.replace("100.0", "[N/A]"), None) == (2000 << 20, None)
    assert watch.parse_state("", None) == (None, None)
    assert watch.energy_of([(0.0, 100.0), (2.0, 200.0), (3.0, 200.0)]) == 500.0
    states = iter([(5, 10.0), (7, 10.0), (6, 10.0)])
    with watch.Watch(None, on_gpus=True, ask=lambda: watch.GpuState(*next(states, (6, 10.0)))) as observed:
        observed._sample()
        observed._sample()
    assert observed.memory_bytes == 7 and observed.energy_j is not None and observed.energy_j >= 0


def test_memory_of_processes() -> None:
    import os

    held = watch.memory_of_group(os.getpgrp())
    assert held is not None and held > 10 << 20
    assert watch.memory_of_group(2**22 + 7) is None


@pytest.mark.parametrize(
    ("words", "depths", "flags"),
    [
        ("kv:kv-cache-dtype=fp8", (0, 1), {"kv-cache-dtype": "fp8"}),
        ("no-mtp:mtp=off", (0,), {}),
        ("deep:mtp=3", (3,), {}),
        ("ngram:speculative-config={method: ngram, num_speculative_tokens: 2}", (2,), {}),
    ],
)
def test_a_variant_is_measured_as_it_is_served(
    world: World, words: str, depths: tuple[int, ...], flags: dict[str, Any]
) -> None:
    """Beside the reference, at the drafts that it declares, or at all of the ladder's if it declares none."""
    (variant,) = parse_variants([words], {})
    subject = replace(SUBJECT, label=variant.name, variant=variant)
    assert subject.depths(LADDER) == depths
    measuring = world.measuring(LADDER, SUBJECT, subject)
    spec = measuring.spec(subject, depths[-1])
    assert {name: spec.profile.flags.get(name) for name in flags} == flags
    assert (spec.speculate, spec.serving.num_speculative_tokens) == (depths[-1] > 0, depths[-1] or None)
    record = measuring.run()
    points = {(row.checkpoint, row.speculation) for row in record.rows}
    assert points == {("bf16", 0), ("bf16", 1), *((variant.name, depth) for depth in depths)}
