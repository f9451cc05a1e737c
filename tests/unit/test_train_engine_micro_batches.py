"""The micro-batch planner: its docstring's invariants, each over random rows."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.train_engine.micro_batches import MicroBatch, compute_row_costs, plan_micro_batches

row_lengths = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), max_size=60)
budgets = st.integers(1, 400)
few = settings(deadline=None, max_examples=60)
hidden_sizes = st.sampled_from([1, 8, 4096])


def plan(lengths: list[int], max_tokens: int, hidden_size: int = 64) -> tuple[MicroBatch, ...]:
    lengths_S = np.array(lengths, dtype=np.int64)
    return plan_micro_batches(lengths_S, compute_row_costs(lengths_S, hidden_size), max_tokens)


@few
@given(row_lengths, budgets, hidden_sizes)
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int], max_tokens: int, hidden_size: int) -> None:
    rows = [row for micro_batch in plan(lengths, max_tokens, hidden_size) for row in micro_batch.rows]
    assert sorted(rows) == list(range(len(lengths)))


@few
@given(row_lengths, budgets, hidden_sizes)
def test_the_budget_holds_unless_one_row_alone_exceeds_it(
    lengths: list[int], max_tokens: int, hidden_size: int
) -> None:
    for micro_batch in plan(lengths, max_tokens, hidden_size):
        assert micro_batch.rows
        assert micro_batch.num_tokens == sum(lengths[row] for row in micro_batch.rows)
        assert micro_batch.num_tokens <= max_tokens or len(micro_batch.rows) == 1


@few
@given(row_lengths, budgets, hidden_sizes)
def test_no_better_balance_is_one_move_away(lengths: list[int], max_tokens: int, hidden_size: int) -> None:
    micro_batches = plan(lengths, max_tokens, hidden_size)
    for heavy in micro_batches:
        shortest = min(lengths[row] for row in heavy.rows)
        (cost,) = compute_row_costs(np.array([shortest]), hidden_size)
        for light in micro_batches:
            if heavy.cost - light.cost > cost * (1 + 1e-9):
                assert light.num_tokens + shortest > max_tokens


@few
@given(row_lengths, budgets, hidden_sizes)
def test_there_are_not_many_more_micro_batches_than_needed(
    lengths: list[int], max_tokens: int, hidden_size: int
) -> None:
    needed = sum(min(length, max_tokens) for length in lengths) / max_tokens
    assert needed <= len(plan(lengths, max_tokens, hidden_size)) + 1e-9
    assert len(plan(lengths, max_tokens, hidden_size)) <= 2 * needed + 1


@few
@given(row_lengths, budgets, hidden_sizes)
def test_the_plan_is_deterministic_and_in_canonical_order(
    lengths: list[int], max_tokens: int, hidden_size: int
) -> None:
    micro_batches = plan(lengths, max_tokens, hidden_size)
    assert micro_batches == plan(list(lengths), max_tokens, hidden_size)
    assert all(list(micro_batch.rows) == sorted(micro_batch.rows) for micro_batch in micro_batches)
    keys = [(-micro_batch.cost, micro_batch.rows[0]) for micro_batch in micro_batches]
    assert keys == sorted(keys)


def test_one_row_longer_than_the_budget_stands_alone_and_adds_no_others() -> None:
    micro_batches = plan([10_000] + [100] * 10, 1000)
    assert [micro_batch.rows for micro_batch in micro_batches] == [(0,), tuple(range(1, 11))]


def test_long_rows_are_balanced_by_cost_not_by_count() -> None:
    micro_batches = plan([4096, 4096] + [512] * 16, 8192, hidden_size=64)
    assert len(micro_batches) == 2
    assert [sum(row < 2 for row in micro_batch.rows) for micro_batch in micro_batches] == [1, 1]


def test_row_costs_grow_with_the_square_of_long_rows() -> None:
    short, long = compute_row_costs(np.array([1, 12 * 64]), 64)
    assert short == pytest.approx(1.0, rel=2e-3)
    assert long == 2 * 12 * 64


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="budget of 0 tokens"):
        plan([1], 0)
    with pytest.raises(ValueError, match="row 1 has 0 tokens"):
        plan([1, 0], 10)


def test_planning_is_quick_and_close_to_the_fewest() -> None:
    lengths = np.random.default_rng(0).integers(100, 4096, size=4096)
    start_s = time.perf_counter()
    micro_batches = plan_micro_batches(lengths, compute_row_costs(lengths, 1024), 16384)
    assert time.perf_counter() - start_s < 1.0
    assert len(micro_batches) < 1.1 * lengths.sum() / 16384
