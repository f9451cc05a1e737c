"""How a batch lies in the runtime's store: in chunks of whole groups, and each chunk in parts that different readers pull.

A rollout's chunk has two parts: `tokens` for those that compute, `text` for rewards. Scores are further parts of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Concatenate, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridflow.batch import Batch
from hybridflow.runtime.api import Closeable, Group, Pieces, Runtime
from hybridflow.types import BatchRef, ChunkRef, Ref

TOKENS, TEXT = "tokens", "text"
PER_TOKEN = ("tokens", "loss_mask", "rollout_logprobs", "kept_counts")
SCALARS = (
    "group_id", "sample_id", "prompt_id", "policy_version_min", "policy_version_max", "finish_reason", "state", "rollout_error",
)  # fmt: skip
"""Columns of both parts."""
CALLS_PER_WORKER = 4
"""Scoring calls of a step for each worker, at most: enough to keep all of them busy to the end."""

W = TypeVar("W", bound=Closeable)


@dataclass(frozen=True, eq=False)
class RowDigest:
    """What the controller may read of a chunk to split it: `RowDigest(group_ids=[7, 7], lengths=[212, 180])`.

    group_ids: [rows] int64. lengths: [rows] int32, tokens of each.
    """

    group_ids: NDArray[np.int64]
    lengths: NDArray[np.int32]


def cut_rollout(batch: Batch, sizes: Sequence[int]) -> Pieces[Batch]:
    """A rollout's objects, `tokens` and `text` of each chunk in turn; the first with its `RowDigest`.

    sizes: rows of each chunk.
    """
    scalars, per_token = ([name for name in names if name in batch] for names in (SCALARS, PER_TOKEN))
    objects: list[Batch] = []
    digests: list[Any] = []
    for chunk in batch.split(sizes):
        objects += [chunk.select([*scalars, *per_token]), chunk.drop(per_token)]
        digests += [describe_rows(objects[-2]), None]
    return Pieces(tuple(objects), tuple(digests))


def describe_rows(batch: Batch) -> RowDigest:
    """The digest of a chunk; a copy, which holds no column in memory."""
    return RowDigest(np.array(batch.numpy("group_id"), np.int64), batch.lengths("tokens").astype(np.int32))


def cut_columns(columns: Batch, sizes: Sequence[int]) -> Pieces[Batch]:
    """New columns of a call's rows as one object a chunk; without sizes none, where another rank returns them."""
    if not sizes:
        return Pieces((), ())
    return Pieces(tuple(columns.split(sizes)), (None,) * len(sizes))


def name_parts(refs: Sequence[Ref[Batch]], sizes: Sequence[int]) -> list[ChunkRef]:
    """The chunks that the refs of `cut_rollout` name."""
    pairs = zip(refs[::2], refs[1::2], strict=True)
    return [ChunkRef({TOKENS: tokens, TEXT: text}, rows) for (tokens, text), rows in zip(pairs, sizes, strict=True)]


def add_columns(
    runtime: Runtime,
    group: Group[W],
    verb: Callable[Concatenate[W, ...], Pieces[Batch]],
    batch: BatchRef,
    part: str,
    *args: Any,
) -> BatchRef:
    """New columns of the batch's rows, by calls of `verb(worker, rows, sizes, *args)`.

    There is one for the chunks of each call that made them, so that it starts when the rollout that it reads is done, while others still
    generate; where that would be more than `CALLS_PER_WORKER` for each worker, neighbours go together.
    """
    chunks: list[ChunkRef] = []
    first_row = 0
    for together in _merge(_group_by_call(batch), CALLS_PER_WORKER * group.size):
        sizes = tuple(chunk.num_rows for chunk in together)
        label = name_rows(first_row, sum(sizes))
        refs = runtime.submit_pieces(group, verb, len(sizes), BatchRef(together), sizes, *args, rows=label)
        chunks += [ChunkRef({part: ref}, rows) for ref, rows in zip(refs, sizes, strict=True)]
        first_row += sum(sizes)
    return BatchRef(tuple(chunks))


def add_columns_together(
    runtime: Runtime,
    gang: Group[W],
    verb: Callable[Concatenate[W, ...], Pieces[Batch]],
    batch: BatchRef,
    part: str,
    places: Sequence[tuple[int, bool]],
    *args: Any,
) -> BatchRef:
    """New columns by one call of `verb(worker, rows or None, sizes, *args)` on every worker of a gang that shares a model.

    places: of each rank, which share of the chunks it passes through, and whether it is the one of these ranks to return the columns.
    """
    shares = split_chunks(batch.chunks, 1 + max(share for share, _ in places))
    given = [(shares[share], tells) for share, tells in places]
    sizes = [tuple(chunk.num_rows for chunk in chunks) if tells else () for chunks, tells in given]
    calls = [(BatchRef(chunks) if chunks else None, own, *args) for (chunks, _), own in zip(given, sizes, strict=True)]
    label = name_rows(0, batch.num_rows)
    made = runtime.submit_all_pieces(gang, verb, [len(own) for own in sizes], calls, rows=label)
    refs = [
        refs for _, refs in sorted(zip([share for share, _ in places], made, strict=True), key=lambda pair: pair[0])
    ]
    pairs = zip(chain.from_iterable(refs), batch.chunks, strict=True)
    return BatchRef(tuple(ChunkRef({part: ref}, chunk.num_rows) for ref, chunk in pairs))


def split_chunks(chunks: Sequence[ChunkRef], count: int) -> list[tuple[ChunkRef, ...]]:
    """Neighbours together, in order, in so many shares of about as many rows each; a share may be empty."""
    ends = np.cumsum([chunk.num_rows for chunk in chunks])
    middles = ends - np.array([chunk.num_rows for chunk in chunks]) / 2
    share_C = (middles * count / max(ends[-1], 1)).astype(int) if len(ends) else []
    return [tuple(chunk for chunk, at in zip(chunks, share_C, strict=True) if at == share) for share in range(count)]


def name_rows(first: int, count: int) -> str:
    """Rows of a step as errors name them: `rows 64 to 127`."""
    return f"rows {first} to {first + count - 1}" if count else "no rows"


def _group_by_call(batch: BatchRef) -> list[tuple[ChunkRef, ...]]:
    """The chunks that each call has made."""
    return [
        tuple(made) for _, made in groupby(batch.chunks, key=lambda chunk: id(next(iter(chunk.parts.values())).call))
    ]


def _merge(groups: Sequence[tuple[ChunkRef, ...]], max_groups: int) -> list[tuple[ChunkRef, ...]]:
    """At most so many groups, of neighbours, as even as they come."""
    size = -(-len(groups) // max_groups)
    return [tuple(chain.from_iterable(groups[start : start + size])) for start in range(0, len(groups), size)]
