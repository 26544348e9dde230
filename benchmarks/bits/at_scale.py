"""Memory, disk and processor time of a calibration layer by layer: 24 layers, 64 experts, 1 B parameters, under `--memory`.

    python benchmarks/bits/at_scale.py 1024 16384 [--memory 6GiB] [--folder DIR] [--write benchmarks/bits/at_scale.md]

A GLM-4-MoE of random weights is generated (benchmarks/generated.py), with tiny-glm's tokenizer and text of random words;
for each number of tokens `assay quantize` makes a calibrated checkpoint of it, with one thread, verification included. Peak
memory is the kernel's (`ru_maxrss`), processor time is user and system, disk is the most that lay beside the source at any half
second. What is measured is kept in DIR/rows.json, and not measured again. Beside it stands what `assay plan --hardware this`
estimates of the layers: the same code, with rates measured here at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import generated  # noqa: E402

TOKENIZER = REPOSITORY / "examples" / "tiny_glm" / "checkpoint"
LENGTH = 512
MORE = {"autoround": ", iterations: 20"}
"""Options of a recipe: a tenth of AutoRound's steps, all of which take the same memory."""
POLL_S = 0.5
WORDS = 12_000
GIB = 1 << 30


@dataclass(frozen=True)
class Deep(generated.Shape):
    """Many layers and small experts; of the first layer the MLP is dense."""

    layers: int = 24
    experts: int = 64

    @property
    def num_moe_layers(self) -> int:
        return self.layers - 1

    @property
    def num_experts(self) -> int:
        return self.experts


SHAPE = Deep(
    0, 256 << 20, hidden=768, moe_intermediate=256, head_dim=64, num_heads=12, num_kv_heads=4, vocab_size=2048
)  # fmt: skip


def source_in(folder: Path) -> Path:
    """The generated model, made once."""
    source = folder / "source"
    if not (source / "model.safetensors.index.json").is_file():
        shutil.rmtree(source, ignore_errors=True)
        generated.make_checkpoint(source, SHAPE)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        (source / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 4}), encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, source / name)
    return source


def text_in(folder: Path) -> Path:
    draw = random.Random(0)
    path = folder / "words.txt"
    path.write_text(" ".join("".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(WORDS)), encoding="utf-8")
    return path


def measured(folder: Path, method: str, tokens: int, memory: str) -> dict[str, Any]:
    """One calibration by the command line."""
    source, out = source_in(folder), folder / "out" / f"{method}-{tokens}"
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    recipe = folder / f"{method}-{tokens}.yaml"
    recipe.write_text(
        f"schema: 1\nname: {method}-{tokens}\nextends: w4a16-{method}\n"
        f"calibration: {{method: {method}, tokens: {tokens}, length: {LENGTH}{MORE.get(method, '')}}}\n",
        encoding="utf-8",
    )
    command = [str(Path(sys.executable).with_name("assay")), "quantize", str(source), "--precision", str(recipe)]
    command += ["--text", str(text_in(folder)), "--memory", memory, "--workers", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    disk_bytes, layers_done, marks = 0, -1, []
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        disk_bytes = max(disk_bytes, bytes_below(out.parent))
        lines = layers_in(out)
        if lines > layers_done:
            layers_done = lines
            marks.append(cpu_s_of(process.pid))
        time.sleep(POLL_S)
    if status:
        raise SystemExit(f"{' '.join(command)}: ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "method": method,
        "tokens": tokens,
        "memory": memory,
        "peak_bytes": used.ru_maxrss << 10,
        "cpu_s": used.ru_utime + used.ru_stime,
        "layers_cpu_s": marks[-1] - marks[0],
        "wall_s": time.monotonic() - began,
        "disk_bytes": disk_bytes,
        "out_bytes": generated.weight_bytes(out),
        "source_bytes": generated.weight_bytes(source),
    }


def estimated_s(folder: Path, row: Mapping[str, Any]) -> float:
    """Processor seconds of the layers, by `assay plan --hardware this,cores=1`; waiting for the disk is not in it."""
    from assay.recipes.load import load_recipe
    from assay.recipes.precision import PrecisionRecipe
    from assay_quantize.checkpoint.checkpoint import open_checkpoint
    from assay_quantize.estimate.calibration_time import estimate_calibration
    from assay_quantize.estimate.measure_machine import measured_machine, measured_torch
    from assay_quantize.plan.planner import make_plan

    recipe = load_recipe(PrecisionRecipe, str(folder / f"{row['method']}-{row['tokens']}.yaml"))
    plan = make_plan(open_checkpoint(folder / "source"), recipe, model="deep", family=None)
    machine, rates = measured_machine(plan, folder)
    made = estimate_calibration(plan, replace(machine, cores=1), rates, measured_torch(plan), gpu=False)
    return sum(line.seconds or 0.0 for line in made.lines if line.name not in ("source", "states", "layers"))


def layers_in(out: Path) -> int:
    """Finished layers by the journal of a calibration that is under way; 0: its tokens are there; -1: they are not."""
    work = out.with_name(f".{out.name}.calibration")
    try:
        return (work / "calibration.jsonl").read_bytes().count(b"\n") - 1 if (work / "tokens.npy").is_file() else -1
    except FileNotFoundError:
        return -1


def cpu_s_of(pid: int) -> float:
    """User and system time of a process that runs (`man proc_pid_stat`)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bytes_below(folder: Path) -> int:
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(here, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def lines(rows: Sequence[Mapping[str, Any]], command: str) -> Iterator[str]:
    parameters = sum(row["source_bytes"] for row in rows[:1]) / 2
    yield "# Calibration of a model layer by layer, in bounded memory"
    yield ""
    yield f"`{command}`"
    yield ""
    shape = f"{SHAPE.layers} layers and {SHAPE.experts} experts, {parameters / 1e9:.2f} B parameters"
    yield f"A generated GLM-4-MoE of {shape} in BF16 ({parameters * 2 / 1e9:.2f} GB),"
    yield f"sequences of {LENGTH} tokens, one thread. Memory and CPU time are of the whole command, verification included."
    yield "That of the layers stands apart, beside what `assay plan --hardware this,cores=1` estimates of it with rates that"
    yield "were measured here. Other work ran on the machine."
    yield ""
    yield "| method | tokens | `--memory` | peak memory | CPU time | in layers | estimated | disk beside source | checkpoint |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['method']} | {row['tokens']:,} | {row['memory']} | {row['peak_bytes'] / GIB:.2f} GiB "
            f"| {row['cpu_s']:,.0f} s | {row['layers_cpu_s']:,.0f} s | {row['estimated_s']:,.0f} s "
            f"| {row['disk_bytes'] / 1e9:.2f} GB | {row['out_bytes'] / 1e9:.2f} GB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tokens", nargs="+", type=int)
    parser.add_argument("--method", choices=("gptq", "awq", "autoround"), default="gptq")
    parser.add_argument("--memory", default="6GiB")
    parser.add_argument("--folder", type=Path, help="where the model lies, and what was measured; else a temporary one")
    parser.add_argument("--write", type=Path, help="file of the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-at-scale-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "rows.json"
        rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else []
        wanted = []
        for tokens in args.tokens:
            key = {"method": args.method, "tokens": tokens, "memory": args.memory}
            found = next((row for row in rows if key.items() <= row.items()), None)
            if found is None:
                found = measured(folder, args.method, tokens, args.memory)
                rows.append(found)
                kept.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            wanted.append({**found, "estimated_s": estimated_s(folder, found)})
        numbers = " ".join(map(str, args.tokens))
        method = "" if args.method == "gptq" else f" --method {args.method}"
        text = "".join(
            f"{line}\n"
            for line in lines(wanted, f"python benchmarks/bits/at_scale.py {numbers} --memory {args.memory}{method}")
        )
    print(text, end="")
    if args.write is not None:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
