"""What was served, and what is known of the checkpoints."""

from assay_reports.limits.entries import with_entries, with_labels
from assay_reports.run import UNQUANTIZED_LABELS, Run
from assay_reports.sentences import limits as english
from assay_reports.text import and_list, grouped

UNQUANTIZED_BITS = 16
"""`Measurement.weight_bits` of what is not quantized."""
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"


def foreign_reference(run: Run) -> str | None:
    if run.foreign_reference is None or run.reference is None:
        return None
    return english.FOREIGN_REFERENCE.format(reference=run.reference.label, how=run.foreign_reference)


def quantized_reference(run: Run) -> str | None:
    """Of one that is quantized as its family is, or was made here. A folder whose weights are in 16 bits is not quantized."""
    reference = run.reference
    if reference is None or reference.label in UNQUANTIZED_LABELS or run.foreign_reference is not None:
        return None
    if reference.weight_bits == UNQUANTIZED_BITS or reference.imported is not None:
        return None
    measured = [m.label for m in run.measurements if m.divergence is not None or any(task.accuracy for task in m.tasks)]
    source = next((label for label in measured if label in UNQUANTIZED_LABELS), None)
    distance = english.SOURCE_MEASURED.format(source=source) if source else english.SOURCE_NOT_MEASURED
    return english.QUANTIZED_REFERENCE.format(reference=reference.label, distance=distance)


def emulated(run: Run) -> str | None:
    return with_labels(english.EMULATED, (m for m in run.measurements if m.fingerprint.emulated))


def native_kernels(run: Run) -> str | None:
    """What `assay diagnose gpu-check` found, where native kernels ran. It served a small model: of this one it says nothing."""
    check = run.gpu_check
    if check is None or check.gpu is None or not any(m.fingerprint.emulated is False for m in run.measurements):
        return None
    if any(check.gpu not in m.fingerprint.hardware.get("gpus", "") for m in run.measurements):
        return english.NATIVE_KERNELS_ELSEWHERE.format(gpu=check.gpu)
    by_outcome = grouped((result.outcome, result.precision) for result in check.formats)
    outcomes = "; ".join(f"{outcome}: {and_list(names)}" for outcome, names in by_outcome.items())
    return english.NATIVE_KERNELS.format(gpu=check.gpu, date=check.started[:10], outcomes=outcomes)


def second_rounding(run: Run) -> str | None:
    """vLLM's `requant_weight_ue8m0_inplace`: with the variable at its default, 1, it changes what was in the files."""
    return with_labels(
        english.SECOND_ROUNDING,
        (
            m
            for m in run.measurements
            if m.fingerprint.emulated is False
            and "gpus" in m.fingerprint.hardware
            and m.fingerprint.environment.get(E8M0, "1") != "0"
        ),
    )


def unknown_kernels(run: Run) -> str | None:
    asked_here = (m for m in run.measurements if m.imported is None)
    unnamed = (m for m in asked_here if m.fingerprint.emulated is not True and not m.fingerprint.kernels)
    return with_labels(english.UNKNOWN_KERNELS, unnamed)


def imported(run: Run) -> str | None:
    """What no file of another harness says of how its scores came about."""
    sides = [(m.label, m.imported) for m in run.measurements if m.imported is not None]
    if not sides:
        return None
    harnesses = dict.fromkeys(harness for _, source in sides for harness in source.harnesses)
    by_what = grouped((what, label) for label, source in sides for what in source.not_known)
    not_known = (
        what if len(labels) == len(sides) else english.IMPORTED_NOT_KNOWN.format(what=what, labels=and_list(labels))
        for what, labels in by_what.items()
    )
    return english.IMPORTED.format(harnesses=", ".join(harnesses), not_known=", ".join(not_known))


def external_server(run: Run) -> str | None:
    return with_labels(english.EXTERNAL_SERVER, (m for m in run.measurements if m.fingerprint.server == "external"))


def unclean_versions(run: Run) -> str | None:
    versions = {
        f"{name} {version}"
        for m in run.measurements
        for name, version in m.fingerprint.versions.items()
        if not version or any(word in version.lower() for word in ("dirty", "unknown", "dev"))
    }
    return english.UNCLEAN_VERSIONS.format(versions=", ".join(sorted(versions))) if versions else None


def speculation_off(run: Run) -> str | None:
    with_mtp = {name for name, plan in run.plans.items() if plan.keeps_mtp}
    idle = (m for m in run.measurements if m.label in with_mtp and m.fingerprint.speculation is None)
    return with_labels(english.SPECULATION_OFF, idle)


def precisions_by_shape(run: Run) -> str | None:
    return with_entries(english.PRECISIONS_BY_SHAPE, run.choices)


def verification_gaps(run: Run) -> str | None:
    gaps = [f"{name}: {what}" for name, record in sorted(run.verifications.items()) for what in record.not_checked]
    gaps += [english.NOT_VERIFIED.format(label=name) for name in sorted(run.plans) if name not in run.verifications]
    return with_entries(english.VERIFICATION_GAPS, gaps)


def verification_stale(run: Run) -> str | None:
    return with_labels(
        english.VERIFICATION_STALE,
        (
            m
            for m in run.measurements
            if m.label in run.verifications and run.verifications[m.label].checkpoint_sha256 != m.checkpoint_sha256
        ),
    )
