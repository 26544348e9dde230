"""A measured row beside its roofline: impossible above it, suspect far below."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from assay.records.speed import SpeedRow
from assay_evaluate.roofline.devices import device_named
from assay_evaluate.roofline.steps import floor_s, step_of
from assay_evaluate.roofline.weights import StepWeights

FAR = 0.05
"""Share of the roofline under which a row is flagged. GLM-5.2 on eight H200 reached 0.11 to 0.23 with drafts, and NVFP4 without
any 0.08 alone."""
Flag = Literal["faster than memory allows", "far from the roofline"]


@dataclass(frozen=True)
class Beside:
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


def beside(row: SpeedRow, weights: StepWeights, kv_bytes_each: float = 0.0) -> Beside | None:
    """None: a CPU, a GPU that is not in the table, or nobody says how many tokens were drafted."""
    device = device_named(row.hardware)
    if device is None or not row.num_gpus or row.speculation is None:
        return None
    step = step_of(weights, users=row.concurrency, drafted=row.speculation, kv_bytes_each=kv_bytes_each)
    told = [one.acceptance_length for one in row.repeats if one.acceptance_length is not None]
    acceptance = fmean(told) if told else 1.0 + row.speculation
    step_s = floor_s(step.num_bytes, device, row.num_gpus)
    share = row.tokens_s * step_s / (row.concurrency * acceptance)
    flag: Flag | None = None
    if share > 1:
        flag = "faster than memory allows"
    elif share < FAR:
        flag = "far from the roofline"
    return Beside(step_s / acceptance, share, acceptance, flag)
