"""Reductions along rows, one program a row and blocks of one size: torch's own choose their order by the number of rows and by alignment.

Dimensions: R rows, C columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.exact_kernels.layout import align

_MAX_BLOCK = 4096
_SCAN_BLOCK = 1024


def sum_rows(x: Tensor) -> Tensor:
    """Sum over the last dimension, which stays with size 1; float32 sums, rounded once to the dtype."""
    rows_RC = align(x.reshape(-1, x.shape[-1]))
    out = torch.empty((*x.shape[:-1], 1), dtype=x.dtype, device=x.device)
    _run(_sum, rows_RC, out, _plan_block(rows_RC.shape[1]))
    return out


def log_softmax_rows(logits_RC: Tensor) -> Tensor:
    """Log-softmax of each row, [R, C] float32. A row with a NaN or +inf, or with nothing but -inf, gives NaN."""
    logits_RC = align(logits_RC.float())
    out_RC = torch.empty_like(logits_RC)
    _run(_log_softmax, logits_RC, out_RC, _plan_block(logits_RC.shape[1]))
    return out_RC


def cumulate_rows(x_RC: Tensor) -> Tensor:
    """Cumulative sums along each row in the tensor's dtype, [R, C]."""
    x_RC = align(x_RC)
    out_RC = torch.empty_like(x_RC)
    _run(_cumulate, x_RC, out_RC, {"BLOCK": _SCAN_BLOCK, "num_warps": 4})
    return out_RC


def _plan_block(width: int) -> dict[str, int]:
    block = min(max(triton.next_power_of_2(width), 16), _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


def _run(kernel: Any, rows_RC: Tensor, out: Tensor, plan: dict[str, int]) -> None:
    if rows_RC.numel():
        kernel[(rows_RC.shape[0],)](rows_RC, out, WIDTH=rows_RC.shape[1], **plan)


@triton.jit
def _sum(x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0).to(out.dtype.element_ty))


@triton.jit
def _log_softmax(x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        here = start + lane < WIDTH
        peaks = tl.maximum(peaks, tl.load(x + row + start + lane, mask=here, other=float("-inf")))
    peak = tl.max(peaks, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        here = start + lane < WIDTH
        value = tl.load(x + row + start + lane, mask=here, other=float("-inf"))
        # A NaN, which the maximum passes over, stays in the sum.
        total += tl.where(here, tl.exp(value - peak), 0.0)
    log_total = tl.log(tl.sum(total, 0))
    for start in range(0, WIDTH, BLOCK):
        here = start + lane < WIDTH
        value = tl.load(x + row + start + lane, mask=here, other=0.0)
        tl.store(out + row + start + lane, (value - peak) - log_total, mask=here)


@triton.jit
def _cumulate(x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((1,), dtype=out.dtype.element_ty)
    for start in range(0, WIDTH, BLOCK):
        here = start + lane < WIDTH
        value = tl.load(x + row + start + lane, mask=here, other=0.0)
        tl.store(out + row + start + lane, before + tl.cumsum(value, 0), mask=here)
        before += tl.sum(value, 0)
