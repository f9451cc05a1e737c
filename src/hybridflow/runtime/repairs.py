"""What is done about workers that die, do not answer, or fail: named, restarted on what is left, and their work done again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hybridflow.runtime.api import WorkerError, WorkersLostError
from hybridflow.runtime.dispatcher import Dispatcher
from hybridflow.runtime.host import Failure
from hybridflow.runtime.tasks import Attempt, Result, StateLostError, Task, WorkerGroup, WorkerProcess
from hybridflow.runtime.transport import InputLost
from hybridflow.types import PeerLostError

LOOK_S = 1.0
"""Seconds between looks at the clocks, and at workers that have nothing to do."""
MAX_LOOKED_AT = 32
"""Idle workers asked for a sign of life at each look."""
GRACE_S = 3.0
"""Seconds that the other ranks of a gang have to answer after one has failed: the error that came first is the one to tell."""
PEER_GRACE_S = 30.0
"""The same where a rank says only that another one left: a death or that one's own error will explain it."""
_log = logging.getLogger(__name__)


class Repairs:
    """Acts on deaths, lost objects, silence and errors among the dispatcher's workers."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._transport = dispatcher, dispatcher.transport
        self._settings = dispatcher.settings
        self._looked_s = time.monotonic()
        self._next_look = 0

    # Deaths.

    def bury(self, worker: WorkerProcess, cause: str) -> None:
        """A worker is gone: names it, and sees that its place is taken and its work done again."""
        node_id = worker.info.node_id if worker.info else ""
        lost_node = bool(node_id) and self._transport.node_is_lost(node_id)
        told = f"its node does not answer ({cause})" if lost_node else cause
        self._dispatcher.deaths.record(worker, told, list(worker.attempts.values()))
        if not lost_node:
            self._replace([worker])
            return
        groups = self._dispatcher.groups
        self._replace([w for group in groups for w in group.workers if w.info and w.info.node_id == node_id])
        for task in [task for group in groups for task in (*group.taken, *group.reads)]:
            if task.done and task.only_result().node_id == node_id:
                self.remake(task)

    def _replace(self, gone: Sequence[WorkerProcess]) -> None:
        for group in dict.fromkeys(worker.group for worker in gone):
            dead = [worker for worker in gone if worker.group is group]
            swept = list(group.workers) if group.gang else dead
            needed = [task for worker in swept for task in self._clear(worker)]
            if group.gang or any(group.changed_after(task) for task in needed):
                swept = self._rewind(group, needed, swept)
            else:
                self._requeue(group, needed)
            for worker in swept:
                self._settle(worker, moved=worker in dead)

    def _clear(self, worker: WorkerProcess) -> list[Task]:
        """Ends a worker's process; returns the reads that it was to carry out. (The changes are in the group's past.)"""
        attempts, worker.attempts = list(worker.attempts.values()), {}
        dispatcher = self._dispatcher
        for attempt in attempts:
            dispatcher.flying.pop(attempt.key, None)
        dispatcher.failed = [entry for entry in dispatcher.failed if entry[1].worker is not worker]
        worker.group.free.pop(worker, None)
        worker.ready, worker.info = False, None
        if worker.handle is not None:
            self._transport.kill(worker.handle)
            worker.handle = None
        return [a.task for a in attempts if a.task is not None and not a.task.changes and not a.task.done]

    def _requeue(self, group: WorkerGroup, reads: Sequence[Task]) -> None:
        for task in reads:
            self._dispatcher.await_inputs(task)
            group.segments[0].add(task)

    def _rewind(
        self, group: WorkerGroup, needed: Sequence[Task], swept: Sequence[WorkerProcess]
    ) -> list[WorkerProcess]:
        """Queues the group's changes to go through again, from a snapshot or from weights that replaced all before.

        swept:   workers whose processes have ended.
        returns: workers that need new ones: those, or all where the changes go back to the build.
        """
        for task in needed:
            self._dispatcher.await_inputs(task)
        try:
            as_they_are = group.requeue(needed)
        except StateLostError:
            raise WorkersLostError(
                f"the state of {group.role} is lost: no snapshot of it is left outside the workers that died; "
                "set runtime.recovery.snapshot_every_steps=1, and start the same command again to go on from the last checkpoint"
            ) from None
        for change in group.queued_changes():
            self._dispatcher.await_inputs(change)
            change.results = change.results if change.done else {}
        if as_they_are:
            return list(swept)
        for worker in group.workers:
            if worker not in swept:
                self._requeue(group, self._clear(worker))
        return list(group.workers)

    def _settle(self, worker: WorkerProcess, *, moved: bool, share: bool = False) -> None:
        """Gives a worker's place a process again: where it was, or where there is room."""
        if worker.slot is not None and moved:
            found = self._transport.find_slot(worker.slot, share=share)
            if found is None:
                worker.homeless_since_s = worker.homeless_since_s or time.monotonic()
                return
            if found != worker.slot:
                _log.warning("%s moves to another node", worker.label)
            worker.slot = found
        self._dispatcher.open(worker)

    def _give_up_place(self, worker: WorkerProcess) -> None:
        """No place is free for this worker: it shares one, or its group goes on without it, or the run ends."""
        group = worker.group
        waited_s = self._settings.recovery.wait_for_node_s
        if group.size > 1:
            _log.warning("no place is free for %s; its group goes on with %d workers", worker.label, group.size - 1)
            group.remove(worker)
            for change in [change for change in group.catch_up() if not change.done]:
                self._dispatcher.finish(change)
            self._dispatcher.start_together(group)
            return
        self._settle(worker, moved=True, share=True)
        if worker.homeless_since_s is not None:
            raise WorkersLostError(
                f"no place is left for {worker.label}: for {waited_s:g} s no node had a device of its kind; add a node, or raise "
                "runtime.recovery.wait_for_node_s"
            )
        _log.warning("no place is free for %s; it shares one", worker.label)

    # Lost objects.

    def remake(self, task: Task) -> None:
        """Makes a result again that went with the node that kept it, from the state that it was made from."""
        if task.spare is not None:
            (item, node_id), digests = task.spare, task.only_result().digests
            task.results, task.spare = {0: Result((item,), digests, node_id)}, None
            return
        task.results, task.done = {}, False
        if task in task.group.taken:
            return  # a snapshot is of a moment that does not come again; an older one, or a newer, has to do
        _log.warning("the result of %s is lost with its node; it is made again", task.call)
        if task.group.changed_after(task):
            for worker in self._rewind(task.group, [task], []):
                self._settle(worker, moved=False)
        else:
            self._requeue(task.group, [task])

    def input_lost(self, attempt: Attempt, answer: InputLost) -> None:
        """An order could not run for want of an input: that is made again first."""
        task, worker = attempt.task, attempt.worker
        self._dispatcher.land(attempt)
        if task is None:
            return
        lost = [needed for needed in task.inputs() if answer.lost is None or needed.made(answer.lost)]
        self._count_attempt(task, worker)
        for needed in lost:
            if needed.done:
                self.remake(needed)
        if task.changes:
            self._replace([worker])
        else:
            self._requeue(worker.group, [task])

    def _count_attempt(self, task: Task, worker: WorkerProcess) -> None:
        task.deaths[worker.rank] += 1
        if task.deaths[worker.rank] > self._settings.recovery.max_attempts:
            raise WorkersLostError(
                f"{worker.name_of(task.call)} has lost its inputs {task.deaths[worker.rank]} times; look at the nodes' health"
            )

    # Errors of a verb: never repaired, because they would come again.

    def judge_failures(self) -> None:
        """Decides what failed calls mean: the first error of a gang stands for all, and a death explains those of its peers."""
        dispatcher = self._dispatcher
        for since_s, attempt, _ in list(dispatcher.failed):
            group, task = attempt.worker.group, attempt.task
            together = [
                entry for entry in dispatcher.failed if entry[1].worker.group is group and entry[1].task is task
            ]
            silent = {w for w in group.workers if w.attempts} - {entry[1].worker for entry in together}
            only_peers = all(entry[2].kind == PeerLostError.__name__ for entry in together)
            grace_s = PEER_GRACE_S if only_peers else GRACE_S if silent and task and task.changes else 0.0
            if group.gang and time.monotonic() - since_s < grace_s:
                continue
            dispatcher.failed = [entry for entry in dispatcher.failed if entry not in together]
            for _, each, _ in together:
                dispatcher.land(each)
            _, first, cause = min(
                together, key=lambda entry: (entry[2].kind == PeerLostError.__name__, entry[2].time_s)
            )
            self._convict(first, cause)
            return

    def _convict(self, attempt: Attempt, failure: Failure) -> None:
        what = (
            f"{attempt} failed on {attempt.worker.label}" if attempt.task else f"{attempt.worker.label} could not start"
        )
        error = WorkerError(f"{what}: {failure.kind}: {failure.text}\n{failure.trace}")
        if attempt.task is None:
            raise error
        self._dispatcher.fail(attempt.task, error)

    # Clocks.

    def look(self) -> None:
        """Now and then: names who has not answered in time, asks the idle for a sign of life, finds places for the homeless."""
        now_s = time.monotonic()
        if now_s - self._looked_s < min(LOOK_S, self._settings.call_timeout_s / 4):
            return
        self._looked_s = now_s
        workers = [worker for group in self._dispatcher.groups for worker in group.workers]
        for worker in workers:
            if worker.homeless_since_s is not None:
                self._house(worker, now_s)
            elif worker.attempts:
                self._check_silence(worker, now_s - worker.busy_since_s)
        idle = [worker for worker in workers if worker.ready and not worker.attempts]
        for worker in (idle[self._next_look :] + idle[: self._next_look])[:MAX_LOOKED_AT]:
            self._dispatcher.look_at(worker)
        self._next_look = (self._next_look + MAX_LOOKED_AT) % max(len(idle), 1)

    def _house(self, worker: WorkerProcess, now_s: float) -> None:
        self._settle(worker, moved=True)
        since_s = worker.homeless_since_s
        if since_s is not None and now_s - since_s > self._settings.recovery.wait_for_node_s:
            self._give_up_place(worker)

    def _check_silence(self, worker: WorkerProcess, silent_s: float) -> None:
        attempt = next(iter(worker.attempts.values()))
        settings = self._settings
        if not worker.ready:
            if silent_s > settings.start_timeout_s:
                raise WorkerError(
                    f"the controller waited {settings.start_timeout_s:g} s for {attempt}; look at that node, or raise "
                    "runtime.start_timeout_s"
                )
        elif silent_s > settings.call_timeout_s:
            waiting = f"{self._who_waits(attempt)} waited {settings.call_timeout_s:g} s for {attempt}"
            self.bury(worker, f"{waiting}; look at that worker, or raise runtime.call_timeout_s")

    def _who_waits(self, attempt: Attempt) -> str:
        task = attempt.task
        calls = [str(dependent.call) for dependent in task.dependents] if task else []
        more = f" and {len(calls) - 1} more calls" if len(calls) > 1 else ""
        return f"{calls[0]}{more}" if calls else "the controller"
