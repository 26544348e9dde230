"""TARGET of a command line -> a model recipe and the checkpoint it is about.

A target is the name of a model recipe, a checkpoint folder, or a Hugging Face id. A folder or id without a recipe gets one made
from its config.json: precisions and reference of tiny-glm, or what fits its shapes instead; speculation if it has an MTP head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.atomic_files import naming
from assay.callbacks import Say, say_nothing
from assay.errors import AssayError, CheckpointError, PlanError, did_you_mean, nearest
from assay.foreign_text import one_line, safe_name, shown
from assay.quantities import and_more
from assay.recipes.families import family_of, quantization_of
from assay.recipes.family_names import add_family, family_file, names_of, take_up_family
from assay.recipes.load import load_recipe, recipe_file, recipe_names, recipes_dir
from assay.recipes.model import HUB_ID, Location, ModelRecipe, Reference, Serving
from assay.recipes.mtp import mtp_block
from assay.recipes.profile import ProfileRecipe
from assay.records.manifest import load_manifest
from assay.records.run import SourceData, folder_name
from assay.safe_files import MAX_JSON_BYTES, read_json_object
from assay.safetensors_index import tensor_names

if TYPE_CHECKING:
    from assay_quantize.checkpoint.checkpoint import Checkpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_URL = re.compile(r"https?://.*", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"([A-Za-z0-9][\w.-]*|\[[0-9A-Fa-f:.]+\]):\d{1,5}(/\S*)?")


@dataclass(frozen=True)
class Target:
    """What a command is about. `location.path` is absolute or relative to the working directory."""

    recipe: ModelRecipe
    location: Location
    typed: str = ""
    """As it stands on the command line, for messages that say what to type."""
    choices: tuple[tuple[str | None, str], ...] = ()
    """What was chosen for a checkpoint without a recipe because of its shapes: (precision taken, None if one is left out; a
    sentence that says why)."""
    opened: Checkpoint | None = field(default=None, compare=False, repr=False)
    """The source by its headers, where they were read to choose the precisions; None: not read yet (`open_source`)."""
    unopened: AssayError | None = field(default=None, compare=False, repr=False)
    """Why the headers are those of no source, where they were read; None: they are, or were not read yet."""

    def on_profile(self, profile: ProfileRecipe) -> Target:
        """The target with the precisions that its recipe has for a profile."""
        return replace(self, recipe=self.recipe.on_profile(profile.name))

    def compared_with(self, reference: Reference | None) -> Target:
        """The target with another reference; None: its recipe's."""
        return self if reference is None else replace(self, recipe=self.recipe.model_copy(update={"reference": reference}))

    @property
    def is_own_reference(self) -> bool:
        """Whether its source is named as what candidates are compared with."""
        release, source = self.recipe.reference.release, self.location
        if release is None or release.path is None or source.path is None:
            return release is not None and release.hub is not None and release.hub == source.hub
        return Path(release.path).resolve() == Path(source.path).resolve()


def resolve_target(text: str, base_model: str | None = None, mtp: str | None = None, reference: str | None = None) -> Target:
    """The model that `text` names; AssayError says what was tried.

    base_model: hub id of a source in a folder, for cards. mtp: `drop`: no precision keeps an MTP block, and nothing drafts.
    reference: a checkpoint folder or hub id, instead of what the recipe compares candidates with.
    """
    release = None if reference is None else Reference(release=_location_of(reference))
    target = replace(_target_of(text, release), typed=text)
    if mtp is not None:
        serving = target.recipe.serving.model_copy(update={"num_speculative_tokens": None})
        target = replace(target, recipe=target.recipe.model_copy(update={"mtp": mtp, "serving": serving}))
    if base_model is None:
        return target
    if re.fullmatch(HUB_ID, base_model) is None:
        raise AssayError(f"--base-model {shown(base_model)}: is not a repository id; write OWNER/NAME, such as zai-org/GLM-5")
    if target.location.path is None:
        raise AssayError(f"--base-model: {text} is read from the hub, which names it already; leave the option out")
    return replace(target, recipe=target.recipe.model_copy(update={"base_model": base_model}))


def _target_of(text: str, reference: Reference | None) -> Target:
    """reference: instead of the recipe's."""
    if text in recipe_names("models") or text.endswith((".yaml", ".yml")):
        return _recipe_target(text).compared_with(reference)
    if url_in(text) is not None:
        raise CheckpointError(
            f"{shown(text)}: is a server's address; give a model recipe's name, a checkpoint folder or a Hugging Face id"
        )
    folder = Path(text).expanduser()
    if folder.exists() or not may_be_on_the_hub(text):
        if not folder.exists():
            raise CheckpointError(no_such_folder(text, folder))
        _check_no_gguf(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{text}: is a file; give the checkpoint's folder (with config.json and *.safetensors)")
        take_up_family_of(folder)
        config = read_json_object(folder, "config.json")
        recipe = _recipe_for(folder_name(folder), Location(path=str(folder)), config, tensor_names(folder), folder)
        return _fitted(Target(recipe, Location(path=str(folder))).compared_with(reference))
    for name in recipe_names("models"):
        recipe = load_recipe(ModelRecipe, name)
        if recipe.source.hub == text:
            return Target(recipe, recipe.source).compared_with(reference)
    stored = open_stored(Location(hub=text))
    recipe = _recipe_for(text.split("/")[1], Location(hub=text), stored.config, stored.tensors, None)
    return _fitted(Target(recipe, Location(hub=text)).compared_with(reference), stored)


def take_up_family_of(folder: Path) -> None:
    """Know the family of the user's own that the checkpoint in `folder` was made with, as its manifest says. What is wrong with
    a manifest is for others to say."""
    with suppress(AssayError):
        manifest = load_manifest(folder)
        if manifest is not None and manifest.own_family is not None:
            take_up_family(manifest.own_family)


def _location_of(text: str) -> Location:
    """Of a checkpoint folder or a hub id."""
    folder = Path(text).expanduser()
    if folder.exists() or not may_be_on_the_hub(text):
        if not folder.is_dir():
            raise CheckpointError(f"--reference {shown(text)}: no such folder; give a checkpoint's folder or a Hugging Face id")
        return Location(path=str(folder))
    return Location(hub=text)


def gguf_files(place: Path) -> list[str]:
    """Names of the GGUF files that a file or folder consists of; empty: it has other weights, or none."""
    if place.is_file():
        return [place.name] if place.suffix == ".gguf" else []
    return [] if any(place.glob("*.safetensors")) else sorted(path.name for path in place.glob("*.gguf"))


def _check_no_gguf(place: Path) -> None:
    """CheckpointError: it is a GGUF file, or a folder that has no other weights."""
    from assay_quantize.checkpoint.native import is_candidate

    if files := gguf_files(place):
        raise is_candidate(str(place), f"its weights are GGUF, {and_more(files)}")


def url_in(text: str) -> str | None:
    """The URL of a server, if `text` is one; HOST:PORT is one as well, unless something of that name lies on the disk."""
    if _URL.fullmatch(text):
        return text
    return f"http://{text}" if _HOST_AND_PORT.fullmatch(text) and not Path(text).exists() else None


def may_be_on_the_hub(text: str) -> bool:
    """Whether `text` reads as a Hugging Face id, and not as a path: a mistyped path must not be asked of the hub."""
    return _HUB_ID.fullmatch(text) is not None and not Path(text.split("/")[0]).exists()


def no_such_folder(text: str, folder: Path) -> str:
    """What is missing, and what may have been meant."""
    models = recipe_names("models")
    if "/" not in text:
        return (
            f"{shown(text)}: no such folder, and no model recipe of that name; {did_you_mean(text, models)}"
            f"known recipes: {', '.join(models)}; or give a Hugging Face id such as zai-org/GLM-4.5-Air"
        )
    existing = next(parent for parent in folder.parents if parent.exists())
    missing = folder.relative_to(existing).parts[0]
    beside = [path.name for path in existing.iterdir() if path.is_dir()] if existing.is_dir() else []
    line = f"{shown(text)}: no such folder: {existing.resolve() if existing == Path() else existing} has no '{shown(missing)}'"
    if (near := nearest(missing, beside)) is not None:
        line += f"; did you mean {shown(existing / near)}?"
    else:
        line += "; give a checkpoint's folder (with config.json and *.safetensors)"
    if _HUB_ID.fullmatch(text):
        line += "; a Hugging Face id cannot begin with the name of a folder that is here"
    return line


def local_checkpoint(location: Location, source: SourceData | None = None, say: Say = say_nothing) -> Path:
    """The folder of `location`; a hub id is downloaded into the Hugging Face cache first (weights included).

    source: what a plan was made from, if this is it: then that very commit, whatever was pushed since, and every file is held
    against the hash that the hub states. Raises CheckpointError like `download_model`.
    """
    if location.path is not None:
        return Path(location.path)
    from assay_quantize.checkpoint.hub import check_hashes_stated
    from assay_quantize.remote.hub_download import download_model

    assert location.hub is not None
    if source is None or source.files is None:
        return download_model(location.hub, location.revision, {})
    check_hashes_stated(location.hub, source.files)
    say(f"{location.hub}: its {len(source.files)} files are compared with the hashes that the hub states")
    return download_model(location.hub, source.revision or location.revision, source.files)


def _recipe_target(text: str) -> Target:
    """The model of a shipped recipe or of a recipe's file; relative folders in it become relative to the working directory.

    CheckpointError: a relative source is not there.
    """
    recipe, file = load_recipe(ModelRecipe, text), recipe_file(ModelRecipe, text)
    if recipe.family.endswith((".yaml", ".yml")):
        add_family(recipe.family)
    is_shipped = file.resolve().parent == (recipes_dir() / "models").resolve()
    base = recipes_dir().parent if is_shipped else file.parent
    folder, release = recipe.source.path, recipe.reference.release
    if folder is not None and not Path(folder).is_absolute() and not (base / folder).is_dir():
        hint = (
            "checkpoints of shipped recipes lie in a clone and not in the wheel; work in a clone, or give a checkpoint folder"
            if is_shipped
            else "a relative path starts at the folder of the recipe's file; correct it, or write it absolute"
        )
        whole = one_line(str((base / folder).resolve()))
        raise CheckpointError(f"{shown(text)}: source.path {shown(folder)}: no such folder {whole}; {hint}")
    if release is not None:
        recipe = recipe.model_copy(update={"reference": Reference(release=_below(base, release))})
    return Target(recipe, _below(base, recipe.source))


def _below(base: Path, location: Location) -> Location:
    """With a relative folder of a recipe, which starts at `base`, relative to the working directory.

    Absolute where it lies elsewhere: records name the source, and should read alike on every machine.
    """
    if location.path is None or Path(location.path).is_absolute():
        return location
    folder = (base / location.path).resolve()
    return Location(path=str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder))


def _recipe_for(
    name: str, location: Location, config: dict[str, Any], tensors: Iterable[str] | None, folder: Path | None
) -> ModelRecipe:
    """A recipe for a checkpoint that has none. What is guessed here is printed by `assay plan` and kept in the records.

    tensors: their names; None: there are none yet.
    """
    try:
        family = family_of(config)
    except PlanError as problem:
        raise PlanError(f"{folder or location.hub}/{problem}") from None
    return ModelRecipe(
        schema=1,
        name=safe_name(name),
        description=f"Made from the config of {name}.",
        source=location,
        family=family_file(family),
        reference=Reference(precision="fp8"),
        precisions=("fp8", "w4a16", "nvfp4a16"),
        include_source=not quantization_of(config),  # an FP8 source is its own FP8 reference
        suite="full",
        profiles=("8xb200", "8xh200", "4xh200", "8xrtx-pro-6000", "cpu-emulated"),
        serving=Serving(
            reasoning_parser=names_of(family).reasoning_parser if folder is not None and _thinks(folder) else None,
            num_speculative_tokens=1 if mtp_block(config, tensors).num_layers else None,
        ),
    )  # fmt: skip


def _fitted(target: Target, checkpoint: Checkpoint | None = None) -> Target:
    """The target with precisions that fit the shapes of the checkpoint; which and why is in its recipe's description too.

    checkpoint: as it is stored; None: the folder's. What cannot be opened, or is no source, is left to whoever opens it, with
    an error of its own.
    """
    from assay_quantize.plan.planner import choose_fitting

    recipe = target.recipe
    try:
        opened = source_in(target, checkpoint or open_stored(target.location))
    except AssayError as problem:
        return replace(target, unopened=problem)
    try:
        target = replace(target, opened=opened)
        recipe = recipe.model_copy(update={"profiles": _sharing_profiles(recipe.profiles, opened.config)})
        target = replace(target, recipe=recipe)
        chosen = choose_fitting(opened, recipe.precisions)
    except AssayError:
        return target
    choices = tuple((choice.precision, choice.sentence) for choice in chosen if choice.sentence is not None)
    fits = {choice.requested: choice.precision for choice in chosen}
    changed = {
        "precisions": tuple(choice.precision for choice in chosen if choice.precision is not None),
        "reference": recipe.reference
        if recipe.reference.precision is None
        else Reference(precision=fits.get(recipe.reference.precision) or recipe.reference.precision),
        "description": " ".join([recipe.description, *(f"{reason}." for _, reason in choices)]),
    }
    return replace(target, recipe=recipe.model_copy(update=changed), choices=choices) if choices else target


def _sharing_profiles(names: Iterable[str], config: dict[str, Any]) -> tuple[str, ...]:
    """Profiles whose GPUs can share the model's attention heads."""
    from assay_quantize.plan.fits import ranks_of, uneven_heads

    return tuple(name for name in names if not uneven_heads(config, ranks_of(load_recipe(ProfileRecipe, name))))


def _thinks(folder: Path) -> bool:
    """Whether the chat template, or another small file that has it, mentions a thinking section."""
    for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        if path.is_file() and path.stat().st_size <= MAX_JSON_BYTES:
            with naming(path):
                if "</think>" in path.read_text(encoding="utf-8", errors="replace"):
                    return True
    return False


def open_source(target: Target, say: Say = say_nothing) -> Checkpoint:
    """The source by its headers, which are read once for a target that has kept them (`Target.opened`); its notes are said.

    Raises CheckpointError: it is no source but a candidate, and the line names the command that judges it.
    """
    checkpoint = target.opened or source_in(target, open_stored(target.location))
    for note in checkpoint.notes:
        say(f"note: {note}")
    if checkpoint.foreign is not None:
        say(f"note: {foreign_note(target.typed or checkpoint.location, checkpoint.foreign)}")
    return checkpoint


def source_in(target: Target, stored: Checkpoint) -> Checkpoint:
    """The source of a target, of the headers as they are stored. CheckpointError: as `open_source`."""
    from assay_quantize.checkpoint.checkpoint import as_source
    from assay_quantize.checkpoint.source_format import check_config_readable

    how = refuse_copy(target, stored)
    check_config_readable(stored.location, stored.config)
    return replace(as_source(stored), foreign=how)


def refuse_copy(target: Target, stored: Checkpoint) -> str | None:
    """CheckpointError: a target's weights are a quantized copy, and nobody named it as what others are compared with.

    Returns how they are quantized, if somebody did; None: they are the model's own.
    """
    from assay_quantize.checkpoint.native import foreign_quantization, is_candidate

    how = foreign_quantization(stored)
    if how is not None and not target.is_own_reference:
        raise is_candidate(stored.location, how, stored)
    return how


def resolve_source(text: str, base_model: str | None = None, mtp: str | None = None, reference: str | None = None) -> Target:
    """As `resolve_target`, for commands that make something of TARGET's weights or compare with them.

    Raises CheckpointError: it is no source but a candidate, and the line names the command that judges it. Of a model recipe
    whose source is on the hub, and of a folder that cannot be opened, that is left to whoever opens it.
    """
    target = resolve_target(text, base_model, mtp, reference)
    if target.opened is not None:
        return target
    if target.location.path is None:
        if target.unopened is not None:
            raise target.unopened
        return target
    try:
        stored = open_stored(target.location)
    except AssayError:
        return target
    refuse_copy(target, stored)
    return target


def local_source(target: Target, *, say: Say) -> Path:
    """The folder of a target's source, as `local_checkpoint`. CheckpointError: as `open_source`, of what was downloaded."""
    folder = local_checkpoint(target.location, None, say)
    if target.location.path is None:
        source_in(target, open_stored(Location(path=str(folder))))
    return folder


def foreign_note(name: str, how: str) -> str:
    """What is said wherever a quantized copy is what others are compared with."""
    return f"{shown(name)} is a quantized copy ({how}) and is compared with as it is: what it lost itself is in no verdict"


def open_stored(location: Location) -> Checkpoint:
    """A checkpoint by its headers, quantized in any way: its tensors as they are stored."""
    if location.path is not None:
        from assay_quantize.checkpoint.checkpoint import open_checkpoint

        return open_checkpoint(Path(location.path), allow_quantized=True)
    from assay_quantize.checkpoint.hub import open_hub_checkpoint

    assert location.hub is not None
    return open_hub_checkpoint(location.hub, location.revision, allow_quantized=True)


def source_label(config: dict[str, Any]) -> Literal["bf16", "fp16", "fp32", "source"]:
    """What the source is called in a run: its dtype, or `source` when it is published in FP8."""
    if quantization_of(config):
        return "source"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    labels: dict[str, Literal["bf16", "fp16", "fp32"]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if dtype not in labels:
        raise AssayError(f"config.json: dtype {dtype!r} is not one of {', '.join(labels)}")
    return labels[dtype]


def run_name(text: str) -> str:
    """What the model given as MODEL is called: the recipe's name, the folder's, or the last part of a hub id.

    It looks at recipes and folders: never for what a server calls itself, which is `safe_name`'s.
    """
    if text in recipe_names("models"):
        return text
    folder = Path(text).expanduser()
    return folder_name(folder) if folder.exists() else safe_name(text.rstrip("/").split("/")[-1])
