"""Passes of checkpoints over texts, and what stands for the reference of a screening: its own pass, or a pack."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assay.callbacks import Say
from assay.errors import AssayError, QuantizeError
from assay.foreign_text import shown
from assay.quantities import size
from assay.records.pack import Pack
from assay.records.screening import AppliedFloor, Numerics, Panel, StatedTexts
from assay_pipeline.comparison.screen_sources import ScreenSource

if TYPE_CHECKING:
    from assay_quantize.decoding.open_stored import StoredCheckpoint
    from assay_quantize.screen.compare import PassSide
    from assay_quantize.screen.draft import DraftAcceptance
    from assay_quantize.screen.estimate import PassCost
    from assay_quantize.screen.forward import ScreenPass, States
    from assay_quantize.screen.layer_model import LayerModel
    from assay_quantize.screen.pack import OpenPack
    from assay_quantize.screen.ray_pass import PassTasks
    from assay_quantize.screen.texts import ScreenText
    from assay_quantize.sensitivity.texts import ScoredText

Arithmetic = Literal["fp32", "bf16"]
KvCacheDtype = Literal["auto", "fp8"]
COMPUTING_BYTES = 128 << 20
"""What a process takes for computing beside weights and states: buffers of torch's libraries, what the allocator keeps."""


@dataclass(frozen=True)
class MadePass:
    """A finished pass of one checkpoint, and a model for its head."""

    model: LayerModel
    states: States
    sha256: str
    drafts: list[DraftAcceptance] | str
    """Of its MTP block; or why there are none."""

    def side(self) -> PassSide:
        from assay_quantize.screen.compare import PassSide

        return PassSide(self.model.stored.location, self.model.head(), self.states)


def joined(passes: Sequence[tuple[MadePass, Sequence[int]]]) -> MadePass:
    """Passes of one checkpoint over different texts as one over all of them, in the order of the texts' numbers."""
    from assay_quantize.screen.forward import ChosenStates

    if len(passes) == 1:
        return passes[0][0]
    places = sorted((number, at, index) for at, (_, numbers) in enumerate(passes) for index, number in enumerate(numbers))
    first = passes[0][0]
    reason = next((made.drafts for made, _ in passes if isinstance(made.drafts, str)), None)
    of_passes = [made.drafts for made, _ in passes if not isinstance(made.drafts, str)]
    drafts = [of_passes[at][index] for _, at, index in places] if reason is None else reason
    chosen = tuple((passes[at][0].states, index) for _, at, index in places)
    return replace(first, states=ChosenStates(first.states.num_layers, chosen), drafts=drafts)


@dataclass(frozen=True)
class PassRunner:
    """How passes are made, and where their states lie."""

    arithmetic: Arithmetic
    device: str
    folder: Path
    say: Say
    kv_cache_dtype: KvCacheDtype = "auto"
    """`fp8`: of every candidate; `auto`: as each checkpoint says."""
    memory_bytes: int | None = None
    """Of the process, or of the GPU, at most; None: what is free."""
    tasks: PassTasks | None = None
    """Of a Ray cluster, which make them; None: this process."""

    def model(self, stored: StoredCheckpoint) -> LayerModel:
        """Without weights."""
        import torch

        from assay_quantize.screen.kv_cache import is_fp8
        from assay_quantize.screen.layer_model import LayerModel
        from assay_quantize.screen.memory import Budget

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.arithmetic]
        model = LayerModel(stored, dtype, self.device, fp8_kv_cache=is_fp8(stored.kv, self.kv_cache_dtype))
        if self.memory_bytes is not None:
            model.budget = Budget(self.device, _left_of(self.memory_bytes, self.device))
        return model

    def run(
        self, label: str, stored: StoredCheckpoint, source: ScreenSource, texts: Sequence[ScoredText], *, num_doubled: int = 0
    ) -> MadePass:
        """num_doubled: as of `run_pass`."""
        from assay_quantize.screen.forward import pass_identity, run_pass
        from assay_quantize.screen.ray_pass import SHARES, run_ray_pass

        sha256 = source.sha256()
        model = self.model(stored)
        folder, identity = self.folder / label, pass_identity(sha256, texts, model)

        def say(line: str) -> None:
            self.say(f"{label}: {line}")

        if self.tasks is None:
            shutil.rmtree(folder / SHARES, ignore_errors=True)
            states = run_pass(model, texts, folder, identity, say, num_doubled=num_doubled)
        else:
            states = run_ray_pass(
                model, texts, folder, identity, say,
                checkpoint=source.folder, tasks=self.tasks, num_doubled=num_doubled,
            )  # fmt: skip
        return MadePass(self.model(stored), states, sha256, self._drafts(label, stored, states, texts))

    def cost(self, label: str, stored: StoredCheckpoint, texts: Sequence[ScoredText]) -> PassCost | None:
        """What its pass will take. texts: as of `estimate_pass`. None: it was begun before, and goes on."""
        from assay_quantize.screen.draft import DraftModel, NoDraft
        from assay_quantize.screen.estimate import estimate_pass
        from assay_quantize.screen.forward import PASS_RECORD

        if (self.folder / label / PASS_RECORD).is_file():
            return None
        model = self.model(stored)
        try:
            DraftModel(stored, model.dtype, self.device)
            has_draft = True
        except (NoDraft, QuantizeError):
            has_draft = False
        self.folder.mkdir(parents=True, exist_ok=True)
        cost = estimate_pass(model, texts, self.folder, has_draft=has_draft)
        return cost if self.tasks is None else cost.shared_out(self.tasks.for_model(model).num_shares(len(texts)))

    def _drafts(
        self, label: str, stored: StoredCheckpoint, states: ScreenPass, texts: Sequence[ScoredText]
    ) -> list[DraftAcceptance] | str:
        from assay_quantize.screen.compare import PassSide
        from assay_quantize.screen.draft import NoDraft, drafts_of

        model = self.model(stored)
        decoder = PassSide(stored.location, model.head(), states)
        try:
            drafts = drafts_of(model, texts, decoder, states.folder)
        except (NoDraft, QuantizeError) as reason:
            return str(reason).removeprefix(f"{stored.location}: ")
        self.say(f"{label}: MTP block")
        return drafts


@dataclass(frozen=True)
class ScreenReference:
    """A checkpoint's pass, or a pack. check, side_for: of a candidate; floor: what the numerics of a pass differ by."""

    location: str
    sha256: str
    stored_as: str
    panel: Panel
    texts: list[ScreenText]
    states: States
    drafts: list[DraftAcceptance] | str
    side_for: Callable[[StoredCheckpoint], PassSide]
    check: Callable[[StoredCheckpoint], None] = lambda _candidate: None
    pack_seal: str | None = None
    floor: AppliedFloor | None = None


def reference_checkpoint(
    made: MadePass, stored: StoredCheckpoint, source: ScreenSource, texts: list[ScreenText], panel: Panel, runner: PassRunner
) -> ScreenReference:
    """Of its pass over texts."""
    return ScreenReference(
        source.location, made.sha256, stored.what, panel, texts, made.states, made.drafts,
        lambda _candidate: replace(made, model=runner.model(stored)).side(),
    )  # fmt: skip


def restricted(reference: ScreenReference, numbers: Sequence[int]) -> ScreenReference:
    """A pack's to some of its texts; its panel stays."""
    from assay_quantize.screen.forward import ChosenStates

    states = ChosenStates(reference.states.num_layers, tuple((reference.states, number) for number in numbers))
    drafts = reference.drafts if isinstance(reference.drafts, str) else [reference.drafts[number] for number in numbers]
    return replace(
        reference, texts=[reference.texts[number] for number in numbers], states=states, drafts=drafts,
        side_for=lambda candidate: reference.side_for(candidate)._replace(states=states),
    )  # fmt: skip


def reference_pack(pack: OpenPack, runner: PassRunner) -> ScreenReference:
    """What a pack holds of it."""
    record, folder = pack.record, pack.folder
    as_packed = replace(runner, arithmetic=record.numerics.arithmetic)
    return ScreenReference(
        str(folder), record.reference_sha256, record.reference_stored_as, record.panel, pack.texts, pack.states, pack.drafts,
        lambda candidate: pack.side_for(as_packed.model(candidate)), lambda candidate: pack.check(as_packed.model(candidate)),
        record.seal, _floor(record, numerics_of(runner.arithmetic, runner.device)),
    )  # fmt: skip


def _floor(pack: Pack, numerics: Numerics) -> AppliedFloor | None:
    """What a pass of other numerics differs by from the pack's. AssayError: the pack did not measure it."""
    if numerics == pack.numerics:
        return None
    differing = [
        f"{name} {getattr(numerics, name)} for {getattr(pack.numerics, name)}"
        for name in Numerics.model_fields
        if getattr(numerics, name) != getattr(pack.numerics, name)
    ]
    cause = "batch shape" if numerics.arithmetic == pack.numerics.arithmetic else "arithmetic"
    for floor in pack.floors:
        if floor.cause == cause:
            return AppliedFloor(cause=", ".join(differing), kl=floor.kl_largest)
    raise AssayError(
        f"the pack was made with {pack.numerics.arithmetic} on {pack.numerics.device}, and has no measure of what "
        f"{', '.join(differing)} changes; screen with --arithmetic {pack.numerics.arithmetic}"
    )


@contextmanager
def states_in(folder: Path, *, is_temporary: bool = False) -> Iterator[None]:
    """While files of states are written below `folder` and read: by one process, and no folder stays that nothing was put into.

    is_temporary: the folder that it lies in was made for it. AssayError: another process is at work there; the disk takes or
    gives no file, for which safetensors has a word of its own that names none.
    """
    from safetensors import SafetensorError

    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system (NFS) that locks no folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AssayError(
                    f"{folder}: another command is at work in it; wait for it, or give this one another --out"
                ) from None
        yield
    except SafetensorError as problem:
        code = re.search(r"\(os error (\d+)\)", str(problem))
        if code is not None:
            raise AssayError(f"{folder}: cannot be written: {os.strerror(int(code[1]))}; give another --out") from None
        raise AssayError(f"{folder}: holds a damaged file of states ({shown(problem, 80)}); remove it and begin anew") from None
    finally:
        os.close(descriptor)
        with suppress(OSError):
            for place in (*made, folder.parent) if is_temporary else made:
                place.rmdir()


def check_device(device: str) -> None:
    """AssayError: it is not here."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise AssayError("--device cuda: torch sees no CUDA device here; leave --device out, or install torch for CUDA")


def _left_of(memory_bytes: int, device: str) -> int:
    """What `--memory` leaves for weights and what flows through them: on a CPU it bounds the process.

    AssayError: the process holds as much. To be called when a model is built, but none of its weights is read.
    """
    if device != "cpu":
        return memory_bytes
    held_bytes = _held_bytes() + COMPUTING_BYTES
    if memory_bytes <= held_bytes:
        raise AssayError(f"--memory {size(memory_bytes)}: the process takes {size(held_bytes)} without any weight; give more")
    return memory_bytes - held_bytes


@functools.cache
def _held_bytes() -> int:
    """When it is first asked: later, what is left of weights would count as well."""
    from assay_quantize.storage.resident import resident_bytes

    return resident_bytes()


def numerics_of(arithmetic: Arithmetic, device: str) -> Numerics:
    """Of this process."""
    import torch
    import transformers

    from assay_quantize.screen.forward import device_name

    return Numerics(
        arithmetic=arithmetic, device=device_name(device), torch=torch.__version__, transformers=transformers.__version__
    )


def panel_like(panel: Panel, texts: Sequence[ScreenText], *, is_whole: bool) -> Panel:
    """Of some of its texts."""
    return panel if is_whole else panel_of(panel.files, texts, panel.stated)


def panel_of(files: Sequence[str], texts: Sequence[ScreenText], stated: StatedTexts) -> Panel:
    """What a record says of texts."""
    from assay_quantize.sensitivity.texts import texts_sha256

    scored = [entry.scored for entry in texts]
    return Panel(
        files=tuple(files),
        sha256=texts_sha256(scored),
        num_texts=len(texts),
        num_tokens=sum(text.num_scored for text in scored),
        stated=stated,
    )
