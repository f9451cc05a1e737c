"""From scored samples to rows that a policy loss can train on. S: samples of a batch. P: prompt groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.algorithms.advantages import AdvantageFunction, compute_advantages, summarize_groups
from hybridflow.algorithms.filters import compute_constant_groups
from hybridflow.batch import Batch
from hybridflow.columns import Ragged
from hybridflow.types import Metrics, RowState, maximum, mean, total


class Prepared(NamedTuple):
    """What `Objective.prepare` returns: the rows as the loss reads them, and what was counted on the way."""

    batch: Batch
    metrics: Metrics


def keep_all(batch: Batch) -> Prepared:
    """The rows as they are, counted by state: the `prepare` of supervised fine-tuning."""
    return Prepared(batch, _count_states(batch.numpy("state")))


def prepare_policy_batch(
    batch: Batch, *, advantage_function: AdvantageFunction, drop_constant_groups: bool
) -> Prepared:
    """Rollout and scores side by side become rows with `advantages`; a pure function, for batches of whole groups.

    batch:   columns `tokens`, `loss_mask`, `group_id`, `state`, `reward`, `finish_reason`.
    returns: the same rows in the same order with `state` renewed and a column `advantages`: the row's advantage at every
             token with `loss_mask` 1, else 0.

    An ok row without a counted token becomes EMPTY; one whose reward is null or not finite becomes FAILED; then
    `drop_constant_groups` makes groups of equal rewards REJECTED. Only rows that are still OK enter baselines.

    Metrics: `reward/mean` is over rows with a reward, before groups are dropped; `reward/std` is the mean over their groups
    of the standard deviation within the group, so that it merges over shards. `response/*` leave failed rollouts out.
    """
    offsets = batch.ragged("loss_mask").offsets.numpy()
    mask = batch.ragged("loss_mask").values.numpy()
    lengths_S = _sum_rows(mask, offsets)
    rollout_state_S, rewards_S, group_ids_S = batch.numpy("state"), batch.numpy("reward"), batch.numpy("group_id")
    scored_state_S = _score_states(rollout_state_S, rewards_S, lengths_S)
    scored_S = scored_state_S == RowState.OK
    constant_S = compute_constant_groups(rewards_S, group_ids_S, scored_S)
    state_S = np.where(constant_S & drop_constant_groups, RowState.REJECTED, scored_state_S).astype(np.int8)
    advantages_S = compute_advantages(advantage_function, rewards_S, group_ids_S, state_S == RowState.OK)
    unscored_S = (scored_state_S == RowState.FAILED) & (rollout_state_S != RowState.FAILED)
    metrics = (
        _count_states(state_S)
        | {"reward/errors": total(int(unscored_S.sum()))}
        | _reward_metrics(rewards_S, group_ids_S, scored_S)
        | _response_metrics(lengths_S, batch.numpy("finish_reason"), rollout_state_S != RowState.FAILED)
    )
    advantages = _spread(advantages_S, mask, offsets)
    return Prepared(batch.with_column("state", state_S).with_column("advantages", advantages), metrics)


def _score_states(
    state_S: NDArray[np.int8], rewards_S: NDArray[np.float64], lengths_S: NDArray[np.int64]
) -> NDArray[np.int8]:
    ok_S = state_S == RowState.OK
    empty_S = ok_S & (lengths_S == 0)
    failed_S = ok_S & ~empty_S & ~np.isfinite(rewards_S)
    return np.select([empty_S, failed_S], [RowState.EMPTY, RowState.FAILED], state_S).astype(np.int8)


def _sum_rows(values: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    # Differences of running sums, because reduceat gives an empty row the value of its neighbour.
    return np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[offsets])


def _spread(advantages_S: NDArray[np.float32], mask: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Ragged:
    values = np.repeat(advantages_S, np.diff(offsets))
    values[mask == 0] = 0.0
    return Ragged(torch.from_numpy(values), torch.from_numpy(offsets.copy()))


def _count_states(state_S: NDArray[np.int8]) -> Metrics:
    return {f"rows/{state.name.lower()}": total(int((state_S == state).sum())) for state in RowState}


def _reward_metrics(
    rewards_S: NDArray[np.float64], group_ids_S: NDArray[np.int64], scored_S: NDArray[np.bool_]
) -> Metrics:
    groups = summarize_groups(rewards_S, group_ids_S, scored_S)
    present_P = groups.count_P > 0
    metrics = {"groups/total": total(present_P.sum()), "groups/constant": total(groups.constant_P.sum())}
    if present_P.any():
        rewards = rewards_S[scored_S]
        metrics["reward/mean"] = mean(rewards.mean(), rewards.size)
        metrics["reward/std"] = mean(groups.std_P[present_P].mean(), present_P.sum())
    return metrics


def _response_metrics(
    lengths_S: NDArray[np.int64], finish_S: NDArray[np.object_], sampled_S: NDArray[np.bool_]
) -> Metrics:
    num_sampled = int(sampled_S.sum())
    if not num_sampled:
        return {}
    return {
        "response/length_mean": mean(lengths_S[sampled_S].mean(), num_sampled),
        "response/length_max": maximum(lengths_S[sampled_S].max()),
        "response/cut_off": mean((finish_S[sampled_S] == "length").mean(), num_sampled),
    }
