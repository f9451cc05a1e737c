"""From logits to one token a sequence and its log-probability under the distribution it was drawn from.

Dimensions: S sequences, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.models import compute_log_softmax, count_kept, cut_logits
from hybridflow.models.exact import cumulate_rows
from hybridflow.types import UNSHAPED, Shaping


class Drawn(NamedTuple):
    """One token a sequence.

    tokens:   [S] int64.
    logprobs: [S] float32, under the distribution that it was drawn from.
    num_kept: [S] int64, among how many tokens it was drawn; None where none are cut.
    """

    tokens: Tensor
    logprobs: Tensor
    num_kept: Tensor | None


def sample_tokens(
    logits_SV: Tensor, uniforms_S: Tensor | None, shaping: Shaping = UNSHAPED, *, exact: bool = False
) -> Drawn:
    """Draws a token from each distribution by inverting its cumulative sum at the uniform.

    logits_SV:  [S, V] float32, divided by the temperature, a repetition penalty applied.
    uniforms_S: [S] float64 in [0, 1); None takes the most likely token.
    shaping:    which tokens are kept.
    exact:      a row's draw and its log-probability have the same bits in any company.
    returns:    log-probabilities of the cut, renormalised distribution; with uniforms None those of the whole distribution, since a
                certain choice has no density worth a ratio.

    Tokens stand in order of id, not of probability: rounding that swaps two near-equal logits then moves no draw. The
    sum runs in float64, so a token of 1e-12 keeps its share. Logits that are not finite give such a log-probability.
    """
    num_kept_S = None
    if uniforms_S is None:
        logprobs_SV = compute_log_softmax(logits_SV, exact=exact)
        tokens_S = logits_SV.argmax(dim=-1)
    else:
        cut_SV = cut_logits(logits_SV, shaping, exact=exact)
        num_kept_S = count_kept(cut_SV) if shaping.cuts else None
        logprobs_SV = compute_log_softmax(cut_SV, exact=exact)
        cumulative_SV = _cumulate(logprobs_SV.exp().double(), exact)
        targets_S1 = uniforms_S[:, None] * cumulative_SV[:, -1:]
        # The clamp serves rows of NaN alone: a uniform below 1 times the sum is below the sum.
        tokens_S = torch.searchsorted(cumulative_SV, targets_S1, right=True)[:, 0].clamp_(max=logits_SV.shape[-1] - 1)
    return Drawn(tokens_S, logprobs_SV.gather(1, tokens_S[:, None])[:, 0], num_kept_S)


def _cumulate(values_SV: Tensor, exact: bool) -> Tensor:
    return cumulate_rows(values_SV) if exact else values_SV.cumsum(dim=-1)
