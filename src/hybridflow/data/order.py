"""In which order rows come: a pure planner, known by three numbers."""

from __future__ import annotations

import numpy as np


class EpochOrder:
    """Row numbers epoch after epoch, each epoch a permutation that depends on (seed, epoch) alone.

    After any calls of `take`, the numbers given so far are whole epochs and the first `position` of epoch `epoch`. Position stays below
    `num_rows`, so a place has one name, also at the border of an epoch.

    num_rows: 1 or more. epochs: how many, then there are no more; None never ends.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True, epochs: int | None = None) -> None:
        self.num_rows, self.seed, self.shuffle, self.epochs = num_rows, seed, shuffle, epochs
        self.epoch = 0
        self.position = 0
        self._permutation: tuple[int, np.ndarray] | None = None

    def take(self, count: int) -> np.ndarray:
        """The next `count` row numbers, int64; fewer only where the last epoch ends."""
        parts: list[np.ndarray] = [np.empty(0, np.int64)]
        while count > 0 and self.epoch != self.epochs:
            part = self._permute()[self.position : self.position + count]
            parts.append(part)
            count -= len(part)
            self.move_to(self.epoch, self.position + len(part))
        return np.concatenate(parts)

    def move_to(self, epoch: int, position: int) -> None:
        """Go on after `position` rows of `epoch`."""
        self.epoch, self.position = epoch + position // self.num_rows, position % self.num_rows

    def _permute(self) -> np.ndarray:
        if self._permutation is None or self._permutation[0] != self.epoch:
            permutation = permute(self.num_rows, self.seed, self.epoch) if self.shuffle else np.arange(self.num_rows)
            self._permutation = (self.epoch, permutation)
        return self._permutation[1]


def permute(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0..num_rows - 1, int64, from a counter-based generator (Philox) with the key (seed, epoch).

    The raw draws are sorted, because numpy keeps those the same for ever, and `Generator.permutation` only within a release.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")
