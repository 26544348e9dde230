"""Suite recipes: what is measured. A task of each kind, the divergence, and the probes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Discriminator, Field, Tag

from assay.recipes.base import Recipe, Section, beside
from assay.recipes.swe import SweOptions
from assay.records.probe import ProbeSettings


class Range(Section):
    """As many as the gates need: `min` at first, and more while a task is undecided, up to `max`."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)

    def _contradictions(self) -> Iterator[str]:
        if self.min > self.max:
            yield f"min {self.min} is above max {self.max}"


def _number_or_range(value: object) -> str:
    return "[range]" if isinstance(value, dict | Range) else "[number]"


NumberOrRange = Annotated[
    Annotated[int, Field(ge=1), Tag("[number]")] | Annotated[Range, Tag("[range]")], Discriminator(_number_or_range)
]


class TaskBase(Section):
    items_field: ClassVar[str | None] = None
    """Name of the field that says how many items are asked, a number or a range. None: the kind of task has none."""
    name: str
    title: str | None = Field(default=None, min_length=1, max_length=60, exclude=True)
    """What sentences call the task: `Chinese code lookup`. None: its name. Recorded with the result; not part of the hash."""
    max_tokens: int = Field(ge=1)
    """Budget of the whole reply, thinking included."""
    thinking_tokens: int | None = Field(default=None, ge=1)
    """Of `max_tokens`: after so many the server ends the thinking, the rest is left for the answer. Needs a reasoning parser,
    and is left out without one. None: one budget for both."""
    sampling: Literal["suite", "model"] = Field(default="suite", exclude=True)
    """model: temperature, top_p and top_k are those of the model's recipe, if it has any (`as_model_asks`)."""
    budget: Literal["suite", "model"] = Field(default="suite", exclude=True)
    """model: `max_tokens` is the longest reply of the model's card, if its recipe names one."""
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1: all tokens. Every other sampling parameter is pinned to its neutral value in every request."""
    num_samples: NumberOrRange = 1
    """Replies to each item: the score is the mean over them (avg@k, and pass@k beside it), its interval is over items.
    {min, max}: asked again in rounds while the gates cannot decide (`stopping:` of the gates)."""
    chance: float = Field(default=0.0, ge=0, lt=1, exclude=True)
    """Share of the items that guessing gets right: 0.25 of four choices, 0 where the answer is written. A reference that is not
    above it makes the verdict NOT MEASURED. Not part of the hash, as gates are not: the questions are the same."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.most_samples > 1 and self.temperature == 0 and self.sampling == "suite":
            yield "num_samples above 1 needs a temperature above 0: greedy replies to one question are all alike"
        if self.thinking_tokens is not None and self.thinking_tokens >= self.max_tokens:
            yield (
                f"thinking_tokens {self.thinking_tokens} leaves no room for an answer; it is part "
                f"of max_tokens ({self.max_tokens})"
            )
        if isinstance(self.items, Range) and isinstance(self.num_samples, Range):
            yield f"{self.items_field} and num_samples are both a range; let one of them grow: new items where there are any"

    @property
    def fewest_samples(self) -> int:
        """Replies of a candidate to each item that are asked for in any case."""
        return self.num_samples.min if isinstance(self.num_samples, Range) else self.num_samples

    @property
    def most_samples(self) -> int:
        return self.num_samples.max if isinstance(self.num_samples, Range) else self.num_samples

    @property
    def items(self) -> int | Range | None:
        """Items of each part of the task; what a part is depends on the kind. None: all there are."""
        num_items: int | Range | None = None if self.items_field is None else getattr(self, self.items_field)
        return num_items

    @property
    def most_items(self) -> int | None:
        """Of each part. None: all."""
        return self.items.max if isinstance(self.items, Range) else self.items

    @property
    def is_adaptive(self) -> bool:
        """How much is asked depends on what is seen."""
        return isinstance(self.num_samples, Range) or isinstance(self.items, Range)


class GeneratedTask(TaskBase):
    """A task whose items are made from the suite's seed, as many as one likes: the first are the same however many follow."""

    items_field: ClassVar[str | None] = "num_items"
    num_items: NumberOrRange
    """Of each part: of a language (arithmetic), a language and length (needle), a task and length (RULER; of the needle grid a
    cell), a number of tools, length and language (tools). {min, max}: new ones in rounds while the gates cannot decide."""

    @property
    def num_made(self) -> int:
        """Of each part: `num_items`, or the max of a range."""
        return self.num_items.max if isinstance(self.num_items, Range) else self.num_items


RulerTaskName = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2", "needle_grid",
]  # fmt: skip
RULER_TASKS: tuple[RulerTaskName, ...] = get_args(RulerTaskName)[:-1]
"""The published thirteen."""
LONGEST: Literal["longest"] = "longest"


class ArithmeticTask(GeneratedTask):
    kind: Literal["arithmetic"]
    languages: tuple[Literal["en", "zh"], ...] = ("en", "zh")
    num_steps: tuple[int, ...] = (3, 4, 5)


class NeedleTask(GeneratedTask):
    kind: Literal["needle"]
    languages: tuple[Literal["en", "zh"], ...] = ("en", "zh")
    lengths_tokens: tuple[int, ...] = (1024,)
    num_needles: int = Field(default=5, ge=1)


class LmEvalTask(TaskBase):
    """Any task of lm-eval, by name, over HTTP."""

    items_field: ClassVar[str | None] = "limit"
    kind: Literal["lm_eval"]
    tasks: tuple[str, ...]
    limit: NumberOrRange | None = None
    """Items of each task behind a name, the first ones. {min, max}: drawn by the suite's seed, and new ones in rounds while the
    gates cannot decide. A new item says more than the same one once more."""
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
    translations: bool = Field(default=False, exclude=True)
    """`tasks` are the same questions in several languages, in the same order: the items of one number are a cluster. Recorded
    with every item; not part of the hash."""
    allow_code_execution: bool = False
    """Run what the model wrote on this machine, without a sandbox; tasks that score code need it."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.translations and len(self.tasks) < 2:
            yield "translations: true needs several tasks, one for each language"


class RulerTask(GeneratedTask):
    """RULER's tasks, and the needle grid, generated for the reference's tokenizer and chat template."""

    kind: Literal["ruler"]
    tasks: tuple[RulerTaskName, ...] = RULER_TASKS
    lengths_tokens: tuple[Annotated[int, Field(ge=1)] | Literal["longest"], ...]
    """longest: what the context of the reference leaves room for."""
    style: Literal["auto", "base", "chat", "prefill"] = "auto"
    """auto: `chat` with a chat template, `base` without. prefill: the reply begins with the published words; a model that
    thinks first then cannot."""
    reply_within_length: bool = False
    """True: `max_tokens` are taken from the length. False: only the published 30 to 128 are, and the budget lies beyond it."""
    sources: Literal["generated", "published", "auto"] = "generated"
    """published: RULER's essays, SQuAD and HotpotQA, downloaded once; the run does not begin without them. auto: each of them
    that can be had when the run begins, generated text instead of the others. What was used is recorded."""
    essays: str | None = None
    """Folder of .txt files to hide needles in, whatever `sources` says."""
    squad: str | None = None
    """SQuAD JSON file for qa_1, whatever `sources` says."""
    hotpotqa: str | None = None
    """HotpotQA JSON file for qa_2, whatever `sources` says."""
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Of the needle grid: 0 the front, 1 the end."""
    languages: tuple[Literal["en", "zh", "es", "ru", "ja"], ...] = ("en",)
    """Of the needle grid."""

    @property
    def stated_tokens(self) -> tuple[int, ...]:
        """The lengths that are numbers."""
        return tuple(length for length in self.lengths_tokens if length != LONGEST)

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        for twice in sorted({str(length) for length in self.lengths_tokens if self.lengths_tokens.count(length) > 1}):
            yield f"lengths_tokens names {twice} twice"


class ToolsTask(GeneratedTask):
    """Generated questions with tools to call, or not to: one cell for every number of tools and length of prompt."""

    kind: Literal["tools"]
    num_tools: tuple[Annotated[int, Field(ge=1, le=128)], ...] = (1, 8, 32, 128)
    prompt_tokens: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Of the whole prompt, tools included; dialogue before the question fills it. 0: no dialogue."""
    languages: tuple[Literal["en", "zh", "es", "ru", "ja"], ...] = ("en",)
    """Of the questions; tools and their parameters are in English."""
    share_without_tool: float = Field(default=0.25, ge=0, le=1)
    """Of the items: a plain answer is right. Without such items a model that always calls something looks perfect."""


class SweTask(TaskBase, SweOptions):
    """SWE-bench: an agent's whole trajectories, graded by the official harness. `max_tokens` is the budget of one reply."""

    kind: Literal["swe"]

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.num_samples != 1:
            yield "num_samples does not apply to trajectories; say how many `num_repeats` of each instance"


class DivergenceSpec(Section):
    """Next-token divergence on replies the reference samples at T=1."""

    languages: tuple[Literal["en", "zh"], ...] = ("en", "zh")
    num_documents: int = Field(ge=2)
    """Per language."""
    max_tokens: int = Field(ge=1)
    top_k: int = Field(default=64, ge=1)
    position_buckets: tuple[int, ...] = (0, 32, 64, 128, 256, 512, 1024, 4096, 32768)
    spans: tuple[int, ...] = (0,)
    """First positions of the spans that gates judge one by one, prompt included. Each needs twenty texts that reach it."""
    suite_documents: int = Field(default=0, ge=0)
    """Of every task: so many of its questions are answered once more at T=1, and the replies scored, thinking included."""
    held_out_documents: int = Field(default=0, ge=0)
    """Texts of `held_out_tokens` tokens that no model here wrote; generated ones per language."""
    held_out_tokens: int = Field(default=1024, ge=2)
    held_out: str | None = None
    """Folder of .txt files to take them from. None: generated sentences."""
    exact: bool = False
    """Also the full-vocabulary KL, from hidden states; needs one more start of a server per checkpoint."""

    def spans_within(self, max_model_len: int | None) -> tuple[int, ...]:
        """Those that begin before the longest text the server takes: beyond it there is no position to judge."""
        return tuple(first for first in self.spans if max_model_len is None or first < max_model_len - 1)

    def _contradictions(self) -> Iterator[str]:
        if not self.spans or self.spans[0] != 0 or list(self.spans) != sorted(set(self.spans)):
            yield f"spans {list(self.spans)} must begin with 0 and ascend"


AnyTask = ArithmeticTask | NeedleTask | LmEvalTask | RulerTask | ToolsTask | SweTask


class SuiteRecipe(Recipe):
    seed: str
    """Items are drawn from this; it begins with `eval`, which training data never does."""
    tasks: tuple[
        Annotated[AnyTask, Field(discriminator="kind")],
        ...,
    ]
    divergence: DivergenceSpec | None = None
    acceptance: bool = True
    gates: str | None = Field(default=None, exclude=True)
    """Limits for this suite: a name of recipes/gates/, or a YAML file, relative to the suite's. None: those of its name if it
    is a shipped suite, else `default`. Not part of the hash: with other limits the questions are the same."""
    probes: ProbeSettings | None = None
    """Serving-fidelity probes of every checkpoint while it is served (docs/fidelity.md); concurrency is the profile's. None:
    not now, `assay diagnose probe` does them by themselves."""
    files_sha256: dict[str, str] = Field(default_factory=dict)
    """Local files and folders that tasks name -> hash of what is in them. Filled in when the suite is read for a run: other
    data are another suite."""

    def found_from(self, folder: Path) -> Self:
        return self if self.gates is None else self.model_copy(update={"gates": beside(folder, self.gates)})

    def _contradictions(self) -> Iterator[str]:
        names = [task.name for task in self.tasks]
        for twice in sorted({name for name in names if names.count(name) > 1}):
            yield f"two tasks are called {twice}; names are keys of the results"
        if not self.seed.startswith("eval"):
            yield f"seed {self.seed!r} must begin with 'eval': other seeds may have been trained on"


def tasks_with_lengths(suite: SuiteRecipe) -> list[str]:
    """Names of the tasks that ask at stated lengths."""
    return [
        task.name
        for task in suite.tasks
        if isinstance(task, NeedleTask | RulerTask) or (isinstance(task, ToolsTask) and any(task.prompt_tokens))
    ]
