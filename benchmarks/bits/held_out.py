"""KL of whole checkpoints on texts that nothing was calibrated or chosen on, beside that of data-free ones.

    python benchmarks/bits/held_out.py w4a16 w4a16-mse w4a16-gptq mix.yaml [--seed 11] [--write benchmarks/bits/held_out.md]

Each precision (a shipped one, or a recipe's file) is made and verified by `assay quantize` from tiny-glm, read back with
compressed-tensors' decompressors, and run in transformers in FP32 on text that the source writes by itself with another seed.
KL is exact, over the whole vocabulary, source first. Ratios are to the first precision that is named, paired by text. Formats
with rounded activations are refused: here activations stay in FP32. No server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from assay.records.plan import Plan
from assay.records.run import PLAN_INSIDE
from assay_quantize.calibration.calibrate import load_model, names_of
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.checkpoint import open_checkpoint
from assay_quantize.formats.schemes import module_of
from assay_quantize.kernels.reference import dequantize_weight

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "tiny_glm" / "checkpoint"
LENGTH = 256
WEIGHTS_ONLY = {"w4a16", "w4a16_g64", "w4a16_g32", "w4a16_channel", "w4a16_asym", "nvfp4a16"}
RESAMPLES = 4000
Values = NDArray[np.float64]


def quantized(precision: str, out: Path) -> Path:
    """A checkpoint of this precision, made and verified by the product."""
    command = [
        str(Path(sys.executable).with_name("assay")),
        "quantize",
        str(SOURCE),
        "--precision",
        precision,
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Name in the source -> what the checkpoint stands for, in FP32."""
    plan = Plan.load(folder / PLAN_INSIDE)
    stored = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    found = {}
    for tensor in plan.tensors:
        if tensor.scheme is None:
            found |= {output.name: stored[output.name].float() for output in tensor.outputs if output.name in stored}
            continue
        if tensor.scheme not in WEIGHTS_ONLY:
            raise SystemExit(f"{folder.name}: {tensor.name} is {tensor.scheme}, whose activations are rounded too")
        module = module_of(tensor.name)
        parts = {output.name.removeprefix(f"{module}."): stored[output.name] for output in tensor.outputs}
        found[tensor.name] = dequantize_weight(parts, tensor.scheme, torch.float32)
    return found


def fill(model: Any, weights: dict[str, Tensor]) -> None:
    """Every matrix that the checkpoint has, and every vector (AWQ changes norms), in the model's parameters."""
    by_address = names_of(model)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name in weights:
                parameter.copy_(weights[name])
            elif parameter.dim() == 3:
                for expert in parameter:
                    names = by_address[expert.data_ptr()]
                    expert.copy_(torch.cat([weights[one] for one in names]))


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


def ratio(ours_N: Values, first_N: Values) -> tuple[float, float, float]:
    """Of the means, and the 95 % of resampled texts around it."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(ours_N), (RESAMPLES, len(ours_N)))
    low, high = np.quantile(ours_N[drawn].mean(1) / first_N[drawn].mean(1), [0.025, 0.975])
    return float(ours_N.mean() / first_N.mean()), float(low), float(high)


def lines(precisions: Sequence[str], seed: int, num_tokens: int) -> Iterator[str]:
    model = load_model(open_checkpoint(SOURCE), SOURCE, "cpu")
    tokens_NL = torch.tensor(Text((), seed).sequences(model, SOURCE, num_tokens, LENGTH, lambda line: None))
    reference = list(log_probabilities(model, tokens_NL))
    yield "# KL on held-out text"
    yield ""
    named = " ".join(Path(one).name for one in precisions)
    yield f"`python benchmarks/bits/held_out.py {named} --seed {seed} --tokens {num_tokens}`"
    yield ""
    yield f"tiny-glm, {len(tokens_NL)} texts of {LENGTH} tokens that it wrote with seed {seed}; exact KL in FP32, the source"
    yield f"first; ratios to {precisions[0]}, 95 % over texts, paired."
    yield ""
    yield "| precision | bytes | mean KL, nats | ratio | 95 % |"
    yield "|---|---|---|---|---|"
    first: Values | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number, precision in enumerate(precisions):
            made = quantized(precision, Path(folder) / f"{number}")
            fill(model, weights_of(made))
            found = kl_by_text(model, reference, tokens_NL)
            first = found if first is None else first
            value, low, high = ratio(found, first)
            size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
            name = Path(precision).stem if precision.endswith(".yaml") else precision
            yield f"| {name} | {size:,} | {found.mean():.5f} | {value:.3f} | {low:.3f} to {high:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("precisions", nargs="+", help="the first is what the others are held against")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--write", type=Path, help="file of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = ""
    for line in lines(args.precisions, args.seed, args.tokens):
        print(line, flush=True)
        text += f"{line}\n"
    if args.write is not None:
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
