"""Rows of speed and the roofline: rows that are predicted from it, and measured ones beside it. A prediction is never a
measurement's rival.

The roofline bounds formats and does not order them: of GLM-5.2 on eight H200 it puts W4A16 1.8 times ahead of FP8 at 32
streams, where FP8 was measured 11 % ahead. So a prediction has a range of three times, and every row says what it assumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from assay.records.speed import Quantiles, SpeedRepeat, SpeedRow
from assay_evaluate.roofline.devices import Device, device_named
from assay_evaluate.roofline.weights import StepWeights, floor_s, step_of

Range = tuple[float, float]
"""From the least to the most."""

WRITING_SHARE: Range = (0.10, 0.30)
"""Of the roofline. GLM-5.2 on eight H200, five drafted tokens of which 28 % are accepted, wrote 94 to 126 tokens a second alone
and 828 to 925 with 32 requests, as FP8, W4A16 and NVFP4: shares of 0.11 to 0.23
(https://huggingface.co/canada-quant/GLM-5.2-W4A16-MTP)."""
ACCEPTED_SHARE: Range = (0.28, 0.52)
"""Of drafted tokens. GLM-5.2: 28 % of them on random prompts, 46 to 52 % on natural text (the same card)."""


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
            assumptions.append(f"{accepted:.0%} of the drafted tokens are accepted, {drafted} at a time")
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


FAR = 0.05
"""Share of the roofline under which a row is flagged. GLM-5.2 on eight H200 reached 0.11 to 0.23 with drafts, and NVFP4 without
any 0.08 alone."""
Flag = Literal["faster than memory allows", "far from the roofline"]


@dataclass(frozen=True)
class RooflineComparison:
    """share: of the output tokens a second that the roofline allows. acceptance: every draft where the row does not say."""

    floor_tpot_s: float
    share: float
    acceptance: float
    flag: Flag | None

    @property
    def words(self) -> str | None:
        """What is wrong with the row, in a clause; None: nothing is."""
        if self.flag is None:
            return None
        what = "the number, the bytes or the GPU is wrong" if self.share > 1 else "something else than memory held it up"
        return f"{self.share:.3g} of the roofline, {self.flag}: {what}"


def compare_with_roofline(row: SpeedRow, weights: StepWeights) -> RooflineComparison | None:
    """None: a CPU, a GPU that is not in the table, or nobody says how many tokens were drafted."""
    device = device_named(row.hardware)
    if device is None or not row.num_gpus or row.speculation is None:
        return None
    step = step_of(weights, users=row.concurrency, drafted=row.speculation)
    lengths = [repeat.acceptance_length for repeat in row.repeats if repeat.acceptance_length is not None]
    acceptance = fmean(lengths) if lengths else 1.0 + row.speculation
    step_s = floor_s(step.num_bytes, device, row.num_gpus)
    share = row.tokens_s * step_s / (row.concurrency * acceptance)
    flag: Flag | None = None
    if share > 1:
        flag = "faster than memory allows"
    elif share < FAR:
        flag = "far from the roofline"
    return RooflineComparison(step_s / acceptance, share, acceptance, flag)
