"""A directory as transport: trainers write each version beside the last, readers take up the newest whole one when they like."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hybridflow.types import PeerLostError
from hybridflow.weights.layout import WeightLayout
from hybridflow.weights.packets import Packet, build_packet, load_packets, read_label, read_packet, write_packet
from hybridflow.weights.packing import Source
from hybridflow.weights.target import TargetWeights
from hybridflow.weights.transports import Switch, SwitchTimer

KEPT_VERSIONS = 2
_POLL_S = 0.05
_PREFIX = "version_"


class FileSender:
    """Writes this rank's share of each version; no rank waits for another, and a version counts when all have written theirs.

    writers: the ranks that hold any part, the same on all. dtypes: in which the tensors are used.
    """

    def __init__(
        self,
        directory: Path,
        layout: WeightLayout,
        rank: int,
        writers: Sequence[int],
        sources: Mapping[str, Source],
        dtypes: Mapping[str, torch.dtype] | torch.dtype,
    ) -> None:
        self._directory, self._layout, self._rank = directory, layout, rank
        self._writers, self._sources, self._dtypes = tuple(writers), sources, dtypes

    def push(self, version: int) -> Switch:
        """See `WeightSender`. Versions before the last one go once nobody needs them."""
        with SwitchTimer(torch.device("cpu")) as timer:
            packet = build_packet(version, self._layout, self._rank, self._writers, self._sources, self._dtypes)
            write_packet(packet, self._directory / f"{_PREFIX}{version:08d}")
            if self._rank == self._writers[0]:
                self._remove_old(version)
        return timer.switch(version, len(packet.data))

    def release(self) -> None:
        """Nothing is kept."""

    def _remove_old(self, version: int) -> None:
        whole = [path for number, path in find_versions(self._directory) if number < version and is_whole(path)]
        for path in whole[KEPT_VERSIONS - 1 :]:
            shutil.rmtree(path, ignore_errors=True)


class FileReceiver:
    """Takes up the newest whole version in a directory.

    timeout_s: how long `pull` waits for the first version; later ones it does not wait for.
    """

    def __init__(
        self, directory: Path, layout: WeightLayout, rank: int, target: TargetWeights, *, timeout_s: float = 0.0
    ) -> None:
        self._directory, self._layout, self._rank = directory, layout, rank
        self._target, self._timeout_s = target, timeout_s

    def pull(self) -> Switch:
        """See `WeightReceiver`; what is older than the version at hand, or not whole, is left alone.

        Raises PacketError for a damaged file, which leaves the version at hand as it is, and PeerLostError where no version comes.
        """
        num_bytes = 0
        with SwitchTimer(torch.device("cpu")) as timer:
            version, path = self._wait()
            if self._target.version is None or version > self._target.version:
                packets = list(self._read(path))
                num_bytes = sum(len(packet.data) for packet in packets)
                load_packets(packets, self._layout, self._rank, self._target)
        assert self._target.version is not None
        return timer.switch(self._target.version, num_bytes)

    def release(self) -> None:
        """Nothing is kept."""

    def _wait(self) -> tuple[int, Path]:
        end_s = time.monotonic() + self._timeout_s
        while True:
            whole = [found for found in find_versions(self._directory) if is_whole(found[1])]
            if whole:
                return whole[0]
            if time.monotonic() >= end_s:
                raise PeerLostError(
                    f"rank {self._rank} waited {self._timeout_s:g} s for a whole version of the weights in {self._directory}; see whether "
                    "the trainers write there"
                )
            time.sleep(_POLL_S)

    def _read(self, path: Path) -> list[Packet]:
        count = read_label(next(iter(sorted(path.glob("*.json"))))).num_writers
        return [read_packet(path, writer) for writer in range(count)]


def find_versions(directory: Path) -> list[tuple[int, Path]]:
    """Versions with their directories, the newest first, whole or not."""
    found = [(int(path.name.removeprefix(_PREFIX)), path) for path in directory.glob(f"{_PREFIX}*")]
    return sorted(found, reverse=True)


def is_whole(path: Path) -> bool:
    """Whether every writer has put its label there."""
    labels = sorted(path.glob("writer_*.json"))
    return bool(labels) and len(labels) == read_label(labels[0]).num_writers
