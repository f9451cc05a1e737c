"""The probe of a worker that trains and generates: its rollout engine answers fixed prompts, its trainer scores the answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hybridflow.rollout import RolloutEngine
from hybridflow.train_engine import Ranks, TrainEngine
from hybridflow.types import Metrics, RowState
from hybridflow.weights.probe import (
    TOLERANCES,
    ProbePrompts,
    Tolerance,
    build_probe,
    calibrate,
    check_probe,
    compare,
    score_rows,
)


class SyncProbe:
    """Holds an engine to the trainer, whose weights it is to have. Every rank has one and calls `check`.

    engine: the trainer; in parts where ranks share the model, so that scoring is a collective.

    The first check, of a model that both sides have loaded from one place, says how much rounding there is.
    """

    def __init__(self, engine: TrainEngine, ranks: Ranks, seed: int) -> None:
        self._engine, self._ranks = engine, ranks
        config = engine.model.config
        self._tolerance: Tolerance | None = None
        self.prompts: ProbePrompts = build_probe(config.vocab_size, seed, config.max_position_embeddings)

    def check(self, rollout: RolloutEngine, version: int) -> Metrics:
        """Raises ProbeError where the two sides are further apart than rounding explains."""
        found = rollout.generate(self.prompts.batch, self.prompts.sampling, step=0)
        rows = np.flatnonzero(found.numpy("state") == RowState.OK)
        samples = found.take(rows)
        tokens, theirs = self._agree(samples.arrays("tokens")), score_rows(samples, samples.arrays("rollout_logprobs"))
        ours = score_rows(samples, self._engine.log_prob(samples.with_column("tokens", tokens), 1.0))
        kept = [
            count_equal(one, other) - len(one) + len(scores)
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

    def _agree(self, tokens: list[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        """What the first of the ranks has sampled: those that share a model score the same rows. Rounding may part the others' draws."""
        flat = np.concatenate(tokens)
        every = self._ranks.gather(flat.astype(np.float64).tolist())
        agreed = np.array(every[0]).astype(np.int32)
        return np.split(agreed, np.cumsum([len(row) for row in tokens])[:-1])


def count_equal(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Tokens from the start that are the same."""
    differing = np.flatnonzero(one != other)
    return int(differing[0]) if differing.size else len(one)
