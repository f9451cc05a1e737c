"""Weights through NCCL between GPUs, and through CUDA IPC between two processes on one."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
import torch
from processes import Place, run_ranks
from test_weights_link import ROUTES as LINKS
from test_weights_link import check_links, follow_links
from test_weights_transports import ROUTES, check_routes, follow_routes
from torch import Tensor

from hybridflow.rollout.buckets import Entry, export_buffer, import_buffer, pack, unpack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]


@pytest.mark.parametrize("size", [2, 4])
def test_every_route_brings_the_bits_of_the_whole_model_through_nccl(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    routes = ROUTES[size]
    by_rank = run_ranks(size, follow_routes, list(routes.values()), "cuda", directory=tmp_path, timeout_s=100.0)
    check_routes(routes, by_rank)


@pytest.mark.parametrize("size", [2, 4])
def test_links_to_generators_apart_bring_the_bits_through_nccl(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    routes = {name: route for name, route in LINKS.items() if route.num_trainers + route.num_generators == size}
    by_rank = run_ranks(size, follow_links, list(routes.values()), "cuda", directory=tmp_path, timeout_s=100.0)
    check_links(routes, by_rank)


def build_bucket(fill: float) -> list[tuple[str, Tensor]]:
    return [
        ("a", torch.full((3, 5), fill, dtype=torch.bfloat16, device="cuda:0")),
        ("b", torch.arange(7, dtype=torch.float32, device="cuda:0") * fill),
    ]


def pass_buffer(place: Place, directory: Path) -> list[list[float]]:
    """What the second process reads of two buckets, one after the other, in the first one's memory."""
    found, buffer = [], torch.empty(4096, dtype=torch.uint8, device="cuda:0") if place.rank == 0 else None
    for number in (1, 2):
        handle, read = directory / f"handle-{number}", directory / f"read-{number}"
        if buffer is not None:
            entries, buffer = pack(build_bucket(float(number)), buffer)
            torch.cuda.synchronize()
            (directory / "beside").write_text(
                repr([export_buffer(buffer), [(e.name, e.dtype, e.shape, e.offset) for e in entries]])
            )
            (directory / "beside").rename(handle)
            wait_for(read)
        else:
            wait_for(handle)
            exported, entries = ast.literal_eval(handle.read_text())
            views = unpack([Entry(*entry) for entry in entries], import_buffer(exported, 4096))
            found += [view.float().flatten().tolist() for _, view in views]
            del views
            read.touch()
    return found


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < end_s, f"{path.name} did not come"
        time.sleep(0.01)


def test_another_process_on_the_gpu_reads_a_bucket_where_it_lies(tmp_path: Path) -> None:
    _, found = run_ranks(2, pass_buffer, tmp_path, directory=tmp_path, timeout_s=100.0)
    assert found == [[1.0] * 15, [float(i) for i in range(7)], [2.0] * 15, [2.0 * i for i in range(7)]]
