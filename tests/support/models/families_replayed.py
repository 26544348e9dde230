"""The table of docs/families.md: what vLLM's loaders for GPUs say of a model of every family that ships.

`make families-table` writes it whole; that takes about three minutes on two cores. With names of families only their rows are
written anew. Widths are the published ones, layers, experts and towers are few and small.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import hollow
import hollow_deepseek_v41
import hollow_moe
from serving_interpreter import REPOSITORY, with_our_plugin

from assay.errors import PlanError
from assay.recipes.family import FamilyRecipe
from assay.recipes.family_names import names_of
from assay.recipes.load import load_recipe
from assay.recipes.model import Serving
from assay.recipes.precision import PrecisionRecipe
from assay.recipes.profile import ProfileRecipe
from assay.records.plan import Plan
from assay.records.preflight.replay import Replay
from assay_evaluate.serving.replay import Candidate, planned, replay
from assay_quantize.checkpoint.checkpoint import Checkpoint, open_checkpoint
from assay_quantize.formats.config_groups import config_json
from assay_quantize.plan.planner import make_plan

PAGE = REPOSITORY / "docs" / "families.md"
BEGIN, END = "<!-- families: made by make families-table -->\n", "<!-- families: end -->\n"
PROFILE = "8xh200"
PRECISIONS = ("w4a16-g32", "fp8-channel")
EXPERTS = 16
"""More than any model chooses for a token."""
CONTEXT_TOKENS = 4096


class Example(NamedTuple):
    """A model of a family. layers: None: of `hollow_moe`. most_ranks: among which its heads can be shared. mtp: whether vLLM
    drafts with its MTP block."""

    model: str
    layers: int | None
    most_ranks: int = 8
    mtp: bool = False


EXAMPLES: dict[str, Example] = {
    "deepseek_v3": Example("deepseek-v3", 2, mtp=True), "deepseek_v32": Example("deepseek-v3.2", 2, mtp=True),
    "deepseek_v4": Example("deepseek-v4-flash", 3, mtp=True), "ernie4_5_moe": Example("ernie-4.5-21b", 2, 4, mtp=True),
    "glm4_moe": Example("glm-4.5-air", 2, mtp=True), "glm4_moe_lite": Example("glm-4.7-flash", 2, 4, mtp=True),
    "glm_moe_dsa": Example("glm-5", 2, mtp=True), "kimi_k25": Example("kimi-k2.5", 2),
    "mimo_v2": Example("mimo-v2.5", 2, mtp=True),
    "mimo_v2_flash": Example("mimo-v2-flash", 2, mtp=True), "minimax_m2": Example("minimax-m2", 2),
    "nemotron_h": Example("nemotron-3-super", 3, mtp=True), "qwen3_5_moe": Example("qwen3.5-35b-a3b", 4, mtp=True),
    "qwen3_moe": Example("qwen3-30b-a3b", 2), "qwen3_next": Example("qwen3-next-80b-a3b", 4, mtp=True),
    "step3p5": Example("step-3.5-flash", 2),
    "qwen3_5_moe_text": Example("qwen3.5-35b-a3b-text", 4, mtp=True),
    **{name: Example(model.named, None, model.most_ranks, model.mtp) for name, model in hollow_moe.MODELS.items()},
}  # fmt: skip
"""Family -> the model that speaks for it."""
BESIDE: dict[str, Example] = {"deepseek_v4 with images": Example("DeepSeek-V4-Flash-Vision-Exp", 3)}
"""Models of families in the table, of which vLLM builds another class."""
NO_CLASS = ("hunyuan_v1_moe", "dots1")
"""Families for which vLLM 0.32 has no class: it would build transformers' model, which is not replayed."""
MAKERS_CONFIGS = ("bailing_moe", "bailing_hybrid", "mimo_v2")
"""Values of `model_type` whose configuration class is remote code."""


def replayed_families() -> list[str]:
    return [family for family in EXAMPLES if family not in NO_CLASS]


def source_of(family: str, folder: Path) -> Path:
    """A hollow checkpoint of the family's example."""
    example = (EXAMPLES | BESIDE)[family]
    if family in BESIDE:
        return hollow_deepseek_v41.write_v4_vision(folder, layers=example.layers or 0, experts=EXPERTS)
    if example.layers is None:
        config = hollow_moe.cut(family, experts=EXPERTS)
        return hollow_moe.write(folder, family, config)
    return hollow.hollow_model(folder, example.model, layers=example.layers, dense=1, experts=EXPERTS)


class Cell(NamedTuple):
    """what: `source` or a precision."""

    family: str
    what: str
    ranks: int


def replay_all(families: list[str] | None = None) -> dict[Cell, Replay]:
    """One record for each cell of these families that can be planned; None: of all."""
    cells: dict[Cell, Candidate] = {}
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(ProfileRecipe, PROFILE).model_copy(
            update={"interpreter": with_our_plugin(Path(folder), plain_configs=MAKERS_CONFIGS)}
        )
        for family in families or replayed_families():
            source = source_of(family, Path(folder) / family)
            opened = open_checkpoint(source)
            example = (EXAMPLES | BESIDE)[family]
            serving = Serving(num_speculative_tokens=1 if example.mtp else None)
            plans = {name: plan for name in PRECISIONS if (plan := plan_of(opened, name)) is not None}
            made = {"source": source} | {name: planned(plan, config_json(plan)) for name, plan in plans.items()}
            for ranks in (1, example.most_ranks):
                flags = {
                    **recipe.vllm,
                    "tensor-parallel-size": ranks,
                    "max-model-len": CONTEXT_TOKENS,
                    "kv-cache-dtype": "auto",
                }
                profile = recipe.model_copy(update={"vllm": flags})
                for what, checkpoint in made.items():
                    cells[Cell(family, what, ranks)] = Candidate(f"{family} {what} {ranks}", checkpoint, profile, serving)
        return dict(zip(cells, replay(list(cells.values())), strict=True))


def plan_of(source: Checkpoint, precision: str) -> Plan | None:
    """None: the family refuses the precision, for vLLM would not load what is made."""
    try:
        return make_plan(source, load_recipe(PrecisionRecipe, precision), model="m", family=None)
    except PlanError:
        return None


def table(records: Mapping[Cell, Replay]) -> str:
    """Markdown; a row for each family."""
    head = ["family", "example", "names from", "ranks", "as published", *PRECISIONS, "MTP drafts"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(row(family, records) for family in sorted(EXAMPLES))]) + "\n"


def row(family: str, records: Mapping[Cell, Replay]) -> str:
    example = EXAMPLES[family]
    answers = []
    for what in ("source", *PRECISIONS) if family not in NO_CLASS else ():
        said = [said_of(records.get(Cell(family, what, ranks))) for ranks in dict.fromkeys((1, example.most_ranks))]
        answers.append(said[0] if len(set(said)) == 1 else ", ".join(said))
    return f"| {' | '.join([*known_cells(family), *(answers or ['no class'] * 3), drafts_of(family)])} |"


def known_cells(family: str) -> list[str]:
    """The cells of a row that need no replay: its first four."""
    by_config = load_recipe(FamilyRecipe, family).from_config
    return [f"`{family}`", EXAMPLES[family].model, "config" if by_config else "checkpoint", f"1, {EXAMPLES[family].most_ranks}"]


def drafts_of(family: str) -> str:
    names = names_of(family)
    without = "left out" if names.mtp_not_kept else "kept" if names.mtp or names.mtp_layer else "none"
    return "yes" if EXAMPLES[family].mtp else without


def said_of(record: Replay | None) -> str:
    """`loads`, or the kind of the first thing that stands against it. None: there is no plan to be replayed."""
    if record is None:
        return "no plan"
    return "loads" if record.outcome == "PASS" else next(finding.kind for finding in record.every_finding)


def page_with(text: str) -> str:
    """The page with another table."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + text + END + rest.partition(END)[2]


def table_on_page() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def rows_on_page() -> list[list[str]]:
    """Cells of the rows of the table that is committed."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table_on_page().splitlines()[2:]]


def with_rows(families: list[str], records: Mapping[Cell, Replay]) -> str:
    """The committed table with the rows of these families anew, in order of their names."""
    head, rule, *lines = table_on_page().splitlines()
    rows = {line.split("`")[1]: line for line in lines} | {family: row(family, records) for family in families}
    return "\n".join([head, rule, *(rows[family] for family in sorted(rows))]) + "\n"


if __name__ == "__main__":
    chosen = sys.argv[1:] or replayed_families()
    answers_of = replay_all([family for family in chosen if family not in NO_CLASS])
    PAGE.write_text(page_with(with_rows([*chosen, *NO_CLASS], answers_of)), encoding="utf-8")
