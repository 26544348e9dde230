"""What really goes into every weight: mean squares, the channel weights of the scale search, and largest magnitudes, from which
static scales of activations and of the KV cache are made (`checkpoint/importance.py`, `checkpoint/static_scales.py`).

The model runs in transformers, on text that is given or that it writes itself, with every call of `linear` watched: attention,
MLPs, and each expert by itself, since an expert only counts the tokens that were routed to it. What transformers does not
build (the MTP block) is not calibrated. The model must fit into memory whole; FP8 releases are dequantized on the way in.
"""

from __future__ import annotations

import errno
import json
import math
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
from torch.overrides import TorchFunctionMode

from assay.atomic_files import replacing
from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.recipes.families import classify, family_of
from assay.records.base import sha256_of_file
from assay.records.calibration import Calibration, TextTaken
from assay_quantize.calibration.coverage import TokensByExpert
from assay_quantize.calibration.kept import Kept
from assay_quantize.calibration.quiet import loading
from assay_quantize.calibration.ranges import Moments, nvfp4_inputs
from assay_quantize.calibration.text import Text
from assay_quantize.calibration.withheld import Withheld
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.fused_experts import FUSED_PARTS
from assay_quantize.checkpoint.identity import weights_sha256
from assay_quantize.checkpoint.importance import INPUT_AMAX, K_AMAX, V_AMAX, WEIGHTS
from assay_quantize.kernels.devices import device_here
from assay_quantize.storage.resident import cached_bytes

BATCH_TOKENS = 4096
"""Tokens that go through the model at once."""


class InputWatch(TorchFunctionMode):
    """While it is entered, adds up the squared inputs of every `linear` whose weight has a name, and watches what attention
    with heads keeps: keys (rotated) and values.

    names: address of a weight's first element -> the weights of the checkpoint that lie there (gate and up of an expert).
    """

    def __init__(self, names: Mapping[int, tuple[str, ...]]) -> None:
        super().__init__()
        self._names = names
        self._attention: str | None = None
        self.moments: dict[str, Moments] = {}
        self.caches: dict[str, tuple[float, float]] = {}
        """Attention module -> largest |key| and |value|."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            names = self._names.get(args[1].data_ptr(), ())
            if names and args[0].numel():
                self._add(names, args[0])
        elif func is torch.nn.functional.scaled_dot_product_attention and self._attention is not None:
            self._keep(*args[1:3])
        return func(*args, **(kwargs or {}))

    def _add(self, names: tuple[str, ...], inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        squares = rows.float().square().sum(0, dtype=torch.float64).cpu()
        largest = float(rows.abs().max())
        if not (math.isfinite(largest) and bool(torch.isfinite(squares).all())):
            raise _not_finite(f"what enters {names[0]}")
        for name in names:
            moments = self.moments.setdefault(name, Moments(torch.zeros_like(squares)))
            moments.squares += squares
            moments.num_tokens += len(rows)
            moments.largest = max(moments.largest, largest)
            owner, _, leaf = name.removesuffix(".weight").rpartition(".")
            if leaf in ("k_proj", "kv_b_proj"):
                # latent attention (MLA) keeps other tensors, for which vLLM loads no scales
                self._attention = owner if leaf == "k_proj" else None
        self.moments[names[0]].range.add(rows)

    def _keep(self, keys: Tensor, values: Tensor) -> None:
        assert self._attention is not None
        before = self.caches.get(self._attention, (0.0, 0.0))
        largest = float(keys.detach().abs().max()), float(values.detach().abs().max())
        if not all(map(math.isfinite, largest)):
            raise _not_finite(f"what {self._attention} keeps")
        self.caches[self._attention] = max(before[0], largest[0]), max(before[1], largest[1])
        self._attention = None


def _not_finite(what: str) -> QuantizeError:
    """Python's `max` would pass over NaN, and a scale over the batch that it was in."""
    return QuantizeError(
        f"{what} is NaN, infinite or too large to be squared: the source is damaged, or cannot be calibrated; take another "
        "copy, or a precision without calibration"
    )


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
    started, about = time.monotonic(), text.identity()
    say = report or (lambda line: None)
    checkpoint, device = open_checkpoint(folder), device_here(device)
    _check_out(out)
    if device == "cuda":
        say("calibrating on the GPU")
    model = load_model(checkpoint, folder, device)
    wanted = linear_weights(checkpoint)
    names = names_of(model)
    known = {name for group in names.values() for name in group}
    if lost := sorted(wanted - known):
        raise QuantizeError(
            f"{folder}: transformers builds no parameter for {lost[0]}{f' and {len(lost) - 1} more' if lost[1:] else ''}; "
            "this model cannot be calibrated here: quantize without --importance"
        )
    watch = InputWatch({address: kept for address, group in names.items() if (kept := tuple(n for n in group if n in wanted))})
    experts = TokensByExpert(wanted)
    count = max(1, num_tokens // length)
    enough = None
    if tokens_per_expert is not None:
        if not experts.by_layer:
            raise QuantizeError(f"{folder}: has no routed experts; leave --tokens-per-expert out")
        enough = lambda: experts.least(_tokens(watch)) >= tokens_per_expert  # noqa: E731
    store = None if keep is None else Kept(keep, device)
    has_tokens = tokens_per_expert is None  # else how many will be needed is not known
    before = store.tokens() if store is not None and has_tokens else None
    drawn: Iterable[Sequence[int]] = ()
    taken: Callable[[], TextTaken] | None = None
    if before is None:
        asked = text if withheld is None else replace(text, withheld=withheld())
        stream = asked.stream(folder, length, say, model=model)
        drawn, taken = islice(stream, count), lambda: stream.taken(asked.withheld)
        if store is not None and has_tokens:
            drawn = list(drawn)
            _check_same(text, about)
            before = store.keep_tokens(drawn, taken())
    if before is not None:
        drawn = before.tokens.tolist()
    with loading(f"{folder}: transformers cannot run it"):
        num_sequences = run_over(
            model,
            drawn,
            watch,
            say,
            count=count,
            is_enough=enough,
            done=0 if store is None else store.load(watch.moments, watch.caches),
            on_batch=None if store is None else lambda done: store.save(watch.moments, watch.caches, done),
        )
    if before is None:
        _check_same(text, about)
    told = before.taken if before is not None else taken() if taken is not None else TextTaken()
    starved = {name: watch.moments[name].num_tokens if name in watch.moments else 0 for name in wanted}
    starved = {name: seen for name, seen in sorted(starved.items()) if seen < min_tokens}
    if len(starved) == len(wanted):
        raise QuantizeError(f"{out}: no weight saw {min_tokens} tokens; give more text, or lower --min-tokens")
    fed = {name: moments for name, moments in sorted(watch.moments.items()) if name not in starved}
    scales = largest_inputs(watch)
    weights = weights_sha256(checkpoint)
    write_importance(out, fed, text.describe(), scales, weights)
    coverage = experts.coverage(_tokens(watch))
    return Calibration(
        model=model_name,
        source=str(folder),
        text=text.describe(),
        num_tokens=num_sequences * length,
        length=length,
        min_tokens=min_tokens,
        weights=len(fed),
        starved=starved,
        tokens_by_expert=experts.spread(_tokens(watch)),
        nvfp4_inputs=nvfp4_inputs(watch.moments),
        file=str(out),
        file_sha256=sha256_of_file(out),
        weights_sha256=weights,
        seconds=time.monotonic() - started,
        sources=told.sources,
        withheld=told.withheld,
        coverage=coverage,
        tokens_per_expert=tokens_per_expert,
        ended="every expert" if enough is not None and enough() else "tokens" if num_sequences == count else "text",
        num_scales=len(scales),
        num_repeated=told.num_repeated,
    )


def _check_same(text: Text, about: Any) -> None:
    """QuantizeError: another text was read than was asked for, for which the result would be taken."""
    if text.identity() != about:
        raise QuantizeError(f"{', '.join(text.describe())}: changed while it was read; run again")


def _tokens(watch: InputWatch) -> Callable[[str], int]:
    return lambda name: watch.moments[name].num_tokens if name in watch.moments else 0


def largest_inputs(watch: InputWatch) -> dict[str, float]:
    """Name in the file -> largest magnitude: of what entered each module, and of the keys and values that were kept."""
    found = {f"{name.removesuffix('.weight')}.{INPUT_AMAX}": one.largest for name, one in watch.moments.items()}
    for attention, (key, value) in watch.caches.items():
        found |= {f"{attention}.{K_AMAX}": key, f"{attention}.{V_AMAX}": value}
    return dict(sorted(found.items()))


def linear_weights(checkpoint: Checkpoint) -> set[str]:
    """Names of the weights that a precision may quantize, the MTP block's left out."""
    family = family_of(checkpoint.config)
    weights = (name for name in checkpoint.tensors if name.endswith(".weight"))
    found = {name: classify(family, name, checkpoint.config) for name in weights}
    return {name for name, what in found.items() if what.linear and what.role not in ("mtp", "lm_head", "router", "indexer")}


def run_over(
    model: Any,
    sequences: Iterable[Sequence[int]],
    watch: InputWatch,
    say: Say,
    *,
    count: int | None = None,
    is_enough: Callable[[], bool] | None = None,
    done: int = 0,
    on_batch: Callable[[int], None] | None = None,
) -> int:
    """Sequences, of one length each, through the decoder, until it is enough; the head is not needed. How many there were.

    count: the most there are, for whoever waits. is_enough: asked after each batch. done: that many `watch` has seen before.
    on_batch: told how many after each batch.
    """
    iterator = iter(sequences)
    first = next(iterator)
    left, size = chain([first], iterator), max(1, BATCH_TOKENS // len(first))
    for _ in islice(left, done):
        pass
    if done and is_enough is not None and is_enough():
        return done
    most = "" if count is None else f" of {'at most ' if is_enough else ''}{count * len(first):,}"
    with torch.no_grad(), watch:
        while some := list(islice(left, size)):
            model.base_model(input_ids=torch.tensor(some, device=model.device), use_cache=False)
            done += len(some)
            say(f"calibrating: {done * len(first):,}{most} tokens")
            if on_batch is not None:
                on_batch(done)
            if is_enough is not None and is_enough():
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

    means = {name: (one.squares / one.num_tokens).numpy().astype(np.float32) for name, one in moments.items()}
    counts = {name: one.num_tokens for name, one in moments.items()}
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
    made = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False).encode()
    made += b" " * (-len(made) % 8)
    return len(made).to_bytes(8, "little") + made + file[begin:]


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
    from transformers.utils import logging as their_logging

    logging: Any = their_logging
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
        free, where, remedy = torch.cuda.mem_get_info()[0], " of the GPU's memory", "say --device cpu"
    else:
        where, remedy = "", "use a larger machine"
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + cached_bytes()
    if needed > free:
        raise QuantizeError(
            f"{checkpoint.location}: calibrating takes the whole model, {needed / 1e9:.1f} GB as it runs here, and "
            f"{free / 1e9:.1f} GB{where} are free; {remedy}, or quantize without --importance"
        )
