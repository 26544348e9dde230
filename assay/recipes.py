"""Recipes: what a person writes. YAML, strict, frozen; five kinds, one folder each under `recipes/`.

    models/      a model: where its weights are, its family, what it is compared with, which precisions, how it is served
    precisions/  what to quantize, by role, and what to keep
    profiles/    how vLLM is run on some hardware; the one open block `vllm:` is passed on verbatim, under vLLM's flag names
    suites/      what is measured
    gates/       limits, written down before the run

An unknown key is an error that names the file, the key and the nearest allowed one. Needs neither torch nor vllm.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from assay.errors import RecipeError
from assay.probe_records import ProbeSettings
from assay.records import Role, sha256_of
from assay.swe_recipe import SweOptions

ROLES: tuple[str, ...] = get_args(Role)
Family = Literal["glm4_moe", "glm_moe_dsa", "deepseek_v3", "qwen3_moe", "qwen3_next"]
SchemeName = Literal[
    "w4a16", "w4a16_g64", "w4a16_g32", "w4a16_channel",
    "w4a16_asym", "w4a16_asym_g64", "w4a16_asym_g32", "w4a16_asym_channel",
    "fp8_block", "fp8_channel", "fp8_tensor", "nvfp4a16", "nvfp4", "mxfp4", "mxfp8", "w8a8",
]  # fmt: skip
NEEDS_CALIBRATION: dict[str, str] = {"nvfp4": "its activation scales (input_global_scale) are measured on data"}
"""Schemes that cannot be made from weights alone -> why."""


class Section(BaseModel):
    """Base of every recipe and part of one: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Recipe(Section):
    """A whole file. `schema: 1` is its first line."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    description: str = ""

    @property
    def sha256(self) -> str:
        """Identity of the recipe's meaning: comments and order do not count."""
        return sha256_of(self.model_dump(mode="json"))


# ------------------------------------------------------------------------------------------------ models
class Location(Section):
    """Where a checkpoint is: a folder (relative to the repository), or a Hugging Face id with a revision."""

    path: str | None = None
    hub: str | None = None
    revision: str = "main"

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("say either `path` (a folder) or `hub` (an id such as zai-org/GLM-5), not both or neither")
        return self


class Reference(Section):
    """What candidates are compared with: a published release, or a precision that is made here."""

    precision: str | None = None
    release: Location | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.precision is None) == (self.release is None):
            raise ValueError("say either `precision` (made here from the source) or `release` (a published checkpoint)")
        return self


class Serving(Section):
    """What the model itself needs to be served right, whatever the hardware."""

    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1)
    """Draft tokens per step with the model's own MTP head; None: no speculation."""
    chat_template_kwargs: dict[str, Any] = {}
    vllm: dict[str, Any] = {}
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

    scheme: SchemeName
    quantize: tuple[Role, ...]
    keep: dict[Literal["source", "bf16", "fp32"], tuple[Role, ...]]
    """dtype -> roles. `source`: whatever dtype the source has. A role is named once, in `quantize` or here."""
    mtp: Literal["keep", "quantize", "drop"] = "keep"
    """keep: in the dtype role `mtp` has under `keep`. quantize: inside the block like outside, `eh_proj` exempt.
    drop: the block is removed and the config rewritten."""
    calibration: Literal["none", "required"] = "none"
    observer: Literal["minmax", "mse"] = "minmax"
    """How scales are found. minmax: from the largest weight of the group. mse: searched for the least squared error, weighted
    by what a calibration file says of each input channel where one is given."""

    @model_validator(mode="after")
    def _each_role_once(self) -> Self:
        named = [*self.quantize, *(role for roles in self.keep.values() for role in roles)]
        twice = sorted({role for role in named if named.count(role) > 1})
        if twice:
            raise ValueError(f"role {twice[0]} is named twice; name each role once, under `quantize` or one `keep` dtype")
        missing = [role for role in ROLES if role not in named]
        if missing:
            raise ValueError(f"role {missing[0]} is named nowhere; put it under `quantize` or under `keep: {{bf16: [...]}}`")
        never = sorted({"norm", "router", "router_bias", "embedding", "mtp"} & set(self.quantize))
        if never:
            hint = "say `mtp: quantize`" if never[0] == "mtp" else "vLLM loads it only unquantized; move it to `keep`"
            raise ValueError(f"role {never[0]} cannot be under `quantize`: {hint}")
        if self.scheme == "fp8_tensor" and "routed_expert" in self.quantize:
            raise ValueError(
                "scheme fp8_tensor cannot be under `quantize` for routed_expert: vLLM's FP8 experts take scales by row or by "
                "block; choose fp8_channel or fp8_block, or move the role to `keep`"
            )
        if "router_bias" not in self.keep.get("fp32", ()) and "router_bias" not in self.keep.get("source", ()):
            raise ValueError("router_bias must be kept in fp32: in BF16 it changes the chosen experts of most tokens")
        return self

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
    vllm: dict[str, Any] = {}
    """vLLM's own flags without the dashes in front: `max-model-len: 4096`. Passed verbatim; `true` is a bare flag."""
    environment: dict[str, str] = {}
    startup_timeout_s: float = Field(default=600.0, gt=0)
    concurrency: int = Field(default=8, ge=1)
    """Requests in flight while measuring, per server."""
    interpreter: str | None = None
    """Python of another environment that has vLLM; default: `.venv-serve`."""
    base_url: str | None = None
    """A server that runs already (one checkpoint only); nothing is started then."""
    base_urls: tuple[str, ...] = ()
    """Several such servers of the same checkpoint: they share the items, each item always goes to the same one."""

    @model_validator(mode="after")
    def _one_way_to_name_servers(self) -> Self:
        if self.base_url is not None and self.base_urls:
            raise ValueError("say either `base_url` or `base_urls`")
        twice = sorted({url for url in self.base_urls if self.base_urls.count(url) > 1})
        if twice:
            raise ValueError(f"`base_urls` names {twice[0]} twice")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers that run already; empty: one is started."""
        return self.base_urls if self.base_url is None else (self.base_url,)


# ------------------------------------------------------------------------------------------------ suites
class TaskBase(Section):
    name: str
    max_tokens: int = Field(ge=1)
    """Budget of the whole reply, thinking included."""
    thinking_tokens: int | None = Field(default=None, ge=1)
    """Of `max_tokens`: after so many the server ends the thinking, the rest is left for the answer. Needs a reasoning parser,
    and is left out without one. None: one budget for both."""
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1: all tokens. Every other sampling parameter is pinned to its neutral value in every request."""
    num_samples: int = Field(default=1, ge=1)
    """Replies to each item: the score is the mean over them (avg@k, and pass@k beside it), its interval is over items."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("num_samples above 1 needs a temperature above 0: greedy replies to one question are all alike")
        return self

    @model_validator(mode="after")
    def _leaves_room_for_an_answer(self) -> Self:
        if self.thinking_tokens is not None and self.thinking_tokens >= self.max_tokens:
            raise ValueError(
                f"thinking_tokens {self.thinking_tokens} leaves no room for an answer; it is part "
                f"of max_tokens ({self.max_tokens})"
            )
        return self


RulerTaskName = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2", "needle_grid",
]  # fmt: skip
RULER_TASKS: tuple[RulerTaskName, ...] = get_args(RulerTaskName)[:-1]
"""The published thirteen."""


class ArithmeticTask(TaskBase):
    kind: Literal["arithmetic"]
    languages: tuple[Literal["en", "zh"], ...] = ("en", "zh")
    num_items: int = Field(ge=1)
    """Per language."""
    num_steps: tuple[int, ...] = (3, 4, 5)


class NeedleTask(TaskBase):
    kind: Literal["needle"]
    languages: tuple[Literal["en", "zh"], ...] = ("en", "zh")
    num_items: int = Field(ge=1)
    """Per language and length."""
    lengths_tokens: tuple[int, ...] = (1024,)
    num_needles: int = Field(default=5, ge=1)


class LmEvalTask(TaskBase):
    """Any task of lm-eval, by name, over HTTP."""

    kind: Literal["lm_eval"]
    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: str | None = None
    """Folder with task files of one's own; they may read local data files."""
    stop_strings: Literal["auto", "always", "never"] = "auto"
    """The task's own, cut from finished replies and never sent: a server would stop at them inside the thinking. auto: only
    where the checkpoint has no chat template, and replies run on."""
    metric: str | None = None
    """Of each document, right or wrong. None: the first the task lists."""
    filter: str | None = None
    """How the answer is taken from the reply, by lm-eval's name. None: `flexible-extract`, if there is that, or the first."""
    allow_code_execution: bool = False
    """Run what the model wrote on this machine, without a sandbox; tasks that score code need it."""


class RulerTask(TaskBase):
    """RULER's tasks, and the needle grid, generated for the reference's tokenizer and chat template."""

    kind: Literal["ruler"]
    tasks: tuple[RulerTaskName, ...] = RULER_TASKS
    lengths_tokens: tuple[int, ...]
    num_items: int = Field(ge=1)
    """Per task and length; of the needle grid, per cell."""
    style: Literal["auto", "base", "chat", "prefill"] = "auto"
    """auto: `chat` with a chat template, `base` without. prefill: the reply begins with the published words; a model that
    thinks first then cannot."""
    reply_within_length: bool = False
    """True: `max_tokens` are taken from the length. False: only the published 30 to 128 are, and the budget lies beyond it."""
    essays: str | None = None
    """Folder of .txt files to hide needles in. None: generated text."""
    squad: str | None = None
    """SQuAD JSON file for qa_1. None: generated questions."""
    hotpotqa: str | None = None
    """HotpotQA JSON file for qa_2. None: generated questions."""
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Of the needle grid: 0 the front, 1 the end."""
    languages: tuple[Literal["en", "zh", "es", "ru", "ja"], ...] = ("en",)
    """Of the needle grid."""


class ToolsTask(TaskBase):
    """Generated questions with tools to call, or not to: one cell for every number of tools and length of prompt."""

    kind: Literal["tools"]
    num_tools: tuple[Annotated[int, Field(ge=1, le=128)], ...] = (1, 8, 32, 128)
    prompt_tokens: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Of the whole prompt, tools included; dialogue before the question fills it. 0: no dialogue."""
    num_items: int = Field(ge=1)
    """Per cell and language."""
    languages: tuple[Literal["en", "zh", "es", "ru", "ja"], ...] = ("en",)
    """Of the questions; tools and their parameters are in English."""
    share_without_tool: float = Field(default=0.25, ge=0, le=1)
    """Of the items: a plain answer is right. Without such items a model that always calls something looks perfect."""

    @model_validator(mode="after")
    def _one_sample(self) -> Self:
        if self.num_samples > 1:
            raise ValueError("tools are asked about once each: ask for more num_items, the shares of cells are over items")
        return self


class SweTask(TaskBase, SweOptions):
    """SWE-bench: an agent's whole trajectories, graded by the official harness. `max_tokens` is the budget of one reply."""

    kind: Literal["swe"]


class DivergenceSpec(Section):
    """Next-token divergence on replies the reference samples at T=1."""

    languages: tuple[Literal["en", "zh"], ...] = ("en", "zh")
    num_documents: int = Field(ge=2)
    """Per language."""
    max_tokens: int = Field(ge=1)
    top_k: int = Field(default=64, ge=1)
    position_buckets: tuple[int, ...] = (0, 32, 64, 128, 256, 512, 1024, 4096, 32768)
    spans: tuple[int, ...] = (0, 4096, 32768)
    """First positions of the spans that gates can judge one by one, prompt included."""
    suite_documents: int = Field(default=0, ge=0)
    """Of every task: so many of its questions are answered once more at T=1, and the replies scored, thinking included."""
    held_out_documents: int = Field(default=0, ge=0)
    """Texts of `held_out_tokens` tokens that no model here wrote; generated ones per language."""
    held_out_tokens: int = Field(default=1024, ge=2)
    held_out: str | None = None
    """Folder of .txt files to take them from. None: generated sentences."""
    exact: bool = False
    """Also the full-vocabulary KL, from hidden states; needs one more start of a server per checkpoint."""

    @model_validator(mode="after")
    def _spans_ascend(self) -> Self:
        if not self.spans or self.spans[0] != 0 or list(self.spans) != sorted(set(self.spans)):
            raise ValueError(f"spans {list(self.spans)} must begin with 0 and ascend")
        return self


class SuiteRecipe(Recipe):
    seed: str
    """Items are drawn from this; it begins with `eval`, which training data never does."""
    tasks: tuple[
        Annotated[ArithmeticTask | NeedleTask | LmEvalTask | RulerTask | ToolsTask | SweTask, Field(discriminator="kind")],
        ...,
    ]
    divergence: DivergenceSpec | None = None
    acceptance: bool = True
    probes: ProbeSettings | None = None
    """Serving-fidelity probes of every checkpoint while it is served (docs/fidelity.md); concurrency is the profile's. None:
    not now, `assay probe` does them by themselves."""
    files_sha256: dict[str, str] = {}
    """Local files and folders that tasks name -> hash of what is in them. Filled in when the suite is read for a run: other
    data are another suite."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [task.name for task in self.tasks]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two tasks are called {twice[0]}; names are keys of the results")
        if not self.seed.startswith("eval"):
            raise ValueError(f"seed {self.seed!r} must begin with 'eval': other seeds may have been trained on")
        return self


# ------------------------------------------------------------------------------------------------ gates
class ScoreGate(Section):
    """Non-inferiority: the upper end of the paired interval of the drop must stay below `max_drop`."""

    kind: Literal["score"]
    task: str
    max_drop: float = Field(gt=0, lt=1)
    """In accuracy: 0.02 = two points."""
    claim: Literal["non_inferior", "equivalent"] = "non_inferior"
    """equivalent: a gain of `max_drop` must be excluded too (TOST)."""
    max_truncated: float | None = Field(default=None, ge=0, le=1)
    """Share of replies cut off, on either side, above which this task is NOT MEASURED. Default: the truncation gate's; without
    one, 5 %."""
    required: bool = True
    """False: where the *reference* cannot do the task (no score, hardly ever right, cut off), the gate is shown without a say
    in the overall verdict. A candidate that cannot do what the reference can is judged all the same."""


class DivergenceGate(Section):
    """Can fail a candidate, never certify it."""

    kind: Literal["divergence"]
    metric: Literal[
        "kl_mean", "kl_p99", "top1_agreement", "kl_unbiased_mean", "kl_p999", "kl_cvar95", "perplexity_ratio", "kl_exact_mean",
    ]  # fmt: skip
    max: float | None = None
    min: float | None = None
    texts: Literal["sampled", "held_out", "every"] = "sampled"
    """every: sampled and held-out ones, the worse of the two."""
    over: Literal["all", "spans"] = "all"
    """spans: every span of positions by itself, the worst of them: short texts cannot dilute what goes wrong in long ones."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.max is None) == (self.min is None):
            raise ValueError("say either `max` or `min`")
        if self.over == "spans" and self.metric != "kl_mean":
            raise ValueError("`over: spans` judges kl_mean")
        if self.texts != "sampled" and self.metric in {"kl_unbiased_mean", "kl_exact_mean"}:
            raise ValueError(f"{self.metric} is of sampled texts")
        return self


class AcceptanceGate(Section):
    kind: Literal["acceptance"]
    max_drop: float = Field(gt=0, lt=1)
    """Of the acceptance rate, against the reference."""


class TruncationGate(Section):
    kind: Literal["truncation"]
    max_share: float = Field(ge=0, le=1)
    """Above it a score is NOT MEASURED, not low."""


class ProbesGate(Section):
    """Serving-fidelity probes (`assay probe`, or `probes:` in the suite): one alarm fails the candidate."""

    kind: Literal["probes"]
    required: tuple[str, ...] = ()
    """Probes that must have run; one that could not makes the candidate NOT MEASURED."""
    max_rate: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(default_factory=dict)
    """Probe -> rate of events that must be excluded; UNDERPOWERED while the upper bound is above it."""


class GateRecipe(Recipe):
    gates: tuple[
        Annotated[
            ScoreGate | DivergenceGate | AcceptanceGate | TruncationGate | ProbesGate, Field(discriminator="kind")
        ], ...
    ]  # fmt: skip
    level: float = Field(default=0.95, gt=0.5, lt=1)
    """Of every interval. The chance of a PASS when the margin is truly lost is about (1 - level) / 2 at most."""
    adjust: Literal["holm", "none"] = "holm"
    """Over the score gates of one candidate, for what can fail it. A PASS needs every gate, so nothing is adjusted there."""
    max_excluded: float = Field(default=0.01, ge=0, lt=1)
    """Share of items without a reply on either side above which a task is NOT MEASURED."""
    min_items: int = Field(default=30, ge=1)
    """Fewer paired items never PASS, whatever the margin."""

    @model_validator(mode="after")
    def _one_gate_per_task(self) -> Self:
        tasks = [gate.task for gate in self.gates if isinstance(gate, ScoreGate)]
        twice = [task for task in tasks if tasks.count(task) > 1]
        if twice:
            raise ValueError(f"two score gates for task {twice[0]}; write one margin and one claim per task")
        return self


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

    Raises RecipeError (one line: file, key, what is allowed) when there is none or it is not valid.
    """
    folder = next(folder for folder, model in KINDS.items() if model is kind)
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = recipes_dir() / folder / f"{name_or_path}.yaml"
        if Path(name_or_path).name != name_or_path or not path.is_file():
            known = recipe_names(folder)
            near = difflib.get_close_matches(name_or_path, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RecipeError(f"no {folder[:-1]} recipe called {name_or_path!r}; {hint}known: {', '.join(known)}")
    return parse_recipe(kind, path)


def parse_recipe(kind: type[R], path: Path) -> R:
    """Read and validate one file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this file holds a {type(data).__name__}")
    try:
        recipe = kind.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_first_problem(kind, error)}") from None
    if recipe.name != path.stem:
        raise RecipeError(f"{path}: name is {recipe.name!r}; it must be the file's name, {path.stem!r}")
    return recipe


def _first_problem(kind: type[BaseModel], error: ValidationError) -> str:
    # A misspelt required key is both missing and unknown: the unknown one tells what to mend.
    problem = next((one for one in error.errors() if one["type"] == "extra_forbidden"), error.errors()[0])
    steps = [str(step) for step in problem["loc"]]
    where = ".".join(steps) or kind.__name__
    if problem["type"] == "extra_forbidden":
        allowed = _keys_at(kind, steps[:-1])
        near = difflib.get_close_matches(steps[-1], allowed, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown key {where!r}{hint or '.'} Allowed: {', '.join(sorted(allowed))}"
    if problem["type"] == "missing":
        return f"key {where!r} is missing"
    got = "" if isinstance(problem["input"], dict) else f" (got {str(problem['input'])[:80]!r})"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}{got}"


def _keys_at(kind: type[BaseModel], steps: list[str]) -> list[str]:
    """Allowed keys of the section that `steps` lead to; indexes and union tags in between are stepped over."""
    current: list[type[BaseModel]] = [kind]
    for step in steps:
        following = [
            model
            for section in current
            if (field := _field(section, step)) is not None
            for model in _sections_in(field.annotation)
        ]
        tagged = [model for model in current if _kind_tag(model) == step]
        current = following or tagged or current
    return [field.alias or name for section in current for name, field in section.model_fields.items()]


def _kind_tag(section: type[BaseModel]) -> str | None:
    kind = section.model_fields.get("kind")
    return None if kind is None else str(get_args(kind.annotation)[0])


def _field(section: type[BaseModel], key: str) -> Any:
    return next((f for name, f in section.model_fields.items() if key in (name, f.alias)), None)


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _sections_in(argument)]
