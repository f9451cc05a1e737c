"""From scored samples to rows that a policy loss can train on. S: samples of a batch. P: prompt groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.algorithms.advantages import (
    EQUAL_REWARDS,
    AdvantageFunction,
    compute_advantages,
    summarize_groups,
)
from hybridflow.algorithms.filters import compute_constant_groups
from hybridflow.algorithms.moments import Moments, compute_moments, merge_moments
from hybridflow.batch import Batch
from hybridflow.columns import REWARD_COMPONENT, Ragged
from hybridflow.types import Metrics, RowState, last, maximum, mean, total


class Prepared(NamedTuple):
    """What `Objective.prepare` returns: the rows as the loss reads them, and what was counted on the way.

    moments: of the advantages at the counted tokens, where these are still to be normalised over all ranks' rows
             (`normalize_advantages`); None leaves them as they are.
    """

    batch: Batch
    metrics: Metrics
    moments: Moments | None = None


@dataclass(frozen=True)
class RewardKL:
    """KL to the reference as a part of the reward: coefficient * (log p_old - log p_ref) is taken off at each counted token.

    logprobs:  column of log p_old. per_token: a token's advantage holds the KL from itself on, not that of the whole row.
    """

    coefficient: float
    logprobs: str
    per_token: bool


def keep_all(batch: Batch) -> Prepared:
    """The rows as they are, counted by state: the `prepare` of supervised fine-tuning."""
    return Prepared(batch, _count_states(batch.numpy("state")))


def prepare_policy_batch(
    batch: Batch,
    *,
    advantage_function: AdvantageFunction,
    drop_constant_groups: bool,
    kl: RewardKL | None = None,
    over_batch: bool = False,
) -> Prepared:
    """Rollout and scores side by side become rows with `advantages`; a pure function, for batches of whole groups.

    batch:      columns `tokens`, `loss_mask`, `group_id`, `state`, `reward`, `finish_reason`; with `kl` those of the log-probabilities.
    over_batch: the advantages are to be normalised over the whole batch of all ranks, which this part of it cannot do by itself.
    returns:    the same rows in the same order with `state` renewed and a column `advantages`: the row's advantage at every
                token with `loss_mask` 1, else 0.

    With `kl`, what advantages and the filter see as reward is the reward less the row's KL. An ok row without a counted token becomes
    EMPTY; one whose reward is null or not finite becomes FAILED; then `drop_constant_groups` makes groups of equal rewards REJECTED.
    Only rows that are still OK enter baselines.

    Metrics: `reward/mean` is over rows with a reward, without KL, before groups are dropped; `reward/std` is the mean over their groups
    of the standard deviation within the group, so that it merges over shards. `reward/<name>` is over the rows which that one of several
    rewards has scored, `reward/kl` over the counted tokens of rows with a reward. `response/*` leave failed rollouts out.
    """
    tokens = _Tokens.of(batch)
    rewards_S, group_ids_S = batch.numpy("reward"), batch.numpy("group_id")
    before_T, kl_S = _sum_along_rows(batch, kl, tokens)
    shaped_S = rewards_S - kl_S
    scored_state_S = _score_states(batch.numpy("state"), shaped_S, tokens.lengths_S)
    constant_S = compute_constant_groups(shaped_S, group_ids_S, scored_state_S == RowState.OK)
    state_S = np.where(constant_S & drop_constant_groups, RowState.REJECTED, scored_state_S).astype(np.int8)
    ok_S = state_S == RowState.OK
    advantages_S = compute_advantages(advantage_function, shaped_S, group_ids_S, ok_S)
    later_T = before_T if kl and kl.per_token else 0.0
    counted_T = tokens.counted(ok_S)
    advantages_T = np.where(counted_T, tokens.spread(advantages_S) + later_T, 0.0).astype(np.float32)
    metrics = _count_states(state_S) | _reward_metrics(batch, shaped_S, scored_state_S) | _component_metrics(batch)
    metrics |= _kl_metrics(kl, kl_S, tokens.lengths_S, scored_state_S == RowState.OK)
    metrics |= _response_metrics(batch, tokens.lengths_S)
    renewed = batch.with_column("state", state_S).with_column("advantages", tokens.ragged(advantages_T))
    return Prepared(renewed, metrics, compute_moments(advantages_T[counted_T]) if over_batch else None)


def normalize_advantages(prepared: Prepared, parts: Sequence[Moments]) -> Prepared:
    """The rows with advantages of mean 0 and standard deviation 1 over the counted tokens of all parts of the batch, if they are to be.

    parts: the moments of each part of the batch, this one's too; the same on all ranks, so that each comes to the same numbers.

    Source: REINFORCE++, arXiv:2501.03262. Differs: a spread that is rounding beside the advantages themselves
    (`EQUAL_REWARDS`) gives exact zeros, without an epsilon. The spread is that of the whole population.
    """
    if prepared.moments is None:
        return prepared
    batch, whole = prepared.batch, merge_moments(parts)
    tokens = _Tokens.of(batch)
    counted_T = tokens.counted(batch.numpy("state") == RowState.OK)
    is_flat = whole.std <= EQUAL_REWARDS * np.hypot(whole.mean, whole.std)
    values_T = batch.ragged("advantages").values.numpy().astype(np.float64)
    scaled_T = np.where(counted_T & (not is_flat), (values_T - whole.mean) / (whole.std or 1.0), 0.0)
    told: Metrics = {"advantages/mean": last(whole.mean), "advantages/std": last(whole.std)} if whole.num else {}
    renewed = batch.with_column("advantages", tokens.ragged(scaled_T.astype(np.float32)))
    return Prepared(renewed, prepared.metrics | told)


@dataclass(frozen=True)
class _Tokens:
    """Where the rows' tokens lie, and which of them count. T: all of them, one row after the other."""

    offsets: NDArray[np.int64]
    mask_T: NDArray[np.uint8]

    @classmethod
    def of(cls, batch: Batch) -> _Tokens:
        column = batch.ragged("loss_mask")
        return cls(column.offsets.numpy(), column.values.numpy())

    @property
    def lengths_S(self) -> NDArray[np.int64]:
        """Tokens of each row that count."""
        # Differences of running sums, because reduceat gives an empty row the value of its neighbour.
        return np.diff(np.concatenate([[0], np.cumsum(self.mask_T, dtype=np.int64)])[self.offsets])

    def spread(self, values_S: NDArray[Any]) -> NDArray[Any]:
        """Each row's value at all of its tokens."""
        return np.repeat(values_S, np.diff(self.offsets))

    def counted(self, ok_S: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """True at the tokens that count, of rows that are ok."""
        return (self.mask_T == 1) & self.spread(ok_S)

    def ragged(self, values_T: NDArray[np.float32]) -> Ragged:
        """A column of these values."""
        return Ragged(torch.from_numpy(values_T), torch.from_numpy(self.offsets.copy()))


def _sum_along_rows(
    batch: Batch, kl: RewardKL | None, tokens: _Tokens
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What is taken off the reward for KL: at each token of [T] the sum of what stands before it in its row, and of each row of [S] all."""
    before_T, sum_S = np.zeros(tokens.mask_T.size), np.zeros(len(tokens.offsets) - 1)
    if kl is None:
        return before_T, sum_S
    ours, theirs = (batch.ragged(name).values.numpy().astype(np.float64) for name in (kl.logprobs, "ref_logprobs"))
    values_T = np.where(tokens.mask_T == 1, kl.coefficient * (ours - theirs), 0.0)
    # Row by row, so that a value which is not finite stays in its row.
    for row, (start, end) in enumerate(pairwise(tokens.offsets.tolist())):
        running = np.cumsum(values_T[start:end])
        before_T[start + 1 : end] = running[:-1]
        sum_S[row] = running[-1] if running.size else 0.0
    return before_T, sum_S


def _score_states(
    state_S: NDArray[np.int8], rewards_S: NDArray[np.float64], lengths_S: NDArray[np.int64]
) -> NDArray[np.int8]:
    ok_S = state_S == RowState.OK
    empty_S = ok_S & (lengths_S == 0)
    failed_S = ok_S & ~empty_S & ~np.isfinite(rewards_S)
    return np.select([empty_S, failed_S], [RowState.EMPTY, RowState.FAILED], state_S).astype(np.int8)


def _count_states(state_S: NDArray[np.int8]) -> Metrics:
    return {f"rows/{state.name.lower()}": total(int((state_S == state).sum())) for state in RowState}


def _reward_metrics(batch: Batch, shaped_S: NDArray[np.float64], scored_state_S: NDArray[np.int8]) -> Metrics:
    scored_S, rewards_S = scored_state_S == RowState.OK, batch.numpy("reward")
    failed_S = (scored_state_S == RowState.FAILED) & (batch.numpy("state") != RowState.FAILED)
    groups = summarize_groups(rewards_S, batch.numpy("group_id"), scored_S)
    as_filtered = summarize_groups(shaped_S, batch.numpy("group_id"), scored_S)
    present_P = groups.count_P > 0
    metrics = {
        "reward/errors": total(int((failed_S & ~np.isfinite(rewards_S)).sum())),
        "groups/total": total(present_P.sum()),
        "groups/constant": total(as_filtered.constant_P.sum()),
    }
    if present_P.any():
        metrics["reward/mean"] = mean(rewards_S[scored_S].mean(), scored_S.sum())
        metrics["reward/std"] = mean(groups.std_P[present_P].mean(), present_P.sum())
    return metrics


def _component_metrics(batch: Batch) -> Metrics:
    found = {name: batch.numpy(name) for name in batch.column_names if name.startswith(REWARD_COMPONENT)}
    scored = {name: values[np.isfinite(values)] for name, values in found.items()}
    return {name: mean(values.mean(), values.size) for name, values in scored.items() if values.size}


def _kl_metrics(
    kl: RewardKL | None, kl_S: NDArray[np.float64], lengths_S: NDArray[np.int64], scored_S: NDArray[np.bool_]
) -> Metrics:
    num_tokens = lengths_S[scored_S].sum()
    if kl is None or not num_tokens:
        return {}
    return {"reward/kl": mean(kl_S[scored_S].sum() / kl.coefficient / num_tokens, num_tokens)}


def _response_metrics(batch: Batch, lengths_S: NDArray[np.int64]) -> Metrics:
    sampled_S = batch.numpy("state") != RowState.FAILED
    num_sampled = int(sampled_S.sum())
    if not num_sampled:
        return {}
    return {
        "response/length_mean": mean(lengths_S[sampled_S].mean(), num_sampled),
        "response/length_max": maximum(lengths_S[sampled_S].max()),
        "response/cut_off": mean((batch.numpy("finish_reason")[sampled_S] == "length").mean(), num_sampled),
    }
