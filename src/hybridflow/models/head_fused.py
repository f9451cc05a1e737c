"""The head from sums that shards of the vocabulary can add up, in passes that can be compiled: with gradient, chunk by chunk.

Dimensions: T packed tokens, M targets, C targets of a chunk, D model, V vocabulary (rows of the head that are here).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.models.head import VocabularyAxis, compute_product
from hybridflow.models.head_chunks import ChunkSettings, HeadGradients, take_rows
from hybridflow.models.head_passes import read_statistics, run_pass, write_gradient_


class FusedFunction(torch.autograd.Function):
    """(hidden_TD, weight_VD, targets_M, rows, settings) -> (logprobs [M], entropy [M] or empty)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_M: Tensor, rows: Tensor | None, settings: ChunkSettings
    ) -> tuple[Tensor, Tensor]:
        vocabulary = settings.head.vocabulary
        local_M = targets_M if vocabulary is None else targets_M - vocabulary.offset
        dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        statistics_4M = torch.empty((4, *targets_M.shape), dtype=dtype, device=hidden_TD.device)
        kept: dict[int, Tensor] = {}
        room = settings.keep_logits_bytes
        for chunk in settings.iter_chunks(targets_M.shape[0]):
            raw_CV = compute_product(take_rows(hidden_TD, rows, chunk), weight_VD.t(), settings.head)
            statistics_4M[:, chunk] = run_pass(
                read_statistics, settings.compiled, raw_CV, local_M[chunk], *settings.scale, settings.with_entropy
            )
            if raw_CV.nbytes <= room:
                kept[chunk.start] = raw_CV
                room -= raw_CV.nbytes
        if vocabulary is not None and targets_M.shape[0]:
            statistics_4M = _combine(statistics_4M, vocabulary.axis)
        peak_M, total_M, target_M, weighted_M = statistics_4M
        log_total_M = torch.log(total_M)
        entropy = log_total_M - weighted_M / total_M if settings.with_entropy else total_M.new_empty(0)
        ctx.save_for_backward(hidden_TD, weight_VD, local_M, rows, peak_M, log_total_M, entropy)
        ctx.settings = settings
        ctx.kept = kept
        # An entropy that is only reported has no gradient.
        ctx.set_materialize_grads(False)
        return (target_M - peak_M) - log_total_M, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_TD, weight_VD, local_M, rows, peak_M, log_total_M, entropy = ctx.saved_tensors
        settings: ChunkSettings = ctx.settings
        head = settings.head
        grad_logprob_M, grad_entropy_M = grads
        grad_logprob_M = torch.zeros_like(peak_M) if grad_logprob_M is None else grad_logprob_M
        gradients = HeadGradients(hidden_TD, weight_VD, rows, ctx.needs_input_grad, head)
        for chunk in settings.iter_chunks(local_M.shape[0]):
            hidden_CD = take_rows(hidden_TD, rows, chunk)
            # Taken out: the gradient overwrites them, and a second backward computes them again.
            raw_CV = ctx.kept.pop(chunk.start, None)
            raw_CV = compute_product(hidden_CD, weight_VD.t(), head) if raw_CV is None else raw_CV
            parts = (None, None) if grad_entropy_M is None else (entropy[chunk], grad_entropy_M[chunk])
            run_pass(
                write_gradient_, settings.compiled, raw_CV, local_M[chunk],
                peak_M[chunk], log_total_M[chunk], grad_logprob_M[chunk], *parts, *settings.scale,
            )  # fmt: skip
            gradients.add(chunk, hidden_CD, raw_CV)
            del raw_CV
        if head.vocabulary is not None and gradients.hidden_TD is not None and local_M.shape[0]:
            head.vocabulary.axis.sum_(gradients.hidden_TD)
        return gradients.hidden_TD, gradients.weight_VD, None, None, None


def _combine(statistics_4M: Tensor, axis: VocabularyAxis) -> Tensor:
    """Statistics of the whole vocabulary from those of every rank's shard."""
    own_M, total_M, target_M, weighted_M = statistics_4M
    peak_M = own_M.clone()
    axis.max_(peak_M)
    below_M = own_M - peak_M
    factor_M = torch.exp(below_M)
    sums_3M = torch.stack([factor_M * total_M, target_M, factor_M * (weighted_M + below_M * total_M)])
    axis.sum_(sums_3M)
    return torch.cat([peak_M[None], sums_3M])
