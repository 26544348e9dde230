"""One layer over all sequences: whole in memory, or its experts in groups.

In groups, (a) every sequence runs up to the experts, and what these are called with is kept on the disk; (b) group after group,
each sequence's call goes through the experts of the group, and what they add up is kept; (c) every sequence runs again, with
what was added up in place of the experts. What is no expert is in memory from (a) to (c) and is computed twice; every weight is
read once. A killed run goes on where it was, with other groups too, and its bits are those of the whole layer.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from assay.atomic_files import naming
from assay_quantize.calibration.one_layer import State
from assay_quantize.calibration.quiet import loading
from assay_quantize.screen.expert_groups import Call, LoadedGroup, NotInGroups, add_group, caught, experts_name, made_by_all
from assay_quantize.screen.layer_model import LayerModel, LoadedLayer
from assay_quantize.screen.placing import unlike

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")
_CALLS, _SUMS = "calls", "sums"
_SUMMED, _NUM_ADDED = "summed", "num_added"


class LayerRun(NamedTuple):
    """Of one sequence. chosen_experts: int16 [T, k], sorted, of every token; None: the layer chooses none."""

    state: State
    chosen_experts: Tensor | None


def run_all(
    model: LayerModel,
    layer: int,
    loaded: LoadedLayer,
    sequences: Sequence[Tensor],
    given: Callable[[int], State | None],
    keep: Callable[[int, LayerRun], None],
    work: Path,
) -> float:
    """Run `layer` over token ids [B, T]. given: the state in front of it, by the number of the sequence; may be asked twice.
    keep: is handed what it made. work: folder for what groups make, which is to be removed when what was kept is safe.

    Returns the seconds that were spent waiting for weights of groups. QuantizeError: transformers cannot run it, or not in
    groups.
    """
    if not loaded.groups.experts:
        with model.filled(layer, loaded) as module, _chosen_experts(module) as chosen:
            for number, ids_BT in enumerate(sequences):
                chosen.clear()
                state = model.run(layer, ids_BT, given(number))
                keep(number, LayerRun(state, chosen[0].cpu() if chosen else None))
        return 0.0
    try:
        with model.filled(layer, loaded) as module:
            return _in_groups(_Grouped(model, layer, module, sequences, given, work), loaded, keep)
    except NotInGroups as reason:
        raise unlike(model.stored, f"layer {layer} does not fit into the memory that may be used, and {reason}") from None


class _Grouped(NamedTuple):
    model: LayerModel
    layer: int
    module: nn.Module
    sequences: Sequence[Tensor]
    given: Callable[[int], State | None]
    work: Path

    @property
    def experts(self) -> nn.Module:
        return self.module.get_submodule(str(experts_name(self.module)))

    def file(self, kind: str, sequence: int) -> Path:
        return self.work / kind / f"{sequence:06d}.safetensors"

    def summed(self, sequence: int) -> tuple[Tensor | None, int]:
        """What experts have added up, and how many of them."""
        path = self.file(_SUMS, sequence)
        if not path.is_file():
            return None, 0
        tensors = _load(path)
        return tensors[_SUMMED].to(self.model.device), int(tensors[_NUM_ADDED])


def _in_groups(run: _Grouped, loaded: LoadedLayer, keep: Callable[[int, LayerRun], None]) -> float:
    model, experts, num_experts = run.model, run.experts, loaded.groups.experts[-1].stop
    for kind in (_CALLS, _SUMS):
        (run.work / kind).mkdir(parents=True, exist_ok=True)
    num_added = [run.summed(number)[1] for number in range(len(run.sequences))]
    for number, ids_BT in enumerate(run.sequences):
        if num_added[number] < num_experts and not run.file(_CALLS, number).is_file():
            with caught(experts) as calls:
                model.run_to_experts(ids_BT, run.given(number))
            if not calls:
                raise NotInGroups("transformers does not call its experts in every sequence")
            _save(run.file(_CALLS, number), calls[0])
    groups = [group for group in loaded.groups.experts if group.stop > min(num_added)]
    waited_s = 0.0
    begin = time.perf_counter()
    is_read_ahead = loaded.groups.is_read_ahead
    prefetch = (lambda group: model.prefetch(run.layer, group)) if model.device == "cpu" else None
    for group in read_ahead(groups, lambda group: model.load_group(run.layer, group), lambda *_: is_read_ahead, prefetch):
        waited_s += time.perf_counter() - begin
        for number in range(len(run.sequences)):
            _add(run, experts, group, number)
        group.weights.clear()
        begin = time.perf_counter()
    shutil.rmtree(run.work / _CALLS)
    with _chosen_experts(run.module) as chosen:
        for number, ids_BT in enumerate(run.sequences):
            summed, _ = run.summed(number)
            assert summed is not None, "every sequence went through every group"
            chosen.clear()
            with made_by_all(experts, summed):
                state = model.run(run.layer, ids_BT, run.given(number))
            keep(number, LayerRun(state, chosen[0].cpu()))
    return waited_s


def _add(run: _Grouped, experts: nn.Module, group: LoadedGroup, sequence: int) -> None:
    """What the experts of a group make of a sequence, unless it was added before a kill."""
    summed, num_added = run.summed(sequence)
    if num_added < group.experts.stop:
        call = {name: tensor.to(run.model.device) for name, tensor in _load(run.file(_CALLS, sequence)).items()}
        chosen = range(max(num_added, group.experts.start), group.experts.stop)
        with loading(f"{run.model.stored.location}: transformers cannot run it"):
            summed = add_group(experts, group, chosen, call, summed)
        _save(run.file(_SUMS, sequence), {_SUMMED: summed, _NUM_ADDED: torch.tensor(group.experts.stop)})


def read_ahead(
    items: Sequence[Item],
    load: Callable[[Item], Loaded],
    has_room_beside: Callable[[Loaded, Item], bool],
    prefetch: Callable[[Item], None] | None,
) -> Iterator[Loaded]:
    """Each of `items` loaded. While one is at work, the next is read in a second thread where there is room for both.

    prefetch: has the bytes of an item read, but not decoded; for a CPU. None: the second thread loads, while a GPU computes. On
    a CPU it would decode with OpenMP threads of its own, and beside two sets of them libgomp's barriers sleep instead of
    spinning: for as long as the second set exists, a layer of 128 experts takes a quarter more time on two cores.
    """
    with ThreadPoolExecutor(max_workers=1) as reader:
        loading_next: Future[Loaded] | None = None
        prefetching: Future[None] | None = None
        for place, item in enumerate(items):
            if prefetching is not None:
                prefetching.result()
            loaded = load(item) if loading_next is None else loading_next.result()
            following = items[place + 1 : place + 2]
            loading_next = prefetching = None
            if following and has_room_beside(loaded, following[0]):
                if prefetch is None:
                    loading_next = reader.submit(load, following[0])
                else:
                    prefetching = reader.submit(prefetch, following[0])
            yield loaded


@contextmanager
def _chosen_experts(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Which experts the tokens of a call are sent to: the second argument of transformers' module of all experts."""
    chosen: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        if isinstance(index, Tensor) and not index.is_floating_point():
            chosen.append(index.sort(-1).values.to(torch.int16))

    modules = [module for name, module in layer.named_modules() if name.rpartition(".")[2] == "experts"]
    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def _save(path: Path, tensors: Call) -> None:
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    with naming(path):
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
        os.replace(partial, path)


def _load(path: Path) -> Call:
    from safetensors.torch import load_file

    with loading(f"{path}: cannot be read"):
        return load_file(path)
