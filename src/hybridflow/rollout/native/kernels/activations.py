"""The gate of a gated MLP.

Dimensions: T packed tokens, F inner width.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.rollout.native.kernels.launch import launch_options, wait_for_inputs

Act = Literal["silu", "gelu_tanh"]
ACTS: tuple[Act, ...] = ("silu", "gelu_tanh")
# 16 bytes a thread of each half, in bfloat16.
_BLOCK, _NUM_WARPS = 1024, 4
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


def gated_act(gate_up_T2F: Tensor, act: Act) -> Tensor:
    """act(gate) * up, rounded as Transformers' gated MLPs do: the activation in float32, then the product in the dtype.

    gate_up_T2F: [T, 2F] float, gates first; rows may lie further apart.
    returns:     [T, F] of the same dtype.

    ValueError for an activation that is not one of `ACTS`.
    """
    if act not in ACTS:
        raise ValueError(f"activation '{act}' has no kernel; the kernels know {' and '.join(ACTS)}")
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty((num_tokens, width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if num_tokens:
        _gate[(num_tokens * triton.cdiv(width, _BLOCK),)](
            gate_up_T2F,
            out_TF,
            gate_up_T2F.stride(0),
            WIDTH=width,
            GELU=act == "gelu_tanh",
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            **launch_options(gate_up_T2F.device),
        )
    return out_TF


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent of float32, to 1e-7 absolute; infinities give -1 and 1."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activate(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """The activation in float32."""
    x = gate.to(tl.float32)
    # (1 + tanh(y)) / 2 is the logistic function of 2 y, which loses no digits where tanh is near -1.
    slope = 2.0 * _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x) if GELU else x
    return x / (1.0 + tl.exp(-slope))


@triton.jit
def _gate(
    gate_up: tl.tensor, out: tl.tensor, row_stride: tl.tensor, WIDTH: tl.constexpr, GELU: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    blocks = tl.cdiv(WIDTH, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * row_stride + column, mask=column < WIDTH, other=0.0)
    up = tl.load(gate_up + row * row_stride + WIDTH + column, mask=column < WIDTH, other=0.0)
    product = activate(gate, GELU).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(gate.dtype), mask=column < WIDTH)
