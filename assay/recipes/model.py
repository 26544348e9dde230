"""Model recipes: where the weights are, the family, the reference, the default precisions, how it is served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field
from pydantic_core import PydanticKnownError

from assay.errors import AssayError, RecipeError
from assay.foreign_text import shown
from assay.quantities import Budget, budget_of
from assay.recipes import own_families
from assay.recipes.base import MOST_AT_ONCE, Recipe, Section, beside, recipe_names, refused_secrets
from assay.recipes.calibrated.texts import MAX_LENGTH, TextNames, text_beside
from assay.recipes.precision import SchemeName
from assay.recipes.variant import Variants


def _known_family(name: str) -> str:
    is_own = name in own_families.RECORDED or name.endswith((".yaml", ".yml"))
    if not is_own and name not in (known := recipe_names("families")):
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, known))})
    return name


FamilyName = Annotated[str, AfterValidator(_known_family)]


HUB_ID = r"^[A-Za-z0-9][\w.-]*/[\w.-]+$"
"""OWNER/NAME."""


class Location(Section):
    """Where a checkpoint is: a folder, or a Hugging Face id with a revision. A relative folder starts at the recipe's file; in
    a recipe that ships with assay, at the repository."""

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
    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens of prompt and reply together, where the model's own context needs more KV cache than GPUs have; a profile's
    `max-model-len` wins. None: the model's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    vllm: dict[str, Any] = Field(default_factory=dict)
    """More flags under vLLM's own names; a profile's flags win."""

    def _contradictions(self) -> Iterator[str]:
        for name in ("chat_template_kwargs", "vllm"):
            yield from refused_secrets(getattr(self, name), name)


class Sampling(Section):
    """How a model is asked, by its card or generation_config.json; the recipe names the source in a comment."""

    temperature: float = Field(ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Length of a reply, thinking included, for tasks with `budget: model`. None: what the suite says."""


class PublishedScore(Section):
    """What the model's publisher reports for one task of a suite, with the protocol as far as it is stated."""

    value: float = Field(gt=0, le=1)
    """Share right; of several replies to each item their mean (avg@k), never pass@k."""
    num_items: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0)
    """None: not stated; the score is then shown and not compared."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    max_tokens: int | None = Field(default=None, ge=1)
    """None: not stated. A smaller budget here is no other protocol: cut replies are what the comparison is to find."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """None: not stated."""
    tools: bool = False
    source: str = Field(pattern=r"^https://")


class Licence(Section):
    """Of the source's weights, as its page on the hub states it; a card repeats it."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """One of the hub's: `mit`, `apache-2.0`, `other` (https://huggingface.co/docs/hub/repositories-licenses)."""
    name: str | None = None
    """Of `other`."""
    link: str | None = None
    """Of `other`: where its text is, or the name of its file."""

    def _contradictions(self) -> Iterator[str]:
        if (self.id == "other") != (self.name is not None and self.link is not None):
            yield "`name` and `link` are for `id: other`, and it needs both"


class SpeedPoints(Section):
    """What `assay speed` measures where the command says nothing. None: as the command does by itself."""

    concurrency: tuple[Annotated[int, Field(ge=1, le=MOST_AT_ONCE)], ...] | None = Field(default=None, min_length=1)
    """Requests in flight."""
    speculation: tuple[Annotated[int, Field(ge=0, le=MOST_AT_ONCE)], ...] | None = Field(default=None, min_length=1)
    """Tokens drafted a step; 0: off."""
    prompts: tuple[str, ...] | None = Field(default=None, min_length=1)
    repeats: int | None = Field(default=None, ge=1, le=1000)
    starts: int | None = Field(default=None, ge=1, le=100)
    """Of each server; its repeats are dealt out to them."""
    requests: int | None = Field(default=None, ge=1)
    """Of a repeat."""
    output_tokens: int | None = Field(default=None, ge=2)
    """Longest reply."""
    prompt_tokens: int | None = Field(default=None, ge=128)
    """Of `long` prompts."""

    def options(self) -> dict[str, Any]:
        """Those that are said, under the names of a ladder's fields; numbers each once and in order."""
        told = {"num_requests" if name == "requests" else name: value for name, value in self if value is not None}
        return told | {name: tuple(sorted(set(told[name]))) for name in ("concurrency", "speculation") if name in told}


PREFIX = "auto-"


@dataclass(frozen=True)
class Automatic:
    """A precision that is not there yet. name: also of the recipe that is chosen, and of its checkpoint."""

    name: str
    budget: Budget


def is_automatic(name: str) -> bool:
    """Whether it is no recipe's name or file, but that of a mix to be chosen."""
    return name.startswith(PREFIX) and not name.endswith((".yaml", ".yml"))


def automatic_of(name: str) -> Automatic:
    """RecipeError: what stands behind `auto-` is no budget."""
    try:
        return Automatic(name, budget_of(name.removeprefix(PREFIX), f"precision {shown(name)}"))
    except AssayError as problem:
        raise RecipeError(f"{problem}: {PREFIX}405GB, {PREFIX}4.5bpw") from None


class AutomaticMix(Section):
    """`automatic:` of a model's recipe: how `auto-BUDGET` is chosen (`assay sensitivity`, then `assay recipe`).

    proxy: kl: the divergence itself, part by part. schemes: that are measured and chosen from. base: the precision that
    says which roles are chosen for and what is kept; None: w4a16. hardware: profile of the GPUs it must run on; None: a
    choice by bytes alone. texts: that damages are measured on, replies: the model's to generated questions, which are none
    of a suite's; own: what it samples by itself, as calibrations do; or files, as for `assay sensitivity --text`, which a
    model that does not fit into memory needs. tokens, length: of these. slack: as of `assay recipe`.
    """

    proxy: Literal["kl"] = "kl"
    schemes: tuple[SchemeName, ...] = Field(default=("w4a16", "w4a16_g32", "nvfp4a16", "fp8_block"), min_length=1)
    base: str | None = None
    hardware: str | None = None
    texts: Literal["replies", "own"] | Annotated[tuple[str, ...], Field(min_length=1)] = "replies"
    tokens: int = Field(default=16_384, ge=64)
    length: int = Field(default=256, ge=8, le=MAX_LENGTH)
    seed: int = Field(default=0, ge=0)
    slack: float = Field(default=0.02, ge=0, le=0.5)

    def _contradictions(self) -> Iterator[str]:
        if "fp8_static" in self.schemes:
            yield "schemes: fp8_static needs a calibration file and has the weights of fp8_channel; name that"

    def found_from(self, folder: Path) -> Self:
        """With the files that it names relative to the working directory. folder: of the recipe."""
        return self.model_copy(
            update={
                "base": None if self.base is None else beside(folder, self.base),
                "hardware": None if self.hardware is None else beside(folder, self.hardware),
                "texts": self.texts if isinstance(self.texts, str) else tuple(str(folder / text) for text in self.texts),
            }
        )


class CalibrationData(Section):
    """`calibration:` of a model's recipe: what precisions that need to know what enters weights are made with.

    file: what `assay calibrate` made; None: a run makes it in its folder, for the precisions that cannot do without. text: of
    GPTQ and AWQ as well, where the precision names none. withhold: suites and runs whose items no text may hold; None: as
    `assay calibrate` does by default. tokens: the most, where `tokens_per_expert` says when every expert saw enough.
    """

    file: str | None = None
    text: TextNames = ()
    withhold: tuple[str, ...] | None = None
    tokens: int = Field(default=65_536, ge=1)
    tokens_per_expert: int | None = Field(default=None, ge=1)
    length: int = Field(default=512, ge=8, le=MAX_LENGTH)
    min_tokens: int = Field(default=64, ge=1)
    seed: int = Field(default=0, ge=0)

    def _contradictions(self) -> Iterator[str]:
        made = {"tokens", "tokens_per_expert", "length", "min_tokens", "seed"} & self.model_fields_set
        if self.file is not None and made:
            yield f"{', '.join(sorted(made))}: of a file that is made, and `file` names one that is there; say one of them"

    def found_from(self, folder: Path) -> Self:
        """With its files relative to the working directory. folder: of the recipe."""
        more: dict[str, Any] = {"text": tuple(text_beside(folder, text) for text in self.text)}
        if self.file is not None:
            more["file"] = str(folder / self.file)
        if self.withhold is not None:
            more["withhold"] = tuple(beside(folder, suite) for suite in self.withhold)
        return self.model_copy(update=more)


class ModelRecipe(Recipe):
    """Precisions, suite, gates and profiles are names, or YAML files relative to the model's."""

    source: Location
    base_model: str | None = Field(default=None, pattern=HUB_ID)
    """Of a source in a folder: the hub id of the model, which cards name as their `base_model`."""
    family: FamilyName
    """That of the checkpoint's config.json; one of your own by its file, relative to the recipe's."""
    licence: Licence | None = None
    """None: not known here; a card then goes by the LICENSE file that came with the weights."""
    reference: Reference
    precisions: tuple[str, ...]
    """Candidates made by default: names, files, or `auto-BUDGET`, whose schemes the run chooses."""
    mtp: Literal["drop"] | None = Field(default=None, exclude_if=lambda action: action is None)
    """drop: every precision leaves the MTP block out, as with `mtp: drop` of its own. None: each does what it says."""
    automatic: AutomaticMix = AutomaticMix()
    """How `auto-BUDGET` is chosen."""
    calibration: CalibrationData | None = None
    """What calibrated precisions are made with. None: what they cannot do without is made by the run, with the defaults; those
    that search scales (`observer: mse`) then do without channel weights."""
    precisions_on: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Profile -> candidates made by default where it is used, since its GPUs cannot share the groups of others."""
    include_source: bool = False
    """Serve and score the unquantized source too (small models; the noise between reference and candidates)."""
    suite: str = "full"
    gates: str | None = None
    """With `suite`. None: those that the suite names, or that have its name, or `default`."""
    profiles: tuple[str, ...] = ("cpu-emulated",)
    """Allowed profiles, best first; the first whose hardware is present is the default. Reference and candidates fit."""
    deployment_profiles: tuple[str, ...] = ()
    """Profiles that the candidates fit and the reference does not: there each is compared with itself (`assay deployment`)."""
    sampling: Sampling | None = None
    """As the model's card says; tasks with `sampling: model` ask so. None: as the suite says."""
    published: dict[str, PublishedScore] = Field(default_factory=dict)
    """Task of a suite -> published score of the source. A reference that misses it makes the task's verdicts NOT MEASURED."""
    serving: Serving = Serving()
    variants: Variants = Field(default_factory=dict, exclude_if=lambda variants: not variants)
    """Name -> another way of serving, measured where `--variant NAME` asks for it; a profile's of that name wins."""
    speed: SpeedPoints = SpeedPoints()

    def found_from(self, folder: Path) -> Self:
        named: dict[str, Any] = {
            "precisions": tuple(beside(folder, precision) for precision in self.precisions),
            "precisions_on": {
                profile: tuple(beside(folder, precision) for precision in names)
                for profile, names in self.precisions_on.items()
            },
            "profiles": tuple(beside(folder, name) for name in self.profiles),
            "deployment_profiles": tuple(beside(folder, name) for name in self.deployment_profiles),
            "family": beside(folder, self.family),
            "suite": beside(folder, self.suite),
            "gates": None if self.gates is None else beside(folder, self.gates),
        }
        named["automatic"] = self.automatic.found_from(folder)
        named["calibration"] = None if self.calibration is None else self.calibration.found_from(folder)
        if self.reference.precision is not None:
            named["reference"] = Reference(precision=beside(folder, self.reference.precision))
        return self.model_copy(update=named)

    def on_profile(self, name: str) -> Self:
        """The recipe as it is where the profile of that name is used."""
        return self.model_copy(update={"precisions": self.precisions_on.get(name, self.precisions)})

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        yield from self._contradictions_of_automatic()
        known = {Path(profile).stem for profile in (*self.profiles, *self.deployment_profiles)}
        for unused in sorted(self.precisions_on.keys() - known):
            yield f"precisions_on: {unused} is none of the recipe's profiles ({', '.join(sorted(known))})"
        for twice in sorted(set(self.profiles) & set(self.deployment_profiles)):
            yield f"{twice} is named under `profiles` and under `deployment_profiles`; the reference fits it or does not"

    def _contradictions_of_automatic(self) -> Iterator[str]:
        """A budget stands behind `auto-`; the reference is none of these, since it is what damages are compared with."""
        for name in dict.fromkeys(
            (*self.precisions, *(other_name for names in self.precisions_on.values() for other_name in names))
        ):
            if is_automatic(name):
                try:
                    automatic_of(name)
                except RecipeError as problem:
                    yield f"precisions: {problem}"
        if self.reference.precision is not None and is_automatic(self.reference.precision):
            yield f"reference: {self.reference.precision} is chosen in the run; name a precision that is there before"
