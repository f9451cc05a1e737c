"""Matrix products of few rows: the weights go by once at memory speed, and are asked for before what they meet is there.

Dimensions: T tokens, I columns of the input, O columns of the output, S shares of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.rollout.native.kernels.activations import Act, activate
from hybridflow.rollout.native.kernels.launch import launch_options, prefetch, wait_for_inputs
from hybridflow.rollout.native.plans import ProductPlan

# Weights that are brought near while the kernel before still runs: more would push out what has come. A line of the L2 cache has 128 bytes.
_AHEAD_BYTES, _MOST_LINES, _LINE = 8 << 20, 16, tl.constexpr(128)


def multiply(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, plan: ProductPlan) -> Tensor:
    """x @ weight.T + bias as [T, O] of x's dtype; with several splits, the shares [S, T, O] float32 of that sum, bias left out.

    x_TI: [T, I], rows may lie further apart. weight_OI: contiguous. I is a multiple of the plan's depth, else ValueError.
    """
    return _launch(x_TI, weight_OI, bias_O, plan, None)


def multiply_gated(x_TI: Tensor, gate_up: Tensor, act: Act, plan: ProductPlan) -> Tensor:
    """act(x @ gate.T) * (x @ up.T) as [T, F], rounded as `gated_act` of the whole product; gate_up: [2F, I]. The plan has one split."""
    return _launch(x_TI, gate_up, None, plan, act)


def add_shares(shares_STO: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `multiply` would have given unsplit: [T, O]."""
    total_TO = shares_STO.sum(0)
    return (total_TO if bias_O is None else total_TO + bias_O.float()).to(dtype)


def _launch(x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, plan: ProductPlan, act: Act | None) -> Tensor:
    num_tokens, depth = x_TI.shape
    width = weight.shape[0] if act is None else weight.shape[0] // 2
    if depth % plan.depth or weight.shape[1] != depth or not weight.is_contiguous() or (act and plan.splits > 1):
        raise ValueError(
            f"the plan {plan} does not serve inputs of {depth} columns and weights {tuple(weight.shape)}; "
            "its depth divides the columns, weights are contiguous, and gated sums have one split"
        )
    share = triton.cdiv(depth // plan.depth, plan.splits) * plan.depth
    splits = triton.cdiv(depth, share)
    shape, dtype = ((num_tokens, width), x_TI.dtype) if splits == 1 else ((splits, num_tokens, width), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x_TI.device)
    if num_tokens:
        _multiply[(triton.cdiv(width, plan.columns) * splits * triton.cdiv(num_tokens, plan.rows),)](
            x_TI, weight, weight if bias_O is None else bias_O, out, x_TI.stride(0), num_tokens,
            OUT=width, IN=depth, SHARE=share, SPLITS=splits, ROWS=plan.rows, COLUMNS=plan.columns, DEPTH=plan.depth,
            BIASED=bias_O is not None, GATED=act is not None, GELU=act == "gelu_tanh", TURNED=plan.turned,
            LINES=_count_lines(weight.shape[0] * splits, share * weight.element_size()),
            num_warps=plan.num_warps, num_stages=plan.num_stages, **launch_options(x_TI.device),
        )  # fmt: skip
    return out


def _count_lines(num_rows: int, row_bytes: int) -> int:
    """Lines of each program's rows of weights that are asked for early: 0 or a power of two."""
    most = min(_AHEAD_BYTES // (num_rows * _LINE.value), row_bytes // _LINE.value, _MOST_LINES)
    return 1 << most.bit_length() >> 1


@triton.jit
def _bring(weight: tl.tensor, column: tl.tensor, begin: tl.tensor, IN: tl.constexpr, LINES: tl.constexpr) -> None:
    """Brings the beginning of rows of weights into the L2 cache."""
    size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    at = tl.minimum(begin + tl.arange(0, LINES) * (_LINE // size), IN - 1)
    prefetch(weight + column.to(tl.int64)[:, None] * IN + at[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, x_stride: tl.tensor, num_rows: tl.tensor,
    OUT: tl.constexpr, IN: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    TURNED: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    # Programs side by side read the same weights.
    tiles = tl.cdiv(num_rows, ROWS)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(0) // tiles % SPLITS
    column = tl.program_id(0) // (tiles * SPLITS) * COLUMNS + tl.arange(0, COLUMNS)
    # Beyond the last column, its weights once more: what they give is not stored.
    held = tl.minimum(column, OUT - 1)
    begin = split * SHARE
    if EARLY and LINES > 0:
        _bring(weight, held, begin, IN, LINES)
        if GATED:
            _bring(weight + OUT * IN, held, begin, IN, LINES)
    wait_for_inputs(EARLY)
    here = row < num_rows
    k = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight + held.to(tl.int64)[:, None] * IN + k[None, :]
    if TURNED:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        acc_up = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, tl.minimum(begin + SHARE, IN), DEPTH):
        a = tl.load(x_at + start, mask=here[:, None], other=0.0)
        w = tl.load(weight_at + start)
        acc = _add_product(a, w, acc, TURNED)
        if GATED:
            up = tl.load(weight_at + OUT * IN + start)
            acc_up = _add_product(a, up, acc_up, TURNED)
    if TURNED:
        at = split.to(tl.int64) * num_rows * OUT + row.to(tl.int64)[None, :] * OUT + column[:, None]
        kept = here[None, :] & (column < OUT)[:, None]
    else:
        at = split.to(tl.int64) * num_rows * OUT + row.to(tl.int64)[:, None] * OUT + column[None, :]
        kept = here[:, None] & (column < OUT)[None, :]
    if BIASED and SPLITS == 1:
        offset = tl.load(bias + held).to(tl.float32)
        acc += offset[:, None] if TURNED else offset[None, :]
    if GATED:
        dtype: tl.constexpr = x.dtype.element_ty
        acc = activate(acc.to(dtype), GELU).to(dtype).to(tl.float32) * acc_up.to(dtype).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _add_product(a: tl.tensor, w: tl.tensor, acc: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    left, right = (w, a) if TURNED else (a, w)
    return tl.dot(left, tl.trans(right), acc, input_precision="ieee")
