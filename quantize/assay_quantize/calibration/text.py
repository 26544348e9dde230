"""Text for a calibration: files, data sets, conversations, what the model writes by itself, or a mix of them by weight.

Own text needs no data set and is what the model will meet when it is served: its prompts and its replies. A chat model is given
its template up to where the user's words would begin and sampled from there, question and answer (Magpie, arXiv 2406.08464);
another one is sampled from its first token (self-calibration, arXiv 2410.17170).

Texts are taken one by one from whichever source is furthest behind its weight, in tokens, and laid one behind the other into
sequences of one length. Only the model's own text needs the model; everything else can be read where no model is in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.records.calibration import TextSource, TextTaken
from assay_quantize.calibration.memory import texts_at_once
from assay_quantize.calibration.quiet import loading
from assay_quantize.calibration.reading.pieces import PART_LETTERS, parts_of
from assay_quantize.calibration.sources import Entry, FileText, Source, as_text, pieces_of
from assay_quantize.calibration.withheld import Withheld

PLACEHOLDER = "assay-user-message"
OWN = "own"


@dataclass(frozen=True)
class Weighted:
    """A source in a mix. source: None: the model's own text. kind: what its user calls it."""

    source: Source | None
    weight: float = 1.0
    kind: str | None = None


@dataclass(frozen=True)
class Text:
    """Where tokens come from. files: `.jsonl` (of each line `text`, `prompt` or `messages`), `.parquet`, else plain text in
    UTF-8, one file after the other; mix: sources by weight instead; neither: the model's own text, sampled at temperature 1
    with `seed`. withheld: items that no text may hold; None: texts are not looked at. withhold: whose items, as its user named
    them; None: the default."""

    files: tuple[Path, ...] = ()
    seed: int = 0
    mix: tuple[Weighted, ...] = ()
    withheld: Withheld | None = field(default=None, compare=False)
    withhold: tuple[str, ...] | None = None

    def identity(self) -> Any:
        """What tells one request from another, told before any text is read: a run that is resumed, or finished, was this one.

        The items of evaluations that are withheld are not in it: they grow with every run, the words for them do not.
        """
        mix = self.mix or tuple(Weighted(FileText(path)) for path in self.files)
        sources = [[one.weight, None if one.source is None else one.source.identity()] for one in mix]
        return [sources, bool(self.mix), self.seed if self.needs_model else None, self.withhold]

    def describe(self) -> tuple[str, ...]:
        """Its sources, in words."""
        own = f"the model's own, sampled at temperature 1, seed {self.seed}"
        if self.mix:
            total = sum(one.weight for one in self.mix)
            return tuple(
                f"{own if one.source is None else one.source.name} ({one.weight / total:.0%})" if self.mix[1:]
                else (own if one.source is None else one.source.name)
                for one in self.mix
            )  # fmt: skip
        return tuple(map(str, self.files)) or (own,)

    @property
    def needs_model(self) -> bool:
        """Whether some of it is written by the model."""
        return any(one.source is None for one in self.mix) if self.mix else not self.files

    def sequences(self, model: Any, folder: Path, num_tokens: int, length: int, say: Say) -> list[list[int]]:
        """About `num_tokens` tokens in sequences of `length`. Raises QuantizeError when there is not even one.

        model: in transformers; None where nothing is the model's own text (`needs_model`).
        """
        return list(islice(self.stream(folder, length, say, model=model), max(1, num_tokens // length)))

    def stream(self, folder: Path, length: int, say: Say, *, model: Any = None) -> Stream:
        """Sequences of `length` tokens, made as they are taken, by the tokenizer of the checkpoint in `folder`; without end
        where some of it is the model's own. Raises QuantizeError, when the first is taken if there is not even one."""
        from transformers import AutoTokenizer

        assert model is not None or not self.needs_model, "own text is sampled from the model"
        with loading(f"{folder}: its tokenizer cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.model_max_length = sys.maxsize  # a text is cut into sequences, and no warning is needed for a long one
        mix = self.mix or tuple(Weighted(FileText(path)) for path in self.files) or (Weighted(None),)
        taps = []
        for one in mix:
            opened = self._sampled(model, tokenizer, length, say) if one.source is None else _read(one.source, tokenizer)
            taps.append(Tap(one, opened, tokenizer, self.withheld))
        return Stream(taps, length, by_weight=bool(self.mix), what=", ".join(self.describe()))

    def _sampled(self, model: Any, tokenizer: Any, length: int, say: Say) -> Iterator[Document]:
        """Texts of the model, without end."""
        import torch

        first = first_tokens(tokenizer, model.config)
        torch.manual_seed(self.seed)
        inputs = torch.tensor([first] * texts_at_once(model, len(first) + length), device=model.device)
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
                shown = (
                    "" if self.withheld is None else tokenizer.decode(reply[len(first) : last + 1], skip_special_tokens=True)
                )
                yield Document(reply[: last + 1], Entry(text=shown))
            say(f"sampled {done:,} tokens of the model's own text")


@dataclass(frozen=True)
class Document:
    """Tokens of one text, or of a part of a long one. shows_thinking: False: a conversation of which the template leaves the
    thinking out. is_first: of its parts."""

    tokens: list[int]
    entry: Entry
    shows_thinking: bool = True
    is_first: bool = True


class Tap:
    """One source of a mix, and what was taken from it."""

    def __init__(self, of: Weighted, opened: Iterator[Document] | _Reading, tokenizer: Any, withheld: Withheld | None) -> None:
        self.weight = of.weight
        self._of, self._tokenizer, self._withheld = of, tokenizer, withheld
        self._reading = opened if isinstance(opened, _Reading) else None
        self._documents = opened.documents() if isinstance(opened, _Reading) else opened
        self.num_texts = self.num_tokens = self.num_dropped = self.num_without_thinking = 0
        self.is_exhausted = False

    def take(self) -> list[int] | None:
        """Tokens of the next text that holds no item of an evaluation; None: there is no further one."""
        for document in self._documents:
            tokens: list[int] | None = document.tokens
            if self._withheld is not None and self._withheld.find(pieces_of(document.entry)) is not None:
                self.num_dropped += 1
                tokens = self._without_items(document)
            if not tokens:
                continue
            self.num_texts += document.is_first
            self.num_tokens += len(tokens)
            self.num_without_thinking += document.is_first and not document.shows_thinking
            return tokens
        self.is_exhausted = True
        return None

    def _without_items(self, document: Document) -> list[int] | None:
        """Of a plain text in paragraphs, those that share nothing with the items that were found in it."""
        text = document.entry.text
        if self._reading is None or text is None or "\n\n" not in text:
            return None
        assert self._withheld is not None
        kept = [part for part in text.split("\n\n") if not self._withheld.touches(part)]
        return list(self._tokenizer("\n\n".join(kept))["input_ids"]) if kept else None

    def used(self, total_weight: float) -> TextSource:
        """What the record says of it."""
        source = self._of.source
        return TextSource(
            source=OWN if source is None else source.name,
            kind=self._of.kind,
            weight=self._of.weight / total_weight,
            num_texts=self.num_texts,
            num_tokens=self.num_tokens,
            num_dropped=self.num_dropped,
            num_without_thinking=self.num_without_thinking,
            is_exhausted=self.is_exhausted,
            sha256=None if self._reading is None else self._reading.sha256(),
            revision=None if self._reading is None else self._reading.revision,
        )


class _Reading:
    """One pass over a source."""

    def __init__(self, source: Source, tokenizer: Any) -> None:
        self._source, self._tokenizer = source, tokenizer
        opened = source.open()
        self._entries, self.revision, self.sha256 = opened

    def documents(self) -> Iterator[Document]:
        for entry in self._entries:
            try:
                text, shows_thinking = as_text(entry, self._tokenizer)
            except QuantizeError as problem:
                raise QuantizeError(f"{self._source.name}: {problem}") from None
            # a template writes the special tokens itself
            special = entry.text is not None
            if len(text) <= PART_LETTERS:
                yield Document(list(self._tokenizer(text, add_special_tokens=special)["input_ids"]), entry, shows_thinking)
            else:
                yield from self._in_parts(text, entry, shows_thinking, self._special_tokens() if special else ([], []))

    def _in_parts(
        self, text: str, entry: Entry, shows_thinking: bool, special: tuple[list[int], list[int]]
    ) -> Iterator[Document]:
        """A long text, a part at a time: special tokens stand before the first and behind the last one."""
        begin = 0
        for part in parts_of(text):
            tokens = list(self._tokenizer(part.text, add_special_tokens=False)["input_ids"])
            is_first, begin = begin == 0, begin + len(part.text)
            tokens = (special[0] if is_first else []) + tokens + (special[1] if begin == len(text) else [])
            of_part = entry if entry.text is None else entry._replace(text=part.text, around=part.around)
            yield Document(tokens, of_part, shows_thinking, is_first)

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """That the tokenizer puts before and behind a text."""
        bare, whole = (list(self._tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
        at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), len(whole))
        return whole[:at], whole[at + len(bare) :]


def _read(source: Source, tokenizer: Any) -> _Reading:
    return _Reading(source, tokenizer)


class Stream:
    """Sequences of one length, one behind the other; an iterator. `used` tells what they were made of."""

    def __init__(self, taps: list[Tap], length: int, *, by_weight: bool, what: str) -> None:
        self._taps, self._length, self._by_weight, self._what = taps, length, by_weight, what
        self._rest: list[int] = []
        self._num_made = 0
        self._made: set[int] = set()
        """Hashes of sequences."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        while len(self._rest) < self._length:
            tap = self._next_tap()
            if tap is None:
                if not self._num_made:
                    raise QuantizeError(
                        f"{self._what}: less than one sequence of {self._length} tokens{self._dropped()}; give more text or a "
                        "smaller --length"
                    )
                raise StopIteration
            self._rest += tap.take() or []
        made, self._rest = self._rest[: self._length], self._rest[self._length :]
        self._num_made += 1
        self._made.add(hash(tuple(made)))
        return made

    def _next_tap(self) -> Tap | None:
        left = [tap for tap in self._taps if not tap.is_exhausted]
        if not left:
            return None
        return min(left, key=lambda tap: tap.num_tokens / tap.weight) if self._by_weight else left[0]

    def _dropped(self) -> str:
        count = sum(tap.num_dropped for tap in self._taps)
        return f", {count} texts with items of an evaluation left out" if count else ""

    def taken(self, withheld: Withheld | None) -> TextTaken:
        """What the record says of all that was made so far."""
        return TextTaken(
            sources=self.used(),
            withheld=() if withheld is None else withheld.record(),
            num_repeated=self._num_made - len(self._made),
        )

    def used(self) -> tuple[TextSource, ...]:
        """What was taken of each source so far."""
        total = sum(tap.weight for tap in self._taps)
        return tuple(tap.used(total) for tap in self._taps)


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
