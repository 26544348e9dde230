"""The model of transformers that a stored checkpoint is, and which of its parameters each stored tensor belongs to.

The model is transformers' own class on torch's meta device. Which parameter a stored tensor belongs to is transformers' answer
too (`conversion_mapping.py`, by which `from_pretrained` loads).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from assay.errors import PlanError, QuantizeError
from assay.quantities import and_more
from assay.recipes.families import family_of
from assay.recipes.family_names import names_of
from assay.recipes.text_config import text_of
from assay_quantize.decoding.open_stored import StoredCheckpoint

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


class Placing:
    """Which stored tensors make up the parameters of `model`, one that `hollow_model` built for `stored`.

    name_as_built: what a stored tensor would be called as a part of that model. QuantizeError: the checkpoint lacks one of its
    parameters, or it has no list of decoder layers.
    """

    def __init__(self, stored: StoredCheckpoint, model: Any, name_as_built: Callable[[str], str]) -> None:
        self._stored, self._model = stored, model
        self.base = model.get_decoder()
        layers = getattr(self.base, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise unlike(stored, "it has no list of decoder layers")
        names = {module: name for name, module in model.named_modules()}
        self.layers, self.prefix = list(layers), names[layers]
        """prefix: of the names of the layers."""
        self.embedding, self.head = names[model.get_input_embeddings()], names[model.get_output_embeddings()]
        """Names of these modules."""
        self.sources = self._place(name_as_built)
        """Parameter or buffer of the model -> the stored tensors that make it up."""
        self._tied_head()
        self._check_whole()

    def _place(self, name_as_built: Callable[[str], str]) -> dict[str, list[Source]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        parameters = self._model.state_dict()
        sources: dict[str, list[Source]] = defaultdict(list)
        wrapped, root = self._wrapped_root(), self.prefix.rpartition(".")[0]
        for name in (*(weight.name for weight in self._stored.weights), *self._stored.others):
            own = name_as_built(name)
            own = f"{root}.{own.removeprefix(wrapped)}" if wrapped and own.startswith(wrapped) else own
            target, pattern = rename_source_key(own, renamings, converters, self._model.base_model_prefix, parameters)
            if target in parameters:
                sources[target].append(Source(name) if pattern is None else self._part_of(name, pattern, by_pattern[pattern]))
            elif (expert := _EXPERT.fullmatch(target)) is not None:
                self._add_expert(name, expert, parameters, sources)  # else it is of a tower or an MTP block
        return sources

    def _wrapped_root(self) -> str | None:
        """What a multimodal checkpoint has in front of the names of its language model; None: it is none."""
        if text_of(self._stored.config) is self._stored.config or self.base is not self._model.base_model:
            return None  # of the wrapper's class names are the checkpoint's
        try:
            return names_of(family_of(self._stored.config)).layers.rpartition(".")[0] + "."
        except PlanError:
            return None

    def _add_expert(
        self, name: str, expert: re.Match[str], parameters: Mapping[str, Tensor], sources: dict[str, list[Source]]
    ) -> None:
        """One expert's weight where checkpoints have all of them in one tensor, as transformers does, and this one has not."""
        target = f"{expert['experts']}.{_STACKED_AS[expert['projection']]}"
        if target not in parameters:
            return
        rows, columns = self._stored.weight(name).shape
        whole = parameters[target].shape
        share = 2 if target.endswith("gate_up_proj") else 1
        if tuple(whole[1:]) != (share * rows, columns):
            raise unlike(self._stored, f"{name} is [{rows}, {columns}], and transformers holds its experts as {list(whole)}")
        first_row = rows if expert["projection"] in ("up_proj", "w3") else 0
        sources[target].append(Source(name, int(expert["number"]), first_row))

    def _part_of(self, name: str, pattern: str, converter: Any) -> Source:
        """One expert's weight in the parameter that holds all of them."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        operations = [type(operation) for operation in converter.operations]
        if operations not in ([MergeModulelist], [MergeModulelist, Concatenate]):
            named = ", ".join(operation.__name__ for operation in operations)
            raise unlike(self._stored, f"{name} becomes a parameter of transformers by {named}")
        expert = re.search(r"\.(\d+)\.[^.]+(?:\.weight)?$", name)
        if expert is None:
            raise unlike(self._stored, f"{name} has no number of an expert")
        rows = self._stored.weight(name).shape[0]
        return Source(name, int(expert[1]), rows * converter.source_patterns.index(pattern))

    def _tied_head(self) -> None:
        """A head that is the embedding is stored once."""
        head = f"{self.head}.weight"
        if head not in self.sources and getattr(self.base.config, "tie_word_embeddings", False):
            self.sources[head] = self.sources[f"{self.embedding}.weight"]

    def _check_whole(self) -> None:
        names = {
            name for name, module in self._model.named_modules() if module in (self.base, self._model.get_output_embeddings())
        }
        needed = [name for name in self._model.state_dict() if any(name.startswith(f"{root}.") for root in names)]
        lacking = sorted(name for name in needed if name not in self.sources)
        if lacking:
            raise unlike(self._stored, f"it stores nothing for {and_more(lacking)}")


def unlike(stored: StoredCheckpoint, reason: str) -> QuantizeError:
    """What is raised of a checkpoint that is not run layer by layer."""
    return QuantizeError(f"{stored.location}: cannot be run layer by layer: {reason}")


def hollow_model(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
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
