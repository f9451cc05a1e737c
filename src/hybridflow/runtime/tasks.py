"""The controller's books: calls as tasks, groups of workers with their queues and pasts. No process is touched here.

A worker's state is its build and its **past**: the state-changing calls since the last one that replaced the state altogether. So a worker
that died is built again and led through the past of its group; and since each read holds the past that it was made from, a result that was
lost can be made again. What nobody holds any more is forgotten by itself.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.runtime.api import Seat, Split
from hybridflow.runtime.dispatch import flatten_refs
from hybridflow.runtime.host import HostInfo
from hybridflow.runtime.placement import Slot
from hybridflow.types import Call, Ref


@dataclass(frozen=True)
class Output:
    """What a `Ref` of the scheduler holds: one object of a task, or with `piece` None the results of all workers.

    rank: who made it, of a read on all workers, or its place in the team that made it; else 0.
    """

    task: Task
    piece: int | None
    rank: int = 0


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call with numbered slots where references were."""

    skeleton: Any
    refs: tuple[Ref[Any], ...]

    @classmethod
    def of(cls, args: Sequence[Any]) -> Arguments:
        """Takes the references out."""
        skeleton, refs = flatten_refs(tuple(args))
        return cls(skeleton, tuple(refs))


@dataclass(frozen=True)
class Result:
    """What one worker made: handles of its objects, their digests, and the node that keeps them; or of a change its value."""

    objects: tuple[Any, ...] = ()
    digests: tuple[Any, ...] = ()
    node_id: str = ""
    value: Any = None


@dataclass(eq=False)
class Task:
    """One call: on one worker, on all of its group where it changes their state, or on those who meet in it (`counts`: pieces of each).

    in_team: those who meet are neighbours in a gang, as many as `counts`; `team`: which ones make it, or have made it.
    held:   what it made lies with workers whose answers it was made from.
    spares: second copies of a snapshot's parts, by rank, and the nodes that keep them.
    asks:   on every worker that is there; `asked`: these, and their processes, by rank, `unanswered` those who have not answered yet.
    """

    seq: int
    call: Call
    group: WorkerGroup
    verb: Callable[..., Any]
    pieces: int = 0
    counts: tuple[int, ...] = ()
    in_team: bool = False
    team: tuple[WorkerProcess, ...] = ()
    changes: bool = False
    replaces: bool = False
    position: int | None = None
    follows: int | None = None
    arguments: tuple[Arguments, ...] = ()
    split: Split | None = None
    described: tuple[Ref[Any], ...] = ()
    results: dict[int, Result] = field(default_factory=dict)
    done: bool = False
    failure: Exception | None = None
    deaths: Counter[int] = field(default_factory=Counter)
    missing: int = 0
    sent: bool = False
    after: Task | None = None
    past: Past | None = None
    dependents: dict[Task, None] = field(default_factory=dict)
    spares: dict[int, tuple[Any, str]] = field(default_factory=dict)
    order: bytes | None = None
    held: bool = False
    asks: bool = False
    asked: dict[int, tuple[WorkerProcess, Any]] = field(default_factory=dict)
    unanswered: set[WorkerProcess] = field(default_factory=set)

    @property
    def is_shared(self) -> bool:
        """Whether several workers make it: all of the group, or a team."""
        return self.changes or self.asks or bool(self.counts)

    @property
    def makers(self) -> Sequence[WorkerProcess]:
        """Of a shared call those who make it."""
        return self.team if self.in_team else self.group.workers

    def place_of(self, worker: WorkerProcess) -> int:
        """Where the worker stands among those who make it."""
        if self.in_team:
            return self.team.index(worker)
        return worker.rank if self.is_shared else 0

    @property
    def tells(self) -> bool:
        """Whether its results come with the reports, and lie in no store."""
        return self.changes or self.asks

    @property
    def is_outdated(self) -> bool:
        """Whether what it made lies with workers of which one has been replaced since."""
        return self.held and self.done and any(None in needed.values() for needed in self.inputs() if needed.asks)

    def pieces_of(self, worker: WorkerProcess) -> int:
        """Pieces that this worker returns."""
        return self.counts[self.makers.index(worker)] if self.counts else self.pieces

    def inputs(self) -> Iterable[Task]:
        """The calls whose results this one needs before it can go: those described until it is divided, then those referenced."""
        if self.split is not None and not self.arguments:
            return {ref.handle.task: None for ref in self.described}
        refs = {ref.handle.task: None for arguments in self.arguments for ref in arguments.refs}
        return {**refs, **({self.after: None} if self.after else {})}

    def divide(self, size: int) -> None:
        """Makes the arguments of `size` workers from the digests of what they describe; where all get the same there is nothing to do."""
        if self.split is None or len(self.arguments) == size:
            return
        digests = [ref.handle.task.digest(ref.handle) for ref in self.described]
        self.arguments = tuple(Arguments.of(args) for args in self.split(digests, size))

    def arguments_for(self, worker: WorkerProcess) -> Arguments:
        """What the worker is given."""
        return self.arguments[0 if len(self.arguments) == 1 else self.makers.index(worker)]

    def digest(self, output: Output) -> Any:
        """The digest of one of its objects; None where its verb gave none."""
        digests = self.results[output.rank].digests
        return digests[output.piece or 0] if digests else None

    def values(self) -> tuple[Any, ...]:
        """What a change returned on each worker, by rank; of what all were asked None where the process that answered is gone."""
        if not self.asks:
            return tuple(self.results[rank].value for rank in sorted(self.results))
        told = {rank for rank, (worker, handle) in self.asked.items() if worker.handle is handle} & self.results.keys()
        return tuple(self.results[rank].value if rank in told else None for rank in sorted(self.asked))

    def lies_on(self, node_id: str) -> bool:
        """Whether any of its results is kept by this node."""
        return any(result.node_id == node_id for result in self.results.values())

    def made(self, item: Any) -> bool:
        """Whether this object is one of the call's."""
        return any(item in result.objects for result in self.results.values())


@dataclass(frozen=True, eq=False)
class Past:
    """How a state came about: the last change, and what was before it; None before one that replaced all, or that was the first."""

    change: Task
    before: Past | None

    def changes(self) -> list[Task]:
        """The changes that make the state, oldest first."""
        found: list[Task] = []
        past: Past | None = self
        while past is not None:
            found.append(past.change)
            past = past.before
        return found[::-1]


@dataclass(eq=False)
class Attempt:
    """An order that is with a worker; where `task` is None it is one of the runtime's own, called `name`."""

    worker: WorkerProcess
    task: Task | None = None
    name: str = ""
    key: Any = None
    objects: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.worker.name_of(self.task.call) if self.task else f"{self.worker.label} ({self.name})"


@dataclass(eq=False)
class WorkerProcess:
    """One place in a group, and the process that sits there now; a dead process leaves its place to another one."""

    group: WorkerGroup
    rank: int
    slot: Slot | None
    handle: Any = None
    info: HostInfo | None = None
    ready: bool = False
    unplaced_since_s: float | None = None
    attempts: dict[Any, Attempt] = field(default_factory=dict)
    busy_since_s: float = 0.0

    @property
    def label(self) -> str:
        """`actor[1] on gpu:3 of 10.0.0.2`, as far as it is known."""
        number = f"[{self.rank}]" if self.group.size > 1 else ""
        device = f" on {_name_devices(self.slot)}" if self.slot else ""
        where = f" of {self.info.address}, pid {self.info.pid}" if self.info else ""
        return f"{self.group.role}{number}{device}{where}"

    def is_at(self, task: Task | None) -> bool:
        """Whether the call is with it."""
        return any(attempt.task is task for attempt in self.attempts.values())

    def name_of(self, call: Call) -> str:
        """The call as errors name it: `actor[1].update (phase 'update', step 3)`."""
        number = f"[{self.rank}]" if self.group.size > 1 else ""
        return str(Call(f"{call.role}{number}", call.verb, call.mark, call.rows))


@dataclass
class Segment:
    """Calls between two changes of state: reads in any order, then the change, once all of them are on their way."""

    ready: list[tuple[int, Task]] = field(default_factory=list)
    waiting: set[Task] = field(default_factory=set)
    change: Task | None = None

    def add(self, task: Task) -> None:
        """Takes a read in, ready or not."""
        if task.missing:
            self.waiting.add(task)
        else:
            heapq.heappush(self.ready, (task.seq, task))

    def pop(self) -> Task:
        """The ready read that was submitted first."""
        return heapq.heappop(self.ready)[1]

    def tasks(self) -> list[Task]:
        """All that has not gone out."""
        return [*(task for _, task in self.ready), *self.waiting, *([self.change] if self.change else [])]


@dataclass(eq=False)
class WorkerGroup:
    """The workers of one role, what waits for them, and what has made their state.

    remembers: whether the past is kept; without it, and so without snapshots, the state goes with the first worker that dies.
    past:      of the present state: that after all changes that were sent; None is that of the build.
    replays:   changes at the head of the queue that lead back to the present state; `replayed`: those that have gone out again.
    joining:   workers that are built, and wait for what the group's past was made of.
    taken:     snapshots that somebody still holds; `snapshots`: those that do not count yet, with the changes that will stand for them.
    """

    role: str
    gang: bool
    build: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: str | None = None
    dtype: str | None = None
    remembers: bool = True
    workers: list[WorkerProcess] = field(default_factory=list)
    segments: deque[Segment] = field(default_factory=lambda: deque([Segment()]))
    free: dict[WorkerProcess, None] = field(default_factory=dict)
    past: Past | None = None
    replays: int = 0
    replayed: list[Task] = field(default_factory=list)
    reads: weakref.WeakSet[Task] = field(default_factory=weakref.WeakSet)
    taken: weakref.WeakSet[Task] = field(default_factory=weakref.WeakSet)
    snapshots: dict[Task, Task] = field(default_factory=dict)
    has_started: bool = False
    joining: dict[WorkerProcess, None] = field(default_factory=dict)
    last_position: int | None = None
    last_change: Task | None = None
    forgot: bool = False

    @property
    def size(self) -> int:
        """Workers in the group."""
        return len(self.workers)

    def seat(self, worker: WorkerProcess, rendezvous: str | None, timeout_s: float) -> Seat:
        """Where the worker sits."""
        address = worker.info.address if worker.info else ""
        return Seat(self.role, worker.rank, self.size, self.device, self.dtype, rendezvous, timeout_s, address)

    def find_team(self, size: int) -> tuple[WorkerProcess, ...]:
        """So many neighbours who are all free; none where there are no such. Teams do not overlap."""
        teams = (tuple(self.workers[start : start + size]) for start in range(0, self.size, size))
        return next((team for team in teams if all(worker in self.free for worker in team)), ())

    def enqueue(self, task: Task) -> None:
        """Puts a call behind all others."""
        last = self.segments[-1]
        if task.changes:
            last.change = task
            self.segments.append(Segment())
        else:
            last.add(task)

    def wake(self, task: Task) -> None:
        """The read's inputs are there. (A change is looked at whenever it is its turn.)"""
        for segment in self.segments:
            if task in segment.waiting:
                segment.waiting.remove(task)
                segment.add(task)

    def drop(self, task: Task) -> None:
        """Takes a read that will never run out of the queue."""
        for segment in self.segments:
            segment.waiting.discard(task)
            segment.ready = [entry for entry in segment.ready if entry[1] is not task]

    def advance(self, change: Task) -> None:
        """The change is on its way to the workers, for the first time or again."""
        change.sent = True
        if self.replays:
            self.replays -= 1
            self.replayed = [*self.replayed, change] if self.replays else []
            return
        if not self.remembers:
            self.forgot = self.forgot or not change.replaces
        # A worker that comes late has to make a change that is still waited for, also where another has replaced its state.
        cut = change.replaces and all(before.done for before in (self.past.changes() if self.past else []))
        self.past = Past(change, self.past if self.remembers and not cut else None)

    def requeue(self, needed: Iterable[Task]) -> bool:
        """Queues what leads to the state before each needed read, the read, and what leads back to the present state, before the rest.

        needed: reads that were sent before; those that wait to be repeated are needed still. Returns whether the workers can take it as
        they are; if not, it starts from their build. Raises StateLostError where neither that nor a snapshot leads to a state.
        """
        queued = [task for segment in self.segments for task in segment.tasks()]
        reads = {*needed, *(task for task in queued if task.sent and not task.changes)}
        order: list[Task] = []
        at: list[Task] | None = None
        as_they_are = True
        for read in [*sorted(reads, key=lambda task: task.seq), None]:
            past = read.past if read else self.past
            wanted = past.changes() if past else []
            if at is None or wanted[: len(at)] != at:
                as_they_are = self._starts_anywhere(wanted) and as_they_are
                at = []
            order += [*wanted[len(at) :], *([read] if read else [])]
            at = wanted
        self.segments, self.replayed = deque([Segment()]), []
        self.replays = sum(task.changes for task in order)
        for task in [*order, *(task for task in queued if not task.sent)]:
            self.enqueue(task)
        return as_they_are

    def _starts_anywhere(self, changes: Sequence[Task]) -> bool:
        """Whether the first change needs no state before it; else they lead on from the build."""
        # Whatever else it needs can be made again.
        lost = changes and any(not task.done and task in task.group.taken for task in changes[0].inputs())
        if changes and changes[0].replaces and not lost:
            return True
        if self.forgot or (changes and changes[0].replaces):
            raise StateLostError(self.role)
        return False

    def queued_changes(self) -> list[Task]:
        """The changes that have not gone out, or are to go again."""
        return [segment.change for segment in self.segments if segment.change is not None]

    def remove(self, worker: WorkerProcess) -> None:
        """Goes on without a worker. The ranks of a gang close up, because its collectives count them; others keep their numbers."""
        self.workers.remove(worker)
        self.free.pop(worker, None)
        if self.gang:
            for rank, left in enumerate(self.workers):
                left.rank = rank

    def catch_up(self) -> list[Task]:
        """The changes that a new worker of a group, whose others go on, is led through."""
        if self.replays:
            return self.replayed
        return self.past.changes() if self.past else []

    def add_base(self, taken: Task, base: Task) -> None:
        """Puts a snapshot in the place of what was before it, in the past of the present state and of the reads since."""
        since = self._since(taken.past)
        if not since and self.past is not taken.past:
            taken.past = None
            return  # the state was replaced meanwhile, and does not follow from the snapshot
        renewed: dict[Past | None, Past] = {taken.past: Past(base, None)}
        for past in since:
            is_cut = past.before is None and past.change.replaces
            renewed[past] = Past(past.change, None if is_cut else renewed[past.before])
        # It is never taken again, and what it held of the past would hold all before.
        taken.past = None
        self.past = renewed.get(self.past, self.past)
        for read in (*self.reads, *self.taken):
            read.past = renewed.get(read.past, read.past)

    def _since(self, past: Past | None) -> list[Past]:
        """The steps from a past state to the present one; none where the present does not follow from it."""
        found, step = [], self.past
        while step is not None and step is not past:
            found.append(step)
            step = step.before
        return found[::-1] if step is past else []

    def changed_after(self, task: Task) -> bool:
        """Whether the state is another than the one that this read was sent for."""
        return self.replays > 0 or task.past is not self.past


class StateLostError(Exception):
    """What a group's state came from is not there any more; names the role."""


def _name_devices(slot: Slot) -> str:
    first, last = slot.indices[0], slot.indices[-1]
    return f"{slot.kind}:{first}" if first == last else f"{slot.kind}:{first}-{last}"
