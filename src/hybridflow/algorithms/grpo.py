"""GRPO and Dr. GRPO: a baseline from the siblings of a sample, and a clipped policy loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from hybridflow.algorithms.advantages import AdvantageFunction, compute_group_advantages, resolve_advantage_function
from hybridflow.algorithms.losses import PolicyLoss, PolicyLossSettings
from hybridflow.algorithms.prepare import Prepared, prepare_policy_batch
from hybridflow.batch import Batch
from hybridflow.config import ConfigError, settings
from hybridflow.types import BatchRef, Objective


@settings
class GRPOSettings(PolicyLossSettings):
    """Advantages within prompt groups, and the terms of the loss."""

    normalize_std: bool = True
    """Divides by the standard deviation of the group's rewards (GRPO); false leaves them as they are (Dr. GRPO)."""
    drop_constant_groups: bool = True
    """Leaves out groups whose rewards are all equal; false keeps their tokens, with advantage 0, in the denominator."""
    advantage_function: str | None = None
    """A function of yours in place of GRPO's, as 'package.module:function', called with numpy arrays (rewards, group_ids, ok);
    null takes GRPO's."""


class GRPO:
    """What the loop needs of the algorithm: `policy_loss`, made of `prepare` and `loss`.

    temperature:        of the sampling; the loss divides its logits by the same.
    advantage_function: a function (or its import path) where the settings name none; see `AdvantageFunction`.
    """

    def __init__(
        self, settings: GRPOSettings, *, temperature: float, advantage_function: str | AdvantageFunction | None = None
    ) -> None:
        self.prepare: Callable[[Batch], Prepared] = functools.partial(
            prepare_policy_batch,
            advantage_function=_choose_advantages(settings, advantage_function),
            drop_constant_groups=settings.drop_constant_groups,
        )
        self.loss = PolicyLoss(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            kl_coefficient=settings.kl_coefficient,
            kl_estimator=settings.kl_estimator,
            report_kl=settings.report_kl,
            entropy_coefficient=settings.entropy_coefficient,
            old_logprobs=settings.old_logprobs,
            normalization=settings.normalization,
            temperature=temperature,
        )

    def policy_loss(self, batch: BatchRef, scores: Mapping[str, BatchRef]) -> Objective:
        """Names the loss over the rollout's columns and those of the scores; computes nothing yet."""
        return Objective(batch, tuple(scores.values()), self.prepare, self.loss)


def _choose_advantages(settings: GRPOSettings, given: str | AdvantageFunction | None) -> AdvantageFunction:
    named = settings.advantage_function
    if given is not None and named is not None:
        raise ConfigError(f"advantage_function: '{named}' is set and a function is given too; leave one of them out")
    chosen = named if given is None else given
    if chosen is None:
        return functools.partial(compute_group_advantages, normalize_std=settings.normalize_std)
    return resolve_advantage_function(chosen)
