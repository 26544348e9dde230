"""How drafts fare with the MTP block in each precision, from what a run has measured.

Precisions differ in more than their MTP block, so a share says how a whole checkpoint drafts for itself; two precisions that
differ in the block alone, as w4a16 and w4a16-mtp do, tell what the block's own costs.
"""

from __future__ import annotations

from pathlib import Path

from assay.records.diagnosis.sensitivity import MtpAcceptance
from assay.records.measurement import Measurement
from assay.records.plan import Plan


def mtp_acceptance(run_dir: Path) -> tuple[MtpAcceptance, ...]:
    """Of every measured precision that has a plan and drafted; by label."""
    acceptances = []
    for path in sorted((run_dir / "measurements").glob("*.json"), key=lambda path: path.stem):
        measured = Measurement.load(path)
        plan = Plan.load_if_there(run_dir / measured.label / "plan.json")
        drafts = measured.acceptance
        if plan is None or measured.is_noise_floor or drafts is None or not drafts.num_draft_tokens:
            continue
        drafting = [tensor for tensor in plan.tensors if tensor.role == "mtp" and tensor.action != "drop"]
        schemes = {tensor.scheme for tensor in drafting} - {None}
        acceptances.append(
            MtpAcceptance(
                label=measured.label,
                scheme=", ".join(sorted(filter(None, schemes))) or "bf16",
                accepted_share=drafts.num_accepted_tokens / drafts.num_draft_tokens,
                num_drafted=drafts.num_draft_tokens,
                bytes=sum(output.num_bytes for tensor in drafting for output in tensor.outputs),
            )
        )
    return tuple(acceptances)
