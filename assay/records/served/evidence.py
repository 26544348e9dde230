"""What the replies to a task say of who gave them, and of what: evidence that they answer the same questions, whole."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.records.base import Part


class PromptCount(Part):
    """Length of one item's prompt in tokens, by the two who should agree."""

    item: str
    billed: int
    """`usage.prompt_tokens` of its reply."""
    counted: int
    """By the server's /tokenize, or the checkpoint's own tokenizer."""


class TextCounts(Part):
    """Do the texts of replies hold the tokens that the server bills for them? Counted by a tokenizer, over a few replies."""

    typical_share: float
    """Tokens of the text / tokens billed: the second largest over the first replies that are long enough. Below 1 where the
    server hides thinking, or drops marks."""
    num_typical: int
    num_suspects: int
    """Replies with far fewer characters per token than the others: counted are those with the fewest."""
    num_counted: int
    num_short: int
    """Of those counted: their text has far fewer tokens than were billed, next to the typical share."""
    shortest: PromptCount | None = None
    """The one that lacks most: tokens billed for the reply, and counted in its text."""


class ServedEvidence(Part):
    """What the replies to one task carry beside their answers. Shares are over `num_replies`, the replies that came."""

    num_replies: int
    temperature: float
    """That was asked for."""
    asked_model: str
    """Name that was asked for: the server's own, by /v1/models."""
    models: dict[str, int]
    """Name that a reply gives itself -> replies. Empty: they give none."""
    system_fingerprints: dict[str, int]
    """Configuration that a reply says it is of -> replies. Empty: they say none."""
    num_unguessable_ids: int = 0
    """Replies whose id is so long that no two servers give the same one."""
    stop_strings: dict[str, int] = Field(default_factory=dict)
    """String that a reply says ended it, though none was sent -> replies."""
    num_from_cache: int = 0
    """Replies with a header that says that a cache gave them."""
    cache_header: str | None = None
    """The first such, `name: value`."""
    num_usage_problems: int = 0
    """Replies whose token counts contradict each other, or their text."""
    usage_problem: str | None = None
    """How those of the first such reply do."""
    common_texts: dict[int, str] = Field(default_factory=dict)
    """Beginning of the texts that were given to many different questions, by `ItemResult.text_key`. Short ones are left out."""
    num_beside: int = 0
    """Greedy replies that were compared with the reference's reply to the same request. 0 of its first pass."""
    num_cut_short: int = 0
    """Of those: after the same thinking and as many tokens as the reference's, the text is the beginning of it and no more."""
    num_reference_cut_short: int = 0
    """The other way round: the reference's is the beginning of this one."""
    prompt_counts: tuple[PromptCount, ...] = ()
    """Of the shortest and the longest prompts. Empty: there is no tokenizer to count with, or the pass is a repeat."""
    texts: TextCounts | None = None
    """None: as above, or no reply is long enough."""


class AskedTwice(Part):
    """A few of a run's own questions, shortly, each sent twice with the same words: does the server do as it is told?"""

    temperature: Literal["zero", "above zero"]
    num_questions: int
    num_different: int
    """Questions with two different replies."""
    num_same_id: int
    """Questions of which the very same request came back with the very same id: the first reply, from a cache."""
    mean_output_tokens: float | None
    """Of the replies. None: the server does not count."""
