"""What runs in a worker's process: a `Host` that holds one worker and carries out orders, one at a time, first in, first out.

Orders and reports are small and travel through the controller; the objects that verbs take and return do not.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from hybridflow.observability.phases import SpanTimer
from hybridflow.runtime.api import Pieces, Seat
from hybridflow.runtime.binding import bind_worker
from hybridflow.runtime.dispatch import restore_refs
from hybridflow.types import Call, Span

BUILT = -1
"""Place of the state that a worker has when it is built."""


@dataclass(frozen=True)
class Describe:
    """Asks who is there; answered by `HostInfo`."""


@dataclass(frozen=True)
class Start:
    """Builds the worker: `build(seat, *args, **kwargs)`.

    directory:     the controller's, so that a relative path means the same here, on a machine that has it.
    kind, indices: the devices of this worker on its node, for NUMA binding; None binds nothing.
    """

    seat: Seat
    build: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    directory: str = "."
    kind: str | None = None
    indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """Calls a verb.

    inline:   values of references that come with the order, by the number of their slot; the others come beside it, as objects.
    pieces:   objects that the verb returns; 0 for one value that is not `Pieces`.
    position: of a call that changes state: its place among those of its group. A call that comes twice, or after one that never came,
              is refused. None for a call that only reads.
    resets:   the state afterwards is that of the arguments alone, so this call may stand at any place.
    tells:    what it returns goes with the report, as that of a change does.
    """

    call: Call
    verb: Callable[..., Any]
    skeleton: Any
    inline: Mapping[int, Any]
    pieces: int
    position: int | None = None
    follows: int | None = None
    resets: bool = False
    tells: bool = False

    @property
    def num_objects(self) -> int:
        """Objects that are returned beside the report."""
        return 0 if self.tells or self.position is not None else max(self.pieces, 1)


@dataclass(frozen=True)
class Close:
    """Ends what the worker started outside its process."""


@dataclass(frozen=True)
class HostInfo:
    """Where a host is, and where the ranks of a gang can meet if it is their rank 0: by a file on one machine, else at a port."""

    node_id: str
    address: str
    pid: int
    rendezvous_file: str
    rendezvous_port: int


@dataclass(frozen=True)
class Failure:
    """An error of a verb as its worker saw it: type, text, and its own traceback; `time_s` tells which of several came first."""

    kind: str
    text: str
    trace: str
    time_s: float


@dataclass(frozen=True)
class Report:
    """What the controller learns of one order: never data, only who, how long, and the digests that the verb gave.

    value: what a call that changes state, or `tells`, returned, which is small, and must not go with a node after the state has moved on.
    """

    info: HostInfo | None = None
    span: Span | None = None
    digests: tuple[Any, ...] = ()
    value: Any = None
    failure: Failure | None = None


def encode(order: Describe | Start | Run | Close) -> bytes:
    """Plain pickle, which is several times faster, unless something of the user's was defined in a notebook, a script or a function:
    that travels by cloudpickle."""
    try:
        data = pickle.dumps(order, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        data = b"__main__"
    return cloudpickle.dumps(order) if b"__main__" in data else data


def decode(report: bytes) -> Report:
    """A report from a worker of this cluster."""
    found: Report = pickle.loads(report)  # noqa: S301  (inside the authenticated cluster)
    return found


class Host:
    """Lives in the worker's process."""

    def __init__(self, node_id: str = "", address: str = "") -> None:
        self._node_id, self._address = node_id, address
        self._worker: Any = None
        self._rank = 0
        self._position = BUILT

    def answer(self, order: bytes, *values: Any) -> Any:
        """Carries out one order; returns the objects, and last the pickled `Report`. Raises nothing that a verb raised."""
        decoded = cloudpickle.loads(order)
        match decoded:
            case Describe():
                return pickle.dumps(Report(info=self._describe()))
            case Close():
                self.close()
                return pickle.dumps(Report())
            case Start():
                return pickle.dumps(self._start(decoded))
            case Run():
                objects, report = self._run(decoded, values)
                return (*objects, pickle.dumps(report)) if objects else pickle.dumps(report)

    def close(self) -> None:
        """Ends what the worker started outside this process."""
        if self._worker is not None:
            self._worker.close()

    def _describe(self) -> HostInfo:
        # A port that is free now; nothing holds it until rank 0 listens there, and a failure to listen restarts the gang with another.
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        meeting = Path(tempfile.gettempdir()) / f"hybridflow-ranks-{secrets.token_hex(8)}"
        return HostInfo(self._node_id, self._address, os.getpid(), meeting.as_uri(), port)

    def _start(self, order: Start) -> Report:
        try:
            if os.path.isdir(order.directory):
                os.chdir(order.directory)
            bind_worker(order.kind, order.indices)
            self._rank = order.seat.rank
            self._worker = order.build(order.seat, *order.args, **order.kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (told to the controller, which raises it)
            return Report(failure=_describe_failure(error))
        return Report()

    def _run(self, order: Run, values: Sequence[Any]) -> tuple[tuple[Any, ...], Report]:
        nothing = (None,) * order.num_objects
        try:
            with SpanTimer(order.call, self._rank) as timer:
                self._check_position(order)
                args = restore_refs(order.skeleton, _interleave(values, order.inline))
                value = order.verb(self._worker, *args)
                if order.pieces:
                    Pieces.check(value, order.call.verb, order.pieces)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (told to the controller, which raises it)
            return nothing, Report(span=timer.span, failure=_describe_failure(error))
        if order.position is not None:
            self._position = order.position
        if order.tells or order.position is not None:
            return (), Report(span=timer.span, value=value)
        if order.pieces == 0:
            return (value,), Report(span=timer.span)
        return value.objects, Report(span=timer.span, digests=value.digests)

    def _check_position(self, order: Run) -> None:
        if (
            order.position is None
            or order.resets
            or (BUILT if order.follows is None else order.follows) == self._position
        ):
            return
        raise OutOfOrderError(
            f"call {order.position} changes the state that call {order.follows} left, but this worker's last change was "
            f"call {self._position}; a change was delivered twice or not at all, please report it"
        )


class OutOfOrderError(RuntimeError):
    """A state-changing call came twice, or one before it never came."""


def _interleave(values: Sequence[Any], inline: Mapping[int, Any]) -> list[Any]:
    """All values by the number of their slot."""
    rest = iter(values)
    return [inline[index] if index in inline else next(rest) for index in range(len(values) + len(inline))]


def _describe_failure(error: BaseException) -> Failure:
    # The first frame is this file's; what a reader needs begins below it.
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    lines = traceback.format_exception(type(error), error, trace)
    return Failure(type(error).__name__, str(error), "".join(lines).rstrip(), time.time())
