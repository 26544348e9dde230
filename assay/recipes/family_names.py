"""How each architecture names its tensors: name -> role, fused group, MTP block; and the modules vLLM must leave alone.

A family is a file of `recipes/families/` (`family.py`): a table of *forms*, names with `{expert}` for the expert's number,
inside a decoder layer, in the MTP block or outside. A name has exactly one form (a dictionary look-up) or it is a PlanError
that names the nearest form known. Which family a model is of, its config says (`families.py`). Imports neither torch nor vllm.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from assay.errors import PlanError, RecipeError
from assay.recipes import own_families
from assay.recipes.base import recipe_names, recipes_dir
from assay.recipes.family import FamilyBlock, FamilyRecipe, Form, MtpStep, NativeQuantization, Stacked
from assay.recipes.load import load_recipe
from assay.recipes.text_config import num_hidden_layers


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
    MTP layer, or the same ones with another form there. mtp: whole names of an MTP block outside its layers. mtp_required:
    without these an MTP block is incomplete. mtp_lacks, mtp_step, mtp_not_kept: as in `MtpNames`. mtp_experts: whether an MTP
    layer has routed experts. layers, mtp_layers: what stands in front of the number of a decoder layer, of an MTP layer (None:
    they follow the decoder layers). experts: name of a layer's experts, `mlp.experts`; projections: the weights of one of them,
    in the order of the table. mtp_runtime_layers: `MtpNames.runtime_layers`. kept, kept_in_layers, stacked, joined, apart,
    kinds, runtime, older_names, native_quantization, expert_schemes, mxfp4_experts_alone, packed_as_vllm: as in
    `FamilyRecipe`.
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
    mtp_experts: bool
    mtp_lacks: tuple[str, ...]
    mtp_step: MtpStep | None
    mtp_not_kept: Mapping[str, str]
    layers: str
    mtp_layers: str | None
    mtp_runtime_layers: str | None
    experts: str
    projections: tuple[str, ...]
    kept: tuple[str, ...]
    kept_in_layers: tuple[str, ...]
    stacked: Mapping[str, Stacked]
    joined: Mapping[str, tuple[str, str, str]]
    apart: Mapping[str, str]
    kinds: tuple[str, ...]
    runtime: Mapping[str, str]
    older_names: Mapping[str, str]
    native_quantization: tuple[NativeQuantization, ...]
    expert_schemes: tuple[str, ...]
    mxfp4_experts_alone: bool
    packed_as_vllm: bool

    def runtime_name(self, module: str) -> str:
        """What vLLM calls a module of the checkpoint, before it fuses any; an MTP layer keeps its number."""
        for part, runtime_part in self.runtime.items():
            module = re.sub(rf"(?<![^.]){re.escape(part)}(?![^.])", runtime_part, module)
        return module

    def name_of_older(self, name: str) -> str:
        """What the family calls a tensor or module that an older checkpoint has under another name."""
        return next(
            (f"{new}{name[len(older) :]}" for older, new in self.older_names.items() if f"{name}.".startswith(f"{older}.")),
            name,
        )

    def is_table(self, name: str) -> bool:
        """Whether `name` lies in a module that stays as it is inside the layers (`kept_in_layers`)."""
        at = split_layer(name)
        return at is not None and at.rest.startswith(tuple(f"{module}." for module in self.kept_in_layers))

    def is_beside_mtp_layers(self, name: str) -> bool:
        """Whether `name` is one of `mtp`."""
        at = split_layer(name)
        return name in self.mtp or (at is not None and f"{at.root}.{{layer}}.{at.rest}" in self.mtp)

    def runtime_namer(self, config: Mapping[str, Any]) -> Callable[[str], str]:
        """`runtime_name` for one model, whose MTP layers may go on with the numbers of its decoder layers."""
        if self.mtp_runtime_layers is None:
            return self.runtime_name
        first, root = num_hidden_layers(config), self.mtp_runtime_layers

        def rename(module: str) -> str:
            at = split_layer(module)
            if at is not None and at.root == self.mtp_layers:
                module = f"{root}.{first + at.layer}.{at.rest}"
            return self.runtime_name(module)

        return rename


def family_names() -> list[str]:
    """The families that ship with assay, sorted, and behind them those of the user's own."""
    return [*recipe_names("families"), *own_families.FILES]


def add_family(file: str) -> str:
    """Have this process know the family of a file; its name. It is asked before those that ship.

    RecipeError: the file is wrong, or is called as another family is.
    """
    recipe = load_recipe(FamilyRecipe, file)
    path = str(Path(file).absolute())
    if recipe.name in recipe_names("families") or own_families.FILES.get(recipe.name, path) != path:
        raise RecipeError(f"{file}: name {recipe.name}: another family is called so; give yours a name of its own")
    own_families.FILES[recipe.name] = path
    names_of.cache_clear()
    return recipe.name


def recorded_family(family: str) -> dict[str, Any] | None:
    """What plan and manifest keep of a family of the user's own, whole: the names of its blocks are among its own, so that no
    file is needed to read it. None: it ships with assay."""
    if family not in own_families.FILES and family not in own_families.RECORDED:
        return None
    return _whole(_own_recipe(family)).model_dump(mode="json", by_alias=True, exclude_defaults=True)


def take_up_family(recorded: Mapping[str, Any]) -> str:
    """Have this process know the family that a record has; its name. It is asked behind all others, and one of the same name
    that ships or was given by its file counts instead. RecipeError: it is none."""
    try:
        recipe = FamilyRecipe.model_validate(recorded)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecipeError(f"own_family: {where}: {first['msg']}; restore the record, or give the file with --family") from None
    if recipe.blocks:  # files of another machine
        raise RecipeError("own_family: blocks: must be empty in a record; restore the record, or give the file with --family")
    if recipe.name not in recipe_names("families") and recipe.name not in own_families.FILES:
        own_families.RECORDED[recipe.name] = recipe
        names_of.cache_clear()
    return recipe.name


def _own_recipe(family: str) -> FamilyRecipe:
    return own_families.RECORDED[family] if family in own_families.RECORDED else load_recipe(FamilyRecipe, family_file(family))


def _whole(recipe: FamilyRecipe) -> FamilyRecipe:
    """The same family without blocks."""
    parts: list[FamilyBlock] = [*(load_recipe(FamilyBlock, block) for block in recipe.blocks), recipe]

    def merged(table: str, of: Callable[[FamilyBlock], Any] = lambda part: part) -> dict[str, Any]:
        return {name: told for part in parts for name, told in getattr(of(part), table).items()}

    mtp = recipe.mtp.model_copy(
        update={
            "layers": next((part.mtp.layers for part in reversed(parts) if part.mtp.layers is not None), None),
            "layer": merged("layer", lambda part: part.mtp),
            "outside": merged("outside", lambda part: part.mtp),
            "experts": all(part.mtp.experts for part in parts),
            "required": tuple(name for part in parts for name in part.mtp.required),
        }
    )
    tables = {table: merged(table) for table in ("outside", "layer", "stacked", "joined", "runtime")}
    return recipe.model_copy(update={**tables, "mtp": mtp, "blocks": ()})


def family_file(family: str) -> str:
    """What a recipe says of a family: its name, or its file if it is the user's own."""
    return own_families.FILES.get(family, family)


@functools.cache
def names_of(family: str) -> FamilyNames:
    """The names of a family, or of the one in a file; files are read once. RecipeError: no such family, or a file is wrong."""
    recipe = _own_recipe(family)
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
    of_experts = [name for name in layer if "{expert}" in name and name.endswith(".weight")]
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
        mtp_lacks=recipe.mtp.lacks,
        mtp_step=recipe.mtp.step,
        mtp_not_kept=recipe.mtp.not_kept,
        mtp_experts=all(part.mtp.experts for part in parts),
        layers=recipe.layers,
        mtp_layers=next((part.mtp.layers for part in reversed(parts) if part.mtp.layers is not None), None),
        mtp_runtime_layers=recipe.mtp.runtime_layers,
        experts=of_experts[0].partition(".{expert}")[0] if of_experts else "",
        projections=tuple(name.split(".")[-2] for name in of_experts),
        kept=recipe.kept,
        kept_in_layers=recipe.kept_in_layers,
        stacked={name: stacked for part in parts for name, stacked in part.stacked.items()},
        joined={name: members for part in parts for name, members in part.joined.items()},
        apart=recipe.apart,
        kinds=recipe.kinds,
        runtime={name: runtime_part for part in parts for name, runtime_part in part.runtime.items()},
        older_names={older: name for part in parts for older, name in part.older_names.items()},
        native_quantization=recipe.native_quantization,
        expert_schemes=recipe.expert_schemes,
        mxfp4_experts_alone=recipe.mxfp4_experts_alone,
        packed_as_vllm=recipe.packed_as_vllm,
    )


def families_with(word: str) -> Iterator[FamilyNames]:
    """Families in whose files `word` stands: the others need not be read through."""
    yield from map(names_of, own_families.FILES)
    for family in recipe_names("families"):
        if word in (recipes_dir() / "families" / f"{family}.yaml").read_text(encoding="utf-8"):
            yield names_of(family)
    yield from map(names_of, own_families.RECORDED)


_NUMBERED = re.compile(r"(.+?)\.(0|[1-9]\d*)\.(.+)")
"""What stands in front of the first number in a name, the number, and what stands behind it."""
_KEPT, _KEPT_WEIGHT = Form(role="other"), Form(role="other", kind="plain")


# ------------------------------------------------------------------------------------------------ names
class InLayer(NamedTuple):
    """`model.layers.3.mlp.gate.weight` -> ("model.layers", 3, "mlp.gate.weight"); the root is `mtp.layers` in an MTP block."""

    root: str
    layer: int
    rest: str


def split_layer(name: str) -> InLayer | None:
    """Where in the model a tensor lies, by the first number in its name; None: there is none."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else InLayer(match[1], int(match[2]), match[3])


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
    if at is None or at.root not in (names.layers, names.mtp_layers):
        return _find_outside(names, name, at)
    expert, form = None, names.layer.get(at.rest)
    if form is None and any(at.rest.startswith(f"{module}.") for module in names.kept_in_layers):
        form = _kept(name)
    if form is None and (in_expert := _NUMBERED.fullmatch(at.rest)):
        expert, form = int(in_expert[2]), names.layer.get(f"{in_expert[1]}.{{expert}}.{in_expert[3]}")
    inside = at.root == names.mtp_layers or at.layer >= layers
    if inside:
        has_block = at.root == names.mtp_layers or (names.mtp_layers is None and bool(names.mtp_layer))
        form = names.mtp_layer.get(at.rest, form) if has_block else None
    return at.layer, expert, inside, form


def _find_outside(names: FamilyNames, name: str, at: InLayer | None) -> tuple[int | None, int | None, bool, Form | None]:
    """As `_find`, of what is in no layer: a whole name, one that is the same but for a number, or of a module that is kept."""
    if name in names.mtp:
        return None, None, True, names.mtp[name]
    if name in names.outside:
        return None, None, False, names.outside[name]
    if at is not None and (numbered := f"{at.root}.{{layer}}.{at.rest}") in names.mtp:
        return at.layer, None, True, names.mtp[numbered]
    kept = any(name.startswith(f"{module}.") for module in names.kept)
    return None, None, False, _kept(name) if kept else None


def _kept(name: str) -> Form:
    return _KEPT_WEIGHT if name.endswith(".weight") else _KEPT


def _unknown(family: str, name: str, config: Mapping[str, Any]) -> str:
    at, layers = split_layer(name), num_hidden_layers(config)
    names = names_of(family)
    if at and at.root == names.layers and at.layer >= layers and (names.mtp_layers or not names.mtp_layer):
        return (
            f"{name}: layer {at.layer} is beyond the {layers} layers of config.json, and family {family} has no MTP "
            "block there; correct num_hidden_layers, or the checkpoint is of another family"
        )
    if at and at.root == names.layers and at.rest in names.mtp_layer:
        return (
            f"{name}: belongs in an MTP layer, but layer {at.layer} is one of the {layers} layers of config.json; "
            "correct num_hidden_layers"
        )
    numberless = re.sub(r"\.\d+\.", ".{expert}.", re.sub(r"\.\d+\.", ".{layer}.", name, count=1))
    near = difflib.get_close_matches(numberless, forms(family), 1, cutoff=0.0)
    return f"{name}: family {family} has no such tensor; nearest known form: {near[0]}; unknown tensors are never guessed"


def forms(family: str) -> dict[str, Form]:
    """Every full form of a family -> what it is. `{layer}` stands for a layer's number, `{expert}` for an expert's."""
    names = names_of(family)
    form_by_name = {**names.outside, **names.mtp}
    inlined = names.mtp_layer if names.mtp_layers is None else {}
    form_by_name |= {f"{names.layers}.{{layer}}.{rest}": form for rest, form in {**names.layer, **inlined}.items()}
    if names.mtp_layers is not None:
        form_by_name |= {
            f"{names.mtp_layers}.{{layer}}.{rest}": form for rest, form in {**names.layer, **names.mtp_layer}.items()
        }
    return form_by_name


# ------------------------------------------------------------------------------------------------ ignore patterns
def ignore_patterns(
    family: str,
    quantized: Collection[str],
    *,
    mtp: Literal["keep", "quantize", "drop"],
    mtp_layers: Collection[int],
) -> tuple[str, ...]:
    """Patterns for `ignore` in config.json: modules that vLLM must expect unquantized.

    quantized: roles that are quantized. mtp_layers: numbers of MTP layers that follow the decoder layers, in the checkpoint or
    in vLLM. vLLM matches `re:X` by `re.match`, which is anchored in front only, so every pattern is closed with `$`, its dots
    escaped. Where a family has a role that this checkpoint lacks, the pattern matches nothing; the planner drops it.
    """
    names = names_of(family)
    outside = {module.rpartition(".")[2] for module in _unquantizable(names.outside)} | {"lm_head", "embed_tokens"}
    patterns = [rf"re:(.*\.)?{leaf}$" for leaf in sorted(outside, reverse=True)]
    kept: dict[str, list[str]] = {}
    for name, form in names.layer.items():
        if form.kind in ("plain", "bare") or (form.kind == "linear" and form.part not in quantized):
            module = name.removesuffix(".weight")
            for spelling in dict.fromkeys((module, names.runtime_name(module))):
                parent, _, leaf = spelling.rpartition(".")
                kept.setdefault(parent, []).append(leaf)
    for parent, leaves in kept.items():
        leaves = asked_of_vllm(parent, leaves)
        within = rf"{numberless(parent)}\." if parent else ""
        patterns.append(rf"re:.*\.{within}{alternatives(leaves)}$")
    whole = (*names.kept, *names.kept_in_layers)
    patterns += [rf"re:(.*\.)?{re.escape(module.rpartition('.')[2])}\..*$" for module in whole]
    if mtp != "drop":
        patterns += _mtp_patterns(names, mtp == "quantize", sorted(mtp_layers))
    return tuple(patterns)


def asked_of_vllm(parent: str, leaves: Sequence[str]) -> list[str]:
    """The last components under which vLLM looks for the scheme of these modules.

    Of experts without a gate projection it also asks for one that is called None (`CompressedTensorsMoEMethod.get_moe_method`,
    0.32), and refuses to start if that has another scheme; of gate and up in one weight it asks by the names of the two.
    parent: `mixer.experts.{expert}`.
    """
    if not parent.endswith(".{expert}"):
        return list(leaves)
    if "gate_up_proj" in leaves:
        return [*leaves, "gate_proj", "up_proj"]
    return [*leaves, "None"] if len(leaves) == 2 else list(leaves)


def _unquantizable(forms: Mapping[str, Form]) -> list[str]:
    """Modules whose weight vLLM loads only unquantized."""
    return [name.removesuffix(".weight") for name, form in forms.items() if form.kind in ("plain", "bare")]


def alternatives(names: Sequence[str]) -> str:
    """A regular expression for one of `names`, which are expressions themselves."""
    return names[0] if len(names) == 1 else f"({'|'.join(names)})"


def numberless(module: str) -> str:
    """A module's name as a regular expression, for any number of its expert or layer."""
    return re.escape(module).replace(r"\{expert\}", r"\d+").replace(r"\{layer\}", r"\d+")


def _mtp_patterns(names: FamilyNames, quantized: bool, layers: list[int]) -> list[str]:
    """The whole block when it is kept; else what vLLM never loads quantized, under vLLM's own names too."""
    inside = sorted(_unquantizable(names.mtp_layer))
    inside += [runtime_module for module in inside if (runtime_module := names.runtime_name(module)) != module]
    if names.mtp_layers is None:
        which = alternatives([re.escape(module) for module in inside]) if quantized else ".*"
        return [rf"re:.*layers\.{layer}\.{which}$" for layer in layers if inside or not quantized]
    if quantized:
        modules = _unquantizable(names.mtp) + [f"{names.mtp_layers}.{{layer}}.{module}" for module in inside]
        expressions = list(map(numberless, modules))
        if names.mtp_runtime_layers is not None:
            of_layers = [re.escape(f"{names.mtp_runtime_layers}.{layer}.{module}") for layer in layers for module in inside]
            expressions += of_layers
        return [rf"re:(.*\.)?{module}$" for module in expressions]
    modules = [name.rpartition(".")[0].removesuffix(".{layer}") for name in names.mtp if name.endswith(".weight")]
    roots = {_mtp_root(module): module for module in [*modules, names.mtp_layers]}
    whole = {root for root, module in roots.items() if root == module and f"{root}.weight" in names.mtp}
    ends = {root: "" if root in whole else r"\..*" for root in sorted(roots)}
    patterns = [rf"re:(.*\.)?{re.escape(root)}{end}$" for root, end in ends.items()]
    if names.mtp_runtime_layers is not None:
        patterns += [rf"re:(.*\.)?{re.escape(names.mtp_runtime_layers)}\.{layer}\..*$" for layer in layers]
    return patterns


def _mtp_root(name: str) -> str:
    """`mtp` of `mtp.layers`, `model.mtp_block` of `model.mtp_block.0`: up to the first component that is called MTP."""
    parts = name.split(".")
    end = next((number for number, part in enumerate(parts, 1) if "mtp" in part), len(parts) - 1)
    return ".".join(parts[:end])
