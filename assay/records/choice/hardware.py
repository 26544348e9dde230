"""`assay plan MODEL --profile P`: every precision of a model on one machine: memory, kernels, bytes of a step, floors."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Part, Record


class StepRead(Part):
    """One step of decoding with all users in flight, all GPUs together. drafted: tokens for each user; 0: no speculation."""

    drafted: int
    tokens: int
    """In the target's step."""
    experts_touched: float | None
    """Of a layer, uniform routing. None: no experts."""
    target_bytes: float
    draft_bytes: float
    kv_bytes: float
    acceptance_length: float
    """Assumed: tokens that a step yields."""
    floor_tpot_s: float | None
    """Least seconds per output token of one user. None: the GPU's bandwidth is not known."""


class PrecisionOnHardware(Part):
    """One precision. Bytes are of the fullest GPU. problem: why it cannot be planned, split or held; None: nothing is wrong."""

    precision: str
    experts: str | None
    """Scheme of the routed experts. None: as in the source, unquantized."""
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    """KV cache of all users at the whole context."""
    free_bytes: int | None = None
    """For the KV cache, after weights and workspace."""
    users_that_fit: int | None = None
    fits: bool = False
    native: bool | None = None
    """None: GPU or scheme is not in the table of kernels."""
    runs_as: str | None = None
    """What is computed: the format, or another one. Empty: the kernel refuses the GPU."""
    kernels: tuple[str, ...] = ()
    steps: tuple[StepRead, ...] = ()
    """Without speculation, then with it where the model drafts."""
    problem: str | None = None


class HardwarePlan(Record):
    """All precisions of a model on one machine. Arithmetic over names and shapes; nothing was measured."""

    kind: Literal["hardware_plan"] = "hardware_plan"
    model: str
    source: str
    profile: str
    gpu: str
    num_gpus: int
    usable_bytes: int
    """Of each GPU."""
    workspace_bytes: int
    kv_dtype: str
    users: int
    context: int
    """Tokens of each user's sequence, prompt and reply together."""
    rows: tuple[PrecisionOnHardware, ...]
    assumptions: tuple[str, ...]
