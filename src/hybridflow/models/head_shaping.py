"""What sampling changes in a distribution beside its temperature: one function of rollout and trainer, so that both know the same one.

Dimensions: S distributions, V vocabulary, K most likely tokens, L tokens of the longest history, N tokens of all rows, M targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models.exact import cumulate_rows
from hybridflow.types import Shaping


@dataclass(frozen=True)
class Shaped:
    """How the distributions of targets were shaped, and what each of them came after.

    tokens_N:         int64, all rows one after the other.
    starts_M, ends_M: int64; target i came after tokens_N[starts_M[i] : ends_M[i]], at least one.
    num_kept_M:       int64 on the host, pinned where there is a GPU: among how many tokens each was drawn; None where sampling cuts none.
    """

    shaping: Shaping
    tokens_N: Tensor
    starts_M: Tensor
    ends_M: Tensor
    num_kept_M: Tensor | None = None

    def shape(self, logits_CV: Tensor, targets_M: Tensor, chunk: slice) -> Tensor:
        """Logits of the distributions that the targets of a chunk were drawn from. Each target is kept, since it was drawn.

        logits_CV: float32 (float64), divided by the temperature.
        """
        logits_CV = self._penalize(logits_CV, chunk)
        if self.num_kept_M is None:
            return logits_CV
        return keep_most_likely(logits_CV, self.num_kept_M[chunk], targets_M[chunk])

    def find_gradient(self, grad_CV: Tensor, logits_CV: Tensor, chunk: slice) -> Tensor:
        """Gradient at the logits from the one at the shaped logits, which is 0 where these were cut.

        Which tokens are kept, and the penalty's border at 0, have none.
        """
        if self.shaping.repetition_penalty == 1.0:
            return grad_CV
        with torch.enable_grad():
            logits_CV = logits_CV.detach().requires_grad_()
            (found_CV,) = torch.autograd.grad(self._penalize(logits_CV, chunk), logits_CV, grad_CV)
        return found_CV

    def _penalize(self, logits_CV: Tensor, chunk: slice) -> Tensor:
        penalty = self.shaping.repetition_penalty
        if penalty == 1.0:
            return logits_CV
        return penalize_repetition(logits_CV, self._find_seen(chunk, logits_CV.shape[1]), penalty)

    def _find_seen(self, chunk: slice, vocab_size: int) -> Tensor:
        starts_C1, ends_C1 = self.starts_M[chunk, None], self.ends_M[chunk, None]
        within_L = torch.arange(int((ends_C1 - starts_C1).amax()), device=self.tokens_N.device)
        return find_seen(self.tokens_N[torch.minimum(starts_C1 + within_L, ends_C1 - 1)], vocab_size)


def find_seen(tokens_SL: Tensor, vocab_size: int) -> Tensor:
    """Which tokens of the vocabulary each history holds, [S, V] bool.

    tokens_SL: [S, L] int64; a shorter history is filled up with tokens that it holds.
    """
    seen_SV = torch.zeros((tokens_SL.shape[0], vocab_size), dtype=torch.bool, device=tokens_SL.device)
    return seen_SV.scatter_(1, tokens_SL, True)


def penalize_repetition(logits_SV: Tensor, seen_SV: Tensor, penalty: float) -> Tensor:
    """Logits of seen tokens divided by the penalty where they are above 0, else multiplied by it.

    Source: CTRL, arXiv:1909.05858 section 4.1, in the form of Transformers and vLLM: prompt and response count as seen, once. The paper
    divides logits below 0 too, which would make them likelier. Before or after the temperature is the same.
    """
    return torch.where(seen_SV, torch.where(logits_SV > 0, logits_SV / penalty, logits_SV * penalty), logits_SV)


def cut_logits(logits_SV: Tensor, shaping: Shaping, *, exact: bool = False) -> Tensor:
    """Logits with -inf outside those of at least `min_p` times the greatest probability, outside the `top_k` most likely of them, and, of
    what is left, outside the smallest set reaching `top_p`.

    Source: nucleus, Holtzman et al., arXiv:1904.09751; min-p, Nguyen et al., arXiv:2407.01082; in vLLM's order. Differs: tokens equal to
    the last one kept are kept too, so the set does not depend on a sort's order.
    """
    if not shaping.cuts:
        return logits_SV
    floor_S1 = _find_floor(logits_SV.detach(), shaping, exact=exact)
    return logits_SV.masked_fill(logits_SV < floor_S1, -math.inf)


def count_kept(cut_SV: Tensor) -> Tensor:
    """How many tokens `cut_logits` has kept, [S] int64; at least one, the greatest."""
    return (cut_SV > -math.inf).sum(dim=-1).clamp_(min=1)


def keep_most_likely(logits_SV: Tensor, num_kept_S: Tensor, drawn_S: Tensor) -> Tensor:
    """Logits with -inf outside so many of the most likely: what was cut, said of logits that may be rounded otherwise.

    num_kept_S: [S] int64 on the host, from `count_kept`; the largest says how many logits are put in order.
    drawn_S:    [S] int64, tokens that are kept whatever their probability; each counts as the most likely one of its row.

    Differs from asking the rules again: at the border rounding decides how many tokens these keep, and each log-probability jumps with the
    mass of one more. Where the number is known it decides only which of two tokens stays that are alike, so that log-probabilities are
    at most twice as far apart as these logits are. With the very logits of the draw it is the very set. Of equal logits at the border
    those of the lowest ids stay, so that a row's set does not depend on what is beside it.
    """
    most = min(int(num_kept_S.amax()), logits_SV.shape[-1])
    num_kept_S1 = num_kept_S[:, None].to(logits_SV.device, non_blocking=True)
    ranked_SV = logits_SV.detach().scatter(1, drawn_S[:, None], math.inf)
    floor_S1 = ranked_SV.topk(most, dim=-1).values.gather(1, num_kept_S1.clamp(max=most) - 1)
    is_level_SV = ranked_SV == floor_S1
    room_S1 = num_kept_S1 - (ranked_SV > floor_S1).sum(dim=-1, keepdim=True)
    is_out_SV = is_level_SV & (is_level_SV.cumsum(dim=-1, dtype=torch.int32) > room_S1)
    return logits_SV.masked_fill(is_out_SV.logical_or_(ranked_SV < floor_S1), -math.inf)


def _find_floor(logits_SV: Tensor, shaping: Shaping, *, exact: bool) -> Tensor:
    """The least logit that is kept, [S, 1]."""
    vocab = logits_SV.shape[-1]
    sorted_SK = logits_SV.topk(_count_sorted(shaping, vocab), dim=-1).values
    floor_S1 = sorted_SK[:, -1:] if shaping.top_k or shaping.top_p < 1.0 else torch.full_like(sorted_SK, -math.inf)
    if shaping.min_p > 0.0:
        floor_S1 = torch.maximum(floor_S1, sorted_SK[:, :1] + math.log(shaping.min_p))
    if shaping.top_p < 1.0:
        # Powers above the greatest logit, instead of a softmax: their sum is the last of the cumulative sums.
        powers_SK = torch.exp(sorted_SK.double() - sorted_SK[:, :1].double())
        powers_SK = powers_SK.masked_fill(sorted_SK < floor_S1, 0.0)
        sums_SK = cumulate_rows(powers_SK) if exact else powers_SK.cumsum(dim=-1)
        is_out_SK = sums_SK - powers_SK >= shaping.top_p * sums_SK[:, -1:]
        floor_S1 = sorted_SK.masked_fill(is_out_SK, math.inf).amin(dim=-1, keepdim=True)
    return floor_S1


def _count_sorted(shaping: Shaping, vocab: int) -> int:
    if shaping.top_k:
        return min(shaping.top_k, vocab)
    return vocab if shaping.top_p < 1.0 else 1
