"""The result of `assay inspect`: what a checkpoint is, and everything that is wrong with it."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Part, Record

Severity = Literal["fails", "wrong", "risk", "note"]
"""fails: vLLM does not load it, or refuses the requests it is for. wrong: it is served, and what comes out is not the model's,
or drafts are worthless. risk: vLLM's default serves it; another loader, version or setting does not, or something is lost.
note: about the checkpoint, not in it; alone it is no defect."""
MendBy = Literal["text", "tensors", "base", "requantize", "nothing"]
"""What mending takes. text: an edit of config.json, the index or another small file. tensors: some stored tensors are
written anew from what is there. base: tensors or files of the base model. requantize: quantizing anew. nothing: it cannot."""
Needs = Literal["headers", "scales", "weights", "source"]
"""What a check reads."""


class Place(Part):
    """Where something is wrong."""

    where: str
    """Tensor, module, file or config key."""
    what: str


class Finding(Part):
    """One defect of the table (docs/inspect.md), with the places where it was found."""

    defect: str
    severity: Severity
    places: tuple[Place, ...]
    """The first of them."""
    num_places: int
    served: str
    """What it does when the checkpoint is served."""
    mend_by: MendBy
    mend: str
    source: str
    """Public report of the same defect, or the rule that it breaks."""


class StoredForm(Part):
    """Weights of one role that are stored alike."""

    role: str
    form: str
    layers: str
    """`0-2, 7`; empty: outside the layers."""
    num_weights: int
    num_elements: int
    """Of the weights as they are multiplied, not of their codes."""
    num_bytes: int
    """With scales and zero points."""


class MtpFacts(Part):
    """declared: layers by config.json, None: it says nothing. stored: by the names of tensors, None: not known."""

    declared: int | None
    stored: int | None
    form: str | None


class CheckpointFacts(Part):
    """What a checkpoint is, by its headers and small files."""

    family: str | None
    """None: assay has no family for its architecture."""
    architecture: str | None
    model_type: str | None
    num_layers: int | None
    num_experts: int | None
    num_elements: int
    num_bytes: int
    bits_per_weight: float
    forms: tuple[StoredForm, ...]
    method: str | None
    """`quant_method` that the config claims; None: none."""
    producer: str | None
    """Tool and version, as the files claim."""
    activations: str | None
    kv_cache: str | None
    mtp: MtpFacts
    base_model: str | None
    licence: str | None


class Inspection(Record):
    """What a checkpoint is and what is wrong with it."""

    kind: Literal["inspection"] = "inspection"
    checkpoint: str
    revision: str | None
    """Commit on the hub."""
    source: str | None
    read: Needs
    """How far it was read."""
    facts: CheckpointFacts
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    """Defects that were looked for."""
    not_checked: tuple[str, ...]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found but notes."""
        return all(finding.severity == "note" for finding in self.findings)
