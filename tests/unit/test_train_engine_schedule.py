"""Learning rates over optimizer steps, against values written out by hand."""

from __future__ import annotations

import math

import pytest

from hybridflow.config import ConfigError
from hybridflow.train_engine.schedule import ScheduleSettings, compute_learning_rate


def rates(schedule: ScheduleSettings, num_steps: int, lr: float = 1.0) -> list[float]:
    return [compute_learning_rate(step, lr, schedule) for step in range(num_steps)]


def test_constant_with_warm_up() -> None:
    assert rates(ScheduleSettings(), 3, lr=0.5) == [0.5, 0.5, 0.5]
    assert rates(ScheduleSettings(warmup_steps=3), 6, lr=4.0) == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_linear_reaches_its_floor_and_stays() -> None:
    schedule = ScheduleSettings(kind="linear", warmup_steps=1, total_steps=5, min_lr_ratio=0.2)
    assert rates(schedule, 7) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_reaches_its_floor_and_stays() -> None:
    schedule = ScheduleSettings(kind="cosine", total_steps=4, min_lr_ratio=0.1)
    half = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rates(schedule, 6) == pytest.approx(
        [1.0, half, 0.55, 0.1 + 0.9 * 0.5 * (1 - math.cos(math.pi / 4)), 0.1, 0.1]
    )


def test_a_falling_schedule_needs_its_length() -> None:
    with pytest.raises(ConfigError, match="total_steps is 3"):
        ScheduleSettings(kind="cosine", warmup_steps=3, total_steps=3)
    with pytest.raises(ValueError, match="total_steps is 0"):
        compute_learning_rate(0, 1.0, ScheduleSettings(kind="linear"))
