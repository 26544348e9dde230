"""Tool-count ladder: the same kind of question with more and more tools on offer, with a short and with a long dialogue before.

Quantized checkpoints and some kernels write malformed calls past a number of tools and look as if they had decided to talk
(NVIDIA/dgx-spark-playbooks #89; TensorRT-LLM #15295: only with three tools and more than 5.4k tokens of prompt).
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy import stats

from assay.records.probe import ProbeResult, Witness
from assay_evaluate.asking.dialect import CHAT
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, not_run, witness
from assay_evaluate.tasks.tools.calls import judge
from assay_evaluate.tasks.tools.catalogue import all_tools
from assay_evaluate.tasks.tools.dialogue import messages_of
from assay_evaluate.tasks.tools.questions import tool_question
from assay_evaluate.tasks.tools.task import TEMPLATE_IGNORES_TOOLS

CLIFF_P_VALUE = 0.01
CLIFF_DROP = 0.25
"""Share of valid calls that is lost between two rungs: a cliff is no slope."""
SENTENCE_TOKENS = 12
"""Of the dialogue that fills a prompt, about."""


@dataclass
class Rung:
    """Replies with so many tools. `num_valid`: one or more calls, all of them valid, and none left in the text."""

    num_tools: int
    is_long: bool
    num_replies: int = 0
    num_valid: int = 0
    num_malformed: int = 0

    @property
    def name(self) -> str:
        return f"{self.num_tools} {'long' if self.is_long else 'short'}"

    @property
    def share(self) -> float:
        return self.num_valid / self.num_replies


def probe_tools(session: ProbeSession) -> ProbeResult:
    """Alarm: a rung at which surely fewer calls are valid than on the best rung below it, by a quarter at least."""
    if (reason := _reason_without_tools(session)) is not None:
        return not_run("tools", "request", reason)
    rungs: list[Rung] = []
    events: list[Witness] = []
    first = None
    num_replies = 0
    for num_tools in session.settings.num_tools:
        for is_long in (False, True):
            rung = Rung(num_tools, is_long)
            for exchange, is_valid, is_malformed in _ask_rung(session, rung):
                num_replies += 1
                rung.num_replies += 1
                rung.num_valid += is_valid
                rung.num_malformed += is_malformed
                if is_malformed:
                    events.append(
                        witness(exchange, f"malformed call with {rung.name}", None, "a valid call", exchange.text[:80])
                    )
                    first = first or num_replies
            if rung.num_replies:
                rungs.append(rung)
    if not any(rung.num_valid for rung in rungs):
        return not_run("tools", "request", "the model calls no tool on any rung", num_replies)
    return session.result(
        "tools",
        trials=num_replies,
        unit="request",
        alarms=_find_cliff(rungs),
        witnesses=events,
        first_event_at=first,
        stands_without_events=True,
        details={
            "valid_calls": {rung.name: rung.share for rung in rungs},
            "malformed": {rung.name: rung.num_malformed for rung in rungs},
        },
    )


def _reason_without_tools(session: ProbeSession) -> str | None:
    if not session.endpoint.offer.chat:
        return "the endpoint has no chat, so it cannot be shown tools"
    body = {"messages": [{"role": "user", "content": "1 + 1"}], "max_tokens": 1, "temperature": 0}
    offered = {"tools": [all_tools()[0].definition], "tool_choice": "auto"}
    with_tools = session.client.exchange(Ask("tools/with", CHAT, {**body, **offered}))  # a refusal is an answer: not counted
    without = session.client.exchange(Ask("tools/without", CHAT, body))
    if not with_tools.is_answered:
        error = with_tools.reply.error or ""
        flags = "" if "--tool-call-parser" in error else "; of vLLM: --enable-auto-tool-choice --tool-call-parser PARSER"
        return f"the server does not accept tool calls: {error}{flags}"
    longer, shorter = with_tools.reply.prompt_tokens, without.reply.prompt_tokens
    return TEMPLATE_IGNORES_TOOLS if longer is not None and shorter is not None and longer <= shorter else None


def _ask_rung(session: ProbeSession, rung: Rung) -> list[tuple[Exchange, bool, bool]]:
    """(reply, valid calls and nothing else, malformed) of every answered question of a rung."""
    settings = session.settings
    kind = "long" if rung.is_long else "short"
    seed = f"{settings.seed}:{kind}"
    questions = [tool_question(seed, i, rung.num_tools, None, 0.0) for i in range(settings.num_tool_requests)]
    num_sentences = session.room(settings.long_tokens) // SENTENCE_TOKENS if rung.is_long else 0
    asks = []
    for question in questions:
        body = {
            "messages": messages_of(question, num_sentences, seed), "max_tokens": settings.max_tokens, "temperature": 0,
            "tools": [tool.definition for tool in question.tools], "tool_choice": "auto",
        }  # fmt: skip
        asks.append(Ask(f"tools/{kind}/{question.id}", CHAT, body, question.question))
    judged = []
    for question, exchange in zip(questions, session.client.ask_together(asks, settings.concurrency), strict=True):
        if exchange.is_answered:
            item = judge(question, exchange.reply)
            is_malformed = item.left_in_text or item.schema_valid is False
            judged.append((exchange, bool(item.called) and not is_malformed, is_malformed))
    return judged


def _find_cliff(rungs: list[Rung]) -> list[str]:
    """The first rung that lies far below the best one before it (Fisher's exact test, corrected for the rungs)."""
    for at, rung in enumerate(rungs[1:], 1):
        best = max(rungs[:at], key=lambda rung: rung.share)
        table = [[best.num_valid, best.num_replies - best.num_valid], [rung.num_valid, rung.num_replies - rung.num_valid]]
        p_value = float(stats.fisher_exact(table, "greater").pvalue) * (len(rungs) - 1)
        if best.share - rung.share > CLIFF_DROP and p_value < CLIFF_P_VALUE:
            return [
                f"with {rung.name} prompts {rung.num_valid} of {rung.num_replies} replies are valid calls, with {best.name} "
                f"{best.num_valid} of {best.num_replies} (p {p_value:.1g})"
            ]
    return []
