"""Attention of a decode step from the joint projection on: norms, rotation, the cache's new entries and flash-decoding in one kernel.

Dimensions: B rows, H query heads, N kv heads, G query heads of a kv head, K head size, P positions of a table, X = (H + 2N) K columns
of the projection, W blocks of a table, S shares of a product's sum.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.kv_cache import BLOCK_SIZE
from hybridflow.rollout.native.kernels.attention import (
    build_partials,
    count_sms,
    find_slots,
    plan_attention,
    plan_row,
    read_keys,
)
from hybridflow.rollout.native.kernels.launch import launch_options, prefetch, wait_for_inputs
from hybridflow.rollout.native.kernels.norms import apply_gain, load_sum
from hybridflow.rollout.native.plans import AttentionPlan

_LOG2_E = math.log2(math.e)
_NO_WINDOW = tl.constexpr(2**31 - 1)
_PAGE, _LINE = tl.constexpr(BLOCK_SIZE), tl.constexpr(128)
# Keys and values that a program asks for before the projection is there, where programs are few enough to run all at once.
_KEYS_AHEAD, _PROGRAMS_PER_SM = 128, 4


def attend_and_store(
    qkv: Tensor, bias_X: Tensor | None, cos_PK: Tensor, sin_PK: Tensor, keys: Tensor, values: Tensor,
    block_tables_BW: Tensor, context_lens_B: Tensor, arrivals: Tensor, *, num_heads: int, scale: float,
    query_norm: Tensor | None = None, key_norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:  # fmt: skip
    """What `rotate_and_store` and `decode_attention` do one after the other for the newest token of each row.

    qkv:             [B, X] of the cache's dtype, or float32 shares [S, B, X] of it; bias_X is added to those alone.
    keys, values:    [num_slots, N, K] contiguous; the newest token's, at position length - 1, are written here.
    context_lens_B:  [B] int32 tokens held, the newest among them; 0 is an idle row, which writes zeros and stores nothing.
    arrivals:        [at least B N] int32, all 0, and so again afterwards; launches that run at one time need arrivals of their own.
    returns:         [B, H, K], `out` where it is given.

    Lengths, tables and older tokens are read while the kernel before this one may still run: that kernel must not write them.
    Rounds as those two do. Differs from `decode_attention`: the newest token meets the queries from registers, and the split that ends
    last adds up all of its row, in their order.
    """
    num_rows, (num_kv_heads, head_dim) = context_lens_B.shape[0], keys.shape[1:]
    group, num_blocks = num_heads // num_kv_heads, block_tables_BW.shape[1]
    _check(qkv, cos_PK, keys, values, num_heads, arrivals, num_rows)
    out_BHK = keys.new_empty((num_rows, num_heads, head_dim)) if out is None else out
    if num_rows == 0:
        return out_BHK
    num_sms, row_bytes = count_sms(keys.device), head_dim * keys.element_size()
    plan = plan or plan_attention(num_rows, num_kv_heads, num_blocks, row_bytes, num_sms)
    partials = num_rows * num_heads * plan.num_splits if plan.num_splits > 1 else 0
    num_programs = num_rows * plan.num_splits * num_kv_heads
    ahead = _KEYS_AHEAD // plan.tile if num_programs <= _PROGRAMS_PER_SM * num_sms else 0
    norms = (cos_PK if query_norm is None else query_norm, cos_PK if key_norm is None else key_norm)
    _attend_joint[(num_programs,)](
        qkv, qkv if bias_X is None else bias_X, cos_PK, sin_PK, *norms, keys, values, block_tables_BW, context_lens_B,
        out_BHK, *build_partials(partials, head_dim, keys.device), arrivals, num_blocks, scale * _LOG2_E, eps,
        qkv.stride(-2), qkv.stride(0), cos_PK.stride(0), block_tables_BW.stride(0),
        N=num_kv_heads, G=group, K=head_dim, WIDTH=triton.next_power_of_2(head_dim), SPLITS=plan.num_splits,
        TILE=plan.tile, LEAST=plan.least_keys, ROWS=max(16, triton.next_power_of_2(group + 1)),
        SHARES=qkv.shape[0] if qkv.dim() == 3 else 0, BIASED=bias_X is not None and qkv.dim() == 3,
        NORMED=query_norm is not None, AHEAD=ahead, num_warps=plan.num_warps, num_stages=plan.num_stages,
        # As in `rotate_and_store`: rounded products must not be fused with their sum.
        enable_fp_fusion=False, **launch_options(keys.device),
    )  # fmt: skip
    return out_BHK


def _check(
    qkv: Tensor, cos_PK: Tensor, keys: Tensor, values: Tensor, num_heads: int, arrivals: Tensor, num_rows: int
) -> None:
    num_kv_heads, head_dim = keys.shape[1:]
    if num_heads % num_kv_heads or cos_PK.shape[1] != head_dim:
        raise ValueError(
            f"{num_heads} query heads and tables of {cos_PK.shape[1]} columns do not fit a cache of {num_kv_heads} heads of {head_dim}; "
            "query heads are a multiple of its heads, and tables as wide as one"
        )
    if qkv.shape[-2:] != (num_rows, (num_heads + 2 * num_kv_heads) * head_dim) or qkv.stride(-1) != 1:
        raise ValueError(
            f"the projection is {tuple(qkv.shape)} and {num_rows} rows of {num_heads} + 2 * {num_kv_heads} heads of {head_dim} are wanted"
        )
    if not (keys.is_contiguous() and values.is_contiguous()) or keys.shape != values.shape:
        raise ValueError(f"keys are {tuple(keys.shape)}, values {tuple(values.shape)}; pass one layer of a cache")
    if arrivals.numel() < num_rows * num_kv_heads:
        raise ValueError(
            f"there is room for {arrivals.numel()} arrivals and {num_rows} rows of {num_kv_heads} heads need more"
        )


@triton.jit
def _bring(
    store: tl.tensor, table: tl.tensor, begin: tl.tensor, stop: tl.tensor, N: tl.constexpr, K: tl.constexpr,
    TILE: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Brings the first tiles of a head into the L2 cache."""
    step: tl.constexpr = _LINE // (store.dtype.element_ty.primitive_bitwidth // 8)
    lines: tl.constexpr = 1 if step >= K else 2 if 2 * step >= K else 4
    column = tl.minimum(tl.arange(0, lines) * step, K - 1)
    r = tl.arange(0, TILE)
    for tile in tl.static_range(AHEAD):
        slots = find_slots(table, begin + tile * TILE, stop, r, TILE)
        prefetch(store + slots.to(tl.int64)[:, None] * (N * K) + column[None, :])


@triton.jit
def _load_heads(
    qkv: tl.tensor, bias: tl.tensor, at: tl.tensor, here: tl.tensor, share_stride: tl.tensor, dtype: tl.constexpr,
    SHARES: tl.constexpr, BIASED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    x = load_sum(qkv + at, here, share_stride, SHARES)
    if BIASED:
        x += tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    return x.to(dtype)


@triton.jit
def _multiply(x: tl.tensor, factor: tl.tensor) -> tl.tensor:
    # Rounded to the tables' dtype before the sum.
    return (x.to(tl.float32) * factor.to(tl.float32)).to(factor.dtype).to(tl.float32)


@triton.jit
def _turn_heads(
    x: tl.tensor, other: tl.tensor, query_norm: tl.tensor, key_norm: tl.tensor, cosine: tl.tensor, sine: tl.tensor,
    is_query: tl.tensor, d: tl.tensor, opposite: tl.tensor, eps: tl.tensor, K: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Heads normed and rotated; `other` has of each column the one that it turns with."""
    here = d < K
    if NORMED:
        full, full_other = x.to(tl.float32), other.to(tl.float32)
        over = tl.rsqrt(tl.sum(full * full, 1) / K + eps)[:, None]
        gain = tl.where(
            is_query, tl.load(query_norm + d, mask=here, other=0.0), tl.load(key_norm + d, mask=here, other=0.0)
        )
        gain_other = tl.where(
            is_query,
            tl.load(query_norm + opposite, mask=here, other=0.0),
            tl.load(key_norm + opposite, mask=here, other=0.0),
        )
        dtype: tl.constexpr = x.dtype
        x = apply_gain(full * over, gain, dtype, 0.0)
        other = apply_gain(full_other * over, gain_other, dtype, 0.0)
    straight, across = _multiply(x, cosine), _multiply(other, sine)
    return tl.where(d < K // 2, straight - across, straight + across).to(x.dtype)


@triton.jit(do_not_specialize=["num_blocks", "table_stride"])
def _attend_joint(
    qkv: tl.tensor, bias: tl.tensor, cos: tl.tensor, sin: tl.tensor, query_norm: tl.tensor, key_norm: tl.tensor,
    keys: tl.tensor, values: tl.tensor, tables: tl.tensor, lengths: tl.tensor, out: tl.tensor, sums: tl.tensor,
    peaks: tl.tensor, totals: tl.tensor, arrivals: tl.tensor, num_blocks: tl.tensor, scale: tl.tensor, eps: tl.tensor,
    row_stride: tl.tensor, share_stride: tl.tensor, angle_stride: tl.tensor, table_stride: tl.tensor, N: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, SHARES: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0) % N
    split = tl.program_id(0) // N % SPLITS
    row = (tl.program_id(0) // (N * SPLITS)).to(tl.int64)
    end, seen, base, share = plan_row(lengths, row, num_blocks, _NO_WINDOW, SPLITS, TILE, LEAST)
    begin = split * share
    if (split > 0) & (begin >= end):
        return
    newest = tl.maximum(end - 1, 0)
    stop = tl.minimum(begin + share, newest)
    has_newest = (begin + share >= end) & (end > 0)
    table = tables + row * table_stride
    if EARLY and AHEAD > 0:
        _bring(keys + head * K, table, begin, stop, N, K, TILE, AHEAD)
        _bring(values + head * K, table, begin, stop, N, K, TILE, AHEAD)
    g = tl.arange(0, ROWS)[:, None]
    d = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], [ROWS, WIDTH])
    # After the group's queries, one row of the tile is the newest token's key.
    opposite = tl.where(d < K // 2, d + K // 2, d - K // 2)
    first = row * row_stride + tl.where(g < G, head * G + g, N * G + head) * K
    here = (g <= G) & (d < K)
    angle = newest.to(tl.int64) * angle_stride
    cosine = tl.load(cos + angle + d, mask=d < K, other=0.0)
    sine = tl.load(sin + angle + d, mask=d < K, other=0.0)
    wait_for_inputs(EARLY)
    dtype: tl.constexpr = keys.dtype.element_ty
    bias_row = bias - row * row_stride
    q = _load_heads(qkv, bias_row, first + d, here, share_stride, dtype, SHARES, BIASED)
    other = _load_heads(qkv, bias_row, first + opposite, here, share_stride, dtype, SHARES, BIASED)
    q = _turn_heads(q, other, query_norm, key_norm, cosine, sine, g < G, d, opposite, eps, K, NORMED)
    e = tl.arange(0, WIDTH)
    # One term is not zero, so that the sum is exact.
    key = tl.sum(tl.where(g == G, q.to(tl.float32), 0.0), 0)
    at_value = row * row_stride + (N * G + N + head) * K + e
    value = _load_heads(qkv, bias_row, at_value, e < K, share_stride, dtype, SHARES, BIASED)
    block = tl.load(table + newest // _PAGE, mask=has_newest, other=0).to(tl.int64)
    at_slot = (block * _PAGE + newest % _PAGE) * (N * K) + head * K + e
    tl.store(keys + at_slot, key.to(dtype), mask=has_newest & (e < K))
    tl.store(values + at_slot, value, mask=has_newest & (e < K))
    score = tl.sum(q.to(tl.float32) * key[None, :], 1) * scale
    peak = tl.where(has_newest, score, float("-inf"))
    total = tl.where(has_newest, tl.full([ROWS], 1.0, tl.float32), 0.0)
    acc = tl.where(has_newest, tl.broadcast_to(value.to(tl.float32)[None, :], [ROWS, WIDTH]), 0.0)
    acc, peak, total = read_keys(
        q, keys + head * K, values + head * K, table, begin, stop, seen, scale, 1.0,
        tl.arange(0, WIDTH)[None, :], acc, peak, total, N, K, TILE, False,
    )  # fmt: skip
    at = (head * G + g) * K + d
    kept = (g < G) & (d < K)
    used = tl.cdiv(end, share)
    if (SPLITS > 1) & (used > 1):
        pair = row * N + head
        partial = (pair * G + g) * SPLITS + split
        tl.store(sums + partial * K + d, acc, mask=kept)
        tl.store(peaks + partial, peak[:, None], mask=g < G)
        tl.store(totals + partial, total[:, None], mask=g < G)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu") == used - 1
        if is_last:
            tl.store(arrivals + pair, 0)
            acc, total = _add_splits(sums, peaks, totals, pair, used, g, d, kept, G, K, SPLITS, ROWS, WIDTH)
        kept = kept & is_last
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row * (N * G * K) + at, (acc / divisor).to(dtype), mask=kept)


@triton.jit
def _add_splits(
    sums: tl.tensor, peaks: tl.tensor, totals: tl.tensor, pair: tl.tensor, used: tl.tensor, g: tl.tensor, d: tl.tensor,
    kept: tl.tensor, G: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(weighted values, sum of powers) of a row's splits together."""
    r = tl.arange(0, ROWS)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(0, used):
        each = (pair * G + r) * SPLITS + split
        # Around the first cache, which may hold what was there before.
        its_peak = tl.load(peaks + each, mask=r < G, other=0.0, cache_modifier=".cg")
        its_total = tl.load(totals + each, mask=r < G, other=0.0, cache_modifier=".cg")
        part = tl.load(sums + ((pair * G + g) * SPLITS + split) * K + d, mask=kept, other=0.0, cache_modifier=".cg")
        greatest = tl.maximum(peak, its_peak)
        before, now = tl.exp2(peak - greatest), tl.exp2(its_peak - greatest)
        total = total * before + its_total * now
        acc = acc * before[:, None] + part * now[:, None]
        peak = greatest
    return acc, total
