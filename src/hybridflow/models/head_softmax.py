"""The head through `compute_log_softmax`, bit-equal to what a rollout samples from: with gradient, chunk by chunk.

Dimensions: T packed tokens, M targets, C targets of a chunk, D model, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.models.exact import sum_rows
from hybridflow.models.head import Head, compute_log_softmax, compute_product
from hybridflow.models.head_chunks import ChunkSettings, HeadGradients, take_rows
from hybridflow.models.head_passes import scale_logits


class SoftmaxFunction(torch.autograd.Function):
    """(hidden_TD, weight_VD, targets_M, rows, settings) -> (logprobs [M], entropy [M] or empty)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_M: Tensor, rows: Tensor | None, settings: ChunkSettings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        logprobs = torch.empty(targets_M.shape, dtype=dtype, device=hidden_TD.device)
        entropy = torch.empty_like(logprobs) if settings.with_entropy else logprobs.new_empty(0)
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            logits_CV = _chunk_logits(take_rows(hidden_TD, rows, chunk), weight_VD, settings)
            logp_CV = compute_log_softmax(_shape(logits_CV, targets_M, chunk, settings), exact=settings.head.exact)
            logprobs[chunk] = logp_CV.gather(1, targets_M[chunk, None]).squeeze(1)
            if settings.with_entropy:
                entropy[chunk] = _entropy(logp_CV, torch.exp(logp_CV), settings.head)
        ctx.save_for_backward(hidden_TD, weight_VD, targets_M, rows)
        ctx.settings = settings
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, targets_M, rows = ctx.saved_tensors
        settings: ChunkSettings = ctx.settings
        grad_logprob, grad_entropy = grads
        gradients = HeadGradients(hidden_TD, weight_VD, rows, ctx.needs_input_grad, settings.head)
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            hidden_CD = take_rows(hidden_TD, rows, chunk)
            entropy_part = grad_entropy[chunk, None] if settings.with_entropy else None
            grad_CV = _logits_gradient(
                hidden_CD, weight_VD, targets_M, chunk, grad_logprob[chunk, None], entropy_part, settings
            )
            gradients.add(chunk, hidden_CD, grad_CV)
        return gradients.hidden_TD, gradients.weight_VD, None, None, None


def _entropy(logp_CV: Tensor, p_CV: Tensor, head: Head) -> Tensor:
    # A token of probability 0 has log-probability -inf at worst; its part is 0.
    parts_CV = p_CV * logp_CV.clamp(min=torch.finfo(logp_CV.dtype).min)
    return -(sum_rows(parts_CV).squeeze(-1) if head.exact else parts_CV.sum(-1))


def _logits_gradient(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    chunk: slice,
    grad_logprob_C1: Tensor,
    grad_entropy_C1: Tensor | None,
    settings: ChunkSettings,
) -> Tensor:
    """Gradient at the raw logits of a chunk: g (onehot - p) for the log-probability, -g p (log p + H) for the entropy."""
    head, temperature = settings.head, settings.temperature
    logits_CV = _chunk_logits(hidden_CD, weight_VD, settings)
    logp_CV = compute_log_softmax(_shape(logits_CV, targets_M, chunk, settings), exact=head.exact)
    p_CV = torch.exp(logp_CV)
    grad_CV = p_CV * -grad_logprob_C1
    if grad_entropy_C1 is not None:
        entropy_C1 = _entropy(logp_CV, p_CV, head).unsqueeze(1)
        surprise_CV = logp_CV.clamp_(min=torch.finfo(logp_CV.dtype).min).add_(entropy_C1)
        grad_CV.sub_(surprise_CV.mul_(p_CV).mul_(grad_entropy_C1))
    grad_CV.scatter_add_(1, targets_M[chunk, None], grad_logprob_C1.to(grad_CV.dtype))
    if settings.shaped is not None:
        grad_CV = settings.shaped.find_gradient(grad_CV, logits_CV, targets_M, chunk, exact=head.exact)
    return _scale_gradient(grad_CV, logits_CV, head, temperature)


def _chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, settings: ChunkSettings) -> Tensor:
    return scale_logits(compute_product(hidden_CD, weight_VD.t(), settings.head), *settings.scale)


def _shape(logits_CV: Tensor, targets_M: Tensor, chunk: slice, settings: ChunkSettings) -> Tensor:
    if settings.shaped is None:
        return logits_CV
    return settings.shaped.shape(logits_CV, targets_M, chunk, exact=settings.head.exact)


def _scale_gradient(grad_TV: Tensor, logits_TV: Tensor, head: Head, temperature: float) -> Tensor:
    """Gradient at the raw product from the gradient at the scaled logits; `grad_TV` is overwritten."""
    if temperature != 1.0:
        grad_TV.div_(temperature)
    if head.softcap is not None:
        capped = logits_TV * (temperature / head.softcap)
        grad_TV.mul_(1.0 - capped * capped)
    return grad_TV if head.logit_scale == 1.0 else grad_TV.mul_(head.logit_scale)
