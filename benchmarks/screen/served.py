"""KL of a run's candidates by screening, beside what was measured of them served, over the very same tokens.

    python benchmarks/screen/served.py RUN REFERENCE_LABEL

Served KL is known between two figures: with the reference's top k alone it is a lower bound, and with the sampled correction
unbiased, with an interval. A screening sees the whole vocabulary and no kernels.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from assay.records.base import Interval
from assay.records.measurement import Measurement
from assay_pipeline.comparison.screening import screen
from assay_reports.screening import nats, plain_nats


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("run", type=Path)
    arguments.add_argument("reference")
    options = arguments.parse_args()
    folders = {
        path.parent.name: path for path in sorted(options.run.glob("*/checkpoint")) if path.parent.name != options.reference
    }
    reference = options.run / options.reference / "checkpoint"
    with tempfile.TemporaryDirectory() as out:
        record, _ = screen([str(reference), *map(str, folders.values())], text=[options.run], out=Path(out))
    print("# Screened and served\n")
    panel = record.panel
    print(f"{panel.num_texts} replies of the reference, {panel.num_tokens:,} tokens, served by vLLM on a CPU; nats.\n")
    print("| candidate | stored as | served, lower bound | screened | served, unbiased | same first token, served | screened |")
    print("|---|---|---|---|---|---|---|")
    outside = []
    for candidate in record.candidates:
        measured = Measurement.load(options.run / "measurements" / f"{candidate.label}.json").divergence
        if measured is None:
            continue
        value, unbiased = candidate.drift.kl_mean.value, measured.kl_corrected_mean
        high = unbiased.high if isinstance(unbiased, Interval) else float("inf")
        if not measured.kl_mean.value * 0.98 <= value <= high:
            outside.append(candidate.label)
        shown = nats(unbiased) if unbiased is not None else "-"
        print(
            f"| {candidate.label} | {candidate.stored_as} | {plain_nats(measured.kl_mean.value)} | {plain_nats(value)} "
            f"| {shown} | {measured.top1_agreement.value:.2%} | {candidate.drift.top1_agreement.value:.2%} |"
        )
    print(f"\nBelow the lower bound (by more than 2 %) or above the interval: {', '.join(outside) or 'none'}.")
    print("\n[exact.md](exact.md) has five precisions, W4A4 among them, against the whole vocabulary of served checkpoints.")


if __name__ == "__main__":
    main()
