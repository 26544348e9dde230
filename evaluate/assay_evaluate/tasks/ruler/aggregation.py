"""Common words and frequent words: the answer is spread over the whole context, so no needle has a place.

Configurations and wording: Hsieh et al. 2024 (arXiv 2404.06654), section 3 and appendices.
"""

from __future__ import annotations

import random
import string
from dataclasses import asdict, dataclass, replace

from assay_evaluate.tasks.ruler.draft import Blueprint, Draft
from assay_evaluate.tasks.ruler.words import NUM_COMPOUNDS, compound, stride

# ------------------------------------------------------------------------------------------------ common words


@dataclass(frozen=True)
class Counts:
    """How many words are common, and how often each common and each other word occurs."""

    num_common: int
    common_times: int
    other_times: int


PUBLISHED = Counts(10, 30, 3)
SMALLER = (Counts(10, 20, 2), Counts(10, 10, 1), Counts(10, 5, 1), Counts(5, 5, 1), Counts(3, 3, 1))
"""What is asked at lengths too short for the published counts."""
OWN_WORDS = "the list is of words composed by assay"


def common_words_blueprint(seed: str) -> Blueprint:
    """A numbered list in which some words occur ten times as often as the rest; one worked example. Units: other words."""
    blueprint = _common_words(seed, SMALLER[-1], None)
    for counts in (*reversed(SMALLER[:-1]), PUBLISHED):
        blueprint = _common_words(seed, counts, blueprint)
    return blueprint


def _common_words(seed: str, counts: Counts, smaller: Blueprint | None) -> Blueprint:
    draw = random.Random(seed)
    start, step = draw.randrange(NUM_COMPOUNDS), stride(NUM_COMPOUNDS, draw.randrange(NUM_COMPOUNDS))
    shuffles = draw.random()
    num_common = counts.num_common

    def words(first: int, num_words: int) -> list[str]:
        return [compound((start + i * step) % NUM_COMPOUNDS) for i in range(first, first + num_words)]

    example_counts = Counts(num_common, min(counts.common_times, 3), 1)
    example = _listed(words(0, num_common), words(num_common, num_common), example_counts, random.Random(f"{shuffles}:example"))
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(example.expected, 1))
    worked_example = f"{example.question} {example.answer_prefix} {answer}\n\n"

    def build(units: int, pieces: int) -> Draft:
        common, others = words(2 * num_common, num_common), words(3 * num_common, units)
        draft = _listed(common, others, counts, random.Random(shuffles))
        return replace(draft, question=worked_example + draft.question)

    note = OWN_WORDS
    if counts != PUBLISHED:
        note += f"; reduced to fit: {num_common} words {counts.common_times} times among others {counts.other_times} times"
    return Blueprint(build, num_common, NUM_COMPOUNDS - 3 * num_common, "all", note, smaller=smaller)


def _listed(common: list[str], others: list[str], counts: Counts, draw: random.Random) -> Draft:
    words = common * counts.common_times + others * counts.other_times
    draw.shuffle(words)
    context = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return Draft(
        question="Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        f"that appear most often.\n{context}\nQuestion: What are the {len(common)} most common words in the above list?",
        answer_prefix=f"Answer: The top {len(common)} words that appear most often in the list are:",
        context=context,
        expected=tuple(common),
        facts={**asdict(counts), "num_words": len(words)},
    )


# ------------------------------------------------------------------------------------------------ frequent words
ALPHA = 2.0
"""Of the zeta distribution: the word of rank k occurs in proportion to k^-ALPHA."""
ZETA_OF_ALPHA = 1.6449340668482264
LEAST_WORDS = 60
"""From here on the fourth word is always more frequent than the fifth."""
NOISE_WORD = "..."
"""The word of rank one, which the question tells to ignore; ranks two to four are asked for."""


def frequent_words_blueprint(seed: str) -> Blueprint:
    """Made-up words of six letters, as often as their rank says. Units: words drawn from the distribution."""
    draw = random.Random(seed)
    shuffles = draw.random()
    made: dict[str, None] = {NOISE_WORD: None}

    def build(units: int, pieces: int) -> Draft:
        times = frequencies(units)
        while len(made) < len(times):
            made["".join(draw.choices(string.ascii_lowercase, k=6))] = None
        by_rank = list(made)[: len(times)]
        words = [word for word, count in zip(by_rank, times, strict=True) for _ in range(count)]
        random.Random(shuffles).shuffle(words)
        context = " ".join(words)
        return Draft(
            question="Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            answer_prefix="Answer: According to the coded text above, the three most frequently appeared words are:",
            context=context,
            expected=tuple(by_rank[1:4]),
            facts={"times": times[:5], "num_words": len(words)},
        )

    return Blueprint(build, LEAST_WORDS, 100_000_000, "all")


def frequencies(num_words: int) -> list[int]:
    """How often the word of each rank occurs in `num_words` by the zeta distribution; without the ranks that never do."""
    times: list[int] = []
    while count := int(num_words / ZETA_OF_ALPHA / (len(times) + 1) ** ALPHA):
        times.append(count)
    return times
