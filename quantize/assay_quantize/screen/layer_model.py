"""The language model of a stored checkpoint, of which one decoder layer at a time has weights: the others pass on what they
are given.

The model's own forward runs: masks, positions and what one layer hands to the next are the model's. Weights are decoded to FP32
as they are stored (`decoding`), then rounded to the dtype of the arithmetic; experts are decoded one after the other into the
parameter that holds all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from assay.errors import QuantizeError
from assay.quantities import size
from assay.recipes.family_names import split_layer
from assay_quantize.calibration.one_layer import End, Passing, State, again_with_buffers, parent, pass_through, run_layer
from assay_quantize.calibration.quiet import loading
from assay_quantize.decoding.activations import InputRounding, RoundedInputs
from assay_quantize.decoding.open_stored import ByteRange, StoredCheckpoint
from assay_quantize.screen.expert_groups import LoadedGroup, experts_name
from assay_quantize.screen.kv_cache import CacheScales, fp8_cache
from assay_quantize.screen.memory import FOR_WEIGHTS, Budget, Groups, Parts, empty_tensor, groups_of
from assay_quantize.screen.placing import Placing, hollow_model, unlike

Logits = Callable[[Tensor, Tensor, State], Tensor]
"""(tokens [B, T], positions, states behind the last layer) -> logits [B, positions, V]."""
_EXPERTS = "experts"
_EMBEDDING_ROWS = 4096
"""Rows of the embedding that are decoded at once."""


class LoadedLayer(NamedTuple):
    """roundings: how inputs of its weights are rounded, by the address of the weight. groups: of experts, which have no weights
    yet; none: they have."""

    roundings: dict[int, InputRounding]
    groups: Groups


class _FewTokens(nn.Module):
    """The model's own embedding with the rows of those tokens that occur. ids: sorted."""

    def __init__(self, embedding: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.embedding, self.ids = embedding, ids

    def forward(self, tokens: Tensor) -> Any:
        return self.embedding(torch.searchsorted(self.ids, tokens.contiguous()).clamp_max(len(self.ids) - 1))


class LayerModel:
    """dtype: of the arithmetic. Inputs of quantized weights are rounded as their scheme says, experts and attention alike.

    fp8_kv_cache: keys and values are rounded as an FP8 cache does, by the checkpoint's scales. memory_bytes: of the device, for
    weights and what flows through them; None: what is free. QuantizeError: transformers has no such model, or the checkpoint
    lacks one of its parameters.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        fp8_kv_cache: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        self.budget = Budget(device, memory_bytes)
        self.stored, self.dtype, self.device, self.fp8_kv_cache = stored, dtype, device, fp8_kv_cache
        self._look_up_names()
        with loading(f"{stored.location}: transformers cannot build it"), torch.device("meta"):
            self.model = hollow_model(self._config(), dtype)
        placing = Placing(stored, self.model, self._name_as_built)
        self.base, self.prefix, self._layers = placing.base, placing.prefix, placing.layers
        self._sources, self._embedding, self._head = placing.sources, placing.embedding, placing.head
        self._compute_buffers()
        self._norm, self.base.norm = self.base.norm, nn.Identity()
        self._passing = Passing()
        self.base.layers = nn.ModuleList([self._passing] * len(self._layers))

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have an embedding."""
        return int(self.base.config.vocab_size)

    def layer(self, number: int) -> nn.Module:
        """Decoder layer `number`, without weights."""
        return self._layers[number]

    def source_names(self) -> set[str]:
        """The stored tensors that a pass reads."""
        return {source.name for sources in self._sources.values() for source in sources}

    def _look_up_names(self) -> None:
        """What has to be known of the stored names before the model is built."""

    def _config(self) -> Mapping[str, Any]:
        """config.json of the model that is built."""
        return self.stored.config

    def _name_as_built(self, name: str) -> str:
        """What a stored tensor would be called as a part of the model that is built."""
        return name

    def _compute_buffers(self) -> None:
        """What is computed when a model is built and not stored: rotary frequencies, Gemma's factor of embeddings."""
        embedding = self.model.get_input_embeddings()
        if isinstance(factor := getattr(embedding, "scalar_embed_scale", None), float | int):
            embedding.embed_scale = torch.tensor(factor, device=self.device)
        again_with_buffers(self.base, self.device, self.stored.location, but=embedding)

    # -------------------------------------------------------------------------------------------- values
    def _read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A stored tensor or rows of it: weights that are codes in FP32, others as they are stored."""
        if name in self.stored.others:
            return self.stored.read_other(name, rows)
        return self.stored.read_values(name, rows)

    def _fill(self, root: nn.Module, prefix: str, but: str | None = None) -> dict[int, InputRounding]:
        """Give a module its weights. but: a part of it that gets none. Returns address of a weight in memory -> how its inputs
        are rounded."""
        roundings: dict[int, InputRounding] = {}
        persistent = root.state_dict().keys()
        tensors = [*root.named_parameters(), *((name, buffer) for name, buffer in root.named_buffers() if name in persistent)]
        for name, hollow in tensors:
            if but is not None and name.startswith(f"{but}."):
                continue
            value, of_value = self._value(f"{prefix}{name}", hollow)
            roundings |= of_value
            module, leaf = parent(root, name)
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[leaf] = value
        return roundings

    def _value(self, name: str, hollow: Tensor, experts: range | None = None) -> tuple[Tensor, dict[int, InputRounding]]:
        """Of a parameter or buffer, or of these experts in one that holds all of them; and the roundings, as of `_fill`."""
        value = self._weights(name, hollow, experts)
        return value, self._roundings(name, value, experts)

    def _weights(self, name: str, hollow: Tensor, experts: range | None = None) -> Tensor:
        """Of `_value`."""
        whole = range(len(hollow)) if hollow.dim() else range(1)
        held = whole if experts is None else experts
        shape = hollow.shape if experts is None else (len(experts), *hollow.shape[1:])
        value = empty_tensor(shape, hollow.dtype, self.device)
        for source in self._sources[name]:
            if source.expert is not None and source.expert not in held:
                continue
            is_stack = source.expert is None and hollow.dim() > 2 and f".{_EXPERTS}." in name
            if is_stack and source.name in self.stored.others:  # one by one, so that only one is in memory twice
                self._copy_rows(source.name, hollow, value, held)
                continue
            part = self._read(source.name, None if experts is None or source.expert is not None else (held.start, held.stop))
            of_expert = value if source.expert is None else value[source.expert - held.start]
            place = of_expert[source.first_row : source.first_row + part.shape[0]] if part.dim() else of_expert
            self._check_shape(source.name, part.shape, place.shape)
            place.copy_(part)
        return value

    def _roundings(self, name: str, value: Tensor, experts: range | None = None) -> dict[int, InputRounding]:
        """How inputs of `_weights`, or of others that lie in their place, are rounded."""
        first = 0 if experts is None else experts.start
        roundings: dict[int, InputRounding] = {}
        for source in self._sources[name]:
            is_held = source.expert is None or experts is None or source.expert in experts
            if is_held and source.name not in self.stored.others:
                of_expert = value if source.expert is None else value[source.expert - first]
                address = of_expert.data_ptr()
                roundings[address] = _of_fused(roundings.get(address), self._rounding(source.name))
        return {address: rounding for address, rounding in roundings.items() if rounding.rule.kind != "none"}

    def _copy_rows(self, name: str, hollow: Tensor, value: Tensor, rows: range) -> None:
        self._check_shape(name, self.stored.others[name].shape, hollow.shape)
        for place, row in enumerate(rows):
            value[place].copy_(self._read(name, (row, row + 1))[0])

    def _check_shape(self, name: str, stored: Sequence[int], expected: Sequence[int]) -> None:
        if tuple(stored) != tuple(expected):
            raise unlike(self.stored, f"{name} is {list(stored)}, transformers has {list(expected)} for it")

    def _rounding(self, name: str) -> InputRounding:
        rule = self.stored.weight(name).activations
        scale = None if rule.kind == "none" else self.stored.read_activation_scale(name)
        if scale is None:
            return InputRounding(rule)
        step = float(scale.max())
        return InputRounding(rule, step if rule.granularity == "tensor" else 1.0 / step)

    # -------------------------------------------------------------------------------------------- running
    def load(self, layer: int) -> LoadedLayer:
        """Read the weights of a layer, which may go on in another thread while one before it runs; for `filled`.

        QuantizeError: the device has no room for it, nor for one expert and what is no expert.
        """
        module, parts = self._layers[layer], self.parts(layer)
        groups = groups_of(parts, self.budget.left_bytes(self._held_bytes()))
        if groups is None:
            raise self._no_room(
                f"the weights of layer {layer}{', one expert at a time,' if parts.expert_bytes else ''}", parts.least_bytes
            )
        but = experts_name(module) if groups.experts else None
        return LoadedLayer(self._fill(module, f"{self.prefix}.{layer}.", but), groups)

    def load_group(self, layer: int, experts: range) -> LoadedGroup:
        """Read the weights of some experts of a layer."""
        module = self._layers[layer]
        name = experts_name(module)
        weights: dict[str, Tensor] = {}
        roundings: dict[int, InputRounding] = {}
        for leaf, hollow in module.get_submodule(str(name)).named_parameters():
            weights[leaf], of_value = self._value(f"{self.prefix}.{layer}.{name}.{leaf}", hollow, experts)
            roundings |= of_value
        return LoadedGroup(experts, weights, roundings)

    def prefetch(self, layer: int, experts: range | None = None, but: Collection[str] = ()) -> None:
        """Have the stored bytes read ahead that `load` or, of these experts, `load_group` decodes next.

        but: parameters that are not read. Safe beside a layer that runs. CheckpointError: they cannot be read.
        """
        prefix = f"{self.prefix}.{layer}."
        ranges: list[ByteRange] = []
        for name, sources in self._sources.items():
            is_expert = f".{_EXPERTS}." in name
            if name.startswith(prefix) and name not in but and (experts is None or is_expert):
                for source in sources:
                    if source.expert is not None:
                        ranges += self.stored.byte_ranges(source.name) if experts is None or source.expert in experts else []
                    elif is_expert and source.name in self.stored.others:  # as `_copy_rows` reads them
                        rows = range(self.stored.others[source.name].shape[0]) if experts is None else experts
                        ranges += [part for row in rows for part in self.stored.byte_ranges(source.name, (row, row + 1))]
                    else:
                        held = None if experts is None else (experts.start, experts.stop)
                        ranges += self.stored.byte_ranges(source.name, held)
        self.stored.prefetch(ranges)

    def release(self, layer: int) -> None:
        """No pass reads layers up to `layer` again: shards that hold nothing else are released (`ShardReader`)."""
        self.stored.release([shard for shard, last in self._last_layer_of_shards.items() if last <= layer])

    @functools.cached_property
    def _last_layer_of_shards(self) -> dict[str, float]:
        """What is outside of decoder layers is read for the head, and MTP blocks for drafts, behind the last layer."""
        last_layer_of: dict[str, float] = {}
        for name, sources in self._sources.items():
            place = split_layer(name) if name.startswith(f"{self.prefix}.") else None
            for source in sources:
                for shard in self.stored.shards_of(source.name):
                    last = math.inf if place is None else place.layer
                    last_layer_of[shard] = max(last, last_layer_of.get(shard, 0))
        read = self.source_names()
        for name in (*(weight.name for weight in self.stored.weights), *self.stored.others):
            place = split_layer(name)
            if name not in read and place is not None and (place.root.startswith("mtp") or place.layer >= self.num_layers):
                last_layer_of |= dict.fromkeys(self.stored.shards_of(name), math.inf)
        return last_layer_of

    def parts(self, layer: int) -> Parts:
        """Sizes of what the weights of a layer are made of, as it runs."""
        module = self._layers[layer]
        name = experts_name(module)
        whole = _bytes_of(module.state_dict().values())
        if name is None:
            return Parts(whole)
        tensors = list(module.get_submodule(name).parameters())
        of_experts = _bytes_of(tensors)
        return Parts(whole - of_experts, of_experts // len(tensors[0]), len(tensors[0]))

    def has_room_for(self, layer: int) -> bool:
        """Whether the device holds its weights beside what it holds."""
        return self.parts(layer).whole_bytes < self.budget.left_bytes(self._held_bytes())

    def check_room_for_heads(self) -> None:
        """QuantizeError: the device has no room for two heads, which are held at once where two passes are compared."""
        head_bytes = 2 * _bytes_of(self.model.get_output_embeddings().parameters())
        if head_bytes >= self.budget.left_bytes(0):
            raise self._no_room("two heads, which are compared,", head_bytes)

    def _no_room(self, what: str, needed_bytes: int) -> QuantizeError:
        limit_bytes = self.budget.limit_bytes
        free = "less is free" if limit_bytes is None else f"{size(FOR_WEIGHTS * limit_bytes)} may be used for weights"
        more = (
            "a machine with more"
            if limit_bytes is None
            else f"{size(needed_bytes / FOR_WEIGHTS - limit_bytes)} more of --memory"
        )
        return QuantizeError(
            f"{self.stored.location}: {what} take {size(needed_bytes)} of memory, and {free}; take --arithmetic bf16, or {more}"
        )

    def _held_bytes(self) -> int:
        modules = [module for module in (self.model, self._norm, *self._layers) if module is not self._passing]
        tensors = {id(tensor): tensor for module in modules for tensor in module.parameters() if not tensor.is_meta}
        return _bytes_of(tensors.values())

    @contextmanager
    def filled(self, layer: int, loaded: LoadedLayer | None = None) -> Iterator[nn.Module]:
        """One layer has weights; all others pass on their input. Afterwards the layer is gone. loaded: of `load`; None: the
        layer is not loaded yet."""
        whole = self._layers[layer]
        roundings = (loaded or self.load(layer)).roundings
        others: list[nn.Module] = [self._passing if number != layer else whole for number in range(self.num_layers)]
        others[layer + 1 :] = [End()] * (self.num_layers - layer - 1)
        self.base.layers = nn.ModuleList(others)
        try:
            with (
                RoundedInputs(roundings) if roundings else nullcontext(),
                fp8_cache(whole, self._cache_scales(layer)) if self.fp8_kv_cache else nullcontext(),
            ):
                yield whole
        finally:
            self._layers[layer] = self._passing
            self.base.layers = nn.ModuleList([self._passing] * self.num_layers)

    def _cache_scales(self, layer: int) -> CacheScales:
        """Those that are stored of a layer; 1, as vLLM takes it, where none is."""
        scales = CacheScales()
        for name, scaled in self.stored.kv.scales.items():
            place = split_layer(self._name_as_built(name))
            if place is None or place.layer != layer or place.root.startswith("mtp"):
                continue
            if scaled in ("key", "value", "key and value"):
                names = ("key", "value") if scaled == "key and value" else (scaled,)
                scales = scales._replace(**dict.fromkeys(names, self.stored.read_cache_scale(name)))
        return scales

    def use_embedding(self, tokens: Tensor) -> None:
        """Have the model know the embeddings of `tokens`."""
        embedding = self.model.get_input_embeddings()
        ids = torch.unique(tokens)
        num_rows, columns = embedding.weight.shape
        rows_VH = torch.empty(len(ids), columns, dtype=self.dtype)
        for begin in range(0, num_rows, _EMBEDDING_ROWS):
            end = min(begin + _EMBEDDING_ROWS, num_rows)
            is_in = (ids >= begin) & (ids < end)
            if is_in.any():
                rows_VH[is_in] = self._embedding_rows(begin, end)[ids[is_in] - begin].to(self.dtype)
        embedding.weight = nn.Parameter(rows_VH.to(self.device), requires_grad=False)
        self.model.set_input_embeddings(_FewTokens(embedding, ids.to(self.device)))

    def _embedding_rows(self, begin: int, end: int) -> Tensor:
        (source,) = self._sources[f"{self._embedding}.weight"]
        return self._read(source.name, (begin, end))

    def run(self, layer: int, tokens: Tensor, state: State | None) -> State:
        """What layer `layer` makes of `state`, or of the embedded `tokens` [B, T] where it is None; it must be filled."""
        with loading(f"{self.stored.location}: transformers cannot run it"), torch.no_grad():
            return run_layer(self.base, self._layers[layer], self._passing, tokens, state, self.device)

    def run_to_experts(self, tokens: Tensor, state: State | None) -> None:
        """Begin to run the layer that is filled, as of `run`, until something in it raises `Ended`."""
        with loading(f"{self.stored.location}: transformers cannot run it"), torch.no_grad():
            pass_through(self.base, self._passing, tokens, state, self.device)

    @contextmanager
    def head(self, tensors: Mapping[str, Tensor] | None = None) -> Iterator[Logits]:
        """The model's own forward behind the last layer. tensors: `head_tensors` of another checkpoint of this model, in place
        of what this one stores.

        QuantizeError: those are of other shapes or names.
        """
        roundings = self._fill_head() if tensors is None else self._take_head(tensors)
        self.base.norm = self._norm
        if not isinstance(self.model.get_input_embeddings(), _FewTokens):
            self.use_embedding(torch.zeros(1, dtype=torch.long))  # the model asks for embeddings, nobody looks at them

        def logits(tokens: Tensor, positions: Tensor, state: State) -> Tensor:
            self._passing.hand_on(state, self.device)
            try:
                reason = f"{self.stored.location}: transformers cannot run its head"
                with loading(reason), torch.no_grad(), RoundedInputs(roundings):
                    made: Tensor = self.model(
                        input_ids=tokens.to(self.device), use_cache=False, logits_to_keep=positions.to(self.device)
                    ).logits
            finally:
                self._passing.state = None
            return made

        try:
            yield logits
        finally:
            self.base.norm = nn.Identity()

    def head_tensors(self) -> dict[str, Tensor]:
        """What `head` computes with, of the last norm and the head, in the dtype of the arithmetic.

        QuantizeError: the head rounds its inputs, which its weights alone do not tell.
        """
        if self._fill_head():
            raise unlike(self.stored, "its head rounds its inputs, so its logits cannot be made from states and weights alone")
        return {f"{part}.{name}": tensor for part, root in self._parts_of_head() for name, tensor in root.state_dict().items()}

    def _parts_of_head(self) -> tuple[tuple[str, nn.Module], ...]:
        return ("norm", self._norm), ("head", self.model.get_output_embeddings())

    def _fill_head(self) -> dict[int, InputRounding]:
        self._fill(self._norm, f"{self.prefix.rpartition('.')[0]}.norm.")
        return self._fill(self.model.get_output_embeddings(), f"{self._head}.")

    def _take_head(self, tensors: Mapping[str, Tensor]) -> dict[int, InputRounding]:
        own = {f"{part}.{name}": tensor for part, root in self._parts_of_head() for name, tensor in root.state_dict().items()}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if shapes != {name: list(tensor.shape) for name, tensor in own.items()}:
            raise unlike(self.stored, f"the head that it is compared with is another: {shapes}")
        for part, root in self._parts_of_head():
            for name in root.state_dict():
                module, leaf = parent(root, name)
                value = tensors[f"{part}.{name}"].to(self.device, own[f"{part}.{name}"].dtype)
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                else:
                    module._buffers[leaf] = value
        return {}


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _of_fused(first: InputRounding | None, second: InputRounding) -> InputRounding:
    """Of weights that share their inputs, as vLLM takes it: the largest step."""
    if first is None or first.factor is None or second.factor is None:
        return second
    larger = max if second.rule.granularity == "tensor" else min
    return second._replace(factor=larger(first.factor, second.factor))
