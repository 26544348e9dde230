"""Tokens of a prompt, chat template and all: counted here where that agrees with the server, else by asking it."""

from __future__ import annotations

import functools
from pathlib import Path

from assay_evaluate.asking.dialect import count_prompt
from assay_evaluate.asking.session import Session
from assay_evaluate.client.client import NotMeasured
from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.items import Style, prompt_of
from assay_evaluate.tasks.ruler.tokens import CountTokens, Prompt, TokenCounter


def prompt_counter(session: Session, checkpoint: Path | None, style: Style) -> CountTokens:
    """The checkpoint's own tokenizer where it counts as the server does, else the server: sizing asks hundreds of times."""
    on_server = functools.partial(_count_on_server, session)
    if checkpoint is None:
        return on_server
    local = TokenCounter(checkpoint, session.dialect.chat_template_kwargs)
    question = prompt_of(style, "How many?", "Answer:")
    try:
        return local if local(question) == on_server(question) else on_server
    except RulerError:
        return on_server


def _count_on_server(session: Session, prompt: Prompt) -> int:
    """Prompt tokens as the server counts them. NotMeasured if it does not say."""
    if not session.dialect.can_tokenize and (isinstance(prompt, str) or len(prompt) > 1):
        raise NotMeasured("tokens cannot be counted: the server has no /tokenize; only style chat can do without")
    return count_prompt(session.client, session.dialect, prompt)
