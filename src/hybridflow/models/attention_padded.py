"""Fast attention for ragged rows: rows of like length are padded to one block and go through torch's SDPA.

Serves the CPU, and GPUs where the variable-length kernel does not apply (float32, softcap, paged cache).
Dimensions: T packed tokens, R rows of a bucket, P padded slots of all buckets, L query length of a bucket, M key length, H query heads,
N kv heads, G = H / N, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.models.attention import AttentionForm, AttentionPlan, Paged, SharedKeys, layer_index, to_device
from hybridflow.models.kv_cache import PagedKVCache

SHORT_ROW_TOKENS = 32


def plan_buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups rows so that padding each group to its longest row wastes little.

    Each row with a token is in exactly one bucket; rows of a bucket keep their order; the longest row of a bucket is at most twice the
    shortest, or at most 32 tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    buckets = []
    while order.size:
        longest = lengths[order[0]]
        limit = 0 if longest <= SHORT_ROW_TOKENS else longest / 2
        count = int(np.searchsorted(-lengths[order], -limit, side="right"))
        buckets.append(np.sort(order[:count]))
        order = order[count:]
    return buckets


def plan_pair_buckets(new: np.ndarray, held: np.ndarray) -> list[np.ndarray]:
    """Groups rows that are alike both in their new tokens and in all that they hold, [rows] each."""
    return [rows[alike] for rows in plan_buckets(new) for alike in plan_buckets(held[rows])]


def attend_padded(
    query_RLHK: Tensor, key_RMNK: Tensor, value_RMNK: Tensor, form: AttentionForm, mask: Tensor | None
) -> Tensor:
    """Attention of padded rows, [R, L, H, K]. mask: bool [R or 1, 1, G * L, M], True attends; None is causal with L = M."""
    query, key, value = (x.transpose(1, 2) for x in (query_RLHK, key_RMNK, value_RMNK))
    num_rows, num_heads, length, size = query.shape
    num_kv_heads = key.shape[1]
    if mask is None and form.softcap is None:
        gqa = num_heads != num_kv_heads
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=form.scale, enable_gqa=gqa)
        return out.transpose(1, 2)
    # The query heads of a group lie one after another along the query axis: no key or value is repeated.
    folded = query.reshape(num_rows, num_kv_heads, -1, size)
    if form.softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=form.scale)
    else:
        scores = torch.matmul(folded, key.transpose(2, 3)) * form.scale
        scores = torch.tanh(scores.to(torch.promote_types(scores.dtype, torch.float32)) / form.softcap) * form.softcap
        assert mask is not None
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype)
        out = torch.matmul(weights, value)
    return out.reshape(num_rows, num_heads, length, size).transpose(1, 2)


@dataclass(frozen=True)
class Bucket:
    """Rows padded to one length: `num_rows` rows of `length` slots each."""

    num_rows: int
    length: int

    @property
    def num_slots(self) -> int:
        """Padded slots of the bucket."""
        return self.num_rows * self.length


class RowPadding:
    """Index tensors between packed tokens [T] and the padded slots [P] of all buckets.

    pad_index:   [P] the token of a slot; slots past the end of a row repeat its last token, so nothing leaks from other rows.
    unpad_index: [T] the slot of a token.
    Both are None where packed tokens already are one block of equal rows.
    """

    def __init__(self, lengths: np.ndarray, bucket_rows: list[np.ndarray], device: torch.device) -> None:
        starts = np.cumsum(lengths) - lengths
        self.buckets = [Bucket(rows.size, int(lengths[rows].max())) for rows in bucket_rows]
        self.sizes = [bucket.num_slots for bucket in self.buckets]
        self.pad_index: Tensor | None = None
        self.unpad_index: Tensor | None = None
        if len(self.buckets) == 1 and self.sizes[0] == lengths.sum():
            return
        pad_index = np.empty(sum(self.sizes), dtype=np.int64)
        unpad_index = np.empty(int(lengths.sum()), dtype=np.int64)
        base = 0
        for rows, bucket in zip(bucket_rows, self.buckets, strict=True):
            within = np.arange(bucket.length)
            real = within[None, :] < lengths[rows, None]
            tokens = starts[rows, None] + np.minimum(within[None, :], lengths[rows, None] - 1)
            pad_index[base : base + bucket.num_slots] = tokens.reshape(-1)
            unpad_index[tokens[real]] = base + np.flatnonzero(real)
            base += bucket.num_slots
        self.pad_index = to_device(pad_index, device)
        self.unpad_index = to_device(unpad_index, device)

    def pad(self, rows_T: Tensor) -> tuple[Tensor, ...]:
        """One tensor a bucket, [R, L, ...]."""
        padded = rows_T if self.pad_index is None else _PadRows.apply(rows_T, self.pad_index, self.unpad_index)
        parts = padded.split(self.sizes) if len(self.sizes) > 1 else (padded,)
        return tuple(
            part.reshape(bucket.num_rows, bucket.length, *rows_T.shape[1:])
            for part, bucket in zip(parts, self.buckets, strict=True)
        )

    def unpad(self, parts: list[Tensor]) -> Tensor:
        """The reverse: [T, ...] from one tensor a bucket."""
        flat = [part.flatten(0, 1) for part in parts]
        padded = flat[0] if len(flat) == 1 else torch.cat(flat)
        return padded if self.unpad_index is None else _UnpadRows.apply(padded, self.unpad_index)


class _PadRows(torch.autograd.Function):
    # Padding slots get a zero gradient (causal keys after the row, queries whose output is dropped), so the adjoint is a plain gather;
    # autograd's own scatter-add is several times slower on the CPU.
    @staticmethod
    def forward(ctx: Any, rows_T: Tensor, pad_index: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.unpad_index = unpad_index
        return rows_T.index_select(0, pad_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.unpad_index), None, None


class _UnpadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_P: Tensor, unpad_index: Tensor) -> Tensor:
        ctx.unpad_index = unpad_index
        ctx.shape = rows_P.shape
        return rows_P.index_select(0, unpad_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_zeros(ctx.shape).index_copy_(0, ctx.unpad_index, grads[0]), None


class PaddedPlan:
    """Packed rows through padded blocks, with gradient."""

    def __init__(self, lengths: np.ndarray, device: torch.device) -> None:
        self.device = device
        self.padding = RowPadding(lengths, plan_buckets(lengths), device)
        self.masks: dict[tuple[int, int | None, int], Tensor] = {}

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]."""
        group = query_THK.shape[1] // key_TNK.shape[1]
        padded = zip(*(self.padding.pad(rows) for rows in (query_THK, key_TNK, value_TNK)), strict=True)
        outs = [attend_padded(q, k, v, form, self._mask(q.shape[1], form, group)) for q, k, v in padded]
        return self.padding.unpad(outs)

    def _mask(self, length: int, form: AttentionForm, group: int) -> Tensor | None:
        window = form.window if form.window is not None and form.window < length else None
        if window is None and form.softcap is None:
            return None
        key = (length, window, group)
        if key not in self.masks:
            position = torch.arange(length, device=self.device)
            mask = _visible(position[None, :, None], position[None, None, :], window)
            self.masks[key] = mask.repeat(1, group, 1).unsqueeze(1)
        return self.masks[key]


class SharedPlan:
    """Packed rows that share what they begin with, through padded blocks, with gradient."""

    def __init__(self, lengths: np.ndarray, keys: SharedKeys, device: torch.device) -> None:
        self.index_C = to_device(keys.index_C.numpy(), device)
        held = keys.lengths
        # Rows by themselves apart from branches: they are plainly causal, which takes no mask. Branches alike in what they ask and hold.
        branches, whole = np.flatnonzero(held > lengths), np.flatnonzero(held == lengths)
        bucket_rows = [whole[alike] for alike in plan_buckets(lengths[whole])]
        self.num_whole = len(bucket_rows)
        bucket_rows += [branches[alike] for alike in plan_pair_buckets(lengths[branches], held[branches])]
        self.queries, self.keys = (RowPadding(part, bucket_rows, device) for part in (lengths, held))
        self.positions = [
            _place(lengths[rows], held[rows], queries.length, device)
            for rows, queries in zip(bucket_rows, self.queries.buckets, strict=True)
        ]
        self.masks: dict[tuple[int, int | None, int], Tensor] = {}

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]."""
        group = query_THK.shape[1] // key_TNK.shape[1]
        key_CNK, value_CNK = (rows.index_select(0, self.index_C) for rows in (key_TNK, value_TNK))
        padded = zip(self.queries.pad(query_THK), self.keys.pad(key_CNK), self.keys.pad(value_CNK), strict=True)
        outs = [attend_padded(q, k, v, form, self._mask(at, form, group)) for at, (q, k, v) in enumerate(padded)]
        return self.queries.unpad(outs)

    def _mask(self, bucket: int, form: AttentionForm, group: int) -> Tensor | None:
        window = form.window if form.window is not None and form.window < self.keys.buckets[bucket].length else None
        if bucket < self.num_whole and window is None and form.softcap is None:
            return None
        key = (bucket, window, group)
        if key not in self.masks:
            query_position, key_position = self.positions[bucket]
            self.masks[key] = _visible(query_position, key_position, window).repeat(1, group, 1).unsqueeze(1)
        return self.masks[key]


def _place(new: np.ndarray, held: np.ndarray, query_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of padded queries [R, L, 1], a row's last ones of those that it holds, and of padded keys [1, 1, M]."""
    positions = held[:, None] - new[:, None] + np.minimum(np.arange(query_length)[None, :], new[:, None] - 1)
    return to_device(positions[:, :, None], device), torch.arange(int(held.max()), device=device)[None, None, :]


def _visible(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    seen = key_position <= query_position
    return seen if window is None else seen & (key_position > query_position - window)


class PagedPlan:
    """New tokens against the paged cache: their keys and values are written, then each sequence's slots gathered. No gradient.

    A pass whose sequences hold nothing but the new tokens attends to these directly, through `packed`.
    """

    def __init__(self, paged: Paged, device: torch.device, packed: AttentionPlan | None) -> None:
        self.cache: PagedKVCache = paged.cache
        self.packed = packed
        self.device = device
        rows, positions = paged.new_positions()
        self.new_slots = to_device(paged.slots(rows, positions), device)
        if packed is not None:
            return
        self.context = paged.context_lens.numpy().astype(np.int64)
        self.new = paged.new_lens()
        bucket_rows = plan_pair_buckets(self.new, self.context)
        self.queries = RowPadding(self.new, bucket_rows, device)
        self.key_buckets: list[tuple[Tensor, Tensor, Tensor]] = []
        for bucket, queries in zip(bucket_rows, self.queries.buckets, strict=True):
            self.key_buckets.append(self._gather(paged, bucket, queries.length))
        self.masks: dict[tuple[int, int | None, int], Tensor] = {}

    def _gather(self, paged: Paged, rows: np.ndarray, query_length: int) -> tuple[Tensor, Tensor, Tensor]:
        """(slots [R, M], query positions [R, L, 1], key positions [1, 1, M]) of one bucket."""
        context = self.context[rows]
        # Keys past the context repeat a slot of the same sequence: stale slots, whatever they hold, are never read.
        key_positions = np.minimum(np.arange(int(context.max()))[None, :], context[:, None] - 1)
        slots = to_device(paged.slots(rows[:, None], key_positions), self.device)
        return slots, *_place(self.new[rows], context, query_length, self.device)

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K] of the new tokens."""
        layer = layer_index(module)
        self.cache.write(layer, self.new_slots, key_TNK, value_TNK)
        if self.packed is not None:
            return self.packed.attend(module, query_THK, key_TNK, value_TNK, form)
        group = query_THK.shape[1] // key_TNK.shape[1]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        outs = []
        for index, query_RLHK in enumerate(self.queries.pad(query_THK)):
            slots = self.key_buckets[index][0]
            shape = (*slots.shape, *key_TNK.shape[1:])
            key_RMNK = keys.index_select(0, slots.flatten()).view(shape)
            value_RMNK = values.index_select(0, slots.flatten()).view(shape)
            outs.append(attend_padded(query_RLHK, key_RMNK, value_RMNK, form, self._mask(index, form.window, group)))
        return self.queries.unpad(outs)

    def _mask(self, index: int, window: int | None, group: int) -> Tensor:
        if (index, window, group) not in self.masks:
            _, query_positions, key_positions = self.key_buckets[index]
            mask = _visible(query_positions, key_positions, window)
            self.masks[index, window, group] = mask.repeat(1, group, 1).unsqueeze(1)
        return self.masks[index, window, group]
