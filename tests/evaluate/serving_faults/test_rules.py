"""Every rule at its threshold: what it says just beyond it, and its silence before, on healthy servers and damaged weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.records.measurement import ItemResult, TaskResult
from assay.records.served.evidence import AskedTwice, PromptCount, ServedEvidence, TextCounts
from assay.records.serving import Signature, SignedPrompt
from assay_evaluate.serving_faults.rules import RULES, check_pair, unchecked_rules
from assay_evaluate.serving_faults.sides import Pair, Repeated, Side

NUM = 200
EVIDENCE = ServedEvidence(
    num_replies=NUM, temperature=0, asked_model="m", models={"m": NUM}, system_fingerprints={}, num_unguessable_ids=NUM
)
GREEDY = AskedTwice(temperature="zero", num_questions=16, num_different=0, num_same_id=0, mean_output_tokens=40)
TEXTS = TextCounts(typical_share=0.97, num_typical=6, num_suspects=0, num_counted=0, num_short=0)


def item(number: int, **changes: Any) -> ItemResult:
    """A healthy reply; lengths spread."""
    return dataclasses.replace(
        ItemResult(
            item=f"i{number}", language="en", correct=number % 10 > 0, truncated=False, wrong_script=False,
            finish_reason="stop", prompt_tokens=100 + number, output_tokens=40 + number % 97, answer=str(number),
            reply_key=number, text_key=1000 + number, text_chars=160, reasoning_chars=80, ends_open=False,
            answer_in_reasoning=False,
        ),
        **changes,
    )  # fmt: skip


def side(
    label: str, change: Callable[[int], dict[str, Any]] = lambda number: {}, served: dict[str, Any] | None = None, **more: Any
) -> Side:
    """change: number of an item -> what is other about its reply."""
    ids = {"reply_key": None} if label == "no ids" else {}
    items = tuple(item(number, **{**ids, **change(number)}) for number in range(NUM))
    kind = more.pop("kind", "arithmetic")
    task = TaskResult(
        task="task", kind=kind, num_items=NUM, num_failed=0, num_truncated=0, accuracy=None, mean_output_tokens=None,
        max_tokens=400, items=items, served=EVIDENCE.model_copy(update=served or {}),
    )  # fmt: skip
    return Side(label, task, **{"asked_twice": (GREEDY,), **more})


def other(label: str = "new", **more: Any) -> Side:
    """The candidate of a healthy pair, with ids of its own."""
    change = more.pop("change", lambda number: {})
    return side(label, lambda number: {"reply_key": 5000 + number, **change(number)}, **more)


def said(reference: Side, candidate: Side) -> list[tuple[str, str, str]]:
    return [(rule.name, finding.side, finding.clause) for rule, finding in check_pair(Pair(reference, candidate))]


def first(count: int, **changes: Any) -> Callable[[int], dict[str, Any]]:
    """Of the first so many replies."""
    return lambda number: changes if number < count else {}


def signed(**names: str) -> Signature:
    prompt = SignedPrompt(token_ids=(), logprobs=(), next={}, **names)  # type: ignore[arg-type]
    return Signature(prompts_sha256="x", prompts=(prompt,), noise=0)


def test_healthy_sides_raise_nothing() -> None:
    assert said(side("ref"), other()) == []


def test_names_of_rules_are_their_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


# ------------------------------------------------------------------------------------------------ names
@pytest.mark.parametrize(
    ("asked", "models", "names", "is_alias"),
    [
        ("m", {"m": 199, "other": 1}, "m", True),  # half a percent
        ("m", {"m": 198, "other": 2}, "m", False),
        ("m", {"other": 200}, "m", False),
        ("m", {"other": 200}, "other", True),  # /v1/completions says so as well
        ("gpt-4o", {"gpt-4o-2024-08-06": 200}, "gpt-4o", True),
        ("openai/gpt-4o", {"gpt-4o": 200}, "", True),
        ("/models/Toy-7B", {"Toy-7B": 200}, "", True),
        ("toy", {"toy-fp8": 200}, "toy", False),
        ("m", {"ref-name": 200}, "ref-name", False),  # the other side's
        ("m", {}, "", True),
    ],
)
def test_another_model(asked: str, models: dict[str, int], names: str, is_alias: bool) -> None:
    candidate = other(served={"asked_model": asked, "models": models}, signature=signed(model=names) if names else None)
    found = said(side("ref", served={"asked_model": "ref-name", "models": {"ref-name": NUM}}), candidate)
    assert [name for name, *_ in found] == ([] if is_alias else ["another model"])


@pytest.mark.parametrize(
    ("models", "signature", "nameless"),
    [
        ({"m": 199}, None, ""),  # half a percent
        ({}, None, ""),  # a server that names none
        ({}, signed(), ""),
        ({}, signed(model="m"), "all 200"),
        ({"m": 150}, None, "50 of 200"),
    ],
)
def test_replies_that_name_no_model_where_the_server_does(
    models: dict[str, int], signature: Signature | None, nameless: str
) -> None:
    """GPTCache #61: what it has kept comes without id, model and counts, whichever model was asked."""
    clause = (
        f"{nameless} replies of new name no model, while others of its server name m: something else answers, perhaps a cache"
    )
    found = said(side("ref"), other(served={"models": models}, signature=signature))
    assert found == ([("another model", "candidate", clause)] if nameless else [])


def test_another_configuration() -> None:
    served = {"system_fingerprints": {"fp_b": 200}}
    assert said(side("ref"), other(served=served, signature=signed(system_fingerprint="fp_b"))) == []
    assert said(side("ref"), other(served=served)) == []
    [(name, whose, clause)] = said(side("ref"), other(served=served, signature=signed(system_fingerprint="fp_a")))
    assert (name, whose) == ("another configuration", "candidate")
    assert clause.startswith("all 200 replies of new are of server configuration fp_b, its signature of fp_a: another server")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (first(3, reply_key=7, text_key=7), 0),  # 2 of 200
        (first(4, reply_key=7, text_key=7), 3),
        (lambda number: {"reply_key": 7}, 0),  # one id for all: it names nothing
        (lambda number: {"reply_key": number % 50}, 0),  # Ollama: ids of a small range
    ],
)
def test_replayed(change: Callable[[int], dict[str, Any]], expected: int) -> None:
    guessable = {"num_unguessable_ids": 0}
    found = [clause for name, _, clause in said(side("ref"), other(change=change, served=guessable)) if name == "replayed"]
    assert [clause.split(":")[0] for clause in found] == (
        [f"{expected} of 200 replies of new are other ones over again, with the same id"] if expected else []
    )


def test_replies_that_come_from_a_cache_by_their_headers() -> None:
    """llmgateway #3877: id and counts are those of the first reply, or new ones; a header tells."""
    by = "x-llmgateway-cache: HIT"
    assert said(side("ref"), other(served={"num_from_cache": 1, "cache_header": by})) == []
    assert said(side("ref"), other(served={"num_from_cache": 12, "cache_header": by})) == [
        ("replayed", "candidate", "12 of 200 replies of new come from a cache, as their header says (x-llmgateway-cache: HIT)")
    ]


def test_replies_of_one_side_on_the_other() -> None:
    [(name, whose, clause)] = said(side("ref"), side("new"))
    assert (name, whose) == ("replayed", "candidate")
    assert clause == "all 200 replies of new are those of ref, with the same id: a cache or gateway answers for both"
    counters = {"num_unguessable_ids": 0}  # two servers that count both begin at 0
    assert said(side("ref", served=counters), side("new", served=counters)) == []
    [(_, _, clause)] = said(side("ref", served=counters), side("ref-repeat", served=counters, is_repeat=True))
    assert clause == (
        "all 200 replies of ref-repeat are those of ref, with the same id: the second pass was not asked, a cache answered"
    )


# ------------------------------------------------------------------------------------------------ prompts
@pytest.mark.parametrize(
    ("change", "clause"),
    [
        (first(1, prompt_tokens=99), None),
        (lambda number: {"prompt_tokens": 101 + number}, "prompts have 1 more token at new than at ref on all 200 questions:"),
        (lambda number: {"prompt_tokens": min(100 + number, 250)},
         "the same question had 299 prompt tokens at ref and 250 at new (49 of 200 questions differ): something"),
        (first(4, prompt_tokens=180),
         "the same question had 100 prompt tokens at ref and 180 at new (4 of 200 questions differ, not the long"),
        (lambda number: {"prompt_tokens": 60 + number},
         "the same question had 100 prompt tokens at ref and 60 at new (all 200 questions differ): something"),
        (lambda number: {"prompt_tokens": None}, None),
    ],
)  # fmt: skip
def test_other_prompts(change: Callable[[int], dict[str, Any]], clause: str | None) -> None:
    found = said(side("ref"), other(change=change))
    assert [(name, text[: len(clause or "")]) for name, _, text in found] == (
        [] if clause is None else [("other prompts", clause)]
    )


@pytest.mark.parametrize(
    ("billed", "usually_less", "is_short"),
    [(992, 0, False), (970, 0, True), (940, 60, False), (700, 300, True), (1001, 0, False)],
)
def test_shortened_prompts(billed: int, usually_less: int, is_short: bool) -> None:
    """On both sides alike, so that only our own count tells. usually_less: what no prompt of the server is billed for."""
    served = {"prompt_counts": (PromptCount(item="i0", billed=billed, counted=1000),)}
    more: dict[str, Any] = {"served": served, "uncounted_tokens": usually_less}
    found = said(side("ref", **more), other(**more))
    assert [(name, whose) for name, whose, _ in found] == (
        [("shortened prompts", "reference"), ("shortened prompts", "candidate")] if is_short else []
    )
    if is_short:
        assert found[0][2].startswith(
            f"a prompt of 1000 tokens is billed as {billed} by ref (all 1 that were counted are short)"
        )


# ------------------------------------------------------------------------------------------------ endings
def at_cap(count: int, **changes: Any) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"output_tokens": 30, "correct": False, "ends_open": True, **changes} if number < count else {}


@pytest.mark.parametrize(
    ("change", "is_cap"),
    [
        (at_cap(4), False),
        (at_cap(8), True),
        (at_cap(8, ends_open=False), False),  # ended sentences: a refusal
        (at_cap(8, text_key=1), False),  # one text: a phrase
        (at_cap(8, text_chars=0, text_key=1, truncated=True, truncated_by="empty"), True),
        (at_cap(8, output_tokens=12), False),  # a form of short answers
        (at_cap(8, truncated=True, truncated_by="length", finish_reason="length", output_tokens=400), False),  # it says so
        (lambda number: {"output_tokens": 30, "ends_open": True}, False),  # all answers have that form, right ones too
    ],
)
def test_capped(change: Callable[[int], dict[str, Any]], is_cap: bool) -> None:
    found = said(side("ref"), other(change=change))
    assert [(name, whose) for name, whose, _ in found] == ([("capped", "candidate")] if is_cap else [])
    if is_cap:
        assert found[0][2] == (
            "8 of 200 replies of new end at exactly 30 tokens without an answer, and say that they ended by themselves: "
            "something caps replies"
        )


@pytest.mark.parametrize(("answer", "is_cap"), [("1234", False), (None, True)])
def test_wrong_answers_of_another_form_are_no_cap(answer: str | None, is_cap: bool) -> None:
    """Right replies end with a bare number; a candidate spells out what it looked up, and gives a wrong number."""
    wrong = {"output_tokens": 82, "ends_open": True, "correct": False, "answer": answer}
    short = {"output_tokens": 24, "ends_open": True}
    candidate = other(change=lambda number: wrong if number % 5 == 1 else short)
    found = said(side("ref", lambda number: short), candidate)
    assert [name for name, *_ in found] == (["capped"] if is_cap else [])


def test_wrong_answers_in_the_form_of_right_ones_are_no_cap() -> None:
    """A candidate that finds no UUID any more writes some: as long as the right ones of the reference."""
    reference = side("ref", lambda number: {"output_tokens": 36, "ends_open": True})
    candidate = other(change=lambda number: {"output_tokens": 36, "ends_open": True, "correct": False})
    assert said(reference, candidate) == []


def test_cut_early_and_stop_at_the_budget() -> None:
    cut = {"truncated": True, "truncated_by": "length", "finish_reason": "length", "correct": False}
    assert said(side("ref"), other(change=first(1, **cut, output_tokens=40))) == []
    [(name, _, clause)] = said(side("ref"), other(change=first(6, **cut, output_tokens=40)))
    assert (name, clause) == (
        "cut early", "6 of 200 replies of new are cut off at 40 tokens, 400 were allowed: something lowers max_tokens"
    )  # fmt: skip
    repeats = {**cut, "finish_reason": "repetition"}  # vLLM, of a model that repeats itself
    assert said(side("ref"), other(change=first(60, **repeats, output_tokens=40))) == []
    full = {"truncated": True, "truncated_by": "budget", "output_tokens": 400}
    assert said(side("ref"), other(change=first(60, **full, finish_reason="length"))) == []
    assert said(side("ref"), other(change=first(2, **full))) == []
    [(name, _, clause)] = said(side("ref"), other(change=first(5, **full)))
    assert (name, clause) == (
        "stop at budget",
        "all 5 replies of new that fill their 400 tokens say `stop`: something changes finish_reason",
    )


def test_replies_that_just_fit_into_their_budget_stop_by_themselves() -> None:
    """A form of 392 to 400 tokens, or of 399 and 400: as a short budget has it for short answers."""

    def form(shortest: int) -> Callable[[int], dict[str, Any]]:
        def of(number: int) -> dict[str, Any]:
            tokens = shortest + number % (401 - shortest)
            return {"output_tokens": tokens, **({"truncated": True, "truncated_by": "budget"} if tokens == 400 else {})}

        return of

    assert said(side("ref"), other(change=form(392))) == []
    assert said(side("ref"), other(change=form(399))) == []


def test_stops_and_usage_that_nobody_asked_for() -> None:
    assert said(side("ref"), other(served={"stop_strings": {"Q:": 1}, "num_usage_problems": 1, "usage_problem": "x"})) == []
    found = said(side("ref"), other(served={"stop_strings": {"Q:": 3}, "num_usage_problems": 200, "usage_problem": "a > b"}))
    assert found == [
        ("unsent stop", "candidate",
         "3 of 200 replies of new were ended by a stop string that was not sent ('Q:'): something adds one"),
        ("usage", "candidate", "the usage of all 200 replies of new contradicts itself (a > b), so it cannot be seen which "
         "replies were cut off"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ thinking
@pytest.mark.parametrize(("thoughtless", "is_fault"), [(100, False), (190, False), (196, True), (200, True)])
def test_thinking_on_one_side(thoughtless: int, is_fault: bool) -> None:
    """Half of the replies without thinking may be the candidate's loss; none with it is a switch."""
    found = said(side("ref"), other(change=first(thoughtless, reasoning_chars=0)))
    assert [(name, whose) for name, whose, _ in found] == ([("thinking on one side", "both")] if is_fault else [])
    looping = {"reasoning_chars": 0, "truncated": True, "truncated_by": "budget", "loops": True, "finish_reason": "length"}
    assert said(side("ref"), other(change=first(thoughtless, **looping))) == []


def test_longer_thinking() -> None:
    assert said(side("ref"), other(change=lambda number: {"reasoning_chars": 240})) == []  # three times as much
    [(name, whose, clause)] = said(side("ref"), other(change=lambda number: {"reasoning_chars": 400}))
    assert (name, whose, clause) == (
        "longer thinking", "both",
        "new thinks 5.0 times as long as ref (median of 200 questions), and longer on 200 of them: another reasoning effort on "
        "one side",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("swallowed", "stuck", "is_fault"), [(4, 0, False), (6, 0, False), (7, 0, True), (0, 60, False), (20, 20, True)]
)
def test_answers_in_thinking(swallowed: int, stuck: int, is_fault: bool) -> None:
    """stuck: end inside their thinking without an answer there; that may be the weights'."""
    empty = {"text_chars": 0, "correct": False, "truncated": True, "truncated_by": "empty"}

    def change(number: int) -> dict[str, Any]:
        if number < swallowed:
            return {**empty, "answer_in_reasoning": True}
        return empty if number < swallowed + stuck else {}

    found = said(side("ref"), other(change=change))
    assert [(name, whose) for name, whose, _ in found] == ([("answers in thinking", "candidate")] if is_fault else [])
    if is_fault:
        assert found[0][2] == (
            f"{swallowed + stuck} of 200 replies of new have thinking and no answer (ref: none), and in {swallowed} of them "
            "the answer stands at its end: the reasoning parser, not the weights"
        )


# ------------------------------------------------------------------------------------------------ texts
PAGE = {"text_key": 1, "correct": False, "reasoning_chars": 0, "text_chars": 60}


@pytest.mark.parametrize(
    ("change", "is_page"),
    [
        (first(10, **PAGE), False),
        (first(11, **PAGE), True),
        (first(60, **{**PAGE, "text_chars": 9}), False),  # a short answer
        (first(60, **{**PAGE, "correct": True}), False),
        (first(60, **{**PAGE, "reasoning_chars": 80}), False),  # a refusal, after thinking as always
        (first(60, **{**PAGE, "reasoning_chars": 80, "output_tokens": None}), True),
        (first(200, **{**PAGE, "reasoning_chars": 80, "output_tokens": None}), True),  # to every question
        (first(200, **{**PAGE, "reasoning_chars": 80}), False),  # damaged weights may have one answer to everything
        (first(60, **{**PAGE, "truncated": True, "truncated_by": "budget", "loops": True}), False),
    ],
)
def test_one_text(change: Callable[[int], dict[str, Any]], is_page: bool) -> None:
    found = said(side("ref"), other(change=change, served={"common_texts": {1: "Back in an hour"}}))
    assert [(name, whose) for name, whose, _ in found] == ([("one text", "candidate")] if is_page else [])
    if is_page:
        assert "questions ('Back in an hour'), right for hardly any: a page of a gateway, not a reply" in found[0][2]


def swapped(count: int) -> Callable[[int], dict[str, Any]]:
    """Wrong replies that are those to later questions."""
    return lambda number: {"text_key": 1101 + number, "correct": False} if number < count and (101 + number) % 10 else {}


def test_texts_of_others() -> None:
    assert said(side("ref"), other(change=swapped(2))) == []
    [(name, whose, clause)] = said(side("ref"), other(change=swapped(4)))
    assert (name, whose) == ("texts of others", "candidate")
    assert clause == "4 of 200 replies of new are the reply to another question: replies are swapped"
    assert said(side("ref", kind="tools"), other(change=swapped(40), kind="tools")) == []  # one call fits several questions
    shared = {**PAGE, "correct": True, "reasoning_chars": 80}
    change = swapped(4)
    assert said(side("ref"), other(change=lambda number: change(number) or (shared if number > 197 else {}))) == []


def test_text_that_ends_before_the_references() -> None:
    assert said(side("ref"), other(served={"num_beside": 200, "num_cut_short": 1})) == []
    found = said(side("ref"), other(served={"num_beside": 60, "num_cut_short": 1, "num_reference_cut_short": 2}))
    assert found == [
        ("lost text", "reference",
         "the text of 2 of 60 replies of ref is the beginning of new's to the same question and no more, though as many tokens "
         "were billed: something loses text"),
        ("lost text", "candidate",
         "the text of 1 of 60 replies of new is the beginning of ref's to the same question and no more, though as many tokens "
         "were billed: something loses text"),
    ]  # fmt: skip


@pytest.mark.parametrize(("short", "typical", "clause"), [
    (1, 0.97, None),
    (2, 0.97, "the text of 2 of 200 replies of new lacks tokens that were billed (40 of 90 in one): something loses text"),
    (0, 0.80, None),
    (0, 0.66, "texts of new hold 66 % of the tokens that are billed for them, those of ref 97 %: thinking is kept ba"),
])  # fmt: skip
def test_lost_text(short: int, typical: float, clause: str | None) -> None:
    counts = {"num_short": short, "typical_share": typical, "shortest": PromptCount(item="i1", billed=90, counted=40)}
    found = said(side("ref", served={"texts": TEXTS}), other(served={"texts": TEXTS.model_copy(update=counts)}))
    assert [(name, text[: len(clause or "")]) for name, _, text in found] == ([] if clause is None else [("lost text", clause)])


# ------------------------------------------------------------------------------------------------ temperature
@pytest.mark.parametrize(
    ("num", "different", "tokens", "there", "repeated", "is_fault"),
    [
        (16, 16, 40, 0, None, True),  # sampled
        (16, 5, 64, 5, None, False),  # the noise of batches, on both sides
        (64, 20, 64, 1, Repeated(240, 100), False),
        (64, 16, 31, 0, Repeated(240, 0), True),  # a short reply that flips, where the other never does
        (64, 6, 31, 0, Repeated(240, 0), False),
        # batches of a mixture of experts, beside a server that is told to be batch-invariant (vllm #23138)
        (64, 15, 64, 0, Repeated(240, 0), False),
        (64, 25, 64, 0, Repeated(240, 0), True),
        (64, 14, 31, 0, None, False),  # nothing is known of the other's noise but 16 questions
        (240, 40, 32, 0, Repeated(240, 0), True),  # a fifth of the short replies: many questions show it (agno #988)
        (240, 24, 32, 0, Repeated(240, 0), False),
        (240, 30, 8, 0, Repeated(240, 0), True),
        (240, 8, 8, 0, Repeated(240, 0), False),
    ],
)
def test_not_greedy(num: int, different: int, tokens: int, there: int, repeated: Repeated | None, is_fault: bool) -> None:
    twice = GREEDY.model_copy(update={"num_questions": num, "num_different": different, "mean_output_tokens": tokens})
    reference = side("ref", asked_twice=(GREEDY.model_copy(update={"num_different": there}),), repeated=repeated)
    found = said(reference, other(asked_twice=(twice,)))
    assert [(name, whose) for name, whose, _ in found] == ([("not greedy", "candidate")] if is_fault else [])
    sampled = {"temperature": 0.7}  # the task was not asked at 0
    assert said(side("ref", served=sampled), other(served=sampled, asked_twice=(twice,))) == []


@pytest.mark.parametrize(("turned", "is_fault"), [(30, False), (60, True)])
def test_a_reference_whose_short_replies_turn_is_not_greedy(turned: int, is_fault: bool) -> None:
    found = said(side("ref", repeated=Repeated(240, turned, 240, turned)), other())
    assert [(name, whose) for name, whose, _ in found] == ([("not greedy", "reference")] if is_fault else [])
    if is_fault:
        assert found[0][2] == (
            "at temperature 0 60 of 240 short replies of ref are right in one pass and wrong in the other: temperature 0 is "
            "not obeyed there"
        )


@pytest.mark.parametrize(("different", "there", "is_fault"), [(0, 16, True), (1, 8, True), (0, 7, False), (2, 16, False)])
def test_not_sampled(different: int, there: int, is_fault: bool) -> None:
    ours, theirs = (GREEDY.model_copy(update={"temperature": "above zero", "num_different": one}) for one in (there, different))
    sampled = {"temperature": 0.7}
    found = said(side("ref", served=sampled, asked_twice=(ours,)), other(served=sampled, asked_twice=(theirs,)))
    assert [name for name, *_ in found] == (["not sampled"] if is_fault else [])


def test_a_cache_is_seen_by_asking_twice() -> None:
    [(name, whose, clause)] = said(side("ref"), other(asked_twice=(GREEDY.model_copy(update={"num_same_id": 12}),)))
    assert (name, whose) == ("replayed", "candidate")
    assert clause == (
        "asked twice, 12 of 16 questions came back from new with the id of the first reply: a cache answers, and nothing shows "
        "whose replies it has"
    )
    assert said(side("ref"), other(asked_twice=(GREEDY.model_copy(update={"num_same_id": 7}),))) == []


# ------------------------------------------------------------------------------------------------ old records
def test_records_of_an_earlier_version_are_not_looked_at_and_say_so() -> None:
    bare = dict.fromkeys(("reply_key", "text_key", "text_chars", "reasoning_chars", "ends_open", "answer_in_reasoning"))
    old = side("old", lambda number: bare, asked_twice=())
    old = dataclasses.replace(old, task=old.task.model_copy(update={"served": None}))
    assert said(side("ref"), old) == [] and said(old, old) == []
    lacking = unchecked_rules(Pair(side("ref"), old))
    assert lacking == [rule.name for rule in RULES if rule.needs != "nothing"]
    assert unchecked_rules(Pair(side("ref"), other())) == []
    assert unchecked_rules(Pair(side("ref"), side("ref-repeat", is_repeat=True, asked_twice=()))) == []


def test_the_page_on_trust_has_every_rule() -> None:
    page = (Path(__file__).parents[3] / "docs" / "trust.md").read_text(encoding="utf-8")
    section = page.split("## Asked and answered alike\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [rule.name for rule in RULES]
