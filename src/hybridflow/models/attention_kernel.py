"""What a library's attention kernel over packed rows is given, and what it gives back.

Dimensions: T packed tokens, S sequences, H query heads, N kv heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

SavedTensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Query, key, value, output and what backward needs of the softmax."""


@dataclass(frozen=True, eq=False)
class KernelRows:
    """Where rows begin and how their tokens attend: `KernelRows(cu_seqlens, max_len=1000, scale=0.125, window=0)`.

    cu_seqlens: [S + 1] int32, on the GPU.
    max_len:    tokens of the longest row.
    scale:      factor on query times key.
    window:     0 is none; else a token sees `window` tokens, itself included, fewer than the longest row has keys.
    cu_keys, max_keys: the same of keys, where a row's queries are the last of the tokens that it attends to; None: it has no others.
    """

    cu_seqlens: Tensor
    max_len: int
    scale: float
    window: int
    cu_keys: Tensor | None = None
    max_keys: int = 0


class FusedKernel(Protocol):
    """A library's causal attention over packed rows; grouped-query heads are grouped by it."""

    takes_keys: bool
    """Whether rows may have more keys than queries."""

    def why_not(self) -> str | None:
        """Why the library cannot be used here, in a few words; None where it can."""

    def forward(self, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, rows: KernelRows) -> tuple[Tensor, Tensor]:
        """Output [T, H, K] and what backward needs of the softmax, [H, T] float32."""

    def backward(self, grad_THK: Tensor, saved: SavedTensors, rows: KernelRows) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients at query, key and value."""
