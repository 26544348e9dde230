"""Long context: the thirteen RULER tasks and a needle grid, generated offline for a model's own tokenizer and template.

Written from the published method (Hsieh et al. 2024, arXiv 2404.06654). In: a task, a length, a counter of tokens, a seed.
Out: items with their answers, and scores. May import what `tasks` may, and needs no server; `tasks.ruler_task` asks the
items.
"""

from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.files import read_items, write_items
from assay_evaluate.tasks.ruler.grid import GridCell, grid_cells, grid_item, needle_grid
from assay_evaluate.tasks.ruler.haystacks import TextFolder, read_text_folder
from assay_evaluate.tasks.ruler.items import GENERATOR_VERSION, LEAST_FILL, STYLES, RulerItem, Style
from assay_evaluate.tasks.ruler.languages import LANGUAGES, RulerLanguage
from assay_evaluate.tasks.ruler.qa import QaQuestion, QaSource, read_hotpotqa, read_squad
from assay_evaluate.tasks.ruler.scoring import match_all, match_any, score
from assay_evaluate.tasks.ruler.tasks import REPLY_TOKENS, TASKS, Sources, ruler_item, ruler_items
from assay_evaluate.tasks.ruler.tokens import CountTokens, Message, Prompt, TokenCounter

__all__ = [
    "GENERATOR_VERSION",
    "LANGUAGES",
    "LEAST_FILL",
    "REPLY_TOKENS",
    "STYLES",
    "TASKS",
    "CountTokens",
    "GridCell",
    "Message",
    "Prompt",
    "QaQuestion",
    "QaSource",
    "RulerError",
    "RulerItem",
    "RulerLanguage",
    "Sources",
    "Style",
    "TextFolder",
    "TokenCounter",
    "grid_cells",
    "grid_item",
    "match_all",
    "match_any",
    "needle_grid",
    "read_hotpotqa",
    "read_items",
    "read_squad",
    "read_text_folder",
    "ruler_item",
    "ruler_items",
    "score",
    "write_items",
]  # fmt: skip
