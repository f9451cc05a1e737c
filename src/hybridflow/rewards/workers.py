"""Where a reward function runs: in processes that are watched and replaced, or for debugging in this one."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config import ConfigError
from hybridflow.rewards.child import (
    FunctionError,
    Hello,
    Parameters,
    Transport,
    evaluate,
    load_function,
    read_parameters,
)
from hybridflow.rewards.process import Outcome, RewardProcess, wait

_CHUNK_S = 0.02
_MAX_CHUNK_ROWS = 256
_MAX_FAILED_STARTS = 3
_SPARE_CPU_S = 5.0

Row = Mapping[str, Any]
"""What the function is called with, e.g. `{"response": "4", "answer": "4"}`."""


class InlineFunction:
    """The function in this process, with no limits."""

    def __init__(self, transport: Transport, function: Any = None) -> None:
        self._transport, self._function = transport, function

    def start(self) -> Parameters:
        """Load the function and tell what it asks for. Raises ConfigError."""
        try:
            self._function = self._function or load_function(self._transport)
            return read_parameters(self._function)
        except FunctionError as error:
            raise ConfigError(f"reward.function: {error}") from error

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        """Call the function on each row."""
        return [evaluate(self._function, dict(row)) for row in rows]

    def close(self) -> None:
        """Nothing to end."""


class ProcessGroup:
    """`workers` processes that share out rows.

    A process gets rows worth some milliseconds at a time: the pipes cost little where the function is fast, and where it is slow no process
    sits on rows that another could run. If one hangs, dies or writes nonsense, the row it was at is an error, the rows after it go back to
    the head of the queue, and a new process takes its place.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        workers: int,
        timeout_s: float,
        startup_timeout_s: float,
        max_memory_bytes: int | None,
    ) -> None:
        self._transport, self._workers = transport, workers
        self._timeout_s, self._startup_timeout_s = timeout_s, startup_timeout_s
        self._max_memory_bytes = max_memory_bytes
        self._processes: list[RewardProcess] = []
        self._failed_starts = 0
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, os.getpid())

    def start(self) -> Parameters:
        """Start what is not running; return when one process has loaded the function. Raises ConfigError if it cannot be loaded."""
        while len(self._processes) < self._workers:
            self._processes.append(self._spawn())
        while True:
            self._pump({}, deque())
            for process in self._processes:
                if process.parameters is not None:
                    return process.parameters
            wait(self._processes)

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        """One outcome a row, in order."""
        self.start()
        outcomes: dict[int, Outcome] = {}
        try:
            self._serve(rows, outcomes)
        finally:
            if len(outcomes) < len(rows):
                # Interrupted: answers that are still to come must not be taken for those of other rows.
                self.close()
        return [outcomes[index] for index in range(len(rows))]

    def close(self) -> None:
        """End the processes and what they started."""
        _kill_all(self._processes, os.getpid())

    def _serve(self, rows: Sequence[Row], outcomes: dict[int, Outcome]) -> None:
        queue = deque(range(len(rows)))
        while len(outcomes) < len(rows):
            for process in self._processes:
                if process.is_idle and queue:
                    chunk = [queue.popleft() for _ in range(self._plan_chunk(process, len(queue)))]
                    process.give([(index, rows[index]) for index in chunk])
            wait(self._processes)
            self._pump(outcomes, queue)

    def _plan_chunk(self, process: RewardProcess, num_queued: int) -> int:
        """Rows that take about `_CHUNK_S`, by what the last ones took; never more than the process's share of what is left."""
        affordable = int(_CHUNK_S / process.row_s) if process.row_s else 1
        return max(1, min(affordable, _MAX_CHUNK_ROWS, math.ceil(num_queued / self._workers)))

    def _pump(self, outcomes: dict[int, Outcome], queue: deque[int]) -> None:
        for place, process in enumerate(self._processes):
            outcomes.update(process.pump())
            if process.startup_error is not None:
                self.close()
                raise ConfigError(f"reward.function: {process.startup_error}")
            fault = process.fault()
            if fault is not None:
                self._bury(process, fault, outcomes, queue)
                self._processes[place] = self._spawn()
            elif process.parameters is not None:
                self._failed_starts = 0

    def _bury(self, process: RewardProcess, fault: str, outcomes: dict[int, Outcome], queue: deque[int]) -> None:
        suspect = process.pending[0] if process.pending else None
        outcomes.update(process.kill())
        if process.parameters is None:
            self._count_failed_start(fault)
        rest = list(process.pending)
        if rest and rest[0] == suspect:
            outcomes[rest.pop(0)] = (None, fault)
        queue.extendleft(reversed(rest))

    def _count_failed_start(self, fault: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self.close()
            raise ConfigError(
                f"reward.function: {self._failed_starts} processes in a row did not get as far as having loaded it ({fault}); "
                "see that it can be imported, and raise reward.startup_timeout_s or reward.max_memory_bytes if it needs more"
            )

    def _spawn(self) -> RewardProcess:
        hello = Hello(
            sys_path=[path or os.getcwd() for path in sys.path],
            function=self._transport,
            max_memory_bytes=self._max_memory_bytes,
            # All cores may work on a row, so only this much CPU time is surely beyond its time limit.
            cpu_limit_s=self._timeout_s * (os.cpu_count() or 1) + _SPARE_CPU_S,
        )
        return RewardProcess(hello, timeout_s=self._timeout_s, startup_timeout_s=self._startup_timeout_s)


def _kill_all(processes: list[RewardProcess], owner_pid: int) -> None:
    # A process forked from the owner has this list too, and must leave the owner's processes alone.
    if os.getpid() == owner_pid:
        while processes:
            processes.pop().kill()
