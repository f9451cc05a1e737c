"""Layer inputs in the host's memory between forward and backward.

Dimensions: T packed tokens, D model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class HostInputs:
    """Layer inputs that wait in pinned host memory from forward to backward, copied beside the computation.

    One micro-batch at a time: backward needs them in the reverse order, and each is fetched while the layer above it runs.
    On the CPU they are copies, which tests count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._waiting: list[_HostInput] = []

    def keeping(self, hidden_TD: Tensor) -> AbstractContextManager[Any]:
        """While a layer runs: of what autograd saves, its input goes to the host."""
        address = hidden_TD.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Tensor | _HostInput:
            return self._send(tensor) if tensor.untyped_storage().data_ptr() == address else tensor

        def unpack(kept: Tensor | _HostInput) -> Tensor:
            return kept if isinstance(kept, Tensor) else self._fetch(kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @property
    def num_waiting(self) -> int:
        """Inputs on the host now."""
        return len(self._waiting)

    def clear(self) -> None:
        """Forgets inputs that no backward pass came for."""
        self._waiting.clear()

    def _send(self, tensor: Tensor) -> _HostInput:
        kept = _HostInput(torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda"))
        with self._beside() as stream:
            kept.host.copy_(tensor.detach(), non_blocking=True)
            if stream is not None:
                # Its memory is not given away before the copy has been made.
                tensor.record_stream(stream)
        self._waiting.append(kept)
        return kept

    def _fetch(self, kept: _HostInput) -> Tensor:
        place = next((index for index, other in enumerate(self._waiting) if other is kept), None)
        self._start(kept)
        if place is not None:
            del self._waiting[place:]
        if kept.event is not None:
            torch.cuda.current_stream(self._device).wait_event(kept.event)
        if self._waiting:
            self._start(self._waiting[-1])
        assert kept.fetched is not None
        return kept.fetched

    def _start(self, kept: _HostInput) -> None:
        if kept.fetched is not None:
            return
        kept.fetched = torch.empty_like(kept.host, device=self._device)
        with self._beside() as stream:
            kept.fetched.copy_(kept.host, non_blocking=True)
            if stream is not None:
                kept.event = stream.record_event()

    @contextmanager
    def _beside(self) -> Iterator[torch.cuda.Stream | None]:
        """On a stream of its own that has waited for what is under way, so that the copy sees it."""
        if self._device.type != "cuda":
            yield None
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield self._stream


@dataclass(eq=False)
class _HostInput:
    host: Tensor
    fetched: Tensor | None = None
    event: torch.cuda.Event | None = None
