"""Natural text to ask: the suite's own questions, never random tokens, on which no draft head was trained.

Of a kind, every repeat of every point has prompts of its own, so that a prefix cache answers none of them from before; and all
checkpoints, with speculation and without, get the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from assay.errors import AssayError
from assay.recipes.suite import ArithmeticTask, LmEvalTask, NeedleTask, SuiteRecipe
from assay_evaluate.client.journal import Identity, Journal
from assay_evaluate.tasks.items import arithmetic_item, needle_item, writing_item
from assay_evaluate.tasks.ruler.tokens import TokenCounter

Language = Literal["en", "zh"]
CHAT, LONG, CODE = "chat", "long", "code"


class Prompts:
    """`kinds`: what there is. prompts: name of a task -> questions of it that an evaluation asked, as one user message each."""

    def __init__(self, suite: SuiteRecipe, seed: int, long_tokens: int, prompts: Mapping[str, Sequence[str]]) -> None:
        self._seed, self._long_tokens = f"{suite.seed}:speed:{seed}", long_tokens
        self._asked = {name: list(dict.fromkeys(texts)) for name, texts in prompts.items() if texts}
        code = {task.name for task in suite.tasks if isinstance(task, LmEvalTask) and task.allow_code_execution}
        self._asked_code = [text for name in sorted(code) for text in self._asked.get(name, [])]
        languages = {
            language for task in suite.tasks if isinstance(task, ArithmeticTask | NeedleTask) for language in task.languages
        }
        if suite.divergence is not None:
            languages |= set(suite.divergence.languages)
        self._languages: tuple[Language, ...] = tuple(sorted(languages)) or ("en",)
        self.kinds = (CHAT, LONG, *([CODE] if self._asked_code else []), *sorted(self._asked))

    def check(self, kinds: Sequence[str]) -> None:
        """AssayError for a kind that there is not."""
        for kind in kinds:
            if kind not in self.kinds:
                hint = "; `code` needs an evaluation of a suite with a code task in this run" if kind == CODE else ""
                raise AssayError(f"--prompts {kind}: there are {', '.join(self.kinds)}{hint}")

    def of(self, kind: str, part: str, num: int, count_tokens: Callable[[str], int]) -> list[str]:
        """`num` prompts of a kind. part: which repeat of which point; another part, other prompts."""
        if kind == CHAT:
            return [self._chat(f"{self._seed}:{part}", index) for index in range(num)]
        if kind == LONG:
            return [self._long(f"{self._seed}:{part}", index, count_tokens) for index in range(num)]
        pool = self._asked_code if kind == CODE else self._asked[kind]
        return list(_drawn(pool, random.Random(f"{self._seed}:{kind}:{part}"), num))

    def _chat(self, seed: str, index: int) -> str:
        """A short question that is worked out, then one that is answered at length; languages in turn."""
        language = self._languages[index // 2 % len(self._languages)]
        made = arithmetic_item(seed, index, language, 3 + index % 3) if index % 2 == 0 else writing_item(seed, index, language)
        return made.prompt

    def _long(self, seed: str, index: int, count_tokens: Callable[[str], int]) -> str:
        language = self._languages[index % len(self._languages)]
        draw = random.Random(f"{seed}:depth:{index}")
        return needle_item(
            seed, index, language, num_needles=5, depth=draw.random(), max_tokens=self._long_tokens, count_tokens=count_tokens
        ).prompt


def _drawn(pool: Sequence[str], draw: random.Random, num: int) -> Iterator[str]:
    """Without the same one twice, until the pool is empty."""
    while num > 0:
        one_pass = draw.sample(pool, min(num, len(pool)))
        num -= len(one_pass)
        yield from one_pass


def asked_in(journal: Journal, who: Identity) -> dict[str, list[str]]:
    """Task -> questions of one user message, or plain texts, that `who` answered. Others (tools, dialogues) are left out."""
    prompts: dict[str, list[str]] = {}
    for task, items in journal.answered_items(who).items():
        for _, key in items:
            _, body = journal.request_of(key)
            if "tools" in body:
                continue
            messages = body.get("messages")
            if isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0].get("content"), str):
                prompts.setdefault(task, []).append(messages[0]["content"])
            elif isinstance(body.get("prompt"), str):
                prompts.setdefault(task, []).append(body["prompt"])
    return prompts


def token_counter(checkpoint: Path) -> Callable[[str], int]:
    """Tokens of a question in a chat, for a checkpoint's own tokenizer and template; of the text where it has no template."""
    counter = TokenCounter(checkpoint)
    if not has_chat_template(checkpoint):
        return counter
    return lambda text: counter([{"role": "user", "content": text}])


def has_chat_template(checkpoint: Path) -> bool:
    """Whether a checkpoint is asked in a chat: it has a template, in a file of its own or in its tokenizer's config."""
    if (checkpoint / "chat_template.jinja").is_file():
        return True
    path = checkpoint / "tokenizer_config.json"
    return path.is_file() and '"chat_template"' in path.read_text(encoding="utf-8", errors="replace")
