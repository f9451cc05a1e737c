"""From one layout to another: which box goes from which rank to which, in buckets of bounded size. Pure: layouts in, numbers out."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridflow.weights.copies import Copies, Kind, cut_even, number_rows
from hybridflow.weights.layout import Ints, LayoutError, WeightLayout

ALIGNMENT = 16
"""Bytes that each piece in a bucket begins at a multiple of, for the widest loads of a copy."""
PIECE_BYTES = 4 * 2**20
"""A copy that several ranks could send is shared between them down to this size."""
_MAX_PADDING = 1.25
"""An all-gather pads every member to the largest; where that costs more than this, boxes travel one by one."""


@dataclass(frozen=True, eq=False)
class Part:
    """What a bucket has of one tensor; tensors that are alike share their `copies`."""

    tensor: str
    itemsize: int
    copies: Copies


@dataclass(frozen=True, eq=False)
class Bucket:
    """What travels together."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """Buckets in the order in which they travel.

    groups: ranks in groups in which every member needs all that any other one sends, as from FSDP2 to whole replicas: each bucket is then
            one all-gather a group. Empty where the layouts ask for something else.
    sent, received: [size] bytes of each rank over all buckets; a box that goes to two ranks is sent twice.
    local:          [size] bytes that ranks copy for themselves.
    digest:         the same where plans are.
    """

    size: int
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    groups: tuple[tuple[int, ...], ...]
    sent: Ints
    received: Ints
    local: Ints
    digest: int = field(repr=False)

    @property
    def bytes_moved(self) -> int:
        """Bytes between ranks, over all."""
        return int(self.sent.sum())

    def iter_parts(self) -> Iterator[tuple[int, Part]]:
        """Each part with the number of its bucket, in order."""
        for index, bucket in enumerate(self.buckets):
            for part in bucket.parts:
                yield index, part


def plan_weights(
    source: WeightLayout,
    target: WeightLayout,
    bucket_bytes: int,
    *,
    nodes: Sequence[int] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> WeightPlan:
    """The copies that fill every box of `target` from the boxes of `source`, tensors in the order of `target`.

    nodes:       by rank the machine it is on; a box comes from a rank of the same machine where one has it.
    piece_bytes: see `PIECE_BYTES`.

    Sizes are those of the target's types: the source rounds before it sends.

    Invariants: every value of every target box arrives once, and nothing else is sent; a rank receives its boxes less what it holds itself,
    which is the least there is; in each bucket what a rank packs (once for all who want it) and what it receives are together at most
    `bucket_bytes`, each piece rounded up to 16 bytes; larger tensors are cut. Ranks that hold the same box send equally much of the tensors
    of one kind (shape and splits), to within one copy or piece.

    Raises LayoutError for a tensor that is not on both sides, has two shapes, is not held once over the distinct boxes of the source, or
    cannot be cut to fit `bucket_bytes`.
    """
    _check_sides(source, target)
    numbered = np.zeros(target.size, np.int64) if nodes is None else np.unique(nodes, return_inverse=True)[1]
    whole = _plan_whole(source, target, numbered, piece_bytes)
    groups = _find_groups(whole, target.size)
    buckets = tuple(_iter_buckets(whole, _Loads(target.size, groups), bucket_bytes))
    sent, received, local = _count_traffic(whole, target.size)
    return WeightPlan(
        target.size, bucket_bytes, buckets, groups, sent, received, local, _compute_digest(whole, bucket_bytes)
    )


def _check_sides(source: WeightLayout, target: WeightLayout) -> None:
    if source.size != target.size:
        raise LayoutError(
            f"the source counts {source.size} ranks and the target {target.size}; number all that take part over both"
        )
    odd = sorted(source.tensors.keys() ^ target.tensors.keys())
    if odd:
        raise LayoutError(f"tensor '{odd[0]}' is on one side alone ({len(odd)} such); give both sides one model")
    for name, held in target.tensors.items():
        ours, theirs = held.placement.global_shape, source.tensors[name].placement.global_shape
        if ours != theirs:
            raise LayoutError(
                f"tensor '{name}' is {list(theirs)} at the source and {list(ours)} at the target; give both sides one model"
            )


def _plan_whole(source: WeightLayout, target: WeightLayout, nodes: Ints, piece_bytes: int) -> list[Part]:
    """All copies of each tensor, not yet in buckets; each kind of tensors is worked out once."""
    kinds: dict[tuple[bytes, ...], Kind] = {}
    parts = []
    for name, held in target.tensors.items():
        ours, theirs, itemsize = held.placement, source.tensors[name].placement, held.dtype.itemsize
        sizes = np.array([*ours.global_shape, itemsize])
        key = tuple(array.tobytes() for array in (sizes, theirs.offsets, theirs.shape, ours.offsets, ours.shape))
        if key not in kinds:
            kinds[key] = Kind(name, theirs, ours, nodes, max(piece_bytes // itemsize, 1), first_turn=len(kinds))
        parts.append(Part(name, itemsize, kinds[key].next_copies()))
    return parts


def align(num_bytes: Ints) -> Ints:
    """Each rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Loads:
    """[size] bytes of a bucket that copies take on each rank."""

    def __init__(self, size: int, groups: tuple[tuple[int, ...], ...]) -> None:
        self._size, self._groups = size, groups
        self._found: dict[tuple[int, int], tuple[Copies, Ints]] = {}

    def of(self, part: Part) -> Ints:
        """Worked out once for tensors that share their copies."""
        # Beside the number the copies themselves, so that it stays theirs.
        key = (id(part.copies), part.itemsize)
        if key not in self._found:
            self._found[key] = part.copies, self._compute(part.copies, part.itemsize)
        return self._found[key][1]

    def _compute(self, copies: Copies, itemsize: int) -> Ints:
        sizes = align(copies.counts * itemsize)
        received = self._sum(copies.target[copies.is_remote], sizes[copies.is_remote])
        rows = copies.packed
        packed = self._sum(copies.source[rows], sizes[rows])
        load = packed + received
        for group in map(list, self._groups):
            # In an all-gather every member has the room of the largest.
            load[group] = len(group) * packed[group].max()
        return load

    def _sum(self, ranks: Ints, sizes: Ints) -> Ints:
        return np.bincount(ranks, weights=sizes, minlength=self._size).astype(np.int64)


def _iter_buckets(whole: Sequence[Part], loads: _Loads, bucket_bytes: int) -> Iterator[Bucket]:
    """Tensors in order, as many in each bucket as fit on every rank."""
    parts: list[Part] = []
    filled: Ints | int = 0
    for part in whole:
        for piece in _iter_pieces(part, loads, bucket_bytes):
            load = loads.of(piece)
            if parts and (filled + load).max() > bucket_bytes:
                yield Bucket(tuple(parts))
                parts, filled = [], 0
            parts.append(piece)
            filled = filled + load
    if parts:
        yield Bucket(tuple(parts))


def _iter_pieces(part: Part, loads: _Loads, bucket_bytes: int) -> Iterator[Part]:
    """The part, or where it is too large for a bucket the smallest number of even pieces that are not."""
    largest = int(loads.of(part).max())
    if largest <= bucket_bytes:
        yield part
        return
    num_pieces = -(-largest // bucket_bytes)
    while True:
        pieces = [Part(part.tensor, part.itemsize, _cut(part.copies, piece, num_pieces)) for piece in range(num_pieces)]
        worst = max(int(loads.of(piece).max()) for piece in pieces)
        if worst <= bucket_bytes:
            break
        if num_pieces > 2 * int(part.copies.counts.max()) * len(part.copies.counts):
            raise LayoutError(
                f"tensor '{part.tensor}' takes {worst} bytes of a bucket in its smallest pieces, and a bucket has {bucket_bytes}; "
                f"set bucket_bytes to {worst} or more"
            )
        num_pieces += max(num_pieces // 4, 1)
    yield from (piece for piece in pieces if len(piece.copies.source))


def _cut(copies: Copies, piece: int, num_pieces: int) -> Copies:
    """Of each copy one piece. All senders are busy with each; short copies take turns."""
    apart = max(num_pieces // (int(copies.region.max(initial=0)) + 1), 1)
    at = (piece + copies.region * apart) % num_pieces
    start, shape = cut_even(copies.start, copies.shape, at, num_pieces)
    return Copies(copies.source, copies.target, start, shape, copies.region).take(shape.min(axis=1) > 0)


def _find_groups(whole: Sequence[Part], size: int) -> tuple[tuple[int, ...], ...]:
    """See `WeightPlan.groups`."""
    distinct = list({id(part.copies): part.copies for part in whole}.values())
    groups = _find_components(distinct, size)
    members = np.zeros(size, np.int64)
    for group in groups:
        members[list(group)] = len(group)
    if not groups or not all(_is_gather(copies, members) for copies in distinct):
        return ()
    packed = np.zeros(size)
    for copies, itemsize, times in _tally(whole):
        sizes = copies.counts[copies.packed] * (itemsize * times)
        packed += np.bincount(copies.source[copies.packed], weights=sizes, minlength=size)
    needed = sum(packed[list(group)].sum() for group in groups)
    padded = sum(packed[list(group)].max() * len(group) for group in groups)
    return groups if padded <= _MAX_PADDING * needed else ()


def _tally(whole: Sequence[Part]) -> list[tuple[Copies, int, int]]:
    """(copies, itemsize, how many tensors have them), each once."""
    times = Counter((id(part.copies), part.itemsize) for part in whole)
    found = {(id(part.copies), part.itemsize): part.copies for part in whole}
    return [(found[key], key[1], count) for key, count in times.items()]


def _find_components(distinct: Sequence[Copies], size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks between which anything travels, each with all that it is connected to; ranks alone are left out."""
    linked = np.eye(size, dtype=np.bool_)
    for copies in distinct:
        linked[copies.source, copies.target] = linked[copies.target, copies.source] = True
    labels = np.arange(size)
    while True:
        lowest = np.where(linked, labels, size).min(axis=1)
        if (lowest == labels).all():
            break
        labels = lowest
    groups = (tuple(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels))
    return tuple(group for group in groups if len(group) > 1)


def _is_gather(copies: Copies, members: Ints) -> bool:
    """Whether all that anyone sends goes to all others of its group."""
    remote = copies.take(copies.is_remote)
    keys = number_rows(np.column_stack([remote.source, remote.region]))
    _, first, readers = np.unique(keys, return_index=True, return_counts=True)
    return bool((readers == members[remote.source[first]] - 1).all())


def _count_traffic(whole: Sequence[Part], size: int) -> tuple[Ints, Ints, Ints]:
    totals = np.zeros((3, size), np.int64)
    for copies, itemsize, times in _tally(whole):
        sizes, away = copies.counts * (itemsize * times), copies.is_remote
        for row, ranks, rows in ((0, copies.source, away), (1, copies.target, away), (2, copies.target, ~away)):
            totals[row] += np.bincount(ranks[rows], weights=sizes[rows], minlength=size).astype(np.int64)
    sent, received, local = totals
    return sent, received, local


def _compute_digest(whole: Sequence[Part], bucket_bytes: int) -> int:
    found: dict[int, int] = {}
    digest = zlib.crc32(str(bucket_bytes).encode())
    for part in whole:
        key = id(part.copies)
        if key not in found:
            copies = part.copies
            fields = (copies.source, copies.target, copies.start, copies.shape)
            found[key] = zlib.crc32(b"".join(array.tobytes() for array in fields))
        digest = zlib.crc32(f"{part.tensor} {part.itemsize} {found[key]}".encode(), digest)
    return digest
