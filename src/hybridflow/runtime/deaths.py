"""The register of deaths: names each, counts them against what may be repaired, and notes when the work was done again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridflow.runtime.api import RecoverySettings, WorkersLostError
from hybridflow.runtime.tasks import Task, WorkerGroup, WorkerProcess
from hybridflow.types import Recovery

_log = logging.getLogger(__name__)


@dataclass
class _Case:
    """A death that is not made good yet."""

    record: Recovery
    group: WorkerGroup
    lost: set[Task] = field(default_factory=set)

    @property
    def closed(self) -> bool:
        return not self.lost and all(worker.ready for worker in self.group.workers)


class DeathRegister:
    """Deaths of one run."""

    def __init__(self, settings: RecoverySettings) -> None:
        self._settings = settings
        self._times_s: list[float] = []
        self._open: list[_Case] = []
        self._closed: list[Recovery] = []
        self._new = 0

    def record(self, workers: Sequence[WorkerProcess], cause: str) -> None:
        """Notes and tells the death of a worker, or of all that went with one node, which counts once.

        Raises WorkersLostError where it is one too many, in this run or under one call.
        """
        now_s = time.monotonic()
        self._times_s = [at_s for at_s in (*self._times_s, now_s) if now_s - at_s <= self._settings.window_s]
        self._new += len(workers)
        for worker in workers:
            running = next((attempt.task for attempt in worker.attempts.values() if attempt.task is not None), None)
            call = worker.name_of(running.call) if running else ""
            step = running.call.mark.step if running else 0
            case = _Case(Recovery(worker.label, call, step, cause, time.time()), worker.group)
            case.lost = {a.task for a in worker.attempts.values() if a.task is not None and not a.task.done}
            self._open.append(case)
            first = next(iter(worker.attempts.values()), None)
            doing = f"in {call}" if call else f"during {first.name}" if first else "with nothing to do"
            told = f"{worker.label} died {doing}: {cause}"
            self._check_budget(told)
            if running is not None:
                self.count_attempt(running, worker, told)
            count = f"{len(self._times_s)} of {self._settings.max_restarts}"
            _log.warning("%s; it is restarted and its work done again (%s)", told, count)

    def _check_budget(self, told: str) -> None:
        limit = self._settings.max_restarts
        if len(self._times_s) > limit:
            raise WorkersLostError(
                f"{told}; that is death {len(self._times_s)} within {self._settings.window_s:g} s and "
                f"runtime.recovery.max_restarts is {limit}"
            )

    def count_attempt(self, task: Task, worker: WorkerProcess, told: str) -> None:
        """Counts a call that has to be made again. Raises WorkersLostError where the call itself seems to be the cause."""
        # Of a call on several workers each may lose its own, as when a machine goes; it is the cause where one place loses it every time.
        place = task.place_of(worker)
        task.deaths[place] += 1
        if task.deaths[place] >= self._settings.max_attempts:
            raise WorkersLostError(
                f"{told}; the same call has lost its worker {task.deaths[place]} times, so the call itself seems to be the cause "
                f"(runtime.recovery.max_attempts is {self._settings.max_attempts})"
            )

    def restarted(self, group: WorkerGroup) -> None:
        """A worker of the group is there again."""
        if all(worker.ready for worker in group.workers):
            for case in self._open:
                if case.group is group and case.record.restarted_s is None:
                    case.record.restarted_s = time.time()
        self._close()

    def repeated(self, task: Task) -> None:
        """A call is done."""
        for case in self._open:
            if task in case.lost:
                case.lost.remove(task)
                case.record.repeated_s = None if case.lost else time.time()
        self._close()

    def _close(self) -> None:
        for case in [case for case in self._open if case.closed]:
            self._open.remove(case)
            self._closed.append(case.record)

    def count_new(self) -> int:
        """Deaths since the last look."""
        count, self._new = self._new, 0
        return count

    def take(self, *, unfinished: bool) -> list[Recovery]:
        """The deaths made good since the last look; and those that are not, where nothing more will come."""
        taken, self._closed = self._closed, []
        if unfinished:
            taken += [case.record for case in self._open]
            self._open = []
        return taken
