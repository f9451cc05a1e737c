"""What the algorithm hands to the loop: settings that arrive, a picklable objective, and each paper by hand from rewards to gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from hybridflow.algorithms import (
    PolicyGradient,
    PolicyGradientSettings,
    PolicyLoss,
    PolicyLossSettings,
    Prepared,
    compute_denominator,
    compute_token_weights,
    normalize_advantages,
)
from hybridflow.batch import Batch
from hybridflow.config import ConfigError, load_config
from hybridflow.config.composition import SHIPPED
from hybridflow.flow.rl_job import RLConfig
from hybridflow.types import BatchRef, RowState, SamplingParams

OTHER_VALUES = {
    "clip_low": 0.05,
    "clip_high": 0.5,
    "clip_dual": 3.0,
    "kl_coefficient": 0.25,
    "kl_estimator": "k2",
    "report_kl": True,
    "entropy_coefficient": 0.125,
    "old_logprobs": "trainer_logprobs",
    "normalization": "constant",
    "constant_tokens": 9,
}
SAMPLING = SamplingParams(max_new_tokens=11)


def rollout() -> Batch:
    return Batch.from_columns(
        tokens=[[1, 2, 3], [1, 2, 3, 4], [5, 6], [5, 7]],
        loss_mask=[np.array(mask, np.uint8) for mask in ([0, 1, 1], [0, 1, 1, 1], [0, 1], [0, 1])],
        rollout_logprobs=[[0.0, -1.0, -2.0], [0.0, -0.5, -1.5, -0.7], [0.0, -0.1], [0.0, -2.0]],
        group_id=[1, 1, 2, 2],
        state=[0, 0, 0, 0],
        reward=[1.0, 0.0, 0.5, 0.5],
        finish_reason=["stop"] * 4,
    )


def test_every_setting_of_the_loss_arrives_in_it() -> None:
    assert set(OTHER_VALUES) == {field.name for field in dataclasses.fields(PolicyLossSettings)}
    loss = PolicyGradient(PolicyGradientSettings(**OTHER_VALUES), SamplingParams(temperature=0.7)).loss
    assert loss == PolicyLoss(**OTHER_VALUES, temperature=0.7)
    for name, value in OTHER_VALUES.items():
        assert getattr(loss, name) == value != getattr(PolicyLossSettings(), name)


def test_temperature_is_that_of_the_sampling_and_above_zero() -> None:
    assert PolicyGradient(PolicyGradientSettings(), SamplingParams(temperature=1.5)).loss.temperature == 1.5
    with pytest.raises(ConfigError, match="temperature"):
        PolicyGradient(PolicyGradientSettings(), SamplingParams(temperature=0.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_low": 1.0}, "clip_low is 1.0 and must be less than 1"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"kl_coefficient": -1.0}, "kl_coefficient"),
        ({"kl_estimator": "k4"}, "k1, k2, k3"),
        ({"normalization": "mean"}, "token_mean, sequence_mean, constant"),
        ({"old_logprobs": "ref_logprobs"}, "rollout_logprobs, trainer_logprobs"),
        ({"normalisation": "token_mean"}, "normalization"),
        ({"clip_dual": 1.0}, "clip_dual is 1.0 and must be greater than 1"),
        ({"baseline": "none"}, "drop_constant_groups is true, and baseline=none learns .*set it to false"),
        ({"baseline": "none", "drop_constant_groups": False}, "scale is group_std, and baseline=none leaves nothing"),
        ({"constant_tokens": 4}, "constant_tokens is 4, which normalization=token_mean does not read"),
    ],
)
def test_wrong_settings_are_refused(values, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyGradientSettings(**values)


def test_policy_loss_names_columns_and_computes_nothing() -> None:
    algorithm = PolicyGradient(PolicyGradientSettings(), SAMPLING)
    batch, scores = BatchRef(()), {"reward": BatchRef(()), "reference": BatchRef(())}
    objective = algorithm.policy_loss(batch, scores)
    assert objective.batch is batch
    assert objective.scores == tuple(scores.values())
    assert (objective.prepare, objective.loss) == (algorithm.prepare, algorithm.loss)


def test_prepare_and_loss_travel_by_pickle() -> None:
    algorithm = PolicyGradient(PolicyGradientSettings(), SAMPLING)
    prepare, loss = pickle.loads(pickle.dumps((algorithm.prepare, algorithm.loss)))
    assert loss == algorithm.loss
    assert prepare(rollout()).batch.equals(algorithm.prepare(rollout()).batch)


@pytest.mark.parametrize(
    ("settings", "advantage"),
    [
        ({}, math.sqrt(0.5)),
        ({"scale": "none"}, 0.5),
        ({"baseline": "leave_one_out", "scale": "none"}, 1.0),
    ],
)
def test_baseline_and_scale_choose_the_advantages(settings, advantage: float) -> None:
    prepared = PolicyGradient(PolicyGradientSettings(**settings), SAMPLING).prepare(rollout())
    assert [row[-1] for row in prepared.batch.pylist("advantages")] == pytest.approx(
        [advantage, -advantage, 0.0, 0.0], rel=1e-6
    )


def test_constant_takes_the_longest_response_that_sampling_allows() -> None:
    for given, expected in ((None, 11), (5, 5)):
        settings = PolicyGradientSettings(normalization="constant", constant_tokens=given)
        assert PolicyGradient(settings, SAMPLING).loss.constant_tokens == expected


def test_columns_of_loss_and_advantages_are_told() -> None:
    plain = PolicyGradient(PolicyGradientSettings(), SAMPLING)
    assert plain.columns == {"advantages", "rollout_logprobs"}
    settings = PolicyGradientSettings(kl_in_reward=0.1, old_logprobs="trainer_logprobs")
    assert PolicyGradient(settings, SAMPLING).columns == {"advantages", "trainer_logprobs", "ref_logprobs"}
    assert settings.reads_reference and not PolicyGradientSettings().reads_reference
    assert "ref_logprobs" not in PolicyGradient(settings, SAMPLING).loss.columns


@pytest.mark.parametrize(("drop", "states"), [(True, [0, 0, 3, 3]), (False, [0, 0, 0, 0])])
def test_drop_constant_groups_arrives(drop: bool, states: list[int]) -> None:
    prepared = PolicyGradient(PolicyGradientSettings(drop_constant_groups=drop), SAMPLING).prepare(rollout())
    assert prepared.batch.pylist("state") == states


def half(rewards, group_ids, ok):
    """An advantage function of a user's."""
    return np.full(len(rewards), 0.5)


def test_a_users_function_comes_by_value_by_path_or_by_setting() -> None:
    path = f"{half.__module__}:half"
    for algorithm in (
        PolicyGradient(PolicyGradientSettings(), SAMPLING, half),
        PolicyGradient(PolicyGradientSettings(), SAMPLING, path),
        PolicyGradient(PolicyGradientSettings(advantage_function=path), SAMPLING),
    ):
        prepared = algorithm.prepare(rollout())
        assert [row[-1] for row in prepared.batch.pylist("advantages")] == [0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ConfigError, match="is set and a function is given too"):
        PolicyGradient(PolicyGradientSettings(advantage_function=path), SAMPLING, half)
    with pytest.raises(ConfigError, match="no_such:thing"):
        PolicyGradient(PolicyGradientSettings(advantage_function="no_such:thing"), SAMPLING)


PAPERS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def load_algorithm(name: str, *overrides: str) -> PolicyGradientSettings:
    """As `hybridflow rl algorithm=NAME` has it."""
    lines = ["model.path=m", "data.files=[d]", f"algorithm={name}", *overrides]
    return load_config(RLConfig, config_name="rl", overrides=lines).algorithm


@dataclasses.dataclass
class Sample:
    """A row of the references: log-probabilities, token by token, and what was given for all of them."""

    group: int
    mask: list[int]
    old: list[float]
    ref: list[float]
    reward: float
    state: int = 0

    @property
    def tokens(self) -> list[int]:
        return [t for t, counts in enumerate(self.mask) if counts]

    @property
    def counts(self) -> bool:
        return self.state == RowState.OK and bool(self.tokens)


def draw_samples(seed: int) -> list[Sample]:
    """Uneven groups and lengths, a tool's token in the middle, a failed row, an empty one, and a group of equal rewards."""
    draw, samples = random.Random(seed), []
    for group, rewards in enumerate([[1.0, 0.0, 0.25, 0.0], [0.5, 0.5, 0.5], [0.0, 3.0], [1.0, 0.0, 7.0, 1.0]]):
        for reward in rewards:
            response = draw.randint(1, 9)
            mask = [0, 0] + [1] * response
            if response > 4:
                mask[4] = 0
            old = [draw.uniform(-3, -0.1) for _ in mask]
            samples.append(Sample(group, mask, old, [value + draw.uniform(-0.8, 0.8) for value in old], reward))
    samples[2].state = RowState.FAILED
    samples[-2] = dataclasses.replace(samples[-2], mask=[0] * 4, old=[-1.0] * 4, ref=[-1.0] * 4)
    return samples


def to_batch(samples: list[Sample]) -> Batch:
    return Batch.from_columns(
        tokens=[[1] * len(sample.mask) for sample in samples],
        loss_mask=[np.array(sample.mask, np.uint8) for sample in samples],
        # In single precision, as a rollout gives them; the references read the same numbers.
        rollout_logprobs=[sample.old for sample in samples],
        ref_logprobs=[sample.ref for sample in samples],
        group_id=[sample.group for sample in samples],
        state=[int(sample.state) for sample in samples],
        reward=[sample.reward for sample in samples],
        finish_reason=["stop"] * len(samples),
    )


def rounded(samples: list[Sample]) -> list[Sample]:
    def single(values: list[float]) -> list[float]:
        return [float(np.float32(value)) for value in values]

    return [dataclasses.replace(sample, old=single(sample.old), ref=single(sample.ref)) for sample in samples]


def kl_of(sample: Sample, tokens: list[int]) -> float:
    return math.fsum(sample.old[t] - sample.ref[t] for t in tokens)


def siblings_of(sample: Sample, samples: list[Sample]) -> list[Sample]:
    return [other for other in samples if other.group == sample.group and other.counts]


def advantages_by_hand(name: str, samples: list[Sample], beta: float) -> list[dict[int, float]]:
    """What the paper says each counted token is worth, row by row; nothing for rows that do not count."""
    found: list[dict[int, float]] = []
    for sample in samples:
        others = siblings_of(sample, samples)
        rewards = [other.reward for other in others]
        if not sample.counts:
            found.append({})
            continue
        mean = math.fsum(rewards) / len(rewards)
        if name == "grpo":
            spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
            found.append(dict.fromkeys(sample.tokens, (sample.reward - mean) / spread if spread else 0.0))
        elif name == "rloo":
            shaped = {id(other): other.reward - beta * kl_of(other, other.tokens) for other in others}
            rest = [value for key, value in shaped.items() if key != id(sample)]
            found.append({t: shaped[id(sample)] - math.fsum(rest) / len(rest) for t in sample.tokens})
        elif name == "reinforce_plus_plus":
            found.append(
                {t: sample.reward - beta * kl_of(sample, [u for u in sample.tokens if u >= t]) for t in sample.tokens}
            )
        else:
            found.append(dict.fromkeys(sample.tokens, sample.reward - mean))
    if name.startswith("reinforce_plus_plus"):
        kept = keep_by_hand(name, samples)
        values = [value for row, keeps in zip(found, kept, strict=True) if keeps for value in row.values()]
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        found = [{t: (value - mean) / std for t, value in row.items()} for row in found]
    return found


def keep_by_hand(name: str, samples: list[Sample]) -> list[bool]:
    """Groups of equal rewards teach nothing, but where there is no baseline, or where the KL tells their rows apart."""
    if name in ("reinforce_plus_plus", "rloo"):
        return [sample.counts for sample in samples]
    return [sample.counts and len({other.reward for other in siblings_of(sample, samples)}) > 1 for sample in samples]


def gradient_by_hand(name: str, samples: list[Sample], settings: PolicyGradientSettings) -> list[float]:
    """The derivative of the loss by each log p, at p = p_old, where no ratio is clipped."""
    advantages = advantages_by_hand(name, samples, settings.kl_in_reward)
    kept = keep_by_hand(name, samples)
    num_tokens = sum(len(sample.tokens) for sample, keeps in zip(samples, kept, strict=True) if keeps)
    num_rows = sum(kept)
    gradient = []
    for sample, row, keeps in zip(samples, advantages, kept, strict=True):
        for t in range(len(sample.mask)):
            if not keeps or t not in row:
                gradient.append(0.0)
                continue
            share = 1 / (num_rows * SAMPLING.max_new_tokens) if settings.normalization == "constant" else 1 / num_tokens
            slope = settings.kl_coefficient * (sample.old[t] - sample.ref[t])
            gradient.append(share * (slope - row[t]))
    return gradient


def train_once(algorithm: PolicyGradient, parts: list[Prepared]) -> list[float]:
    """The gradient by each log p over parts of a batch, as engines on several ranks form it."""
    moments = [part.moments for part in parts if part.moments is not None]
    batches = [normalize_advantages(part, moments).batch for part in parts]
    loss, gradient = algorithm.loss, []
    counts = [
        int(row.sum()) for batch in batches for row in batch.filter(batch.numpy("state") == 0).arrays("loss_mask")
    ]
    denominator = compute_denominator(counts, loss.normalization)
    for batch in batches:
        mask = batch.ragged("loss_mask")
        ok_T = torch.from_numpy(np.repeat(batch.numpy("state") == 0, np.diff(mask.offsets.numpy())))
        counted = mask.values.clone() * ok_T
        logprobs = batch.ragged(loss.old_logprobs).values.clone().double().requires_grad_()
        columns = {column: batch.ragged(column).values for column in loss.columns}
        weights = compute_token_weights(counted, mask.offsets, loss.normalization)
        result = loss(logprobs, torch.zeros(len(logprobs)), counted, weights, columns)
        (result.total / denominator).backward()
        gradient += logprobs.grad.tolist()
    return gradient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PAPERS)
def test_each_paper_from_rewards_to_gradient_by_hand(name: str, seed: int) -> None:
    samples, settings = rounded(draw_samples(seed)), load_algorithm(name)
    algorithm = PolicyGradient(settings, SAMPLING)
    gradient = train_once(algorithm, [algorithm.prepare(to_batch(samples))])
    # Advantages are stored in single precision.
    assert gradient == pytest.approx(gradient_by_hand(name, samples, settings), rel=1e-6, abs=3e-9)
    assert sum(1 for value in gradient if value) >= 20


@pytest.mark.parametrize("name", PAPERS)
def test_no_split_of_the_groups_over_ranks_changes_the_gradient(name: str) -> None:
    """Statistics of a rank's own part in place of the batch's would: the parts differ in mean and spread."""
    samples = rounded(draw_samples(5))
    algorithm = PolicyGradient(load_algorithm(name), SAMPLING)
    whole = train_once(algorithm, [algorithm.prepare(to_batch(samples))])
    for borders in ([0, 1, 4], [0, 2, 4], [0, 1, 2, 3, 4]):
        parts = [[s for s in samples if first <= s.group < last] for first, last in itertools.pairwise(borders)]
        prepared = [algorithm.prepare(to_batch(part)) for part in parts]
        assert train_once(algorithm, prepared) == pytest.approx(whole, rel=1e-6, abs=1e-12)
    if algorithm.prepare(to_batch(samples)).moments is not None:
        alone = [train_once(algorithm, [algorithm.prepare(to_batch(part))]) for part in parts]
        assert max(abs(a - b) for a, b in zip(itertools.chain(*alone), whole, strict=True)) > 0.01


def test_the_defaults_are_those_of_grpo_and_each_paper_has_a_file() -> None:
    assert load_algorithm("grpo") == PolicyGradientSettings()
    shipped = {path.stem for path in (SHIPPED / "algorithm").glob("*.yaml")}
    assert shipped == set(PAPERS)


@pytest.mark.parametrize("rewards", [[0.1] * 6, [1e6 + 0.1] * 6, [0.0] * 6, [0.3, 0.30000004] * 3])
def test_equal_rewards_over_the_whole_batch_are_no_signal(rewards: list[float]) -> None:
    """Their deviations are rounding, which a division by their spread would make a signal of size 1."""
    algorithm = PolicyGradient(load_algorithm("reinforce_plus_plus", "algorithm.kl_in_reward=0"), SAMPLING)
    samples = [Sample(row // 2, [0, 1, 1], [-1.0] * 3, [-1.0] * 3, reward) for row, reward in enumerate(rewards)]
    prepared = [algorithm.prepare(to_batch(part)) for part in (samples[:2], samples[2:])]
    assert not any(train_once(algorithm, prepared))


def test_a_batch_without_a_row_that_counts_is_normalized_to_nothing() -> None:
    algorithm = PolicyGradient(load_algorithm("reinforce_plus_plus"), SAMPLING)
    failed = [Sample(0, [0, 1], [-1.0] * 2, [-1.0] * 2, math.nan), Sample(0, [0, 0], [-1.0] * 2, [-1.0] * 2, 1.0)]
    prepared = algorithm.prepare(to_batch(failed))
    normalized = normalize_advantages(prepared, [prepared.moments])
    assert normalized.batch.pylist("advantages") == [[0.0, 0.0], [0.0, 0.0]]
    assert not any(name.startswith("advantages/") for name in normalized.metrics)


def test_a_kl_that_is_not_finite_fails_its_row_and_no_other() -> None:
    algorithm = PolicyGradient(load_algorithm("reinforce_plus_plus"), SAMPLING)
    rows = [Sample(row, [0, 1, 1], [-1.0] * 3, [-1.0, -1.5, -math.inf if row == 1 else -2.0], 1.0) for row in range(3)]
    prepared = algorithm.prepare(to_batch(rows))
    assert prepared.batch.pylist("state") == [RowState.OK, RowState.FAILED, RowState.OK]
    first, second, third = prepared.batch.pylist("advantages")
    assert first == third == pytest.approx([0.0, 1.0 - 0.01 * 1.5, 1.0 - 0.01 * 1.0], rel=1e-6)
    assert second == [0.0] * 3
    assert (prepared.metrics["reward/kl"].value, prepared.metrics["reward/kl"].weight) == (pytest.approx(0.75), 4.0)


def test_the_table_of_settings_in_the_docs_is_that_of_the_files() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| | `grpo`"))
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 :] if line.startswith("| `")
    ]
    seen = 0
    for cells in table[: next(i for i, line in enumerate(lines[start + 2 :]) if not line.startswith("|"))]:
        for name, text in zip(PAPERS, cells[1:], strict=True):
            settings = load_algorithm(name)
            told = [getattr(settings, key.strip("` ")) for key in cells[0].split(",")]
            written = [yaml.safe_load(value) for value in text.split(",")]
            assert ["none" if value is None else value for value in written] == told, (name, cells[0])
            seen += len(told)
    assert seen == 45
