"""Weights in pieces of bounded size, on their way to an engine in another process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from hybridflow.config import HybridflowError

_ALIGNMENT = 16
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


class WeightFilesError(HybridflowError, RuntimeError):
    """Weights could not be written to where an engine reads them."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a buffer of bytes: `Entry("model.norm.weight", "float32", (64,), offset=4096)`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def iter_buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Neighbours together, up to `max_bytes` (with each tensor's alignment); one that is larger goes alone."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, weight in weights:
        size = _align(weight.nbytes)
        if bucket and filled + size > max_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, weight))
        filled += size
    if bucket:
        yield bucket


def pack(bucket: Sequence[tuple[str, Tensor]], buffer: Tensor) -> tuple[list[Entry], Tensor]:
    """Copies a bucket into the beginning of a buffer of bytes (uint8), or into a new one where this is too small.

    returns: where each tensor lies, and the buffer.
    """
    offsets = [0]
    for _, weight in bucket:
        offsets.append(offsets[-1] + _align(weight.nbytes))
    if buffer.numel() < offsets[-1]:
        buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=buffer.device)
    entries = [
        Entry(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), offset)
        for (name, weight), offset in zip(bucket, offsets[:-1], strict=True)
    ]
    for (_, weight), (_, place) in zip(bucket, unpack(entries, buffer), strict=True):
        place.copy_(weight)
    return entries, buffer


def unpack(entries: Sequence[Entry], buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Views of the tensors in a buffer of bytes."""
    return [(entry.name, _view(entry, buffer)) for entry in entries]


def export_buffer(buffer: Tensor) -> list[Any]:
    """A CUDA buffer of bytes as another process on the machine can open it: numbers and bytes alone, nothing pickled."""
    _, arguments = reduce_tensor(buffer)
    # The first six name classes, shape and type, which the receiver knows: a row of bytes.
    return list(arguments[6:])


def import_buffer(exported: Sequence[Any], size: int) -> Tensor:
    """The buffer that `export_buffer` named, on the device where it lies; it stays the sender's."""
    return rebuild_cuda_tensor(torch.Tensor, (size,), (1,), 0, torch.UntypedStorage, torch.uint8, *exported)


@torch.no_grad()
def write_weight_files(weights: Iterable[tuple[str, Tensor]], directory: str | os.PathLike[str], max_bytes: int) -> int:
    """Writes weights as safetensors files of bounded size, as a checkpoint's shards; returns the bytes written."""
    written = 0
    try:
        for number, bucket in enumerate(iter_buckets(weights, max_bytes)):
            tensors = {name: weight.detach().cpu().contiguous() for name, weight in bucket}
            save_file(tensors, Path(directory) / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
            written += sum(weight.nbytes for weight in tensors.values())
    except OSError as error:
        raise WeightFilesError(f"weights could not be written to {directory} ({error}); make room there") from None
    return written


def find_memory_directory() -> str | None:
    """A directory whose files lie in memory; None, which stands for the usual place of temporary files, where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _view(entry: Entry, buffer: Tensor) -> Tensor:
    dtype: torch.dtype = _DTYPES[entry.dtype]
    num_bytes = torch.Size(entry.shape).numel() * dtype.itemsize
    return buffer[entry.offset : entry.offset + num_bytes].view(dtype).view(entry.shape)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
