"""Text for a calibration: files, or what the model writes by itself.

Own text needs no data set and is what the model will meet when it is served: its prompts and its replies. A chat model is given
its template up to where the user's words would begin and sampled from there, question and answer (Magpie, arXiv 2406.08464);
another one is sampled from its first token (self-calibration, arXiv 2410.17170).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.callbacks import Say
from assay.errors import QuantizeError

SAMPLED_AT_ONCE = 32
PLACEHOLDER = "assay-user-message"


@dataclass(frozen=True)
class Text:
    """Where tokens come from. files: `.jsonl` (of each line `text`, `prompt` or `messages`), else plain text in UTF-8; empty:
    the model's own text, sampled at temperature 1 with `seed`."""

    files: tuple[Path, ...] = ()
    seed: int = 0

    def describe(self) -> tuple[str, ...]:
        return tuple(map(str, self.files)) or (f"the model's own, sampled at temperature 1, seed {self.seed}",)

    def sequences(self, model: Any, folder: Path, num_tokens: int, length: int, say: Say) -> list[list[int]]:
        """About `num_tokens` tokens in sequences of `length`. Raises QuantizeError when the files hold not even one."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as problem:
            raise QuantizeError(f"{folder}: its tokenizer cannot be loaded: {str(problem).splitlines()[0]}") from None
        count = max(1, num_tokens // length)
        documents = _documents(self.files, tokenizer) if self.files else self._sampled(model, tokenizer, length, say)
        made = packed(documents, length, count)
        if not made:
            raise QuantizeError(
                f"{', '.join(self.describe())}: less than one sequence of {length} tokens; give more text or a smaller --length"
            )
        return made

    def _sampled(self, model: Any, tokenizer: Any, length: int, say: Say) -> Iterator[list[int]]:
        """Texts of the model, without end."""
        import torch

        first = first_tokens(tokenizer, model.config)
        torch.manual_seed(self.seed)
        inputs = torch.tensor([first] * SAMPLED_AT_ONCE, device=model.device)
        ends = model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        done = 0
        while True:
            replies = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=length, pad_token_id=model.generation_config.pad_token_id or 0,
            )  # fmt: skip
            for reply in replies.tolist():
                last = next((at for at, token in enumerate(reply) if at >= len(first) and token in ends), len(reply) - 1)
                done += last + 1
                yield reply[: last + 1]
            say(f"sampled {done:,} tokens of the model's own text")


def first_tokens(tokenizer: Any, config: Any) -> list[int]:
    """What stands before a user's first word, or before any text."""
    if getattr(tokenizer, "chat_template", None):
        shown = tokenizer.apply_chat_template([{"role": "user", "content": PLACEHOLDER}], tokenize=False)
        before, found, _ = str(shown).partition(PLACEHOLDER)
        if found and before:
            return [int(token) for token in tokenizer(before, add_special_tokens=False)["input_ids"]]
    ends = getattr(config, "eos_token_id", None)
    fallback = ends[0] if isinstance(ends, list) else ends
    starts = (tokenizer.bos_token_id, getattr(config, "bos_token_id", None), fallback)
    return [next((int(token) for token in starts if token is not None), 0)]


def packed(documents: Iterator[list[int]], length: int, count: int) -> list[list[int]]:
    """The first `count` pieces of `length` tokens of all documents one after the other."""
    made: list[list[int]] = []
    rest: list[int] = []
    for document in documents:
        rest += document
        while len(rest) >= length:
            made.append(rest[:length])
            rest = rest[length:]
            if len(made) == count:
                return made
    return made


def _documents(files: Sequence[Path], tokenizer: Any) -> Iterator[list[int]]:
    for path in files:
        for text in _texts(path, tokenizer):
            yield tokenizer(text)["input_ids"]


def _texts(path: Path, tokenizer: Any) -> Iterator[str]:
    try:
        whole = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise QuantizeError(f"{path}: cannot be read: {problem.strerror}; --text takes plain text or .jsonl") from None
    except UnicodeDecodeError:
        raise QuantizeError(f"{path}: is not UTF-8; --text takes plain text or .jsonl") from None
    if path.suffix != ".jsonl":
        yield whole
        return
    for number, line in enumerate(whole.split("\n"), 1):  # a string in JSON may hold other ends of lines
        try:
            entry = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as problem:
            raise QuantizeError(f"{path}, line {number}: not JSON: {problem.msg}") from None
        if entry is None:
            continue
        fields = entry if isinstance(entry, dict) else {}
        value = next((fields[key] for key in ("text", "prompt", "messages") if key in fields), None)
        if isinstance(value, list):
            value = tokenizer.apply_chat_template(value, tokenize=False)
        if not isinstance(value, str):
            raise QuantizeError(f"{path}, line {number}: an object with `text`, `prompt` or `messages` is needed")
        yield value
