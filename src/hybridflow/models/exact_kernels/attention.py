"""Causal attention by one walk over the keys, of packed rows or pages: blocks at fixed positions of a row, in order, never split.

A tile holds the queries of some tokens of one row under one kv head. A query meets the same blocks in the same order whatever else is in
its tile: blocks that it does not see leave its sums as they are, bit for bit.
Dimensions: T packed tokens, H query heads, N kv heads, G = H / N, K head size, S slots of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.exact_kernels.layout import align

# (rows of a tile, keys of a block): functions of the dtype alone. float32 has no tensor cores of full precision, and takes more registers.
_BLOCKS = {torch.bfloat16: (64, 64), torch.float32: (32, 32)}
_NUM_WARPS, _NUM_STAGES = 4, 2
# Backward holds twice as many operands at a time.
_NUM_STAGES_BACKWARD = 1


@dataclass(frozen=True, eq=False)
class Tiles:
    """Which tokens meet which keys, on the device.

    queries: [n, 4] int32, for each tile: where its row's keys begin (packed) or which row of `tables` says so (pages), the index of its
             first query among the tokens, that query's position in the row, how many queries.
    tables:  [B, W] int32, block of `page` slots for each `page` positions of a row; None: keys of a row follow one another.
    page:    slots of a block.
    """

    queries: Tensor
    tables: Tensor | None = None
    page: int = 1


@dataclass(frozen=True)
class Form:
    """Factor on query times key, and how many tokens a token sees, itself included; 0 is all before it."""

    scale: float
    window: int = 0


def count_queries(dtype: torch.dtype, group: int) -> int:
    """Tokens of a tile, for so many query heads of a kv head."""
    return max(_BLOCKS[dtype][0] // triton.next_power_of_2(group), 1)


def count_keys(dtype: torch.dtype) -> int:
    """Keys of a block."""
    return _BLOCKS[dtype][1]


def attend(query_THK: Tensor, keys_SNK: Tensor, values_SNK: Tensor, tiles: Tiles, form: Form) -> tuple[Tensor, Tensor]:
    """Output [T, H, K] in the dtype of the query, and the log of the sum of exponentials [T, H] float32.

    keys_SNK, values_SNK: where they lie, the tokens of a row or pages; of the query's dtype, with adjacent heads.
    """
    query_THK = align(query_THK)
    out_THK = torch.empty_like(query_THK)
    log_sum_TH = torch.empty(query_THK.shape[:2], dtype=torch.float32, device=query_THK.device)
    table = tiles.queries if tiles.tables is None else tiles.tables
    if tiles.queries.shape[0]:
        _forward[(tiles.queries.shape[0], keys_SNK.shape[1])](
            query_THK, keys_SNK, values_SNK, out_THK, log_sum_TH, tiles.queries, table, form.scale,
            table.stride(0), PAGED=tiles.tables is not None, PAGE=tiles.page,
            **_describe(query_THK, keys_SNK, form), num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
        )  # fmt: skip
    return out_THK, log_sum_TH


def attend_backward(
    grad_THK: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    tiles: Tiles,
    key_tiles: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at query, key and value of packed rows.

    saved:     query, key, value, output and log-sum of `attend`, all contiguous.
    tiles:     those of `attend`, which begin at positions that are multiples of `count_queries`.
    key_tiles: [n, 4] int32: index of a block's first key among the tokens, its position in the row, how many keys, and the row's length.
               Blocks begin at multiples of `count_keys`.

    A query's gradient is summed over key blocks, a key's over query tiles, both in ascending order.
    """
    query_THK, key_TNK, value_TNK, out_THK, log_sum_TH = saved
    grad_THK = align(grad_THK)
    dquery, dkey, dvalue = (torch.empty_like(x) for x in (query_THK, key_TNK, value_TNK))
    delta_TH = torch.empty_like(log_sum_TH)
    shape = _describe(query_THK, key_TNK, form) | {"num_warps": _NUM_WARPS, "num_stages": _NUM_STAGES_BACKWARD}
    rows = (query_THK, key_TNK, value_TNK, grad_THK)
    num_kv_heads = key_TNK.shape[1]
    if tiles.queries.shape[0]:
        _query_gradient[(tiles.queries.shape[0], num_kv_heads)](
            *rows, out_THK, log_sum_TH, delta_TH, dquery, tiles.queries, form.scale, **shape
        )
        _key_gradient[(key_tiles.shape[0], num_kv_heads)](
            *rows, log_sum_TH, delta_TH, dkey, dvalue, key_tiles, form.scale, **shape
        )
    return dquery, dkey, dvalue


def _describe(query_THK: Tensor, keys_SNK: Tensor, form: Form) -> dict[str, Any]:
    num_rows, num_keys = _BLOCKS[query_THK.dtype]
    num_heads, size = query_THK.shape[1:]
    kv_heads = keys_SNK.shape[1]
    group = num_heads // kv_heads
    padded = triton.next_power_of_2(group)
    if padded > num_rows:
        raise ValueError(
            f"exact attention takes up to {num_rows} query heads of a kv head, not {group}; use numerics 'fast'"
        )
    return {
        "HEADS": num_heads, "KV_HEADS": kv_heads, "GROUP": group, "PADDED": padded, "SIZE": size,
        "WIDTH": max(triton.next_power_of_2(size), 16), "WINDOW": form.window, "ROWS": num_rows, "KEYS": num_keys,
    }  # fmt: skip


@triton.jit
def _see(query_at: tl.tensor, key_at: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Whether a token at the one position sees the other."""
    sees = key_at <= query_at
    return sees & (key_at > query_at - WINDOW) if WINDOW else sees


@triton.jit
def _first_block(position: tl.tensor, WINDOW: tl.constexpr, KEYS: tl.constexpr) -> tl.tensor:
    return tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS if WINDOW else position * 0


@triton.jit
def _load_queries(
    base: tl.tensor, first: tl.tensor, count: tl.tensor, kv_head: tl.tensor, HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The tile's rows of a [T, H, K] tensor, zeros where there is no token or head."""
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = first + row // PADDED, row % PADDED
    here = (row // PADDED < count) & (head < GROUP)
    at = (token.to(tl.int64) * HEADS + kv_head * GROUP + head) * SIZE
    return tl.load(base + at[:, None] + d[None, :], mask=here[:, None] & (d[None, :] < SIZE), other=0.0)


@triton.jit
def _load_keys(
    keys: tl.tensor, values: tl.tensor, head: tl.tensor, exists: tl.tensor, SIZE: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(keys, values) of these heads, by their number over all slots; zeros where one does not exist."""
    d = tl.arange(0, WIDTH)
    at, here = (head * SIZE)[:, None] + d[None, :], exists[:, None] & (d[None, :] < SIZE)
    return tl.load(keys + at, mask=here, other=0.0), tl.load(values + at, mask=here, other=0.0)


@triton.jit(do_not_specialize=["table_width"])
def _forward(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, out: tl.tensor, log_sum: tl.tensor, tiles: tl.tensor,
    tables: tl.tensor, scale: tl.tensor, table_width: tl.tensor, PAGED: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    tile, kv_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    owner, first, position, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, d, block = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    query_tile = _load_queries(query, first, count, kv_head, HEADS, GROUP, PADDED, SIZE, WIDTH, ROWS)
    query_at = position + row // PADDED
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    result = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    end = position + count
    for start in range(_first_block(position, WINDOW, KEYS), end, KEYS):
        key_at = start + block
        # What lies beyond the newest query was never written, or belongs to others.
        exists = key_at < end
        if PAGED:
            page = tl.load(tables + owner.to(tl.int64) * table_width + key_at // PAGE, mask=exists, other=0)
            slot = page.to(tl.int64) * PAGE + key_at % PAGE
        else:
            slot = (owner + key_at).to(tl.int64)
        key_tile, value_tile = _load_keys(keys, values, slot * KV_HEADS + kv_head, exists, SIZE, WIDTH)
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scale
        sees = _see(query_at[:, None], key_at[None, :], WINDOW) & exists[None, :]
        scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # Before the first key that a query sees, its peak is -inf: powers must be 0 and not NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(value_tile.dtype), value_tile, result * shrink[:, None], input_precision="ieee")
        peak = higher
    head = row % PADDED
    here = (row // PADDED < count) & (head < GROUP)
    at = (first + row // PADDED).to(tl.int64) * HEADS + kv_head * GROUP + head
    result = result / tl.where(here, total, 1.0)[:, None]
    tl.store(
        out + at[:, None] * SIZE + d[None, :], result.to(query_tile.dtype), mask=here[:, None] & (d[None, :] < SIZE)
    )
    tl.store(log_sum + at, peak + tl.log(tl.where(here, total, 1.0)), mask=here)


@triton.jit
def _query_gradient(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, grad: tl.tensor, out: tl.tensor, log_sum: tl.tensor,
    delta: tl.tensor, dquery: tl.tensor, tiles: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """dquery of a tile, and on the way delta, each query's sum of gradient times output, which the keys' gradients need too."""
    tile, kv_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    owner, first, position, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, d, block = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    query_tile = _load_queries(query, first, count, kv_head, HEADS, GROUP, PADDED, SIZE, WIDTH, ROWS)
    grad_tile = _load_queries(grad, first, count, kv_head, HEADS, GROUP, PADDED, SIZE, WIDTH, ROWS)
    out_tile = _load_queries(out, first, count, kv_head, HEADS, GROUP, PADDED, SIZE, WIDTH, ROWS)
    head = row % PADDED
    here = (row // PADDED < count) & (head < GROUP)
    at = (first + row // PADDED).to(tl.int64) * HEADS + kv_head * GROUP + head
    own_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + at, own_delta, mask=here)
    own_log_sum = tl.load(log_sum + at, mask=here, other=0.0)
    query_at = position + row // PADDED
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    end = position + count
    for start in range(_first_block(position, WINDOW, KEYS), end, KEYS):
        key_at = start + block
        exists = key_at < end
        key_head = (owner + key_at).to(tl.int64) * KV_HEADS + kv_head
        key_tile, value_tile = _load_keys(keys, values, key_head, exists, SIZE, WIDTH)
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scale
        sees = _see(query_at[:, None], key_at[None, :], WINDOW) & exists[None, :] & here[:, None]
        weights = tl.where(sees, tl.exp(scores - own_log_sum[:, None]), 0.0)
        dweights = tl.dot(grad_tile, tl.trans(value_tile), input_precision="ieee")
        dscores = weights * (dweights - own_delta[:, None]) * scale
        total = tl.dot(dscores.to(key_tile.dtype), key_tile, total, input_precision="ieee")
    tl.store(
        dquery + at[:, None] * SIZE + d[None, :], total.to(query_tile.dtype), mask=here[:, None] & (d[None, :] < SIZE)
    )


@triton.jit
def _key_gradient(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, grad: tl.tensor, log_sum: tl.tensor, delta: tl.tensor,
    dkey: tl.tensor, dvalue: tl.tensor, tiles: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    tile, kv_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    first, position, count, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, d, block = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    key_at = position + block
    exists = block < count
    key_base = ((first + block).to(tl.int64) * KV_HEADS + kv_head) * SIZE
    key_here = exists[:, None] & (d[None, :] < SIZE)
    key_tile = tl.load(keys + key_base[:, None] + d[None, :], mask=key_here, other=0.0)
    value_tile = tl.load(values + key_base[:, None] + d[None, :], mask=key_here, other=0.0)
    key_total = tl.zeros((KEYS, WIDTH), dtype=tl.float32)
    value_total = tl.zeros((KEYS, WIDTH), dtype=tl.float32)
    tokens = ROWS // PADDED
    row_start = first - position
    end = tl.minimum(length, position + count + WINDOW - 1) if WINDOW else length
    head = row % PADDED
    for start in range(position // tokens * tokens, end, tokens):
        num_tokens = tl.minimum(length - start, tokens)
        token = row_start + start
        query_tile = _load_queries(query, token, num_tokens, kv_head, HEADS, GROUP, PADDED, SIZE, WIDTH, ROWS)
        grad_tile = _load_queries(grad, token, num_tokens, kv_head, HEADS, GROUP, PADDED, SIZE, WIDTH, ROWS)
        here = (row // PADDED < num_tokens) & (head < GROUP)
        at = (token + row // PADDED).to(tl.int64) * HEADS + kv_head * GROUP + head
        own_log_sum = tl.load(log_sum + at, mask=here, other=0.0)
        own_delta = tl.load(delta + at, mask=here, other=0.0)
        query_at = start + row // PADDED
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scale
        sees = _see(query_at[:, None], key_at[None, :], WINDOW) & exists[None, :] & here[:, None]
        weights = tl.where(sees, tl.exp(scores - own_log_sum[:, None]), 0.0)
        value_total = tl.dot(tl.trans(weights.to(grad_tile.dtype)), grad_tile, value_total, input_precision="ieee")
        dweights = tl.dot(grad_tile, tl.trans(value_tile), input_precision="ieee")
        dscores = weights * (dweights - own_delta[:, None]) * scale
        key_total = tl.dot(tl.trans(dscores.to(query_tile.dtype)), query_tile, key_total, input_precision="ieee")
    tl.store(dkey + key_base[:, None] + d[None, :], key_total.to(key_tile.dtype), mask=key_here)
    tl.store(dvalue + key_base[:, None] + d[None, :], value_total.to(key_tile.dtype), mask=key_here)
