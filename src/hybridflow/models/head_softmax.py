"""The head through `compute_log_softmax`, bit-equal to what a rollout samples from: with gradient, chunk by chunk.

Products are of a chunk's targets, passes over logits of a block's, few enough for a CPU's cache and for memory that its allocator keeps.
Dimensions: T packed tokens, M targets, C targets of a chunk, B targets of a block, D model, V vocabulary.
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
            raw_CV = compute_product(take_rows(hidden_TD, rows, chunk), weight_VD.t(), settings.head)
            for block, here in settings.iter_blocks(chunk, weight_VD):
                logits_BV = scale_logits(raw_CV[here], *settings.scale)
                logp_BV = compute_log_softmax(_shape(logits_BV, targets_M, block, settings), exact=settings.head.exact)
                logprobs[block] = logp_BV.gather(1, targets_M[block, None]).squeeze(1)
                if settings.with_entropy:
                    entropy[block] = _entropy(logp_BV, torch.exp(logp_BV), settings.head)
                # Not beside the next block's, or chunk's: scaled logits may be a view of the raw ones.
                del logits_BV, logp_BV
            del raw_CV
        ctx.save_for_backward(hidden_TD, weight_VD, targets_M, rows)
        ctx.settings = settings
        # An entropy that is only reported has no gradient, and costs no passes.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, targets_M, rows = ctx.saved_tensors
        settings: ChunkSettings = ctx.settings
        gradients = HeadGradients(hidden_TD, weight_VD, rows, ctx.needs_input_grad, settings.head)
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            hidden_CD = take_rows(hidden_TD, rows, chunk)
            raw_CV = compute_product(hidden_CD, weight_VD.t(), settings.head)
            # Over the logits, where their numbers are those of the weight.
            grad_CV = raw_CV if raw_CV.dtype == weight_VD.dtype else torch.empty_like(raw_CV, dtype=weight_VD.dtype)
            for block, here in settings.iter_blocks(chunk, weight_VD):
                grad_CV[here] = _logits_gradient(raw_CV[here], targets_M, block, grads, settings)
            gradients.add(chunk, hidden_CD, grad_CV)
            del raw_CV, grad_CV
        return gradients.hidden_TD, gradients.weight_VD, None, None, None


def _entropy(logp_BV: Tensor, p_BV: Tensor, head: Head) -> Tensor:
    # A token of probability 0 has log-probability -inf at worst; its part is 0.
    parts_BV = p_BV * logp_BV.clamp(min=torch.finfo(logp_BV.dtype).min)
    return -(sum_rows(parts_BV).squeeze(-1) if head.exact else parts_BV.sum(-1))


def _logits_gradient(
    raw_BV: Tensor,
    targets_M: Tensor,
    block: slice,
    grads: tuple[Tensor | None, ...],
    settings: ChunkSettings,
) -> Tensor:
    """Gradient at the raw logits of a block: g (onehot - p) for the log-probability, -g p (log p + H) for the entropy."""
    head, temperature = settings.head, settings.temperature
    grad_logprob_B1, grad_entropy_B1 = (None if part_M is None else part_M[block, None] for part_M in grads)
    logits_BV = scale_logits(raw_BV, *settings.scale)
    logp_BV = compute_log_softmax(_shape(logits_BV, targets_M, block, settings), exact=head.exact)
    p_BV = torch.exp(logp_BV)
    grad_BV = torch.zeros_like(p_BV) if grad_logprob_B1 is None else p_BV * -grad_logprob_B1
    if grad_entropy_B1 is not None:
        entropy_B1 = _entropy(logp_BV, p_BV, head).unsqueeze(1)
        surprise_BV = logp_BV.clamp_(min=torch.finfo(logp_BV.dtype).min).add_(entropy_B1)
        grad_BV.sub_(surprise_BV.mul_(p_BV).mul_(grad_entropy_B1))
    if grad_logprob_B1 is not None:
        grad_BV.scatter_add_(1, targets_M[block, None], grad_logprob_B1.to(grad_BV.dtype))
    del logp_BV, p_BV
    if settings.shaped is not None:
        grad_BV = settings.shaped.find_gradient(grad_BV, logits_BV, block)
    return _scale_gradient(grad_BV, logits_BV, head, temperature)


def _shape(logits_BV: Tensor, targets_M: Tensor, block: slice, settings: ChunkSettings) -> Tensor:
    if settings.shaped is None:
        return logits_BV
    return settings.shaped.shape(logits_BV, targets_M, block)


def _scale_gradient(grad_BV: Tensor, logits_BV: Tensor, head: Head, temperature: float) -> Tensor:
    """Gradient at the raw product from the gradient at the scaled logits; `grad_BV` is overwritten."""
    if temperature != 1.0:
        grad_BV.div_(temperature)
    if head.softcap is not None:
        capped_BV = logits_BV * (temperature / head.softcap)
        grad_BV.mul_(1.0 - capped_BV * capped_BV)
    return grad_BV if head.logit_scale == 1.0 else grad_BV.mul_(head.logit_scale)
