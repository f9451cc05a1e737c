"""Finding and reading checkpoints. Nothing is unpickled, and nothing is believed before its checksum is."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.checkpoint.manifest import (
    STATE,
    CheckpointError,
    Dtype,
    Manifest,
    TensorShard,
    describe_file,
    fits,
    intersect,
    iter_tensors,
    read_manifest,
    to_slices,
)
from hybridflow.types import Box

_log = logging.getLogger(__name__)
_Pieces = list[tuple[str, TensorShard]]
_ADAPTER = ".lora_"
DTYPES = {name: getattr(torch, name) for name in get_args(Dtype)}


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk.

    state:   what the controller gave to `commit`.
    damaged: newer ones that were passed over, one sentence each.
    """

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step after which it was written."""
        return self.manifest.step

    def role_state(self, role: str) -> dict[str, Any]:
        """The state that the role's lowest rank gave to `write_shard`."""
        ranks = {entry.rank: entry.state for entry in self.manifest.shards if entry.role == role}
        if not ranks:
            roles = sorted({entry.role for entry in self.manifest.shards})
            raise CheckpointError(f"{self.path} has no role '{role}'; it has {roles}")
        return ranks[min(ranks)]

    def load_tensors(self, role: str, prefix: str = "") -> dict[str, Tensor]:
        """All tensors of a role, whole, on the CPU, by the names that begin with `prefix`; from however many shards."""
        names = {name: pieces for (owner, name), pieces in iter_tensors(self.manifest.shards) if owner == role}
        with ExitStack() as stack:
            reader = _Reader(self.path, stack)
            return {
                name: reader.read(name, pieces, (0,) * len(pieces[0][1].global_shape), pieces[0][1].global_shape)
                for name, pieces in names.items()
                if name.startswith(prefix)
            }

    def load_boxes(self, role: str, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
        """A box of each tensor of a role, as a rank of any layout holds them; only the shards that they touch are read.

        Raises CheckpointError for a tensor that is only here, only in the checkpoint, or of another shape there, and a box outside.
        """
        saved = {name: pieces for (owner, name), pieces in iter_tensors(self.manifest.shards) if owner == role}
        _check_adapters(self.path, saved, boxes)
        for name in sorted(saved.keys() ^ boxes.keys())[:1]:
            where = f"is in {self.path}, but this run has none" if name in saved else f"is not in {self.path}"
            raise CheckpointError(f"tensor '{name}' of {role} {where}; resume with the same model and train.lora")
        with ExitStack() as stack:
            reader, loaded = _Reader(self.path, stack), {}
            for name, box in boxes.items():
                there = saved[name][0][1].global_shape
                if there != box.global_shape:
                    _check_rank(self.path, name, there, box.global_shape)
                    raise CheckpointError(
                        f"tensor '{name}' of {role} is {list(there)} in {self.path} and {list(box.global_shape)} here; "
                        "resume with the same model"
                    )
                if not fits(box):
                    raise CheckpointError(f"tensor '{name}' of {role} has no such box: {box}")
                loaded[name] = reader.read(name, saved[name], box.offsets, box.shape)
            return loaded


def _check_adapters(path: Path, saved: Collection[str], wanted: Collection[str]) -> None:
    """Raises CheckpointError where one side has an adapter and the other none, or not on the same layers."""
    there, here = ({name for name in names if _ADAPTER in name} for names in (saved, wanted))
    if there and not here:
        raise CheckpointError(
            f"{path}: this run trained an adapter (train.lora); set it again, as in the run's config.yaml"
        )
    if here and not there:
        raise CheckpointError(f"{path}: this run trained all weights, without an adapter; take train.lora out again")
    if there != here:
        raise CheckpointError(
            f"{path}: the saved adapter is on other layers; set train.lora.target_modules as in the run's config.yaml"
        )


def _check_rank(path: Path, name: str, there: tuple[int, ...], here: tuple[int, ...]) -> None:
    if f"{_ADAPTER}A." in name and there[1:] == here[1:]:
        raise CheckpointError(f"{path}: the saved adapter has rank {there[0]}: set train.lora.rank={there[0]}")


def newest_checkpoint(root: str | os.PathLike[str]) -> Checkpoint | None:
    """The whole checkpoint that was written last, or None where there is none at all.

    Every file's checksum is verified. A damaged one is logged, named in `Checkpoint.damaged` and passed over.
    Raises CheckpointError if all are damaged: starting anew would in the end remove them.
    """
    readable, unreadable = scan(Path(root))
    damaged = list(unreadable.values())
    for path, _ in readable:
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for sentence in damaged:
            _log.warning("checkpoint passed over: %s", sentence)
        return replace(checkpoint, damaged=tuple(damaged))
    if damaged:
        raise CheckpointError(f"no checkpoint in {root} is whole: {'; '.join(damaged)}; repair them or move them away")
    return None


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in this directory, every checksum verified. Raises CheckpointError naming the file that is at fault."""
    path = Path(path).resolve()
    manifest = read_manifest(path)
    damage = find_damage(path, manifest, checksums=True)
    if damage is not None:
        raise CheckpointError(damage)
    return _build(path, manifest)


def load_shards(
    directory: str | os.PathLike[str], role: str, boxes: Mapping[str, Box] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A role's tensors and its state, from a checkpoint that the controller has verified already.

    boxes: those of this rank, as of `Checkpoint.load_boxes`; None reads all tensors whole.
    """
    path = Path(directory)
    checkpoint = _build(path, read_manifest(path))
    tensors = checkpoint.load_tensors(role) if boxes is None else checkpoint.load_boxes(role, boxes)
    return tensors, checkpoint.role_state(role)


def scan(root: Path) -> tuple[list[tuple[Path, Manifest]], dict[Path, str]]:
    """The checkpoints with a sound manifest, last written first, and what is wrong with those without."""
    readable: list[tuple[Path, Manifest]] = []
    unreadable: dict[Path, str] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if step_of(path) is None:
            continue
        try:
            readable.append((path, read_manifest(path)))
        except CheckpointError as error:
            unreadable[path] = str(error)
    return sorted(readable, key=lambda found: -found[1].sequence), unreadable


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's directory; None if the name is not one."""
    match = re.fullmatch(r"(?:\.replaced-)?step_(\d+)", path.name)
    return int(match[1]) if match else None


def find_damage(path: Path, manifest: Manifest, *, checksums: bool) -> str | None:
    """The first file that is missing, of another size or, if `checksums`, of other bytes, in a sentence; None if all are whole."""
    for name, record in manifest.files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != record.num_bytes:
            return f"{file} has {file.stat().st_size} bytes instead of {record.num_bytes}"
        if checksums and describe_file(file) != record:
            return f"{file} does not match its checksum"
    return None


def _build(path: Path, manifest: Manifest) -> Checkpoint:
    return Checkpoint(path, manifest, json.loads((path / STATE).read_text()))


class _Reader:
    """Reads boxes of tensors from shard files, each opened once."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        self._open: dict[str, Any] = {}

    def read(self, name: str, pieces: _Pieces, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The box of the tensor at `offsets`, put together from the pieces that touch it."""
        file, box = pieces[0]
        if (box.offsets, box.shape) == (offsets, shape):
            return self._fetch(file, name, box, None)
        region = torch.empty(shape, dtype=DTYPES[box.dtype])
        for file, box in pieces:
            shared = intersect(offsets, shape, box.offsets, box.shape)
            if shared is not None:
                region[to_slices(shared, offsets)] = self._fetch(file, name, box, to_slices(shared, box.offsets))
        return region

    def _fetch(self, file: str, name: str, box: TensorShard, part: tuple[slice, ...] | None) -> Tensor:
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._path / file, framework="pt"))
            view = self._open[file].get_slice(name)
            tensor: Tensor = self._open[file].get_tensor(name) if part is None else view[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path / file}, tensor '{name}': {error}") from error
        if tuple(view.get_shape()) != box.shape or tensor.dtype != DTYPES[box.dtype]:
            raise CheckpointError(
                f"{self._path / file}, tensor '{name}': not {box.dtype} {box.shape} as the manifest says"
            )
        return tensor
