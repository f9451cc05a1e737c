"""What the loop of supervised fine-tuning works with, built from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridflow.algorithms import SFTLoss, keep_all
from hybridflow.batch import Batch
from hybridflow.config import Field, settings, to_yaml
from hybridflow.data import DataSettings, SFTLoader, list_filter_sources
from hybridflow.flow.evaluation import EvaluationSettings, Evaluator, read_held_out
from hybridflow.flow.job import (
    CheckpointSettings,
    Job,
    RunInputs,
    check_placed_models,
    check_trainers,
    describe_start,
    find_run,
    model_spec,
    resolve_engine,
    train_over,
)
from hybridflow.flow.kept_samples import KeptSamples
from hybridflow.observability.run import RunSettings
from hybridflow.rewards import RewardSettings, list_reward_sources
from hybridflow.roles.actor import Actor
from hybridflow.roles.actor_worker import ActorSpec
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.policy import ModelSettings, read_tokenizer
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import Runtime, RuntimeSettings
from hybridflow.train_engine import OptimizerSettings, TrainSettings
from hybridflow.types import BatchRef, Numerics, Objective, SamplingParams

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
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Keys new weights and the order of rows."""
    numerics: Numerics = "fast"
    """`exact` makes each row's numbers independent of all around it; `fast` states tolerances."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Who generates for evaluations."""
    reward: RewardSettings | None = None
    """What evaluations measure; needed with `evaluation.data`."""
    train: TrainSettings = Field(default_factory=lambda: TrainSettings(optimizer=OptimizerSettings(lr=1e-5)))
    """Optimizer and micro-batches; a learning rate of 1e-5 by default. From Python a `TrainSettings` is taken whole: give it a learning
    rate too."""
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    """Held-out evaluation by generation."""
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    """Saving and going on."""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """Where roles run."""
    run: RunSettings = Field(default_factory=RunSettings)
    """Where results go."""


@dataclass(frozen=True, kw_only=True)
class SFTInputs(RunInputs):
    """What a run of supervised fine-tuning needs beside."""

    rows: SFTLoader


def read_sft_inputs(
    config: SFTConfig, *, reward_function: Callable[..., Any] | None = None, assume_installed: bool = False
) -> SFTInputs:
    """Reads and checks all that can be before a worker starts. Raises ConfigError for what is wrong.

    assume_installed: see `resolve_engine`.
    """
    models = {"actor": config.model, "rollout": config.model}
    check_placed_models(config.runtime.placement, (*models, "reward"), models, config.numerics)
    check_trainers(config.model, config.train, config.runtime, config.numerics)
    rollout, engine = resolve_engine(
        config.model,
        config.rollout,
        config.runtime,
        config.numerics,
        train=config.train,
        assume_installed=assume_installed,
    )
    rollout.check_sampling(config.evaluation.sampling, "evaluation.sampling")
    run, resume_from = find_run(config.run, "sft", config.checkpoint)
    tokenizer = read_tokenizer(config.model)
    return SFTInputs(
        run=run,
        resume_from=resume_from,
        tokenizer=tokenizer,
        rows=SFTLoader(config.data, tokenizer, seed=config.seed),
        held_out=read_held_out(config.evaluation, tokenizer, config.reward, reward_function),
        rollout=rollout,
        engine=engine,
        reward_function=reward_function,
        sources=list_reward_sources(config.reward, reward_function)
        | list_filter_sources(config.data)
        | list_filter_sources(config.evaluation.data, "evaluation.data"),
    )


class SFTJob(Job):
    """A run of supervised fine-tuning: the model, its rows, and what every run has."""

    def __init__(self, config: SFTConfig, inputs: SFTInputs, runtime: Runtime) -> None:
        self.config, self.rows = config, inputs.rows
        model = model_spec(config.model, config.runtime, config.numerics, config.seed)
        actor = Actor(
            runtime,
            ActorSpec(model, train_over(config.train, config.steps), inputs.rollout),
            SamplingParams(),
            separate_rollout=config.runtime.placement.separates("rollout"),
            snapshot_every_steps=config.runtime.recovery.snapshot_every_steps,
        )
        evaluator, self._kept = None, None
        if inputs.held_out is not None:
            reward = RewardModel(runtime, config.reward or RewardSettings(), inputs.reward_function)
            evaluator = Evaluator(
                config.evaluation, inputs.held_out, inputs.tokenizer, actor, reward, runtime, config.seed
            )
            self._kept = KeptSamples(
                inputs.run,
                runtime,
                reward,
                inputs.tokenizer,
                num_steps=config.steps,
                samples_per_prompt=config.evaluation.sampling.samples_per_prompt,
            )
        super().__init__(
            kind="sft",
            inputs=inputs,
            config_yaml=to_yaml(config),
            num_steps=config.steps,
            checkpoint=config.checkpoint,
            evaluation=config.evaluation,
            runtime=runtime,
            actor=actor,
            evaluator=evaluator,
            data=inputs.rows,
            shown=SHOWN,
            engine=None if inputs.held_out is None else inputs.engine,
            starting=describe_start(config.runtime),
        )

    def loss(self, rows: Batch) -> Objective:
        """Mean negative log-likelihood of the counted tokens."""
        return Objective(rows, (), keep_all, SFTLoss())

    def after_evaluation(self, step: int, scored: BatchRef, *, is_last: bool) -> None:
        """Keeps some of the evaluation's samples, which are the only ones of such a run."""
        if self._kept is not None:
            self._kept.write(step, scored, is_last=is_last)
