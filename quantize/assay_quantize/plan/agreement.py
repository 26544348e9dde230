"""Whether the shapes of a checkpoint are those that its config.json declares: vLLM builds its parameters from config.json.

Tools that prune experts or layers, or resize an embedding, leave the two at odds. Headers only: what is wrong is said before
hours of work, and not by vLLM's loaders after them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from assay.errors import PlanError
from assay.recipes.families import num_experts
from assay.recipes.family_names import Classified
from assay.recipes.mtp import draft_not_kept
from assay.recipes.text_config import count_of, num_hidden_layers, size_of, text_of
from assay_quantize.checkpoint.headers import TensorHeader


class _Contradiction(NamedTuple):
    """One tensor that config.json contradicts. what: continues its name. mend: what to do."""

    name: str
    what: str
    mend: str


def check_shapes_declared(
    where: str,
    family: str,
    config: Mapping[str, Any],
    classified: Mapping[str, Classified],
    tensors: Mapping[str, TensorHeader],
) -> None:
    """PlanError names the first tensor whose shape config.json contradicts, or the layers that it takes for others.

    where: the checkpoint. Looked at: rows of embedding and head (`vocab_size`), rows of routers and lengths of their biases
    (experts), the width of experts (`moe_intermediate_size`), which layers have experts (`first_k_dense_replace` and the like).
    """
    for contradictions in (
        list(_vocabulary(config, classified, tensors)),
        list(_routers(family, config, classified, tensors)),
        list(_experts(config, classified, tensors)),
        list(_kinds(config, classified)),
    ):
        if contradictions:
            name, what, mend = contradictions[0]
            also = f" (and {len(contradictions) - 1:,} more like this)" if len(contradictions) > 1 else ""
            raise PlanError(f"{where}: {name} {what}{also}; {mend}")


def _vocabulary(
    config: Mapping[str, Any], classified: Mapping[str, Classified], tensors: Mapping[str, TensorHeader]
) -> Iterator[_Contradiction]:
    declared = text_of(config).get("vocab_size")
    if not isinstance(declared, int):
        return
    rows = {
        name: tensors[name].shape[0]
        for name, what in sorted(classified.items(), key=lambda item: item[1].part)  # the embedding first
        if what.part in ("embedding", "lm_head") and name.endswith(".weight") and len(tensors[name].shape) == 2
    }
    mend = "give embedding and head the same number of rows, and set vocab_size to it"
    if len(stored := set(rows.values())) == 1:
        mend = f"set vocab_size to {stored.pop()}"
        if min(rows.values(), default=0) > declared:
            mend += f", or cut the rows behind the first {declared}"
    for name, num_rows in rows.items():
        if num_rows != declared:
            yield _Contradiction(
                name, f"has {num_rows} rows, config.json says vocab_size {declared}: vLLM takes no other number", mend
            )


def _routers(
    family: str, config: Mapping[str, Any], classified: Mapping[str, Classified], tensors: Mapping[str, TensorHeader]
) -> Iterator[_Contradiction]:
    experts = num_experts(family, config)
    # LongCat-Flash's routers also choose experts that do nothing
    every = experts + count_of("zero_expert_num", text_of(config).get("zero_expert_num"))
    mend = (
        "cut the router to the experts that are left, in their order, as the tool that pruned them should have, or correct the "
        "config"
    )
    # a router before its bias
    has_other_draft = draft_not_kept(family, classified) is not None  # it may have experts in another number
    for name, what in sorted(classified.items(), key=lambda item: item[1].part):
        shape = tensors[name].shape
        if has_other_draft and what.role == "mtp":
            continue
        if what.part == "router_bias" and shape:
            length, words = shape[-1], "values"
        elif what.part == "router" and name.endswith(".weight") and "shared_expert" not in name and len(shape) == 2:
            length, words = shape[0], "rows"
        else:
            continue
        if length not in (experts, every):
            yield _Contradiction(name, f"has {length} {words}, config.json declares {experts} experts", mend)


def _experts(
    config: Mapping[str, Any], classified: Mapping[str, Classified], tensors: Mapping[str, TensorHeader]
) -> Iterator[_Contradiction]:
    """Experts are as wide as config.json says; where it does not say, as those of their layer."""
    width = text_of(config).get("moe_intermediate_size")
    declared = width if isinstance(width, int) and not isinstance(width, bool) and width > 0 else None
    first: dict[tuple[int | None, str], TensorHeader] = {}
    for name, what in classified.items():
        shape = tensors[name].shape
        if what.part != "routed_expert" or what.expert is None or len(shape) != 2 or not name.endswith(".weight"):
            continue
        other = first.setdefault((what.layer, name.split(".")[-2]), tensors[name])
        if shape != other.shape:
            rule = f"{other.name} {list(other.shape)}: vLLM has one shape for the experts of a layer"
            yield _Contradiction(name, f"{list(shape)} is unlike {rule}", "make the experts alike, or take another checkpoint")
        elif declared is not None and declared not in shape:
            yield _Contradiction(
                name, f"is {list(shape)}, config.json says moe_intermediate_size {declared}", "correct the config"
            )


# ------------------------------------------------------------------------------------------------ layers with experts
def _kinds(config: Mapping[str, Any], classified: Mapping[str, Classified]) -> Iterator[_Contradiction]:
    """Layers with experts are those that config.json says; nothing where it does not say, or no expert is known by its name."""
    stored: dict[int, bool] = defaultdict(bool)
    for what in classified.values():
        if what.layer is not None and what.role != "mtp":
            stored[what.layer] |= what.expert is not None
    rule = rule_of_experts(config)
    if rule is None or not any(stored.values()):
        return
    keys, with_experts = rule
    keys_with_values = ", ".join(f"{key} {str(text_of(config).get(key))[:40]}" for key in keys.split(", "))
    mend = f"correct {keys}"
    dense = [layer for layer, has_experts in sorted(stored.items()) if not has_experts]
    if keys == "first_k_dense_replace" and dense == list(range(len(dense))):
        mend = f"set first_k_dense_replace to {len(dense)}"
    for layer, has_experts in sorted(stored.items()):
        if has_experts != (layer in with_experts):
            problem = "holds experts, and config.json makes it dense" if has_experts else "holds no experts, and should"
            yield _Contradiction(f"layer {layer}", f"{problem} ({keys_with_values})", mend)


def rule_of_experts(config: Mapping[str, Any]) -> tuple[str, frozenset[int]] | None:
    """(keys of config.json by which vLLM tells the layers with experts, those layers); None: it says nothing.

    As `deepseek_v2.py`, `mimo_v2.py`, `qwen3_moe.py`, `ernie45_moe.py` and `step3p5.py` of vLLM 0.32 read them.
    """
    text, layers = text_of(config), range(num_hidden_layers(config))
    if isinstance(each := text.get("moe_layer_freq"), list):
        return "moe_layer_freq", frozenset(layer for layer, flag in zip(layers, each, strict=False) if flag)
    if isinstance(text.get("first_k_dense_replace"), int):
        first, step = count_of("first_k_dense_replace", text["first_k_dense_replace"]), size_of(text, "moe_layer_freq", 1)
        keys = "first_k_dense_replace" if step == 1 else "first_k_dense_replace, moe_layer_freq"
        return keys, frozenset(layer for layer in layers if layer >= first and layer % step == 0)
    if "mlp_only_layers" in text or "decoder_sparse_step" in text:
        dense = each if isinstance(each := text.get("mlp_only_layers"), list) else []
        step = size_of(text, "decoder_sparse_step", 1)
        return "mlp_only_layers, decoder_sparse_step", frozenset(
            layer for layer in layers if layer not in dense and (layer + 1) % step == 0
        )
    if isinstance(text.get("moe_layers_enum"), str):
        numbers = text["moe_layers_enum"].split(",")
        return "moe_layers_enum", frozenset(int(number) for number in numbers if number.strip().isdecimal())
    if "moe_layer_start_index" in text:
        keys = "moe_layer_start_index, moe_layer_end_index, moe_layer_interval"
        first, last = text["moe_layer_start_index"], text.get("moe_layer_end_index", len(layers) - 1)
        if not isinstance(first, int) or not isinstance(last, int):  # one for text and one for images
            return None
        step = size_of(text, "moe_layer_interval", 1)
        return keys, frozenset(layer for layer in layers if first <= layer <= last and (layer + 1) % step == 0)
    return None
