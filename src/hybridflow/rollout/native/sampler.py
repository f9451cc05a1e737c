"""From logits to one token a sequence and its log-probability under the distribution it was drawn from.

Dimensions: S sequences, V vocabulary, K tokens of the top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridflow.models import compute_log_softmax
from hybridflow.models.exact import cumulate_rows


def sample_tokens(
    logits_SV: Tensor, uniforms_S: Tensor | None, *, top_k: int, top_p: float, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Draws a token from each distribution by inverting its cumulative sum at the uniform.

    logits_SV:  [S, V] float32, divided by the temperature.
    uniforms_S: [S] float64 in [0, 1); None takes the most likely token.
    exact:      a row's draw and its log-probability have the same bits in any company.
    returns:    (tokens [S] int64, logprobs [S] float32): logprobs of the filtered, renormalised distribution; with
                None those of the whole distribution, since a certain choice has no density worth a ratio.

    Tokens stand in order of id, not of probability: rounding that swaps two near-equal logits then moves no draw. The
    sum runs in float64, so a token of 1e-12 keeps its share. Logits that are not finite give such a log-probability.
    """
    if uniforms_S is None:
        logprobs_SV = compute_log_softmax(logits_SV, exact=exact)
        tokens_S = logits_SV.argmax(dim=-1)
    else:
        filtered_SV = filter_logits(logits_SV, top_k=top_k, top_p=top_p, exact=exact)
        logprobs_SV = compute_log_softmax(filtered_SV, exact=exact)
        cumulative_SV = _cumulate(logprobs_SV.exp().double(), exact)
        targets_S1 = uniforms_S[:, None] * cumulative_SV[:, -1:]
        # The clamp serves rows of NaN alone: a uniform below 1 times the sum is below the sum.
        tokens_S = torch.searchsorted(cumulative_SV, targets_S1, right=True)[:, 0].clamp_(max=logits_SV.shape[-1] - 1)
    return tokens_S, logprobs_SV.gather(1, tokens_S[:, None])[:, 0]


def _cumulate(values_SV: Tensor, exact: bool) -> Tensor:
    return cumulate_rows(values_SV) if exact else values_SV.cumsum(dim=-1)


def filter_logits(logits_SV: Tensor, *, top_k: int, top_p: float, exact: bool = False) -> Tensor:
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
        # Powers above the greatest logit, instead of a softmax: their sum is the last of the cumulative sums.
        powers_SK = torch.exp(sorted_SK.double() - sorted_SK[:, :1].double())
        sums_SK = _cumulate(powers_SK, exact)
        outside_SK = sums_SK - powers_SK >= top_p * sums_SK[:, -1:]
        floor_S1 = sorted_SK.masked_fill(outside_SK, math.inf).amin(dim=-1, keepdim=True)
    return logits_SV.masked_fill(logits_SV < floor_S1, -math.inf)
