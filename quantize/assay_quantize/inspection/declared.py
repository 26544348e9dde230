"""What a checkpoint's small files claim of its quantization, and which modules vLLM therefore builds quantized.

The rules are vLLM 0.32's, one method each, replayed in pure Python on the names that vLLM gives its modules:

    compressed-tensors  targets and ignore, exact or `re:` by prefix (`formats/vllm_rules.py`)
    modelopt            `ignore` of config.json, or `exclude_modules` of hf_quant_config.json: whole names, substrings, globs
                        (modelopt.py: is_layer_excluded); of MIXED_PRECISION also `quantized_layers` (`mixed_precision.py`)
    fp8                 `ignored_layers`, else `modules_to_not_convert`: whole names (quant_utils.py: is_layer_skipped)
    awq                 `modules_to_not_convert`: substrings; without a list whatever is stored plain
    gptq                `dynamic` patterns, `modules_in_block_to_quantize`; without one whatever is stored plain
    auto-round          `extra_config` by name or pattern, `block_name_to_quantize`
    quark               `exclude`: whole names, globs, `re:` (quark/utils.py: should_ignore_layer)

Of other methods nothing is said about single modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from assay.errors import PlanError
from assay.foreign_text import shown
from assay_quantize.checkpoint.declaration import groups_of, read_declaration, weight_arguments
from assay_quantize.formats.vllm_rules import MixedSchemes, RuntimeModule, group_of
from assay_quantize.inspection.mixed_precision import algorithms_of, expects_mixed, is_mixed

Expects = Callable[[RuntimeModule], str | None]
"""A module of vLLM -> the config group or method by which vLLM builds it; None: unquantized. MixedSchemes: it refuses."""

_METHOD_NAMES = {"auto_awq": "awq", "awq_marlin": "awq", "gptq_marlin": "gptq", "intel/auto-round": "auto-round",
                 "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "modelopt_mxfp8": "modelopt"}  # fmt: skip
SERVED_METHODS = frozenset({
    "awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "auto-round", "inc", "fp8", "deepseek_v4_fp8", "mxfp8",
    "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "compressed-tensors", "compressed_tensors", "quark",
    "torchao", "mxfp4", "gpt_oss_mxfp4", "moe_wna16", "experts_int8", "humming",
})  # fmt: skip
"""`quant_method` of a checkpoint that vLLM 0.32 serves (layers/quantization: QUANTIZATION_METHODS, and what it renames)."""
_SPECIAL = frozenset("*+?^$()[]{}|\\")
_INTEGER_BITS = (2, 3, 4, 5, 6, 8)
_MOST_PATTERNS = 200_000
"""Of one list; longer ones are no list that a tool wrote."""


@dataclass(frozen=True)
class Declared:
    """quantization: the claim itself. method: its name in vLLM, None: nothing is declared. producer: tool and version.

    expects: None where the method's rules are not known. listed: patterns of its list of modules that stay plain, key: where
    that list stands. needs_inputs: scales of activations belong to every quantized weight. algorithms: of ModelOpt's
    MIXED_PRECISION, entry of `quantized_layers` -> algorithm.
    """

    quantization: Mapping[str, Any]
    method: str | None
    producer: str | None
    where: str
    expects: Expects | None
    listed: tuple[str, ...]
    key: str
    bits: int | None
    needs_inputs: bool
    activations: str | None
    kv_cache: str | None
    algorithms: Mapping[str, str] = field(default_factory=dict)

    @property
    def packings(self) -> tuple[tuple[int, int], ...]:
        """(bits, columns that share a scale) of integers in groups, as the config groups have them."""
        told = [(weights.get("num_bits"), weights.get("group_size")) for weights in weight_arguments(self.quantization)]
        if self.method == "mlx":  # for all modules, and by name for some
            of_modules = [args for args in self.quantization.values() if isinstance(args, dict)]
            told = [(args.get("bits"), args.get("group_size")) for args in (self.quantization, *of_modules)]
        pairs = [(b, g) for b, g in told if type(b) is int and type(g) is int and b in _INTEGER_BITS and g > 0]
        return tuple(dict.fromkeys(pairs))

    @property
    def is_served(self) -> bool:
        """Whether vLLM 0.32 has the method, or nothing is declared."""
        told = self.quantization.get("quant_method")
        return self.method not in ("unknown", "mlx") if told is None else str(told).lower() in SERVED_METHODS

    @property
    def is_mixed(self) -> bool:
        """Whether it is ModelOpt's MIXED_PRECISION."""
        return self.method == "modelopt" and is_mixed(self.quantization)

    def form_expected(self, group: str) -> frozenset[str] | None:
        """Forms of `stored.py` in which a module of this group may be stored; None: any."""
        if self.method == "compressed-tensors":
            weights = _dict(groups_of(self.quantization).get(group, {}).get("weights"))
            return _forms_of_arguments(weights)
        if self.is_mixed:
            return _MODELOPT_FORMS.get(group)
        return _FORMS.get(self.method or "") or _MODELOPT_FORMS.get(str(self.quantization.get("quant_algo", "")).upper())


_FP8 = frozenset({"fp8", "fp8_block", "fp8_channel", "fp8_tensor"})
_FORMS = {"fp8": _FP8 | {"mxfp8", "mxfp4"}, "awq": frozenset({"awq"}), "gptq": frozenset({"gptq"})}
_MODELOPT_FORMS = {"NVFP4": frozenset({"nvfp4"}), "W4A16_NVFP4": frozenset({"nvfp4"}), "FP8": _FP8, "FP8_PB_WO": _FP8,
                   "FP8_BLOCK_SCALES": _FP8, "FP8_PER_CHANNEL_PER_TOKEN": _FP8, "MXFP8": frozenset({"mxfp8"})}  # fmt: skip


def _forms_of_arguments(weights: Mapping[str, Any]) -> frozenset[str] | None:
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind == "int":
        return frozenset({"int_packed"} if bits != 8 else {"int_packed", "int8"})
    if (kind, bits) == ("float", 8):
        return _FP8 | {"mxfp8"}
    return frozenset({"nvfp4", "mxfp4"}) if (kind, bits) == ("float", 4) else None


# ------------------------------------------------------------------------------------------------ reading the claim
def read_declared(
    config: Mapping[str, Any],
    others: Mapping[str, Mapping[str, Any]],
    is_plain: Callable[[str], bool],
    fused: Mapping[str, Sequence[str]],
    rename: Callable[[str], str],
) -> Declared:
    """What config.json claims, else hf_quant_config.json, quantize_config.json or quant_config.json, as vLLM looks for it.

    others: name of such a file -> its contents. is_plain: whether a module of the checkpoint is stored unquantized. fused: of
    vLLM, as `packed_modules` gives it. rename: what vLLM's mapper makes of an entry of the list, where its modules have other
    names than the checkpoint's.
    """
    declaration = read_declaration(config, others)
    flat = {} if declaration is None else declaration.stated
    where = "config.json: quantization_config" if declaration is None else declaration.where
    method = _METHOD_NAMES.get(declaration.method, declaration.method) if declaration is not None and flat else None
    key, listed = _listed(method, flat)
    return Declared(
        quantization=flat,
        method=method,
        producer=_producer(flat, others),
        where=where,
        expects=_expects(method, flat, [rename(entry) for entry in listed], is_plain, fused, rename),
        listed=tuple(listed),
        key=key,
        bits=_bits(flat),
        needs_inputs=_needs_inputs(method, flat),
        activations=_activations(method, flat),
        kv_cache=_kv_cache(flat),
        algorithms=algorithms_of(flat) if method == "modelopt" and is_mixed(flat) else {},
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _strings(value: Any) -> list[str]:
    """The texts in a list, and in lists in it."""
    if not isinstance(value, list):
        return []
    flat = [item for each in value for item in (each if isinstance(each, list) else [each])]
    return [item for item in flat[:_MOST_PATTERNS] if isinstance(item, str)]


def _listed(method: str | None, flat: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(key, patterns) of the list of modules that stay plain."""
    keys = {
        "compressed-tensors": ("ignore",), "modelopt": ("exclude_modules", "ignore"), "awq": ("modules_to_not_convert",),
        "fp8": ("ignored_layers", "modules_to_not_convert"), "quark": ("exclude",),
    }.get(method or "", ())  # fmt: skip
    key = next((key for key in keys if flat.get(key)), keys[0] if keys else "")
    if method == "gptq":
        dynamic = [pattern for pattern in _dict(flat.get("dynamic")) if pattern.startswith("-:")]
        return "dynamic", dynamic
    return key, _strings(flat.get(key))


def _bits(flat: Mapping[str, Any]) -> int | None:
    told = flat.get("bits", flat.get("w_bit"))
    of_ints = {weights.get("num_bits") for weights in weight_arguments(flat) if weights.get("type") == "int"}
    told = of_ints.pop() if len(of_ints) == 1 else told
    return told if isinstance(told, int) and told in _INTEGER_BITS else None


def _needs_inputs(method: str | None, flat: Mapping[str, Any]) -> bool:
    if method == "modelopt":
        if str(flat.get("quant_algo", "")).upper() not in ("NVFP4", "FP8"):
            return False
        groups = groups_of(flat).values()
        return not groups or any(group.get("input_activations") is not None for group in groups)
    if method != "compressed-tensors":
        return method == "fp8" and flat.get("activation_scheme") == "static"
    inputs = [_dict(group.get("input_activations")) for group in groups_of(flat).values()]
    return bool(inputs) and all(args.get("dynamic") in (False, "local") for args in inputs)


def _activations(method: str | None, flat: Mapping[str, Any]) -> str | None:
    if method is None:
        return None
    if scheme := flat.get("activation_scheme"):
        return f"FP8, {shown(scheme, 20)}"
    told = []
    for group in groups_of(flat).values():
        args = _dict(group.get("input_activations"))
        how = {True: "dynamic", False: "static", "local": "static range, dynamic groups"}.get(args.get("dynamic"), "dynamic")
        told.append(f"{args['num_bits']}-bit {shown(args.get('type'), 10)}, {how}" if args.get("num_bits") else "16 bits")
    if not told and method == "modelopt":
        told = [{"NVFP4": "4-bit float, static range, dynamic groups", "FP8": "FP8, static"}.get(
            str(flat.get("quant_algo", "")).upper(), "as the algorithm has it")]  # fmt: skip
    return "; ".join(dict.fromkeys(told)) or "16 bits"


def _kv_cache(flat: Mapping[str, Any]) -> str | None:
    if algo := flat.get("kv_cache_quant_algo"):
        return shown(algo, 20)
    scheme = _dict(flat.get("kv_cache_scheme"))
    return f"{scheme['num_bits']}-bit {shown(scheme.get('type'), 10)}" if scheme.get("num_bits") else None


def _producer(flat: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str | None:
    told = []
    for producer in [_dict(flat.get("producer")), *(_dict(file.get("producer")) for file in others.values())]:
        if producer.get("name"):
            told.append(f"{producer['name']} {producer.get('version', '')}")
    if (version := flat.get("autoround_version")) is not None:
        told.append(f"auto-round {version}")
    quantizer = _dict(flat.get("meta")).get("quantizer")
    told += _strings(quantizer) if isinstance(quantizer, list) else [quantizer] if isinstance(quantizer, str) else []
    if flat.get("quant_method") == "compressed-tensors" and not told:
        told.append(f"compressed-tensors {flat.get('version', '')}")
    if flat.get("quant_method") == "quark":
        told.append(f"quark {_dict(flat.get('export')).get('version', '')}")
    return shown(", ".join(dict.fromkeys(text.strip() for text in told if text)), 100) or None


# ------------------------------------------------------------------------------------------------ vLLM's rules
def _expects(
    method: str | None,
    flat: Mapping[str, Any],
    listed: list[str],
    is_plain: Callable[[str], bool],
    fused: Mapping[str, Sequence[str]],
    rename: Callable[[str], str],
) -> Expects | None:
    if method is None:
        return lambda module: None
    if method == "compressed-tensors":
        targets = {target: name for name, group in groups_of(flat).items() for target in _strings(group.get("targets"))}
        return lambda module: group_of(module, listed, targets, fused)
    if method == "modelopt" and is_mixed(flat):
        algorithms = {rename(entry): algorithm for entry, algorithm in algorithms_of(flat).items()}
        kept = _of_runtime(listed)
        return expects_mixed(algorithms, lambda name: _excluded_modelopt(name, kept, fused), fused) if algorithms else None
    rule = {"modelopt": _excluded_modelopt, "fp8": _skipped_exactly, "awq": _skipped_by_part}.get(method)
    if method == "awq" and not listed:
        rule = None
    if rule is not None:
        names = _of_runtime(listed) if method == "modelopt" else listed
        return lambda module: None if _stays_plain(module, method, flat) or rule(module.name, names, fused) else method
    if method == "quark":
        return lambda module: None if _ignored_quark(module, listed, fused) else method
    if method == "auto-round":
        return lambda module: _group_of_autoround(module, flat, fused)
    if method in ("awq", "gptq"):
        blocks = _strings(flat.get("modules_in_block_to_quantize"))
        return lambda module: _group_of_gptq(module, method, flat, listed, blocks, is_plain, fused)
    return None


def experts_alone(declared: Declared) -> Declared:
    """`declared` where vLLM takes another method for such a checkpoint, which builds everything but experts plain."""
    expects = declared.expects
    return replace(declared, expects=None if expects is None else lambda m: expects(m) if m.kind == "experts" else None)


def _stays_plain(module: RuntimeModule, method: str, flat: Mapping[str, Any]) -> bool:
    """What vLLM builds without asking the list."""
    if module.kind in ("plain", "embedding"):
        return True
    if module.kind == "lm_head":
        return method == "fp8" or (method in ("awq", "gptq") and not flat.get("lm_head"))
    return False


def _members(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    last = name.rpartition(".")[2]
    return [name.replace(last, part) for part in fused[last]] if last in fused else []


def _all_alike(name: str, skipped: Iterable[bool]) -> bool:
    answers = list(skipped)
    if any(answers) and not all(answers):
        raise MixedSchemes(f"the list covers only some members of {name}; vLLM refuses to start")
    return all(answers)


def _skipped_exactly(name: str, listed: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    if members := _members(name, fused):
        return name in listed or _all_alike(name, (member in listed for member in members))
    if "experts" in name:
        return any(name in entry for entry in listed if "experts" in entry)
    return name in listed


def _skipped_by_part(name: str, listed: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    if members := _members(name, fused):
        whole = any(entry in name for entry in listed)
        return whole or _all_alike(name, (any(entry in member for entry in listed) for member in members))
    return any(entry in name for entry in listed)


def _of_runtime(listed: Sequence[str]) -> list[str]:
    """`a.b*` of ModelOpt becomes `a.b` and `a.b.*` (apply_vllm_mapper)."""
    names = []
    for entry in listed:
        if len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            names += [entry[:-1], entry[:-1] + ".*"]
        else:
            names.append(entry)
    return names


def _excluded_modelopt(name: str, listed: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    if not listed:
        return False
    short = name.removeprefix("language_model.")
    return (
        _skipped_exactly(name, listed, fused)
        or any(entry in name or entry in short for entry in listed)
        or any(fnmatchcase(name, entry) for entry in listed)
    )


def _ignored_quark(module: RuntimeModule, listed: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    if module.kind in ("plain", "embedding"):
        return True

    def is_listed(name: str) -> bool:
        return any(
            re.match(entry[3:], name) is not None if entry.startswith("re:") else entry == name or fnmatchcase(name, entry)
            for entry in listed
        )

    if members := _members(module.name, fused):
        return is_listed(module.name) or _all_alike(module.name, map(is_listed, members))
    return is_listed(module.name) or (module.kind == "experts" and all(map(is_listed, module.judged_by)))


def _group_of_autoround(
    module: RuntimeModule, flat: Mapping[str, Any], fused: Mapping[str, Sequence[str]]
) -> str | None:  # fmt: skip
    if module.kind in ("plain", "embedding"):
        return None
    extra = {name: _dict(told) for name, told in _dict(flat.get("extra_config")).items()}
    blocks = flat.get("block_name_to_quantize")
    blocks = [part.strip() for part in blocks.split(",")] if isinstance(blocks, str) else _strings(blocks)
    in_blocks = module.kind != "lm_head" if not blocks else any(module.name.startswith(name) for name in blocks)

    def bits_of(name: str) -> int:
        told = extra.get(name) or next((told for key, told in extra.items() if name.endswith(f".{key}")), None)
        patterns = ((key, args) for key, args in extra.items() if not _SPECIAL.isdisjoint(key))
        told = told or next((args for pattern, args in patterns if re.search(pattern, name) is not None), None)
        bits = (told or {}).get("bits", _bits(flat) or 4 if in_blocks else 16)
        return bits if isinstance(bits, int) else 16

    names = _members(module.name, fused) or (list(module.judged_by) if module.kind == "experts" else [module.name])
    plain = _all_alike(module.name, (bits_of(name) >= 16 for name in names))
    return None if plain else "auto-round"


def _group_of_gptq(
    module: RuntimeModule,
    method: str,
    flat: Mapping[str, Any],
    patterns: Sequence[str],
    blocks: Sequence[str],
    is_plain: Callable[[str], bool],
    fused: Mapping[str, Sequence[str]],
) -> str | None:
    if _stays_plain(module, method, flat):
        return None
    if any(re.match(pattern.removeprefix("-:"), module.name) for pattern in patterns):
        return None
    if not blocks:  # vLLM looks at the dtypes
        return None if _all_alike(module.name, map(is_plain, module.members)) else method
    if module.kind == "experts":
        return method  # the list is not asked
    names = _members(module.name, fused) or [module.name]
    plain = _all_alike(module.name, (not any(block in name for block in blocks) for name in names))
    return None if plain else method


_NESTED = re.compile(r"\([^()]*[+*][^()]*\)[+*{]")
"""A repetition inside a repetition: a stranger's may take hours to match."""
MOST_REPETITIONS = 8


def slow_pattern(declared: Declared) -> str | None:
    """A pattern of the claim that is not matched here, because it may take too long; None: there is none."""
    patterns = [entry for entry in declared.listed if entry.startswith("re:") or declared.method == "gptq"]
    patterns += [pattern for pattern in _dict(declared.quantization.get("extra_config")) if not _SPECIAL.isdisjoint(pattern)]
    for group in groups_of(declared.quantization).values():
        patterns += [target for target in _strings(group.get("targets")) if target.startswith("re:")]
    for pattern in patterns:
        if len(pattern) > 2000 or len(re.findall(r"[*+]", pattern)) > MOST_REPETITIONS or _NESTED.search(pattern):
            return pattern
    return None


def check_patterns(declared: Declared) -> PlanError | None:
    """A pattern of the claim that is no regular expression; None: all are."""
    patterns = [entry[3:] for entry in declared.listed if entry.startswith("re:")]
    patterns += [entry.removeprefix("-:") for entry in declared.listed if declared.method == "gptq"]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as problem:
            return PlanError(f"{declared.where}.{declared.key}: {shown(pattern)} is no pattern: {problem}")
    return None
