"""What a role asks of a runtime: place a group of workers, call their verbs, look at results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from hybridflow.batch import Batch
from hybridflow.config import Field, HybridflowError, settings
from hybridflow.runtime.placement import PlacementSettings
from hybridflow.types import BatchRef, Metrics, MetricsRef, Recovery, Ref, Span


class Closeable(Protocol):
    """What every worker class has: `close()` ends what it started outside its process."""

    def close(self) -> None: ...


W = TypeVar("W", bound=Closeable)
W_co = TypeVar("W_co", bound=Closeable, covariant=True)
R = TypeVar("R")
S = TypeVar("S")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


@settings
class RecoverySettings:
    """What is done about a worker that dies or does not answer (Ray)."""

    max_restarts: int = Field(default=8, ge=0)
    """Deaths within `window_s` that are repaired; one more stops the run, with a checkpoint. 0 stops at the first."""
    window_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a death no longer counts against `max_restarts`."""
    max_attempts: int = Field(default=3, ge=1)
    """Times that one call may lose its worker; then the call itself is taken to be the cause, and the run stops."""
    snapshot_every_steps: int = Field(default=1, ge=0)
    """Steps between copies of the training state in memory outside the trainer's process; 0 keeps none, and a lost trainer ends the run
    at its last checkpoint."""
    wait_for_node_s: float = Field(default=10.0, ge=0)
    """Seconds that a worker of a lost node waits for a free device of its kind; then its group goes on without it, or it shares one."""


@settings
class RuntimeSettings:
    """Where roles run and how long anything may take."""

    kind: str = Field(default="local", pattern="^(local|ray)$")
    """`local`: all roles in this process, breakpoints work anywhere. `ray`: workers of their own. `RAY_ADDRESS=local` means local."""
    address: str | None = None
    """Ray cluster to join, e.g. 'auto'; null takes RAY_ADDRESS where that is set, and else starts one on this machine."""
    num_cpus: int | None = Field(default=None, ge=1)
    """CPUs that a cluster started here offers; null takes the machine's. More than there are lets workers share cores."""
    placement: PlacementSettings = Field(default_factory=PlacementSettings)
    """Which devices each role gets (Ray)."""
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)
    """What is done about a worker that dies (Ray)."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that one call may run; then its worker counts as dead, and the log says who waited for whom."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds a worker may take to start and load its model."""
    threads_per_worker: int = Field(default=0, ge=0, le=1024)
    """Arithmetic threads of a worker on the CPU; 0 takes all cores in one process, and on Ray those of its slot; exact mode takes 1."""


class WorkerError(HybridflowError, RuntimeError):
    """A verb failed in a worker; the message names role, rank, device, verb, phase and step, with the worker's own traceback once."""


class WorkersLostError(WorkerError):
    """Workers died more often than may be repaired; what the run knew at its last snapshot is still there."""


@dataclass(frozen=True)
class Seat:
    """The place of one worker in its group: `Seat("actor", rank=1, size=2, device="cuda:0", rendezvous="tcp://10.0.0.1:29500")`.

    device, dtype: what the placement says; None leaves it to the model's own settings.
    rendezvous:    where the ranks of a gang meet (`init_method` of torch.distributed); None where there is one rank, or no gang.
    timeout_s:     bound of every wait for another rank.
    address:       of the worker's machine, by which workers of other machines reach it.
    """

    role: str
    rank: int = 0
    size: int = 1
    device: str | None = None
    dtype: str | None = None
    rendezvous: str | None = None
    timeout_s: float = 3600.0
    address: str = "127.0.0.1"


HELD_BY_ASKED = "held by asked"
"""Digest of an object whose data lies with workers whose answers (`Runtime.ask`) it was made from: with any of them it is lost."""


@dataclass(frozen=True, eq=False)
class Pieces(Generic[T_co]):
    """What a verb returns whose result is several objects, each fetched by itself.

    digests: for each object the few numbers that the controller may read (lengths, states), `HELD_BY_ASKED`, or None.
    """

    objects: tuple[T_co, ...]
    digests: tuple[Any, ...]

    @staticmethod
    def check(value: Any, verb: str, count: int) -> None:
        """Raises TypeError unless the value that a verb returned is pieces, as many as it promised."""
        if not isinstance(value, Pieces) or len(value.objects) != count:
            raise TypeError(f"{verb} promised {count} pieces and returned something else")


class Group(Protocol[W_co]):
    """Workers of class W that share a role. `gang`: their calls meet in collectives, so one death restarts all."""

    @property
    def role(self) -> str: ...

    @property
    def size(self) -> int: ...


Split = Callable[[Sequence[Any], int], Sequence[tuple[Any, ...]]]
"""(digests, size) -> the arguments of each of `size` workers. A `functools.partial`, whose own arguments hold every reference that the
results may: so a plan sees what the call will read, before there is a digest."""


class Runtime(Protocol):
    """Where workers live.

    The calls of a group keep their order around every change of state: a `submit` sees the state that the `broadcast` and `scatter`
    calls before it have left, and no later one. Between two changes, calls run when their inputs are there, on any worker that is free.
    """

    def place(self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs) -> Group[W]:
        """The workers of `role`, each made by `build(seat, *args)` where it will live; as many as the placement has devices for.

        May return before they are ready, so that workers start side by side. Raises WorkerError, here or from a later `get`, for one
        that cannot start within `start_timeout_s`.
        """
        ...

    def place_gang(
        self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs
    ) -> Group[W]:
        """The same for workers that meet in collectives (`Seat.rendezvous`): they live and die together."""
        ...

    def submit(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, rows: str = "") -> Ref[R]:
        """Calls `verb(worker, *args)` on one worker, whichever is free, and returns at once. It must leave nothing that a later call sees.

        References inside the arguments arrive as the data that they name, which is why the facade, not this call, types them.
        rows: which rows of the step this is about, for errors: `rows="rows 0 to 63"`.
        """
        ...

    def submit_pieces(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], Pieces[R]], count: int, *args: Any, rows: str = ""
    ) -> tuple[Ref[R], ...]:
        """As `submit`, for a verb that returns `count` objects."""
        ...

    def submit_all(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], args: Sequence[tuple[Any, ...]]
    ) -> tuple[Ref[R], ...]:
        """Calls a verb that only reads, and in which the workers of a gang meet, on all of them at once; the results by rank.

        args: of each worker. A gang that has become smaller meanwhile cannot make the call, and the run ends.
        """
        ...

    def submit_all_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """As `submit_all`, for a verb of which worker i returns `counts[i]` objects, maybe none."""
        ...

    def submit_team_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """As `submit_pieces`, for a verb in which a team of a gang meets: so many neighbours as there are `args`, whichever are free; the
        pieces by their place in the team. Teams do not overlap, and one size divides the gang.
        """
        ...

    def ask(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any) -> Ref[tuple[R | None, ...]]:
        """Calls a verb that leaves nothing behind but what can be had again, on every worker that is there; the small answers by rank.

        None for a worker that is not there, dies over it, or has been replaced when the answers are read. It is never made again. In a gang
        the workers may meet in it: there it waits until all are there.
        """
        ...

    def broadcast(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, replaces: bool = False
    ) -> Ref[tuple[R, ...]]:
        """Calls a verb that changes state with the same arguments on every worker; the results by rank, small, since the controller gets
        them with the report.

        replaces: the state afterwards follows from these arguments alone (weights, a checkpoint), so that a restarted worker needs
                  nothing from before.
        """
        ...

    def scatter(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], split: Split, described: Sequence[Ref[Any]]
    ) -> Ref[tuple[R, ...]]:
        """Calls a verb that changes state on every worker, each with its own arguments; the results by rank, small as with `broadcast`.

        split: is called with the digests of `described` as soon as they are there, in the controller.
        """
        ...

    def snapshot(self, group: Group[W], take: Callable[[W], S], restore: Callable[[W, S], None]) -> Ref[S] | None:
        """Copies a gang's state out of its processes: a worker that dies later starts from `restore(worker, take(worker))` and what came
        after. None, and no copy, where nothing can outlive the worker (one process), or while the one before is on its way to another node.
        """
        ...

    def snapshot_all(
        self, group: Group[W], take: Callable[[W], S], restore: Callable[Concatenate[W, ...], None]
    ) -> tuple[Ref[S], ...] | None:
        """The same for a gang whose workers each hold a part of the state: every one's `take`, and each later starts from
        `restore(worker, *parts)` with the parts of all."""
        ...

    @overload
    def get(self, value: BatchRef) -> Batch: ...
    @overload
    def get(self, value: MetricsRef) -> Metrics: ...
    @overload
    def get(self, value: Ref[R]) -> R: ...
    @overload
    def get(self, value: tuple[Ref[R], ...]) -> tuple[R, ...]: ...
    def get(self, value: Any) -> Any:
        """Waits for what the value names and returns it. Each call that it waits for is bounded by `call_timeout_s`."""
        ...

    def is_there(self, ref: Ref[Any]) -> bool:
        """Whether `get` would return at once, and without any worker."""
        ...

    def spans(self) -> list[Span]:
        """The workers' own times of all calls that ended since the last look, in the order they were submitted."""
        ...

    def metrics(self) -> Metrics:
        """What the runtime itself cost since the last look: `controller/*` and `recovery/*`; empty in one process."""
        ...

    def recoveries(self, *, unfinished: bool = False) -> list[Recovery]:
        """The deaths that were made good since the last look; with those that are not, at the end of a run."""
        ...

    def shutdown(self) -> None:
        """Ends all workers, and with them what they started; bounded, may be called twice."""
        ...
