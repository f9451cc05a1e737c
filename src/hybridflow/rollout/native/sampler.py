"""From logits to one token a sequence and its log-probability under the distribution it was drawn from.

Dimensions: S sequences, V vocabulary, K tokens of the top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridflow.models import compute_log_softmax


def sample_tokens(logits_SV: Tensor, uniforms_S: Tensor | None, *, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Draws a token from each distribution by inverting its cumulative sum at the uniform.

    logits_SV:  [S, V] float32, divided by the temperature.
    uniforms_S: [S] float64 in [0, 1); None takes the most likely token.
    returns:    (tokens [S] int64, logprobs [S] float32): logprobs of the filtered, renormalised distribution; with
                None those of the whole distribution, since a certain choice has no density worth a ratio.

    Tokens stand in order of id, not of probability: rounding that swaps two near-equal logits then moves no draw. The
    sum runs in float64, so a token of 1e-12 keeps its share. Logits that are not finite give such a log-probability.
    """
    if uniforms_S is None:
        logprobs_SV = compute_log_softmax(logits_SV)
        tokens_S = logits_SV.argmax(dim=-1)
    else:
        logprobs_SV = compute_log_softmax(filter_logits(logits_SV, top_k=top_k, top_p=top_p))
        cumulative_SV = logprobs_SV.exp().double().cumsum(dim=-1)
        targets_S1 = uniforms_S[:, None] * cumulative_SV[:, -1:]
        # The clamp serves rows of NaN alone: a uniform below 1 times the sum is below the sum.
        tokens_S = torch.searchsorted(cumulative_SV, targets_S1, right=True)[:, 0].clamp_(max=logits_SV.shape[-1] - 1)
    return tokens_S, logprobs_SV.gather(1, tokens_S[:, None])[:, 0]


def filter_logits(logits_SV: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Logits with -inf outside the `top_k` most likely tokens and, of those, outside the smallest set reaching `top_p`.

    Source: Holtzman et al., arXiv:1904.09751 (nucleus). Differs: tokens equal to the last one kept are kept too, so the
    set does not depend on a sort's order.
    """
    vocab = logits_SV.shape[-1]
    if not top_k and top_p == 1.0:
        return logits_SV
    sorted_SK = logits_SV.topk(min(top_k or vocab, vocab), dim=-1).values
    floor_S1 = sorted_SK[:, -1:]
    if top_p < 1.0:
        probs_SK = sorted_SK.softmax(dim=-1, dtype=torch.float64)
        outside_SK = probs_SK.cumsum(dim=-1) - probs_SK >= top_p
        floor_S1 = sorted_SK.masked_fill(outside_SK, math.inf).amin(dim=-1, keepdim=True)
    return logits_SV.masked_fill(logits_SV < floor_S1, -math.inf)
