"""LanguageModel: a Hugging Face causal language model, untouched, driven through our attention function and head.

Dimensions: T packed tokens, D model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.models.attention import (
    ATTENTION_NAME,
    AttentionPass,
    AttentionPlan,
    Packed,
    Paged,
    SplitPlan,
    to_device,
)
from hybridflow.models.attention_exact import ExactPlan
from hybridflow.models.attention_exact_gpu import ExactKernelPlan
from hybridflow.models.attention_fused import KERNELS, FusedPlan, KernelName, choose_fused
from hybridflow.models.attention_padded import PaddedPlan, PagedPlan, SharedPlan
from hybridflow.models.attention_varlen import VarlenPagedPlan, VarlenPlan, serves_varlen
from hybridflow.models.exact import ExactMath, check_exact, pad_rows, uses_kernels
from hybridflow.models.head import Head, VocabularyShard
from hybridflow.models.kv_cache import PagedKVCache
from hybridflow.types import Numerics

T = TypeVar("T")


class LanguageModel:
    """A Hugging Face causal language model whose module tree and parameters stay as they are.

    Made by `load_model` or `fresh_model`. The module is in eval mode: post-training runs without dropout.
    numerics: "exact" makes a row's numbers independent of all that is computed beside it; see `check_exact` for where it holds.

    device, dtype: where passes are computed and in which numbers, those of the weights when the model was built; weights that are later
                   kept in shards may have others.
    packed_kernel: which library's kernel computes attention over packed rows on a GPU, the fastest there is; None is torch's own.
    layers_compiled: whether the layers run compiled now; who compiles them sees to it that each is called.
    runner:        what `run` goes through; whoever shards the weights puts in what gathers them.
    vocabulary:    which rows of the head are here; set where the model is split for tensor parallel, else None.
    """

    def __init__(self, module: PreTrainedModel, numerics: Numerics = "fast") -> None:
        self.module = module
        self.config: PretrainedConfig = module.config
        settings = self.config.to_dict()
        self.num_layers: int = self.config.num_hidden_layers
        self.num_heads: int = self.config.num_attention_heads
        self.num_kv_heads: int = self.config.num_key_value_heads
        self.head_dim: int = settings.get("head_dim") or self.config.hidden_size // self.num_heads
        self.vocab_size: int = self.config.vocab_size
        self._attention_softcap: float | None = settings.get("attn_logit_softcapping")
        self._head_softcap: float | None = settings.get("final_logit_softcapping")
        self.device: torch.device = self.head_weight.device
        self.dtype: torch.dtype = self.head_weight.dtype
        self.packed_kernel: KernelName | None = choose_fused(self.device, self.dtype, self.head_dim)
        self.layers_compiled = False
        self.runner: Callable[[Callable[[], Any]], Any] | None = None
        self.vocabulary: VocabularyShard | None = None
        self._numerics: Numerics = "fast"
        self.numerics = numerics

    @property
    def numerics(self) -> Numerics:
        """How numbers are computed, "fast" or "exact"."""
        return self._numerics

    @numerics.setter
    def numerics(self, numerics: Numerics) -> None:
        if numerics == "exact":
            check_exact(self.module)
        self._numerics = numerics

    @property
    def packed_attention(self) -> Literal["exact", "padded", "torch"] | KernelName:
        """What computes attention over packed rows: a fused kernel by name, torch's own for them, or rows padded to blocks."""
        if self.numerics == "exact":
            return "exact"
        if not serves_varlen(self.device, self.dtype, self.head_dim, self._attention_softcap):
            return "padded"
        return self.packed_kernel or "torch"

    @property
    def shares_keys(self) -> bool:
        """Whether rows that share what they begin with go through what computes attention of others; else through torch's own."""
        return all(kernel.takes_keys for name, kernel in KERNELS.items() if name == self.packed_attention)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the language-model head, [V, D]; the embedding's own where the two are tied."""
        return self.module.get_output_embeddings().weight

    @property
    def head(self) -> Head:
        """What turns this model's hidden states into logits; where the vocabulary is split, with the rows that are here."""
        weight = self.head_weight if self.vocabulary is None else self.vocabulary.local(self.head_weight)
        exact = self.numerics == "exact"
        return Head(weight, softcap=self._head_softcap, exact=exact, vocabulary=self.vocabulary)

    def run(self, forward: Callable[[], T]) -> T:
        """What `forward` returns: a pass from tokens to the head, with all its weights there while it runs.

        It returns a tensor, or a tuple of them; backward through these finds the weights again.
        """
        if self.runner is None:
            return forward()
        result: T = self.runner(forward)
        return result

    def new_cache(self, num_blocks: int) -> PagedKVCache:
        """An empty cache that fits this model, in its dtype and on its device."""
        return PagedKVCache(
            self.num_layers, num_blocks, self.num_kv_heads, self.head_dim, dtype=self.dtype, device=self.device
        )

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, attention: Packed | Paged) -> Tensor:
        """Hidden states after the final norm, [T, D], of packed tokens.

        tokens_T, positions_T: [T] int, moved to the model's device; a position is counted within its own row, from 0.
        Raises RuntimeError if the module did not attend through our function once a layer.
        """
        plan = self.plan_attention(attention)
        if isinstance(attention, Packed):
            return self.planned_states(tokens_T, positions_T, plan)
        with torch.no_grad():
            return self.planned_states(tokens_T, positions_T, plan)

    def planned_states(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """As `hidden_states`, under a plan that is there already."""
        num_tokens = tokens_T.shape[0]
        tokens = tokens_T.to(self.device, torch.long, non_blocking=True)
        positions = positions_T.to(self.device, torch.long, non_blocking=True)
        exact = self.numerics == "exact"
        if exact and not uses_kernels(self.device):
            tokens, positions = pad_rows(tokens), pad_rows(positions)
        attention_pass = AttentionPass(plan)
        with ExactMath() if exact else contextlib.nullcontext():
            output = self.module.base_model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                attention_pass=attention_pass,
            )
        attention_pass.closed = exact
        if attention_pass.calls != self.num_layers and not self.layers_compiled:
            raise RuntimeError(
                f"{attention_pass.calls} of {self.num_layers} layers attended through hybridflow's function (the config names "
                f"'{self.config._attn_implementation}', not '{ATTENTION_NAME}'): build every other model from a copy of the config"
            )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD[:num_tokens]

    def plan_attention(self, attention: Packed | Paged) -> AttentionPlan:
        """How every layer of a pass attends; of a `Packed` made once."""
        if isinstance(attention, Paged):
            return self._plan_paged(attention)
        key = (self.packed_attention, str(self.device))
        if key not in attention.plans:
            plan = self._plan_packed(attention)
            attention.plans[key] = plan if attention.wrap is None else attention.wrap(plan)
        return attention.plans[key]

    def _plan_packed(self, attention: Packed) -> AttentionPlan:
        rows = (attention.cu_seqlens, attention.max_len, self.device, attention.keys)
        match self.packed_attention:
            case "exact" if attention.keys is None:
                if uses_kernels(self.device):
                    return ExactKernelPlan.packed(attention.lengths, self.device)
                return ExactPlan.packed(attention.lengths)
            case "exact":
                raise ValueError(
                    "numerics 'exact' computes each row by itself, and these rows share what they begin with"
                )
            case "padded":
                lengths, keys = attention.lengths, attention.keys
                return PaddedPlan(lengths, self.device) if keys is None else SharedPlan(lengths, keys, self.device)
            case "torch":
                return VarlenPlan(*rows)
            case kernel if attention.keys is not None and not KERNELS[kernel].takes_keys:
                return VarlenPlan(*rows)
            case kernel:
                return FusedPlan(kernel, *rows)

    def _plan_paged(self, attention: Paged) -> AttentionPlan:
        if self.numerics == "exact":
            if uses_kernels(self.device):
                return ExactKernelPlan.paged(attention, self.device)
            return ExactPlan.paged(attention)
        fresh, is_new = None, attention.context_lens.numpy() == attention.new_lens()
        if attention.cu_query is not None and is_new.all():
            # No sequence holds anything older: its new tokens are whole packed rows.
            fresh = self._plan_packed(Packed(attention.cu_query, int(attention.context_lens.max())))
        elif attention.cu_query is not None and is_new.any():
            return self._plan_split(attention, is_new)
        elif serves_varlen(self.device, self.dtype, self.head_dim, self._attention_softcap):
            return VarlenPagedPlan(attention, self.device)
        return PagedPlan(attention, self.device, fresh)

    def _plan_split(self, attention: Paged, is_new: np.ndarray) -> SplitPlan:
        """Sequences that hold nothing older by themselves, since only the others' keys and values have to be gathered."""
        owners_T, _ = attention.new_positions()
        return SplitPlan(
            tuple(
                (
                    to_device(np.flatnonzero(chosen[owners_T]), self.device),
                    self._plan_paged(attention.take(np.flatnonzero(chosen))),
                )
                for chosen in (is_new, ~is_new)
            )
        )
