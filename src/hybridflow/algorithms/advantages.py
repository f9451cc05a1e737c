"""How much better than its siblings each sample is. S: samples of a batch, in any order. P: prompt groups.

An advantage function is any function of (rewards, group ids, ok mask); those of GRPO and RLOO are two of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybridflow.config import ConfigError, HybridflowError
from hybridflow.config.functions import import_named

AdvantageFunction: TypeAlias = Callable[[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]], Any]
"""`function(rewards_S, group_ids_S, ok_S) -> advantages_S`, finite floats.

rewards_S is NaN where ok_S is False, so that a row which takes no part cannot slip into a mean unseen. Groups come whole,
uneven in size where rows are not ok. What is returned for a row that is not ok is not used.
"""

EQUAL_REWARDS = 1e-6
"""Rewards of a group count as equal when they spread over no more than this share of the largest of them."""


@dataclass(frozen=True)
class GroupSummary:
    """Statistics of each group's ok rows.

    index_S:    group of each row, 0..P-1.
    count_P:    ok rows. mean_P, std_P: float64, 0 where there are none; std is the sample's (n - 1), 0 for a constant group.
    constant_P: True where all ok rewards are equal (one alone is), up to `EQUAL_REWARDS`; False without an ok row.
    """

    index_S: NDArray[np.int64]
    count_P: NDArray[np.int64]
    mean_P: NDArray[np.float64]
    std_P: NDArray[np.float64]
    constant_P: NDArray[np.bool_]


def summarize_groups(
    rewards_S: NDArray[np.float64], group_ids_S: NDArray[np.int64], ok_S: NDArray[np.bool_]
) -> GroupSummary:
    """Statistics of each group over its ok rows alone, in float64.

    Rows of a group need not be adjacent, nor groups complete. Rewards of rows that are not ok are not read; NaN is fine there.
    """
    ids_P, index_S = np.unique(group_ids_S, return_inverse=True)
    rewards, index = np.asarray(rewards_S, np.float64)[ok_S], index_S[ok_S]
    count_P = np.bincount(index, minlength=ids_P.size)
    divisor_P = np.maximum(count_P, 1)
    mean_P = np.bincount(index, rewards, minlength=ids_P.size) / divisor_P
    lowest_P, highest_P = np.full(ids_P.size, np.inf), np.full(ids_P.size, -np.inf)
    np.minimum.at(lowest_P, index, rewards)
    np.maximum.at(highest_P, index, rewards)
    # The deviations of equal rewards are rounding noise, and dividing by their spread would make it a signal of size 1.
    constant_P = highest_P - lowest_P <= EQUAL_REWARDS * np.maximum(abs(lowest_P), abs(highest_P))
    constant_P &= count_P > 0
    squares_P = np.bincount(index, (rewards - mean_P[index]) ** 2, minlength=ids_P.size)
    std_P = np.sqrt(squares_P / np.maximum(count_P - 1, 1))
    return GroupSummary(index_S, count_P, mean_P, np.where(constant_P, 0.0, std_P), constant_P)


def compute_group_advantages(
    rewards_S: NDArray[np.float64],
    group_ids_S: NDArray[np.int64],
    ok_S: NDArray[np.bool_],
    *,
    normalize_std: bool,
    leave_one_out: bool = False,
) -> NDArray[np.float64]:
    """Reward of each sample minus the mean of its prompt group, or of its siblings alone (`leave_one_out`); divided by the group's
    spread where `normalize_std`.

    rewards_S: [S] float64. group_ids_S: [S] int64. ok_S: [S] bool, True takes part.
    returns:   [S] float64; 0 where not ok; sums to 0 over the ok rows of each group.

    Source: GRPO, arXiv:2402.03300 (outcome supervision); `normalize_std=False` is Dr. GRPO, arXiv:2503.20783; `leave_one_out` is RLOO,
    arXiv:2402.14740. With n rows in a group, the last is n / (n - 1) times the difference to the mean of all.
    Differs from all: a group of equal rewards gives exact zeros, without an epsilon; so does a row without siblings. The spread is the
    sample standard deviation (n - 1), as in verl and TRL; the paper leaves it open.
    """
    groups = summarize_groups(rewards_S, group_ids_S, ok_S)
    used_S = ok_S & ~groups.constant_P[groups.index_S]
    advantages_S = np.where(used_S, rewards_S - groups.mean_P[groups.index_S], 0.0)
    if leave_one_out:
        advantages_S *= (groups.count_P / np.maximum(groups.count_P - 1, 1))[groups.index_S]
    if not normalize_std:
        return advantages_S
    return np.divide(advantages_S, groups.std_P[groups.index_S], out=np.zeros_like(advantages_S), where=used_S)


def keep_rewards(
    rewards_S: NDArray[np.float64], group_ids_S: NDArray[np.int64], ok_S: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The rewards themselves, without a baseline: [S] float64, 0 where not ok."""
    return np.where(ok_S, rewards_S, 0.0)


class AdvantageError(HybridflowError, ValueError):
    """An advantage function returned what cannot be trained on."""


def compute_advantages(
    function: AdvantageFunction,
    rewards_S: NDArray[np.float64],
    group_ids_S: NDArray[np.int64],
    ok_S: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """What `function` says of the ok rows, checked, and 0 for all others: [S] float32.

    The function gets arrays of its own, and is not called when no row is ok.
    Raises AdvantageError naming function and row if it returns another number of values, or one that is not finite.
    """
    if not ok_S.any():
        return np.zeros(ok_S.size, np.float32)
    hidden_S = np.where(ok_S, rewards_S, np.nan)
    returned = np.asarray(function(hidden_S, group_ids_S.copy(), ok_S.copy()), dtype=np.float64)
    if returned.shape != ok_S.shape:
        raise AdvantageError(
            f"advantage function '{_name(function)}' returned shape {returned.shape} for {ok_S.size} rows: return one float per row"
        )
    with np.errstate(over="ignore"):  # What float32 does not hold becomes infinite and is told below.
        advantages_S = np.where(ok_S, returned, 0.0).astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(advantages_S))
    if wrong.size:
        raise AdvantageError(
            f"advantage function '{_name(function)}' returned {returned[wrong[0]]} at row {wrong[0]} (group {group_ids_S[wrong[0]]}): "
            "return finite float32 values, and leave rows out where the ok mask is False (their reward is NaN)"
        )
    return advantages_S


def resolve_advantage_function(function: str | AdvantageFunction) -> AdvantageFunction:
    """The function itself, imported where it is given as 'pkg.mod:fn' or 'path/to/file.py:fn'.

    Raises ConfigError in one sentence if it is not there or cannot be called with three arguments.
    """
    resolved = import_named(function, "algorithm.advantage_function") if isinstance(function, str) else function
    if not callable(resolved):
        raise ConfigError(
            f"advantage_function '{function}' is {type(resolved).__name__}, not a function: name a function"
        )
    try:
        inspect.signature(resolved).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(
            f"advantage_function '{_name(resolved)}' cannot be called as function(rewards, group_ids, ok): {error}; take these three"
        ) from error
    return resolved


def _name(function: AdvantageFunction) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return function.__qualname__ if inspect.isroutine(function) else repr(function)
