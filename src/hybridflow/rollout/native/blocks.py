"""Who holds which block of the KV cache."""

from __future__ import annotations

import numpy as np


class BlockAllocator:
    """Counts the holders of each block; a block is free when nobody holds it.

    Invariants: a block is handed out to one holder only; `num_free` is the number of blocks without a holder;
    the same calls hand out the same blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    def allocate(self, count: int) -> np.ndarray:
        """Takes `count` free blocks. returns: [count] int32.

        Raises RuntimeError when fewer are free: the scheduler must make room first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} KV blocks were asked for and {self.num_free} are free; preempt first")
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._holders[blocks] = 1
        return blocks

    def share(self, blocks: np.ndarray) -> None:
        """Adds one holder for each mention of a block."""
        np.add.at(self._holders, blocks, 1)

    def release(self, blocks: np.ndarray) -> np.ndarray:
        """Takes one holder off for each mention of a block; a block may be mentioned by several holders at once.

        returns: [n] int32, those that nobody holds any more.
        """
        np.subtract.at(self._holders, blocks, 1)
        touched = np.unique(blocks)
        holders = self._holders[touched]
        if len(touched) and holders.min() < 0:
            raise RuntimeError(f"KV block {touched[holders.argmin()]} was released more often than it was held")
        free = touched[holders == 0]
        self._free[self.num_free : self.num_free + len(free)] = free
        self.num_free += len(free)
        return free
