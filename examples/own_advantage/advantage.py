"""An advantage function of one's own: hard prompts count more, as they do where the aim is the mean log of the chance to be right."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def log_success(
    rewards: NDArray[np.float64], group_ids: NDArray[np.int64], ok: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """(R_i - mean of the group) / mean of the group, for rewards of 0 and 1: [S] float64, 0 where not ok.

    A group's mean estimates p, the chance that an answer to its prompt is right. R_i - mean follows the gradient of p, and divided by p
    that of log p: one right answer among 8 is worth 7, one among two is worth 1, and a wrong one always -1 beside some that are right.
    A group without a right answer teaches nothing.
    """
    advantages = np.zeros(rewards.size)
    for group in np.unique(group_ids[ok]):
        rows = ok & (group_ids == group)
        mean = rewards[rows].mean()
        if mean > 0:
            advantages[rows] = (rewards[rows] - mean) / mean
    return advantages
