"""The layout changes no number: 1, 2 and 4 processes over gloo against one process in float64, written out by hand (`layouts.py`).

Loss, every gradient, gradient norm, merged metrics, the weights after three optimizer steps and `log_prob`. Gradients agree to 1e-10 of
a tensor's largest entry in float64 and 1e-5 in float32; weights to 1e-9 and 1e-4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import (
    NUM_ROWS,
    PERTURBED_ROW,
    TRAIN_LOSSES,
    WEIGHT_TOLERANCE,
    Case,
    Expected,
    Found,
    Key,
    adapter_reference_worker,
    adapter_worker,
    assemble,
    count_writers,
    layout_worker,
    list_gaps,
    list_gradient_gaps,
    list_metric_gaps,
    list_mismatches,
    names_worker,
    perturb_worker,
    plan_split,
    reference_worker,
    resume_worker,
    save_worker,
    skip_worker,
    start_ranks,
)

from hybridflow.types import merge_metrics

WHOLE = 1000
"""Tokens of a micro-batch that takes all rows."""
CASES = [
    Case("tied", "policy, tokens", "uneven"),
    Case("untied", "sft, sequences", "idle", micro_batch_tokens=12),
    Case("untied", "policy, sequences", "masked", more=(("gradient_checkpointing", "selective"),)),
    Case("tied, odd vocabulary", "sft, tokens", micro_batch_tokens=WHOLE, more=(("gradient_checkpointing", "full"),)),
]
SHARED = Case("tied", "policy, tokens", "uneven", micro_batch_tokens=60, more=(("share_prompts", True),), rows="groups")
"""Prompts are computed once for their rows; on the ranks of a split those that are there."""
ROW_BY_ROW = Case("tied", "policy, tokens", micro_batch_tokens=1)
ONE_KV_HEAD = Case("one kv head", "policy, tokens", more=(("gradient_checkpointing", "full"),))
"""Fewer kv heads than ranks of the sequence; with four of them, those of the other models are fewer too."""
ON_HOST = Case("tied", "policy, tokens", more=(("offload", "parameters"),))
GATHERED = Case("untied", "sft, sequences", "uneven", more=(("offload", "optimizer"), ("reshard_after_forward", False)))
"""Where sharded weights are between passes."""
LAYOUTS: dict[str, tuple[int, dict[str, int], list[Case]]] = {
    "alone": (1, {}, [*CASES, ROW_BY_ROW, SHARED]),
    "data 2": (2, {}, [*CASES, ROW_BY_ROW, SHARED]),
    "data 4": (4, {}, CASES[:3]),
    "shard 2": (2, {"shard": 2}, [*CASES, ON_HOST, GATHERED, SHARED]),
    "shard 4": (4, {"shard": 0}, CASES[:3]),
    "replicate 2, shard 2": (4, {"shard": 2}, CASES[:3]),
    "tensor 2": (2, {"tp": 2}, [*CASES, SHARED]),
    "sequence 2": (2, {"sp": 2}, [ONE_KV_HEAD, *CASES, SHARED]),
    "sequence 4": (4, {"sp": 4}, [ONE_KV_HEAD, *CASES[1:3]]),
    "data 2, sequence 2": (4, {"sp": 2}, [CASES[0], CASES[2]]),
    "data 2, tensor 2": (4, {"tp": 2}, CASES[:2]),
    "tensor 2, sequence 2": (4, {"tp": 2, "sp": 2}, [CASES[0], CASES[2]]),
    "tensor 2, shard 2": (4, {"tp": 2, "shard": 2}, [CASES[0], GATHERED, CASES[3]]),
    "sequence 2, shard 2": (2, {"sp": 2, "shard": 2}, [ONE_KV_HEAD, *CASES[1:3], SHARED]),
    "data 2, sequence 2, shard 2": (4, {"sp": 2, "shard": 2}, [CASES[0], CASES[1]]),
    "data 2, sequence 2, shard 4": (4, {"sp": 2, "shard": 0}, [CASES[2]]),
}
"""Processes, parallel_config, and what is trained in them, one case after the other; the first two also in float32."""
KEYS = sorted({case.reference for _, _, cases in LAYOUTS.values() for case in cases})
DTYPES = {"float64": torch.float64, "float32": torch.float32}
Run = Callable[[str, str], list[list[Found]]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Expected]:
    """By model and loss, in float64; the weights at the start are float32 numbers, the same for both dtypes."""
    (found,) = start_ranks(1, reference_worker, KEYS, torch.float64, directory=tmp_path_factory.mktemp("reference"))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(layout, dtype)`: for each case, what each rank found; both dtypes in the same processes, computed once."""

    @functools.cache
    def trained(layout: str) -> list[list[Found]]:
        size, parallel, _ = LAYOUTS[layout]
        every = [(case, DTYPES[dtype]) for dtype in DTYPES for case in list_cases(layout, dtype)]
        by_rank = start_ranks(size, layout_worker, every, parallel, directory=tmp_path_factory.mktemp("ranks"))
        assert all(found is not None for found in by_rank), "a rank died; its error is above"
        return [list(found) for found in zip(*by_rank, strict=True)]

    def choose(layout: str, dtype: str) -> list[list[Found]]:
        count = len(list_cases(layout, "float64"))
        return trained(layout)[:count] if dtype == "float64" else trained(layout)[count:]

    return choose


def list_cases(layout: str, dtype: str) -> list[Case]:
    cases = LAYOUTS[layout][2]
    return cases if dtype == "float64" else cases[:2]


def test_the_cases_cover_what_they_say() -> None:
    assert {case.loss for case in CASES} == set(TRAIN_LOSSES)
    for data in (2, 4):
        for split in ("even", "uneven", "idle", "masked"):
            assert sorted(row for rows in plan_split(split, data) for row in rows) == list(range(NUM_ROWS))
    assert [len(rows) for rows in plan_split("uneven", 4)] == [8, 1, 1, 1]
    assert plan_split("idle", 4)[-1] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_number(
    layout: str,
    dtype: str,
    run: Run,
    references: dict[Key, Expected],
) -> None:
    cases = list_cases(layout, dtype)
    mismatches = {
        str(case): list_mismatches(found, references[case.reference], DTYPES[dtype])
        for case, found in zip(cases, run(layout, dtype), strict=True)
    }
    assert not any(mismatches.values()), "\n".join(
        f"{case}: {line}" for case, lines in mismatches.items() for line in lines
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_entry_of_the_state_is_written_by_one_rank(layout: str, run: Run) -> None:
    for found in run(layout, "float64"):
        for prefix, parts in (("model", "weights"), ("optimizer/exp_avg", "moments")):
            counts = count_writers([(vars(rank)[parts], rank.owned) for rank in found], prefix)
            assert counts and all(np.array_equal(count, np.ones_like(count)) for count in counts.values())
        for name in ("optimizer/steps", "rng/cpu"):
            assert sum(name in rank.owned for rank in found) == 1, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_weights_are_the_whole_ones_on_every_rank(layout: str, run: Run) -> None:
    for found in run(layout, "float64"):
        whole = assemble([rank.weights for rank in found])
        for rank in found:
            assert not list_gaps({name: rank.gathered[name] for name in whole}, whole, 0.0, "gathered")


STATE_CASE = Case("tied", "policy, tokens", "uneven")
MOVES = [
    ("data 2, sequence 2, shard 4", "tensor 2"),
    ("tensor 2, shard 2", "shard 4"),
    ("tensor 2, sequence 2", "alone"),
    ("alone", "replicate 2, shard 2"),
]


@pytest.mark.parametrize(("first", "second"), MOVES, ids=str)
def test_a_state_goes_on_in_any_layout(
    first: str, second: str, references: dict[Key, Expected], tmp_path: Path
) -> None:
    by_rank = start_ranks(LAYOUTS[first][0], save_worker, STATE_CASE, LAYOUTS[first][1], directory=tmp_path)
    whole = assemble([saved.boxes for saved in by_rank])
    assert not any(np.isnan(values).any() for values in whole.values())
    steps = by_rank[0].steps
    found = start_ranks(
        LAYOUTS[second][0], resume_worker, STATE_CASE, LAYOUTS[second][1], whole, steps, directory=tmp_path
    )
    expected = references[STATE_CASE.reference]
    weights = assemble([rank.weights for rank in found])
    assert not list_gaps(weights, expected.weights, WEIGHT_TOLERANCE[torch.float64], "weight")
    assert not list_metric_gaps([rank.metrics[0] for rank in found], expected.metrics[-1], 1e-9)


@pytest.mark.parametrize("layout", ["data 2", "shard 2", "tensor 2", "sequence 2, shard 2"])
def test_a_mini_batch_without_a_token_moves_nothing(layout: str, tmp_path: Path) -> None:
    size, parallel, _ = LAYOUTS[layout]
    by_rank = start_ranks(size, skip_worker, parallel, directory=tmp_path)
    for before, after, _, steps_taken in by_rank:
        assert before and all(np.array_equal(before[name].values, after[name].values) for name in before)
        assert steps_taken == 0
    merged = merge_metrics([metrics for _, _, metrics, _ in by_rank])
    assert merged["train/skipped_steps"].value == 1 and merged["train/nonfinite_steps"].value == 0
    assert "policy/loss" not in merged and merged["train/rows"].value == 0


@pytest.mark.parametrize("layout", ["alone", "shard 2", "tensor 2", "sequence 2"])
def test_no_row_sees_its_neighbours(layout: str, tmp_path: Path) -> None:
    size, parallel, _ = LAYOUTS[layout]
    for before, after in start_ranks(size, perturb_worker, parallel, directory=tmp_path):
        for row in before:
            gap = float(np.abs(before[row] - after[row]).max())
            assert gap > 1e-3 if row == PERTURBED_ROW else gap < 1e-6, row


@pytest.mark.parametrize("layout", ["data 2", "replicate 2, shard 2", "sequence 2, shard 2"])
def test_an_adapter_trains_as_by_hand(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is an extra")
    size, parallel, _ = LAYOUTS[layout]
    found = start_ranks(size, adapter_worker, parallel, directory=tmp_path)
    start = assemble([rank.start for rank in found])
    (expected,) = start_ranks(1, adapter_reference_worker, start, directory=tmp_path)
    lines = list_gaps(assemble([rank.gradient for rank in found]), expected.gradient, 1e-10, "gradient")
    lines += list_gaps(assemble([rank.weights for rank in found]), expected.weights, 1e-9, "weight")
    for rank in found:
        lines += list_gaps(rank.merged, expected.merged, 1e-9, "merged weight")
        assert np.array_equal(rank.base_before, rank.base_after)
    assert not lines, "\n".join(lines)


def test_the_order_of_names_may_differ_between_ranks(references: dict[Key, Expected], tmp_path: Path) -> None:
    found = start_ranks(2, names_worker, STATE_CASE, {"tp": 2}, directory=tmp_path)
    assert not list_gradient_gaps(found, references[STATE_CASE.reference], torch.float64)
