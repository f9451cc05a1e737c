"""Counter-based draws: the uniform of a token is a pure function of who is being sampled and where.

Dimensions: S sequences.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 0xFFFFFFFFFFFFFFFF


def compute_keys(seed: int, step: int, group_ids_S: np.ndarray, sample_ids_S: np.ndarray) -> np.ndarray:
    """One 64-bit key a sequence, from the four numbers that name it.

    group_ids_S, sample_ids_S: [S] int64.
    returns:                   [S] int64 (the bits of an unsigned key).

    Each number goes through a SplitMix64 round on top of the ones before it, so (seed 1, step 2) and
    (seed 2, step 1) are unrelated.
    """
    keys_S = np.zeros(len(group_ids_S), np.uint64)
    for part in (
        np.uint64(seed & _BITS),
        np.uint64(step & _BITS),
        group_ids_S.astype(np.uint64),
        sample_ids_S.astype(np.uint64),
    ):
        keys_S = _mix(keys_S + part + np.uint64(_GOLDEN))
    return keys_S.view(np.int64)


def compute_uniforms(keys_S: Tensor, positions_S: Tensor) -> Tensor:
    """The uniform in [0, 1) of each key at its token position.

    keys_S:      [S] int64, from `compute_keys`.
    positions_S: [S] int64, index in the row of the token to be drawn.
    returns:     [S] float64, multiples of 2^-53; the same bits on every device.

    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), entered at any place of the key's stream: its state after n
    draws is key + n * golden ratio. Torch has no unsigned arithmetic; int64 wraps around to the same bits.
    """
    state = keys_S + (positions_S + 1) * _signed(_GOLDEN)
    state = (state ^ _shift_right(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift_right(state, 27)) * _signed(_MIX_2)
    return _shift_right(state ^ _shift_right(state, 31), 11).double() * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
    return state ^ (state >> np.uint64(31))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # Torch's own shift carries the sign down; the mask makes it a logical one.
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
