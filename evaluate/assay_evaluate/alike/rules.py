"""The rules that every task is held against before it is judged, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from assay_evaluate.alike.endings import capped, contradicting_usage, cut_early, stop_at_budget, unsent_stop
from assay_evaluate.alike.names import another_configuration, another_model, replayed
from assay_evaluate.alike.prompts import other_prompts, shortened_prompts
from assay_evaluate.alike.sides import Finding, Pair
from assay_evaluate.alike.temperature import not_greedy, not_sampled
from assay_evaluate.alike.texts import lost_text, one_text, texts_of_others
from assay_evaluate.alike.thinking import answers_in_thinking, longer_thinking, thinking_on_one_side

Needs = Literal["served", "marks", "asked twice", "nothing"]


class Rule(NamedTuple):
    """One rule. Its false alarms and its power are in benchmarks/trust/alike.md."""

    name: str
    look: Callable[[Pair], Iterator[Finding]]
    catches: str
    """What goes wrong, and where it was reported."""
    threshold: str
    healthy: str
    """Why a healthy server does not raise it."""
    needs: Needs
    """Evidence that old records lack. marks: what items keep of their replies."""


RULES: tuple[Rule, ...] = (
    Rule("another model", another_model, "a fallback or split traffic answers (litellm #13486, #28241)",
         "more than 0.5 % of the replies; as many without a name where others of the server have one",
         "a server names one model", "served"),
    Rule("another configuration", another_configuration, "questions and signature go to different servers",
         "more than 0.5 % of the replies", "a server has one system_fingerprint", "served"),
    Rule("replayed", replayed, "a cache replays replies (lm-evaluation-harness PR #3839, inspect_ai #2580)",
         "more than 1 % of the replies, 2 at least; of a second pass 5 %; half of 3 questions asked twice; 0.5 % by a header",
         "ids are new each time; ids that different texts share name nothing", "marks"),
    Rule("other prompts", other_prompts, "prompts shortened, another template, first token twice, swapped replies "
         "(ollama #17889, little-coder #128)", "more than 0.5 % of the questions", "tokenizers are deterministic", "nothing"),
    Rule("shortened prompts", shortened_prompts, "the same on both sides, against our own count",
         "more than 8 tokens and 2 % below the count, beyond what no prompt is billed for", "counts of one tokenizer agree",
         "served"),
    Rule("capped", capped, "a cap that says stop (hermes-agent #108558, inspect_ai PR #5189)",
         "5 and 2 % of the replies end without an answer at one length of 16 tokens or more; p < 1e-6 by the lengths near it",
         "lengths of unfinished replies spread; a length that right replies have as well is a form", "marks"),
    Rule("cut early", cut_early, "max_tokens lowered on the way",
         "more than 0.5 % say `length` below budget and context", "vLLM ends at the budget or the context", "nothing"),
    Rule("stop at budget", stop_at_budget, "finish_reason changed on the way",
         "3, and half of the replies that fill their budget, say `stop`; p < 1e-4 by the lengths below it",
         "as many end there by themselves as just before",
         "nothing"),
    Rule("unsent stop", unsent_stop, "a stop string is added (vllm #53066, lm-evaluation-harness PR #3700)",
         "more than 0.5 % of the replies", "none is ever sent", "served"),
    Rule("thinking on one side", thinking_on_one_side, "thinking switched or unparsed on one side (club-3090 #747, omlx #358)",
         "half of the ended replies on one side, 2 % on the other, 10 replies each",
         "both sides think as often; damaged weights that loop are not ended", "marks"),
    Rule("longer thinking", longer_thinking, "another reasoning effort",
         "4 times in the median of 20 pairs or more, 90 % in one direction, 200 characters or more",
         "quantized weights think up to twice as long",
         "marks"),
    Rule("answers in thinking", answers_in_thinking, "a reasoning parser that swallows answers (vllm #41902, PR #42635)",
         "3 % of the replies, 5 at least, with the right answer at the end of the thinking",
         "a reply that ends inside its thinking is rare", "marks"),
    Rule("one text", one_text, "a maintenance page or a filter answers with HTTP 200",
         "5 and 5 % of the questions, 32 characters or more, 10 % right at most, without the thinking or counts of the others "
         "(p < 1e-5)",
         "a model's phrase or refusal thinks and is counted as its other replies are", "marks"),
    Rule("texts of others", texts_of_others, "replies are swapped",
         "3 and more than 0.5 % of the replies, 24 tokens or more, where no two questions share a right reply",
         "two questions hardly ever have one long text", "marks"),
    Rule("lost text", lost_text, "text is cut while its tokens are billed",
         "2 and more than 0.5 % of the replies lack 8 tokens and 20 % by a tokenizer; or all lack 20 % next to the other side; "
         "or more than 0.5 % end before the reference's with as many tokens",
         "text has the tokens that it was decoded from", "served"),
    Rule("usage", contradicting_usage, "usage that contradicts itself (kserve PR #3712, llama.cpp PR #27318)",
         "more than 0.5 % of the replies", "counts add up", "served"),
    Rule("not greedy", not_greedy, "temperature 0 counts as not given (agno #988, OpenManus PR #642)",
         "asked twice: p < 1e-4 by one difference in 150 tokens; or p < 1e-3 by one in 350, and by three times the other "
         "side's noise; or 10 % of the reference's short replies turn in its second pass (p < 1e-6)",
         "batches change few replies within 64 tokens, on both sides", "asked twice"),
    Rule("not sampled", not_sampled, "temperature forced to 0",
         "asked twice: 90 % alike at the candidate, 50 % at the reference, 8 questions each, 32 tokens or more",
         "both sides vary", "asked twice"),
)  # fmt: skip


def look(pair: Pair) -> list[tuple[Rule, Finding]]:
    """What the rules find in one task of two sides, in their order."""
    return [(rule, finding) for rule in RULES for finding in rule.look(pair)]


def not_looked_at(pair: Pair) -> list[str]:
    """Names of the rules for which a record, of an earlier version, has no evidence."""
    sides = (pair.reference, pair.candidate)
    lacks: set[Needs] = set()
    if any(side.task.served is None for side in sides):
        lacks.add("served")
    if any(item.text_key is None for side in sides for item in side.answered):
        lacks.add("marks")
    if any(not side.asked_twice and not side.is_repeat for side in sides):
        lacks.add("asked twice")
    return [rule.name for rule in RULES if rule.needs in lacks]
