"""Memory shared with another process on the same device as transport: CUDA IPC on a GPU, a mapped file on the CPU.

The sender owns two staging buffers, whose handles it gives away once; a bucket is packed into one of them while the other is read. What is
said over the socket between the two is lines of JSON.
"""

from __future__ import annotations

import base64
import json
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.types import PeerLostError
from hybridflow.weights.layout import LayoutError, WeightLayout
from hybridflow.weights.messages import RankBucket, plan_messages
from hybridflow.weights.packing import CopyList, Source, Sources, Targets, find_staged
from hybridflow.weights.plan import WeightPlan
from hybridflow.weights.target import TargetWeights, VersionError
from hybridflow.weights.transports import Switch, SwitchTimer, wait_for_device

NUM_SLOTS = 2
_POLL_S = 0.02


class SharedSender:
    """The trainer's side: packs its weights into memory that the other process reads.

    ranks:   (this one, the other one) as the plan numbers them; all that travels goes from the first to the second.
    address: path of a socket that the other process connects to, at its first `pull`; it must not exist yet.
    """

    def __init__(
        self,
        plan: WeightPlan,
        layouts: tuple[WeightLayout, WeightLayout],
        ranks: tuple[int, int],
        sources: Mapping[str, Source],
        address: Path,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._plan, self._ranks, self._device, self._timeout_s = plan, ranks, device, timeout_s
        self._buckets = plan_messages(plan, ranks[0], gathers=False)
        _check_pair(self._buckets, ranks)
        self._sources, self._target_layout = Sources(layouts[0], ranks[0], sources), layouts[1]
        self._slots: list[Tensor] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(1)
        self._line: Line | None = None

    def push(self, version: int) -> Switch:
        """See `WeightSender`; returns when the other process has all of it."""
        with SwitchTimer(self._device) as timer:
            line = self._connect()
            line.say(version=version, digest=self._plan.digest)
            refused = line.hear("whether it takes the version").get("refused")
            if refused:
                raise VersionError(refused)
            for index, bucket in enumerate(self._buckets):
                if index >= NUM_SLOTS:
                    line.hear(f"bucket {index - NUM_SLOTS} of version {version}")
                self._pack(bucket, self._slots[index % NUM_SLOTS])
                line.say(bucket=index)
            for index in range(max(len(self._buckets) - NUM_SLOTS, 0), len(self._buckets)):
                line.hear(f"bucket {index} of version {version}")
            line.say(whole=version)
            line.hear(f"the end of version {version}")
        return timer.switch(version, 0)

    def release(self) -> None:
        """Frees nothing: the other process holds the same memory. It goes with `close`."""

    def close(self) -> None:
        """Hangs up."""
        self._listener.close()
        self._slots.clear()
        if self._line is not None:
            self._line.close()

    def _connect(self) -> Line:
        if self._line is None:
            self._listener.settimeout(self._timeout_s)
            try:
                there, _ = self._listener.accept()
            except TimeoutError:
                raise PeerLostError(
                    f"rank {self._ranks[1]} did not connect to rank {self._ranks[0]} in {self._timeout_s:g} s; see whether it runs"
                ) from None
            room = max((bucket.num_bytes for bucket in self._buckets), default=0)
            made = [share_memory(room, self._device) for _ in range(NUM_SLOTS)]
            self._slots = [slot for slot, _ in made]
            self._line = Line(there, *self._ranks, self._timeout_s)
            self._line.say(slots=[handle for _, handle in made])
        return self._line

    def _pack(self, bucket: RankBucket, slot: Tensor) -> None:
        copies = CopyList()
        for piece in bucket.packed:
            dtype = self._target_layout.tensors[piece.tensor].dtype
            copies.add(find_staged(slot, piece, dtype), self._sources.read(piece))
        copies.run()
        # The other process has streams of its own, which know nothing of this one's.
        wait_for_device(self._device, self._timeout_s, f"rank {self._ranks[0]} waited for its device to pack weights")


class SharedReceiver:
    """The rollout's side: reads the sender's memory into its own storages. Arguments as of `SharedSender`; `ranks` in the same order."""

    def __init__(
        self,
        plan: WeightPlan,
        layout: WeightLayout,
        ranks: tuple[int, int],
        target: TargetWeights,
        address: Path,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._plan, self._ranks, self._address = plan, ranks, address
        self._layout, self._target, self._device, self._timeout_s = layout, target, device, timeout_s
        self._buckets = plan_messages(plan, ranks[1], gathers=False)
        self._slots: list[Tensor] = []
        self._line: Line | None = None

    def pull(self) -> Switch:
        """See `WeightReceiver`; waits for the sender's next version."""
        with SwitchTimer(self._device) as timer:
            line = self._connect()
            offer = line.hear("the next version")
            version = self._accept(line, offer)
            with self._target.receiving(version) as buffers:
                targets = Targets(self._layout, self._ranks[1], buffers)
                for index, bucket in enumerate(self._buckets):
                    line.hear(f"bucket {index} of {len(self._buckets)} of version {version}")
                    self._unpack(bucket, self._slots[index % NUM_SLOTS], targets)
                    line.say(done=index)
                line.hear(f"the end of version {version}")
            line.say(here=version)
        return timer.switch(version, int(self._plan.received[self._ranks[1]]))

    def release(self) -> None:
        """Frees nothing; the memory is the sender's."""

    def close(self) -> None:
        """Hangs up."""
        self._slots.clear()
        if self._line is not None:
            self._line.close()

    def _accept(self, line: Line, offer: Mapping[str, Any]) -> int:
        version = int(offer["version"])
        try:
            if offer["digest"] != self._plan.digest:
                raise LayoutError(
                    f"rank {self._ranks[0]} has another plan than rank {self._ranks[1]}; make it from the same layouts and bucket_bytes"
                )
            self._target.check_version(version)
        except (LayoutError, VersionError) as error:
            line.say(refused=str(error))
            raise
        line.say(accepted=version)
        return version

    def _unpack(self, bucket: RankBucket, slot: Tensor, targets: Targets) -> None:
        copies = CopyList()
        for piece in bucket.received:
            copies.add(targets.find(piece), find_staged(slot, piece, targets.find_dtype(piece)))
        copies.run()
        wait_for_device(self._device, self._timeout_s, f"rank {self._ranks[1]} waited for its device to unpack weights")

    def _connect(self) -> Line:
        if self._line is None:
            there = self._reach()
            self._line = Line(there, *self._ranks[::-1], self._timeout_s)
            slots = self._line.hear("the memory that is shared")["slots"]
            self._slots = [open_memory(handle, self._device) for handle in slots]
        return self._line

    def _reach(self) -> socket.socket:
        """The sender may start later."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            there = socket.socket(socket.AF_UNIX)
            try:
                there.connect(str(self._address))
                return there
            except OSError as error:
                there.close()
                if time.monotonic() > end_s:
                    raise PeerLostError(
                        f"rank {self._ranks[1]} did not reach rank {self._ranks[0]} at {self._address} in {self._timeout_s:g} s ({error}); "
                        "see whether the trainer runs"
                    ) from error
            time.sleep(_POLL_S)


def _check_pair(buckets: tuple[RankBucket, ...], ranks: tuple[int, int]) -> None:
    odd = [message.peers for bucket in buckets for message in bucket.sends if message.peers != ranks[1:]]
    if odd or any(bucket.receives or bucket.own for bucket in buckets):
        raise LayoutError(
            f"rank {ranks[0]} shares memory with rank {ranks[1]} alone, and the plan has it send to others or receive; plan from one rank "
            "that holds all that the other wants"
        )


class Line:
    """A socket to one other rank over which lines of JSON go; PeerLostError names that rank where it hangs up or stays silent."""

    def __init__(self, there: socket.socket, rank: int, other: int, timeout_s: float) -> None:
        there.settimeout(timeout_s)
        self._socket, self._file = there, there.makefile("rb")
        self._rank, self._other, self._timeout_s = rank, other, timeout_s

    def say(self, **words: Any) -> None:
        """One line."""
        self._try("it speaks to it", lambda: self._socket.sendall(json.dumps(words).encode() + b"\n"))

    def hear(self, waiting_for: str) -> dict[str, Any]:
        """The next line."""
        line = self._try(f"it waited for {waiting_for}", self._file.readline)
        if not line:
            raise self._lost(f"it waited for {waiting_for}", "it hung up")
        words: dict[str, Any] = json.loads(line)
        return words

    def close(self) -> None:
        """Hangs up."""
        self._file.close()
        self._socket.close()

    def _try(self, doing: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except TimeoutError:
            raise self._lost(doing, f"no answer in {self._timeout_s:g} s") from None
        except OSError as error:
            raise self._lost(doing, str(error)) from error

    def _lost(self, doing: str, why: str) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank} lost rank {self._other} while {doing} ({why}); look for the error of the rank that failed first"
        )


def share_memory(num_bytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """A buffer of bytes, and what another process on the same device needs to open it, as plain JSON."""
    if device.type == "cuda":
        memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)
        handle = [_to_json(value) for value in memory.untyped_storage()._share_cuda_()[1:]]
        return memory, {"uuid": _find_uuid(device), "handle": handle}
    with tempfile.NamedTemporaryFile(dir=_find_shared_directory(), prefix="hybridflow-", delete=False) as file:
        file.truncate(max(num_bytes, 1))
    return _map_file(file.name, num_bytes), {"path": file.name, "num_bytes": num_bytes}


def open_memory(handle: Mapping[str, Any], device: torch.device) -> Tensor:
    """The same bytes in this process."""
    if device.type != "cuda":
        memory = _map_file(handle["path"], handle["num_bytes"])
        # Both processes have it mapped; the name is of no use any longer.
        Path(handle["path"]).unlink()
        return memory
    if handle["uuid"] != _find_uuid(device):
        raise LayoutError(
            f"the sender's memory is on GPU {handle['uuid']} and this process on {_find_uuid(device)}; place both on one GPU"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *map(_from_json, handle["handle"]))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _find_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _to_json(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value


def _map_file(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=max(num_bytes, 1), dtype=torch.uint8)


def _find_shared_directory() -> str | None:
    """Where files lie in memory; None: wherever temporary files lie."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
