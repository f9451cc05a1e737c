"""What a response is worth: any Python function of a row, run where it can do no harm."""

from hybridflow.rewards.builtin import exact_match, gsm8k
from hybridflow.rewards.function import BUILTIN, RewardFunction, source_hash
from hybridflow.rewards.pool import RewardPool, RewardSettings, check_reward

__all__ = [
    "BUILTIN",
    "RewardFunction",
    "RewardPool",
    "RewardSettings",
    "check_reward",
    "exact_match",
    "gsm8k",
    "source_hash",
]
