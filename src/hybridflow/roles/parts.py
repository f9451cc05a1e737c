"""How a batch lies in the runtime's store: in chunks of whole groups, and each chunk in parts that different readers pull.

A rollout's chunk has two parts: `tokens` for those that compute, `text` for rewards. Scores are further parts of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Concatenate, TypeVar

from hybridflow.batch import Batch
from hybridflow.roles.shares import describe_rows
from hybridflow.runtime.api import Closeable, Group, Pieces, Runtime
from hybridflow.types import BatchRef, ChunkRef, Ref

TOKENS, TEXT = "tokens", "text"
PER_TOKEN = ("tokens", "loss_mask", "rollout_logprobs")
SCALARS = (
    "group_id", "sample_id", "prompt_id", "policy_version_min", "policy_version_max", "finish_reason", "state", "rollout_error",
)  # fmt: skip
"""Columns of both parts."""

W = TypeVar("W", bound=Closeable)


def cut_rollout(batch: Batch, sizes: Sequence[int]) -> Pieces[Batch]:
    """A rollout's objects, `tokens` and `text` of each chunk in turn; the first with its `RowDigest`.

    sizes: rows of each chunk.
    """
    scalars = [name for name in SCALARS if name in batch]
    objects: list[Batch] = []
    digests: list[Any] = []
    for chunk in batch.split(sizes):
        objects += [chunk.select([*scalars, *PER_TOKEN]), chunk.drop(PER_TOKEN)]
        digests += [describe_rows(objects[-2]), None]
    return Pieces(tuple(objects), tuple(digests))


def cut_columns(columns: Batch, sizes: Sequence[int]) -> Pieces[Batch]:
    """New columns of a call's rows as one object a chunk."""
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
    """New columns of the batch's rows: one call of `verb(worker, rows, sizes, *args)` for the chunks of each call that made them.

    So a call starts when the rollout that it reads is done, while others still generate.
    """
    chunks: list[ChunkRef] = []
    for first_row, made_together in _iter_calls(batch):
        sizes = tuple(chunk.num_rows for chunk in made_together)
        label = name_rows(first_row, sum(sizes))
        refs = runtime.submit_pieces(group, verb, len(sizes), BatchRef(made_together), sizes, *args, rows=label)
        chunks += [ChunkRef({part: ref}, rows) for ref, rows in zip(refs, sizes, strict=True)]
    return BatchRef(tuple(chunks))


def name_rows(first: int, count: int) -> str:
    """Rows of a step as errors name them: `rows 64 to 127`."""
    return f"rows {first} to {first + count - 1}" if count else "no rows"


def _iter_calls(batch: BatchRef) -> Iterator[tuple[int, tuple[ChunkRef, ...]]]:
    first_row = 0
    for _, together in groupby(batch.chunks, key=lambda chunk: id(next(islice(chunk.parts.values(), 1)).call)):
        chunks = tuple(together)
        yield first_row, chunks
        first_row += sum(chunk.num_rows for chunk in chunks)
