"""Storage of a paged key-value cache; which block belongs to whom is the rollout engine's business.

Dimensions: T packed tokens, N kv heads, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 32


class PagedKVCache:
    """Keys and values of all layers in blocks of `block_size` tokens, at fixed addresses.

    keys, values: [num_layers, num_blocks * block_size, N, K]; token slot = block * block_size + position % block_size.

    Starts as zeros. A slot outside every sequence is never read, so freed blocks need no clearing.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Size of the storage."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots_T: Tensor, key_TNK: Tensor, value_TNK: Tensor) -> None:
        """Stores one layer's keys and values at the given token slots (int64, no slot twice)."""
        self.keys[layer].index_copy_(0, slots_T, key_TNK)
        self.values[layer].index_copy_(0, slots_T, value_TNK)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copies token slots, all layers: slot `source[i]` to slot `target[i]` (int64 [n], no target twice).

        Used where samples of a group go on from one partly filled block of their prompt.
        """
        for store in (self.keys, self.values):
            store.index_copy_(1, target, store.index_select(1, source))
