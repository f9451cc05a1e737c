"""A reward for each row of a batch: by a user's function, in processes of its own, with a time limit on each row."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import TracebackType

from hybridflow.batch import Batch
from hybridflow.config import Field, settings
from hybridflow.rewards.child import Parameters
from hybridflow.rewards.function import (
    SCORED_COLUMNS,
    RewardFunction,
    check_columns,
    choose_columns,
    describe_transport,
)
from hybridflow.rewards.process import Outcome
from hybridflow.rewards.workers import InlineFunction, ProcessGroup
from hybridflow.types import RowState

_log = logging.getLogger(__name__)


@settings
class RewardSettings:
    """Which function says what a response is worth, and within which limits."""

    function: str | None = None
    """`pkg.mod:fn`, `path/to/file.py:fn`, `exact_match` or `gsm8k`. It is given the columns that its parameters name."""
    timeout_s: float = Field(default=10.0, gt=0.0)
    """Seconds for one row; then its process is killed and the row is an error."""
    workers: int = Field(default=2, ge=1)
    """Processes that score rows side by side."""
    startup_timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds for a process to start and import the function."""
    max_memory_bytes: int | None = Field(default=None, gt=0)
    """Address space of each process, beyond which its allocations fail; null does not limit it."""
    inline: bool = False
    """Calls the function in this process, where a debugger reaches it, without any of these limits."""


class RewardPool:
    """Scores batches by a function: the one that the settings name, or a live one in its place.

    A row whose function raises, runs out of time, ends its process or gives anything but a finite number has reward null and says why in
    `reward_error`; it touches no other row. The processes start at the first call and end with `close()`, with the pool, or with this
    process, however that ends.
    """

    def __init__(self, settings: RewardSettings, function: RewardFunction | None = None) -> None:
        transport = describe_transport(settings.function, function)
        self._workers: InlineFunction | ProcessGroup
        if settings.inline:
            self._workers = InlineFunction(transport, function)
        else:
            self._workers = ProcessGroup(
                transport,
                workers=settings.workers,
                timeout_s=settings.timeout_s,
                startup_timeout_s=settings.startup_timeout_s,
                max_memory_bytes=settings.max_memory_bytes,
            )

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> Parameters:
        """Start the processes, if they have not, and tell what the function asks for. Raises ConfigError if it cannot be loaded."""
        return self._workers.start()

    def score(self, batch: Batch) -> Batch:
        """Columns `reward` float64 and `reward_error` string for the same rows; in each row one of the two is null.

        A row whose `state` is not OK is not scored: its `reward_error` says so.
        """
        names = choose_columns(self.start(), batch.schema)
        states = batch.pylist("state") if "state" in batch else [int(RowState.OK)] * batch.num_rows
        scored = [index for index, state in enumerate(states) if state == RowState.OK]
        columns = {name: batch.pylist(name) for name in names}
        found = self._workers.run([{name: columns[name][index] for name in names} for index in scored])
        _warn_of_errors(scored, found)
        by_row = dict(zip(scored, found, strict=True))
        outcomes = [by_row.get(index) or _skip(state) for index, state in enumerate(states)]
        return Batch.from_columns(
            reward=[reward for reward, _ in outcomes], reward_error=[error for _, error in outcomes]
        )

    def close(self) -> None:
        """End the processes and what they started. Takes no longer than killing them does; the next call starts new ones."""
        self._workers.close()


def check_reward(
    settings: RewardSettings, function: RewardFunction | None = None, columns: Iterable[str] | None = None
) -> frozenset[str]:
    """Raise ConfigError if no reward is named, if it cannot be loaded, or if it asks for a column that rows will not have.

    columns: those of the data, e.g. `("question", "answer")`, to which what a rollout adds is added; None leaves names unchecked.
    returns: the columns that the function names.
    """
    with RewardPool(settings, function) as pool:
        parameters = pool.start()
        if columns is not None:
            check_columns(parameters, (*SCORED_COLUMNS, *columns))
        return frozenset({*parameters["required"], *parameters["optional"]})


def _warn_of_errors(scored: list[int], found: list[Outcome]) -> None:
    errors = [(index, error) for index, (_, error) in zip(scored, found, strict=True) if error is not None]
    if errors:
        _log.warning("%d of %d rewards are errors; the first, row %d: %s", len(errors), len(scored), *errors[0])


def _skip(state: int) -> Outcome:
    return None, f"not scored: the row is {RowState(state).name}"
