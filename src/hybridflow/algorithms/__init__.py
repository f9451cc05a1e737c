"""The maths of post-training: pure functions on tensors and arrays, and the losses made of them."""

from hybridflow.algorithms.advantages import AdvantageFunction, compute_group_advantages, resolve_advantage_function
from hybridflow.algorithms.filters import compute_constant_groups
from hybridflow.algorithms.kl import KLEstimator, compute_kl
from hybridflow.algorithms.losses import (
    LossSum,
    MetricSum,
    Normalization,
    PolicyLoss,
    PolicyLossSettings,
    SFTLoss,
    TokenLoss,
    compute_denominator,
    compute_token_weights,
)
from hybridflow.algorithms.moments import Moments
from hybridflow.algorithms.policy_gradient import PolicyGradient, PolicyGradientSettings
from hybridflow.algorithms.prepare import Prepared, RewardKL, keep_all, normalize_advantages, prepare_policy_batch

__all__ = [
    "AdvantageFunction",
    "KLEstimator",
    "LossSum",
    "MetricSum",
    "Moments",
    "Normalization",
    "PolicyGradient",
    "PolicyGradientSettings",
    "PolicyLoss",
    "PolicyLossSettings",
    "Prepared",
    "RewardKL",
    "SFTLoss",
    "TokenLoss",
    "compute_constant_groups",
    "compute_denominator",
    "compute_group_advantages",
    "compute_kl",
    "compute_token_weights",
    "keep_all",
    "normalize_advantages",
    "prepare_policy_batch",
    "resolve_advantage_function",
]
