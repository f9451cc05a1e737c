"""All roles in this process: each call runs to its end before it returns, so a debugger works anywhere on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from hybridflow.observability.phases import SpanTimer, current_mark
from hybridflow.runtime.api import Closeable, Worker
from hybridflow.runtime.dispatch import flatten_refs, restore_refs
from hybridflow.types import Call, Ref, Span

W = TypeVar("W", bound=Closeable)
R = TypeVar("R")
P = ParamSpec("P")


class InProcessRuntime:
    """The `Runtime` of one process. Errors are raised where they happen, with the whole stack."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._workers: list[Worker[Any]] = []

    def place(self, role: str, build: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> Worker[W]:
        """See `Runtime.place`."""
        worker: Worker[W] = Worker(role, build(*args, **kwargs))
        self._workers.append(worker)
        return worker

    def submit(self, worker: Worker[W], verb: Callable[Concatenate[W, ...], R], *args: Any) -> Ref[R]:
        """See `Runtime.submit`; the call has ended when this returns."""
        call = Call(worker.role, verb.__name__, current_mark())
        with SpanTimer(call) as timer:
            value = verb(worker.handle, *self.get(args))
        self._spans.append(timer.span)
        return Ref(value, call)

    def get(self, value: Any) -> Any:
        """See `Runtime.get`."""
        skeleton, refs = flatten_refs(value)
        return restore_refs(skeleton, [ref.handle for ref in refs])

    def spans(self) -> list[Span]:
        """See `Runtime.spans`."""
        spans, self._spans = self._spans, []
        return spans

    def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        for worker in self._workers:
            worker.handle.close()
        self._workers = []
