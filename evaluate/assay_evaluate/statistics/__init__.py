"""Intervals and tests for scores: pure functions over counts and arrays, no state, no I/O.

Differences are always *reference minus candidate*: a positive number is a loss. `b` counts the items that only the
reference gets right, `c` those that only the candidate gets right, `n` all paired items. Every interval is two-sided at
`level`; a one-sided statement made from one end of it has a nominal error of (1 - level) / 2.

    proportions  one proportion, two independent ones      paired     two paired ones: McNemar, Tango, flips
    clustered    means and ratios of dependent values      power      what n items can show, how many a margin needs
    decisions    non-inferiority, TOST, Holm, the verdict   graded     the same for partial credit and several samples
    rates        rare events and their bounds              trends     does an error jump with slot, position or load?
    drafts       the acceptance of drafted tokens, by reply
    skewed       means of skewed values (KL) in clusters and strata   sequential  several looks at the evidence, one alpha
    uneven/      losses that sit in a few clusters, or in one subgroup of a task
    item_pairs, swe_difference  the same of two measurements' items: what is compared, and which test fits it

In: counts, arrays, results of items. Out: intervals, p values, numbers of items. May import `assay.records` only.
"""

from assay_evaluate.statistics.clustered import (
    ClusteredMean,
    bca_interval,
    cluster_bootstrap_mean,
    cluster_bootstrap_ratio,
    clustered_difference,
    clustered_mean,
    clustered_minimum_detectable_effect,
    clustered_proportion,
    clustered_values_needed,
    cr2_factors,
    paired_mean_difference,
    satterthwaite_degrees,
)
from assay_evaluate.statistics.decisions import (
    Claim,
    PairedEvidence,
    decide,
    equivalence_p,
    holm,
    inferiority_p,
    noninferiority_p,
    paired_evidence,
    widen,
    wider,
)
from assay_evaluate.statistics.graded import (
    graded_difference,
    graded_evidence,
    graded_items_needed,
    graded_minimum_detectable_effect,
    mean_of_shares,
)
from assay_evaluate.statistics.paired import (
    Flips,
    count_flips,
    discordant_counts,
    exact_tail,
    mcnemar_midp,
    paired_difference,
    score_interval,
    score_statistic,
)
from assay_evaluate.statistics.power import (
    POWER,
    detection_power,
    items_for_margin,
    items_needed,
    minimum_detectable_effect,
    noninferiority_power,
)
from assay_evaluate.statistics.proportions import clopper_pearson, independent_difference, normal_quantile, wilson
from assay_evaluate.statistics.skewed import skewed_mean, unseen_share

__all__ = [
    "POWER",
    "Claim",
    "ClusteredMean",
    "Flips",
    "PairedEvidence",
    "bca_interval",
    "clopper_pearson",
    "cluster_bootstrap_mean",
    "cluster_bootstrap_ratio",
    "clustered_difference",
    "clustered_mean",
    "clustered_minimum_detectable_effect",
    "clustered_proportion",
    "clustered_values_needed",
    "count_flips",
    "cr2_factors",
    "decide",
    "detection_power",
    "discordant_counts",
    "equivalence_p",
    "exact_tail",
    "graded_difference",
    "graded_evidence",
    "graded_items_needed",
    "graded_minimum_detectable_effect",
    "holm",
    "independent_difference",
    "inferiority_p",
    "items_for_margin",
    "items_needed",
    "mcnemar_midp",
    "mean_of_shares",
    "minimum_detectable_effect",
    "noninferiority_p",
    "noninferiority_power",
    "normal_quantile",
    "paired_difference",
    "paired_evidence",
    "paired_mean_difference",
    "satterthwaite_degrees",
    "score_interval",
    "score_statistic",
    "skewed_mean",
    "unseen_share",
    "widen",
    "wider",
    "wilson",
]
