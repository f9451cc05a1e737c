"""From scored samples to trainable rows: states, advantages at tokens, and metrics that merge over shards."""

from __future__ import annotations

import functools
import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hybridflow.algorithms import (
    Prepared,
    compute_denominator,
    compute_group_advantages,
    keep_all,
    prepare_policy_batch,
)
from hybridflow.batch import Batch
from hybridflow.types import Metrics, RowState, merge_metrics

OK, EMPTY, FAILED, REJECTED = RowState.OK, RowState.EMPTY, RowState.FAILED, RowState.REJECTED
DR_GRPO = functools.partial(compute_group_advantages, normalize_std=False)


def samples(rows: list[dict[str, Any]]) -> Batch:
    """Rows of group, reward, and optionally prompt and response lengths, state, mask and finish reason."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "loss_mask", "group_id", "state", "reward", "finish_reason")
    }
    for row in rows:
        mask = row.get("mask", [0] * row.get("prompt", 2) + [1] * row.get("response", 3))
        columns["tokens"].append(np.arange(len(mask), dtype=np.int32))
        columns["loss_mask"].append(np.array(mask, np.uint8))
        columns["group_id"].append(row["group"])
        columns["state"].append(int(row.get("state", OK)))
        columns["reward"].append(row["reward"])
        columns["finish_reason"].append(row.get("finish", "stop"))
    return Batch.from_columns(**columns)


def prepare(rows: list[dict[str, Any]], *, drop: bool = False, function: Any = DR_GRPO) -> Prepared:
    return prepare_policy_batch(samples(rows), advantage_function=function, drop_constant_groups=drop)


def states(prepared: Prepared) -> list[int]:
    return prepared.batch.pylist("state")


def values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def test_each_counted_token_carries_its_rows_advantage() -> None:
    result = prepare(
        [
            {"group": 1, "reward": 1.0, "mask": [0, 0, 1, 1]},
            {"group": 1, "reward": 0.0, "mask": [0, 1, 0, 1, 1]},
        ]
    )
    assert result.batch.pylist("advantages") == [[0.0, 0.0, 0.5, 0.5], [0.0, -0.5, 0.0, -0.5, -0.5]]
    assert str(result.batch.column("advantages").type) == "list<item: float>"


def test_an_empty_response_gets_nothing_and_gives_nothing_to_its_neighbours() -> None:
    """A value placed at index -1 of the empty row would land in the row before it."""
    full = [{"group": 1, "reward": 1.0}, {"group": 1, "reward": 0.0}]
    for empty in ({"response": 0}, {"response": 0, "prompt": 0}, {"mask": [0, 0, 0]}):
        for position in range(3):
            for state in (EMPTY, OK):
                rows = [*full[:position], {"group": 1, "reward": 100.0, "state": state, **empty}, *full[position:]]
                result = prepare(rows)
                assert states(result)[position] == EMPTY
                advantages = result.batch.pylist("advantages")
                assert not any(advantages.pop(position))
                assert advantages == [[0.0, 0.0, 0.5, 0.5, 0.5], [0.0, 0.0, -0.5, -0.5, -0.5]]
                assert values(result.metrics)["reward/mean"] == 0.5


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_reward_that_failed_fails_its_row_and_no_other(reward: float | None) -> None:
    result = prepare([{"group": 1, "reward": 1.0}, {"group": 1, "reward": reward}, {"group": 1, "reward": 0.0}])
    assert states(result) == [OK, FAILED, OK]
    assert [row[-1] for row in result.batch.pylist("advantages")] == [0.5, 0.0, -0.5]
    got = values(result.metrics)
    assert (got["reward/errors"], got["rows/failed"], got["rows/ok"]) == (1, 1, 2)
    assert got["reward/mean"] == 0.5


@pytest.mark.parametrize("state", [EMPTY, FAILED, REJECTED])
@pytest.mark.parametrize("reward", [None, 50.0])
def test_rows_that_came_not_ok_keep_their_state_and_stay_out(state: RowState, reward: float | None) -> None:
    result = prepare(
        [{"group": 1, "reward": 1.0}, {"group": 1, "reward": reward, "state": state}, {"group": 1, "reward": 0.0}]
    )
    assert states(result) == [OK, state, OK]
    assert [row[-1] for row in result.batch.pylist("advantages")] == [0.5, 0.0, -0.5]
    assert values(result.metrics)["reward/errors"] == 0
    assert values(result.metrics)["reward/mean"] == 0.5


def test_constant_groups_are_rejected_when_asked_and_always_counted() -> None:
    rows = [
        {"group": 1, "reward": 1.0},
        {"group": 2, "reward": 0.3},
        {"group": 1, "reward": 0.0},
        {"group": 2, "reward": 0.1 + 0.2},
        {"group": 2, "reward": None},
    ]
    dropped, kept = prepare(rows, drop=True), prepare(rows, drop=False)
    assert states(dropped) == [OK, REJECTED, OK, REJECTED, FAILED]
    assert states(kept) == [OK, OK, OK, OK, FAILED]
    assert values(dropped.metrics)["groups/constant"] == values(kept.metrics)["groups/constant"] == 1
    assert values(dropped.metrics)["groups/total"] == 2
    assert values(dropped.metrics)["rows/rejected"] == 2
    assert [row[-1] for row in kept.batch.pylist("advantages")] == [0.5, 0.0, -0.5, 0.0, 0.0]


def test_a_rejected_group_is_no_part_of_a_users_baseline() -> None:
    seen = []

    def over_the_batch(rewards, group_ids, ok):
        seen.append(ok.tolist())
        return rewards - rewards[ok].mean()

    rows = [
        {"group": 1, "reward": 1.0},
        {"group": 1, "reward": 0.0},
        {"group": 2, "reward": 9.0},
        {"group": 2, "reward": 9.0},
    ]
    result = prepare(rows, drop=True, function=over_the_batch)
    assert seen == [[True, True, False, False]]
    assert [row[-1] for row in result.batch.pylist("advantages")] == [0.5, -0.5, 0.0, 0.0]


def test_denominators_follow_the_states() -> None:
    """What an engine divides by: the counted tokens of the rows that are ok after preparation."""
    result = prepare(
        [
            {"group": 1, "reward": 1.0, "response": 3},
            {"group": 1, "reward": 0.0, "response": 5},
            {"group": 1, "reward": None, "response": 7},
            {"group": 2, "reward": 1.0, "response": 11},
            {"group": 2, "reward": 1.0, "response": 13},
        ],
        drop=True,
    )
    ok = result.batch.numpy("state") == OK
    lengths = np.array([sum(mask) for mask in result.batch.pylist("loss_mask")])
    assert compute_denominator(lengths[ok], "token_mean") == 8.0
    assert compute_denominator(lengths[ok], "sequence_mean") == 2.0
    weighted = [any(row) for row in result.batch.pylist("advantages")]
    assert weighted == ok.tolist()


def test_the_input_is_untouched_and_the_order_stays() -> None:
    batch = samples([{"group": g, "reward": r} for g, r in [(3, 1.0), (1, 0.0), (3, None), (1, 2.0)]])
    before = [batch.pylist(name) for name in batch.column_names]
    result = prepare_policy_batch(batch, advantage_function=DR_GRPO, drop_constant_groups=True)
    assert [batch.pylist(name) for name in batch.column_names] == before
    assert result.batch.pylist("group_id") == [3, 1, 3, 1]
    assert set(result.batch.column_names) == {*batch.column_names, "advantages"}
    assert "advantages" not in batch


row_strategy = st.fixed_dictionaries(
    {
        "reward": st.sampled_from([None, 0.0, 1.0, 0.25]),
        "response": st.integers(0, 4),
        "state": st.sampled_from([OK, OK, OK, EMPTY, FAILED, REJECTED]),
        "finish": st.sampled_from(["stop", "length"]),
    }
)


@given(
    groups=st.lists(st.lists(row_strategy, min_size=1, max_size=4), min_size=1, max_size=5),
    drop=st.booleans(),
    cut=st.integers(0, 5),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_shards_of_whole_groups_give_the_rows_and_metrics_of_the_whole(groups, drop: bool, cut: int) -> None:
    parts = [[{**row, "group": index} for row in group] for index, group in enumerate(groups)]
    shards = [shard for shard in (list(chain(*parts[:cut])), list(chain(*parts[cut:]))) if shard]
    whole = prepare(list(chain(*parts)), drop=drop)
    pieces = [prepare(shard, drop=drop) for shard in shards]
    joined = Batch.concat([piece.batch for piece in pieces])
    for name in ("state", "advantages"):
        assert joined.pylist(name) == whole.batch.pylist(name)
    merged = merge_metrics([piece.metrics for piece in pieces])
    assert merged.keys() == whole.metrics.keys()
    for name, metric in whole.metrics.items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-12, abs=1e-15), name
        assert merged[name].reduce is metric.reduce
        assert merged[name].weight == metric.weight
    chunked = Batch.concat([samples(shard) for shard in shards])
    again = prepare_policy_batch(chunked, advantage_function=DR_GRPO, drop_constant_groups=drop)
    assert again.batch.pylist("advantages") == whole.batch.pylist("advantages")
    assert again.metrics == whole.metrics


def test_metrics_say_what_they_average_over() -> None:
    rows = [
        {"group": 1, "reward": 1.0, "response": 2, "finish": "length"},
        {"group": 1, "reward": 0.0, "response": 4},
        {"group": 2, "reward": 3.0, "response": 6},
        {"group": 2, "reward": 3.0, "response": 8},
        {"group": 3, "reward": None, "response": 0, "state": FAILED, "finish": "abort"},
    ]
    got = prepare(rows, drop=True).metrics
    assert values(got) == pytest.approx(
        {
            "rows/ok": 2,
            "rows/empty": 0,
            "rows/failed": 1,
            "rows/rejected": 2,
            "groups/total": 2,
            "groups/constant": 1,
            "reward/mean": 7 / 4,
            "reward/std": math.sqrt(0.5) / 2,
            "reward/errors": 0,
            "response/length_mean": 5.0,
            "response/length_max": 8,
            "response/cut_off": 0.25,
        }
    )
    assert (got["reward/mean"].weight, got["reward/std"].weight, got["response/length_mean"].weight) == (4, 2, 4)


def test_nothing_ok_leaves_means_out_instead_of_nan() -> None:
    result = prepare([{"group": 1, "reward": None}, {"group": 1, "reward": None, "state": FAILED}], drop=True)
    got = values(result.metrics)
    assert "reward/mean" not in got
    assert all(math.isfinite(value) for value in got.values())
    assert not any(map(any, result.batch.pylist("advantages")))


def test_a_batch_without_rows_is_prepared_too() -> None:
    empty = samples([{"group": 1, "reward": 1.0}]).slice(0, 0)
    result = prepare_policy_batch(empty, advantage_function=DR_GRPO, drop_constant_groups=True)
    assert result.batch.num_rows == 0
    assert "advantages" in result.batch
    assert values(result.metrics)["rows/ok"] == 0


def test_keep_all_counts_and_changes_nothing() -> None:
    batch = samples([{"group": 1, "reward": 1.0}, {"group": 2, "reward": 1.0, "state": EMPTY}])
    result = keep_all(batch)
    assert result.batch is batch
    assert values(result.metrics) == {"rows/ok": 1, "rows/empty": 1, "rows/failed": 0, "rows/rejected": 0}
