"""What the scale search (`observer: mse`) is worth: weight error and KL of tiny-glm with and without it, for every scheme.

    python benchmarks/scale_search.py [--num-prompts 96] [--results benchmarks/RESULTS.md]

Plain PyTorch in FP32, no server: the model of examples/tiny_glm with the weights its plan quantizes rounded by the kernels and
read back. Texts are replies it samples from itself at T=1; KL is that of the whole next-token distribution at every token of
the replies, reference first; intervals resample prompts. Channel weights come from replies to other prompts.

A few texts make much of every mean: those in which T=1 has led the model astray, where it is unsure of everything and a
rounding that swaps two experts is felt. Hence thousands of replies, and the column of the mean without the largest 0.1 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "examples" / "tiny_glm"))
from data import EOS  # noqa: E402
from model import TinyConfig, TinyGlm  # noqa: E402
from score import chat_ids  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from assay.recipes.load import load_recipe  # noqa: E402
from assay.recipes.precision import PrecisionRecipe  # noqa: E402
from assay.recipes.suite import DivergenceSpec  # noqa: E402
from assay.records.plan import Plan  # noqa: E402
from assay_evaluate.divergence.documents import document_items  # noqa: E402
from assay_evaluate.statistics.clustered import cluster_bootstrap_mean  # noqa: E402
from assay_quantize.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from assay_quantize.checkpoint.torch_tensors import read_tensor  # noqa: E402
from assay_quantize.formats.schemes import SHARES_GLOBAL_SCALE  # noqa: E402
from assay_quantize.kernels import (  # noqa: E402
    amax_rows,
    needs_amax,
    quantize_rows,
    search_reference,
)
from assay_quantize.kernels.reference import dequantize_rows, to_numpy  # noqa: E402
from assay_quantize.plan.planner import make_plan  # noqa: E402

CHECKPOINT = REPOSITORY / "examples" / "tiny_glm" / "checkpoint"
SCHEMES = ("w4a16", "w4a16_g64", "w4a16_g32", "w4a16_asym", "nvfp4a16", "mxfp4", "fp8_block", "fp8_channel", "mxfp8", "w8a8")
OBSERVERS = ("minmax", "mse", "mse + channel weights")
UNSQUARED = "mse without w^2 (not offered)"
BEGIN, END = "<!-- scale-search -->", "<!-- /scale-search -->"
SAMPLES = 24
"""Replies to each prompt."""


# ------------------------------------------------------------------------------------------------ the model
def build(tensors: dict[str, Tensor]) -> TinyGlm:
    """The model with these weights, by checkpoint name, in FP32. MTP is not among what is measured."""
    config = json.loads((CHECKPOINT / "config.json").read_text())
    model = TinyGlm(TinyConfig(**{name: config[name] for name in TinyConfig.__dataclass_fields__})).eval()
    experts = range(model.c.n_routed_experts)
    state = {}
    for name in model.state_dict():
        if name.startswith("layers.") and "mlp.w_" in name:
            stem, part = name.split("mlp.w_")
            state[name] = torch.stack([tensors[f"model.{stem}mlp.experts.{e}.{part}_proj.weight"] for e in experts])
        elif name == "lm_head.weight":
            state[name] = tensors[name]
        elif name.startswith(("layers.", "embed_tokens.", "norm.")):
            renamed = name.replace("mlp.gate_weight", "mlp.gate.weight").replace("mlp.e_score", "mlp.gate.e_score")
            state[name] = tensors[f"model.{renamed}"]
    skipped = model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    assert all(name.startswith(("mtp", "enorm", "hnorm", "eh_proj")) for name in skipped.missing_keys), skipped
    return model


@dataclass(frozen=True)
class Replies:
    """SAMPLES replies to one prompt, padded at the right."""

    ids_ST: Tensor
    prompt_tokens: int
    is_reply_ST: Tensor
    """True where the token belongs to the reply; the one that ends it included."""


@torch.no_grad()
def write_replies(model: TinyGlm, num_prompts: int, seed: str, max_tokens: int = 192) -> list[Replies]:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    stop = torch.tensor([tokenizer.token_to_id(name) for name in EOS])
    generator = torch.Generator().manual_seed(1)
    made = []
    for item in document_items(DivergenceSpec(num_documents=num_prompts // 2, max_tokens=max_tokens), seed):
        prompt_S = torch.tensor([chat_ids(tokenizer, item.prompt)]).repeat(SAMPLES, 1)
        past: list[list[Tensor]] = [[] for _ in model.layers]
        token_S1, columns, running = prompt_S, [], [torch.ones(SAMPLES, 1, dtype=torch.bool)]
        while len(columns) < max_tokens and bool(running[-1].any()):
            logits_SV = model.lm_head(model(token_S1, past)[:, -1])
            token_S1 = torch.multinomial(logits_SV.softmax(-1), 1, generator=generator)
            columns.append(token_S1)
            running.append(running[-1] & ~torch.isin(token_S1, stop))
        is_reply = torch.cat([torch.zeros_like(prompt_S, dtype=torch.bool), *running[: len(columns)]], 1)
        made.append(Replies(torch.cat([prompt_S, *columns], 1), prompt_S.shape[1], is_reply))
    return made


@torch.no_grad()
def logprobs(model: TinyGlm, replies: Replies) -> Tensor:
    """[tokens of the replies, vocabulary], reply by reply."""
    hidden_STD = model(replies.ids_ST)[:, :-1]
    return model.lm_head(hidden_STD[replies.is_reply_ST[:, 1:]]).log_softmax(-1)


def mean_squares(model: TinyGlm, texts: list[Replies]) -> dict[str, NDArray[np.float32]]:
    """Weight -> mean squared activation of each input channel: what `assay quantize --importance` reads from a file."""
    names = {parameter.data_ptr(): f"model.{name}" for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if "mlp.w_" in name:
            stem, part = name.split("mlp.w_")
            names |= {w.data_ptr(): f"model.{stem}mlp.experts.{e}.{part}_proj.weight" for e, w in enumerate(parameter)}
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name, flat = names.get(weight.data_ptr()), x.reshape(-1, x.shape[-1])
        if name is not None and len(flat):
            sums[name] = sums.get(name, torch.zeros(flat.shape[1], dtype=torch.float64)) + flat.double().square().sum(0)
            counts[name] = counts.get(name, 0) + len(flat)
        return linear(x, weight, bias)

    with patch.object(F, "linear", watched):
        for replies in texts:
            logprobs(model, replies)
    return {name: (total / counts[name]).float().numpy() for name, total in sums.items()}


# ------------------------------------------------------------------------------------------------ quantized
def quantized(
    plan: Plan, tensors: dict[str, Tensor], observer: str, weights: dict[str, NDArray[np.float32]]
) -> tuple[dict[str, Tensor], float]:
    """(tensors with the planned ones rounded and read back, ||error|| / ||w|| over all of them)."""
    planned = [tensor for tensor in plan.tensors if tensor.action == "quantize"]
    rows = {tensor.name: to_numpy(tensors[tensor.name]) for tensor in planned}
    amaxes: dict[str, float] = {}
    for tensor in planned:
        key = tensor.fused_group if tensor.scheme in SHARES_GLOBAL_SCALE and tensor.fused_group else tensor.name
        amaxes[key] = max(amaxes.get(key, 0.0), amax_rows(rows[tensor.name], "BF16"))
    made, squared_error, squared_norm = dict(tensors), 0.0, 0.0
    for tensor in planned:
        assert tensor.scheme is not None
        key = tensor.fused_group if tensor.scheme in SHARES_GLOBAL_SCALE and tensor.fused_group else tensor.name
        one = quantize_rows(
            rows[tensor.name],
            "BF16",
            tensor.scheme,
            amax=amaxes[key] if needs_amax(tensor.scheme) else None,
            observer="minmax" if observer == "minmax" else "mse",
            importance_I=weights.get(tensor.name) if observer == OBSERVERS[2] else None,
            kernels="reference" if observer == UNSQUARED else "fused",
        )
        made[tensor.name] = dequantize_rows(one.parts, rows[tensor.name], "BF16", tensor.scheme)
        squared_error, squared_norm = squared_error + one.squared_error, squared_norm + one.squared_norm
    return made, (squared_error / squared_norm) ** 0.5


@contextmanager
def without_squares(wanted: bool) -> Iterator[None]:
    """Inside, the definition does not multiply the errors of integers by w^2."""
    if not wanted:
        yield
        return
    with patch.object(search_reference, "SQUARED", ()):
        yield


def plan_of(scheme: str) -> Plan:
    recipe = load_recipe(PrecisionRecipe, "w4a16").model_copy(update={"scheme": scheme})
    return make_plan(open_checkpoint(CHECKPOINT), recipe, model="tiny-glm", family=None)


# ------------------------------------------------------------------------------------------------ the table
def measure(num_prompts: int, schemes: tuple[str, ...], console: Console) -> list[str]:
    source = open_checkpoint(CHECKPOINT)
    tensors = {name: read_tensor(source, name).clone() for name in source.tensors}
    model = build(tensors)
    weights = mean_squares(model, write_replies(model, max(4, num_prompts // 8), "eval-scale-search-calibration"))
    candidates = []
    for scheme in schemes:
        plan = plan_of(scheme)
        for observer in (*OBSERVERS, *((UNSQUARED,) if scheme == "w4a16" else ())):
            with without_squares(observer == UNSQUARED):
                made, error = quantized(plan, tensors, observer, weights)
            candidates.append((scheme, observer, error, build(made)))
    texts = write_replies(model, num_prompts, "eval-scale-search")
    console.print(f"{len(texts)} prompts answered")
    kls: list[list[NDArray[np.float64]]] = [[] for _ in candidates]
    for replies in track(texts, "KL", console=console):
        p = logprobs(model, replies)
        for kl, (_, _, _, candidate) in zip(kls, candidates, strict=True):
            kl.append(1e6 * (p.exp() * (p - logprobs(candidate, replies))).sum(-1).double().numpy())
    prompt_of = np.repeat(np.arange(len(texts)), [len(kl) for kl in kls[0]])
    lines = [
        f"{len(texts) * SAMPLES} replies to {len(texts)} prompts, {len(prompt_of)} tokens. KL in 1e-6 nats per token, with "
        "95 % intervals. Differences are from min-max, paired.",
        "",
        "| scheme | observer | weight error | mean KL | difference | without the top 0.1 % | difference |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (scheme, observer, error, _), kl in zip(candidates, kls, strict=True):
        found = np.concatenate(kl)
        if observer == "minmax":
            base, kept = found, found <= np.quantile(found, 0.999)
        usual = found <= np.quantile(found, 0.999)
        both = kept & usual
        changes = ["", ""]
        if observer != "minmax":
            changes = [
                _interval(cluster_bootstrap_mean(found - base, prompt_of), "+"),
                _interval(cluster_bootstrap_mean((found - base)[both], prompt_of[both]), "+"),
            ]
        mean = _interval(cluster_bootstrap_mean(found, prompt_of))
        lines.append(
            f"| {scheme} | {observer} | {error:.5f} | {mean} | {changes[0]} | {found[usual].mean():.2f} | {changes[1]} |"
        )
        console.print(lines[-1], highlight=False)
    return lines


def _interval(found: object, sign: str = "") -> str:
    value, low, high = (getattr(found, name) for name in ("value", "low", "high"))
    return f"{value:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def write_results(path: Path, lines: list[str]) -> None:
    """Replace what is between the markers, or append it."""
    text = path.read_text(encoding="utf-8") if path.is_file() else "# Results\n"
    body = "\n".join([BEGIN, "## Scale search on tiny-glm", "", *lines, END])
    if BEGIN in text and END in text:
        text = text[: text.index(BEGIN)] + body + text[text.index(END) + len(END) :]
    else:
        text = text.rstrip("\n") + "\n\n" + body + "\n"
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=96, help=f"prompts, half of them Chinese; {SAMPLES} replies each")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; the sums, and so the last digits, depend on it")
    parser.add_argument("--results", type=Path, help="file to write the table into")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = measure(args.num_prompts, tuple(args.schemes.split(",")), Console(width=160))
    if args.results is not None:
        write_results(args.results, lines)


if __name__ == "__main__":
    main()
