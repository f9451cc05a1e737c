"""Exact attention on a GPU: packed rows (with gradient) and the paged cache through one kernel, whose order over the keys never changes.

Dimensions: T packed tokens, S sequences, H query heads, N kv heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.models.attention import AttentionForm, Paged, layer_index, to_device
from hybridflow.models.kv_cache import PagedKVCache

if TYPE_CHECKING:
    from hybridflow.models.exact_kernels.attention import Form, Tiles


class ExactKernelPlan:
    """Exact attention of some rows: `positions` says of each row's new tokens where they stand, from `firsts` to `firsts + counts - 1`.

    firsts: [S] int64, position of each row's first new token; counts: [S] int64, new tokens.
    owners: [S] int64, where each row's keys begin among the tokens, or which row of `tables` says where they are.
    tables: [S, W] int32 on the CPU, blocks of the cache; None for packed rows, which have no other keys.
    """

    def __init__(
        self,
        firsts: np.ndarray,
        counts: np.ndarray,
        owners: np.ndarray,
        device: torch.device,
        tables: Tensor | None = None,
    ) -> None:
        self._rows = (firsts, counts, owners)
        self._device = device
        self._tables = None if tables is None else tables.to(device, torch.int32, non_blocking=True).contiguous()
        self._cache: PagedKVCache | None = None
        self._new_slots: Tensor | None = None
        self._tiles: dict[int, Tensor] = {}
        self._key_tiles: dict[int, Tensor] = {}

    @classmethod
    def packed(cls, lengths: np.ndarray, device: torch.device) -> ExactKernelPlan:
        """Packed rows of these lengths."""
        return cls(np.zeros_like(lengths), lengths, np.cumsum(lengths) - lengths, device)

    @classmethod
    def paged(cls, paged: Paged, device: torch.device) -> ExactKernelPlan:
        """New tokens against the paged cache."""
        counts = paged.new_lens()
        firsts = paged.context_lens.numpy().astype(np.int64) - counts
        plan = cls(firsts, counts, np.arange(counts.size), device, paged.block_tables)
        plan._cache = paged.cache
        plan._new_slots = to_device(paged.slots(*paged.new_positions()), device)
        return plan

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]."""
        from hybridflow.models import exact_kernels

        if form.softcap is not None:
            raise RuntimeError(f"the model has an attention softcap, {form.softcap}, which exact kernels do not know")
        own_form = exact_kernels.Form(form.scale, form.window or 0)
        if self._cache is None:
            return _ExactKernelAttention.apply(query_THK, key_TNK, value_TNK, self, own_form)
        assert self._new_slots is not None
        layer = layer_index(module)
        self._cache.write(layer, self._new_slots, key_TNK, value_TNK)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return exact_kernels.attend(query_THK, keys, values, self.tiles(query_THK, keys), own_form)[0]

    def tiles(self, query_THK: Tensor, keys: Tensor) -> Tiles:
        """The tiles of queries for heads and dtype such as these."""
        from hybridflow.models import exact_kernels

        step = exact_kernels.count_queries(query_THK.dtype, query_THK.shape[1] // keys.shape[1])
        if step not in self._tiles:
            self._tiles[step] = to_device(plan_query_tiles(*self._rows, step), self._device)
        page = 1 if self._cache is None else self._cache.block_size
        return exact_kernels.Tiles(self._tiles[step], self._tables, page)

    def key_tiles(self, key_TNK: Tensor) -> Tensor:
        """The blocks of keys of packed rows for the backward pass."""
        from hybridflow.models import exact_kernels

        step = exact_kernels.count_keys(key_TNK.dtype)
        if step not in self._key_tiles:
            _, lengths, starts = self._rows
            self._key_tiles[step] = to_device(plan_key_tiles(starts, lengths, step), self._device)
        return self._key_tiles[step]


def plan_query_tiles(firsts: np.ndarray, counts: np.ndarray, owners: np.ndarray, step: int) -> np.ndarray:
    """Tiles of up to `step` new tokens, [n, 4] int32: owner, index of the first token, its position, how many.

    Each token is in exactly one tile, and a tile is of one row.
    """
    row, within = _cut(counts, step)
    token = (np.cumsum(counts) - counts)[row] + within
    columns = [owners[row], token, firsts[row] + within, np.minimum(counts[row] - within, step)]
    return np.stack(columns, axis=1).astype(np.int32)


def plan_key_tiles(starts: np.ndarray, lengths: np.ndarray, step: int) -> np.ndarray:
    """Blocks of `step` positions of packed rows, [n, 4] int32: index of the first key, its position, how many, the row's length."""
    row, within = _cut(lengths, step)
    columns = [starts[row] + within, within, np.minimum(lengths[row] - within, step), lengths[row]]
    return np.stack(columns, axis=1).astype(np.int32)


def _cut(counts: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """For each piece of up to `step` of a row's tokens the row, and where in the row's tokens it begins."""
    pieces = -(-counts // step)
    row = np.repeat(np.arange(counts.size), pieces)
    return row, (np.arange(row.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * step


class _ExactKernelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, plan: ExactKernelPlan, form: Form
    ) -> Tensor:
        from hybridflow.models import exact_kernels

        query, key, value = (exact_kernels.align(rows) for rows in (query_THK, key_TNK, value_TNK))
        tiles = plan.tiles(query, key)
        out, log_sum = exact_kernels.attend(query, key, value, tiles, form)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.tiles, ctx.form, ctx.key_tiles = tiles, form, plan.key_tiles
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        from hybridflow.models import exact_kernels

        key_tiles: Callable[[Tensor], Tensor] = ctx.key_tiles
        saved = ctx.saved_tensors
        gradients = exact_kernels.attend_backward(grads[0], saved, ctx.tiles, key_tiles(saved[1]), ctx.form)
        return *gradients, None, None
