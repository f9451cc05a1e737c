"""Which rows teach nothing or should not be learned from. S: samples of a batch, in any order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridflow.algorithms.advantages import summarize_groups


def compute_constant_groups(
    rewards_S: NDArray[np.float64], group_ids_S: NDArray[np.int64], ok_S: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """True at the ok rows of groups whose ok rewards are all equal: [S] bool, True is to be rejected.

    Such a group has no advantage to learn from, and its tokens would only thin out the others in the denominator.
    A group with one ok row is constant. Equal means up to `advantages.EQUAL_REWARDS`.

    Source: dynamic sampling, DAPO, arXiv:2503.14476. Differs: the step gets smaller, no further prompts are drawn.
    """
    groups = summarize_groups(rewards_S, group_ids_S, ok_S)
    return ok_S & groups.constant_P[groups.index_S]
