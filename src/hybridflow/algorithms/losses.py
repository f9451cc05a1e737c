"""Losses over tokens: what a loss is given, what it returns, and what its sum is divided by.

T: packed tokens of one micro-batch. S: sequences.
A loss sees one micro-batch and returns sums. The engine divides once, by `compute_denominator` over the whole
mini-batch, so no split into micro-batches or ranks changes a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hybridflow.algorithms.kl import MAX_LOG_RATIO, KLEstimator, compute_kl
from hybridflow.config import Field, settings
from hybridflow.types import UNSHAPED, Reduce, Shaping

Normalization = Literal["token_mean", "sequence_mean", "constant"]


class MetricSum(NamedTuple):
    """A metric before its division: a MEAN is value / weight, a MAX or MIN is `value` where `weight` is not 0."""

    value: Tensor
    weight: Tensor
    reduce: Reduce


@dataclass(frozen=True)
class LossSum:
    """What a loss returns for one micro-batch: sums, never means.

    total:   [] carries gradient; the engine backpropagates total / denominator.
    weight:  [] sum of the token weights; over all micro-batches it adds up to the denominator.
    metrics: without gradient.
    """

    total: Tensor
    weight: Tensor
    metrics: dict[str, MetricSum]


class TokenLoss(Protocol):
    """A loss over packed tokens, e.g. `PolicyLoss(clip_high=0.3)`; a frozen value that travels by pickle."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token float columns it reads."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy_T` must be given."""

    @property
    def normalization(self) -> Normalization:
        """What the weights and the denominator count."""

    @property
    def temperature(self) -> float:
        """Divides the logits in the head, above 0."""

    @property
    def shaping(self) -> Shaping:
        """What else the head does to the distribution: that of the sampling."""

    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor | None,
        mask_T: Tensor,
        weights_T: Tensor,
        columns: Mapping[str, Tensor],
    ) -> LossSum:
        """Sum over the tokens that count.

        logprobs_T, entropy_T: [T] float, carry gradient.
        mask_T:                [T] bool or uint8, `loss_mask`: 1 counts. What stands elsewhere is never used, NaN included.
        weights_T:             [T] float, from `compute_token_weights`.
        columns:               [T] float each, without gradient.
        """


def compute_token_weights(mask_T: Tensor, cu_seqlens: Tensor, normalization: Normalization) -> Tensor:
    """Weight of each token in the denominator: 1 (token_mean), or 1 / tokens of its sequence that count (the others).

    A loss multiplies its tokens by the same; under `constant` it multiplies them by 1 / its own constant.

    mask_T:     [T] bool or uint8, `loss_mask`.
    cu_seqlens: [S+1] int, from 0 to T.
    returns:    [T] float64, which the loss rounds to its own dtype; 0 where the mask is 0. A sequence's weights depend on that
                sequence alone.
    """
    counts_T = mask_T.bool()
    if normalization == "token_mean":
        return counts_T.double()
    if normalization not in ("sequence_mean", "constant"):
        raise ValueError(f"normalization '{normalization}' is not known: use token_mean, sequence_mean or constant")
    before = torch.nn.functional.pad(counts_T.long().cumsum(0), (1, 0))
    lengths_S = before[cu_seqlens[1:].long()] - before[cu_seqlens[:-1].long()]
    sizes_S = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    lengths_T = torch.repeat_interleave(lengths_S, sizes_S, output_size=mask_T.numel())
    return counts_T.double() / lengths_T.clamp(min=1)


def compute_denominator(response_lengths: Sequence[int] | np.ndarray, normalization: Normalization) -> float:
    """What the loss sum of a mini-batch is divided by: its tokens (token_mean) or its sequences (sequence_mean, constant).

    response_lengths: [S] tokens with `loss_mask` 1, of the rows that are OK, of all micro-batches and ranks.
    returns:          0.0 when nothing counts; the engine then skips the step.

    A sequence without such a token is no sequence here: it adds nothing to the numerator either.
    """
    lengths_S = np.asarray(response_lengths, dtype=np.int64)
    if normalization == "token_mean":
        return float(lengths_S.sum())
    if normalization in ("sequence_mean", "constant"):
        return float(np.count_nonzero(lengths_S))
    raise ValueError(f"normalization '{normalization}' is not known: use token_mean, sequence_mean or constant")


@settings
class PolicyLossSettings:
    """The terms of a clipped policy loss."""

    clip_low: float = Field(default=0.2, ge=0.0, lt=1.0)
    """The ratio to the sampling policy earns nothing below 1 - clip_low, where the advantage is negative."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """The ratio to the sampling policy earns nothing above 1 + clip_high, where the advantage is positive."""
    clip_dual: float | None = Field(default=None, gt=1.0)
    """The ratio costs nothing more above this, where the advantage is negative, e.g. 3.0 (dual clip); null does not bound it."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference in the loss; 0 leaves the term out, and needs no reference unless `report_kl`."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that KL: k1, k2 or k3. Values and gradients: `hybridflow.algorithms.kl.compute_kl`."""
    report_kl: bool = False
    """Reports the KL to the reference also where `kl_coefficient` is 0."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy, which the loss rewards; 0 only reports it."""
    old_logprobs: Literal["rollout_logprobs", "trainer_logprobs"] = "rollout_logprobs"
    """Author of the log-probabilities below the ratio: the rollout engine, or the trainer before its first update."""
    normalization: Normalization = "token_mean"
    """Every token counts the same (token_mean), every response does (sequence_mean), or each token of a response counts as one of
    `constant_tokens`, however long the response is (constant)."""
    constant_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a response is taken to have under `constant`; null takes `sampling.max_new_tokens`."""

    def __post_init__(self) -> None:
        if self.constant_tokens is not None and self.normalization != "constant":
            raise ValueError(
                f"constant_tokens is {self.constant_tokens}, which normalization={self.normalization} does not read; leave it out, or set "
                "normalization=constant"
            )

    @property
    def reads_reference(self) -> bool:
        """Whether the reference's log-probabilities are needed."""
        return self.kl_coefficient > 0 or self.report_kl


@settings
class PolicyLoss(PolicyLossSettings):
    """Clipped policy-gradient loss with optional KL and entropy terms, e.g. `PolicyLoss(kl_coefficient=0.01)`.

    At a token with ratio r = p / p_old and advantage A:
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coefficient * KL - entropy_coefficient * entropy;
    where A < 0, r is no more than clip_dual.

    Denominator: tokens with `loss_mask` 1, or sequences that have one, over the whole mini-batch; with `constant` the sequences, and each
    token is divided by `constant_tokens` in here.
    Gradient flows through `logprobs_T` and `entropy_T` alone, and is exactly 0 at a token that is clipped.
    With p equal to p_old, r is exactly 1, nothing is clipped, and KL to the rollout is exactly 0.
    A NaN at a token that counts makes the sum NaN, and the engine skips that step. log r is cut at 20 before it is exponentiated: a
    token above has r = e^20 and no gradient from the first term. An infinite log r is cut likewise, and seen in `policy/logprob_gap_max`.

    Source: PPO, arXiv:1707.06347 eq. 7; two clips, DAPO, arXiv:2503.14476 eq. 10; dual clip, arXiv:1912.09729; KL in the loss,
    GRPO, arXiv:2402.03300 eq. 3; `constant`, Dr. GRPO, arXiv:2503.20783.
    Differs from GRPO: tokens count alike by default, as in DAPO; `sequence_mean` is GRPO's 1/|o_i|. Differs from Dr. GRPO: sequences
    that a filter took out, or that have no token, do not count.

    Metrics: `policy/loss` is the whole loss, by its own denominator; all others are means or extremes over tokens.
    `policy/kl_to_rollout` is k3 of KL(p_old, p), `policy/logprob_gap_*` is |log r|, `policy/clip_fraction_*` counts tokens
    without gradient from the first term because of the clip on that side (`_dual`: because of `clip_dual`, where it is set).
    """

    temperature: float = Field(default=1.0, gt=0.0)
    """Divides the logits: that of the sampling, else the ratio does not start at 1."""
    shaping: Shaping = UNSHAPED
    """What the sampling changed beside it, for the same reason."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalization == "constant" and self.constant_tokens is None:
            raise ValueError("constant_tokens is null, and normalization=constant divides by it; give it, e.g. 1024")

    @property
    def columns(self) -> tuple[str, ...]:
        """See `TokenLoss`."""
        return ("advantages", self.old_logprobs, *(("ref_logprobs",) if self.reads_reference else ()))

    @property
    def needs_entropy(self) -> bool:
        """See `TokenLoss`; the entropy is always reported."""
        return True

    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor | None,
        mask_T: Tensor,
        weights_T: Tensor,
        columns: Mapping[str, Tensor],
    ) -> LossSum:
        """See `TokenLoss` and the class."""
        if entropy_T is None:
            raise ValueError("PolicyLoss was called without entropy_T: compute it where needs_entropy is True")
        counts_T = mask_T.bool()
        logprobs_T, entropy_T = _keep(logprobs_T, counts_T), _keep(entropy_T, counts_T)
        kept = {name: _keep(columns[name].to(logprobs_T.dtype), counts_T) for name in self.columns}
        log_ratio_T = logprobs_T - kept[self.old_logprobs]
        loss_T, metrics = self._clipped_objective(log_ratio_T, kept["advantages"], counts_T)
        metrics |= _ratio_metrics(log_ratio_T, counts_T)
        metrics["policy/entropy"] = token_mean(entropy_T, counts_T)
        if self.reads_reference:
            kl_T = compute_kl(logprobs_T, kept["ref_logprobs"], self.kl_estimator)
            metrics["policy/kl_to_reference"] = token_mean(kl_T, counts_T)
            # A coefficient of 0 must not turn an infinite KL into NaN.
            loss_T = loss_T + self.kl_coefficient * kl_T if self.kl_coefficient else loss_T
        if self.entropy_coefficient:
            loss_T = loss_T - self.entropy_coefficient * entropy_T
        if self.constant_tokens is not None and self.normalization == "constant":
            return _sum_up("policy/loss", loss_T / self.constant_tokens, counts_T, weights_T.sum(), metrics)
        return _sum_up("policy/loss", loss_T, weights_T, weights_T.sum(), metrics)

    def _clipped_objective(
        self, log_ratio_T: Tensor, advantages_T: Tensor, counts_T: Tensor
    ) -> tuple[Tensor, dict[str, MetricSum]]:
        # Written as a choice, not as a minimum: torch.minimum halves the gradient of each side in a tie.
        ratio_T = log_ratio_T.clamp(max=MAX_LOG_RATIO).exp()
        low_T = (advantages_T < 0) & (ratio_T < 1 - self.clip_low)
        high_T = (advantages_T > 0) & (ratio_T > 1 + self.clip_high)
        bounded_T = torch.where(low_T, 1 - self.clip_low, torch.where(high_T, 1 + self.clip_high, ratio_T))
        clipped = {"low": low_T, "high": high_T}
        if self.clip_dual is not None:
            clipped["dual"] = dual_T = (advantages_T < 0) & (ratio_T > self.clip_dual)
            bounded_T = torch.where(dual_T, self.clip_dual, bounded_T)
        return -advantages_T * bounded_T, {
            f"policy/clip_fraction_{side}": token_mean(clipped_T.to(ratio_T.dtype), counts_T)
            for side, clipped_T in clipped.items()
        }


@settings
class SFTLoss:
    """Negative log-likelihood of the tokens that count: -log p, e.g. `SFTLoss()`.

    Denominator: tokens with `loss_mask` 1, or sequences that have one, over the whole mini-batch (`normalization`).
    A non-finite log-probability at a token that counts makes the sum non-finite, and the engine skips that step.
    """

    normalization: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every token counts the same (token_mean), or every sequence does (sequence_mean)."""

    @property
    def columns(self) -> tuple[str, ...]:
        """See `TokenLoss`."""
        return ()

    @property
    def needs_entropy(self) -> bool:
        """See `TokenLoss`."""
        return False

    @property
    def temperature(self) -> float:
        """See `TokenLoss`."""
        return 1.0

    @property
    def shaping(self) -> Shaping:
        """See `TokenLoss`."""
        return UNSHAPED

    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor | None,
        mask_T: Tensor,
        weights_T: Tensor,
        columns: Mapping[str, Tensor],
    ) -> LossSum:
        """See `TokenLoss` and the class."""
        return _sum_up("sft/loss", -_keep(logprobs_T, mask_T.bool()), weights_T, weights_T.sum(), {})


def token_mean(values_T: Tensor, counts_T: Tensor) -> MetricSum:
    """A metric that is a mean over the tokens that count. values_T: [T], 0 elsewhere. counts_T: [T] bool."""
    return MetricSum(values_T.detach().sum(), counts_T.sum(), Reduce.MEAN)


def _token_max(values_T: Tensor, counts_T: Tensor) -> MetricSum:
    # The appended 0 is below every value that comes here, and lets a micro-batch be empty.
    kept_T = torch.nn.functional.pad(_keep(values_T.detach(), counts_T), (0, 1))
    return MetricSum(kept_T.amax(), counts_T.sum(), Reduce.MAX)


def _ratio_metrics(log_ratio_T: Tensor, counts_T: Tensor) -> dict[str, MetricSum]:
    log_ratio_T = log_ratio_T.detach()
    ratio_T = _keep(log_ratio_T.clamp(max=MAX_LOG_RATIO).exp(), counts_T)
    return {
        "policy/ratio_mean": token_mean(ratio_T, counts_T),
        "policy/ratio_max": _token_max(ratio_T, counts_T),
        "policy/logprob_gap_mean": token_mean(log_ratio_T.abs(), counts_T),
        "policy/logprob_gap_max": _token_max(log_ratio_T.abs(), counts_T),
        # The samples come from the old policy, so it is the first of the two.
        "policy/kl_to_rollout": token_mean(compute_kl(-log_ratio_T, torch.zeros_like(log_ratio_T), "k3"), counts_T),
    }


def _keep(values_T: Tensor, counts_T: Tensor) -> Tensor:
    # A product with the mask would let a NaN through, in the value and in the gradient.
    return torch.where(counts_T, values_T, 0.0)


def _sum_up(name: str, loss_T: Tensor, weights_T: Tensor, weight: Tensor, metrics: dict[str, MetricSum]) -> LossSum:
    total = (weights_T.to(loss_T.dtype) * loss_T).sum()
    return LossSum(total, weight, {name: MetricSum(total.detach(), weight, Reduce.MEAN), **metrics})
