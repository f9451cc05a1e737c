"""Checks a node before a run is started on it. It needs torch for the GPUs, and nothing of hybridflow.

On the head node, as long as the others check: `python check_node.py --serve 6379 --shared runs`.
On every node, the head too: `python check_node.py --head 10.0.0.1:6379 --ports 6380,6381 --shared runs --gpus 8`.

Prints one line a node, `node1 ok ...` or `node1 BAD <what is wrong, what was asked for>; ...`, and exits with 1 for BAD.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPARED = ("python", "torch", "transformers", "ray", "hybridflow")
MISSING = "not installed"
LONGEST_REQUEST = 4096


@dataclass(frozen=True)
class Gpu:
    """`Gpu("NVIDIA H200", memory_gb=139.8, free_gb=139.3, trouble="")`; trouble: why it cannot be computed with."""

    name: str
    memory_gb: float
    free_gb: float
    trouble: str = ""


@dataclass(frozen=True)
class Link:
    """What the head said about this node.

    skew_s:       this node's clock minus the head's; the truth lies within `uncertain_s` of it.
    closed_ports: ports of this node that the head could not connect to.
    shared:       what is wrong with the shared directory; "" where the head sees what this node writes into it.
    versions:     the head's own.
    """

    skew_s: float = 0.0
    uncertain_s: float = 0.0
    closed_ports: tuple[int, ...] = ()
    shared: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """What was found. Sizes in GB of 2**30 bytes; `trouble`: what could not be found out, one sentence each."""

    host: str
    memory_gb: float
    shm_gb: float
    disk_gb: float
    gpus: tuple[Gpu, ...]
    versions: dict[str, str]
    link: Link | None = None
    trouble: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needs:
    """What a run asks of a node; sizes in GB of 2**30 bytes, 0 asks for nothing."""

    gpus: int = 0
    gpu_memory_gb: float = 0.0
    memory_gb: float = 0.0
    shm_gb: float = 0.0
    disk_gb: float = 0.0
    skew_s: float = 1.0
    versions: dict[str, str] = field(default_factory=dict)


def find_faults(node: Node, needs: Needs) -> list[str]:
    """One sentence for each thing that is wrong; empty for a node that will do. Pure."""
    faults = list(node.trouble)
    for what, found, asked in (
        ("free memory", node.memory_gb, needs.memory_gb),
        ("/dev/shm", node.shm_gb, needs.shm_gb),
        ("temporary disk", node.disk_gb, needs.disk_gb),
    ):
        if found < asked:
            faults.append(f"{what}: {found:.1f} GB, {asked:g} GB asked for")
    return faults + _gpu_faults(node, needs) + _version_faults(node, needs) + _link_faults(node, needs)


def _gpu_faults(node: Node, needs: Needs) -> list[str]:
    faults = [f"GPU {i}: {gpu.trouble}" for i, gpu in enumerate(node.gpus) if gpu.trouble]
    if len(node.gpus) < needs.gpus:
        faults.insert(0, f"GPUs: {len(node.gpus)}, {needs.gpus} asked for")
    for i, gpu in enumerate(node.gpus):
        if gpu.free_gb < needs.gpu_memory_gb and not gpu.trouble:
            faults.append(
                f"GPU {i}: {gpu.free_gb:.1f} GB of its {gpu.memory_gb:.1f} free, {needs.gpu_memory_gb:g} GB asked for"
            )
    return faults


def _version_faults(node: Node, needs: Needs) -> list[str]:
    faults = [f"{name} is {MISSING}" for name in COMPARED if node.versions[name] == MISSING]
    for name, asked in needs.versions.items():
        if node.versions[name] not in (asked, MISSING):
            faults.append(f"{name} {node.versions[name]}, {asked} asked for")
    for name, version in (node.link.versions if node.link else {}).items():
        if node.versions[name] not in (version, MISSING):
            faults.append(f"{name} {node.versions[name]}, the head has {version}")
    return faults


def _link_faults(node: Node, needs: Needs) -> list[str]:
    if node.link is None:
        return []
    faults = [f"port {port}: the head cannot reach it" for port in node.link.closed_ports]
    if abs(node.link.skew_s) - node.link.uncertain_s > needs.skew_s:
        faults.append(f"clock: {node.link.skew_s:+.3f} s from the head's, {needs.skew_s:g} s allowed")
    if node.link.shared:
        faults.append(f"shared directory: {node.link.shared}")
    return faults


def measure_memory_gb() -> float:
    """Memory that can still be taken: the machine's, or the job's own limit (cgroup v2) where that is less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = float(lines["MemAvailable"].split()[0]) * 1024
    for cgroup in _own_cgroups():
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int((cgroup / "memory.max").read_text()) - _used_memory(cgroup))
    return free / 2**30


def _used_memory(cgroup: Path) -> int:
    """Bytes that cannot be had back: files kept in memory are given up when memory is asked for."""
    lines = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int((cgroup / "memory.current").read_text()) - int(lines["inactive_file"])


def _own_cgroups() -> Iterator[Path]:
    """This process's cgroup and those around it; a limit may stand on any of them."""
    root = Path("/sys/fs/cgroup")
    own = root / Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    yield from (path for path in (own, *own.parents) if path.is_relative_to(root))


def measure_free_gb(directory: str) -> float:
    """Space left on the file system that holds `directory`; 0 where there is none."""
    try:
        return shutil.disk_usage(directory).free / 2**30
    except OSError:
        return 0.0


def measure_versions() -> dict[str, str]:
    """Version by name of what must be the same on every node."""
    return {"python": platform.python_version()} | {name: _read_version(name) for name in COMPARED[1:]}


def _read_version(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return MISSING
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    # Two checkouts of one version may differ, so that what counts is the source itself.
    return f"{version} source {_hash_source(spec.submodule_search_locations[0])}" if name == "hybridflow" else version


def _hash_source(package: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(package).rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def measure_gpus() -> tuple[Gpu, ...]:
    """Every GPU of this node, each tried with a product of known result; the CPU is tried where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        trouble = try_product("cpu")
        return (Gpu("CPU", 0.0, 0.0, f"the CPU {trouble}"),) if trouble else ()
    return tuple(_measure_gpu(i) for i in range(torch.cuda.device_count()))


def _measure_gpu(i: int) -> Gpu:
    import torch

    try:
        free, memory = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        return Gpu(name, memory / 2**30, free / 2**30, try_product(f"cuda:{i}"))
    except RuntimeError as error:
        return Gpu("GPU", 0.0, 0.0, f"does not answer: {str(error).splitlines()[0]}")


def try_product(device: str, size: int = 1024) -> str:
    """Why the device cannot be trusted, or "" where its matrix product is exactly right.

    a[i, k] = (i + k) mod 8 and b[k, j] = (k + 3j) mod 8, so (a b)[i, j] is size / 8 times a number that 3j - i mod 8
    decides. All are whole numbers far below 2**24: exact in float32, in TF32 and in any order of the sum.
    """
    import torch

    line = torch.arange(size)
    a = ((line[:, None] + line[None, :]) % 8).float()
    b = ((line[:, None] + 3 * line[None, :]) % 8).float()
    sums = torch.tensor([sum(k * ((k + shift) % 8) for k in range(8)) for shift in range(8)])
    right = sums[(3 * line[None, :] - line[:, None]) % 8] * (size // 8)
    wrong = int((a.to(device) @ b.to(device)).cpu().ne(right).sum())
    return f"computes {wrong} of {size * size} products wrong" if wrong else ""


class _Answer(socketserver.StreamRequestHandler):
    """One request of one node: {"want": "time"}, {"want": "versions"}, {"want": "port", "port": 6380} or
    {"want": "file", "name": ".check_node-node1"}."""

    server: Head
    timeout = 10

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline(LONGEST_REQUEST))
        self.wfile.write(json.dumps(self._answer(asked)).encode() + b"\n")

    def _answer(self, asked: dict[str, Any]) -> Any:
        if asked["want"] == "versions":
            return self.server.versions
        if asked["want"] == "port":
            return _is_open(self.client_address[0], int(asked["port"]))
        if asked["want"] == "file":
            return self._sees(str(asked["name"]))
        return time.time()

    def _sees(self, name: str) -> bool:
        return bool(re.fullmatch(r"\.check_node-[\w.-]+", name)) and (self.server.shared / name).exists()


class Head(socketserver.ThreadingTCPServer):
    """Answers the nodes' questions, on the port that Ray will use."""

    allow_reuse_address = True
    daemon_threads = True
    # All nodes of a job ask at once.
    request_queue_size = 512

    def __init__(self, port: int, shared: str) -> None:
        super().__init__(("", port), _Answer)
        self.versions = measure_versions()
        self.shared = Path(shared)


def serve(port: int, shared: str, seconds: float) -> None:
    """Answers until killed, or for `seconds`."""
    with Head(port, shared) as head:
        end = threading.Timer(seconds, head.shutdown)
        end.daemon = True
        end.start()
        head.serve_forever()


def _is_open(host: str, port: int, timeout_s: float = 5.0) -> bool:
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _ask(head: tuple[str, int], timeout_s: float, want: str, **more: Any) -> Any:
    """The head's answer; raises OSError where there is none, and where something else listens on its port."""
    with socket.create_connection(head, timeout=timeout_s) as connection:
        connection.sendall(json.dumps({"want": want, **more}).encode() + b"\n")
        answer = connection.makefile().readline()
    try:
        return json.loads(answer)
    except ValueError:
        raise OSError("what listens there is no `check_node.py --serve`") from None


def _wait_for(head: tuple[str, int], timeout_s: float) -> None:
    """Returns when the head answers; raises OSError where it has not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _ask(head, timeout_s, "time")
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def measure_skew(head: tuple[str, int], timeout_s: float) -> tuple[float, float]:
    """(this clock minus the head's, how far that may be wrong), in seconds, from the quickest of eight answers."""
    trips = []
    for _ in range(8):
        sent, began = time.time(), time.monotonic()
        theirs = _ask(head, timeout_s, "time")
        half = (time.monotonic() - began) / 2
        trips.append((half, sent + half - theirs))
    half, skew = min(trips)
    return skew, half


def measure_link(head: tuple[str, int], ports: list[int], shared: str, timeout_s: float) -> Link:
    """Asks the head about this node."""
    _wait_for(head, timeout_s)
    skew, uncertain = measure_skew(head, timeout_s)
    closed = tuple(port for port in ports if not _ask(head, timeout_s, "port", port=port))
    trouble = try_shared(head, shared, timeout_s) if shared else ""
    return Link(skew, uncertain, closed, trouble, _ask(head, timeout_s, "versions"))


def try_shared(head: tuple[str, int], shared: str, timeout_s: float) -> str:
    """Why the directory will not do, or "" where a file written here is seen on the head."""
    path = Path(shared) / f".check_node-{platform.node()}-{os.getpid()}"
    try:
        path.touch()
    except OSError as error:
        return f"'{shared}' cannot be written here ({error.strerror})"
    try:
        return (
            "" if _is_seen(head, path.name, timeout_s) else f"the head does not see what is written to '{shared}' here"
        )
    finally:
        path.unlink()


def _is_seen(head: tuple[str, int], name: str, timeout_s: float) -> bool:
    """Network file systems may take seconds to show a new file."""
    deadline = time.monotonic() + timeout_s
    while not (seen := _ask(head, timeout_s, "file", name=name)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return bool(seen)


@contextlib.contextmanager
def listening(ports: list[int], trouble: list[str]) -> Iterator[list[int]]:
    """The ports that are free here, listened on until the end of the block; what is said of the others goes to `trouble`."""
    with contextlib.ExitStack() as stack:
        free = []
        for port in ports:
            try:
                stack.enter_context(socket.create_server(("", port)))
                free.append(port)
            except OSError as error:
                trouble.append(f"port {port}: cannot be listened on ({os.strerror(error.errno or 0)})")
        yield free


def measure(options: argparse.Namespace) -> Node:
    """Looks at this node, and asks the head about it where there is one."""
    trouble: list[str] = []
    link = None
    with listening(options.ports, trouble) as ports:
        if options.head:
            try:
                link = measure_link(options.head, ports, options.shared, options.timeout)
            except OSError as error:
                trouble.append(f"head {options.head[0]}:{options.head[1]}: {error}")
    versions = measure_versions()
    return Node(
        host=platform.node(),
        memory_gb=measure_memory_gb(),
        shm_gb=measure_free_gb("/dev/shm"),
        disk_gb=measure_free_gb(options.tmp),
        gpus=measure_gpus() if versions["torch"] != MISSING else (),
        versions=versions,
        link=link,
        trouble=tuple(trouble),
    )


def describe(node: Node, faults: list[str]) -> str:
    """The line of a node."""
    if faults:
        return f"{node.host} BAD {'; '.join(faults)}"
    names = sorted({gpu.name for gpu in node.gpus})
    gpus = f"{len(node.gpus)} x {' and '.join(names)}, " if names else "no GPU, "
    clock = f"clock {node.link.skew_s:+.3f} s, " if node.link else ""
    versions = ", ".join(f"{name} {version}" for name, version in node.versions.items())
    sizes = f"memory {node.memory_gb:.0f} GB, /dev/shm {node.shm_gb:.0f} GB, disk {node.disk_gb:.0f} GB"
    return f"{node.host} ok {gpus}{sizes}, {clock}{versions}"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _ports(text: str) -> list[int]:
    return [int(port) for port in text.split(",") if port]


def _version(text: str) -> tuple[str, str]:
    name, _, version = text.partition("=")
    if name not in COMPARED or not version:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VERSION with NAME one of {', '.join(COMPARED)}")
    return name, version


def parse_options(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, metavar="PORT", help="answer the nodes, on the head; Ray's port is best")
    parser.add_argument("--serve-s", type=float, default=600.0, help="seconds to answer for (%(default)g)")
    parser.add_argument("--head", type=_address, metavar="HOST:PORT", help="where the head answers")
    parser.add_argument("--ports", type=_ports, default=[], metavar="P,P", help="ports of this node that must be open")
    parser.add_argument("--shared", default="", metavar="DIR", help="directory that all nodes see")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs asked for")
    for name, what in (("gpu-memory", "free on each GPU"), ("memory", "free memory"), ("shm", "free in /dev/shm")):
        parser.add_argument(f"--{name}", type=float, default=0.0, metavar="GB", help=f"{what} asked for")
    parser.add_argument("--disk", type=float, default=0.0, metavar="GB", help="free in --tmp asked for")
    parser.add_argument("--tmp", default=tempfile.gettempdir(), metavar="DIR", help="Ray's directory (%(default)s)")
    parser.add_argument("--skew", type=float, default=1.0, metavar="S", help="clock difference allowed (%(default)g s)")
    parser.add_argument("--expect", type=_version, action="append", default=[], metavar="NAME=VERSION")
    parser.add_argument("--timeout", type=float, default=20.0, metavar="S", help="bound of each wait (%(default)g s)")
    return parser.parse_args(words)


def read_needs(options: argparse.Namespace) -> Needs:
    """What the command line asks for."""
    return Needs(
        gpus=options.gpus,
        gpu_memory_gb=options.gpu_memory,
        memory_gb=options.memory,
        shm_gb=options.shm,
        disk_gb=options.disk,
        skew_s=options.skew,
        versions=dict(options.expect),
    )


def main() -> int:
    """Exit codes: 0 the node will do, 1 it will not, 2 a wrong option."""
    options = parse_options(sys.argv[1:])
    if options.serve is not None:
        serve(options.serve, options.shared, options.serve_s)
        return 0
    node = measure(options)
    faults = find_faults(node, read_needs(options))
    print(describe(node, faults), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
