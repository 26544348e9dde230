"""Whether an odd reply is the model's own habit, or was garbled by serving.

A reply at temperature 0 is scored where it can be: if prefill would have chosen its ids, the ids are the model's own. Where
nothing can be scored, and for signs that may stand in the text alone, the same request is asked again alone: a habit shows the
same signs. What neither tells is undecided: no event, and not among the replies that were judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from assay_evaluate.client.checks.decoded_text import Compared
from assay_evaluate.client.exchanges import Exchange
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply
from assay_evaluate.diagnosis.probes.recompute import why_not
from assay_evaluate.diagnosis.probes.replies.batch_signs import STILL_THIN, Usual, ends_at_limit, starts_alike
from assay_evaluate.diagnosis.probes.replies.detectors import SURPRISE_NATS, Sign, signs_in

FOREIGN_NATS = 2.0
"""A token this far below the best one of prefill is none that this model picks at temperature 0; eight times a decision."""
RARE_DRAW = 1e-7
"""A sampled reply with a token of almost no probability is not the model's if so many tokens that are not listed are drawn with
less probability. One token below e^-15 is one of very many that a model may draw: it stood in one of 1,300 sampled replies of a
healthy server (tiny-glm)."""
LEAST_REST = 1e-6
"""Probability of all tokens that are not listed at one place, at least: what is left of 1 in single precision."""
MOST_ASKED_AGAIN = 64
"""Suspects that are asked again alone; it takes as many replies one after the other."""
OF_TEXT = frozenset(
    {"wrong_script", "replacement_character", "control_character", "open_thinking", "empty", "repeated", "thin", "end_at_limit"}
)
"""Signs that may stand in the text, or in what comes with it, alone."""
URGENT = (
    "replacement_character", "wrong_script", "control_character", "id_zero", "surprise", "empty", "thin", "repeated",
    "end_at_limit", "open_thinking", "loop", "missing_end",
)  # fmt: skip
"""In the order in which suspects are asked again: what models do often by themselves comes last."""
AT_ANY_TEMPERATURE = frozenset(URGENT[:6])
"""Signs that are looked for in sampled replies, too: these loop and miss their ends by themselves, and nobody could tell."""


@dataclass(frozen=True)
class Suspect:
    """A reply with its signs. `number` counts answered replies from 1."""

    exchange: Exchange
    signs: tuple[Sign, ...]
    number: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({sign.kind for sign in self.signs}))

    @property
    def is_greedy(self) -> bool:
        return not self.exchange.ask.body["temperature"]

    @property
    def urgency(self) -> int:
        return min((URGENT.index(kind) for kind in self.kinds if kind in URGENT), default=len(URGENT))


@dataclass(frozen=True)
class Sorted:
    """Suspects: of serving's making, of the model's, and not to be told."""

    garbled: list[Suspect]
    habits: list[Suspect]
    unknown: list[Suspect]


def signs_of(exchange: Exchange, *, is_end_expected: bool) -> list[Sign]:
    """Of one reply by itself."""
    reply = exchange.reply
    return signs_in(
        exchange.ask.prompt,
        reply.text,
        reasoning=reply.reasoning,
        finish_reason=reply.finish_reason,
        token_ids=reply.token_ids,
        rows=exchange.rows,
        is_end_expected=is_end_expected,
    )


def sort_out(session: ProbeSession, suspects: Sequence[Suspect], compared: dict[str, Compared], usual: Usual) -> Sorted:
    """Score them all, and ask the most urgent ones again."""
    told = Sorted([], [], [])
    in_order = sorted(suspects, key=lambda one: (one.urgency, one.number))
    undecided = in_order[: session.settings.most_suspects]
    told.unknown.extend(in_order[len(undecided) :])
    if undecided and why_not(session) is None:
        scored = session.score([one.exchange for one in undecided], session.settings.concurrency)
        by_id = {one.exchange.id: one for one in scored}
        remaining: list[Suspect] = []
        for suspect in undecided:
            own = is_own(by_id.get(suspect.exchange.id), suspect.exchange.ask.body["temperature"])
            if own and not _is_cleared_by_its_ids(suspect, compared):
                own = None
            (remaining if own is None else told.habits if own else told.garbled).append(suspect)
        undecided = remaining
    able = [one for one in undecided if one.is_greedy]
    told.unknown.extend(one for one in undecided if not one.is_greedy)
    told.unknown.extend(able[MOST_ASKED_AGAIN:])
    asks = [replace(one.exchange.ask, id=f"once-more/{one.exchange.id}") for one in able[:MOST_ASKED_AGAIN]]
    for suspect, alone in zip(able, session.client.ask_together(asks, 1), strict=False):
        if not alone.is_answered:
            told.unknown.append(suspect)
        else:
            (told.habits if _shows_again(suspect, alone, usual) else told.garbled).append(suspect)
    for some in (told.garbled, told.habits, told.unknown):
        some.sort(key=lambda one: one.number)
    return told


def _shows_again(suspect: Suspect, alone: Exchange, usual: Usual) -> bool:
    """Whether the reply to the same request alone has every sign that the suspect has."""
    again = {sign.kind for sign in signs_of(alone, is_end_expected="missing_end" in suspect.kinds)}
    if starts_alike(alone.text, suspect.exchange.text):
        again.add("repeated")
    if usual.is_thin(alone, STILL_THIN):
        again.add("thin")
    if ends_at_limit(alone):
        again.add("end_at_limit")
    return again >= set(suspect.kinds)


def _is_cleared_by_its_ids(suspect: Suspect, compared: dict[str, Compared]) -> bool:
    """Whether the model's having chosen the ids says all about the reply's signs."""
    if "wrong_script" in suspect.kinds:
        return False
    text = compared.get(suspect.exchange.id)
    return (text is not None and text.is_equal) or not OF_TEXT & set(suspect.kinds)


def is_own(scored: RescoredReply | None, temperature: float) -> bool | None:
    """Whether prefill would have written the reply, too. None: it could not be scored, or was drawn above temperature 1."""
    gap = furthest_behind(scored) if not temperature else None
    if gap is not None:
        return gap < FOREIGN_NATS
    if scored is None or scored.prefill is None or not len(scored.prefill.chosen_P):
        return None
    chosen_P = scored.prefill.chosen_P.astype(np.float64)
    if np.nanmin(chosen_P) > -SURPRISE_NATS:
        return True
    if temperature > 1:
        return None
    top_PK = scored.prefill.logprobs_PK.astype(np.float64)
    num_outside = int(np.sum(chosen_P < np.nanmin(top_PK, axis=1)))
    expected = float(np.clip(1 - np.nansum(np.exp(top_PK), axis=1), LEAST_REST, 1.0).sum())
    return bool(stats.poisson.sf(num_outside - 1, expected) > RARE_DRAW)


def furthest_behind(scored: RescoredReply | None) -> float | None:
    """Nats by which a token of the reply is behind the best one of prefill, at most. None: it could not be scored."""
    if scored is None or scored.prefill is None or not len(scored.prefill.chosen_P):
        return None
    gap_P = np.nanmax(scored.prefill.logprobs_PK.astype(float), axis=1) - scored.prefill.chosen_P.astype(float)
    return float(np.nanmax(gap_P))
