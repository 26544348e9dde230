"""Weights calibrated layer by layer: one decoder layer in memory, what goes into it on the disk, any layer done once.

    tokens -> embedded -> layer 0: filled from the source, watched, rounded, written -> its outputs -> layer 1 ...

Each layer runs twice over all sequences, as in llm-compressor's `SequentialPipeline`: with the weights of the source, every
expert seeing every token, so that the method sees its inputs; then with the weights that the method leaves and the real
routing, for the inputs of the next layer: under GPTQ the rounded ones, so that it knows of the errors before it. What is left
is a file for each layer and a `CalibratedLayers` record; the engine takes its tensors from there and everything else (MTP,
router, norms, embedding, head) from the source, by the plan.

Under AutoRound a layer runs once, with the weights of the source, for its own inputs and those of the next layer; what it puts
out once it is tuned goes on beside them. A state has both then: first all parts of the one, then all of the other.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.file_data import data_of_files, hashes_of_files, other_data
from assay.recipes.calibrated.methods import AutoRoundCalibration, Calibrated
from assay.recipes.families import num_hidden_layers
from assay.recipes.precision import PrecisionRecipe
from assay.records.base import sha256_of
from assay.records.calibration import CalibratedLayers, TextTaken
from assay.records.plan import Plan, TensorPlan
from assay_quantize.calibration.kept import Drawn, drawn_before
from assay_quantize.calibration.memory import AUTOROUND_BATCH, BATCH_TOKENS, check_disk, check_gpu_memory, check_memory
from assay_quantize.calibration.quiet import quiet
from assay_quantize.calibration.text import Text
from assay_quantize.calibration.withheld import Withheld
from assay_quantize.calibration.work_folder import Finished, WorkFolder, opened
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.source_reader import SourceReader
from assay_quantize.kernels.devices import device_here
from assay_quantize.plan.calibrated import calibrated_mtp_layer, calibrated_tensors, check_scaled
from assay_quantize.plan.planner import plan_sha256

SAID_EVERY_S = 10.0
TRIMMED_EVERY = 5
"""Steps of AutoRound. What glibc keeps of gradients of all sizes grows with every step, by half in 40 of a layer of 50 million
weights; giving it back each time takes a third longer."""


def asked_sha256(plan: Plan, text: Text) -> str:
    """Identity of what is asked for: what the layers depend on, but for the data of the source and versions of packages."""
    bare = plan.model_copy(update={"calibrated": None})
    return sha256_of({"plan": plan_sha256(bare), "text": text.identity(), "batch_tokens": BATCH_TOKENS})


def calibrate_layers(
    plan: Plan,
    source: Path,
    work: Path,
    text: Text,
    *,
    memory_bytes: int | None = None,
    workers: int | None = None,
    device: str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
    withheld: Callable[[], Withheld] | None = None,
    tokens_of: Path | None = None,
    report: Say | None = None,
) -> CalibratedLayers:
    """Calibrate the layers of `plan` on `text`, with files in the folder `work`; go on where a killed run stopped.

    memory_bytes: bound of the process's memory; None: what the machine has free. workers: threads of torch. device: `cpu`,
    `cuda` or `auto`: where a layer, its inputs and its statistics are; a GPU's sums have other last bits.
    batch_tokens: at once through a layer; other numbers are for tests. withheld: finds the items that no text may hold, asked
    when text is read; None: those of `text`. tokens_of: folder of another calibration with the same text, whose tokens are
    taken where there are none. report: told a line for every layer, and every ten seconds between.
    Raises QuantizeError: a model that transformers does not build as it is stored, too little memory or text, a folder that was
    begun otherwise.
    """
    started, say = time.monotonic(), report or (lambda line: None)
    device = device_here(device)
    check_scaled(plan)
    options = _options(plan)
    layers: dict[int, Sequence[TensorPlan]] = dict.fromkeys(range(num_hidden_layers(plan.config)), ())
    layers |= calibrated_tensors(plan)  # and the one of the MTP block behind them
    asked = asked_sha256(plan, text)
    checkpoint = open_checkpoint(source)
    _check_source(plan, source)
    threads = torch.get_num_threads()
    begin = {
        "asked_sha256": asked,
        "versions": _versions(options),
        "threads": workers or threads,
        "device": device,
        "batch_tokens": batch_tokens,
        "source": {name: data for name, data in sorted(plan.source_files.items()) if name in checkpoint.shards},
    }
    torch.set_num_threads(workers or threads)
    try:
        with opened(work, begin) as folder:
            drawn = folder.tokens() or (None if tokens_of is None else drawn_before(tokens_of))
            if drawn is None:
                # before text is sampled or downloaded; how much of a file there is, only reading it tells
                count = max(1, options.tokens // options.length) if text.needs_model else 1
                shape, batch = (count, options.length), max(1, batch_tokens // options.length)
                _check_memory(plan, source, layers, shape, batch, memory_bytes, device)
                check_disk(plan, layers, shape, work)
                about = text if withheld is None else replace(text, withheld=withheld())
                sequences, taken = _sequences(checkpoint, source, about, options, say)
                if asked_sha256(plan, text) != asked:
                    raise QuantizeError(f"{', '.join(text.describe())}: changed while it was read; run again")
                drawn = folder.keep_tokens(sequences, taken)
            elif tokens_of is not None and folder.tokens() is None:
                folder.keep_tokens(drawn.tokens, drawn.taken)
            folder.begin(drawn, layers)
            todo = [layer for layer in layers if layer not in folder.finished]
            if todo:
                check_disk(plan, layers, drawn.tokens.shape, work, folder.finished)
                if device == "cuda":
                    say(f"{options.method}: on the GPU")
                _do(plan, source, checkpoint, folder, layers, todo, drawn, options, memory_bytes, batch_tokens, say, device)
            lines = folder.finished
            return CalibratedLayers(
                method=options.method,
                asked_sha256=asked,
                text=text.describe(),
                num_tokens=int(drawn.tokens.size),
                length=int(drawn.tokens.shape[1]),
                tokens_sha256=drawn.sha256,
                layers={layer: lines[layer].digest for layer, tensors in layers.items() if tensors},
                smoothed=tuple(t.name for tensors in layers.values() for t in tensors if t.action != "quantize"),
                fell_back=tuple(sorted(name for line in lines.values() for name in line.fell_back)),
                versions=_versions(options),
                sources=drawn.taken.sources,
                withheld=drawn.taken.withheld,
                num_repeated=drawn.taken.num_repeated,
                seconds=max(time.monotonic() - started, sum(line.seconds for line in lines.values())),
            )
    finally:
        torch.set_num_threads(threads)


def _check_memory(
    plan: Plan,
    source: Path,
    layers: Mapping[int, Sequence[TensorPlan]],
    shape: tuple[int, ...],
    batch: int,
    memory_bytes: int | None,
    device: str,
) -> None:
    """QuantizeError: too little for a layer, where layers are calibrated. shape: sequences and their length."""
    if device == "cpu":
        check_memory(plan, layers, shape, batch, memory_bytes, source)
    else:
        check_gpu_memory(plan, layers, shape, batch, torch.cuda.mem_get_info()[0], source)


def _do(
    plan: Plan,
    source: Path,
    checkpoint: Checkpoint,
    folder: WorkFolder,
    layers: Mapping[int, Sequence[TensorPlan]],
    todo: Sequence[int],
    drawn: Drawn,
    options: Calibrated,
    memory_bytes: int | None,
    batch_tokens: int,
    say: Say,
    device: str,
) -> None:
    """The layers that are missing, one after the other."""
    from assay_quantize.calibration.mtp import MtpInput
    from assay_quantize.calibration.skeleton import Skeleton

    observer, tokens = str(plan.precision_recipe.get("observer", "minmax")), drawn.tokens
    begun, size = time.monotonic(), max(1, batch_tokens // tokens.shape[1])
    with quiet(), SourceReader(checkpoint) as reader, _nothing_old_is_garbage():
        mtp = calibrated_mtp_layer(plan)
        skeleton = Skeleton(source, plan, torch.float32, device, has_mtp=mtp is not None)
        _check_memory(plan, source, layers, tokens.shape, size, memory_bytes, device)
        if todo[0] == 0:
            skeleton.use_embedding(reader, torch.from_numpy(tokens).long())
        else:
            skeleton.pass_embedding()
        for number, layer in enumerate(todo):
            left = (time.monotonic() - begun) / number * (len(todo) - number) if number else None
            name = f"layer {layer} of {len(layers)}"
            name = f"{name}, the MTP block" if layer == mtp else name
            say(f"{options.method}: {name}{'' if left is None else f', {_clock(left)} left'}")
            becomes = None
            if layer + 1 == mtp:
                becomes = MtpInput(skeleton, reader, plan, mtp, torch.from_numpy(tokens).long())
            given = tokens[:, :-1] if layer == mtp else tokens
            slowly = _Slowly(say, name)
            line = _one(
                skeleton, reader, folder, layer, layers, given, size, options, observer, becomes, slowly, drawn.sha256
            )  # fmt: skip
            folder.add(line)
            _give_back()


def _one(
    skeleton: Any,
    reader: SourceReader,
    folder: WorkFolder,
    layer: int,
    layers: Mapping[int, Sequence[TensorPlan]],
    tokens: Any,
    size: int,
    options: Calibrated,
    observer: str,
    becomes: Any,
    say: Say,
    tokens_sha256: str,
) -> Finished:
    """One layer: its file, the states behind it, and its line of the journal. becomes: what the next layer gets instead of
    what this one puts out, of it and its tokens; None: the same."""
    from assay_quantize.calibration.methods.method import LayerResult, Method, plain_forward

    started, tensors = time.monotonic(), layers[layer]
    is_tuned, is_last = isinstance(options, AutoRoundCalibration), layer == len(layers) - 1
    # AutoRound puts sequences together itself
    passing = _Passing(skeleton, folder, layer, tokens, 1 if is_tuned else size, is_tuned, becomes, say)
    writing: Any = nullcontext() if is_last else folder.writing_state(layer + 1, len(tokens))
    digest, result = "", LayerResult({}, ())
    with skeleton.filled(layer, reader) as whole:
        for tensor in tensors:
            if not bool(torch.isfinite(skeleton.model.get_parameter(tensor.name)).all()):
                raise QuantizeError(
                    f"{skeleton.where}: {tensor.name} has values that are NaN or infinite; the source is damaged: take another "
                    "copy"
                )
        if tensors and isinstance(options, AutoRoundCalibration):
            with writing as states:
                result = passing.tuned(Method(options, observer, tensors), whole, states, options)
            digest = folder.write_layer(layer, tensors, result.tensors)
        else:
            if tensors:
                method = Method(options, observer, tensors)
                for watch in method.watches(skeleton.model):
                    with watch:
                        for _ in passing.outputs("watching"):
                            pass
                say("rounding")
                result = method.finish(skeleton.model, whole)
                digest = folder.write_layer(layer, tensors, result.tensors)
                result.tensors.clear()  # its bytes are needed for what passes
                del method
            if not is_last:
                with plain_forward(skeleton.model), writing as states:
                    for begin, made in passing.outputs("passing on"):
                        states.append(passing.next_of(begin, made))
                    for begin, made in passing.outputs("passing on", of_tuned=True) if is_tuned else ():
                        states.append(passing.next_of(begin, made), is_tuned=True)
    return Finished(
        layer=layer,
        digest=digest,
        states=() if is_last else folder.state_hashes(layer + 1),
        fell_back=result.fell_back,
        seconds=time.monotonic() - started,
        tokens_sha256=tokens_sha256,
    )


@dataclass(frozen=True)
class _Passing:
    """All sequences through one layer, `size` at once. has_tuned: a state is that of the untouched model and behind it that of
    the tuned one; of the first layer both are the embedded tokens."""

    skeleton: Any
    folder: WorkFolder
    layer: int
    tokens: Any
    size: int
    has_tuned: bool
    becomes: Any
    say: Say

    def outputs(self, doing: str, *, of_tuned: bool = False) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """The first of the sequences, and what the layer makes of them; of_tuned: of what the tuned layers before it gave."""
        for begin in range(0, len(self.tokens), self.size):
            state = self._inputs(begin, of_tuned=of_tuned)
            yield begin, self._checked(self.skeleton.run(self.layer, self._batch(begin), state))
            self.say(f"{doing}, {begin} of {len(self.tokens)} sequences")

    def next_of(self, begin: int, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What goes into the next layer."""
        if self.becomes is None:
            return made
        hidden, *others = made  # the block looks for itself where DSA hands on what to look at, which is not for its inputs
        return (self.becomes(hidden.to(self.skeleton.device), self._batch(begin)), *(part[:, :-1] for part in others))

    def tuned(self, method: Any, whole: Any, states: Any, options: AutoRoundCalibration) -> Any:
        """The result of AutoRound. states: gets both of what goes into the next layer; None: there is none."""
        for watch in method.watches(self.skeleton.model):
            with watch:
                for begin, made in self.outputs("watching"):
                    if states is not None:
                        states.append(self.next_of(begin, made))
        sequences = len(self.tokens)
        of_a_step = -(-min(sequences, options.batch) // AUTOROUND_BATCH)
        passes = count(-sequences // AUTOROUND_BATCH)  # those below 0 are of the untouched layer

        def step(*_: Any) -> None:
            number = next(passes) // of_a_step
            if number % TRIMMED_EVERY == 0:
                _trim()
            self.say(f"tuning, step {min(options.iterations, max(0, number))} of {options.iterations}")

        handle = whole.register_forward_pre_hook(step)
        before = None if self._inputs(0, of_tuned=True) is None else (self._inputs(n, of_tuned=True) for n in range(sequences))
        try:
            result = method.finish(self.skeleton.model, whole, before)
        finally:
            handle.remove()
        for begin, made in enumerate(map(self._checked, result.tuned)):
            if states is not None:
                states.append(self.next_of(begin, made), is_tuned=True)
        return result

    def _batch(self, begin: int) -> Tensor:
        return torch.from_numpy(self.tokens[begin : begin + self.size]).long()

    def _inputs(self, begin: int, *, of_tuned: bool) -> tuple[Tensor, ...] | None:
        state = self.folder.read_state(self.layer, begin, min(begin + self.size, len(self.tokens)))
        if state is None or not self.has_tuned:
            return state
        half = len(state) // 2
        return state[half:] if of_tuned else state[:half]

    def _checked(self, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not bool(torch.isfinite(made[0]).all()):
            raise QuantizeError(
                f"{self.skeleton.where}: layer {self.layer} gives values that are NaN or infinite, so nothing behind it can be "
                "calibrated; take another copy of the source, or a precision without `calibration`"
            )
        return made


class _Slowly:
    """Says a line at most every ten seconds."""

    def __init__(self, say: Say, name: str) -> None:
        self._say, self._name, self._next = say, name, time.monotonic() + SAID_EVERY_S

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAID_EVERY_S
            self._say(f"{self._name}: {line}")


def _options(plan: Plan) -> Calibrated:
    options = PrecisionRecipe.model_validate(plan.precision_recipe).calibration
    if options == "none":
        raise QuantizeError(f"precision {plan.precision}: it is not calibrated")
    return options


def _sequences(
    checkpoint: Checkpoint, source: Path, text: Text, options: Calibrated, say: Say
) -> tuple[list[list[int]], TextTaken]:
    """The text in sequences of one length, and what it was made of. Only to write text of its own the model is loaded whole."""
    model: Any = None
    if text.needs_model:
        from assay_quantize.calibration.calibrate import load_model

        model = load_model(checkpoint, source, "cpu")
    try:
        stream = text.stream(source, options.length, say, model=model)
        made = list(islice(stream, max(1, options.tokens // options.length)))
        return made, stream.taken(text.withheld)
    finally:
        del model
        _give_back()


def _check_source(plan: Plan, source: Path) -> None:
    """Refuse a folder whose data is not what the plan was made of; of a source on the hub, the download checks the hashes."""
    if plan.source_revision is not None:
        return
    stamped = {name for name, data in plan.source_files.items() if data.startswith("stamp:")}
    now = data_of_files(source, stamped) | hashes_of_files(source, plan.source_files.keys() - stamped)
    if (how := other_data(plan.source_files, now)) is not None:
        raise QuantizeError(f"{source}: its data is not what the plan was made of: {how}; make the plan anew")


def _versions(options: Calibrated) -> dict[str, str]:
    packages = ["llmcompressor", "compressed-tensors", "torch", "transformers"]
    if isinstance(options, AutoRoundCalibration):
        packages.append("auto-round")
    return {package: version(package) for package in packages}


@contextmanager
def _nothing_old_is_garbage() -> Iterator[None]:
    """Inside, garbage is looked for among new objects only: looking through all of torch and transformers after every layer
    takes half a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _give_back() -> None:
    """Memory that is free goes back to the system: of the many allocations of a layer glibc keeps a part."""
    gc.collect()
    _trim()


def _trim() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
