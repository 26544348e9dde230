"""Whether the weights of a checkpoint are the model itself, or a lossy copy of it: a source, or only a candidate.

A quantized checkpoint is a source where its family names the form as native (`native_quantization` in
`recipes/families/NAME.yaml`): INT4 experts of Kimi-K2.5, FP8 blocks of DeepSeek-V3. Whatever else is quantized is compared with
the model that it was made of, never with itself. It is recognised by what assay or another tool left beside the weights, by any
declaration in config.json, and by names and dtypes of the tensors: a declaration that was renamed or deleted changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.errors import AssayError, CheckpointError, PlanError
from assay.recipes.families import family_of
from assay.recipes.family import NativeQuantization
from assay.recipes.family_names import classify, names_of
from assay.recipes.text_config import text_of
from assay.records.manifest import MANIFEST, Manifest, load_manifest
from assay.records.run import folder_name
from assay.safe_files import read_json_object
from assay_quantize.checkpoint.checkpoint import Checkpoint, as_source
from assay_quantize.checkpoint.declaration import (
    FILES,
    MODELOPT_CONFIG,
    Declaration,
    declarations,
    declared_block,
    declares_int4,
    declares_mxfp4,
)
from assay_quantize.checkpoint.source_format import FP4, FP8, INT4, block_of, find_companions, released_as
from assay_quantize.checkpoint.stored import CACHE_LEAVES, MARKS, WEIGHT_SCALE_LEAVES

DTYPES = {"fp8": FP8, "int4": INT4, "fp4": FP4}
"""`NativeQuantization.dtype` -> what such weights are called in headers that are read as a source."""
FLOATS = ("BF16", "F16", "F32", "F64")


def foreign_quantization(stored: Checkpoint) -> str | None:
    """How the weights are quantized in a form that is not native to their family, in a clause; None: they are a source.

    stored: the tensors as their files name them (`allow_quantized`).
    """
    config, family = stored.config, _family(stored.config)
    native = () if family is None else _native_to(family, config)
    if MANIFEST in stored.files:
        return _made_here(stored)
    if (file := next((name for name in FILES if name in stored.files), None)) is not None:
        told = _numbers(_contents(stored, file), stored)
        return f"{file} says {told}" if told else f"{file} lies beside it"
    declared = list(declarations(config))
    method = next((str(value.get("quant_method", value.get("quant_algo", "unknown"))) for _, value in declared), None)
    fitting = [form for form in native if form.method == method]
    if declared and (not fitting or (method == "compressed-tensors" and not _is_declared(config, fitting))):
        place, kind = declared[0][0], declared[0][1].get("format")
        named = "" if kind is None else f", format {_short(kind)}"
        where = "" if place == "quantization_config" else f"in {ascii(place)[1:-1]}: "
        numbers = f", {told}" if (told := _numbers(declared[0][1], stored)) else ""
        return f"config.json says {where}quant_method {_short(method)}{named}{numbers}"
    if not fitting:
        return _marked(stored)
    assert family is not None, "nothing is native to no family"
    try:
        source = as_source(stored)
        companions = find_companions(stored.location, config, source.tensors)
    except CheckpointError:
        return None  # damaged, or packed in another way: whoever opens it as a source says so
    block = declared_block(stored.location, config)
    for name, scale in companions.scale_of.items():
        header = source.tensors[name]
        shared = block_of(header.dtype, header.shape, source.tensors[scale].shape, block)
        alike = [form for form in fitting if (DTYPES[form.dtype], form.block) == (header.dtype, shared)]
        if not any(not form.roles or _part(family, name, config) in form.roles for form in alike):
            return f"{name} is {header.dtype} with one scale for {' x '.join(map(str, shared or ('?',)))} values"
    return None


def is_candidate(location: str, how: str, stored: Checkpoint | None = None) -> CheckpointError:
    """The error for a checkpoint that cannot be a source; it names the commands that judge it and say what is wrong with it.

    stored: None: no safetensors.
    """
    family = None if stored is None or MANIFEST in stored.files else _family(stored.config)
    of_family = "" if family is None else f", which is not native to family {family}"
    reference, own = "REFERENCE", shlex.quote(location)
    if stored is None or stored.folder is None:
        judged = "serve it, and judge it by its URL: `assay judge REFERENCE URL`"
    else:
        made_of = _manifest_in(stored)
        if made_of is not None and Path(made_of.source).is_dir():
            reference = shlex.quote(made_of.source)
        judged = f"judge it: `assay judge {reference} {own}`"
    what = "" if reference != "REFERENCE" else ", REFERENCE being the model that it was made of"
    release = released_as(location)
    source = "" if release is None else f"; the source of this model is {release}"
    inspect = "" if stored is None else f"; what is wrong with it: `assay inspect {own}`"
    return CheckpointError(
        f"{location}: is quantized already, a candidate and no source ({how}{of_family}); {judged}{what}{inspect}{source}"
    )


# ------------------------------------------------------------------------------------------------ how it shows
def _made_here(stored: Checkpoint) -> str:
    made = _manifest_in(stored)
    if made is None:
        return f"{MANIFEST} says that assay made it"
    source = Path(made.source)  # records and cards have this clause: no place of the machine that made it
    return f"assay made it from {folder_name(source) if source.is_absolute() else made.source}, as {made.precision}"


def _manifest_in(stored: Checkpoint) -> Manifest | None:
    """None: there is none here, or it cannot be read."""
    try:
        return None if stored.folder is None else load_manifest(stored.folder)
    except AssayError:
        return None


def _contents(stored: Checkpoint, file: str) -> Mapping[str, Any]:
    """Of a file beside config.json; empty: it is on the hub, or cannot be read."""
    try:
        return {} if stored.folder is None else read_json_object(stored.folder, file)
    except AssayError:
        return {}


def _numbers(contents: Mapping[str, Any], stored: Checkpoint) -> str:
    """ModelOpt's algorithm, and what is stored beside it that other formats have not; empty: it names none."""
    stated = Declaration("modelopt", contents, MODELOPT_CONFIG).stated
    if not (algorithm := stated.get("quant_algo")):
        return ""
    told = [f"ModelOpt's {_short(algorithm)}"]
    leaves = [(name.rpartition(".")[2], header) for name, header in stored.tensors.items()]
    if any(leaf in WEIGHT_SCALE_LEAVES and len(header.shape) == 4 for leaf, header in leaves):
        told.append("with scales of blocks in 4-D")
    if count := sum(leaf in CACHE_LEAVES for leaf, _ in leaves):
        told.append(f"with {count:,} scales of the KV cache")
    return " ".join(told)


def _marked(stored: Checkpoint) -> str | None:
    """A tensor that only quantized checkpoints have. Integers that are no weights (expert tables, positions) are none."""
    for name, header in stored.tensors.items():
        leaf = name.rpartition(".")[2]
        is_weight = len(header.shape) > 1 and header.dtype not in FLOATS and leaf == "weight"
        is_narrow = header.dtype[:2] in ("F8", "F6", "F4") or header.dtype in ("I8", "U8", "I4", "U4")
        if is_weight or is_narrow or leaf in MARKS or leaf.endswith("_scale_inv") or "quant_state" in name:
            return f"{name} is {header.dtype}"
    return None


def _family(config: Mapping[str, Any]) -> str | None:
    try:
        return family_of(config)
    except PlanError:
        return None


def _native_to(family: str, config: Mapping[str, Any]) -> Sequence[NativeQuantization]:
    types = (config.get("model_type"), text_of(config).get("model_type"))
    forms = names_of(family).native_quantization
    return [form for form in forms if not form.model_types or any(declared in form.model_types for declared in types)]


def _is_declared(config: Mapping[str, Any], forms: Sequence[NativeQuantization]) -> bool:
    """Whether config.json describes one of these forms of compressed-tensors."""
    dtypes = {form.dtype for form in forms}
    return ("int4" in dtypes and declares_int4(config)) or ("fp4" in dtypes and declares_mxfp4(config))


def _part(family: str, name: str, config: Mapping[str, Any]) -> str | None:
    try:
        return classify(family, name, config).part
    except PlanError:
        return None


def _short(value: Any) -> str:
    return ascii(value)[:60]
