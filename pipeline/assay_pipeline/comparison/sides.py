"""`assay evaluate --reference ... --candidate ...`: any checkpoints, by folder, or by the URL of a server that has one.

A value is DIR, URL, or URL,DIR (a server, and the folder that it serves), each with LABEL= before it if it is to be called so;
or a label of the profile's `endpoints`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import AssayError, CheckpointError
from assay.foreign_text import safe_name
from assay.quantities import and_more
from assay.recipes.address import problem_with
from assay.recipes.load import load_recipe, recipe_names
from assay.recipes.model import Location, ModelRecipe
from assay.recipes.profile import GivenServer, Hardware, ProfileRecipe
from assay.records.base import sha256_of_file
from assay.records.run import ReferenceCheckpoint, RunRecord, folder_name
from assay_evaluate.serving.api_key import bearer
from assay_pipeline.comparison.checkpoints import Comparison, foreign_in, other_source
from assay_pipeline.comparison.damage import damage_in, damage_note
from assay_pipeline.profiles import profile_for
from assay_pipeline.run_folders import read_run
from assay_pipeline.targets import Target, gguf_files, resolve_target, take_up_family_of, url_in

if TYPE_CHECKING:
    from assay_evaluate.run.candidate import Candidate
    from assay_evaluate.serving.server import Server

GIVEN = ProfileRecipe(
    schema=1,
    name="given",
    description="Servers that were given by their URLs; what they run on is not known.",
    hardware=Hardware(device="cuda"),
)
"""The profile of an evaluation whose servers run already, if none is named."""
_LABELLED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)", re.DOTALL)


@dataclass(frozen=True)
class Side:
    """One value of --reference or --candidate. label: what the user calls it. endpoint: None, if it is to be served here."""

    label: str | None
    folder: Path | None
    endpoint: GivenServer | None = None


def split_values(text: str) -> list[str]:
    """Values separated by commas; a folder that follows a URL belongs to it. A path that exists is one value, commas or not."""
    if text and Path(text).exists():
        return [text]
    values: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        before = values[-1] if values else ""
        is_folder = _LABELLED.fullmatch(part) is None and _url_of(part) is None
        if is_folder and "," not in before and _url_of(before) is not None:
            values[-1] = f"{before},{part}"
        else:
            values.append(part)
    return values


def split_label(text: str) -> tuple[str | None, str]:
    """(LABEL, the rest) of LABEL=REST; (None, text) without a label. What exists by that name has none."""
    labelled = None if Path(text).exists() else _LABELLED.fullmatch(text)
    return (labelled[1], labelled[2]) if labelled else (None, text)


def _url_of(text: str) -> str | None:
    """The URL in [LABEL=]URL; None: it is a folder, or a label of the profile."""
    labelled = _LABELLED.fullmatch(text)
    return url_in(labelled[2] if labelled else text)


def parse_side(side: str, text: str, endpoints: Mapping[str, GivenServer], api_key_env: str | None) -> Side:
    """side: `reference` or `candidate`, for messages. AssayError: the text means nothing."""
    if text in endpoints and not Path(text).is_dir():
        endpoint = endpoints[text]
        return Side(text, None if endpoint.checkpoint is None else Path(endpoint.checkpoint), endpoint)
    label, what = split_label(text)
    address, _, folder = what.partition(",")
    if (url := url_in(address)) is None and "://" in address and not Path(what).exists():
        url = address  # of another scheme: the next check says so without repeating what may be a password
    if url is None:
        return _served_at(Side(label, Path(what)), endpoints)
    if endpoints:
        raise AssayError(f"{side}: a URL, and the profile has `endpoints`; say where the servers are in one place")
    if (problem := problem_with(url)) is not None:
        raise AssayError(f"{side}: {problem}")
    return Side(label, Path(folder) if folder else None, GivenServer(url=url, api_key_env=api_key_env))


def _served_at(side: Side, endpoints: Mapping[str, GivenServer]) -> Side:
    """With the server of the profile, where that names servers."""
    if not endpoints:
        return side
    assert side.folder is not None, "a value without URL is a folder"
    label = side.label or folder_name(side.folder)
    if label not in endpoints:
        raise AssayError(
            f"{side.folder}: is called {label}, and the profile's `endpoints` are for {', '.join(endpoints)}; add it there, or "
            "give one of these labels"
        )
    named = endpoints[label].checkpoint
    if named is not None and Path(named).resolve() != side.folder.resolve():
        raise AssayError(f"{side.folder}: the profile's `endpoints` say that {label} is {named}; give one of them")
    return Side(label, side.folder, endpoints[label])


def parse_sides(
    reference: str, candidates: list[str], endpoints: Mapping[str, GivenServer], api_key_env: str | None
) -> list[Side]:
    """The reference, then the candidates. AssayError: a value means nothing, or the key is for nobody."""
    first, *more = split_values(reference) or [""]
    if more:
        raise AssayError(f"reference: names {1 + len(more)} checkpoints; there is one reference")
    sides = [parse_side("reference", first, endpoints, api_key_env)]
    values = dict.fromkeys(value for text in candidates for value in split_values(text))
    sides += [parse_side("candidate", value, endpoints, api_key_env) for value in values]
    labels = [side.label for side in sides if side.label is not None]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise AssayError(f"label {twice[0]}: is used twice; give every checkpoint a label of its own (LABEL= before it)")
    if api_key_env is not None:
        if endpoints or all(side.endpoint is None for side in sides):
            raise AssayError(
                "--api-key-env: is for URLs of the command line; in a profile, each endpoint has its `api_key_env`"
            )
        bearer(api_key_env, "--api-key-env")
    return sides


def given_endpoints(profile: str | None) -> dict[str, GivenServer]:
    """Servers that run already, by label, if a profile is named that has some."""
    return {} if profile is None else load_recipe(ProfileRecipe, profile).endpoints


def profile_of(
    target: Target,
    requested: str | None,
    *,
    given: bool,
    problem_on: Callable[[ProfileRecipe], str | None] | None = None,
    tensor_parallel_size: int | None = None,
) -> ProfileRecipe:
    """How the checkpoints are served; of servers that run already (given), how they are asked. problem_on: as `profile_for`."""
    if not given:
        return profile_for(target, requested, problem_on, tensor_parallel_size=tensor_parallel_size)
    return GIVEN if requested is None else load_recipe(ProfileRecipe, requested)


# ------------------------------------------------------------------------------------------------ what is compared
def model_of(sides: list[Side], target: str | None) -> Target:
    """The model, whose recipe says how it is asked: the one that the user named, else the reference's.

    CheckpointError: no such folder. MeasureError: two sides name one server, or only some name one; nothing was asked then.
    """
    from assay_evaluate.run.weights import require_separate_servers

    for side in sides:
        if side.folder is not None:
            _check_there(side.folder)
            take_up_family_of(side.folder)
    unasked = _unasked(sides)
    require_separate_servers(unasked)
    if target is not None:
        return resolve_target(target)
    folder = sides[0].folder
    return _known_by(_join(unasked[0])) if folder is None else resolve_target(str(folder))


def _check_there(folder: Path) -> None:
    if files := gguf_files(folder):
        raise CheckpointError(
            f"{folder}: its weights are GGUF, {and_more(files)}, which vLLM 0.32 does not serve; serve it with llama-server, "
            "and give the URLs of both: `assay judge REFERENCE_URL URL`"
        )
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; give a checkpoint's folder, or a server as http://HOST:PORT")
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give the folder of a checkpoint (with config.json and *.safetensors)")


def of_sides(target: Target, sides: list[Side], runs: Path) -> Comparison:
    """The reference and the candidates. Other data than the reference's is allowed; it is a note of the measurement."""
    for side in sides:
        if side.folder is not None and not (side.folder / "config.json").is_file():
            raise CheckpointError(f"{side.folder}: no checkpoint there (no config.json)")
    unasked = _unasked(sides)
    servers = [_join(candidate) for candidate in unasked]
    labels = [_label(side, server) for side, server in zip(sides, servers, strict=True)]
    if len(set(labels)) != len(labels) and all(side.label is None for side in sides):
        labels = [f"{label}-{number}" for number, label in enumerate(labels)]
    identity = _identity(sides[0], servers[0], target.recipe.name, runs)
    first = replace(unasked[0], label=labels[0], is_reference=True, sha256=identity.checkpoint_sha256)
    first = replace(first, notes=_damage(first))
    others = [
        replace(candidate, label=label, notes=(*_notes(first, candidate), *_damage(candidate)))
        for label, candidate in zip(labels[1:], unasked[1:], strict=True)
    ]
    foreign = None if sides[0].folder is None else foreign_in(sides[0].folder)
    return Comparison([first, *others], RunRecord(model=target.recipe.name, reference=identity, foreign_reference=foreign))


def _unasked(sides: list[Side]) -> list[Candidate]:
    """Of every side what is known before its server was asked."""
    from assay_evaluate.run.candidate import Candidate

    return [Candidate(_provisional(side, number), side.folder, endpoint=side.endpoint) for number, side in enumerate(sides)]


def _provisional(side: Side, number: int) -> str:
    """What a side is called until its server was asked."""
    if side.label is not None or side.folder is not None:
        return side.label or folder_name(side.folder or Path())
    return "reference" if number == 0 else f"candidate {number}"


def _join(candidate: Candidate) -> Server | None:
    from assay_evaluate.serving.server import join

    if candidate.endpoint is None:
        return None
    return join(candidate.endpoint, label=candidate.label, checkpoint=candidate.checkpoint, profile=GIVEN.name)


def _label(side: Side, server: Server | None) -> str:
    """What the user says, the folder's name, or the end of what the server says it loaded."""
    if side.label is not None or side.folder is not None:
        return side.label or folder_name(side.folder or Path())
    assert server is not None and server.root is not None, "a side is a folder or a server"
    return _name_of(server.root)


def _name_of(root: str) -> str:
    """The end of what a server says it loaded: a folder's name, as `folder_name` has it, or that of a model of the hub."""
    return safe_name(root.rstrip("/").removesuffix("/checkpoint").rpartition("/")[2])


def _known_by(server: Server | None) -> Target:
    """The model whose hub id a server tells, if there is a recipe for it; else one of which nothing is known."""
    assert server is not None and server.root is not None, "a side is a folder or a server"
    for name in recipe_names("models"):
        recipe = load_recipe(ModelRecipe, name)
        if recipe.source.hub == server.root:
            return Target(recipe, recipe.source)
    location = Location(hub=server.root)
    return Target(_unknown_model(_name_of(server.root), location), location)


def _unknown_model(name: str, location: Location) -> ModelRecipe:
    """A model of which nothing is known but its name: asked in the usual way.

    It is neither quantized nor served here, so it has no family and no reference of its own.
    """
    return ModelRecipe.model_construct(
        schema_version=1, name=name, description="Known by its server only.", source=location, precisions=(), suite="quick",
    )  # fmt: skip


def _notes(reference: Candidate, candidate: Candidate) -> tuple[str, ...]:
    if reference.checkpoint is None or candidate.checkpoint is None:
        return ()
    if reference.checkpoint.resolve() == candidate.checkpoint.resolve():
        return (f"the folder of the reference {reference.label} itself: its weights are compared with themselves",)
    note = other_source(reference.checkpoint, candidate.checkpoint, reference.label)
    return () if note is None else (note,)


def _damage(candidate: Candidate) -> tuple[str, ...]:
    if candidate.checkpoint is None or (damage := damage_in(candidate.checkpoint)) is None:
        return ()
    return (damage_note(candidate.checkpoint, damage),)


# ------------------------------------------------------------------------------------------------ which reference it is
def _identity(reference: Side, server: Server | None, model: str, runs: Path) -> ReferenceCheckpoint:
    """The reference; of unchanged files, or of a server with the same weights, as an earlier run recorded it."""
    first = runs / safe_name(model)
    records = [read_run(folder) for folder in (first, *sorted(runs.glob(f"{first.name}-*")))]
    earlier = [record.reference for record in records if record is not None and record.reference is not None]
    if reference.folder is not None:
        return _identity_of_folder(reference.folder, earlier)
    assert server is not None, "a side is a folder or a server"
    return _identity_of_server(server, earlier)


def _identity_of_folder(folder: Path, earlier: list[ReferenceCheckpoint]) -> ReferenceCheckpoint:
    from assay.file_data import data_of_files
    from assay_evaluate.run.identity import checkpoint_sha256, hashed_files

    files = data_of_files(folder, [path.name for path in hashed_files(folder)])
    for reference in earlier:
        if reference.files == files:
            return reference.model_copy(update={"location": str(folder)})
    return ReferenceCheckpoint(location=str(folder), checkpoint_sha256=checkpoint_sha256(folder, sha256_of_file), files=files)


def _identity_of_server(server: Server, earlier: list[ReferenceCheckpoint]) -> ReferenceCheckpoint:
    from assay_evaluate.run.weights import sign_given, unnamed_sha256

    signature = sign_given("reference", server)
    for reference in earlier:
        if reference.signature is not None and reference.signature.agrees_with(signature):
            return reference.model_copy(update={"location": server.base_url})
    sha256 = unnamed_sha256(server, signature)
    return ReferenceCheckpoint(location=server.base_url, checkpoint_sha256=sha256, signature=signature)
