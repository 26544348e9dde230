"""Screen checkpoints of Qwen3-30B-A3B's shapes and generated weights, at two numbers of layers: memory, time beside reading and
computing alone, bytes read, the estimate; and the same figures window by window.

    python benchmarks/screen/large.py [--layers 1 3] [--tokens 8192] [--lengths 512 2048]

Reading alone: every layer is decoded and thrown away. Computing alone: every layer runs all texts, and only that is timed.
Window by window: every text goes through the whole model before the next begins, and layers are read for each, as a model that
does not fit into memory is run where texts are outermost. It sees the first two texts. The head is loaded, twice, and sees one
text, and then four: their difference is what three more take. The page cache is dropped before each where the machine lets it
be.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from assay_pipeline.comparison.screen_sources import ScreenSource
from assay_quantize.decoding.open_stored import StoredCheckpoint
from assay_quantize.screen.compare import PassSide, compare_passes
from assay_quantize.screen.estimate import estimate_pass
from assay_quantize.screen.forward import ScreenPass, load_state, run_pass, save_state
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.sensitivity.texts import ScoredText

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "tests" / "support"
sys.path[:0] = [str(REPOSITORY / "benchmarks"), *(str(SUPPORT / part) for part in ("quantization", "models", "serving"))]
import generated  # noqa: E402
import hollow  # noqa: E402

SHARD_BYTES = 4 << 30
WHOLE_LAYERS = 48
WINDOWS, HEAD_TEXTS = 2, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, nargs=2, default=(1, 3))
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--lengths", type=int, nargs="+", default=(512, 2048), help="of texts")
    arguments.add_argument(
        "--folder", type=Path, help="where checkpoints are made and removed; default: that of temporary files"
    )
    arguments.add_argument("--one", type=Path, help="internal: measure this checkpoint in this process")
    arguments.add_argument("--arithmetic", choices=list(DTYPES), help="internal: of that checkpoint")
    options = arguments.parse_args()
    if options.one is not None:
        texts = texts_of(options.tokens, *options.lengths)
        print(json.dumps(measure(options.one, texts, DTYPES[options.arithmetic])))
        return
    print("# Screening checkpoints of Qwen3-30B-A3B's shapes\n")
    print(f"Generated BF16 weights, 128 experts in each layer; {options.tokens:,} tokens, {torch.get_num_threads()} threads.\n")
    print(
        "| tokens of a text | layers | arithmetic | checkpoint | read | peak memory | estimate | pass and head | pass "
        "| reading alone | computing alone | pass / larger of the two | window by window, a token | / this schedule |"
    )
    print(f"|{14 * '---|'}", flush=True)
    rows: dict[tuple[int, str], list[dict[str, float]]] = {
        (length, arithmetic): [] for length in options.lengths for arithmetic in DTYPES
    }
    for layers in options.layers:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = make_checkpoint(Path(folder) / str(layers), layers)
            for (length, arithmetic), of_both in rows.items():
                command = [
                    sys.executable,
                    __file__,
                    "--one",
                    str(path),
                    "--tokens",
                    str(options.tokens),
                    "--lengths",
                    str(length),
                    "--arithmetic",
                    arithmetic,
                ]
                row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                of_both.append(row)
                print(f"| {length} | {layers} | {arithmetic} {row_of(row)}", flush=True)
    few, many = options.layers
    for (length, arithmetic), (smaller, larger) in rows.items():
        whole = {
            name: larger[name] + (larger[name] - smaller[name]) / (many - few) * (WHOLE_LAYERS - many)
            for name in ("pass_s", "reading_s", "computing_s", "bytes")
        }
        by_few_s = smaller["pass_s"] * many / few
        ratio = whole["pass_s"] / max(whole["reading_s"], whole["computing_s"])
        print(
            f"\nTexts of {length} tokens, {arithmetic}: a pass of {many} layers, by {few} alone: {by_few_s:.0f} s, measured "
            f"{larger['pass_s']:.0f} s. By both, all {WHOLE_LAYERS} layers: {whole['bytes'] / 1e9:.0f} GB, a pass of "
            f"{whole['pass_s'] / 60:.0f} min in the same memory, {ratio:.2f} times the larger of reading and computing."
        )


def row_of(row: Mapping[str, float]) -> str:
    """Without its first two cells."""
    pass_per_token_s, window_per_token_s = row["pass_s"] / row["num_tokens"], row["window_s"] / row["window_tokens"]
    cells = [
        f"{row['bytes'] / 1e9:.1f} GB",
        f"{row['read_bytes'] / 1e9:.1f} GB",
        f"{row['peak_bytes'] / 2**30:.2f} GiB",
        f"{row['estimate_s']:.0f} s",
        f"{row['pass_s'] + row['head_s']:.0f} s",
        f"{row['pass_s']:.0f} s",
        f"{row['reading_s']:.0f} s",
        f"{row['computing_s']:.0f} s",
        f"{row['pass_s'] / max(row['reading_s'], row['computing_s']):.2f}",
        f"{1e3 * window_per_token_s:.1f} ms",
        f"{window_per_token_s / pass_per_token_s:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def make_checkpoint(folder: Path, layers: int) -> Path:
    """The model's config with so many layers, and weights cut out of a pool (`generated`)."""
    config = {**hollow.QWEN3_30B_CONFIG, "num_hidden_layers": layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = np.random.default_rng(0)
    noise = generator.standard_normal(generated.POOL_VALUES, dtype=np.float32) * np.float32(generated.STANDARD_DEVIATION)
    shards = list(generated.cut_into_shards(hollow.qwen3_moe_shapes(config), SHARD_BYTES))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, name)
        generated.write_shard(folder / name, tensors, generated.to_bf16(noise), generator)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def texts_of(num_tokens: int, length: int) -> list[ScoredText]:
    draw = np.random.default_rng(0)
    return [ScoredText(tuple(map(int, draw.integers(7, 150_000, length)))) for _ in range(-(-num_tokens // length))]


def measure(path: Path, texts: Sequence[ScoredText], dtype: torch.dtype) -> dict[str, float]:
    num_tokens = sum(len(text.ids) for text in texts)
    with ScreenSource(str(path), path).opened() as stored, tempfile.TemporaryDirectory(dir=path.parent) as work:
        model = LayerModel(stored, dtype)  # imports transformers
        drop_cache()
        read_before = bytes_read()
        begin = time.perf_counter()
        states = run_pass(model, texts, Path(work) / "pass", "x", lambda _line: None)
        pass_s = time.perf_counter() - begin
        read_bytes = bytes_read() - read_before
        first_s, several_s = (head_seconds(stored, dtype, texts[:count], states) for count in (1, HEAD_TEXTS))
        head_s = first_s + (len(texts) - 1) * (several_s - first_s) / (HEAD_TEXTS - 1)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        drop_cache()
        estimate_s = estimate_pass(LayerModel(stored, dtype), texts, Path(work), has_draft=False).seconds
        reading_s, computing_s = reading_and_computing(LayerModel(stored, dtype), texts, Path(work))
        window_s = window_by_window(LayerModel(stored, dtype), texts[:WINDOWS], Path(work) / "windows")
        for number in range(WINDOWS):
            if not torch.equal(states.state(number)[0], load_state(Path(work) / "windows", number)[0]):
                raise SystemExit("window by window, other states came out")
    return {
        "bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")), "read_bytes": read_bytes,
        "peak_bytes": peak_bytes, "estimate_s": estimate_s, "pass_s": pass_s, "head_s": head_s, "reading_s": reading_s,
        "computing_s": computing_s, "window_s": window_s,
        "window_tokens": sum(len(text.ids) for text in texts[:WINDOWS]), "num_tokens": num_tokens,
    }  # fmt: skip


def head_seconds(stored: StoredCheckpoint, dtype: torch.dtype, texts: Sequence[ScoredText], states: ScreenPass) -> float:
    """Of a comparison of a pass with itself, each side with a head of its own, which is loaded."""
    begin = time.perf_counter()
    side, other = (PassSide(stored.location, LayerModel(stored, dtype).head(), states) for _ in range(2))
    if any(values.kl_P.any() for values in compare_passes(texts, side, other)):
        raise SystemExit("the pass differs from itself")
    return time.perf_counter() - begin


def reading_and_computing(model: LayerModel, texts: Sequence[ScoredText], work: Path) -> tuple[float, float]:
    """Seconds of each, one after the other."""
    drop_cache()
    reading_s = computing_s = 0.0
    model.use_embedding(torch.cat([torch.tensor(text.ids) for text in texts]))
    for layer in range(model.num_layers):
        begin = time.perf_counter()
        loaded = model.load(layer)
        reading_s += time.perf_counter() - begin
        with model.filled(layer, loaded):
            begin = time.perf_counter()
            for number, text in enumerate(texts):
                state = model.run(layer, torch.tensor([text.ids]), load_state(work, number) if layer else None)
                save_state(work, number, state)
            computing_s += time.perf_counter() - begin
    return reading_s, computing_s


def window_by_window(model: LayerModel, texts: Sequence[ScoredText], folder: Path) -> float:
    """Seconds of one text after the other through all layers, each layer read for each."""
    folder.mkdir()
    drop_cache()
    begin = time.perf_counter()
    model.use_embedding(torch.cat([torch.tensor(text.ids) for text in texts]))
    hollow_layers = list(model._layers)
    for number, text in enumerate(texts):
        model._layers[:] = hollow_layers
        state = None
        for layer in range(model.num_layers):
            with model.filled(layer):
                state = model.run(layer, torch.tensor([text.ids]), state)
        save_state(folder, number, state or ())
    return time.perf_counter() - begin


def bytes_read() -> int:
    """From the disk, by this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def drop_cache() -> None:
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


if __name__ == "__main__":
    main()
