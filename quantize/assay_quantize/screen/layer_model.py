"""The language model of a stored checkpoint, of which one decoder layer at a time has weights: the others pass on what they
are given.

The model is transformers' own class on torch's meta device, and its own forward runs: masks, positions and what one layer hands
to the next are the model's. Which parameter a stored tensor belongs to is transformers' answer too (`conversion_mapping.py`, by
which `from_pretrained` loads). Weights are decoded to FP32 as they are stored (`decoding`), then rounded to the dtype of the
arithmetic; experts are decoded one after the other into the parameter that holds all of them.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from assay.errors import PlanError, QuantizeError
from assay.quantities import and_more, size
from assay.recipes.families import family_of
from assay.recipes.family_names import names_of, split_layer
from assay.recipes.text_config import text_of
from assay_quantize.calibration.quiet import loading
from assay_quantize.decoding.activations import InputRounding, RoundedInputs
from assay_quantize.decoding.open_stored import StoredCheckpoint
from assay_quantize.screen.kv_cache import CacheScales, fp8_cache
from assay_quantize.storage.resident import available_bytes

State = tuple[Tensor, ...]
"""What goes from one layer to the next: hidden states [B, T, H], and for some models more (indexes of the tokens looked at)."""
Logits = Callable[[Tensor, Tensor, State], Tensor]
"""(tokens [B, T], positions, states behind the last layer) -> logits [B, positions, V]."""
_EMBEDDING_ROWS = 4096
"""Rows of the embedding that are decoded at once."""


_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_STACKED_AS = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj",
    "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj",
}  # fmt: skip


class Source(NamedTuple):
    """A stored tensor and where in its parameter it goes. first_row: of a matrix, or of its expert's; expert: None: it is not
    one of several."""

    name: str
    expert: int | None = None
    first_row: int = 0


class LayerInputs(NamedTuple):
    """How inputs of a loaded layer's weights are rounded, by the address of the weight."""

    roundings: dict[int, InputRounding]


class _Passing(nn.Module):
    """Stands for every layer but the one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, hidden: Any, *_args: Any, **_kwargs: Any) -> Any:
        return hidden if self.state is None else self.state


class _Ended(Exception):
    """Nothing behind the layer needs to run."""


class _End(nn.Module):
    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise _Ended


class _FewTokens(nn.Module):
    """The model's own embedding with the rows of those tokens that occur. ids: sorted."""

    def __init__(self, embedding: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.embedding, self.ids = embedding, ids

    def forward(self, tokens: Tensor) -> Any:
        return self.embedding(torch.searchsorted(self.ids, tokens.contiguous()).clamp_max(len(self.ids) - 1))


class LayerModel:
    """dtype: of the arithmetic. Inputs of quantized weights are rounded as their scheme says, experts and attention alike.

    fp8_kv_cache: keys and values are rounded as an FP8 cache does, by the checkpoint's scales. QuantizeError: transformers has
    no such model, or the checkpoint lacks one of its parameters.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        fp8_kv_cache: bool = False,
    ) -> None:
        self.stored, self.dtype, self.device, self.fp8_kv_cache = stored, dtype, device, fp8_kv_cache
        self._look_up_names()
        with loading(f"{stored.location}: transformers cannot build it"), torch.device("meta"):
            self.model = _hollow_model(self._config(), dtype)
            self.base = self.model.get_decoder()
        layers = getattr(self.base, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise self._unlike("it has no list of decoder layers")
        self._layers = list(layers)
        self.prefix = next(name for name, module in self.model.named_modules() if module is layers)
        self._sources = self._place()
        self._tied_head()
        self._check_whole()
        self._compute_buffers()
        self._norm, self.base.norm = self.base.norm, nn.Identity()
        self._passing = _Passing()
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

    def _unlike(self, reason: str) -> QuantizeError:
        return QuantizeError(f"{self.stored.location}: cannot be run layer by layer: {reason}")

    def _compute_buffers(self) -> None:
        """What is computed when a model is built and not stored: rotary frequencies, Gemma's factor of embeddings."""
        embedding = self.model.get_input_embeddings()
        if isinstance(factor := getattr(embedding, "scalar_embed_scale", None), float | int):
            embedding.embed_scale = torch.tensor(factor, device=self.device)
        for name, module in list(self.base.named_children()):
            if name != "layers" and module is not embedding and any(True for _ in module.buffers(recurse=False)):
                again: Any = type(module)
                with loading(f"{self.stored.location}: transformers cannot build {name}"):
                    setattr(self.base, name, again(config=self.base.config).to(self.device))

    # -------------------------------------------------------------------------------------------- which tensor goes where
    def _place(self) -> dict[str, list[Source]]:
        """Parameter or buffer of the model -> the stored tensors that make it up."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        parameters = self.model.state_dict()
        sources: dict[str, list[Source]] = defaultdict(list)
        wrapped, root = self._wrapped_root(), self.prefix.rpartition(".")[0]
        for name in (*(weight.name for weight in self.stored.weights), *self.stored.others):
            own = self._name_as_built(name)
            own = f"{root}.{own.removeprefix(wrapped)}" if wrapped and own.startswith(wrapped) else own
            target, pattern = rename_source_key(own, renamings, converters, self.model.base_model_prefix, parameters)
            if target in parameters:
                sources[target].append(Source(name) if pattern is None else self._part_of(name, pattern, by_pattern[pattern]))
            elif (expert := _EXPERT.fullmatch(target)) is not None:
                self._add_expert(name, expert, parameters, sources)  # else it is of a tower or an MTP block
        return sources

    def _wrapped_root(self) -> str | None:
        """What a multimodal checkpoint has in front of the names of its language model; None: it is none."""
        if text_of(self.stored.config) is self.stored.config or self.base is not self.model.base_model:
            return None  # of the wrapper's class names are the checkpoint's
        try:
            return names_of(family_of(self.stored.config)).layers.rpartition(".")[0] + "."
        except PlanError:
            return None

    def _add_expert(
        self, name: str, expert: re.Match[str], parameters: Mapping[str, Tensor], sources: dict[str, list[Source]]
    ) -> None:
        """One expert's weight where checkpoints have all of them in one tensor, as transformers does, and this one has not."""
        target = f"{expert['experts']}.{_STACKED_AS[expert['projection']]}"
        if target not in parameters:
            return
        rows, columns = self.stored.weight(name).shape
        whole = parameters[target].shape
        share = 2 if target.endswith("gate_up_proj") else 1
        if tuple(whole[1:]) != (share * rows, columns):
            raise self._unlike(f"{name} is [{rows}, {columns}], and transformers holds its experts as {list(whole)}")
        first_row = rows if expert["projection"] in ("up_proj", "w3") else 0
        sources[target].append(Source(name, int(expert["number"]), first_row))

    def _part_of(self, name: str, pattern: str, converter: Any) -> Source:
        """One expert's weight in the parameter that holds all of them."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        operations = [type(operation) for operation in converter.operations]
        if operations not in ([MergeModulelist], [MergeModulelist, Concatenate]):
            named = ", ".join(operation.__name__ for operation in operations)
            raise self._unlike(f"{name} becomes a parameter of transformers by {named}")
        expert = re.search(r"\.(\d+)\.[^.]+(?:\.weight)?$", name)
        if expert is None:
            raise self._unlike(f"{name} has no number of an expert")
        rows = self.stored.weight(name).shape[0]
        return Source(name, int(expert[1]), rows * converter.source_patterns.index(pattern))

    def _tied_head(self) -> None:
        """A head that is the embedding is stored once."""
        names = {module: name for name, module in self.model.named_modules()}
        self._embedding = names[self.model.get_input_embeddings()]
        head = f"{names[self.model.get_output_embeddings()]}.weight"
        if head not in self._sources and getattr(self.base.config, "tie_word_embeddings", False):
            self._sources[head] = self._sources[f"{self._embedding}.weight"]

    def _check_whole(self) -> None:
        names = {
            name for name, module in self.model.named_modules() if module in (self.base, self.model.get_output_embeddings())
        }
        needed = [name for name in self.model.state_dict() if any(name.startswith(f"{root}.") for root in names)]
        lacking = sorted(name for name in needed if name not in self._sources)
        if lacking:
            raise self._unlike(f"it stores nothing for {and_more(lacking)}")

    # -------------------------------------------------------------------------------------------- values
    def _read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A stored tensor in the arithmetic's dtype; what is stored in FP32 and no weight stays so (biases of routers)."""
        if name in self.stored.others:
            return self.stored.read_other(name)
        return self.stored.read_weight(name, rows)

    def _fill(self, root: nn.Module, prefix: str) -> dict[int, InputRounding]:
        """Give a module its weights. Returns address of a weight in memory -> how its inputs are rounded."""
        roundings: dict[int, InputRounding] = {}
        tensors: list[tuple[str, Tensor, bool]] = [(name, tensor, True) for name, tensor in root.named_parameters()]
        persistent = root.state_dict().keys()
        tensors += [(name, tensor, False) for name, tensor in root.named_buffers() if name in persistent]
        for name, hollow, is_parameter in tensors:
            value = torch.empty(hollow.shape, dtype=hollow.dtype, device=self.device)
            for source in self._sources[f"{prefix}{name}"]:
                part = self._read(source.name)
                place = value if source.expert is None else value[source.expert]
                place = place[source.first_row : source.first_row + part.shape[0]] if part.dim() else place
                if place.shape != part.shape:
                    raise self._unlike(f"{source.name} is {list(part.shape)}, transformers has {list(place.shape)} for it")
                place.copy_(part)
                if source.name not in self.stored.others:
                    first = value if source.expert is None else value[source.expert]
                    rounding = self._rounding(source.name)
                    roundings[first.data_ptr()] = _of_fused(roundings.get(first.data_ptr()), rounding)
            module, leaf = _parent(root, name)
            if is_parameter:
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[leaf] = value
        return {address: rounding for address, rounding in roundings.items() if rounding.rule.kind != "none"}

    def _rounding(self, name: str) -> InputRounding:
        rule = self.stored.weight(name).activations
        scale = None if rule.kind == "none" else self.stored.read_activation_scale(name)
        if scale is None:
            return InputRounding(rule)
        step = float(scale.max())
        return InputRounding(rule, step if rule.granularity == "tensor" else 1.0 / step)

    # -------------------------------------------------------------------------------------------- running
    def load(self, layer: int) -> LayerInputs:
        """Read the weights of a layer, which may go on in another thread while one before it runs; for `filled`."""
        return LayerInputs(self._fill(self._layers[layer], f"{self.prefix}.{layer}."))

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

    def layer_bytes(self, layer: int) -> int:
        """Of its weights, as it runs."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._layers[layer].state_dict().values())

    def has_room_for(self, *layers: int) -> bool:
        """Whether the device holds these beside what it holds, with a fifth of what is free to spare."""
        needed = sum(self.layer_bytes(layer) for layer in layers)
        free = available_bytes() if self.device == "cpu" else torch.cuda.mem_get_info()[0]
        return needed < 0.8 * free

    def check_room_for(self, layer: int) -> None:
        """QuantizeError: the device has no room for it."""
        if not self.has_room_for(layer):
            raise QuantizeError(
                f"{self.stored.location}: layer {layer} takes {size(self.layer_bytes(layer))} of memory, and less is free; "
                "take --arithmetic bf16, or a machine with more"
            )

    @contextmanager
    def filled(self, layer: int, inputs: LayerInputs | None = None) -> Iterator[nn.Module]:
        """One layer has weights; all others pass on their input. Afterwards the layer is gone. inputs: of `load`; None: the
        layer is not loaded yet."""
        whole = self._layers[layer]
        roundings = (inputs or self.load(layer)).roundings
        others: list[nn.Module] = [self._passing if number != layer else whole for number in range(self.num_layers)]
        others[layer + 1 :] = [_End()] * (self.num_layers - layer - 1)
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
        embedding, (source,) = self.model.get_input_embeddings(), self._sources[f"{self._embedding}.weight"]
        ids = torch.unique(tokens)
        num_rows, columns = embedding.weight.shape
        rows_VH = torch.empty(len(ids), columns, dtype=self.dtype)
        for begin in range(0, num_rows, _EMBEDDING_ROWS):
            end = min(begin + _EMBEDDING_ROWS, num_rows)
            is_in = (ids >= begin) & (ids < end)
            if is_in.any():
                rows_VH[is_in] = self._read(source.name, (begin, end))[ids[is_in] - begin].to(self.dtype)
        embedding.weight = nn.Parameter(rows_VH.to(self.device), requires_grad=False)
        self.model.set_input_embeddings(_FewTokens(embedding, ids.to(self.device)))

    def run(self, layer: int, tokens: Tensor, state: State | None) -> State:
        """What layer `layer` makes of `state`, or of the embedded `tokens` [B, T] where it is None; it must be filled."""
        outputs: list[Any] = []
        handle = self._layers[layer].register_forward_hook(lambda _module, _args, output: outputs.append(output))
        self._passing.state = _as_given(state, self.device)
        try:
            with loading(f"{self.stored.location}: transformers cannot run it"), suppress(_Ended), torch.no_grad():
                self.base(input_ids=tokens.to(self.device), use_cache=False)
        finally:
            handle.remove()
            self._passing.state = None
        output = outputs[0]
        return (output,) if isinstance(output, Tensor) else tuple(output)

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
            self._passing.state = _as_given(state, self.device)
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
            raise self._unlike("its head rounds its inputs, so its logits cannot be made from states and weights alone")
        return {f"{part}.{name}": tensor for part, root in self._parts_of_head() for name, tensor in root.state_dict().items()}

    def _parts_of_head(self) -> tuple[tuple[str, nn.Module], ...]:
        return ("norm", self._norm), ("head", self.model.get_output_embeddings())

    def _fill_head(self) -> dict[int, InputRounding]:
        names = {module: name for name, module in self.model.named_modules()}
        output = self.model.get_output_embeddings()
        self._fill(self._norm, f"{self.prefix.rpartition('.')[0]}.norm.")
        return self._fill(output, f"{names[output]}.")

    def _take_head(self, tensors: Mapping[str, Tensor]) -> dict[int, InputRounding]:
        own = {f"{part}.{name}": tensor for part, root in self._parts_of_head() for name, tensor in root.state_dict().items()}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if shapes != {name: list(tensor.shape) for name, tensor in own.items()}:
            raise self._unlike(f"the head that it is compared with is another: {shapes}")
        for part, root in self._parts_of_head():
            for name in root.state_dict():
                module, leaf = _parent(root, name)
                value = tensors[f"{part}.{name}"].to(self.device, own[f"{part}.{name}"].dtype)
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                else:
                    module._buffers[leaf] = value
        return {}


def _hollow_model(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The language model without its wrapper where transformers has such a class, else the wrapper."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    language, whole = text_config(config), whole_config(config)
    by_config: Any = AutoModelForCausalLM
    if type(language) not in MODEL_FOR_CAUSAL_LM_MAPPING and language is not whole:
        by_config, language = AutoModelForImageTextToText, whole
    return by_config.from_config(language, dtype=dtype, experts_implementation="eager").eval()


def whole_config(config: Mapping[str, Any]) -> Any:
    """transformers' configuration that a config.json describes, without its quantization."""
    from transformers import CONFIG_MAPPING

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    known: Any = CONFIG_MAPPING
    return known[str(config.get("model_type"))].from_dict(plain)


def text_config(config: Mapping[str, Any]) -> Any:
    """The same of its language model."""
    return whole_config(config).get_text_config()


def _of_fused(first: InputRounding | None, second: InputRounding) -> InputRounding:
    """Of weights that share their inputs, as vLLM takes it: the largest step."""
    if first is None or first.factor is None or second.factor is None:
        return second
    larger = max if second.rule.granularity == "tensor" else min
    return second._replace(factor=larger(first.factor, second.factor))


def _as_given(state: State | None, device: str) -> Any:
    """As a layer returns it."""
    if state is None:
        return None
    parts = tuple(part.to(device) for part in state)
    return parts[0] if len(parts) == 1 else parts


def _parent(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
