"""Predicted rows of a speed record: the share of the roofline that published servers reach. Never a measurement's rival.

The roofline bounds formats and does not order them: of GLM-5.2 on eight H200 it puts W4A16 1.8 times ahead of FP8 at 32
streams, where FP8 was measured 11 % ahead. So a prediction has a range of three times, and every row says what it assumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay_evaluate.roofline.devices import Device
from assay_evaluate.roofline.shares import ACCEPTED_SHARE, WRITING_SHARE
from assay_evaluate.roofline.steps import floor_s, step_of
from assay_evaluate.roofline.weights import StepWeights

SOURCE = "assay roofline"
SHARE = math.sqrt(WRITING_SHARE[0] * WRITING_SHARE[1])
"""Of the roofline: the middle of the range."""
SPREAD = math.sqrt(WRITING_SHARE[1] / WRITING_SHARE[0])
"""A predicted number may be wrong by this factor either way."""


def predicted_rows(
    checkpoint: str,
    scheme: str | None,
    weights: StepWeights,
    *,
    hardware: str,
    device: Device,
    num_gpus: int,
    tensor_parallel: int,
    speculation: Sequence[int],
    concurrency: Sequence[int],
    context: int = 0,
    kv_bytes_each: float = 0.0,
) -> Iterator[SpeedRow]:
    """One row for each number of drafted tokens (0: off) and of streams; one repeat, for there is nothing to repeat.

    context: tokens of each sequence, to which `kv_bytes_each` belongs.
    """
    for drafted in speculation:
        accepted = sum(ACCEPTED_SHARE) / 2
        length = 1 + accepted * drafted
        assumptions = [
            f"{SHARE:.2f} of the roofline, as published servers reach {WRITING_SHARE[0]:.2f} to {WRITING_SHARE[1]:.2f} of it",
            "every token is routed on its own and to every expert alike",
            f"KV cache of {context:,} tokens for each stream; prompts cost nothing",
        ]
        if drafted:
            assumptions.append(f"{accepted:.0%} of {drafted} drafted tokens are accepted")
        for users in concurrency:
            step = step_of(weights, users=users, drafted=drafted, kv_bytes_each=kv_bytes_each)
            step_s = floor_s(step.num_bytes, device, num_gpus) / SHARE
            tpot_s = step_s / length
            yield SpeedRow(
                checkpoint=checkpoint,
                scheme=scheme,
                origin="predicted",
                source=SOURCE,
                hardware=hardware,
                num_gpus=num_gpus,
                parallelism={"tensor": tensor_parallel},
                speculation=drafted,
                prompts=f"decoding at {context:,} tokens",
                prompt_tokens=float(context),
                concurrency=users,
                repeats=(
                    SpeedRepeat(
                        output_tokens_s=users / tpot_s,
                        tpot_s=Quantiles(mean=tpot_s, p50=tpot_s),
                        acceptance_length=length if drafted else None,
                    ),
                ),
                assumptions=tuple(assumptions),
            )
