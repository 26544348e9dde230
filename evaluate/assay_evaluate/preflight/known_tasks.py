"""What is known, or assumed, of tasks before anything is asked: how many items, how long, how steady from run to run.

Counts are those of the data sets' cards. Lengths and discordances are assumptions, each with a range that is carried through to
the result: models differ, and a suite on a model of one's own is measured, not looked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from assay.recipes.suite import ArithmeticTask, LmEvalTask, NeedleTask, RulerTask, SweTask, TaskBase, ToolsTask
from assay_evaluate.tasks.cells import num_cells
from assay_evaluate.tasks.swebench.dataset import sliced

LENGTH_RANGE = (0.55, 1.85)
"""Models of equal size differ by up to 3.4 times in the tokens of their replies: OckBench, https://ockbench.github.io."""
DISCORDANCE_RANGE = (2 / 3, 3 / 2)
"""Of what is assumed, for the range that goes with a chance."""


class KnownTask(NamedTuple):
    """A task of lm-eval, or a group of tasks.

    sizes: items of each task behind the name. prompt_tokens: examples included. thinking_tokens, plain_tokens: of a typical
    reply by a model that thinks first, and by one that does not. discordance: share of items of which one of two runs is right
    and the other wrong, without any loss.
    """

    sizes: tuple[int, ...]
    prompt_tokens: int
    thinking_tokens: int
    plain_tokens: int
    discordance: float


_AIME = KnownTask((30,), 150, 16_000, 2_000, 0.15)
_MGSM = KnownTask((250,), 150, 1_500, 250, 0.05)
_MMLU_PROX = KnownTask((42,) * 14, 2_000, 3_000, 400, 0.08)
_LANGUAGES_MGSM = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
_LANGUAGES_MMLU_PROX = (
    "af", "ar", "bn", "cs", "de", "en", "es", "fr", "hi", "hu", "id", "it", "ja", "ko", "mr", "ne", "pt", "ru", "sr", "sw",
    "te", "th", "uk", "ur", "vi", "wo", "yo", "zh", "zu",
)  # fmt: skip

LM_EVAL: dict[str, KnownTask] = {
    "gsm8k_cot_zeroshot": KnownTask((1319,), 120, 1_200, 200, 0.03),
    "minerva_math500": KnownTask((500,), 750, 4_000, 500, 0.04),
    "aime24": _AIME,
    "aime25": _AIME,
    "gpqa_diamond_cot_zeroshot": KnownTask((198,), 300, 10_000, 800, 0.12),
    # By subject: biology, business, chemistry, computer science, economics, engineering, health, history, law, mathematics,
    # other, philosophy, physics, psychology; 12,032 together.
    "mmlu_pro": KnownTask((717, 789, 1132, 410, 844, 969, 818, 381, 1101, 1351, 924, 499, 1299, 798), 1_500, 3_000, 400, 0.08),
    "ifeval": KnownTask((541,), 60, 1_800, 400, 0.07),
    "humaneval_instruct": KnownTask((164,), 200, 300, 300, 0.06),  # its prompt begins the reply: nobody thinks first
    "mbpp_instruct": KnownTask((500,), 600, 150, 150, 0.06),
    **{f"mgsm_native_cot_{language}": _MGSM for language in _LANGUAGES_MGSM},
    **{f"mmlu_prox_lite_{language}": _MMLU_PROX for language in _LANGUAGES_MMLU_PROX},
}
"""Name in lm-eval -> what is known of it.

Sizes: https://huggingface.co/datasets of openai/gsm8k, HuggingFaceH4/MATH-500, Maxwell-Jia/AIME_2024, math-ai/aime25,
Idavidrein/gpqa, TIGER-Lab/MMLU-Pro, google/IFEval, openai/openai_humaneval, google-research-datasets/mbpp, juletxara/mgsm,
li-lab/MMLU-ProX-Lite (658 questions a language, 70 of them for validation). Lengths: AIME took DeepSeek-R1 12,000 tokens a
question and DeepSeek-R1-0528 23,000 (https://huggingface.co/deepseek-ai/DeepSeek-R1-0528); the others are in proportion to it,
by difficulty, and are assumptions. Discordance: a score over n items that varies by s from run to run has D = 2 n s^2; AIME
(n = 30) varies by 5 points or more (Hochlehnert et al. 2025, arXiv 2504.07086), so 15 %; the others are assumptions of the same
kind, smaller where nearly every item is answered right."""


def mean_of_known(names: Iterable[str], field: str) -> float | None:
    """A field of the known ones among tasks of lm-eval, as the mean over their items. None: none is known."""
    known = [LM_EVAL[name] for name in names if name in LM_EVAL]
    total = sum(sum(task.sizes) for task in known)
    return sum(sum(task.sizes) * getattr(task, field) for task in known) / total if total else None


UNKNOWN_PROMPT_TOKENS = 300
LONGEST_TOKENS = 131_072
"""What `longest` is taken for where nobody says how long the context is and no other length is stated. Assumption."""
THINKING_SHARE, PLAIN_SHARE = 0.12, 0.05
"""Share of a reply's budget that a typical reply takes, of a task that is not in the table. In the table GPQA takes 15 % of its
65,536 tokens, MMLU-Pro 18 % of 16,384, GSM8K 7 %."""
UNKNOWN_DISCORDANCE = 0.08

GENERATED_DISCORDANCE = {"arithmetic": 0.005, "needle": 0.005, "ruler": 0.05, "tools": 0.05, "swe": 0.17}
"""By kind of task. Seen between precisions of tiny-glm (`reports/samples/tiny-glm`): arithmetic 0 of 600 items, needles 0 of
480, so less than 0.7 % each. RULER and tools, which it cannot do: assumptions. SWE-bench: 17 % of the instances come out
differently, as gates `swe-verified` has it."""
MANY_NEEDLES, CODES_DISCORDANCE = 16, 0.11
"""A needle task with more needles in a text than that is a list of codes, as many as the model can just tell apart. There the
sample report has tiny-glm's BF16, which loses nothing, differ from FP8 on 17 of 160 items (10.6 %), and its 4-bit checkpoints
on 85 of 620; `benchmarks/verdicts/twenty_verdicts.md` has 94 of 800 (11.8 %)."""
GENERATED_REPLY = {"arithmetic": (700, 80), "needle": (500, 60), "ruler": (700, 80), "tools": (500, 80)}
"""By kind of task: tokens of a typical reply by a model that thinks, and by one that does not. Assumptions."""
ARITHMETIC_PROMPT_TOKENS = 100
TOOL_TOKENS = 130
"""Of one tool's description in a prompt. Assumption."""

REPOSITORIES: dict[str, dict[str, int]] = {
    "verified": {
        "astropy": 22, "django": 231, "matplotlib": 34, "mwaskom/seaborn": 2, "pallets/flask": 1, "psf/requests": 8,
        "pydata/xarray": 22, "pylint": 10, "pytest": 19, "scikit-learn": 32, "sphinx": 44, "sympy": 75,
    },
    "lite": {
        "astropy": 6, "django": 114, "matplotlib": 23, "mwaskom/seaborn": 4, "pallets/flask": 3, "psf/requests": 6,
        "pydata/xarray": 5, "pylint": 6, "pytest": 17, "scikit-learn": 23, "sphinx": 16, "sympy": 77,
    },
    "multilingual": {f"repository {number}": 8 if number < 6 else 7 for number in range(42)},
}  # fmt: skip
"""Data set of SWE-bench -> instances of each repository, in the order of their ids (https://www.swebench.com). Multilingual has
300 in 42 repositories, taken for equally large."""
TRAJECTORY_STEPS, STEP_PROMPT_TOKENS, STEP_THINKING_TOKENS, STEP_PLAIN_TOKENS = 50, 12_000, 500, 250
"""Of a trajectory of mini-swe-agent: calls of the model, tokens of each prompt on average (the dialogue so far), tokens of each
reply by a model that thinks, and by one that does not. Assumptions."""


# ------------------------------------------------------------------------------------------------ how many items
UNKNOWN_COUNT = "how many items it has is not known here, since only the run loads its data"


def num_items(task: TaskBase) -> int | None:
    """Items of a task, each counted once however often it is asked; of a range, its max. None: not known."""
    match task:
        case ArithmeticTask() | NeedleTask() | RulerTask() | ToolsTask():
            return task.num_made * num_cells(task)
        case LmEvalTask():
            # a folder of one's own may hold another task of a known name
            if task.include_path is not None or any(name not in LM_EVAL for name in task.tasks):
                return None
            each = [size for name in task.tasks for size in LM_EVAL[name].sizes]  # `limit` is of each task behind a name
            return sum(size if task.most_items is None else min(size, task.most_items) for size in each)
        case SweTask():
            sizes = cluster_sizes(task)
            return None if sizes is None else sum(sizes)
        case _:
            raise TypeError(f"{type(task).__name__}: no kind of task that a suite has")


def cluster_sizes(task: SweTask) -> tuple[int, ...] | None:
    """Instances of each repository that are left after `slice`; None: another data set, or a `filter`."""
    known = REPOSITORIES.get(task.dataset)
    if known is None or task.filter is not None:
        return None
    instances = [repository for repository, size in known.items() for _ in range(size)]
    left = sliced(instances, task.slice)
    return tuple(count for repository in known if (count := left.count(repository)))
