"""Rows of a batch side by side, as one forward pass takes them: everything indexed on the host, a rank's part of the tokens cut out.

Dimensions: S sequences, T packed tokens, M scored tokens (those whose log-probability is computed).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.algorithms.losses import Normalization, compute_token_weights
from hybridflow.batch import Batch
from hybridflow.models import Packed, Shaped, predicted_positions
from hybridflow.train_engine.ranks import ALONE, Ranks
from hybridflow.train_engine.segments import RowGroup, Segments, build_segments
from hybridflow.train_engine.sequence_parallel import UlyssesPlan
from hybridflow.types import UNSHAPED, RowState, Shaping

# Rows of a matrix product that a GPU works on together; also keeps the number of shapes small.
_TILE_TOKENS = {"cpu": 1, "cuda": 128}


@dataclass(frozen=True)
class Rows:
    """Per-token columns of a batch as flat host arrays; row i is at `offsets[i]:offsets[i + 1]` of each.

    tokens:    [sum of lengths] int32.
    loss_mask: [sum of lengths] bool, True where a token counts; all False in a row that is not OK.
    columns:   the per-token columns that a loss reads, [sum of lengths].
    num_kept:  [sum of lengths] int32, among how many tokens each was drawn; None where the rows do not tell.
    """

    offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    columns: dict[str, NDArray[np.float32]]
    num_kept: NDArray[np.int32] | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def count_masked(self) -> NDArray[np.int64]:
        """Tokens that count, of each row: int64 [S]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])[self.offsets])


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch as one rank of the sequence axis computes it; tensors on the model's device unless said otherwise.

    The forward pass sees the tokens of all rows and, where their number does not divide, one dummy row at the end that nothing reads.
    Each rank holds an equal part of these, and scores what is predicted by the hidden states of its part; a row may lie in several parts.
    A loss sees all tokens of all rows, without the dummy, on every rank.

    tokens_T, positions_T: int64, this rank's part; positions of the dummy row are 0.
    attention:             over the tokens of all parts.
    hidden_index_M:        int64, which of this rank's hidden states predicts scored token i.
    token_index_M:         int64, at which of the loss's tokens scored token i stands.
    targets_M:             int64, the scored tokens.
    cu_seqlens:            [S+1] int32 on the host, the rows in the loss's tokens; of rows that share a trunk, it and their branches.
    is_here_T:             bool on the host, of the loss's tokens those that this rank speaks of; each is spoken of by one rank.
    places_T, places_M:    int64 on the host: where the loss's tokens and the scored ones stand in the arrays of `Rows`.
    """

    tokens_T: Tensor
    positions_T: Tensor
    attention: Packed
    hidden_index_M: Tensor
    token_index_M: Tensor
    targets_M: Tensor
    cu_seqlens: Tensor
    is_here_T: NDArray[np.bool_]
    places_T: NDArray[np.int64]
    places_M: NDArray[np.int64]


def read_rows(batch: Batch | None, columns: Iterable[str] = ()) -> Rows:
    """Reads `tokens`, `loss_mask`, `state`, the named float columns and `kept_counts` where it is there; ValueError names the row where
    a length differs.

    None is a batch without rows, of whatever columns.
    """
    if batch is None:
        return Rows(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.bool_), {})
    tokens = batch.ragged("tokens")
    offsets = tokens.offsets.numpy()
    ok = batch.numpy("state") == RowState.OK
    mask = _read_column(batch, "loss_mask", offsets).astype(np.bool_) & np.repeat(ok, np.diff(offsets))
    values = {name: _read_column(batch, name, offsets) for name in columns}
    num_kept = _read_column(batch, "kept_counts", offsets) if "kept_counts" in batch else None
    return Rows(offsets, tokens.values.numpy(), mask, values, num_kept)


def pack_rows(
    rows: Rows, groups: Sequence[RowGroup], scored: NDArray[np.bool_], device: torch.device, axis: Ranks = ALONE
) -> PackedRows:
    """The rows of these groups side by side, in the order given; none make a micro-batch of the dummy row alone.

    scored: [sum of lengths] bool; of the tokens that something predicts, those to compute a log-probability of; none in a trunk.
    axis:   the ranks that share the tokens; all call with the same rows. Alone on the CPU there is no dummy row; on a GPU each part is
            a multiple of 128 tokens.
    """
    segments = build_segments(groups, rows.lengths)
    lengths = segments.lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions_T = np.arange(starts[-1]) - np.repeat(starts[:-1] - segments.starts, lengths)
    places_T = positions_T + np.repeat(rows.offsets[segments.rows], lengths)
    tokens_T = torch.from_numpy(rows.tokens[places_T].astype(np.int64))
    cu_seqlens = torch.from_numpy(starts.astype(np.int32))
    part = plan_part(places_T.size, axis.rank, axis.size, _TILE_TOKENS[device.type])
    is_here_T = part.speaks_of(places_T.size)
    hidden_index, token_index = predicted_positions(cu_seqlens)
    wanted = torch.from_numpy(scored[places_T] & is_here_T)[token_index]
    token_index = token_index[wanted]
    return PackedRows(
        tokens_T=to_device(part.cut(tokens_T), device),
        positions_T=to_device(part.cut(torch.from_numpy(positions_T)), device),
        attention=_build_attention(segments, part.padding, axis),
        hidden_index_M=to_device(hidden_index[wanted] - part.start, device),
        token_index_M=to_device(token_index, device),
        # Taken from the tokens of all parts: a row that goes on in the next part has its next token there.
        targets_M=to_device(tokens_T[token_index], device),
        cu_seqlens=cu_seqlens,
        is_here_T=is_here_T,
        places_T=places_T,
        places_M=places_T[token_index.numpy()],
    )


def compute_packed_weights(rows: Rows, packed: PackedRows, normalization: Normalization) -> tuple[Tensor, Tensor]:
    """What counts in the loss of a micro-batch on this rank, and how much: mask [T] bool, weights [T] float64, on the host.

    A row's weights come from all its tokens, wherever they are; both are 0 at a token that another rank speaks of. So over the ranks of
    the axis masks and weights add up to those of one rank.
    """
    mask_T, is_here_T = torch.from_numpy(rows.loss_mask[packed.places_T]), torch.from_numpy(packed.is_here_T)
    weights_T = compute_token_weights(mask_T, packed.cu_seqlens, normalization)
    return mask_T & is_here_T, weights_T * is_here_T


def build_shaped(rows: Rows, packed: PackedRows, shaping: Shaping, device: torch.device) -> Shaped | None:
    """How the scored tokens of a micro-batch were sampled, for the head: each came after all of its row up to it. None: unshaped.

    Raises ValueError where sampling cut tokens and a row does not say among how many one of its scored tokens was drawn.
    """
    if shaping == UNSHAPED:
        return None
    parts = (rows.tokens, rows.offsets[_find_rows(rows, packed)], packed.places_M)
    tokens_N, starts_M, ends_M = (to_device(torch.from_numpy(part.astype(np.int64)), device) for part in parts)
    num_kept_M = _read_num_kept(rows, packed, device) if shaping.cuts else None
    return Shaped(shaping, tokens_N, starts_M, ends_M, num_kept_M)


def _find_rows(rows: Rows, packed: PackedRows) -> NDArray[np.int64]:
    """The row of each scored token."""
    return np.searchsorted(rows.offsets, packed.places_M, side="right") - 1


def _read_num_kept(rows: Rows, packed: PackedRows, device: torch.device) -> Tensor:
    num_kept_M = np.zeros(packed.places_M.shape, np.int32) if rows.num_kept is None else rows.num_kept[packed.places_M]
    if (untold := np.flatnonzero(num_kept_M < 1)).size:
        raise ValueError(
            f"row {_find_rows(rows, packed)[untold[0]]}: 'kept_counts' does not say among how many tokens each was drawn, which min_p, "
            "top_k and top_p ask for; take rows that the native engine has sampled with them"
        )
    counts = torch.from_numpy(num_kept_M.astype(np.int64))
    return counts if device.type == "cpu" else counts.pin_memory()


@dataclass(frozen=True)
class Part:
    """One rank's part of a micro-batch: `[start, start + size)` of its tokens and `padding` dummy ones behind them."""

    start: int
    size: int
    padding: int

    def cut(self, values_T: Tensor) -> Tensor:
        """This part of the values of all tokens, 0 at dummy ones."""
        return torch.nn.functional.pad(values_T, (0, self.padding))[self.start : self.start + self.size]

    def speaks_of(self, num_tokens: int) -> NDArray[np.bool_]:
        """[T] bool, the tokens before which a token of this part stands; the very first is the first part's."""
        before_T = np.maximum(np.arange(num_tokens) - 1, 0)
        return (before_T >= self.start) & (before_T < self.start + self.size)


def plan_part(num_tokens: int, rank: int, degree: int, tile_tokens: int) -> Part:
    """The part of one of `degree` ranks.

    Invariants: parts follow each other in the order of ranks and are of one size, the smallest multiple of `tile_tokens` above 0 with which
    they hold all tokens; what they hold beyond these are dummy tokens at the end.
    """
    size = max(1, -(-num_tokens // (degree * tile_tokens))) * tile_tokens
    return Part(rank * size, size, degree * size - num_tokens)


def _build_attention(segments: Segments, padding: int, axis: Ranks) -> Packed:
    lengths = np.append(segments.lengths, padding) if padding else segments.lengths
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    wrap = functools.partial(UlyssesPlan, axis=axis) if axis.size > 1 else None
    return Packed(cu_seqlens, int(lengths.max()), keys=segments.build_keys(padding), wrap=wrap)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a host tensor without waiting for it: through pinned memory, so that the host stays ahead of the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _read_column(batch: Batch, name: str, offsets: NDArray[np.int64]) -> NDArray[Any]:
    column = batch.ragged(name)
    if not np.array_equal(column.offsets.numpy(), offsets):
        lengths = np.diff(column.offsets.numpy())
        row = int(np.flatnonzero(lengths != np.diff(offsets))[0])
        raise ValueError(
            f"row {row}: '{name}' has {lengths[row]} values for {offsets[row + 1] - offsets[row]} tokens; give one value a token"
        )
    values: NDArray[Any] = column.values.numpy()
    return values
