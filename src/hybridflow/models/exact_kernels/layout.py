"""Operands as every launch must find them: a kernel is compiled by alignment, and other loads may lead to another order of sums."""

from __future__ import annotations

from torch import Tensor

_ALIGNMENT_BYTES = 16


def align(x: Tensor) -> Tensor:
    """The tensor, contiguous and at an address that is a multiple of 16 bytes; copied only where it is not so yet."""
    x = x.contiguous()
    x = x.clone() if x.data_ptr() % _ALIGNMENT_BYTES else x
    # A dimension of size 1 may keep any stride, and a kernel is compiled by that, too.
    return x.view(-1).view(x.shape)
