"""Bytes that one step of decoding reads, and the least time per output token that follows from them.

A step of the target reads all weights that its tokens touch, once, and the KV cache of every sequence. With k drafted tokens a
sequence brings k + 1 tokens into the step (so more experts are touched), and the draft's weights are read k times before it.
No server is faster than this; launches, all-reduces and arithmetic make every real one slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from assay_evaluate.roofline.devices import Device
from assay_evaluate.roofline.weights import Coverage, StepWeights


@dataclass(frozen=True)
class Step:
    """Bytes that all GPUs together read in one step. target: weights of the model itself; draft: of k steps of its MTP block.

    tokens: in the target's step. experts_share: of a layer's experts, touched.
    """

    target_bytes: float
    draft_bytes: float
    kv_bytes: float
    tokens: int
    experts_share: float

    @property
    def num_bytes(self) -> float:
        return self.target_bytes + self.draft_bytes + self.kv_bytes


def step_of(
    weights: StepWeights, *, users: int, drafted: int = 0, kv_bytes_each: float = 0.0, coverage: Coverage | None = None
) -> Step:
    """users: sequences in flight. drafted: tokens for each; 0: no speculation. kv_bytes_each: read of one sequence's cache.

    The draft's own KV cache is one layer's and left out where `kv_bytes_each` leaves it out.
    """
    tokens = users * (1 + drafted)
    draft = 0.0 if weights.draft is None else drafted * weights.draft.touched_bytes(users)
    return Step(
        target_bytes=weights.target.touched_bytes(tokens, coverage),
        draft_bytes=draft,
        kv_bytes=users * kv_bytes_each,
        tokens=tokens,
        experts_share=weights.target.touched_share(tokens, coverage),
    )


def floor_s(num_bytes: float, device: Device, num_gpus: int) -> float:
    """Least seconds in which the GPUs read so much, each its part."""
    return num_bytes / (device.bytes_s * num_gpus)


def tpot_floor_s(step: Step, device: Device, num_gpus: int, acceptance_length: float = 1.0) -> float:
    """Least seconds for an output token of one sequence. acceptance_length: tokens that a step yields, 1 without drafts."""
    return floor_s(step.num_bytes, device, num_gpus) / acceptance_length
