"""The reward: any Python function of a row, run in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import Batch
from hybridflow.columns import REWARD_COMPONENT
from hybridflow.observability.samples import compute_spread, cut_samples
from hybridflow.rewards import RewardPool, RewardSettings
from hybridflow.roles.parts import PER_TOKEN, TEXT, TOKENS, add_columns, cut_columns
from hybridflow.runtime.api import Pieces, Runtime, Seat
from hybridflow.types import BatchRef, ChunkRef, Ref, RowState

RewardFunction = Callable[..., float]


@dataclass(frozen=True)
class ScoreSummary:
    """Scored rows in a few numbers. A row that failed counts as reward 0 in `mean`: dropping it would flatter the policy.

    num_tokens: sampled. first_error: why row 0 failed, where it did. components: of several rewards, what each gave and to how many rows.
    """

    num_rows: int
    num_failed: int
    num_tokens: int
    mean: float
    first_error: str
    components: dict[str, tuple[float, int]]


class RewardWorker:
    """Holds the pool of processes that run the user's function."""

    def __init__(self, seat: Seat, settings: RewardSettings, function: RewardFunction | None) -> None:
        self.pool = RewardPool(settings, function)

    def score(self, batch: Batch, sizes: tuple[int, ...]) -> Pieces[Batch]:
        """Columns `reward` float64 (null where the function failed) and `reward_error`, in chunks of these numbers of rows."""
        return cut_columns(self.pool.score(batch), sizes)

    def summarize(self, batch: Batch) -> ScoreSummary:
        """What an evaluation tells of scored rows."""
        rewards = batch.numpy("reward")
        failed = np.isnan(rewards) | (batch.numpy("state") == RowState.FAILED)
        first = batch.slice(0, min(1, batch.num_rows))
        reasons = [*first.pylist("rollout_error"), *first.pylist("reward_error"), None]
        return ScoreSummary(
            num_rows=batch.num_rows,
            num_failed=int(failed.sum()),
            num_tokens=sum(int(mask.sum()) for mask in batch.arrays("loss_mask")),
            mean=float(np.where(failed, 0.0, rewards).mean()) if batch.num_rows else 0.0,
            first_error=next((reason for reason in reasons if reason), "no reason was given"),
            components=_read_components(batch),
        )

    def write(self, batch: Batch, path: Path) -> None:
        """Writes the rows as Parquet."""
        batch.to_parquet(path)

    def take(self, batch: Batch, rows: Sequence[int]) -> Pieces[Batch]:
        """These rows alone."""
        return Pieces((batch.take(rows),), (None,))

    def cut(self, batch: Batch, rows: Sequence[int], scores: Batch | None) -> tuple[Batch, Batch]:
        """These rows as a report shows them (`cut_samples`), with scores of theirs, and the spread of all (`compute_spread`)."""
        samples = batch.take(rows)
        return cut_samples(samples if scores is None else samples.merge(scores)), compute_spread(batch)

    def close(self) -> None:
        """Ends the processes."""
        self.pool.close()


def _read_components(batch: Batch) -> dict[str, tuple[float, int]]:
    columns = {name: batch.numpy(name) for name in batch.column_names if name.startswith(REWARD_COMPONENT)}
    given = {name.removeprefix(REWARD_COMPONENT): values[np.isfinite(values)] for name, values in columns.items()}
    return {name: (float(values.mean()), values.size) for name, values in given.items() if values.size}


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

    def summarize(self, batch: BatchRef) -> Ref[ScoreSummary]:
        """A few numbers of scored rows, taken where they are read, so that the controller need not."""
        return self._runtime.submit(self._workers, RewardWorker.summarize, batch)

    def write(self, batch: BatchRef, path: Path) -> Ref[None]:
        """Writes the rows as Parquet, beside the worker, to a path that controller and worker share."""
        return self._runtime.submit(self._workers, RewardWorker.write, batch, path)

    def take(self, batch: BatchRef, rows: Sequence[int]) -> BatchRef:
        """These rows alone, in rising order, as those that compute read them; waits for no chunk behind them."""
        starts = accumulate((chunk.num_rows for chunk in batch.chunks), initial=0)
        leading = tuple(chunk for chunk, start in zip(batch.chunks, starts, strict=False) if start <= rows[-1])
        tokens = BatchRef(leading).only(TOKENS)
        (taken,) = self._runtime.submit_pieces(self._workers, RewardWorker.take, 1, tokens, tuple(rows))
        return BatchRef((ChunkRef({TOKENS: taken}, len(rows)),))

    def cut(self, batch: BatchRef, rows: Sequence[int], scores: BatchRef | None) -> Ref[tuple[Batch, Batch]]:
        """These rows as a report shows them, with scores of theirs, and the spread of all; small enough for the controller."""
        return self._runtime.submit(self._workers, RewardWorker.cut, batch, tuple(rows), scores)
