"""Tensors that leave their process, as bytes with type and shape: a trainer's state, and weights on their way to a generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.checkpoint import HUGGING_FACE, ShardEntry, intersect, to_slices, write_shard
from hybridflow.types import Box
from hybridflow.weights.probe import ProbeScores


@dataclass(frozen=True, eq=False)
class CarriedTensor:
    """One tensor's bytes: `CarriedTensor(torch.bfloat16, (128, 64), data)`; a type that numpy does not know travels too."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, tensor: Tensor) -> CarriedTensor:
        """The tensor's bytes on the host; for one that is there already no copy, so it must be sent before it changes."""
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(tensor.dtype, tuple(tensor.shape), flat.numpy())

    def tensor(self) -> Tensor:
        """A tensor of its own memory."""
        return torch.from_numpy(np.array(self.data)).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Weights:
    """A policy's weights by name, their version, and what their trainer makes of the probe's rows.

    tensors: none where all generators have taken this version already.
    """

    version: int
    tensors: Mapping[str, CarriedTensor]
    scores: ProbeScores


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A trainer's state, all of it or one rank's part, and what an export needs beside it.

    rank:        whose part it is.
    boxes:       where in the whole tensors these lie.
    description: that of the model as files by name; with the part of rank 0 alone.
    """

    rank: int
    tensors: Mapping[str, CarriedTensor]
    boxes: Mapping[str, Box]
    state: Mapping[str, Any]
    description: Mapping[str, bytes]


def carry(tensors: Mapping[str, Tensor]) -> dict[str, CarriedTensor]:
    """Tensors by name, ready to be sent."""
    return {name: CarriedTensor.of(tensor) for name, tensor in tensors.items()}


def read_parts(parts: Sequence[Snapshot], boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    """What a rank of any layout holds of a state that lies in parts: those of its boxes that the parts have."""
    return {
        name: _read_box(parts, name, box) for name, box in boxes.items() if any(name in part.boxes for part in parts)
    }


def _read_box(parts: Sequence[Snapshot], name: str, wanted: Box) -> Tensor:
    pieces = [(part.boxes[name], part.tensors[name]) for part in parts if name in part.boxes]
    for box, carried in pieces:
        if box == wanted:
            return carried.tensor()
    region = torch.empty(wanted.shape, dtype=pieces[0][1].dtype)
    for box, carried in pieces:
        shared = intersect(wanted.offsets, wanted.shape, box.offsets, box.shape)
        if shared is not None:
            region[to_slices(shared, wanted.offsets)] = carried.tensor()[to_slices(shared, box.offsets)]
    return region


def write_snapshot(snapshot: Snapshot, path: Path) -> ShardEntry:
    """Writes a snapshot as the shard of a checkpoint, as its worker would have; `path` as `CheckpointWriter.shard_path` gives it."""
    write_description(snapshot.description, path.parent / HUGGING_FACE)
    tensors = {name: carried.tensor() for name, carried in snapshot.tensors.items()}
    return write_shard(path, tensors, snapshot.state, snapshot.boxes)


def write_description(description: Mapping[str, bytes], directory: Path) -> None:
    """Writes the files by name, if there are any."""
    for name, content in description.items():
        directory.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
