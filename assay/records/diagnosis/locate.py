"""Records of `assay diagnose locate`: where two servers, two precisions, or the ranks of one server part."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Part, Record

SidePair = tuple[float, float]
"""The same figure on side A and on side B."""


class PointDifference(Part):
    """One place of the model on one rank: what it put out on both sides, over the same tokens.

    Distances are relative, from sketches: ||a - b|| / max(||a||, ||b||) over all tokens; 0 is equal, 1.4 unrelated.
    """

    name: str
    """vLLM's module name; `NAME.sum` after the ranks are summed, `NAME.residual` the residual stream after a norm's input is
    added, `NAME.router` the experts chosen, `NAME.7` expert 7 alone."""
    kind: str
    layer: int | None
    expert: int | None
    role: str | None
    rank: int
    partial: bool
    """True: the rank's own share, before ranks are summed."""
    distance: float | None
    """None: nothing comparable (router; no token in common)."""
    added: float | None
    """What the module adds to the distance of its inputs: sqrt(distance^2 - that of the inputs^2). None: inputs not known."""
    noise: float
    """Distance of side A to itself, asked again."""
    max_abs: SidePair
    mean: SidePair
    rms: SidePair
    non_finite: tuple[int, int]
    agreement: float | None = None
    """Of a router: share of tokens for which both sides chose the same experts."""


class Parting(Part):
    """A place where the sides part."""

    name: str
    layer: int | None
    expert: int | None
    role: str | None
    rank: int | None
    """None: every rank."""
    why: str


class Remedy(Part):
    """What to try, in a recipe's terms."""

    role: str
    keep: Literal["bf16", "fp32"]
    sentence: str
    recipe: str | None = None
    """YAML of the changed precision recipe: `assay quantize -p FILE`, then `assay diagnose locate`. None: no recipe given."""


class LocateReport(Record):
    """What `assay diagnose locate` found."""

    kind: Literal["location"] = "location"
    how: Literal["servers", "ranks"]
    a: str
    b: str | None
    """None: the ranks of A."""
    tensor_parallel_size: int
    num_prompts: int
    num_tokens: int
    first: Parting | None
    """The first place, in order of execution, that differs by more than noise. None: nowhere."""
    outlier: Parting | None
    """The place that adds far more to the distance than its like elsewhere: where to look when every layer differs a little."""
    remedy: Remedy | None
    sentence: str
    points: tuple[PointDifference, ...]
    not_compared: tuple[str, ...]
    """What was there on one side only, or could not be compared, and why."""
    seconds: float
