"""Rows of a batch side by side, as one forward pass takes them: no padding, everything indexed on the host.

Dimensions: S sequences, T packed tokens, M scored tokens (those whose log-probability is computed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.models import Packed, predicted_positions
from hybridflow.types import RowState


@dataclass(frozen=True)
class Rows:
    """Per-token columns of a batch as flat host arrays; row i is at `offsets[i]:offsets[i + 1]` of each.

    tokens:    [sum of lengths] int32.
    loss_mask: [sum of lengths] bool, True where a token counts; all False in a row that is not OK.
    columns:   the per-token columns that a loss reads, [sum of lengths].
    """

    offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    columns: dict[str, NDArray[np.float32]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def count_masked(self) -> NDArray[np.int64]:
        """Tokens that count, of each row: int64 [S]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])[self.offsets])


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch; tensors on the model's device unless said otherwise.

    tokens_T, positions_T: int64.
    hidden_index_M:        int64, which packed position predicts scored token i.
    token_index_M:         int64, at which packed position scored token i stands.
    targets_M:             int64, the scored tokens.
    places_T, places_M:    int64 on the host: where packed and scored tokens stand in the arrays of `Rows`.
    """

    tokens_T: Tensor
    positions_T: Tensor
    attention: Packed
    hidden_index_M: Tensor
    token_index_M: Tensor
    targets_M: Tensor
    places_T: NDArray[np.int64]
    places_M: NDArray[np.int64]


def read_rows(batch: Batch | None, columns: Iterable[str] = ()) -> Rows:
    """Reads `tokens`, `loss_mask`, `state` and the named float columns; ValueError names the row where a length differs.

    None is a batch without rows, of whatever columns.
    """
    if batch is None:
        return Rows(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.bool_), {})
    tokens = batch.ragged("tokens")
    offsets = tokens.offsets.numpy()
    ok = batch.numpy("state") == RowState.OK
    mask = _read_column(batch, "loss_mask", offsets).astype(np.bool_) & np.repeat(ok, np.diff(offsets))
    values = {name: _read_column(batch, name, offsets) for name in columns}
    return Rows(offsets, tokens.values.numpy(), mask, values)


def pack_rows(rows: Rows, chosen: Sequence[int], scored: NDArray[np.bool_], device: torch.device) -> PackedRows:
    """The chosen rows side by side, in the order given.

    scored: [sum of lengths] bool; of the tokens that something predicts, those to compute a log-probability of.
    """
    index = np.asarray(chosen)
    lengths = rows.lengths[index]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions_T = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    places_T = positions_T + np.repeat(rows.offsets[index], lengths)
    tokens_T = torch.from_numpy(rows.tokens[places_T].astype(np.int64))
    cu_seqlens = torch.from_numpy(starts.astype(np.int32))
    hidden_index, token_index = predicted_positions(cu_seqlens)
    wanted = torch.from_numpy(scored[places_T])[token_index]
    token_index = token_index[wanted]
    return PackedRows(
        tokens_T=to_device(tokens_T, device),
        positions_T=to_device(torch.from_numpy(positions_T), device),
        attention=Packed(cu_seqlens, int(lengths.max())),
        hidden_index_M=to_device(hidden_index[wanted], device),
        token_index_M=to_device(token_index, device),
        targets_M=to_device(tokens_T[token_index], device),
        places_T=places_T,
        places_M=places_T[token_index.numpy()],
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a host tensor without waiting for it: through pinned memory, so that the host stays ahead of the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _read_column(batch: Batch, name: str, offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    column = batch.ragged(name)
    if not np.array_equal(column.offsets.numpy(), offsets):
        lengths = np.diff(column.offsets.numpy())
        row = int(np.flatnonzero(lengths != np.diff(offsets))[0])
        raise ValueError(
            f"row {row}: '{name}' has {lengths[row]} values for {offsets[row + 1] - offsets[row]} tokens; give one value a token"
        )
    values: NDArray[np.float32] = column.values.numpy()
    return values
