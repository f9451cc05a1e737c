"""Runs one function in several processes at once, each of them a rank."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Forked from a server that has imported these once: a start takes a tenth of a second, and nothing of this process (threads, autograd
# that has run) is forked along.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers", "hybridflow.train_engine", "hybridflow.algorithms"])


class Place(NamedTuple):
    """Which rank a process is, and where the ranks meet."""

    rank: int
    size: int
    rendezvous: str


def run_ranks(
    size: int, work: Callable[..., Any], *args: Any, directory: Path, missing: int = 0, timeout_s: float = 40.0
) -> list[Any]:
    """What `work(place, *args)` returned on each rank; None for one whose process died. `missing`: as many last ranks never start."""
    rendezvous = f"file://{tempfile.mkdtemp(dir=directory)}/meet"
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size - missing)]
    processes = [
        _CONTEXT.Process(target=_run, args=(writer, work, Place(rank, size, rendezvous), args))
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()
    end_s = time.monotonic() + timeout_s
    try:
        return [_receive(reader, end_s) for reader, _ in pipes]
    finally:
        for process in processes:
            process.join(max(0.1, min(2.0, end_s - time.monotonic())))
            process.kill()


def _run(writer: Connection, work: Callable[..., Any], place: Place, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    writer.send(work(place, *args))


def _receive(reader: Connection, end_s: float) -> Any:
    if not reader.poll(max(0.0, end_s - time.monotonic())):
        raise TimeoutError("a rank has not ended in time")
    try:
        return reader.recv()
    except EOFError:
        return None
