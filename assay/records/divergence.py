"""What divergence is told in: drift over one set of texts, in parts and along the position, and exact mode. All in nats.

Three kinds of KL: `kl_mean`, its quantiles and `kl_cvar95` are a *lower bound* (all ids outside the reference's top k are one
bucket); `kl_unbiased_mean` and `kl_text_mean` are *unbiased* estimates, which only text sampled from the reference has;
`ExactDivergence` is *exact*. A limit from above is passed by an unbiased or exact number only (decision 210).

Intervals are over whole texts, with the kinds of text that the suite fixes as strata (95 %). Missing is None: fewer than
`FEWEST_TEXTS` texts have no interval.
"""

from __future__ import annotations

from typing import Literal

from assay.records.base import Interval, Part

TextSet = Literal["replies", "suite_replies", "held_out"]
"""replies: the reference's, to our questions. suite_replies: its replies to the questions of the suite's tasks, thinking
included. Both sampled at T=1, top_p=1. held_out: text no model wrote for this; there is no unbiased estimate on it."""

FEWEST_TEXTS = 20
"""Fewer texts than this have no interval, and no gate judges them: no interval over so few covers what it says."""

EXACT_MODE = "divergence in exact mode"
"""Key of `Measurement.not_measured` under which it is said why exact mode could not be."""


class Estimate(Part):
    """A mean over fewer than `FEWEST_TEXTS` texts, which have no interval."""

    value: float
    n: int
    """Texts; those that answer one question, as its translations do, count once."""


TextMean = Interval | Estimate
"""A mean over the positions of texts; `n` counts the texts, those that answer one question once."""


class DriftGroup(Part):
    """Positions that have something in common."""

    name: str
    num_positions: int
    num_documents: int
    kl_mean: float
    """Lower bound."""
    kl_mean_interval: Interval | None
    """None: fewer than `FEWEST_TEXTS` texts."""
    kl_p99: float
    top1_agreement: float
    kl_unbiased_mean: TextMean | None = None
    """None: there is none (held-out text, structural tokens), or recorded before groups had one."""


class DriftSpan(DriftGroup):
    """Positions [first, last] of the text, prompt included."""

    first: int
    last: int


class TextKl(Part):
    """Sums over the finite positions of the texts that answer one question; what candidates are paired by."""

    item: str
    """Of the first of these texts."""
    kl: float
    unbiased: float


class Ranking(Part):
    """One candidate against the next: KL of the first over that of the second, paired by text."""

    first: str
    second: str
    ratio: Interval | None
    """None: too few texts, or the second loses too little to divide by."""
    is_ranked: bool
    """The interval excludes 1."""


class Drift(Part):
    """How far the candidate's next-token distributions are from the reference's, over one set of texts."""

    texts: TextSet | Literal["all"]
    num_documents: int
    num_positions: int
    non_finite_share: float
    """Of all positions; everything else is over the others."""
    kl_mean: TextMean
    kl_median: float
    kl_p90: float
    kl_p95: float
    kl_p99: float
    kl_p999: float
    kl_max: float
    kl_cvar95: float
    """Mean of the worst 5 % of positions. Neither it nor a quantile has an interval: of tens of texts none covers."""
    kl_unbiased_mean: TextMean | None
    """Unbiased estimate of the full-vocabulary mean KL over tokens. None: the text was not sampled from the reference."""
    kl_text_mean: TextMean | None = None
    """Of the same values, each text's mean first: every text counts alike, so that long ones do not hide short ones. None: as
    above, or recorded before this was."""
    tail_mass_mean: float
    """Probability the reference puts outside its top k: what the bound cannot see into."""
    tail_mass_p99: float
    top1_agreement: TextMean
    num_swaps: int
    """Positions where the two like another token best."""
    swap_margin_median: float | None
    """Of those, by how much the reference prefers its own: p(its first) - p(the candidate's first)."""
    swap_margin_max: float | None
    num_confident_swaps: int
    """Swaps with a margin above one half: the reference was sure."""
    probability_change_mean: TextMean
    """q(x) - p(x) of the token that stands there."""
    probability_change_rms: TextMean
    perplexity_ratio: TextMean
    """Of the text: candidate's over reference's. 1.02: two percent more surprised."""
    by_span: tuple[DriftSpan, ...]
    unreached_spans: tuple[str, ...]
    """Names of the spans that the suite asks for and no text reaches."""
    by_confidence: tuple[DriftGroup, ...]
    """By the probability of the reference's first choice."""
    by_domain: tuple[DriftGroup, ...]
    by_language: tuple[DriftGroup, ...]
    by_part: tuple[DriftGroup, ...]
    """Thinking and answer, where the server says how long the thinking was."""
    curve: tuple[DriftSpan, ...]
    """Finer spans, for the plot of drift against position."""
    kl_by_text: tuple[TextKl, ...] = ()
    """Empty: of a screening, or recorded before this was."""


class StopChance(Part):
    """Probability that a side gives to the tokens that end a reply, all of them together. One that a side does not list (it is
    outside its top k) counts as 0, so elsewhere these are lower bounds."""

    num_stops: int
    """Positions where the reference stopped, one for each reply that was not cut off."""
    reference_at_stops: float
    candidate_at_stops: float
    change_at_stops: TextMean | None
    """Candidate minus reference: below 0 the candidate goes on where the reference stopped. None: no reply ended."""
    reference_elsewhere: float
    """Mean per position."""
    candidate_elsewhere: float
    change_elsewhere: TextMean | None
    """Above 0 the candidate stops where the reference went on. None: there is no other position."""


class Structural(Part):
    """Positions of sampled texts where a structural token stands: one that the tokenizer adds to its vocabulary by name, such
    as <think>, </think>, tags of tool calls and ends of text and turn."""

    num_documents: int
    """Texts with at least one."""
    num_positions: int
    kl_mean: TextMean
    top1_agreement: TextMean
    groups: tuple[DriftGroup, ...]
    """Thinking, tools, end, other."""
    stop: StopChance


class Agreement(Part):
    """Exact mode beside the server's own log-probabilities of the same positions."""

    num_positions: int
    reference_mean_difference: float
    """Mean |ln p| difference of the token that stands there, nats."""
    reference_max_difference: float
    """Over tokens of a probability above 1 in 1,000."""
    candidate_mean_difference: float
    candidate_max_difference: float
    lumped_mean: TextMean
    """Of the server's log-probabilities, at these positions."""
    unbiased_minus_exact: TextMean | None
    """Per position, on sampled texts: an interval around 0 says that the estimate and the exact value agree. None: no such."""
    num_bound_violations: int
    """Positions where the lumped KL, a lower bound, exceeds the exact one by more than a thousandth and 1e-4 nats."""


class ExactDivergence(Part):
    """Full-vocabulary KL from hidden states (vLLM pooling) and each checkpoint's own output matrix."""

    drift: Drift
    """On sampled texts."""
    held_out: Drift | None = None
    agreement: Agreement
    """On all texts."""
    hidden_size: int
    vocabulary: int
    stored_dtype: str
    bytes_per_token: float
    """Of hidden states on disk."""
    seconds: float
    """Fetching the candidate's states and computing, without the start of its server."""
