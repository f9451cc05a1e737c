"""Packed attention on GPUs through torch's variable-length flash attention; the one place that knows its signature.

Dimensions: T packed tokens, S sequences, H query heads, N kv heads, K head size.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from hybridflow.models.attention import AttentionForm, Paged, SharedKeys, layer_index, to_device
from hybridflow.models.kv_cache import PagedKVCache

# torch 2.11 groups query heads by itself; later versions want to be told.
_TAKES_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
_MAX_HEAD_DIM = 256


def serves_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    """Whether the kernel serves this device, dtype and form of attention."""
    fits = head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0 and softcap is None
    return fits and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class VarlenPlan:
    """Packed rows through flash attention, with gradient; knows no softcap."""

    def __init__(self, cu_seqlens: Tensor, max_len: int, device: torch.device, keys: SharedKeys | None = None) -> None:
        self.cu_seqlens = cu_seqlens.to(device, torch.int32, non_blocking=True)
        self.max_len = max_len
        self.index_C = None if keys is None else keys.index_C.to(device, non_blocking=True)
        held = (cu_seqlens, max_len) if keys is None else (keys.cu_seqlens, keys.max_len)
        self.cu_keys, self.max_keys = held[0].to(device, torch.int32, non_blocking=True), held[1]

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]."""
        lengths = (self.cu_seqlens, self.cu_keys, self.max_len, self.max_keys)
        if self.index_C is not None:
            key_TNK, value_TNK = (rows.index_select(0, self.index_C) for rows in (key_TNK, value_TNK))
        return _attend(query_THK, key_TNK, value_TNK, lengths, form)


class VarlenPagedPlan:
    """New tokens of sequences that hold older ones: keys and values are written, then gathered from the cache. No gradient, no softcap.

    Dimensions: C tokens that the sequences hold in all.
    """

    def __init__(self, paged: Paged, device: torch.device) -> None:
        self.cache: PagedKVCache = paged.cache
        context, new = paged.context_lens.numpy().astype(np.int64), paged.new_lens()
        self.new_slots = to_device(paged.slots(*paged.new_positions()), device)
        rows_C = np.repeat(np.arange(context.size), context)
        within_C = np.arange(rows_C.size) - np.repeat(np.cumsum(context) - context, context)
        self.slots_C = to_device(paged.slots(rows_C, within_C), device)
        ends = [to_device(np.append(0, np.cumsum(lengths)).astype(np.int32), device) for lengths in (new, context)]
        self.lengths = (ends[0], ends[1], int(new.max()), int(context.max()))

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K] of the new tokens."""
        layer = layer_index(module)
        self.cache.write(layer, self.new_slots, key_TNK, value_TNK)
        held = [store[layer].index_select(0, self.slots_C) for store in (self.cache.keys, self.cache.values)]
        return _attend(query_THK, held[0], held[1], self.lengths, form)


def _attend(
    query_THK: Tensor, key_CNK: Tensor, value_CNK: Tensor, lengths: tuple[Tensor, Tensor, int, int], form: AttentionForm
) -> Tensor:
    """lengths: where each sequence's queries and keys begin, and the most of each; a sequence's last query sees its last key."""
    if form.softcap is not None:
        raise RuntimeError(f"the model has an attention softcap, {form.softcap}, which flash attention does not know")
    window = (-1, 0) if form.window is None or form.window >= lengths[3] else (form.window - 1, 0)
    grouped = query_THK.shape[1] != key_CNK.shape[1]
    flags: dict[str, Any] = {"enable_gqa": True} if grouped and _TAKES_GQA_FLAG else {}
    query, key, value = (part.contiguous() for part in (query_THK, key_CNK, value_CNK))
    ends_q, ends_k, max_q, max_k = lengths
    out = varlen_attn(query, key, value, ends_q, ends_k, max_q, max_k, scale=form.scale, window_size=window, **flags)
    assert isinstance(out, Tensor)
    return out
