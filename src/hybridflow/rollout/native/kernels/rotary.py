"""From the joint projection to rotated queries, and keys and values in the cache.

Dimensions: T packed tokens, H query heads, N kv heads, K head size, P positions of a table, X columns of the projection.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hybridflow.rollout.native.kernels.launch import launch_options, wait_for_inputs
from hybridflow.rollout.native.kernels.norms import apply_gain

# A warp holds four heads of 128 at 16 bytes a thread.
_HEADS, _NUM_WARPS = 8, 2


def rotate_and_store(
    qkv_TX: Tensor, cos_PK: Tensor, sin_PK: Tensor, positions_T: Tensor, slots_T: Tensor, keys: Tensor, values: Tensor, *,
    num_heads: int, num_kv_heads: int, head_dim: int, query_norm: Tensor | None = None, key_norm: Tensor | None = None,
    eps: float = 0.0, norm_offset: float = 0.0, return_kv: bool = False,
) -> Any:  # fmt: skip
    """Norms (where the family has them) and rotates queries and keys, writes keys and values into the cache, in one pass.

    qkv_TX:                [T, X >= (H + 2N) K] float: queries, keys, values of all heads; rows may lie further apart.
    cos_PK, sin_PK:        [P, K] of the model's dtype or float32, by position.
    positions_T, slots_T:  [T] integer; a token whose slot is below 0 is not written.
    keys, values:          [num_slots, N, K] contiguous: one layer of the cache.
    query_norm, key_norm:  [K] weights of the norm over a head, both or neither; `norm_offset` as in `rms_norm`.
    returns:               query_THK contiguous; with `return_kv`, (query_THK, key_TNK, value_TNK), keys rotated.

    Rounds as Transformers' `apply_rotary_pos_emb` (rotate_half): products and their sum in the tables' dtype, so
    float32 tables round once. ValueError where the tables are not as wide as a head (partial rotation).
    """
    _check(qkv_TX, cos_PK, keys, values, num_heads, num_kv_heads, head_dim, query_norm, key_norm)
    num_tokens = qkv_TX.shape[0]
    query_THK = qkv_TX.new_empty((num_tokens, num_heads, head_dim))
    packed_kv = qkv_TX.new_empty((2, num_tokens if return_kv else 0, num_kv_heads, head_dim))
    norms = (cos_PK if query_norm is None else query_norm, cos_PK if key_norm is None else key_norm)
    if num_tokens:
        _rotate[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS))](
            qkv_TX, cos_PK, sin_PK, positions_T, slots_T, keys, values, query_THK, packed_kv[0], packed_kv[1], *norms, eps,
            qkv_TX.stride(0), cos_PK.stride(0), H=num_heads, N=num_kv_heads, K=head_dim, HEADS=_HEADS,
            HALF=triton.next_power_of_2(head_dim // 2), NORMED=query_norm is not None, OFFSET=norm_offset, PACKED=return_kv,
            num_warps=_NUM_WARPS,
            # The compiler narrows the rounded products to the tables' dtype, and would then fuse one of them with the sum.
            enable_fp_fusion=False, **launch_options(qkv_TX.device),
        )  # fmt: skip
    return (query_THK, packed_kv[0], packed_kv[1]) if return_kv else query_THK


def _check(
    qkv_TX: Tensor,
    cos_PK: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> None:
    if cos_PK.shape[1] != head_dim:
        raise ValueError(
            f"the rotary tables have {cos_PK.shape[1]} columns and heads have {head_dim}; heads rotated in part need another path"
        )
    if qkv_TX.shape[1] < (num_heads + 2 * num_kv_heads) * head_dim or qkv_TX.stride(1) != 1:
        raise ValueError(
            f"the projection has {qkv_TX.shape[1]} columns and {num_heads} + 2 * {num_kv_heads} heads of {head_dim} "
            "need more; pass queries, keys and values side by side"
        )
    if not (keys.is_contiguous() and values.is_contiguous()) or keys.shape[1:] != (num_kv_heads, head_dim):
        raise ValueError(
            f"the cache's layer is {tuple(keys.shape)} with strides {keys.stride()}; "
            f"pass [num_slots, {num_kv_heads}, {head_dim}], contiguous"
        )
    if (query_norm is None) != (key_norm is None):
        raise ValueError("one of query_norm and key_norm is None; pass both or neither")


@triton.jit
def _rotate(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, slots: tl.tensor, keys: tl.tensor,
    values: tl.tensor, query: tl.tensor, packed_keys: tl.tensor, packed_values: tl.tensor, query_norm: tl.tensor,
    key_norm: tl.tensor, eps: tl.tensor, row_stride: tl.tensor, table_stride: tl.tensor, H: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    OFFSET: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    # Tables and weights are read as whole tiles too: one row of them would change its layout through shared memory.
    d = tl.broadcast_to(tl.arange(0, HALF)[None, :], [HEADS, HALF])
    here = (head < H + 2 * N) & (d < K // 2)
    low = tl.load(qkv + token * row_stride + head * K + d, mask=here, other=0.0)
    high = tl.load(qkv + token * row_stride + head * K + K // 2 + d, mask=here, other=0.0)
    angle = tl.load(positions + token).to(tl.int64) * table_stride + d
    rotates = here & (head < H + N)
    if NORMED:
        norm_low, norm_high = _norm_heads(low, high, query_norm, key_norm, eps, head < H, d, K, OFFSET)
    else:
        norm_low, norm_high = low, high
    turned_low, turned_high = _turn(norm_low, norm_high, cos, sin, angle, d, K)
    low = tl.where(rotates, turned_low, low)
    high = tl.where(rotates, turned_high, high)
    _store(query + token * (H * K) + head * K + d, low, high, here & (head < H), K)
    key_at = (head - H) * K + d
    value_at = (head - H - N) * K + d
    slot = tl.load(slots + token).to(tl.int64)
    _store(keys + slot * (N * K) + key_at, low, high, rotates & (head >= H) & (slot >= 0), K)
    _store(values + slot * (N * K) + value_at, low, high, here & (head >= H + N) & (slot >= 0), K)
    if PACKED:
        _store(packed_keys + token * (N * K) + key_at, low, high, rotates & (head >= H), K)
        _store(packed_values + token * (N * K) + value_at, low, high, here & (head >= H + N), K)


@triton.jit
def _norm_heads(
    low: tl.tensor, high: tl.tensor, query_norm: tl.tensor, key_norm: tl.tensor, eps: tl.tensor, is_query: tl.tensor,
    d: tl.tensor, K: tl.constexpr, OFFSET: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    here = d < K // 2
    gain_low = tl.where(is_query, _load_gain(query_norm + d, here), _load_gain(key_norm + d, here))
    gain_high = tl.where(is_query, _load_gain(query_norm + K // 2 + d, here), _load_gain(key_norm + K // 2 + d, here))
    full_low, full_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(full_low * full_low + full_high * full_high, 1)[:, None]
    over = tl.rsqrt(squares / K + eps)
    dtype: tl.constexpr = low.dtype
    return apply_gain(full_low * over, gain_low, dtype, OFFSET), apply_gain(full_high * over, gain_high, dtype, OFFSET)


@triton.jit
def _load_gain(at: tl.tensor, here: tl.tensor) -> tl.tensor:
    return tl.load(at, mask=here, other=0.0)


@triton.jit
def _turn(
    low: tl.tensor, high: tl.tensor, cos: tl.tensor, sin: tl.tensor, angle: tl.tensor, d: tl.tensor, K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    here = d < K // 2
    cos_low = tl.load(cos + angle, mask=here, other=0.0)
    cos_high = tl.load(cos + angle + K // 2, mask=here, other=0.0)
    sin_low = tl.load(sin + angle, mask=here, other=0.0)
    sin_high = tl.load(sin + angle + K // 2, mask=here, other=0.0)
    turned_low = _multiply(low, cos_low) - _multiply(high, sin_low)
    turned_high = _multiply(high, cos_high) + _multiply(low, sin_high)
    return turned_low.to(low.dtype), turned_high.to(low.dtype)


@triton.jit
def _multiply(x: tl.tensor, factor: tl.tensor) -> tl.tensor:
    # Rounded to the tables' dtype before the sum.
    return (x.to(tl.float32) * factor.to(tl.float32)).to(factor.dtype).to(tl.float32)


@triton.jit
def _store(at: tl.tensor, low: tl.tensor, high: tl.tensor, mask: tl.tensor, K: tl.constexpr) -> None:
    tl.store(at, low, mask=mask)
    tl.store(at + K // 2, high, mask=mask)
