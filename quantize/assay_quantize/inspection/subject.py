"""What is inspected: the files of a checkpoint, read as far as headers and small files go, and what they say of each weight."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from assay.errors import CheckpointError, PlanError
from assay.recipes.families import family_of, num_experts
from assay.recipes.family_names import Classified, classify, form_of, names_of, split_layer
from assay.recipes.runtime_names import packed_modules, role_of
from assay.recipes.text_config import count_of, num_hidden_layers, text_of
from assay.safe_files import parse_json_object
from assay.safetensors_index import INDEX_NAME, weight_map
from assay_quantize.checkpoint.declaration import MXFP4_FORMAT, READ_BESIDE
from assay_quantize.checkpoint.file_names import CONFIG
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.stored import StoredTensors, Weight, weights_of
from assay_quantize.formats.vllm_rules import RuntimeModule, runtime_modules
from assay_quantize.inspection.declared import Declared, experts_alone, read_declared
from assay_quantize.inspection.files import Files, Headers

_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What vLLM merges in nearly every architecture; for those that have no family here."""


_WITHOUT_CONFIG = {
    "params.json": "it is in Mistral's own layout; take the release for transformers",
    "adapter_config.json": "it is an adapter; merge it with its base",
    "model_index.json": "it is a pipeline of diffusers, no language model",
}
"""Files of what people take for a checkpoint -> what it is."""


class Counts(NamedTuple):
    """Numbers of one tensor."""

    elements: int
    non_finite: int
    zero: int
    negative: int


@dataclass
class Values:
    """What was read of the data; empty where only headers were.

    scales: of each tensor of scales. scalars: those with one element -> its value. weights: of plain and FP8 weights.
    packed: of tensors that describe codes (zero points, g_idx, weight_shape) what is wrong. differing: tensor -> how it is not
    the base's. errors: weight -> how it is farther from that than its form explains. not_looked_at: why something was not.
    """

    scales: dict[str, Counts] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Counts] = field(default_factory=dict)
    packed: dict[str, str] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    not_looked_at: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Subject:
    """A checkpoint by headers and small files.

    index: tensor -> shard, None: there is none. index_problem: what is wrong with it. shards: of every safetensors file that
    can be read its headers; broken: of the others what is wrong. tensors: what a loader reads: of the files that the index
    names, without an index of all. stored: the same as weights. family: None: assay has none. json: small JSON files that could
    be read; unreadable: of the others what is wrong. renamed: name of the family -> name in the shards, where they differ and
    vLLM renames it; all other fields have the family's. source: the base it is compared with. values: what was read of it.
    """

    files: Files
    config: dict[str, Any]
    index: Mapping[str, str] | None
    index_problem: str | None
    total_size: Any
    shards: Mapping[str, Headers]
    broken: Mapping[str, str]
    tensors: Mapping[str, TensorHeader]
    stored: StoredTensors
    declared: Declared
    family: str | None
    family_problem: str | None
    json: Mapping[str, Mapping[str, Any]]
    unreadable: Mapping[str, str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    source: Subject | None = None
    values: Values = field(default_factory=lambda: Values())

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        return text_of(self.config)

    def number(self, *keys: str) -> int | None:
        """The first of these sizes that the config has; None: it has none, or no number."""
        told = next((self.text[key] for key in keys if self.text.get(key) is not None), None)
        return told if type(told) is int and told > 0 else None

    @functools.cached_property
    def num_layers(self) -> int | None:
        try:
            return num_hidden_layers(self.config)
        except PlanError:
            return None

    @functools.cached_property
    def num_experts(self) -> int | None:
        """By the config; None: it does not say."""
        try:
            if self.family is not None:
                return num_experts(self.family, self.config) or None
            keys = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")
            return next((n for key in keys if (n := count_of(key, self.text.get(key)))), None)
        except PlanError:
            return None

    @functools.cached_property
    def classes(self) -> Mapping[str, Classified]:
        """Module -> what it is; only of names that the family knows."""
        if self.family is None or self.num_layers is None:
            return {}
        found = {}
        for module, weight in self.stored.weights.items():
            try:
                found[module] = classify(self.family, f"{weight.representatives[0]}.weight", self.config)
            except PlanError:
                continue
        return found

    def part(self, weight: Weight) -> str:
        """The role of a weight inside its block, as a family has it; guessed by name where there is none."""
        told = self.classes.get(weight.module)
        return told.part if told is not None else role_of(weight.representatives[0]) or "other"

    def is_bare(self, weight: Weight) -> bool:
        """Whether vLLM builds the module without a quantization config, or can only hold it plain."""
        if weight.module not in self.classes or self.family is None:
            return False
        return form_of(self.family, f"{weight.representatives[0]}.weight", self.config).kind == "bare"

    def role(self, weight: Weight) -> str:
        """`mtp` inside the MTP block, else as `part`."""
        told = self.classes.get(weight.module)
        if told is not None:
            return told.role
        return "mtp" if self.is_in_mtp(weight.module) else self.part(weight)

    def is_in_mtp(self, name: str) -> bool:
        """Whether a tensor or module belongs to an MTP block."""
        if (told := self.classes.get(name)) is not None:
            return told.role == "mtp"
        at = split_layer(f"{name}.")
        if self.num_layers is not None and at is not None and at.layer >= self.num_layers:
            own = "model.layers" if self.family is None else names_of(self.family).layers
            if at.root in (own, "model.layers", "layers"):
                return True
        return any(part.startswith("mtp") or part == "nextn" for part in name.split("."))

    @functools.cached_property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        return _PACKED if self.family is None else packed_modules(self.family)

    @functools.cached_property
    def runtime(self) -> tuple[tuple[RuntimeModule, tuple[Weight, ...]], ...]:
        """vLLM's modules, each with the weights that it is loaded from; of known names only."""
        if self.family is None or self.num_layers is None:
            return ()
        of_name = {
            name: self.stored.weights[module] for module in self.classes for name in self.stored.weights[module].representatives
        }
        names = names_of(self.family)
        towers = tuple(f"{module}." for module in names.kept)  # which of them are asked, no table says
        known = [
            name
            for name in of_name
            if self._is_linear(name, of_name[name]) and not name.startswith(towers) and not names.is_table(f"{name}.weight")
        ]
        made = runtime_modules(self.family, known, self.config)
        return tuple((module, tuple({of_name[n].module: of_name[n] for n in module.members}.values())) for module in made)

    def _is_linear(self, name: str, weight: Weight) -> bool:
        """Whether vLLM applies it as a matrix; a convolution is none."""
        try:
            is_vector = form_of(str(self.family), f"{name}.weight", self.config).kind == "vector"
        except PlanError:
            return False
        return not is_vector and (weight.shape is None or len(weight.shape) == (3 if weight.is_stacked else 2))

    def fused_groups(self) -> Iterator[tuple[str, list[Weight]]]:
        """(name of a fused parameter, its members) of dense layers and of each single expert."""
        groups: dict[str, list[Weight]] = {}
        for module, weight in self.stored.weights.items():
            if (group := self._group(module)) is not None:
                groups.setdefault(group, []).append(weight)
        return ((group, members) for group, members in groups.items() if len(members) > 1)

    def _group(self, module: str) -> str | None:
        if (told := self.classes.get(module)) is not None:
            return told.fused_group
        parent, _, leaf = module.rpartition(".")
        pairs = {**_PACKED, "w13": ("w1", "w3")}
        name = next((name for name, members in pairs.items() if leaf in members), None)
        return None if name is None else f"{parent}.{name}"


def open_subject(files: Files, source: Subject | None = None) -> Subject:
    """Read config, index, headers and small JSON files. CheckpointError: no config that can be read, or no safetensors."""
    raw = files.small(CONFIG)
    if raw is None:
        other = next((f", but {name}: {what}" for name, what in _WITHOUT_CONFIG.items() if name in files.names), "")
        raise CheckpointError(f"{files.location}: has no {CONFIG}{other}; a checkpoint holds {CONFIG} and *.safetensors")
    config = parse_json_object(f"{files.location}: {CONFIG}", raw)
    index, index_problem, total_size = _index(files)
    present = {name for name in files.names if name.endswith(".safetensors")}
    named = set(index.values()) if index is not None else set()
    readable = sorted(present | (set() if files.lists_all else named))
    if not readable:
        old = sorted(name for name in files.names if name.endswith((".gguf", ".bin", ".pt", ".pth")))
        what = f"only {', '.join(old[:3])}" if old else "nothing that holds weights"
        raise CheckpointError(
            f"{files.location}: no *.safetensors, {what}; `assay inspect` reads safetensors, and GGUF without a base"
        )
    shards: dict[str, Headers] = {}
    broken: dict[str, str] = {}
    for shard, headers in files.headers(readable).items():
        if isinstance(headers, CheckpointError):
            broken[shard] = str(headers).removeprefix(f"{files.location}/{shard}: ")
        else:
            shards[shard] = headers
    family, problem = None, None
    try:
        family = family_of(config)
    except PlanError as error:
        problem = str(error).removeprefix("config.json: ")
    renamed = _older_names(family, shards)
    if renamed:
        to_family = {stored: name for name, stored in renamed.items()}
        index = None if index is None else {to_family.get(name, name): shard for name, shard in index.items()}
        shards = {shard: {(new := to_family.get(name, name)): header._replace(name=new) for name, header in headers.items()}
                  for shard, headers in shards.items()}  # fmt: skip
    loaded = [shard for shard in shards if index is None or shard in named]
    tensors = {name: header for shard in loaded for name, header in shards[shard].items()}
    json, unreadable = _small_json(files)
    claims = {name: json[name] for name in READ_BESIDE if name in json}
    claim = read_declared(config, claims, lambda module: False, {}, str)
    stacked = None if family is None else names_of(family).stacked
    stored = weights_of(tensors.values(), claim.bits, stacked, claim.packings)
    fused = _PACKED if family is None else packed_modules(family)
    declared = read_declared(
        config, claims, lambda module: module in stored.weights and not stored.weights[module].is_quantized, fused,
        _mapper(family),
    )  # fmt: skip
    if family is not None and names_of(family).mxfp4_experts_alone and declared.quantization.get("format") == MXFP4_FORMAT:
        declared = experts_alone(declared)
    return Subject(
        files, config, index, index_problem, total_size, shards, broken, tensors, stored, declared, family, problem, json,
        unreadable, renamed, source,
    )  # fmt: skip


def _older_names(family: str | None, shards: Mapping[str, Headers]) -> dict[str, str]:
    """Name of the family -> name in the shards, of tensors that have an older name and are not there under the family's too."""
    names = None if family is None else names_of(family)
    if names is None or not names.older_names:
        return {}
    stored = {name for headers in shards.values() for name in headers}
    return {new: name for name in stored if (new := names.name_of_older(name)) not in stored}


def _mapper(family: str | None) -> Any:
    """How vLLM renames the entries of a list of modules: what stands in front of the layers, and modules outside them."""
    if family is None:
        return str
    names = names_of(family)
    outside = {name.rpartition(".")[0] for name in names.outside}
    roots = {
        key: value
        for key, value in names.runtime.items()
        if names.layers == key or names.layers.startswith(f"{key}.") or key in outside
    }

    def rename(entry: str) -> str:
        entry = names.name_of_older(entry)
        key = next((key for key in roots if entry == key or entry.startswith((f"{key}.", f"{key}*"))), None)
        return entry if key is None else roots[key] + entry.removeprefix(key)

    return rename


def _index(files: Files) -> tuple[Mapping[str, str] | None, str | None, Any]:
    """(tensor -> shard, what is wrong with the index, its total_size)."""
    raw = files.small(INDEX_NAME)
    if raw is None:
        return None, None, None
    try:
        parsed = parse_json_object(INDEX_NAME, raw, unique_names=True)
        metadata = parsed.get("metadata")
        return weight_map(INDEX_NAME, parsed), None, metadata.get("total_size") if isinstance(metadata, dict) else None
    except CheckpointError as problem:
        return None, str(problem).removeprefix(f"{INDEX_NAME}: "), None


def _small_json(files: Files) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    names = (*READ_BESIDE, "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.json",
             "assay_manifest.json")  # fmt: skip
    parsed: dict[str, Mapping[str, Any]] = {}
    unreadable: dict[str, str] = {}
    for name in names:
        try:
            if (raw := files.small(name)) is not None:
                parsed[name] = parse_json_object(name, raw)
        except CheckpointError as problem:
            unreadable[name] = str(problem).removeprefix(f"{name}: ").removeprefix(f"{files.location}/{name}: ")
    return parsed, unreadable
