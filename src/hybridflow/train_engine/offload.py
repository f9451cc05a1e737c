"""Optimizer state in the host's memory, brought to the device and back while it is stepped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_MAX_BORROWED = 2
_SLAB_BYTES = 2**30
_ALIGNMENT = 512


class HostMemory:
    """Hands out tensors in the host's memory, pinned where there is a GPU that copies from there.

    Pinned memory comes in sizes of powers of two: a tensor of 260 MiB alone would take 512. So small ones share slabs.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def build_empty(self, like: Tensor) -> Tensor:
        """A contiguous tensor of this shape and dtype; what is in it is left open."""
        if not torch.cuda.is_available():
            return torch.empty(like.shape, dtype=like.dtype)
        num_bytes = like.numel() * like.element_size()
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > self._slab.numel():
            self._slab, start = torch.empty(max(_SLAB_BYTES, num_bytes), dtype=torch.uint8, pin_memory=True), 0
        self._used = start + num_bytes
        return self._slab[start : self._used].view(like.dtype).view(like.shape)

    def build_copy(self, tensor: Tensor) -> Tensor:
        """The same values."""
        return self.build_empty(tensor).copy_(tensor)


class HostState:
    """Lends tensors of the host to the device, two lots at a time: one is worked on while the next comes and the last goes back."""

    def __init__(self) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._returning: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    @contextmanager
    def borrow(self, kept: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
        """The tensors on the device; what they are when the block ends goes back. On the CPU they are lent as they are."""
        if device.type == "cpu":
            yield list(kept)
            return
        fetch, give = self._streams or self._build_streams(device)
        while len(self._returning) >= _MAX_BORROWED:
            self._returning.popleft()[0].synchronize()
        with torch.cuda.stream(fetch):
            lent = [tensor.to(device, non_blocking=True) for tensor in kept]
        working = torch.cuda.current_stream(device)
        working.wait_stream(fetch)
        yield lent
        give.wait_stream(working)
        with torch.cuda.stream(give):
            for tensor, changed in zip(kept, lent, strict=True):
                tensor.copy_(changed, non_blocking=True)
        # The lot is held until it is back: its memory belongs to another stream than the ones that use it.
        self._returning.append((give.record_event(), lent))

    def wait(self) -> None:
        """Returns when all is back."""
        while self._returning:
            self._returning.popleft()[0].synchronize()

    def _build_streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams
