"""The record of `assay recipe`: a scheme for every layer and role under a budget, why, and what uniform recipes do beside it.

Damages are in nats per token: mean KL from the unquantized model, as the sensitivity record has it of each part alone. That of
a mix is their sum, an assumption (`assumptions`) that `checks` holds against what was measured.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.records.base import Interval, Part, Record
from assay.records.plan import Role

KEPT = "bf16"
"""In place of a scheme: 16 bits."""


class MixedPart(Part):
    """What one role of one layer takes."""

    layer: int
    role: Role
    num_weights: int
    scheme: str
    """`bf16`: kept."""
    bytes: int
    damage_nats: float
    """As it was counted (`mixing/damage.py`); 0 for `bf16`."""
    measured_nats: float | None
    """As the sensitivity record has it. None: `bf16`, or nobody measured this part."""
    interval: Interval | None
    usual: str
    """The scheme that most layers of this role take; `bf16` only where all are kept."""
    usual_bytes: int | None
    usual_nats: float | None
    """What it would take and lose in that. None: it cannot take it, or nobody measured it; `why` says which."""
    why: str = ""


class MixPoint(Part):
    """One way to store the whole checkpoint."""

    name: str
    kind: Literal["mix", "uniform", "shipped"]
    """mix: chosen part by part. uniform: one scheme for every part that can take it. shipped: a precision of assay's."""
    bytes: int
    """Of all tensors of the checkpoint."""
    bits_per_weight: float
    """Of the weights that the choice is about."""
    damage_nats: float
    num_kept: int
    """Parts in 16 bits."""
    fits: bool
    """Whether it is within the limits of the hardware."""


class NotTaken(Part):
    """A scheme that parts cannot take, or parts that stay in 16 bits. layers: as recipes write them."""

    role: Role
    layers: str
    scheme: str
    why: str


class PredictedMeasured(Part):
    """The sum of the parts' damages beside what was measured with all of them at once."""

    name: str
    source: str
    """Who measured: `sensitivity` (the record's own texts), or the run's folder."""
    predicted_nats: float
    measured_nats: float
    interval: Interval | None = None
    on_other_texts: bool = Field(default=False, exclude_if=lambda others: not others)
    """On texts that no part was measured on, so that the choice was not made by them."""


class Advantage(Part):
    """What the best uniform recipe of at most the budget loses more than the mix: its sum of damages less the mix's."""

    uniform: str
    nats: float
    low_nats: float | None
    """Lower end of its interval (95 %). None: some damage has no interval."""


class Mix(Record):
    """A mix of schemes under limits, and the recipe that is proposed."""

    kind: Literal["mix"] = "mix"
    model: str
    source: str
    base: str
    """The precision that it extends: what is kept, and how scales are found."""
    name: str
    """Of the recipe that is proposed."""
    sensitivity_sha256: str
    calibrated_by: str | None = Field(default=None, exclude_if=lambda method: method is None)
    """The method that rounds INT4 weights, in the damages, the proposal and the controls alike. None: none does."""
    method: str
    """Who says the damages, as in the sensitivity record."""
    texts: str
    """On which they were measured: not to be used for judging the recipe."""
    texts_sha256: str
    num_texts: int
    budget: str
    """As it was asked for."""
    budget_bytes: int | None
    """Of all tensors of the checkpoint. None: the hardware alone is the limit."""
    hardware: str | None = None
    slack: float | None = Field(default=None, exclude_if=lambda slack: slack is None)
    """Share of the least damage that might be given up so that layers are alike. None: of a record from before it was kept."""
    users: int | None = None
    context: int | None = None
    rank_limit_bytes: int | None = None
    """Weights of one GPU, so that the KV cache of all users fits beside them."""
    num_weights: int
    """That the choice is about; bits per weight are of these."""
    other_bytes: int
    """Everything else: embeddings, head, norms, routers, biases, the MTP block."""
    proposes: Literal["mix", "uniform"]
    reason: str
    parts: tuple[MixedPart, ...]
    """Of what is proposed."""
    point: MixPoint
    """Of what is proposed."""
    optimum_nats: float
    """The least sum of damages within the limits; `point` may lose a little more, so that layers are alike."""
    bound_nats: float
    """The solver's proof: nothing within the limits loses less."""
    advantage: Advantage | None
    """None: no uniform recipe is within the limits."""
    frontier: tuple[MixPoint, ...]
    """Optima for other budgets, by bytes."""
    controls: tuple[MixPoint, ...]
    """Uniform recipes and shipped ones, by bytes."""
    not_taken: tuple[NotTaken, ...]
    checks: tuple[PredictedMeasured, ...]
    replayed: str
    """What vLLM's own loaders said of it, or why they were not asked."""
    assumptions: tuple[str, ...]
