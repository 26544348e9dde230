"""Proxy `kl`: each part rounded by itself in the model, and the divergence of what it says from the unquantized model's.

What is found of a part is kept at once, in a file of its own: a run that is killed goes on behind the last one. The folder is
named after all that the numbers depend on. The same machine, versions and number of threads give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from assay.atomic_files import replacing
from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.records.base import sha256_of
from assay_quantize.calibration.calibrate import in_order
from assay_quantize.sensitivity.parts import Key, Layout
from assay_quantize.sensitivity.rounded import Rounder, RoundInputs, input_args
from assay_quantize.sensitivity.running import Passed, Runner, other_experts
from assay_quantize.sensitivity.texts import Batch, ScoredText, texts_sha256

NOISE = "noise"


@dataclass(frozen=True)
class Found:
    """Of one part, or of a whole precision. kl_N: nats at each scored position, text after text in the order of
    `texts`. other_experts: layer -> share of tokens that chose other experts."""

    kl_N: npt.NDArray[np.float32]
    other_experts: dict[int, float]


@dataclass(frozen=True)
class Cost:
    """Estimated from one pass of the unquantized model, before anything is rounded."""

    num_passes: float
    cpu_seconds: float
    bytes_kept: int


def identity(layout: Layout, texts: Sequence[ScoredText], calibration_sha256: str | None = None) -> str:
    """Of what all numbers depend on: the source's data, the texts, how weights are rounded, the versions that compute."""
    import transformers

    made_from = [
        dict(layout.checkpoint.data),
        texts_sha256(texts),
        layout.observer,
        torch.__version__,
        transformers.__version__,
        *([] if calibration_sha256 is None else [calibration_sha256]),
    ]
    return sha256_of(made_from)[:16]


class Kept:
    """What was found of each part, a file each. folder: None: nothing is kept."""

    def __init__(self, folder: Path | None, num_positions: int) -> None:
        self.folder, self._num_positions = folder, num_positions

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{name}.safetensors"

    def load(self, name: str) -> Found | None:
        """None: not measured yet, or the file is damaged."""
        from safetensors import SafetensorError, safe_open

        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                kl_N = file.get_tensor("kl")
        except (SafetensorError, OSError):
            return None
        told = metadata.get("found", "")
        if kl_N.shape != (self._num_positions,) or metadata.get("sha256") != _sha256(kl_N, told):
            return None
        experts = json.loads(told)["other_experts"]
        return Found(kl_N, {int(layer): float(share) for layer, share in experts.items()})

    def save(self, name: str, found: Found) -> None:
        from safetensors.numpy import save

        if (path := self._path(name)) is None:
            return
        told = json.dumps({key: value for key, value in asdict(found).items() if key != "kl_N"}, sort_keys=True)
        with replacing(path) as partial:
            partial.write_bytes(in_order(save({"kl": found.kl_N}, {"found": told, "sha256": _sha256(found.kl_N, told)})))


def _sha256(kl_N: npt.NDArray[np.float32], told: str) -> str:
    return hashlib.sha256(kl_N.tobytes() + told.encode()).hexdigest()


class Direct:
    """All parts of a checkpoint on some texts. keep: folder of what is found; None: nothing is kept."""

    def __init__(
        self, layout: Layout, rounder: Rounder, runner: Runner, texts: Sequence[ScoredText], keep: Path | None, say: Say
    ) -> None:
        self._layout, self._rounder, self._runner, self._say = layout, rounder, runner, say
        self._places = places(runner.batches, texts)
        kept = None if keep is None else keep / identity(layout, texts, rounder.calibration_sha256)
        self._kept = Kept(kept, len(self._places))
        started = _cpu_seconds()
        self._reference: Passed = runner.run()
        self._pass_s = _cpu_seconds() - started
        missing = sorted(set().union(*layout.weights.values()) - runner.views.keys() - set(_mtp(layout)))
        if missing:
            raise QuantizeError(
                f"{layout.checkpoint.location}: transformers builds no parameter for {missing[0]}"
                f"{f' and {len(missing) - 1} more' if missing[1:] else ''}; "
                "use --proxy weights, which reads the checkpoint only"
            )

    def cost(self, pairs: Sequence[tuple[Key, str]]) -> Cost:
        """What is not there yet, in passes of the whole model."""
        layers = len(self._runner.layers)
        left = [key for key, scheme in pairs if self._kept.load(part_name(key, scheme)) is None]
        wholes = [name for name in self._layout.wholes() if self._kept.load(part_name(None, name)) is None]
        passes = sum(1 - (key.layer or 0) / layers for key in left) + len(wholes) + 1
        return Cost(passes, passes * self._pass_s, 4 * len(self._reference.states_NH) * len(left))

    def noise(self) -> float:
        """KL of the unquantized model against itself, run once more from the middle of its layers. Call it last."""
        if self._runner.layer == 0:
            self._runner.advance()
        return float(self._runner.kl(self._reference.states_NH, self._runner.run().states_NH).double().mean())

    def wholes(self) -> Iterator[tuple[str, Found]]:
        """Every scheme in all parts that it fits, and every mix. Call it first: the model is run from its first layer."""
        assert self._runner.layer == 0
        for whole, chosen in self._layout.wholes().items():
            name = part_name(None, whole)
            if (found := self._kept.load(name)) is None:
                self._say(f"{whole} in every part" if whole in self._layout.plans else "a mix as a whole")
                with self._rounded(chosen):
                    found = self._measure()
                self._kept.save(name, found)
            yield whole, found

    def parts(self, pairs: Sequence[tuple[Key, str]]) -> Iterator[tuple[Key, str, Found]]:
        """Of each pair, layer after layer: pairs must be sorted by layer."""
        for number, (key, scheme) in enumerate(pairs, 1):
            name = part_name(key, scheme)
            if (found := self._kept.load(name)) is None:
                assert key.layer is not None and self._runner.layer <= key.layer, "pairs are sorted by layer"
                while self._runner.layer < key.layer:
                    self._runner.advance()
                with self._rounded({key: scheme}):
                    found = self._measure()
                self._kept.save(name, found)
                self._say(f"{number} of {len(pairs)}: {key}, {scheme}: {found.kl_N.mean(dtype=np.float64):.3g} nats")
            yield key, scheme, found

    # -------------------------------------------------------------------------------------------- one measurement
    @contextmanager
    def _rounded(self, chosen: Mapping[Key, str]) -> Iterator[None]:
        """The parts rounded in the model, each in its scheme, and plain again afterwards."""
        views = self._runner.views
        before: dict[str, Tensor] = {}
        scheme_of: dict[str, str] = {}
        try:
            for key, scheme in chosen.items():
                for name, plain, back in self._rounder.weights(key, scheme):
                    before[name], scheme_of[name] = views[name].clone(), scheme
                    if before[name].shape != plain.shape:
                        raise QuantizeError(
                            f"{name}: transformers builds it as {list(before[name].shape)}, not {list(plain.shape)}"
                        )
                    views[name].copy_(back)
            watched = {
                at: scheme_of[name] for at, names in self._runner.addresses.items() for name in names if name in scheme_of
            }
            with RoundInputs(watched) if any(map(input_args, chosen.values())) else nullcontext():
                yield
        finally:
            for name, plain in before.items():
                views[name].copy_(plain)

    def _measure(self) -> Found:
        passed = self._runner.run()
        kl_N = self._runner.kl(self._reference.states_NH, passed.states_NH).cpu().numpy()
        if not np.isfinite(kl_N).all():
            raise QuantizeError(f"{self._layout.checkpoint.location}: a part gives infinite divergence; leave its scheme out")
        return Found(kl_N[self._places], other_experts(self._reference.experts, passed.experts))


def part_name(key: Key | None, scheme: str) -> str:
    return f"all-{scheme}" if key is None else f"layer-{key.layer:05d}-{key.role}-{scheme}"


def _mtp(layout: Layout) -> tuple[str, ...]:
    """The MTP block's weights, which transformers leaves out by design."""
    return layout.weights.get(Key(None, "mtp"), ())


def places(batches: Sequence[Batch], texts: Sequence[ScoredText]) -> npt.NDArray[np.intp]:
    """Where each text's positions stand in a pass, in the order of `texts`: batches are sorted by length."""
    begins = np.zeros(len(texts), np.intp)
    at = 0
    for batch in batches:
        for text in batch.texts:
            begins[text] = at
            at += texts[text].num_scored
    parts = [np.arange(begin, begin + text.num_scored) for begin, text in zip(begins, texts, strict=True)]
    return np.concatenate(parts)


def _cpu_seconds() -> float:
    """Of this process, all its threads."""
    spent = os.times()
    return spent.user + spent.system


def mean_other_experts(found: Mapping[int, float]) -> tuple[int, float] | None:
    """(layer, share) of the router that is disturbed most; None where no router was looked at."""
    return max(found.items(), key=lambda one: (one[1], -one[0])) if found else None
