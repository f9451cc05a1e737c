"""Root-mean-square norms, alone or with the addition to the residual stream that comes before.

Dimensions: T packed tokens, D model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.rollout.native.kernels.launch import launch_options, wait_for_inputs


def rms_norm(
    hidden_TD: Tensor, weight_D: Tensor, eps: float, out: Tensor | None = None, *, offset: float = 0.0
) -> Tensor:
    """Each row over its root mean square, times the weight; rounded as Transformers' RMSNorm modules do.

    hidden_TD: [T, D] float; rows may lie further apart.
    weight_D:  [D] of the same dtype.
    offset:    added to the weight; 1 for the Gemma families.
    out:       [T, D] contiguous, written and returned; None allocates it.

    Without an offset the norm is rounded to the dtype before it meets the weight (Llama, Qwen, Mistral); with one, the
    product is taken in float32 and rounded once (Gemma).
    """
    return _launch(hidden_TD, None, weight_D, eps, offset, out)


def add_rms_norm(
    hidden_TD: Tensor,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    offset: float = 0.0,
) -> Tensor:
    """Adds to the residual stream, in its dtype and in place, and returns the norm of the sum as `rms_norm` does.

    residual_TD: [T, D], overwritten by the sum.
    hidden_TD:   [T, D] of its dtype, or the float32 shares [S, T, D] of a product, which are added up and rounded first.
    """
    return _launch(hidden_TD, residual_TD, weight_D, eps, offset, out)


def _launch(
    hidden_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, offset: float, out: Tensor | None
) -> Tensor:
    stream_TD = hidden_TD if residual_TD is None else residual_TD
    num_tokens, width = stream_TD.shape
    normed_TD = torch.empty((num_tokens, width), dtype=stream_TD.dtype, device=hidden_TD.device) if out is None else out
    block = triton.next_power_of_2(width)
    if num_tokens:
        _norm[(num_tokens,)](
            hidden_TD,
            stream_TD,
            weight_D,
            normed_TD,
            eps,
            hidden_TD.stride(-2),
            stream_TD.stride(0),
            hidden_TD.stride(0),
            WIDTH=width,
            OFFSET=offset,
            ADDS=residual_TD is not None,
            SHARES=hidden_TD.shape[0] if hidden_TD.dim() == 3 else 0,
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 8),
            **launch_options(hidden_TD.device),
        )
    return normed_TD


@triton.jit
def _norm(
    hidden: tl.tensor, stream: tl.tensor, weight: tl.tensor, normed: tl.tensor, eps: tl.tensor,
    hidden_stride: tl.tensor, stream_stride: tl.tensor, share_stride: tl.tensor, WIDTH: tl.constexpr,
    OFFSET: tl.constexpr, ADDS: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    here = column < WIDTH
    gain = tl.load(weight + column, mask=here, other=0.0)
    wait_for_inputs(EARLY)
    x = load_sum(hidden + row * hidden_stride + column, here, share_stride, SHARES).to(stream.dtype.element_ty)
    if ADDS:
        before = tl.load(stream + row * stream_stride + column, mask=here, other=0.0)
        x = (x.to(tl.float32) + before.to(tl.float32)).to(x.dtype)
        tl.store(stream + row * stream_stride + column, x, mask=here)
    full = x.to(tl.float32)
    full = full * tl.rsqrt(tl.sum(full * full, 0) / WIDTH + eps)
    tl.store(normed + row * WIDTH + column, apply_gain(full, gain, x.dtype, OFFSET), mask=here)


@triton.jit
def load_sum(at: tl.tensor, here: tl.tensor, share_stride: tl.tensor, SHARES: tl.constexpr) -> tl.tensor:
    """What is there, or the sum of its shares in their order; 0 shares are a value that is whole."""
    x = tl.load(at, mask=here, other=0.0)
    for share in tl.static_range(1, SHARES):
        x += tl.load(at + share * share_stride, mask=here, other=0.0)
    return x


@triton.jit
def apply_gain(full: tl.tensor, gain: tl.tensor, dtype: tl.constexpr, OFFSET: tl.constexpr) -> tl.tensor:
    """A float32 norm times its weight, in the dtype, rounded where the family rounds."""
    factor = gain.to(tl.float32)
    return (full.to(dtype).to(tl.float32) * factor if OFFSET == 0.0 else full * (OFFSET + factor)).to(dtype)
