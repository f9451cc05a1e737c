"""Held-out evaluation: every row once, greedy unless asked otherwise, scored by the run's reward."""

from __future__ import annotations

import numpy as np

from hybridflow.batch import Batch
from hybridflow.config import Field, settings
from hybridflow.data import DataSettings
from hybridflow.observability.phases import phase
from hybridflow.roles.generator import Generator
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import Runtime
from hybridflow.types import Metrics, RowState, SamplingParams, mean, total


@settings
class EvaluationSettings:
    """When and on what the policy is evaluated."""

    data: DataSettings | None = None
    """Held-out rows with prompts; null evaluates nothing."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates after the last step alone."""
    max_prompts: int = Field(default=0, ge=0)
    """Takes the first this many rows; 0 takes all."""
    sampling: SamplingParams = Field(default_factory=lambda: SamplingParams(temperature=0.0))
    """How responses are drawn; greedy by default."""
    stop_at: float | None = None
    """Ends the run when the mean reward of an evaluation reaches this; null never does."""


class Evaluator:
    """Generates for all held-out prompts and averages their rewards."""

    def __init__(self, settings: EvaluationSettings, prompts: Batch, policy: Generator, reward: RewardModel, runtime: Runtime) -> None:
        self.settings = settings
        self._prompts = prompts
        self._policy, self._reward, self._runtime = policy, reward, runtime

    def run(self, step: int) -> tuple[Batch, Metrics]:
        """The scored samples, and `eval/*` metrics.

        A row that failed counts as reward 0 here and is told in `eval/failed`: dropping it would flatter the policy.
        """
        with phase("evaluate"):
            samples = self._policy.rollout(self._prompts, step=step, sampling=self.settings.sampling)
            scores = self._reward.score(samples)
        batch = self._runtime.get(samples).merge(self._runtime.get(scores))
        rewards = batch.numpy("reward")
        failed = np.isnan(rewards) | (batch.numpy("state") == RowState.FAILED)
        metrics = {
            "eval/reward_mean": mean(float(np.where(failed, 0.0, rewards).mean()), batch.num_rows),
            "eval/failed": total(int(failed.sum())),
            "eval/response_length_mean": mean(batch.ragged("loss_mask").values.sum().item() / batch.num_rows, batch.num_rows),
        }
        return batch, metrics

    def reached(self, metrics: Metrics) -> bool:
        """Whether the run may end here."""
        return self.settings.stop_at is not None and metrics["eval/reward_mean"].value >= self.settings.stop_at

