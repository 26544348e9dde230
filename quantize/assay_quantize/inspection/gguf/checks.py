"""Files, metadata, names, shapes, types and values of GGUF files: one function for each defect of `defects.py`."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from assay.foreign_text import shown
from assay_quantize.decoding.gguf_header import GgufTensor
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.file_checks import card_metadata
from assay_quantize.inspection.gguf.model import NEXTN, GgufModel, Piece, is_plain
from assay_quantize.inspection.gguf_names import SPLIT
from assay_quantize.inspection.structure_checks import ALIKE, SAME_IN_MOST, ranges
from assay_quantize.inspection.subject import Counts

EXPERT_STACKS = ("ffn_up_exps.weight", "ffn_down_exps.weight")
"""What a block with a router cannot do without; `experts_missing` says so."""


# ------------------------------------------------------------------------------------------------ files
def shard_unreadable(model: GgufModel) -> Iterator[Place]:
    for name, what in model.broken.items():
        yield Place(name, what)
    for name, header in model.headers.items():
        if behind := list(header.behind_the_end()):
            first = shown(min(behind, key=lambda tensor: tensor.begin).name, 80)
            yield Place(name, f"ends at byte {header.num_bytes:,}; {len(behind)} tensors lie behind it ({first}, ...)")


def shard_missing(model: GgufModel) -> Iterator[Place]:
    split = SPLIT.fullmatch(model.names[0])
    told = max((header.count("split.count") or 0 for header in model.headers.values()), default=0)
    count = max(told, int(split["count"]) if split else 0)
    if split is None or len(model.names) >= count:
        return
    there = {int(match["number"]) for name in model.names if (match := SPLIT.fullmatch(name)) is not None}
    absent = [number for number in range(1, min(count, 99_999) + 1) if number not in there]
    yield Place(f"{shown(split['stem'])}-*-of-{split['count']}.gguf", f"part {ranges(absent)} of {count} is not there")


def split_name(model: GgufModel) -> Iterator[Place]:
    for name, header in model.headers.items():
        number, count, split = header.count("split.no") or 0, header.count("split.count") or 0, SPLIT.fullmatch(name)
        if split is None and count > 1:
            yield Place(name, f"is part {number + 1} of {count} by split.no and split.count, and has another name")
        if split is not None and (number + 1, max(count, 1)) != (int(split["number"]), int(split["count"])):
            yield Place(name, f"has split.no {number} and split.count {count}")


def split_tensors(model: GgufModel) -> Iterator[Place]:
    told = model.main.count("split.tensors.count")
    held = sum(len(header.tensors) for header in model.headers.values())
    if told is not None and told != held and not model.broken and not any(shard_missing(model)) and not any(split_name(model)):
        yield Place(model.main.shard, f"says split.tensors.count {told:,}; the files hold {held:,} tensors")


def tensor_twice(model: GgufModel) -> Iterator[Place]:
    holders: dict[str, list[str]] = defaultdict(list)
    for header in model.headers.values():
        for tensor in header.tensors:
            holders[tensor.name].append(tensor.shard)
    for name, shards in holders.items():
        if len(shards) > 1:
            yield Place(shown(name), f"is in {' and in '.join(shards[:3])}")


def tensors_overlap(model: GgufModel) -> Iterator[Place]:
    for header in model.headers.values():
        ordered = sorted(header.tensors, key=lambda tensor: tensor.begin)
        for tensor, following in itertools.pairwise(ordered):
            if tensor.end > following.begin:
                short = tensor.end - following.begin
                yield Place(shown(tensor.name), f"takes {short:,} bytes of {shown(following.name)}, which begins inside it")


def tensor_type_unknown(model: GgufModel) -> Iterator[Place]:
    for name, tensor in model.tensors.items():
        if tensor.kind.startswith("type "):
            yield Place(shown(name), f"is stored as {tensor.kind}")


# ------------------------------------------------------------------------------------------------ metadata
def key_missing(model: GgufModel) -> Iterator[Place]:
    if model.architecture is None:
        if not model.broken and not any(shard_missing(model)):  # else it is what is missing that says it
            yield Place("general.architecture", "is not there")
        return
    needed = ["block_count", "context_length", "embedding_length"]
    if any("ffn_gate_inp.weight" in names for names in model.blocks.values()):
        needed += ["expert_count", "expert_used_count"]
    for name in needed:
        if model.key(name) not in model.main.values:
            yield Place(shown(model.key(name)), "is not there")


def tokenizer_absent(model: GgufModel) -> Iterator[Place]:
    if model.architecture is not None and model.main.text("tokenizer.ggml.model") is None:
        yield Place("tokenizer.ggml.model", "is not there")


def pre_tokenizer_absent(model: GgufModel) -> Iterator[Place]:
    if model.main.text("tokenizer.ggml.model") == "gpt2" and model.main.text("tokenizer.ggml.pre") is None:
        yield Place("tokenizer.ggml.pre", "is not there, and the tokenizer is one of byte pairs")


def gating_absent(model: GgufModel) -> Iterator[Place]:
    """DeepSeek's architecture: a bias by which experts are chosen goes with sigmoids (DeepSeek-V3, Kimi, GLM-4.7-Flash)."""
    name = model.key("expert_gating_func")
    has_bias = any("exp_probs_b.bias" in names for names in model.blocks.values())
    if model.architecture == "deepseek2" and has_bias and name not in model.main.values:
        yield Place(name, "is not there, and experts are chosen with a bias, which goes with sigmoids")


def special_token_outside(model: GgufModel) -> Iterator[Place]:
    tokens = model.num_tokens
    for key in (f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")):
        value = model.main.values.get(key)
        if tokens is not None and type(value) is int and not 0 <= value < tokens:
            yield Place(key, f"is {value}; the vocabulary has {tokens:,} tokens")


def chat_template_absent(model: GgufModel) -> Iterator[Place]:
    told = any(key.startswith("tokenizer.chat_template") for key in (*model.main.values, *model.main.counts))
    if model.architecture is not None and not told:
        yield Place("tokenizer.chat_template", "is not there")


def licence_absent(model: GgufModel) -> Iterator[Place]:
    told = model.main.text("general.license") or (card_metadata(model.files) or {}).get("license")
    if model.architecture is not None and not told:
        yield Place("general.license", "is not there")


def base_model_absent(model: GgufModel) -> Iterator[Place]:
    told = any(key.startswith(("general.base_model.0.", "general.source.")) for key in model.main.values)
    is_quantized = not all(is_plain(tensor) for tensor in model.tensors.values())
    told = told or bool((card_metadata(model.files) or {}).get("base_model"))
    if model.architecture is not None and is_quantized and not told:
        yield Place("general.base_model.0.repo_url", "is not there")


# ------------------------------------------------------------------------------------------------ names
def layers_missing(model: GgufModel) -> Iterator[Place]:
    absent = [number for number in model.trunk if number not in model.blocks]
    if absent and not model.is_draft:
        yield Place(f"block {ranges(absent)}", f"no file has a tensor of it; {model.key('block_count')} is {model.num_blocks}")


def unknown_tensor(model: GgufModel) -> Iterator[Place]:
    """Of blocks behind the last; `mtp_undeclared` says so of MTP blocks."""
    if model.num_blocks is None:
        return
    for number, names in model.blocks.items():
        if number >= model.num_blocks and number not in model.mtp_blocks:
            yield Place(f"block {number}", f"has {len(names)} tensors; {model.key('block_count')} is {model.num_blocks}")


def tensors_missing(model: GgufModel) -> Iterator[Place]:
    for number, name, count in _lacking(model):
        if number not in model.mtp_blocks and name not in EXPERT_STACKS:
            yield Place(f"blk.{number}.{shown(name)}", f"is missing; {count} like blocks have it")
    yield from _missing_outside(model)


def _lacking(model: GgufModel) -> Iterator[tuple[int, str, int]]:
    """(block, name behind its number, how many like blocks have it)."""
    for numbers in _alike(model):
        counted = Counter(name for number in numbers for name in model.blocks[number] if not name.startswith(NEXTN))
        for name, count in sorted(counted.items()):
            if SAME_IN_MOST * len(numbers) < count < len(numbers):
                yield from ((number, name, count) for number in numbers if name not in model.blocks[number])


def _alike(model: GgufModel) -> list[list[int]]:
    """Blocks that are made of the same, but for a few names."""
    groups: list[tuple[tuple[object, ...], set[str], list[int]]] = []
    for number in model.blocks:
        if number not in model.trunk and number not in model.mtp_blocks:
            continue
        names = {name for name in model.blocks[number] if not name.startswith(NEXTN)}
        kind = _kind(model, number, names)
        for of_group, those, numbers in groups:
            if of_group == kind and len(names & those) >= ALIKE * len(names | those):
                numbers.append(number)
                break
        else:
            groups.append((kind, names, [number]))
    return [numbers for _, _, numbers in groups]


def _kind(model: GgufModel, number: int, names: set[str]) -> tuple[object, ...]:
    """What a block is made of, coarsely, and what the metadata say of it alone: its window, its number of heads.

    Gemma 4's global layers store no values of their own, and its last ones share their keys.
    """
    marks = ("_exps.", "ssm_", "indexer.", "attn_")
    made_of = tuple(any(mark in name for name in names) for mark in marks)
    lengths = (model.num_blocks, len(model.trunk))
    own = tuple(
        value[number]
        for key, value in sorted(model.main.values.items())
        if isinstance(value, tuple) and len(value) in lengths and key.startswith(model.key("")) and number < len(value)
    )
    shared = model.count("attention.shared_kv_layers") or 0
    return (*made_of, *own, number >= (model.num_blocks or 0) - shared)


def _missing_outside(model: GgufModel) -> Iterator[Place]:
    from gguf import MODEL_TENSOR, MODEL_TENSORS

    known = MODEL_TENSORS.get(architecture_of(model), ())
    if MODEL_TENSOR.TOKEN_EMBD in known and "token_embd.weight" not in model.tensors:
        yield Place("token_embd.weight", "is in no file")
    # early files of LFM2 have their last norm under the other name
    if MODEL_TENSOR.OUTPUT_NORM in known and not model.tensors.keys() & {"output_norm.weight", "token_embd_norm.weight"}:
        yield Place("output_norm.weight", "is in no file")


def architecture_of(model: GgufModel) -> Any:
    """`gguf.MODEL_ARCH`; None: the package knows none of that name."""
    from gguf import MODEL_ARCH_NAMES

    return next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == model.architecture), None)


# ------------------------------------------------------------------------------------------------ experts
def _stacks(model: GgufModel) -> Iterator[tuple[int, str, GgufTensor]]:
    """(block, name, tensor) of weights of all experts."""
    for number, names in model.blocks.items():
        for name, tensor in names.items():
            if name.endswith("_exps.weight") and len(tensor.shape) == 3:
                yield number, f"blk.{number}.{name}", tensor


def experts_not_stacked(model: GgufModel) -> Iterator[Place]:
    for number, names in model.blocks.items():
        alone = [name for name in names if name.startswith("ffn_") and name.split(".")[1].isdigit()]
        if alone:
            yield Place(f"block {number}", f"has {len(alone)} weights of single experts (blk.{number}.{min(alone)}, ...)")


def experts_missing(model: GgufModel) -> Iterator[Place]:
    yield from _experts(model, in_mtp=False)


def mtp_experts_missing(model: GgufModel) -> Iterator[Place]:
    yield from _experts(model, in_mtp=True)


def _experts(model: GgufModel, *, in_mtp: bool) -> Iterator[Place]:
    experts = model.count("expert_count")
    for number, name, tensor in _stacks(model):
        if experts is not None and tensor.shape[0] != experts and (number in model.mtp_blocks) == in_mtp:
            yield Place(name, f"holds {tensor.shape[0]} experts; {model.key('expert_count')} is {experts}")
    alone = {place.where for place in experts_not_stacked(model)}
    for number, names in model.blocks.items():
        if "ffn_gate_inp.weight" not in names or (number in model.mtp_blocks) != in_mtp or f"block {number}" in alone:
            continue
        fused = "ffn_gate_up_exps.weight" in names
        lacking = [name for name in EXPERT_STACKS if name not in names and not (fused and name == EXPERT_STACKS[0])]
        if lacking:
            yield Place(f"block {number}", f"has a router, and no {' and no '.join(lacking)}")


def router_rows(model: GgufModel) -> Iterator[Place]:
    experts = model.count("expert_count")
    for number, names in model.blocks.items():
        for name, what in (("ffn_gate_inp.weight", "rows"), ("exp_probs_b.bias", "values")):
            tensor = names.get(name)
            if experts and tensor is not None and tensor.shape and tensor.shape[0] != experts:
                yield Place(f"blk.{number}.{name}", f"has {tensor.shape[0]} {what}; {model.key('expert_count')} is {experts}")


def router_quantized(model: GgufModel) -> Iterator[Place]:
    for number, names in model.blocks.items():
        router = names.get("ffn_gate_inp.weight")
        if router is not None and not is_plain(router):
            yield Place(f"blk.{number}.ffn_gate_inp.weight", f"is {router.kind}")


def router_bias_in_16_bits(model: GgufModel) -> Iterator[Place]:
    for number, names in model.blocks.items():
        bias = names.get("exp_probs_b.bias")
        if bias is not None and bias.kind != "F32":
            yield Place(f"blk.{number}.exp_probs_b.bias", f"is {bias.kind}")


def dense_layers(model: GgufModel) -> Iterator[Place]:
    dense = model.count("leading_dense_block_count")
    if dense is None or any((model.count(key) or 1) > 1 for key in ("interleave_moe_layer_step", "moe_every_n_layers")):
        return
    told = f"{model.key('leading_dense_block_count')} is {dense}"
    for number in model.trunk:
        names = model.blocks.get(number, {})
        if number < dense and "ffn_gate_inp.weight" in names:
            yield Place(f"block {number}", f"has experts; {told}")
        elif number >= dense and "ffn_down.weight" in names and "ffn_gate_inp.weight" not in names:
            yield Place(f"block {number}", f"has no experts; {told}")


# ------------------------------------------------------------------------------------------------ shapes
def vocabulary_rows(model: GgufModel) -> Iterator[Place]:
    tokens = model.num_tokens
    for name in ("token_embd.weight", "output.weight"):
        tensor = model.tensors.get(name)
        if tokens is not None and tensor is not None and tensor.shape and tensor.shape[0] != tokens:
            yield Place(name, f"has {tensor.shape[0]:,} rows; the vocabulary has {tokens:,} tokens")


def width_unlike_metadata(model: GgufModel) -> Iterator[Place]:
    hidden, inner = model.count("embedding_length"), model.count("expert_feed_forward_length")
    expected: list[tuple[str, GgufTensor, str, int | None, int]] = []
    if (embedding := model.tensors.get("token_embd.weight")) is not None:
        expected.append((embedding.name, embedding, "embedding_length", hidden, -1))
    for number, names in model.blocks.items():
        if (router := names.get("ffn_gate_inp.weight")) is not None:
            expected.append((f"blk.{number}.ffn_gate_inp.weight", router, "embedding_length", hidden, -1))
    for _, name, tensor in _stacks(model):
        is_down = "_down_" in name
        if model.count("moe_latent_size") is None:  # experts between narrower projections
            expected.append((name, tensor, "embedding_length", hidden, -2 if is_down else -1))
        size = inner * 2 if inner is not None and "_gate_up_" in name else inner
        expected.append((name, tensor, "expert_feed_forward_length", size, -1 if is_down else -2))
    for name, tensor, key, size, axis in expected:
        if size is not None and len(tensor.shape) >= -axis and tensor.shape[axis] != size:
            yield Place(name, f"is {list(tensor.shape)}; {model.key(key)} is {model.count(key)}")


# ------------------------------------------------------------------------------------------------ MTP
def mtp_absent(model: GgufModel) -> Iterator[Place]:
    if model.declared_mtp and not model.mtp_blocks:
        yield Place(model.key("nextn_predict_layers"), f"is {model.declared_mtp}, and no file has a tensor of an MTP block")


def mtp_undeclared(model: GgufModel) -> Iterator[Place]:
    if model.architecture is not None and len(model.mtp_blocks) > (model.declared_mtp or 0):
        told = "is not there" if model.declared_mtp is None else f"is {model.declared_mtp}"
        what = f"MTP block; {model.key('nextn_predict_layers')} {told}"
        yield Place(f"block {ranges(list(model.mtp_blocks))}", what)


def mtp_incomplete(model: GgufModel) -> Iterator[Place]:
    for number in model.mtp_blocks:
        names = model.blocks[number]
        joined = "nextn.eh_proj.weight" in names or {"nextn.e_proj.weight", "nextn.h_proj.weight"} <= set(names)
        lacking = [] if joined else ["nextn.eh_proj.weight"]
        lacking += [name for name in ("nextn.enorm.weight", "nextn.hnorm.weight") if name not in names]
        for name in lacking:
            yield Place(f"blk.{number}.{name}", "is missing")
        for part in ("attn_", "ffn_"):
            if not any(name.startswith(part) for name in names):
                yield Place(f"block {number}", f"has no {part}* weights")
    for number, name, count in _lacking(model):
        if number in model.mtp_blocks and name not in EXPERT_STACKS:
            yield Place(f"blk.{number}.{shown(name)}", f"is missing; {count} like blocks have it")


# ------------------------------------------------------------------------------------------------ values
def weight_not_finite(model: GgufModel) -> Iterator[Place]:
    for tensor, pieces in _by_tensor(model).items():
        bad = {piece: counts for piece, counts in pieces.items() if counts.non_finite}
        if bad:
            unit = "values" if is_plain(model.tensors[tensor]) else "block scales"
            number, all_ = (sum(getattr(c, key) for c in pieces.values()) for key in ("non_finite", "elements"))
            yield Place(shown(tensor), f"{number:,} of {all_:,} {unit} are NaN or infinite{_of_experts(bad)}")


def weight_all_zero(model: GgufModel) -> Iterator[Place]:
    for tensor, pieces in _by_tensor(model).items():
        empty = {piece: c for piece, c in pieces.items() if c.elements and c.zero == c.elements}
        if empty and tensor.endswith(".weight") and model.tensors[tensor].num_elements > 1:
            yield Place(shown(tensor), f"all values are zero{_of_experts(empty)}")


def _by_tensor(model: GgufModel) -> dict[str, dict[Piece, Counts]]:
    by_tensor: dict[str, dict[Piece, Counts]] = defaultdict(dict)
    for piece, counts in model.values.items():
        by_tensor[piece.tensor][piece] = counts
    return by_tensor


def _of_experts(pieces: dict[Piece, Counts]) -> str:
    experts = [piece.expert for piece in pieces if piece.expert is not None]
    return f" (expert {ranges(experts)})" if experts else ""
