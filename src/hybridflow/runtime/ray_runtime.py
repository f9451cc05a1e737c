"""Roles as Ray actors, one worker a role. With `ray_*.py` beside it, the only place that imports ray.

A call's references travel as top-level arguments of the actor task, so Ray starts the task when they are there and in
the order of submission. What a verb returns is the task's return value: it outlives the worker that made it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from hybridflow.observability.phases import SpanTimer, current_mark
from hybridflow.runtime.api import Closeable, RuntimeSettings, Worker, WorkerError
from hybridflow.runtime.dispatch import flatten_refs, restore_refs
from hybridflow.types import Call, Ref, Span

W = TypeVar("W", bound=Closeable)
R = TypeVar("R")
P = ParamSpec("P")


class _Host:
    """Lives in the actor process: holds the worker and runs its verbs, one at a time, in order of submission."""

    def __init__(self, build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._worker = build(*args, **kwargs)

    def ready(self) -> bool:
        return True

    def run(self, call: Call, verb: Callable[..., Any], skeleton: Any, *values: Any) -> tuple[Any, Span]:
        args = restore_refs(skeleton, values)
        with SpanTimer(call) as timer:
            value = verb(self._worker, *args)
        return value, timer.span


class RayRuntime:
    """The `Runtime` on a Ray cluster, joined or started here."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        self._spans: list[Ref[Span]] = []
        self._workers: list[Worker[Any]] = []
        self._starting: list[Ref[bool]] = []
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            ray.init(address=settings.address, include_dashboard=False, log_to_driver=True, logging_level=logging.ERROR)

    def place(self, role: str, build: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> Worker[W]:
        """See `Runtime.place`."""
        host = ray.remote(_Host).options(num_cpus=0, runtime_env={"env_vars": _worker_environment()})
        worker: Worker[W] = Worker(role, host.remote(build, args, kwargs))
        self._workers.append(worker)
        self._starting.append(Ref(worker.handle.ready.remote(), Call(role, "start", current_mark())))
        return worker

    def submit(self, worker: Worker[W], verb: Callable[Concatenate[W, ...], R], *args: Any) -> Ref[R]:
        """See `Runtime.submit`."""
        call = Call(worker.role, verb.__name__, current_mark())
        skeleton, refs = flatten_refs(args)
        run = worker.handle.run.options(num_returns=2, name=f"{call.role}.{call.verb}")
        value, span = run.remote(call, verb, skeleton, *(ref.handle for ref in refs))
        self._spans.append(Ref(span, call))
        return Ref(value, call)

    def get(self, value: Any) -> Any:
        """See `Runtime.get`."""
        starting, self._starting = self._starting, []
        self._wait(starting, self._settings.start_timeout_s, suspects=starting)
        skeleton, refs = flatten_refs(value)
        return restore_refs(skeleton, self._wait(refs, self._settings.call_timeout_s, suspects=[*self._spans, *refs]))

    def spans(self) -> list[Span]:
        """See `Runtime.spans`."""
        pending = set(self._unfinished(self._spans))
        ended = [ref for ref in self._spans if ref not in pending]
        self._spans = [ref for ref in self._spans if ref in pending]
        return self._wait(ended, self._settings.call_timeout_s, suspects=ended)

    def shutdown(self) -> None:
        """See `Runtime.shutdown`."""
        for worker in self._workers:
            ray.kill(worker.handle)
        self._workers = []
        if self._owns_cluster and ray.is_initialized():
            ray.shutdown()

    def _wait(self, refs: list[Ref[Any]], timeout_s: float, suspects: list[Ref[Any]]) -> list[Any]:
        """The values, or WorkerError naming the first of the suspects (in order of submission) that failed."""
        try:
            return ray.get([ref.handle for ref in refs], timeout=timeout_s)
        except GetTimeoutError:
            waiting = "; ".join(str(ref.call) for ref in self._unfinished(refs))
            raise WorkerError(
                f"the controller waited {timeout_s:g} s for {waiting}; look at that worker, or raise "
                "runtime.call_timeout_s (runtime.start_timeout_s for a start)"
            ) from None
        except RayTaskError as error:
            raise WorkerError(f"{_first_failed(suspects)} failed: {error.cause!r}\n{_plain(error)}") from None
        except RayActorError as error:
            raise WorkerError(f"{_first_failed(suspects)} lost its worker: {_plain(error)}") from None

    def _unfinished(self, refs: list[Ref[Any]]) -> list[Ref[Any]]:
        if not refs:
            return []
        _, pending = ray.wait([ref.handle for ref in refs], num_returns=len(refs), timeout=0, fetch_local=False)
        missing = set(pending)
        return [ref for ref in refs if ref.handle in missing]


def _first_failed(refs: list[Ref[Any]]) -> Call:
    """The call that failed by itself: one whose inputs failed fails as well, but was submitted after it."""
    for ref in refs:
        try:
            ray.get(ref.handle, timeout=0)
        except GetTimeoutError:
            continue
        except (RayTaskError, RayActorError):
            return ref.call
    return refs[0].call


def _worker_environment() -> dict[str, str]:
    """What a worker finds in its environment.

    The controller's import path, so that its modules and the user's are found. One arithmetic thread a worker unless the user
    said otherwise. And all GPUs of the machine: which one a role takes is said by its `model.device`, where Ray would hide them
    from an actor that reserves none.
    """
    return {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _plain(error: Exception) -> str:
    """The worker's own traceback as Ray tells it, without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
