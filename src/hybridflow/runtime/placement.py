"""Which devices each role gets: the settings, and pure planners from them to slots on the nodes of a cluster.

Devices are numbered over the cluster, node by node in the order of its inventory: where nodes have 8 GPUs, `gpu:8` is the first of the
second node. A CPU device is one core.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from operator import itemgetter
from typing import Literal

from hybridflow.config import ConfigError, Field, settings
from hybridflow.config.explain import shown
from hybridflow.config.schema import nearest

Kind = Literal["cpu", "gpu"]
DEVICE_TYPES: dict[Kind, str] = {"cpu": "cpu", "gpu": "cuda"}
"""What torch calls each kind."""
Strategy = Literal["per_device", "per_node", "single"]

# At most six digits, so that a slip of the keyboard asks for no more memory than a large cluster does.
_RANGE = re.compile(r"(cpu|gpu):(\d{1,6})(?:-(\d{1,6}))?")
_SECTION = "runtime.placement"
_MAX_NODES_SHOWN = 8
_GPUS_OF_ASSUMED_NODE = 8


@settings
class PoolSettings:
    """Devices and who runs on them, e.g. `PoolSettings(name="train", devices=("gpu:0-3", "gpu:8-11"), roles=("actor", "reference"))`."""

    name: str = Field(min_length=1)
    """What messages call the pool; where `roles` is empty, the role that it is for."""
    devices: tuple[str, ...]
    """Ranges of devices of one kind, numbered over the whole cluster, e.g. ["gpu:0-3", "gpu:8-11"] or ["cpu:0-7"]."""
    strategy: Strategy = "per_device"
    """Workers of each role: `per_device` starts one a device; `per_node` one a node, with all the pool's cores there as its threads;
    `single` one, with all the pool's cores, which must be on one node. A GPU worker has one GPU."""
    roles: tuple[str, ...] = ()
    """Roles that share these devices; empty means the one that has the pool's name."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Precision of the models here; null leaves it to each role's `model.dtype`."""

    def __post_init__(self) -> None:
        parse_devices("devices", self.devices)


@settings
class PlacementSettings:
    """Which devices each role gets, by `device_map` or by `mesh`. Roles with the same devices share them; one that is not named is left
    to Ray."""

    device_map: dict[str, str] | None = None
    """Devices by role, one worker a device, e.g. {actor: "gpu:0-3", rollout: "gpu:4-7,gpu:12-15", reward: "cpu:0-3"}."""
    mesh: tuple[PoolSettings, ...] = ()
    """The same as a list of pools, which say more: several roles, workers by node, precision."""
    bind_numa: bool = True
    """Keeps each worker on the cores that are near its devices."""

    def __post_init__(self) -> None:
        if self.device_map and self.mesh:
            raise ValueError("device_map and mesh are both set; keep one and leave the other out")
        pools = _read_pools(self)
        _require_names_once(pools)
        for one, other in combinations(pools, 2):
            _require_same_or_apart(one, other)

    def roles(self) -> tuple[str, ...]:
        """The roles that get devices."""
        return tuple(role for pool in _read_pools(self) for role in pool.roles)

    def kind(self, role: str) -> Kind | None:
        """The kind of the role's devices; None where they are left to Ray."""
        return next((pool.devices.kind for pool in _read_pools(self) if role in pool.roles), None)

    def num_workers(self, role: str) -> int | None:
        """Workers of the role; None where the cluster's nodes tell. One where it is left to Ray."""
        pool = next((pool for pool in _read_pools(self) if role in pool.roles), None)
        if pool is None or pool.strategy == "single":
            return 1
        return len(pool.devices.indices) if pool.strategy == "per_device" else None

    def dtype(self, role: str) -> str | None:
        """The precision that the role's pool sets, if it does."""
        return next((pool.dtype for pool in _read_pools(self) if role in pool.roles), None)

    def separates(self, role: str) -> bool:
        """Whether `role` has devices of its own, other than the actor's."""
        devices = {name: pool.devices for pool in _read_pools(self) for name in pool.roles}
        return role in devices and devices[role] != devices.get("actor")


@dataclass(frozen=True)
class Devices:
    """Devices of one kind, numbered over the cluster, ascending: `Devices("gpu", (0, 1, 8, 9))`."""

    kind: Kind
    indices: tuple[int, ...]


@dataclass(frozen=True)
class NodeInventory:
    """What a node offers: `NodeInventory("a8f3...", "10.0.0.1", num_gpus=8, num_cpus=96)`."""

    node_id: str
    address: str
    num_gpus: int
    num_cpus: int

    def num_devices(self, kind: Kind) -> int:
        """How many devices of this kind the node has."""
        return self.num_gpus if kind == "gpu" else self.num_cpus


Inventory = tuple[NodeInventory, ...]


@dataclass(frozen=True)
class Bundle:
    """What is reserved on a node for the workers of one slot: `Bundle("a8f3...", gpus=1, cpus=0)`.

    A GPU's bundle reserves no core: its worker runs where `binding` puts it, and all cores stay free to be placed by number.
    """

    node_id: str
    gpus: int
    cpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As a Ray placement group takes it."""
        return {name: float(count) for name, count in (("GPU", self.gpus), ("CPU", self.cpus)) if count}


@dataclass(frozen=True)
class Slot:
    """The place of one worker of each role that runs there: `Slot("a8f3...", "gpu", indices=(2,), bundle=10)`.

    indices: devices, numbered over the node alone.
    bundle:  which of the placement's bundles holds them; None for a slot that came later, whose `reservation` is still to be made.
    """

    node_id: str
    kind: Kind
    indices: tuple[int, ...]
    bundle: int | None = None

    @property
    def reservation(self) -> Bundle:
        """The bundle that holds this slot."""
        count = len(self.indices)
        return Bundle(self.node_id, gpus=count, cpus=0) if self.kind == "gpu" else Bundle(self.node_id, 0, cpus=count)


@dataclass(frozen=True)
class RolePlacement:
    """Where the workers of a role live, by rank. `dtype`: None leaves it to the role's model."""

    role: str
    pool: str
    slots: tuple[Slot, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where all roles live, and what to reserve for them. A role that is not in it is left to Ray."""

    roles: tuple[RolePlacement, ...] = ()
    bundles: tuple[Bundle, ...] = ()

    def of(self, role: str) -> RolePlacement | None:
        """The placement of one role, or None."""
        return next((placed for placed in self.roles if placed.role == role), None)


@dataclass(frozen=True)
class _Pool:
    """A role of `device_map`, or an item of `mesh`. `key`: where its devices are set; `written`: as what."""

    key: str
    name: str
    roles: tuple[str, ...]
    written: str
    devices: Devices
    strategy: Strategy
    dtype: str | None


def parse_devices(key: str, ranges: Sequence[str]) -> Devices:
    """The devices that `["gpu:0-3,gpu:8", "gpu:12-15"]` names. Raises ValueError with one sentence that begins with `key`."""
    written = ", ".join(ranges)
    kinds: set[Kind] = set()
    indices: list[int] = []
    for text in written.split(","):
        kind, first, last = _parse_range(key, text.strip())
        kinds.add(kind)
        indices += range(first, last + 1)
    if len(kinds) > 1:
        raise ValueError(f"{key} names GPUs and CPUs ({shown(written)}); give each kind a pool and roles of its own")
    (kind,) = kinds
    index, times = Counter(indices).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{key} names {kind}:{index} {times} times ({shown(written)}); name each device once")
    return Devices(kind, tuple(sorted(indices)))


def _parse_range(key: str, text: str) -> tuple[Kind, int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{key} names {shown(text)}, which is not a range of devices; write such as gpu:0-3, gpu:4 or cpu:0-7"
        )
    kind: Kind = "gpu" if match[1] == "gpu" else "cpu"
    first, last = int(match[2]), int(match[3] or match[2])
    if last < first:
        raise ValueError(f"{key} names {shown(text)}, which ends before it begins; write {kind}:{last}-{first}")
    return kind, first, last


def check_roles(settings: PlacementSettings, roles: Sequence[str]) -> None:
    """Raises ConfigError for a role that is not among `roles`."""
    for pool in _read_pools(settings):
        for role in pool.roles:
            if role not in roles:
                near = nearest(role, list(roles))
                remedy = f"the nearest is '{near}'" if near else "take it out or use one of these"
                raise ConfigError(
                    f"{_SECTION}.{pool.key}: '{role}' is not a role of this run, whose roles are {', '.join(roles)}; {remedy}"
                )


def plan_placement(settings: PlacementSettings, inventory: Inventory, roles: Sequence[str]) -> Placement:
    """Where the workers of each role live, and what to reserve on which node. Empty where the settings place nothing.

    roles: those that may be placed.

    Invariants:
    - the slots of a role hold exactly its devices, each in one slot, and ascend; a slot is on one node and within what it has;
    - roles with the same devices have the same slots, and so the same bundles; other roles have no device in common;
    - there is one bundle a slot, `bundles[slot.bundle] == slot.reservation`, and none that no slot names.

    Raises ConfigError, one sentence that says what was asked and what is there, for what cannot fit.
    """
    check_roles(settings, roles)
    pools = _read_pools(settings)
    slots: dict[Devices, tuple[Slot, ...]] = {}
    bundles: list[Bundle] = []
    for pool in pools:
        if pool.devices not in slots:
            slots[pool.devices] = _plan_slots(pool, inventory, first_bundle=len(bundles))
            bundles += [slot.reservation for slot in slots[pool.devices]]
    placed = [RolePlacement(role, pool.name, slots[pool.devices], pool.dtype) for pool in pools for role in pool.roles]
    return Placement(tuple(placed), tuple(bundles))


def find_shortage(settings: PlacementSettings, inventory: Inventory) -> tuple[Kind, ...]:
    """The kinds of device of which the settings place more than the cluster has."""
    needed = _count_needed(settings)
    kinds: tuple[Kind, ...] = ("gpu", "cpu")
    return tuple(kind for kind in kinds if needed[kind] > sum(node.num_devices(kind) for node in inventory))


def assume_nodes(settings: PlacementSettings) -> Inventory:
    """A cluster that has just what the settings place: one node, or as many of 8 GPUs as it takes. Each node has all cores that are placed,
    since these may have to be on one."""
    needed = _count_needed(settings)
    num_nodes = max(1, math.ceil(needed["gpu"] / _GPUS_OF_ASSUMED_NODE))
    num_gpus = needed["gpu"] if num_nodes == 1 else _GPUS_OF_ASSUMED_NODE
    names = [f"assumed node {number}" for number in range(1, num_nodes + 1)] if num_nodes > 1 else ["an assumed node"]
    return tuple(NodeInventory(name, name, num_gpus, needed["cpu"]) for name in names)


def describe_total(kinds: Sequence[Kind], inventory: Inventory) -> str:
    """`0 GPUs and 8 CPUs` of the whole cluster."""
    totals = [(kind, sum(node.num_devices(kind) for node in inventory)) for kind in kinds]
    return " and ".join(_counted(total, kind.upper()) for kind, total in totals)


def _count_needed(settings: PlacementSettings) -> Counter[Kind]:
    """Devices that the cluster must have, by kind, for the highest number of each to be there."""
    needed: Counter[Kind] = Counter()
    for pool in _read_pools(settings):
        needed[pool.devices.kind] = max(needed[pool.devices.kind], pool.devices.indices[-1] + 1)
    return needed


def plan_new_slot(like: Slot, alive: Inventory, in_use: Sequence[Slot]) -> Slot | None:
    """A slot for a worker that lost its node, or for one more worker: as many free devices of the kind that `like` has.

    like:   the slot of the lost worker, or of another worker of the role.
    alive:  the nodes that are there now.
    in_use: one slot for each worker that lives or is about to start, and for each bundle that is held without one.
    returns: free devices on the node with the fewest slots in use (the first of equal ones), the lowest numbers there; None where no node
             has enough. Roles that shared the lost slot share the new one.
    """
    taken = {(slot.node_id, slot.kind, index) for slot in in_use for index in slot.indices}
    load = Counter(slot.node_id for slot in in_use)
    for node in sorted(alive, key=lambda node: load[node.node_id]):
        every = range(node.num_devices(like.kind))
        free = [index for index in every if (node.node_id, like.kind, index) not in taken]
        if len(free) >= len(like.indices):
            return Slot(node.node_id, like.kind, tuple(free[: len(like.indices)]))
    return None


def plan_shared_slot(like: Slot, held: Sequence[Slot]) -> Slot | None:
    """A slot that others have, of the kind and size of `like`, for where nothing is free: on the node that holds the fewest of them."""
    fitting = [slot for slot in held if slot.kind == like.kind and len(slot.indices) == len(like.indices)]
    load = Counter(slot.node_id for slot in fitting)
    return min(fitting, key=lambda slot: load[slot.node_id], default=None)


def _read_pools(settings: PlacementSettings) -> tuple[_Pool, ...]:
    if settings.device_map:
        return tuple(_read_role(role, written) for role, written in settings.device_map.items())
    return tuple(_read_pool(f"mesh.{index}", pool) for index, pool in enumerate(settings.mesh))


def _read_role(role: str, written: str) -> _Pool:
    key = f"device_map.{role}"
    return _Pool(key, role, (role,), written, parse_devices(key, [written]), "per_device", None)


def _read_pool(key: str, pool: PoolSettings) -> _Pool:
    written = ", ".join(pool.devices)
    devices = parse_devices(f"{key}.devices", pool.devices)
    return _Pool(key, pool.name, pool.roles or (pool.name,), written, devices, pool.strategy, pool.dtype)


def _require_names_once(pools: Sequence[_Pool]) -> None:
    names = Counter(pool.name for pool in pools)
    if names and (most := names.most_common(1)[0])[1] > 1:
        raise ValueError(f"mesh has {most[1]} pools named '{most[0]}'; give each a name of its own")
    roles = Counter(role for pool in pools for role in pool.roles)
    if roles and (most := roles.most_common(1)[0])[1] > 1:
        where = ", ".join(dict.fromkeys(pool.name for pool in pools if most[0] in pool.roles))
        raise ValueError(f"mesh names role '{most[0]}' {most[1]} times (pools {where}); name it once")


def _require_same_or_apart(one: _Pool, other: _Pool) -> None:
    """Two pools share all their devices and how these are split, or none: their workers then need one bundle a slot."""
    if one.devices.kind != other.devices.kind:
        return
    shared = set(one.devices.indices) & set(other.devices.indices)
    if shared and one.devices != other.devices:
        raise ValueError(
            f"'{one.name}' ({one.written}) and '{other.name}' ({other.written}) share {one.devices.kind}:{min(shared)} but "
            "not all of their devices; give them the same devices, or none in common"
        )
    if shared and one.strategy != other.strategy:
        raise ValueError(
            f"'{one.name}' and '{other.name}' share their devices but split them differently ({one.strategy}, {other.strategy}); "
            "give them one strategy"
        )


def _plan_slots(pool: _Pool, inventory: Inventory, first_bundle: int) -> tuple[Slot, ...]:
    kind = pool.devices.kind
    groups = [(node.node_id, group) for node, indices in _locate(pool, inventory) for group in _split(pool, indices)]
    return tuple(Slot(node, kind, indices, first_bundle + i) for i, (node, indices) in enumerate(groups))


def _split(pool: _Pool, indices: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One worker's devices each, of those that the pool has on a node."""
    if pool.strategy == "per_device":
        return [(index,) for index in indices]
    if pool.devices.kind == "gpu" and len(indices) > 1:
        raise ConfigError(
            f"{_SECTION}.{pool.key}.strategy: '{pool.strategy}' gives a worker {len(indices)} GPUs of {shown(pool.written)}, and a "
            "worker runs on one; write per_device"
        )
    return [indices]


def _locate(pool: _Pool, inventory: Inventory) -> list[tuple[NodeInventory, tuple[int, ...]]]:
    """The pool's devices by node, numbered over the node. Raises ConfigError for those that are not there."""
    kind, wanted = pool.devices.kind, pool.devices.indices
    cluster = [(node, index) for node in inventory for index in range(node.num_devices(kind))]
    if wanted[-1] >= len(cluster):
        raise ConfigError(_explain_missing(pool, len(cluster), inventory))
    by_node = groupby((cluster[index] for index in wanted), key=itemgetter(0))
    found = [(node, tuple(index for _, index in devices)) for node, devices in by_node]
    if pool.strategy == "single" and len(found) > 1:
        raise ConfigError(
            f"{_SECTION}.{pool.key}.strategy: 'single' puts one worker on one node, and {shown(pool.written)} lies on {len(found)} "
            f"({_describe(tuple(node for node, _ in found))}); write per_node, or take the devices of one node"
        )
    return found


def _explain_missing(pool: _Pool, total: int, inventory: Inventory) -> str:
    kind, word = pool.devices.kind, pool.devices.kind.upper()
    remedy = "raise runtime.num_cpus, " if kind == "cpu" else ""
    return (
        f"{_SECTION}.{pool.key}: {shown(pool.written)} asks for {_counted(len(pool.devices.indices), word)} up to "
        f"{kind}:{pool.devices.indices[-1]}, but the cluster has {_counted(total, word)} "
        f"({_describe(inventory)}); take devices that are there, counted from {kind}:0, {remedy}or start more nodes"
    )


def _describe(inventory: Inventory) -> str:
    """What is there: `10.0.0.1: 8 GPUs, 96 CPUs; 10.0.0.2: 0 GPUs, 32 CPUs`."""
    lines = [
        f"{node.address}: {_counted(node.num_gpus, 'GPU')}, {_counted(node.num_cpus, 'CPU')}"
        for node in inventory[:_MAX_NODES_SHOWN]
    ]
    more = len(inventory) - len(lines)
    return "; ".join([*lines, f"{_counted(more, 'more node')}"] if more else lines) or "no nodes"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
