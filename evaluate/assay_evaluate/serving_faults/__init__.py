"""Was everybody asked the same, and answered by the weights that were asked, whole? Looked at before anything is judged.

In: one task of reference and candidate, with the evidence that replies carry. Out: findings, each a clause that names the side.
Rules are about the serving and never about weights: what damaged weights do (loop, garble, think longer, answer nothing) is no
finding. May import `assay.records` and statistics.
"""
