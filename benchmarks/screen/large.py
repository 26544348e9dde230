"""Screen checkpoints of generated weights at two sizes: memory, time beside reading and computing alone, and the estimate.

    python benchmarks/screen/large.py [--layers 6 12] [--tokens 8000]

Models of GLM-4.5's family, 1,024 wide, 64 experts of 512, their last layers' MTP block left out. Reading alone: every layer is
decoded and thrown away. Computing alone: every layer runs all texts, and only that is timed. The page cache is dropped before
each where the machine lets it be.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from assay_pipeline.comparison.screen_sources import ScreenSource
from assay_quantize.screen.estimate import estimate_pass
from assay_quantize.screen.forward import load_state, run_pass, save_state
from assay_quantize.screen.layer_model import LayerModel
from assay_quantize.sensitivity.texts import ScoredText

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path[:0] = [str(SUPPORT / part) for part in ("quantization", "models", "serving")]
from tiny_families import glm4_moe, make_tiny  # noqa: E402

TEXT_TOKENS = 400


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, nargs=2, default=(6, 12))
    arguments.add_argument("--tokens", type=int, default=8000)
    arguments.add_argument("--one", type=Path, help="internal: measure this checkpoint in this process")
    options = arguments.parse_args()
    if options.one is not None:
        measure(options.one, options.tokens)
        return
    print("# Screening checkpoints of generated weights\n")
    print(f"{options.tokens:,} tokens in texts of {TEXT_TOKENS}, FP32, {torch.get_num_threads()} threads.\n")
    print(
        "| layers | checkpoint | peak memory | estimate | pass | reading alone | computing alone | pass / larger of the two |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for layers in options.layers:
            path = Path(folder) / str(layers)
            config = glm4_moe(
                hidden_size=1024, moe_intermediate_size=512, n_routed_experts=64, num_hidden_layers=layers,
                intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts_per_tok=8,
                num_nextn_predict_layers=0,
            )  # fmt: skip
            make_tiny(path, config)
            command = [sys.executable, __file__, "--one", str(path), "--tokens", str(options.tokens)]
            print(
                f"| {layers} {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}", flush=True
            )


def measure(path: Path, num_tokens: int) -> None:
    draw = np.random.default_rng(0)
    texts = [ScoredText(tuple(map(int, draw.integers(7, 800, TEXT_TOKENS)))) for _ in range(num_tokens // TEXT_TOKENS)]
    with ScreenSource(str(path), path).opened() as stored, tempfile.TemporaryDirectory(dir=path.parent) as work:
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        drop_cache()
        estimate_s = estimate_pass(LayerModel(stored), texts, Path(work), has_draft=False).seconds
        drop_cache()
        begin = time.perf_counter()
        states = run_pass(LayerModel(stored), texts, Path(work) / "pass", "x", lambda _line: None)
        pass_s = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        drop_cache()
        model = LayerModel(stored)
        reading_s = computing_s = 0.0
        model.use_embedding(torch.arange(800))
        for layer in range(model.num_layers):
            begin = time.perf_counter()
            loaded = model.load(layer)
            reading_s += time.perf_counter() - begin
            with model.filled(layer, loaded):
                begin = time.perf_counter()
                for number, text in enumerate(texts):
                    state = model.run(layer, torch.tensor([text.ids]), load_state(Path(work), number) if layer else None)
                    save_state(Path(work), number, state)
                computing_s += time.perf_counter() - begin
        assert torch.equal(states.state(0)[0], load_state(Path(work), 0)[0])
    ratio = pass_s / max(reading_s, computing_s)
    print(
        f"| {size / 1e9:.2f} GB | {peak / 2**30:.2f} GiB | {estimate_s:.1f} s, with the head | {pass_s:.1f} s "
        f"| {reading_s:.1f} s | {computing_s:.1f} s | {ratio:.2f} |"
    )


def drop_cache() -> None:
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


if __name__ == "__main__":
    main()
