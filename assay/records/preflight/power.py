"""What `assay power` foretells of a suite under its gates: chances of the verdicts on candidates whose true loss is known; and
of a screening: what more tokens would show."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.records.base import Interval, Part, Record
from assay.records.divergence import TextMean


class GatePower(Part):
    """One score gate. Chances are shares from 0 to 1; what is neither PASS nor FAIL is UNDERPOWERED."""

    task: str
    required: bool
    max_drop: float
    claim: Literal["non_inferior", "equivalent"]
    num_items: int
    """At the last look."""
    num_replies: tuple[int, int]
    """To each item, of the reference and of the candidate, at the last look."""
    num_looks: int
    num_clusters: int | None
    """None: every item stands for itself."""
    discordance: float
    """Share of pairs of replies, one of each side, of which one is right and one wrong, if nothing is lost."""
    reply_noise: float
    """Share of the discordance that other replies would not show again."""
    assumed_from: str
    """`assumed`: the table of tasks; `given`: the command line; else the run it was measured in."""
    lossless_passes: float
    at_margin_passes: float
    """Of this gate, on a candidate that loses the margin on this task and nothing else."""
    at_margin_fails: float
    at_twice_passes: float
    """On one that loses twice the margin."""
    at_twice_fails: float
    at_twice_candidate_passes: float
    """By all gates together: what the claim about the whole lets through."""
    mean_candidate_replies: float
    """To all items together, of a candidate that loses nothing."""
    at_margin_candidate_passes: float | None = None
    """By all gates together, of a candidate that loses this margin and nothing else: what the claim about the whole lets
    through. None: recorded before this was."""


class NeededFor(Part):
    """So that a candidate with this true loss is PASS 4 times in 5. None: no number up to a million items, or a hundred
    replies, would do; of replies also where greedy ones are all alike."""

    task: str
    loss: float
    """0, or the largest that was seen of a candidate of the run that was named."""
    items: int | None
    """For this gate, with as many replies to each as the suite asks at most."""
    replies: int | None
    """For this gate: to each of the suite's items, of reference and candidate each."""
    items_together: int | None
    """So that all gates are PASS 4 times in 5, each as likely as the others, by itself."""
    replies_together: int | None


class TogetherPower(Part):
    """The overall verdict over some of the score gates and the claim about the whole, if the gates have one."""

    num_gates: int
    whole: bool
    """The claim about the whole counts: tasks undecided alone do not stand against a PASS."""
    lossless_passes: float
    lossless_fails: float
    lossless_passes_range: tuple[float, float]
    """If two runs of one model differ on half as many items more, or a third fewer, than assumed."""
    at_margin_passes: float
    """Of a candidate that loses every margin."""
    at_margin_fails: float
    at_twice_passes: float
    at_twice_fails: float
    lasting_passes: dict[str, float] = Field(default_factory=dict)
    """Share of the discordance that is lasting (`0.5`) -> chance of a checkpoint that loses nothing on balance and changes for
    good which items are right. Empty: a share of noise was given, or recorded before this was."""
    cut_passes: float | None = None
    """Of an identical copy where 1 % of the replies of both sides are cut off: each counts against it. None: recorded before
    this was."""


class CheckpointCost(Part):
    """What is asked of one checkpoint; of a candidate that loses nothing, further rounds included. hours: (least, most)."""

    label: str
    num_requests: int
    prompt_tokens: int
    output_tokens: tuple[int, int]
    hours: tuple[float, float] | None
    gpu_hours: tuple[float, float] | None


class PowerReport(Record):
    """The power of a suite. Part of no verdict."""

    kind: Literal["power"] = "power"
    suite: str
    gate_recipe: str
    model: str | None
    profile: str | None
    level: float
    num_draws: int
    seed: int
    gates: tuple[GatePower, ...]
    together: TogetherPower
    required_only: TogetherPower | None
    """By the required gates alone: the reference cannot do the tasks of the others. None: all are required."""
    needed: tuple[NeededFor, ...]
    """Of every gate without any loss, then of each loss that was seen and is one."""
    unknown: tuple[str, ...]
    """GatedTask tasks that are in no chance, for how many items they have is not known before the run."""
    taken_to_pass: tuple[str, ...]
    """Kinds of the other gates."""
    costs: tuple[CheckpointCost, ...]
    """The reference first, with its repeat and the texts it writes."""
    no_gpu_hours: str | None
    """Why there are none, and what would give them."""
    would_raise: str | None
    """Until a lossless candidate passes with 80 %. None: it does."""
    notes: tuple[str, ...]
    seconds: float


# ------------------------------------------------------------------------------------------------ of a screening
class HalfWidth(Part):
    """Of the interval of a KL over so many scored tokens. share: of the KL; None: it is 0."""

    num_tokens: int
    nats: float
    share: float | None


class ScreenedPower(Part):
    """One candidate of a screening. kl: what was seen. limit: nats."""

    label: str
    kl: TextMean
    limit: float
    tokens_needed: int | None
    """Scored tokens that would decide at the limit, if the KL seen is the true one; those that were screened, if they do. None:
    no number would, or there is no interval."""
    half_widths: tuple[HalfWidth, ...]
    """Empty: fewer than 20 texts have no interval."""


class RankingPower(Part):
    """One candidate against the next. ratio: of their KL, as seen. tokens_needed: as of a candidate, so that they are told
    apart."""

    first: str
    second: str
    ratio: Interval | None
    tokens_needed: int | None


class ScreeningPower(Record):
    """Of a screening as that which was recorded, over more texts like its own. Part of no verdict."""

    kind: Literal["screening_power"] = "screening_power"
    reference: str
    num_texts: int
    num_tokens: int
    """That were screened."""
    is_foreign: bool
    """The texts are foreign to the reference: no number of them fails a candidate."""
    candidates: tuple[ScreenedPower, ...]
    rankings: tuple[RankingPower, ...]
