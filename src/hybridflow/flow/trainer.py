"""The Python face: the same runs as the command line, with live functions and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.flow.commands import run_rl, run_sft
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig


class RLTrainer:
    """Reinforcement learning from Python.

        def reward(response: str, answer: str) -> float:
            return float(response.strip() == answer)

        config = RLConfig(model=ModelSettings(path="model"), data=DataSettings(files=("train.jsonl",)), steps=100)
        result = RLTrainer(config, reward=reward).train()

    reward:     any function of a row; its parameters name columns. None takes `config.reward.function`.
    advantages: `(rewards, group_ids, ok) -> advantages` on numpy arrays of whole groups. None takes the algorithm's own.
    """

    def __init__(
        self,
        config: RLConfig,
        *,
        reward: Callable[..., float] | None = None,
        advantages: Callable[..., Any] | None = None,
    ) -> None:
        self.config, self._reward, self._advantages = config, reward, advantages

    def train(self) -> dict[str, Any]:
        """Runs, or goes on with, the run; returns its directory (`run`) and its last metrics."""
        return run_rl(self.config, reward_function=self._reward, advantage_function=self._advantages)


class SFTTrainer:
    """Supervised fine-tuning from Python: `SFTTrainer(SFTConfig(model=..., data=...)).train()`.

    reward: what evaluations by generation measure; None takes `config.reward.function`.
    """

    def __init__(self, config: SFTConfig, *, reward: Callable[..., float] | None = None) -> None:
        self.config, self._reward = config, reward

    def train(self) -> dict[str, Any]:
        """Runs, or goes on with, the run; returns its directory (`run`) and its last metrics."""
        return run_sft(self.config, reward_function=self._reward)
