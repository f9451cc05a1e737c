"""Packed attention on GPUs through torch's variable-length flash attention; the one place that knows its signature.

Dimensions: T packed tokens, S sequences, H query heads, N kv heads, K head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from hybridflow.models.attention import AttentionForm

# torch 2.11 groups query heads by itself; later versions want to be told.
_TAKES_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
_MAX_HEAD_DIM = 256


def serves_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    """Whether the kernel serves this device, dtype and form of attention."""
    fits = head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0 and softcap is None
    return fits and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class VarlenPlan:
    """Packed rows through flash attention, with gradient; knows no softcap."""

    def __init__(self, cu_seqlens: Tensor, max_len: int, device: torch.device) -> None:
        self.cu_seqlens = cu_seqlens.to(device, torch.int32, non_blocking=True)
        self.max_len = max_len

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]."""
        if form.softcap is not None:
            raise RuntimeError(
                f"the model has an attention softcap, {form.softcap}, which flash attention does not know"
            )
        window = (-1, 0) if form.window is None or form.window >= self.max_len else (form.window - 1, 0)
        grouped = query_THK.shape[1] != key_TNK.shape[1]
        flags: dict[str, Any] = {"enable_gqa": True} if grouped and _TAKES_GQA_FLAG else {}
        out = varlen_attn(
            query_THK.contiguous(),
            key_TNK.contiguous(),
            value_TNK.contiguous(),
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_len,
            self.max_len,
            scale=form.scale,
            window_size=window,
            **flags,
        )
        assert isinstance(out, Tensor)
        return out
