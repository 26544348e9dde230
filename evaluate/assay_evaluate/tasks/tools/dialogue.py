"""Prompts that grow: dialogue about nothing before the question, as much as fits into a given number of tokens.

Sized by the reference's own tokenizer and chat template, tools and all; the number of sentences is kept in the journal, so
that every checkpoint gets the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from assay_evaluate.asking.dialect import Dialect
from assay_evaluate.client.client import Client, NotMeasured
from assay_evaluate.tasks.ruler.haystacks import generated
from assay_evaluate.tasks.tools.questions import ToolQuestion

Messages = list[dict[str, str]]
CountPrompt = Callable[[Messages, ToolQuestion], int]
"""(messages, the question whose tools go with them) -> tokens of the whole prompt."""

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
        return count(messages_of(question, num_sentences, seed), question)

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


def prompt_counter(client: Client, dialect: Dialect) -> CountPrompt:
    """Counts with vLLM's /tokenize where there is one, else by what a reply of one token is billed."""

    def count(messages: Messages, question: ToolQuestion) -> int:
        return count_prompt(client, dialect, messages, [tool.definition for tool in question.tools])

    return count


def count_prompt(client: Client, dialect: Dialect, messages: Messages, definitions: list[dict[str, object]]) -> int:
    """Prompt tokens of a chat with tools. A prompt that is refused as too long counts one more than the server takes.

    NotMeasured if the server counts in neither way.
    """
    if dialect.can_tokenize:
        path = "/tokenize"
        body: dict[str, object] = {"messages": messages, "chat_template_kwargs": dialect.chat_template_kwargs}
    else:
        path, body = dialect.generation(messages, max_tokens=1, temperature=0.0, seed=0)
    if definitions:
        body = {**body, "tools": definitions} | ({} if dialect.can_tokenize else {"tool_choice": "auto"})
    response = client.post(path, body)
    if response.num_prompt_tokens is not None:
        return response.num_prompt_tokens
    longest = client.endpoint.max_model_len
    if response.status == 400 and longest is not None and "context length" in response.message:
        return longest + 1
    raise NotMeasured(f"tokens cannot be counted: {path}: HTTP {response.status}: {response.message}")
