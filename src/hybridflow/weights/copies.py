"""For tensors of one kind (one shape, split alike): which box goes from whom to whom.

Boxes are matched between the distinct ones of each side, then spread over the ranks that hold or want them.
Dimensions: N copies, P pairs of boxes, D dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridflow.weights.layout import Ints, LayoutError, Placement

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Copies:
    """Boxes of one tensor and the ranks between which they go; where the two are one rank, it copies for itself.

    source, target: [N]
    start, shape:   [N, D] in the whole tensor.
    region:         [N] equal where the same box comes of the same source box: a sender packs it once for all who want it.
    """

    source: Ints
    target: Ints
    start: Ints
    shape: Ints
    region: Ints

    @cached_property
    def counts(self) -> Ints:
        """[N] elements."""
        return self.shape.prod(axis=1)

    @cached_property
    def is_remote(self) -> Flags:
        """[N] whether the box travels."""
        return self.source != self.target

    @cached_property
    def packed(self) -> Ints:
        """Which of those that travel: one for each region of each sender."""
        remote = np.flatnonzero(self.is_remote)
        keys = self.source[remote] * (int(self.region.max(initial=0)) + 1) + self.region[remote]
        return remote[np.unique(keys, return_index=True)[1]]

    @cached_property
    def audience(self) -> NDArray[np.uint64]:
        """[N] a number for the set of ranks that get the same region of the same sender; equal sets have equal ones, but for chance."""
        keys = number_rows(np.column_stack([self.source, self.region]))
        sums = np.zeros(int(keys.max(initial=-1)) + 1, np.uint64)
        # A product with a large odd number spreads small ones over all bits, so that sums of different sets differ.
        spread = (self.target.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        spread = (spread ^ (spread >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        np.add.at(sums, keys[self.is_remote], (spread ^ (spread >> np.uint64(32)))[self.is_remote])
        return sums[keys]

    def take(self, rows: Flags | Ints) -> Copies:
        """Some of them."""
        return Copies(self.source[rows], self.target[rows], self.start[rows], self.shape[rows], self.region[rows])


@dataclass(frozen=True, eq=False)
class Wanted:
    """Boxes that target ranks want, each inside one distinct source box, `origin`.

    target, origin, region: [N]; start, shape: [N, D].
    """

    target: Ints
    origin: Ints
    region: Ints
    start: Ints
    shape: Ints

    def take(self, rows: Flags | Ints) -> Wanted:
        """Some of them."""
        return Wanted(self.target[rows], self.origin[rows], self.region[rows], self.start[rows], self.shape[rows])


class Kind:
    """Tensors of one shape that are split alike: each gets the same copies, but for which of several senders has the turn.

    name:         of one of them, for errors.
    nodes:        [ranks] the machine of each.
    piece_counts: elements down to which a copy is shared between senders.
    first_turn:   where the turns begin, another number for each kind.
    """

    def __init__(
        self, name: str, source: Placement, target: Placement, nodes: Ints, piece_counts: int, first_turn: int
    ) -> None:
        boxes, self._held = find_distinct(source)
        _check_tiling(name, boxes, source.global_shape)
        self._wanted = match_boxes(boxes, target)
        self._nodes, self._piece_counts = nodes, piece_counts
        self._turn, self._by_turn, self._num_turns = first_turn, dict[int, Copies](), 1

    def next_copies(self) -> Copies:
        """The copies of one more tensor of the kind."""
        turn, self._turn = self._turn % self._num_turns, self._turn + 1
        if turn not in self._by_turn:
            found, self._num_turns = choose_senders(self._wanted, self._held, self._nodes, self._piece_counts, turn)
            self._by_turn[turn] = found
        return self._by_turn[turn]


def find_distinct(placement: Placement) -> tuple[Ints, Ints]:
    """[boxes, 2 D] the boxes that differ, and [ranks] which of them each rank has, -1 for none."""
    some = placement.counts > 0
    rows = np.column_stack([placement.offsets, placement.shape])
    boxes, inverse = np.unique(rows[some], axis=0, return_inverse=True)
    which = np.full(len(some), -1, np.int64)
    which[some] = inverse.reshape(-1)
    return boxes, which


def _check_tiling(name: str, boxes: Ints, global_shape: tuple[int, ...]) -> None:
    dims, whole = len(global_shape), math.prod(global_shape)
    held = int(boxes[:, dims:].prod(axis=1).sum())
    if held != whole:
        raise LayoutError(
            f"the source holds {held} of the {whole} values of tensor '{name}', equal boxes counted once; its boxes have to fill the "
            "tensor without overlap"
        )
    ones, others, _, _ = _intersect(boxes, boxes)
    if (ones != others).any():
        at = boxes[ones[ones != others][0], :dims].tolist()
        raise LayoutError(f"boxes of the source overlap in tensor '{name}' at {at}; give ranks equal boxes or apart")


def match_boxes(boxes_S: Ints, target: Placement) -> Wanted:
    """What each target rank wants of which source box, in the order of target boxes, then ranks."""
    boxes_T, wanting = find_distinct(target)
    box_P, origin_P, start_P, shape_P = _intersect(boxes_T, boxes_S)
    region_P = number_rows(np.column_stack([origin_P, start_P, shape_P]))
    ranks = np.argsort(wanting, kind="stable")[np.count_nonzero(wanting < 0) :]
    ranks_per_box = np.bincount(wanting[ranks], minlength=len(boxes_T))
    pair, within = _repeat(ranks_per_box[box_P])
    first = np.cumsum(ranks_per_box) - ranks_per_box
    target_N = ranks[first[box_P[pair]] + within]
    return Wanted(target_N, origin_P[pair], region_P[pair], start_P[pair], shape_P[pair])


def _intersect(ones: Ints, others: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Pairs of boxes that share something, ordered by the first: (index of one, index of other, start, shape) of what they share."""
    dims = ones.shape[1] // 2
    ends, other_ends = ones[:, :dims] + ones[:, dims:], others[:, :dims] + others[:, dims:]
    meet = np.ones((len(ones), len(others)), np.bool_)
    for dim in range(dims):
        low = np.maximum.outer(ones[:, dim], others[:, dim])
        meet &= low < np.minimum.outer(ends[:, dim], other_ends[:, dim])
    i, j = np.nonzero(meet)
    start = np.maximum(ones[i, :dims], others[j, :dims])
    return i, j, start, np.minimum(ends[i], other_ends[j]) - start


def number_rows(rows: Ints) -> Ints:
    """[rows] numbers from 0, equal where rows are."""
    numbers = np.zeros(len(rows), np.int64)
    for column in rows.T:
        # Renumbered after each column, so that the product stays small.
        numbers = np.unique(numbers * (column.max(initial=0) + 1) + column, return_inverse=True)[1].reshape(-1)
    return numbers


def _repeat(times: Ints) -> tuple[Ints, Ints]:
    """Each index as often as it says: [3, 1] gives (0, 0, 0, 1) and, within each, (0, 1, 2, 0)."""
    index = np.repeat(np.arange(len(times)), times)
    return index, np.arange(len(index)) - (np.cumsum(times) - times)[index]


def choose_senders(wanted: Wanted, held: Ints, nodes: Ints, piece_counts: int, turn: int) -> tuple[Copies, int]:
    """The copies, and over how many tensors of the kind the turns go round.

    held: [ranks] the source box of each, -1 for none. A rank that wants what it holds is its own sender.

    Candidates for a box are its holders on the wanting rank's machine, else all. Of copies of one size with the same candidates each sends
    equally many, to wanting ranks that follow one another; what is left over is cut into pieces, which are dealt out in turn.
    """
    is_own = held[wanted.target] == wanted.origin
    own, away = wanted.take(is_own), wanted.take(~is_own)
    candidates = _Candidates(held, nodes, away)
    order, within, alike = _count_alike(candidates, away)
    away, count = away.take(order), candidates.count[order]
    first, left = candidates.first[order], alike % count
    even = alike - left
    is_even = within < even
    sent, rest = away.take(is_even), away.take(~is_even)
    sender = first[is_even] + within[is_even] * count[is_even] // even[is_even]
    parts = _count_parts(rest, count[~is_even], piece_counts)
    owner, piece = _repeat(parts)
    dealt = (turn * left[~is_even] + within[~is_even] - even[~is_even]) * parts
    dealer = first[~is_even][owner] + (dealt[owner] + piece) % count[~is_even][owner]
    cut = _cut_pieces(rest.take(owner), piece, parts[owner], first_region=int(wanted.region.max(initial=0)) + 1)
    every = _join([own, sent, cut])
    source = np.concatenate([own.target, candidates.members[sender], candidates.members[dealer]])
    num_turns = int((count[~is_even] // np.gcd(count[~is_even], left[~is_even] * parts)).max(initial=1))
    return Copies(source, every.target, every.start, every.shape, every.region), num_turns


class _Candidates:
    """Who could send each wanted box: `members[first : first + count]`, ranks ascending."""

    def __init__(self, held: Ints, nodes: Ints, wanted: Wanted) -> None:
        holders = np.flatnonzero(held >= 0)
        self.members = holders[np.lexsort((holders, nodes[holders], held[holders]))]
        num_nodes = int(nodes.max(initial=0)) + 1
        origins = held[self.members]
        near = origins * num_nodes + nodes[self.members]
        self.first, self.count = _find_runs(near, wanted.origin * num_nodes + nodes[wanted.target])
        far = self.count == 0
        self.first[far], self.count[far] = _find_runs(origins, wanted.origin[far])


def _find_runs(ascending: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Where each value begins in an ascending array, and how often it is there."""
    first = np.searchsorted(ascending, values)
    return first, np.searchsorted(ascending, values, side="right") - first


def _count_alike(candidates: _Candidates, wanted: Wanted) -> tuple[Ints, Ints, Ints]:
    """An order in which boxes of one size with the same candidates are side by side; in this order, place and number of each in its set."""
    keys = (candidates.first, candidates.count, wanted.shape.prod(axis=1))
    order = np.lexsort((wanted.start[:, 0], wanted.target, *keys))
    ordered = np.stack([key[order] for key in keys])
    begins = np.flatnonzero(np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))[: len(order)])
    sizes = np.diff(np.append(begins, len(order)))
    which, within = _repeat(sizes)
    return order, within, sizes[which]


def _count_parts(rest: Wanted, count: Ints, piece_counts: int) -> Ints:
    """Into how many pieces each is cut: one a candidate, but none smaller than it has to be."""
    wanted = -(-rest.shape.prod(axis=1) // piece_counts)
    return np.minimum(np.minimum(wanted, count), rest.shape.max(axis=1, initial=1))


def _cut_pieces(wanted: Wanted, piece: Ints, parts: Ints, first_region: int) -> Wanted:
    start, shape = cut_even(wanted.start, wanted.shape, piece, parts)
    regions = number_rows(np.column_stack([wanted.region, start, shape]))
    # A piece is a region of its own, beside those of whole boxes.
    region = np.where(parts > 1, first_region + regions, wanted.region)
    return Wanted(wanted.target, wanted.origin, region, start, shape)


def cut_even(start: Ints, shape: Ints, piece: Ints, parts: Ints | int) -> tuple[Ints, Ints]:
    """The box of one of `parts` pieces of each box, as even as it comes; over all pieces they fill the boxes.

    Cut along its longest dimension, and where that has fewer rows than there are parts along the next longest too, and so on; pieces beyond
    the last value are empty.
    """
    rows, start, shape = np.arange(len(shape)), start.copy(), shape.copy()
    left, index = np.broadcast_to(parts, len(shape)), piece
    for dim in np.argsort(-shape, axis=1, kind="stable").T:
        length = shape[rows, dim]
        count = np.maximum(np.minimum(length, left), 1)
        at, index, left = index % count, index // count, left // count
        low = at * length // count
        start[rows, dim] += low
        shape[rows, dim] = (at + 1) * length // count - low
    shape[index > 0] = 0
    return start, shape


def _join(parts: list[Wanted]) -> Wanted:
    fields = ((p.target, p.origin, p.region, p.start, p.shape) for p in parts)
    target, origin, region, start, shape = (np.concatenate(column) for column in zip(*fields, strict=True))
    return Wanted(target, origin, region, start, shape)
