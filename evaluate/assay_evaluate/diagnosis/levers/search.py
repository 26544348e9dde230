"""`assay diagnose lever`: change one parameter at a time and see which one changes how the server fails.

    report, search = find_levers(start, LeverSettings(), label="glm-5 w4a16", facts=facts_of)

`start(setting)` is a context manager that yields a ProbedEndpoint served under a Setting; `serve_here` makes one for a
checkpoint folder, `ask_running` for a URL, where only what a request can say is changed. The same greedy requests are asked
every time, and every reply is compared with itself: chosen against most likely, generated against recomputed, not-a-number,
signs of garbling.

Does a changed parameter change how something fails, or only how often? The method is that of the people who found vLLM's stale
Mamba slots (AI21, "One token to corrupt them all" and "Stride and Prejudice"): look for the variable that changes the
structure of a failure, not its size. A failure that needs more than N cache slots vanishes with a smaller cache; one that is
merely rarer there does not depend on it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from scipy.stats import PermutationMethod, binom, fisher_exact, hypergeom, ks_2samp

from assay.callbacks import Say
from assay.errors import MeasureError, ServeError
from assay.records.diagnosis.lever import Effect, Failure, LeverEffect, LeverReport, Observation
from assay.records.probe import ProbeSettings
from assay_evaluate.client.client import Client
from assay_evaluate.client.exchanges import Ask, Exchange
from assay_evaluate.diagnosis.endpoint import TIMEOUT_S, ProbedEndpoint
from assay_evaluate.diagnosis.levers.settings import LEVERS, Facts, Setting, Start
from assay_evaluate.diagnosis.probes.probe_session import ProbeSession, RescoredReply
from assay_evaluate.diagnosis.probes.ranking import TIE
from assay_evaluate.diagnosis.probes.signs import signs_of
from assay_evaluate.statistics.decisions import holm
from assay_evaluate.statistics.proportions import clopper_pearson

RECOMPUTED_NATS = 0.5
"""|generated - recomputed log-probability| of one token from which a request counts as failed: far above the noise of any
number format, as levers are for failures and not for drift."""
GARBLED = ("replacement_character", "control_character", "wrong_script", "loop", "id_zero", "surprise")
"""Signs of garbling that count here: those a healthy reply seldom has, whatever its prompt."""

NOT_OURS = "it needs a server with other settings; give the checkpoint folder instead of the URL"


@dataclass(frozen=True)
class LeverSettings:
    """What is asked under every setting. The defaults take a minute a setting on a model that answers at once."""

    num_requests: int = 48
    num_passes: int = 2
    concurrency: int = 16
    max_tokens: int = 96
    prompt_tokens: int = 96
    levers: tuple[str, ...] | None = None
    """Names of LEVERS; None: all."""
    seed: str = "eval-lever"


# ------------------------------------------------------------------------------------------------ the search
def find_levers(
    start: Start,
    settings: LeverSettings,
    *,
    label: str,
    base: Setting | None = None,
    facts: Callable[[ProbedEndpoint], Facts],
    on_progress: Say = lambda line: None,
) -> tuple[LeverReport, Search]:
    """(report, what is needed to shrink and to write a bundle). MeasureError: a lever that is not in the table."""
    unknown = [name for name in settings.levers or () if name not in LEVERS]
    if unknown:
        raise MeasureError(f"no lever called {unknown[0]!r}; there are: {', '.join(LEVERS)}")
    started = time.monotonic()
    search = Search(start, settings, base or Setting(settings.concurrency), on_progress=on_progress)
    with start(search.base) as endpoint:
        baseline = search.observe(endpoint, search.base)
        known = replace(facts(endpoint), longest_tokens=search.longest_tokens)
        turned = {name: LEVERS[name].turn(search.base, known) for name in settings.levers or LEVERS}
        if not baseline.failures:
            turned = {}
        observed = {
            name: search.observe(endpoint, search.turned(name, value))
            for name, value in turned.items()
            if not isinstance(value, str) and not LEVERS[name].needs_restart
        }
    for name, value in turned.items():
        if not isinstance(value, str) and LEVERS[name].needs_restart:
            outcome = search.restarted(name, value) if known.can_restart else NOT_OURS
            if isinstance(outcome, str):
                turned[name] = outcome
            else:
                observed[name] = outcome
    effects = _effects(search.base, baseline, turned, observed)
    lever, also = pick([(effect.lever, effect.effect) for effect in effects])
    report = LeverReport(
        label=label, baseline=baseline, effects=tuple(effects), lever=lever, also=also, smallest=(), bundle=None,
        sentence=_sentence(baseline, effects, lever, also), seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip
    return report, search


def _effects(
    base: Setting, baseline: Observation, turned: dict[str, Any], observed: dict[str, Observation]
) -> list[LeverEffect]:
    names = list(observed)
    chosen = dict(zip(names, choose_changes([compare_observations(baseline, observed[n]) for n in names]), strict=True))
    effects = []
    for name, value in turned.items():
        before = getattr(base, LEVERS[name].field)
        if name not in chosen:
            effects.append(LeverEffect(
                lever=name, before=_text_of(before), after="", effect="not tried", p_value=None, sentence=f"not tried: {value}"
            ))  # fmt: skip
            continue
        change = chosen[name]
        effects.append(LeverEffect(
            lever=name, before=_text_of(before), after=_text_of(value), effect=change.effect, p_value=change.p_value,
            sentence=change.sentence, observation=observed[name],
        ))  # fmt: skip
    return effects


def _text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "as served" if value is None else str(value)


def _sentence(baseline: Observation, effects: Sequence[LeverEffect], lever: str | None, also: Sequence[str]) -> str:
    if not baseline.failures:
        return f"nothing failed in {baseline.num_requests} requests, so there is nothing to search for; ask more"
    failed = f"{len(baseline.failures)} of {baseline.num_requests} requests failed ({_kinds(baseline)})"
    tried = [effect.lever for effect in effects if effect.effect != "not tried"]
    if lever is None:
        return f"{failed}; none of {', '.join(tried) or 'the levers'} changes how they fail"
    effect = next(effect for effect in effects if effect.lever == lever)
    more = f"; {', '.join(also)} {'changes' if len(also) == 1 else 'change'} it too, because of {lever}" if also else ""
    return f"{failed}; it depends on {lever} ({effect.before} -> {effect.after}: {effect.effect}){more}"


# ------------------------------------------------------------------------------------------------ one observation
@dataclass
class Search:
    """Requests, and what came of them under each setting."""

    start: Start
    settings: LeverSettings
    base: Setting
    on_progress: Say = lambda line: None
    longest_tokens: int = 0
    exchanges: dict[Setting, list[Exchange]] = field(default_factory=dict)
    """The last pass under each setting."""

    def turned(self, lever: str, value: Any) -> Setting:
        return replace(self.base, **{LEVERS[lever].field: value})

    def restarted(self, lever: str, value: Any) -> Observation | str:
        """What is observed on a server of its own; in words why there is none."""
        setting = self.turned(lever, value)
        with ExitStack() as stack:
            try:
                endpoint = stack.enter_context(self.start(setting))
            except ServeError as error:
                return f"vLLM does not start with {LEVERS[lever].field} {_text_of(value)}: {str(error).splitlines()[0]}"
            return self.observe(endpoint, setting)

    def observe(self, endpoint: ProbedEndpoint, setting: Setting, asks: Sequence[Ask] | None = None) -> Observation:
        """Every request `num_passes` times. asks: only these; None: all."""
        started = time.monotonic()
        with Client(endpoint, timeout_s=TIMEOUT_S) as client:
            session = self.session(endpoint, client)
            asks = list(asks) if asks is not None else self.requests(session)
            passes = []
            for _ in range(self.settings.num_passes):
                # of n copies of a request the first is looked at: a server refuses n > 1 of a greedy request
                copies = [replace(ask, id=f"{ask.id}#{copy}") if copy else ask for ask in asks for copy in range(setting.n)]
                exchanges = client.ask_together(copies, setting.concurrency * setting.n, in_waves=True)[:: setting.n]
                self.exchanges[setting] = exchanges
                prefill = {scored.exchange.id: scored for scored in session.score(exchanges, 1)}
                failures = [failure_of(exchange, prefill.get(exchange.id)) for exchange in exchanges]
                passes.append(self._without_habits(client, [failure for failure in failures if failure], exchanges))
        sizes = ((e.reply.prompt_tokens or 0) + (e.reply.output_tokens or 0) for e in exchanges)
        self.longest_tokens = max(self.longest_tokens, *sizes)
        failed, asked = sum(map(len, passes)), len(asks) * self.settings.num_passes
        parameters = parameters_of(setting)
        described = ", ".join(f"{name} {_text_of(value)}" for name, value in parameters.items())
        self.on_progress(f"{described}: {failed} of {asked} failed")
        return Observation(
            setting=parameters, num_requests=asked, rate=clopper_pearson(failed, asked), passes=tuple(passes),
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip

    def _without_habits(
        self, client: Client, failures: Sequence[Failure], exchanges: Sequence[Exchange]
    ) -> tuple[Failure, ...]:
        """Signs of garbling in a text that comes word for word when the request is asked alone are the model's habit."""
        by_id = {exchange.id: exchange for exchange in exchanges}
        doubtful = [failure.request for failure in failures if failure.kind in GARBLED]
        alone = client.ask_together([by_id[name].ask for name in doubtful], 1)
        habits = {reply.id for reply in alone if reply.is_answered and reply.text == by_id[reply.id].text}
        return tuple(failure for failure in failures if failure.kind not in GARBLED or failure.request not in habits)

    def requests(self, session: ProbeSession) -> list[Ask]:
        """The greedy requests of this search, always the same."""
        prompts = session.prompts("lever", self.settings.num_requests, self.settings.prompt_tokens)
        return [session.ask("lever", prompt, with_logprobs=True) for prompt in prompts]

    def asks(self, endpoint: ProbedEndpoint) -> list[Ask]:
        """The requests as this endpoint is asked them."""
        with Client(endpoint, timeout_s=TIMEOUT_S) as client:
            return self.requests(self.session(endpoint, client))

    def session(self, endpoint: ProbedEndpoint, client: Client) -> ProbeSession:
        settings = ProbeSettings(max_tokens=self.settings.max_tokens, seed=self.settings.seed, top_k=8)
        return ProbeSession(endpoint, settings, client)


def parameters_of(setting: Setting) -> dict[str, Any]:
    """The parameters that a setting fixes."""
    return {name: value for name, value in asdict(setting).items() if value is not None}


def failure_of(exchange: Exchange, scored: RescoredReply | None) -> Failure | None:
    """What is wrong with one reply; None: nothing that can be seen."""

    def failure(kind: str, detail: str, position: int | None = None) -> Failure:
        return Failure(request=exchange.id, kind=kind, position=position, detail=detail)

    if not exchange.is_answered:
        return failure("no reply", str(exchange.reply.error))
    recomputed = None if scored is None or scored.prefill is None else scored.prefill.chosen_P
    for position, row in enumerate(exchange.rows):
        if math.isnan(row.logprob):
            return failure("not a number", "log-probability is not a number", position)
        if row.top and row.token != row.top[0][0] and row.top[0][1] - row.logprob > TIE:
            return failure("not the most likely", f"{row.token} for {row.top[0][0]}", position)
        if recomputed is not None and position < len(recomputed):
            difference = abs(row.logprob - float(recomputed[position]))
            if difference > RECOMPUTED_NATS:
                return failure("recomputed otherwise", f"log-probability {difference:.2f} nats off", position)
    sign = next((sign for sign in signs_of(exchange) if sign.kind in GARBLED), None)
    return None if sign is None else failure(sign.kind, sign.detail, sign.position)


# ------------------------------------------------------------------------------------------------ two observations
ALPHA = 0.01
"""Of all levers together (Holm): a lever named wrongly costs an engineer a day."""
EXPLAINED_BY: dict[str, tuple[str, ...]] = {
    "max_num_seqs": ("concurrency",),
    "n": ("concurrency",),
    "concurrency": ("kv_cache",),
    "prefix_caching": ("kv_cache",),
}
"""Lever -> levers that, if they work as well, are the reason: fewer sequences at once need fewer slots, but a smaller cache
that still holds all of them does not lower the number of sequences. Earlier in a chain of reasons is better."""


@dataclass(frozen=True)
class Change:
    """What one comparison says, before adjustment for the others. `p_value` belongs to `effect`."""

    effect: Effect
    p_value: float
    sentence: str


def compare_observations(before: Observation, after: Observation) -> list[Change]:
    """Every way in which the two differ, each with its p value; most telling first. Nothing is left out for being unlikely."""
    k0, n0, k1, n1 = len(before.failures), before.num_requests, len(after.failures), after.num_requests
    p_rate = float(fisher_exact([[k0, n0 - k0], [k1, n1 - k1]]).pvalue)
    counts = f"{k0} of {n0} requests failed before, {k1} of {n1} after"
    if k0 and not k1:
        return [Change("gone", p_rate, f"the failure is gone: {counts}")]
    if k1 and not k0:
        return [Change("appears", p_rate, f"the failure appears: {counts}")]
    if not k0:
        return [Change("none", 1.0, counts)]
    return [
        Change("other kind", p_kinds(before, after), f"other symptoms: {_kinds(before)} before, {_kinds(after)} after"),
        Change("moved", p_positions(before, after), f"elsewhere: {_positions(before)} before, {_positions(after)} after"),
        Change("moved", p_requests(before, after), "other requests fail than did before, where the same ones had failed again"),
        Change("size", p_rate, f"only the rate changes: {counts}"),
    ]


def p_kinds(before: Observation, after: Observation) -> float:
    """That kinds of failures are drawn from one distribution: exact for two kinds, else by permutation (seeded)."""
    sides = [Counter(failure.kind for failure in side.failures) for side in (before, after)]
    kinds = sorted(sides[0] | sides[1])
    if len(kinds) < 2:
        return 1.0
    table = [[side[kind] for kind in kinds] for side in sides]
    method = None if len(kinds) == 2 else PermutationMethod(n_resamples=9999, rng=np.random.default_rng(0))
    return float(fisher_exact(table, method=method).pvalue)


def p_positions(before: Observation, after: Observation) -> float:
    """That first wrong tokens stand at the same positions (Kolmogorov-Smirnov, two samples)."""
    sides = [[f.position for f in side.failures if f.position is not None] for side in (before, after)]
    if min(map(len, sides)) < 5:
        return 1.0
    return float(ks_2samp(*sides).pvalue)


def p_requests(before: Observation, after: Observation) -> float:
    """That the same requests fail as did before. 1 where not even two passes before had failing requests in common."""
    if len(before.passes) < 2:
        return 1.0
    first, second, *_ = ({failure.request for failure in failures} for failures in before.passes)
    other = {failure.request for failure in after.passes[0]}
    each = before.num_requests // len(before.passes)
    repeated, expected = len(first & second), min(len(first), len(second))
    common = min(len(first), len(other))
    # that so many are in both of two random subsets
    if not expected or not common or hypergeom.sf(repeated - 1, each, len(first), len(second)) > ALPHA:
        return 1.0
    # Jeffreys' estimate: requests that failed again by chance alone must not count as certain to
    share = (repeated + 0.5) / (expected + 1)
    return float(binom.cdf(len(first & other), common, share))


def _kinds(observation: Observation) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in Counter(f.kind for f in observation.failures).most_common())


def _positions(observation: Observation) -> str:
    known = sorted(f.position for f in observation.failures if f.position is not None)
    return f"{known[0]} to {known[-1]}, median {known[len(known) // 2]}" if known else "none known"


def choose_changes(changes: Sequence[Sequence[Change]]) -> list[Change]:
    """Of every lever's changes the first that chance does not explain, p values Holm-adjusted over all levers and changes."""
    adjusted = iter(holm([change.p_value for of_lever in changes for change in of_lever]))
    chosen: list[Change] = []
    for of_lever in changes:
        own = [replace(change, p_value=next(adjusted)) for change in of_lever]
        unexplained = (change for change in own if change.p_value < ALPHA and change.effect != "none")
        none = Change("none", min(change.p_value for change in own), f"no difference ({own[-1].sentence})")
        chosen.append(next(unexplained, none))
    return chosen


def pick(effects: Sequence[tuple[str, Effect]]) -> tuple[str | None, tuple[str, ...]]:
    """(the lever, others that its working explains). A failure that goes away outranks one that changes."""
    ranks: list[Effect] = ["gone", "appears", "other kind", "moved"]
    working = [(lever, effect) for lever, effect in effects if effect in ranks]
    if not working:
        return None, ()
    best = min(ranks.index(effect) for _, effect in working)
    names = [lever for lever, effect in working if ranks.index(effect) == best]
    reasons = [lever for lever in names if not any(reason in names for reason in EXPLAINED_BY.get(lever, ()))]
    lever = (reasons or names)[0]
    return lever, tuple(name for name, _ in working if name != lever)
