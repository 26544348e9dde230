"""Text for a calibration: files, data sets, conversations, what the model writes by itself, or a mix of them by weight.

Own text needs no data set and is what the model will meet when it is served: its prompts and its replies. A chat model is given
its template up to where the user's words would begin and sampled from there, question and answer (Magpie, arXiv 2406.08464);
another one is sampled from its first token (self-calibration, arXiv 2410.17170).

Texts are taken one by one from whichever source is furthest behind its weight, in tokens, and laid one behind the other into
sequences of one length. Only the model's own text needs the model; everything else can be read where no model is in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from assay.callbacks import Say
from assay.errors import QuantizeError
from assay.records.calibration import TextSource, TextTaken
from assay.safe_yaml import NotPlainYaml, read_yaml
from assay_quantize.calibration.memory import texts_at_once
from assay_quantize.calibration.pieces import PART_LETTERS, parts_of
from assay_quantize.calibration.quiet import loading
from assay_quantize.calibration.sources import HUB, Entry, FileText, HubText, Source, as_text, pieces_of
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
        sources = [[text.weight, None if text.source is None else text.source.identity()] for text in mix]
        return [sources, bool(self.mix), self.seed if self.needs_model else None, self.withhold]

    def describe(self) -> tuple[str, ...]:
        """Its sources, in words."""
        own = f"the model's own, sampled at temperature 1, seed {self.seed}"
        if self.mix:
            names = tuple(own if text.source is None else text.source.name for text in self.mix)
            total = sum(text.weight for text in self.mix)
            shares = (f"{name} ({text.weight / total:.0%})" for name, text in zip(names, self.mix, strict=True))
            return tuple(shares) if self.mix[1:] else names
        return tuple(map(str, self.files)) or (own,)

    @property
    def needs_model(self) -> bool:
        """Whether some of it is written by the model."""
        return any(text.source is None for text in self.mix) if self.mix else not self.files

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
        for text in mix:
            opened = self._sampled(model, tokenizer, length, say) if text.source is None else _Reading(text.source, tokenizer)
            taps.append(Tap(text, opened, tokenizer, self.withheld))
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


class Stream:
    """Sequences of one length, one behind the other; an iterator. `taken` tells what they were made of."""

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
            left = [tap for tap in self._taps if not tap.is_exhausted]
            if not left:
                if not self._num_made:
                    count = sum(tap.num_dropped for tap in self._taps)
                    dropped = f", {count} texts with items of an evaluation left out" if count else ""
                    raise QuantizeError(
                        f"{self._what}: less than one sequence of {self._length} tokens{dropped}; give more text or a "
                        "smaller --length"
                    )
                raise StopIteration
            tap = min(left, key=lambda tap: tap.num_tokens / tap.weight) if self._by_weight else left[0]
            self._rest += tap.take() or []
        sequence, self._rest = self._rest[: self._length], self._rest[self._length :]
        self._num_made += 1
        self._made.add(hash(tuple(sequence)))
        return sequence

    def taken(self, withheld: Withheld | None) -> TextTaken:
        """What the record says of all that was made so far."""
        total = sum(tap.weight for tap in self._taps)
        return TextTaken(
            sources=tuple(tap.used(total) for tap in self._taps),
            withheld=() if withheld is None else withheld.record(),
            num_repeated=self._num_made - len(self._made),
        )


def first_tokens(tokenizer: Any, config: Any) -> list[int]:
    """What stands before a user's first word, or before any text."""
    if getattr(tokenizer, "chat_template", None):
        shown = tokenizer.apply_chat_template([{"role": "user", "content": PLACEHOLDER}], tokenize=False)
        before, placeholder, _ = str(shown).partition(PLACEHOLDER)
        if placeholder and before:
            return [int(token) for token in tokenizer(before, add_special_tokens=False)["input_ids"]]
    ends = getattr(config, "eos_token_id", None)
    fallback = ends[0] if isinstance(ends, list) else ends
    starts = (tokenizer.bos_token_id, getattr(config, "bos_token_id", None), fallback)
    return [next((int(token) for token in starts if token is not None), 0)]


# ------------------------------------------------------------------------------------------------ `--text`
OpenFolder = Callable[[Path], Source]
"""What a folder stands for: the conversations of a run. QuantizeError: nothing."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""What a share of tokens can be made of: of numbers near the ends of a double neither sums nor quotients are numbers."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MixedText(_Strict):
    """One entry of a mix file. files, revision: of a data set. column: of its rows."""

    source: str
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    kind: str | None = None
    files: tuple[str, ...] = ()
    revision: str = "main"
    column: str | None = None


class MixFile(_Strict):
    """The whole file."""

    texts: Annotated[tuple[MixedText, ...], Field(min_length=1)]


def mix_of(named: Sequence[str], open_folder: OpenFolder) -> tuple[Weighted, ...]:
    """The sources that `--text` names: `SOURCE@WEIGHT`, or a YAML file.

        texts:
          - {source: hub:org/code, files: ["data/*.parquet"], weight: 0.4, kind: code}
          - {source: chats.jsonl, weight: 0.3, kind: tools}
          - {source: own, weight: 0.3}

    Weights are shares of tokens and need not add up to 1. Paths are relative to the file. What stands for a source: `own`, the
    model's own text; `hub:OWNER/NAME`, a data set; else a file. Others, such as a run's folder, are opened by who knows them.
    QuantizeError: a weight that is none, a file that is not there.
    """
    return tuple(source for text in named for source in _of_option(text, open_folder))


def _of_option(text: str, open_folder: OpenFolder) -> Iterable[Weighted]:
    name, weight = text, 1.0
    if "@" in text and not Path(text).exists():
        before, _, after = text.rpartition("@")
        with suppress(ValueError):  # an @ of the name's own
            name, weight = before, float(after)
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise QuantizeError(
                f"--text {text}: a weight is a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, as in {before}@0.3"
            )
    if Path(name).suffix in (".yaml", ".yml"):
        mixed = _of_file(Path(name), open_folder)
        total = sum(source.weight for source in mixed)
        return [replace(source, weight=weight * source.weight / total) for source in mixed]
    return [Weighted(_source(name, Path(), open_folder), weight)]


def _source(name: str, folder: Path, open_folder: OpenFolder, entry: MixedText | None = None) -> Source | None:
    if name == OWN:
        return None
    entry = entry or MixedText(source=name)
    if name.startswith(HUB):
        dataset, _, patterns = name.removeprefix(HUB).partition(":")
        files = (*(part for part in patterns.split(",") if part), *entry.files)
        return HubText(dataset, files, entry.revision, entry.column)
    path = folder / name
    return open_folder(path) if path.is_dir() else FileText(path, entry.column)


def _of_file(path: Path, open_folder: OpenFolder) -> list[Weighted]:
    try:
        mix = MixFile.model_validate(read_yaml(path))
    except OSError as problem:
        raise QuantizeError(f"{path}: cannot be read: {problem.strerror}") from None
    except NotPlainYaml as problem:
        raise QuantizeError(f"{path}: {problem}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "the file"
        raise QuantizeError(
            f"{path}: {where}: {first['msg']}; a mix is `texts:`, a list of {{source, weight, kind, files, revision, column}}"
        ) from None
    return [Weighted(_source(entry.source, path.parent, open_folder, entry), entry.weight, entry.kind) for entry in mix.texts]
