"""Files, index and shards, and what the files beside the weights say: one function for each defect of `defects.py`."""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay.safe_yaml import NotPlainYaml, parse_yaml
from assay.safetensors_index import INDEX_NAME, SINGLE_NAME
from assay_quantize.checkpoint.file_names import WEIGHT_SUFFIXES
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.files import Files
from assay_quantize.inspection.subject import Subject

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model", "spiece.model", "vocab.txt")
TRAINING_FILES = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state)\w*\.(bin|pt|pth)")
LARGE_DIFFERENCE = 0.01
"""Share by which a `total_size` may be off before the index is taken for that of another checkpoint."""


# ------------------------------------------------------------------------------------------------ shards and their index
def shard_unreadable(subject: Subject) -> Iterator[Place]:
    listed = set(subject.index.values()) if subject.index is not None else None
    for shard, what in subject.broken.items():
        if (listed is None or shard in listed) and (shard in subject.files.names or not subject.files.lists_all):
            yield Place(shard, what)


def index_unreadable(subject: Subject) -> Iterator[Place]:
    if subject.index_problem is not None:
        yield Place(INDEX_NAME, subject.index_problem)


def shard_missing(subject: Subject) -> Iterator[Place]:
    if subject.index is None or not subject.files.lists_all:
        return
    names: dict[str, list[str]] = defaultdict(list)
    for name, shard in subject.index.items():
        if shard not in subject.files.names:
            names[shard].append(name)
    for shard, of_shard in sorted(names.items()):
        yield Place(shard, f"is in the index with {len(of_shard)} tensors ({min(of_shard)}, ...), and is not there")


def indexed_tensor_missing(subject: Subject) -> Iterator[Place]:
    for name, shard in (subject.index or {}).items():
        if shard in subject.shards and name not in subject.shards[shard]:
            elsewhere = subject.tensors.get(name)
            where = f"{elsewhere.shard} has it" if elsewhere is not None else "no shard has it"
            yield Place(name, f"is in {shard} by the index; {where}")


def unindexed_tensor(subject: Subject) -> Iterator[Place]:
    if subject.index is None:
        return
    for name, header in subject.tensors.items():
        if name not in subject.index:
            yield Place(name, f"is in {header.shard}, and the index does not name it")


def tensor_twice(subject: Subject) -> Iterator[Place]:
    listed = set(subject.index.values()) if subject.index is not None else set(subject.shards)
    holders: dict[str, list[str]] = defaultdict(list)
    for shard in sorted(listed & subject.shards.keys()):
        for name in subject.shards[shard]:
            holders[name].append(shard)
    for name, shards in holders.items():
        if len(shards) > 1:
            meant = (subject.index or {}).get(name)
            yield Place(name, f"is in {' and in '.join(shards)}" + (f"; the index means {meant}" if meant else ""))


def shard_not_in_index(subject: Subject) -> Iterator[Place]:
    if subject.index is None:
        return
    for shard in sorted(subject.shards.keys() - set(subject.index.values())):
        new = [name for name in subject.shards[shard] if name not in subject.index and _is_of_model(name, subject)]
        if new:
            yield Place(shard, f"holds {len(new)} tensors that the index does not name ({min(new)}, ...)")


def _is_of_model(name: str, subject: Subject) -> bool:
    """Whether a tensor is called as those of the index are, or is of an MTP block: not of another format of the whole model."""
    roots = {other.split(".")[0] for other in (subject.index or {})}
    return name.split(".")[0] in roots or subject.is_in_mtp(name.rpartition(".")[0])


def extra_weights(subject: Subject) -> Iterator[Place]:
    named = set(subject.index.values()) if subject.index is not None else set()
    new = {place.where for place in shard_not_in_index(subject)}
    for name in sorted(subject.files.names):
        suffix = name[name.rfind(".") :] if "." in name else ""
        if suffix not in WEIGHT_SUFFIXES or TRAINING_FILES.fullmatch(name) or subject.shards.get(name) == {}:
            continue
        if suffix != ".safetensors":
            yield Place(name, "holds weights in another format, beside the shards")
        elif subject.index is not None and name not in named | new:
            yield Place(name, "holds weights, and the index names none of them")
        elif subject.index is None and name != SINGLE_NAME and SINGLE_NAME in subject.files.names:
            yield Place(name, f"lies beside {SINGLE_NAME}, without an index that says what is in it")


def total_size(subject: Subject) -> Iterator[Place]:
    if (off := _size_difference(subject)) is not None and off[0] >= LARGE_DIFFERENCE:
        yield Place(INDEX_NAME, off[1])


def total_size_off(subject: Subject) -> Iterator[Place]:
    if (off := _size_difference(subject)) is not None and off[0] < LARGE_DIFFERENCE:
        yield Place(INDEX_NAME, off[1])


def _size_difference(subject: Subject) -> tuple[float, str] | None:
    """(share by which the index is off, in words); None: it is not, says nothing, or not all shards can be read."""
    told, num_bytes = subject.total_size, sum(header.num_bytes for header in subject.tensors.values())
    if subject.broken or not num_bytes or told is None or any(shard_missing(subject)):
        return None
    if type(told) not in (int, float):
        return 1.0, f"its total_size is {shown(told, 40)}, which is no number of bytes"
    if told == num_bytes:
        return None
    return abs(told - num_bytes) / num_bytes, f"says total_size {told:,}; the shards hold {num_bytes:,} bytes"


def index_absent(subject: Subject) -> Iterator[Place]:
    shards = sorted(name for name in subject.shards if name.startswith("model"))
    if subject.index is None and subject.index_problem is None and shards not in ([], [SINGLE_NAME]) and len(shards) > 1:
        yield Place(INDEX_NAME, f"is missing, and there are {len(shards)} shards")


def file_unreadable(subject: Subject) -> Iterator[Place]:
    for name, what in subject.unreadable.items():
        yield Place(name, what)


# ------------------------------------------------------------------------------------------------ beside the weights
def tokenizer_absent(subject: Subject) -> Iterator[Place]:
    if not subject.files.names & set(TOKENIZERS) and not any(name.endswith(".tiktoken") for name in subject.files.names):
        yield Place("tokenizer.json", "is not there, nor any other tokenizer")


def chat_template_absent(subject: Subject) -> Iterator[Place]:
    if not any(tokenizer_absent(subject)) and chat_template_of(subject) is None:
        yield Place("chat_template.jinja", "is not there, and tokenizer_config.json has no chat_template")


def chat_templates_folder(subject: Subject) -> Iterator[Place]:
    if "additional_chat_templates" in subject.files.folders:
        yield Place("additional_chat_templates", "holds named templates")


def licence_absent(subject: Subject) -> Iterator[Place]:
    card = card_metadata(subject.files)
    if card is not None and not card.get("license"):
        yield Place("README.md", "has no `license` in its front matter")


def base_model_absent(subject: Subject) -> Iterator[Place]:
    card = card_metadata(subject.files)
    if card is not None and not card.get("base_model") and subject.declared.method is not None:
        yield Place("README.md", "has no `base_model` in its front matter")


def card_metadata(files: Files) -> Mapping[str, Any] | None:
    """Front matter of the model card; empty where it has none that can be read, None where there is no card."""
    try:
        raw = files.small("README.md")
    except CheckpointError:
        return None
    if raw is None:
        return None
    match = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", raw.decode(errors="replace"), re.DOTALL)
    if match is None:
        return {}
    try:
        parsed = parse_yaml(match[1])
    except NotPlainYaml:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def chat_template_of(subject: Subject) -> str | None:
    """The chat template as vLLM takes it; None: there is none."""
    with contextlib.suppress(CheckpointError):
        if (raw := subject.files.small("chat_template.jinja")) is not None:
            return raw.decode(errors="replace").strip()
    told = subject.json.get("chat_template.json", {}).get("chat_template")
    told = told or subject.json.get("tokenizer_config.json", {}).get("chat_template")
    if isinstance(told, list):  # named templates
        return json.dumps(told, sort_keys=True)
    return told.strip() if isinstance(told, str) else None
