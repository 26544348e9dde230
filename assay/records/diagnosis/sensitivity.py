"""The record of `assay sensitivity`: what it costs, in divergence and in bytes, to quantize one part of a model.

A part is one role of one layer; in it every weight takes the same scheme, since vLLM loads the experts of a layer, and the
members of a fused projection, with one. All divergences are in nats per token, over the same positions of the same texts.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from assay.records.base import Interval, Part, Record, sha256_of
from assay.records.plan import Role

SENSITIVITY_NAME = "sensitivity.json"
"""Its file in a run's folder."""

KindOfPosition = Literal["domain", "language", "structural", "part", "context"]
"""What positions have in common: the text's domain or language; a structural token (<think>, tags of tools, ends) stands there;
thinking or answer; the tokens before it (`context`)."""


class WorstTensor(Part):
    """One weight and its share of the part's squared rounding error, 0 to 1."""

    name: str
    share: float


class KindDamage(Part):
    """Mean KL over some of the positions, with only this part quantized."""

    kind: KindOfPosition
    name: str
    num_positions: int
    damage_nats: float


class LayerRouting(Part):
    """One router: share of tokens whose set of chosen experts is not the unquantized model's."""

    layer: int
    other_experts: float


class SensitivityPart(Part):
    """One role of one layer in one scheme, everything else unquantized.

    `damage_nats`: mean KL(unquantized || this part quantized) per token; where the method is an estimate, its estimate of that.
    0 for `bf16`. Of role `mtp` it is None: drafts are only proposals, so the served distribution stays; see `mtp_acceptance`.
    """

    layer: int | None
    """Counted from 0. None: outside layers, and the MTP block, all of whose weights are one part."""
    role: Role
    scheme: str
    """A scheme of precision recipes, or `bf16`: kept."""
    num_weights: int
    bytes: int
    """Of all the part's tensors as this scheme stores them, scales and plain tensors of the role included: the plan's."""
    damage_nats: float | None
    interval: Interval | None = None
    """Of the mean, over whole texts. None: an estimate without texts, or fewer than 20."""
    served_nats: Interval | None = None
    """The same, measured by serving the mix, as a lower bound (ids outside the top 64 are one). None: not served."""
    worst: tuple[WorstTensor, ...] = ()
    by_kind: tuple[KindDamage, ...] = ()
    routing: LayerRouting | None = None
    """The router that this part disturbs most. None: no router was looked at."""


class LeftOut(Part):
    """A part that a scheme cannot hold, or that was not measured in it."""

    layer: int | None
    role: Role
    scheme: str
    why: str


class UniformDamage(Part):
    """Every part that takes the scheme quantized at once: what the parts' damages add up to, beside what it is."""

    scheme: str
    bytes: int
    """Of the whole checkpoint."""
    damage_nats: float
    interval: Interval | None = None
    sum_of_parts_nats: float
    routing: tuple[LayerRouting, ...] = ()


class WholeDamage(Part):
    """A mix of schemes with all its parts quantized at once."""

    schemes: tuple[tuple[int, Role, str], ...]
    """layer, role, scheme; parts that are not here are kept."""
    damage_nats: float
    interval: Interval | None = None
    sum_of_parts_nats: float

    @model_validator(mode="after")
    def _each_part_once(self) -> Self:
        keys = [(layer, role) for layer, role, _ in self.schemes]
        if twice := [key for key in set(keys) if keys.count(key) > 1]:
            raise ValueError(f"schemes: {twice[0]} is there twice")
        return self


class RankCorrelation(Part):
    """Spearman's rank correlation of two ways to say how sensitive parts are; the interval is over parts, each with
    all its schemes."""

    of: str
    """`proxy:NAME`."""
    beside: str
    """`served`, or a `proxy:` that it is compared with."""
    spearman: Interval | None
    """`n`: parts in both. None: fewer than 4, or one side is constant."""
    parts: tuple[tuple[int | None, Role, str, float, float], ...] = ()
    """layer, role, scheme, then the two figures."""
    why_not: str | None = None


class MtpAcceptance(Part):
    """How drafts fare with the MTP block in one precision, from a run's measurements."""

    label: str
    scheme: str
    """`bf16`: the block is kept."""
    accepted_share: float
    num_drafted: int
    bytes: int | None = None


class Sensitivity(Record):
    """What `assay sensitivity` found: one row for each part and scheme, `bf16` (kept, damage 0) among them.

    `parts` and `other_bytes` together are the whole checkpoint: take one scheme of each (layer, role) and add.
    """

    kind: Literal["sensitivity"] = "sensitivity"
    model: str
    family: str
    source: str
    source_sha256: str
    """As a plan's: names, dtypes, shapes and shards."""
    source_revision: str | None = None
    data_sha256: str
    """Of what identifies the data of every file of the source (`Plan.source_files`)."""
    weights_sha256: str | None = None
    """Which weights these are (`checkpoint/identity/weights.py`). None: a record from before it, or a source on the hub."""
    method: str
    """Of `damage_nats`: `proxy:NAME`."""
    in_nats: bool = True
    """False: `damage_nats` are figures of another kind (a relative error): only their order counts."""
    observer: Literal["minmax", "mse"] = "minmax"
    calibration: dict[str, str | int | float] | None = Field(default=None, exclude_if=lambda options: options is None)
    """How INT4 weights were calibrated, as precision recipes say it. None: all schemes are computed from the weights alone."""
    texts: str
    """Which texts, in words; empty where none were read."""
    texts_sha256: str
    num_texts: int
    num_texts_of_wholes: int | None = Field(default=None, exclude_if=lambda number: number is None)
    """Of these so many are apart: `uniform` and `wholes` are over them, `parts` over the others. None: both are over all."""
    num_tokens: int
    """Positions of all texts."""
    seed: str
    layers: int
    """Decoder layers of the model, the MTP block not counted."""
    weights: int
    """Of the whole checkpoint, MTP included."""
    other_bytes: int
    """Tensors that belong to no part: norms, routers, embeddings, everything no scheme takes."""
    parts: tuple[SensitivityPart, ...]
    left_out: tuple[LeftOut, ...] = ()
    uniform: tuple[UniformDamage, ...] = ()
    wholes: tuple[WholeDamage, ...] = Field(default=(), exclude_if=lambda wholes: not wholes)
    """Mixes that were measured as a whole."""
    noise_nats: float | None = None
    """KL of the unquantized model against itself, computed in the same way."""
    correlations: tuple[RankCorrelation, ...] = ()
    mtp_acceptance: tuple[MtpAcceptance, ...] = ()
    not_measured: dict[str, str] = Field(default_factory=dict)
    """What could have been said and was not -> why."""
    cpu_seconds: float

    @model_validator(mode="after")
    def _each_part_once(self) -> Self:
        keys = [(part.layer, part.role, part.scheme) for part in self.parts]
        if twice := [key for key in set(keys) if keys.count(key) > 1]:
            raise ValueError(f"parts: {twice[0]} is there twice")
        mixes = [frozenset(whole.schemes) for whole in self.wholes]
        if len(set(mixes)) < len(mixes):
            raise ValueError("wholes: a mix is there twice")
        if self.calibration is not None and "method" not in self.calibration:
            raise ValueError("calibration: names no method")
        return self

    @property
    def sha256(self) -> str:
        """Of what was measured of parts: the mixes that were measured as a whole since are left out."""
        return sha256_of(self.model_copy(update={"wholes": ()}).model_dump(mode="json"))

    @property
    def by_part(self) -> dict[tuple[int | None, Role], dict[str, SensitivityPart]]:
        """(layer, role) -> scheme -> row, in the order of `parts`."""
        by_scheme: dict[tuple[int | None, Role], dict[str, SensitivityPart]] = {}
        for part in self.parts:
            by_scheme.setdefault((part.layer, part.role), {})[part.scheme] = part
        return by_scheme
