"""Which prompts of a call begin alike, block by block, and which of these blocks are in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def find_shared_prefixes(prompts: Sequence[np.ndarray], block_size: int) -> list[tuple[int, ...]]:
    """For each prompt a number for each of its first blocks that another prompt begins with, too.

    Prompts [1, 2, 3, 4, 5], [1, 2, 3, 4, 6] and [7] in blocks of 2 give [(0, 1), (0, 1), ()]: equal numbers mean equal tokens from
    the start to that block's end. A block is full, and a prompt's last token is in none, since its hidden state is needed.
    """
    found: list[list[int]] = [[] for _ in prompts]
    open_prompts = [list(range(len(prompts)))]
    depth, count = 0, 0
    while open_prompts:
        deeper = []
        for members in open_prompts:
            for same in _group(prompts, members, depth * block_size, block_size):
                for prompt in same:
                    found[prompt].append(count)
                count += 1
                deeper.append(same)
        open_prompts, depth = deeper, depth + 1
    return [tuple(numbers) for numbers in found]


def _group(prompts: Sequence[np.ndarray], members: Iterable[int], start: int, size: int) -> list[list[int]]:
    """Those members that have a block at `start` in common, by what is in it; at least two each."""
    groups: dict[bytes, list[int]] = {}
    for prompt in members:
        if len(prompts[prompt]) > start + size:
            groups.setdefault(prompts[prompt][start : start + size].tobytes(), []).append(prompt)
    return [same for same in groups.values() if len(same) > 1]


class PrefixBlocks:
    """Blocks that hold shared prefixes, as long as somebody holds the blocks.

    numbers: what `find_shared_prefixes` gives, by prompt.
    """

    def __init__(self, numbers: Sequence[tuple[int, ...]], num_blocks: int) -> None:
        self._numbers = numbers
        self._block_of: dict[int, int] = {}
        self._number_in = np.full(num_blocks, -1, np.int64)
        self._computing: dict[int, int] = {}

    def match(self, prompt: int) -> np.ndarray | None:
        """[n] int32 blocks that hold the prompt's first tokens; None while another prompt computes more of them: wait for it."""
        numbers = self._numbers[prompt]
        blocks = []
        for number in numbers:
            if number in self._computing:
                return None
            if number not in self._block_of:
                break
            blocks.append(self._block_of[number])
        return np.array(blocks, np.int32)

    def begin(self, prompt: int) -> None:
        """This prompt is going to be computed: those that begin alike wait for it."""
        for number in self._numbers[prompt]:
            if number not in self._block_of:
                self._computing.setdefault(number, prompt)

    def add(self, prompt: int, blocks: np.ndarray) -> None:
        """The prompt is computed, and its first blocks are these."""
        for number, block in zip(self._numbers[prompt], blocks.tolist(), strict=False):
            if number not in self._block_of:
                self._block_of[number] = block
                self._number_in[block] = number
        self.give_up(prompt)

    def give_up(self, prompt: int) -> None:
        """The prompt computes nothing (any more)."""
        for number in self._numbers[prompt]:
            if self._computing.get(number) == prompt:
                del self._computing[number]

    def remove(self, blocks: np.ndarray) -> None:
        """These blocks are free."""
        gone = blocks[self._number_in[blocks] >= 0]
        for number in self._number_in[gone].tolist():
            del self._block_of[number]
        self._number_in[gone] = -1
