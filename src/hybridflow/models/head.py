"""The language-model head: log-probability and entropy from hidden states, chunk by chunk, with its own backward.

The logits of a whole sequence never exist. The shift by one (hidden state t-1 predicts token t) lives here too.
Dimensions: T packed tokens, M targets, C targets of a chunk, D model, V vocabulary, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.models.exact import matmul_rows

# Logits of a chunk, in float32: 64 MiB on the CPU; 512 MiB on a GPU, where each chunk also passes over the whole weight gradient.
_CHUNK_LOGITS = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
_MIN_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: `softcap * tanh(logit_scale * (hidden @ weight.T) / softcap)`.

    weight:      [V, D], the module's own parameter (shared with the embedding where tied).
    softcap:     None for families without one.
    logit_scale: factor on the raw logits, 1.0 for families without one.
    exact:       a row's result is bit-equal whatever rows are beside it (CPU, float32).
    """

    weight: Tensor
    softcap: float | None = None
    logit_scale: float = 1.0
    exact: bool = False


def predicted_positions(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For packed rows: which hidden state predicts which token, `(hidden_index, token_index)`, each int64 [T - rows with a token].

    Token t > 0 of a row is predicted by the hidden state at t - 1 of that row; the first token of a row by none.
    """
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    is_first = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool, device=cu_seqlens.device)
    is_first[starts[starts < ends]] = True
    token_index = torch.nonzero(~is_first).squeeze(1)
    return token_index - 1, token_index


def compute_logits(hidden_TD: Tensor, head: Head, temperature: float = 1.0) -> Tensor:
    """Logits divided by the temperature, [T, V] float32 (float64 for a float64 head). For sampling, where T is small.

    Without gradient. Greedy decoding takes the arg max at temperature 1; a temperature of 0 is an error.
    """
    _check_temperature(temperature)
    with torch.no_grad():
        return _scale_logits(_product(hidden_TD, head.weight.t(), head), head, temperature)


def compute_log_softmax(logits_TV: Tensor) -> Tensor:
    """Log-probabilities over the vocabulary, [T, V].

    The one function of rollout and trainer, so that both agree bit for bit; each row is reduced by itself.
    """
    return torch.log_softmax(logits_TV, dim=-1)


def compute_logprobs(
    hidden_TD: Tensor,
    targets_M: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under the head, and the entropy of the distribution if asked for.

    hidden_TD:    [M, D] hidden states, already shifted (row i predicts targets_M[i]); with `rows` [T, D].
    targets_M:    [M] int64.
    chunk_tokens: targets whose logits exist at once; None takes 64 MiB of logits, on a GPU 512 MiB.
    rows:         [M] int64, no index twice: hidden state rows[i] predicts target i. Cheaper than `hidden_TD[rows]`, whose backward is a
                  slow scatter on the CPU.
    returns:      (logprobs [M] float32, entropy [M] float32 or None), in nats, at the given temperature; float64 for a float64 head.

    Gradient reaches hidden_TD and head.weight; the weight's is summed in float32 and returned in its dtype. Logits are computed again in
    backward, chunk by chunk.
    """
    _check_temperature(temperature)
    if chunk_tokens is None:
        fitting = _CHUNK_LOGITS[head.weight.device.type] // head.weight.shape[0]
        chunk_tokens = max(_MIN_CHUNK_TOKENS, fitting // _MIN_CHUNK_TOKENS * _MIN_CHUNK_TOKENS)
    settings = _Settings(head, temperature, chunk_tokens, with_entropy)
    logprobs, entropy = _HeadFunction.apply(hidden_TD, head.weight, targets_M, rows, settings)
    return logprobs, entropy if with_entropy else None


def _check_temperature(temperature: float) -> None:
    if not temperature > 0.0:
        raise ValueError(
            f"temperature is {temperature}, but logits are divided by it: give a number above 0 (greedy: 1)"
        )


@dataclass(frozen=True)
class _Settings:
    head: Head
    temperature: float
    chunk_tokens: int
    with_entropy: bool

    def iter_chunks(self, count: int) -> Iterator[slice]:
        """Slices of the targets, in order."""
        for start in range(0, count, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, count))


def _product(rows_TD: Tensor, matrix: Tensor, head: Head) -> Tensor:
    return matmul_rows(rows_TD, matrix) if head.exact else rows_TD @ matrix


def _scale_logits(raw_TV: Tensor, head: Head, temperature: float) -> Tensor:
    # Families cap in the weight's dtype; float32 here is the same function with less rounding.
    logits = raw_TV.to(torch.promote_types(raw_TV.dtype, torch.float32))
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits if temperature == 1.0 else logits / temperature


def _scale_gradient(grad_TV: Tensor, logits_TV: Tensor, head: Head, temperature: float) -> Tensor:
    """Gradient at the raw product from the gradient at the scaled logits; `grad_TV` is overwritten."""
    if temperature != 1.0:
        grad_TV.div_(temperature)
    if head.softcap is not None:
        capped = logits_TV * (temperature / head.softcap)
        grad_TV.mul_(1.0 - capped * capped)
    return grad_TV if head.logit_scale == 1.0 else grad_TV.mul_(head.logit_scale)


def _chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, settings: _Settings) -> Tensor:
    return _scale_logits(_product(hidden_CD, weight_VD.t(), settings.head), settings.head, settings.temperature)


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_M: Tensor, rows: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        logprobs = torch.empty(targets_M.shape, dtype=dtype, device=hidden_TD.device)
        entropy = torch.empty_like(logprobs) if settings.with_entropy else logprobs.new_empty(0)
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            hidden_CD = hidden_TD[chunk] if rows is None else hidden_TD.index_select(0, rows[chunk])
            logits_CV = _chunk_logits(hidden_CD, weight_VD, settings)
            logp_CV = compute_log_softmax(logits_CV)
            logprobs[chunk] = logp_CV.gather(1, targets_M[chunk, None]).squeeze(1)
            if settings.with_entropy:
                entropy[chunk] = _entropy(logp_CV, torch.exp(logp_CV))
        ctx.save_for_backward(hidden_TD, weight_VD, targets_M, rows)
        ctx.settings = settings
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, targets_M, rows = ctx.saved_tensors
        settings: _Settings = ctx.settings
        grad_logprob, grad_entropy = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_TD) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=grad_logprob.dtype) if needs_weight else None
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            hidden_CD = hidden_TD[chunk] if rows is None else hidden_TD.index_select(0, rows[chunk])
            entropy_part = grad_entropy[chunk, None] if settings.with_entropy else None
            grad_CV = _logits_gradient(
                hidden_CD, weight_VD, targets_M[chunk, None], grad_logprob[chunk, None], entropy_part, settings
            ).to(weight_VD.dtype)
            if grad_hidden is not None:
                grad_CD = _product(grad_CV, weight_VD, settings.head)
                if rows is None:
                    grad_hidden[chunk] = grad_CD
                else:
                    grad_hidden.index_copy_(0, rows[chunk], grad_CD)
            if grad_weight is not None:
                _add_product(grad_weight, grad_CV.t(), hidden_CD)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VD.dtype)
        return grad_hidden, grad_weight, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.add_(left @ right)


def _entropy(logp_CV: Tensor, p_CV: Tensor) -> Tensor:
    # A token of probability 0 has log-probability -inf at worst; its part is 0.
    return -(p_CV * logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min)).sum(-1)


def _logits_gradient(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C1: Tensor,
    grad_logprob_C1: Tensor,
    grad_entropy_C1: Tensor | None,
    settings: _Settings,
) -> Tensor:
    """Gradient at the raw logits of a chunk: g (onehot - p) for the log-probability, -g p (log p + H) for the entropy."""
    head, temperature = settings.head, settings.temperature
    logits_CV = _chunk_logits(hidden_CD, weight_VD, settings)
    logp_CV = compute_log_softmax(logits_CV)
    p_CV = torch.exp(logp_CV)
    grad_CV = p_CV * -grad_logprob_C1
    if grad_entropy_C1 is not None:
        entropy_C1 = _entropy(logp_CV, p_CV).unsqueeze(1)
        surprise_CV = logp_CV.clamp_(min=torch.finfo(logp_CV.dtype).min).add_(entropy_C1)
        grad_CV.sub_(surprise_CV.mul_(p_CV).mul_(grad_entropy_C1))
    grad_CV.scatter_add_(1, targets_C1, grad_logprob_C1.to(grad_CV.dtype))
    return _scale_gradient(grad_CV, logits_CV, head, temperature)
