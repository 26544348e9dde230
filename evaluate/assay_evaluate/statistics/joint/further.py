"""Which tasks are asked further under a claim about the whole: one rule for the gates and for runs that are drawn.

Why it is this rule, is said in `verdicts.whole.going_on`.
"""

from __future__ import annotations

import numpy as np

from assay_evaluate.statistics.joint.drawn import Bools


def worth_another_look(
    undecided_TD: Bools, has_say_TD: Bools, is_over_D: Bools, mean_is_shown_D: Bools, *, every_task: bool
) -> Bools:
    """Tasks [T, D] of D runs.

    has_say: tasks that can change the overall verdict by themselves, were the mean shown. is_over: a task or the whole is
    FAIL. every_task: ask until each is decided.
    """
    mean_is_open_D = ~is_over_D & ~mean_is_shown_D
    by_themselves_TD = undecided_TD if every_task else undecided_TD & has_say_TD & ~is_over_D
    return np.asarray(mean_is_open_D | by_themselves_TD)
