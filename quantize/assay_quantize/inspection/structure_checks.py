"""Names and shapes against config.json: layers, experts, routers, vocabulary, MTP block. One function for each defect."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from assay.errors import PlanError
from assay.quantities import number_ranges
from assay.recipes.family_names import classify, names_of, split_layer
from assay.recipes.mtp import declared_layers, draft_not_kept, mtp_problems, stored_steps
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.source_format import ties_head
from assay_quantize.checkpoint.stored import CACHE_LEAVES, PLAIN, Weight
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.subject import Subject

SKIPPED_BY_VLLM = re.compile(r".*(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.attn\.bias|\.masked_bias)")
"""Buffers of old checkpoints that vLLM's loaders pass over."""
_EXPERT = re.compile(r"(?P<front>.+\.)(?P<expert>\d+)(?P<behind>\..+)")
SAME_IN_MOST = 0.5
"""Share of like layers that must have a name before one without it lacks something."""


# ------------------------------------------------------------------------------------------------ shapes
def router_rows(subject: Subject) -> Iterator[Place]:
    experts = subject.num_experts
    if experts is None:
        return
    has_other_draft = subject.family is not None and draft_not_kept(subject.family, logical_names(subject)) is not None

    def is_other(name: str) -> bool:
        """Of a draft that may have experts in another number."""
        return has_other_draft and subject.is_in_mtp(name)

    for module, weight in subject.stored.weights.items():
        is_router = subject.part(weight) == "router" and "shared" not in module.rpartition(".")[2]
        if is_router and weight.shape is not None and weight.shape[0] != experts and not is_other(module):
            yield Place(module, f"has {weight.shape[0]} rows; config.json declares {experts} experts")
    for name, header in router_biases(subject):
        if header.shape and header.shape[-1] != experts and not is_other(name):
            yield Place(name, f"has {header.shape[-1]} values; config.json declares {experts} experts")


def router_biases(subject: Subject) -> Iterator[tuple[str, TensorHeader]]:
    """Biases by which experts are chosen."""
    for name, header in subject.stored.others.items():
        leaf = name.rpartition(".")[2]
        if leaf in ("e_score_correction_bias", "router_bias", "expert_bias", "bias_vl") or name.endswith(".ffn.gate.bias"):
            yield name, header


def vocabulary_rows(subject: Subject) -> Iterator[Place]:
    size = subject.number("vocab_size")
    for module, weight in subject.stored.weights.items():
        if size is None or subject.part(weight) not in ("embedding", "lm_head") or weight.shape is None:
            continue
        is_known = not subject.classes or module in subject.classes  # the embedding of a vision tower is not
        if len(weight.shape) == 2 and weight.shape[0] != size and is_known:
            yield Place(module, f"has {weight.shape[0]:,} rows; vocab_size is {size:,}")


def width_unlike_config(subject: Subject) -> Iterator[Place]:
    hidden = subject.number("hidden_size")
    inner = {
        "routed_expert": subject.number("moe_intermediate_size", "expert_ffn_hidden_size"),
        "dense_mlp": subject.number("intermediate_size"),
    }
    for module, weight in subject.stored.weights.items():
        if weight.shape is None or len(weight.shape) != 2 or weight.is_stacked or module not in subject.classes:
            continue
        part, (rows, columns), leaf = subject.part(weight), weight.shape, module.rpartition(".")[2]
        is_down = leaf in ("down_proj", "w2")
        expected: list[tuple[str, int | None, int]] = []
        if part in ("router", "embedding", "lm_head"):
            expected = [("hidden_size", hidden, columns)]
        elif leaf in ("gate_proj", "up_proj", "w1", "w3", "down_proj", "w2") and part in (*inner, "shared_expert"):
            keys = [key for key in _LATENT if part == "routed_expert" and subject.number(key) is not None]
            key = keys[0] if keys else "hidden_size"
            expected = [(key, subject.number(key), rows if is_down else columns)]
            if part in inner and subject.family in _SAME_WIDTH_IN_ALL_LAYERS:
                key = "moe_intermediate_size" if part == "routed_expert" else "intermediate_size"
                expected.append((key, inner[part], columns if is_down else rows))
        for key, size, stored in expected:
            if size is not None and stored != size:
                yield Place(module, f"is {list(weight.shape)}; {key} is {size}")


_LATENT = ("moe_latent_size", "routed_expert_hidden_size")
"""Keys of the width of what routed experts see, where that is not the model's."""
_SAME_WIDTH_IN_ALL_LAYERS = frozenset({"glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "qwen3_moe"})
"""Families in which these keys say the width of every MLP."""


ALIKE = 0.8
"""Share of their names that two layers of one kind have in common."""


class _Layer(NamedTuple):
    rests: set[str]
    experts: set[int]


@functools.lru_cache(maxsize=2)
def _layers(subject: Subject) -> dict[int, _Layer]:
    """Decoder layer -> names behind its number, an expert's number as `{expert}`; without the MTP block."""
    count = subject.num_layers
    root = names_of(subject.family).layers if subject.family is not None else None
    layers: dict[int, _Layer] = defaultdict(lambda: _Layer(set(), set()))
    for name in logical_names(subject):
        at = split_layer(name)
        if at is None or count is None or at.layer >= count or (root is not None and at.root != root):
            continue
        if root is None and not at.root.endswith("layers"):
            continue
        expert = re.match(r"(.*experts)\.(\d+)\.(.*)", at.rest)
        if expert is None:
            layers[at.layer].rests.add(at.rest)
        else:
            layers[at.layer].rests.add(f"{expert[1]}.{{expert}}.{expert[3]}")
            layers[at.layer].experts.add(int(expert[2]))
    return dict(layers)


_ACTIVATION_SCALE = re.compile(r".+\.(act|act_fn|activation_fn)\.scales")
"""What AutoAWQ writes where it scales behind an activation function."""


def activation_scales(subject: Subject) -> frozenset[str]:
    """Names of scales of activation functions."""
    return frozenset(name for name in subject.stored.others if _ACTIVATION_SCALE.fullmatch(name) is not None)


@functools.lru_cache(maxsize=2)
def logical_names(subject: Subject) -> frozenset[str]:
    """Names as a source has them: stacked experts and their biases by those of each expert, joined weights one by one."""
    stacked = names_of(subject.family).stacked if subject.family is not None else {}
    joined = names_of(subject.family).joined if subject.family is not None else {}
    names = set()
    left_out = activation_scales(subject)
    for header in subject.stored.others.values():
        if header.name in left_out:
            continue
        at = split_layer(header.name)
        if at is None or at.rest not in stacked:
            names.add(header.name)
            continue
        parts = [part.split("{expert}") for part in stacked[at.rest].parts]
        experts = range(header.shape[0] if header.shape else 0)
        names |= {f"{at.root}.{at.layer}.{front}{expert}{rest}" for expert in experts for front, rest in parts}
    for weight in subject.stored.weights.values():
        if not weight.is_stacked:
            at = split_layer(weight.name) if joined else None
            members = joined.get(at.rest, ()) if at is not None else ()
            names |= {f"{at.root}.{at.layer}.{member}" for member in members} if at is not None and members else {weight.name}
            continue
        count = weight.shape[0] if weight.shape else 0
        for name in weight.representatives:
            front, _, part = name.rpartition(".0.")
            names |= {f"{front}.{expert}.{part}.weight" for expert in range(count)}
    return frozenset(names)


def older_names(subject: Subject) -> Iterator[Place]:
    if subject.renamed:
        new, stored = min(subject.renamed.items())
        yield Place(stored, f"and {len(subject.renamed) - 1:,} more tensors have older names; vLLM calls this one {new}")


def layers_missing(subject: Subject) -> Iterator[Place]:
    if subject.num_layers is None:
        return
    layers = _layers(subject)
    missing = [n for n in range(subject.num_layers) if n not in layers]
    if not layers and subject.family is not None and subject.declared.is_served:
        stored = (at.root for name in subject.stored.weights if (at := split_layer(f"{name}.")) is not None)
        root, other = names_of(subject.family).layers, Counter(stored).most_common(1)
        if other:
            what = f"are in no shard by their names, {root}.0 and so on; what is stored is called {other[0][0]}.0 and so on"
            yield Place(f"layers {ranges(missing)}", what)
    elif layers and missing:
        yield Place(f"layers {ranges(missing)}", f"are in no shard; num_hidden_layers is {subject.num_layers}")


def dense_layers(subject: Subject) -> Iterator[Place]:
    first = subject.text.get("first_k_dense_replace")
    if type(first) is not int or subject.text.get("moe_layer_freq", 1) != 1:
        return
    for number, layer in sorted(_layers(subject).items()):
        has_experts = bool(layer.experts) or any(".experts." in rest for rest in layer.rests)
        if has_experts and number < first:
            yield Place(f"layer {number}", f"has experts; by first_k_dense_replace {first} it is dense")
        elif number >= first and not has_experts and any(rest.startswith("mlp.") for rest in layer.rests):
            yield Place(f"layer {number}", f"has no experts; by first_k_dense_replace {first} only layers before it are dense")


def experts_missing(subject: Subject) -> Iterator[Place]:
    experts = subject.num_experts
    names = sorted(name for name in logical_names(subject) if ".experts." in name)
    if experts is None:
        return
    for where in _routers_without_experts(subject):
        yield Place(where, f"has a router, and no expert by the family's names; config.json declares {experts} experts")
    projections: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        match = re.match(r"(?P<where>.+\.experts)\.(?P<expert>\d+)\.(?P<rest>.+\.weight)$", name)
        if match is not None and not subject.is_in_mtp(match["where"]):
            projections[match["where"]][int(match["expert"])].add(match["rest"])
    for where, of_layer in projections.items():
        whole = set().union(*of_layer.values())
        if absent := [expert for expert in range(experts) if expert not in of_layer]:
            yield Place(where, f"has no expert {ranges(absent)}; config.json declares {experts} experts")
        if beyond := sorted(expert for expert in of_layer if expert >= experts):
            yield Place(where, f"has experts {ranges(beyond)}; config.json declares {experts} experts")
        if partial := sorted(expert for expert, rests in of_layer.items() if rests != whole and expert < experts):
            lacking = sorted(whole - of_layer[partial[0]])
            yield Place(where, f"expert {ranges(partial)}: {', '.join(lacking)} is missing")


def _routers_without_experts(subject: Subject) -> Iterator[str]:
    """Of a family that is known: MoE layers outside the MTP block, none of whose experts has the family's name."""
    if not subject.declared.is_served:
        return
    layers: dict[str, set[str]] = defaultdict(set)
    for module, told in subject.classes.items():
        if told.role in ("router", "routed_expert") and (at := split_layer(module)) is not None:
            layers[f"{at.root}.{at.layer}"].add(told.role)
    yield from (where for where, roles in sorted(layers.items()) if roles == {"router"})


def expert_shapes_differ(subject: Subject) -> Iterator[Place]:
    shapes: dict[tuple[str, str], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for module, weight in subject.stored.weights.items():
        match = _EXPERT.fullmatch(module)
        if match is not None and match["front"].endswith("experts.") and weight.shape is not None:
            shapes[match["front"], match["behind"]][weight.shape] += 1
    for (front, behind), counted in shapes.items():
        if len(counted) > 1:
            told = ", ".join(f"{list(shape)} in {count}" for shape, count in counted.most_common(3))
            yield Place(f"{front}*{behind}", f"has {told} experts")


def tensors_missing(subject: Subject) -> Iterator[Place]:
    layers = _layers(subject)
    for numbers in _alike(layers, names_of(subject.family).kinds if subject.family is not None else ()):
        counted = Counter(rest for number in numbers for rest in layers[number].rests)
        for rest, count in sorted(counted.items()):
            if rest.rpartition(".")[2] in CACHE_LEAVES:
                continue  # `cache_scales_missing` says so
            if len(numbers) > 1 and SAME_IN_MOST * len(numbers) < count < len(numbers):
                absent = sorted(number for number in numbers if rest not in layers[number].rests)
                yield Place(rest, f"is missing in layer {ranges(absent)}; {count} like layers have it")
    yield from _missing_outside(subject)


def _alike(layers: dict[int, _Layer], kinds: tuple[str, ...]) -> list[list[int]]:
    """Numbers of layers that are made of the same, but for a few names. kinds: of the family."""
    groups: list[tuple[frozenset[str], set[str], list[int]]] = []
    for number, layer in sorted(layers.items()):
        kind = _kind(layer) | {kind for kind in kinds if any(rest.startswith(kind) for rest in layer.rests)}
        for of_group, rests, numbers in groups:
            if of_group == kind and len(rests & layer.rests) >= ALIKE * len(rests | layer.rests):
                numbers.append(number)
                break
        else:
            groups.append((kind, layer.rests, [number]))
    return [numbers for _, _, numbers in groups]


def _kind(layer: _Layer) -> frozenset[str]:
    """What a layer is made of, coarsely: submodules with several tensors, an indexer, experts."""
    containers = Counter(rest.split(".")[0] for rest in layer.rests if rest.count(".") > 1)
    marks = {name for name, count in containers.items() if count > 1}
    marks |= {"indexer" for rest in layer.rests if ".indexer." in rest} | {
        "experts" for rest in layer.rests if "experts." in rest
    }
    return frozenset(marks)


def _missing_outside(subject: Subject) -> Iterator[Place]:
    if subject.family is None or not subject.declared.is_served:
        return
    names = logical_names(subject)
    is_tied = ties_head(subject.config)
    for name, form in names_of(subject.family).outside.items():
        if form.part in ("embedding", "norm", "lm_head") and name not in names and not (is_tied and form.part == "lm_head"):
            yield Place(name, "is in no shard")


def unknown_tensor(subject: Subject) -> Iterator[Place]:
    if subject.family is None or subject.num_layers is None or not subject.declared.is_served:
        return
    others = subject.stored.others.keys() - activation_scales(subject)
    for name in sorted({*(f"{weight.module}.weight" for weight in subject.stored.weights.values()), *others}):
        weight = subject.stored.weights.get(name.removesuffix(".weight"))
        if weight is not None and weight.module in subject.classes:
            continue
        if SKIPPED_BY_VLLM.fullmatch(name) or _is_scale_of_cache(name) or (weight is None and _is_bias_of_known(subject, name)):
            continue
        if (at := split_layer(name)) is not None and at.rest in names_of(subject.family).stacked:
            continue  # biases of all experts
        if _is_behind_all_layers(subject, name):
            continue  # an MTP block; `mtp_undeclared` says so
        try:
            classify(subject.family, name, subject.config)
        except PlanError:
            yield Place(name, f"is no name of family {subject.family}")


def _is_scale_of_cache(name: str) -> bool:
    return name.rpartition(".")[2] in (*CACHE_LEAVES, "k_zero_point", "v_zero_point")


def _is_bias_of_known(subject: Subject, name: str) -> bool:
    """GPTQ and AWQ store a bias with each weight."""
    module, _, leaf = name.rpartition(".")
    weight = subject.stored.weights.get(module)
    return leaf == "bias" and weight is not None and weight.form in ("gptq", "awq")


def _is_behind_all_layers(subject: Subject, name: str) -> bool:
    at = split_layer(name)
    return at is not None and subject.num_layers is not None and at.layer >= subject.num_layers and subject.is_in_mtp(name)


def tied_head_stored(subject: Subject) -> Iterator[Place]:
    embeddings = [
        w for w in subject.stored.weights.values() if subject.part(w) == "embedding" and not subject.is_in_mtp(w.module)
    ]
    heads = [w for w in subject.stored.weights.values() if subject.part(w) == "lm_head" and not subject.is_in_mtp(w.module)]
    if not ties_head(subject.config) or len(embeddings) != 1:
        return
    for head in heads:
        if not _is_same_data(subject, head, embeddings[0]):
            yield Place(head.module, "is stored with other values than the embedding, and config.json ties the two")


def _is_same_data(subject: Subject, first: Weight, second: Weight) -> bool:
    """By the first and the last 64 KiB; taken to be so where the data are not at hand."""
    one, other = (weight.parts.get("weight") for weight in (first, second))
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if not subject.files.is_local:
        return True
    size = min(one.num_bytes, 65_536)
    offsets = (0, one.num_bytes - size)
    read = subject.files.read
    return all(
        read(one.shard, one.begin + at, one.begin + at + size) == read(other.shard, other.begin + at, other.begin + at + size)
        for at in offsets
    )


def dtype_disagrees(subject: Subject) -> Iterator[Place]:
    told = subject.text.get(
        "dtype", subject.text.get("torch_dtype", subject.config.get("dtype", subject.config.get("torch_dtype")))
    )
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    form = names.get(str(told).removeprefix("torch."))
    counted: Counter[str] = Counter()
    for weight in subject.stored.weights.values():
        if weight.form in PLAIN.values() and subject.part(weight) != "router":
            counted[weight.form] += weight.num_elements
    if form is not None and counted and form not in counted:
        yield Place("config.json: dtype", f"is {told}; no plain weight is stored so, most are {counted.most_common(1)[0][0]}")


# ------------------------------------------------------------------------------------------------ MTP
def _declared(subject: Subject) -> int | None:
    try:
        return declared_layers(subject.config)
    except PlanError:
        return None


def stored_mtp_layers(subject: Subject) -> int | None:
    """How many MTP layers are stored, as config.json counts them; None: that cannot be told."""
    if subject.family is None:
        numbers = {split_layer(name) for name in subject.tensors if subject.is_in_mtp(name.rpartition(".")[0])}
        return len({(at.root, at.layer) for at in numbers if at is not None}) or int(bool(numbers))
    try:
        return stored_steps(subject.family, subject.config, subject.tensors)
    except PlanError:
        return None


def mtp_absent(subject: Subject) -> Iterator[Place]:
    declared = _declared(subject)
    if declared and stored_mtp_layers(subject) == 0:
        yield Place("config.json", f"declares {declared} MTP layer(s), and no shard holds a tensor of one")


def mtp_undeclared(subject: Subject) -> Iterator[Place]:
    declared, stored = _declared(subject), stored_mtp_layers(subject)
    if declared is not None and stored is not None and stored > declared:
        names = sorted(name for name in subject.tensors if subject.is_in_mtp(name.rpartition(".")[0]))
        yield Place(names[0] if names else "config.json", f"{stored} MTP layer(s) are stored; config.json declares {declared}")


@functools.lru_cache(maxsize=2)
def _mtp_problems(subject: Subject) -> list[tuple[str, str]]:
    """(where, what) of a block that is there and not whole."""
    if subject.family is None or any(mtp_absent(subject)) or any(mtp_undeclared(subject)):
        return []
    try:
        problems = list(mtp_problems(subject.family, subject.config, logical_names(subject)))
    except PlanError:
        return []
    return [(problem.where, problem.what) for problem in problems]


def mtp_experts_missing(subject: Subject) -> Iterator[Place]:
    lacking: dict[str, set[int]] = defaultdict(set)
    for where, what in _mtp_problems(subject):
        match = re.match(r"(.+\.experts)\.(\d+)", where)
        if match is not None and "missing" in what:
            lacking[match[1]].add(int(match[2]))
    for where, experts in lacking.items():
        yield Place(where, f"expert {ranges(sorted(experts))}: weights are missing ({len(experts)} experts)")


def mtp_incomplete(subject: Subject) -> Iterator[Place]:
    for where, what in _mtp_problems(subject):
        if ".experts." not in where or "missing" not in what:
            yield Place(where, what.replace(": vLLM would load it and draft noise", ""))


def ranges(numbers: list[int]) -> str:
    """`0-2, 5`; shortened where there are many."""
    told = number_ranges(numbers).split(", ")
    return ", ".join(told) if len(told) <= 6 else f"{', '.join(told[:5])} and {len(told) - 5} more"


def layer_ranges(weights: list[Weight]) -> str:
    """The layers that weights lie in: `0-2, 7`; empty: in none."""
    places = (split_layer(weight.name) for weight in weights)
    return ranges(sorted({at.layer for at in places if at is not None}))
