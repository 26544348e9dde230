"""What replies carry beside their answers, gathered while they come: who gave them, of which prompt, and whole or not.

`marks_of` is about one reply and goes into its item. `ServedTally` adds up a task; what needs a tokenizer is counted at its
end, of a few prompts and texts only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import re
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from assay.foreign_text import shown
from assay.records.base import canonical_json
from assay.records.measurement import Truncation
from assay.records.served.evidence import PromptCount, ServedEvidence, TextCounts
from assay_evaluate.client.journal import Identity, Journal, Reply, Request
from assay_evaluate.client.message import separate_thinking
from assay_evaluate.client.truncation import ends_in_loop

ENDS_A_SENTENCE = frozenset(".!?。！？…\"'”’»)）]】}`*|>$~")
END_OF_REASONING_CHARS = 300
"""Where an answer stands that was taken for thinking."""
KEY_BYTES = 6
ORDINARY_REASONS = frozenset({
    "stop", "length", "eos", "eos_token", "end", "end_turn", "max_tokens", "tool_calls", "tool_use", "function_call",
    "completed", "repetition_detected",
})  # fmt: skip
"""What some servers write into `stop_reason` where vLLM has the stop string that was met; the last is vLLM's own."""
END_MARK = re.compile(r"<[|｜][^<>\s]{1,60}[|｜]>|</s>|<eos>|<end_of_turn>")
"""The model's own end, written where others have the stop string: what ends a reply anyway, whoever sends it."""
UNGUESSABLE_CHARS = 16
"""Letters and digits of an id behind its first `-` from which on it is no counter."""
NUM_PROMPTS = 3
"""Prompts counted of the shortest, and of the longest."""
NUM_QUESTIONS, NUM_LONG_QUESTIONS, LONG_QUESTION_CHARS = 256, 24, 8_000
"""Shortest ones that are kept, to be asked once more; of long ones fewer, since a prompt is paid for."""
MOST_PROMPT_CHARS = 2_000_000
NUM_TYPICAL = 6
NUM_SUSPECTS = 12
MOST_SUSPECTS = 48
SHORTEST_TEXT_TOKENS = 24
"""Of a shorter reply the marks around it are too large a part."""
SUSPECT_SHARE = 0.8
"""Of the upper quartile of characters per token; a reply below it is counted."""
FEWEST_RATIOS = 8
LACKING_TOKENS, LACKING_SHARE = 8, 0.2
"""What a text must lack of the tokens that are billed, at least, both."""
NOT_ASCII_SHARE = 0.2
"""From which on a text counts among those of the other scripts: these have fewer characters per token."""
SHORTEST_COMMON_CHARS, FEWEST_COMMON, COMMON_SHOWN_CHARS = 32, 5, 60
"""Of a text that is kept because several questions got it."""
MOST_BESIDE, BESIDE_AT_ONCE = 400, 64
"""Replies of a task that are compared with the reference's, and in one look at the journal."""
FEWEST_CUT_CHARS = 3
LONGEST_WORD_CHARS = 16
"""What a last token may have more than another that begins as it does."""
MOST_NAMES = 8
"""Different names kept; others count together."""
OTHERS = "others"
T = TypeVar("T", "_Text", tuple[int, int, Request, int])
CountText = Callable[[str], int | None]
CountPrompt = Callable[[dict[str, Any]], int | None]


# ------------------------------------------------------------------------------------------------ one reply
def key_of(text: str) -> int:
    """48 bits of a hash: equal for equal text, and of 100,000 different ones no two are likely to share it."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest())


def marks_of(reply: Reply, cut_by: Truncation | None, expected: str) -> dict[str, Any]:
    """Fields of an `ItemResult` that say what its reply carries; none, if no reply came. expected: the right answer; empty: not
    known."""
    if reply.status != "answered":
        return {}
    text, reasoning = reply.text.strip(), (reply.reasoning or "").strip()
    last = (text or reasoning)[-1:]
    is_without_answer = cut_by in {None, "empty", "reasoning_only"} and not text and not reply.has_tool_calls
    return {
        "reply_key": None if reply.reply_id is None else key_of(reply.reply_id),
        "text_key": key_of(full_text(reply)),
        "text_chars": len(reply.text),
        "reasoning_chars": len(reply.reasoning or ""),
        "ends_open": last != "" and last not in ENDS_A_SENTENCE,
        "answer_in_reasoning": is_without_answer
        and (cut_by == "reasoning_only" or _stands_in(expected, reasoning[-END_OF_REASONING_CHARS:])),
    }


def full_text(reply: Reply) -> str:
    """Text, thinking and calls; these without their ids, which are new ones each time."""
    calls = [{name: value for name, value in call.items() if name != "id"} for call in reply.tool_calls or ()]
    return "\0".join([reply.text, reply.reasoning or "", *([canonical_json(calls)] if calls else [])])


def _stands_in(expected: str, text: str) -> bool:
    return bool(expected.strip()) and re.search(rf"(?<!\w){re.escape(expected.strip())}(?!\w)", text) is not None


# ------------------------------------------------------------------------------------------------ one task
@dataclass
class ServedTally:
    """Adds up what the replies to one task carry."""

    num_replies: int = 0
    num_unguessable_ids: int = 0
    models: Counter[str] = field(default_factory=Counter)
    system_fingerprints: Counter[str] = field(default_factory=Counter)
    stop_strings: Counter[str] = field(default_factory=Counter)
    num_from_cache: int = 0
    cache_header: str | None = None
    num_usage_problems: int = 0
    usage_problem: str | None = None
    comparison: ReferenceComparison | None = None
    common: _CommonTexts = field(default_factory=lambda: _CommonTexts())
    prompts: _Prompts = field(default_factory=lambda: _Prompts())
    texts: _Texts = field(default_factory=lambda: _Texts())

    def note(self, request: Request, reply: Reply) -> None:
        """One reply more. What did not come says nothing."""
        if reply.status != "answered":
            return
        self.num_replies += 1
        if reply.model is not None:
            _count(self.models, reply.model)
        if reply.system_fingerprint is not None:
            _count(self.system_fingerprints, reply.system_fingerprint)
        if isinstance(reply.stop_reason, str) and not (
            reply.stop_reason.lower() in ORDINARY_REASONS or END_MARK.fullmatch(reply.stop_reason)
        ):
            _count(self.stop_strings, reply.stop_reason)
        if reply.cache_header is not None:
            self.num_from_cache += 1
            self.cache_header = self.cache_header or reply.cache_header
        if reply.usage_problem is not None:
            self.num_usage_problems += 1
            self.usage_problem = self.usage_problem or reply.usage_problem
        if reply.reply_id is not None:
            self.num_unguessable_ids += sum(map(str.isalnum, reply.reply_id.partition("-")[2])) >= UNGUESSABLE_CHARS
        if self.comparison is not None:
            self.comparison.note(request, reply)
        self.common.note(request, reply)
        self.prompts.note(request, reply)
        self.texts.note(request, reply)

    def evidence(
        self, *, temperature: float, asked_model: str, count_prompt: CountPrompt | None, count_text: CountText | None
    ) -> ServedEvidence:
        """count_prompt: tokens of a request's prompt; None: nobody can count."""
        return ServedEvidence(
            num_replies=self.num_replies,
            temperature=temperature,
            asked_model=shown(asked_model),
            models=dict(self.models),
            system_fingerprints=dict(self.system_fingerprints),
            num_unguessable_ids=self.num_unguessable_ids,
            stop_strings=dict(self.stop_strings),
            num_from_cache=self.num_from_cache,
            cache_header=self.cache_header,
            num_usage_problems=self.num_usage_problems,
            usage_problem=self.usage_problem,
            common_texts=self.common.texts,
            **({} if self.comparison is None else self.comparison.counted()),
            prompt_counts=() if count_prompt is None else tuple(self.prompts.counted(count_prompt)),
            texts=None if count_text is None else self.texts.counted(count_text),
        )


def _count(names: Counter[str], name: str) -> None:
    names[name if name in names or len(names) < MOST_NAMES else OTHERS] += 1


def _keep_largest(heap: list[T], entry: T, most: int) -> None:
    if len(heap) < most:
        heapq.heappush(heap, entry)
    elif entry > heap[0]:
        heapq.heapreplace(heap, entry)


class ReferenceComparison:
    """Greedy replies compared with the reference's to the same requests, from the journal: text that lacks its end, though as
    many tokens were billed, was lost on the way. Whatever the weights are: other tokens would make another text."""

    def __init__(self, journal: Journal, reference: Identity) -> None:
        self._journal, self._reference = journal, reference
        self._waiting: list[tuple[str, Reply]] = []
        self._num_noted = 0
        self._counts = {"num_beside": 0, "num_cut_short": 0, "num_reference_cut_short": 0}

    def note(self, request: Request, reply: Reply) -> None:
        if reply.output_tokens is None or reply.has_tool_calls or self._num_noted >= MOST_BESIDE:
            return
        self._num_noted += 1
        self._waiting.append((dataclasses.replace(request, sample=0).key(self._reference), reply))
        if len(self._waiting) >= BESIDE_AT_ONCE:
            self._compare()

    def counted(self) -> dict[str, int]:
        """As `ServedEvidence` has it."""
        self._compare()
        return self._counts

    def _compare(self) -> None:
        replies = self._journal.find_all([key for key, _ in self._waiting])
        for key, reply in self._waiting:
            if key not in replies or replies[key].status != "answered":
                continue
            self._counts["num_beside"] += 1
            reference = separate_thinking(replies[key])
            if (reference.output_tokens, reference.reasoning) == (reply.output_tokens, reply.reasoning):
                self._counts["num_cut_short"] += _is_beginning(reply.text, reference.text)
                self._counts["num_reference_cut_short"] += _is_beginning(reference.text, reply.text)
        self._waiting.clear()


def _is_beginning(text: str, whole: str) -> bool:
    """Whether more than the rest of a word is missing: `No` is not the beginning of `None`, but another token."""
    missing = whole[len(text) :].rstrip()
    if len(missing) < FEWEST_CUT_CHARS or not whole.startswith(text):
        return False
    return not text or len(missing) >= LONGEST_WORD_CHARS or len(missing.split()) > 1


class _CommonTexts:
    """Texts that came back for several questions, as they begin."""

    def __init__(self) -> None:
        self._times: Counter[int] = Counter()
        self._last: dict[int, str] = {}
        self.texts: dict[int, str] = {}

    def note(self, request: Request, reply: Reply) -> None:
        if len(reply.text) < SHORTEST_COMMON_CHARS:
            return
        key, item = key_of(full_text(reply)), request.item.partition("#")[0]
        if self._last.get(key) == item:
            return  # samples of one question may be alike
        self._last[key] = item
        self._times[key] += 1
        if self._times[key] >= FEWEST_COMMON and len(self.texts) < MOST_NAMES:
            self.texts.setdefault(key, shown(" ".join(reply.text.split()), COMMON_SHOWN_CHARS))


class _Prompts:
    """The requests with the least and the most in them, and what was billed for their prompts."""

    def __init__(self) -> None:
        self._shortest: list[tuple[int, int, Request, int]] = []
        self._longest: list[tuple[int, int, Request, int]] = []
        self._number = 0

    def note(self, request: Request, reply: Reply) -> None:
        size = len(request.body_json)
        if reply.prompt_tokens is None or size > MOST_PROMPT_CHARS:
            return
        self._number += 1
        most = NUM_QUESTIONS if size <= LONG_QUESTION_CHARS else NUM_LONG_QUESTIONS
        _keep_largest(self._shortest, (-size, -self._number, request, reply.prompt_tokens), most)
        _keep_largest(self._longest, (size, -self._number, request, reply.prompt_tokens), NUM_PROMPTS)

    @property
    def shortest(self) -> list[Request]:
        """One request for each of the shortest questions that were answered, the shortest first."""
        requests = [request for _, _, request, _ in sorted(self._shortest)]
        return list({request.item.partition("#")[0]: request for request in requests}.values())[::-1]

    def counted(self, count: CountPrompt) -> Iterator[PromptCount]:
        shortest = sorted(self._shortest, reverse=True)[:NUM_PROMPTS]
        prompts = {number: (request, billed) for _, number, request, billed in [*shortest, *self._longest]}
        for request, billed in prompts.values():
            if (counted := count(request.body)) is not None:
                yield PromptCount(item=request.item, billed=billed, counted=counted)


@dataclass(frozen=True, order=True)
class _Text:
    """Sorted by characters per token, most first: the heap's first is the one to go."""

    rank: float
    number: int
    item: str = field(compare=False)
    text: str = field(compare=False)
    billed: int = field(compare=False)


class _Texts:
    """Replies whose text is short for the tokens that are billed, apart for Latin and other scripts."""

    def __init__(self) -> None:
        self._ratios = (array("f"), array("f"))
        self._fewest: tuple[list[_Text], list[_Text]] = ([], [])
        self._first: list[_Text] = []
        self._number = 0

    def note(self, request: Request, reply: Reply) -> None:
        billed = reply.output_tokens
        if billed is None or billed < SHORTEST_TEXT_TOKENS or reply.has_tool_calls or reply.finish_reason == "length":
            return
        text = f"{reply.reasoning or ''}{reply.text}"
        head = text[:1000]
        is_other_script = len(head) - len(head.encode("ascii", "ignore")) > NOT_ASCII_SHARE * len(head)
        ratio = len(text) / billed
        self._ratios[is_other_script].append(ratio)
        self._number += 1
        entry = _Text(-ratio, self._number, request.item, text, billed)
        _keep_largest(self._fewest[is_other_script], entry, MOST_SUSPECTS)
        if len(self._first) < NUM_TYPICAL:
            self._first.append(entry)

    def counted(self, count: CountText) -> TextCounts | None:
        shares = [counted / text.billed for text in self._first if (counted := count(text.text)) is not None]
        if not shares:
            return None
        typical = sorted(shares)[-2:][0]  # not the median: a third of the replies may have lost some
        num_suspects = num_counted = num_short = 0
        shortest: PromptCount | None = None
        for ratios, heap in zip(self._ratios, self._fewest, strict=True):
            suspects = _suspects(ratios, heap)
            num_suspects += len(suspects)
            for number, suspect in enumerate(suspects):
                if number == NUM_SUSPECTS and 2 * num_short < num_counted:
                    break
                if (counted := count(suspect.text)) is None:
                    continue
                num_counted += 1
                lacks = typical * suspect.billed - counted
                if lacks > max(LACKING_TOKENS, LACKING_SHARE * typical * suspect.billed):
                    num_short += 1
                    if shortest is None or lacks > typical * shortest.billed - shortest.counted:
                        shortest = PromptCount(item=suspect.item, billed=suspect.billed, counted=counted)
        return TextCounts(
            typical_share=round(typical, 4), num_typical=len(shares), num_suspects=num_suspects, num_counted=num_counted,
            num_short=num_short, shortest=shortest,
        )  # fmt: skip


def _suspects(ratios: Sequence[float], heap: Sequence[_Text]) -> list[_Text]:
    """With the fewest characters per token first. A reply that repeats itself is left out: it is the model's, and its tokens
    written once more are others."""
    if len(ratios) < FEWEST_RATIOS:
        return []
    limit = SUSPECT_SHARE * statistics.quantiles(ratios, n=4)[-1]
    return [text for text in sorted(heap, reverse=True) if -text.rank < limit and not ends_in_loop(text.text)]
