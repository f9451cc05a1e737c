"""The maths of post-training: pure functions on tensors and arrays, and the losses made of them."""

from hybridflow.algorithms.advantages import AdvantageFunction, compute_group_advantages, resolve_advantage_function
from hybridflow.algorithms.filters import compute_constant_groups
from hybridflow.algorithms.grpo import GRPO, GRPOSettings
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
from hybridflow.algorithms.prepare import Prepared, keep_all, prepare_policy_batch

__all__ = [
    "GRPO",
    "AdvantageFunction",
    "GRPOSettings",
    "KLEstimator",
    "LossSum",
    "MetricSum",
    "Normalization",
    "PolicyLoss",
    "PolicyLossSettings",
    "Prepared",
    "SFTLoss",
    "TokenLoss",
    "compute_constant_groups",
    "compute_denominator",
    "compute_group_advantages",
    "compute_kl",
    "compute_token_weights",
    "keep_all",
    "prepare_policy_batch",
    "resolve_advantage_function",
]
