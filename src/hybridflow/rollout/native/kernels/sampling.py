"""From raw logits to one token a row and its log-probability: the logits are read once, and a chunk of them again.

Dimensions: B rows, V vocabulary, C chunks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.rollout.native.kernels.activations import tanh
from hybridflow.rollout.native.kernels.launch import launch_options, wait_for_inputs

_CHUNK, _NUM_WARPS = 4096, 4
# The constants of SplitMix64, as in rollout/native/draws.py.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def sample(
    logits_BV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    *,
    temperature: float,
    greedy: bool,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws each row's next token by inverting the cumulative sum of its distribution, in order of id.

    logits_BV:   [B, V] bfloat16, float16 or float32: the head's raw products, scaled here as `scale_logits` does.
    keys_B:      [B] int64 from `compute_keys`; positions_B: [B] int64 index in the row of the token to be drawn. They give
                 the uniform that `compute_uniforms` gives, bit for bit.
    greedy:      the most likely token, the lowest id of equals, and its log-probability at temperature 1.
    returns:     (tokens [B] int64, logprobs [B] float32) of the whole distribution.

    Sums are float32 within a chunk of the vocabulary, float64 over chunks and up to the token, in fixed order: the draws are
    those of `sample_tokens` but where the uniform falls within rounding of a border. A row with a NaN or an infinity above
    all, or with nothing but -inf, gives a log-probability that is not finite and a token of the vocabulary.
    """
    num_rows, vocab = logits_BV.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    peaks_BC = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits_BV.device)
    totals_BC = torch.empty_like(peaks_BC)
    tokens_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    logprobs_B = torch.empty(num_rows, dtype=torch.float32, device=logits_BV.device)
    factors = (
        logit_scale,
        1.0 if softcap is None else softcap,
        1.0 if greedy else 1.0 / temperature,
        logits_BV.stride(0),
    )
    shape = {"VOCAB": vocab, "CHUNKS": num_chunks, "CHUNK": _CHUNK, "CAPPED": softcap is not None}
    early = launch_options(logits_BV.device)
    if num_rows:
        _reduce_chunks[(num_rows * num_chunks,)](
            logits_BV, peaks_BC, totals_BC, *factors, **shape, num_warps=_NUM_WARPS, **early
        )
        _draw[(num_rows,)](
            logits_BV, keys_B, positions_B, peaks_BC, totals_BC, tokens_B, logprobs_B, *factors, **shape,
            MOST=triton.next_power_of_2(num_chunks), GREEDY=greedy, num_warps=_NUM_WARPS, **early,
        )  # fmt: skip
    return tokens_B, logprobs_B


@triton.jit
def compute_uniform(key: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The uniform of a key at a position, float64, as `rollout.native.draws.compute_uniforms` has it."""
    state = key.to(tl.uint64) + (position + 1).to(tl.uint64) * _GOLDEN
    state = (state ^ (state >> 30)) * _MIX_1
    state = (state ^ (state >> 27)) * _MIX_2
    return ((state ^ (state >> 31)) >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _load_chunk(
    row: tl.tensor, index: tl.tensor, logit_scale: tl.tensor, softcap: tl.tensor, coldness: tl.tensor,
    VOCAB: tl.constexpr, CAPPED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Logits that the distribution is made of; -inf beyond the vocabulary."""
    logits = tl.load(row + index, mask=index < VOCAB, other=0.0).to(tl.float32) * logit_scale
    if CAPPED:
        logits = tanh(logits / softcap) * softcap
    return tl.where(index < VOCAB, logits * coldness, float("-inf"))


@triton.jit
def _base(peak: tl.tensor) -> tl.tensor:
    # What exponents are taken above: where all is -inf, powers of it must be 0 and not NaN.
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _reduce_chunks(
    logits: tl.tensor, peaks: tl.tensor, totals: tl.tensor, logit_scale: tl.tensor, softcap: tl.tensor,
    coldness: tl.tensor, row_stride: tl.tensor, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    item = tl.program_id(0)
    row = logits + (item // CHUNKS).to(tl.int64) * row_stride
    index = item % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    chunk = _load_chunk(row, index, logit_scale, softcap, coldness, VOCAB, CAPPED)
    peak = tl.max(chunk, 0)
    tl.store(peaks + item, peak)
    # A NaN, which the maximum passes over, stays in the sum.
    tl.store(totals + item, tl.sum(tl.exp(chunk - _base(peak)), 0))


@triton.jit
def _draw(
    logits: tl.tensor, keys: tl.tensor, positions: tl.tensor, peaks: tl.tensor, totals: tl.tensor, tokens: tl.tensor,
    logprobs: tl.tensor, logit_scale: tl.tensor, softcap: tl.tensor, coldness: tl.tensor, row_stride: tl.tensor,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, MOST: tl.constexpr,
    GREEDY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, MOST)
    peak_C = tl.load(peaks + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    total_C = tl.load(totals + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    peak = tl.max(peak_C, 0)
    mass_C = total_C.to(tl.float64) * tl.exp(peak_C - _base(peak)).to(tl.float64)
    mass = tl.sum(mass_C, 0)
    i = tl.arange(0, CHUNK)
    if GREEDY:
        chunk = tl.minimum(tl.min(tl.where(peak_C == peak, c, CHUNKS - 1), 0), CHUNKS - 1)
        logit = _load_chunk(logits + row * row_stride, chunk * CHUNK + i, logit_scale, softcap, coldness, VOCAB, CAPPED)
        place = tl.min(tl.where(logit == peak, i, CHUNK - 1), 0)
    else:
        target = compute_uniform(tl.load(keys + row), tl.load(positions + row)) * mass
        chunk = _find_place(tl.cumsum(mass_C, 0), mass_C, target, c, CHUNKS)
        logit = _load_chunk(logits + row * row_stride, chunk * CHUNK + i, logit_scale, softcap, coldness, VOCAB, CAPPED)
        power = tl.exp(logit - _base(peak)).to(tl.float64)
        before = tl.sum(tl.where(c < chunk, mass_C, 0.0), 0)
        place = _find_place(tl.cumsum(power, 0), power, target - before, i, CHUNK)
    token = tl.minimum(chunk * CHUNK + place, VOCAB - 1)
    chosen = tl.sum(tl.where(chunk * CHUNK + i == token, logit, 0.0), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - _base(peak) - tl.log(mass.to(tl.float32)))


@triton.jit
def _find_place(
    cumulative: tl.tensor, mass: tl.tensor, target: tl.tensor, index: tl.tensor, SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """First place whose cumulative sum is above the target, held to places that have a mass; any place where there is NaN."""
    below = tl.sum((cumulative <= target).to(tl.int32), 0)
    first = tl.min(tl.where(mass > 0.0, index, SIZE - 1), 0)
    last = tl.max(tl.where(mass > 0.0, index, 0), 0)
    return tl.minimum(tl.maximum(below, first), tl.maximum(last, first))
