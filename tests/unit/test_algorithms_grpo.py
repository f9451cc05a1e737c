"""What GRPO hands to the loop: settings that arrive, a picklable objective, and one step by hand from rewards to gradient."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from hybridflow.algorithms import (
    GRPO,
    GRPOSettings,
    PolicyLoss,
    PolicyLossSettings,
    compute_denominator,
    compute_token_weights,
)
from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.types import BatchRef

OTHER_VALUES = {
    "clip_low": 0.05,
    "clip_high": 0.5,
    "kl_coefficient": 0.25,
    "kl_estimator": "k2",
    "report_kl": True,
    "entropy_coefficient": 0.125,
    "old_logprobs": "trainer_logprobs",
    "normalization": "sequence_mean",
}


def rollout() -> Batch:
    return Batch.from_columns(
        tokens=[[1, 2, 3], [1, 2, 3, 4], [5, 6], [5, 7]],
        loss_mask=[np.array(mask, np.uint8) for mask in ([0, 1, 1], [0, 1, 1, 1], [0, 1], [0, 1])],
        rollout_logprobs=[[0.0, -1.0, -2.0], [0.0, -0.5, -1.5, -0.7], [0.0, -0.1], [0.0, -2.0]],
        group_id=[1, 1, 2, 2],
        state=[0, 0, 0, 0],
        reward=[1.0, 0.0, 0.5, 0.5],
        finish_reason=["stop"] * 4,
    )


def test_every_setting_of_the_loss_arrives_in_it() -> None:
    assert set(OTHER_VALUES) == {field.name for field in dataclasses.fields(PolicyLossSettings)}
    loss = GRPO(GRPOSettings(**OTHER_VALUES), temperature=0.7).loss
    assert loss == PolicyLoss(**OTHER_VALUES, temperature=0.7)
    for name, value in OTHER_VALUES.items():
        assert getattr(loss, name) == value != getattr(PolicyLossSettings(), name)


def test_temperature_is_that_of_the_sampling_and_above_zero() -> None:
    assert GRPO(GRPOSettings(), temperature=1.5).loss.temperature == 1.5
    with pytest.raises(ConfigError, match="temperature"):
        GRPO(GRPOSettings(), temperature=0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_low": 1.0}, "clip_low is 1.0 and must be less than 1"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"kl_estimator": "k4"}, "k1, k2, k3"),
        ({"normalization": "mean"}, "token_mean, sequence_mean"),
        ({"old_logprobs": "ref_logprobs"}, "rollout_logprobs, trainer_logprobs"),
        ({"normalise_std": True}, "normalize_std"),
    ],
)
def test_wrong_settings_are_refused(values, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOSettings(**values)


def test_policy_loss_names_columns_and_computes_nothing() -> None:
    algorithm = GRPO(GRPOSettings(), temperature=1.0)
    batch, scores = BatchRef(()), {"reward": BatchRef(()), "reference": BatchRef(())}
    objective = algorithm.policy_loss(batch, scores)
    assert objective.batch is batch
    assert objective.scores == tuple(scores.values())
    assert (objective.prepare, objective.loss) == (algorithm.prepare, algorithm.loss)


def test_prepare_and_loss_travel_by_pickle() -> None:
    algorithm = GRPO(GRPOSettings(), temperature=1.0)
    prepare, loss = pickle.loads(pickle.dumps((algorithm.prepare, algorithm.loss)))
    assert loss == algorithm.loss
    assert prepare(rollout()).batch.equals(algorithm.prepare(rollout()).batch)


@pytest.mark.parametrize(("normalize_std", "advantage"), [(True, math.sqrt(0.5)), (False, 0.5)])
def test_normalize_std_chooses_grpo_or_dr_grpo(normalize_std: bool, advantage: float) -> None:
    prepared = GRPO(GRPOSettings(normalize_std=normalize_std), temperature=1.0).prepare(rollout())
    assert [row[-1] for row in prepared.batch.pylist("advantages")] == pytest.approx(
        [advantage, -advantage, 0.0, 0.0], rel=1e-6
    )


@pytest.mark.parametrize(("drop", "states"), [(True, [0, 0, 3, 3]), (False, [0, 0, 0, 0])])
def test_drop_constant_groups_arrives(drop: bool, states: list[int]) -> None:
    prepared = GRPO(GRPOSettings(drop_constant_groups=drop), temperature=1.0).prepare(rollout())
    assert prepared.batch.pylist("state") == states


def half(rewards, group_ids, ok):
    """An advantage function of a user's."""
    return np.full(len(rewards), 0.5)


def test_a_users_function_comes_by_value_by_path_or_by_setting() -> None:
    path = f"{half.__module__}:half"
    for algorithm in (
        GRPO(GRPOSettings(), temperature=1.0, advantage_function=half),
        GRPO(GRPOSettings(), temperature=1.0, advantage_function=path),
        GRPO(GRPOSettings(advantage_function=path), temperature=1.0),
    ):
        prepared = algorithm.prepare(rollout())
        assert [row[-1] for row in prepared.batch.pylist("advantages")] == [0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ConfigError, match="is set and a function is given too"):
        GRPO(GRPOSettings(advantage_function=path), temperature=1.0, advantage_function=half)
    with pytest.raises(ConfigError, match="no_such:thing"):
        GRPO(GRPOSettings(advantage_function="no_such:thing"), temperature=1.0)


@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean"])
def test_one_step_from_rewards_to_gradient_by_hand(normalization) -> None:
    """Two responses of 2 and 3 tokens with Dr. GRPO advantages of 0.5 and -0.5; the other group is constant and drops out."""
    algorithm = GRPO(GRPOSettings(normalize_std=False, normalization=normalization), temperature=1.0)
    prepared = algorithm.prepare(rollout()).batch
    rows = prepared.filter(prepared.numpy("state") == 0)
    mask = rows.ragged("loss_mask")
    logprobs = rows.ragged("rollout_logprobs").values.clone().double().requires_grad_()
    columns = {name: rows.ragged(name).values for name in algorithm.loss.columns}
    weights = compute_token_weights(mask.values, mask.offsets, normalization)
    result = algorithm.loss(logprobs, torch.zeros(7), mask.values, weights, columns)
    lengths = [int(row.sum()) for row in rows.arrays("loss_mask")]
    (result.total / compute_denominator(lengths, normalization)).backward()
    first, second = (-0.5 / 5, 0.5 / 5) if normalization == "token_mean" else (-0.5 / 2 / 2, 0.5 / 3 / 2)
    assert logprobs.grad.tolist() == pytest.approx([0, first, first, 0, second, second, second], rel=1e-12)
