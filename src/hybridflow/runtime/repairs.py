"""What is done about workers that die, do not answer, or fail: named, restarted on what is left, and their work done again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from hybridflow.config import ConfigError
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

    def replace_dead(self, worker: WorkerProcess, cause: str) -> None:
        """A worker is gone, or its whole node: names it, and sees that its place is taken and its work done again."""
        deaths, groups = self._dispatcher.deaths, self._dispatcher.groups
        node_id = worker.info.node_id if worker.info else worker.slot.node_id if worker.slot else ""
        if not node_id or not self._transport.node_is_lost(node_id):
            deaths.record([worker], cause)
            self._replace([worker])
            return
        gone = [
            w for group in groups for w in group.workers if w is not worker and w.info and w.info.node_id == node_id
        ]
        deaths.record([worker, *gone], f"its node does not answer ({cause})")
        # Snapshots first, because a group that starts again must not rely on one that is lost.
        for task in [task for group in groups for task in group.taken]:
            self._remake_if_on(task, node_id)
        self._replace([worker, *gone])
        for task in [task for group in groups for task in group.reads]:
            self._remake_if_on(task, node_id)

    def _remake_if_on(self, task: Task, node_id: str) -> None:
        # What was asked is never made again: others would wait for those who took part in it then.
        if task.done and not task.asks and task.lies_on(node_id):
            self.remake(task)

    def _replace(self, gone: Sequence[WorkerProcess], reads: Sequence[Task] = ()) -> None:
        """`reads`: what is to be made again beside what the workers were at."""
        for group in dict.fromkeys(worker.group for worker in gone):
            ended = list(group.workers) if group.gang else [worker for worker in gone if worker.group is group]
            lost = [*reads, *(task for worker in ended for task in self._end(worker))]
            self._repeat(group, list(dict.fromkeys(lost)), ended)

    def _end(self, worker: WorkerProcess) -> list[Task]:
        """Ends a worker's process; returns the reads that it was to carry out. (The changes are in the group's past.)"""
        attempts, worker.attempts = list(worker.attempts.values()), {}
        dispatcher = self._dispatcher
        for attempt in attempts:
            dispatcher.flying.pop(attempt.key, None)
        dispatcher.failed = [entry for entry in dispatcher.failed if entry[1].worker is not worker]
        worker.group.free.pop(worker, None)
        worker.group.joining.pop(worker, None)
        worker.ready, worker.info = False, None
        if worker.handle is not None:
            self._transport.kill(worker.handle)
            worker.handle = None
        tasks = [a.task for a in attempts if a.task is not None and not a.task.done]
        for task in [task for task in tasks if task.asks]:
            dispatcher.unanswered(task, worker)
        reads = [task for task in tasks if not task.tells]
        for task in reads:
            # Of a read on several workers others may have reported, and they make it again, too.
            task.results = {}
        return reads

    def _repeat(self, group: WorkerGroup, reads: Sequence[Task], ended: Sequence[WorkerProcess] = ()) -> None:
        """Sees that reads, which were sent before, are made again from the state that they were sent for.

        ended: workers of the group whose processes have ended; they get new ones. Of a gang, all.
        """
        for task in reads:
            self._dispatcher.await_inputs(task)
        reads = [task for task in reads if task.failure is None]
        if (group.gang and ended) or any(group.changed_after(task) for task in reads):
            ended = self._rewind(group, reads, ended)
        else:
            for task in reads:
                group.segments[0].add(task)
        for worker in ended:
            self._reopen(worker)

    def _rewind(
        self, group: WorkerGroup, reads: Sequence[Task], ended: Sequence[WorkerProcess]
    ) -> Sequence[WorkerProcess]:
        """Queues the group's changes to go through again, from a snapshot or from the build.

        returns: workers that need new processes: those of `ended`, or all where the changes go back to the build.
        """
        try:
            as_they_are = group.requeue(reads)
            if not as_they_are:
                others = [worker for worker in group.workers if worker not in ended]
                group.requeue([task for worker in others for task in self._end(worker)])
                ended = group.workers
        except StateLostError:
            remedy = "" if group.remembers else "; set runtime.recovery.snapshot_every_steps=1"
            raise WorkersLostError(
                f"the state of {group.role} is lost: no snapshot of it is left outside what died{remedy}"
            ) from None
        for change in group.queued_changes():
            self._dispatcher.await_inputs(change)
            change.results = change.results if change.done else {}
        return list(ended)

    def _reopen(self, worker: WorkerProcess, *, share: bool = False) -> None:
        """Gives a worker's place a process again: where it was if its node is there, else where there is room."""
        if worker.slot is not None:
            found = self._transport.find_slot(worker.slot, share=share)
            if found is None:
                worker.unplaced_since_s = worker.unplaced_since_s or time.monotonic()
                return
            if found != worker.slot:
                _log.warning("%s moves to another node", worker.label)
            worker.slot = found
        self._dispatcher.open(worker)

    def _go_on_without(self, worker: WorkerProcess) -> None:
        """No place is free for this worker: its group goes on smaller, or it shares a place, or the run ends."""
        group = worker.group
        if group.size > 1:
            _log.warning("no place is free for %s; its group goes on with %d workers", worker.label, group.size - 1)
            group.remove(worker)
            for change in [change for change in group.catch_up() if not change.done]:
                self._dispatcher.finish(change)
            self._dispatcher.start_together(group)
            return
        self._reopen(worker, share=True)
        if worker.unplaced_since_s is not None:
            raise WorkersLostError(
                f"no place is left for {worker.label}: for {self._settings.recovery.wait_for_node_s:g} s no node had a device of its kind; "
                "add a node, or raise runtime.recovery.wait_for_node_s"
            )
        _log.warning("no place is free for %s; it shares one", worker.label)

    # Lost objects.

    def remake_outdated(self) -> None:
        """Makes what lay with workers that are gone again, now that something needs it."""
        outdated, self._dispatcher.outdated = self._dispatcher.outdated, {}
        for task in outdated:
            self.remake(task)

    def remake(self, task: Task, item: Any = None) -> None:
        """Makes a result again that went with the node that kept it, from the state that it was made from. `item`: what was missed."""
        lost = [rank for rank, result in task.results.items() if self._is_lost(result, item)]
        if task.spares and all(rank in task.spares for rank in lost):
            for rank in lost:
                spare, node_id = task.spares.pop(rank)
                task.results[rank] = Result((spare,), task.results[rank].digests, node_id)
            return
        task.results, task.done, task.held = {}, False, False
        if task in task.group.taken:
            # It is of a moment that does not come again; an older one, or a newer, has to do.
            task.failure = WorkersLostError(f"the state of {task.group.role} is lost: {task.call} went with its node")
            dependents, task.dependents = task.dependents, {}
            for dependent in dependents:
                self._dispatcher.fail(dependent, task.failure)
            return
        _log.warning("the result of %s is lost with what kept it; it is made again", task.call)
        self._repeat(task.group, [task])

    def _is_lost(self, result: Result, item: Any) -> bool:
        return item in result.objects or self._transport.node_is_lost(result.node_id)

    def input_lost(self, attempt: Attempt, answer: InputLost) -> None:
        """An order could not run for want of an input: that is made again first."""
        task, worker = attempt.task, attempt.worker
        self._dispatcher.returned(attempt)
        if task is None:
            return
        self._dispatcher.deaths.count_attempt(task, worker, f"{worker.name_of(task.call)} has lost its inputs")
        for needed in [needed for needed in task.inputs() if needed.done and needed.made(answer.lost)]:
            self.remake(needed, answer.lost)
        if task.is_shared:
            self._replace([worker], [] if task.changes else [task])
        else:
            self._repeat(worker.group, [task])

    # Errors of a verb: never repaired, because they would come again.

    def judge_failures(self) -> None:
        """Decides what failed calls mean: the first error of a gang stands for all, and a death explains those of its peers."""
        dispatcher = self._dispatcher
        for since_s, attempt, _ in list(dispatcher.failed):
            group, task = attempt.worker.group, attempt.task
            together = [
                entry for entry in dispatcher.failed if entry[1].worker.group is group and entry[1].task is task
            ]
            silent = {w for w in group.workers if w.is_at(task)} - {entry[1].worker for entry in together}
            only_peers = all(entry[2].kind == PeerLostError.__name__ for entry in together)
            grace_s = PEER_GRACE_S if only_peers else GRACE_S if silent and task else 0.0
            if group.gang and time.monotonic() - since_s < grace_s:
                continue
            dispatcher.failed = [entry for entry in dispatcher.failed if entry not in together]
            for _, each, _ in together:
                dispatcher.returned(each)
            _, first, cause = min(
                together, key=lambda entry: (entry[2].kind == PeerLostError.__name__, entry[2].time_s)
            )
            self._answer_failure(first, cause, only_peers)
            return

    def _answer_failure(self, attempt: Attempt, failure: Failure, only_peers: bool) -> None:
        """Raises what failed, unless the ranks have only lost sight of each other, or a worker cannot start again: that is a death."""
        worker, task = attempt.worker, attempt.task
        can_restart = task is None and worker.group.has_started and failure.kind != ConfigError.__name__
        if only_peers or can_restart:
            self.replace_dead(worker, f"{attempt} failed: {failure.kind}: {failure.text}")
            return
        if task is None and worker.group.has_started:
            raise WorkersLostError(f"{worker.group.role} cannot go on with what is left: {failure.text}")
        what = f"{attempt} failed on {worker.label}" if task else f"{worker.label} could not start"
        error = WorkerError(f"{what}: {failure.kind}: {failure.text}\n{failure.trace}")
        if task is None:
            raise error
        self._dispatcher.fail(task, error)

    # Clocks.

    def look(self) -> None:
        """Now and then: names who has not answered in time, asks the idle for a sign of life, finds places for those without."""
        now_s = time.monotonic()
        if now_s - self._looked_s < min(LOOK_S, self._settings.call_timeout_s / 4):
            return
        self._looked_s = now_s
        for worker in [worker for group in self._dispatcher.groups for worker in group.workers]:
            if worker.unplaced_since_s is not None:
                self._find_place(worker, now_s)
            elif worker.attempts:
                self._check_silence(worker, now_s - worker.busy_since_s)
        self._dispatcher.give_up_copies(now_s - self._settings.call_timeout_s)
        self._ask_the_idle()

    def _ask_the_idle(self) -> None:
        workers = [worker for group in self._dispatcher.groups for worker in group.workers]
        idle = [worker for worker in workers if worker.ready and not worker.attempts]
        for worker in (idle[self._next_look :] + idle[: self._next_look])[:MAX_LOOKED_AT]:
            self._dispatcher.look_at(worker)
        self._next_look = (self._next_look + MAX_LOOKED_AT) % max(len(idle), 1)

    def _find_place(self, worker: WorkerProcess, now_s: float) -> None:
        self._reopen(worker)
        since_s = worker.unplaced_since_s
        if since_s is not None and now_s - since_s > self._settings.recovery.wait_for_node_s:
            self._go_on_without(worker)

    def _check_silence(self, worker: WorkerProcess, silent_s: float) -> None:
        attempt = next(iter(worker.attempts.values()))
        settings = self._settings
        if worker.ready:
            if silent_s > settings.call_timeout_s:
                waiting = f"{self._who_waits(attempt)} waited {settings.call_timeout_s:g} s for {attempt}"
                others = self._as_silent(worker, attempt)
                told = f"{waiting}{others}; look at {'these workers' if others else 'that worker'}, or raise runtime.call_timeout_s"
                self.replace_dead(worker, told)
        elif worker.slot is not None and self._transport.node_is_lost(worker.slot.node_id):
            self.replace_dead(worker, "its process did not come")
        elif silent_s > settings.start_timeout_s:
            waiting = f"the controller waited {settings.start_timeout_s:g} s for {attempt}"
            told = f"{waiting}; look at that node, or raise runtime.start_timeout_s"
            if not worker.group.has_started:
                raise WorkerError(told)
            self.replace_dead(worker, told)

    def _as_silent(self, worker: WorkerProcess, attempt: Attempt) -> str:
        """The ranks that are in the same call: in a collective all wait for one, and from here it cannot be seen for which."""
        others = [each for each in worker.group.workers if each is not worker and worker.group.gang and attempt.task]
        silent = [each for each in others if each.is_at(attempt.task)]
        return f", and for {', '.join(each.label for each in silent)}" if silent else ""

    def _who_waits(self, attempt: Attempt) -> str:
        task = attempt.task
        calls = [str(dependent.call) for dependent in task.dependents] if task else []
        more = f" and {len(calls) - 1} more calls" if len(calls) > 1 else ""
        return f"{calls[0]}{more}" if calls else "the controller"
