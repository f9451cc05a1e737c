"""The ranks of a gang, along one axis or all: the collectives that training needs, and what happens when one of them leaves."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config import HybridflowError
from hybridflow.types import PeerLostError

# The same functions; newer versions call the old names deprecated.
_gather_into = dist.all_gather_into_tensor if torch.__version__ < "2.13" else dist.all_gather_single
_reduce_scatter = dist.reduce_scatter_tensor if torch.__version__ < "2.13" else dist.reduce_scatter_single
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class DriftError(HybridflowError, RuntimeError):
    """Ranks that have to be replicas of each other are not."""


class Ranks:
    """This process among those along one axis: `Ranks(rank=1, size=2)` is one of two, from `join_ranks` or `split`; `Ranks()` is alone.

    Alone, every collective is the identity and there is no process group. Tensors travel by their device (gloo on the CPU, nccl on
    GPUs) and numbers of the host through gloo, so that none of this waits for a device. All ranks get the same bits, and the order of a
    sum follows from its shape and the number of ranks.

    A collective that another rank cannot enter raises PeerLostError: at once where that rank has died or left, since its connections
    close, else after the timeout (a host that falls silent). This rank leaves then too, all axes at once, so that the news spreads.
    Surprise: a rank that dies while nccl sums gradients is noticed by nccl's watchdog alone, after the timeout; whoever runs the ranks
    ends them earlier.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, gang: _Gang | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._gang = gang or _Gang(rank, size, None, None)
        self._group = group

    @property
    def group(self) -> dist.ProcessGroup | None:
        """torch's group of these ranks, None where there is one rank."""
        if self.size == 1:
            return None
        return dist.group.WORLD if self._group is None else self._group

    def sum_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over ranks, in place."""
        if self.size > 1:
            self._gang.meet(lambda: dist.all_reduce(tensor, group=self.group))

    def max_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its largest values over ranks, in place."""
        if self.size > 1:
            self._gang.meet(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group))

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in the order of ranks; as many on each."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._gang.meet(lambda: dist.all_gather(parts, own, group=self.group))
        return [part.tolist() for part in parts]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in the order of ranks; of one shape on all."""
        if self.size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._gang.meet(lambda: dist.all_gather(parts, tensor, group=self.group))
        return parts

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Every rank's rows, one rank's below the other's, in one new tensor; of one shape on all."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        whole = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self._gang.meet(lambda: _gather_into(whole, tensor, group=self.group))
        return whole

    def sum_rows(self, tensor: Tensor) -> Tensor:
        """This rank's part of the rows of the sum over ranks, in a new tensor; there are a multiple of `size` rows."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        self._gang.meet(lambda: _reduce_scatter(part, tensor, group=self.group))
        return part

    def total(self, number: float) -> float:
        """Sum over ranks in float64, in the order of ranks."""
        return sum(numbers[0] for numbers in self.gather([number]))

    def split(self, parts: Sequence[Sequence[int]]) -> Ranks:
        """This rank among those of its part.

        parts: ranks in groups of one size that hold each rank once, ascending. All ranks call, with the same parts.
        """
        own = next(part for part in parts if self.rank in part)
        if len(own) == self.size:
            return self
        rank = own.index(self.rank)
        if len(own) == 1:
            return Ranks(rank, 1, self._gang)
        return Ranks(rank, len(own), self._gang, self.build_group(parts))

    def build_group(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """A new group of this rank's part, for somebody who keeps it; all ranks call, with the same parts.

        Gloo's connections close when nobody holds their group any longer. So what keeps a group (FSDP2, DTensor) gets one apart from those
        that are waited in here, or leaving would tell the other ranks nothing.
        """
        return self._gang.build_group(parts)

    def leave(self) -> None:
        """Closes the connections of all axes; no rank waits for this one any longer. May be called twice."""
        self._gang.leave()

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Leaves where the block raises, so that ranks which wait for this one learn of it at once.

        An error of a collective that was not ours (a sharded weight's, a split matrix's) becomes a PeerLostError like those of ours.
        """
        lost = None
        with ExitStack() as stack:
            stack.callback(self._gang.abort)
            try:
                yield
            except RuntimeError as error:
                if isinstance(error, HybridflowError) or not _is_collective(error):
                    raise
                lost = _shorten(error)
            if lost is None:
                stack.pop_all()
        if lost is not None:
            raise self._gang.describe_loss(lost)


class _Gang:
    """What all axes of one process share: whether it has joined, and the groups that end together."""

    def __init__(self, rank: int, size: int, rendezvous: str | None, timeout_s: float | None) -> None:
        self._rank = rank
        self._size = size
        self._rendezvous = rendezvous
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._joined = size > 1
        self._groups: list[dist.ProcessGroup] = []

    def build_group(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        made: list[dist.ProcessGroup] = []

        def build() -> None:
            for part in parts:
                group = dist.new_group(list(part), timeout=self._timeout)
                if self._rank in part:
                    made.append(group)

        with listening_near(self._rendezvous):
            self.meet(build)
        self._groups += made
        return made[0]

    def meet(self, collective: Callable[[], object]) -> None:
        if not self._joined:
            raise PeerLostError(
                f"rank {self._rank} of {self._size} has left its gang after an error; start all ranks again"
            )
        try:
            collective()
            return
        except RuntimeError as error:
            reason = _shorten(error)
        # Not inside the handler: the traceback of the cause holds the connections open, and the others would go on waiting.
        self.abort()
        raise self.describe_loss(reason)

    def describe_loss(self, reason: str) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank} of {self._size} lost another rank, which died, left or did not answer in time ({reason}); "
            "look for the error of the rank that failed first"
        )

    def abort(self) -> None:
        """Leaves without waiting for what is under way, which nccl would do."""
        if self._joined and dist.group.WORLD is not None:
            for group in (*self._groups, dist.group.WORLD):
                group.abort()
        self.leave()

    def leave(self) -> None:
        self._groups.clear()
        if self._joined:
            self._joined = False
            dist.destroy_process_group()


ALONE = Ranks()
"""One process, which nobody else is with."""


def join_ranks(*, rank: int, size: int, rendezvous: str | None, device: torch.device, timeout_s: float) -> Ranks:
    """Meets the other ranks, and returns when all are there.

    rendezvous: 'file:///...', a path that does not exist yet, for ranks of one machine; or 'tcp://host:port', where rank 0 listens.
                None where there is one rank.
    timeout_s:  bound of this wait and of every later one.
    Raises PeerLostError where they do not all come.

    Surprises: a process is in one gang at a time. On one machine gloo listens on the loopback interface alone; between machines it
    takes the address of the host's name, unless `GLOO_SOCKET_IFNAME` says which interface.
    """
    if size == 1:
        return Ranks()
    if rendezvous is None:
        raise ValueError(f"rank {rank} of {size} has no rendezvous; give all ranks one, such as 'tcp://host:29500'")
    accelerator = None if device.type == "cpu" else _select_device(device)
    try:
        with listening_near(rendezvous):
            dist.init_process_group(
                _BACKENDS[device.type],
                init_method=rendezvous,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=accelerator,
            )
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} of {size} did not meet all others at {rendezvous} within {timeout_s:g} s ({_shorten(error)}); "
            "see whether each has started, and whether the hosts reach each other (GLOO_SOCKET_IFNAME names the interface)"
        ) from error
    return Ranks(rank, size, _Gang(rank, size, rendezvous, timeout_s))


def check_same(name: str, values: Sequence[float], ranks: Sequence[int] | None = None) -> None:
    """Raises DriftError, naming two ranks, unless the number is the same on all of these (NaN on all is the same).

    ranks: whose values they are; None: 0, 1, 2 and so on.
    """
    numbered = list(zip(range(len(values)) if ranks is None else ranks, values, strict=True))
    first, expected = numbered[0]
    for rank, value in numbered:
        if value != expected and not (math.isnan(value) and math.isnan(expected)):
            raise DriftError(
                f"ranks {first} and {rank} are no replicas of each other: {name} is {expected:.17g} on rank {first} and {value:.17g} on "
                f"rank {rank}; go on from the last checkpoint, with devices of one kind on all ranks"
            )


def _select_device(device: torch.device) -> torch.device:
    chosen = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    torch.cuda.set_device(chosen)
    return chosen


@contextmanager
def listening_near(rendezvous: str | None) -> Iterator[None]:
    """Keeps gloo off the network where all ranks are on this machine. Gloo reads its interface from the environment alone."""
    loopback = _find_loopback() if rendezvous is not None and _is_local(rendezvous) else None
    if loopback is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _is_local(rendezvous: str) -> bool:
    where = urlsplit(rendezvous)
    return where.scheme == "file" or where.hostname in ("127.0.0.1", "localhost", "::1")


def _find_loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _shorten(error: RuntimeError) -> str:
    """The first sentence, without the place in gloo's source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0]).partition(". ")[0]


def _is_collective(error: RuntimeError) -> bool:
    """Whether it comes from torch's collectives; gloo says so in its text alone."""
    return (
        isinstance(error, dist.DistError)
        or re.search(r"gloo/|Gloo|NCCL|Connection closed by peer", str(error)) is not None
    )
