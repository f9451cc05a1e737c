"""What a role asks of a runtime: place a worker, call its verbs, look at results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from hybridflow.batch import Batch
from hybridflow.config import Field, HybridflowError, settings
from hybridflow.types import BatchRef, Metrics, MetricsRef, Ref, Span


class Closeable(Protocol):
    """What every worker class has: `close()` ends what it started outside its process."""

    def close(self) -> None: ...


W = TypeVar("W", bound=Closeable)
W_co = TypeVar("W_co", bound=Closeable, covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


@settings
class RuntimeSettings:
    """Where roles run and how long anything may take."""

    kind: str = Field(default="local", pattern="^(local|ray)$")
    """`local`: all roles in this process, breakpoints work anywhere. `ray`: one Ray worker a role. `RAY_ADDRESS=local` means local."""
    address: str | None = None
    """Ray cluster to join, e.g. 'auto'; null starts one on this machine."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds a single wait for a worker may last before the run stops and says who waited for whom."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds a worker may take to start and load its model."""
    threads_per_worker: int = Field(default=0, ge=0, le=1024)
    """Arithmetic threads of a worker on the CPU; 0 takes all cores in one process and one a worker on Ray; exact mode takes 1."""


class WorkerError(HybridflowError, RuntimeError):
    """A verb failed in a worker; the message names role, verb, phase and step, and carries the worker's own traceback once."""


@dataclass(frozen=True, eq=False)
class Worker(Generic[W_co]):
    """A placed worker of class W. Only its runtime looks into `handle`."""

    role: str
    handle: Any


class Runtime(Protocol):
    """Where workers live. Calls of one worker run first in, first out; a call starts when its inputs are there."""

    def place(self, role: str, build: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> Worker[W]:
        """A worker named `role`, made by `build(*args)` where it will live.

        May return before it is ready, so that workers start side by side; the next `get` waits for all of them, no longer than
        `start_timeout_s`, and raises WorkerError for one that cannot start.
        """
        ...

    def submit(self, worker: Worker[W], verb: Callable[Concatenate[W, ...], R], *args: Any) -> Ref[R]:
        """Calls `verb(worker, *args)` there and returns at once.

        References inside the arguments arrive as the data that they name, which is why the facade, not this call, types them.
        """
        ...

    @overload
    def get(self, value: BatchRef) -> Batch: ...
    @overload
    def get(self, value: MetricsRef) -> Metrics: ...
    @overload
    def get(self, value: Ref[R]) -> R: ...
    def get(self, value: Any) -> Any:
        """Waits for what the value names and returns it. Bounded by `call_timeout_s`."""
        ...

    def spans(self) -> list[Span]:
        """The workers' own times of all calls that ended since the last look, in the order they were submitted."""
        ...

    def shutdown(self) -> None:
        """Ends all workers, and with them what they started; bounded, may be called twice."""
        ...
