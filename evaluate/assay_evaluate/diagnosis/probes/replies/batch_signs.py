"""Signs that show among other replies: one text for several questions, few characters for many tokens, an end at the limit.

Models make them, too; the garble scan asks again before it calls one a fault. They are for servers that tell no ids: with ids
`whole_text` sees the same for sure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from assay_evaluate.asking.language import count_scripts
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.client.reply_checks import find_repeated_texts
from assay_evaluate.diagnosis.probes.replies.detectors import Sign

THIN = 0.8
"""A reply with less than this share of the usual characters per token has lost some, or is of another kind ..."""
STILL_THIN = 0.9
"""... and a habit if it still has less than this share when it is asked for again alone."""
LEAST_TOKENS = 24
LEAST_REPLIES = 8
"""Of a script, to know what is usual."""


@dataclass(frozen=True)
class Usual:
    """Characters per token of replies to prompts of each script."""

    per_token: dict[str, float] = field(default_factory=dict)

    def is_thin(self, exchange: Exchange, share: float) -> bool:
        usual = self.per_token.get(_script(exchange))
        own = characters_per_token(exchange)
        return usual is not None and own is not None and own < share * usual


def characters_per_token(exchange: Exchange) -> float | None:
    """None: the number of tokens is not told, too small, or known from ids, or thinking is hidden in it."""
    reply = exchange.reply
    count = reply.output_tokens
    if count is None or count < LEAST_TOKENS or reply.token_ids is not None or reply.has_tool_calls:
        return None
    if reply.thinking_tokens and not reply.reasoning:
        count -= reply.thinking_tokens
    return len(exchange.text) / count if count >= LEAST_TOKENS else None


def _script(exchange: Exchange) -> str:
    [(script, _)] = count_scripts(exchange.ask.prompt).most_common(1) or [("none", 0)]
    return script


def usual_of(replies: Sequence[Exchange]) -> Usual:
    """The median of each script that has enough replies."""
    by_script: dict[str, list[float]] = defaultdict(list)
    for one in replies:
        if (own := characters_per_token(one)) is not None:
            by_script[_script(one)].append(own)
    return Usual({script: statistics.median(all_) for script, all_ in by_script.items() if len(all_) >= LEAST_REPLIES})


def signs_among(replies: Sequence[Exchange], usual: Usual) -> dict[str, list[Sign]]:
    """By id, of greedy replies."""
    found: dict[str, list[Sign]] = defaultdict(list)
    others = find_repeated_texts((one.id, one.ask.prompt, one.text) for one in replies)
    for one in replies:
        if one.id in others:
            found[one.id].append(Sign("repeated", f"the same text as {others[one.id]}, another question's reply, has"))
        if usual.is_thin(one, THIN):
            few = f"{len(one.text)} characters for {one.reply.output_tokens} tokens"
            found[one.id].append(Sign("thin", f"{few}, less than {THIN:.0%} of what is usual"))
        if ends_at_limit(one):
            found[one.id].append(Sign("end_at_limit", f"`stop` after {one.reply.output_tokens} tokens, all that were allowed"))
    return dict(found)


def ends_at_limit(exchange: Exchange) -> bool:
    """Whether a reply without ids says that it ended itself, with the last token that it could have."""
    reply = exchange.reply
    return reply.token_ids is None and reply.finish_reason == "stop" and reply.output_tokens == exchange.ask.body["max_tokens"]


def starts_alike(one: str, other: str) -> bool:
    """Whether two texts begin with the same words: 24 characters, or a quarter of the shorter one."""
    length = min(24, max(1, min(len(one), len(other)) // 4))
    return one[:length] == other[:length]
