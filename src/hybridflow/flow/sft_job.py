"""What the loop of supervised fine-tuning works with, built from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.algorithms import SFTLoss, keep_all
from hybridflow.batch import Batch
from hybridflow.config import Field, settings, to_yaml
from hybridflow.data import DataSettings, SFTLoader
from hybridflow.flow.evaluation import EvaluationSettings
from hybridflow.flow.job import CheckpointSettings, Job, find_run, train_over
from hybridflow.flow.rl_job import build_evaluator
from hybridflow.models import load_tokenizer
from hybridflow.observability.run import RunSettings
from hybridflow.rewards import RewardSettings, check_reward
from hybridflow.roles.actor import Actor, ActorSpec
from hybridflow.roles.generator import RolloutSettings
from hybridflow.roles.policy import ModelSettings, ModelSpec, check_model, model_directory
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import Runtime, RuntimeSettings
from hybridflow.runtime.start import worker_threads
from hybridflow.train_engine import TrainSettings
from hybridflow.types import MetricsRef, Numerics, Objective, SamplingParams

SHOWN = ("sft/loss", "eval/reward_mean", "train/lr", "time/step_s")


@settings
class SFTConfig:
    """A run of supervised fine-tuning: `hybridflow sft --config-name sft model.path=... data.files=[...]`."""

    model: ModelSettings
    """The model to train."""
    data: DataSettings
    """Rows to train on."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    rows_per_step: int = Field(default=32, ge=1)
    """Rows of a step, over all micro-batches."""
    seed: int = Field(default=0, ge=0)
    """Keys new weights and the order of rows."""
    numerics: Numerics = "fast"
    """`exact` makes each row's numbers independent of all around it (CPU, float32); `fast` states tolerances."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Who generates for evaluations."""
    reward: RewardSettings | None = None
    """What evaluations measure; needed with `evaluation.data`."""
    train: TrainSettings = Field(default_factory=TrainSettings)
    """Optimizer and micro-batches."""
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    """Held-out evaluation by generation."""
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    """Saving and going on."""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """Where roles run."""
    run: RunSettings = Field(default_factory=RunSettings)
    """Where results go."""


def check_sft(config: SFTConfig, reward_function: Callable[..., Any] | None = None) -> None:
    """Raises ConfigError for whatever can be seen to be wrong before any process starts."""
    check_model(config.model, config.numerics)
    if config.reward is not None:
        check_reward(config.reward, reward_function)


class SFTJob(Job):
    """A run of supervised fine-tuning: the model, its rows, and what every run has."""

    def __init__(self, config: SFTConfig, runtime: Runtime, *, reward_function: Callable[..., Any] | None = None) -> None:
        self.config = config
        run, resume_from = find_run(config.run, "sft", config.checkpoint)
        tokenizer = load_tokenizer(config.model.tokenizer or model_directory(config.model.path or ""))
        self.rows = SFTLoader(config.data, tokenizer, seed=config.seed)
        model = ModelSpec(config.model, config.numerics, config.seed, worker_threads(config.runtime, config.numerics))
        actor = Actor(runtime, ActorSpec(model, train_over(config.train, config.steps), config.rollout), SamplingParams())
        reward = RewardModel(runtime, config.reward, reward_function) if config.reward else None
        super().__init__(
            run=run,
            resume_from=resume_from,
            config_yaml=to_yaml(config),
            num_steps=config.steps,
            checkpoint=config.checkpoint,
            runtime=runtime,
            actor=actor,
            evaluator=build_evaluator(config.evaluation, tokenizer, actor, reward, runtime),
            data=self.rows,
            sources={},
            shown=SHOWN,
        )

    def loss(self, rows: Batch) -> Objective:
        """Mean negative log-likelihood of the counted tokens."""
        return Objective(rows, (), keep_all, SFTLoss())

    def after_step(self, step: int, metrics: MetricsRef) -> None:
        """Everything that `close_step` does."""
        self.close_step(step, metrics)
