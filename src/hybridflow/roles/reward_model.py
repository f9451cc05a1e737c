"""The reward: any Python function of a row, run in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.batch import Batch
from hybridflow.rewards import RewardPool, RewardSettings
from hybridflow.roles.parts import PER_TOKEN, TEXT, TOKENS, add_columns, cut_columns
from hybridflow.runtime.api import Pieces, Runtime, Seat
from hybridflow.types import BatchRef

RewardFunction = Callable[..., float]


class RewardWorker:
    """Holds the pool of processes that run the user's function."""

    def __init__(self, seat: Seat, settings: RewardSettings, function: RewardFunction | None) -> None:
        self.pool = RewardPool(settings, function)

    def score(self, batch: Batch, sizes: tuple[int, ...]) -> Pieces[Batch]:
        """Columns `reward` float64 (null where the function failed) and `reward_error`, in chunks of these numbers of rows."""
        return cut_columns(self.pool.score(batch), sizes)

    def close(self) -> None:
        """Ends the processes."""
        self.pool.close()


class RewardModel:
    """Verbs of the reward on the page.

    columns: those that the function names, so that per-token ones are pulled only where it asks for them; None where it is not known.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: RewardSettings,
        function: Callable[..., Any] | None = None,
        columns: frozenset[str] | None = None,
    ) -> None:
        self._runtime = runtime
        asks_for_tokens = columns is None or bool(columns.intersection(PER_TOKEN))
        self._parts = (TEXT, TOKENS) if asks_for_tokens else (TEXT,)
        self._workers = runtime.place("reward", RewardWorker, settings, function)

    def score(self, batch: BatchRef) -> BatchRef:
        """Rewards of the rows."""
        return add_columns(self._runtime, self._workers, RewardWorker.score, batch.only(*self._parts), "reward")
