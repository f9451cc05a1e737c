"""The process group as transport: between ranks that train, ranks that generate, and ranks that do both.

Two staging buffers take turns: while one bucket travels, the one before is unpacked and the next one packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.types import PeerLostError
from hybridflow.weights.layout import LayoutError, WeightLayout
from hybridflow.weights.messages import RankBucket, plan_messages
from hybridflow.weights.packing import CopyList, Source, Sources, Targets, find_staged
from hybridflow.weights.plan import WeightPlan
from hybridflow.weights.target import TargetWeights, refuse_older
from hybridflow.weights.transports import Switch, SwitchTimer, wait_for_device

_NOTHING = -1
# The same function; newer versions call the old name deprecated.
_gather_into = dist.all_gather_into_tensor if torch.__version__ < "2.13" else dist.all_gather_single

R = TypeVar("R")

_Flight = list[tuple[dist.Work, tuple[int, ...]]]
"""Transfers under way, and the ranks that each waits for."""


@dataclass(frozen=True, eq=False)
class _Bound:
    """A bucket and its copies as calls on live tensors."""

    bucket: RankBucket
    staging: Tensor
    pack: CopyList
    own: CopyList
    unpack: CopyList


@dataclass(frozen=True)
class Gang:
    """The ranks between which weights travel, numbered as in the plan.

    rank, size: this one, and how many.
    group:      torch's group of them, whether it knows of it by name or not; None is the default one. It has to take tensors of the CPU
                as well, for versions.
    gathering:  the group of this rank's entry of `WeightPlan.groups`, the same ranks ascending; None: boxes travel one by one, but for
                an entry that is all ranks.
    device:     of the staging buffers.
    timeout_s:  bound of each wait.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    group: dist.ProcessGroup | None = None
    gathering: dist.ProcessGroup | None = None


class CollectiveTransport:
    """Executes a plan in a process group; every rank of it takes part in every transfer.

    sources:  this rank's parts of the tensors, by name, at fixed addresses; empty on one that does not train.
    target:   this rank's storages; None on one that does not generate.
    gathers:  one all-gather a bucket, where the plan allows it; None: wherever it does.

    Ranks that train call `push`, the others `pull`; both return when this rank's storages hold the version and its sources may change.
    Versions and plans are compared before anything moves. A rank that dies is named where its connection tells of it, else the ranks
    that were waited for are; the group is of no use then.
    """

    def __init__(
        self,
        plan: WeightPlan,
        layouts: tuple[WeightLayout, WeightLayout],
        gang: Gang,
        sources: Mapping[str, Source],
        target: TargetWeights | None,
        *,
        gathers: bool | None = None,
    ) -> None:
        self.plan, self._gang, self._target = plan, gang, target
        self._source_layout, self._target_layout = layouts
        self._sources = Sources(self._source_layout, gang.rank, sources)
        self._connected = False
        self._group = gang.group or dist.group.WORLD
        group = gang.gathering
        if group is None and plan.groups == (tuple(range(gang.size)),):
            group = self._group
        self._gathering = group
        use_gather = bool(plan.groups) and group is not None if gathers is None else gathers
        self._buckets = plan_messages(plan, gang.rank, gathers=use_gather)
        # Bound copies are known by the storages that they go to: one object for none.
        self._no_buffers: Mapping[str, Tensor] = {}
        self._staging: list[Tensor] = []
        self._bound: dict[tuple[int, int], _Bound] = {}

    def push(self, version: int) -> Switch:
        """See `WeightTransport`; on ranks that generate too, it fills their own storages as well."""
        return self._transfer(version)

    def pull(self) -> Switch:
        """See `WeightTransport`."""
        return self._transfer(_NOTHING)

    def release(self) -> None:
        """See `WeightTransport`."""
        for staging in self._staging:
            # The copies of the next transfer are bound to these storages, so only their memory goes.
            staging.untyped_storage().resize_(0)

    def _transfer(self, offered: int) -> Switch:
        device = self._gang.device
        with SwitchTimer(device) as timer:
            version = self._agree(offered)
            self._take_staging()
            if self._target is None:
                self._move(version, self._no_buffers)
            else:
                with self._target.receiving(version) as buffers:
                    self._move(version, buffers)
            self.release()
        return timer.switch(version, int(self.plan.received[self._gang.rank]))

    def _agree(self, offered: int) -> int:
        """The version that all who train offer; raises on every rank where they do not, or where someone has a newer one."""
        here = _NOTHING if self._target is None or self._target.version is None else self._target.version
        own = torch.tensor([offered, here, self.plan.digest])
        table = self._gather_numbers(own)
        versions = sorted({version for version in table[:, 0].tolist() if version != _NOTHING})
        if len(versions) != 1:
            raise LayoutError(
                f"ranks offer versions {versions} of the weights at once; let all that train push one version together"
            )
        odd = (table[:, 2] != self.plan.digest).nonzero().flatten().tolist()
        if odd:
            raise LayoutError(
                f"ranks {odd} have another plan than rank {self._gang.rank}; make it from the same layouts and bucket_bytes everywhere"
            )
        refuse_older(versions[0], here=int(table[:, 1].max()))
        return versions[0]

    def _gather_numbers(self, own: Tensor) -> Tensor:
        """[ranks, numbers] of every rank, through the host."""
        if self._group is None or self._gang.size == 1:
            return own[None]
        group, every, others = self._group, [torch.empty_like(own) for _ in range(self._gang.size)], self._others()
        work = self._attempt(lambda: group.allgather([every], [own]), "the versions", others)
        self._wait(work, "the versions", others, on_host=True)
        return torch.stack(every)

    def _move(self, version: int, buffers: Mapping[str, Tensor]) -> None:
        """Bucket after bucket. On a GPU nothing waits for the device until the end."""
        self._connect()
        flying: list[tuple[str, _Bound, _Flight]] = []
        for index in range(len(self._buckets)):
            bound = self._bind(index, buffers)
            bound.pack.run()
            what = f"bucket {index} of {len(self._buckets)} of version {version}"
            flying.append(
                (what, bound, self._attempt(functools.partial(self._start, bound), what, _find_peers(bound.bucket)))
            )
            bound.own.run()
            if len(flying) == 2:
                self._land(*flying.pop(0))
        for flight in flying:
            self._land(*flight)
        wait_for_device(self._gang.device, self._gang.timeout_s, self._tell(f"version {version}", self._others()))

    def _connect(self) -> None:
        """NCCL connects a group at its first call, in which all have to take part; a bucket may leave some out."""
        if self._gang.device.type == "cuda" and self._group is not None and not self._connected:
            group, one, others = self._group, torch.zeros(1, device=self._gang.device), self._others()
            work = self._attempt(lambda: group.allreduce([one]), "the first call", others)
            self._wait(work, "the first call", others, on_host=False)
        self._connected = True

    def _land(self, what: str, bound: _Bound, flight: _Flight) -> None:
        for work, peers in flight:
            self._wait(work, what, peers, on_host=self._gang.device.type != "cuda")
        bound.unpack.run()

    def _start(self, bound: _Bound) -> _Flight:
        return self._start_gather(bound) if bound.bucket.group else self._start_messages(bound)

    def _start_gather(self, bound: _Bound) -> _Flight:
        group, room = bound.bucket.group, bound.bucket.room
        if len(group) == 1 or not room:
            return []
        at = group.index(self._gang.rank) * room
        every, own = bound.staging[: room * len(group)], bound.staging[at : at + room]
        work = _gather_into(every, own, group=self._gathering, async_op=True)
        return [(work, tuple(rank for rank in group if rank != self._gang.rank))]

    def _start_messages(self, bound: _Bound) -> _Flight:
        calls = [(False, message, peer) for message in bound.bucket.receives for peer in message.peers]
        calls += [(True, message, peer) for message in bound.bucket.sends for peer in message.peers]
        if self._group is None or not calls:
            return []
        # On a GPU all travel as one, and nothing tells which of them failed.
        together = self._gang.device.type == "cuda"
        if together:
            self._group._start_coalescing(self._gang.device)
        flight: _Flight = []
        for sends, message, peer in calls:
            move = self._group.send if sends else self._group.recv
            flight.append((move([bound.staging[message.offset :][: message.num_bytes]], peer, 0), (peer,)))
        if together:
            return [(self._group._end_coalescing(self._gang.device), _find_peers(bound.bucket))]
        return flight

    def _take_staging(self) -> None:
        room = max((bucket.num_bytes for bucket in self._buckets), default=0)
        if not self._staging:
            self._staging = [torch.empty(room, dtype=torch.uint8, device=self._gang.device) for _ in self._buckets[:2]]
        for staging in self._staging:
            staging.untyped_storage().resize_(room)

    def _bind(self, index: int, buffers: Mapping[str, Tensor]) -> _Bound:
        """The bucket's copies as calls on tensors, made once."""
        key = index, id(buffers)
        if key not in self._bound:
            bucket, staging = self._buckets[index], self._staging[index % 2]
            targets = Targets(self._target_layout, self._gang.rank, buffers)
            pack, own, unpack = CopyList(), CopyList(), CopyList()
            for piece in bucket.packed:
                pack.add(find_staged(staging, piece, targets.find_dtype(piece)), self._sources.read(piece))
            for piece in bucket.own:
                own.add(targets.find(piece), self._sources.read(piece))
            for piece in bucket.received:
                unpack.add(targets.find(piece), find_staged(staging, piece, targets.find_dtype(piece)))
            self._bound[key] = _Bound(bucket, staging, pack, own, unpack)
        return self._bound[key]

    def _others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self._gang.size) if rank != self._gang.rank)

    def _wait(self, work: dist.Work, what: str, peers: Sequence[int], *, on_host: bool) -> None:
        """Waits for one transfer. On a GPU it is the device that waits, and the host goes on."""
        limits = (timedelta(seconds=self._gang.timeout_s),) if on_host else ()
        self._attempt(lambda: work.wait(*limits), what, peers)

    def _attempt(self, act: Callable[[], R], what: str, peers: Sequence[int]) -> R:
        """What it returns; PeerLostError where another rank cannot take part."""
        try:
            return act()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
        # Not inside the handler: the traceback of the cause would hold the connections open, and others would go on waiting.
        raise PeerLostError(f"{self._tell(what, peers)} ({reason}); look for the error of the rank that failed first")

    def _tell(self, what: str, peers: Sequence[int]) -> str:
        names = f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {', '.join(map(str, peers))}"
        return f"rank {self._gang.rank} lost {names}, which died, left or did not answer in time, while it waited for {what}"


def _find_peers(bucket: RankBucket) -> tuple[int, ...]:
    """The ranks that this one exchanges anything with."""
    of_messages = {peer for message in (*bucket.sends, *bucket.receives) for peer in message.peers}
    return tuple(sorted(of_messages | set(bucket.group)))
