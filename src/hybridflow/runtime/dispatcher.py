"""Sends calls where and when they can run, and takes in what they return. What happens when a worker dies is in `repairs.py`."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.observability.phases import current_mark
from hybridflow.runtime.api import HELD_BY_ASKED, RuntimeSettings, WorkersLostError
from hybridflow.runtime.deaths import DeathRegister
from hybridflow.runtime.host import BUILT, Describe, Failure, HostInfo, Report, Run, Start, encode
from hybridflow.runtime.placement import DEVICE_TYPES, Placement, Slot
from hybridflow.runtime.tasks import Arguments, Attempt, Output, Result, Task, WorkerGroup, WorkerProcess
from hybridflow.runtime.transport import Transport
from hybridflow.types import Call, Ref, Span

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copy:
    """A second copy of a snapshot, or of one rank's part of it, on its way to another node."""

    taken: Task
    rank: int
    item: Any
    node_id: str
    since_s: float


class Dispatcher:
    """Groups of workers, the calls on their way, and the way itself."""

    def __init__(self, transport: Transport, settings: RuntimeSettings, placement: Placement) -> None:
        self.transport, self.settings, self.placement = transport, settings, placement
        self.groups: list[WorkerGroup] = []
        self.flying: dict[Any, Attempt] = {}
        self.copying: dict[Any, _Copy] = {}
        self.failed: list[tuple[float, Attempt, Failure]] = []
        self.outdated: dict[Task, None] = {}
        self.deaths = DeathRegister(settings.recovery)
        self.spans: list[tuple[int, Span]] = []
        self.sent_bytes = self.received_bytes = 0
        self._numbers = itertools.count()

    # Workers.

    def place(self, role: str, gang: bool, build: Any, args: Any, kwargs: Any) -> WorkerGroup:
        """Starts the processes of a new group; they are told what to be as soon as they answer."""
        placed = self.placement.of(role)
        slots: Sequence[Slot | None] = placed.slots if placed else (None,)
        group = WorkerGroup(role, gang, build, args, kwargs)
        if placed:
            group.device, group.dtype = DEVICE_TYPES[placed.slots[0].kind], placed.dtype
        # Without snapshots a gang's past would hold the data of all steps since the start.
        group.remembers = not gang or self.settings.recovery.snapshot_every_steps > 0
        group.workers = [WorkerProcess(group, rank, slot) for rank, slot in enumerate(slots)]
        self.groups.append(group)
        for worker in group.workers:
            self.open(worker)
        return group

    def open(self, worker: WorkerProcess) -> None:
        """Starts the process of a worker's place."""
        worker.handle = self.transport.create(worker.group.role, worker.slot)
        worker.ready, worker.info, worker.unplaced_since_s = False, None, None
        self._send(Attempt(worker, name="the start of its process"), encode(Describe()), (), 0)

    def look_at(self, worker: WorkerProcess) -> None:
        """Asks for a sign of life."""
        self._send(Attempt(worker, name="a sign of life"), encode(Describe()), (), 0)

    def start_together(self, group: WorkerGroup) -> None:
        """Builds the workers that wait for it: those of a gang when all their processes are there."""
        waiting = [worker for worker in group.workers if worker.info and not worker.ready and not worker.attempts]
        fresh = [worker for worker in waiting if worker not in group.joining]
        if group.gang and len(fresh) < group.size:
            return
        rendezvous = _choose_rendezvous([worker.info for worker in fresh if worker.info]) if group.gang else None
        for worker in fresh:
            kind, indices = (worker.slot.kind, worker.slot.indices) if worker.slot else (None, ())
            seat = group.seat(worker, rendezvous, self.settings.call_timeout_s)
            bound = kind if self.settings.placement.bind_numa else None
            order = Start(seat, group.build, group.args, group.kwargs, os.getcwd(), bound, indices)
            self._send(Attempt(worker, name="its start"), encode(order), (), 0)

    def started(self, worker: WorkerProcess) -> None:
        """The worker is built; one that joins a group that went on is led through the group's past first, once its inputs are there."""
        group = worker.group
        changes = [] if group.gang else group.catch_up()
        if not all(needed.done for change in changes for needed in change.inputs()):
            group.joining[worker] = None
            return
        group.joining.pop(worker, None)
        worker.ready = True
        for change in changes:
            change.divide(group.size)
            self._send_task(worker, change)
        if not worker.attempts:
            group.free[worker] = None
        group.has_started = group.has_started or all(each.ready for each in group.workers)
        self.deaths.restarted(group)

    # Calls.

    def enqueue(
        self, group: WorkerGroup, verb: Callable[..., Any], rows: str = "", *, is_snapshot: bool = False, **fields: Any
    ) -> Task:
        """A new call behind all others of its group, sent at once if it can go."""
        task = Task(next(self._numbers), Call(group.role, verb.__name__, current_mark(), rows), group, verb, **fields)
        if task.changes:
            task.position, task.follows, group.last_position = task.seq, group.last_position, task.seq
            group.last_change = task
        else:
            (group.taken if is_snapshot else group.reads).add(task)
        self.await_inputs(task)
        if task.failure is None:
            group.enqueue(task)
            self.dispatch(group)
        return task

    def snapshot(
        self, group: WorkerGroup, take: Callable[..., Any], restore: Callable[..., Any], counts: tuple[int, ...]
    ) -> tuple[Ref[Any], ...] | None:
        """A read of the whole state, and the change that will stand for all before it once the read is done and copied.

        counts: () takes it from one worker, who has all of it; else as of `Task`, and every worker gives its part.
        None while the one before is not: snapshots are large, and must not gather.
        """
        if group.snapshots:
            return None
        arguments = (Arguments.of(()),) * max(len(counts), 1)
        taken = self.enqueue(group, take, arguments=arguments, counts=counts, is_snapshot=True, after=group.last_change)
        refs: tuple[Ref[Any], ...] = tuple(Ref(Output(taken, 0, rank), taken.call) for rank in range(len(arguments)))
        call = Call(group.role, restore.__name__, current_mark())
        base = Task(next(self._numbers), call, group, restore, changes=True, replaces=True, done=True, sent=True)
        base.arguments = (Arguments.of(refs),)
        # The state that it restores is the one that the change before the snapshot left.
        base.position = BUILT if group.last_position is None else group.last_position
        group.snapshots[taken] = base
        return refs

    def await_inputs(self, task: Task) -> None:
        """Counts the inputs that are not there (any more), and asks each to tell when it is."""
        for needed in [needed for needed in task.inputs() if needed.is_outdated]:
            needed.done = False
            self.outdated[needed] = None
        missing = [needed for needed in task.inputs() if not needed.done]
        task.missing = len(missing)
        for needed in missing:
            needed.dependents[task] = None
            if needed.failure is not None:
                self.fail(task, needed.failure)

    def dispatch(self, group: WorkerGroup) -> None:
        """Sends what can go: reads of the first segment to free workers, and once they are all out, the change behind them."""
        for worker in list(group.joining):
            self.started(worker)
        while True:
            segment = group.segments[0]
            while segment.ready and group.free:
                task = segment.pop()
                if not self._inputs_are_here(task):
                    if task.failure is None:
                        segment.add(task)
                    continue
                if (task.counts or (task.asks and group.gang)) and not self._can_meet(task):
                    segment.add(task)
                    return
                chosen = self._choose_workers(task)
                if not chosen:
                    # Nothing overtakes it, or one worker of each team could be kept busy for good.
                    segment.add(task)
                    return
                if not task.sent:
                    task.sent, task.past = True, group.past
                for worker in chosen:
                    group.free.pop(worker, None)
                    self._send_task(worker, task)
            if segment.ready or segment.waiting or segment.change is None or not self._send_change(segment.change):
                return
            group.segments.popleft()

    def _send_change(self, task: Task) -> bool:
        group = task.group
        there = [worker for worker in group.workers if worker.ready]
        if not there or (group.gang and len(there) < group.size) or task.missing:
            return False
        if not self._inputs_are_here(task):
            return False
        task.divide(group.size)
        if not self._inputs_are_here(task):
            return False
        group.advance(task)
        for worker in there:
            self._send_task(worker, task)
        group.free.clear()
        return True

    def _choose_workers(self, task: Task) -> Sequence[WorkerProcess]:
        """Who makes a read: whoever is free, a team that is, all, or all that are there. None while no team is free."""
        group = task.group
        if task.in_team:
            task.team = group.find_team(len(task.counts))
            return task.team
        if not task.asks:
            return list(group.workers) if task.counts else [next(iter(group.free))]
        task.asked = {worker.rank: (worker, worker.handle) for worker in group.workers}
        there = [worker for worker in group.workers if worker.ready]
        task.unanswered = set(there)
        return there

    def unanswered(self, task: Task, worker: WorkerProcess) -> None:
        """The worker will not answer what all were asked."""
        task.unanswered.discard(worker)
        self.finish(task)

    def _can_meet(self, task: Task) -> bool:
        """Whether all workers are there for a read in which they meet; on all, it queues like a change behind what they are at."""
        group, wanted = task.group, len(task.counts)
        if task.in_team and group.size % wanted:
            raise WorkersLostError(
                f"{task.call} is made by teams of {wanted} workers, and {group.size} are left; start again with a multiple of {wanted}"
            )
        if task.counts and not task.in_team and group.size != wanted:
            raise WorkersLostError(
                f"{task.call} was to be made by {wanted} workers together, and {group.size} are left; start again with fewer"
            )
        return all(worker.ready for worker in group.workers)

    def _inputs_are_here(self, task: Task) -> bool:
        """Whether the inputs are (still) there; else the task waits for them again."""
        if all(needed.done and not needed.is_outdated for needed in task.inputs()):
            return True
        self.await_inputs(task)
        return False

    def _send_task(self, worker: WorkerProcess, task: Task) -> None:
        arguments = task.arguments_for(worker)
        objects = [object_of(ref) for ref in arguments.refs if ref.handle.piece is not None]
        order = task.order
        if order is None:
            order = encode(self._build_run(task, arguments, task.pieces_of(worker)))
            # Where all workers get the same, it is written once.
            task.order = order if task.changes and task.split is None else None
        self._send(Attempt(worker, task), order, objects, 0 if task.tells else max(task.pieces_of(worker), 1))

    def _build_run(self, task: Task, arguments: Arguments, pieces: int) -> Run:
        refs = enumerate(arguments.refs)
        inline = {index: ref.handle.task.values() for index, ref in refs if ref.handle.piece is None}
        place = task.position, task.follows, task.replaces
        return Run(task.call, task.verb, arguments.skeleton, inline, pieces, *place, tells=task.tells)

    def _send(self, attempt: Attempt, order: bytes, inputs: Sequence[Any], num_objects: int) -> None:
        worker = attempt.worker
        if not worker.attempts:
            worker.busy_since_s = time.monotonic()
        attempt.key, attempt.objects = self.transport.send(worker.handle, order, inputs, num_objects)
        worker.attempts[attempt.key] = attempt
        self.flying[attempt.key] = attempt
        self.sent_bytes += len(order)

    # Answers.

    def take(self, attempt: Attempt, report: Report) -> None:
        """Takes in what a worker reports of one order."""
        worker, task = attempt.worker, attempt.task
        if report.failure is not None:
            self.flying.pop(attempt.key, None)
            self.failed.append((time.monotonic(), attempt, report.failure))
            return
        self.returned(attempt)
        if report.info is not None:
            if worker.info is None:
                worker.info = report.info
                self.start_together(worker.group)
        elif task is None:
            self.started(worker)
        else:
            if report.span is not None:
                self.spans.append((task.seq, report.span))
            node_id = worker.info.node_id if worker.info else ""
            self._take_result(worker, task, Result(attempt.objects, report.digests, node_id, report.value))

    def returned(self, attempt: Attempt) -> None:
        """The order is no longer with its worker, which may be free now."""
        worker = attempt.worker
        self.flying.pop(attempt.key, None)
        worker.attempts.pop(attempt.key, None)
        worker.busy_since_s = time.monotonic()
        if worker.ready and not worker.attempts:
            worker.group.free[worker] = None

    def _take_result(self, worker: WorkerProcess, task: Task, result: Result) -> None:
        if task.done:
            return  # made again on the way to another result; the first one stands
        task.results[task.place_of(worker)] = result
        task.held = task.held or any(isinstance(told, str) and told == HELD_BY_ASKED for told in result.digests)
        task.unanswered.discard(worker)
        self.finish(task)

    def finish(self, task: Task) -> None:
        """Marks the call done once all workers that it was for have answered, and wakes what waited for it."""
        group = task.group
        if task.asks:
            is_waiting = bool(task.unanswered)
        else:
            is_waiting = task.is_shared and any(task.place_of(worker) not in task.results for worker in task.makers)
        if is_waiting:
            return
        task.done, task.after = True, None
        self.deaths.repeated(task)
        if task in group.snapshots:
            self._keep_snapshot(task)
        dependents, task.dependents = task.dependents, {}
        for dependent in dependents:
            dependent.missing -= 1
            if not dependent.missing and not dependent.changes:
                dependent.group.wake(dependent)

    def _keep_snapshot(self, taken: Task) -> None:
        """Sees that a second copy lies on another node, where there is one, before anything relies on the snapshot."""
        for rank, result in taken.results.items():
            copy = self.transport.copy(result.objects[0], result.node_id)
            if copy is not None:
                key, item, node_id = copy
                self.copying[key] = _Copy(taken, rank, item, node_id, time.monotonic())
        self._count_snapshot(taken)

    def _count_snapshot(self, taken: Task) -> None:
        """Lets others rely on the snapshot once no copy of it is on its way."""
        group = taken.group
        if taken in group.snapshots and not any(copy.taken is taken for copy in self.copying.values()):
            base = group.snapshots.pop(taken)
            if taken.done:
                group.add_base(taken, base)

    def copied(self, key: Any, *, whole: bool) -> None:
        """A snapshot's copy is there, or will not be: where the snapshot itself is, it counts from here on."""
        copy = self.copying.pop(key)
        taken = copy.taken
        if whole:
            taken.spares[copy.rank] = (copy.item, copy.node_id)
        elif taken.done and self.transport.node_is_lost(taken.results[copy.rank].node_id):
            # The snapshot itself is gone with its node, and what was before it must stay.
            taken.group.snapshots.pop(taken, None)
        else:
            _log.warning("the snapshot of %s has no copy on another node: it was not made in time", taken.group.role)
        self._count_snapshot(taken)

    def give_up_copies(self, before_s: float) -> None:
        """No longer waits for copies that were begun before this moment."""
        for key in [key for key, copy in self.copying.items() if copy.since_s < before_s]:
            self.copied(key, whole=False)

    def fail(self, task: Task, error: Exception) -> None:
        """A failed read is told to who asks for it, and for what was to be made of it; a failed change or snapshot ends the run."""
        task.failure = error
        if task.changes or task in task.group.snapshots:
            raise error
        task.group.drop(task)
        dependents, task.dependents = task.dependents, {}
        for dependent in dependents:
            self.fail(dependent, error)


def object_of(ref: Ref[Any]) -> Any:
    """Handle of the object that a reference to a read names."""
    output: Output = ref.handle
    return output.task.results[output.rank].objects[output.piece or 0]


def _choose_rendezvous(infos: Sequence[HostInfo]) -> str | None:
    """Where the ranks of a gang meet: through a file where all are on one machine, so that nothing listens on the network."""
    if len(infos) < 2:
        return None
    if len({info.address for info in infos}) == 1:
        return infos[0].rendezvous_file
    return f"tcp://{infos[0].address}:{infos[0].rendezvous_port}"
