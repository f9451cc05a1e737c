"""Faults that post-training systems have really had in losses, advantages and rewards, planted one by one: each turns a test red.

A plant takes the place of a function wherever the package or these tests hold it. Kinds of fault, and what holds them:

2.  statistics of a rank's own part: `first_part` (and in several processes, test_algorithm_layouts).
3.  a denominator that counts what the mask does not: `all_rows`.
6.  length bias, both ways: `each_token_alike`, `each_row_alike`.
7.  KL: `k1_differentiated`, `k3_as_reward`, `whole_row` (no reward to go), an exponential that overflows.
8.  a ratio that is not 1 at the first update: `own_temperature`.
11. what belongs to an empty response lands on its neighbour: `at_the_end`.
12. baselines: `failed_as_zero`, `neighbours`, rounding as signal (within a group, over the batch).
16. a verifier that fails is a 0, hangs, or blames another row: `failed_counts_zero`, `patient`, `first_is_blamed`, `for_everybody`.
35. metrics without their weights: `unweighted`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_algorithms_advantages as advantage_tests
import test_algorithms_kl as kl_tests
import test_algorithms_losses as loss_tests
import test_algorithms_policy_gradient as paper_tests
import test_algorithms_prepare as prepare_tests
import test_rewards_components as reward_tests
import torch

from hybridflow.algorithms import PolicyLoss, advantages, kl, losses, moments, prepare
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.columns import Ragged
from hybridflow.rewards.pool import RewardPool
from hybridflow.rewards.workers import ProcessGroup
from hybridflow.types import Metric, RowState, mean

Check = Callable[[], None]


def plant(patch: pytest.MonkeyPatch, original: Any, faulty: Any) -> None:
    """The faulty one in place of the original, under every name by which a module has it."""
    held = [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith(("hybridflow.", "test_algorithms", "test_rewards")) and key != __name__
        for name, value in vars(module).items()
        if value is original
    ]
    assert held
    for module, name in held:
        patch.setattr(module, name, faulty)


def first_part(parts: Any) -> Any:
    return ORIGINAL_MERGE(list(parts)[:1])


def all_rows(lengths: Any, normalization: str) -> float:
    return float(len(lengths)) if normalization != "token_mean" else ORIGINAL_DENOMINATOR(lengths, "token_mean")


def each_token_alike(mask_T: Any, cu_seqlens: Any, normalization: Any) -> Any:
    return ORIGINAL_WEIGHTS(mask_T, cu_seqlens, "token_mean")


def each_row_alike(mask_T: Any, cu_seqlens: Any, normalization: Any) -> Any:
    return ORIGINAL_WEIGHTS(mask_T, cu_seqlens, "sequence_mean")


def k1_differentiated(logprobs_T: Any, reference_T: Any, estimator: Any) -> Any:
    return logprobs_T - reference_T if estimator == "k1" else ORIGINAL_KL(logprobs_T, reference_T, estimator)


def k3_as_reward(batch: Any, term: Any, tokens: Any) -> Any:
    """The estimator with the right value, and in a reward the wrong gradient."""
    if term is None:
        return ORIGINAL_SUM(batch, term, tokens)
    x = batch.ragged(term.logprobs).values.numpy() - batch.ragged("ref_logprobs").values.numpy()
    k3 = Ragged(torch.from_numpy(np.expm1(-x) + x), batch.ragged("tokens").offsets)
    zeros = Ragged(torch.zeros(x.size), batch.ragged("tokens").offsets)
    return ORIGINAL_SUM(batch.with_column(term.logprobs, k3).with_column("ref_logprobs", zeros), term, tokens)


def whole_row(coefficient: float, logprobs: str, per_token: bool) -> Any:
    return ORIGINAL_REWARD_KL(coefficient, logprobs, per_token=False)


def own_temperature(self: PolicyGradient, settings: Any, sampling: Any, *function: Any) -> None:
    ORIGINAL_INIT(self, settings, type(sampling)(max_new_tokens=sampling.max_new_tokens), *function)


def at_the_end(self: Any, values_S: Any) -> Any:
    values_T = ORIGINAL_SPREAD(self, values_S)
    if values_T.size:
        values_T[self.offsets[1:] - 1] = values_S
    return values_T


def failed_as_zero(rewards_S: Any, group_ids_S: Any, ok_S: Any) -> Any:
    return ORIGINAL_GROUPS(np.where(ok_S, rewards_S, 0.0), group_ids_S, np.ones_like(ok_S))


def neighbours(rewards_S: Any, group_ids_S: Any, ok_S: Any) -> Any:
    """Groups as they come, each as large as the first."""
    size = int((group_ids_S == group_ids_S[:1]).sum()) or 1
    return ORIGINAL_GROUPS(rewards_S, np.arange(len(group_ids_S)) // size, ok_S)


def failed_counts_zero(self: RewardPool, row: int, route: str, found: Any) -> Any:
    filled = {key: (0.0, None) if value is None else (value, error) for key, (value, error) in found.items()}
    return ORIGINAL_COMBINE(self, row, route, filled)


def patient(self: ProcessGroup, name: str) -> float:
    return 3.0


def first_is_blamed(self: ProcessGroup, *args: Any) -> None:
    self._parameters = {name: {**one, "is_async": False} for name, one in self._parameters.items()}
    ORIGINAL_BURY(self, *args)


def for_everybody(self: RewardPool, name: str, route: str) -> bool:
    return True


def unweighted(value: float, weight: float = 1.0) -> Any:
    return Metric(float(value))


ORIGINAL_MERGE, ORIGINAL_DENOMINATOR = moments.merge_moments, losses.compute_denominator
ORIGINAL_WEIGHTS, ORIGINAL_KL, ORIGINAL_SUM = losses.compute_token_weights, kl.compute_kl, prepare._sum_along_rows
ORIGINAL_REWARD_KL, ORIGINAL_SPREAD, ORIGINAL_GROUPS = (
    prepare.RewardKL,
    prepare._Tokens.spread,
    advantages.summarize_groups,
)
ORIGINAL_INIT, ORIGINAL_COMBINE, ORIGINAL_BURY = PolicyGradient.__init__, RewardPool._combine, ProcessGroup._bury

REPLACED: dict[str, tuple[Any, Any, Check]] = {
    "2 first_part": (
        ORIGINAL_MERGE,
        first_part,
        lambda: paper_tests.test_no_split_of_the_groups_over_ranks_changes_the_gradient("reinforce_plus_plus"),
    ),
    "3 all_rows": (
        ORIGINAL_DENOMINATOR,
        all_rows,
        lambda: loss_tests.test_policy_loss_matches_the_loop_by_hand(PolicyLoss(normalization="sequence_mean"), 0),
    ),
    "6 each_token_alike": (
        ORIGINAL_WEIGHTS,
        each_token_alike,
        lambda: loss_tests.test_policy_loss_matches_the_loop_by_hand(PolicyLoss(normalization="sequence_mean"), 0),
    ),
    "6 each_row_alike": (
        ORIGINAL_WEIGHTS,
        each_row_alike,
        lambda: loss_tests.test_policy_loss_matches_the_loop_by_hand(PolicyLoss(), 0),
    ),
    "7 k1_differentiated": (
        ORIGINAL_KL,
        k1_differentiated,
        lambda: kl_tests.test_values_and_gradients_are_those_of_the_exact_kl_of_32_words("k1", 0, torch.float64),
    ),
    "7 k3_as_reward": (
        ORIGINAL_SUM,
        k3_as_reward,
        lambda: paper_tests.test_each_paper_from_rewards_to_gradient_by_hand("rloo", 0),
    ),
    "7 whole_row": (
        ORIGINAL_REWARD_KL,
        whole_row,
        lambda: paper_tests.test_each_paper_from_rewards_to_gradient_by_hand("reinforce_plus_plus", 0),
    ),
    "12 failed_as_zero": (
        ORIGINAL_GROUPS,
        failed_as_zero,
        lambda: advantage_tests.test_a_row_that_is_not_ok_does_not_move_its_siblings(False),
    ),
    "12 neighbours": (ORIGINAL_GROUPS, neighbours, advantage_tests.test_interleaved_groups_are_told_apart_by_id),
    "35 unweighted": (
        mean,
        unweighted,
        reward_tests.test_the_mean_of_each_component_is_a_metric_that_merges_over_shards,
    ),
}
SET: dict[str, tuple[Any, str, Any, Check]] = {
    "7 overflow": (kl, "MAX_LOG_RATIO", 1e9,
                   kl_tests.test_k3_holds_value_and_slope_where_the_exponential_would_overflow),
    "8 own_temperature": (PolicyGradient, "__init__", own_temperature,
                          paper_tests.test_temperature_is_that_of_the_sampling_and_above_zero),
    "11 at_the_end": (prepare._Tokens, "spread", at_the_end,
                      prepare_tests.test_an_empty_response_gets_nothing_and_gives_nothing_to_its_neighbours),
    "12 rounding in a group": (advantages, "EQUAL_REWARDS", 0.0,
                               lambda: advantage_tests.test_equal_rewards_give_exact_zeros([0.3, 0.1 + 0.2, 0.3, 0.3], True)),
    "12 rounding over a batch": (prepare, "EQUAL_REWARDS", 0.0,
                                 lambda: paper_tests.test_equal_rewards_over_the_whole_batch_are_no_signal([0.3, 0.30000004] * 3)),
    "16 failed_counts_zero": (
        RewardPool, "_combine", failed_counts_zero,
        lambda: reward_tests.test_a_component_that_fails_fails_its_row_by_name_and_no_other("raise", "judge: ValueError"),
    ),
    "16 patient": (
        ProcessGroup, "_find_limit_s", patient,
        lambda: reward_tests.test_a_component_that_fails_fails_its_row_by_name_and_no_other("hang", "judge: no result within 0.4 s"),
    ),
    "16 first_is_blamed": (ProcessGroup, "_bury", first_is_blamed,
                           lambda: reward_tests.test_what_ends_a_process_of_async_rows_is_the_error_of_its_own_row("hang")),
    "16 for_everybody": (RewardPool, "_is_for", for_everybody,
                         reward_tests.test_the_mean_of_each_component_is_a_metric_that_merges_over_shards),
}  # fmt: skip


@pytest.mark.parametrize("fault", REPLACED)
def test_a_planted_fault_turns_its_test_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, faulty, check = REPLACED[fault]
    check()
    plant(monkeypatch, original, faulty)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("fault", SET)
def test_a_changed_value_turns_its_test_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, faulty, check = SET[fault]
    check()
    monkeypatch.setattr(owner, name, faulty)
    with pytest.raises(AssertionError):
        check()


def test_a_row_that_failed_is_counted_and_takes_no_part() -> None:
    """What holds kind 12 from end to end: the rows of a failed reward, beside those that are ok."""
    result = prepare_tests.prepare(
        [{"group": 1, "reward": 1.0}, {"group": 1, "reward": None}, {"group": 1, "reward": 0.0}]
    )
    assert result.batch.pylist("state") == [RowState.OK, RowState.FAILED, RowState.OK]
    assert [row[-1] for row in result.batch.pylist("advantages")] == [0.5, 0.0, -0.5]
