"""How each architecture names its tensors: name -> role, fused group, MTP block; and the modules vLLM must leave alone.

A family is a table of *forms*: names with `{expert}` for the expert's number, inside `model.layers.{layer}.` or outside. A
name has exactly one form (a dictionary look-up) or it is a PlanError that names the nearest form known. Names follow the
published checkpoints; `fused` and what can be quantized follow vLLM 0.32 (`glm4_moe`, `glm4_moe_mtp`, `deepseek_v2`,
`deepseek_mtp`, `models/deepseek_v32`, `qwen3_moe`, `qwen3_next`, `qwen3_next_mtp`). Imports neither torch nor vllm.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from assay.errors import PlanError


@dataclass(frozen=True)
class Form:
    """One name of a family.

    kind: `linear`: a 2-D weight that vLLM can hold quantized. `plain`: a weight that vLLM applies to or looks up by
        activations but loads only unquantized, so the ignore list must cover it. `bare`: the same, and vLLM builds its layer
        without a quantization config, so that the ignore list has no say. `vector`: norms, biases and other small things.
    fused: last component of the vLLM parameter into which this weight is loaded together with others, in this order.
    split: what a rank of tensor parallelism holds. `rows`: a part of the outputs (vLLM's ColumnParallelLinear, vocabulary).
        `kv_rows`: the same by key-value heads, which are repeated once there are more ranks than heads. `columns`: a part of
        the inputs (RowParallelLinear). `whole`: everything.
    """

    part: str
    kind: Literal["linear", "plain", "bare", "vector"] = "vector"
    fused: str | None = None
    split: Literal["rows", "kv_rows", "columns", "whole"] = "whole"


class Classified(NamedTuple):
    """What a tensor is.

    role: what it is for; `mtp` for everything inside the MTP block. part: its role inside the block (equal to `role`
    elsewhere), `mtp_projection` for `eh_proj` and `mtp.fc`. module: the name without its last component, against which
    vLLM matches ignore patterns. layer: number in its name (counted from 0 again in `mtp.layers`). fused_group: name of the
    vLLM parameter its weight is fused into. linear: a 2-D weight that can be quantized.
    """

    role: str
    part: str
    module: str
    layer: int | None
    expert: int | None
    fused_group: str | None
    linear: bool


@dataclass(frozen=True)
class FamilyNames:
    """Forms of one family.

    layer: inside a decoder layer. mtp_layer: more names, only inside an MTP layer `model.layers.{num_hidden_layers}`.
    mtp: whole names outside `model.layers`, for families whose MTP block is called `mtp.*`. mtp_required: without these an
    MTP block is incomplete. head and embedding of the block are optional: vLLM shares the model's own.
    """

    architectures: tuple[str, ...]
    layer: Mapping[str, Form]
    mtp_layer: Mapping[str, Form] = field(default_factory=dict)
    mtp: Mapping[str, Form] = field(default_factory=dict)
    mtp_required: tuple[str, ...] = ()
    num_experts_keys: tuple[str, ...] = ("n_routed_experts", "num_local_experts")


def _rows(part: str, fused: str | None = None) -> Form:
    return Form(part, "linear", fused, "rows")


def _columns(part: str) -> Form:
    return Form(part, "linear", split="columns")


def _whole(part: str, fused: str | None = None) -> Form:
    return Form(part, "linear", fused)


def _mlp(prefix: str, part: str) -> dict[str, Form]:
    return {
        f"{prefix}.gate_proj.weight": _rows(part, "gate_up_proj"),
        f"{prefix}.up_proj.weight": _rows(part, "gate_up_proj"),
        f"{prefix}.down_proj.weight": _columns(part),
    }


_TOP = {
    "model.embed_tokens.weight": Form("embedding", "plain", split="rows"),
    "model.norm.weight": Form("norm"),
    "lm_head.weight": Form("lm_head", "plain", split="rows"),
}
_LAYER_NORMS = {"input_layernorm.weight": Form("norm"), "post_attention_layernorm.weight": Form("norm")}
_MOE = {
    "mlp.gate.weight": Form("router", "bare"),
    **_mlp("mlp", "dense_mlp"),
    **_mlp("mlp.experts.{expert}", "routed_expert"),
}
_ROUTER_BIAS = {"mlp.gate.e_score_correction_bias": Form("router_bias")}
_GQA = {
    "self_attn.q_proj.weight": _rows("attention", "qkv_proj"),
    "self_attn.k_proj.weight": Form("attention", "linear", "qkv_proj", "kv_rows"),
    "self_attn.v_proj.weight": Form("attention", "linear", "qkv_proj", "kv_rows"),
    "self_attn.o_proj.weight": _columns("attention"),
    "self_attn.q_proj.bias": Form("attention"),
    "self_attn.k_proj.bias": Form("attention"),
    "self_attn.v_proj.bias": Form("attention"),
    "self_attn.q_norm.weight": Form("norm"),
    "self_attn.k_norm.weight": Form("norm"),
}
_MLA = {
    "self_attn.q_proj.weight": _rows("attention"),  # only where q_lora_rank is null
    "self_attn.q_a_proj.weight": _whole("attention", "fused_qkv_a_proj"),
    "self_attn.kv_a_proj_with_mqa.weight": _whole("attention", "fused_qkv_a_proj"),
    "self_attn.q_b_proj.weight": _rows("attention"),
    "self_attn.kv_b_proj.weight": _rows("attention"),
    "self_attn.o_proj.weight": _columns("attention"),
    "self_attn.q_a_proj.bias": Form("attention"),
    "self_attn.kv_a_proj_with_mqa.bias": Form("attention"),
    "self_attn.o_proj.bias": Form("attention"),
    "self_attn.q_a_layernorm.weight": Form("norm"),
    "self_attn.kv_a_layernorm.weight": Form("norm"),
    "self_attn.rotary_emb.inv_freq": Form("attention"),  # some DeepSeek-V3 descendants store it; vLLM skips it
}
_INDEXER = {
    "self_attn.indexer.wq_b.weight": _whole("indexer"),
    # vLLM fuses these two into one layer that has no quantization config
    "self_attn.indexer.wk.weight": Form("indexer", "bare", "wk_weights_proj"),
    "self_attn.indexer.weights_proj.weight": Form("indexer", "bare", "wk_weights_proj"),
    "self_attn.indexer.k_norm.weight": Form("norm"),
    "self_attn.indexer.k_norm.bias": Form("norm"),
}
_GATED_DELTA_NET = {
    "linear_attn.in_proj_qkvz.weight": _rows("attention"),
    # decay and gate of the recurrence: 64 rows, and vLLM's FP8-block layer cannot hold it
    "linear_attn.in_proj_ba.weight": Form("attention", "plain", split="rows"),
    "linear_attn.out_proj.weight": _columns("attention"),
    "linear_attn.conv1d.weight": Form("attention", "plain", split="rows"),
    "linear_attn.A_log": Form("attention"),
    "linear_attn.dt_bias": Form("attention"),
    "linear_attn.norm.weight": Form("norm"),
}
_INLINED_MTP = {
    "eh_proj.weight": Form("mtp_projection", "bare"),  # a bare nn.Linear in vLLM: packed, it is a KeyError
    "enorm.weight": Form("norm"),
    "hnorm.weight": Form("norm"),
    "shared_head.norm.weight": Form("norm"),
    "shared_head.head.weight": Form("lm_head", "plain", split="rows"),
    "embed_tokens.weight": Form("embedding", "plain", split="rows"),
}
_INLINED_REQUIRED = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
_QWEN_MTP = {
    "mtp.fc.weight": Form("mtp_projection", "plain", split="rows"),
    "mtp.norm.weight": Form("norm"),
    "mtp.pre_fc_norm_embedding.weight": Form("norm"),
    "mtp.pre_fc_norm_hidden.weight": Form("norm"),
}
_QWEN_EXPERT_KEYS = ("num_experts", "num_local_experts")

NAMES: dict[str, FamilyNames] = {
    "glm4_moe": FamilyNames(
        ("Glm4MoeForCausalLM",),
        {**_LAYER_NORMS, **_GQA, **_MOE, **_ROUTER_BIAS, **_mlp("mlp.shared_experts", "shared_expert")},
        mtp_layer=_INLINED_MTP,
        mtp_required=_INLINED_REQUIRED,
    ),
    "glm_moe_dsa": FamilyNames(
        ("GlmMoeDsaForCausalLM",),
        {**_LAYER_NORMS, **_MLA, **_INDEXER, **_MOE, **_ROUTER_BIAS, **_mlp("mlp.shared_experts", "shared_expert")},
        mtp_layer=_INLINED_MTP,
        mtp_required=_INLINED_REQUIRED,
    ),
    "deepseek_v3": FamilyNames(
        ("DeepseekV3ForCausalLM",),  # Kimi-K2 too
        {**_LAYER_NORMS, **_MLA, **_MOE, **_ROUTER_BIAS, **_mlp("mlp.shared_experts", "shared_expert")},
        mtp_layer=_INLINED_MTP,
        mtp_required=_INLINED_REQUIRED,
    ),
    "qwen3_moe": FamilyNames(
        ("Qwen3MoeForCausalLM",),
        # vLLM hands its quantization config to this router: it is a linear like any other there
        {**_LAYER_NORMS, **_GQA, **_MOE, "mlp.gate.weight": Form("router", "plain")},
        num_experts_keys=_QWEN_EXPERT_KEYS,
    ),
    "qwen3_next": FamilyNames(
        ("Qwen3NextForCausalLM",),
        {
            **_LAYER_NORMS,
            **_GQA,
            **_GATED_DELTA_NET,
            **_MOE,
            **_mlp("mlp.shared_expert", "shared_expert"),
            "mlp.shared_expert_gate.weight": Form("router", "bare"),
        },
        mtp=_QWEN_MTP,
        mtp_required=tuple(_QWEN_MTP),
        num_experts_keys=_QWEN_EXPERT_KEYS,
    ),
}  # fmt: skip
"""Family -> its names."""

MODEL_TYPES: dict[str, str] = {**{family: family for family in NAMES}, "kimi_k2": "deepseek_v3"}
"""`model_type` of config.json -> family."""

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The weights of one expert, in every family."""

_IN_LAYER = re.compile(r"(model|mtp)\.layers\.(0|[1-9]\d*)\.(.+)")
_IN_EXPERT = re.compile(r"mlp\.experts\.(0|[1-9]\d*)\.(.+)")


# ------------------------------------------------------------------------------------------------ configs
def family_of(config: Mapping[str, Any]) -> str:
    """The family of a model, from `architectures` and `model_type` of its config.json.

    Raises PlanError: dense model, multimodal wrapper, or an architecture that is not known, with the list that is.
    """
    architectures = config.get("architectures") or []
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    model_type = config.get("model_type")
    what = architecture or f"model_type {model_type!r}"
    supported = ", ".join(name for names in NAMES.values() for name in names.architectures)
    if isinstance(config.get("text_config"), dict):
        raise PlanError(
            f"config.json: {what} wraps a text model in a multimodal one, which is not supported yet; supported: {supported}"
        )
    by_architecture = {name: family for family, names in NAMES.items() for name in names.architectures}
    family = by_architecture.get(architecture or "") or (MODEL_TYPES.get(str(model_type)) if architecture is None else None)
    if family is not None and num_experts(family, config) > 0:
        return family
    if not any(count_of(key, config.get(key)) for key in _EXPERT_COUNT_KEYS):
        raise PlanError(
            f"config.json: {what} is a dense model (it declares no experts); assay is for mixture-of-experts: {supported}"
        )
    raise PlanError(f"config.json: architecture {what} is not known; supported: {supported}")


_EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")


MAX_COUNT = 100_000
"""More layers or experts than any model has: loops over a config's numbers stay short."""


def count_of(key: str, value: Any) -> int:
    """A number of layers or experts; 0 for what counts nothing. PlanError for one that cannot be."""
    if isinstance(value, list):  # per layer, in some configs
        return max((count_of(key, one) for one in value), default=0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or value > MAX_COUNT:
        if value is None or value is False:
            return 0
        raise PlanError(
            f"config.json: {key} must be a number from 0 to {MAX_COUNT}, got {ascii(value)[:40]}; correct the config"
        )
    return value


def num_experts(family: str, config: Mapping[str, Any]) -> int:
    """Routed experts per MoE layer; 0 if the config does not say."""
    return next((n for key in NAMES[family].num_experts_keys if (n := count_of(key, config.get(key)))), 0)


def num_hidden_layers(config: Mapping[str, Any]) -> int:
    """Decoder layers without MTP; PlanError if the config does not say."""
    layers = count_of("num_hidden_layers", config.get("num_hidden_layers"))
    if not layers:
        got = config.get("num_hidden_layers")
        raise PlanError(f"config.json: num_hidden_layers must be a positive number of layers, got {got!r}")
    return layers


# ------------------------------------------------------------------------------------------------ names
class InLayer(NamedTuple):
    """`model.layers.3.mlp.gate.weight` -> ("model", 3, "mlp.gate.weight"); the root is `mtp` in `mtp.layers`."""

    root: str
    layer: int
    rest: str


def split_layer(name: str) -> InLayer | None:
    """Where in the model a tensor lies; None: in no layer."""
    found = _IN_LAYER.fullmatch(name)
    return None if found is None else InLayer(found[1], int(found[2]), found[3])


def classify(family: str, name: str, config: Mapping[str, Any]) -> Classified:
    """What the tensor called `name` is. PlanError names tensor, family and the nearest known form."""
    names = NAMES[family]
    layer, expert, inside, form = _find(names, name, num_hidden_layers(config))
    if form is None:
        raise PlanError(_unknown(family, name, config))
    module = name.rpartition(".")[0]
    group = None if form.fused is None else f"{module.rpartition('.')[0]}.{form.fused}"
    return Classified(
        "mtp" if inside else form.part, form.part, module, layer, expert, group, form.kind == "linear"
    )  # fmt: skip


def form_of(family: str, name: str, config: Mapping[str, Any]) -> Form:
    """The form of the tensor called `name`; PlanError as `classify`."""
    form = _find(NAMES[family], name, num_hidden_layers(config))[3]
    if form is None:
        raise PlanError(_unknown(family, name, config))
    return form


def _find(names: FamilyNames, name: str, layers: int) -> tuple[int | None, int | None, bool, Form | None]:
    """(layer, expert, inside the MTP block, form) of a name; form None: not known."""
    at = split_layer(name)
    if at is None:
        inside = name in names.mtp
        return None, None, inside, names.mtp.get(name) if inside else _TOP.get(name)
    root, layer, rest = at
    expert = None
    if in_expert := _IN_EXPERT.fullmatch(rest):
        expert, rest = int(in_expert[1]), f"mlp.experts.{{expert}}.{in_expert[2]}"
    form = names.layer.get(rest)
    if root == "mtp":
        return layer, expert, True, form if names.mtp else None
    inside = layer >= layers
    if inside:
        form = None if not names.mtp_layer else form or names.mtp_layer.get(rest)
    return layer, expert, inside, form


def _unknown(family: str, name: str, config: Mapping[str, Any]) -> str:
    at, layers = split_layer(name), num_hidden_layers(config)
    if at and at.root == "model" and at.layer >= layers and not NAMES[family].mtp_layer:
        return (
            f"{name}: layer {at.layer} is beyond the {layers} layers of config.json, and family {family} has no MTP "
            "block there; correct num_hidden_layers, or the checkpoint is of another family"
        )
    if at and at.root == "model" and at.rest in NAMES[family].mtp_layer:
        return (
            f"{name}: belongs in an MTP layer, but layer {at.layer} is one of the {layers} layers of config.json; "
            "correct num_hidden_layers"
        )
    numberless = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", name))
    near = difflib.get_close_matches(numberless, forms(family), 1, cutoff=0.0)
    return f"{name}: family {family} has no such tensor; nearest known form: {near[0]}; unknown tensors are never guessed"


def forms(family: str) -> dict[str, Form]:
    """Every full form of a family -> what it is. `{layer}` stands for a layer's number, `{expert}` for an expert's."""
    names = NAMES[family]
    found = {**_TOP, **names.mtp}
    found |= {f"model.layers.{{layer}}.{rest}": form for rest, form in {**names.layer, **names.mtp_layer}.items()}
    if names.mtp:
        found |= {f"mtp.layers.{{layer}}.{rest}": form for rest, form in names.layer.items()}
    return found


# ------------------------------------------------------------------------------------------------ ignore patterns
def ignore_patterns(
    family: str,
    quantized: Collection[str],
    *,
    mtp: Literal["keep", "quantize", "drop"],
    mtp_layers: Collection[int],
) -> tuple[str, ...]:
    """Patterns for `ignore` in config.json: modules that vLLM must expect unquantized.

    quantized: roles that are quantized. mtp_layers: indexes of inlined MTP layers. vLLM matches `re:X` by `re.match`, which
    is anchored in front only, so every pattern is closed with `$`, its dots escaped. Where a family has a role
    that this checkpoint lacks, the pattern matches nothing; the planner drops it.
    """
    names = NAMES[family]
    patterns = [r"re:(.*\.)?lm_head$", r"re:(.*\.)?embed_tokens$"]
    kept: dict[str, list[str]] = {}
    for name, form in names.layer.items():
        if form.kind in ("plain", "bare") or (form.kind == "linear" and form.part not in quantized):
            parent, _, leaf = name.removesuffix(".weight").rpartition(".")
            kept.setdefault(parent, []).append(leaf)
    for parent, leaves in kept.items():
        where = re.escape(parent).replace(r"\{expert\}", r"\d+")
        patterns.append(rf"re:.*\.{where}\.{leaves[0] if len(leaves) == 1 else '(' + '|'.join(leaves) + ')'}$")
    if mtp != "drop":
        patterns += _mtp_patterns(names, mtp == "quantize", sorted(mtp_layers))
    return tuple(patterns)


def _mtp_patterns(names: FamilyNames, quantized: bool, layers: list[int]) -> list[str]:
    """The whole block when it is kept; else what vLLM never loads quantized, under vLLM's own names too."""
    if names.mtp:
        return [r"re:(.*\.)?mtp\.fc$"] if quantized else [r"re:(.*\.)?mtp\..*$"]
    inside = r"(eh_proj|embed_tokens|shared_head\.head|head)" if quantized else ".*"
    return [rf"re:.*layers\.{layer}\.{inside}$" for layer in layers]
