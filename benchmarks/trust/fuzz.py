"""`make fuzz`: damaged files are read by the product's own commands and readers; each ends well or in one line for the user.

    python benchmarks/trust/fuzz.py [--cases 10000] [--only WORD] [--write benchmarks/trust/fuzz.md]

A case is a real file, damaged by a generator of its own seed (mutations.py), in a copy of its folder. "Held" means: the command
exits 0, 1 or 2 and writes no traceback; the reader returns or raises an AssayError of one line (a recipe's lists its problems);
within 30 s of the processor. What does not hold is listed with its seed: `--only TARGET --seed N` runs that case alone and
shows its traceback.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parents[1] / "tests" / "support"
sys.path[:0] = [str(HERE), *(str(SUPPORT / room) for room in ("evaluation", "quantization", "models"))]

import numpy as np  # noqa: E402
from mutations import damaged_text  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from sensitivities import by_bits, sensitivity  # noqa: E402
from synthetic_run import few_items, make_plan, make_run  # noqa: E402
from tiny_checkpoints import make_tiny_glm4_moe  # noqa: E402

import assay_cli as cli  # noqa: E402
from assay.errors import AssayError  # noqa: E402
from assay.recipes.base import recipes_dir  # noqa: E402
from assay.recipes.load import KINDS, parse_recipe  # noqa: E402
from assay.records.choice.record import Choice  # noqa: E402
from assay.records.plan import Plan  # noqa: E402
from assay.records.run import RunRecord, SourceData, SuiteIdentity  # noqa: E402
from assay.records.speed import SpeedRecord  # noqa: E402
from assay_evaluate.choice.choose import ChoiceRequest, choose  # noqa: E402
from assay_evaluate.client.journal import Identity, Journal, Reply, Request  # noqa: E402
from assay_evaluate.client.journal_reading import count_replies  # noqa: E402
from assay_evaluate.speed.imported import read_imported  # noqa: E402
from assay_evaluate.speed.rows import with_rows  # noqa: E402
from assay_evaluate.speed.stated import Stated  # noqa: E402
from assay_evaluate.tasks.ruler.qa import read_hotpotqa, read_squad  # noqa: E402
from assay_evaluate.tasks.swebench.trajectories import read_predictions, read_trajectory  # noqa: E402
from assay_quantize.calibration.text import Text, mix_of  # noqa: E402
from assay_quantize.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from assay_quantize.checkpoint.importance import load_importance  # noqa: E402

LONGEST_S, LONGEST_WAIT_S = 30, 900
"""Of the processor, which others may keep busy; and at all."""


@dataclass(frozen=True)
class Target:
    """`make` writes a folder once; of a copy of it one of `files` is damaged, and `read` is called with the copy."""

    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], object]
    lines: int | None = 1
    """Lines that an error may have; None: any number (a recipe lists its problems)."""
    one_in: int = 1
    """Of so many cases, for what takes seconds each."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended: read, refused, or what did not hold, in words that are the same for the same mistake."""

    kind: str
    detail: str = ""


class Hung(BaseException):
    """Above every handler for errors."""


# ------------------------------------------------------------------------------------------------ what is read, and how
def command(*words: str) -> Callable[[Path], object]:
    """`assay WORDS`, in this process and with the folder as working directory."""

    def read(folder: Path) -> None:
        before, sys.argv = (os.getcwd(), sys.argv), ["assay", *words]
        os.chdir(folder)
        err = io.StringIO()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
                cli.main()
        except SystemExit as ended:
            if ended.code not in (None, 0, 1, 2):
                raise RuntimeError(f"exit {ended.code}") from None
            if ended.code == 2:
                raise AssayError(err.getvalue().strip().removeprefix("error: ").split("\nerror: ")[-1]) from None
        finally:
            os.chdir(before[0])
            sys.argv = before[1]

    return read


def recipe(kind: str, name: str) -> Target:
    """A shipped recipe."""

    def make(folder: Path) -> None:
        shutil.copy(recipes_dir() / kind / f"{name}.yaml", folder)

    return Target(make, (f"{name}.yaml",), lambda folder: parse_recipe(KINDS[kind], folder / f"{name}.yaml"), lines=None)


def run_folder(file: str, *words: str) -> Target:
    """A file of a run, read by a command about that run."""
    return Target(lambda folder: void(make_run(folder / "runs", change=few_items)), (f"runs/tiny-glm/{file}",), command(*words))


def two_runs(folder: Path) -> None:
    make_run(folder / "runs", change=few_items)
    make_run(folder / "other", seed=1, change=few_items)


def recorded(folder: Path) -> None:
    make_run(folder / "runs", change=few_items)
    source = SourceData(location="org/model", revision="a" * 40, files={"config.json": f"sha256:{'b' * 64}"})
    record = RunRecord(model="tiny-glm", source=source, suite=SuiteIdentity(name="quick", sha256="c" * 64))
    record.save(folder / "runs" / "tiny-glm" / "run.json")


def planned(folder: Path) -> None:
    make_plan("w4a16").save(folder / "plan.json")


def checkpoint(folder: Path) -> None:
    make_tiny_glm4_moe(folder / "model", num_layers=2, num_experts=2, hidden=128, dense_intermediate=128)


TEXT = "".join(f'{{"text": "The {n} small cats sit in the park and wait near the river.", "id": {n}}}\n' for n in range(40))
CALIBRATED = (
    "schema: 1\nname: short\nextends: w4a16-gptq\ncalibration: {method: gptq, tokens: 64, length: 32, text: [text.jsonl]}\n"
)


def calibratable(folder: Path) -> None:
    """With text, and a recipe that takes little of it."""
    make_tiny_glm4_moe(folder / "model", num_layers=1, first_dense=0, num_experts=2, hidden=128, num_heads=2, num_kv_heads=1)
    (folder / "text.jsonl").write_text(TEXT, encoding="utf-8")
    (folder / "short.yaml").write_text(CALIBRATED, encoding="utf-8")


def measured(folder: Path) -> None:
    """A checkpoint, and what its parts lose."""
    checkpoint(folder)
    sensitivity(open_checkpoint(folder / "model"), by_bits, ("w4a16", "nvfp4a16", "fp8_block")).save(folder / "parts.json")


def importance_file(folder: Path) -> None:
    save_file({"a": np.ones(8, np.float32), "a.input_amax": np.ones(1, np.float32)}, folder / "made.safetensors")


def read_importance(path: Path) -> None:
    found = load_importance(path)
    found.largest("a.input_amax")
    found.for_weight("a", 8)


def read_text(path: Path) -> None:
    """Through a tokenizer, twice over: by what it is known, and what it says."""
    source = Text((path,))
    source.identity()
    source.sequences(None, TOKENIZER, 4096, 32, void)


def quantized(folder: Path) -> None:
    checkpoint(folder)
    command("quantize", "model", "-p", "w4a16", "--out", "out/checkpoint")(folder)


TOKENIZER = HERE.parents[1] / "examples" / "tiny_glm" / "checkpoint"


def text(name: str, content: str, read: Callable[[Path], object]) -> Target:
    def make(folder: Path) -> None:
        (folder / name).write_text(content, encoding="utf-8")

    return Target(make, (name,), lambda folder: read(folder / name))


def trajectories(folder: Path) -> None:
    (folder / "a__b-1").mkdir()
    (folder / "a__b-1" / "a__b-1.traj.json").write_text(
        '{"info": {"exit_status": "Submitted", "submission": "diff", "model_stats": {"api_calls": 3}},'
        ' "messages": [{"role": "user", "content": "x"}]}'
    )
    (folder / "preds.json").write_text('{"a__b-1": {"instance_id": "a__b-1", "model_name_or_path": "m", "model_patch": "d"}}')


def read_trajectories(folder: Path) -> None:
    read_predictions(folder)
    read_trajectory(folder / "a__b-1" / "a__b-1.traj.json")


WHO = Identity("quick", "c" * 64, "f" * 64)
KEYS = [f"{number:064x}" for number in range(40)]


def journal(folder: Path) -> None:
    with Journal(folder / "journal.db") as made:
        made.write_requests([(key, Request("codes", key[-2:], 0, "/v1/completions", {"prompt": key})) for key in KEYS], WHO)
        made.write_replies([(key, Reply("answered", text=30 * key, output_tokens=5, token_ids=(1, 2)), 1) for key in KEYS])
        made.keep_items("codes", [1], [{"prompt": "x"}])
        made.add_counters("phase", {"drafts": 3.0})


def read_journal(folder: Path) -> None:
    with Journal(folder / "journal.db") as made:
        found = made.find_all(KEYS)
        wrong = [key for key, reply in found.items() if reply.text != 30 * key]
        assert not wrong, f"{len(wrong)} replies are others than were written"
        made.find_items("codes", [1])
        made.counters("phase")
        made.answered_items(WHO)
    count_replies(folder / "journal.db")


def import_speeds(path: Path) -> None:
    """Read, put into a record, written: whatever was read must be a record's number."""
    with_rows(None, read_imported(path, None, Stated())).as_text()


def deployed(folder: Path) -> None:
    record = with_rows(None, read_imported(PUBLISHED, None, Stated()))
    record.save(folder / "speed.json")
    choose(record.rows, None, ChoiceRequest()).save(folder / "choice.json")


def void(_: object) -> None:
    """For a lambda that is called for what it does."""


PUBLISHED = HERE.parents[1] / "examples" / "glm-5.2-speed" / "published.yaml"
INFERENCEX = (
    '{"hw": "h200", "conc": 8, "output_tput_per_gpu": 50.5, "tput_per_gpu": 80.0, "tp": 8, "ep": 1, "model": "m", "isl": 1024,'
    ' "osl": 512, "precision": "fp8", "spec_decoding": "none", "mean_ttft": 0.2, "median_ttft": 0.2, "mean_tpot": 0.01,'
    ' "median_tpot": 0.01}'
)
VLLM_BENCH = (
    '{"hardware": "8xH200", "model_id": "m", "max_concurrency": 4, "speculation": 5, "output_throughput": 95.5, "completed": 8,'
    ' "total_output_tokens": 512, "mean_ttft_ms": 9.5, "median_ttft_ms": 9.0, "mean_tpot_ms": 2.5, "median_tpot_ms": 2.0}'
)
FIRST_SHARD = "model/model-00001-of-00002.safetensors"
OF_MODEL = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
PLAN, VERIFY = ("plan", "model", "-p", "w4a16"), ("verify", "out/checkpoint", "--source", "model")
CALIBRATE = ("calibrate", "model", "--out", "made.safetensors", "--text", "text.jsonl", "--tokens", "64", "--length", "32",
             "--min-tokens", "1")  # fmt: skip
RECIPE = ("recipe", "model", "--sensitivity", "parts.json", "--budget", "4.6bpw", "--no-replay")
MIX = (
    "texts:\n  - {source: a.jsonl, weight: 3, kind: code, column: body}\n"
    "  - {source: hub:org/tools, files: [x.jsonl], revision: v1}\n"
)
ASKED = '{"question": "q", "is_impossible": false, "answers": [{"text": "a"}]}'
SQUAD = f'{{"data": [{{"paragraphs": [{{"context": "c", "qas": [{ASKED}]}}, {{"context": "d", "qas": []}}]}}]}}'
CONTEXT = '"context": [["t", ["s one.", "s two."]], ["u", ["s"]]]'
HOTPOT = f'[{{"question": "q", "answer": "a", {CONTEXT}, "supporting_facts": [["t", 0]]}}]'

TARGETS: dict[str, Target] = {
    "recipe of a model": recipe("models", "tiny-glm"),
    "recipe of a precision": recipe("precisions", "w4a16"),
    "recipe of a profile": recipe("profiles", "cpu-emulated"),
    "recipe of a suite": recipe("suites", "quick"),
    "recipe of gates": recipe("gates", "full"),
    "recipe of a family": recipe("families", "glm4_moe"),
    "plan": Target(planned, ("plan.json",), lambda folder: Plan.load(folder / "plan.json")),
    "manifest, by status": run_folder("w4a16/checkpoint/assay_manifest.json", "status", "tiny-glm"),
    "verification, by status": run_folder("w4a16/verify.json", "status", "tiny-glm"),
    "measurement, by status": run_folder("measurements/w4a16.json", "status", "tiny-glm"),
    "measurement, by gate": run_folder("measurements/w4a16.json", "gate", "tiny-glm"),
    "measurement, by compare": Target(
        two_runs, ("runs/tiny-glm/measurements/w4a16.json",), command("compare", "runs/tiny-glm", "other/tiny-glm")
    ),
    "registered gates, by gate": run_folder("gates.registered.json", "gate", "tiny-glm"),
    "verdicts, by report": run_folder("gates.json", "report", "tiny-glm"),
    "verdicts, by card": run_folder("gates.json", "card", "tiny-glm"),
    "config of a source, by plan": Target(checkpoint, ("model/config.json",), command(*PLAN)),
    "index of a source, by plan": Target(checkpoint, ("model/model.safetensors.index.json",), command(*PLAN)),
    "shard of a source, by plan": Target(checkpoint, (FIRST_SHARD,), command(*PLAN)),
    "config of a source, by calibrate": Target(calibratable, ("model/config.json",), command(*CALIBRATE), one_in=40),
    "config of a source, by quantize with GPTQ": Target(
        calibratable, ("model/config.json", "model/tokenizer.json"), command("quantize", "model", "-p", "short.yaml"), one_in=40
    ),
    "recipe that is calibrated, by quantize": Target(
        calibratable, ("short.yaml",), command("quantize", "model", "-p", "short.yaml"), lines=None, one_in=40
    ),
    "text of a calibration": text("text.jsonl", TEXT, read_text),
    "mix of texts": text("mix.yaml", MIX, lambda path: mix_of([str(path)], void)),
    "sensitivity, by recipe": Target(measured, ("parts.json",), command(*RECIPE), one_in=20),
    "calibration file, by its reader": Target(
        importance_file,
        ("made.safetensors",),
        lambda folder: load_importance(folder / "made.safetensors").largest("a.input_amax"),
    ),
    "run's record, by status": Target(recorded, ("runs/tiny-glm/run.json",), command("status", "tiny-glm")),
    "tokenizer of a source, by quantize": Target(
        checkpoint, tuple(f"model/{name}" for name in OF_MODEL[2:]), command("quantize", "model", "-p", "w4a16")
    ),
    "manifest of a checkpoint, by verify": Target(quantized, ("out/checkpoint/assay_manifest.json",), command(*VERIFY)),
    "config of a checkpoint, by verify": Target(quantized, ("out/checkpoint/config.json",), command(*VERIFY)),
    "shard of a checkpoint, by verify": Target(
        quantized, ("out/checkpoint/model-00001-of-00002.safetensors",), command(*VERIFY)
    ),
    "journal of replies": Target(journal, ("journal.db",), read_journal),
    "SQuAD": text("squad.json", SQUAD, read_squad),
    "HotpotQA": text("hotpot.json", HOTPOT, read_hotpotqa),
    "speeds of InferenceX": text("speeds.json", INFERENCEX, import_speeds),
    "speeds of vLLM": text("speeds.json", VLLM_BENCH, import_speeds),
    "speeds of a table": text("speeds.yaml", PUBLISHED.read_text(encoding="utf-8"), import_speeds),
    "speeds of a run": Target(deployed, ("speed.json",), lambda folder: SpeedRecord.load(folder / "speed.json")),
    "choice of a run": Target(deployed, ("choice.json",), lambda folder: Choice.load(folder / "choice.json")),
    "predictions of SWE-bench": Target(trajectories, ("preds.json", "a__b-1/a__b-1.traj.json"), read_trajectories),
}


# ------------------------------------------------------------------------------------------------ cases
def outcome_of(target: Target, folder: Path) -> Outcome:
    """Read the damaged folder, and say how that ended."""
    try:
        return _outcome_in_time(target, folder)
    except Hung:  # as the case ended otherwise
        return Outcome("hangs")


def _outcome_in_time(target: Target, folder: Path) -> Outcome:
    for number, timer, seconds in TIMERS:
        signal.signal(number, _hang)
        signal.setitimer(timer, seconds)
    try:
        target.read(folder)
        return Outcome("read")
    except AssayError as error:
        lines = str(error).count("\n") + 1
        if target.lines is not None and lines > target.lines:
            return Outcome("several lines", str(error)[:300])
        return Outcome("refused")
    except Hung:
        return Outcome("hangs")
    except BaseException as error:  # noqa: BLE001  # what this program looks for
        where = traceback.extract_tb(error.__traceback__)
        ours = next((frame for frame in reversed(where) if "site-packages" not in frame.filename), where[-1])
        return Outcome("traceback", f"{type(error).__name__} in {Path(ours.filename).name}:{ours.lineno}: {str(error)[:100]!r}")
    finally:
        for _, timer, _ in TIMERS:
            signal.setitimer(timer, 0)


TIMERS = (
    (signal.SIGPROF, signal.ITIMER_PROF, LONGEST_S),
    (signal.SIGALRM, signal.ITIMER_REAL, LONGEST_WAIT_S),
)


def _hang(*_: object) -> None:
    raise Hung


def cases(name: str, seeds: range, folder: Path) -> Iterator[tuple[int, Outcome]]:
    """(seed, outcome) of each; `folder` is empty and on one file system."""
    target = TARGETS[name]
    whole, copy = folder / "whole", folder / "copy"
    whole.mkdir()
    target.make(whole)
    shutil.copytree(whole, copy)
    target.read(copy)  # undamaged, it raises nothing
    for seed in seeds[:: target.one_in]:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        source = random.Random(f"{name} {seed}")
        file = copy / source.choice(target.files)
        file.write_bytes(damaged_text(file.read_bytes(), file.suffix, source))
        yield seed, outcome_of(target, copy)


def main() -> int:
    options = argparse.ArgumentParser(description="Damage files and read them: one line, or well.")
    options.add_argument("--cases", type=int, default=10_000, help="of each target")
    options.add_argument("--only", default="", help="targets whose name holds this")
    options.add_argument("--seed", type=int, help="this case alone, with its traceback")
    options.add_argument("--write", type=Path, help="write the table there")
    told = options.parse_args()
    names = [name for name in TARGETS if told.only in name]
    rows: dict[str, collections.Counter[Outcome]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if told.seed is not None:
                traceback_of(name, told.seed, Path(folder))
                continue
            rows[name] = collections.Counter()
            first: dict[Outcome, int] = {}
            for seed, outcome in cases(name, range(told.cases), Path(folder)):
                rows[name][outcome] += 1
                first.setdefault(outcome, seed)
            print(table_row(name, rows[name]), flush=True)
            for outcome, seed in first.items():
                if outcome.kind not in ("read", "refused"):
                    print(f"    {rows[name][outcome]} x {outcome.kind}, first with --seed {seed}: {outcome.detail}", flush=True)
    if told.write is not None:
        told.write.write_text(page(rows, told.cases), encoding="utf-8")
    return int(any(not_held(row) for row in rows.values()))


def traceback_of(name: str, seed: int, folder: Path) -> None:
    for _, outcome in cases(name, range(seed, seed + 1), folder):
        print(name, seed, outcome)
    TARGETS[name].read(folder / "copy")


def not_held(row: collections.Counter[Outcome]) -> int:
    return sum(count for outcome, count in row.items() if outcome.kind not in ("read", "refused"))


def table_row(name: str, row: collections.Counter[Outcome]) -> str:
    kinds: collections.Counter[str] = collections.Counter()
    for outcome, count in row.items():
        kinds[outcome.kind] += count
    shown = [kinds[kind] for kind in ("read", "refused", "several lines", "traceback", "hangs")]
    return f"| {name} | {' | '.join(f'{count:,}' for count in shown)} |"


def page(rows: dict[str, collections.Counter[Outcome]], num_cases: int) -> str:
    lines = [
        "# Damaged files", "", f"`python benchmarks/trust/fuzz.py --cases {num_cases}`", "",
        f"{sum(row.total() for row in rows.values()):,} cases; {sum(map(not_held, rows.values())):,} did not hold.", "",
        "| target | read | refused in a line | several lines | traceback | hangs |", "|---|---|---|---|---|---|",
        *(table_row(name, row) for name, row in rows.items()), "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
