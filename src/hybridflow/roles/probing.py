"""The probe of a worker that trains and generates: its rollout engine answers fixed prompts, its trainer scores the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hybridflow.batch import Batch
from hybridflow.rollout import RolloutEngine
from hybridflow.train_engine import Ranks, TrainEngine
from hybridflow.train_engine.logprobs import compute_batch_logprobs
from hybridflow.types import Metrics, RowState
from hybridflow.weights.probe import (
    TOLERANCES,
    ProbeError,
    ProbePrompts,
    ProbeScores,
    Tolerance,
    build_probe,
    calibrate,
    check_probe,
    choose_tolerance,
    compare,
    drop_unsettled,
    score_rows,
)

PROBE_TOKENS = 4096
"""More than the rows of a probe have together."""


class SyncProbe:
    """Holds a rollout engine to the trainer, whose weights it is to have. Every rank has one and calls `check`.

    engine: of the trainer; where ranks share the model it has a part of it, and scoring is a collective.
    ranks:  those that share the model, or that score alike; `ALONE` where each rank is checked by itself.
    seed:   of the prompts and of what is sampled.

    The first check, of a model that both sides have loaded from one place, says how much rounding there is (`calibrate`).
    """

    def __init__(self, engine: TrainEngine, ranks: Ranks, seed: int) -> None:
        self._engine, self._ranks, self._seed = engine, ranks, seed
        self._tolerance: Tolerance | None = None

    def check(self, rollout: RolloutEngine, version: int) -> Metrics:
        """Raises ProbeError where the two sides are further apart than rounding explains."""
        prompts = self._build_prompts(rollout.longest_row)
        samples = rollout.generate(prompts.batch, prompts.sampling, step=0)
        _check_states(samples, version)
        tokens, theirs = self._agree(samples.arrays("tokens")), score_rows(samples, samples.arrays("rollout_logprobs"))
        ours = score_rows(samples, self._score(samples.with_column("tokens", tokens), only_masked=True))
        kept = [
            # Of the equal tokens those that `scores` are of, the last ones of their row.
            max(count_equal(one, other) - (len(one) - len(scores)), 0)
            for one, other, scores in zip(tokens, samples.arrays("tokens"), theirs, strict=True)
        ]
        pairs = [(our[:count], their[:count]) for our, their, count in zip(ours, theirs, kept, strict=True)]
        tolerance = self._tolerance or TOLERANCES[self._engine.model.dtype]
        result = compare([our for our, _ in pairs], [their for _, their in pairs], tolerance)
        if self._tolerance is None:
            self._tolerance = calibrate(result)
            result = replace(result, tolerance=self._tolerance)
        check_probe(result, version)
        return result.metrics()

    def score(self) -> ProbeScores:
        """The trainer's log-probabilities of the prompts; a collective where ranks share the model."""
        rows = self._build_prompts(self._engine.model.config.max_position_embeddings).rows
        return ProbeScores(rows, tuple(self._score(_build_rows(rows), only_masked=False)), self._engine.model.dtype)

    def _build_prompts(self, longest_row: int) -> ProbePrompts:
        config = self._engine.model.config
        return build_probe(config.vocab_size, self._seed, min(config.max_position_embeddings, longest_row))

    def _score(self, batch: Batch, *, only_masked: bool) -> list[NDArray[np.float32]]:
        if self._ranks.size > 1:
            return self._engine.log_prob(batch, 1.0, only_masked=only_masked)
        # No rank waits for another here, though they may share the tokens of what they train on.
        return compute_batch_logprobs(
            self._engine.model, batch, temperature=1.0, micro_batch_tokens=PROBE_TOKENS, only_masked=only_masked
        )

    def _agree(self, tokens: list[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        """What the first rank has sampled: ranks that share a model score the same rows, and rounding may have parted their draws."""
        flat = np.concatenate(tokens)
        every = self._ranks.gather(flat.astype(np.float64).tolist())
        agreed = np.array(every[0]).astype(np.int32)
        return np.split(agreed, np.cumsum([len(row) for row in tokens])[:-1])


class ReceivedProbe:
    """Holds weights that were sent to a generator to what their trainer made of fixed rows: its engine's model scores the same rows."""

    def __init__(self) -> None:
        self._tolerance: Tolerance | None = None

    def check(self, engine: RolloutEngine, scores: ProbeScores, version: int) -> None:
        """Raises ProbeError where the two sides are further apart than rounding explains. An engine that cannot score is not checked."""
        ours = engine.score([row for row in scores.rows if len(row) < engine.longest_row])
        if ours is None:
            return
        theirs = drop_unsettled([row for row in scores.logprobs if len(row) < engine.longest_row])
        tolerance = self._tolerance or choose_tolerance(ours.dtype, scores.dtype)
        result = compare(theirs, drop_unsettled(ours.logprobs), tolerance)
        if self._tolerance is None:
            self._tolerance = calibrate(result)
            result = replace(result, tolerance=self._tolerance)
        check_probe(result, version)


def _build_rows(rows: Sequence[Sequence[int]]) -> Batch:
    return Batch.from_columns(
        tokens=[np.array(row, np.int32) for row in rows],
        loss_mask=[(np.arange(len(row)) > 0).astype(np.uint8) for row in rows],
        state=np.full(len(rows), RowState.OK, np.int8),
    )


def _check_states(samples: Batch, version: int) -> None:
    odd = np.flatnonzero(samples.numpy("state") != RowState.OK)
    if odd.size:
        why = samples.pylist("rollout_error")[odd[0]] or "it came back without tokens"
        raise ProbeError(
            f"version {version} of the weights cannot be generated with: prompt {odd[0]} of the probe failed ({why}); go on from the last "
            "checkpoint, with a lower optimizer.lr if its weights are not finite"
        )


def count_equal(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Tokens from the start that are the same."""
    differing = np.flatnonzero(one != other)
    return int(differing[0]) if differing.size else len(one)
