"""A runtime that runs nothing: it notes what the page asks for, and what each call would wait for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar

import torch

from hybridflow.batch import Batch
from hybridflow.observability.phases import current_mark
from hybridflow.runtime.api import Closeable, Group, Pieces, RuntimeSettings, Seat, Split
from hybridflow.runtime.dispatch import flatten_refs
from hybridflow.runtime.placement import Inventory, NodeInventory, PlacementSettings
from hybridflow.runtime.start import open_runtime
from hybridflow.types import BatchRef, Call, Metrics, Recovery, Ref, Span

W = TypeVar("W", bound=Closeable)
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")
On = Literal["one", "each"] | int


@dataclass(frozen=True)
class RecordedCall:
    """One call: `RecordedCall(7, Call("actor", "update", Mark(1, "update")), "each", num_rows=512, inputs=(1, 2, 5), after=(6,))`.

    number:   from 1, in the order of calling.
    on:       `one` worker, whichever is free, so many neighbours of a gang that are, or `each` of the group.
    num_rows: of the first batch among its arguments; 0 without one.
    inputs:   the calls whose results its arguments name.
    after:    the calls of its own group that it keeps its order to: the last change of state before it, and if it changes the state
              itself, everything that was to see the state before.
    """

    number: int
    call: Call
    on: On
    num_rows: int = 0
    inputs: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(eq=False)
class RecordedGroup:
    """Workers that were placed, and which of their calls the next one has to be ordered against."""

    role: str
    size: int
    worker: str
    gang: bool
    last_change: int | None = None
    reads: list[int] = field(default_factory=list)


class RecordingRuntime:
    """The `Runtime` of a plan: `groups` are the workers placed and `calls` what they were asked, in order.

    workers:         how many each role gets; a role that is not there gets one.
    keeps_snapshots: whether the runtime planned for does.
    """

    def __init__(self, workers: Mapping[str, int] | None = None, *, keeps_snapshots: bool = True) -> None:
        self.groups: list[RecordedGroup] = []
        self.calls: list[RecordedCall] = []
        self._workers, self._keeps_snapshots = dict(workers or {}), keeps_snapshots

    def place(self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs) -> Group[W]:
        """See `Runtime.place`."""
        return self._place(role, build, gang=False)

    def place_gang(
        self, role: str, build: Callable[Concatenate[Seat, P], W], *args: P.args, **kwargs: P.kwargs
    ) -> Group[W]:
        """See `Runtime.place_gang`."""
        return self._place(role, build, gang=True)

    def submit(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, rows: str = "") -> Ref[R]:
        """See `Runtime.submit`."""
        return self._read(group, verb.__name__, args, rows)

    def submit_pieces(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], Pieces[R]], count: int, *args: Any, rows: str = ""
    ) -> tuple[Ref[R], ...]:
        """See `Runtime.submit_pieces`; the pieces share one call."""
        made = self._read(group, verb.__name__, args, rows)
        return tuple(Ref(made.handle, made.call) for _ in range(count))

    def submit_all(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], args: Sequence[tuple[Any, ...]]
    ) -> tuple[Ref[R], ...]:
        """See `Runtime.submit_all`."""
        return (self._read(group, verb.__name__, tuple(chain.from_iterable(args)), "", on="each"),) * len(args)

    def submit_all_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """See `Runtime.submit_all_pieces`; what the workers make shares one call."""
        return self._meet(group, verb.__name__, counts, args, rows, "each")

    def submit_team_pieces(
        self,
        group: Group[W],
        verb: Callable[Concatenate[W, ...], Pieces[R]],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[R], ...], ...]:
        """See `Runtime.submit_team_pieces`; what the workers make shares one call."""
        return self._meet(group, verb.__name__, counts, args, rows, len(args))

    def ask(self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any) -> Ref[tuple[R | None, ...]]:
        """See `Runtime.ask`."""
        return self._read(group, verb.__name__, args, "", on="each")

    def broadcast(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], *args: Any, replaces: bool = False
    ) -> Ref[tuple[R, ...]]:
        """See `Runtime.broadcast`."""
        return self._change(group, verb.__name__, args)

    def scatter(
        self, group: Group[W], verb: Callable[Concatenate[W, ...], R], split: Split, described: Sequence[Ref[Any]]
    ) -> Ref[tuple[R, ...]]:
        """See `Runtime.scatter`; without results to split, what the workers are given is known by what `split` holds.

        Raises TypeError for a split that is not a `functools.partial`, and so hides it.
        """
        if not isinstance(split, functools.partial):
            raise TypeError(
                f"the split of {group.role}.{verb.__name__} hides what it refers to; make it a functools.partial"
            )
        return self._change(group, verb.__name__, (*split.args, *split.keywords.values(), described))

    def snapshot(self, group: Group[W], take: Callable[[W], S], restore: Callable[[W, S], None]) -> Ref[S] | None:
        """See `Runtime.snapshot`."""
        return self._read(group, take.__name__, (), "") if self._keeps_snapshots else None

    def snapshot_all(
        self, group: Group[W], take: Callable[[W], S], restore: Callable[Concatenate[W, ...], None]
    ) -> tuple[Ref[S], ...] | None:
        """See `Runtime.snapshot_all`."""
        return (self._read(group, take.__name__, (), "", on="each"),) * group.size if self._keeps_snapshots else None

    def get(self, value: Any) -> NoReturn:
        """Raises TypeError: there are no results."""
        _, refs = flatten_refs(value)
        raise TypeError(f"a plan runs nothing, so {', '.join(str(ref.call) for ref in refs)} has no result to get")

    def is_there(self, ref: Ref[Any]) -> bool:
        """See `Runtime.is_there`: nothing ever is."""
        return False

    def spans(self) -> list[Span]:
        """Nothing ran."""
        return []

    def metrics(self) -> Metrics:
        """Nothing was spent."""
        return {}

    def recoveries(self, *, unfinished: bool = False) -> list[Recovery]:
        """Nothing died."""
        return []

    def shutdown(self) -> None:
        """Nothing was started."""

    def _place(self, role: str, build: Callable[..., W], *, gang: bool) -> Any:
        group = RecordedGroup(role, self._workers.get(role, 1), build.__name__, gang)
        self.groups.append(group)
        return group

    def _meet(
        self, group: Any, verb: str, counts: Sequence[int], args: Sequence[tuple[Any, ...]], rows: str, on: On
    ) -> tuple[tuple[Ref[Any], ...], ...]:
        made = self._read(group, verb, tuple(chain.from_iterable(args)), rows, on)
        return tuple(tuple(Ref(made.handle, made.call) for _ in range(count)) for count in counts)

    def _read(self, group: Any, verb: str, args: Any, rows: str, on: On = "one") -> Ref[Any]:
        after = () if group.last_change is None else (group.last_change,)
        made = self._record(group, verb, args, rows, on, after)
        group.reads.append(made.handle)
        return made

    def _change(self, group: Any, verb: str, args: Any) -> Ref[Any]:
        after = tuple(group.reads) or (() if group.last_change is None else (group.last_change,))
        made = self._record(group, verb, args, "", "each", after)
        group.last_change, group.reads = made.handle, []
        return made

    def _record(self, group: Any, verb: str, args: Any, rows: str, on: On, after: tuple[int, ...]) -> Ref[Any]:
        call = Call(group.role, verb, current_mark(), rows)
        _, refs = flatten_refs(args)
        number = len(self.calls) + 1
        inputs = tuple(dict.fromkeys(ref.handle for ref in refs))
        num_rows = next((arg.num_rows for arg in args if isinstance(arg, Batch | BatchRef)), 0)
        self.calls.append(RecordedCall(number, call, on, num_rows, inputs, after))
        return Ref(number, call)


def find_nodes(settings: RuntimeSettings) -> Inventory:
    """What the placement of a run would be made on: the nodes of the cluster that it would join, or this machine. Starts no cluster."""
    if settings.address is None and "RAY_ADDRESS" not in os.environ:
        num_cpus = settings.num_cpus or os.cpu_count() or 1
        return (NodeInventory("here", "this machine", torch.cuda.device_count(), num_cpus),)
    with open_runtime(replace(settings, placement=PlacementSettings())):
        from hybridflow.runtime.ray_transport import read_inventory  # there only where ray is installed

        return read_inventory()
