"""Rows cut into segments, so that what several rows begin with is computed once, forward and backward.

A group's samples share their prompt. Its tokens up to the last but one become a segment of their own, the trunk, and each row's others a
branch, whose tokens attend to the trunk and to themselves. The prompt's last token stays in every branch: its hidden state predicts the
first token of each response.

Dimensions: S segments, C keys of all segments together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.models.attention import SharedKeys

MIN_SAVED = 1 / 8
"""Share of a group's tokens that sharing has to save: a pass with trunks has masks, and keys and values to copy."""
MAX_KEYS_PER_TOKEN = 8
"""Each branch has a copy of its trunk's keys and values, in every layer; a group has at most so many for each token that it computes."""


@dataclass(frozen=True)
class RowGroup:
    """Rows that go through the model together: `RowGroup((4, 5, 6), trunk=211)`; trunk is the number of tokens that they share, or 0."""

    rows: tuple[int, ...]
    trunk: int = 0


@dataclass(frozen=True)
class GroupsOfPass:
    """What goes through the model together, by the numbers of rows in the batch; no groups make a pass of the dummy row alone."""

    groups: tuple[RowGroup, ...]
    num_tokens: int


def find_groups(
    tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    scored: NDArray[np.bool_],
    rows: Sequence[int],
    max_tokens: int,
) -> list[RowGroup]:
    """Rows that begin alike up to their first scored token, together; every row in one group, groups by their first row.

    tokens, scored: flat, row i at `offsets[i]:offsets[i + 1]`.
    max_tokens:     of a group; larger ones are cut in two and more, each with the trunk, and rows that are too long with it go alone. So
                    are those with more than `MAX_KEYS_PER_TOKEN`. Rows that would save less than `MIN_SAVED` go alone too.
    """
    alike: dict[tuple[int, bytes], list[int]] = {}
    for row in rows:
        start = offsets[row]
        trunk = max(_find_first(scored[start : offsets[row + 1]]) - 1, 0)
        alike.setdefault((trunk, tokens[start : start + trunk].tobytes()), []).append(row)
    lengths = np.diff(offsets)
    groups = [group for (trunk, _), same in alike.items() for group in _cut(same, trunk, lengths, max_tokens)]
    return sorted(groups, key=lambda group: group.rows[0])


def estimate_keys_per_token(num_rows: int, prompt_tokens: int, response_tokens: int, max_tokens: int) -> float:
    """Keys that attention holds for each token that is computed of a prompt's samples, as `find_groups` puts them together; 1 where they
    share nothing."""
    length = prompt_tokens + response_tokens
    groups = _cut(list(range(num_rows)), prompt_tokens - 1, np.full(num_rows, length), max_tokens)
    computed = sum(group.trunk + len(group.rows) * (length - group.trunk) for group in groups)
    return sum(group.trunk + len(group.rows) * length for group in groups) / computed


def add_up(
    groups: Sequence[RowGroup],
    lengths: NDArray[np.int64],
    values_of: Callable[[NDArray[np.int64]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Of values that whole rows have by their lengths, 0 for none, those of what each group computes: of its trunk once, and of each row
    what it has beyond. [groups] float64."""
    sizes = np.array([len(group.rows) for group in groups], np.int64)
    rows = np.array([row for group in groups for row in group.rows], np.int64)
    owners = np.repeat(np.arange(sizes.size), sizes)
    trunks = values_of(np.array([group.trunk for group in groups], np.int64))
    return np.bincount(owners, values_of(lengths[rows]), minlength=sizes.size) - (sizes - 1) * trunks


def _find_first(scored: NDArray[np.bool_]) -> int:
    return int(scored.argmax()) if scored.any() else 0


def _cut(rows: list[int], trunk: int, lengths: NDArray[np.int64], max_tokens: int) -> list[RowGroup]:
    groups, open_rows = list[list[int]](), list[int]()
    computed = keys = trunk
    for row in rows:
        branch = int(lengths[row]) - trunk
        fits = computed + branch <= max_tokens and keys + trunk + branch <= MAX_KEYS_PER_TOKEN * (computed + branch)
        if open_rows and not fits:
            groups.append(open_rows)
            open_rows, computed, keys = [], trunk, trunk
        open_rows.append(row)
        computed, keys = computed + branch, keys + trunk + branch
    return [group for same in [*groups, open_rows] for group in _join(same, trunk, lengths)]


def _join(rows: list[int], trunk: int, lengths: NDArray[np.int64]) -> list[RowGroup]:
    """The rows as a group, or each as one of its own where they would save too little."""
    saved = (len(rows) - 1) * trunk
    if saved > 0 and saved >= MIN_SAVED * lengths[rows].sum():
        return [RowGroup(tuple(rows), trunk)]
    return [RowGroup((row,)) for row in rows]


@dataclass(frozen=True)
class Segments:
    """What a micro-batch is made of: segment s is tokens `starts[s]` to `ends[s]` of row `rows[s]`, after a trunk that lies in segment
    `trunks[s]`, or in none (-1). All int64 [S]."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    trunks: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each."""
        return self.ends - self.starts

    def build_keys(self, padding: int) -> SharedKeys | None:
        """What each segment attends to, and as a last one `padding` dummy tokens to themselves; None where no segment has a trunk."""
        if (self.trunks < 0).all():
            return None
        lengths = np.append(self.lengths, padding) if padding else self.lengths
        firsts = np.cumsum(lengths) - lengths
        trunks = np.append(self.trunks, -1) if padding else self.trunks
        spans = [
            span
            for segment, trunk in enumerate(trunks.tolist())
            for span in ([trunk] if trunk >= 0 else []) + [segment]
        ]
        index_C = np.concatenate([np.arange(firsts[span], firsts[span] + lengths[span]) for span in spans])
        held = lengths + np.where(trunks >= 0, lengths[trunks], 0)
        ends = torch.from_numpy(np.append(0, np.cumsum(held)).astype(np.int32))
        return SharedKeys(torch.from_numpy(index_C), ends, int(held.max()))


def build_segments(groups: Sequence[RowGroup], lengths: NDArray[np.int64]) -> Segments:
    """Each group's trunk, then its branches; a row without one as it is."""
    cut: list[tuple[int, int, int, int]] = []
    for group in groups:
        trunk = len(cut) if group.trunk else -1
        if group.trunk:
            cut.append((group.rows[0], 0, group.trunk, -1))
        cut += [(row, group.trunk, int(lengths[row]), trunk) for row in group.rows]
    rows, starts, ends, trunks = np.array(cut, np.int64).reshape(-1, 4).T
    return Segments(rows, starts, ends, trunks)
