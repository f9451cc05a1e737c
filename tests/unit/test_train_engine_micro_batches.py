"""The cost of rows and the micro-batch planner: their docstrings' invariants, each over random rows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hybridflow.models import LanguageModel, Packed, fresh_model
from hybridflow.models.attention import AttentionForm, AttentionPlan
from hybridflow.train_engine.micro_batches import (
    MicroBatch,
    ModelWork,
    compute_model_work,
    compute_row_costs,
    pad_plan,
    plan_micro_batches,
)

row_lengths = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 300)), max_size=60)
budgets = st.integers(1, 400)
few = settings(deadline=None, max_examples=60)
works = st.builds(
    ModelWork,
    matrices=st.sampled_from([24, 24 * 64, 10**9]),
    attention=st.sampled_from([0, 2, 4096]),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 20), st.just(10**6)), min_size=1, max_size=4).map(tuple),
)
WORK = ModelWork(matrices=12 * 64 * 64, attention=2 * 64, windows=(None,))
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}


def plan(lengths: list[int], max_tokens: int, work: ModelWork = WORK, min_parts: int = 1) -> tuple[MicroBatch, ...]:
    lengths_S = np.array(lengths, dtype=np.int64)
    return plan_micro_batches(lengths_S, compute_row_costs(lengths_S, work), max_tokens, min_parts)


@few
@given(row_lengths, budgets, works, st.integers(1, 12))
def test_every_row_is_in_exactly_one_micro_batch(
    lengths: list[int], max_tokens: int, work: ModelWork, min_parts: int
) -> None:
    rows = [row for micro_batch in plan(lengths, max_tokens, work, min_parts) for row in micro_batch.rows]
    assert sorted(rows) == list(range(len(lengths)))


@few
@given(row_lengths, budgets, works, st.integers(1, 12))
def test_the_budget_holds_unless_one_row_alone_exceeds_it(
    lengths: list[int], max_tokens: int, work: ModelWork, min_parts: int
) -> None:
    for micro_batch in plan(lengths, max_tokens, work, min_parts):
        assert micro_batch.rows
        assert micro_batch.num_tokens == sum(lengths[row] for row in micro_batch.rows)
        assert micro_batch.num_tokens <= max_tokens or len(micro_batch.rows) == 1


@few
@given(row_lengths, budgets, works, st.integers(1, 12))
def test_no_better_balance_is_one_move_away(
    lengths: list[int], max_tokens: int, work: ModelWork, min_parts: int
) -> None:
    micro_batches = plan(lengths, max_tokens, work, min_parts)
    for heavy in micro_batches:
        shortest = min(lengths[row] for row in heavy.rows)
        (cost,) = compute_row_costs(np.array([shortest]), work)
        for light in micro_batches:
            if heavy.cost - light.cost > cost * (1 + 1e-9):
                assert light.num_tokens + shortest > max_tokens


@few
@given(row_lengths, budgets, works, st.integers(1, 12))
def test_there_are_not_many_more_micro_batches_than_needed(
    lengths: list[int], max_tokens: int, work: ModelWork, min_parts: int
) -> None:
    needed = sum(min(length, max_tokens) for length in lengths) / max_tokens
    assert needed <= len(plan(lengths, max_tokens, work, min_parts)) + 1e-9
    assert len(plan(lengths, max_tokens, work, min_parts)) <= max(min_parts, 2 * needed + 1)


@few
@given(row_lengths, budgets, works, st.integers(1, 12))
def test_asking_for_more_micro_batches_gives_no_more_than_asked_or_needed(
    lengths: list[int], max_tokens: int, work: ModelWork, min_parts: int
) -> None:
    needed = len(plan(lengths, max_tokens, work))
    assert needed <= len(plan(lengths, max_tokens, work, min_parts)) <= max(needed, min(min_parts, len(lengths)))


def test_as_many_micro_batches_as_asked_for_where_there_are_rows() -> None:
    rows = [10] * 6
    for min_parts, sizes in [(1, [6]), (2, [3, 3]), (4, [2, 2, 1, 1]), (6, [1] * 6), (9, [1] * 6)]:
        assert [len(micro_batch.rows) for micro_batch in plan(rows, 60, min_parts=min_parts)] == sizes
    assert len(plan(rows, 20, min_parts=2)) == 3
    assert plan([], 20, min_parts=3) == ()


def test_a_plan_is_padded_with_micro_batches_without_rows() -> None:
    (only,) = plan([3, 4], 10)
    nothing = MicroBatch((), 0, 0.0)
    assert pad_plan((only,), 3) == (only, nothing, nothing)
    assert pad_plan((only, only), 1) == (only, only)
    assert pad_plan((), 1) == (nothing,)


@few
@given(row_lengths, budgets, works, st.integers(1, 12))
def test_the_plan_is_deterministic_and_in_canonical_order(
    lengths: list[int], max_tokens: int, work: ModelWork, min_parts: int
) -> None:
    micro_batches = plan(lengths, max_tokens, work, min_parts)
    assert micro_batches == plan(list(lengths), max_tokens, work, min_parts)
    assert all(list(micro_batch.rows) == sorted(micro_batch.rows) for micro_batch in micro_batches)
    keys = [(-micro_batch.cost, micro_batch.rows[0]) for micro_batch in micro_batches]
    assert keys == sorted(keys)


def test_one_row_longer_than_the_budget_stands_alone_and_adds_no_others() -> None:
    micro_batches = plan([10_000] + [100] * 10, 1000)
    assert [micro_batch.rows for micro_batch in micro_batches] == [(0,), tuple(range(1, 11))]


def test_long_rows_are_balanced_by_cost_not_by_count() -> None:
    micro_batches = plan([4096, 4096] + [512] * 16, 8192)
    assert len(micro_batches) == 2
    assert [sum(row < 2 for row in micro_batch.rows) for micro_batch in micro_batches] == [1, 1]


def count_seen(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, one by one."""
    return sum(1 for seer in range(length) for seen in range(seer + 1) if window is None or seer - seen < window)


@few
@given(st.integers(0, 40), works)
def test_a_row_costs_its_tokens_and_the_pairs_that_see_each_other(length: int, work: ModelWork) -> None:
    pairs = sum(count_seen(length, window) for window in work.windows)
    (cost,) = compute_row_costs(np.array([length]), work)
    assert cost == pytest.approx(length + pairs * work.attention / work.matrices, rel=1e-12, abs=0)


@few
@given(st.integers(1, 10**6), st.integers(1, 10**6), works)
def test_a_longer_row_costs_more_and_no_less_than_its_pieces(first: int, second: int, work: ModelWork) -> None:
    nothing, one, other, both = compute_row_costs(np.array([0, first, second, first + second]), work)
    assert nothing == 0 < one < both
    assert both >= (one + other) * (1 - 1e-12)


def test_without_attention_a_row_costs_its_length() -> None:
    lengths = np.array([1, 7, 4096])
    assert compute_row_costs(lengths, ModelWork(1000, 0, (None, 3))).tolist() == lengths.tolist()


def test_a_window_makes_long_rows_cheaper_and_short_ones_not() -> None:
    wide, narrow = ModelWork(1000, 10, (None,) * 2), ModelWork(1000, 10, (8, None))
    lengths = np.array([8, 9])
    (short, long), (short_narrow, long_narrow) = compute_row_costs(lengths, wide), compute_row_costs(lengths, narrow)
    assert short == short_narrow
    assert long - long_narrow == pytest.approx(10 / 1000)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("head_dim", [8, 16])
def test_the_work_of_a_token_is_that_of_the_models_own_matrices(family: str, head_dim: int) -> None:
    windowed = {} if family in ("llama", "gemma") else {"sliding_window": 5}
    model = fresh_model({**SHAPE, **windowed, "model_type": family, "head_dim": head_dim}, seed=0, dtype=torch.float32)
    work = compute_model_work(model.config)
    linear = [module for module in model.module.modules() if isinstance(module, nn.Linear)]
    assert work.matrices == sum(module.weight.numel() for module in linear)
    assert work.attention == 2 * 4 * linear[0].out_features // 4
    assert work.windows == tuple(form.window for form in record_forms(model))


class Recorder:
    """An attention plan that keeps what each layer asks for."""

    def __init__(self, inner: AttentionPlan, forms: list[AttentionForm]) -> None:
        self.inner, self.forms = inner, forms

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        self.forms.append(form)
        return self.inner.attend(module, query, key, value, form)


def record_forms(model: LanguageModel) -> list[AttentionForm]:
    """What the layers ask for, first to last."""
    forms: list[AttentionForm] = []
    packed = Packed(torch.tensor([0, 2], dtype=torch.int32), 2, wrap=lambda inner: Recorder(inner, forms))
    with torch.no_grad():
        model.hidden_states(torch.tensor([1, 2]), torch.tensor([0, 1]), packed)
    return forms


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="budget of 0 tokens"):
        plan([1], 0)
    with pytest.raises(ValueError, match="row 1 has 0 tokens"):
        plan([1, 0], 10)


def test_planning_is_quick_and_close_to_the_fewest() -> None:
    lengths = np.random.default_rng(0).integers(100, 4096, size=4096)
    start_s = time.perf_counter()
    micro_batches = plan_micro_batches(lengths, compute_row_costs(lengths, WORK), 16384)
    assert time.perf_counter() - start_s < 1.0
    assert len(micro_batches) < 1.1 * lengths.sum() / 16384
