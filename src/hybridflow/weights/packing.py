"""Copies between tensors and a staging buffer, many in one call; types are converted on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.models import compute_merged
from hybridflow.weights.layout import WeightLayout
from hybridflow.weights.messages import Piece

Slices = tuple[slice, ...]


class Computed(Protocol):
    """A part of a tensor that is computed when it is read."""

    def read(self, slices: Slices) -> Tensor:
        """A box of the part, as a new tensor."""
        ...


Source = Tensor | Computed


@dataclass(frozen=True, eq=False)
class MergedPart:
    """This rank's rows of a matrix with an adapter's update added, rounded once to the base's type; base and adapter stay as they are.

    base:   [rows, D], this rank's part of [E, D].
    lora_A: [R, D], whole; lora_B: [rows, R], the same rows as of the base.
    """

    base: Tensor
    lora_A: Tensor
    lora_B: Tensor
    scale: float

    def read(self, slices: Slices) -> Tensor:
        """See `Computed`."""
        rows, columns = slices
        return compute_merged(self.base[slices], self.lora_A[:, columns], self.lora_B[rows], self.scale)


class Sources:
    """This rank's parts of the tensors, by the boxes of a layout."""

    def __init__(self, layout: WeightLayout, rank: int, parts: Mapping[str, Source]) -> None:
        self._layout, self._rank, self._parts = layout, rank, parts

    def read(self, piece: Piece) -> Tensor | tuple[Computed, Slices]:
        """A view of the live part, or what computes it."""
        slices = find_slices(piece, self._layout.tensors[piece.tensor].placement.offsets[self._rank].tolist())
        part = self._parts[piece.tensor]
        return part[slices] if isinstance(part, Tensor) else (part, slices)


class Targets:
    """This rank's storages, by the boxes of a layout."""

    def __init__(self, layout: WeightLayout, rank: int, buffers: Mapping[str, Tensor]) -> None:
        self._layout, self._rank, self._buffers = layout, rank, buffers

    def find(self, piece: Piece) -> Tensor:
        """A view of the storage."""
        origin = self._layout.tensors[piece.tensor].placement.offsets[self._rank]
        return self._buffers[piece.tensor][find_slices(piece, origin.tolist())]

    def find_dtype(self, piece: Piece) -> torch.dtype:
        """In which the piece travels."""
        return self._layout.tensors[piece.tensor].dtype


def find_slices(piece: Piece, origin: Sequence[int]) -> Slices:
    """The piece in a tensor that begins at `origin` of the whole one."""
    bounds = zip(piece.start, piece.shape, origin, strict=True)
    return tuple(slice(start - first, start - first + length) for start, length, first in bounds)


def find_staged(staging: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    """The piece's place in a staging buffer of bytes."""
    num_bytes = math.prod(piece.shape) * dtype.itemsize
    return staging[piece.offset : piece.offset + num_bytes].view(dtype).view(piece.shape)


class CopyList:
    """Copies that run in few calls: those between dense tensors of equal types in one, the others each by itself."""

    def __init__(self) -> None:
        self._alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        self._single: list[tuple[Tensor, Tensor]] = []
        self._computed: list[tuple[Tensor, Computed, Slices]] = []

    def add(self, to: Tensor, source: Tensor | tuple[Computed, Slices]) -> None:
        """One more; nothing is copied yet."""
        if not isinstance(source, Tensor):
            self._computed.append((to, *source))
        elif to.device == source.device and to.is_contiguous() and source.is_contiguous():
            targets, sources = self._alike.setdefault((to.dtype, source.dtype), ([], []))
            targets.append(to)
            sources.append(source)
        else:
            self._single.append((to, source))

    @torch.no_grad()
    def run(self) -> None:
        """All of them, on the current stream."""
        for targets, sources in self._alike.values():
            torch._foreach_copy_(targets, sources)
        for to, source in self._single:
            to.copy_(source, non_blocking=True)
        for to, part, slices in self._computed:
            to.copy_(part.read(slices))
