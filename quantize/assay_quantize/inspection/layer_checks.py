"""What is stored against what config.json claims, module by module as vLLM builds them, and which scales are lacking.

One function for each defect. Values of scales are looked at in `scale_checks.py`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from assay.recipes.family_names import names_of, split_layer
from assay_quantize.checkpoint.declaration import DEFAULT_BLOCK, declared_blocks, is_block, weight_arguments
from assay_quantize.checkpoint.stored import GLOBAL_LEAVES, INPUT_LEAVES, Weight, packed_bits
from assay_quantize.formats.vllm_rules import MixedSchemes, RuntimeModule
from assay_quantize.inspection.declared import check_patterns, slow_pattern
from assay_quantize.inspection.defect import Place
from assay_quantize.inspection.mixed_precision import STATIC, spellings, without_tensor
from assay_quantize.inspection.structure_checks import activation_scales, router_biases
from assay_quantize.inspection.subject import Subject

ANY = frozenset({"weight_scale", "weight_scale_inv", "scale"})
NEEDED: dict[str, tuple[frozenset[str], ...]] = {
    "fp8": (ANY,), "int8": (ANY,), "int_packed": (ANY,), "mxfp4": (ANY,), "nvfp4": (ANY, frozenset(GLOBAL_LEAVES)),
    "gptq": (frozenset({"scales"}), frozenset({"qzeros"})), "awq": (frozenset({"scales"}), frozenset({"qzeros"})),
}  # fmt: skip
"""Form -> tensors that must lie beside the codes, one of each set."""
_CODES = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})
"""dtypes of packed codes."""


class Judged(NamedTuple):
    """A module of vLLM. expected: config group or method by which it is built, None: unquantized. problem: vLLM refuses it."""

    module: RuntimeModule
    weights: tuple[Weight, ...]
    expected: str | None
    problem: str | None


@functools.lru_cache(maxsize=2)
def judged_modules(subject: Subject) -> tuple[Judged, ...]:
    """Every module whose build the claim decides; none where its method's rules are not known."""
    expects = subject.declared.expects
    if expects is None or check_patterns(subject.declared) is not None or slow_pattern(subject.declared) is not None:
        return ()
    judged = []
    for module, weights in subject.runtime:
        try:
            judged.append(Judged(module, weights, expects(module), None))
        except MixedSchemes as problem:
            judged.append(Judged(module, weights, None, str(problem)))
    return tuple(judged)


def stored_not_declared(subject: Subject) -> Iterator[Place]:
    quantized = [weight for weight in subject.stored.weights.values() if weight.is_quantized]
    if subject.declared.method is None and quantized:
        forms = Counter(weight.form for weight in quantized)
        told = ", ".join(f"{count:,} {form}" for form, count in forms.most_common(3))
        yield Place("config.json", f"has no quantization_config; {told} weights are stored ({quantized[0].module}, ...)")


def declared_not_stored(subject: Subject) -> Iterator[Place]:
    if subject.declared.method is None or not subject.declared.is_served or not subject.stored.weights:
        return
    if any(len(header.shape) > 1 and header.dtype in _CODES for header in subject.stored.others.values()):
        return  # in a layout that is not known here
    if not any(weight.is_quantized for weight in subject.stored.weights.values()):
        form = Counter(weight.form for weight in subject.stored.weights.values()).most_common(1)[0][0]
        yield Place(subject.declared.where, f"claims {subject.declared.method}; all weights are stored plain, most as {form}")


def pattern_invalid(subject: Subject) -> Iterator[Place]:
    if (problem := check_patterns(subject.declared)) is not None:
        yield Place(subject.declared.where, str(problem))


def fused_partly_listed(subject: Subject) -> Iterator[Place]:
    for judged in judged_modules(subject):
        if judged.problem is not None:
            yield Place(judged.module.name, judged.problem.partition("; vLLM")[0])


def fused_members_differ(subject: Subject) -> Iterator[Place]:
    for group, members in subject.fused_groups():
        forms = {weight.module.rpartition(".")[2]: weight.form for weight in members if not _lacks_scale(weight)}
        if len({_kind_of_form(form) for form in forms.values()}) > 1 and not _is_bare(subject, members):
            yield Place(group, "; ".join(f"{name} is stored as {form}" for name, form in forms.items()))
    for module, weights in subject.runtime:
        forms_of = Counter(_kind_of_form(weight.form) for weight in weights if not _lacks_scale(weight))
        if module.kind == "experts" and len(forms_of) > 1:
            told = "; ".join(f"{count:,} weights as {form}" for form, count in forms_of.most_common())
            yield Place(module.name, f"its experts are stored in several forms: {told}")


def _lacks_scale(weight: Weight) -> bool:
    """FP8 in a form that only its scale would tell: `scale_missing` says so."""
    return weight.form == "fp8"


def _kind_of_form(form: str) -> str:
    """Plain dtypes are one kind: vLLM casts them."""
    return "plain" if form in ("bf16", "fp16", "fp32") else form


def _is_bare(subject: Subject, members: list[Weight]) -> bool:
    return all(subject.is_bare(weight) for weight in members)


def _misfit(subject: Subject) -> Iterator[tuple[Judged, bool]]:
    """Modules that are stored quantized where vLLM builds them plain (True), or the other way round."""
    if any(stored_not_declared(subject)) or any(declared_not_stored(subject)):
        return
    for judged in judged_modules(subject):
        stored = {weight.is_quantized for weight in judged.weights}
        if judged.problem is None and len(stored) == 1 and judged.module.kind not in ("plain", "embedding"):
            is_quantized = stored.pop()
            if is_quantized != (judged.expected is not None):
                yield judged, is_quantized


def _listed_words(subject: Subject) -> str:
    declared = subject.declared
    if declared.is_mixed:
        return f"{declared.where}.quantized_layers"
    return f"{declared.where}.{declared.key}" if declared.key else declared.where


def _plain_words(subject: Subject, judged: Judged) -> str:
    form, key = judged.weights[0].form, _listed_words(subject)
    if subject.declared.is_mixed:
        return f"is stored as {form}; {key} says {judged.expected}"
    return f"is stored as {form}, and {key} does not leave it out ({judged.expected})"


def plain_not_listed(subject: Subject) -> Iterator[Place]:
    for judged, is_quantized in _misfit(subject):
        if not is_quantized and not _is_mtp(subject, judged):
            yield Place(judged.module.name, _plain_words(subject, judged))


def mtp_plain_not_listed(subject: Subject) -> Iterator[Place]:
    for judged, is_quantized in _misfit(subject):
        if not is_quantized and _is_mtp(subject, judged):
            yield Place(judged.module.name, _plain_words(subject, judged))
    if subject.family is None and subject.declared.expects is not None:
        yield from _guessed_mtp(subject)


def _guessed_mtp(subject: Subject) -> Iterator[Place]:
    """Of an architecture without a family: plain matrices of an MTP block that nothing in the list names, by any rule."""
    words = [entry.removeprefix("re:") for entry in subject.declared.listed]
    plain = [
        weight
        for weight in subject.stored.weights.values()
        if not weight.is_quantized and len(weight.shape or ()) == 2 and subject.is_in_mtp(weight.module)
    ]
    if (
        plain
        and subject.declared.method is not None
        and subject.declared.method != "gptq"
        and not any("mtp" in w for w in words)
    ):
        numbers = [rf"layers\.{subject.num_layers}", f"layers.{subject.num_layers}"]
        if not any(number in word for word in words for number in numbers):
            what = f"and {len(plain) - 1} more plain weights of the MTP block: {_listed_words(subject)} names none"
            yield Place(plain[0].module, what)


def _is_mtp(subject: Subject, judged: Judged) -> bool:
    return any(subject.role(weight) == "mtp" for weight in judged.weights)


def listed_but_packed(subject: Subject) -> Iterator[Place]:
    for judged, is_quantized in _misfit(subject):
        if is_quantized and subject.part(judged.weights[0]) != "router":
            what = f"is stored as {judged.weights[0].form}, and vLLM builds it plain by {_listed_words(subject)}"
            yield Place(judged.module.name, what)


def other_form(subject: Subject) -> Iterator[Place]:
    counted: dict[tuple[str, str], list[str]] = defaultdict(list)
    for judged in judged_modules(subject):
        allowed = None if judged.expected is None else subject.declared.form_expected(judged.expected)
        if allowed is None:
            continue
        for weight in judged.weights:
            if weight.is_quantized and weight.form not in allowed:
                counted[judged.module.name, weight.form].append(weight.module)
    for (module, form), weights in counted.items():
        expected = next(j.expected for j in judged_modules(subject) if j.module.name == module)
        yield Place(module, f"{len(weights):,} weights are stored as {form}; {subject.declared.where} says {expected}")
    if subject.family is None and subject.declared.is_mixed:
        yield from _other_than_entry(subject)


def _other_than_entry(subject: Subject) -> Iterator[Place]:
    """Of an architecture without a family: weights with an entry of their own in `quantized_layers`, in no form of it."""
    declared = subject.declared
    for module, weight in subject.stored.weights.items():
        algorithm = next((declared.algorithms[name] for name in spellings(module) if name in declared.algorithms), None)
        allowed = None if algorithm is None else declared.form_expected(algorithm)
        if allowed is not None and weight.form not in allowed:
            yield Place(module, f"is stored as {weight.form}; {_listed_words(subject)} says {algorithm}")


def quantized_layers_absent(subject: Subject) -> Iterator[Place]:
    if subject.declared.is_mixed and not subject.declared.algorithms:
        yield Place(subject.declared.where, "says MIXED_PRECISION, and has no quantized_layers with an algorithm for each")


def layer_without_tensor(subject: Subject) -> Iterator[Place]:
    stored: set[str] = set()
    for module, weight in subject.stored.weights.items():
        stored.add(module)
        experts = weight.shape[0] if weight.is_stacked and weight.shape else 0
        for name in weight.representatives if weight.is_stacked else ():
            stored.update(name.replace(".experts.0.", f".experts.{expert}.") for expert in range(experts))
    for entry in without_tensor(subject.declared.algorithms, stored):
        yield Place(entry, f"{_listed_words(subject)} says {subject.declared.algorithms[entry]}; no shard has such a module")


def router_quantized(subject: Subject) -> Iterator[Place]:
    if not subject.declared.is_served:
        return
    for module, weight in subject.stored.weights.items():
        if weight.is_quantized and subject.part(weight) == "router":
            yield Place(module, f"is stored as {weight.form}")


def unquantizable_quantized(subject: Subject) -> Iterator[Place]:
    """Bare modules that vLLM loads plain; FP8 keys of an indexer it dequantizes while it loads them."""
    for module, weight in subject.stored.weights.items():
        is_read = weight.form.startswith("fp8") and subject.part(weight) == "indexer"
        if weight.is_quantized and subject.is_bare(weight) and subject.part(weight) != "router" and not is_read:
            yield Place(module, f"is stored as {weight.form}")


def embedding_quantized(subject: Subject) -> Iterator[Place]:
    if subject.declared.method in (None, "compressed-tensors") or not subject.declared.is_served:
        return
    for module, weight in subject.stored.weights.items():
        if weight.is_quantized and subject.part(weight) == "embedding":
            yield Place(module, f"is stored as {weight.form}")


def awq_without_groups(subject: Subject) -> Iterator[Place]:
    claim = subject.declared.quantization
    if subject.declared.method != "awq" or claim.get("q_group_size", claim.get("group_size")) != -1:
        return
    experts = [name for name, w in subject.stored.weights.items() if w.form == "awq" and subject.part(w) == "routed_expert"]
    if experts:
        yield Place(min(experts), f"and {len(experts) - 1:,} more weights of experts: the claim has group_size -1")


def experts_left_out(subject: Subject) -> Iterator[Place]:
    experts = [w for w in subject.stored.weights.values() if subject.part(w) == "routed_expert"]
    if subject.declared.method is None or not experts or any(weight.is_quantized for weight in experts):
        return
    if any(weight.is_quantized for weight in subject.stored.weights.values()):
        num_bytes = sum(weight.num_bytes for weight in experts)
        share = num_bytes / max(1, sum(weight.num_bytes for weight in subject.stored.weights.values()))
        yield Place(experts[0].module, f"and all other routed experts are stored plain: {100 * share:.0f} % of the bytes")


# ------------------------------------------------------------------------------------------------ scales, by their headers
def scale_missing(subject: Subject) -> Iterator[Place]:
    for module, weight in subject.stored.weights.items():
        key = "fp8" if weight.form.startswith("fp8") else weight.form
        for leaves in NEEDED.get(key, ()):
            if not leaves & weight.parts.keys():
                yield Place(module, f"is stored as {weight.form}, and has no {' or '.join(sorted(leaves))}")
    for name in subject.stored.others.keys() - activation_scales(subject):
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "qzeros", "scales"):
            yield Place(name, "belongs to a weight that no shard has")


def input_scale_missing(subject: Subject) -> Iterator[Place]:
    """Of some experts, or of all where the claim has static activations."""
    of_group: dict[str, list[Weight]] = defaultdict(list)
    for module, weight in subject.stored.weights.items():
        if weight.form in ("nvfp4", "fp8_tensor", "fp8_channel", "int8"):
            of_group[re.sub(r"experts\.\d+\.", "experts.*.", module)].append(weight)
    for group, weights in of_group.items():
        lacking = [weight for weight in weights if not weight.parts.keys() & set(INPUT_LEAVES)]
        is_some = len(lacking) < len(weights)
        if lacking and (is_some or subject.declared.needs_inputs or _is_static_by_entry(subject, weights[0].module)):
            told = f"{len(lacking):,} of {len(weights):,} weights have no scale of activations"
            yield Place(lacking[0].module if is_some else group, told)


def _is_static_by_entry(subject: Subject, module: str) -> bool:
    algorithms = subject.declared.algorithms
    return any(algorithms.get(name) in STATIC for name in spellings(module))


def scale_shape(subject: Subject) -> Iterator[Place]:
    for module, weight in subject.stored.weights.items():
        leaves = ("weight_scale", "weight_scale_inv", "scale", "scales")
        scale = next((weight.parts[leaf] for leaf in leaves if leaf in weight.parts), None)
        if scale is None or weight.shape is None or len(weight.shape) != 2:
            continue
        if (problem := _scale_problem(weight, scale.shape, subject)) is not None:
            yield Place(module, problem)


def _scale_problem(weight: Weight, scale: tuple[int, ...], subject: Subject) -> str | None:
    """What is wrong with the shape of a scale; None: it fits the weight."""
    rows, columns = weight.shape or (0, 0)
    told = f"its scales are {list(scale)} for a weight {[rows, columns]}"
    if weight.form in ("nvfp4", "mxfp4", "mxfp8"):
        group = 16 if weight.form == "nvfp4" else 32
        return (
            None
            if scale == (rows, columns // group) and columns % group == 0
            else f"{told}; one for {group} columns was expected"
        )
    if (claimed := _claimed_groups(subject, weight.form)) and len(scale) == 2:
        stored = scale[1] if weight.form == "int_packed" else scale[0]
        if all(stored != math.ceil(columns / (size or columns)) for size in claimed):
            sizes = " or ".join("all" if size is None else str(size) for size in sorted(claimed, key=lambda size: size or 0))
            return f"{told}, in {stored} groups; the claim is of groups of {sizes} columns"
    if weight.form in ("gptq", "awq"):
        bits = packed_bits(weight.parts, subject.declared.bits)
        zeros = weight.parts.get("qzeros")
        fits = zeros is None or zeros.shape == (scale[0], rows * bits // 32)
        return None if fits else f"{told}, its zero points {list(zeros.shape)}" if zeros is not None else None
    if weight.form in ("int_packed", "int8"):
        fits = math.prod(scale) == 1 or (scale[0] == rows and (len(scale) == 1 or columns % scale[1] == 0))
        return None if fits else f"{told}; one for each row, or for whole groups of its columns, was expected"
    if weight.form == "fp8_block":
        flat = (scale[0], scale[2]) if len(scale) == 4 else scale  # ModelOpt: [blocks of rows, 1, blocks of columns, 1]
        blocks, shares = _declared_blocks(subject), _shares(subject, weight.module)
        fits = any(flat == (shares * math.ceil(rows / shares / height), math.ceil(columns / width)) for height, width in blocks)
        return None if fits else f"{told}; one for each block of {blocks[0][0]} x {blocks[0][1]} was expected"
    return None


def _claimed_groups(subject: Subject, form: str) -> set[int | None]:
    """Columns that share a scale of integers in some group of the claim; None: all of a row. Empty: the claim does not say it,
    or says it by module."""
    flat = subject.declared.quantization
    if form == "int_packed" and subject.declared.method == "compressed-tensors":
        told = [args for args in weight_arguments(flat) if args.get("type") == "int"]
        named = [args.get("group_size") if args.get("strategy") == "group" else args.get("strategy") for args in told]
    elif form == subject.declared.method and form in ("gptq", "awq") and not flat.get("dynamic"):
        named = [flat.get("group_size")]
    else:
        return set()
    if not all(size in (-1, "channel") or (type(size) is int and size > 0) for size in named):
        return set()
    return {size if type(size) is int and size > 0 else None for size in named}


def _shares(subject: Subject, module: str) -> int:
    """In how many parts, each with blocks of its own, queries, keys and values in one tensor are stored."""
    at = split_layer(f"{module}.weight")
    is_joined = at is not None and subject.family is not None and at.rest in names_of(subject.family).joined
    return subject.number("num_key_value_heads") or 1 if is_joined else 1


def _declared_blocks(subject: Subject) -> list[tuple[int, int]]:
    """(rows, columns) that may share a scale of FP8: as the claim says, and those of formats that say nothing."""
    pairs = [(block[0], block[1]) for block in declared_blocks(subject.declared.quantization) if is_block(block)]
    return [*(pairs or [DEFAULT_BLOCK]), (1, 128), (1, 32)]


def router_bias_in_16_bits(subject: Subject) -> Iterator[Place]:
    for name, header in router_biases(subject):
        if header.dtype not in ("F32", "F64"):
            in_source = subject.source.tensors.get(name) if subject.source is not None else None
            if in_source is None or in_source.dtype != header.dtype:
                yield Place(name, f"is {header.dtype}")
