"""What the divergence does not show."""

from assay.quantities import percent_of_events
from assay.records.divergence import FEWEST_TEXTS
from assay_reports.limits.entries import with_entries, with_labels
from assay_reports.run import Run
from assay_reports.sentences import limits as english
from assay_reports.text import and_list, count_of, grouped


def no_noise_floor(run: Run) -> str | None:
    floor = run.noise_floor
    if not run.measurements or (floor is not None and floor.divergence is not None):
        return None
    if floor is None:
        return english.NO_REPEAT
    if all(m.divergence is None for m in run.candidates):
        return None
    return english.NO_NOISE_FLOOR.format(reason=floor.not_measured.get("divergence", english.NO_REASON))


def zero_noise_floor(run: Run) -> str | None:
    floor = run.noise_floor.divergence if run.noise_floor else None
    return english.ZERO_NOISE_FLOOR if floor is not None and floor.kl_mean.value <= 0 else None


def kl_lower_bound(run: Run) -> str | None:
    divergences = [m.divergence for m in run.candidates if m.divergence is not None]
    tail = max((d.tail_mass_mean for d in divergences), default=0.0)
    if tail <= 0:
        return None
    return english.KL_LOWER_BOUND.format(top_k=min(d.top_k for d in divergences), share=percent_of_events(tail))


def divergence_direction(run: Run) -> str | None:
    return english.DIVERGENCE_DIRECTION if any(m.divergence is not None for m in run.candidates) else None


def few_texts(run: Run) -> str | None:
    few = dict.fromkeys(
        (drift.num_documents, english.HELD_OUT_TEXT if drift.texts == "held_out" else english.SAMPLED_TEXT)
        for m in run.measurements
        for drift in (() if m.divergence is None else m.divergence.drift)
        if drift.texts in {"all", "held_out"} and drift.num_documents < FEWEST_TEXTS
    )
    if not few:
        return None
    texts = and_list([count_of(number, kind) for number, kind in few])
    sentence = english.FEW_TEXTS.format(texts=texts, least=FEWEST_TEXTS)
    return sentence + (english.FEW_SAMPLED if any(kind == english.SAMPLED_TEXT for _, kind in few) else "")


def not_sampled(run: Run) -> str | None:
    gaps = [m.divergence.gap_of_unsampled for m in run.measurements if m.divergence is not None]
    worst = max((gap for gap in gaps if gap is not None), key=lambda gap: abs(gap.value), default=None)
    return None if worst is None else english.NOT_SAMPLED.format(gap=worst.value, low=worst.low, high=worst.high)


def measurement_notes(run: Run) -> str | None:
    by_note = grouped((note, m.label) for m in run.measurements for note in m.notes)
    return with_entries(
        english.MEASUREMENT_NOTES,
        (english.MEASUREMENT_NOTE.format(note=note, labels=", ".join(labels)) for note, labels in by_note.items()),
    )


def non_finite(run: Run) -> str | None:
    return with_entries(
        english.NON_FINITE,
        (
            english.NON_FINITE_ENTRY.format(number=d.num_non_finite, total=d.num_positions, label=m.label)
            for m in run.measurements
            if (d := m.divergence) is not None and d.num_non_finite
        ),
    )


def acceptance_interval(run: Run) -> str | None:
    return with_labels(
        english.ACCEPTANCE_INTERVAL,
        (
            m
            for m in run.measurements
            if m.acceptance is not None and m.acceptance.num_draft_tokens and m.acceptance.rate_standard_error is None
        ),
    )
