"""Packing: what a rank is given of a micro-batch, and that the parts of all ranks are the micro-batch of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.train_engine.packing import (
    PackedRows,
    Part,
    Rows,
    compute_packed_weights,
    pack_rows,
    plan_part,
)
from hybridflow.train_engine.ranks import Ranks
from hybridflow.train_engine.segments import RowGroup

CPU = torch.device("cpu")
few = settings(deadline=None, max_examples=40)
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=7)
degrees = st.integers(1, 5)


def build_rows(lengths: list[int], seed: int = 0) -> Rows:
    """Rows whose token i is 10 + i, and a random mask in which a first token may count too."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(10, 10 + offsets[-1], dtype=np.int32)
    return Rows(offsets, tokens, np.random.default_rng(seed).random(offsets[-1]) < 0.7, {})


def one_by_one(rows: Sequence[int]) -> list[RowGroup]:
    return [RowGroup((row,)) for row in rows]


def pack(rows: Rows, chosen: list[int], degree: int, scored: Any = None) -> list[PackedRows]:
    """The micro-batch as each rank has it."""
    scored = rows.loss_mask if scored is None else scored
    return [pack_rows(rows, one_by_one(chosen), scored, CPU, Ranks(rank, degree)) for rank in range(degree)]


def test_one_process_packs_rows_without_a_dummy() -> None:
    rows = build_rows([3, 1, 4])
    packed = pack_rows(rows, one_by_one((2, 0, 1)), np.array([1, 1, 0, 1, 1, 1, 1, 0], bool), CPU)
    assert packed.tokens_T.tolist() == [14, 15, 16, 17, 10, 11, 12, 13]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert packed.attention.cu_seqlens.tolist() == packed.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert (packed.attention.max_len, packed.attention.wrap) == (4, None)
    assert packed.hidden_index_M.tolist() == [0, 1, 4]
    assert packed.token_index_M.tolist() == [1, 2, 5]
    assert packed.targets_M.tolist() == [15, 16, 11]
    assert packed.places_T.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert packed.places_M.tolist() == [5, 6, 1]
    assert packed.is_here_T.tolist() == [True] * 8


def test_two_ranks_share_the_tokens_and_a_label_crosses_the_border() -> None:
    rows = build_rows([3, 4])
    first, second = pack(rows, [0, 1], 2, np.ones(7, bool))
    assert first.tokens_T.tolist() == [10, 11, 12, 13]
    assert second.tokens_T.tolist() == [14, 15, 16, 0]
    assert second.positions_T.tolist() == [1, 2, 3, 0]
    assert first.hidden_index_M.tolist() == [0, 1, 3]
    assert first.targets_M.tolist() == [11, 12, 14]
    assert second.hidden_index_M.tolist() == [0, 1]
    assert second.targets_M.tolist() == [15, 16]
    assert second.token_index_M.tolist() == [5, 6]
    assert first.is_here_T.tolist() == [True] * 5 + [False] * 2
    for packed in (first, second):
        assert packed.attention.cu_seqlens.tolist() == [0, 3, 7, 8]
        assert packed.cu_seqlens.tolist() == [0, 3, 7]
        assert packed.attention.wrap is not None


@few
@given(row_lengths, degrees, st.randoms(use_true_random=False))
def test_the_parts_are_the_whole_one_after_another(lengths: list[int], degree: int, random: Any) -> None:
    rows, chosen = build_rows(lengths), random.sample(range(len(lengths)), len(lengths))
    parts, alone = pack(rows, chosen, degree), pack_rows(rows, one_by_one(chosen), rows.loss_mask, CPU)
    padding = -sum(lengths) % degree
    for name in ("tokens_T", "positions_T"):
        whole = torch.cat([getattr(part, name) for part in parts]).tolist()
        assert whole == getattr(alone, name).tolist() + [0] * padding
    assert len({part.tokens_T.numel() for part in parts}) == 1
    for part in parts:
        lengths_S = part.attention.lengths.tolist()
        assert lengths_S == alone.attention.lengths.tolist() + [padding] * (padding > 0)
        assert part.attention.max_len == max(lengths_S)
        assert part.places_T.tolist() == alone.places_T.tolist()


@few
@given(row_lengths, degrees)
def test_every_scored_token_is_predicted_on_one_rank_by_the_state_before_it(lengths: list[int], degree: int) -> None:
    rows, chosen = build_rows(lengths), list(range(len(lengths)))
    parts, alone = pack(rows, chosen, degree), pack_rows(rows, one_by_one(chosen), rows.loss_mask, CPU)
    assert np.concatenate([part.places_M for part in parts]).tolist() == alone.places_M.tolist()
    for part in parts:
        assert part.targets_M.tolist() == rows.tokens[part.places_M].tolist()
        assert part.places_T[part.token_index_M.numpy()].tolist() == part.places_M.tolist()
        # Token i is 10 + i, so the one before it is less by one.
        assert part.tokens_T[part.hidden_index_M].tolist() == (part.targets_M - 1).tolist()
        assert part.is_here_T[part.token_index_M.numpy()].all()


@few
@given(row_lengths, degrees, st.sampled_from(["token_mean", "sequence_mean"]))
def test_weights_add_up_to_those_of_one_rank(lengths: list[int], degree: int, normalization: Any) -> None:
    rows, chosen = build_rows(lengths), list(range(len(lengths)))
    (alone,) = pack(rows, chosen, 1)
    mask_T, weights_T = compute_packed_weights(rows, alone, normalization)
    assert mask_T.tolist() == rows.loss_mask.tolist()
    counted = int(np.count_nonzero(rows.count_masked()))
    assert float(weights_T.sum()) == pytest.approx(counted if normalization == "sequence_mean" else mask_T.sum())
    shares = [compute_packed_weights(rows, part, normalization) for part in pack(rows, chosen, degree)]
    assert sum(mask.long() for mask, _ in shares).tolist() == mask_T.long().tolist()  # type: ignore[union-attr]
    assert sum(weights for _, weights in shares).tolist() == weights_T.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("degree", [1, 3])
def test_a_micro_batch_without_rows_is_a_dummy_that_nothing_scores(degree: int) -> None:
    for packed in pack(build_rows([3, 4]), [], degree):
        assert packed.tokens_T.tolist() == packed.positions_T.tolist() == [0]
        assert packed.attention.cu_seqlens.tolist() == [0, degree]
        assert packed.attention.max_len == degree
        assert packed.cu_seqlens.tolist() == [0]
        sizes = [packed.targets_M, packed.hidden_index_M, packed.token_index_M, packed.places_T, packed.places_M]
        assert [len(values) for values in sizes] == [0] * 5
        mask_T, weights_T = compute_packed_weights(build_rows([3, 4]), packed, "sequence_mean")
        assert (mask_T.tolist(), weights_T.tolist()) == ([], [])


def test_the_dummy_on_a_gpu_fills_tiles_of_every_part() -> None:
    assert plan_part(1000, 0, 1, 128) == Part(0, 1024, 24)
    assert plan_part(1024, 0, 1, 128) == Part(0, 1024, 0)
    assert plan_part(1000, 1, 3, 128) == Part(384, 384, 152)
    assert plan_part(0, 1, 2, 128) == Part(128, 128, 256)
    assert plan_part(5, 0, 1, 1) == Part(0, 5, 0)
