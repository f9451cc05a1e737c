"""The learning rate of each optimizer step, as a pure function of the number of steps taken."""

from __future__ import annotations

import math
from typing import Literal

from hybridflow.config import Field, settings


@settings
class ScheduleSettings:
    """How the learning rate changes over optimizer steps, e.g. `ScheduleSettings(kind="cosine", total_steps=1000)`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: `constant`, or falling to `min_lr_ratio` along a `linear` or `cosine` curve."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps below the full rate, rising linearly from 1 / (warmup_steps + 1) of it; 0 starts at the full rate."""
    total_steps: int = Field(default=0, ge=0)
    """Optimizer steps until the rate of `linear` and `cosine` reaches its floor, warm-up counted in; 0 takes those of the run."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Floor of a falling rate, as a fraction of the full rate."""

    def __post_init__(self) -> None:
        if self.kind != "constant" and 0 < self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps is {self.total_steps}, but a {self.kind} schedule with warmup_steps={self.warmup_steps} "
                "needs more than that; set total_steps to the optimizer steps of the run"
            )


def compute_learning_rate(steps_taken: int, lr: float, schedule: ScheduleSettings) -> float:
    """Learning rate of the next optimizer step, after `steps_taken` steps.

    lr:      full rate, reached when the warm-up ends.
    returns: `lr` times the schedule's factor; from step `total_steps` on, `lr * min_lr_ratio`.
    Raises ValueError for a falling schedule whose `total_steps` nobody has filled in.

    A skipped step takes no step, so it does not move the schedule: weights, optimizer state and rate stay as they were,
    and the next mini-batch meets exactly what this one met. Calls of `update` are the grain, never micro-batches.
    Differs from Transformers' schedules: the first step of a warm-up has a rate above 0, so no step is without effect.
    """
    if steps_taken < schedule.warmup_steps:
        return lr * (steps_taken + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return lr
    if schedule.total_steps == 0:
        raise ValueError(
            f"schedule.total_steps is 0, and a {schedule.kind} schedule falls over that many steps; set it to those of the run"
        )
    progress = min((steps_taken - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps), 1.0)
    height = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * height)
