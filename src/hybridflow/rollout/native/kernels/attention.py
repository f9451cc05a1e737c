"""Attention of one new token a row over the paged cache: flash-decoding for grouped queries.

Dimensions: B rows, H query heads, N kv heads, G query heads of a kv head, K head size, W blocks of a table, S splits of a context.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.kv_cache import BLOCK_SIZE
from hybridflow.rollout.native.kernels.activations import tanh
from hybridflow.rollout.native.kernels.launch import launch_options, wait_for_inputs
from hybridflow.rollout.native.plans import AttentionPlan

_PAGE = tl.constexpr(BLOCK_SIZE)
_LOG2_E = math.log2(math.e)
# A split of fewer keys costs more in starting and combining than it saves in waiting.
_LEAST_KEYS = 128
_MAX_SPLITS = 32
# Two programs on each multiprocessor keep enough loads in flight for the memory; a context beyond this many keys is split
# even so, since one long row would go on alone after all others, as long as programs do not become too many.
_FULL_PROGRAMS_PER_SM, _MOST_PROGRAMS_PER_SM, _LONG_KEYS = 2, 32, 768
_NO_WINDOW = 2**31 - 1


def plan_attention(
    num_rows: int, num_kv_heads: int, num_blocks: int, row_bytes: int, num_sms: int, window: int | None = None
) -> AttentionPlan:
    """The layout for this many rows with tables of `num_blocks` blocks; row_bytes: of a head's key, K * itemsize.

    Splits grow until the programs fill the machine, or with the longest context a table can hold; at most `_MAX_SPLITS`.
    Every (row, kv head) is a program for each split, and those beyond a row's end stop at once.
    """
    tile, num_warps = (64, 4) if row_bytes <= 256 else (32, 8)
    splits, least = _plan_splits(num_rows, num_kv_heads, num_blocks, num_sms, window)
    return AttentionPlan(splits, tile, num_warps, num_stages=3, least_keys=least)


def decode_attention(
    query_BHK: Tensor, keys: Tensor, values: Tensor, block_tables_BW: Tensor, context_lens_B: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, out: Tensor | None = None, plan: AttentionPlan | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each row's newest token over the row's keys, its own among them.

    query_BHK:       [B, H, K] bfloat16, float16 or float32; rows may lie further apart. H is a multiple of N.
    keys, values:    [num_slots, N, K] contiguous, of the same dtype: one layer of the cache.
    block_tables_BW: [B, W] int32; slot of a position = table[position // 32] * 32 + position % 32.
    context_lens_B:  [B] int32 tokens held; 0 is an idle row, which reads nothing and gives zeros.
    window:          only that many last positions are read; None reads all.
    softcap:         scores become softcap * tanh(score / softcap).
    out:             [B, H, K] contiguous, written and returned; plan: from `plan_attention`. None makes each of them.

    Source: flash-decoding (Dao et al., 2023) on arXiv:2307.08691, scores in powers of two. Differs: a split is a share of
    the row's own length, and a row short enough for one split is written at once. Sums are float32, in fixed order for a plan.
    W bounds the number of programs, so tables cut to a little over the longest row cost least. A slot outside the rows is
    never read. ValueError where the shapes do not fit.
    """
    _check(query_BHK, keys, values, block_tables_BW, context_lens_B, window)
    out_BHK = torch.empty(query_BHK.shape, dtype=query_BHK.dtype, device=query_BHK.device) if out is None else out
    if query_BHK.shape[0] == 0:
        return out_BHK
    window = _NO_WINDOW if window is None else window
    plan = plan or _plan_for(query_BHK, keys.shape[1], block_tables_BW.shape[1], window)
    _check_plan(plan)
    _launch(query_BHK, keys, values, (context_lens_B, block_tables_BW, window), scale, softcap, out_BHK, plan)
    return out_BHK


def _launch(
    query_BHK: Tensor, keys: Tensor, values: Tensor, rows: tuple[Tensor, Tensor, int], scale: float,
    softcap: float | None, out_BHK: Tensor, plan: AttentionPlan,
) -> None:  # fmt: skip
    (num_rows, num_heads, head_dim), num_kv_heads = query_BHK.shape, keys.shape[1]
    context_lens_B, block_tables_BW, window = rows
    num_partials = num_rows * num_heads * plan.num_splits if plan.num_splits > 1 else 0
    partial = build_partials(num_partials, head_dim, query_BHK.device)
    shape = {
        "N": num_kv_heads, "G": num_heads // num_kv_heads, "K": head_dim, "WIDTH": triton.next_power_of_2(head_dim),
        "SPLITS": plan.num_splits, "TILE": plan.tile, "LEAST": plan.least_keys,
    }  # fmt: skip
    bounds = (context_lens_B, block_tables_BW.shape[1], window)
    # With a cap, `scale` brings scores into its unit, and `cap` brings them back.
    factors = (scale * _LOG2_E, 1.0) if softcap is None else (scale / softcap, softcap * _LOG2_E)
    early = launch_options(query_BHK.device)
    _attend[(num_rows * plan.num_splits * num_kv_heads,)](
        query_BHK, keys, values, block_tables_BW, out_BHK, *partial, *bounds, *factors,
        query_BHK.stride(0), block_tables_BW.stride(0),
        **shape, ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)), CAPPED=softcap is not None,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **early,
    )  # fmt: skip
    if plan.num_splits > 1:
        _combine[(num_rows * num_heads,)](
            out_BHK, *partial, *bounds, **shape, MOST=triton.next_power_of_2(plan.num_splits), num_warps=4, **early
        )


def _plan_splits(
    num_rows: int, num_kv_heads: int, num_blocks: int, num_sms: int, window: int | None
) -> tuple[int, int]:
    """(splits, keys of one at least)."""
    reach = min(num_blocks * BLOCK_SIZE, _NO_WINDOW if window is None else window)
    pairs = max(num_rows * num_kv_heads, 1)
    filling = -(-_FULL_PROGRAMS_PER_SM * num_sms // pairs)
    long = min(reach // _LONG_KEYS, -(-_MOST_PROGRAMS_PER_SM * num_sms // pairs))
    splits = max(min(max(filling, long), -(-reach // _LEAST_KEYS), _MAX_SPLITS), 1)
    # A split begins where a tile does, and every tile of any plan is a divisor of the least number.
    return splits, max(_LEAST_KEYS, _LONG_KEYS // filling // _LEAST_KEYS * _LEAST_KEYS)


def _plan_for(query_BHK: Tensor, num_kv_heads: int, num_blocks: int, window: int) -> AttentionPlan:
    row_bytes = query_BHK.shape[2] * query_BHK.element_size()
    return plan_attention(query_BHK.shape[0], num_kv_heads, num_blocks, row_bytes, count_sms(query_BHK.device), window)


@functools.cache
def count_sms(device: torch.device) -> int:
    # Triton's interpreter runs on the CPU, one program after the other.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def build_partials(num_partials: int, head_dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """Room for (sums [P, K], greatest scores [P], totals [P]) of P partial results, float32, flat."""
    # Triton compiles once more for a pointer that is not a multiple of 16 bytes.
    count = -(-num_partials // 4) * 4
    room = torch.empty(count * (head_dim + 2), dtype=torch.float32, device=device)
    return room.split([count * head_dim, count, count])


def _check(
    query_BHK: Tensor, keys: Tensor, values: Tensor, block_tables_BW: Tensor, context_lens_B: Tensor, window: int | None
) -> None:
    num_rows, num_heads, head_dim = query_BHK.shape
    if keys.shape != values.shape or keys.shape[2] != head_dim or num_heads % keys.shape[1]:
        raise ValueError(
            f"queries {tuple(query_BHK.shape)} do not fit keys {tuple(keys.shape)} and values {tuple(values.shape)}; "
            "heads must be of one size, and query heads a multiple of kv heads"
        )
    if not (keys.is_contiguous() and values.is_contiguous()) or query_BHK.stride()[1:] != (head_dim, 1):
        raise ValueError(f"keys have strides {keys.stride()} and queries {query_BHK.stride()}; pass contiguous heads")
    if block_tables_BW.shape[0] != num_rows or context_lens_B.shape != (num_rows,) or block_tables_BW.stride(1) != 1:
        raise ValueError(
            f"{num_rows} queries come with {block_tables_BW.shape[0]} block tables and {context_lens_B.shape[0]} lengths; "
            "pass one of each a row"
        )
    if window is not None and window < 1:
        raise ValueError(f"the window is {window}; a row sees at least its own position, so pass 1 or more, or None")


def _check_plan(plan: AttentionPlan) -> None:
    if plan.least_keys % plan.tile or plan.tile % BLOCK_SIZE:
        raise ValueError(
            f"the plan has tiles of {plan.tile} keys and splits of {plan.least_keys} at least; a tile is a multiple of {BLOCK_SIZE}, "
            "and a split one of a tile"
        )


@triton.jit
def plan_row(
    lengths: tl.tensor, row: tl.tensor, num_blocks: tl.tensor, window: tl.tensor, SPLITS: tl.constexpr,
    TILE: tl.constexpr, LEAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(end, first position in sight, start of its page, keys of a split) of a row."""
    end = tl.minimum(tl.load(lengths + row), num_blocks * _PAGE)
    seen = tl.maximum(end - window, 0)
    base = seen // _PAGE * _PAGE
    share = tl.maximum(tl.cdiv(tl.cdiv(end - base, SPLITS), TILE) * TILE, LEAST)
    return end, seen, base, share


@triton.jit
def find_slots(table: tl.tensor, start: tl.tensor, stop: tl.tensor, r: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Slots of the positions start + r, start at the beginning of a page; pages at or beyond `stop` are not looked up."""
    slots = tl.zeros([TILE], tl.int32)
    for page in tl.static_range(TILE // _PAGE):
        at = start // _PAGE + page
        block = tl.load(table + at, mask=at * _PAGE < stop, other=0)
        slots = tl.where(r // _PAGE == page, block * _PAGE + r % _PAGE, slots)
    return slots


@triton.jit(do_not_specialize=["num_blocks", "window", "table_stride"])
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, tables: tl.tensor, out: tl.tensor, sums: tl.tensor,
    peaks: tl.tensor, totals: tl.tensor, lengths: tl.tensor, num_blocks: tl.tensor, window: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, query_stride: tl.tensor, table_stride: tl.tensor, N: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CAPPED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    # Heads of one row run side by side, as their keys lie side by side.
    head = tl.program_id(0) % N
    split = tl.program_id(0) // N % SPLITS
    row = (tl.program_id(0) // (N * SPLITS)).to(tl.int64)
    end, seen, base, share = plan_row(lengths, row, num_blocks, window, SPLITS, TILE, LEAST)
    begin = base + split * share
    if (split > 0) & (begin >= end):
        return
    g = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    at = (head * G + g) * K + d
    here = (g < G) & (d < K)
    q = tl.load(query + row * query_stride + at, mask=here, other=0.0)
    table = tables + row * table_stride
    stop = tl.minimum(begin + share, end)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, peak, total = read_keys(
        q, keys + head * K, values + head * K, table, begin, stop, seen, scale, cap, d, acc, peak, total, N, K, TILE, CAPPED,
    )  # fmt: skip
    if (SPLITS == 1) | (base + share >= end):
        divisor = tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + row * (N * G * K) + at, (acc / divisor).to(out.dtype.element_ty), mask=here)
    else:
        partial = ((row * N + head) * G + g) * SPLITS + split
        tl.store(sums + partial * K + d, acc, mask=here)
        tl.store(peaks + partial, peak[:, None], mask=g < G)
        tl.store(totals + partial, total[:, None], mask=g < G)


@triton.jit
def read_keys(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, table: tl.tensor, begin: tl.tensor, stop: tl.tensor,
    seen: tl.tensor, scale: tl.tensor, cap: tl.tensor, d: tl.tensor, acc: tl.tensor, peak: tl.tensor, total: tl.tensor,
    N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(weighted values [ROWS, WIDTH], greatest score [ROWS], sum of powers [ROWS]), the positions from begin to stop added."""
    r = tl.arange(0, TILE)
    # Looked up one tile ahead: in the same tile, the pipeliner would take the lookup for a stage of its own and leave
    # fewer tiles of keys under way.
    slots = find_slots(table, begin, stop, r, TILE)
    for start in range(begin, stop, TILE):
        position = start + r
        valid = (position >= seen) & (position < stop)
        offset = (slots.to(tl.int64) * (N * K))[:, None] + d
        here = valid[:, None] & (d < K)
        k = tl.load(keys + offset, mask=here, other=0.0)
        v = tl.load(values + offset, mask=here, other=0.0)
        slots = find_slots(table, start + TILE, stop, r, TILE)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            score = tanh(score) * cap
        score = tl.where(valid[None, :], score, float("-inf"))
        greatest = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - greatest[:, None])
        kept = tl.exp2(peak - greatest)
        total = total * kept + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        peak = greatest
    return acc, peak, total


@triton.jit(do_not_specialize=["num_blocks", "window"])
def _combine(
    out: tl.tensor, sums: tl.tensor, peaks: tl.tensor, totals: tl.tensor, lengths: tl.tensor, num_blocks: tl.tensor,
    window: tl.tensor, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    item = tl.program_id(0).to(tl.int64)
    end, _, base, share = plan_row(lengths, item // (N * G), num_blocks, window, SPLITS, TILE, LEAST)
    if base + share >= end:
        return
    split = tl.arange(0, MOST)
    d = tl.arange(0, WIDTH)
    used = base + split * share < end
    peak = tl.load(peaks + item * SPLITS + split, mask=used, other=float("-inf"))
    total = tl.load(totals + item * SPLITS + split, mask=used, other=0.0)
    part = tl.load(sums + (item * SPLITS + split)[:, None] * K + d, mask=used[:, None] & (d < K)[None, :], other=0.0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + item * K + d, mixed.to(out.dtype.element_ty), mask=d < K)
