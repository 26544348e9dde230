"""A checkpoint against the base that it was made from: files beside the weights, config, kept tensors, errors of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay.recipes.families import unquantized
from assay_quantize.checkpoint.stored import PLAIN
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.file_checks import TOKENIZERS, chat_template_of
from assay_quantize.inspection.structure_checks import SKIPPED_BY_VLLM, logical_names
from assay_quantize.inspection.subject import Subject

OF_NO_MODEL = frozenset({
    "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures", "auto_map", "model_type",
    "compression_config", "_attn_implementation", "_attn_implementation_autoset", "num_mtp_layers", "num_nextn_predict_layers",
    "mtp_num_hidden_layers", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id",
})  # fmt: skip
"""Keys of config.json that say nothing of what the model computes, or that another check looks at."""
ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""Where transformers 4 and 5 say how rotary embeddings are scaled."""
OF_GENERATION = ("eos_token_id", "bos_token_id", "pad_token_id", "temperature", "top_p", "top_k", "do_sample")
_NO_PART_OF_TOKENIZER = frozenset({"truncation", "padding", "version"})
WIDTH = {"bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64}


def _source(subject: Subject) -> Subject:
    assert subject.source is not None, "these checks run where there is one"
    return subject.source


def tokenizer_unlike_base(subject: Subject) -> Iterator[Place]:
    source = _source(subject)
    for name in TOKENIZERS:
        if name not in source.files.names:
            continue
        if name not in subject.files.names:
            if not subject.files.names & set(TOKENIZERS):
                yield Place(name, "is in the base, and not here")
            continue
        if name in source.json and name in subject.json:
            if (part := tokenizer_difference(source.json[name], subject.json[name])) is not None:
                yield Place(name, f"its {part} is not the base's")
        elif _bytes(source, name) != _bytes(subject, name):
            yield Place(name, "is not the base's, byte for byte")


def tokenizer_difference(base: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """The first part of a tokenizer.json that differs; merges may be written in two ways."""
    for key in sorted((base.keys() | own.keys()) - _NO_PART_OF_TOKENIZER):
        if _plain_merges(base.get(key)) != _plain_merges(own.get(key)):
            return key
    return None


def _plain_merges(part: Any) -> Any:
    if not isinstance(part, dict) or not isinstance(part.get("merges"), list):
        return part
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in part["merges"]]
    known = {key: value for key, value in part.items() if value is not None and value is not False}
    return {**known, "merges": merges}


def _bytes(subject: Subject, name: str) -> bytes | None:
    try:
        return subject.files.small(name)
    except CheckpointError:
        return None


def chat_template_unlike_base(subject: Subject) -> Iterator[Place]:
    base, own = chat_template_of(_source(subject)), chat_template_of(subject)
    if base is not None and own is None:
        yield Place("chat_template.jinja", "the base has a chat template, and there is none here")
    elif base is not None and base != own:
        yield Place("chat_template.jinja", "the chat template is not the base's")


def generation_config_unlike_base(subject: Subject) -> Iterator[Place]:
    name = "generation_config.json"
    base, own = _source(subject).json.get(name), subject.json.get(name)
    if base is None:
        return
    if own is None:
        if name not in subject.files.names:
            told = ", ".join(f"{key} {shown(base[key], 40)}" for key in OF_GENERATION if base.get(key) is not None)
            yield Place(name, f"is in the base ({told}), and not here")
        return
    for key in OF_GENERATION:
        if base.get(key) != own.get(key):
            yield Place(f"{name}: {key}", f"is {shown(own.get(key), 40)}; the base has {shown(base.get(key), 40)}")


def config_unlike_base(subject: Subject) -> Iterator[Place]:
    yield from _config_differences(unquantized(_source(subject).config), unquantized(subject.config), "config.json")


def _config_differences(base: Mapping[str, Any], own: Mapping[str, Any], where: str) -> Iterator[Place]:
    for key in sorted(base.keys() - OF_NO_MODEL):
        own_value, base_value = own.get(key), base[key]
        if own_value == base_value or (key not in own and base_value in (None, False, [], {})):
            continue
        if isinstance(own_value, dict) and isinstance(base_value, dict):
            yield from _config_differences(base_value, own_value, f"{where}: {key}")
        elif key in own:
            yield Place(f"{where}: {key}", f"is {shown(own_value, 60)}; the base has {shown(base_value, 60)}")
    yield from _rope_lost(base, own, where)


def _rope_lost(base: Mapping[str, Any], own: Mapping[str, Any], where: str) -> Iterator[Place]:
    """Scaled rotary embeddings of one side of which the other has no word: no architecture scales them by default."""
    for key in ROPE_KEYS:
        if _is_scaled(base.get(key)) and not any(name in own for name in ROPE_KEYS):
            yield Place(f"{where}: {key}", f"is absent; the base has {shown(base[key], 60)}")
        if _is_scaled(own.get(key)) and not any(name in base for name in ROPE_KEYS):
            yield Place(f"{where}: {key}", f"is {shown(own[key], 60)}; the base has none")


def _is_scaled(rope: object) -> bool:
    return isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) not in (None, "default")


def tensor_lost(subject: Subject) -> Iterator[Place]:
    if not subject.declared.is_served:
        return  # other engines have names of their own
    for name in sorted(logical_names(_source(subject)) - logical_names(subject)):
        is_scale = name.rpartition(".")[2] in ("k_scale", "v_scale")
        if not is_scale and not SKIPPED_BY_VLLM.fullmatch(name) and not _is_told_elsewhere(subject, name):
            yield Place(name, "is in the base, and nothing of it is stored here")


def _is_told_elsewhere(subject: Subject, name: str) -> bool:
    """A lost MTP block is a defect of its own."""
    return subject.is_in_mtp(name.rpartition(".")[0]) or _source(subject).is_in_mtp(name.rpartition(".")[0])


def narrowed(subject: Subject) -> Iterator[Place]:
    """Stored plain in fewer bits than in the base; routers' biases have a defect of their own."""
    base = _source(subject)
    for name, header in subject.tensors.items():
        other = base.tensors.get(name)
        if other is None or other.dtype not in PLAIN or header.dtype not in PLAIN or name.endswith("_bias"):
            continue
        if WIDTH[PLAIN[header.dtype]] < WIDTH[PLAIN[other.dtype]]:
            yield Place(name, f"is {header.dtype}; the base has {other.dtype}")


def shape_unlike_base(subject: Subject) -> Iterator[Place]:
    base = _source(subject)
    for module, weight in subject.stored.weights.items():
        other = base.stored.weights.get(module)
        if other is None or weight.shape is None or other.shape is None or len(weight.shape) != len(other.shape):
            continue
        if weight.shape != other.shape:
            yield Place(module, f"stands for {list(weight.shape)}; the base has {list(other.shape)}")


def kept_tensor_differs(subject: Subject) -> Iterator[Place]:
    return (Place(name, what) for name, what in subject.values.differing.items())


def error_beyond_format(subject: Subject) -> Iterator[Place]:
    return (Place(name, what) for name, what in subject.values.errors.items())
