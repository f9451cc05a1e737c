"""Count, mean and spread of numbers that lie in several places, without bringing them together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Moments(NamedTuple):
    """`Moments(4, 2.5, 5.0)` of 1, 2, 3, 4. squares: sum of the squared deviations from the mean."""

    num: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of the whole population (divided by n)."""
        return math.sqrt(self.squares / self.num) if self.num else 0.0


def compute_moments(values: NDArray[np.floating]) -> Moments:
    """Of these numbers, in float64; zeros for none."""
    if not values.size:
        return Moments()
    values = values.astype(np.float64)
    mean = math.fsum(values) / values.size
    return Moments(float(values.size), mean, math.fsum((values - mean) ** 2))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Of all numbers together. Sums of squares are taken around the common mean (Chan et al., 1983): a difference of large sums would lose
    the spread of numbers that lie far from 0. The order of the parts changes nothing."""
    filled = [part for part in parts if part.num]
    if not filled:
        return Moments()
    num = math.fsum(part.num for part in filled)
    mean = math.fsum(part.num * part.mean for part in filled) / num
    squares = math.fsum(part.squares for part in filled)
    return Moments(num, mean, squares + math.fsum(part.num * (part.mean - mean) ** 2 for part in filled))
