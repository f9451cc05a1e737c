"""FlashAttention 4 (package flash-attn-4): the fastest packed attention measured on Hopper, docs/performance.md."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from typing import Any

from torch import Tensor

from hybridflow.models.attention_kernel import KernelRows, SavedTensors

# Its interface below the public one, which torch.compile cannot follow, moves between releases.
_VERSION = "4.0.0b36"


class Flash4:
    """See `FusedKernel`. Kernels are compiled at their first use for a form of heads, a few seconds each; row lengths do not matter."""

    takes_keys = True

    def why_not(self) -> str | None:
        """See `FusedKernel`."""
        return _why_not()

    def forward(self, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, rows: KernelRows) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        out_THK, softmax_HT, *_ = _interface()._flash_attn_fwd(
            query_THK, key_TNK, value_TNK, return_lse=True, **_describe_rows(rows)
        )
        return out_THK, softmax_HT

    def backward(self, grad_THK: Tensor, saved: SavedTensors, rows: KernelRows) -> tuple[Tensor, Tensor, Tensor]:
        """See `FusedKernel`."""
        query_THK, key_TNK, value_TNK, out_THK, softmax_HT = saved
        grads: tuple[Tensor, Tensor, Tensor] = _interface()._flash_attn_bwd(
            query_THK,
            key_TNK,
            value_TNK,
            out_THK,
            grad_THK,
            softmax_HT,
            **_describe_rows(rows),
        )[:3]
        return grads


@functools.cache
def _why_not() -> str | None:
    # A folder `flash_attn` may be an older release's.
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return f"flash-attn-4 is not installed: pip install flash-attn-4=={_VERSION} 'nvidia-cutlass-dsl[cu13]'"
    version = importlib.metadata.version("flash-attn-4")
    return None if version == _VERSION else f"flash-attn-4 is {version}, and {_VERSION} is the one that is known"


@functools.cache
def _interface() -> Any:
    from flash_attn.cute import interface

    return interface


def _describe_rows(rows: KernelRows) -> dict[str, Any]:
    return {
        "cu_seqlens_q": rows.cu_seqlens,
        "cu_seqlens_k": rows.cu_seqlens if rows.cu_keys is None else rows.cu_keys,
        "max_seqlen_q": rows.max_len,
        "max_seqlen_k": rows.max_len if rows.cu_keys is None else rows.max_keys,
        "softmax_scale": rows.scale,
        "causal": not rows.window,
        "window_size_left": rows.window - 1 if rows.window else None,
        "window_size_right": 0 if rows.window else None,
    }
