"""Packed attention on Hopper GPUs through kernels that torch does not ship: one operator, whichever library computes it.

Dimensions: T packed tokens, S sequences, H query heads, N kv heads, K head size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridflow.models import attention_cudnn, attention_flash4
from hybridflow.models.attention import AttentionForm, SharedKeys
from hybridflow.models.attention_kernel import FusedKernel, KernelRows

KernelName = Literal["flash_attn_4", "cudnn"]
_HOPPER = (9, 0)
_MAX_HEAD_DIM = 128


KERNELS: dict[KernelName, FusedKernel] = {
    "flash_attn_4": attention_flash4.Flash4(),
    "cudnn": attention_cudnn.Cudnn(),
}
"""Fastest first (docs/performance.md)."""


def why_not_fused(name: KernelName, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this kernel does not serve here, in a few words; None where it does."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return f"it computes in bfloat16 on a GPU, not in {str(dtype).removeprefix('torch.')} on {device.type}"
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return "it was measured on Hopper GPUs alone"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"heads of size {head_dim} are none of its: a multiple of 8 up to {_MAX_HEAD_DIM}"
    return KERNELS[name].why_not()


def choose_fused(device: torch.device, dtype: torch.dtype, head_dim: int) -> KernelName | None:
    """The fastest kernel that serves here; None where there is none but torch's own."""
    return next((name for name in KERNELS if why_not_fused(name, device, dtype, head_dim) is None), None)


class FusedPlan:
    """Packed rows through a fused kernel, with gradient; knows no softcap.

    Nothing here is a number of Python that differs between batches, so that a compiled layer is compiled once.
    """

    def __init__(
        self, kernel: KernelName, cu_seqlens: Tensor, max_len: int, device: torch.device, keys: SharedKeys | None = None
    ) -> None:
        self.kernel: KernelName = kernel
        self.cu_seqlens = cu_seqlens.to(device, torch.int32, non_blocking=True)
        self.max_len = torch.tensor(max_len)
        self.index_C = None if keys is None else keys.index_C.to(device, non_blocking=True)
        self.cu_keys = None if keys is None else keys.cu_seqlens.to(device, torch.int32, non_blocking=True)
        self.max_keys = torch.tensor(max_len if keys is None else keys.max_len)

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]."""
        if form.softcap is not None:
            raise RuntimeError(f"the model has an attention softcap, {form.softcap}, which {self.kernel} does not know")
        if self.index_C is not None:
            key_TNK, value_TNK = (rows.index_select(0, self.index_C) for rows in (key_TNK, value_TNK))
        rows = [rows.contiguous() for rows in (query_THK, key_TNK, value_TNK)]
        lengths = (self.cu_seqlens, self.max_len, self.cu_keys, self.max_keys)
        return _attend(*rows, *lengths, form.scale, form.window or 0, self.kernel)[0]


# The operators' signatures are flat: they take tensors and plain numbers alone.
@torch.library.custom_op("hybridflow::packed_attention", mutates_args=())
def _attend(
    query_THK: Tensor,
    key_TNK: Tensor,
    value_TNK: Tensor,
    cu_seqlens: Tensor,
    max_len: Tensor,
    cu_keys: Tensor | None,
    max_keys: Tensor,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    rows = _read_rows(cu_seqlens, max_len, cu_keys, max_keys, scale, window)
    return KERNELS[kernel].forward(query_THK, key_TNK, value_TNK, rows)  # type: ignore[index]


@_attend.register_fake
def _(query_THK: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = query_THK.shape
    return torch.empty_like(query_THK), query_THK.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("hybridflow::packed_attention_backward", mutates_args=())
def _attend_backward(
    grad_THK: Tensor,
    query_THK: Tensor,
    key_TNK: Tensor,
    value_TNK: Tensor,
    out_THK: Tensor,
    softmax_HT: Tensor,
    cu_seqlens: Tensor,
    max_len: Tensor,
    cu_keys: Tensor | None,
    max_keys: Tensor,
    scale: float,
    window: int,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    saved = (query_THK, key_TNK, value_TNK, out_THK, softmax_HT)
    rows = _read_rows(cu_seqlens, max_len, cu_keys, max_keys, scale, window)
    return KERNELS[kernel].backward(grad_THK, saved, rows)  # type: ignore[index]


@_attend_backward.register_fake
def _(
    grad_THK: Tensor, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query_THK), torch.empty_like(key_TNK), torch.empty_like(value_TNK)


def _read_rows(
    cu_seqlens: Tensor, max_len: Tensor, cu_keys: Tensor | None, max_keys: Tensor, scale: float, window: int
) -> KernelRows:
    longest = int(max_keys)
    return KernelRows(cu_seqlens, int(max_len), scale, 0 if window >= longest else window, cu_keys, longest)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query_THK, key_TNK, value_TNK, cu_seqlens, max_len, cu_keys, max_keys, *ctx.form = inputs
    ctx.save_for_backward(query_THK, key_TNK, value_TNK, *output, cu_seqlens, max_len, cu_keys, max_keys)


def _backward(ctx: Any, grad_THK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (
        *_attend_backward(grad_THK.contiguous(), *ctx.saved_tensors, *ctx.form),
        None,
        None,
        None,
        None,
        None,
        None,
        None,
    )


_attend.register_autograd(_backward, setup_context=_keep)
