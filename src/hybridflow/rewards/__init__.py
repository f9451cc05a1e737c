"""What a response is worth: any Python functions of a row or a batch, run where they can do no harm."""

from hybridflow.rewards.builtin import exact_match, format_match, gsm8k
from hybridflow.rewards.function import BUILTIN, RewardFunction, source_hash
from hybridflow.rewards.pool import RewardComponent, RewardPool, RewardSettings, check_reward, list_reward_sources

__all__ = [
    "BUILTIN",
    "RewardComponent",
    "RewardFunction",
    "RewardPool",
    "RewardSettings",
    "check_reward",
    "exact_match",
    "format_match",
    "gsm8k",
    "list_reward_sources",
    "source_hash",
]
