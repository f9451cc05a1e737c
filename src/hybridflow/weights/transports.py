"""How weights get from the trainers to the rollout. In this order, the first that can be had:

same storage   the engine reads the trainer's own weights                           `SameStorage`
process group  between ranks of one group, colocated or apart (gloo, NCCL)          `collective.CollectiveTransport`
CUDA IPC       an engine whose workers are another process on the device            `rollout.buckets.export_buffer`
link           generators on devices of their own, in one group with the trainers   `link.Link`, through `collective.CollectiveTransport`
object store   the same where one of them has died, or their engine takes no boxes  `roles.carried`
files          an engine in another process without a GPU, or a server              `rollout.buckets.write_weight_files`

The first two and the link answer `WeightTransport`; the others are `RolloutEngine.load_weights` and `load_adapter` of engines with a copy
of their own.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from hybridflow.observability.phases import peak_rss_bytes
from hybridflow.types import Metrics, PeerLostError, maximum, total

BUCKET_BYTES = 512 * 2**20
"""A link needs some hundred MiB at a time to reach its speed; two buckets are in memory while weights travel."""
_PROCESS_MEMORY = Path("/proc/self/statm")
_POLL_S = 5e-5


@dataclass(frozen=True)
class Switch:
    """One rank's part in bringing a version to the rollout: `Switch(version=7, seconds=0.061, bytes_moved=7_615_616_512, ...)`.

    bytes_moved: what came to this rank from others.
    memory_before, memory_after, memory_peak: bytes in use on the device; on the CPU those of the process, with the peak of its life.
    """

    version: int
    seconds: float
    bytes_moved: int
    memory_before: float
    memory_after: float
    memory_peak: float

    def after(self, first: Switch | None) -> Switch:
        """Both as one; None: there was nothing before."""
        if first is None:
            return self
        moved, seconds = first.bytes_moved + self.bytes_moved, first.seconds + self.seconds
        return replace(self, bytes_moved=moved, seconds=seconds, memory_before=first.memory_before)

    def metrics(self) -> Metrics:
        """The slowest rank's time, the bytes of all, the fullest rank's memory."""
        return {
            "hybrid/switch_ms": maximum(1000.0 * self.seconds),
            "hybrid/bytes_moved": total(self.bytes_moved),
            "hybrid/memory_before_bytes": maximum(self.memory_before),
            "hybrid/memory_after_bytes": maximum(self.memory_after),
            "hybrid/memory_peak_bytes": maximum(self.memory_peak),
        }


class WeightTransport(Protocol):
    """Brings versions of the weights from where they are trained to where they are sampled from.

    Ranks that train call `push`, which fills their own storages too where they generate as well; the others call `pull`.

    A version arrives whole or does not count: a receiver whose transfer breaks off says so and stays at the last whole one (see
    `TargetWeights` for what is then in its storages). An older version than the one at hand is refused. Every wait is bounded.
    """

    def push(self, version: int) -> Switch:
        """Hands out the weights as they are now; returns when they may change again."""
        ...

    def pull(self) -> Switch:
        """Takes the next version; what it returns names the one that is here now."""
        ...

    def release(self) -> None:
        """Frees staging memory; the next transfer takes it anew."""
        ...


class SameStorage:
    """The engine samples from the trainer's own storage: nothing moves."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._version = device, 0

    def push(self, version: int) -> Switch:
        """See `WeightTransport`."""
        self._version = version
        return self.pull()

    def pull(self) -> Switch:
        """See `WeightTransport`."""
        with SwitchTimer(self._device) as timer:
            pass
        return timer.switch(self._version, bytes_moved=0)

    def release(self) -> None:
        """There is none."""


class SwitchTimer:
    """Time and memory of a block: `with SwitchTimer(device) as timer: ...`, then `timer.switch(version, bytes_moved)`.

    The block has to wait for the device itself; nothing here does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._switch = device, Switch(0, 0.0, 0, 0.0, 0.0, 0.0)

    def __enter__(self) -> SwitchTimer:
        self._before = read_memory(self._device)
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._start_s
        after, peak = read_memory(self._device), read_peak(self._device)
        self._switch = Switch(0, seconds, 0, self._before, after, max(self._before, after, peak))

    def switch(self, version: int, bytes_moved: int) -> Switch:
        """What the block was."""
        return replace(self._switch, version=version, bytes_moved=bytes_moved)


def read_memory(device: torch.device) -> float:
    """Bytes that are in use: of the device by torch, or resident in the process on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    if _PROCESS_MEMORY.exists():
        return float(int(_PROCESS_MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return peak_rss_bytes()


def read_peak(device: torch.device) -> float:
    """The most there were: of the device since its statistics were last reset, of the process in its life."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else peak_rss_bytes()


def wait_for_device(device: torch.device, timeout_s: float, waiting: str) -> None:
    """Returns when the device has done what was given to it so far; PeerLostError, `waiting` in it, where that takes longer.

    A synchronisation of CUDA's own has no bound, and a collective whose peer is gone never ends.
    """
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    end_s = time.monotonic() + timeout_s
    while not done.query():
        if time.monotonic() > end_s:
            raise PeerLostError(f"{waiting} for {timeout_s:g} s; look for the error of the rank that failed first")
        time.sleep(_POLL_S)
