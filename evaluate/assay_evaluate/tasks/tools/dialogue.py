"""Prompts that grow: dialogue about nothing before the question, as much as fits into a given number of tokens.

Sized by the reference's own tokenizer and chat template, tools and all; the number of sentences is kept in the journal, so
that every checkpoint gets the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from assay_evaluate.tasks.ruler.haystacks import generated
from assay_evaluate.tasks.tools.questions import ToolQuestion

Messages = list[dict[str, str]]
CountPrompt = Callable[[Messages], int]
"""Tokens of the whole prompt, tools and all."""

SENTENCES_PER_TURN = 3
LEAST_FILL = 0.95
"""Of the length asked for; a prompt that is shorter is not called by its length."""


def messages_of(question: ToolQuestion, num_sentences: int, seed: str) -> Messages:
    """The question after a dialogue in which the assistant has said `num_sentences` sentences."""
    sentences = generated(f"{seed}:{question.id}")(num_sentences)
    turns: Messages = []
    for first in range(0, num_sentences, SENTENCES_PER_TURN):
        turns.append({"role": "user", "content": "Tell me more, in a few sentences." if first else "Tell me a story."})
        turns.append({"role": "assistant", "content": " ".join(sentences[first : first + SENTENCES_PER_TURN])})
    return [*turns, {"role": "user", "content": question.question}]


def fit(question: ToolQuestion, seed: str, count: CountPrompt) -> int:
    """Sentences with which the prompt comes closest to its length without exceeding it; 0 for a prompt that is not filled.

    ValueError when the catalogue alone is longer, or no number of sentences fills the length to 95 %.
    """
    length = question.prompt_tokens
    if length is None:
        return 0

    @functools.cache
    def of(num_sentences: int) -> int:
        return count(messages_of(question, num_sentences, seed))

    if of(0) > length:
        raise ValueError(f"{question.num_tools} tools and the question alone take {of(0)} tokens")
    # From a guess outwards, then by halves: a count costs as much as the prompt is long.
    step = SENTENCES_PER_TURN
    per_sentence = max((of(step) - of(0)) / step, 0.1)
    low, high = 0, max(step, int((length - of(0)) / per_sentence) + step)
    while of(high) <= length:
        if high > length:  # a sentence has more than one token
            raise ValueError(f"the server counts {of(high)} tokens in {high} sentences")
        low, high = high, 2 * high
    guess = max(low, high - 4 * step)
    if of(guess) <= length:
        low = guess
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle) <= length else (low, middle)
    if of(low) < LEAST_FILL * length:
        raise ValueError(f"the fullest prompt has {of(low)} tokens, less than 95 %")
    return low
