"""What the loop of reinforcement learning works with, built from a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridflow.algorithms import PolicyGradient, PolicyGradientSettings
from hybridflow.checkpoint import Checkpoint
from hybridflow.config import ConfigError, Field, settings, to_yaml
from hybridflow.data import DataSettings, PromptPool, chat_stop_ids, list_filter_sources
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
from hybridflow.observability.phases import phase
from hybridflow.observability.run import RunSettings
from hybridflow.rewards import RewardSettings, check_reward, list_reward_sources, source_hash
from hybridflow.roles.actor import Actor
from hybridflow.roles.actor_worker import ActorSpec
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.policy import ModelSettings, ModelSpec, identify_weights, read_tokenizer
from hybridflow.roles.reference import Reference
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import Runtime, RuntimeSettings
from hybridflow.train_engine import RowMemory, TrainSettings, estimate_row_memory
from hybridflow.types import UNSHAPED, BatchRef, MetricsRef, Numerics, SamplingParams

SHOWN = ("reward/mean", "eval/reward_mean", "policy/kl_to_reference", "response/length_mean", "time/step_s")


@settings
class RLConfig:
    """A run of reinforcement learning: `hybridflow rl --config-name rl model.path=... data.files=[...]`."""

    model: ModelSettings
    """The policy to train."""
    data: DataSettings
    """Prompts to train on."""
    steps: int = Field(default=100, ge=1)
    """Steps of rollout and update."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts of a step; each is sampled `sampling.samples_per_prompt` times."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps a rollout is split into, by whole groups."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Keys new weights, the order of prompts and every draw."""
    numerics: Numerics = "fast"
    """`exact` makes each row's numbers independent of all around it; `fast` states tolerances."""
    sampling: SamplingParams = Field(default_factory=lambda: SamplingParams(samples_per_prompt=8))
    """How training samples are drawn. The loss uses the same temperature, repetition penalty, `min_p`, `top_k` and `top_p`; the last three
    need the native engine. From Python a `SamplingParams` is taken whole: give it samples_per_prompt too."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Who generates."""
    reward: RewardSettings = Field(default_factory=RewardSettings)
    """What is rewarded."""
    algorithm: PolicyGradientSettings = Field(default_factory=PolicyGradientSettings)
    """Advantages, clipping, KL; `algorithm=rloo` on the command line takes those of a paper, see docs/algorithms.md."""
    reference: ModelSettings | None = None
    """The policy that KL is measured to; null takes `model`, as it was at the start; with `train.lora` the actor without its adapter."""
    train: TrainSettings = Field(default_factory=TrainSettings)
    """Optimizer and micro-batches."""
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    """Held-out evaluation by the same reward."""
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    """Saving and going on."""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """Where roles run."""
    run: RunSettings = Field(default_factory=RunSettings)
    """Where results go."""


@dataclass(frozen=True, kw_only=True)
class RLInputs(RunInputs):
    """What a run of reinforcement learning needs beside. reference: which weights the reference reads, by `identify_weights`."""

    prompts: PromptPool
    algorithm: PolicyGradient
    sampling: SamplingParams
    reward_columns: frozenset[str]
    expected: RowMemory
    reference: str | None


def read_rl_inputs(
    config: RLConfig,
    *,
    reward_function: Callable[..., Any] | None = None,
    advantage_function: Callable[..., Any] | None = None,
    assume_installed: bool = False,
) -> RLInputs:
    """Reads and checks all that can be before a worker starts. Raises ConfigError for what is wrong.

    assume_installed: see `resolve_engine`.
    """
    _check_settings(config, has_advantages=advantage_function is not None)
    rollout, engine = resolve_engine(
        config.model,
        config.rollout,
        config.runtime,
        config.numerics,
        train=config.train,
        assume_installed=assume_installed,
        cuts=config.sampling.cuts,
    )
    run, resume_from = find_run(config.run, "rl", config.checkpoint)
    tokenizer = read_tokenizer(config.model)
    prompts = PromptPool(config.data, tokenizer, seed=config.seed)
    routes = prompts.list_values(config.reward.route_by)
    reward_columns = check_reward(config.reward, reward_function, prompts.column_names, routes)
    return RLInputs(
        run=run,
        resume_from=resume_from,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=read_held_out(config.evaluation, tokenizer, config.reward, reward_function),
        algorithm=PolicyGradient(config.algorithm, config.sampling, advantage_function),
        sampling=config.sampling.keyed_by(config.seed).also_stopping_on(chat_stop_ids(tokenizer, config.data)),
        rollout=rollout,
        engine=engine,
        reward_function=reward_function,
        reward_columns=reward_columns,
        expected=estimate_row_memory(config.train, config.numerics, config.sampling, config.data.max_tokens),
        reference=_check_reference(config, tokenizer, resume_from),
        sources=_list_sources(config, reward_function, advantage_function),
    )


def _list_sources(
    config: RLConfig, reward_function: Callable[..., Any] | None, advantage_function: Callable[..., Any] | None
) -> dict[str, str]:
    """Hashes of the user's own code, by what it is for."""
    advantages = advantage_function or config.algorithm.advantage_function
    own = {} if advantages is None else {"advantages": source_hash(advantages)}
    filters = list_filter_sources(config.data) | list_filter_sources(config.evaluation.data, "evaluation.data")
    return list_reward_sources(config.reward, reward_function) | filters | own


def _check_reference(config: RLConfig, tokenizer: PreTrainedTokenizerBase, resumed: Checkpoint | None) -> str | None:
    """Which weights the reference reads; None where it reads none. Raises ConfigError where its tokens are not the policy's, or where its
    weights are not those that the run began with."""
    if not config.algorithm.reads_reference or _adapter_gives_reference(config):
        return None
    if config.reference is not None:
        own, theirs = tokenizer.get_vocab(), read_tokenizer(config.reference, "reference").get_vocab()
        other = [token for token in sorted(own, key=own.__getitem__) if theirs.get(token) != own[token]]
        if other:
            raise ConfigError(
                f"reference: {len(other)} of the policy's {len(own)} tokens, such as {other[0]!r}, are others or none in the reference's "
                "tokenizer, and a KL between the two says nothing; give a reference with the tokenizer of model"
            )
    found, saved = identify_weights(config.reference or config.model), resumed and resumed.state.get("reference")
    if resumed is not None and saved is not None and found != saved:
        key, path = ("reference", config.reference.path) if config.reference else ("model", config.model.path)
        raise ConfigError(
            f"{key}.path: '{path}' does not hold the weights that the reference had before '{resumed.path}'; put them back, or name "
            "where they are as reference.path"
        )
    return found


def _check_settings(config: RLConfig, *, has_advantages: bool) -> None:
    models = {"actor": config.model, "rollout": config.model}
    if config.reference is not None and not config.algorithm.reads_reference:
        named = f"path: '{config.reference.path}'" if config.reference.path else "config"
        raise ConfigError(
            f"reference.{named} would not be read, since no KL to it is asked for; set algorithm.kl_coefficient above 0, or take it out"
        )
    if config.algorithm.reads_reference and not _adapter_gives_reference(config):
        models["reference"] = config.reference or config.model
    check_placed_models(config.runtime.placement, (*models, "reward"), models, config.numerics)
    check_trainers(config.model, config.train, config.runtime, config.numerics)
    _check_shaping(config)
    config.rollout.check_sampling(config.sampling, "sampling")
    config.rollout.check_sampling(config.evaluation.sampling, "evaluation.sampling")
    if config.sampling.temperature == 0.0:
        raise ConfigError(
            "sampling.temperature: 0 draws the same sample for a whole group, and nothing is learned; set it above 0, e.g. 1.0"
        )
    if config.sampling.samples_per_prompt == 1 and config.algorithm.needs_siblings and not has_advantages:
        raise ConfigError(
            "sampling.samples_per_prompt: 1 leaves a group without siblings to compare with, and nothing is learned; "
            "set it to 2 or more, e.g. 8, or compare over the batch (algorithm=reinforce_plus_plus)"
        )
    if config.sampling.samples_per_prompt == 1 and config.algorithm.drop_constant_groups:
        raise ConfigError(
            "algorithm.drop_constant_groups: true leaves out groups of equal rewards, as all are with sampling.samples_per_prompt=1, "
            "and nothing is learned; set it to false"
        )
    if config.updates_per_step > config.prompts_per_step:
        raise ConfigError(
            f"updates_per_step: {config.updates_per_step} is more than prompts_per_step={config.prompts_per_step}; "
            "groups stay whole, so set it to at most that"
        )


def _check_shaping(config: RLConfig) -> None:
    """That the trainer can compute the distributions that samples come from."""
    shaping, tp = config.sampling.shaping, config.train.parallel_config.tp
    named = ", ".join(
        f"sampling.{key}={value:g}" for key, value in vars(shaping).items() if value != vars(UNSHAPED)[key]
    )
    if shaping != UNSHAPED and tp > 1:
        raise ConfigError(
            f"{named}: the trainer needs each distribution whole, and train.parallel_config.tp={tp} splits the vocabulary; set tp to 1, or "
            "leave the sampling unshaped"
        )


def _adapter_gives_reference(config: RLConfig) -> bool:
    """Whether the reference is the actor without its adapter, and needs no model of its own."""
    return config.train.lora is not None and config.reference is None


class RLJob(Job):
    """A run of reinforcement learning: roles, prompts and the algorithm for the loop, and what every run has."""

    def __init__(self, config: RLConfig, inputs: RLInputs, runtime: Runtime) -> None:
        self.config, self.prompts, self.algorithm = config, inputs.prompts, inputs.algorithm
        self._reference = inputs.reference
        model = model_spec(config.model, config.runtime, config.numerics, config.seed)
        train = train_over(config.train, config.steps * config.updates_per_step)
        actor = Actor(
            runtime,
            ActorSpec(model, train, inputs.rollout, config.updates_per_step, inputs.expected),
            inputs.sampling,
            separate_rollout=config.runtime.placement.separates("rollout"),
            snapshot_every_steps=config.runtime.recovery.snapshot_every_steps,
        )
        reward = RewardModel(runtime, config.reward, inputs.reward_function, inputs.reward_columns)
        self._reward = reward
        self._kept = KeptSamples(
            inputs.run,
            runtime,
            reward,
            inputs.tokenizer,
            num_steps=config.steps,
            samples_per_prompt=config.sampling.samples_per_prompt,
        )
        self.scorers = self._build_scorers(actor, reward, runtime, model)
        super().__init__(
            kind="rl",
            inputs=inputs,
            config_yaml=to_yaml(config),
            num_steps=config.steps,
            checkpoint=config.checkpoint,
            evaluation=config.evaluation,
            runtime=runtime,
            actor=actor,
            evaluator=None
            if inputs.held_out is None
            else Evaluator(config.evaluation, inputs.held_out, inputs.tokenizer, actor, reward, runtime, config.seed),
            data=inputs.prompts,
            shown=SHOWN,
            engine=inputs.engine,
            starting=describe_start(config.runtime),
        )

    def after_rollout(self, step: int, batch: BatchRef) -> None:
        """Lets the trainer, while it still is what the samples were drawn from, score those that the report shows."""
        self._kept.score(step, batch, self.actor)

    def after_step(self, step: int, metrics: MetricsRef, batch: BatchRef, scores: dict[str, BatchRef]) -> None:
        """Writes the step's samples, before the checkpoint that says the step is done, and everything that `close_step` does."""
        path = self.run.rollout_path(step)
        if path is not None:
            scored = functools.reduce(lambda left, right: left | right, scores.values(), batch)
            path.parent.mkdir(exist_ok=True)
            with phase("write"):
                self.runtime.get(self._reward.write(scored, path.absolute()))
        self._kept.write(step, batch | scores["reward"])
        self.close_step(step, metrics)

    def _state(self, step: int) -> dict[str, Any]:
        return super()._state(step) | {"reference": self._reference}

    def _build_scorers(
        self, actor: Actor, reward: RewardModel, runtime: Runtime, model: ModelSpec
    ) -> dict[str, Callable[[BatchRef], BatchRef]]:
        """The verbs that add columns to a rollout: always the reward; more where the algorithm reads more."""
        scorers: dict[str, Callable[[BatchRef], BatchRef]] = {"reward": reward.score}
        columns = self.algorithm.columns
        if "ref_logprobs" in columns and _adapter_gives_reference(self.config):
            scorers["reference"] = actor.reference_log_prob
        elif "ref_logprobs" in columns:
            reference = Reference(
                runtime,
                replace(model, settings=self.config.reference or self.config.model),
                self.config.sampling,
                micro_batch_tokens=self.config.train.micro_batch_tokens,
            )
            scorers["reference"] = reference.log_prob
        if "trainer_logprobs" in columns:
            scorers["trainer"] = actor.log_prob
        return scorers
