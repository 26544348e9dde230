"""How each architecture names its tensors: name -> role, fused group, MTP block; and the modules vLLM must leave alone.

A family is a file of `recipes/families/` (`family.py`): a table of *forms*, names with `{expert}` for the expert's number,
inside a decoder layer, in the MTP block or outside. A name has exactly one form (a dictionary look-up) or it is a PlanError
that names the nearest form known. Imports neither torch nor vllm.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from assay.errors import PlanError
from assay.recipes.base import recipe_names, recipes_dir
from assay.recipes.family import FamilyBlock, FamilyRecipe, Form
from assay.recipes.load import load_recipe


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
    """Forms of one family, its blocks' and its own.

    outside: whole names, in no layer. layer: inside a decoder layer, and an MTP layer. mtp_layer: more names, only inside an
    MTP layer `model.layers.{num_hidden_layers}`. mtp: whole names outside the layers, for families whose MTP block is called
    `mtp.*`. mtp_required: without these an MTP block is incomplete.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    reasoning_parser: str
    num_experts_keys: tuple[str, ...]
    outside: Mapping[str, Form]
    layer: Mapping[str, Form]
    mtp_layer: Mapping[str, Form]
    mtp: Mapping[str, Form]
    mtp_required: tuple[str, ...]


def family_names() -> list[str]:
    """The families that ship with assay, sorted."""
    return recipe_names("families")


@functools.cache
def names_of(family: str) -> FamilyNames:
    """The names of a family; its files are read once. RecipeError: no such family, or its files are wrong."""
    recipe = load_recipe(FamilyRecipe, family)
    parts: list[FamilyBlock] = [*(load_recipe(FamilyBlock, block) for block in recipe.blocks), recipe]
    outside, layer, mtp_layer, mtp = (
        {name: form for forms in tables for name, form in forms.items()}
        for tables in (
            [part.outside for part in parts],
            [part.layer for part in parts],
            [part.mtp.layer for part in parts],
            [part.mtp.outside for part in parts],
        )
    )
    return FamilyNames(
        name=recipe.name,
        architectures=recipe.architectures,
        model_types=(recipe.name, *recipe.model_types),
        reasoning_parser=recipe.reasoning_parser,
        num_experts_keys=recipe.num_experts,
        outside=outside,
        layer=layer,
        mtp_layer=mtp_layer,
        mtp=mtp,
        mtp_required=tuple(name for part in parts for name in part.mtp.required),
    )


def _families_with(word: str) -> Iterator[FamilyNames]:
    """Families in whose files `word` stands: the others need not be read through."""
    for family in family_names():
        if word in (recipes_dir() / "families" / f"{family}.yaml").read_text(encoding="utf-8"):
            yield names_of(family)


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
    if isinstance(config.get("text_config"), dict):
        raise PlanError(
            f"config.json: {what} wraps a text model in a multimodal one, which is not supported yet; supported: {_supported()}"
        )
    family = _family_called(architecture, str(model_type))
    if family is not None and num_experts(family, config) > 0:
        return family
    if not any(count_of(key, config.get(key)) for key in _EXPERT_COUNT_KEYS):
        raise PlanError(
            f"config.json: {what} is a dense model (it declares no experts); assay is for mixture-of-experts: {_supported()}"
        )
    raise PlanError(f"config.json: architecture {what} is not known; supported: {_supported()}")


def _family_called(architecture: str | None, model_type: str) -> str | None:
    if architecture is None:
        return next((names.name for names in _families_with(model_type) if model_type in names.model_types), None)
    return next((names.name for names in _families_with(architecture) if architecture in names.architectures), None)


def _supported() -> str:
    return ", ".join(name for family in family_names() for name in names_of(family).architectures)


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
    return next((n for key in names_of(family).num_experts_keys if (n := count_of(key, config.get(key)))), 0)


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
    names = names_of(family)
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
    form = _find(names_of(family), name, num_hidden_layers(config))[3]
    if form is None:
        raise PlanError(_unknown(family, name, config))
    return form


def _find(names: FamilyNames, name: str, layers: int) -> tuple[int | None, int | None, bool, Form | None]:
    """(layer, expert, inside the MTP block, form) of a name; form None: not known."""
    at = split_layer(name)
    if at is None:
        inside = name in names.mtp
        return None, None, inside, names.mtp.get(name) if inside else names.outside.get(name)
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
    if at and at.root == "model" and at.layer >= layers and not names_of(family).mtp_layer:
        return (
            f"{name}: layer {at.layer} is beyond the {layers} layers of config.json, and family {family} has no MTP "
            "block there; correct num_hidden_layers, or the checkpoint is of another family"
        )
    if at and at.root == "model" and at.rest in names_of(family).mtp_layer:
        return (
            f"{name}: belongs in an MTP layer, but layer {at.layer} is one of the {layers} layers of config.json; "
            "correct num_hidden_layers"
        )
    numberless = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", name))
    near = difflib.get_close_matches(numberless, forms(family), 1, cutoff=0.0)
    return f"{name}: family {family} has no such tensor; nearest known form: {near[0]}; unknown tensors are never guessed"


def forms(family: str) -> dict[str, Form]:
    """Every full form of a family -> what it is. `{layer}` stands for a layer's number, `{expert}` for an expert's."""
    names = names_of(family)
    found = {**names.outside, **names.mtp}
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
    names = names_of(family)
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
