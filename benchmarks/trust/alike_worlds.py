"""Healthy servers, damaged weights and changed replies, drawn: what `alike.py` holds the rules against.

A world is a task with its form of replies, asked of two servers. Replies are drawn as `Reply` objects and go through the same
code as real ones (`marks_of`, `ServedTally`, `truncation_of`), so that nothing is assumed about the rules.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from assay.records.measurement import ItemResult, TaskResult
from assay.records.served.evidence import AskedTwice
from assay_evaluate.asking.evidence import ServedTally, marks_of
from assay_evaluate.client.journal import Reply, Request
from assay_evaluate.client.truncation import is_looping, truncation_of
from assay_evaluate.run.reply_evidence import FIRST_QUESTIONS, MOST_QUESTIONS
from assay_evaluate.serving_faults.rules import compare_passes
from assay_evaluate.serving_faults.sides import Pair, Side

Form = Literal["letter", "code", "uuid", "sum", "prose", "thinking", "program", "calls"]
Ids = Literal["uuid", "counter", "of 999", "one", "none"]
FORMS: tuple[Form, ...] = ("letter", "code", "uuid", "sum", "prose", "thinking", "program", "calls")
WORDS = random.Random(7).choices(
    [
        "the",
        "sum",
        "of",
        "what",
        "was",
        "given",
        "and",
        "taken",
        "is",
        "then",
        "less",
        "by",
        "two",
        "because",
        "it",
        "goes",
        "on",
    ],
    k=60_000,
)
FILLER = " ".join(WORDS)
PHRASE = "I could not find it in the notes that were given to me"
PAGE = "The service is temporarily unavailable. Please try again later."
MAX_TOKENS: dict[Form, int] = {
    "letter": 8, "code": 64, "uuid": 128, "sum": 512, "prose": 1024, "thinking": 4096, "program": 1024, "calls": 256,
}  # fmt: skip
MEDIAN_TOKENS: dict[Form, int] = {
    "letter": 2, "code": 27, "uuid": 35, "sum": 80, "prose": 220, "thinking": 900, "program": 260, "calls": 41,
}  # fmt: skip
SPREAD = {"sum": 0.35, "prose": 0.5, "thinking": 0.7, "program": 0.5}
CHARS_PER_TOKEN = 4.0


@dataclass(frozen=True)
class World:
    """One task on a healthy pair of servers."""

    form: Form
    num_items: int
    num_samples: int
    temperature: float
    accuracy: float
    prompts_alike: bool
    ids: Ids
    noise_per_token: float
    """Chance that two greedy replies part at a token, for their batches."""
    determinism: float
    """Chance that a draw above temperature 0 is the likeliest reply."""
    phrase: float
    """Share of wrong replies that are one phrase."""
    thinking_share: float
    """Of the replies to prose that think first."""
    is_chinese: bool

    @property
    def max_tokens(self) -> int:
        return MAX_TOKENS[self.form]


def draw_world(rng: random.Random, form: Form | None = None, num_items: int | None = None) -> World:
    """Any task that suites have, and some that they do not."""
    is_sampled = rng.random() < 0.3
    return World(
        form=form or rng.choice(FORMS),
        num_items=num_items or rng.choice((20, 30, 40, 80, 240)),
        num_samples=rng.choice((2, 4)) if is_sampled else 1,
        temperature=0.7 if is_sampled else 0.0,
        accuracy=rng.choice((0.05, 0.3, 0.6, 0.85, 0.97)),
        prompts_alike=rng.random() < 0.3,
        ids=rng.choice(("uuid", "uuid", "counter", "of 999", "one", "none")),
        noise_per_token=rng.choice((0.0, 0.0, 1 / 2000, 1 / 400, 1 / 150)),
        determinism=rng.choice((0.0, 0.3, 0.95, 1.0)),
        phrase=rng.choice((0.0, 0.0, 0.3, 0.9)),
        thinking_share=rng.choice((0.0, 0.5, 1.0)),
        is_chinese=rng.random() < 0.2,
    )


@dataclass(frozen=True)
class Drawn:
    """A reply, the truth about it, and whether it was right."""

    reply: Reply
    is_right: bool
    text_tokens: dict[str, int]
    """Text -> the tokens that a tokenizer counts in it."""


# ------------------------------------------------------------------------------------------------ weights
Damage = Callable[["Weights", random.Random, str, Drawn], Drawn]


@dataclass
class Weights:
    """What one checkpoint answers: the same to the same question, but for draws and the noise of batches."""

    world: World
    seed: int
    likeness: float = 1.0
    """Share of the questions that get the likeliest reply of the reference's weights."""
    loss: float = 0.0
    """Share of right replies that are wrong."""
    damage: Damage | None = None

    def answer(self, item: int, draw: random.Random) -> Drawn:
        """One reply to one question. draw: what batches and sampling bring."""
        world = self.world
        own = random.Random(f"{self.seed}:{item}")
        is_like = own.random() < self.likeness
        way: Any = "likeliest" if is_like else f"own {self.seed}"
        tokens = MEDIAN_TOKENS[world.form]
        if world.temperature > 0:
            way = way if draw.random() < world.determinism else draw.random()
        elif draw.random() > math.exp(-world.noise_per_token / 2 * tokens):
            way = draw.random()
        rng = random.Random(f"{item}:{way}")
        is_right = random.Random(f"right:{item}").random() < world.accuracy
        if way != "likeliest" and rng.random() < 0.1:
            is_right = not is_right
        if is_right and own.random() < self.loss:
            is_right, rng = False, random.Random(f"lost:{item}:{self.seed}:{way}")
        drawn = _reply(world, item, rng, is_right=is_right)
        return (
            drawn if self.damage is None else self.damage(self, random.Random(f"damage:{self.seed}:{item}"), str(item), drawn)
        )


def _length(world: World, rng: random.Random) -> int:
    return max(4, round(rng.lognormvariate(math.log(MEDIAN_TOKENS[world.form]), SPREAD[world.form])))


def _text(tokens: int, rng: random.Random, world: World) -> str:
    per_token = CHARS_PER_TOKEN * rng.lognormvariate(0, 0.08) * (0.4 if world.is_chinese else 1)
    start = rng.randrange(100_000)
    text = FILLER[start : start + round(tokens * per_token)]
    return text.replace("e", "的").replace(" ", "了") if world.is_chinese else text


def _reply(world: World, item: int, rng: random.Random, *, is_right: bool) -> Drawn:
    answer = 1000 + item if is_right else rng.randrange(10_000, 99_999)
    thinks = world.form == "thinking" or (world.form == "prose" and rng.random() < world.thinking_share)
    if not is_right and rng.random() < world.phrase:
        tokens = _length(world, rng) if thinks else 0
        return _made(world, PHRASE, _text(tokens, rng, world) if thinks else None, tokens + 12, is_right=False)
    end = {"sum": f"\n#### {answer}", "program": f"\n    return {answer}\n```"}.get(world.form, f" So it is {answer}.")
    match world.form:
        case "letter":
            letter = item if is_right else item + 1 + rng.randrange(3)
            return _made(world, "ABCD"[letter % 4], None, 1, is_right=is_right)
        case "code":
            return _made(world, f"It says that the code is {answer}", None, 26, is_right=is_right)
        case "uuid":
            return _made(world, f"{random.Random(answer).getrandbits(128):032x}", None, 34, is_right=is_right)
        case "calls":
            call = {"type": "function", "function": {"name": f"tool_{item % 9}", "arguments": json.dumps({"x": answer % 7})}}
            return _made(world, "", None, 40, is_right=is_right, calls=(call,))
        case "sum" | "program" | "prose" | "thinking":
            tokens = _length(world, rng)
            text = _text(tokens, rng, world)
            if thinks:
                return _made(world, end.strip(), text, tokens + 6, is_right=is_right)
            return _made(world, text + end, None, tokens + 5, is_right=is_right)


def _made(
    world: World, text: str, reasoning: str | None, tokens: int, *, is_right: bool, calls: tuple[dict[str, Any], ...] = ()
) -> Drawn:
    """Cut at the budget, if it is longer; with the marks that parsers strip."""
    marks = 1 + (3 if reasoning else 0)
    budget = world.max_tokens
    if tokens + marks > budget:
        share = budget / (tokens + marks)
        whole = f"{reasoning or ''}\0{text}"
        reasoning, _, text = (
            whole[: int(len(whole) * share)].partition("\0") if reasoning else (None, "", text[: int(len(text) * share)])
        )
        reply = _plain(text, reasoning, budget, "length", calls)
        return Drawn(reply, False, {f"{reasoning or ''}{text}": budget - marks})
    return Drawn(_plain(text, reasoning, tokens + marks, "stop", calls), is_right, {f"{reasoning or ''}{text}": tokens})


def _plain(text: str, reasoning: str | None, tokens: int, finish: str, calls: tuple[dict[str, Any], ...] = ()) -> Reply:
    return Reply(
        status="answered", text=text, reasoning=reasoning, has_tool_calls=bool(calls), tool_calls=calls or None,
        finish_reason="tool_calls" if calls else finish, output_tokens=tokens, model="model",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ servers
Change = Callable[["Server", random.Random, Drawn, int], Drawn]


@dataclass
class Server:
    """Asked for a whole task; `change` is what a gateway does to a share of the replies."""

    weights: Weights
    label: str
    seed: int
    change: Change | None = None
    share: float = 0.0
    template_tokens: int = 0

    def side(self, *, is_repeat: bool = False) -> Side:
        world, rng = self.weights.world, random.Random(f"{self.seed}:{is_repeat}")
        tally, items, ids = ServedTally(), [], _Ids(world.ids, rng)
        count: dict[str, int] = {}
        for item, sample in itertools.product(range(world.num_items), range(world.num_samples)):
            drawn = self.weights.answer(item, rng)
            prompt = self.prompt_tokens(item)
            reply = dataclasses.replace(drawn.reply, prompt_tokens=prompt, reply_id=ids.next())
            drawn = dataclasses.replace(drawn, reply=reply)
            if self.change is not None and rng.random() < self.share:
                drawn = self.change(self, rng, drawn, item)
            count |= drawn.text_tokens
            request = Request(
                "task", f"i{item}" if sample == 0 else f"i{item}#{sample}", 0, "/v1/chat/completions", {"i": item}
            )
            tally.note(request, drawn.reply)
            items.append(self._item(item, sample, drawn))
        served = tally.evidence(
            temperature=world.temperature, asked_model="model", count_prompt=None if is_repeat else self._count_prompt,
            count_text=lambda text: 0 if not text else count.get(text, round(len(text) / CHARS_PER_TOKEN)),
        )  # fmt: skip
        task = TaskResult(
            task="task", kind="tools" if world.form == "calls" else "arithmetic", num_items=len(items), num_failed=0,
            num_truncated=sum(one.truncated for one in items), accuracy=None, mean_output_tokens=None,
            max_tokens=world.max_tokens, items=tuple(items), served=served,
        )  # fmt: skip
        return Side(self.label, task, asked_twice=() if is_repeat else (self._twice(rng),), is_repeat=is_repeat)

    def prompt_tokens(self, item: int) -> int:
        """As the server bills them."""
        plain = 700 if self.weights.world.prompts_alike else random.Random(f"prompt:{item}").randrange(60, 900)
        return plain + self.template_tokens

    def _count_prompt(self, body: dict[str, Any]) -> int:
        return self.prompt_tokens(int(body["i"]))

    def _item(self, item: int, sample: int, drawn: Drawn) -> ItemResult:
        world, reply = self.weights.world, drawn.reply
        cut = truncation_of(
            reply, max_tokens=world.max_tokens, max_model_len=None, has_reasoning_parser=world.form == "thinking"
        )
        return ItemResult(
            item=f"i{item}", sample=sample, language="en", correct=drawn.is_right, truncated=cut is not None, truncated_by=cut,
            loops=is_looping(reply, cut, None), wrong_script=False, finish_reason=reply.finish_reason,
            prompt_tokens=reply.prompt_tokens, output_tokens=reply.output_tokens, answer=None,
            **marks_of(reply, cut, str(1000 + item)),
        )  # fmt: skip

    def _twice(self, rng: random.Random) -> AskedTwice:
        """The first questions in 64 tokens, or all where some come back otherwise."""
        world, num, different = self.weights.world, 0, 0
        tokens: list[int] = []
        for item in range(min(MOST_QUESTIONS, world.num_items)):
            if num == FIRST_QUESTIONS and (different == 0 or world.temperature > 0):
                break
            both = [self._changed(self.weights.answer(item, _short(rng, world)), rng, item) for _ in range(2)]
            num += 1
            different += _begins(both[0]) != _begins(both[1])
            tokens += [min(64, one.output_tokens) for one in both if one.output_tokens is not None]
        return AskedTwice(
            temperature="above zero" if world.temperature else "zero", num_questions=num, num_different=different,
            num_same_id=0, mean_output_tokens=sum(tokens) / len(tokens) if tokens else None,
        )  # fmt: skip

    def _changed(self, drawn: Drawn, rng: random.Random, item: int) -> Reply:
        changes = self.change is not None and rng.random() < self.share
        return self.change(self, rng, drawn, item).reply if self.change is not None and changes else drawn.reply


def _begins(reply: Reply) -> str:
    """What 64 tokens of it say."""
    return f"{(reply.reasoning or '')[:256]}|{reply.text[:256]}|{reply.tool_calls}"


def _short(rng: random.Random, world: World) -> random.Random:
    """The first draw decides whether a batch changes the reply: within 64 tokens it does so less often."""
    draw = random.Random(rng.random())
    if world.temperature > 0:
        return draw
    tokens = MEDIAN_TOKENS[world.form]
    keeps = rng.random() < math.exp(-world.noise_per_token / 2 * min(64, tokens))
    return _Fixed(0.0 if keeps else 1.0, draw.random())


class _Fixed(random.Random):
    """A first draw that is given, then others."""

    def __new__(cls, first: float, seed: float) -> _Fixed:
        return super().__new__(cls, seed)

    def __init__(self, first: float, seed: float) -> None:
        super().__init__(seed)
        self._first: float | None = first

    def random(self) -> float:
        if (first := getattr(self, "_first", None)) is not None:
            self._first = None
            return first
        return super().random()


class _Ids:
    def __init__(self, kind: Ids, rng: random.Random) -> None:
        self._kind, self._rng, self._number = kind, random.Random(rng.random()), itertools.count()

    def next(self) -> str | None:
        match self._kind:
            case "uuid":
                return f"chatcmpl-{self._rng.getrandbits(128):032x}"
            case "counter":
                return f"chatcmpl-{next(self._number)}"
            case "of 999":  # Ollama
                return f"chatcmpl-{self._rng.randrange(999)}"
            case "one":
                return "chatcmpl-0"
            case "none":
                return None


def pair_of(reference: Server, candidate: Server) -> Pair:
    """Both sides, with what the reference's second pass says of its noise."""
    ours, again = reference.side(), reference.side(is_repeat=True)
    noise = compare_passes([(ours.task, again.task)])
    return Pair(dataclasses.replace(ours, repeated=noise), candidate.side())
