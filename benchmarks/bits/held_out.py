"""KL of whole checkpoints on texts that nothing was calibrated or chosen on, beside their bytes.

    python benchmarks/bits/held_out.py w4a16 w4a16-gptq nvfp4 mix.yaml [--seed 11] [--write benchmarks/bits/held_out.md]
    python benchmarks/bits/held_out.py w4a16 w4a16-gptq --source examples/tiny_qwen/checkpoint

Each precision (a shipped one, or a recipe's file) is made and verified by `assay quantize` from the source (tiny-glm), read
back with compressed-tensors' decompressors, and run in transformers in FP32 on text that the source writes by itself with
another seed; activations are rounded as the scheme's kernels round them (`sensitivity/rounded.py`). KL is exact, over the whole
vocabulary, source first. Ratios are paired by text: to the first precision, and of every recipe's file to the best shipped one
of at most its bytes. `--keep FOLDER`: what is found of a precision is kept there, and not made again. No server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from assay.recipes.load import load_recipe
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of
from assay.records.plan import Plan
from assay.records.run import PLAN_INSIDE, folder_name
from assay_quantize.calibration.calibrate import load_model
from assay_quantize.calibration.inputs import names_of
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.schemes import SCHEMES, module_of
from assay_quantize.kernels.reference import dequantize_weight
from assay_quantize.sensitivity.rounded import RoundInputs, input_args, scaled

SOURCE = "examples/tiny_glm/checkpoint"
REPOSITORY = Path(__file__).resolve().parents[2]
LENGTH = 256
RESAMPLES = 4000
CALIBRATION_TOKENS = 8192
"""Of `assay calibrate`, for precisions that take static scales from a file; the model's own text, seed 0."""
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Made:
    """weights: name in the source -> what the checkpoint stands for, in FP32. schemes: of weights whose inputs are rounded.
    global_scales: of their inputs, where NVFP4 stores one."""

    weights: dict[str, Tensor]
    schemes: dict[str, str]
    global_scales: dict[str, float]


@dataclass(frozen=True)
class Found:
    """KL of each text, and what the checkpoint weighs."""

    name: str
    is_file: bool
    num_bytes: int
    kl_N: Values


def assay(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("assay")), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def quantized(source: Path, precision: str, folder: Path) -> Path:
    """A checkpoint of this precision, made and verified by the product."""
    out, more = folder / "checkpoint", []
    if load_recipe(PrecisionRecipe, precision).needs_calibration:
        file = str(folder / "seen.safetensors")
        assay("calibrate", str(source), "--out", file, "--tokens", str(CALIBRATION_TOKENS), "--length", str(LENGTH))
        more = ["--importance", file]
    assay("quantize", str(source), "--precision", precision, "--out", str(out), *more)
    return out


def read_back(folder: Path) -> Made:
    plan = Plan.load(folder / PLAN_INSIDE)
    stored = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    made = Made({}, {}, {})
    for tensor in plan.tensors:
        if tensor.scheme is None:
            made.weights.update({one.name: stored[one.name].float() for one in tensor.outputs if one.name in stored})
            continue
        if tensor.scheme == "fp8_static":
            raise SystemExit(f"{folder}: {tensor.name} is {tensor.scheme}, whose inputs are not rounded here")
        module = module_of(tensor.name)
        parts = {output.name.removeprefix(f"{module}."): stored[output.name] for output in tensor.outputs}
        if input_args(tensor.scheme) is not None:
            made.schemes[tensor.name] = tensor.scheme
        if (scale := parts.get("input_global_scale")) is not None:
            made.global_scales[tensor.name] = float(scale)
        if SCHEMES[tensor.scheme].layout == "plain":  # their kernels do not round value times scale to BF16
            made.weights[tensor.name] = scaled(parts["weight"], parts["weight_scale"], tensor.scheme)
        else:
            made.weights[tensor.name] = dequantize_weight(parts, tensor.scheme, torch.float32)
    return made


def fill(model: Any, made: Made) -> RoundInputs:
    """Every matrix that the checkpoint has, and every vector (AWQ changes norms), in the model; returns what rounds inputs."""
    by_address, weights = names_of(model), made.weights
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name in weights:
                parameter.copy_(weights[name])
            elif parameter.dim() == 3:
                for expert in parameter:
                    names = by_address[expert.data_ptr()]
                    expert.copy_(torch.cat([weights[one] for one in names]))
    first = {at: names[0] for at, names in by_address.items()}
    schemes = {at: made.schemes[name] for at, name in first.items() if name in made.schemes}
    return RoundInputs(schemes, {at: made.global_scales[name] for at, name in first.items() if name in made.global_scales})


def log_probabilities(model: Any, tokens_NL: Tensor) -> Iterator[Tensor]:
    """[4, length, vocabulary] at a time."""
    with torch.no_grad():
        for some in tokens_NL.split(4):
            yield model(input_ids=some, use_cache=False).logits.log_softmax(-1)


def kl_by_text(model: Any, reference: Sequence[Tensor], tokens_NL: Tensor) -> Values:
    """Mean over the positions of each text."""
    found = [
        (ours.exp() * (ours - theirs)).sum(-1).mean(1)
        for ours, theirs in zip(reference, log_probabilities(model, tokens_NL), strict=True)
    ]
    return torch.cat(found).double().numpy()


def ratio(ours_N: Values, first_N: Values) -> str:
    """Of the means, and the 95 % of resampled texts around it, as two columns."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(ours_N), (RESAMPLES, len(ours_N)))
    low, high = np.quantile(ours_N[drawn].mean(1) / first_N[drawn].mean(1), [0.025, 0.975])
    return f"{ours_N.mean() / first_N.mean():.3f} | {low:.3f} to {high:.3f}"


def resampled(ours_N: Values) -> tuple[float, float]:
    """95 % of the mean over resampled texts."""
    rng = np.random.default_rng(0)
    low, high = np.quantile(ours_N[rng.integers(0, len(ours_N), (RESAMPLES, len(ours_N)))].mean(1), [0.025, 0.975])
    return float(low), float(high)


def mean(ours_N: Values) -> str:
    """With the 95 % of resampled texts."""
    low, high = resampled(ours_N)
    return f"{ours_N.mean():.5f} | {low:.5f} to {high:.5f}"


def model_name(source: Path) -> str:
    """examples/tiny_glm/checkpoint -> tiny-glm"""
    return folder_name(source).replace("_", "-")


def held_out(model: Any, source: Path, seed: int, num_tokens: int, keep: Path | None) -> Tensor:
    """What the source writes by itself with this seed."""
    kept = None if keep is None else keep / f"tokens-{model_name(source)}-{seed}-{num_tokens}.npy"
    if kept is not None and kept.is_file():
        return torch.from_numpy(np.load(kept, allow_pickle=False))
    tokens_NL = torch.tensor(Text((), seed).sequences(model, source, num_tokens, LENGTH, lambda line: None))
    if kept is not None:
        np.save(kept, tokens_NL.numpy())
    return tokens_NL


def measured(source: Path, precisions: Sequence[str], seed: int, num_tokens: int, keep: Path | None) -> Iterator[Found]:
    model = load_model(open_checkpoint(source), source, "cpu")
    tokens_NL = held_out(model, source, seed, num_tokens, keep)
    reference: list[Tensor] = []
    for precision in precisions:
        recipe = load_recipe(PrecisionRecipe, precision)
        kept = None if keep is None else keep / f"{recipe.name}-{sha256_of([recipe.sha256, tokens_NL.tolist()])[:16]}.npz"
        if kept is not None and kept.is_file():
            with np.load(kept) as file:
                yield Found(recipe.name, precision.endswith(".yaml"), int(file["num_bytes"]), file["kl_N"])
            continue
        if not reference:  # first of all: the model still has the source's weights
            reference = list(log_probabilities(model, tokens_NL))
        with tempfile.TemporaryDirectory() as folder:
            made = quantized(source, precision, Path(folder))
            size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
            with fill(model, read_back(made)):
                found = kl_by_text(model, reference, tokens_NL)
        if kept is not None:
            np.savez(kept, num_bytes=size, kl_N=found)
        print(f"{recipe.name}: {found.mean():.5f} nats", file=sys.stderr, flush=True)
        yield Found(recipe.name, precision.endswith(".yaml"), size, found)


def lines(source: str, precisions: Sequence[str], seed: int, num_tokens: int, keep: Path | None) -> Iterator[str]:
    folder = REPOSITORY / source
    every = list(measured(folder, precisions, seed, num_tokens, keep))
    yield "# KL on held-out text"
    yield ""
    named = " ".join(precisions if source == SOURCE else [*precisions, "--source", source])
    yield f"`python benchmarks/bits/held_out.py {named} --seed {seed} --tokens {num_tokens}`"
    yield ""
    texts = f"{len(every[0].kl_N)} texts of {LENGTH} tokens"
    yield f"{model_name(folder)}, {texts} that it wrote with seed {seed}, on which nothing was"
    yield "calibrated or chosen; exact KL in FP32, the source first, activations rounded where the precision rounds them; 95 %"
    yield "over texts."
    yield f"Ratios to {every[0].name}, paired by text. Bytes are of the files, headers included. `auto-` are recipes of"
    yield "`assay recipe`, whose first lines say what they were chosen on."
    yield ""
    yield "| precision | bytes | mean KL, nats | 95 % | ratio | 95 % |"
    yield "|---|---|---|---|---|---|"
    for one in sorted(every, key=lambda one: (one.num_bytes, one.name)):
        yield f"| {one.name} | {one.num_bytes:,} | {mean(one.kl_N)} | {ratio(one.kl_N, every[0].kl_N)} |"
    if not any(one.is_file for one in every):
        return
    yield ""
    yield "Each recipe of `assay recipe` beside the best of the other precisions here of at most its bytes, first of all, then"
    yield "of those without calibration:"
    yield ""
    yield "| recipe | best of at most its bytes | ratio | 95 % | best without calibration | ratio | 95 % |"
    yield "|---|---|---|---|---|---|---|"
    for one in (one for one in every if one.is_file):
        smaller = [other for other in every if not other.is_file and other.num_bytes <= one.num_bytes]
        columns = []
        for group in (smaller, [other for other in smaller if not _is_calibrated(other.name)]):
            best = min(group, key=lambda other: float(other.kl_N.mean()), default=None)
            columns.append("none | |" if best is None else f"{best.name} | {ratio(one.kl_N, best.kl_N)} |")
        yield f"| {one.name} | {' '.join(columns)}"


def _is_calibrated(name: str) -> bool:
    recipe = load_recipe(PrecisionRecipe, name)
    return recipe.calibration != "none" or recipe.needs_calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("precisions", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--source", default=SOURCE, metavar="FOLDER", help="the checkpoint; relative to the repository")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--keep", type=Path, help="folder of what is found, so that a further run makes only what is new")
    parser.add_argument("--write", type=Path, help="file of the table")
    args = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    text = ""
    for line in lines(args.source, args.precisions, args.seed, args.tokens, args.keep):
        print(line, flush=True)
        text += f"{line}\n"
    if args.write is not None:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
