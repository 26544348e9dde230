"""`make bench`: this quantizer, llm-compressor's data-free path, and a plain copy of the same bytes, side by side in one run.

Prints GB of BF16 per second and the ratios; absolute times mean little on a shared machine, ratios within one run do. The
checkpoint is generated (random weights, GLM-4-MoE names), its size is `--gigabytes`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tiny_checkpoints import make_tiny_glm4_moe

from assay.recipes import PrecisionRecipe, load_recipe
from assay_quantize.checkpoint import open_checkpoint
from assay_quantize.engine import quantize
from assay_quantize.plan import make_plan

PRESETS = {"fp8": "FP8_BLOCK", "w4a16": "W4A16", "nvfp4a16": "NVFP4A16"}
"""Precision -> llm-compressor's name for its scheme."""


def make_source(folder: Path, gigabytes: float) -> int:
    """A checkpoint of about that size; its bytes."""
    hidden, expert = 1024, 512
    per_layer = 3 * hidden * expert * 2 * 32
    num_layers = max(2, round(gigabytes * 1e9 / per_layer))
    make_tiny_glm4_moe(
        folder,
        num_layers=num_layers,
        num_experts=32,
        hidden=hidden,
        moe_intermediate=expert,
        dense_intermediate=1024,
        shards=4,
        mtp=False,
    )
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def timed(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


def run_assay(source: Path, out: Path, precision: str) -> None:
    plan = make_plan(open_checkpoint(source), load_recipe(PrecisionRecipe, precision), model="bench", family=None)
    quantize(plan, source, out, device="cpu")


def run_llmcompressor(source: Path, out: Path, precision: str) -> None:
    from llmcompressor.entrypoints.model_free import model_free_ptq

    ignore = ["lm_head", "re:.*embed_tokens$", "re:.*mlp\\.gate$"]
    model_free_ptq(str(source), str(out), scheme=PRESETS[precision], ignore=ignore, device="cpu")


def run_copy(source: Path, out: Path) -> None:
    shutil.copytree(source, out)
    os.sync()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--precisions", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: a temporary folder")
    args = parser.parse_args()
    table = Table("precision", "cp, s", "assay, s", "assay, GB/s", "llm-compressor, s", "assay is faster by", "assay / cp")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        num_bytes = make_source(folder / "source", args.gigabytes)
        for precision in args.precisions:
            copy_s = timed(lambda: run_copy(folder / "source", folder / "copy"))
            ours_s = timed(lambda: run_assay(folder / "source", folder / "ours", precision))  # noqa: B023
            theirs_s = timed(lambda: run_llmcompressor(folder / "source", folder / "theirs", precision))  # noqa: B023
            speed = num_bytes / 1e9 / ours_s
            cells = (copy_s, ours_s, speed, theirs_s, theirs_s / ours_s, ours_s / copy_s)
            table.add_row(precision, *(f"{cell:.2f}" for cell in cells))
            for made in ("copy", "ours", "theirs"):
                shutil.rmtree(folder / made)
    table.title = f"{num_bytes / 1e9:.2f} GB of BF16, {os.cpu_count()} cores"
    Console().print(table)


if __name__ == "__main__":
    main()
