"""Limits: what the records of a run do *not* show, each found by looking at them.

A limit is a function `Run -> sentence or None`; it speaks only while its condition holds in the records, and never from
goodwill. `LIMITS` is the order in which a reader meets them: first what weakens the numbers that are there, then what is
missing altogether. Their English is in `sentences/limits.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from assay_reports.limits.divergence import (
    acceptance_interval,
    divergence_direction,
    few_texts,
    kl_lower_bound,
    measurement_notes,
    no_noise_floor,
    non_finite,
    not_sampled,
    zero_noise_floor,
)
from assay_reports.limits.missing import (
    gates_not_before,
    not_measured,
    screened_out,
    serving_faults,
    serving_not_looked_at,
    unmeasured,
)
from assay_reports.limits.probes import (
    deployments_left_out,
    no_load,
    nothing_scored_there,
    probes_not_judged,
    probes_not_run,
    rare_faults,
)
from assay_reports.limits.scores import (
    context_length,
    failures,
    generated_questions,
    kinds_of_work,
    languages,
    one_seed,
    sample_sizes,
    selection,
    truncation,
    which_items,
)
from assay_reports.limits.serving import (
    emulated,
    external_server,
    foreign_reference,
    imported,
    native_kernels,
    precisions_by_shape,
    quantized_reference,
    second_rounding,
    speculation_off,
    unclean_versions,
    unknown_kernels,
    verification_gaps,
    verification_stale,
)
from assay_reports.limits.speed import (
    choice_outdated,
    speed_conditions,
    speed_from_elsewhere,
    speed_outdated,
    speed_unmeasured,
)
from assay_reports.run import Run
from assay_reports.schema import Limit


def find_limits(run: Run) -> tuple[Limit, ...]:
    """Every limit whose condition holds, in the order of `LIMITS`."""
    texts = ((key, function(run)) for key, function in LIMITS.items())
    return tuple(Limit(key=key, text=text) for key, text in texts if text is not None)


LIMITS: dict[str, Callable[[Run], str | None]] = {
    function.__name__: function
    for function in (
        unmeasured, screened_out, not_measured, serving_faults, gates_not_before, imported, emulated, foreign_reference,
        quantized_reference, second_rounding,
        native_kernels, sample_sizes, selection, which_items, one_seed, measurement_notes, truncation, failures,
        generated_questions, kinds_of_work, languages, context_length, speed_unmeasured, speed_conditions,
        speed_from_elsewhere, speed_outdated, choice_outdated, no_load, probes_not_judged, probes_not_run,
        nothing_scored_there, deployments_left_out, rare_faults, divergence_direction, few_texts, kl_lower_bound,
        no_noise_floor, zero_noise_floor, not_sampled, non_finite, acceptance_interval, speculation_off, unknown_kernels,
        serving_not_looked_at, external_server, unclean_versions, precisions_by_shape, verification_gaps, verification_stale,
    )
}  # fmt: skip
"""Key -> limit, in a reader's order."""
