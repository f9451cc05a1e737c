"""Losses: values and gradients against loops in plain Python, splits into micro-batches, and what must not matter."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import (
    LossSum,
    MetricSum,
    PolicyLoss,
    SFTLoss,
    TokenLoss,
    compute_denominator,
    compute_token_weights,
)
from hybridflow.config import ConfigError
from hybridflow.types import Metric, Metrics, Reduce, merge_metrics

CONSTANT = 16
"""Tokens that a response counts as under `constant`."""


@dataclass
class Row:
    """One sequence, token by token."""

    mask: list[int]
    logp: list[float]
    old: list[float]
    ref: list[float]
    advantage: list[float]
    entropy: list[float]


def draw_rows(
    seed: int, lengths: Sequence[tuple[int, int]] = ((2, 3), (1, 1), (3, 7), (2, 0), (1, 4), (2, 6))
) -> list[Row]:
    """Rows of (prompt, response) lengths; one response token is masked out, as tool output would be."""
    draw = random.Random(seed)
    rows = []
    for prompt, response in lengths:
        size = prompt + response
        mask = [0] * prompt + [1] * response
        if response > 5:
            mask[prompt + 2] = 0
        logp = [draw.uniform(-3, -0.1) for _ in range(size)]
        old = [value + draw.uniform(-0.6, 0.6) for value in logp]
        ref = [value + draw.uniform(-1, 1) for value in logp]
        advantage = [draw.choice((-1, 1)) * draw.uniform(0.2, 2)] * size
        rows.append(Row(mask, logp, old, ref, advantage, [draw.uniform(0.1, 2) for _ in range(size)]))
    return rows


def kl_value(x: float, estimator: str) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]


def kl_slope(x: float, estimator: str) -> float:
    return {"k1": x, "k2": x, "k3": 1 - math.exp(-x)}[estimator]


def count(row: Row) -> int:
    return sum(row.mask)


def shares_by_hand(rows: list[Row], normalization: str) -> list[float]:
    """What one token of each row counts for in the mean over the mini-batch."""
    if normalization == "token_mean":
        tokens = sum(count(row) for row in rows)
        return [1 / tokens for _ in rows]
    sequences = sum(1 for row in rows if count(row) > 0)
    if normalization == "constant":
        return [1 / (CONSTANT * sequences) for _ in rows]
    return [1 / (count(row) * sequences) if count(row) else 0.0 for row in rows]


def policy_loss_by_hand(rows: list[Row], loss: PolicyLoss) -> float:
    """The mean over the mini-batch, as the papers write it."""
    mean = 0.0
    for row, share in zip(rows, shares_by_hand(rows, loss.normalization), strict=True):
        for t in range(len(row.mask)):
            if not row.mask[t]:
                continue
            ratio = math.exp(row.logp[t] - row.old[t])
            clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            earned = min(ratio * row.advantage[t], clipped * row.advantage[t])
            if loss.clip_dual is not None and row.advantage[t] < 0:
                earned = max(earned, loss.clip_dual * row.advantage[t])
            value = -earned
            value += loss.kl_coefficient * kl_value(row.logp[t] - row.ref[t], loss.kl_estimator)
            value -= loss.entropy_coefficient * row.entropy[t]
            mean += share * value
    return mean


def policy_gradient_by_hand(rows: list[Row], loss: PolicyLoss) -> tuple[list[float], list[float]]:
    """Derivatives of the mean by each log-probability and by each entropy."""
    by_logp, by_entropy = [], []
    for row, share in zip(rows, shares_by_hand(rows, loss.normalization), strict=True):
        for t in range(len(row.mask)):
            if not row.mask[t]:
                by_logp.append(0.0)
                by_entropy.append(0.0)
                continue
            ratio = math.exp(row.logp[t] - row.old[t])
            cut_above = row.advantage[t] > 0 and ratio > 1 + loss.clip_high
            cut_below = row.advantage[t] < 0 and ratio < 1 - loss.clip_low
            cut_dual = loss.clip_dual is not None and row.advantage[t] < 0 and ratio > loss.clip_dual
            slope = 0.0 if cut_above or cut_below or cut_dual else -row.advantage[t] * ratio
            slope += loss.kl_coefficient * kl_slope(row.logp[t] - row.ref[t], loss.kl_estimator)
            by_logp.append(share * slope)
            by_entropy.append(-share * loss.entropy_coefficient)
    return by_logp, by_entropy


@dataclass
class Packed:
    """Rows as a loss sees them."""

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    columns: dict[str, Tensor]


def pack(rows: list[Row], dtype: torch.dtype = torch.float64) -> Packed:
    def flat(name: str) -> Tensor:
        return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=dtype)

    cu_seqlens = torch.tensor([0, *itertools.accumulate(len(row.mask) for row in rows)], dtype=torch.int32)
    mask = torch.tensor([value for row in rows for value in row.mask], dtype=torch.uint8)
    columns = {"rollout_logprobs": flat("old"), "ref_logprobs": flat("ref"), "advantages": flat("advantage")}
    return Packed(flat("logp").requires_grad_(), flat("entropy").requires_grad_(), mask, cu_seqlens, columns)


def call(loss: TokenLoss, packed: Packed) -> LossSum:
    weights = compute_token_weights(packed.mask, packed.cu_seqlens, loss.normalization)
    return loss(packed.logprobs, packed.entropy, packed.mask, weights, packed.columns)


def step(
    loss: TokenLoss, rows: list[Row], micro_batches: Sequence[Sequence[Row]]
) -> tuple[float, list[float], list[LossSum]]:
    """Mean loss and its derivatives by the log-probabilities, as an engine forms them: sums, and one division."""
    denominator = compute_denominator([count(row) for row in rows], loss.normalization)
    mean, gradient, sums = 0.0, [], []
    for micro_batch in micro_batches:
        packed = pack(list(micro_batch))
        sums.append(call(loss, packed))
        (sums[-1].total / denominator).backward()
        mean += sums[-1].total.item() / denominator
        gradient += packed.logprobs.grad.tolist()
    return mean, gradient, sums


def read(metrics: Mapping[str, MetricSum]) -> Metrics:
    return {
        name: Metric(
            (m.value / m.weight).item() if m.reduce is Reduce.MEAN else m.value.item(), m.weight.item(), m.reduce
        )
        for name, m in metrics.items()
        if m.weight.item()
    }


VARIANTS = [
    PolicyLoss(
        normalization=normalization,
        constant_tokens=CONSTANT if normalization == "constant" else None,
        clip_low=0.1,
        clip_high=0.3,
        **terms,
    )
    for normalization in ("token_mean", "sequence_mean", "constant")
    for terms in (
        {},
        {"clip_dual": 1.4},
        {"kl_coefficient": 0.3, "kl_estimator": "k1"},
        {"kl_coefficient": 0.3, "kl_estimator": "k2"},
        {"kl_coefficient": 0.3, "kl_estimator": "k3", "entropy_coefficient": 0.05},
    )
]


def name_of(loss: PolicyLoss) -> str:
    return f"{loss.normalization}-{loss.kl_estimator if loss.kl_coefficient else loss.clip_dual or 'plain'}"


@pytest.mark.parametrize("loss", VARIANTS, ids=name_of)
@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_matches_the_loop_by_hand(loss: PolicyLoss, seed: int) -> None:
    rows = draw_rows(seed)
    packed = pack(rows)
    result = call(loss, packed)
    denominator = compute_denominator([count(row) for row in rows], loss.normalization)
    assert result.total.item() / denominator == pytest.approx(policy_loss_by_hand(rows, loss), rel=1e-12)
    (result.total / denominator).backward()
    by_logp, by_entropy = policy_gradient_by_hand(rows, loss)
    assert packed.logprobs.grad.tolist() == pytest.approx(by_logp, rel=1e-12)
    if loss.entropy_coefficient:
        assert packed.entropy.grad.tolist() == pytest.approx(by_entropy, rel=1e-12)
    else:
        assert packed.entropy.grad is None


@pytest.mark.parametrize("loss", VARIANTS, ids=name_of)
def test_gradient_is_the_finite_difference_of_the_loop_by_hand(loss: PolicyLoss) -> None:
    if loss.kl_estimator == "k1":
        # k1 has the slope of k2: its own derivative says nothing about the reference.
        reported, loss = loss, dataclasses.replace(loss, kl_estimator="k2")
    else:
        reported = loss
    rows, width = draw_rows(1), 1e-6
    _, gradient, _ = step(reported, rows, [rows])
    position = 0
    for row in rows:
        for t in range(len(row.mask)):
            at = row.logp[t]
            row.logp[t] = at + width
            above = policy_loss_by_hand(rows, loss)
            row.logp[t] = at - width
            below = policy_loss_by_hand(rows, loss)
            row.logp[t] = at
            assert gradient[position] == pytest.approx((above - below) / (2 * width), rel=1e-5, abs=1e-9)
            position += 1


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope", "low", "high"),
    [
        (1.0, 1.31, 0.0, 0, 1),
        (1.0, 1.29, -1.29, 0, 0),
        (1.0, 0.5, -0.5, 0, 0),
        (-1.0, 0.89, 0.0, 1, 0),
        (-1.0, 0.91, 0.91, 0, 0),
        (-1.0, 1.5, 1.5, 0, 0),
        (0.0, 3.0, 0.0, 0, 0),
    ],
)
def test_each_side_clips_at_its_own_bound(advantage: float, ratio: float, slope: float, low: int, high: int) -> None:
    packed = pack([Row([0, 1], [0.0, -1.0], [0.0, -1.0 - math.log(ratio)], [0.0] * 2, [advantage] * 2, [0.0] * 2)])
    result = call(PolicyLoss(clip_low=0.1, clip_high=0.3), packed)
    result.total.backward()
    assert packed.logprobs.grad.tolist() == pytest.approx([0.0, slope], rel=1e-12)
    metrics = read(result.metrics)
    assert (metrics["policy/clip_fraction_low"].value, metrics["policy/clip_fraction_high"].value) == (low, high)


@pytest.mark.parametrize(
    ("advantage", "ratio", "slope", "dual"),
    [
        (-1.0, 3.1, 0.0, 1),
        (-1.0, 2.9, 2.9, 0),
        (1.0, 3.1, 0.0, 0),  # The upper clip bounds it, as it did.
        (-1.0, 0.5, 0.0, 0),
        (0.0, 9.0, 0.0, 0),
    ],
)
def test_dual_clip_bounds_what_a_bad_sample_costs(advantage: float, ratio: float, slope: float, dual: int) -> None:
    packed = pack([Row([0, 1], [0.0, -1.0], [0.0, -1.0 - math.log(ratio)], [0.0] * 2, [advantage] * 2, [0.0] * 2)])
    result = call(PolicyLoss(clip_low=0.1, clip_high=0.3, clip_dual=3.0), packed)
    result.total.backward()
    assert packed.logprobs.grad.tolist() == pytest.approx([0.0, slope], rel=1e-12)
    assert result.total.item() == pytest.approx(-max(min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage),
                                                     3.0 * advantage if advantage < 0 else -math.inf))  # fmt: skip
    assert read(result.metrics)["policy/clip_fraction_dual"].value == dual


def splits_of(rows: list[Row]) -> dict[str, list[list[Row]]]:
    return {
        "three": [rows[:1], rows[1:4], rows[4:]],
        "one per row": [[row] for row in rows],
        "reversed": [rows[3:], rows[:3]],
    }


LOSSES: list[Any] = [*VARIANTS, SFTLoss(), SFTLoss(normalization="sequence_mean")]


@pytest.mark.parametrize("split", ["three", "one per row", "reversed"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{type(loss).__name__}-{loss.normalization}")
def test_no_split_into_micro_batches_changes_the_gradient(loss: TokenLoss, split: str) -> None:
    rows = draw_rows(2)
    parts = splits_of(rows)[split]
    ordered = [row for part in parts for row in part]
    mean, gradient, (whole,) = step(loss, ordered, [ordered])
    split_mean, split_gradient, sums = step(loss, ordered, parts)
    assert split_mean == pytest.approx(mean, rel=1e-12)
    assert split_gradient == pytest.approx(gradient, rel=1e-12)
    merged = merge_metrics([read(part.metrics) for part in sums])
    expected = read(whole.metrics)
    assert merged.keys() == expected.keys()
    for name, metric in expected.items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-12), name
        assert merged[name].reduce is metric.reduce


@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(),
        PolicyLoss(normalization="sequence_mean"),
        PolicyLoss(normalization="constant", constant_tokens=7, kl_coefficient=0.1, entropy_coefficient=0.1),
    ],
    ids=name_of,
)
def test_reported_loss_is_the_loss_that_is_trained(loss: PolicyLoss) -> None:
    rows = draw_rows(3)
    mean, _, sums = step(loss, rows, [[row] for row in rows])
    assert merge_metrics([read(part.metrics) for part in sums])["policy/loss"].value == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean", "constant"])
def test_weights_add_up_to_the_denominator(normalization: Any) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        masks = [[0] * draw.randint(1, 3) + [draw.randint(0, 1) for _ in range(draw.randint(0, 8))] for _ in range(7)]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(map(len, masks))])
        weights = compute_token_weights(torch.tensor(sum(masks, []), dtype=torch.uint8), cu_seqlens, normalization)
        assert weights.sum().item() == pytest.approx(
            compute_denominator([sum(mask) for mask in masks], normalization), rel=1e-12
        )


def test_denominators_count_what_the_mask_counts() -> None:
    lengths = np.array([3, 0, 1, 0, 6])
    assert compute_denominator(lengths, "token_mean") == 10.0
    assert compute_denominator(lengths, "sequence_mean") == 3.0
    assert compute_denominator([], "token_mean") == compute_denominator([0], "sequence_mean") == 0.0


def test_token_mean_and_sequence_mean_weigh_lengths_as_they_say() -> None:
    short, long = (Row([0] + [1] * n, [-value] * (n + 1), [0.0] * (n + 1), [0.0] * (n + 1), [0.0] * (n + 1), [0.0] * (n + 1))
                   for n, value in ((1, 10.0), (9, 1.0)))  # fmt: skip
    by_token, token_gradient, _ = step(SFTLoss(normalization="token_mean"), [short, long], [[short, long]])
    by_sequence, sequence_gradient, _ = step(SFTLoss(normalization="sequence_mean"), [short, long], [[short, long]])
    assert by_token == pytest.approx((10.0 + 9 * 1.0) / 10)
    assert by_sequence == pytest.approx((10.0 + 1.0) / 2, rel=1e-12)
    assert token_gradient == pytest.approx([0, -0.1, 0] + [-0.1] * 9)
    assert sequence_gradient == pytest.approx([0, -0.5, 0] + [-1 / 18] * 9, rel=1e-12)


def test_a_constant_length_favours_no_length() -> None:
    """The gradient at a token is the same in a short and in a long response, and does not move with the lengths of others."""
    short, long = ([Row([0] + [1] * n, *([[-1.0] * (n + 1)] * 3), [1.0] * (n + 1), [0.5] * (n + 1)) for n in lengths]
                   for lengths in ((2, 3), (2, 30)))  # fmt: skip
    loss = PolicyLoss(normalization="constant", constant_tokens=40)
    gradients = [{value for value in step(loss, rows, [rows])[1] if value} for rows in (short, long)]
    assert gradients[0] == gradients[1]
    assert list(gradients[0]) == pytest.approx([-1 / (40 * 2)], rel=1e-12)
    by_token = [step(PolicyLoss(), rows, [rows])[1][1] for rows in (short, long)]
    assert by_token == pytest.approx([-1 / 5, -1 / 32], rel=1e-12)


def test_the_constant_is_read_by_its_own_normalization_alone() -> None:
    with pytest.raises(ConfigError, match="constant_tokens is null, and normalization=constant divides by it"):
        PolicyLoss(normalization="constant")
    with pytest.raises(ConfigError, match="constant_tokens is 9, which normalization=token_mean does not read"):
        PolicyLoss(constant_tokens=9)
    with pytest.raises(ConfigError, match="normalization"):
        SFTLoss(normalization="constant")  # type: ignore[arg-type]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize(
    "loss", [PolicyLoss(kl_coefficient=0.1, entropy_coefficient=0.1), SFTLoss()], ids=["policy", "sft"]
)
def test_what_stands_at_uncounted_tokens_never_matters(loss: TokenLoss, garbage: float) -> None:
    rows = draw_rows(4)
    mean, gradient, sums = step(loss, rows, [rows])
    for row in rows:
        for t in range(len(row.mask)):
            if not row.mask[t]:
                row.logp[t] = row.old[t] = row.ref[t] = row.advantage[t] = row.entropy[t] = garbage
    again, gradient_again, sums_again = step(loss, rows, [rows])
    assert (again, gradient_again) == (mean, gradient)
    assert read(sums_again[0].metrics) == read(sums[0].metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_unmoved_policy_has_ratio_one_and_exact_zeros(dtype: torch.dtype, estimator: Any) -> None:
    rows = draw_rows(6, [(2, 50)] * 8)
    for row in rows:
        row.old = row.ref = list(row.logp)
    packed = pack(rows, dtype)
    loss = PolicyLoss(clip_low=0.0, clip_high=0.0, kl_coefficient=0.1, kl_estimator=estimator)
    result = call(loss, packed)
    metrics = {name: metric.value for name, metric in read(result.metrics).items()}
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0
    for name in (
        "clip_fraction_low",
        "clip_fraction_high",
        "kl_to_rollout",
        "kl_to_reference",
        "logprob_gap_mean",
        "logprob_gap_max",
    ):
        assert metrics[f"policy/{name}"] == 0.0, name
    result.total.backward()
    expected = torch.where(packed.mask.bool(), -packed.columns["advantages"], 0.0)
    assert torch.equal(packed.logprobs.grad, expected)


def test_ten_steps_at_learning_rate_zero_stay_at_ratio_one() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 16, generator=generator)
    head = torch.nn.Parameter(torch.randn(16, 32, generator=generator))
    targets = torch.randint(32, (64,), generator=generator)
    optimizer = torch.optim.AdamW([head], lr=0.0)
    loss, mask = PolicyLoss(kl_coefficient=0.1), torch.ones(64, dtype=torch.uint8)

    def score() -> Tensor:
        return (hidden @ head).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    first = score().detach()
    columns = {"rollout_logprobs": first, "ref_logprobs": first, "advantages": torch.randn(64, generator=generator)}
    for _ in range(10):
        result = loss(score(), torch.zeros(64), mask, mask.float(), columns)
        metrics = {name: metric.value for name, metric in read(result.metrics).items()}
        assert metrics["policy/ratio_max"] == 1.0
        zeros = ("kl_to_rollout", "kl_to_reference", "clip_fraction_low", "clip_fraction_high")
        assert [metrics[f"policy/{name}"] for name in zeros] == [0.0] * 4
        optimizer.zero_grad()
        (result.total / 64).backward()
        optimizer.step()


def test_kl_to_rollout_is_taken_over_the_rollout_policy() -> None:
    """Weighted by the old policy, k3 of the metric is KL(old, new): the samples are the old policy's."""
    old, new = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    expected = sum(p * math.log(p / q) for p, q in zip(old, new, strict=True))
    by_token = []
    for p, q in zip(old, new, strict=True):
        row = Row([0, 1], [0.0, math.log(q)], [0.0, math.log(p)], [0.0] * 2, [1.0] * 2, [0.0] * 2)
        by_token.append(read(call(PolicyLoss(), pack([row])).metrics)["policy/kl_to_rollout"].value)
    assert sum(p * value for p, value in zip(old, by_token, strict=True)) == pytest.approx(expected, rel=1e-12)


def test_a_huge_ratio_stays_finite_and_gets_no_gradient() -> None:
    packed = pack([Row([0, 1], [0.0, -1.0], [0.0, -500.0], [0.0] * 2, [-1.0] * 2, [0.0] * 2)], torch.float32)
    result = call(PolicyLoss(), packed)
    result.total.backward()
    assert result.total.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert packed.logprobs.grad.tolist() == [0.0, 0.0]
    assert all(math.isfinite(metric.value) for metric in read(result.metrics).values())


@pytest.mark.parametrize("loss", [PolicyLoss(), PolicyLoss(kl_coefficient=0.1), SFTLoss()], ids=["plain", "kl", "sft"])
def test_a_nan_at_a_counted_token_stays_visible(loss: TokenLoss) -> None:
    rows = draw_rows(7)
    rows[0].logp[-1] = math.nan
    assert math.isnan(call(loss, pack(rows)).total.item())


@pytest.mark.parametrize("logp", [math.inf, -math.inf])
def test_an_infinite_ratio_is_cut_and_seen_in_the_gap(logp: float) -> None:
    packed = pack([Row([0, 1], [0.0, logp], [0.0, -1.0], [0.0] * 2, [-1.0] * 2, [0.0] * 2)])
    result = call(PolicyLoss(), packed)
    result.total.backward()
    assert math.isfinite(result.total.item())
    assert packed.logprobs.grad.tolist() == [0.0, 0.0]
    assert read(result.metrics)["policy/logprob_gap_max"].value == math.inf


@pytest.mark.parametrize("loss", [PolicyLoss(report_kl=True), SFTLoss()], ids=["policy", "sft"])
@pytest.mark.parametrize("lengths", [[], [(3, 0), (1, 0)]], ids=["no tokens", "no counted tokens"])
def test_nothing_to_count_gives_zero_and_no_metrics(loss: TokenLoss, lengths: list[tuple[int, int]]) -> None:
    result = call(loss, pack(draw_rows(0, lengths)))
    assert (result.total.item(), result.weight.item(), read(result.metrics)) == (0.0, 0.0, {})


def test_reporting_the_kl_does_not_train_on_it() -> None:
    rows = draw_rows(8)
    plain, plain_gradient, _ = step(PolicyLoss(), rows, [rows])
    reported, reported_gradient, (sums,) = step(PolicyLoss(report_kl=True), rows, [rows])
    assert (plain, plain_gradient) == (reported, reported_gradient)
    counted = [(row.logp[t], row.ref[t]) for row in rows for t in range(len(row.mask)) if row.mask[t]]
    expected = sum(kl_value(logp - ref, "k3") for logp, ref in counted) / len(counted)
    assert read(sums.metrics)["policy/kl_to_reference"].value == pytest.approx(expected, rel=1e-12)


def test_token_metrics_match_the_loop_by_hand() -> None:
    rows = draw_rows(9)
    metrics = read(call(PolicyLoss(normalization="sequence_mean"), pack(rows)).metrics)
    log_ratios = [row.logp[t] - row.old[t] for row in rows for t in range(len(row.mask)) if row.mask[t]]
    entropies = [row.entropy[t] for row in rows for t in range(len(row.mask)) if row.mask[t]]
    expected = {
        "policy/ratio_mean": sum(map(math.exp, log_ratios)) / len(log_ratios),
        "policy/ratio_max": math.exp(max(log_ratios)),
        "policy/logprob_gap_mean": sum(map(abs, log_ratios)) / len(log_ratios),
        "policy/logprob_gap_max": max(map(abs, log_ratios)),
        "policy/entropy": sum(entropies) / len(entropies),
    }
    assert {name: metrics[name].value for name in expected} == pytest.approx(expected, rel=1e-12)


def test_columns_are_those_that_are_read() -> None:
    assert PolicyLoss().columns == ("advantages", "rollout_logprobs")
    assert PolicyLoss(kl_coefficient=0.1).columns == ("advantages", "rollout_logprobs", "ref_logprobs")
    assert PolicyLoss(report_kl=True, old_logprobs="trainer_logprobs").columns == (
        "advantages",
        "trainer_logprobs",
        "ref_logprobs",
    )
    assert SFTLoss().columns == ()
    packed = pack(draw_rows(0))
    packed.columns = {name: packed.columns[name] for name in PolicyLoss().columns}
    assert call(PolicyLoss(), packed).weight.item() > 0


def test_a_missing_entropy_and_an_unknown_normalization_are_refused() -> None:
    packed = pack(draw_rows(0))
    with pytest.raises(ValueError, match="without entropy_T"):
        PolicyLoss()(packed.logprobs, None, packed.mask, packed.mask.float(), packed.columns)
    with pytest.raises(ValueError, match="'mean' is not known"):
        compute_denominator([1], "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mean' is not known"):
        compute_token_weights(packed.mask, packed.cu_seqlens, "mean")  # type: ignore[arg-type]
