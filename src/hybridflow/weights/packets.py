"""Weights as bytes with a version and a checksum: for an object store, and for files that whoever can read them takes up.

No pickle: safetensors for the values, plain JSON for what they are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hybridflow.config import HybridflowError
from hybridflow.types import Box
from hybridflow.weights.layout import WeightLayout, list_owned
from hybridflow.weights.messages import Piece
from hybridflow.weights.packing import CopyList, Source, Sources, Targets, find_slices
from hybridflow.weights.target import TargetWeights


class PacketError(HybridflowError, ValueError):
    """Bytes that are not what was sent, or not all of it."""


@dataclass(frozen=True)
class Label:
    """What a packet says of itself: `Label(version=7, writer=0, num_writers=2, sha256="9f2c...", boxes={"lm_head.weight": Box(...)})`.

    writer, num_writers: which of how many packets make a version whole.
    """

    version: int
    writer: int
    num_writers: int
    sha256: str
    boxes: Mapping[str, Box]


@dataclass(frozen=True, eq=False)
class Packet:
    """One writer's share of a version; travels as it is through an object store."""

    label: Label
    data: bytes


@torch.no_grad()
def build_packet(
    version: int,
    layout: WeightLayout,
    rank: int,
    writers: Sequence[int],
    parts: Mapping[str, Source],
    dtypes: Mapping[str, torch.dtype] | torch.dtype,
) -> Packet:
    """What this rank has to write: over all `writers` every value once, in the type in which it is used."""
    sources, tensors, boxes = Sources(layout, rank, parts), dict[str, Tensor](), dict[str, Box]()
    for name in list_owned(layout, rank):
        box = layout.tensors[name].placement.box(rank)
        found = sources.read(Piece(name, box.offsets, box.shape, -1))
        value = found if isinstance(found, Tensor) else found[0].read(found[1])
        dtype = dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]
        # Of its own memory: two tensors of one storage would be refused.
        tensors[name] = torch.empty(box.shape, dtype=dtype).copy_(value)
        boxes[name] = box
    data = save(tensors)
    sha256 = hashlib.sha256(data).hexdigest()
    return Packet(Label(version, list(writers).index(rank), len(writers), sha256, boxes), data)


def load_packets(packets: Iterable[Packet], layout: WeightLayout, rank: int, target: TargetWeights) -> int:
    """Fills a rank's storages from all packets of one version, which it returns; all are checked before anything is changed.

    Raises PacketError where one is damaged or missing, VersionError for an older version than the one that is here.
    """
    opened = [(packet.label, open_packet(packet)) for packet in packets]
    version = _check_complete([label for label, _ in opened])
    with target.receiving(version) as buffers:
        targets, copies = Targets(layout, rank, buffers), CopyList()
        for name, held in layout.tensors.items():
            arrived = 0
            given = [(label.boxes[name], tensors[name]) for label, tensors in opened if name in label.boxes]
            for box, tensor in given:
                piece = _intersect(name, held.placement.box(rank), box)
                if piece is not None:
                    arrived += math.prod(piece.shape)
                    copies.add(targets.find(piece), tensor[find_slices(piece, box.offsets)])
            if arrived != held.placement.counts[rank]:
                raise PacketError(
                    f"version {version} of the weights holds {arrived} of the {held.placement.counts[rank]} values of tensor '{name}' "
                    "that are wanted; give both sides one model"
                )
        copies.run()
    return version


def open_packet(packet: Packet) -> dict[str, Tensor]:
    """Its tensors, after a look at its checksum."""
    label = packet.label
    who = f"packet {label.writer} of version {label.version} of the weights"
    if hashlib.sha256(packet.data).hexdigest() != label.sha256:
        raise PacketError(f"{who} does not match its checksum; send it again")
    try:
        return load(packet.data)
    except SafetensorError as error:
        raise PacketError(f"{who} cannot be read: {error}; send it again") from error


def _check_complete(labels: Sequence[Label]) -> int:
    versions = {(label.version, label.num_writers) for label in labels}
    if len(versions) != 1:
        raise PacketError(f"packets are of versions {sorted(versions)} (version, packets); give those of one version")
    ((version, count),) = versions
    missing = sorted(set(range(count)) - {label.writer for label in labels})
    if missing:
        raise PacketError(f"version {version} of the weights is not whole: packets {missing} of {count} are missing")
    return version


def _intersect(name: str, wanted: Box, held: Box) -> Piece | None:
    """What two boxes of a tensor have in common."""
    start = tuple(map(max, wanted.offsets, held.offsets))
    ends = (tuple(map(sum, zip(box.offsets, box.shape, strict=True))) for box in (wanted, held))
    shape = tuple(min(end) - first for *end, first in zip(*ends, start, strict=True))
    return Piece(name, start, shape, -1) if all(length > 0 for length in shape) else None


def write_packet(packet: Packet, directory: Path) -> None:
    """As two files, the label last and by renaming: a packet with a label is there whole."""
    directory.mkdir(parents=True, exist_ok=True)
    name = _name(packet.label.writer)
    (directory / f"{name}.safetensors").write_bytes(packet.data)
    beside = directory / f".{name}.json"
    beside.write_text(json.dumps(asdict(packet.label)))
    beside.rename(directory / f"{name}.json")


def read_packet(directory: Path, writer: int) -> Packet:
    """One that was written; PacketError names the file that cannot be read."""
    path = directory / f"{_name(writer)}.json"
    try:
        label = read_label(path)
        return Packet(label, path.with_suffix(".safetensors").read_bytes())
    except OSError as error:
        raise PacketError(
            f"{path.with_suffix('.safetensors')} cannot be read: {error}; push the version again"
        ) from error


def read_label(path: Path) -> Label:
    """A label that was written."""
    try:
        content: Any = json.loads(path.read_text())
        return TypeAdapter(Label).validate_python(content)
    except (ValidationError, ValueError) as error:
        raise PacketError(f"{path} is no label of a packet ({error}); push the version again") from error


def _name(writer: int) -> str:
    return f"writer_{writer:05d}"
