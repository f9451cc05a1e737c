"""What the rollout's kernels compute, written out in float64, and inputs for them; for tests on the CPU and on a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 32


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int, spread: float = 1.0) -> Tensor:
    """Normal numbers, the same on every device."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).to(device, dtype)


def build_cache(
    lengths: list[int],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    width: int | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(keys, values, tables, lengths): blocks in random order, and NaN in every slot that belongs to no row's last `window`."""
    counts = [-(-length // BLOCK) for length in lengths]
    order = (torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(7)) + 1).tolist()
    tables = torch.zeros(len(lengths), width or max(*counts, 1), dtype=torch.int32)
    keys = torch.full(((sum(counts) + 4) * BLOCK, num_kv_heads, head_dim), math.nan)
    values = keys.clone()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        slots = find_slots(tables[row], length)[max(0, length - (window or length)) :]
        keys[slots] = draw(len(slots), num_kv_heads, head_dim, dtype=torch.float32, device="cpu", seed=row)
        values[slots] = draw(len(slots), num_kv_heads, head_dim, dtype=torch.float32, device="cpu", seed=row + 1000)
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    return keys.to(device, dtype), values.to(device, dtype), tables.to(device), lengths_B


def find_slots(table: Tensor, length: int) -> Tensor:
    """Slots of a row's positions."""
    positions = torch.arange(length, device=table.device)
    return table[positions // BLOCK].long() * BLOCK + positions % BLOCK


def attend(query: Tensor, cache: tuple[Tensor, ...], scale: float, window: int | None, softcap: float | None) -> Tensor:
    """[B, H, K] float64: softmax attention of each row over its last `window` positions."""
    keys, values, tables, lengths = (x.cpu() for x in cache)
    out = torch.zeros(query.shape, dtype=torch.float64)
    groups = query.shape[1] // keys.shape[1]
    for row, length in enumerate(lengths.tolist()):
        slots = find_slots(tables[row], length)[max(0, length - (window or length)) :]
        for head in range(query.shape[1] if length else 0):
            k, v = (x[slots, head // groups].double() for x in (keys, values))
            scores = k @ query[row, head].cpu().double() * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[row, head] = torch.softmax(scores, 0) @ v
    return out


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Float64 norm over the last dimension, times weight and offset."""
    full = x.cpu().double()
    return full * torch.rsqrt((full * full).mean(-1, keepdim=True) + eps) * (offset + weight.cpu().double())


def rotate(x_THK: Tensor, cos_PK: Tensor, sin_PK: Tensor, positions_T: Tensor) -> Tensor:
    """Float64 rotation of halves."""
    x, cos, sin = (t.cpu().double() for t in (x_THK, cos_PK, sin_PK))
    low, high = x.chunk(2, -1)
    at = positions_T.cpu()
    return x * cos[at][:, None] + torch.cat([-high, low], -1) * sin[at][:, None]


def build_tables(num_positions: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """(cos, sin) [P, K] of the usual rotary embedding."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(num_positions).double()[:, None] * torch.cat([frequencies, frequencies])
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def gate(gate_up: Tensor, act: str) -> Tensor:
    """Float64 act(gate) * up."""
    x, up = gate_up.cpu().double().chunk(2, -1)
    if act == "silu":
        return x / (1 + torch.exp(-x)) * up
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) * up


def log_probabilities(raw: Tensor, logit_scale: float, softcap: float | None, temperature: float) -> Tensor:
    """Float64 log-probabilities of raw logits."""
    logits = raw.cpu().double() * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / temperature, -1)


def check_draws(tokens: Tensor, uniforms: Tensor, logp_BV: Tensor, slack: float) -> None:
    """Each token's share of the cumulative sum holds the uniform, but for `slack`."""
    cumulative = logp_BV.exp().cumsum(-1)
    upper = cumulative.gather(1, tokens.cpu()[:, None])[:, 0]
    share = logp_BV.exp().gather(1, tokens.cpu()[:, None])[:, 0]
    assert (share > 0).all()
    assert (uniforms.cpu() <= upper + slack).all() and (uniforms.cpu() >= upper - share - slack).all()
