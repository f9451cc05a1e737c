"""Keeps a worker on the cores near its devices: memory and GPUs of another NUMA node are slower to reach.

The pure planner is `plan_cores`; the rest reads what Linux tells and sets the process's cores. Elsewhere nothing is bound.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_NODES = "/sys/devices/system/node"
_PCI_DEVICES = "/sys/bus/pci/devices"


def bind_worker(kind: str | None, indices: Sequence[int]) -> frozenset[int] | None:
    """Binds this process to the cores near its devices, and returns them; None where there is nothing to gain, or `kind` is None.

    indices: cores of this node, by their place among those that the process may use. A GPU worker takes its first visible GPU, whatever
             its number on the node: Ray chose which GPU that is.
    """
    if kind is None or sys.platform != "linux":
        return None
    gpu_numa_node = read_gpu_numa_node(0) if kind == "gpu" else None
    allowed = frozenset(os.sched_getaffinity(0))
    cores = plan_cores(kind, indices, read_numa_nodes(), gpu_numa_node, allowed)
    if cores is not None:
        bind_process(cores)
    return cores


def plan_cores(
    kind: str,
    indices: Sequence[int],
    numa_nodes: Sequence[frozenset[int]],
    gpu_numa_node: int | None,
    allowed: frozenset[int],
) -> frozenset[int] | None:
    """The allowed cores of the NUMA nodes that a worker's devices belong to; None leaves the process as it is.

    kind, indices: 'cpu' and places in `allowed`, ascending; or 'gpu', where `gpu_numa_node` alone counts.
    numa_nodes:    cores of each NUMA node, by its number.
    allowed:       cores that the process may use.

    Invariants: the result is None or a non-empty part of `allowed`, smaller than it; for 'cpu' it holds every core named.
    None where a core or NUMA node is not there: a cluster may be told of more cores than the machine has.
    """
    if kind == "cpu":
        near = _nodes_of(_cores_at(indices, allowed), numa_nodes)
    elif gpu_numa_node is None or gpu_numa_node >= len(numa_nodes):
        return None
    else:
        near = numa_nodes[gpu_numa_node]
    cores = near & allowed
    return cores if cores and cores != allowed else None


def _cores_at(indices: Sequence[int], allowed: frozenset[int]) -> frozenset[int]:
    ordered = sorted(allowed)
    are_there = all(index < len(ordered) for index in indices)
    return frozenset(ordered[index] for index in indices) if are_there else frozenset()


def _nodes_of(cores: frozenset[int], numa_nodes: Sequence[frozenset[int]]) -> frozenset[int]:
    """All cores of the NUMA nodes that have any of `cores`; empty if one of these belongs to none."""
    near = frozenset[int]().union(*(node for node in numa_nodes if node & cores))
    return near if cores <= near else frozenset()


def read_numa_nodes(root: str | Path = _NODES) -> tuple[frozenset[int], ...]:
    """The cores of each NUMA node, by its number; a number without cores, or left out, is empty. () where the system does not tell."""
    lists = {int(path.parent.name.removeprefix("node")): path for path in Path(root).glob("node[0-9]*/cpulist")}
    return tuple(
        _parse_cpu_list(lists[number].read_text()) if number in lists else frozenset()
        for number in range(max(lists, default=-1) + 1)
    )


def read_gpu_numa_node(index: int, root: str | Path = _PCI_DEVICES) -> int | None:
    """The NUMA node of a GPU, as torch numbers those it sees; None where there is no such GPU, or the system does not tell."""
    # Binding comes before the worker is built, and a CPU worker may never need torch.
    import torch

    if index >= torch.cuda.device_count():
        return None
    gpu = torch.cuda.get_device_properties(index)
    bus_id = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    try:
        node = int((Path(root) / bus_id / "numa_node").read_text())
    except FileNotFoundError:
        return None
    return node if node >= 0 else None


def bind_process(cores: frozenset[int]) -> None:
    """Lets all threads of this process, and those they start, run on `cores` alone. Does nothing where the platform cannot."""
    if sys.platform != "linux":
        return
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended since it was listed.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's way to write cores: '0-3,8' is 0, 1, 2, 3, 8; empty for a node that is memory alone."""
    ranges = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return frozenset(core for first, last in ranges for core in range(first, last + 1))
