"""Who trains on which rows: the invariants of the docstrings, each over random batches."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridflow.batch import Batch
from hybridflow.roles.parts import RowDigest, describe_rows
from hybridflow.roles.shares import Share, plan_shares, plan_updates, split_rows
from hybridflow.train_engine import ModelWork, compute_row_costs

WORK = ModelWork(matrices=12 * 16 * 16 * 2, attention=2 * 16, windows=(None, None))
few = settings(deadline=None, max_examples=80)
group_lengths = st.lists(st.integers(1, 200), min_size=1, max_size=4)
chunk_groups = st.lists(group_lengths, max_size=3)
batches = st.lists(chunk_groups, max_size=9)
"""Chunks of groups of row lengths."""
sizes = st.integers(1, 5)
update_counts = st.integers(1, 4)


def digest(chunks: list[list[list[int]]]) -> list[RowDigest]:
    digests, group = [], 70
    for groups in chunks:
        ids = [group + index for index, lengths in enumerate(groups) for _ in lengths]
        flat = [length for lengths in groups for length in lengths]
        digests.append(RowDigest(np.array(ids, np.int64), np.array(flat, np.int32)))
        group += len(groups)
    return digests


def plan(chunks: list[list[list[int]]], size: int, updates: int) -> tuple[Share, ...]:
    return plan_shares(digest(chunks), size=size, updates=updates, work=WORK)


def all_groups(chunks: list[list[list[int]]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(part.group_ids for part in digest(chunks))])


def updates_of_rows(chunks: list[list[list[int]]], updates: int) -> list[int]:
    """The update of each row of the batch, written out: each border at the group's edge nearest to the even one."""
    groups = all_groups(chunks)
    edges = [row for row in range(groups.size + 1) if row in (0, groups.size) or groups[row] != groups[row - 1]]
    borders = [min(edges, key=lambda edge: (abs(edge - u * groups.size / updates), edge)) for u in range(updates + 1)]
    return [u for u in range(updates) for _ in range(borders[u], borders[u + 1])]


def updates_of_chunks(chunks: list[list[list[int]]], updates: int) -> list[list[int]]:
    """The update of each row, chunk by chunk."""
    flat = iter(updates_of_rows(chunks, updates))
    return [[next(flat) for _ in range(sum(map(len, groups)))] for groups in chunks]


@few
@given(batches, sizes, update_counts)
def test_every_chunk_is_in_exactly_one_share_and_chunks_ascend(
    chunks: list[list[list[int]]], size: int, updates: int
) -> None:
    shares = plan(chunks, size, updates)
    assert len(shares) == size
    assert sorted(chunk for share in shares for chunk in share.chunks) == list(range(len(chunks)))
    assert all(list(share.chunks) == sorted(share.chunks) for share in shares)


@few
@given(batches, sizes, update_counts)
def test_each_row_is_trained_in_the_update_of_the_whole_batch(
    chunks: list[list[list[int]]], size: int, updates: int
) -> None:
    expected = updates_of_chunks(chunks, updates)
    for share in plan(chunks, size, updates):
        rows = [update for chunk in share.chunks for update in expected[chunk]]
        assert [update for update, count in enumerate(share.update_rows) for _ in range(count)] == rows
        assert len(share.update_rows) == updates


@few
@given(batches, update_counts)
def test_one_rank_gets_all_chunks_in_order_and_the_rows_of_one_process(
    chunks: list[list[list[int]]], updates: int
) -> None:
    (share,) = plan(chunks, 1, updates)
    assert share.chunks == tuple(range(len(chunks)))
    assert list(share.update_rows) == plan_updates(all_groups(chunks), updates).tolist()


@few
@given(batches, sizes, update_counts)
def test_no_rank_is_heavier_in_an_update_than_another_by_more_than_its_lightest_chunk_that_begins_there(
    chunks: list[list[list[int]]], size: int, updates: int
) -> None:
    expected, digests = updates_of_chunks(chunks, updates), digest(chunks)
    shares = plan(chunks, size, updates)
    for update in range(updates):
        costs = [
            compute_row_costs(part.lengths[np.array(rows, np.int64) == update], WORK).sum()
            for part, rows in zip(digests, expected, strict=True)
        ]
        loads = [sum(costs[chunk] for chunk in share.chunks) for share in shares]
        for share, load in zip(shares, loads, strict=True):
            begun = [costs[chunk] for chunk in share.chunks if expected[chunk] and expected[chunk][0] == update]
            if begun:
                assert load - min(loads) <= min(begun) * (1 + 1e-9)


def test_shares_written_out() -> None:
    """Four groups of two rows in three chunks, trained in two updates of two groups each: the second chunk has one of each."""
    chunks = [[[10, 10]], [[50, 50], [30, 30]], [[90, 90]]]
    assert plan(chunks, 2, 2) == (Share((1,), (2, 2)), Share((0, 2), (2, 2)))
    assert plan(chunks, 1, 2) == (Share((0, 1, 2), (4, 4)),)
    assert plan(chunks, 4, 1) == (Share((2,), (2,)), Share((1,), (4,)), Share((0,), (2,)), Share((), (0,)))


def test_long_rows_are_balanced_by_cost_not_by_count() -> None:
    shares = plan([[[4096]], [[4096]], *[[[512]]] * 16], 2, 1)
    assert [sum(chunk < 2 for chunk in share.chunks) for share in shares] == [1, 1]
    shares = plan([[[1000]], *[[[10]]] * 20], 2, 1)
    assert [share.chunks for share in shares] == [(0,), tuple(range(1, 21))]


def test_equally_light_ranks_take_turns_over_updates() -> None:
    assert [share.chunks for share in plan([[[100]], [[100]]], 2, 2)] == [(0,), (1,)]


def test_groups_that_are_cut_or_apart_are_named() -> None:
    lengths = np.ones(2, np.int32)
    apart = [RowDigest(np.array([1, 2]), lengths), RowDigest(np.array([3, 1]), lengths)]
    with pytest.raises(ValueError, match="rows of group 1 are not adjacent"):
        plan_shares(apart, size=2, updates=1, work=WORK)
    cut = [RowDigest(np.array([1, 2]), lengths), RowDigest(np.array([2, 3]), lengths)]
    with pytest.raises(ValueError, match="group 2 lies in the chunks 0 and 1"):
        plan_shares(cut, size=2, updates=1, work=WORK)
    with pytest.raises(ValueError, match="cannot train in 0 updates"):
        plan_shares([], size=2, updates=0, work=WORK)


def test_a_batch_without_rows_gives_shares_without_rows() -> None:
    assert plan([], 2, 2) == (Share((), (0, 0)), Share((), (0, 0)))
    assert sum((share.chunks for share in plan([[], [[3]]], 2, 1)), ()) in [(0, 1), (1, 0)]


def test_a_digest_holds_the_rows_and_nothing_else_of_the_chunk() -> None:
    rows = [np.arange(length, dtype=np.int32) for length in (400, 300, 200)]
    batch = Batch.from_columns(group_id=[7, 7, 9], tokens=rows)
    found = describe_rows(batch.slice(1, 3))
    assert (found.group_ids.tolist(), found.lengths.tolist()) == ([7, 9], [300, 200])
    assert (found.group_ids.dtype, found.lengths.dtype) == (np.int64, np.int32)
    assert found.group_ids.base is None
    assert len(pickle.dumps(found)) < 1000


@few
@given(st.lists(st.integers(1, 200), max_size=30), sizes, update_counts)
def test_rows_without_groups_are_each_for_itself(lengths: list[int], size: int, updates: int) -> None:
    batch = Batch.from_columns(
        tokens=[np.full(length, row, np.int32) for row, length in enumerate(lengths)], number=np.arange(len(lengths))
    )
    chunks = [[[length]] for length in lengths]
    split = split_rows(batch, size=size, updates=updates, work=WORK)
    shares = plan(chunks, size, updates)
    for (rows, update_rows), share in zip(split, shares, strict=True):
        assert rows.pylist("number") == list(share.chunks)
        assert rows.column_names == batch.column_names
        assert update_rows == share.update_rows
        assert [part.num_rows for part in rows.split(update_rows)] == list(update_rows)
    if size == 1:
        assert split[0][0] is batch


def test_a_thousand_ranks_are_planned_in_a_blink() -> None:
    rng = np.random.default_rng(0)
    digests = [RowDigest(np.full(8, group), rng.integers(100, 2048, 8, np.int32)) for group in range(1024)]
    start_s = time.process_time()
    shares = plan_shares(digests, size=1000, updates=4, work=WORK)
    assert time.process_time() - start_s < 0.25
    assert sum(map(sum, (share.update_rows for share in shares))) == 8192
