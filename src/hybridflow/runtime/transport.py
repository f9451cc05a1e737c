"""What the scheduler needs of the world: processes that carry out orders, and a store that keeps what they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.runtime.placement import Slot


@dataclass(frozen=True)
class Died:
    """A process is gone, or its node does not answer."""

    cause: str


@dataclass(frozen=True)
class InputLost:
    """An order could not run: this one of its inputs went with the node that kept it."""

    lost: Any


class ObjectLostError(Exception):
    """An object that the controller asked for went with the node that kept it; `lost` is its handle."""

    def __init__(self, lost: Any) -> None:
        super().__init__(str(lost))
        self.lost = lost


class Transport(Protocol):
    """Processes and their store. Keys and objects are opaque and hashable."""

    def create(self, role: str, slot: Slot | None) -> Any:
        """A process that will hold a `Host`; returns its handle at once."""
        ...

    def send(self, handle: Any, order: bytes, inputs: Sequence[Any], num_objects: int) -> tuple[Any, tuple[Any, ...]]:
        """Sends an order behind those that were sent before; returns the key of its report, and the handles of its objects."""
        ...

    def poll(self, keys: list[Any], timeout_s: float) -> list[tuple[Any, bytes | Died | InputLost]]:
        """Answers to some of the keys, waiting for the first no longer than `timeout_s`."""
        ...

    def fetch(self, objects: Sequence[Any], timeout_s: float) -> list[Any] | None:
        """The objects' values; None where they are not here in time. Raises ObjectLostError."""
        ...

    def kill(self, handle: Any) -> None:
        """Ends a process at once, whatever it is doing."""
        ...

    def copy(self, item: Any, node_id: str) -> tuple[Any, Any, str] | None:
        """Another copy of an object that lies on `node_id`: the key of the report that it is there, the copy, and the node that keeps it;
        None where there is no other node."""
        ...

    def node_is_lost(self, node_id: str) -> bool:
        """Whether a node does not answer any more. Bounded to a second or two."""
        ...

    def find_slot(self, slot: Slot, *, share: bool) -> Slot | None:
        """A place for a worker that had `slot`: the same one if its node is there, else a free one of its kind, if any.

        Workers that had the same slot get the same one again. share: where nothing is free, one that others use.
        """
        ...

    def close(self) -> None:
        """Ends everything; bounded."""
        ...
