"""Held-out evaluation: every row once, greedy unless asked otherwise, scored by the run's reward."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.config import ConfigError, Field, HybridflowError, settings
from hybridflow.data import DataError, DataSettings, chat_stop_ids, read_prompts
from hybridflow.observability.phases import phase
from hybridflow.rewards import RewardSettings, check_reward
from hybridflow.roles.generator import Generator
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import Runtime
from hybridflow.types import BatchRef, Metrics, SamplingParams, mean, total

_DATA_KEY = re.compile(
    rf"^data(?=: )|(?<![\w./'])data(?=\.({'|'.join(field.name for field in dataclasses.fields(DataSettings))})\b)"
)


@settings
class HeldOutSettings:
    """What a policy is evaluated on, and how it answers."""

    data: DataSettings | None = None
    """Held-out rows with prompts, each once and in the order of the files (`shuffle` says nothing here); null evaluates nothing."""
    max_prompts: int = Field(default=0, ge=0)
    """Takes the first this many rows; 0 takes all."""
    sampling: SamplingParams = Field(default_factory=lambda: SamplingParams(temperature=0.0))
    """How responses are drawn; greedy by default. From Python a `SamplingParams` is taken whole: give it temperature=0 too."""


@settings
class EvaluationSettings(HeldOutSettings):
    """When the policy is evaluated during a run, and what ends it."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates after the last step alone."""
    stop_at: float | None = None
    """Ends the run when the mean reward of an evaluation reaches this; null never does."""


def read_held_out(
    settings: HeldOutSettings,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardSettings | None,
    reward_function: Callable[..., Any] | None,
) -> Batch | None:
    """The held-out prompts, or None where the settings name no data.

    Raises ConfigError, or DataError for a row, if they cannot be read; ConfigError if no reward can score them, or if a goal is set that
    no evaluation can reach.
    """
    if settings.data is None:
        if isinstance(settings, EvaluationSettings) and settings.stop_at is not None:
            raise ConfigError(
                f"evaluation.stop_at: {settings.stop_at:g} is never reached, since evaluation.data is not given; "
                "give evaluation.data.files=[...], or leave stop_at out (null)"
            )
        return None
    if reward is None and reward_function is None:
        raise ConfigError(
            "reward.function: evaluation.data is given, and nothing says what its responses are worth; name a reward"
        )
    try:
        prompts = read_prompts(settings.data, tokenizer, max_rows=settings.max_prompts)
        chat_stop_ids(tokenizer, settings.data)  # What the evaluation will ask for, refused here.
    except (ConfigError, DataError) as error:
        # The data room calls its own section `data`; here it stands in another one.
        raise type(error)(_DATA_KEY.sub("evaluation.data", str(error))) from error.__cause__
    own = set(prompts.column_names) - {"prompt_id", "group_id", "prompt_tokens", "prompt"}
    reward = reward or RewardSettings()
    routes = prompts.pylist(reward.route_by) if reward.route_by in own else ()
    check_reward(reward, reward_function, sorted(own), routes)
    return prompts


class EvaluationError(HybridflowError, RuntimeError):
    """An evaluation has nothing to average."""


class Evaluator:
    """Generates for all held-out prompts and averages their rewards. seed: the run's own."""

    def __init__(
        self,
        settings: HeldOutSettings,
        prompts: Batch,
        tokenizer: PreTrainedTokenizerBase,
        policy: Generator,
        reward: RewardModel,
        runtime: Runtime,
        seed: int = 0,
    ) -> None:
        self._sampling = settings.sampling.keyed_by(seed).also_stopping_on(chat_stop_ids(tokenizer, settings.data))
        self._prompts = prompts
        self._policy, self._reward, self._runtime = policy, reward, runtime

    def run(self, step: int) -> tuple[BatchRef, Metrics]:
        """The scored samples, and `eval/*` metrics.

        A row that failed counts as reward 0 here and is told in `eval/failed`: dropping it would flatter the policy.
        """
        with phase("evaluate"):
            samples = self._policy.rollout(self._prompts, step=step, sampling=self._sampling)
            scored = samples | self._reward.score(samples)
            summary = self._runtime.get(self._reward.summarize(scored))
        if summary.num_failed == summary.num_rows:
            raise EvaluationError(f"every row of the evaluation failed; row 0 says: {summary.first_error}")
        return scored, {
            "eval/reward_mean": mean(summary.mean, summary.num_rows),
            "eval/failed": total(summary.num_failed),
            "eval/response_length_mean": mean(summary.num_tokens / summary.num_rows, summary.num_rows),
            **{f"eval/reward_{name}": mean(value, rows) for name, (value, rows) in summary.components.items()},
        }
