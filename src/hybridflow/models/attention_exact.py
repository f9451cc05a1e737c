"""Exact attention: a query's result depends on its own sequence alone, bit for bit (CPU, float32).

Forward: query blocks of 8 positions against key blocks of 32, an online softmax over the key blocks in ascending order; every product is
the same small one. Packed rows and the paged cache differ only in where a key is fetched. A masked key or block is an exact no-op.
Backward: blocks of 32 by 32; a block pair contributes in the order of its distance, so sums have a fixed order whatever else is packed.
Dimensions: T packed tokens (dummy rows of the padding included), Q query blocks of 8, C blocks of 32, H query heads, N kv heads, G = H / N,
K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.models.attention import AttentionForm, Paged, layer_index
from hybridflow.models.exact import bmm_fixed
from hybridflow.models.kv_cache import PagedKVCache

QUERY_BLOCK = 8
KEY_BLOCK = 32
# Finite, so that a fully masked block leaves no NaN: exp(-1e30 - anything) is exactly 0, and a sum begun on masked keys is scaled by 0.
_MASKED = -1e30


# Where the keys of given positions of given rows are stored; (rows, positions) broadcast.
SlotsOf = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _KeyStep:
    """One step of the online softmax: the first `count` query blocks meet one key block each."""

    count: int
    slots: Tensor
    masked: Tensor


class _QueryBlocks:
    """Blocks of 8 query positions of all rows, those with most key blocks first, and the key blocks that each meets."""

    def __init__(self, rows_T: np.ndarray, positions_T: np.ndarray, window: int | None) -> None:
        blocks = np.stack([rows_T, positions_T // QUERY_BLOCK], axis=1)
        unique, block_of_token = np.unique(blocks, axis=0, return_inverse=True)
        rows, first = unique[:, 0], unique[:, 1] * QUERY_BLOCK
        last_key = first // KEY_BLOCK
        first_key = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0) // KEY_BLOCK
        order = np.argsort(-(last_key - first_key), kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        self.rows, self.first = rows[order], first[order]
        self.first_key, self.num_keys = first_key[order], (last_key - first_key)[order] + 1
        self.token_slot = rank[block_of_token.reshape(-1)] * QUERY_BLOCK + positions_T % QUERY_BLOCK
        # A slot without a token takes another token of its block; its result is dropped.
        self.tokens = np.repeat(self._any_token(order.size, rank[block_of_token.reshape(-1)]), QUERY_BLOCK)
        self.tokens[self.token_slot] = np.arange(rows_T.size)

    @staticmethod
    def _any_token(num_blocks: int, block_T: np.ndarray) -> np.ndarray:
        token = np.empty(num_blocks, dtype=np.int64)
        token[block_T] = np.arange(block_T.size)
        return token


class _ForwardIndex:
    """Index tensors of the forward pass for one window."""

    def __init__(
        self, rows_T: np.ndarray, positions_T: np.ndarray, lengths: np.ndarray, slots: SlotsOf, window: int | None
    ) -> None:
        blocks = _QueryBlocks(rows_T, positions_T, window)
        self.num_blocks = blocks.rows.size
        self.tokens = torch.from_numpy(blocks.tokens)
        self.token_slot = torch.from_numpy(blocks.token_slot)
        query_position = torch.from_numpy(blocks.first)[:, None, None] + torch.arange(QUERY_BLOCK)[None, :, None]
        self.steps: list[_KeyStep] = []
        for step in range(int(blocks.num_keys.max())):
            count = int((blocks.num_keys > step).sum())
            keys = (blocks.first_key[:count, None] + step) * KEY_BLOCK + np.arange(KEY_BLOCK)[None, :]
            rows = blocks.rows[:count, None]
            # Keys past the end of a row repeat its last one: masked, but always a number.
            key_slots = slots(rows, np.minimum(keys, lengths[rows] - 1))
            key_position = torch.from_numpy(keys)[:, None, :]
            masked = key_position > query_position[:count]
            if window is not None:
                masked = masked | (key_position <= query_position[:count] - window)
            self.steps.append(_KeyStep(count, torch.from_numpy(key_slots.reshape(-1)), masked[:, None, None]))


class _BackwardIndex:
    """Blocks of 32 positions of all rows for the backward pass of packed rows."""

    def __init__(self, lengths: np.ndarray) -> None:
        starts = np.cumsum(lengths) - lengths
        num_blocks = -(-lengths // KEY_BLOCK)
        self.num_blocks = int(num_blocks.sum())
        rows = np.repeat(np.arange(lengths.size), num_blocks)
        block_in_row = np.arange(self.num_blocks) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
        within = block_in_row[:, None] * KEY_BLOCK + np.arange(KEY_BLOCK)[None, :]
        real = within < lengths[rows, None]
        tokens = starts[rows, None] + np.minimum(within, lengths[rows, None] - 1)
        self.tokens = torch.from_numpy(tokens.reshape(-1))
        self.real = torch.from_numpy(real.reshape(-1))
        slot = np.empty(int(lengths.sum()), dtype=np.int64)
        slot[tokens[real]] = np.flatnonzero(real)
        self.token_slot = torch.from_numpy(slot)
        self.blocks_after = num_blocks[rows] - 1 - block_in_row
        self.max_distance = int(self.blocks_after.max())

    def pairs(self, distance: int) -> tuple[Tensor, Tensor]:
        """(query blocks, key blocks) of all pairs this many blocks apart in one row; no block twice in either."""
        keys = torch.from_numpy(np.flatnonzero(self.blocks_after >= distance))
        return keys + distance, keys


class ExactPlan:
    """Exact attention over packed rows (with gradient) or over the paged cache (without)."""

    def __init__(self, rows_T: np.ndarray, positions_T: np.ndarray, lengths: np.ndarray, slots: SlotsOf) -> None:
        self.rows_T, self.positions_T, self.lengths, self.slots = rows_T, positions_T, lengths, slots
        self.cache: PagedKVCache | None = None
        self.new_slots: Tensor | None = None
        self._forward: dict[int | None, _ForwardIndex] = {}
        self._backward: _BackwardIndex | None = None

    @classmethod
    def packed(cls, lengths: np.ndarray) -> ExactPlan:
        """Packed rows of these lengths."""
        starts = np.cumsum(lengths) - lengths
        rows_T = np.repeat(np.arange(lengths.size), lengths)
        positions_T = np.arange(rows_T.size) - starts[rows_T]
        return cls(rows_T, positions_T, lengths, lambda rows, positions: starts[rows] + positions)

    @classmethod
    def paged(cls, paged: Paged) -> ExactPlan:
        """New tokens against the paged cache."""
        rows_T, positions_T = paged.new_positions()
        plan = cls(rows_T, positions_T, paged.context_lens.numpy().astype(np.int64), paged.slots)
        plan.cache = paged.cache
        plan.new_slots = torch.from_numpy(paged.slots(rows_T, positions_T))
        return plan

    def forward_index(self, window: int | None) -> _ForwardIndex:
        """Index tensors for layers of this window."""
        window = None if window is None or window >= int(self.lengths.max()) else window
        if window not in self._forward:
            self._forward[window] = _ForwardIndex(self.rows_T, self.positions_T, self.lengths, self.slots, window)
        return self._forward[window]

    def backward_index(self) -> _BackwardIndex:
        """Index tensors of the backward pass."""
        if self._backward is None:
            self._backward = _BackwardIndex(self.lengths)
        return self._backward

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]; zeros for the dummy rows at the end."""
        if self.cache is None:
            return _ExactAttention.apply(query_THK, key_TNK, value_TNK, self, form)
        assert self.new_slots is not None
        num_new = self.new_slots.shape[0]
        layer = layer_index(module)
        self.cache.write(layer, self.new_slots, key_TNK[:num_new], value_TNK[:num_new])
        index = self.forward_index(form.window)
        return _attend_blocks(query_THK, self.cache.keys[layer], self.cache.values[layer], index, form)[0]


def _fold(rows: Tensor, index: Tensor, block: int, num_kv_heads: int) -> Tensor:
    """Rows [T, H, K] at `index` (whole blocks) as [blocks * N, G * block, K]."""
    picked = rows.index_select(0, index).view(-1, block, num_kv_heads, rows.shape[1] // num_kv_heads, rows.shape[2])
    return picked.permute(0, 2, 3, 1, 4).reshape(-1, picked.shape[3] * block, rows.shape[2])


def _unfold(folded: Tensor, block: int, num_kv_heads: int, num_heads: int) -> Tensor:
    """The reverse of `_fold`: [blocks * block, H, K]."""
    size = folded.shape[-1]
    split = folded.view(-1, num_kv_heads, num_heads // num_kv_heads, block, size)
    return split.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, size)


def _scatter_tokens(slots: Tensor, token_slot: Tensor, num_tokens: int) -> Tensor:
    """[T, ...] from slots; zeros for the dummy rows after the real tokens."""
    real = slots.index_select(0, token_slot)
    extra = num_tokens - token_slot.shape[0]
    return torch.cat([real, real.new_zeros(extra, *real.shape[1:])]) if extra else real


def _scores(query: Tensor, key: Tensor, form: AttentionForm) -> Tensor:
    scores = bmm_fixed(query, key.transpose(1, 2)) * form.scale
    return scores if form.softcap is None else torch.tanh(scores / form.softcap) * form.softcap


def _attend_blocks(
    query_THK: Tensor, keys: Tensor, values: Tensor, index: _ForwardIndex, form: AttentionForm
) -> tuple[Tensor, Tensor]:
    """Online softmax over key blocks: output [T, H, K] and log-sum-exp [T, H, 1]. keys, values: [any, N, K], fetched by slot."""
    num_tokens, num_heads, size = query_THK.shape
    heads = keys.shape[1]
    query = _fold(query_THK, index.tokens, QUERY_BLOCK, heads)
    grouped = (index.num_blocks, heads, num_heads // heads, QUERY_BLOCK)
    peak = query.new_full((*grouped, 1), _MASKED)
    total = query.new_zeros((*grouped, 1))
    out = query.new_zeros((*grouped, size))
    for step in index.steps:
        n = step.count
        key = _fold(keys, step.slots, KEY_BLOCK, heads)
        value = _fold(values, step.slots, KEY_BLOCK, heads)
        scores = _scores(query[: n * heads], key, form).view(n, *grouped[1:], KEY_BLOCK)
        scores = scores.masked_fill(step.masked, _MASKED)
        new_peak = torch.maximum(peak[:n], scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_peak)
        shrink = torch.exp(peak[:n] - new_peak)
        # Separate products and sums: a fused multiply-add rounds otherwise in the vector body than in its tail.
        total[:n] = total[:n] * shrink + weights.sum(-1, keepdim=True)
        part = bmm_fixed(weights.view(n * heads, -1, KEY_BLOCK), value)
        out[:n] = out[:n] * shrink + part.view(n, *grouped[1:], size)
        peak[:n] = new_peak
    result = _unfold((out / total).view(-1, grouped[2] * QUERY_BLOCK, size), QUERY_BLOCK, heads, num_heads)
    log_sum = _unfold((peak + torch.log(total)).view(-1, grouped[2] * QUERY_BLOCK, 1), QUERY_BLOCK, heads, num_heads)
    return _scatter_tokens(result, index.token_slot, num_tokens), _scatter_tokens(log_sum, index.token_slot, num_tokens)


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, plan: ExactPlan, form: AttentionForm
    ) -> Tensor:
        out, log_sum = _attend_blocks(query_THK, key_TNK, value_TNK, plan.forward_index(form.window), form)
        ctx.save_for_backward(query_THK, key_TNK, value_TNK, out, log_sum)
        ctx.index, ctx.form = plan.backward_index, form
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, log_sum = ctx.saved_tensors
        grad_out = grads[0]
        index: _BackwardIndex = ctx.index()
        heads, num_heads, num_tokens = key.shape[1], query.shape[1], query.shape[0]
        # Slots past the end of a row carry no gradient: their output was dropped.
        real = index.real[:, None, None]
        delta = (grad_out * out).sum(-1, keepdim=True)

        def blocks(rows: Tensor) -> Tensor:
            return _fold(rows, index.tokens, KEY_BLOCK, heads).view(index.num_blocks, heads, -1, rows.shape[-1])

        grad_slots = grad_out.index_select(0, index.tokens) * real
        identity = torch.arange(grad_slots.shape[0])
        grad = _fold(grad_slots, identity, KEY_BLOCK, heads).view(index.num_blocks, heads, -1, query.shape[-1])
        sides = (blocks(query), blocks(key), blocks(value), grad, blocks(log_sum), blocks(delta))
        dq, dk, dv = _backward_blocks(*sides, index=index, form=ctx.form)

        def tokens(folded: Tensor, out_heads: int) -> Tensor:
            slots = _unfold(folded.flatten(0, 1), KEY_BLOCK, heads, out_heads)
            return _scatter_tokens(slots, index.token_slot, num_tokens)

        return tokens(dq, num_heads), tokens(dk, heads), tokens(dv, heads), None, None


def _backward_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_sum: Tensor,
    delta: Tensor,
    *,
    index: _BackwardIndex,
    form: AttentionForm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value blocks, all [C, N, G * 32 or 32, ...].

    Block pairs of one distance at a time: each block is met once a distance, so the additions never collide and keep their order.
    """
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    reach = index.max_distance
    if form.window is not None:
        reach = min(reach, (form.window + KEY_BLOCK - 2) // KEY_BLOCK)
    offset = torch.arange(KEY_BLOCK)
    for distance in range(reach + 1):
        query_blocks, key_blocks = index.pairs(distance)
        q, g, lse, d = (x.index_select(0, query_blocks).flatten(0, 1) for x in (query, grad, log_sum, delta))
        k, v = (x.index_select(0, key_blocks).flatten(0, 1) for x in (key, value))
        apart = distance * KEY_BLOCK + offset[:, None] - offset[None, :]
        masked = apart < 0 if form.window is None else (apart < 0) | (apart >= form.window)
        scores = _scores(q, k, form)
        masked_rows = masked.repeat(q.shape[1] // KEY_BLOCK, 1)
        weights = torch.exp(scores - lse).masked_fill(masked_rows, 0.0)
        dscores = weights * (bmm_fixed(g, v.transpose(1, 2)) - d)
        if form.softcap is not None:
            ratio = scores / form.softcap
            dscores = dscores * (1.0 - ratio * ratio)
        dscores = dscores * form.scale
        shape_q, shape_k = (-1, *query.shape[1:]), (-1, *key.shape[1:])
        dq.index_add_(0, query_blocks, bmm_fixed(dscores, k).view(shape_q))
        dk.index_add_(0, key_blocks, bmm_fixed(dscores.transpose(1, 2), q).view(shape_k))
        dv.index_add_(0, key_blocks, bmm_fixed(weights.transpose(1, 2), g).view(shape_k))
    return dq, dk, dv
