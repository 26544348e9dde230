"""Cheap checks of replies against themselves: text, ids, counts, log-probabilities and the reason why each ended.

Pure functions of what replies carry; none asks anybody anything. Each `Contradiction` is one that a correct server cannot make,
whatever its model writes, so that it speaks of the serving (a gateway, a detokenizer, a cache) and never of weights:

    text              the text is not what the reply's ids decode to, or not what the tokens of its log-probabilities are
    count             `usage.completion_tokens` is not the number of ids (or of log-probabilities), or beyond what was allowed
    cut_early         `length` although fewer tokens came than the request and the context leave room for
    stop_at_limit     `stop` although its tokens fill the budget and the last is none that ends a reply
    stop_without_end  `stop`, with a last token that ends no reply (the end was cut, or `length` renamed)
    row               a log-probability that is another token's: the drawn token is likelier than the listed ones and not listed

`find_contradictions` looks at one reply; `EndTokens` learns from many which tokens end a reply; `find_unlike_counts` finds
equal replies that are billed differently, `find_repeated_texts` one text for different questions (models write that, too: no
contradiction, but worth asking again).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from assay_evaluate.client.decoded_text import BROKEN, TextComparison
from assay_evaluate.client.journal import Reply
from assay_evaluate.client.logprobs import TokenRow
from assay_evaluate.transport.foreign_json import count_in

ContradictionKind = Literal["text", "count", "cut_early", "stop_at_limit", "stop_without_end", "row"]

LIKELIER_NATS = 0.01
"""A drawn token that is so much likelier than the last listed one is among the likeliest, and has to be listed."""
SHORTEST_REPEATED = 48
"""Characters from which on two equal texts are more than a short answer."""
LEAST_ENDS = 4
"""Replies that ended, from which on it is known which tokens end one."""
LEAST_MARKED = 0.2
"""Share of such replies whose ids end in a mark, from which on the server is one that tells that token: of one that leaves it
out, only texts that end in markup do."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """What in a reply cannot be, and in words."""

    kind: ContradictionKind
    sentence: str
    position: int | None = None
    """Index of the token concerned."""


def find_contradictions(
    reply: Reply,
    *,
    max_tokens: int,
    room_tokens: int | None = None,
    rows: Sequence[TokenRow] = (),
    compared: TextComparison | None = None,
    ends: EndTokens | None = None,
) -> list[Contradiction]:
    """All that contradict each other in one answered reply.

    max_tokens: as the request said. room_tokens: what the context leaves for a reply (None: unknown, so that no reply is said
    to be cut early). rows: its log-probabilities. compared: its text with what all of its ids decode to (`compare_text`; None:
    not known). ends: tokens that end replies, learned from replies of the same server. The text of a reply with tool calls is
    of the parser's making, and that of one with a stop string ends elsewhere than its ids: neither is compared with them.
    """
    contradictions: list[Contradiction] = []
    is_text_comparable = not reply.has_tool_calls and not isinstance(reply.stop_reason, str)
    if compared is not None and not compared.is_equal and is_text_comparable:
        contradictions.append(Contradiction("text", f"the text is not what its token ids decode to: {compared.difference}"))
    contradictions += [*check_count(reply, max_tokens=max_tokens, rows=rows), *check_rows(rows)]
    end = check_end(reply, max_tokens=max_tokens, room_tokens=room_tokens, compared=compared, ends=ends)
    return [*contradictions, *([end] if end is not None else [])]


def check_count(reply: Reply, *, max_tokens: int, rows: Sequence[TokenRow] = ()) -> list[Contradiction]:
    """What the reply bills against its ids, its log-probabilities, the budget and its own counts."""
    # A count that contradicts another one of the reply is not used elsewhere; here it is what is looked for.
    billed = reply.output_tokens if reply.usage_problem is None else count_in(reply.usage or {}, "completion_tokens")
    if billed is None:
        return []
    if reply.token_ids is not None and len(reply.token_ids) != billed:
        return [Contradiction("count", f"{billed} tokens are billed, and {len(reply.token_ids)} ids came")]
    # An API may leave out the token that ended the reply, and log-probabilities of thinking.
    if reply.token_ids is None and rows and not reply.thinking_tokens and not reply.reasoning and abs(len(rows) - billed) > 1:
        return [Contradiction("count", f"{billed} tokens are billed, and {len(rows)} log-probabilities came")]
    if billed > max_tokens:
        return [Contradiction("count", f"{billed} tokens are billed, and at most {max_tokens} were asked for")]
    return [] if reply.usage_problem is None else [Contradiction("count", f"its counts cannot be true: {reply.usage_problem}")]


def check_end(
    reply: Reply,
    *,
    max_tokens: int,
    room_tokens: int | None = None,
    compared: TextComparison | None = None,
    ends: EndTokens | None = None,
) -> Contradiction | None:
    """The reason that the reply gives for its end against its number of tokens and its last one. None: nothing is wrong."""
    count = len(reply.token_ids) if reply.token_ids is not None else reply.output_tokens
    if count is None:
        return None
    if reply.finish_reason == "length" and room_tokens is not None and count < min(max_tokens, room_tokens):
        allowed = min(max_tokens, room_tokens)
        return Contradiction("cut_early", f"it ends with `length` after {count} tokens, and there was room for {allowed}")
    is_ended = reply.finish_reason == "stop" and not isinstance(reply.stop_reason, str) and not reply.has_tool_calls
    if not is_ended or not reply.token_ids:
        return None
    if reply.stop_reason is not None:
        last = reply.token_ids[-1]
        sentence = f"it was stopped by token {reply.stop_reason}, it says, and its last one is {last}"
        return Contradiction("stop_without_end", sentence) if last != reply.stop_reason else None
    if ends is None or ends.ends_a_reply(reply.token_ids[-1], compared) is not False:
        return None
    if count >= max_tokens:
        return Contradiction("stop_at_limit", f"it says `stop` after {count} tokens, all that were allowed, and none ends it")
    return Contradiction("stop_without_end", f"it says `stop`, and its last token, {reply.token_ids[-1]}, ends no reply")


def check_rows(rows: Sequence[TokenRow]) -> list[Contradiction]:
    """The first log-probability that cannot be that of its token."""
    for position, row in enumerate(rows):
        values = [value for _, value in row.top if value == value]
        if not values or row.logprob != row.logprob:
            continue
        listed = [value for token, value in row.top if token == row.token]
        if not listed and row.logprob > min(values) + LIKELIER_NATS:
            sentence = f"a token of log-probability {row.logprob:.3f} is not listed, and others down to {min(values):.3f} are"
            return [Contradiction("row", sentence, position)]
        if isinstance(row.token, int) and listed and all(abs(value - row.logprob) > LIKELIER_NATS for value in listed):
            sentence = f"a token has log-probability {row.logprob:.3f}, and {listed[0]:.3f} in the list of the likeliest"
            return [Contradiction("row", sentence, position)]
    return []


def text_of_rows(rows: Sequence[TokenRow]) -> str | None:
    """The tokens of a reply's log-probabilities, one behind the other. None: they are ids, or not whole characters."""
    tokens = [row.token for row in rows]
    if not tokens or not all(isinstance(token, str) for token in tokens):
        return None
    whole = "".join(map(str, tokens))
    return None if BROKEN in whole or "\\x" in whole else whole


class EndTokens:
    """Which tokens end replies of one server: those that end one and never stand inside another.

    A server that leaves the token that ended a reply out of its ids shows none, and nothing is concluded from them.
    """

    def __init__(self) -> None:
        self._last: Counter[int] = Counter()
        self._inside: set[int] = set()
        self._marked = [0, 0]
        """Replies that ended, by whether what they decode to ends with a mark."""

    def learn(self, reply: Reply, compared: TextComparison | None = None) -> None:
        """Look at one answered reply."""
        ids = reply.token_ids
        if not ids:
            return
        self._inside.update(ids[:-1])
        if reply.finish_reason == "stop" and not isinstance(reply.stop_reason, str) and not reply.has_tool_calls:
            self._last[ids[-1]] += 1
            if compared is not None:
                self._marked[compared.ends_with_mark] += 1
        elif reply.finish_reason == "length":
            self._inside.add(ids[-1])

    def ends_a_reply(self, token: int, compared: TextComparison | None = None) -> bool | None:
        """Whether a reply that ends with `token` has ended. None: not known."""
        ended = sum(self._last.values())
        if ended < LEAST_ENDS:
            return None
        if compared is not None and self._marked[True] >= max(LEAST_ENDS, LEAST_MARKED * sum(self._marked)):
            return compared.ends_with_mark or (token not in self._inside and self._last[token] > 1)
        own = sum(count for token, count in self._last.items() if token not in self._inside)
        return None if 2 * own <= ended else token not in self._inside


def find_repeated_texts(replies: Iterable[tuple[Hashable, Hashable, str]]) -> dict[Hashable, Hashable]:
    """Of replies as (id, question, text): id of each whose text another question's reply has, too -> id of that reply.

    Texts below 48 characters are answers that many questions share, and left out.
    """
    by_text: dict[str, list[tuple[Hashable, Hashable]]] = defaultdict(list)
    for name, question, text in replies:
        if len(text.strip()) >= SHORTEST_REPEATED:
            by_text[text.strip()].append((name, question))
    repeats: dict[Hashable, Hashable] = {}
    for having in by_text.values():
        first = having[0]
        others = [name for name, question in having[1:] if question != first[1]]
        if others:
            repeats |= {first[0]: others[0], **dict.fromkeys(others, first[0])}
    return repeats


def find_unlike_counts(replies: Iterable[tuple[Hashable, Hashable, int | None]]) -> dict[Hashable, tuple[int, int]]:
    """Of replies as (id, what was asked and came back, billed tokens): id -> (its tokens, those that the equal ones have).

    Of two that differ the later one is named; of more, those that differ from the most common number.
    """
    by_content: dict[Hashable, list[tuple[Hashable, int]]] = defaultdict(list)
    for name, content, count in replies:
        if count is not None:
            by_content[content].append((name, count))
    unlike: dict[Hashable, tuple[int, int]] = {}
    for having in by_content.values():
        [(usual, _)] = Counter(count for _, count in having).most_common(1)
        unlike |= {name: (count, usual) for name, count in having if count != usual}
    return unlike
