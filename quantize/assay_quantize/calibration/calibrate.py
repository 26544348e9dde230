"""What really goes into every weight: mean squares, the channel weights of the scale search, and largest magnitudes, from which
static scales of activations and of the KV cache are made (`checkpoint/importance.py`, `checkpoint/static_scales.py`).

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.atomic_files import replacing
from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.quantities import and_more
from assay.recipes.families import family_of
from assay.recipes.family_names import classify
from assay.records.base import sha256_of_file
from assay.records.calibration import Calibration
from assay_quantize.calibration.inputs import InputWatch, Moments, TokensByExpert, largest_inputs, names_of, nvfp4_inputs
from assay_quantize.calibration.progress import CalibrationProgress, load_tokens, save_tokens
from assay_quantize.calibration.quiet import loading
from assay_quantize.calibration.text import Text
from assay_quantize.calibration.withheld import Withheld
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.identity import weights_sha256
from assay_quantize.checkpoint.importance import WEIGHTS
from assay_quantize.kernels.devices import device_here
from assay_quantize.storage.resident import available_bytes

BATCH_TOKENS = 4096
"""Tokens that go through the model at once."""


def calibrate(
    folder: Path,
    out: Path,
    text: Text,
    *,
    model_name: str,
    num_tokens: int = 65_536,
    length: int = 512,
    min_tokens: int = 64,
    tokens_per_expert: int | None = None,
    device: str = "cpu",
    withheld: Callable[[], Withheld] | None = None,
    keep: Path | None = None,
    report: Say | None = None,
) -> Calibration:
    """Run the checkpoint in `folder` over `num_tokens` of `text` and write what entered its weights to `out` (safetensors).

    text: where tokens come from. length: of the sequences, in tokens. min_tokens: weights that saw fewer get no channel weights
    (and are searched unweighted), since a mean over a few tokens says more about them than about the weight; the largest
    magnitude is kept of all that saw any. tokens_per_expert: end as soon as every routed expert saw so many; `num_tokens` is
    then the most. device: `cpu`, `cuda` or `auto`. withheld: finds the items that no text may hold, asked when text is
    read; None: those of `text`. keep: folder of what one that is killed goes on from, which its caller deletes. report:
    told lines of progress. Deterministic on a CPU.
    Raises QuantizeError: no room for the model, too little text, a model that transformers builds in another way.
    """
    started, text_identity = time.monotonic(), text.identity()
    say = report or (lambda line: None)
    checkpoint, device = open_checkpoint(folder), device_here(device)
    _check_out(out)
    if device == "cuda":
        say("calibrating on the GPU")
    model = load_model(checkpoint, folder, device)
    weights = linear_weights(checkpoint)
    names = names_of(model)
    if missing := sorted(weights.difference(*names.values())):
        raise QuantizeError(
            f"{folder}: transformers builds no parameter for {and_more(missing)}; "
            "this model cannot be calibrated here: quantize without --importance"
        )
    watch = InputWatch({address: kept for address, group in names.items() if (kept := tuple(n for n in group if n in weights))})
    experts = TokensByExpert(weights)

    def tokens_of(name: str) -> int:
        return watch.moments[name].num_tokens if name in watch.moments else 0

    has_enough = None
    if tokens_per_expert is not None:
        if not experts.by_layer:
            raise QuantizeError(f"{folder}: has no routed experts; leave --tokens-per-expert out")
        has_enough = lambda: experts.least(tokens_of) >= tokens_per_expert  # noqa: E731
    store = None if keep is None else CalibrationProgress(keep, device)
    keeps_tokens = store is not None and tokens_per_expert is None  # else how many will be needed is not known
    count = max(1, num_tokens // length)
    drawn = load_tokens(store.folder) if store is not None and keeps_tokens else None
    if drawn is None:
        source = text if withheld is None else replace(text, withheld=withheld())
        stream = source.stream(folder, length, say, model=model)
        sequences: Iterable[Sequence[int]] = islice(stream, count)
        if store is not None and keeps_tokens:
            sequences = list(sequences)
            _check_same(text, text_identity)
            drawn = save_tokens(store.folder, sequences, stream.taken(source.withheld))
    if drawn is not None:
        sequences = drawn.tokens.tolist()
    with loading(f"{folder}: transformers cannot run it"):
        num_sequences = run_over(
            model,
            sequences,
            watch,
            say,
            count=count,
            has_enough=has_enough,
            done=0 if store is None else store.load(watch.moments, watch.caches),
            on_batch=None if store is None else lambda done: store.save(watch.moments, watch.caches, done),
        )
    if drawn is None:
        _check_same(text, text_identity)
    taken = stream.taken(source.withheld) if drawn is None else drawn.taken
    starved = {name: tokens_of(name) for name in sorted(weights) if tokens_of(name) < min_tokens}
    if len(starved) == len(weights):
        raise QuantizeError(f"{out}: no weight saw {min_tokens} tokens; give more text, or lower --min-tokens")
    fed = {name: moments for name, moments in sorted(watch.moments.items()) if name not in starved}
    scales = largest_inputs(watch)
    source_sha256 = weights_sha256(checkpoint)
    write_importance(out, fed, text.describe(), scales, source_sha256)
    return Calibration(
        model=model_name,
        source=str(folder),
        text=text.describe(),
        num_tokens=num_sequences * length,
        length=length,
        min_tokens=min_tokens,
        weights=len(fed),
        starved=starved,
        tokens_by_expert=experts.spread(tokens_of),
        nvfp4_inputs=nvfp4_inputs(watch.moments),
        file=str(out),
        file_sha256=sha256_of_file(out),
        weights_sha256=source_sha256,
        seconds=time.monotonic() - started,
        sources=taken.sources,
        withheld=taken.withheld,
        coverage=experts.coverage(tokens_of),
        tokens_per_expert=tokens_per_expert,
        ended="every expert" if has_enough is not None and has_enough() else "tokens" if num_sequences == count else "text",
        num_scales=len(scales),
        num_repeated=taken.num_repeated,
    )


def _check_same(text: Text, identity: Any) -> None:
    """QuantizeError: another text was read than was asked for, for which the result would be taken."""
    if text.identity() != identity:
        raise QuantizeError(f"{', '.join(text.describe())}: changed while it was read; run again")


def linear_weights(checkpoint: Checkpoint) -> set[str]:
    """Names of the weights that a precision may quantize, the MTP block's left out."""
    family = family_of(checkpoint.config)
    names = (name for name in checkpoint.tensors if name.endswith(".weight"))
    tensors = {name: classify(family, name, checkpoint.config) for name in names}
    plain = ("mtp", "lm_head", "router", "indexer")
    return {name for name, tensor in tensors.items() if tensor.linear and tensor.role not in plain}


def run_over(
    model: Any,
    sequences: Iterable[Sequence[int]],
    watch: InputWatch,
    say: Say,
    *,
    count: int | None = None,
    has_enough: Callable[[], bool] | None = None,
    done: int = 0,
    on_batch: Callable[[int], None] | None = None,
) -> int:
    """Sequences, of one length each, through the decoder, until it is enough; the head is not needed. How many there were.

    count: the most there are, for whoever waits. has_enough: asked after each batch. done: that many `watch` has seen before.
    on_batch: told how many after each batch.
    """
    iterator = iter(sequences)
    first = next(iterator)
    left, size = chain([first], iterator), max(1, BATCH_TOKENS // len(first))
    for _ in islice(left, done):
        pass
    if done and has_enough is not None and has_enough():
        return done
    most = "" if count is None else f" of {'at most ' if has_enough else ''}{count * len(first):,}"
    with torch.no_grad(), watch:
        while batch := list(islice(left, size)):
            model.base_model(input_ids=torch.tensor(batch, device=model.device), use_cache=False)
            done += len(batch)
            say(f"calibrating: {done * len(first):,}{most} tokens")
            if on_batch is not None:
                on_batch(done)
            if has_enough is not None and has_enough():
                break
    return done


def write_importance(
    path: Path,
    moments: Mapping[str, Moments],
    text: Iterable[str],
    largest: Mapping[str, float] | None = None,
    weights: str | None = None,
) -> None:
    """The file that `importance.py` reads: FP32 means by name, largest magnitudes, and in its metadata the tokens that each
    mean is over, and of which weights it is (`weights_identity.py`). The same numbers give the same bytes."""
    from safetensors.numpy import save

    means = {name: (of_weight.squares / of_weight.num_tokens).numpy().astype(np.float32) for name, of_weight in moments.items()}
    counts = {name: of_weight.num_tokens for name, of_weight in moments.items()}
    scalars = {name: np.array([value], np.float32) for name, value in (largest or {}).items()}
    with replacing(path) as partial:
        # not `save_file`: that of a full disk is an error of its own, without a path, and it leaves a file under another name
        text_and_counts = {"assay_text": json.dumps(list(text)), "assay_tokens": json.dumps(counts)}
        if weights is not None:
            text_and_counts[WEIGHTS] = weights
        partial.write_bytes(in_order(save(means | scalars, text_and_counts)))


def in_order(file: bytes) -> bytes:
    """A safetensors file with the keys of its header sorted: the library writes those of the metadata in any order."""
    begin = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:begin])
    metadata = dict(sorted(header.pop("__metadata__").items()))
    sorted_header = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False).encode()
    sorted_header += b" " * (-len(sorted_header) % 8)
    return len(sorted_header).to_bytes(8, "little") + sorted_header + file[begin:]


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


# ------------------------------------------------------------------------------------------------ the model
def load_model(checkpoint: Checkpoint, folder: Path, device: str) -> Any:
    """The model in transformers, its experts one after the other: FP32 on a CPU, BF16 on a GPU."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    by_name: Any = AutoModelForCausalLM
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    _check_memory(checkpoint, device, dtype.itemsize)
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of every tensor of the MTP block, which it leaves out by design
    options: dict[str, Any] = {"dtype": dtype, "experts_implementation": "eager"}
    try:
        with loading(f"{folder}: transformers cannot load it"):
            model: Any
            if not any(header.dtype.startswith("F8_") for header in checkpoint.tensors.values()):
                model = by_name.from_pretrained(folder, **options)
            else:
                config = AutoConfig.from_pretrained(folder)
                if hasattr(config, "quantization_config"):
                    del config.quantization_config
                by_config: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
                model = by_config.from_pretrained(None, config=config, state_dict=plain_weights(checkpoint), **options)
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
    tensors: dict[str, Tensor] = {}
    with SourceReader(checkpoint) as reader:
        for name, header in checkpoint.tensors.items():
            if name in companions.weight_of:
                continue
            scale = companions.scale_of.get(name)
            if scale is None:
                tensors[name] = read_tensor(checkpoint, name)
                continue
            size = header.num_bytes
            tensor = TensorPlan(
                name, "", "", "", "dequantize", None, None, header.dtype, header.shape, size, header.shard, None, (), scale
            )
            tensors[name] = torch.from_numpy(reader.read_rows(tensor, 0, header.shape[0])).view(torch.bfloat16)
    return tensors


def _check_memory(checkpoint: Checkpoint, device: str, weight_bytes: int) -> None:
    needed = weight_bytes * sum(int(np.prod(header.shape)) for header in checkpoint.tensors.values())
    if device == "cuda":
        free, where, remedy = torch.cuda.mem_get_info()[0], " of the GPU's memory", "say --device cpu"
    else:
        where, remedy = "", "use a larger machine"
        free = available_bytes()
    if needed > free:
        raise QuantizeError(
            f"{checkpoint.location}: calibrating takes the whole model, {needed / 1e9:.1f} GB as it runs here, and "
            f"{free / 1e9:.1f} GB{where} are free; {remedy}, or quantize without --importance"
        )
