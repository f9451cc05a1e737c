"""What a checkpoint says of itself: its files, their checksums, and where every piece of every tensor lies.

step_00000010/
    manifest.json                    written last
    state.json                       the controller's state
    actor/rank_00000.safetensors     one shard of one role
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hybridflow.config import HybridflowError
from hybridflow.types import Box

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT: Literal[2] = 2
_FORBID = ConfigDict(extra="forbid")
# No part begins with a dot, so that a path never leaves the checkpoint's directory.
_File = Annotated[str, StringConstraints(pattern=r"^[\w-][\w.-]*(/[\w-][\w.-]*)*$")]
Dtype = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"
]
_Sizes = tuple[Annotated[int, Field(ge=0)], ...]


class CheckpointError(HybridflowError, ValueError):
    """A checkpoint is damaged, or would be if it were written so. The message names the file, tensor or key."""


@dataclass(frozen=True, config=_FORBID)
class TensorShard:
    """A box of a tensor: rows 128 to 255 of an embedding are
    `TensorShard(dtype="float32", shape=(128, 64), global_shape=(256, 64), offsets=(128, 0))`."""

    dtype: Dtype
    shape: _Sizes
    global_shape: _Sizes
    offsets: _Sizes


@dataclass(frozen=True, config=_FORBID)
class FileRecord:
    """What a file must be to be whole."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, config=_FORBID)
class ShardEntry:
    """One shard file, e.g. `actor/rank_00000.safetensors`: what it holds, and its writer's own state (plain JSON)."""

    role: str
    rank: int
    file: _File
    record: FileRecord
    tensors: dict[str, TensorShard]
    state: dict[str, Any]


@dataclass(frozen=True, config=_FORBID)
class Manifest:
    """The index of a checkpoint. `sequence` counts the checkpoints of a directory in the order they were written."""

    format: Literal[2]
    sequence: int
    step: int
    shards: tuple[ShardEntry, ...]
    files: dict[_File, FileRecord]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest with a checksum of its own. Raises CheckpointError if it contradicts itself."""
    check_manifest(manifest)
    body = asdict(manifest)
    text = json.dumps({"sha256": _hash_json(body), "manifest": body}, indent=1)
    (directory / MANIFEST).write_text(text)


def read_manifest(directory: Path) -> Manifest:
    """The manifest, checked against its checksum and in itself. Raises CheckpointError naming the file."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        body = content["manifest"]
        if content["sha256"] != _hash_json(body):
            raise CheckpointError("it does not match its checksum")
        _check_format(body["format"])
        manifest = TypeAdapter(Manifest).validate_python(body)
        check_manifest(manifest)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest of this format: {error.errors()[0]}") from error
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raise CheckpointError unless the shards of each tensor agree and fill it exactly, without overlap, and each file is listed once."""
    for entry in manifest.shards:
        if manifest.files.get(entry.file) != entry.record:
            raise CheckpointError(f"{entry.file} is not listed among the files")
    for (role, name), pieces in iter_tensors(manifest.shards):
        where = f"tensor '{name}' of {role}"
        boxes = [box for _, box in pieces]
        if len({(box.dtype, box.global_shape) for box in boxes}) > 1:
            raise CheckpointError(
                f"{where} has two types or shapes: {sorted({(b.dtype, b.global_shape) for b in boxes})}"
            )
        if not all(map(fits, boxes)):
            raise CheckpointError(f"{where} has a shard outside its shape {boxes[0].global_shape}")
        for (first, a), (second, b) in combinations(pieces, 2):
            if intersect(a.offsets, a.shape, b.offsets, b.shape) is not None:
                raise CheckpointError(
                    f"{where} is written twice at one place, by {first} and {second}; let one of them write it"
                )
        held = sum(math.prod(box.shape) for box in boxes)
        if held != math.prod(boxes[0].global_shape):
            raise CheckpointError(
                f"{where} has {held} of {math.prod(boxes[0].global_shape)} values; a rank's shard is missing"
            )


def _check_format(found: Any) -> None:
    if found != FORMAT:
        raise CheckpointError(
            f"it is of format {found}, and this version of hybridflow reads format {FORMAT}; go on with the version that wrote it, or "
            "start anew with model.path at a model that it has exported"
        )


def iter_tensors(shards: Iterable[ShardEntry]) -> Iterator[tuple[tuple[str, str], list[tuple[str, TensorShard]]]]:
    """Each (role, name) with its pieces, as (file, box)."""
    pieces: dict[tuple[str, str], list[tuple[str, TensorShard]]] = {}
    for entry in shards:
        for name, box in entry.tensors.items():
            pieces.setdefault((entry.role, name), []).append((entry.file, box))
    yield from pieces.items()


def intersect(
    offsets: tuple[int, ...], shape: tuple[int, ...], other_offsets: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and end of what two boxes share, or None if that is empty."""
    start = tuple(map(max, offsets, other_offsets))
    stop = tuple(min(o + n, p + m) for o, n, p, m in zip(offsets, shape, other_offsets, other_shape, strict=True))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def to_slices(shared: tuple[tuple[int, ...], tuple[int, ...]], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Where what two boxes share, as `intersect` gives it, lies in the one that begins at `origin`."""
    return tuple(slice(start - o, stop - o) for start, stop, o in zip(*shared, origin, strict=True))


def describe_file(path: Path) -> FileRecord:
    """Size and checksum of a file as it is."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def fits(box: TensorShard | Box) -> bool:
    """Whether the box lies within its tensor."""
    same = len(box.shape) == len(box.global_shape) == len(box.offsets)
    return same and all(o + n <= g for o, n, g in zip(box.offsets, box.shape, box.global_shape, strict=True))


def _hash_json(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
