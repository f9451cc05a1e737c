"""What one rank does for each bucket of a plan: what it packs where, whom it sends to and hears from, what it copies for itself.

Pure, and worked out by each rank alone: both ends of a message come to the same bytes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hybridflow.weights.copies import Copies
from hybridflow.weights.layout import Ints
from hybridflow.weights.plan import Bucket, WeightPlan, align

_Kind = Literal["packed", "sent", "received", "own"]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor at a place in the staging buffer: `Piece("lm_head.weight", (128, 0), (64, 32), offset=4096)`.

    start, shape: of the box in the whole tensor.
    offset:       in bytes; -1 for a box that goes from one tensor to the other without staging.
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Message:
    """Bytes of the staging buffer that go to these ranks, or come from this one."""

    peers: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class RankBucket:
    """A bucket as one rank sees it.

    packed, received, own: pieces that it sends, that it hears, and that it copies for itself.
    sends:     one for each set of ranks that get the same: all that goes to these, packed once.
    receives:  of each sender in the order in which it sends.
    group:     ranks of the all-gather that stands in for messages; empty: there are messages.
    room:      bytes of each member in the all-gather, one after the other from the buffer's beginning.
    num_bytes: of the staging buffer.
    """

    packed: tuple[Piece, ...]
    received: tuple[Piece, ...]
    own: tuple[Piece, ...]
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    group: tuple[int, ...] = ()
    room: int = 0
    num_bytes: int = 0


def plan_messages(plan: WeightPlan, rank: int, *, gathers: bool) -> tuple[RankBucket, ...]:
    """This rank's side of each bucket.

    gathers: makes each bucket one all-gather in each of the plan's groups, which there have to be.
    """
    finder = _RowFinder(rank, plan.size)
    if not gathers:
        return tuple(_plan_exchange(finder, bucket) for bucket in plan.buckets)
    group = next((group for group in plan.groups if rank in group), (rank,))
    return tuple(_plan_gather(finder, bucket, group) for bucket in plan.buckets)


def _plan_exchange(finder: _RowFinder, bucket: Bucket) -> RankBucket:
    packed = finder.find(bucket, "packed").sort(by_source=False)
    received = finder.find(bucket, "received").sort(by_source=True)
    own = finder.find(bucket, "own").sort(by_source=False)
    sent = finder.find(bucket, "sent")
    ends = int(packed.sizes.sum()), int(packed.sizes.sum() + received.sizes.sum())
    sends = tuple(
        Message(tuple(np.unique(sent.targets[sent.audiences == packed.audiences[first]]).tolist()), offset, size)
        for first, offset, size in packed.find_runs(0)
    )
    receives = tuple(
        Message((int(received.sources[first]),), offset, size) for first, offset, size in received.find_runs(ends[0])
    )
    return RankBucket(
        packed.place(0), received.place(ends[0]), own.place(None), sends, receives,
        num_bytes=ends[1],
    )  # fmt: skip


def _plan_gather(finder: _RowFinder, bucket: Bucket, group: Sequence[int]) -> RankBucket:
    members = list(group)
    room = int(finder.count_packed(bucket)[members].max())
    packed = finder.find(bucket, "packed").sort(by_source=False)
    received = finder.find(bucket, "received").sort(by_source=True)
    own = finder.find(bucket, "own").sort(by_source=False)
    pieces = [
        piece
        for index, member in enumerate(members)
        for piece in received.take(received.sources == member).place(index * room)
    ]
    return RankBucket(
        packed.place(members.index(finder.rank) * room), tuple(pieces), own.place(None),
        group=tuple(group), room=room, num_bytes=room * len(members),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Rows:
    """Copies of all tensors of a bucket, one below the other, one array a field; boxes as (tensor, start, shape).

    parts: the place of the tensor in the bucket. sizes: in bytes, aligned.
    """

    boxes: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
    parts: Ints
    sources: Ints
    targets: Ints
    regions: Ints
    audiences: Any
    sizes: Ints

    def take(self, rows: Any) -> _Rows:
        """Some of them, or in another order."""
        chosen = np.arange(len(self.parts))[rows]
        fields = (self.parts, self.sources, self.targets, self.regions, self.audiences, self.sizes)
        return _Rows([self.boxes[row] for row in chosen.tolist()], *(field[chosen] for field in fields))

    def sort(self, *, by_source: bool) -> _Rows:
        """What goes to the same ranks side by side, in an order that both ends come to."""
        keys = (self.regions, self.parts, self.audiences)
        return self.take(np.lexsort((*keys, self.sources) if by_source else keys))

    def place(self, base: int | None) -> tuple[Piece, ...]:
        """Pieces one behind the other from `base`; None: without a place."""
        begins = (np.cumsum(self.sizes) - self.sizes + (base or 0)).tolist()
        return tuple(Piece(*box, -1 if base is None else begin) for box, begin in zip(self.boxes, begins, strict=True))

    def find_runs(self, base: int) -> list[tuple[int, int, int]]:
        """(first row, offset, bytes) of the rows that travel as one message."""
        if not len(self.parts):
            return []
        same = (self.audiences[1:] == self.audiences[:-1]) & (self.sources[1:] == self.sources[:-1])
        firsts = np.flatnonzero(np.append(True, ~same))
        begins = np.append(np.cumsum(self.sizes) - self.sizes, self.sizes.sum())
        ends = begins[np.append(firsts[1:], len(self.parts))]
        return [
            (first, base + begin, end - begin)
            for first, begin, end in zip(firsts.tolist(), begins[firsts].tolist(), ends.tolist(), strict=True)
        ]


class _RowFinder:
    """The copies that concern one rank; looked for once where tensors share theirs."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self._size = rank, size
        self._rows: dict[int, tuple[Copies, dict[_Kind, Ints]]] = {}
        self._packed: dict[tuple[int, int], tuple[Copies, Ints]] = {}

    def find(self, bucket: Bucket, kind: _Kind) -> _Rows:
        """Those of all parts of the bucket."""
        chosen = [self._select(part.copies)[kind] for part in bucket.parts]
        pairs = list(zip(bucket.parts, chosen, strict=True))

        def join(read: Callable[[Copies], Any]) -> Any:
            return np.concatenate([read(part.copies)[rows] for part, rows in pairs])

        return _Rows(
            [
                (part.tensor, tuple(start), tuple(shape))
                for part, rows in pairs
                for start, shape in zip(part.copies.start[rows].tolist(), part.copies.shape[rows].tolist(), strict=True)
            ],
            np.concatenate([np.full(len(rows), index) for index, rows in enumerate(chosen)]),
            join(lambda copies: copies.source),
            join(lambda copies: copies.target),
            join(lambda copies: copies.region),
            join(lambda copies: copies.audience),
            np.concatenate([align(part.copies.counts[rows] * part.itemsize) for part, rows in pairs]),
        )

    def count_packed(self, bucket: Bucket) -> Ints:
        """[size] bytes that each rank packs for the bucket."""
        return np.sum([self._count_packed(part.copies, part.itemsize) for part in bucket.parts], axis=0)

    def _count_packed(self, copies: Copies, itemsize: int) -> Ints:
        key = (id(copies), itemsize)
        if key not in self._packed:
            sizes = align(copies.counts[copies.packed] * itemsize)
            found = np.bincount(copies.source[copies.packed], weights=sizes, minlength=self._size).astype(np.int64)
            self._packed[key] = copies, found
        return self._packed[key][1]

    def _select(self, copies: Copies) -> dict[_Kind, Ints]:
        if id(copies) not in self._rows:
            away, sends, hears = copies.is_remote, copies.source == self.rank, copies.target == self.rank
            found: dict[_Kind, Ints] = {
                "packed": copies.packed[sends[copies.packed]],
                "sent": np.flatnonzero(away & sends),
                "received": np.flatnonzero(away & hears),
                "own": np.flatnonzero(~away & hears),
            }
            self._rows[id(copies)] = copies, found
        return self._rows[id(copies)][1]
