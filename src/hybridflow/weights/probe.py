"""After each sync a few fixed prompts are generated on and scored on both sides; a mismatch stops the run.

The rollout answers the prompts through all that it samples with (prefix cache, decode kernels, captured graphs), the trainer scores the
very tokens that came out, and the log-probabilities are compared token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config import HybridflowError
from hybridflow.types import Metrics, SamplingParams, maximum, mean

PROMPT_LENGTHS = (3, 21, 40, 70)
"""Within a cache block, and across one and two of 32 tokens."""
UNSETTLED_TOKENS = 12
"""Of a row of random tokens, the first ones, whose predictions do not count: there some models amplify rounding a hundredfold.
SmolLM2-135M in bfloat16 is 0.06 nats from float32 in the mean, and up to 12 at the second token of one row in twenty."""
NEW_TOKENS = 24


class ProbeError(HybridflowError, RuntimeError):
    """Trainer and rollout compute different log-probabilities: the rollout's weights, or what it has cached of older ones, are not the
    trainer's."""


@dataclass(frozen=True)
class ProbePrompts:
    """Rows of token ids that are the same in each probe of a run; `batch` and `sampling` are for `RolloutEngine.generate`."""

    rows: tuple[tuple[int, ...], ...]
    seed: int
    new_tokens: int = NEW_TOKENS

    @property
    def batch(self) -> Batch:
        """One group a row."""
        tokens = [np.array(row, np.int32) for row in self.rows]
        return Batch.from_columns(group_id=list(range(len(tokens))), prompt_tokens=tokens)

    @property
    def sampling(self) -> SamplingParams:
        """From the whole distribution, so that what is reported is the model's own log-probability; rows of one length."""
        return SamplingParams(temperature=1.0, max_new_tokens=self.new_tokens, ignore_eos=True, seed=self.seed)


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """What one side makes of fixed rows, for another that has no trainer beside it: log-probability of each token, 0 at the first.

    dtype: in which the side computes.
    """

    rows: tuple[tuple[int, ...], ...]
    logprobs: tuple[NDArray[np.float32], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Tolerance:
    """Largest differences of log-probabilities (absolute, nats) that rounding explains: `Tolerance(mean=0.01, max=0.2)`."""

    mean: float
    max: float


TOLERANCES = {
    torch.float64: Tolerance(mean=2e-6, max=2e-5),
    torch.float32: Tolerance(mean=1e-5, max=1e-4),
    torch.bfloat16: Tolerance(mean=0.01, max=0.2),
}
"""By the type that both sides compute in. Log-probabilities themselves are float32."""
_ALLOWANCE, _MOST = 3.0, 10.0
_SET_ASIDE = 0.02
"""Share of the tokens that do not count, those furthest apart: the same model is over 0.5 nats from float32 at one later token of a
thousand, which a run of many probes would meet."""


def choose_tolerance(*dtypes: torch.dtype) -> Tolerance:
    """Of sides that compute in these types: that of the coarsest."""
    return max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.mean)


@dataclass(frozen=True)
class ProbeResult:
    """How far apart the two sides are over the tokens that count, and where most: at the token `position` of the row `prompt`."""

    num_tokens: int
    mean_gap: float
    max_gap: float
    prompt: int
    position: int
    trainer: float
    rollout: float
    tolerance: Tolerance

    @property
    def passed(self) -> bool:
        """Whether rounding explains it."""
        return self.mean_gap <= self.tolerance.mean and self.max_gap <= self.tolerance.max

    def metrics(self) -> Metrics:
        """For the run's log."""
        return {
            "probe/mean_gap": mean(self.mean_gap, self.num_tokens),
            "probe/max_gap": maximum(self.max_gap),
        }


def build_probe(vocabulary: int | Sized, seed: int, context: int | None = None) -> ProbePrompts:
    """The prompts of a run.

    vocabulary: its size, or a tokenizer, whose length it is.
    context:    most tokens of a row; prompts are cut to leave half of it, at most `NEW_TOKENS`, for answers.

    Ids are drawn one from each of equal slices of the vocabulary, in random order: 134 tokens reach every part of an embedding that is
    split over up to 64 ranks.
    """
    size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    rng, count = np.random.default_rng(seed), sum(PROMPT_LENGTHS)
    borders = np.arange(count + 1) * size // count
    ids = np.minimum(borders[:-1] + rng.integers(0, np.maximum(np.diff(borders), 1)), size - 1)
    parts = np.split(rng.permutation(ids), np.cumsum(PROMPT_LENGTHS)[:-1])
    new_tokens = NEW_TOKENS if context is None else min(NEW_TOKENS, max(context // 2, 1))
    longest = count if context is None else max(context - new_tokens, 1)
    return ProbePrompts(tuple(tuple(part[:longest].tolist()) for part in parts), seed, new_tokens)


def compare(
    trainer: Sequence[NDArray[np.float32]], rollout: Sequence[NDArray[np.float32]], tolerance: Tolerance
) -> ProbeResult:
    """How far the two sides' log-probabilities of the same tokens are apart; `check_probe` raises where it is too far.

    trainer, rollout: one array a row, of the same lengths, values at tokens that were sampled and 0 elsewhere on both sides, or of sampled
                      tokens alone. What is not finite on a side is infinitely far.

    The 2 % of the tokens that are furthest apart are set aside, one of 87, unless one is not finite.

    What it sees, measured on random models of two layers and a width of 64 (`tests/unit/test_weights_probe.py` holds it): any one tensor
    left at its old value, where an update has moved it by 0.3 % of its RMS or more in float32, by 10 % in bfloat16; there the noise of
    rounding is 0.001 in the mean, a tenth of the tolerance. A square matrix that came transposed, an adapter that never came, a head that
    stayed behind, keys and values of older weights are far above either.

    What it cannot see: a weight that is left out while updates are still smaller than that, as in the first steps at a learning rate of
    1e-6; in bfloat16 small biases of queries and keys, which the softmax all but cancels; rows of an embedding that no token of the probe
    uses; what touches a fiftieth of its tokens or fewer, as one of 64 parts of a head does. Where `iter_moved` comes before the first
    sync, the first of these is seen too.
    """
    lengths = [len(row) for row in trainer]
    if lengths != [len(row) for row in rollout] or not sum(lengths):
        raise ValueError(
            f"rows have {lengths} log-probabilities of the trainer and others of the rollout; score the same tokens"
        )
    ours, theirs = np.concatenate(trainer).astype(np.float64), np.concatenate(rollout).astype(np.float64)
    finite = np.isfinite(ours) & np.isfinite(theirs)
    gaps = np.abs(np.subtract(ours, theirs, out=np.full(len(ours), math.inf), where=finite))
    count = max(int(((ours != 0) | (theirs != 0)).sum()), 1)
    aside = int(_SET_ASIDE * count) if finite.all() else 0
    order = np.argsort(-gaps, kind="stable")[aside:]
    worst, counted = int(order[0]), count - aside
    prompt = int(np.searchsorted(np.cumsum(lengths), worst, side="right"))
    return ProbeResult(
        counted, float(gaps[order].sum() / counted), float(gaps[worst]), prompt, worst - sum(lengths[:prompt]),
        float(ours[worst]), float(theirs[worst]), tolerance,
    )  # fmt: skip


def calibrate(first: ProbeResult) -> Tolerance:
    """The tolerance of a run from its first probe, when both sides have just been loaded from one place: three times what rounding is
    there, at least the tolerance it was compared by, at most ten times that. Some models round more than others. A fault that is there
    from the first probe on is seen only beyond that."""
    base = first.tolerance
    return Tolerance(
        mean=min(max(base.mean, _ALLOWANCE * first.mean_gap), _MOST * base.mean),
        max=min(max(base.max, _ALLOWANCE * first.max_gap), _MOST * base.max),
    )


def check_probe(result: ProbeResult, version: int) -> None:
    """Raises ProbeError unless rounding explains the difference."""
    if not result.passed:
        limit = result.tolerance
        raise ProbeError(
            f"version {version} of the weights is not the same on both sides: over {result.num_tokens} tokens the log-probabilities of "
            f"trainer and rollout differ by {result.mean_gap:.3g} in the mean and {result.max_gap:.3g} at most (tolerance {limit.mean:g} "
            f"and {limit.max:g}, the furthest 2 % left out); prompt {result.prompt} is worst, at token {result.position}: "
            f"{result.trainer:.6g} and {result.rollout:.6g}. A weight was left out or came wrong, or something cached of older ones is "
            "still in use: go on from the last checkpoint with another transport or engine, and report it"
        )


def drop_unsettled(rows: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """What whole rows have at the tokens that count, see `UNSETTLED_TOKENS`; of a short row the second half."""
    return [np.asarray(row)[min(UNSETTLED_TOKENS, len(row) // 2) :] for row in rows]


def iter_moved(weights: Iterable[tuple[str, Tensor]], seed: int, scale: float = 0.3) -> Iterator[tuple[str, Tensor]]:
    """Copies of weights, each moved by noise of `scale` times its own RMS.

    To be sent before the first true version: from then on every tensor at the rollout is far from what it should be unless the sync has
    reached it, so the probe sees what the sync leaves out even where training moves weights by less than rounding. Tests of a sync do
    so; a run does not.
    """
    for index, (name, weight) in enumerate(weights):
        generator = torch.Generator(weight.device).manual_seed(seed + index)
        noise = torch.randn(weight.shape, generator=generator, device=weight.device)
        rms = weight.float().square().mean().sqrt().clamp_min(1e-3)
        yield name, (weight.float() + scale * rms * noise).to(weight.dtype)


def score_rows(batch: Batch, logprobs: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Of each row those of sampled tokens that count: rows as `RolloutEngine.generate` gave them, with values at every token."""
    masks = drop_unsettled(batch.arrays("loss_mask"))
    return [row[np.asarray(mask, np.bool_)] for row, mask in zip(drop_unsettled(logprobs), masks, strict=True)]
