"""LanguageModel: a Hugging Face causal language model, untouched, driven through our attention function and head.

Dimensions: T packed tokens, D model.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.models.attention import ATTENTION_NAME, AttentionPass, AttentionPlan, Packed, Paged
from hybridflow.models.attention_exact import ExactPlan
from hybridflow.models.attention_padded import PaddedPlan, PagedPlan
from hybridflow.models.attention_varlen import VarlenPlan, serves_varlen
from hybridflow.models.exact import ExactMath, check_exact, pad_rows
from hybridflow.models.head import Head
from hybridflow.models.kv_cache import PagedKVCache
from hybridflow.types import Numerics


class LanguageModel:
    """A Hugging Face causal language model whose module tree and parameters stay as they are.

    Made by `load_model` or `fresh_model`. The module is in eval mode: post-training runs without dropout.
    numerics: "exact" (CPU, float32) makes a row's numbers independent of all that is computed beside it.
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
    def head_weight(self) -> Tensor:
        """Weight of the language-model head, [V, D]; the embedding's own where the two are tied."""
        return self.module.get_output_embeddings().weight

    @property
    def head(self) -> Head:
        """What turns this model's hidden states into logits."""
        return Head(self.head_weight, softcap=self._head_softcap, exact=self.numerics == "exact")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.head_weight.dtype

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
        plan = self._plan(attention)
        if isinstance(attention, Packed):
            return self._forward(tokens_T, positions_T, plan)
        with torch.no_grad():
            return self._forward(tokens_T, positions_T, plan)

    def _forward(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        num_tokens = tokens_T.shape[0]
        tokens = tokens_T.to(self.device, torch.long, non_blocking=True)
        positions = positions_T.to(self.device, torch.long, non_blocking=True)
        exact = self.numerics == "exact"
        if exact:
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
        if attention_pass.calls != self.num_layers:
            raise RuntimeError(
                f"{attention_pass.calls} of {self.num_layers} layers attended through hybridflow's function (the config names "
                f"'{self.config._attn_implementation}', not '{ATTENTION_NAME}'): build every other model from a copy of the config"
            )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD[:num_tokens]

    def _plan(self, attention: Packed | Paged) -> AttentionPlan:
        if isinstance(attention, Paged):
            return self._plan_paged(attention)
        key = (self.numerics, str(self.device))
        if key not in attention.plans:
            attention.plans[key] = self._plan_packed(attention)
        return attention.plans[key]

    def _plan_packed(self, attention: Packed) -> AttentionPlan:
        if self.numerics == "exact":
            return ExactPlan.packed(attention.lengths)
        if self._attention_softcap is None and serves_varlen(self.device, self.dtype, self.head_dim):
            return VarlenPlan(attention.cu_seqlens, attention.max_len, self.device)
        return PaddedPlan(attention.lengths, self.device)

    def _plan_paged(self, attention: Paged) -> AttentionPlan:
        if self.numerics == "exact":
            return ExactPlan.paged(attention)
        fresh = None
        if attention.cu_query is not None and torch.equal(
            attention.context_lens.long(), attention.cu_query.diff().long()
        ):
            # No sequence holds anything older: its new tokens are whole packed rows.
            fresh = self._plan_packed(Packed(attention.cu_query, int(attention.context_lens.max())))
        return PagedPlan(attention, self.device, fresh)
