"""Trainers and generators that live apart, as ranks of one group: who they are, where they meet, and the group itself.

A link is of one life of each of its members: where one has been replaced, the next link is another one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from hybridflow.types import PeerLostError
from hybridflow.weights.layout import WeightLayout, read_layout

WAIT_S = 120.0
"""Longest wait for the other side, and for a bucket, whatever a call may take: both sides begin within moments of each other."""
_TRAINERS, _GENERATORS = "trainers", "generators"


@dataclass(frozen=True)
class Member:
    """A process that can take part: `Member("8f2c", "10.0.0.2", 4711, "cuda", "file:///tmp/hybridflow-link-51d0", 29500)`.

    token:      of this life of its worker.
    device:     the kind of device that its weights are on.
    file, port: where others can meet it, on its machine and from others.
    broken:     key of the last meeting that failed here.
    """

    token: str
    address: str
    pid: int
    device: str
    file: str
    port: int
    broken: str = ""


@dataclass(frozen=True)
class Meeting:
    """Where all members come together, trainers first.

    `Meeting("a3f1", "tcp://10.0.0.2:29500", ("8f2c", "77d0", "19ab"), num_trainers=2, nodes=(0, 0, 1))`

    tokens: of the members by rank; nodes: which machine each is on.
    """

    key: str
    rendezvous: str
    tokens: tuple[str, ...]
    num_trainers: int
    nodes: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.tokens)


def describe_member(token: str, address: str, device: torch.device, broken: str = "") -> Member:
    """This process. The port is free now; nothing holds it until the members meet there."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    file = Path(tempfile.gettempdir()) / f"hybridflow-link-{secrets.token_hex(8)}"
    return Member(token, address, os.getpid(), device.type, file.as_uri(), port, broken)


def plan_meeting(trainers: Sequence[Member | None], generators: Sequence[Member | None]) -> Meeting | None:
    """Where these meet; None where they cannot: one is not there, two are one process, which cannot wait for itself, their devices are of
    different kinds, or their last meeting failed. All come to the same answer."""
    members = [member for member in (*trainers, *generators) if member is not None]
    if len(members) < len(trainers) + len(generators) or not trainers or not generators:
        return None
    key = hashlib.sha256(" ".join(member.token for member in members).encode()).hexdigest()[:16]
    apart = len({(member.address, member.pid) for member in members}) == len(members)
    alike = len({member.device for member in members}) == 1
    if not apart or not alike or any(member.broken == key for member in members):
        return None
    first, machines = members[0], sorted({member.address for member in members})
    where = first.file if len(machines) == 1 else f"tcp://{first.address}:{first.port}"
    nodes = tuple(machines.index(member.address) for member in members)
    return Meeting(key, where, tuple(member.token for member in members), len(trainers), nodes)


class Link:
    """The group of a meeting, and what both sides have told each other of their weights.

    layouts: from what to what, over all ranks of the group.

    rank:      in the meeting.
    layout:    of this rank's side, for some of its ranks, which the others repeat; one of each side tells it to the other.
    wait_s:    bound of each wait.
    listening: held while gloo chooses where it listens.

    Raises PeerLostError where not all come in time.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        device: torch.device,
        layout: WeightLayout,
        *,
        wait_s: float,
        listening: AbstractContextManager[None],
    ) -> None:
        self.meeting, self._rank, wait = meeting, rank, timedelta(seconds=wait_s)
        try:
            self._store = _open_store(meeting, rank, wait)
            self.layouts = self._exchange(layout)
            with listening:
                self.group = _build_group(self._store, meeting, rank, device, wait)
            return
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PeerLostError(
            f"rank {rank} of {meeting.size} trainers and generators did not meet all others at {meeting.rendezvous} within {wait_s:g} s "
            f"({reason}); see whether the hosts reach each other (GLOO_SOCKET_IFNAME names the interface)"
        )

    def close(self) -> None:
        """Ends the connections, without waiting for what is under way: whoever waits for this rank learns of it."""
        self.group.abort()
        del self.group, self._store

    def _exchange(self, layout: WeightLayout) -> tuple[WeightLayout, WeightLayout]:
        first, size = self.meeting.num_trainers, self.meeting.size
        layout = layout.repeat((first if self._rank < first else size - first) // layout.size)
        own, other = (_TRAINERS, _GENERATORS) if self._rank < first else (_GENERATORS, _TRAINERS)
        if self._rank in (0, first):
            self._store.set(own, layout.write())
        sides = {own: layout, other: read_layout(self._store.get(other).decode())}
        return sides[_TRAINERS].among(0, size), sides[_GENERATORS].among(first, size)


def _open_store(meeting: Meeting, rank: int, wait: timedelta) -> Store:
    store, _, _ = next(iter(rendezvous(meeting.rendezvous, rank, meeting.size, timeout=wait)))
    store.set_timeout(wait)
    return store


def _build_group(store: Store, meeting: Meeting, rank: int, device: torch.device, wait: timedelta) -> dist.ProcessGroup:
    """A group beside the gangs that its ranks are in: torch knows of it by no name."""
    group, kinds = dist.ProcessGroup(store, rank, meeting.size), dist.ProcessGroup.BackendType
    group._set_default_backend(kinds.GLOO)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, meeting.size, wait)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        # Its watchdog ends the process; whoever waits here gives up earlier.
        options._timeout = 4 * wait
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, meeting.size, options)
        nccl.eager_connect_single_device(device)
        group._register_backend(device, kinds.NCCL, nccl)
    return group
