"""Processes as Ray actors, objects in Ray's store.

An order's inputs travel as top-level arguments of the actor task and its objects are the task's return values, which outlive the worker
that made them. Ray restarts and retries nothing here: who does what again is the scheduler's to decide.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.exceptions import ObjectLostError as RayObjectLostError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hybridflow.config import ConfigError
from hybridflow.runtime.host import Failure, Host, Report
from hybridflow.runtime.placement import (
    Bundle,
    Inventory,
    NodeInventory,
    Placement,
    Slot,
    plan_new_slot,
    plan_shared_slot,
)
from hybridflow.runtime.transport import Died, InputLost, ObjectLostError

INLINE_BYTES = 4096
"""Largest result that Ray may pass through the controller instead of its store; so what the controller carries does not grow with data."""
PROBE_S = 1.0
"""Seconds that a node has to take a connection before it counts as lost."""
MAX_PROBES = 32
"""Nodes asked at once."""
LINGER_S, MAX_LINGER_S = 1e-4, 0.05
"""Seconds, for each call under way and at most, that a look at the answers waits for more of them."""
SHARE = 0.001
"""Part of its slot's GPU that a worker asks Ray for, so that all roles of the slot get that GPU and no other."""


class _RayHost(Host):
    """A host that knows its node."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        super().__init__(context.get_node_id(), ray.util.get_node_ip_address())


class ActorProcess:
    """An actor, and the ways of calling it by the number of results: to make one costs as much as a call."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._ways: dict[int, Callable[..., Any]] = {}

    def call(self, num_returns: int, *args: Any) -> Any:
        """The references of the call's results."""
        way = self._ways.get(num_returns)
        if way is None:
            way = self._ways[num_returns] = self.actor.answer.options(num_returns=num_returns).remote
        return way(*args)


class _Keeper:
    """Keeps copies of objects on its node: what it returns is a result of its own."""

    def keep(self, value: Any) -> tuple[Any, bytes]:
        return value, b""


def read_inventory() -> Inventory:
    """The nodes that are there, in the order in which placements number their devices: by address."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    ordered = sorted(alive, key=lambda node: (_address_key(node["NodeManagerAddress"]), node["NodeManagerPort"]))
    return tuple(
        NodeInventory(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("GPU", 0)),
            int(node["Resources"].get("CPU", 0)),
        )
        for node in ordered
    )


class RayTransport:
    """The `Transport` on a Ray cluster that this process is connected to."""

    def __init__(self, placement: Placement, *, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._reserved: dict[Slot, tuple[PlacementGroup, int]] = {}
        self._moved: dict[Slot, Slot] = {}
        self._groups: list[PlacementGroup] = []
        self._keepers: dict[str, Any] = {}
        self._answering: Inventory = ()
        self._looked_s = 0.0
        self._reserve(placement)

    def create(self, role: str, slot: Slot | None) -> Any:
        """See `Transport.create`."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            # The run's own phases say what each call took; Ray's record of every call costs as well.
            "enable_task_events": False,
            "runtime_env": {"env_vars": _worker_environment(slot)},
        }
        if slot is not None:
            group, index = self._reservation(slot)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, index)
            if slot.kind == "gpu":
                options["num_gpus"] = SHARE * len(slot.indices)
        return ActorProcess(ray.remote(_RayHost).options(**options).remote())

    def send(self, handle: Any, order: bytes, inputs: Sequence[Any], num_objects: int) -> tuple[Any, tuple[Any, ...]]:
        """See `Transport.send`."""
        found = handle.call(num_objects + 1, order, *inputs)
        return (found, ()) if not num_objects else (found[-1], tuple(found[:-1]))

    def poll(self, keys: list[Any], timeout_s: float) -> list[tuple[Any, bytes | Died | InputLost]]:
        """See `Transport.poll`."""
        if not keys:
            time.sleep(min(timeout_s, 0.05))
            return []
        first, _ = ray.wait(keys, num_returns=1, timeout=timeout_s)
        if not first:
            return []
        # Of many workers others answer soon after the first; one look then serves them all.
        time.sleep(min(LINGER_S * len(keys), MAX_LINGER_S))
        there, _ = ray.wait(keys, num_returns=len(keys), timeout=0)
        try:
            return list(zip(there, ray.get(there), strict=True))
        except RayError:
            return [(key, _read_report(key)) for key in there]

    def fetch(self, objects: Sequence[Any], timeout_s: float) -> list[Any] | None:
        """See `Transport.fetch`."""
        try:
            return ray.get(list(objects), timeout=timeout_s) if objects else []
        except GetTimeoutError:
            return None
        except RayObjectLostError as error:
            lost = [item for item in objects if item.hex() == error.object_ref_hex]
            raise ObjectLostError(lost[0] if lost else objects[0]) from None

    def kill(self, handle: Any) -> None:
        """See `Transport.kill`."""
        ray.kill(handle.actor)

    def copy(self, item: Any, node_id: str) -> tuple[Any, Any, str] | None:
        """See `Transport.copy`; on the controller's own node if that is another one, since the run ends with it anyway."""
        here = ray.get_runtime_context().get_node_id()
        others = [node.node_id for node in self._answering_nodes() if node.node_id != node_id]
        if not others:
            return None
        chosen = here if here in others else others[0]
        if chosen not in self._keepers:
            self._keepers[chosen] = (
                ray.remote(_Keeper)
                .options(
                    num_cpus=0,
                    max_restarts=-1,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(chosen, soft=False),
                    runtime_env={"env_vars": _worker_environment(None)},
                )
                .remote()
            )
        copy, report = self._keepers[chosen].keep.options(num_returns=2).remote(item)
        return report, copy, chosen

    def node_is_lost(self, node_id: str) -> bool:
        """See `Transport.node_is_lost`. Ray needs some seconds to declare a node dead; its port tells at once."""
        self._looked_s = 0.0
        return all(node.node_id != node_id for node in self._answering_nodes())

    def find_slot(self, slot: Slot, *, share: bool) -> Slot | None:
        """See `Transport.find_slot`."""
        while slot in self._moved:
            slot = self._moved[slot]
        alive = self._answering_nodes()
        there = {node.node_id for node in alive}
        if slot.node_id in there:
            return slot
        held = [other for other in self._reserved if other.node_id in there]
        found = plan_new_slot(slot, alive, held) or (plan_shared_slot(slot, held) if share else None)
        if found is not None:
            self._moved[slot] = found
        return found

    def _answering_nodes(self) -> Inventory:
        """The nodes that take a connection now, or did within the last second; all are asked at once."""
        if time.monotonic() - self._looked_s > PROBE_S:
            nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
            with ThreadPoolExecutor(MAX_PROBES) as pool:
                found = pool.map(
                    lambda node: answers(node["NodeManagerAddress"], node["NodeManagerPort"]), nodes.values()
                )
                answering = {node_id for node_id, answer in zip(nodes, found, strict=True) if answer}
            self._answering = tuple(node for node in read_inventory() if node.node_id in answering)
            self._looked_s = time.monotonic()
        return self._answering

    def close(self) -> None:
        """See `Transport.close`."""
        for keeper in self._keepers.values():
            ray.kill(keeper)
        for group in self._groups:
            remove_placement_group(group)
        self._groups, self._keepers, self._reserved = [], {}, {}

    def _reserve(self, placement: Placement) -> None:
        """One placement group a node, so that a lost node takes no reservation of another along."""
        slots = {slot.bundle: slot for placed in placement.roles for slot in placed.slots}
        for node_id in dict.fromkeys(bundle.node_id for bundle in placement.bundles):
            numbers = [number for number, bundle in enumerate(placement.bundles) if bundle.node_id == node_id]
            group = self._hold([placement.bundles[number] for number in numbers])
            for index, number in enumerate(numbers):
                self._reserved[slots[number]] = (group, index)
        for group in list(self._groups):
            if not group.wait(self._start_timeout_s):
                self.close()
                raise ConfigError(
                    f"runtime.placement: {group.bundle_specs} could not be reserved within {self._start_timeout_s:g} s, others hold the "
                    "devices; free them, or take devices that are free"
                )

    def _reservation(self, slot: Slot) -> tuple[PlacementGroup, int]:
        if slot not in self._reserved:
            self._reserved[slot] = (self._hold([slot.reservation]), 0)
        return self._reserved[slot]

    def _hold(self, bundles: Sequence[Bundle]) -> PlacementGroup:
        selector = [{"ray.io/node-id": bundle.node_id} for bundle in bundles]
        group = placement_group([bundle.resources for bundle in bundles], bundle_label_selector=selector)
        self._groups.append(group)
        return group


def _read_report(key: Any) -> bytes | Died | InputLost:
    try:
        report: bytes = ray.get(key)
        return report
    except RayActorError as error:
        return Died(_summarize(error))
    except RayTaskError as error:
        if isinstance(error.cause, RayObjectLostError):
            return InputLost(ray.ObjectRef(bytes.fromhex(error.cause.object_ref_hex)))
        trace = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        return pickle.dumps(Report(failure=Failure(type(error.cause).__name__, str(error.cause), trace, time.time())))
    except RayObjectLostError:
        return Died("its report was lost with its node")
    except RayError as error:
        return Died(_summarize(error))


def _summarize(error: RayError) -> str:
    """The one sentence of Ray's account that says what happened."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    if "connection error code 2" in text:
        return "its process ended (killed, out of memory, or crashed; its log and the kernel's say which)"
    for pattern in (r"exit detail: ([^\n]*)", r"[Dd]eath cause: ([^\n]*)"):
        found = re.search(pattern, text)
        if found:
            return found[1].partition(". ")[0].strip().rstrip(".")
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def answers(address: str, port: int) -> bool:
    """Whether something takes a connection there, within `PROBE_S`."""
    try:
        socket.create_connection((address, port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


def _address_key(address: str) -> tuple[Any, ...]:
    parts = address.split(".")
    return (0, *(int(part) for part in parts)) if all(part.isdigit() for part in parts) else (1, address)


def _worker_environment(slot: Slot | None) -> dict[str, str]:
    """What a worker finds in its environment.

    The controller's import path, so that its modules and the user's are found. One arithmetic thread a worker unless the user
    said otherwise, or it has more cores. Ray sets the GPU of a placed worker; one that is not placed sees all GPUs of its machine, and
    `model.device` says which it takes, where Ray would hide them from an actor that reserves none.
    """
    threads = str(len(slot.indices)) if slot is not None and slot.kind == "cpu" else "1"
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "RAY_max_direct_call_object_size": str(INLINE_BYTES),
    }
    if slot is None:
        environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    return environment
