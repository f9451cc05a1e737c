"""Which rows go into which micro-batch: a pure plan over row lengths."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together: `MicroBatch(rows=(0, 3, 4), num_tokens=1893, cost=2410.5)`."""

    rows: tuple[int, ...]
    num_tokens: int
    cost: float


def compute_row_costs(lengths: NDArray[np.int64], hidden_size: int) -> NDArray[np.float64]:
    """Arithmetic of each row, in units of one token's matrix products.

    lengths: [S] tokens of each row.
    returns: [S] float64, `length * (1 + length / (12 * hidden_size))`: a layer spends about 24 D^2 operations a token on its
             matrices and 2 L D a token on causal attention over a row of L tokens. Sliding windows are not counted.
    """
    lengths_f = lengths.astype(np.float64)
    return lengths_f * (1.0 + lengths_f / (12.0 * hidden_size))


def plan_micro_batches(
    lengths: NDArray[np.int64], costs: NDArray[np.float64], max_tokens: int
) -> tuple[MicroBatch, ...]:
    """Packs rows into as few micro-batches as the token budget allows here, balanced by cost.

    lengths: [S] tokens of each row, at least 1.
    costs:   [S] cost of each row, not falling with its length.

    Invariants:
    - every row is in exactly one micro-batch, and none is empty;
    - a micro-batch holds at most `max_tokens` tokens, unless it is one row that is longer by itself;
    - no better balance is one move away: where one micro-batch is heavier than another by more than the cost of its own
      shortest row, that row does not fit into the other;
    - there are at most `2 * sum(min(lengths, max_tokens)) / max_tokens + 1` micro-batches;
    - the plan depends on the arguments alone. Rows ascend inside a micro-batch, and micro-batches come heaviest first
      (equal ones by first row), so that too large a budget fails at once and the allocator's blocks serve what follows.

    Longest row first into the lightest micro-batch with room (LPT of Graham, 1969, under a capacity); one more
    micro-batch is added until all rows fit.
    """
    if max_tokens < 1:
        raise ValueError(f"micro-batches are planned with a budget of {max_tokens} tokens; give at least 1")
    if lengths.size == 0:
        return ()
    if int(lengths.min()) < 1:
        raise ValueError(f"row {int(lengths.argmin())} has {int(lengths.min())} tokens; plan rows of at least 1 token")
    order = np.lexsort((np.arange(lengths.size), -lengths)).tolist()
    num_parts = -(-int(np.minimum(lengths, max_tokens).sum()) // max_tokens)
    while (parts := _place(order, lengths.tolist(), costs.tolist(), max_tokens, num_parts)) is None:
        num_parts += 1
    plan = [_build_micro_batch(part, lengths, costs) for part in parts if part]
    return tuple(sorted(plan, key=lambda micro_batch: (-micro_batch.cost, micro_batch.rows[0])))


def _place(
    order: list[int], lengths: list[int], costs: list[float], max_tokens: int, num_parts: int
) -> list[list[int]] | None:
    """Rows of each part, or None if a row finds no room."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    tokens = [0] * num_parts
    lightest = [(0.0, part) for part in range(num_parts)]
    for row in order:
        full = []
        while lightest and (tokens[lightest[0][1]] and tokens[lightest[0][1]] + lengths[row] > max_tokens):
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        cost, part = lightest[0]
        heapq.heapreplace(lightest, (cost + costs[row], part))
        parts[part].append(row)
        tokens[part] += lengths[row]
        for entry in full:
            heapq.heappush(lightest, entry)
    return parts


def _build_micro_batch(part: list[int], lengths: NDArray[np.int64], costs: NDArray[np.float64]) -> MicroBatch:
    rows = sorted(part)
    return MicroBatch(tuple(rows), int(lengths[rows].sum()), float(costs[rows].sum()))
