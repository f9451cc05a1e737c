"""NUMA binding: what is read of a system, the cores that are chosen, and that the whole process then keeps to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.runtime.binding import bind_worker, plan_cores, read_gpu_numa_node, read_numa_nodes

TWO_SOCKETS = (frozenset({0, 1, 2, 3, 8, 9}), frozenset({4, 5, 6, 7, 10, 11}))
ALL = frozenset(range(12))
core_sets = st.frozensets(st.integers(0, 15), max_size=16)


def write_node(root: Path, number: int, cores: str) -> None:
    (root / f"node{number}").mkdir(parents=True)
    (root / f"node{number}" / "cpulist").write_text(cores + "\n")


def test_numa_nodes_are_read_by_their_number(tmp_path: Path) -> None:
    write_node(tmp_path, 0, "0-3,8,10-11")
    write_node(tmp_path, 10, "12")
    write_node(tmp_path, 2, "")
    (tmp_path / "online").write_text("0,2,10\n")
    (tmp_path / "node_reclaim").mkdir()
    nodes = read_numa_nodes(tmp_path)
    assert nodes[0] == {0, 1, 2, 3, 8, 10, 11}
    assert nodes[10] == {12}
    assert nodes[1:10] == (frozenset(),) * 9
    assert len(nodes) == 11


def test_a_system_that_tells_of_no_numa_nodes_has_none(tmp_path: Path) -> None:
    assert read_numa_nodes(tmp_path) == ()
    assert read_numa_nodes(tmp_path / "missing") == ()


@pytest.mark.parametrize(
    ("indices", "allowed", "expected"),
    [
        ((0,), ALL, TWO_SOCKETS[0]),
        ((4, 5), ALL, TWO_SOCKETS[1]),
        ((8,), ALL, TWO_SOCKETS[0]),
        ((3, 4), ALL, None),
        # Places count among the allowed cores alone: the first of these is core 6.
        ((0,), frozenset({6, 7, 8, 9}), {6, 7}),
        ((2, 3), frozenset({6, 7, 8, 9}), {8, 9}),
        ((0,), frozenset({6, 7}), None),
        # More cores were promised than there are.
        ((12,), ALL, None),
        ((0, 12), ALL, None),
        # Core 12 belongs to no NUMA node, so binding would take it from its worker.
        ((0, 12), ALL | {12}, None),
    ],
)
def test_a_cpu_worker_keeps_to_the_numa_nodes_of_its_cores(
    indices: tuple[int, ...], allowed: frozenset[int], expected: set[int] | None
) -> None:
    assert plan_cores("cpu", indices, TWO_SOCKETS, None, allowed) == expected


@pytest.mark.parametrize(
    ("gpu_numa_node", "allowed", "expected"),
    [
        (1, ALL, TWO_SOCKETS[1]),
        (0, frozenset({0, 1, 4}), {0, 1}),
        (0, frozenset({4, 5}), None),
        (None, ALL, None),
        (2, ALL, None),
    ],
)
def test_a_gpu_worker_keeps_to_the_numa_node_of_its_gpu(
    gpu_numa_node: int | None, allowed: frozenset[int], expected: set[int] | None
) -> None:
    assert plan_cores("gpu", (5,), TWO_SOCKETS, gpu_numa_node, allowed) == expected


@settings(deadline=None)
@given(
    st.lists(core_sets, max_size=3), core_sets, st.sampled_from(["cpu", "gpu"]), st.sets(st.integers(0, 17), min_size=1)
)
def test_the_cores_are_part_of_what_is_allowed_and_hold_those_named(
    numa_nodes: list[frozenset[int]], allowed: frozenset[int], kind: str, places: set[int]
) -> None:
    cores = plan_cores(kind, sorted(places), numa_nodes, min(places), allowed)
    if cores is None:
        return
    assert cores and cores < allowed
    if kind == "cpu":
        assert {sorted(allowed)[place] for place in places} <= cores
    else:
        assert cores == numa_nodes[min(places)] & allowed


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("text", "expected"), [("1\n", 1), ("0\n", 0), ("-1\n", None)])
def test_a_gpus_numa_node_is_read_at_its_bus_address(tmp_path: Path, text: str, expected: int | None) -> None:
    (tmp_path / "0000:dc:01.0").mkdir()
    (tmp_path / "0000:dc:01.0" / "numa_node").write_text(text)
    assert read_gpu_numa_node(0, root=tmp_path) == expected


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_that_is_not_there_or_not_told_of_has_no_numa_node(tmp_path: Path) -> None:
    assert read_gpu_numa_node(0, root=tmp_path) is None
    assert read_gpu_numa_node(1, root=tmp_path) is None


def test_nothing_is_bound_without_a_placement_or_beyond_the_machine() -> None:
    before = os.sched_getaffinity(0)
    assert bind_worker(None, ()) is None
    assert bind_worker("cpu", (100_000,)) is None
    assert os.sched_getaffinity(0) == before


BIND = """
import os, threading
from hybridflow.runtime import binding

allowed = os.sched_getaffinity(0)
mine, others = frozenset({min(allowed)}), frozenset(allowed) - {min(allowed)}
binding.read_numa_nodes = lambda: (others, mine)
started, bound, seen = threading.Event(), threading.Event(), []

def look():
    started.set()
    bound.wait()
    seen.append(os.sched_getaffinity(0))

thread = threading.Thread(target=look)
thread.start()
started.wait()
assert binding.bind_worker("cpu", (0,)) == mine
bound.set()
thread.join()
assert os.sched_getaffinity(0) == mine, os.sched_getaffinity(0)
assert seen == [mine], seen
"""


@pytest.mark.skipif(sys.platform != "linux", reason="cores can be set on Linux alone")
def test_threads_that_run_already_are_bound_too() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be told from all")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
