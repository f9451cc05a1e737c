"""Metrics that know how they reduce, and what travels in place of data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.config import ConfigError
from hybridflow.types import (
    Call,
    Mark,
    MetricsRef,
    Ref,
    SamplingParams,
    last,
    maximum,
    mean,
    merge_metrics,
    minimum,
    total,
)


def test_each_metric_reduces_as_it_says() -> None:
    parts = [
        {"loss": mean(1.0, 3), "rows": total(2), "high": maximum(5), "low": minimum(-1), "lr": last(0.1)},
        {"loss": mean(5.0, 1), "rows": total(4), "high": maximum(2), "low": minimum(7), "lr": last(0.2)},
    ]
    merged = {name: metric.value for name, metric in merge_metrics(parts).items()}
    assert merged == {"loss": 2.0, "rows": 6.0, "high": 5.0, "low": -1.0, "lr": 0.2}
    assert merge_metrics(parts)["loss"].weight == 4


def test_a_mean_over_nothing_takes_no_part() -> None:
    assert merge_metrics([{"loss": mean(math.nan, 0)}, {"loss": mean(2.0, 1)}])["loss"].value == 2.0
    assert math.isnan(merge_metrics([{"loss": mean(math.nan, 0)}])["loss"].value)


def test_two_ways_to_reduce_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'rows' is reduced in two ways, \['mean', 'sum'\]"):
        merge_metrics([{"rows": total(1)}, {"rows": mean(1)}])


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100)), min_size=1), st.randoms())
def test_the_order_of_parts_changes_no_bit(values: list[tuple[float, int]], random: object) -> None:
    parts = [{"loss": mean(value, weight), "rows": total(value)} for value, weight in values]
    shuffled = sorted(parts, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert merge_metrics(parts) == merge_metrics(shuffled)


def test_references_name_their_call() -> None:
    call = Call("reward", "score", Mark(12, "score"))
    assert str(call) == "reward.score (phase 'score', step 12)"
    left, right = MetricsRef((Ref(1, call),)), MetricsRef((Ref(2, call),))
    assert [ref.handle for ref in (left | right).parts] == [1, 2]


def test_further_stop_ids_come_once() -> None:
    sampling = SamplingParams(stop_token_ids=(7,), temperature=0.5).also_stopping_on((2, 7))
    assert (sampling.stop_token_ids, sampling.temperature) == ((7, 2), 0.5)


def test_the_run_s_seed_keys_the_draws_unless_sampling_has_its_own() -> None:
    assert SamplingParams().keyed_by(4).seed == 4
    assert SamplingParams(seed=9).keyed_by(4).seed == 9


def test_sampling_that_would_overflow_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="temperature is 1e-38, and logits divided by it would overflow; give 1e-06 or more"
    ):
        SamplingParams(temperature=1e-38)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=2**31)
    assert SamplingParams(temperature=1e-6, max_new_tokens=2**31 - 1).temperature == 1e-6
