"""Counting prompt tokens as the server will: with the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError
from assay.foreign_text import shown
from assay.safe_files import read_json_object
from assay_evaluate.tasks.ruler.draft import RulerError

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

Message = dict[str, str]
Prompt = str | Sequence[Message]
"""A text for completion, or a chat; a chat that ends with the assistant is to be continued there."""
CountTokens = Callable[[Prompt], int]


@dataclass(frozen=True)
class TokenCounter:
    """`count(prompt)` for one checkpoint folder: special tokens, template and generation prompt included.

    RulerError if the folder has no tokenizer.json, or a chat is counted and there is no template.
    """

    checkpoint: Path
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, prompt: Prompt) -> int:
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self.render(prompt)
        # batch_fast leaves out offsets: twice as fast as encode
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=is_text)[0])

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as the model reads it: up to where the assistant's reply begins, or goes on."""
        from jinja2 import TemplateError

        is_continued = messages[-1]["role"] == "assistant"
        try:
            text = self._template.render(
                messages=list(messages),
                add_generation_prompt=not is_continued,
                **self._special_tokens,
                **self.chat_template_kwargs,
            )
        # a template is a stranger's program
        except (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RulerError(f"{self.checkpoint}: the chat template fails ({type(error).__name__}: {shown(error)})") from None
        if not is_continued:
            return text
        last = messages[-1]["content"].strip()
        if last not in text:
            raise RulerError(
                f"{self.checkpoint}: the chat template drops the words a reply begins with; use style chat or base"
            )
        return text[: text.rindex(last) + len(last)]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        file = self.checkpoint / "tokenizer.json"
        if not file.is_file():
            raise RulerError(f"{file}: missing; without it, count tokens through the server instead")
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  the library raises nothing more special
            raise RulerError(f"{file}: cannot be read as a tokenizer ({shown(error)})") from None

    @cached_property
    def _config(self) -> dict[str, Any]:
        if not (self.checkpoint / "tokenizer_config.json").is_file():
            return {}
        try:
            return read_json_object(self.checkpoint, "tokenizer_config.json")
        except AssayError as error:
            raise RulerError(str(error)) from None

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """What templates write as `{{ bos_token }}` and the like."""
        tokens = {name: self._config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def _template(self) -> jinja2.Template:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        file = self.checkpoint / "chat_template.jinja"
        source = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else self._config.get("chat_template")
        if not isinstance(source, str):
            raise RulerError(f"{self.checkpoint}: no chat template (chat_template.jinja); use style base")
        # the environment in which Hugging Face templates are written
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": datetime.now().strftime}
        return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise RulerError(f"the chat template refuses the prompt: {message}")
