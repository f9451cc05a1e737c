"""Matrix products by one tile whatever the number of rows: an entry's sum runs over the contraction in one order, never split.

Source: the idea is that of Thinking Machines, "Defeating Nondeterminism in LLM Inference" (2025).
Dimensions: T rows, D contraction, E columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.exact_kernels.layout import align

# Tiles that follow each other go down a few tiles of rows before the next columns, so that both operands stay in the L2 cache.
_ROWS_OF_TILES = 8


class _Tile(NamedTuple):
    """What one program computes; a function of the dtype alone, since another tile may sum in another order."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


_TILES = {torch.bfloat16: _Tile(128, 128, 64, 8, 3), torch.float32: _Tile(64, 64, 32, 4, 2)}


def multiply_rows(
    rows_TD: Tensor, matrix_DE: Tensor, bias_E: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """rows @ matrix + bias, [T, E]; a row's bits depend on that row, the matrix and the bias.

    rows_TD:   [T, D] bfloat16 or float32.
    matrix_DE: [D, E] of the same dtype, of any strides (a transposed weight).
    dtype:     of the result, rounded once from float32; None takes that of the rows.
    """
    rows_TD = align(rows_TD)
    out_TE = torch.empty((rows_TD.shape[0], matrix_DE.shape[1]), dtype=dtype or rows_TD.dtype, device=rows_TD.device)
    _launch(rows_TD, matrix_DE, bias_E, out_TE, masks_rows=True, adds=False)
    return out_TE


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in the dtype of both: the same bits for the same operands."""
    out = torch.empty((left.shape[0], right.shape[1]), dtype=left.dtype, device=left.device)
    _launch(left, right, None, out, masks_rows=_cuts(left.shape[0], _TILES[left.dtype].rows), adds=False)
    return out


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to a contiguous float32 total, in place."""
    _launch(left, right, None, total, masks_rows=_cuts(left.shape[0], _TILES[left.dtype].rows), adds=True)


def _cuts(size: int, block: int) -> bool:
    return size % block != 0


def _launch(left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor, *, masks_rows: bool, adds: bool) -> None:
    (num_rows, contraction), num_columns = left.shape, right.shape[1]
    if right.dtype != left.dtype or left.dtype not in _TILES:
        raise TypeError(
            f"exact products take two operands in bfloat16 or float32, not {left.dtype} and {right.dtype}; cast them first"
        )
    tile = _TILES[left.dtype]
    if not out.numel():
        return
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns),)
    _product[grid](
        left, right, out if bias is None else bias, out, num_rows, num_columns, contraction,
        *left.stride(), *right.stride(), out.stride(0),
        HAS_BIAS=bias is not None, ADDS=adds, MASKS_ROWS=masks_rows,
        MASKS_COLUMNS=_cuts(num_columns, tile.columns), MASKS_DEPTH=_cuts(contraction, tile.depth),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, ROWS_OF_TILES=_ROWS_OF_TILES,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    left: tl.tensor, right: tl.tensor, bias: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor,
    contraction: tl.tensor, left_row: tl.tensor, left_depth: tl.tensor, right_depth: tl.tensor,
    right_column: tl.tensor, out_row: tl.tensor, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, MASKS_ROWS: tl.constexpr,
    MASKS_COLUMNS: tl.constexpr, MASKS_DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, ROWS_OF_TILES: tl.constexpr,
) -> None:  # fmt: skip
    tiles_down, tiles_across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    program = tl.program_id(0)
    band = program // (ROWS_OF_TILES * tiles_across)
    height = tl.minimum(tiles_down - band * ROWS_OF_TILES, ROWS_OF_TILES)
    within = program % (ROWS_OF_TILES * tiles_across)
    row = (band * ROWS_OF_TILES + within % height) * ROWS + tl.arange(0, ROWS)
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left_at = left + row[:, None].to(tl.int64) * left_row + depth[None, :] * left_depth
    right_at = right + depth[:, None] * right_depth + column[None, :].to(tl.int64) * right_column
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, contraction, DEPTH):
        left_here = (row[:, None] < num_rows) if MASKS_ROWS else (row[:, None] >= 0)
        right_here = (column[None, :] < num_columns) if MASKS_COLUMNS else (column[None, :] >= 0)
        if MASKS_DEPTH:
            left_here = left_here & (depth[None, :] < contraction - start)
            right_here = right_here & (depth[:, None] < contraction - start)
        left_tile = tl.load(left_at, mask=left_here, other=0.0)
        right_tile = tl.load(right_at, mask=right_here, other=0.0)
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
        left_at += DEPTH * left_depth
        right_at += DEPTH * right_depth
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    out_at = out + row[:, None].to(tl.int64) * out_row + column[None, :]
    here = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    if ADDS:
        total += tl.load(out_at, mask=here, other=0.0)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=here)
