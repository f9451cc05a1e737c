"""Where reward functions run: in processes that are watched and replaced, or for debugging in this one."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridflow.config import ConfigError
from hybridflow.rewards.child import (
    Described,
    FunctionError,
    Hello,
    Loaded,
    Parameters,
    close_loop,
    load,
    read_parameters,
    serve,
)
from hybridflow.rewards.process import Outcome, RewardProcess, wait

_CHUNK_S = 0.02
_MAX_CHUNK_ROWS = 256
_MAX_FAILED_STARTS = 3
_SPARE_CPU_S = 5.0
_GRACE_S = 1.0
"""What an async function has beyond its time limit to end by itself, before its process is killed with all rows it works on."""


class Item(NamedTuple):
    """One call: of which function, and with what, e.g. `Item("accuracy", {"response": "4", "answer": "4"})`."""

    function: str
    columns: Mapping[str, Any]


def name_key(function: str) -> str:
    """The setting that names a function: of several, or of the only one, which has no name."""
    return f"reward.components.{function}.function" if function else "reward.function"


class InlineFunctions:
    """The functions in this process, with no limits. live: by name, those that were passed as objects."""

    def __init__(self, functions: Mapping[str, Described], live: Mapping[str, Any]) -> None:
        self._described = {name: Described(**{**described, "timeout_s": None}) for name, described in functions.items()}
        self._live = live
        self._loaded: dict[str, Loaded] = {}

    def start(self) -> dict[str, Parameters]:
        """Load the functions and tell what each asks for. Raises ConfigError."""
        return {name: self._load(name) for name in self._described}

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Call the functions."""
        outcomes: dict[int, Outcome] = {}

        def answer(index: int, reward: float | None, error: str | None) -> None:
            outcomes[index] = reward, error

        for name, function in self._loaded.items():
            rows = [(index, dict(item.columns)) for index, item in enumerate(items) if item.function == name]
            if rows:
                serve(function, rows, answer)
        return [outcomes[index] for index in range(len(items))]

    def close(self) -> None:
        """Ends the loop of async functions; there is no process."""
        close_loop()

    def _load(self, name: str) -> Parameters:
        try:
            if name not in self._loaded:
                loaded = load(self._described[name])
                # The object itself, not a copy of it: a debugger looks at it.
                self._loaded[name] = loaded._replace(call=self._live.get(name, loaded.call))
            return read_parameters(self._loaded[name])
        except FunctionError as error:
            raise ConfigError(f"{name_key(name)}: {error}") from error


class ProcessGroup:
    """`workers` processes that share out calls; each of them has all functions.

    A process gets rows of one function worth some milliseconds at a time: the pipes cost little where the function is fast, and where it
    is slow no process sits on rows that another could run. Of an async function it gets up to `concurrency` rows, of one of batches all.
    If one hangs, dies or writes nonsense, the row it was at is an error, the rows after it go back to the head of the queue, and a new
    process takes its place. Where several rows ran at once it cannot be told which one did it: each of them is run again alone. A batch
    fails whole.
    """

    def __init__(
        self,
        functions: Mapping[str, Described],
        *,
        workers: int,
        concurrency: int,
        startup_timeout_s: float,
        max_memory_bytes: int | None,
    ) -> None:
        self._functions, self._workers, self._concurrency = dict(functions), workers, concurrency
        self._startup_timeout_s = startup_timeout_s
        self._max_memory_bytes = max_memory_bytes
        self._processes: list[RewardProcess] = []
        self._parameters: dict[str, Parameters] = {}
        self._failed_starts = 0
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, os.getpid())

    def start(self) -> dict[str, Parameters]:
        """Start what is not running; return when one process has loaded the functions. Raises ConfigError if one cannot be loaded."""
        while len(self._processes) < self._workers:
            self._processes.append(self._spawn())
        while True:
            self._pump({}, deque(), set())
            for process in self._processes:
                if process.parameters is not None:
                    self._parameters = process.parameters
                    return process.parameters
            wait(self._processes)

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome a call, in order; calls of one function side by side."""
        self.start()
        outcomes: dict[int, Outcome] = {}
        try:
            self._serve(items, outcomes)
        finally:
            if len(outcomes) < len(items):
                # Interrupted: answers that are still to come must not be taken for those of other rows.
                self.close()
        return [outcomes[index] for index in range(len(items))]

    def close(self) -> None:
        """End the processes and what they started."""
        _kill_all(self._processes, os.getpid())

    def _serve(self, items: Sequence[Item], outcomes: dict[int, Outcome]) -> None:
        queue, alone = deque(range(len(items))), set[int]()
        while len(outcomes) < len(items):
            for process in self._processes:
                if process.is_idle and queue:
                    name = items[queue[0]].function
                    num_same = next((n for n, index in enumerate(queue) if items[index].function != name), len(queue))
                    size = 1 if queue[0] in alone else self._plan_chunk(process, name, num_same)
                    chunk = [(index, items[index].columns) for index in (queue.popleft() for _ in range(size))]
                    process.give(name, chunk, self._find_limit_s(name))
            wait(self._processes)
            self._pump(outcomes, queue, alone)

    def _plan_chunk(self, process: RewardProcess, name: str, num_queued: int) -> int:
        """Rows that take about `_CHUNK_S`, by what the last ones took; never more than the process's share of what is left."""
        if self._functions[name]["per"] == "batch":
            return num_queued
        share = math.ceil(num_queued / self._workers)
        if self._parameters[name]["is_async"]:
            return min(self._concurrency, share)
        row_s = process.row_s.get(name)
        return max(1, min(int(_CHUNK_S / row_s) if row_s else 1, _MAX_CHUNK_ROWS, share))

    def _find_limit_s(self, name: str) -> float:
        """Seconds without an answer after which a process is killed."""
        return (self._functions[name]["timeout_s"] or math.inf) + (
            _GRACE_S if self._parameters[name]["is_async"] else 0.0
        )

    def _pump(self, outcomes: dict[int, Outcome], queue: deque[int], alone: set[int]) -> None:
        for place, process in enumerate(self._processes):
            outcomes.update(process.pump())
            if process.startup_error is not None:
                self.close()
                name, error = process.startup_error
                raise ConfigError(f"{name_key(name)}: {error}")
            fault = process.fault()
            if fault is not None:
                self._bury(process, fault, outcomes, queue, alone)
                self._processes[place] = self._spawn()
            elif process.parameters is not None:
                self._failed_starts = 0

    def _bury(
        self, process: RewardProcess, fault: str, outcomes: dict[int, Outcome], queue: deque[int], alone: set[int]
    ) -> None:
        suspect = process.pending[0] if process.pending else None
        outcomes.update(process.kill())
        if process.parameters is None:
            self._count_failed_start(fault)
        rest = list(process.pending)
        if rest and self._functions[process.function]["per"] == "batch":
            outcomes.update((index, (None, fault)) for index in rest)
            return
        if rest and rest[0] == suspect:
            if self._parameters[process.function]["is_async"] and len(rest) > 1:
                alone.update(rest)
            else:
                outcomes[rest.pop(0)] = (None, fault)
        queue.extendleft(reversed(rest))

    def _count_failed_start(self, fault: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self.close()
            raise ConfigError(
                f"{name_key(next(iter(self._functions)))}: {self._failed_starts} processes in a row did not get as far as having loaded it "
                f"({fault}); see that it can be imported, and raise reward.startup_timeout_s or reward.max_memory_bytes if it needs more"
            )

    def _spawn(self) -> RewardProcess:
        longest_s = max(described["timeout_s"] or 0.0 for described in self._functions.values())
        hello = Hello(
            sys_path=[path or os.getcwd() for path in sys.path],
            functions=self._functions,
            max_memory_bytes=self._max_memory_bytes,
            # All cores may work on a row, so only this much CPU time is surely beyond its time limit.
            cpu_limit_s=longest_s * (os.cpu_count() or 1) + _SPARE_CPU_S,
        )
        return RewardProcess(hello, startup_timeout_s=self._startup_timeout_s)


def _kill_all(processes: list[RewardProcess], owner_pid: int) -> None:
    # A process forked from the owner has this list too, and must leave the owner's processes alone.
    if os.getpid() == owner_pid:
        while processes:
            processes.pop().kill()
