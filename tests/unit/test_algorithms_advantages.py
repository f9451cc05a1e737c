"""Advantages and the constant-group filter: against loops in plain Python, and the rows that must not take part."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hybridflow.algorithms import compute_constant_groups, compute_group_advantages
from hybridflow.algorithms.advantages import AdvantageError, compute_advantages, resolve_advantage_function
from hybridflow.config import ConfigError


def advantages_by_hand(rewards: list[float], groups: list[int], ok: list[bool], normalize_std: bool) -> list[float]:
    result = []
    for reward, group, used in zip(rewards, groups, ok, strict=True):
        siblings = [r for r, g, o in zip(rewards, groups, ok, strict=True) if g == group and o]
        if not used or max(siblings) - min(siblings) <= 1e-6 * max(abs(r) for r in siblings):
            result.append(0.0)
            continue
        mean = math.fsum(siblings) / len(siblings)
        spread = math.sqrt(math.fsum((r - mean) ** 2 for r in siblings) / (len(siblings) - 1))
        result.append((reward - mean) / (spread if normalize_std else 1.0))
    return result


def compute(
    rewards: list[float], groups: list[int], ok: list[bool] | None = None, normalize_std: bool = True
) -> list[float]:
    mask = np.array([True] * len(rewards) if ok is None else ok, bool)
    return compute_group_advantages(
        np.array(rewards, np.float64), np.array(groups, np.int64), mask, normalize_std=normalize_std
    ).tolist()


rows_of_groups = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, -2.5, 0.1, 0.30000000000000004, 1e4]), st.integers(0, 3), st.booleans()),
    max_size=24,
)


@given(rows=rows_of_groups, normalize_std=st.booleans())
@hypothesis_settings(max_examples=200, deadline=None)
def test_matches_the_loop_by_hand_for_interleaved_uneven_groups(rows, normalize_std: bool) -> None:
    rewards, groups, ok = [r for r, _, _ in rows], [g * 10**12 for _, g, _ in rows], [o for _, _, o in rows]
    got = compute(rewards, groups, ok, normalize_std)
    assert got == pytest.approx(advantages_by_hand(rewards, groups, ok, normalize_std), rel=1e-9, abs=1e-12)


def test_grpo_divides_by_the_spread_and_dr_grpo_does_not() -> None:
    assert compute([1.0, 0.0, 0.0, 1.0], [7] * 4, normalize_std=False) == [0.5, -0.5, -0.5, 0.5]
    spread = math.sqrt(4 * 0.25 / 3)
    assert compute([1.0, 0.0, 0.0, 1.0], [7] * 4) == pytest.approx(
        [0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread]
    )


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    rewards, groups, ok = [1.0, 0.0, 5.0, 0.5, 9.0, 2.0], [7, 7, 3, 7, 7, 3], [True, True, True, True, False, True]
    expected = []
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for i, r in enumerate(rewards) if groups[i] == group and ok[i] and i != row]
        expected.append(reward - math.fsum(others) / len(others) if ok[row] else 0.0)
    got = compute_group_advantages(
        np.array(rewards), np.array(groups), np.array(ok), normalize_std=False, leave_one_out=True
    )
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    alone = np.array([3.0]), np.array([1]), np.array([True])
    assert compute_group_advantages(*alone, normalize_std=False, leave_one_out=True).tolist() == [0.0]


def test_interleaved_groups_are_told_apart_by_id() -> None:
    together = compute([1, 0, 5, 9], [1, 1, 2, 2], normalize_std=False)
    apart = compute([1, 5, 0, 9], [1, 2, 1, 2], normalize_std=False)
    assert together == [0.5, -0.5, -2.0, 2.0]
    assert apart == [0.5, -2.0, -0.5, 2.0]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_row_that_is_not_ok_does_not_move_its_siblings(normalize_std: bool) -> None:
    without = compute([1.0, 0.0, 0.5], [3] * 3, normalize_std=normalize_std)
    for reward in (0.0, 1e6, math.nan, math.inf):
        mixed = compute([1.0, reward, 0.0, 0.5], [3] * 4, [True, False, True, True], normalize_std)
        assert [mixed[0], *mixed[2:]] == without
        assert mixed[1] == 0.0


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1] * 3,
        [0.1] * 7,
        [0.3, 0.1 + 0.2, 0.3, 0.3],
        [0.1, float(np.float32(0.1)), 0.1],
        [1e6 + 0.1] * 5,
        [0.0] * 4,
        [-1 / 3] * 6,
        [0.7],
    ],
    ids=repr,
)
def test_equal_rewards_give_exact_zeros(rewards: list[float], normalize_std: bool) -> None:
    assert compute(rewards, [5] * len(rewards), normalize_std=normalize_std) == [0.0] * len(rewards)


def test_small_rewards_that_differ_are_signal() -> None:
    assert compute([0.0, 1e-9], [1, 1]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_no_rows_and_no_ok_rows_give_zeros() -> None:
    assert compute([], []) == []
    assert compute([math.nan, 1.0], [1, 1], [False, False]) == [0.0, 0.0]


def test_constant_groups_are_found_among_ok_rows_alone() -> None:
    rewards = np.array([1, 1, 9, 0, 1, 2, 2, 2.0])
    groups = np.array([1, 1, 1, 2, 2, 3, 4, 4])
    ok = np.array([True, True, False, True, True, True, False, False])
    found = compute_constant_groups(rewards, groups, ok)
    assert found.tolist() == [True, True, False, False, False, True, False, False]


def test_a_users_function_gets_copies_and_nan_where_it_must_not_look() -> None:
    rewards, groups, ok = np.array([1.0, 5.0, 2.0]), np.array([4, 4, 9]), np.array([True, False, True])

    def greedy(given_rewards, given_groups, given_ok):
        assert np.isnan(given_rewards).tolist() == [False, True, False]
        result = np.where(given_ok, given_rewards * 2, 77.0)
        given_rewards[:] = 0
        given_groups[:] = 0
        given_ok[:] = False
        return result

    assert compute_advantages(greedy, rewards, groups, ok).tolist() == [2.0, 0.0, 4.0]
    assert (rewards.tolist(), groups.tolist(), ok.tolist()) == ([1.0, 5.0, 2.0], [4, 4, 9], [True, False, True])


def test_a_users_function_that_forgets_the_ok_mask_is_stopped() -> None:
    def naive(rewards, groups, ok):
        return rewards - rewards.mean()

    with pytest.raises(ValueError, match=r"naive' returned nan at row 0 \(group 4\).*ok mask is False"):
        compute_advantages(naive, np.array([1.0, 0.0]), np.array([4, 4]), np.array([True, False]))
    assert compute_advantages(naive, np.array([1.0, 0.0]), np.array([4, 4]), np.array([True, True])).tolist() == [
        0.5,
        -0.5,
    ]


def test_a_users_function_of_the_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"returned shape \(1,\) for 2 rows"):
        compute_advantages(lambda r, g, o: [0.0], np.zeros(2), np.zeros(2, np.int64), np.ones(2, bool))


@pytest.mark.filterwarnings("error")
def test_a_users_function_that_leaves_float32_is_told_in_the_sentence_alone() -> None:
    with pytest.raises(AdvantageError, match=r"returned -1e\+300 at row 1 \(group 4\): return finite float32 values"):
        compute_advantages(lambda r, g, o: [0.0, -1e300], np.zeros(2), np.full(2, 4), np.ones(2, bool))


def test_a_users_function_is_not_called_without_ok_rows() -> None:
    assert compute_advantages(
        lambda r, g, o: 1 / 0, np.zeros(2), np.zeros(2, np.int64), np.zeros(2, bool)
    ).tolist() == [0.0, 0.0]


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_advantages.py").write_text(
        "SCALE = 3\n"
        "def triple(rewards, group_ids, ok):\n"
        "    return rewards * SCALE\n"
        "def short(rewards):\n"
        "    return rewards\n"
    )
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_advantages", None)


@pytest.mark.usefixtures("user_module")
def test_an_import_path_is_resolved() -> None:
    function = resolve_advantage_function("my_advantages:triple")
    assert compute_advantages(function, np.array([2.0]), np.array([1]), np.array([True])).tolist() == [6.0]


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "my_advantages.triple",
            "algorithm.advantage_function: 'my_advantages.triple' names no function; write pkg.mod:fn or path/to/file.py:fn$",
        ),
        ("no_such_file.py:triple", "there is no file 'no_such_file.py' .seen from .*correct the path"),
        ("my_advantages:", "names no function"),
        ("no_such_module:triple", "cannot be imported .*put its directory on PYTHONPATH"),
        ("needs_more:f", "cannot be imported .*not_installed_anywhere"),
        ("my_advantages:tripel", "has no 'tripel'; did you mean 'triple'"),
        ("my_advantages:SCALE", "is int, not a function"),
        ("my_advantages:short", r"cannot be called as function\(rewards, group_ids, ok\)"),
    ],
)
def test_a_wrong_import_path_is_explained(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_advantage_function(path)


def test_a_file_is_loaded_and_its_function_travels_without_it(tmp_path: Path) -> None:
    """A worker on another machine has neither the file nor its directory."""
    path = tmp_path / "mine.py"
    path.write_text(
        "SCALE = 3\ndef twice(x):\n    return 2 * x\ndef triple(rewards, group_ids, ok):\n    return twice(rewards) * SCALE\n"
    )
    sent = cloudpickle.dumps(resolve_advantage_function(f"{path}:triple"))
    path.unlink()
    code = (
        "import pickle, sys, numpy as np; f = pickle.loads(sys.stdin.buffer.read()); "
        "print(f(np.array([2.0]), np.array([1]), np.array([True])).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[12.0]"
    for text, message in (
        ("def f(:\n", "cannot be loaded"),
        ("import not_there_at_all\n", "not_there_at_all"),
        ("", "has no 'f'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            resolve_advantage_function(f"{path}:f")
