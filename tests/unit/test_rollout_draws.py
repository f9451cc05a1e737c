import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rollout.native.draws import compute_keys, compute_uniforms

_ALL = (1 << 64) - 1


def splitmix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _ALL
    return state ^ (state >> 31)


def reference_uniform(seed: int, step: int, group: int, sample: int, position: int) -> float:
    key = 0
    for part in (seed, step, group, sample):
        key = splitmix64((key + part + 0x9E3779B97F4A7C15) & _ALL)
    return (splitmix64((key + (position + 1) * 0x9E3779B97F4A7C15) & _ALL) >> 11) / 2**53


def uniforms(seed, step, groups, samples, positions) -> np.ndarray:
    keys = compute_keys(seed, step, np.asarray(groups, np.int64), np.asarray(samples, np.int64))
    return compute_uniforms(torch.from_numpy(keys), torch.as_tensor(positions, dtype=torch.int64)).numpy()


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**62),
    st.integers(0, 2**20),
    st.integers(0, 2**31),
)
def test_uniform_equals_a_plain_splitmix64(seed, step, group, sample, position):
    assert uniforms(seed, step, [group], [sample], [position])[0] == reference_uniform(
        seed, step, group, sample, position
    )


def test_known_value_keeps_old_runs_repeatable():
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of SplitMix64 from state 0
    assert uniforms(1, 2, [3], [4], [5])[0] == reference_uniform(1, 2, 3, 4, 5)


@pytest.mark.parametrize("axis", ["seed", "step", "group", "sample", "position"])
def test_each_part_of_the_key_gives_an_even_unrelated_stream(axis):
    n = 20_000
    counter = np.arange(n)
    parts = {"seed": 7, "step": 3, "group": np.full(n, 5), "sample": np.full(n, 2), "position": np.full(n, 11)}
    if axis in ("seed", "step"):
        draws = np.array(
            [uniforms(*({**parts, axis: i}[k] for k in ("seed", "step")), [5], [2], [11])[0] for i in range(2000)]
        )
    else:
        draws = uniforms(
            parts["seed"], parts["step"], *({**parts, axis: counter}[k] for k in ("group", "sample", "position"))
        )
    assert len(np.unique(draws)) == len(draws)
    even = (np.arange(len(draws)) + 0.5) / len(draws)
    assert np.abs(np.sort(draws) - even).max() < 1.95 / np.sqrt(len(draws))  # Kolmogorov-Smirnov at 0.1 %
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / np.sqrt(len(draws))


def test_parts_do_not_trade_places():
    assert uniforms(1, 2, [3], [4], [5])[0] != uniforms(2, 1, [3], [4], [5])[0]
    assert uniforms(1, 2, [3], [4], [5])[0] != uniforms(1, 2, [4], [3], [5])[0]
