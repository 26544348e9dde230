"""Intervals and tests for scores: pure functions over counts and arrays, no state, no I/O.

Differences are always *reference minus candidate*: a positive number is a loss. `b` counts the items that only the
reference gets right, `c` those that only the candidate gets right, `n` all paired items. Every interval is two-sided at
`level`; a one-sided statement made from one end of it has a nominal error of (1 - level) / 2.

    proportions      one proportion, the difference of two, weighted sums
    paired           two paired proportions: McNemar, Tango, flips
    graded           the same for partial credit and several samples; fixed_items: about these items only
    clustered        means and ratios of dependent values; uneven_clusters: losses that sit in a few clusters
    skewed           means of skewed values (KL) in clusters and strata
    decisions        non-inferiority, TOST, Holm, subgroups, the verdict
    sequential       several looks at the evidence, one alpha
    power            what n items can show, how many a margin needs; joint/: of all score gates together
    rates, trends    rare events and their bounds; does an error jump with slot, position or load?
    drafts           the acceptance of drafted tokens, by reply
    item_pairs, swe_difference   two measurements' items: what is compared, and which test fits it

In: counts, arrays, results of items. Out: intervals, p values, numbers of items. May import `assay.records` only.
"""
