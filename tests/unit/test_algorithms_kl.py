"""KL estimates: values and slopes against plain Python, and what they are in expectation over a whole vocabulary."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.kl import MAX_LOG_RATIO, KLEstimator, compute_kl

ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")


def value_by_hand(logp: float, ref: float, estimator: str) -> float:
    x = logp - ref
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]


def slope_by_hand(logp: float, ref: float, estimator: str) -> float:
    x = logp - ref
    return {"k1": x, "k2": x, "k3": 1 - math.exp(-x)}[estimator]


def value_and_slope(
    logp: list[float], ref: list[float], estimator: KLEstimator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    logprobs = torch.tensor(logp, dtype=dtype, requires_grad=True)
    value = compute_kl(logprobs, torch.tensor(ref, dtype=dtype), estimator)
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    return value.detach(), slope


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_slopes_match_plain_python(estimator: KLEstimator) -> None:
    draw = random.Random(0)
    logp = [draw.uniform(-9, 0) for _ in range(200)]
    ref = [draw.uniform(-9, 0) for _ in range(200)]
    value, slope = value_and_slope(logp, ref, estimator, torch.float64)
    assert value.tolist() == pytest.approx(
        [value_by_hand(a, b, estimator) for a, b in zip(logp, ref, strict=True)], rel=1e-12
    )
    assert slope.tolist() == pytest.approx(
        [slope_by_hand(a, b, estimator) for a, b in zip(logp, ref, strict=True)], rel=1e-12
    )


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_slopes_are_the_finite_differences_of_the_values(estimator: KLEstimator) -> None:
    step = 1e-6
    for logp, ref in [(-0.3, -1.7), (-2.0, -1.9), (-4.0, -0.5)]:
        _, slope = value_and_slope([logp], [ref], estimator, torch.float64)
        difference = value_by_hand(logp + step, ref, estimator) - value_by_hand(logp - step, ref, estimator)
        assert slope.item() == pytest.approx(difference / (2 * step), rel=1e-7)


def softmax(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def divergence(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


LOGITS = [0.3, -1.2, 2.0, 0.0, -0.4]
REFERENCE = softmax([-0.5, 0.7, 0.9, 0.2, -1.0])
REVERSE = ("KL(p, ref)", lambda logits: divergence(softmax(logits), REFERENCE))
FORWARD = ("KL(ref, p)", lambda logits: divergence(REFERENCE, softmax(logits)))


@pytest.mark.parametrize(
    ("estimator", "minimised"), [("k1", REVERSE), ("k2", REVERSE), ("k3", FORWARD)], ids=["k1", "k2", "k3"]
)
def test_expected_gradient_is_that_of_the_documented_divergence(estimator: KLEstimator, minimised) -> None:
    """The whole vocabulary weighted by its own probability is the expectation over samples, without noise."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    loss = (
        logprobs.exp().detach() * compute_kl(logprobs, torch.tensor(REFERENCE, dtype=torch.float64).log(), estimator)
    ).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    step, (name, function) = 1e-6, minimised
    for index, got in enumerate(gradient.tolist()):
        up, down = list(LOGITS), list(LOGITS)
        up[index] += step
        down[index] -= step
        assert got == pytest.approx((function(up) - function(down)) / (2 * step), rel=1e-6), f"{name}, logit {index}"


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_is_the_kl_to_the_reference(estimator: KLEstimator) -> None:
    p = softmax(LOGITS)
    value, _ = value_and_slope([math.log(a) for a in p], [math.log(b) for b in REFERENCE], estimator, torch.float64)
    expected = math.fsum(a * v for a, v in zip(p, value.tolist(), strict=True))
    assert expected == pytest.approx(divergence(p, REFERENCE), rel=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_policies_give_exact_zeros(estimator: KLEstimator, dtype: torch.dtype) -> None:
    logp = (-8 * torch.rand(1000, generator=torch.Generator().manual_seed(0))).tolist()
    value, slope = value_and_slope(logp, logp, estimator, dtype)
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(slope, torch.zeros_like(slope))


def test_k3_keeps_the_digits_of_a_small_difference_in_float32() -> None:
    logp, ref = -1.0, -1.0 - 2.0**-18
    value, slope = value_and_slope([logp], [ref], "k3", torch.float32)
    assert slope.item() == pytest.approx(slope_by_hand(logp, ref, "k3"), rel=1e-6)
    assert value.item() >= 0.0


def test_k3_holds_value_and_slope_where_the_exponential_would_overflow() -> None:
    value, slope = value_and_slope([-MAX_LOG_RATIO, -90.0, -5000.0], [0.0, 0.0, 0.0], "k3", torch.float32)
    assert torch.isfinite(value).all()
    assert value.tolist() == [value[0].item()] * 3
    assert slope.tolist() == [slope[0].item()] * 3
    assert slope[0].item() == pytest.approx(1 - math.exp(20), rel=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_non_finite_log_probability_stays_visible(estimator: KLEstimator) -> None:
    for logp in (math.nan, -math.inf):
        value, _ = value_and_slope([logp], [-1.0], estimator, torch.float32)
        assert not torch.isfinite(value).any()


def test_the_reference_gets_no_gradient() -> None:
    reference = torch.tensor([-1.0], requires_grad=True)
    logprobs = torch.tensor([-2.0], requires_grad=True)
    compute_kl(logprobs, reference, "k3").sum().backward()
    assert reference.grad is None


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="'k4' is not known: use 'k1', 'k2' or 'k3'"):
        compute_kl(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


WORDS = 32


def draw_policies(seed: int) -> tuple[list[float], list[float]]:
    draw = random.Random(seed)
    return [draw.gauss(0, 1.5) for _ in range(WORDS)], softmax([draw.gauss(0, 1.5) for _ in range(WORDS)])


def divergence_gradient(logits: list[float], reference: list[float], name: str) -> list[float]:
    """By the logits, in closed form: p (x - KL) of KL(p, ref), p - ref of KL(ref, p)."""
    p = softmax(logits)
    if name == "KL(ref, p)":
        return [a - b for a, b in zip(p, reference, strict=True)]
    kl = divergence(p, reference)
    return [a * (math.log(a / b) - kl) for a, b in zip(p, reference, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_values_and_gradients_are_those_of_the_exact_kl_of_32_words(
    estimator: KLEstimator, seed: int, dtype: torch.dtype
) -> None:
    """To 1e-6, also in float32. k2 alone has another value, and the gradient of KL(p, ref)."""
    scores, reference = draw_policies(seed)
    logits = torch.tensor(scores, dtype=dtype, requires_grad=True)
    logprobs = logits.log_softmax(0)
    expected = (
        logprobs.exp().detach() * compute_kl(logprobs, torch.tensor(reference, dtype=dtype).log(), estimator)
    ).sum()
    if estimator != "k2":
        assert expected.item() == pytest.approx(divergence(softmax(scores), reference), rel=1e-6)
    (gradient,) = torch.autograd.grad(expected, logits)
    exact = divergence_gradient(scores, reference, "KL(ref, p)" if estimator == "k3" else "KL(p, ref)")
    assert gradient.tolist() == pytest.approx(exact, abs=1e-6)
    assert max(map(abs, exact)) > 0.05


@pytest.mark.parametrize("seed", range(3))
def test_kl_in_the_reward_has_the_gradient_of_the_exact_kl_of_32_words(seed: int) -> None:
    """The policy gradient of -k1 as a reward, over all words: minus that of KL(p, ref). k3 in its place is another gradient."""
    scores, reference = draw_policies(seed)
    logits = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    logprobs, p = logits.log_softmax(0), torch.tensor(softmax(scores), dtype=torch.float64)
    exact = divergence_gradient(scores, reference, "KL(p, ref)")
    for estimator, is_right in (("k1", True), ("k3", False)):
        reward = -compute_kl(logprobs, torch.tensor(reference, dtype=torch.float64).log(), estimator).detach()
        (gradient,) = torch.autograd.grad(-(p * reward * logprobs).sum(), logits, retain_graph=True)
        assert (gradient.tolist() == pytest.approx(exact, abs=1e-6)) is is_right
