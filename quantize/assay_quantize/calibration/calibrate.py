"""Mean squared input activations of every weight: the channel weights of the scale search (`importance.py`).

The model runs in transformers, on text that is given or that it writes itself, with every call of `linear` watched: attention,
MLPs, and each expert by itself, since an expert only counts the tokens that were routed to it. What transformers does not
build (the MTP block) is not calibrated. The model must fit into memory whole; FP8 releases are dequantized on the way in.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.atomic_files import replacing
from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.recipes.families import classify, family_of
from assay.records.base import sha256_of_file
from assay.records.calibration import Calibration, Nvfp4Inputs
from assay_quantize.calibration.ranges import InputRange
from assay_quantize.calibration.resident import cached_bytes
from assay_quantize.calibration.text import Text
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.fused_experts import FUSED_PARTS

BATCH_TOKENS = 4096
"""Tokens that go through the model at once."""


@dataclass
class Moments:
    """Of one weight's inputs: sums of squares, FP64 [columns], the tokens they are over, and their range."""

    squares: Tensor
    num_tokens: int = 0
    range: InputRange = field(default_factory=InputRange)


class InputWatch(TorchFunctionMode):
    """While it is entered, adds up the squared inputs of every `linear` whose weight has a name.

    names: address of a weight's first element -> the weights of the checkpoint that lie there (gate and up of an expert).
    """

    def __init__(self, names: Mapping[int, tuple[str, ...]]) -> None:
        super().__init__()
        self._names = names
        self.moments: dict[str, Moments] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            names = self._names.get(args[1].data_ptr(), ())
            if names and args[0].numel():
                self._add(names, args[0])
        return func(*args, **(kwargs or {}))

    def _add(self, names: tuple[str, ...], inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        squares = rows.float().square().sum(0, dtype=torch.float64).cpu()
        for name in names:
            moments = self.moments.setdefault(name, Moments(torch.zeros_like(squares)))
            moments.squares += squares
            moments.num_tokens += len(rows)
        self.moments[names[0]].range.add(rows)


def names_of(model: torch.nn.Module) -> dict[int, tuple[str, ...]]:
    """Address of every matrix of a transformers model -> names of the weights in its checkpoint.

    Experts are one 3-D parameter for all of a layer: gate_up_proj [E, 2I, H] and down_proj [E, H, I].
    """
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if parameter.dim() == 2:
            found[parameter.data_ptr()] = (name,)
        elif parameter.dim() == 3 and leaf in FUSED_PARTS:
            for expert, weight in enumerate(parameter):
                found[weight.data_ptr()] = tuple(f"{prefix}.{expert}.{part}.weight" for part in FUSED_PARTS[leaf])
    return found


def calibrate(
    folder: Path,
    out: Path,
    text: Text,
    *,
    model_name: str,
    num_tokens: int = 65_536,
    length: int = 512,
    min_tokens: int = 64,
    device: str = "cpu",
    report: Say | None = None,
) -> Calibration:
    """Run the checkpoint in `folder` over `num_tokens` of `text` and write its channel weights to `out` (safetensors).

    text: where tokens come from. length: of the sequences, in tokens. min_tokens: weights that saw fewer are left out of the
    file (and so searched unweighted), since a mean over a few tokens says more about them than about the weight. device: cpu,
    or cuda (never run so far). report: told lines of progress. Deterministic on a CPU.
    Raises QuantizeError: no room for the model, too little text, a model that transformers builds in another way.
    """
    started = time.monotonic()
    say = report or (lambda line: None)
    checkpoint = open_checkpoint(folder)
    _check_out(out)
    model = load_model(checkpoint, folder, device)
    wanted = linear_weights(checkpoint)
    names = names_of(model)
    known = {name for group in names.values() for name in group}
    if lost := sorted(wanted - known):
        raise QuantizeError(
            f"{folder}: transformers builds no parameter for {lost[0]}{f' and {len(lost) - 1} more' if lost[1:] else ''}; "
            "this model cannot be calibrated here: quantize without --importance"
        )
    sequences = text.sequences(model, folder, num_tokens, length, say)
    watch = InputWatch({address: kept for address, group in names.items() if (kept := tuple(n for n in group if n in wanted))})
    run_over(model, sequences, watch, say)
    starved = {name: watch.moments[name].num_tokens if name in watch.moments else 0 for name in wanted}
    starved = {name: count for name, count in sorted(starved.items()) if count < min_tokens}
    if len(starved) == len(wanted):
        raise QuantizeError(f"{out}: no weight saw {min_tokens} tokens; give more text, or lower --min-tokens")
    enough = {name: moments for name, moments in sorted(watch.moments.items()) if name not in starved}
    write_importance(out, enough, text.describe())
    return Calibration(
        model=model_name,
        source=str(folder),
        text=text.describe(),
        num_tokens=sum(map(len, sequences)),
        length=length,
        min_tokens=min_tokens,
        weights=len(enough),
        starved=starved,
        tokens_by_expert=_by_expert(watch.moments, wanted),
        nvfp4_inputs=_nvfp4_inputs(watch.moments),
        file=str(out),
        file_sha256=sha256_of_file(out),
        seconds=time.monotonic() - started,
    )


def linear_weights(checkpoint: Checkpoint) -> set[str]:
    """Names of the weights that a precision may quantize, the MTP block's left out."""
    family = family_of(checkpoint.config)
    weights = (name for name in checkpoint.tensors if name.endswith(".weight"))
    found = {name: classify(family, name, checkpoint.config) for name in weights}
    return {name for name, what in found.items() if what.linear and what.role not in ("mtp", "lm_head", "router", "indexer")}


def run_over(model: Any, sequences: Sequence[Sequence[int]], watch: InputWatch, say: Say) -> None:
    """All sequences, of one length each, through the decoder; the head is not needed."""
    batch = max(1, BATCH_TOKENS // len(sequences[0]))
    with torch.no_grad(), watch:
        for begin in range(0, len(sequences), batch):
            some = torch.tensor(sequences[begin : begin + batch], device=model.device)
            model.base_model(input_ids=some, use_cache=False)
            done = begin + len(some)
            say(f"calibrating: {done * len(sequences[0]):,} of {len(sequences) * len(sequences[0]):,} tokens")


def write_importance(path: Path, moments: Mapping[str, Moments], text: Iterable[str]) -> None:
    """The file that `importance.py` reads: FP32 means by name, and in its metadata the tokens that each is over."""
    from safetensors.numpy import save_file

    means = {name: (one.squares / one.num_tokens).numpy().astype(np.float32) for name, one in moments.items()}
    counts = {name: one.num_tokens for name, one in moments.items()}
    with replacing(path) as partial:
        save_file(means, partial, {"assay_text": json.dumps(list(text)), "assay_tokens": json.dumps(counts)})


def _check_out(path: Path) -> None:
    """Before hours of work, not after them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as problem:
        raise QuantizeError(f"--out {path}: cannot be written: {problem.strerror}; give the name of a file") from None


def _nvfp4_inputs(moments: Mapping[str, Moments]) -> Nvfp4Inputs:
    """All groups together, and the weights whose inputs fit worst."""
    ranges = {name: one.range for name, one in moments.items() if one.range.num_groups}
    zeroed = max(ranges, key=lambda name: ranges[name].num_zeroed / ranges[name].num_groups)
    largest = max(ranges, key=lambda name: ranges[name].largest)
    return Nvfp4Inputs(
        num_groups=sum(one.num_groups for one in ranges.values()),
        num_cut_off=sum(one.num_cut_off for one in ranges.values()),
        num_coarse=sum(one.num_coarse for one in ranges.values()),
        num_zeroed=sum(one.num_zeroed for one in ranges.values()),
        largest=ranges[largest].largest,
        largest_at=largest,
        most_zeroed=ranges[zeroed].num_zeroed / ranges[zeroed].num_groups,
        most_zeroed_at=zeroed,
    )


def _by_expert(moments: Mapping[str, Moments], wanted: Iterable[str]) -> tuple[int, int, int] | None:
    names = [name for name in wanted if ".experts." in name and name.endswith(".down_proj.weight")]
    counts = sorted(moments[name].num_tokens if name in moments else 0 for name in names)
    return (counts[0], counts[len(counts) // 2], counts[-1]) if counts else None


# ------------------------------------------------------------------------------------------------ the model
def load_model(checkpoint: Checkpoint, folder: Path, device: str) -> Any:
    """The model in transformers, its experts one after the other: FP32 on a CPU, BF16 on a GPU."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as their_logging

    from assay_quantize.kernels.devices import check_device

    logging: Any = their_logging
    by_name: Any = AutoModelForCausalLM
    check_device(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    _check_memory(checkpoint, device, dtype.itemsize)
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of every tensor of the MTP block, which it leaves out by design
    options: dict[str, Any] = {"dtype": dtype, "experts_implementation": "eager"}
    try:
        model: Any
        if not any(header.dtype.startswith("F8_") for header in checkpoint.tensors.values()):
            model = by_name.from_pretrained(folder, **options)
        else:
            config = AutoConfig.from_pretrained(folder)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            by_config: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model = by_config.from_pretrained(None, config=config, state_dict=plain_weights(checkpoint), **options)
    except (OSError, ValueError, KeyError, ImportError) as problem:
        raise QuantizeError(f"{folder}: transformers cannot load it: {str(problem).splitlines()[0]}") from None
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    return model.eval().to(device)


def plain_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, FP8 weights dequantized to BF16."""
    from assay.records.plan import TensorPlan
    from assay_quantize.checkpoint.source_format import find_companions
    from assay_quantize.checkpoint.source_reader import SourceReader
    from assay_quantize.checkpoint.torch_tensors import read_tensor

    companions = find_companions(checkpoint.location, checkpoint.config, checkpoint.tensors)
    found: dict[str, Tensor] = {}
    with SourceReader(checkpoint) as reader:
        for name, header in checkpoint.tensors.items():
            if name in companions.weight_of:
                continue
            scale = companions.scale_of.get(name)
            if scale is None:
                found[name] = read_tensor(checkpoint, name)
                continue
            size = header.num_bytes
            tensor = TensorPlan(
                name, "", "", "", "dequantize", None, None, header.dtype, header.shape, size, header.shard, None, (), scale
            )
            found[name] = torch.from_numpy(reader.read_rows(tensor, 0, header.shape[0])).view(torch.bfloat16)
    return found


def _check_memory(checkpoint: Checkpoint, device: str, weight_bytes: int) -> None:
    needed = weight_bytes * sum(int(np.prod(header.shape)) for header in checkpoint.tensors.values())
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + cached_bytes()
    if needed > free:
        raise QuantizeError(
            f"{checkpoint.location}: calibrating takes the whole model, {needed / 1e9:.1f} GB as it runs here, and "
            f"{free / 1e9:.1f} GB are free; use a larger machine, or quantize without --importance"
        )
