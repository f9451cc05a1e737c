"""What a decode step does beside the model: where its tokens go, and what became of each row.

Dimensions: B seats, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.kv_cache import BLOCK_SIZE
from hybridflow.rollout.native.kernels.launch import launch_options, wait_for_inputs

_PAGE = tl.constexpr(BLOCK_SIZE)
_NUM_WARPS = 4


class SeatState(Protocol):
    """Rows on the device; int64: tokens, keys, positions, slots; float32: out_logprobs [S, C]; int32: all else.

    tokens: newest token. lengths: tokens known. limits: length at which a row ends. live: 1 while it decodes, else 0.
    tables [C, W]: blocks. positions, slots, contexts: of the token that is fed, see `prepare_step`. step [1]: number in the window.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    live: Tensor
    tables: Tensor
    positions: Tensor
    slots: Tensor
    contexts: Tensor
    out_tokens: Tensor
    out_logprobs: Tensor
    step: Tensor


def prepare_step(state: SeatState, num_seats: int, idle_slot: int) -> None:
    """Writes position, cache slot and tokens held (the one that is fed included) of the first `num_seats` seats.

    A seat without a row is fed at position 0, stores at `idle_slot` and holds nothing.
    """
    _prepare[(1,)](
        *(state.lengths, state.live, state.tables, state.positions, state.slots, state.contexts),
        *(state.tables.stride(0), idle_slot, num_seats),
        BLOCK=triton.next_power_of_2(num_seats),
        num_warps=_NUM_WARPS,
        **launch_options(state.lengths.device),
    )


def finish_step(state: SeatState, num_seats: int, tokens_B: Tensor, logprobs_B: Tensor, is_stop_V: Tensor) -> None:
    """Appends what was drawn to each live row, ends those that it ends, and counts the step.

    tokens_B, logprobs_B: [B] int64 and float32. is_stop_V: [V] int32, 1 for tokens that end a row.
    Idle seats give -1 and 0.0. A row also ends at its limit, and where its log-probability is not finite.
    """
    _finish[(1,)](
        *(tokens_B, logprobs_B, is_stop_V, state.tokens, state.lengths, state.limits, state.live),
        *(state.out_tokens, state.out_logprobs, state.step, state.out_tokens.stride(0), num_seats),
        BLOCK=triton.next_power_of_2(num_seats),
        num_warps=_NUM_WARPS,
        **launch_options(state.lengths.device),
    )


@triton.jit
def _prepare(
    lengths: tl.tensor, live: tl.tensor, tables: tl.tensor, positions: tl.tensor, slots: tl.tensor, contexts: tl.tensor,
    table_stride: tl.tensor, idle_slot: tl.tensor, num_seats: tl.tensor, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    seat = tl.arange(0, BLOCK)
    here = seat < num_seats
    length = tl.load(lengths + seat, mask=here, other=0)
    is_live = (tl.load(live + seat, mask=here, other=0) != 0) & here
    position = tl.where(is_live, length - 1, 0)
    block = tl.load(tables + seat.to(tl.int64) * table_stride + position // _PAGE, mask=is_live, other=0)
    slot = tl.where(is_live, block.to(tl.int64) * _PAGE + position % _PAGE, idle_slot)
    tl.store(positions + seat, position.to(tl.int64), mask=here)
    tl.store(slots + seat, slot, mask=here)
    tl.store(contexts + seat, tl.where(is_live, length, 0), mask=here)


@triton.jit
def _finish(
    drawn: tl.tensor, logprobs: tl.tensor, is_stop: tl.tensor, tokens: tl.tensor, lengths: tl.tensor, limits: tl.tensor,
    live: tl.tensor, out_tokens: tl.tensor, out_logprobs: tl.tensor, step: tl.tensor, out_stride: tl.tensor,
    num_seats: tl.tensor, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    seat = tl.arange(0, BLOCK)
    here = seat < num_seats
    number = tl.load(step)
    is_live = (tl.load(live + seat, mask=here, other=0) != 0) & here
    token = tl.load(drawn + seat, mask=here, other=0)
    logprob = tl.load(logprobs + seat, mask=here, other=0.0)
    length = tl.load(lengths + seat, mask=here, other=0) + 1
    stops = tl.load(is_stop + token, mask=is_live, other=0) != 0
    ends = stops | (length >= tl.load(limits + seat, mask=here, other=0)) | ~(tl.abs(logprob) < float("inf"))
    tl.store(out_tokens + number * out_stride + seat, tl.where(is_live, token, -1).to(tl.int32), mask=here)
    tl.store(out_logprobs + number * out_stride + seat, tl.where(is_live, logprob, 0.0), mask=here)
    tl.store(tokens + seat, token, mask=is_live)
    tl.store(lengths + seat, length, mask=is_live)
    tl.store(live + seat, tl.where(ends, 0, 1), mask=is_live)
    # All have read the number before one writes it.
    tl.debug_barrier()
    tl.store(step, number + 1)
