"""All roles in this process: each call runs to its end before it returns, so a debugger works anywhere on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from hybridflow.observability.phases import SpanTimer, current_mark
from hybridflow.runtime.api import Closeable, Group, Pieces, Seat, Split
from hybridflow.runtime.dispatch import flatten_refs, restore_refs
from hybridflow.types import Call, Metrics, Recovery, Ref, Span

W = TypeVar("W", bound=Closeable)
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")


@dataclass(frozen=True)
class _Here:
    """A value that is here, with the digest that goes with it."""

    value: Any
    digest: Any = None


@dataclass(frozen=True, eq=False)
class LocalGroup:
    """The one worker of a role, whatever the placement says."""

    role: str
    worker: Any
    size: int = 1


class InProcessRuntime:
    """The `Runtime` of one process. Errors are raised where they happen, with the whole stack."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._workers: list[Any] = []

    def place(self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs) -> Group[W]:
        """See `Runtime.place`."""
        worker = build(Seat(role), *args, **kwargs)
        self._workers.append(worker)
        return LocalGroup(role, worker)

    def place_gang(
        self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs
    ) -> Group[W]:
        """See `Runtime.place_gang`."""
        return self.place(role, build, *args, **kwargs)

    def submit(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, rows: str = "") -> Ref[R]:
        """See `Runtime.submit`; the call has ended when this returns."""
        value, call = self._run(group, verb, args, rows)
        return Ref(_Here(value), call)

    def submit_pieces(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], Pieces[R]], count: int, *args: Any, rows: str = ""
    ) -> tuple[Ref[R], ...]:
        """See `Runtime.submit_pieces`."""
        pieces, call = self._run(group, verb, args, rows)
        Pieces.check(pieces, call.verb, count)
        pairs = zip(pieces.objects, pieces.digests, strict=True)
        return tuple(Ref(_Here(value, digest), call) for value, digest in pairs)

    def submit_all(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], args: Sequence[tuple[Any, ...]]
    ) -> tuple[Ref[R], ...]:
        """See `Runtime.submit_all`."""
        return (self.submit(group, verb, *args[0]),)

    def submit_all_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """See `Runtime.submit_all_pieces`."""
        return (self.submit_pieces(group, verb, counts[0], *args[0], rows=rows),)

    def submit_team_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """See `Runtime.submit_team_pieces`."""
        return self.submit_all_pieces(group, verb, counts, args, rows)

    def ask(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any) -> Ref[tuple[R | None, ...]]:
        """See `Runtime.ask`."""
        return self.broadcast(group, verb, *args)

    def broadcast(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, replaces: bool = False
    ) -> Ref[tuple[R, ...]]:
        """See `Runtime.broadcast`."""
        value, call = self._run(group, verb, args)
        return Ref(_Here((value,)), call)

    def scatter(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], split: Split, described: Sequence[Ref[Any]]
    ) -> Ref[tuple[R, ...]]:
        """See `Runtime.scatter`."""
        (args,) = split([ref.handle.digest for ref in described], 1)
        value, call = self._run(group, verb, args)
        return Ref(_Here((value,)), call)

    def snapshot(self, group: Group[W], take: Callable[[W], S], restore: Callable[[W, S], None]) -> Ref[S] | None:
        """See `Runtime.snapshot`: nothing outlives this process."""
        return None

    def snapshot_all(
        self, group: Group[W], take: Callable[[W], S], restore: Callable[Concatenate[W, ...], None]
    ) -> tuple[Ref[S], ...] | None:
        """See `Runtime.snapshot_all`: nothing outlives this process."""
        return None

    def get(self, value: Any) -> Any:
        """See `Runtime.get`."""
        skeleton, refs = flatten_refs(value)
        return restore_refs(skeleton, [ref.handle.value for ref in refs])

    def is_there(self, ref: Ref[Any]) -> bool:
        """See `Runtime.is_there`."""
        return True

    def spans(self) -> list[Span]:
        """See `Runtime.spans`."""
        spans, self._spans = self._spans, []
        return spans

    def metrics(self) -> Metrics:
        """See `Runtime.metrics`."""
        return {}

    def recoveries(self, *, unfinished: bool = False) -> list[Recovery]:
        """See `Runtime.recoveries`."""
        return []

    def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _run(
        self, group: Group[Any], verb: Callable[..., Any], args: Sequence[Any], rows: str = ""
    ) -> tuple[Any, Call]:
        if not isinstance(group, LocalGroup):
            raise TypeError(
                f"a {type(group).__name__} is not a group of this runtime; call verbs where the group was placed"
            )
        call = Call(group.role, verb.__name__, current_mark(), rows)
        with SpanTimer(call) as timer:
            value = verb(group.worker, *self.get(tuple(args)))
        self._spans.append(timer.span)
        return value, call
