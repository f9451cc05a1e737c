"""The runtime of many workers, over a `Transport`.

One loop, `_pump`, does everything: it sends what can go, waits for answers, and looks at the clocks. It runs inside `get`, in the
controller's one thread, so there is nothing to lock, and Ctrl-C ends it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from hybridflow.batch import Batch
from hybridflow.runtime.api import Closeable, Group, Pieces, RuntimeSettings, Seat, Split, WorkerError, WorkersLostError
from hybridflow.runtime.dispatch import flatten_refs, restore_refs
from hybridflow.runtime.dispatcher import Dispatcher, object_of
from hybridflow.runtime.host import Close, decode, encode
from hybridflow.runtime.placement import Placement
from hybridflow.runtime.repairs import LOOK_S, Repairs
from hybridflow.runtime.tasks import Arguments, Output, Task, WorkerGroup
from hybridflow.runtime.transport import Died, InputLost, ObjectLostError, Transport
from hybridflow.types import Metrics, Recovery, Ref, Span, last, total

W = TypeVar("W", bound=Closeable)
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")

CLOSE_S = 10.0
"""Seconds that workers have to end what they started, before their processes are ended."""


class Scheduler:
    """The `Runtime` over a transport."""

    def __init__(self, transport: Transport, settings: RuntimeSettings, placement: Placement) -> None:
        self._transport, self._settings = transport, settings
        self._dispatcher = Dispatcher(transport, settings, placement)
        self._repairs = Repairs(self._dispatcher)
        self._cpu_s = time.process_time()
        self._lost: WorkersLostError | None = None

    def place(self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs) -> Group[W]:
        """See `Runtime.place`."""
        return self._dispatcher.place(role, False, build, args, kwargs)

    def place_gang(
        self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs
    ) -> Group[W]:
        """See `Runtime.place_gang`."""
        return self._dispatcher.place(role, True, build, args, kwargs)

    def submit(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, rows: str = "") -> Ref[R]:
        """See `Runtime.submit`."""
        task = self._dispatcher.enqueue(_own(group), verb, rows, arguments=(Arguments.of(args),))
        return Ref(Output(task, 0), task.call)

    def submit_pieces(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], Pieces[R]], count: int, *args: Any, rows: str = ""
    ) -> tuple[Ref[R], ...]:
        """See `Runtime.submit_pieces`."""
        task = self._dispatcher.enqueue(_own(group), verb, rows, arguments=(Arguments.of(args),), pieces=count)
        return tuple(Ref(Output(task, piece), task.call) for piece in range(count))

    def submit_all(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], args: Sequence[tuple[Any, ...]]
    ) -> tuple[Ref[R], ...]:
        """See `Runtime.submit_all`."""
        arguments = tuple(map(Arguments.of, args))
        task = self._dispatcher.enqueue(_own(group), verb, arguments=arguments, counts=(0,) * len(args))
        return tuple(Ref(Output(task, 0, rank), task.call) for rank in range(len(args)))

    def submit_all_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """See `Runtime.submit_all_pieces`."""
        return self._meet(group, verb, counts, args, rows, in_team=False)

    def submit_team_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """See `Runtime.submit_team_pieces`."""
        return self._meet(group, verb, counts, args, rows, in_team=True)

    def _meet(
        self,
        group: Group[Any],
        verb: Callable[..., Any],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str,
        *,
        in_team: bool,
    ) -> tuple[tuple[Ref[Any], ...], ...]:
        called = tuple(map(Arguments.of, args))
        task = self._dispatcher.enqueue(
            _own(group), verb, rows, arguments=called, counts=tuple(counts), in_team=in_team
        )
        return tuple(
            tuple(Ref(Output(task, piece, place), task.call) for piece in range(count))
            for place, count in enumerate(counts)
        )

    def ask(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any) -> Ref[tuple[R | None, ...]]:
        """See `Runtime.ask`."""
        task = self._dispatcher.enqueue(_own(group), verb, arguments=(Arguments.of(args),), asks=True)
        return Ref(Output(task, None), task.call)

    def broadcast(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, replaces: bool = False
    ) -> Ref[tuple[R, ...]]:
        """See `Runtime.broadcast`."""
        arguments = (Arguments.of(args),)
        task = self._dispatcher.enqueue(_own(group), verb, arguments=arguments, changes=True, replaces=replaces)
        return Ref(Output(task, None), task.call)

    def scatter(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], split: Split, described: Sequence[Ref[Any]]
    ) -> Ref[tuple[R, ...]]:
        """See `Runtime.scatter`."""
        task = self._dispatcher.enqueue(_own(group), verb, split=split, described=tuple(described), changes=True)
        return Ref(Output(task, None), task.call)

    def snapshot(self, group: Group[W], take: Callable[[W], S], restore: Callable[[W, S], None]) -> Ref[S] | None:
        """See `Runtime.snapshot`."""
        taken = self._dispatcher.snapshot(_own(group), take, restore, ())
        return taken[0] if taken else None

    def snapshot_all(
        self, group: Group[W], take: Callable[[W], S], restore: Callable[Concatenate[W, ...], None]
    ) -> tuple[Ref[S], ...] | None:
        """See `Runtime.snapshot_all`."""
        return self._dispatcher.snapshot(_own(group), take, restore, (0,) * group.size)

    def get(self, value: Any) -> Any:
        """See `Runtime.get`."""
        skeleton, refs = flatten_refs(value)
        waited_for = list({ref.handle.task: None for ref in refs})
        while True:
            self._wait(waited_for)
            values = self._fetch(refs)
            if values is not None:
                return restore_refs(skeleton, values)

    def is_there(self, ref: Ref[Any]) -> bool:
        """See `Runtime.is_there`."""
        done: bool = ref.handle.task.done
        return done

    def spans(self) -> list[Span]:
        """See `Runtime.spans`."""
        spans, self._dispatcher.spans = self._dispatcher.spans, []
        return [span for _, span in sorted(spans, key=lambda numbered: numbered[0])]

    def metrics(self) -> Metrics:
        """See `Runtime.metrics`."""
        dispatcher, before_s = self._dispatcher, self._cpu_s
        self._cpu_s = time.process_time()
        sent, received = dispatcher.sent_bytes, dispatcher.received_bytes
        dispatcher.sent_bytes = dispatcher.received_bytes = 0
        return {
            "controller/cpu_s": last(self._cpu_s - before_s),
            "controller/sent_bytes": total(sent),
            "controller/received_bytes": total(received),
            "recovery/deaths": total(dispatcher.deaths.count_new()),
        }

    def recoveries(self, *, unfinished: bool = False) -> list[Recovery]:
        """See `Runtime.recoveries`."""
        return self._dispatcher.deaths.take(unfinished=unfinished)

    def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        workers = [worker for group in self._dispatcher.groups for worker in group.workers if worker.handle is not None]
        idle = [worker for worker in workers if worker.ready and not worker.attempts]
        closing = [self._transport.send(worker.handle, encode(Close()), (), 0)[0] for worker in idle]
        give_up_s = time.monotonic() + CLOSE_S
        while closing and time.monotonic() < give_up_s:
            answered = {key for key, _ in self._transport.poll(closing, LOOK_S)}
            closing = [key for key in closing if key not in answered]
        for worker in workers:
            self._transport.kill(worker.handle)
        self._dispatcher.groups, self._dispatcher.flying, self._dispatcher.copying = [], {}, {}
        self._transport.close()

    def _wait(self, tasks: Sequence[Task]) -> None:
        """Until the calls are done, or one of them has failed. The clocks of the workers bound it."""
        stuck_since_s = None
        while not all(task.done for task in tasks):
            for task in tasks:
                if task.failure is not None:
                    raise task.failure
            self._pump(LOOK_S)
            stuck_since_s = None if self._is_moving() else stuck_since_s or time.monotonic()
            if stuck_since_s is not None and time.monotonic() - stuck_since_s > self._settings.start_timeout_s:
                task = next(task for task in tasks if not task.done)
                raise WorkerError(
                    f"nothing runs, and the controller waits for {task.call}, which cannot start; please report it"
                )

    def _is_moving(self) -> bool:
        groups = self._dispatcher.groups
        asked = (a for a in self._dispatcher.flying.values() if a.task or not a.worker.ready)
        return any(asked) or any(w.unplaced_since_s is not None for g in groups for w in g.workers)

    def _fetch(self, refs: Sequence[Ref[Any]]) -> list[Any] | None:
        """The values; None where some were lost on the way and are made again. Bounded by `call_timeout_s`."""
        objects = [object_of(ref) for ref in refs if ref.handle.piece is not None]
        give_up_s = time.monotonic() + self._settings.call_timeout_s
        while True:
            try:
                fetched = self._transport.fetch(objects, LOOK_S)
            except ObjectLostError as error:
                for task in {ref.handle.task: None for ref in refs}:
                    if task.done and task.made(error.lost):
                        self._repairs.remake(task, error.lost)
                return None
            if fetched is not None:
                self._dispatcher.received_bytes += sum(_size_of(value) for value in fetched)
                rest = iter(fetched)
                return [ref.handle.task.values() if ref.handle.piece is None else next(rest) for ref in refs]
            if self._lost is None:
                self._pump(0.0)
            if not all(ref.handle.task.done for ref in refs):
                return None
            if time.monotonic() > give_up_s:
                raise WorkerError(
                    f"the controller waited {self._settings.call_timeout_s:g} s for the data of {refs[0].call}; look at the network, "
                    "or raise runtime.call_timeout_s"
                )

    def _pump(self, timeout_s: float) -> None:
        """One turn: send, wait for answers, look at the clocks."""
        if self._lost is not None:
            raise self._lost
        try:
            self._turn(timeout_s)
        except WorkersLostError as error:
            self._lost = error
            raise

    def _turn(self, timeout_s: float) -> None:
        dispatcher = self._dispatcher
        for group in dispatcher.groups:
            dispatcher.dispatch(group)
        timeout_s = min(timeout_s, LOOK_S, self._settings.call_timeout_s / 4)
        self._answer(self._transport.poll([*dispatcher.flying, *dispatcher.copying], timeout_s))
        if dispatcher.failed:
            self._repairs.judge_failures()
        self._repairs.look()
        self._repairs.remake_outdated()
        for group in dispatcher.groups:
            dispatcher.dispatch(group)

    def _answer(self, answers: Iterable[tuple[Any, bytes | Died | InputLost]]) -> None:
        for key, answer in answers:
            if key in self._dispatcher.copying:
                self._dispatcher.copied(key, whole=isinstance(answer, bytes))
                continue
            attempt = self._dispatcher.flying.get(key)
            if attempt is None:
                continue  # its worker was given up meanwhile
            if isinstance(answer, Died):
                self._repairs.replace_dead(attempt.worker, answer.cause)
            elif isinstance(answer, InputLost):
                self._repairs.input_lost(attempt, answer)
            else:
                self._dispatcher.received_bytes += len(answer)
                self._dispatcher.take(attempt, decode(answer))


def _own(group: Group[Any]) -> WorkerGroup:
    if not isinstance(group, WorkerGroup):
        raise TypeError(
            f"a {type(group).__name__} is not a group of this runtime; call verbs where the group was placed"
        )
    return group


def _size_of(value: Any) -> int:
    """Bytes of a value that the controller asked for."""
    if isinstance(value, Batch):
        return value.num_bytes
    return sys.getsizeof(value)
