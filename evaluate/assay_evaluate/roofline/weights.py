"""What a checkpoint makes a server read in one step of decoding, and the least time per output token that follows from it.

A step of the target reads all weights that its tokens touch, once, and the KV cache of every sequence. With k drafted tokens a
sequence brings k + 1 tokens into the step (so more experts are touched), and the draft's weights are read k times before it.
No server is faster than this; launches, all-reduces and arithmetic make every real one slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.errors import PlanError
from assay.recipes.families import num_experts
from assay.recipes.family_names import form_of
from assay.recipes.text_config import size_of, text_of
from assay_evaluate.roofline.devices import Device


@dataclass(frozen=True)
class ServedWeights:
    """What a checkpoint makes a server read and compute.

    shared_bytes: of what every token reads (all but experts and embeddings). expert_bytes: of all routed experts.
    active_params: weights that one token multiplies with. num_experts, experts_per_token: 0 without experts.
    """

    shared_bytes: int
    expert_bytes: int
    active_params: int
    num_experts: int
    experts_per_token: int

    @property
    def num_bytes(self) -> int:
        return self.shared_bytes + self.expert_bytes

    def touched_bytes(self, tokens: int) -> float:
        """Read in a step of so many tokens, each routed on its own and to every expert alike."""
        return self.shared_bytes + self.expert_bytes * self.touched_share(tokens)

    def touched_share(self, tokens: int) -> float:
        """Share of a layer's experts that a step reads. Real routing is correlated and uses fewer."""
        return 1 - (1 - self.experts_per_token / self.num_experts) ** tokens if self.num_experts else 1.0


def served_weights(
    family: str,
    config: Mapping[str, Any],
    weights: Iterable[tuple[str, tuple[int, ...], int]],
    *,
    bytes_each: float | None = None,
) -> ServedWeights:
    """Of a checkpoint's weights: (name, shape unpacked, bytes with scales). bytes_each: each weight is held so instead."""
    shared = experts = shared_params = expert_params = 0
    for name, shape, num_bytes in weights:
        part, count = form_of(family, name, config).part, math.prod(shape)
        held = num_bytes if bytes_each is None else int(count * bytes_each)
        if part == "routed_expert":
            experts, expert_params = experts + held, expert_params + count
        elif part != "embedding":  # one row a token
            shared, shared_params = shared + held, shared_params + count
    each = size_of(text_of(config), "num_experts_per_tok", 0)
    number = num_experts(family, config) if each else 0  # a router of another kind: every expert is taken to be used
    if number and each > number:
        raise PlanError(f"config.json: num_experts_per_tok is {each:,}, and a layer has {number} experts; correct the config")
    active = expert_params * each // number if number else expert_params
    return ServedWeights(shared, experts, shared_params + active, number, each)


@dataclass(frozen=True)
class StepWeights:
    """What the two models of a server read. draft: the MTP block and the output head that it shares; None: there is none."""

    target: ServedWeights
    draft: ServedWeights | None = None


Weights = Iterable[tuple[str, tuple[int, ...], int]]
"""(name, shape unpacked, bytes with scales)."""


def step_weights(family: str, config: Mapping[str, Any], target: Weights, draft: Weights) -> StepWeights:
    """draft: what is served of the MTP block. It predicts through the target's head where it has none of its own."""
    of_target, of_draft = list(target), list(draft)
    read_by_target = served_weights(family, config, of_target)
    if not of_draft:
        return StepWeights(read_by_target)
    heads = [
        [weight for weight in weights if form_of(family, weight[0], config).part == "lm_head"]
        for weights in (of_target, of_draft)
    ]
    shared_head = [] if heads[1] else heads[0]
    return StepWeights(read_by_target, served_weights(family, config, [*of_draft, *shared_head]))


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


def step_of(weights: StepWeights, *, users: int, drafted: int = 0, kv_bytes_each: float = 0.0) -> Step:
    """users: sequences in flight. drafted: tokens for each; 0: no speculation. kv_bytes_each: read of one sequence's cache.

    The draft's own KV cache is one layer's and left out where `kv_bytes_each` leaves it out.
    """
    tokens = users * (1 + drafted)
    draft = 0.0 if weights.draft is None else drafted * weights.draft.touched_bytes(users)
    return Step(
        target_bytes=weights.target.touched_bytes(tokens),
        draft_bytes=draft,
        kv_bytes=users * kv_bytes_each,
        tokens=tokens,
        experts_share=weights.target.touched_share(tokens),
    )


def floor_s(num_bytes: float, device: Device, num_gpus: int) -> float:
    """Least seconds in which the GPUs read so much, each its part."""
    return num_bytes / (device.bytes_s * num_gpus)


def tpot_floor_s(step: Step, device: Device, num_gpus: int, acceptance_length: float = 1.0) -> float:
    """Least seconds for an output token of one sequence. acceptance_length: tokens that a step yields, 1 without drafts."""
    return floor_s(step.num_bytes, device, num_gpus) / acceptance_length
