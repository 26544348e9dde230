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
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.recipes.calibrated.methods import AutoRoundCalibration, Calibrated
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.text_config import num_hidden_layers
from assay.records.base import sha256_of
from assay.records.calibration import CalibratedLayers, TextTaken
from assay.records.plan import Plan, TensorPlan
from assay_quantize.calibration.memory import AUTOROUND_BATCH, BATCH_TOKENS, check_disk, check_gpu_memory, check_memory
from assay_quantize.calibration.progress import Drawn, load_tokens, save_tokens
from assay_quantize.calibration.quiet import quiet
from assay_quantize.calibration.text import Text
from assay_quantize.calibration.withheld import Withheld
from assay_quantize.calibration.work_folder import Finished, WorkFolder, opened
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.checkpoint.identity import check_source
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
    options = PrecisionRecipe.model_validate(plan.precision_recipe).calibration
    if options == "none":
        raise QuantizeError(f"precision {plan.precision}: it is not calibrated")
    layers: dict[int, Sequence[TensorPlan]] = dict.fromkeys(range(num_hidden_layers(plan.config)), ())
    layers |= calibrated_tensors(plan)  # and the one of the MTP block behind them
    request_sha256 = asked_sha256(plan, text)
    checkpoint = open_checkpoint(source)
    check_source(plan, source)
    packages = ["llmcompressor", "compressed-tensors", "torch", "transformers"]
    packages += ["auto-round"] if isinstance(options, AutoRoundCalibration) else []
    versions = {package: version(package) for package in packages}
    threads = torch.get_num_threads()
    begin = {
        "asked_sha256": request_sha256,
        "versions": versions,
        "threads": workers or threads,
        "device": device,
        "batch_tokens": batch_tokens,
        "source": {name: data for name, data in sorted(plan.source_files.items()) if name in checkpoint.shards},
    }
    batch = max(1, batch_tokens // options.length)

    def check_memory_for(shape: tuple[int, ...]) -> None:
        if device == "cpu":
            check_memory(plan, layers, shape, batch, memory_bytes, source)
        else:
            check_gpu_memory(plan, layers, shape, batch, torch.cuda.mem_get_info()[0], source)

    torch.set_num_threads(workers or threads)
    try:
        with opened(work, begin) as folder:
            drawn = load_tokens(work)
            if drawn is None and tokens_of is not None and (other := load_tokens(tokens_of)) is not None:
                drawn = save_tokens(work, other.tokens, other.taken)
            if drawn is None:
                # before text is sampled or downloaded; how much of a file there is, only reading it tells
                count = max(1, options.tokens // options.length) if text.needs_model else 1
                check_memory_for((count, options.length))
                check_disk(plan, layers, (count, options.length), work)
                held = text if withheld is None else replace(text, withheld=withheld())
                sequences, taken = _sequences(checkpoint, source, held, options, say)
                if asked_sha256(plan, text) != request_sha256:
                    raise QuantizeError(f"{', '.join(text.describe())}: changed while it was read; run again")
                drawn = save_tokens(work, sequences, taken)
            folder.begin(drawn, layers)
            todo = [layer for layer in layers if layer not in folder.finished]
            if todo:
                check_disk(plan, layers, drawn.tokens.shape, work, folder.finished)
                if device == "cuda":
                    say(f"{options.method}: on the GPU")
                _calibrate_missing(
                    plan, source, checkpoint, folder, layers, todo, drawn, options, batch, check_memory_for, say, device
                )
            lines = folder.finished
            return CalibratedLayers(
                method=options.method,
                asked_sha256=request_sha256,
                text=text.describe(),
                num_tokens=int(drawn.tokens.size),
                length=int(drawn.tokens.shape[1]),
                tokens_sha256=drawn.sha256,
                layers={layer: lines[layer].digest for layer, tensors in layers.items() if tensors},
                smoothed=tuple(t.name for tensors in layers.values() for t in tensors if t.action != "quantize"),
                fell_back=tuple(sorted(name for line in lines.values() for name in line.fell_back)),
                versions=versions,
                sources=drawn.taken.sources,
                withheld=drawn.taken.withheld,
                num_repeated=drawn.taken.num_repeated,
                seconds=max(time.monotonic() - started, sum(line.seconds for line in lines.values())),
            )
    finally:
        torch.set_num_threads(threads)


def _calibrate_missing(
    plan: Plan,
    source: Path,
    checkpoint: Checkpoint,
    folder: WorkFolder,
    layers: Mapping[int, Sequence[TensorPlan]],
    todo: Sequence[int],
    drawn: Drawn,
    options: Calibrated,
    batch: int,
    check_memory_for: Callable[[tuple[int, ...]], None],
    say: Say,
    device: str,
) -> None:
    """The layers of `todo`, one after the other. batch: sequences that go through a layer at once."""
    from assay_quantize.calibration.skeleton import MtpInput, Skeleton

    observer, tokens = str(plan.precision_recipe.get("observer", "minmax")), drawn.tokens
    begun = time.monotonic()
    with quiet(), SourceReader(checkpoint) as reader, ExitStack() as stack:
        # garbage is looked for among new objects only: looking through all of torch and transformers after every layer takes
        # half a second
        gc.freeze()
        stack.callback(gc.unfreeze)
        mtp = calibrated_mtp_layer(plan)
        skeleton = Skeleton(source, plan, torch.float32, device, has_mtp=mtp is not None)
        check_memory_for(tokens.shape)
        if todo[0] == 0:
            skeleton.use_embedding(reader, torch.from_numpy(tokens).long())
        else:
            skeleton.pass_embedding()
        for number, layer in enumerate(todo):
            left_s = int((time.monotonic() - begun) / number * (len(todo) - number)) if number else 0
            left = f", {left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d} left" if number else ""
            name = f"layer {layer} of {len(layers)}{', the MTP block' if layer == mtp else ''}"
            say(f"{options.method}: {name}{left}")
            mtp_input = None
            if layer + 1 == mtp:
                mtp_input = MtpInput(skeleton, reader, plan, mtp, torch.from_numpy(tokens).long())
            calibration = _LayerCalibration(
                skeleton=skeleton,
                reader=reader,
                folder=folder,
                layer=layer,
                is_last=layer == len(layers) - 1,
                tensors=layers[layer],
                tokens=tokens[:, :-1] if layer == mtp else tokens,
                size=1 if isinstance(options, AutoRoundCalibration) else batch,  # which puts sequences together itself
                options=options,
                observer=observer,
                mtp_input=mtp_input,
                say=_Throttled(say, name),
            )
            folder.add(calibration.run(drawn.sha256))
            _give_back()


@dataclass(frozen=True)
class _LayerCalibration:
    """All sequences through one layer, `size` at once: its file, the states behind it, and its line of the journal. mtp_input:
    makes what the next layer gets of what this one puts out, and of its tokens; None: it gets just that.

    Under AutoRound a state is that of the untouched model and behind it that of the tuned one; of the first layer both are the
    embedded tokens.
    """

    skeleton: Any
    reader: SourceReader
    folder: WorkFolder
    layer: int
    is_last: bool
    tensors: Sequence[TensorPlan]
    tokens: Any
    size: int
    options: Calibrated
    observer: str
    mtp_input: Any
    say: Say

    def run(self, tokens_sha256: str) -> Finished:
        from assay_quantize.calibration.methods import LayerResult, Method, plain_forward

        started, tensors, model = time.monotonic(), self.tensors, self.skeleton.model
        is_tuned = isinstance(self.options, AutoRoundCalibration)
        writing: Any = nullcontext() if self.is_last else self.folder.writing_state(self.layer + 1, len(self.tokens))
        digest, result = "", LayerResult({}, ())
        with self.skeleton.filled(self.layer, self.reader) as module:
            for tensor in tensors:
                if not bool(torch.isfinite(model.get_parameter(tensor.name)).all()):
                    raise QuantizeError(
                        f"{self.skeleton.where}: {tensor.name} has values that are NaN or infinite; the source is damaged: "
                        "take another copy"
                    )
            method = Method(self.options, self.observer, tensors) if tensors else None
            if method is not None and isinstance(self.options, AutoRoundCalibration):
                with writing as states:
                    result = self._tuned(method, module, states, self.options)
                digest = self.folder.write_layer(self.layer, tensors, result.tensors)
            else:
                if method is not None:
                    for watch in method.watches(model):
                        with watch:
                            for _ in self._outputs("watching"):
                                pass
                    self.say("rounding")
                    result = method.finish(model, module)
                    digest = self.folder.write_layer(self.layer, tensors, result.tensors)
                    result.tensors.clear()  # its bytes are needed for what passes
                    method = None
                if not self.is_last:
                    with plain_forward(model), writing as states:
                        for begin, output in self._outputs("passing on"):
                            states.append(self._next_inputs(begin, output))
                        for begin, output in self._outputs("passing on", of_tuned=True) if is_tuned else ():
                            states.append(self._next_inputs(begin, output), is_tuned=True)
        return Finished(
            layer=self.layer,
            digest=digest,
            states=() if self.is_last else self.folder.state_hashes(self.layer + 1),
            fell_back=result.fell_back,
            seconds=time.monotonic() - started,
            tokens_sha256=tokens_sha256,
        )

    def _outputs(self, doing: str, *, of_tuned: bool = False) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """The first of the sequences, and what the layer makes of them; of_tuned: of what the tuned layers before it gave."""
        for begin in range(0, len(self.tokens), self.size):
            state = self._inputs(begin, of_tuned=of_tuned)
            yield begin, self._checked(self.skeleton.run(self.layer, self._batch(begin), state))
            self.say(f"{doing}, {begin} of {len(self.tokens)} sequences")

    def _next_inputs(self, begin: int, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What goes into the next layer."""
        if self.mtp_input is None:
            return output
        hidden, *others = output  # the block looks for itself where DSA hands on what to look at, which is not for its inputs
        return (self.mtp_input(hidden.to(self.skeleton.device), self._batch(begin)), *(part[:, :-1] for part in others))

    def _tuned(self, method: Any, module: Any, states: Any, options: AutoRoundCalibration) -> Any:
        """The result of AutoRound. states: gets both of what goes into the next layer; None: there is none."""
        for watch in method.watches(self.skeleton.model):
            with watch:
                for begin, output in self._outputs("watching"):
                    if states is not None:
                        states.append(self._next_inputs(begin, output))
        sequences = len(self.tokens)
        of_a_step = -(-min(sequences, options.batch) // AUTOROUND_BATCH)
        passes = count(-sequences // AUTOROUND_BATCH)  # those below 0 are of the untouched layer

        def step(*_: Any) -> None:
            number = next(passes) // of_a_step
            if number % TRIMMED_EVERY == 0:
                _trim()
            self.say(f"tuning, step {min(options.iterations, max(0, number))} of {options.iterations}")

        handle = module.register_forward_pre_hook(step)
        before = None if self._inputs(0, of_tuned=True) is None else (self._inputs(n, of_tuned=True) for n in range(sequences))
        try:
            result = method.finish(self.skeleton.model, module, before)
        finally:
            handle.remove()
        for begin, output in enumerate(map(self._checked, result.tuned)):
            if states is not None:
                states.append(self._next_inputs(begin, output), is_tuned=True)
        return result

    def _batch(self, begin: int) -> Tensor:
        return torch.from_numpy(self.tokens[begin : begin + self.size]).long()

    def _inputs(self, begin: int, *, of_tuned: bool) -> tuple[Tensor, ...] | None:
        state = self.folder.read_state(self.layer, begin, min(begin + self.size, len(self.tokens)))
        if state is None or not isinstance(self.options, AutoRoundCalibration):
            return state
        half = len(state) // 2
        return state[half:] if of_tuned else state[:half]

    def _checked(self, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not bool(torch.isfinite(output[0]).all()):
            raise QuantizeError(
                f"{self.skeleton.where}: layer {self.layer} gives values that are NaN or infinite, so nothing behind it can be "
                "calibrated; take another copy of the source, or a precision without `calibration`"
            )
        return output


class _Throttled:
    """Says a line at most every ten seconds."""

    def __init__(self, say: Say, name: str) -> None:
        self._say, self._name, self._next = say, name, time.monotonic() + SAID_EVERY_S

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAID_EVERY_S
            self._say(f"{self._name}: {line}")


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
        sequences = list(islice(stream, max(1, options.tokens // options.length)))
        return sequences, stream.taken(text.withheld)
    finally:
        del model
        _give_back()


def _give_back() -> None:
    """Memory that is free goes back to the system: of the many allocations of a layer glibc keeps a part."""
    gc.collect()
    _trim()


def _trim() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
