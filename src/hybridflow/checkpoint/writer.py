"""Writing checkpoints: beside, checksummed, flushed to disk, then renamed; and clearing away old ones."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from safetensors.torch import save_file
from torch import Tensor

from hybridflow.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    CheckpointError,
    Dtype,
    FileRecord,
    Manifest,
    ShardEntry,
    TensorShard,
    describe_file,
    write_manifest,
)
from hybridflow.checkpoint.reader import find_damage, scan, step_of
from hybridflow.types import Box

_NO_BOXES: Mapping[str, Box] = {}


def write_shard(
    path: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any] | None = None,
    boxes: Mapping[str, Box] = _NO_BOXES,
) -> ShardEntry:
    """Write one shard to a path from `CheckpointWriter.shard_path`, in whichever process has the tensors; flushed to disk.

    tensors: on any device; they must not change meanwhile.
    state:   what else the writer must know again; plain JSON.
    boxes:   where each tensor of which this writer has a part lies in the whole; those not named are whole.
    """
    state = dict(state or {})
    _check_json(state, "state")
    placed = {name: _place(name, tensor, boxes.get(name)) for name, tensor in tensors.items()}
    save_file(_separate(tensors), path)
    _flush(path)
    role, rank = path.parent.name, int(path.stem.removeprefix("rank_"))
    return ShardEntry(role, rank, f"{role}/{path.name}", describe_file(path), placed, state)


class CheckpointWriter:
    """One checkpoint in the making; it exists from the moment `commit` renames it, whole.

        with CheckpointWriter(root, step=10) as writer:
            entry = write_shard(writer.shard_path("actor", 0), tensors, state)     # in the worker
            writer.commit([entry], {"step": 10})

    Leaving without a commit leaves nothing. Other files put beside a shard (a model's config) are kept and checksummed.
    A directory of checkpoints has one writer at a time: entering clears away what a killed one left.
    """

    def __init__(self, root: str | os.PathLike[str], step: int) -> None:
        self._root = Path(root).resolve()
        self._step = step
        self._final = self._root / f"step_{step:08d}"
        self._directory = self._root / f".writing-{self._final.name}"

    def __enter__(self) -> Self:
        self._root.mkdir(parents=True, exist_ok=True)
        for leftover in [*self._root.glob(".writing-*"), *self._root.glob(".deleting-*")]:
            shutil.rmtree(leftover)
        self._directory.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A worker may still be writing after an error elsewhere; what stays is cleared by the next writer.
        shutil.rmtree(self._directory, ignore_errors=True)

    def shard_path(self, role: str, rank: int) -> Path:
        """Where this rank of this role writes its shard; its directory exists."""
        if not re.fullmatch(r"[a-z][a-z0-9_]*", role):
            raise CheckpointError(f"'{role}' cannot name a role's directory; use lower-case letters, digits and _")
        (self._directory / role).mkdir(exist_ok=True)
        return self._directory / role / f"rank_{rank:05d}.safetensors"

    def commit(self, entries: Sequence[ShardEntry], state: Mapping[str, Any]) -> Path:
        """Make the checkpoint, from all shards' entries and the controller's state (plain JSON); returns its directory.

        Raises CheckpointError, leaving older checkpoints as they are, if a shard is missing or the shards do not make up whole tensors.
        """
        _check_json(state, "state")
        (self._directory / STATE).write_text(json.dumps(state, indent=1))
        earlier, _ = scan(self._root)
        sequence = 1 + max((manifest.sequence for _, manifest in earlier), default=0)
        files = {entry.file: entry.record for entry in entries} | self._describe_others(
            {entry.file for entry in entries}
        )
        manifest = Manifest(FORMAT, sequence, self._step, tuple(entries), files)
        write_manifest(self._directory, manifest)
        damage = find_damage(self._directory, manifest, checksums=False)
        if damage is not None:
            raise CheckpointError(damage)
        self._publish()
        return self._final

    def _describe_others(self, shards: set[str]) -> dict[str, FileRecord]:
        records = {}
        for path in sorted(self._directory.rglob("*")):
            name = str(path.relative_to(self._directory))
            if path.is_dir() or name in shards:
                continue
            if re.fullmatch(r"rank_\d+\.safetensors", path.name):
                raise CheckpointError(
                    f"{name} was written, but its entry is missing; commit the entries of all writers"
                )
            _flush(path)
            records[name] = describe_file(path)
        return records

    def _publish(self) -> None:
        _flush(self._directory / MANIFEST)
        for path in self._directory.rglob("*"):
            if path.is_dir():
                _flush(path)
        _flush(self._directory)
        # An earlier checkpoint of the same step stays findable until this one has its name.
        replaced = self._root / f".replaced-{self._final.name}"
        if self._final.exists():
            _remove(replaced)
            self._final.rename(replaced)
        self._directory.rename(self._final)
        _flush(self._root)
        _remove(replaced)


def prune(root: str | os.PathLike[str], keep: int) -> None:
    """Remove all checkpoints older than the `keep` newest whole ones, damaged ones among them too.

    Whole means here: a sound manifest and every file of its size; checksums were taken when it was written.
    """
    readable, unreadable = scan(Path(root))
    complete = [found for found in readable if find_damage(*found, checksums=False) is None]
    if keep < 1 or len(complete) < keep:
        return
    _, oldest = complete[keep - 1]
    old = [path for path, manifest in readable if manifest.sequence < oldest.sequence]
    old += [path for path in unreadable if (step_of(path) or 0) < oldest.step]
    for path in old:
        _remove(path)


def _remove(path: Path) -> None:
    if path.exists():
        # Renamed first: half of a checkpoint must not look like a damaged one.
        doomed = path.with_name(f".deleting-{path.name.lstrip('.')}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _place(name: str, tensor: Tensor, box: Box | None) -> TensorShard:
    shape = tuple(tensor.shape)
    box = box or Box(shape, (0,) * len(shape), shape)
    dtype: Any = str(tensor.dtype).removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise CheckpointError(
            f"tensor '{name}' is {dtype}, which a checkpoint does not keep; it keeps {get_args(Dtype)}"
        )
    return TensorShard(dtype, shape, box.global_shape, box.offsets)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of which no two share a storage: safetensors refuses those that do."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return separate


def _check_json(value: Any, where: str) -> None:
    """Raise CheckpointError naming the first thing that would not come back from JSON as it is."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}, which JSON would turn into a string; use strings")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which JSON does not keep; convert it, or save a tensor"
        )
