"""`blame.json`: which part of a candidate its divergence comes from, and the cheapest change that brings it within the limit.

Each cause is switched between the candidate and the reference in teacher-forced passes over the same texts; what a server adds
(kernels, backends, engine) is in none of them.
"""

from __future__ import annotations

from typing import Literal

from assay.records.base import Interval, Part, Record
from assay.records.screening import Numerics, Panel, Surprise
from assay.records.verdict import Overall

BLAME_RECORD = "blame.json"
BLAME = "blame"
"""Folder of a run for records of its candidates."""
CauseKind = Literal["weights", "activations", "kv_cache", "config"]
BlameWord = Literal["nothing to blame", "blamed", "undecided"]
"""nothing to blame: the divergence surely is within the limit. blamed: it surely exceeds it, and a share is surely above 0.
undecided: neither; or the texts are foreign to the reference, whose limit is for text as it writes; or it is within, and the
run failed the candidate all the same."""


class Cause(Part):
    """name: a role of weights, or the kind itself; unique. what: in words. share: of the KL of all causes together, over texts;
    interactions are shared equally between their two. None: the KL of all together may be 0. alone: KL where only this is the
    candidate's; None: not measured."""

    kind: CauseKind
    name: str
    what: str
    share: Interval | None
    alone: float | None = None


class Interaction(Part):
    """What two causes do together beyond what each does alone, as a share of the whole; below 0: they cancel."""

    first: str
    second: str
    share: Interval


class LayerRange(Part):
    """Where the weights of a cause lose most. share: of what they lose alone, by the halves that were tried."""

    cause: str
    first_layer: int
    last_layer: int
    share: float


class Change(Part):
    """What has to be the reference's for the rest to be within the limit, measured.

    restored: in words. kl: with the change. added_bytes: of weights, which take weights_bytes with it. read_ratio: bytes of
    weights that a token reads, over those without it: what decoding slows down by where reading weights bounds it. recipe: file
    of a precision recipe with the change. variant: what says so while serving.
    """

    restored: tuple[str, ...]
    kl: Interval
    is_within: bool
    added_bytes: int
    weights_bytes: int
    read_ratio: float
    recipe: str | None = None
    variant: str | None = None


class Served(Part):
    """KL between the two as they were served in the run, against the same computed here."""

    kl: Interval
    is_more: bool
    """It surely is more than the passes here account for: serving adds to it."""


class ServingCause(Part):
    """The candidate's checkpoint served another way, on the replies that it lost. share: of these, how many more are right so
    than as it was served; num_again of them were right when it was asked again as it was."""

    label: str
    what: str
    num_lost: int
    num_recovered: int
    num_again: int
    share: Interval


class Blame(Record):
    """What `assay blame` found of one candidate."""

    kind: Literal["blame"] = "blame"
    reference: str
    candidate: str
    reference_sha256: str
    candidate_sha256: str
    numerics: Numerics
    panel: Panel
    surprise: Surprise
    kl: Interval
    limit: float
    limit_for: str
    word: BlameWord
    causes: tuple[Cause, ...] = ()
    """Largest share first."""
    interactions: tuple[Interaction, ...] = ()
    unexplained: float | None = None
    """Share of the KL of all together that causes and pairs of them do not add up to."""
    layers: tuple[LayerRange, ...] = ()
    change: Change | None = None
    """The cheapest that is within the limit; else, of those tried, the one with the least KL. None: none was tried."""
    served: Served | None = None
    """None: not of a run, or its divergence was not measured."""
    run_status: Overall | None = None
    """What the run says of the candidate. None: not of a run, or it was not judged."""
    run_reason: str = ""
    """With the numbers, as `GateReport.reasons` has it."""
    serving: tuple[ServingCause, ...] = ()
    """Of the variants that were named, largest share first."""
    num_passes: int
    seconds: float
