"""Which rank of a data-parallel gang trains on which rows: pure plans over lengths and groups.

C: chunks of a batch. S: its rows. U: optimizer steps (updates) that the batch is trained in. R: ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridflow.batch import Batch
from hybridflow.roles.parts import RowDigest
from hybridflow.train_engine import ModelWork, compute_row_costs


@dataclass(frozen=True)
class Share:
    """What one rank trains on: `Share(chunks=(0, 3), update_rows=(24, 8))`.

    chunks:      numbers of its chunks, ascending; a rank may have none.
    update_rows: of its rows, chunk below chunk in this order, how many belong to each of the updates, first to last.

    Every rank calls the engine once an update, also where it has no rows for it:

        parts = prepared.batch.split(share.update_rows) if share.chunks else [None] * len(share.update_rows)
        metrics = [engine.update(part, loss) for part in parts]
    """

    chunks: tuple[int, ...]
    update_rows: tuple[int, ...]


def plan_shares(digests: Sequence[RowDigest], *, size: int, updates: int, work: ModelWork) -> tuple[Share, ...]:
    """Splits the chunks of a batch over `size` ranks (along `data`), for training in `updates` optimizer steps.

    digests: of every chunk, whole groups in each, in the batch's order.
    work:    what a row of the model costs.
    returns: [R] one share a rank.

    Invariants:
    - every chunk is in exactly one share;
    - which rows are trained together in an update is `plan_updates` over the whole batch, whatever `size` is;
    - one rank gets all chunks in order, and so the rows of one process in the order of one process;
    - by cost (`compute_row_costs`) of the rows of any one update, no rank is heavier than another by more than the lightest chunk that
      is its own and begins in that update;
    - the plan depends on the arguments alone.

    A chunk that lies across the border of two updates has rows in both. Longest chunk first to the lightest rank (LPT of Graham, 1969),
    update by update; between equally light ranks, to the one with less over all updates so far.
    """
    chunk_S = np.repeat(np.arange(len(digests)), [digest.lengths.size for digest in digests])
    group_ids_S = np.concatenate([np.zeros(0, np.int64), *(digest.group_ids for digest in digests)])
    lengths_S = np.concatenate([np.zeros(0, np.int64), *(digest.lengths for digest in digests)])
    _check_whole_groups(group_ids_S, chunk_S)
    cell_S = chunk_S, np.repeat(np.arange(updates), plan_updates(group_ids_S, updates))
    rows_CU, costs_CU = np.zeros((len(digests), updates), np.int64), np.zeros((len(digests), updates))
    np.add.at(rows_CU, cell_S, 1)
    np.add.at(costs_CU, cell_S, compute_row_costs(lengths_S, work))
    rank_C = _assign((rows_CU > 0).argmax(axis=1), costs_CU, size)
    return tuple(_build_share(np.flatnonzero(rank_C == rank), rows_CU) for rank in range(size))


def split_rows(batch: Batch, *, size: int, updates: int, work: ModelWork) -> list[tuple[Batch, tuple[int, ...]]]:
    """The same for rows that stand each for itself (supervised fine-tuning), as if each were a group and a chunk.

    returns: [R] the rows of each rank, in their order, and its `update_rows`; a batch without rows where it has none.
    """
    if size == 1:
        return [(batch, tuple(plan_updates(np.arange(batch.num_rows), updates).tolist()))]
    rows = [RowDigest(np.array([row]), np.array([length])) for row, length in enumerate(batch.lengths("tokens"))]
    shares = plan_shares(rows, size=size, updates=updates, work=work)
    return [(batch.take(share.chunks), share.update_rows) for share in shares]


def plan_updates(group_ids_S: NDArray[np.int64], updates: int) -> NDArray[np.int64]:
    """How many rows each update takes, one after the other: int64 [U], whole groups, as even as these allow.

    Each border is the group's edge nearest to that of an even split of the rows (of two, the first), so an update is empty where there
    are fewer groups than updates. Raises ValueError if a group's rows are not adjacent.
    """
    if updates < 1:
        raise ValueError(f"cannot train in {updates} updates; ask for 1 or more")
    starts = np.flatnonzero(np.diff(group_ids_S, prepend=group_ids_S[:1] - 1))
    named, counts = np.unique(group_ids_S[starts], return_counts=True)
    if np.any(counts > 1):
        raise ValueError(f"the rows of group {named[counts > 1][0]} are not adjacent; sort by group_id first")
    edges = np.append(starts, group_ids_S.size)
    wanted = np.arange(updates + 1) * group_ids_S.size / updates
    borders: NDArray[np.int64] = edges[np.abs(edges[None, :] - wanted[:, None]).argmin(axis=1)]
    return np.diff(borders)


def _check_whole_groups(group_ids_S: NDArray[np.int64], chunk_S: NDArray[np.int64]) -> None:
    cut = np.flatnonzero((np.diff(group_ids_S) == 0) & (np.diff(chunk_S) != 0))
    if cut.size:
        row = int(cut[0])
        raise ValueError(
            f"group {group_ids_S[row]} lies in the chunks {chunk_S[row]} and {chunk_S[row + 1]}; keep whole groups in a chunk"
        )


def _assign(first_update_C: NDArray[np.int64], costs_CU: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """The rank of each chunk."""
    rank_C = np.zeros(first_update_C.size, np.int64)
    loads_RU = np.zeros((size, costs_CU.shape[1]))
    for update, costs_C in enumerate(costs_CU.T):
        begin = np.flatnonzero(first_update_C == update)
        lightest = list(zip(loads_RU[:, update], loads_RU.sum(axis=1), range(size), strict=True))
        heapq.heapify(lightest)
        for chunk in begin[np.lexsort((begin, -costs_C[begin]))]:
            load, load_so_far, rank = lightest[0]
            heapq.heapreplace(lightest, (load + costs_C[chunk], load_so_far + costs_CU[chunk].sum(), rank))
            rank_C[chunk] = rank
            loads_RU[rank] += costs_CU[chunk]
    return rank_C


def _build_share(chunks: NDArray[np.int64], rows_CU: NDArray[np.int64]) -> Share:
    return Share(tuple(chunks.tolist()), tuple(rows_CU[chunks].sum(axis=0).tolist()))
