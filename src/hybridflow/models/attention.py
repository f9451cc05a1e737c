"""The one attention function: packed sequences and our paged cache, reached through Transformers' attention interface.

A forward pass names its rows by a `Packed` or a `Paged`; the model turns that into a plan (index tensors, made once for all layers) and
every layer's call lands in `attend_rows`.
Dimensions: T packed tokens, S sequences, B sequences with a cache, H query heads, N kv heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hybridflow.models.kv_cache import PagedKVCache

ATTENTION_NAME = "hybridflow"


@dataclass(frozen=True)
class AttentionForm:
    """What a layer asks of its attention beside causality.

    scale:   factor on query-key products.
    window:  a token sees itself and the window - 1 tokens before it; None sees all.
    softcap: scores become `softcap * tanh(score / softcap)`; None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionPlan(Protocol):
    """Attention over a fixed set of rows; made once a forward pass, used by every layer."""

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K] of one layer's new tokens; `module` is the layer's attention, for plans that must know which."""
        ...


@dataclass(frozen=True, eq=False)
class SharedKeys:
    """What each sequence attends to where some begin with the tokens of another: `SharedKeys(index_C, tensor([0, 5, 14]), max_len=9)`.

    Dimensions: C keys of all sequences together.
    index_C:    [C] int64 on the CPU, for each key of a sequence the token that it is of; a sequence's own tokens are its last ones.
    cu_seqlens: [S+1] int32 on the CPU, starts at 0, ends at C.
    max_len:    keys of the sequence that has the most.
    """

    index_C: Tensor
    cu_seqlens: Tensor
    max_len: int

    @property
    def lengths(self) -> np.ndarray:
        """Keys of each sequence, [S] int64."""
        return np.diff(self.cu_seqlens.numpy().astype(np.int64))


@dataclass
class Packed:
    """Sequences, one after another, each attending to itself alone: `Packed(tensor([0, 5, 9], dtype=int32), max_len=5)`.

    cu_seqlens: [S+1] int32, starts at 0, ends at T. On the CPU preferably, also for a model on a GPU (no host sync then).
    max_len:    length of the longest sequence.
    keys:       None where sequences are whole; else what they attend to beside their own tokens, too.
    wrap:       what the training engine puts around the plan (sequence parallel); None leaves it.
    Use one object for several forward passes over the same rows: it keeps its index plan.
    """

    cu_seqlens: Tensor
    max_len: int
    keys: SharedKeys | None = None
    wrap: Callable[[AttentionPlan], AttentionPlan] | None = field(default=None, repr=False, compare=False)
    plans: dict[tuple[str, str], AttentionPlan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, [S] int64."""
        return np.diff(self.cu_seqlens.cpu().numpy().astype(np.int64))


@dataclass
class Paged:
    """New tokens of B sequences, packed, written to the cache, each attending to all that its sequence holds up to itself.

    cache:        storage; written by the forward pass.
    block_tables: [B, max_blocks] int32 on the CPU; entry i is the block of positions 32 i to 32 i + 31; those past the context are ignored.
    context_lens: [B] int32 or int64 on the CPU; tokens each sequence holds AFTER this pass, the new ones included.
    cu_query:     [B+1] int32 on the CPU; None for decode, one new token a sequence.
    The new tokens of sequence b are its last ones: positions context_lens[b] - new[b] to context_lens[b] - 1, with new[b] >= 1.
    No gradient flows through a paged pass.
    """

    cache: PagedKVCache
    block_tables: Tensor
    context_lens: Tensor
    cu_query: Tensor | None = None

    def new_lens(self) -> np.ndarray:
        """New tokens of each sequence, [B] int64."""
        if self.cu_query is None:
            return np.ones(self.context_lens.shape[0], dtype=np.int64)
        return np.diff(self.cu_query.numpy().astype(np.int64))

    def take(self, rows: np.ndarray) -> Paged:
        """Some of the sequences, [n] int64, with all their new tokens, packed anew."""
        ends = np.append(0, np.cumsum(self.new_lens()[rows])).astype(np.int32)
        at = torch.from_numpy(rows)
        return Paged(self.cache, self.block_tables[at], self.context_lens[at], torch.from_numpy(ends))

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Cache slots of the given positions of the given sequences (arrays that broadcast), int64."""
        size = self.cache.block_size
        return self.block_tables.numpy()[rows, positions // size].astype(np.int64) * size + positions % size

    def new_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """For each new token its sequence and its position there, each [T] int64."""
        new = self.new_lens()
        rows = np.repeat(np.arange(new.size), new)
        within = np.arange(rows.size) - np.repeat(np.cumsum(new) - new, new)
        first = self.context_lens.numpy().astype(np.int64) - new
        return rows, first[rows] + within


@dataclass(frozen=True)
class SplitPlan:
    """Sequences of one pass that attend by two plans. No gradient.

    parts: of each plan the tokens that it serves, int64 on the device, together each of the T once; and the plan.
    """

    parts: tuple[tuple[Tensor, AttentionPlan], ...]

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K]."""
        out_THK = torch.empty_like(query_THK)
        for index, plan in self.parts:
            query, key, value = (rows.index_select(0, index) for rows in (query_THK, key_TNK, value_TNK))
            out_THK.index_copy_(0, index, plan.attend(module, query, key, value, form))
        return out_THK


@dataclass
class AttentionPass:
    """One forward pass through the attention function: its plan, how often a layer has called, and whether no more may.

    closed: exact mode closes a pass after its forward: layers computed again in backward would run without its arithmetic.
    """

    plan: AttentionPlan
    calls: int = 0
    closed: bool = False


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_pass: AttentionPass | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls in every layer, registered as `hybridflow`.

    query: [1, H, T, K]; key, value: [1, N, T, K]; returns ([1, T, H, K], None). `attention_pass` comes from `LanguageModel.hidden_states`.
    """
    if attention_pass is None:
        raise RuntimeError(
            "this model attends only through LanguageModel.hidden_states; to run the module itself, load it with Transformers"
        )
    if attention_mask is not None:
        raise RuntimeError("an attention mask was passed, but cu_seqlens alone says who sees whom: leave the mask out")
    if dropout:
        raise RuntimeError(f"attention dropout is {dropout}, but post-training has none: set attention_dropout to 0")
    if attention_pass.closed:
        raise RuntimeError("numerics 'exact' cannot compute layers again in backward: turn gradient checkpointing off")
    if not torch.compiler.is_compiling():  # a number that a compiled layer reads is compiled in
        attention_pass.calls += 1
    rows = [x.transpose(1, 2).squeeze(0) for x in (query, key, value)]
    form = AttentionForm(scaling, sliding_window, softcap)
    out_THK = attention_pass.plan.attend(module, rows[0], rows[1], rows[2], form)
    return out_THK.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, attend_rows)


def layer_index(module: nn.Module) -> int:
    """Which layer's attention this is."""
    return int(module.layer_idx)  # type: ignore[arg-type]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An index array as a tensor on the device."""
    return torch.from_numpy(array).to(device, non_blocking=True)
