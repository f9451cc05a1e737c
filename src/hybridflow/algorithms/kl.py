"""Divergence from a reference policy, estimated token by token from the sampled tokens alone. T: packed tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Largest log-ratio that is exponentiated: e^20 = 4.9e8 still sums and squares within float32."""


def compute_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: KLEstimator) -> Tensor:
    """KL estimate at each sampled token, with the gradient that minimises a divergence when it stands in a loss.

    logprobs_T:           [T] float, log-probability of the sampled token under the policy; carries gradient.
    reference_logprobs_T: [T] float, the same under the reference; carries none.
    returns:              [T], dtype of `logprobs_T`.

    With x = log p(token) - log p_ref(token):

    | estimator | value           | expected value | slope: d returned / d log p | expected gradient |
    |-----------|-----------------|----------------|-----------------------------|-------------------|
    | k1        | x               | KL(p, p_ref)   | x                           | of KL(p, p_ref)   |
    | k2        | x^2 / 2         | biased         | x                           | of KL(p, p_ref)   |
    | k3        | exp(-x) - 1 + x | KL(p, p_ref)   | 1 - exp(-x)                 | of KL(p_ref, p)   |

    Expectations are over tokens drawn from p itself; no importance weight is applied after p has moved. At x = 0 every
    value and slope is exactly 0. They hold where p can draw whatever p_ref can: where sampling cuts p, k3 is less than KL(p, p_ref) by
    p_ref's mass outside the cut, and KL(p_ref, p) is infinite.

    Source: J. Schulman, "Approximating KL Divergence" (2020); k3 in the loss is GRPO's, arXiv:2402.03300 eq. 4.
    Differs in k1: differentiating x itself gives d log p, whose mean is zero whatever the reference is, so the slope
    here is that of the score-function gradient, x * d log p. k2 and k3 are the plain derivatives of their values.
    Surprises: k1 and k2 train alike and report differently. Below x = -20 the exponential would overflow, so k3 keeps
    the value and the slope that it has at -20. Non-finite log-probabilities give a non-finite value. First derivatives only.
    """
    log_ratio_T = (logprobs_T - reference_logprobs_T).detach()
    if estimator == "k1":
        return _attach_slope(log_ratio_T, log_ratio_T, logprobs_T)
    if estimator == "k2":
        return _attach_slope(0.5 * log_ratio_T.square(), log_ratio_T, logprobs_T)
    if estimator == "k3":
        # expm1, because 1 - exp(-x) loses all digits of a small x.
        growth_T = torch.expm1(-log_ratio_T.clamp(min=-MAX_LOG_RATIO))
        return _attach_slope(growth_T + log_ratio_T.clamp(min=-MAX_LOG_RATIO), -growth_T, logprobs_T)
    raise ValueError(f"KL estimator '{estimator}' is not known: use 'k1', 'k2' or 'k3'")


def _attach_slope(value_T: Tensor, slope_T: Tensor, logprobs_T: Tensor) -> Tensor:
    # The second term is exactly 0 where log p is finite, and NaN (hence visible) where it is not.
    return value_T + slope_T * (logprobs_T - logprobs_T.detach())
