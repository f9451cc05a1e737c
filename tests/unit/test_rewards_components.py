"""Several rewards of a row: combined by weight, routed by a column, per batch and async, and one that fails, by its name."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.algorithms import compute_group_advantages, prepare_policy_batch
from hybridflow.batch import Batch
from hybridflow.config import ConfigError, load_config, to_yaml
from hybridflow.flow.rl_job import RLConfig
from hybridflow.rewards import (
    RewardComponent,
    RewardPool,
    RewardSettings,
    check_reward,
    list_reward_sources,
    source_hash,
)
from hybridflow.types import RowState, merge_metrics

CASES = f"{Path(__file__).parent}/rewards_cases.py"
MISBEHAVE, LATER, BATCH = (f"{CASES}:{name}" for name in ("misbehave", "misbehave_later", "misbehave_batch"))


def rows(*responses: str, **columns: Any) -> Batch:
    return Batch.from_columns(response=list(responses), **columns)


def combine(batch: Batch, components: dict[str, dict[str, Any]], **limits: Any) -> Batch:
    settings = RewardSettings(
        components={name: RewardComponent(**one) for name, one in components.items()},
        **({"workers": 2, "timeout_s": 0.4} | limits),
    )
    with RewardPool(settings) as pool:
        return pool.score(batch)


def score(name: str, *responses: str, **limits: Any) -> list[tuple[float | None, str | None]]:
    settings = RewardSettings(**({"function": name, "workers": 1, "timeout_s": 0.4} | limits))
    with RewardPool(settings) as pool:
        result = pool.score(rows(*responses))
    return list(zip(result.pylist("reward"), result.pylist("reward_error"), strict=True))


@pytest.mark.parametrize("inline", [False, True])
def test_components_are_summed_by_weight_and_each_has_its_column(inline: bool) -> None:
    result = combine(
        rows("4", " <a>4", "five", answer=["4", "4", "5"]),
        {
            "right": {"function": "exact_match", "weight": 2.0},
            "form": {"function": "format_match", "weight": -0.5, "arguments": {"pattern": "[0-9]|<a>."}},
            "told": {"function": f"{CASES}:misbehave", "weight": 0.0},
        },
        inline=inline,
    )
    assert result.pylist("reward/right") == [1.0, 0.0, 0.0]
    assert result.pylist("reward/form") == [1.0, 1.0, 0.0]
    assert result.pylist("reward/told") == [1.0, 1.0, 1.0]
    assert result.pylist("reward") == [1.5, -0.5, 0.0]
    assert result.pylist("reward_error") == [None] * 3


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("hang", "judge: no result within 0.4 s; the process was killed"),
        ("hang in C", "judge: no result within 0.4 s; the process was killed"),
        ("raise", r"judge: ValueError: no number here \(rewards_cases.py:\d+\)"),
        ("hard exit", r"judge: the process ended by itself \(exit code 7\)"),
        ("nan", "judge: returned nan, which is not a finite number"),
        ("none", "judge: returned NoneType, which is not a number"),
    ],
)
def test_a_component_that_fails_fails_its_row_by_name_and_no_other(response: str, error: str) -> None:
    """Its own column says nothing, the others keep what they gave: no 0 in place of what is not known."""
    result = combine(
        rows("4", response, "5", answer=["4", response, "4"]),
        {"right": {"function": "exact_match"}, "judge": {"function": MISBEHAVE}},
    )
    assert result.pylist("reward") == [2.0, None, 1.0]
    assert result.pylist("reward/right") == [1.0, 1.0, 0.0]
    first, second, third = result.pylist("reward/judge")
    assert (first, third) == (1.0, 1.0) and math.isnan(second)
    assert re.match(error, result.pylist("reward_error")[1])


def test_each_component_has_a_time_limit_of_its_own() -> None:
    result = combine(
        rows("wait", "x"),
        {"slow": {"function": LATER, "timeout_s": 0.2}, "quick": {"function": MISBEHAVE}},
        timeout_s=60.0,
    )
    assert result.pylist("reward_error") == ["slow: no result within 0.2 s", None]


def test_rows_are_routed_by_a_column_of_the_data(caplog: pytest.LogCaptureFixture) -> None:
    """A value that nobody names is an error that says so, also where a component for all rows would have scored it."""
    batch = rows("4", "x", "4", "4", answer=["4", "x", "5", "4"], level=[1, 2, 1, 3])
    with caplog.at_level(logging.WARNING):
        result = combine(
            batch,
            {
                "easy": {"function": "gsm8k", "values": ("1",)},
                "hard": {"function": "exact_match", "values": (2, 4), "weight": 3.0},
                "form": {"function": MISBEHAVE, "weight": 0.1},
            },
            route_by="level",
        )
    assert result.pylist("reward") == [1.1, 3.1, 0.1, None]
    assert result.pylist("reward_error")[3] == (
        "no component is for rows with level='3', only for 1, 2, 4; name the value in the `values` of one"
    )
    assert [math.isnan(value) for value in result.pylist("reward/easy")] == [False, True, False, True]
    assert "1 of 4 rewards are errors; the first, row 3: no component is for rows with level='3'" in caplog.text


def test_async_rows_run_at_once_as_many_as_may() -> None:
    """None of six is done before all six are under way; of the next two, in a process that has seen six, each is done at once."""
    outcomes = score(LATER, *["meet 6"] * 6, concurrency=6, timeout_s=20.0)
    assert [reward for reward, _ in outcomes] == [6.0] * 6
    few = score(LATER, *["meet 6"] * 6, concurrency=5, timeout_s=0.3)
    # Five wait for a sixth in vain, which then is the sixth.
    assert few == [(None, "no result within 0.3 s")] * 5 + [(6.0, None)]


@pytest.mark.parametrize("inline", [False, True])
def test_an_async_function_that_raises_or_returns_no_number_is_an_error_row(inline: bool) -> None:
    outcomes = score(LATER, "a", "raise", "nan", "own timeout", "exit", "text", "b", inline=inline)
    assert [reward for reward, _ in outcomes] == [1.0, None, None, None, None, None, 1.0]
    errors = [error or "" for _, error in outcomes]
    assert errors[1].startswith("ValueError: no number here (rewards_cases.py")
    assert errors[2] == "returned nan, which is not a finite number"
    assert errors[3].startswith("TimeoutError: the judge did not answer")
    assert errors[4].startswith("SystemExit: 3") and errors[5].startswith("returned str")


@pytest.mark.parametrize("fault", ["hang", "hang in C", "cling", "hard exit", "segfault"])
def test_what_ends_a_process_of_async_rows_is_the_error_of_its_own_row(fault: str) -> None:
    """Its neighbours ran at the same time in the same process; each is run again alone."""
    responses = ["a", "b", fault, "c", "d"]
    outcomes = score(LATER, *responses, concurrency=5, timeout_s=0.3)
    assert [reward for reward, _ in outcomes] == [1.0, 1.0, None, 1.0, 1.0]
    assert ("no result within" in outcomes[2][1]) if fault in ("hang", "hang in C", "cling") else outcomes[2][1]


def test_a_row_that_waits_too_long_ends_without_its_process() -> None:
    outcomes = score(LATER, "wait", "meet 3", "meet 3", "meet 3", concurrency=4, timeout_s=0.3)
    assert outcomes == [(None, "no result within 0.3 s")] + [(3.0, None)] * 3


@pytest.mark.parametrize("inline", [False, True])
def test_a_function_of_batches_gets_all_rows_in_one_call(inline: bool) -> None:
    assert score(BATCH, *"abcde", per="batch", inline=inline, workers=2) == [(5.0, None)] * 5
    assert score(BATCH, per="batch", inline=inline) == []


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("one too few", "returned 2 values for 3 rows; give one number a row"),
        ("a number", "returned float for 3 rows; give one number a row"),
        ("raise", "ValueError: no number here"),
        ("hang", "no result within 0.4 s; the process was killed"),
        ("hard exit", "exit code 7"),
    ],
)
def test_a_batch_that_fails_fails_whole(response: str, error: str) -> None:
    outcomes = score(BATCH, "a", response, "b", per="batch")
    assert [reward for reward, _ in outcomes] == [None] * 3
    assert all(error in str(said) for _, said in outcomes)


def test_one_bad_value_of_a_batch_is_one_error_row() -> None:
    assert score(BATCH, "a", "nan", "text", "b", per="batch") == [
        (4.0, None),
        (None, "returned nan, which is not a finite number"),
        (None, "returned str, which is not a number (TypeError: must be real number, not str)"),
        (4.0, None),
    ]


def test_an_async_function_may_take_batches() -> None:
    async def double(response: list[str], scale: float) -> list[float]:
        return [scale * float(text) for text in response]

    with RewardPool(RewardSettings(per="batch", workers=1), lambda response: double(response, 2.0)) as pool:
        assert "coroutine" in pool.score(rows("1", "2")).pylist("reward_error")[0]

    async def direct(response: list[str]) -> list[float]:
        return await double(response, 2.0)

    with RewardPool(RewardSettings(per="batch", workers=1), direct) as pool:
        assert pool.score(rows("1", "2")).pylist("reward") == [2.0, 4.0]


def test_a_notebook_whose_cells_run_in_a_loop_scores_inline_by_async_functions_too() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def reward(response: str) -> float:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return float(len(response))

    async def cell() -> tuple[list[list[float]], asyncio.AbstractEventLoop]:
        with RewardPool(RewardSettings(inline=True), reward) as pool:
            return [pool.score(rows("a", "bb")).pylist("reward") for _ in range(2)], asyncio.get_running_loop()

    scored, own = asyncio.run(cell())
    assert scored == [[1.0, 2.0]] * 2
    # One loop for all calls, so that the function can keep connections.
    assert len(loops) == 4 and len(set(loops)) == 1 and loops[0] is not own and loops[0].is_closed()


def test_rows_that_are_not_ok_go_to_no_component() -> None:
    batch = rows("a", "b", "c", state=[int(RowState.OK), int(RowState.FAILED), int(RowState.OK)])
    result = combine(batch, {"all": {"function": BATCH, "per": "batch"}})
    assert result.pylist("reward") == [2.0, None, 2.0]
    assert result.pylist("reward_error")[1] == "not scored: the row is FAILED"


def test_the_mean_of_each_component_is_a_metric_that_merges_over_shards() -> None:
    scored = combine(
        rows("4", "5", "raise", "4", answer=["4", "4", "raise", "4"], kind=["a", "a", "a", "b"]),
        {
            "right": {"function": "exact_match", "values": ("a",)},
            "judge": {"function": MISBEHAVE, "values": ("a", "b"), "weight": 0.5},
        },
        route_by="kind",
    )
    columns = {name: scored.column(name) for name in scored.column_names}
    batch = Batch.from_columns(
        tokens=[[1, 2]] * 4,
        loss_mask=[[0, 1]] * 4,
        group_id=[1, 1, 2, 2],
        state=[0] * 4,
        finish_reason=["stop"] * 4,
        **columns,
    )

    def prepare(part: Batch) -> Any:
        function = lambda r, g, o: compute_group_advantages(r, g, o, normalize_std=False)  # noqa: E731
        return prepare_policy_batch(part, advantage_function=function, drop_constant_groups=False)

    whole, halves = prepare(batch), [prepare(batch.slice(0, 2)), prepare(batch.slice(2, 4))]
    for metrics in (whole.metrics, merge_metrics(half.metrics for half in halves)):
        right, judge = metrics["reward/right"], metrics["reward/judge"]
        assert (right.value, right.weight) == (pytest.approx(2 / 3), 3.0)
        assert (judge.value, judge.weight) == (1.0, 3.0)
        assert metrics["reward/mean"].value == pytest.approx((1.5 + 0.5 + 0.5) / 3)
        assert metrics["reward/errors"].value == 1.0
    assert whole.batch.pylist("state") == [RowState.OK, RowState.OK, RowState.FAILED, RowState.OK]


ONE = {"a": {"function": "exact_match"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "gsm8k", "components": ONE}, "reward: function is 'gsm8k' while components has a; leave one of them out"),
        ({"components": {"mean": ONE["a"]}}, "reward: components has the name 'mean', .*rename it"),
        ({"components": {"a b": ONE["a"]}}, "reward: components has the name 'a b'"),
        ({"components": {"a": {"function": "gsm8k", "wieght": 2}}}, "reward.components.a.wieght.*weight"),
        ({"components": {"a": {}}}, "reward.components.a.function is required"),
        ({"components": ONE, "per": "batch"}, "reward: per is batch, which `function` alone reads"),
        ({"components": {"a": {"function": "gsm8k", "values": ["x"]}}}, "reward: components.a.values is set while route_by is null"),
        ({"components": ONE, "route_by": "kind"}, "reward: route_by is 'kind' while no component has values"),
        ({"function": "gsm8k", "route_by": "kind"}, "reward: route_by is 'kind' while no component has values"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_sentence_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_rewards(settings)
    assert "\n" not in str(caught.value)


def load_rewards(settings: dict[str, Any]) -> RewardSettings:
    lines = ["model.path=m", "data.files=[d]", f"reward={to_flow(settings)}"]
    return load_config(RLConfig, config_name="rl", overrides=lines).reward


def to_flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {to_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_flow, value)) + "]"
    return f"'{value}'" if isinstance(value, str) else "null" if value is None else str(value)


def test_settings_survive_yaml() -> None:
    settings = load_rewards(
        {
            "components": {
                "form": {"function": "format_match", "values": ["x"], "arguments": {"pattern": "a.*b", "n": 2}}
            },
            "route_by": "kind",
        }
    )
    assert load_rewards(yaml.safe_load(to_yaml(settings))) == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"components": {"a": {"function": "exact"}}}, "reward.components.a.function: 'exact' names no function"),
        ({"components": {"a": {"function": "no/such.py:f"}}}, "reward.components.a.function: there is no file 'no/such.py'"),
        ({"components": {"a": {"function": f"{CASES}:gone"}}}, f"reward.components.a.function: '{CASES}' has no 'gone'; "),
        ({"components": {"a": {"function": "gsm8k", "arguments": {"patern": "x"}}}}, "a.function: it takes no argument 'patern'"),
        ({"components": {"a": {"function": "format_match"}}}, "reward.components.a.function: its parameter 'pattern' is no column"),
        ({"components": {"a": {"function": "gsm8k", "values": ["x"]}}, "route_by": "kind"}, "reward.route_by: 'kind' is no column"),
    ],
)  # fmt: skip
def test_what_a_component_lacks_is_one_sentence_with_its_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_reward(load_rewards(settings), columns=("answer",))
    assert "\n" not in str(caught.value)


def test_the_columns_of_all_are_told_and_the_one_that_routes() -> None:
    settings = RewardSettings(
        components={
            "right": RewardComponent(function="exact_match", values=("x",)),
            "form": RewardComponent(function="format_match", values=("y",), arguments={"pattern": "."}),
        },
        route_by="kind",
    )
    assert check_reward(settings, columns=("answer", "kind")) == {"response", "answer", "kind"}
    with pytest.raises(ConfigError, match="is 'right, form' while a function was passed as well"):
        check_reward(settings, lambda response: 1.0)


def test_a_value_of_the_data_that_no_component_is_for_is_told_before_anything_starts() -> None:
    settings = load_rewards(
        {
            "components": {
                "a": {"function": f"{CASES}:gone", "values": ["x", 2]},
                "b": {"function": f"{CASES}:gone", "values": [2]},
            },
            "route_by": "kind",
        }
    )
    with pytest.raises(ConfigError) as caught:
        check_reward(settings, columns=("kind",), routes=["x", 2, None])
    assert str(caught.value) == (
        "reward.route_by: no component is for rows with kind='None', only for x, 2; name the value in the `values` of one"
    )
    with pytest.raises(ConfigError, match=r"reward.components.a.function: .* has no 'gone'; "):
        check_reward(settings, columns=("kind",), routes=["x", 2])


def test_the_source_of_each_is_recorded() -> None:
    settings = RewardSettings(
        components={"a": RewardComponent(function=MISBEHAVE), "b": RewardComponent(function="gsm8k")}
    )
    assert list_reward_sources(settings) == {"reward/a": source_hash(MISBEHAVE), "reward/b": source_hash("gsm8k")}
    assert list_reward_sources(RewardSettings(function="gsm8k")) == {"reward": source_hash("gsm8k")}
    assert list_reward_sources(None) == list_reward_sources(RewardSettings()) == {}
    assert list_reward_sources(settings, misbehave) == {"reward": source_hash(misbehave)}


def misbehave(response: str) -> float:
    return 0.0
