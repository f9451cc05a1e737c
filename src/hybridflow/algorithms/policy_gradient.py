"""The family of policy gradients without a critic: a baseline, what divides it, and a clipped policy loss.

GRPO, Dr. GRPO, RLOO and REINFORCE++ are members of it; `configs/algorithm/` has their settings, `docs/algorithms.md` their formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Literal

from hybridflow.algorithms.advantages import (
    AdvantageFunction,
    compute_group_advantages,
    keep_rewards,
    resolve_advantage_function,
)
from hybridflow.algorithms.losses import PolicyLoss, PolicyLossSettings
from hybridflow.algorithms.prepare import Prepared, RewardKL, prepare_policy_batch
from hybridflow.batch import Batch
from hybridflow.config import ConfigError, Field, settings
from hybridflow.types import BatchRef, Objective, SamplingParams


@settings
class PolicyGradientSettings(PolicyLossSettings):
    """Advantages, and the terms of the loss. The defaults are GRPO's, with its tokens counted as DAPO does."""

    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """Taken off a sample's reward: the mean over its prompt's samples (GRPO), over the others of them (RLOO), or nothing (REINFORCE++)."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """Divides advantages by the standard deviation of the group's rewards (GRPO), or brings them to mean 0 and standard deviation 1 over
    all tokens of the step, on all ranks (REINFORCE++); none leaves them as they are (Dr. GRPO, RLOO)."""
    kl_in_reward: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference (k1) that is taken off the reward: of the whole response where there is a baseline, token by token
    from the end where there is none. 0 takes nothing off."""
    drop_constant_groups: bool = True
    """Leaves out groups whose rewards are all equal; false keeps their tokens, with advantage 0, in the denominator."""
    advantage_function: str | None = None
    """A function of yours in place of `baseline` and `group_std`, as 'package.module:function' or 'path/to/file.py:function', called with
    numpy arrays (rewards, group_ids, ok); null takes these."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantage_function is not None or self.baseline != "none":
            return
        if self.drop_constant_groups:
            raise ValueError(
                "drop_constant_groups is true, and baseline=none learns from groups of equal rewards too; set it to false"
            )
        if self.scale == "group_std":
            raise ValueError(
                "scale is group_std, and baseline=none leaves nothing to compare within a group; set it to batch_std or none"
            )

    @property
    def reads_reference(self) -> bool:
        """Whether the reference's log-probabilities are needed."""
        return super().reads_reference or self.kl_in_reward > 0

    @property
    def needs_siblings(self) -> bool:
        """Whether a sample alone in its group teaches nothing."""
        return self.advantage_function is None and self.baseline != "none"


class PolicyGradient:
    """What the loop needs of the algorithm: `policy_loss`, made of `prepare` and `loss`.

    sampling:           of the training samples; the loss has the same temperature and shaping.
    advantage_function: a function (or its import path) where the settings name none; see `AdvantageFunction`.
    """

    def __init__(
        self,
        settings: PolicyGradientSettings,
        sampling: SamplingParams,
        advantage_function: str | AdvantageFunction | None = None,
    ) -> None:
        function = _choose_advantages(settings, advantage_function)
        kl = RewardKL(settings.kl_in_reward, settings.old_logprobs, per_token=settings.baseline == "none")
        self.prepare: Callable[[Batch], Prepared] = functools.partial(
            prepare_policy_batch,
            advantage_function=function,
            drop_constant_groups=settings.drop_constant_groups,
            kl=kl if kl.coefficient else None,
            over_batch=settings.scale == "batch_std",
        )
        terms = {field.name: getattr(settings, field.name) for field in fields(PolicyLossSettings)}
        if settings.normalization == "constant" and settings.constant_tokens is None:
            terms["constant_tokens"] = sampling.max_new_tokens
        self.loss = PolicyLoss(**terms, temperature=sampling.temperature, shaping=sampling.shaping)
        own = ("ref_logprobs", kl.logprobs) if kl.coefficient else ()
        self.columns = frozenset({*self.loss.columns, *own})
        """Per-token columns that loss and advantages read."""

    def policy_loss(self, batch: BatchRef, scores: Mapping[str, BatchRef]) -> Objective:
        """Names the loss over the rollout's columns and those of the scores; computes nothing yet."""
        return Objective(batch, tuple(scores.values()), self.prepare, self.loss)


def _choose_advantages(settings: PolicyGradientSettings, given: str | AdvantageFunction | None) -> AdvantageFunction:
    named = settings.advantage_function
    if given is not None and named is not None:
        raise ConfigError(f"advantage_function: '{named}' is set and a function is given too; leave one of them out")
    chosen = named if given is None else given
    if chosen is not None:
        return resolve_advantage_function(chosen)
    if settings.baseline == "none":
        return keep_rewards
    return functools.partial(
        compute_group_advantages,
        normalize_std=settings.scale == "group_std",
        leave_one_out=settings.baseline == "leave_one_out",
    )
