"""What needles are hidden in: endless streams of lines or sentences.

`noise` is the published line of five sentences, over and over. `essays` are sentences of our own grammar, others for every
item; or a folder of texts, read from its beginning, cut at a word and begun again at its end, as published.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay_evaluate.tasks.ruler.draft import RulerError
from assay_evaluate.tasks.ruler.languages import WORDINGS, RulerLanguage

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

Sentences = Callable[[int], list[str]]
"""n -> the first n sentences; the same ones for any n. The list is the caller's to change."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+|(?<=[。！？])")


def noise(num_lines: int) -> list[str]:
    """The line of noise, so many times."""
    return [NOISE] * num_lines


def repeated(sentences: Sequence[str], num_sentences: int) -> list[str]:
    """The first `num_sentences` of `sentences`, begun again as often as needed."""
    times, rest = divmod(num_sentences, len(sentences))
    return [*sentences] * times + [*sentences[:rest]]


def growing(make: Callable[[], str]) -> Sentences:
    """Sentences that are made once they are asked for, one after the other."""
    made: list[str] = []

    def first(num_sentences: int) -> list[str]:
        made.extend(make() for _ in range(num_sentences - len(made)))
        return made[:num_sentences]

    return first


def generated(seed: str, language: RulerLanguage = "en") -> Sentences:
    """Essay-like sentences of a language's grammar, another text for every seed. No digits, so no needle by chance."""
    return growing(functools.partial(WORDINGS[language].sentence, random.Random(f"{seed}:haystack:{language}")))


@dataclass(frozen=True)
class TextFolder:
    """The sentences of the .txt files below `path`, in order of their names, white space made single; and the words of all
    files as one text, as RULER joins them."""

    path: Path
    sentences: tuple[str, ...]
    words: tuple[str, ...]

    def first(self, num_sentences: int) -> list[str]:
        return repeated(self.sentences, num_sentences)

    def of_words(self, num_words: int) -> list[str]:
        """The sentences of the first `num_words`; the last one ends where they do."""
        return split_sentences(" ".join(repeated(self.words, num_words)))


def read_text_folder(path: str | Path, names: Collection[str] | None = None) -> TextFolder:
    """Read a haystack of one's own. RulerError if there is no text, not UTF-8, or a link that leads out of the folder.

    names: of the files to read; None: all.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise RulerError(f"{folder}: not a folder; a haystack is a folder of UTF-8 .txt files")
    texts = []
    for file in sorted(folder.rglob("*.txt"), key=lambda file: file.relative_to(folder).as_posix()):
        if not file.resolve().is_relative_to(folder.resolve()):
            raise RulerError(f"{file}: leads out of the haystack folder {folder}; put a copy of the file there")
        if file.is_file() and (names is None or file.name in names):
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise RulerError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    sentences = tuple(sentence for text in texts for sentence in split_sentences(text))
    if not sentences:
        raise RulerError(f"{folder}: no text in any .txt file; a haystack is a folder of UTF-8 .txt files")
    return TextFolder(folder, sentences, tuple("".join(texts).split()))


def split_sentences(text: str) -> list[str]:
    """Sentences of running text, by their final punctuation; white space inside is made single."""
    pieces = (" ".join(piece.split()) for piece in _SENTENCE_END.split(text))
    return [piece for piece in pieces if piece]


def cut(sentence: str, num_pieces: int) -> str:
    """The first `num_pieces` words of a sentence; characters, where it has no spaces."""
    words = sentence.split(" ")
    return " ".join(words[:num_pieces]) if len(words) > 1 else sentence[:num_pieces]


def num_pieces(sentence: str) -> int:
    """In how many pieces `cut` divides a sentence."""
    words = sentence.count(" ") + 1
    return words if words > 1 else len(sentence)


Index = Callable[[float, int], int]
"""(share 0..1, number of sentences) -> how many of them stand before a needle."""


def nearest(share: float, num_sentences: int) -> int:
    return round(share * num_sentences)


def as_published(share: float, num_sentences: int) -> int:
    """By RULER's scripts; of a share that is drawn evenly from 0..1 all places but the very end are equally likely."""
    return int(share * num_sentences)


def hide(sentences: list[str], needles: Sequence[tuple[float, str]], joint: str = " ", index: Index = nearest) -> str:
    """The text with every needle after its share (0..1) of the sentences; needles of equal place keep their order."""
    num_sentences = len(sentences)
    parts: list[str] = []
    done = 0
    for share, needle in sorted(needles, key=lambda needle: needle[0]):
        until = index(share, num_sentences)
        parts += [*sentences[done:until], needle]
        done = until
    return joint.join([*parts, *sentences[done:]])
