"""Tensors that leave their process, as bytes with type and shape: a trainer's state, and weights on their way to a generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.checkpoint import HUGGING_FACE, ShardEntry, write_shard


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
    """A policy's weights by name, and their version."""

    version: int
    tensors: Mapping[str, CarriedTensor]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All of a trainer's state, and what an export needs beside it: `description` holds the files by name."""

    tensors: Mapping[str, CarriedTensor]
    state: Mapping[str, Any]
    description: Mapping[str, bytes]


def carry(tensors: Mapping[str, Tensor]) -> dict[str, CarriedTensor]:
    """Tensors by name, ready to be sent."""
    return {name: CarriedTensor.of(tensor) for name, tensor in tensors.items()}


def write_snapshot(snapshot: Snapshot, path: Path) -> ShardEntry:
    """Writes a snapshot as the shard of a checkpoint, as its worker would have; `path` as `CheckpointWriter.shard_path` gives it."""
    directory = path.parent / HUGGING_FACE
    directory.mkdir(exist_ok=True)
    for name, content in snapshot.description.items():
        (directory / name).write_bytes(content)
    tensors = {name: carried.tensor() for name, carried in snapshot.tensors.items()}
    return write_shard(path, tensors, snapshot.state)
