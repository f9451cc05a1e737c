"""Weights through NCCL between two GPUs, and through CUDA IPC between two processes on one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from test_weights_transports import ROUTES, build_whole, check_routes, follow_routes, share

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path may have a hundred letters."""
    directory = tempfile.mkdtemp(prefix="hf-")
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.mark.parametrize("size", [2, 4])
def test_every_route_brings_the_bits_of_the_whole_model_through_nccl(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    routes = ROUTES[size]
    by_rank = run_ranks(size, follow_routes, list(routes.values()), "cuda", directory=tmp_path, timeout_s=100.0)
    check_routes(routes, by_rank)


def test_another_process_on_the_gpu_reads_the_weights_from_shared_memory(short_path: Path, tmp_path: Path) -> None:
    sender, receiver = run_ranks(2, share, short_path, False, "cuda:0", directory=tmp_path, timeout_s=100.0)
    assert receiver["wrong"] == [] and receiver["versions"] == [1, 2, 2] and receiver["buckets"] > 3
    assert receiver["moved"] == 2 * sum(tensor.numel() for tensor in build_whole(0).values())
    assert sender["refused"] == receiver["VersionError"]
