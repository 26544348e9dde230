"""Recipes: what a person writes. YAML, strict, frozen; five kinds, one folder each under `recipes/`.

    models/      a model: where its weights are, its family, what it is compared with, which precisions, how it is served
    precisions/  what to quantize, by role, and what to keep
    profiles/    how vLLM is run on some hardware; the one open block `vllm:` is passed on verbatim, under vLLM's flag names
    suites/      what is measured
    gates/       limits, written down before the run

An invalid file gives one error that names the file and lists all of its problems. Needs neither torch nor vllm.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import Field

from assay.errors import RecipeError
from assay.gate_recipe import GateRecipe
from assay.recipe_base import Recipe, Section
from assay.recipe_defaults import EXTENDS, MAX_DEPTH, with_defaults
from assay.recipe_problems import problems_in
from assay.records import Role
from assay.suite_recipe import SuiteRecipe

ROLES: tuple[str, ...] = get_args(Role)
Family = Literal["glm4_moe", "glm_moe_dsa", "deepseek_v3", "qwen3_moe", "qwen3_next"]
SchemeName = Literal[
    "w4a16", "w4a16_g32", "w4a16_channel", "w4a16_asym", "fp8_block", "fp8_channel", "nvfp4a16", "mxfp4", "mxfp8", "w8a8",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ models
class Location(Section):
    """Where a checkpoint is: a folder (relative to the repository), or a Hugging Face id with a revision."""

    path: str | None = None
    hub: str | None = None
    revision: str = "main"

    def _contradictions(self) -> Iterator[str]:
        if (self.path is None) == (self.hub is None):
            yield "say either `path` (a folder) or `hub` (an id such as zai-org/GLM-5), not both or neither"


class Reference(Section):
    """What candidates are compared with: a published release, or a precision that is made here."""

    precision: str | None = None
    release: Location | None = None

    def _contradictions(self) -> Iterator[str]:
        if (self.precision is None) == (self.release is None):
            yield "say either `precision` (made here from the source) or `release` (a published checkpoint)"


class Serving(Section):
    """What the model itself needs to be served right, whatever the hardware."""

    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1)
    """Draft tokens per step with the model's own MTP head; None: no speculation."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    vllm: dict[str, Any] = Field(default_factory=dict)
    """More flags under vLLM's own names; a profile's flags win."""


class ModelRecipe(Recipe):
    source: Location
    family: Family
    reference: Reference
    precisions: tuple[str, ...]
    """Candidates made by default."""
    include_source: bool = False
    """Serve and score the unquantized source too (small models; the noise between reference and candidates)."""
    suite: str = "full"
    gates: str = "default"
    profiles: tuple[str, ...] = ("cpu-emulated",)
    """Allowed profiles, best first; the first whose hardware is present is the default."""
    serving: Serving = Serving()


# ------------------------------------------------------------------------------------------------ precisions
class PrecisionRecipe(Recipe):
    """What is quantized and what is kept, by role."""

    loader_keys = (EXTENDS,)
    scheme: SchemeName
    quantize: tuple[Role, ...]
    keep: dict[Literal["source", "bf16", "fp32"], tuple[Role, ...]]
    """dtype -> roles. `source`: whatever dtype the source has. A role is named once, in `quantize` or here."""
    mtp: Literal["keep", "quantize", "drop"] = "keep"
    """keep: in the dtype role `mtp` has under `keep`. quantize: inside the block like outside, `eh_proj` exempt.
    drop: the block is removed and the config rewritten."""
    calibration: Literal["none"] = "none"
    """The only value: every scheme is computed from the weights alone. The field stays because it is part of `sha256`."""
    observer: Literal["minmax", "mse"] = "minmax"
    """How scales are found. minmax: from the largest weight of the group. mse: searched for the least squared error, weighted
    by what a calibration file says of each input channel where one is given."""

    def _contradictions(self) -> Iterator[str]:
        """Each role is named once; what vLLM loads only unquantized is kept; router_bias stays exact."""
        named = [*self.quantize, *(role for roles in self.keep.values() for role in roles)]
        for twice in sorted({role for role in named if named.count(role) > 1}):
            yield f"role {twice} is named twice; name each role once, under `quantize` or one `keep` dtype"
        missing = [role for role in ROLES if role not in named]
        if missing:
            roles, each = ("roles", "are named nowhere; put each") if missing[1:] else ("role", "is named nowhere; put it")
            yield f"{roles} {', '.join(missing)} {each} under `quantize` or under `keep: {{bf16: [...]}}`"
        for never in sorted({"norm", "router", "router_bias", "embedding", "mtp"} & set(self.quantize)):
            hint = "say `mtp: quantize`" if never == "mtp" else "vLLM loads it only unquantized; move it to `keep`"
            yield f"role {never} cannot be under `quantize`: {hint}"
        if "router_bias" in self.keep.get("bf16", ()):
            yield "router_bias must be kept in fp32: in BF16 it changes the chosen experts of most tokens"

    def kept_dtype(self, role: str) -> Literal["source", "bf16", "fp32"] | None:
        """The dtype `role` is kept in, or None if it is quantized."""
        for dtype, roles in self.keep.items():
            if role in roles:
                return dtype
        return None


# ------------------------------------------------------------------------------------------------ profiles
class Hardware(Section):
    """What a profile needs. `gpu` is matched, without case, inside the device name the driver reports."""

    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    num_gpus: int = 0
    memory_bytes_each: int | None = None


class ProfileRecipe(Recipe):
    hardware: Hardware
    emulate: bool = False
    """Serve quantized checkpoints through assay's plugin: dequantized weights, quantize-dequantized activations."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own flags without the dashes in front: `max-model-len: 4096`. Passed verbatim; `true` is a bare flag."""
    environment: dict[str, str] = Field(default_factory=dict)
    startup_timeout_s: float = Field(default=600.0, gt=0)
    concurrency: int = Field(default=8, ge=1)
    """Requests in flight while measuring, per server."""
    interpreter: str | None = None
    """Python of another environment that has vLLM; default: `.venv-serve`."""
    base_url: str | None = None
    """A server that runs already (one checkpoint only); nothing is started then."""
    base_urls: tuple[str, ...] = ()
    """Several such servers of the same checkpoint: they share the items, each item always goes to the same one."""

    def _contradictions(self) -> Iterator[str]:
        if self.base_url is not None and self.base_urls:
            yield "say either `base_url` or `base_urls`"
        for twice in sorted({url for url in self.base_urls if self.base_urls.count(url) > 1}):
            yield f"`base_urls` names {twice} twice"

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers that run already; empty: one is started."""
        return self.base_urls if self.base_url is None else (self.base_url,)


# ------------------------------------------------------------------------------------------------ loading
R = TypeVar("R", bound=Recipe)

KINDS: dict[str, type[Recipe]] = {
    "models": ModelRecipe,
    "precisions": PrecisionRecipe,
    "profiles": ProfileRecipe,
    "suites": SuiteRecipe,
    "gates": GateRecipe,
}


def recipes_dir() -> Path:
    """The folder `recipes/`: beside the package in a checkout, inside it in a wheel."""
    inside = Path(__file__).parent / "_recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def recipe_names(kind: str) -> list[str]:
    """Names of the recipes of one kind that ship with assay, sorted."""
    return sorted(path.stem for path in (recipes_dir() / kind).glob("*.yaml"))


def load_recipe(kind: type[R], name_or_path: str) -> R:
    """The recipe called `name_or_path`, or in the file of that path.

    A precision may have `extends: NAME`, where NAME is a shipped precision or the path of a YAML file relative to its own, and
    then holds only what differs. Its values replace the inherited ones; the roles it names under `quantize` and `keep` move
    there (`recipe_defaults.py`). The resolved recipe is returned and hashed; `extends` is not part of it.

    Raises RecipeError if there is no recipe of that name, or with all problems of the file (`problems_in`).
    """
    return parse_recipe(kind, _file_of(kind, name_or_path))


def parse_recipe(kind: type[R], path: Path) -> R:
    """Read and validate one file, together with the recipe it extends."""
    return _parse(kind, path, ())


def _file_of(kind: type[Recipe], name_or_path: str) -> Path:
    folder = next(folder for folder, model in KINDS.items() if model is kind)
    if Path(name_or_path).suffix in {".yaml", ".yml"}:
        return Path(name_or_path)
    path = recipes_dir() / folder / f"{name_or_path}.yaml"
    if Path(name_or_path).name != name_or_path or not path.is_file():
        known = recipe_names(folder)
        near = difflib.get_close_matches(name_or_path, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(f"no {folder[:-1]} recipe called {name_or_path!r}; {hint}known: {', '.join(known)}")
    return path


def _parse(kind: type[R], path: Path, above: tuple[Path, ...]) -> R:
    """above: the files that led here through `extends`, outermost first."""
    data = _read(path)
    if EXTENDS in data and EXTENDS in kind.loader_keys:
        base = _parse(kind, _extended_file(kind, path, data.pop(EXTENDS), above), (*above, path))
        data = with_defaults(base.model_dump(mode="json", by_alias=True), data)
    if problems := problems_in(kind, data, path.stem):
        listed = problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems:", *problems])
        raise RecipeError(f"{path}: {listed}")
    return kind.model_validate(data)


def _extended_file(kind: type[Recipe], path: Path, named: Any, above: tuple[Path, ...]) -> Path:
    """The file that `path` extends. RecipeError: no such file, a circle, or a chain that is too long."""
    if not isinstance(named, str):
        raise RecipeError(f"{path}: extends: must be the name of a precision or the path of its file (got {str(named)[:80]!r})")
    try:
        found = _file_of(kind, named)
    except RecipeError as error:
        raise RecipeError(f"{path}: extends: {error}") from None
    found = path.parent / found  # the path of a shipped recipe is absolute
    if not found.is_file():
        raise RecipeError(f"{path}: extends: {found}: no such file; the path is relative to the recipe that names it")
    chain = [*above, path, found]
    way = " -> ".join(str(one) for one in chain)
    if found.resolve() in {one.resolve() for one in chain[:-1]}:
        raise RecipeError(f"{chain[0]}: extends: circular, {way}; one of these must not use `extends`")
    if len(chain) > MAX_DEPTH + 1:
        raise RecipeError(f"{chain[0]}: extends: more than {MAX_DEPTH} levels deep, {way}; extend a later recipe of this chain")
    return found


def _read(path: Path) -> dict[Any, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not YAML: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this file holds a {type(data).__name__}")
    return data
