"""Texts on which checkpoints are screened: files of plain text, or JSON lines with `text`, or with `prompt` and `reply`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import QuantizeError
from assay.foreign_text import shown
from assay.records.screening import StatedTexts
from assay_quantize.calibration.quiet import loading
from assay_quantize.sensitivity.texts import ScoredText, prompt_ids

TEXTS, SHORTEST, LENGTH = 40, 64, 2048
STATED = "stated"
"""Key of a first line that is no text, but says of all texts of the file where they come from: {"stated": {"source": ...}}."""
MOST_CHARACTERS = 32
"""Of a text, for each token that is taken of it: what is behind is not tokenized."""


@dataclass(frozen=True)
class ScreenText:
    """name: file and number of its line. language, domain: as its line says; the file's name where it says no domain.
    num_thinking: the first so many of the scored tokens are thinking; None: not known."""

    name: str
    scored: ScoredText
    language: str = ""
    domain: str = ""
    num_thinking: int | None = None


def read_texts(paths: Sequence[Path], tokenizer_folder: Path, num_tokens: int, length: int | None) -> list[ScreenText]:
    """Texts of all files in turns, at most `length` tokens of each are scored, until `num_tokens` are; a plain file is one text
    after the other of `length` tokens. length: None: so many that there are about `TEXTS` texts, at most `LENGTH`.

    QuantizeError: a file or the tokenizer cannot be read, a line means nothing, or nothing is left to score.
    """
    from transformers import AutoTokenizer

    if length is None:
        length = min(LENGTH, max(SHORTEST, num_tokens // TEXTS))

    with loading(f"{tokenizer_folder}: its tokenizer cannot be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    streams = [iter(_texts_of(path, tokenizer, length)) for path in paths]
    texts: list[ScreenText] = []
    left = num_tokens
    while streams and left > 0:
        for stream in list(streams):
            text = next(stream, None)
            if text is None:
                streams.remove(stream)
            elif left > 0:
                texts.append(text)
                left -= text.scored.num_scored
    if not texts:
        raise QuantizeError(f"{', '.join(map(str, paths))}: no text of two tokens; give files of plain text or JSON lines")
    return texts


def _texts_of(path: Path, tokenizer: Any, length: int) -> Iterator[ScreenText]:
    try:
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield from _of_line(f"{path}:{number}", path.stem, line, tokenizer, length)
            return
        with path.open(encoding="utf-8-sig") as file:
            number = 0
            while piece := file.read(MOST_CHARACTERS * length):
                ids = _ids(tokenizer, piece)
                for begin in range(0, len(ids), length):
                    number += 1
                    if len(ids[begin : begin + length]) > 1:
                        scored = ScoredText(tuple(ids[begin : begin + length]))
                        yield ScreenText(f"{path}:{number}", scored, domain=path.stem)
    except UnicodeDecodeError:
        raise QuantizeError(f"{path}: is no UTF-8 text; give plain text or JSON lines") from None
    except OSError as problem:
        raise QuantizeError(f"{path}: cannot be read: {problem.strerror or problem}") from None


def stated_in(paths: Sequence[Path]) -> StatedTexts:
    """What the first lines of files of JSON lines state of their texts."""
    said: dict[str, list[str]] = {}
    for path in paths:
        if path.suffix == ".jsonl" and path.is_file():
            with path.open(encoding="utf-8-sig", errors="replace") as lines:
                fields = _object(next(lines, ""))
            stated = fields.get(STATED) if fields else None
            for name, value in stated.items() if isinstance(stated, dict) else ():
                if name in StatedTexts.model_fields and isinstance(value, str):
                    said.setdefault(name, []).append(shown(value, 200))
    return StatedTexts(**{name: "; ".join(dict.fromkeys(values)) for name, values in said.items()})


def _object(line: str) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _of_line(where: str, domain: str, line: str, tokenizer: Any, length: int) -> Iterator[ScreenText]:
    fields = _object(line) or {}
    if STATED in fields:
        return
    is_text = _is_text(fields.get("text"))
    is_reply = _is_text(fields.get("prompt")) and _is_text(fields.get("reply"))
    if not is_text and not is_reply:
        raise QuantizeError(f'{where}: is no line of a text; write {{"text": ...}} or {{"prompt": ..., "reply": ...}}')
    prompt = prompt_ids(tokenizer, fields["prompt"]) if is_reply else []
    body = _ids(tokenizer, fields["reply" if is_reply else "text"][: MOST_CHARACTERS * length])
    ids = (*prompt, *body[:length])
    first = max(1, len(prompt))
    if len(ids) <= first:
        return
    thinking = None
    if is_reply and "</think>" in fields["reply"]:
        thinking = min(len(_ids(tokenizer, fields["reply"].partition("</think>")[0])), len(ids) - first)
    language, told = (shown(fields.get(key) or "", 40) if fields.get(key) else "" for key in ("language", "domain"))
    yield ScreenText(where, ScoredText(ids, first), language, told or domain, thinking)


def _is_text(value: object) -> bool:
    """Without halves of surrogate pairs, which JSON may hold and no tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
