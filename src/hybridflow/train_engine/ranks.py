"""The ranks of a data-parallel gang: the collectives that training needs, and what happens when one of them leaves."""

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

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class DriftError(HybridflowError, RuntimeError):
    """Ranks that have to be replicas of each other are not."""


class Ranks:
    """This process among those that train one model together: `Ranks(rank=1, size=2)`, from `join_ranks`; `Ranks()` is alone.

    Alone, every collective is the identity and there is no process group. Tensors travel by their device (gloo on the CPU, nccl on
    GPUs) and numbers of the host through gloo, so that none of this waits for a device. All ranks get the same bits, and the order of a
    sum follows from its shape and the number of ranks.

    A collective that another rank cannot enter raises PeerLostError: at once where that rank has died or left, since its connections
    close, else after the timeout (a host that falls silent). This rank leaves then too, so that the news spreads. Surprise: a rank that
    dies while nccl sums gradients is noticed by nccl's watchdog alone, after the timeout; whoever runs the ranks ends them earlier.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._joined = size > 1

    def sum_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over ranks, in place."""
        if self.size > 1:
            self._meet(lambda: dist.all_reduce(tensor))

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in the order of ranks; as many on each."""
        if self.size == 1:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._meet(lambda: dist.all_gather(parts, own))
        return [part.tolist() for part in parts]

    def total(self, number: float) -> float:
        """Sum over ranks in float64, in the order of ranks."""
        return sum(numbers[0] for numbers in self.gather([number]))

    def leave(self) -> None:
        """Closes the connections; no rank waits for this one any longer. May be called twice."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Leaves where the block raises, so that ranks which wait for this one learn of it at once."""
        with ExitStack() as stack:
            stack.callback(self._abort)
            yield
            stack.pop_all()

    def _meet(self, collective: Callable[[], object]) -> None:
        if not self._joined:
            raise PeerLostError(
                f"rank {self.rank} of {self.size} has left its gang after an error; start all ranks again"
            )
        try:
            collective()
            return
        except RuntimeError as error:
            reason = _shorten(error)
        # Not inside the handler: the traceback of the cause holds the connections open, and the others would go on waiting.
        self._abort()
        raise PeerLostError(
            f"rank {self.rank} of {self.size} lost another rank, which died, left or did not answer in time ({reason}); "
            "look for the error of the rank that failed first"
        )

    def _abort(self) -> None:
        """Leaves without waiting for what is under way, which nccl would do."""
        if self._joined and dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        self.leave()


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
        with _listening_near(rendezvous):
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
    return Ranks(rank, size)


def check_same(name: str, values: Sequence[float]) -> None:
    """Raises DriftError, naming two ranks, unless the number is the same on every rank (NaN on all is the same)."""
    for rank, value in enumerate(values):
        if value != values[0] and not (math.isnan(value) and math.isnan(values[0])):
            raise DriftError(
                f"ranks 0 and {rank} are no replicas of each other: {name} is {values[0]:.17g} on rank 0 and {value:.17g} on "
                f"rank {rank}; go on from the last checkpoint, with devices of one kind on all ranks"
            )


def _select_device(device: torch.device) -> torch.device:
    chosen = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    torch.cuda.set_device(chosen)
    return chosen


@contextmanager
def _listening_near(rendezvous: str) -> Iterator[None]:
    """Keeps gloo off the network where all ranks are on this machine. Gloo reads its interface from the environment alone."""
    loopback = _find_loopback() if _is_local(rendezvous) else None
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
