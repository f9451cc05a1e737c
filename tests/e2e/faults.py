"""Faults for whole runs: workers that are killed at random moments, calls that are held up, nodes that are taken away."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tiny_runs import read_lines

from hybridflow.config import to_yaml

Verb = Callable[..., Any]
RAYS_OWN = ("IDLE", "Agent")
"""How the titles of processes end that do no work of ours."""


# Processes


def find_workers(root_pid: int) -> dict[int, str]:
    """The Ray workers below a process, with their titles; those of other clusters on this machine are not among them."""
    parents = dict(_iter_parents())
    titles = {pid: _title_of(pid) for pid in parents if root_pid in _iter_ancestors(pid, parents)}
    return {pid: title for pid, title in titles.items() if title.startswith("ray::") and not title.endswith(RAYS_OWN)}


def _iter_parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            # The name before the last parenthesis may hold anything.
            yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _iter_ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


def _title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


# Kills


@dataclass(frozen=True)
class Kill:
    """`Kill(4711, "ray::Host.answer", step=12, time_s=1.7e9)`: in which step a process was killed, and when."""

    pid: int
    title: str
    step: int
    time_s: float


class Killer:
    """While it is open, kills a random worker of this process in each of the given steps of a run, at a random moment of the step.

    The moment is chosen from the time of a quick step, and the first one holds the start of the workers; so steps begin with 3.
    """

    def __init__(self, run: Path, steps: Sequence[int], seed: int) -> None:
        self.kills: list[Kill] = []
        self._metrics, self._steps, self._rng = run / "metrics.jsonl", steps, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._kill_in_steps, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _kill_in_steps(self) -> None:
        for step in self._steps:
            duration_s = self._wait_for(step)
            self._stop.wait(self._rng.random() * duration_s)
            if not self._stop.is_set():
                self._kill_one(step)

    def _wait_for(self, step: int) -> float:
        """Until the step has begun; returns the seconds of the quickest one so far."""
        while not self._stop.is_set():
            lines = read_lines(self._metrics)
            if len(lines) >= step - 1:
                return min(float(line["time/step_s"]) for line in lines)
            time.sleep(0.005)
        return 0.0

    def _kill_one(self, step: int) -> None:
        while not (workers := find_workers(os.getpid())) and not self._stop.is_set():
            time.sleep(0.05)
        for pid in self._rng.sample(sorted(workers), len(workers)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills.append(Kill(pid, workers[pid], step, time.time()))
                return


# Verbs with a fault


class FaultyVerb:
    """`with FaultyVerb(GeneratorWorker, "rollout", held_up(...)):` puts a verb in the place of another, for Ray workers.

    The verb travels by value, so that the worker's process, where nothing was replaced, still finds the original under its name.
    """

    def __init__(self, owner: type, name: str, verb: Callable[[type, str], Verb]) -> None:
        self._owner, self._name, self._original = owner, name, vars(owner)[name]
        self._verb = verb(owner, name)

    def __enter__(self) -> None:
        setattr(self._owner, self._name, self._verb)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(self._owner, self._name, self._original)


def delayed(max_s: float) -> Callable[[type, str], Verb]:
    """A verb that waits for a random time before it begins, differently in each run."""

    def build(owner: type, name: str) -> Verb:
        def verb(worker: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(random.SystemRandom().random() * max_s)
            return getattr(owner, name)(worker, *args, **kwargs)

        verb.__name__ = name
        return verb

    return build


def held_up(directory: Path, after_calls: int, rank: int | None = None) -> Callable[[type, str], Verb]:
    """A verb that, once, after so many calls, of this rank or of any, writes its node's id to `directory/held` and stays."""

    def build(owner: type, name: str) -> Verb:
        def verb(worker: Any, *args: Any, **kwargs: Any) -> Any:
            if rank in (None, worker._seat.rank):
                made = len(list(directory.glob("call_*")))
                (directory / f"call_{time.time_ns()}_{os.getpid()}").touch()
                if made >= after_calls and _claim(directory / "held"):
                    time.sleep(90.0)
            return getattr(owner, name)(worker, *args, **kwargs)

        verb.__name__ = name
        return verb

    return build


def _claim(mark: Path) -> bool:
    """True for the first caller, whose node the file then names."""
    import ray

    try:
        with open(mark, "x") as file:
            file.write(ray.get_runtime_context().get_node_id() + "\n")
    except FileExistsError:
        return False
    return True


def read_held(directory: Path, within_s: float = 100.0) -> str:
    """The node on which a verb was held up, as soon as one is."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(FileNotFoundError):
            text = (directory / "held").read_text()
            if text.endswith("\n"):
                return text.strip()
        time.sleep(0.01)
    raise TimeoutError(f"no verb was held up in {within_s} s")


def run_on_two_nodes(config: Any, fault: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, by `two_nodes.py`; its config and marks lie in the directory."""
    (directory / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, str(Path(__file__).parent / "two_nodes.py"), str(directory / "config.yaml"), fault]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([*command, str(directory)], env=environment, capture_output=True, text=True, timeout=300)
