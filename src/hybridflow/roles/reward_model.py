"""The reward: any Python function of a row, run in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.batch import Batch
from hybridflow.rewards import RewardPool, RewardSettings
from hybridflow.runtime.api import Runtime
from hybridflow.types import BatchRef

RewardFunction = Callable[..., float]


class RewardWorker:
    """Holds the pool of processes that run the user's function."""

    def __init__(self, settings: RewardSettings, function: RewardFunction | None) -> None:
        self.pool = RewardPool(settings, function)

    def score(self, batch: Batch) -> Batch:
        """Columns `reward` float64 (null where the function failed) and `reward_error`."""
        return self.pool.score(batch)

    def close(self) -> None:
        """Ends the processes."""
        self.pool.close()


class RewardModel:
    """Verbs of the reward on the page."""

    def __init__(self, runtime: Runtime, settings: RewardSettings, function: Callable[..., Any] | None = None) -> None:
        self._runtime = runtime
        self._worker = runtime.place("reward", RewardWorker, settings, function)

    def score(self, batch: BatchRef) -> BatchRef:
        """Rewards of the rows, chunk by chunk."""
        chunks = (self._runtime.submit(self._worker, RewardWorker.score, chunk) for chunk in batch.chunks)
        return BatchRef(tuple(chunks), batch.chunk_rows)
