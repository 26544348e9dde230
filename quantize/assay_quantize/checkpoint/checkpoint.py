"""A checkpoint as its headers describe it: names, dtypes, shapes, places. No weight is read until `Checkpoint.read`.

safetensors headers are parsed here (8 bytes of length, then JSON), because a checkpoint of 1.5 TB is planned from 300 of them
and because everything in them is checked: a truncated shard, tensors that overlap, an index that disagrees with the
files. Imports neither torch nor safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.errors import CheckpointError, PlanError
from assay.file_data import data_of_files, hashes_of_files
from assay.quantities import and_more
from assay.recipes.families import family_of
from assay.recipes.family_names import names_of, split_layer
from assay.records.base import sha256_of
from assay.safe_files import read_json_object
from assay.safetensors_index import INDEX_NAME, SINGLE_NAME, weight_map
from assay_quantize.checkpoint.copied_files import copied_files
from assay_quantize.checkpoint.file_names import CONFIG
from assay_quantize.checkpoint.fused_experts import split_experts
from assay_quantize.checkpoint.headers import TensorHeader, read_shard_header
from assay_quantize.checkpoint.joined_attention import split_attention
from assay_quantize.checkpoint.source_format import (
    check_config_readable,
    find_companions,
    left_out_notes,
    list_notes,
    name_packed,
    squeeze_scales,
    tied_note,
)


@dataclass(frozen=True)
class Checkpoint:
    """Headers of a whole checkpoint.

    location: the folder, or the hub id. folder: None when it is on the hub. tensors: in the order of shards, and in
    a shard in the order of its data. shards: file name -> bytes. files: every other file (config, tokenizer, ...), sorted.
    notes: what was odd but not wrong. revision: the commit on the hub; None for a folder. data: what identifies the data of
    every used shard, of config.json and of every file that is copied (`Plan.source_files`). whole_config: that of the model,
    where `config` and `tensors` have fewer experts, and routers all their rows (`plan/shipped.py`). foreign: of a source that
    is a quantized copy and was named as its own reference, how it is quantized (`native.py`).
    """

    location: str
    folder: Path | None
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    shards: dict[str, int]
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    revision: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    whole_config: Mapping[str, Any] | None = None
    foreign: str | None = None

    @property
    def sha256(self) -> str:
        """Identity of the headers: names, dtypes, shapes and shards of all tensors; not of the data."""
        return sha256_of([[t.name, t.dtype, list(t.shape), t.shard] for _, t in sorted(self.tensors.items())])


# ------------------------------------------------------------------------------------------------ opening a folder
def open_checkpoint(folder: Path, *, allow_quantized: bool = False) -> Checkpoint:
    """The checkpoint in `folder`, from its headers.

    allow_quantized: also open what is quantized already (to verify it). Raises CheckpointError: no such folder, no config,
    no safetensors, index and files that disagree, a damaged header, a source in a form that cannot be read.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; give a folder with config.json and *.safetensors, or a hub id")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give the checkpoint's folder (with config.json and *.safetensors)")
    config = read_json_object(folder, CONFIG)
    if not allow_quantized:
        check_config_readable(str(folder), config)
    entries = sorted(path.name for path in folder.iterdir())
    files = [name for name in entries if name.endswith(".safetensors") or (folder / name).is_file()]
    if not any(name.endswith(".safetensors") for name in files):
        what = "; download the weights into this folder"
        if old := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern)):
            what = (
                f", only {and_more(old)}; convert it first (transformers: "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)), or download the safetensors release"
            )
        raise CheckpointError(f"{folder}: no *.safetensors{what}")
    index = read_json_object(folder, INDEX_NAME, unique_names=True) if INDEX_NAME in entries else None
    made = assemble(
        str(folder), folder, config, index, files, lambda shards: [read_shard_header(folder, shard) for shard in shards]
    )
    made = replace(made, data=data_of_files(folder, made.shards) | hashes_of_files(folder, [CONFIG, *copied_files(folder)]))
    return made if allow_quantized else as_source(made)


def as_source(checkpoint: Checkpoint) -> Checkpoint:
    """The tensors that a plan is made for: packed weights by their own names, fused experts one by one, queries, keys and
    values apart, scales checked.

    Raises CheckpointError for tensors that cannot be read (`source_format.py`, `fused_experts.py`, `joined_attention.py`).
    """
    where, config = checkpoint.location, checkpoint.config
    tensors, squeezed = squeeze_scales(checkpoint.tensors)
    tensors, packed = name_packed(config, tensors)
    tensors, split = split_experts(where, config, tensors)
    tensors, of_attention = split_attention(where, config, tensors)
    unused = find_companions(where, config, tensors).of_activations
    notes = (
        *packed,
        *split,
        *of_attention,
        *squeezed,
        *list_notes(config, tensors),
        *left_out_notes(unused),
        *tied_note(config, tensors),
    )
    return replace(checkpoint, tensors=tensors, notes=(*checkpoint.notes, *notes))


def assemble(
    location: str,
    folder: Path | None,
    config: dict[str, Any],
    index: dict[str, Any] | None,
    files: list[str],
    read_headers: Callable[[list[str]], list[dict[str, TensorHeader]]],
) -> Checkpoint:
    """Headers and index into a checkpoint, whatever they were read from.

    files: names of everything that is there. read_headers(shards): the headers of each, in that order.
    """
    present = [name for name in files if name.endswith(".safetensors")]
    shard_of: dict[str, str] | None = None
    if index is not None:
        shard_of = weight_map(f"{location}: {INDEX_NAME}", index)
        if missing := sorted(set(shard_of.values()) - set(present)):
            names = and_more(missing, " shards")
            raise CheckpointError(f"{location}: {INDEX_NAME} names {names}, not there; complete the download")
    elif present != [SINGLE_NAME]:
        raise CheckpointError(
            f"{location}: holds {and_more(present)} and no {INDEX_NAME}; only a single {SINGLE_NAME} needs no index: "
            "without one vLLM reads every *.safetensors; download the index as well, or move away what is not the model's"
        )
    listed = sorted(set(shard_of.values())) if shard_of is not None else [SINGLE_NAME]
    extra = [name for name in present if name not in set(listed)]
    headers = dict(zip([*listed, *extra], read_headers([*listed, *extra]), strict=True))
    tensors: dict[str, TensorHeader] = {}
    for shard in listed:
        for name, header in headers[shard].items():
            if name in tensors:
                raise CheckpointError(f"{location}: {_twice(name, tensors[name].shard, shard, shard_of or {})}")
            tensors[name] = header
    if shard_of is not None:
        _check_placement(location, shard_of, tensors)
    notes = tuple(_add_extra(location, config, tensors, shard, headers[shard]) for shard in extra)
    used = {header.shard for header in tensors.values()}
    sizes = {shard: max(header.end for header in headers[shard].values()) for shard in sorted(used)}
    others = tuple(name for name in files if name not in {*listed, *extra, INDEX_NAME})
    return Checkpoint(location, folder, config, tensors, sizes, others, notes)


def _twice(name: str, first: str, last: str, shard_of: Mapping[str, str]) -> str:
    """What a tensor in two listed files means: vLLM reads each of them whole, in the order of their names."""
    listed = shard_of.get(name)
    where = "does not list it" if listed is None else f"puts it in {listed}"
    replaced, odd = (
        ("the one of the index", last) if listed == first else (f"that in {first}", first if listed == last else last)
    )
    return (
        f"{name} is in {first} and in {last}, and {INDEX_NAME} {where}; vLLM 0.32 loads whole the files it lists: the copy in "
        f"{last} replaces {replaced}; write {odd} again without it (another download would bring the same files)"
    )


def _add_extra(
    location: str, config: Mapping[str, Any], tensors: dict[str, TensorHeader], shard: str, headers: dict[str, TensorHeader]
) -> str:
    """Take in tensors of a file that the index does not name (GLM-4.7 keeps MTP in mtp.safetensors); returns the note.

    What holds nothing that the model's family has is left out: Mistral's `consolidated.safetensors`, adapters, states of
    optimizers. CheckpointError: a file with tensors of both kinds.
    """
    new = {name: header for name, header in headers.items() if name not in tensors}
    if not new:
        return f"{shard} is not in {INDEX_NAME} and holds nothing new: left out"
    strange = _names_of_no_module(config, new)
    if len(strange) == len(new) or shard.startswith("consolidated"):
        which = f"none of its {len(new)} tensors ({min(new)}, ...) is the model's"
        return f"{shard} is not in {INDEX_NAME}, so vLLM does not read it, and {which}: left out"
    if strange:
        raise CheckpointError(
            f"{location}/{shard}: is not in {INDEX_NAME}, so vLLM does not read it, and holds {strange[0]}, which the model "
            f"lacks, beside {len(new) - len(strange)} tensors that it has; move the file away, or take the model's own"
        )
    tensors |= new
    if twice := len(headers) - len(new):
        return f"{shard} is not in {INDEX_NAME}: its {len(new)} new tensors are taken in, {twice} it repeats are left out"
    return f"{shard} is not in {INDEX_NAME}: its {len(new)} tensors are taken in"


def _names_of_no_module(config: Mapping[str, Any], headers: Iterable[str]) -> list[str]:
    """Names that lie in no module of the model's family, or beside none; empty where the family is not known."""
    try:
        names = names_of(family_of(config))
    except PlanError:
        return []
    of_layers = {rest.partition(".")[0] for rest in (*names.layer, *names.mtp_layer)}
    outside = {name.rpartition(".")[0] for name in (*names.outside, *names.mtp)}

    def is_known(name: str) -> bool:
        at = split_layer(name)
        if at is not None and at.root in (names.layers, names.mtp_layers):
            return at.rest.partition(".")[0] in of_layers
        is_outside = name.rpartition(".")[0] in outside or names.is_beside_mtp_layers(name)
        return is_outside or any(name.startswith(f"{module}.") for module in names.kept)

    return sorted(name for name in headers if not is_known(name))


def _check_placement(where: str, shard_of: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> None:
    """The index and the headers of its shards must hold the same tensors, in the same files."""
    for name, shard in shard_of.items():
        header = tensors.get(name)
        if header is None or header.shard != shard:
            really = "no shard has it" if header is None else f"it is in {header.shard}"
            raise CheckpointError(
                f"{where}: {INDEX_NAME} puts {name} in {shard}, but {really}; download index and shards again"
            )
    unlisted = next((header for name, header in tensors.items() if name not in shard_of), None)
    if unlisted is not None:
        raise CheckpointError(
            f"{where}: {unlisted.shard} holds {unlisted.name}, which {INDEX_NAME} does not list; vLLM loads it all the same; "
            "list it, or write the shard again without it"
        )
