"""Placement: what settings are refused, and the planners' docstrings' invariants over random clusters and pools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hybridflow.config import ConfigError, Field, check_config, load_config, settings, to_yaml
from hybridflow.runtime.placement import (
    Bundle,
    Inventory,
    Kind,
    NodeInventory,
    Placement,
    PlacementSettings,
    PoolSettings,
    Slot,
    check_roles,
    parse_devices,
    plan_new_slot,
    plan_placement,
)

ROLES = ("actor", "rollout", "reference", "reward", "generator")
TWO_NODES = (NodeInventory("a", "10.0.0.1", 8, 16), NodeInventory("b", "10.0.0.2", 8, 4))
MIXED = (
    NodeInventory("a", "10.0.0.1", 1, 4),
    NodeInventory("b", "10.0.0.2", 0, 3),
    NodeInventory("c", "10.0.0.3", 2, 2),
)
few = hypothesis_settings(deadline=None, max_examples=150)

nodes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=4)
inventories = nodes.map(
    lambda sizes: tuple(NodeInventory(f"n{i}", f"10.0.0.{i}", gpus, cpus) for i, (gpus, cpus) in enumerate(sizes))
)


@settings
class Root:
    """A configuration with a placement in it."""

    placement: PlacementSettings = Field(default_factory=PlacementSettings)
    """Where."""


def by_role(**device_map: str) -> PlacementSettings:
    return PlacementSettings(device_map=device_map)


def pool(name: str, *devices: str, **more: Any) -> PoolSettings:
    return PoolSettings(name=name, devices=devices, **more)


def mesh(*pools: PoolSettings) -> PlacementSettings:
    return PlacementSettings(mesh=pools)


def slots_of(placement: Placement, role: str) -> list[tuple[str, tuple[int, ...]]]:
    placed = placement.of(role)
    assert placed is not None
    return [(slot.node_id, slot.indices) for slot in placed.slots]


def numbers_of(inventory: Inventory, kind: Kind) -> list[tuple[str, int]]:
    """Node and number on it of every device of the cluster, by its number in the cluster."""
    return [(node.node_id, i) for node in inventory for i in range(node.num_gpus if kind == "gpu" else node.num_cpus)]


@st.composite
def placed_clusters(draw: st.DrawFn) -> tuple[Inventory, PlacementSettings]:
    """A cluster, and pools that fit it: disjoint, some of them for two roles, some twice with the same devices."""
    inventory = draw(inventories)
    rest = {kind: draw(st.permutations(range(len(numbers_of(inventory, kind))))) for kind in ("gpu", "cpu")}
    pools: list[PoolSettings] = []
    roles = list(ROLES)
    while roles and draw(st.booleans()):
        kind = draw(st.sampled_from(["gpu", "cpu"]))
        count = draw(st.integers(1, 6))
        devices, rest[kind] = rest[kind][:count], rest[kind][count:]
        if not devices:
            continue
        strategy = draw(st.sampled_from(["per_device", "per_node"])) if kind == "cpu" else "per_device"
        texts = tuple(f"{kind}:{index}" for index in devices)
        mine = [roles.pop() for _ in range(draw(st.integers(1, min(2, len(roles)))))]
        pools.append(pool(mine[0], *texts, strategy=strategy, roles=tuple(mine)))
        if roles and draw(st.booleans()):
            pools.append(pool(roles.pop(), *reversed(texts), strategy=strategy))
    return inventory, mesh(*pools)


@few
@given(placed_clusters())
def test_a_role_holds_exactly_its_devices_and_shares_them_as_a_whole(case: tuple[Inventory, PlacementSettings]) -> None:
    inventory, chosen = case
    placement = plan_placement(chosen, inventory, ROLES)
    wanted: dict[str, list[tuple[str, str, int]]] = {}
    for item in chosen.mesh:
        devices = parse_devices("", item.devices)
        located = [(devices.kind, *numbers_of(inventory, devices.kind)[index]) for index in devices.indices]
        wanted |= dict.fromkeys(item.roles or (item.name,), located)
    found = {
        placed.role: [(slot.kind, slot.node_id, index) for slot in placed.slots for index in slot.indices]
        for placed in placement.roles
    }
    assert found == wanted
    for one in placement.roles:
        for other in placement.roles:
            apart = not set(found[one.role]) & set(found[other.role])
            assert apart or one.slots == other.slots


@few
@given(placed_clusters())
def test_each_slot_has_its_bundle_and_all_bundles_fit_their_nodes(case: tuple[Inventory, PlacementSettings]) -> None:
    inventory, chosen = case
    placement = plan_placement(chosen, inventory, ROLES)
    slots = {slot for placed in placement.roles for slot in placed.slots}
    assert sorted(slot.bundle for slot in slots if slot.bundle is not None) == list(range(len(placement.bundles)))
    for slot in slots:
        assert slot.bundle is not None
        bundle = placement.bundles[slot.bundle]
        assert bundle == slot.reservation
        assert (bundle.gpus, bundle.cpus) == ((len(slot.indices), 0) if slot.kind == "gpu" else (0, len(slot.indices)))
    for node in inventory:
        here = [bundle for bundle in placement.bundles if bundle.node_id == node.node_id]
        assert sum(bundle.gpus for bundle in here) <= node.num_gpus
        assert sum(bundle.cpus for bundle in here) <= node.num_cpus


@few
@given(placed_clusters())
def test_workers_are_split_as_the_strategy_says(case: tuple[Inventory, PlacementSettings]) -> None:
    inventory, chosen = case
    placement = plan_placement(chosen, inventory, ROLES)
    for item in chosen.mesh:
        placed = placement.of(item.roles[0] if item.roles else item.name)
        assert placed is not None
        if item.strategy == "per_device":
            assert {len(slot.indices) for slot in placed.slots} == {1}
        else:
            assert max(Counter(slot.node_id for slot in placed.slots).values()) == 1


@few
@given(inventories, st.sampled_from(["gpu", "cpu"]), st.integers(0, 9), st.integers(1, 9))
def test_what_is_not_there_is_refused_with_what_was_asked_and_what_is_there(
    inventory: Inventory, kind: Kind, beyond: int, count: int
) -> None:
    total = len(numbers_of(inventory, kind))
    last = total + beyond
    first = max(0, last - count + 1)
    written = f"{kind}:{first}-{last}"
    with pytest.raises(ConfigError) as caught:
        plan_placement(by_role(actor=written), inventory, ROLES)
    message, asked = str(caught.value), last - first + 1
    assert message.startswith(f"runtime.placement.device_map.actor: '{written}' asks for {asked} {kind.upper()}")
    assert f"up to {kind}:{last}, but the cluster has {total} {kind.upper()}" in message
    for node in inventory:
        gpus, cpus = (f"{count} {word}{'s' * (count != 1)}" for count, word in zip(*sizes(node), strict=True))
        assert f"{node.address}: {gpus}, {cpus}" in message
    assert ("runtime.num_cpus" in message) == (kind == "cpu")
    assert "\n" not in message


def sizes(node: NodeInventory) -> tuple[tuple[int, int], tuple[str, str]]:
    return (node.num_gpus, node.num_cpus), ("GPU", "CPU")


def test_a_missing_gpu_is_told_in_one_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_placement(by_role(actor="gpu:0-3"), (NodeInventory("x", "10.0.0.1", 1, 16),), ROLES)
    assert str(caught.value) == (
        "runtime.placement.device_map.actor: 'gpu:0-3' asks for 4 GPUs up to gpu:3, but the cluster has 1 GPU "
        "(10.0.0.1: 1 GPU, 16 CPUs); take devices that are there, counted from gpu:0, or start more nodes"
    )


def test_a_large_cluster_is_told_in_short() -> None:
    inventory = tuple(NodeInventory(f"n{i}", f"10.0.0.{i}", 8, 96) for i in range(100))
    with pytest.raises(ConfigError, match=r"has 800 GPUs .*10\.0\.0\.7: 8 GPUs, 96 CPUs; 92 more nodes\)"):
        plan_placement(by_role(actor="gpu:800"), inventory, ROLES)
    with pytest.raises(ConfigError, match=r"the cluster has 0 CPUs \(no nodes\)"):
        plan_placement(by_role(actor="cpu:0"), (), ROLES)


def test_devices_are_numbered_over_the_cluster_and_slots_over_their_node() -> None:
    placement = plan_placement(by_role(actor="gpu:10,gpu:6-8", reward="cpu:15-16"), TWO_NODES, ROLES)
    assert slots_of(placement, "actor") == [("a", (6,)), ("a", (7,)), ("b", (0,)), ("b", (2,))]
    assert slots_of(placement, "reward") == [("a", (15,)), ("b", (0,))]
    assert placement.bundles[3:5] == (Bundle("b", gpus=1, cpus=0), Bundle("a", gpus=0, cpus=1))
    assert placement.bundles[3].resources == {"GPU": 1.0}
    assert placement.bundles[4].resources == {"CPU": 1.0}


def test_one_worker_a_node_has_all_cores_there() -> None:
    placement = plan_placement(mesh(pool("reward", "cpu:2-5", strategy="per_node")), MIXED, ROLES)
    assert slots_of(placement, "reward") == [("a", (2, 3)), ("b", (0, 1))]
    assert placement.bundles == (Bundle("a", 0, 2), Bundle("b", 0, 2))


def test_a_single_worker_has_all_devices_of_one_node_only() -> None:
    single = mesh(pool("reward", "cpu:4-6", strategy="single"))
    assert slots_of(plan_placement(single, MIXED, ROLES), "reward") == [("b", (0, 1, 2))]
    with pytest.raises(ConfigError) as caught:
        plan_placement(mesh(pool("reward", "cpu:3-4", strategy="single")), MIXED, ROLES)
    assert str(caught.value) == (
        "runtime.placement.mesh.0.strategy: 'single' puts one worker on one node, and 'cpu:3-4' lies on 2 (10.0.0.1: 1 GPU, 4 CPUs; "
        "10.0.0.2: 0 GPUs, 3 CPUs); write per_node, or take the devices of one node"
    )


@pytest.mark.parametrize("strategy", ["per_node", "single"])
def test_a_gpu_worker_has_one_gpu(strategy: Any) -> None:
    assert slots_of(plan_placement(mesh(pool("actor", "gpu:9", strategy=strategy)), TWO_NODES, ROLES), "actor") == [
        ("b", (1,))
    ]
    with pytest.raises(ConfigError, match=f"mesh.0.strategy: '{strategy}' gives a worker 2 GPUs of 'gpu:0-1'"):
        plan_placement(mesh(pool("actor", "gpu:0-1", strategy=strategy)), TWO_NODES, ROLES)


def test_a_pool_is_for_its_roles_or_else_for_the_role_of_its_name() -> None:
    pools = mesh(pool("train", "gpu:0", roles=("actor", "reference"), dtype="bfloat16"), pool("reward", "cpu:0"))
    placement = plan_placement(pools, TWO_NODES, ROLES)
    assert [(placed.role, placed.pool, placed.dtype) for placed in placement.roles] == [
        ("actor", "train", "bfloat16"),
        ("reference", "train", "bfloat16"),
        ("reward", "reward", None),
    ]
    assert placement.of("generator") is None


def test_colocated_roles_keep_their_own_precision_in_the_same_bundles() -> None:
    pools = mesh(pool("actor", "gpu:0-1", dtype="float32"), pool("reference", "gpu:1", "gpu:0", dtype="bfloat16"))
    placement = plan_placement(pools, TWO_NODES, ROLES)
    assert [placed.dtype for placed in placement.roles] == ["float32", "bfloat16"]
    assert placement.roles[0].slots == placement.roles[1].slots
    assert len(placement.bundles) == 2


def test_no_placement_places_nothing() -> None:
    assert plan_placement(PlacementSettings(), TWO_NODES, ROLES) == Placement()
    assert plan_placement(PlacementSettings(device_map={}), (), ROLES) == Placement()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (by_role(actor="gpu:0-3", rollout="gpu:4-7"), True),
        (by_role(actor="gpu:0-3", rollout="gpu:0-3"), False),
        (by_role(actor="gpu:0-3", rollout="gpu:2-3,gpu:0-1"), False),
        (by_role(actor="gpu:0", rollout="cpu:0"), True),
        (by_role(actor="gpu:0-3"), False),
        (by_role(rollout="cpu:0"), True),
        (mesh(pool("train", "gpu:0", roles=("actor", "rollout"))), False),
        (mesh(pool("train", "gpu:0", roles=("actor",)), pool("rollout", "gpu:1")), True),
        (PlacementSettings(), False),
    ],
)
def test_a_role_is_separate_where_its_devices_are_not_the_actors(chosen: PlacementSettings, expected: bool) -> None:
    assert chosen.separates("rollout") is expected
    assert chosen.separates("actor") is False


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("gpu:3-1", "device_map.actor names 'gpu:3-1', which ends before it begins; write gpu:1-3"),
        ("tpu:0", "device_map.actor names 'tpu:0', which is not a range of devices; write such as gpu:0-3"),
        ("", "device_map.actor names '', which is not a range"),
        ("gpu:0-3,8-11", "device_map.actor names '8-11', which is not a range"),
        ("gpu:-1", "device_map.actor names 'gpu:-1', which is not a range"),
        ("gpu:0-9999999", "device_map.actor names 'gpu:0-9999999', which is not a range"),
        ("gpu:0-3,gpu:3-4", "device_map.actor names gpu:3 2 times ('gpu:0-3,gpu:3-4'); name each device once"),
        ("gpu:0,cpu:0", "device_map.actor names GPUs and CPUs ('gpu:0,cpu:0'); give each kind a pool"),
    ],
)
def test_wrong_devices_are_named(devices: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        by_role(actor=devices)
    assert f"PlacementSettings: {message}" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        pool("actor", devices)
    assert message.replace("device_map.actor", "PoolSettings: devices") in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"device_map": {"actor": "gpu:0"}, "mesh": [{"name": "actor", "devices": ["gpu:0"]}]},
            "placement: device_map and mesh are both set; keep one and leave the other out",
        ),
        (
            {"device_map": {"actor": "gpu:0-3", "rollout": "gpu:2-5"}},
            "placement: 'actor' (gpu:0-3) and 'rollout' (gpu:2-5) share gpu:2 but not all of their devices; give them the same "
            "devices, or none in common",
        ),
        (
            {
                "mesh": [
                    {"name": "actor", "devices": ["cpu:0-1"]},
                    {"name": "reward", "devices": ["cpu:0-1"], "strategy": "per_node"},
                ]
            },
            "placement: 'actor' and 'reward' share their devices but split them differently (per_device, per_node); give them one "
            "strategy",
        ),
        (
            {"mesh": [{"name": "actor", "devices": ["gpu:0"]}, {"name": "actor", "devices": ["gpu:1"]}]},
            "placement: mesh has 2 pools named 'actor'; give each a name of its own",
        ),
        (
            {
                "mesh": [
                    {"name": "a", "devices": ["gpu:0"], "roles": ["actor"]},
                    {"name": "actor", "devices": ["gpu:1"]},
                ]
            },
            "placement: mesh names role 'actor' 2 times (pools a, actor); name it once",
        ),
        (
            {"mesh": [{"name": "actor", "devices": ["gpu:0", "tpu:1"]}]},
            "placement.mesh.0: devices names 'tpu:1', which is not a range of devices; write such as gpu:0-3, gpu:4 or cpu:0-7",
        ),
        (
            {"mesh": [{"name": "actor", "devices": ["gpu:0"], "strategy": "node"}]},
            "placement.mesh.0.strategy is 'node'; write one of per_device, per_node, single (the nearest is per_node)",
        ),
        ({"device_map": {"actor": 3}}, "placement.device_map.actor is 3 and must be a string; correct the value"),
    ],
)
def test_a_placement_that_contradicts_itself_is_refused_in_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(Root, {"placement": values})
    assert str(caught.value) == message


def test_an_unknown_role_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_placement(by_role(actor="gpu:0", refrence="gpu:1"), TWO_NODES, ROLES)
    assert str(caught.value) == (
        "runtime.placement.device_map.refrence: 'refrence' is not a role of this run, whose roles are actor, rollout, reference, "
        "reward, generator; the nearest is 'reference'"
    )
    with pytest.raises(
        ConfigError, match=r"runtime.placement.mesh.0: 'pool' is not a role .* actor; take it out or use one"
    ):
        check_roles(mesh(pool("pool", "gpu:0")), ["actor"])
    check_roles(mesh(pool("pool", "gpu:0", roles=("actor",))), ["actor"])


def test_it_is_read_from_yaml_and_overrides_and_written_back(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("{}\n")
    (tmp_path / "mesh.yaml").write_text(
        "placement:\n  bind_numa: false\n  mesh:\n"
        "    - {name: train, devices: ['gpu:0-3', 'gpu:8-11'], roles: [actor, reference], dtype: bfloat16}\n"
        "    - {name: reward, devices: ['cpu:0-7'], strategy: per_node}\n"
    )

    def load(name: str, *overrides: str) -> PlacementSettings:
        return load_config(Root, config_path=tmp_path, config_name=name, overrides=overrides).placement

    split = by_role(actor="gpu:0-3", rollout="gpu:4-7,gpu:12-15")
    assert load("none") == PlacementSettings()
    assert load("none", "+placement.device_map={actor: 'gpu:0-3', rollout: 'gpu:4-7,gpu:12-15'}") == split
    assert load("none", "placement.device_map.actor=cpu:0-1") == by_role(actor="cpu:0-1")
    written = load("mesh")
    assert written.mesh[0] == pool("train", "gpu:0-3", "gpu:8-11", roles=("actor", "reference"), dtype="bfloat16")
    assert (written.mesh[1].strategy, written.bind_numa) == ("per_node", False)
    (tmp_path / "again.yaml").write_text(to_yaml(Root(placement=written)))
    assert load("again") == written


used_slots = st.lists(
    st.tuples(
        st.sampled_from(["n0", "n1", "n2", "n3", "lost"]),
        st.sampled_from(["gpu", "cpu"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True).map(tuple),
    ).map(lambda values: Slot(*values)),
    max_size=12,
)


@few
@given(inventories, used_slots, st.sampled_from(["gpu", "cpu"]), st.integers(1, 3))
def test_a_new_slot_is_free_and_on_the_least_loaded_node_that_has_room(
    alive: Inventory, in_use: list[Slot], kind: Kind, count: int
) -> None:
    lost = Slot("lost", kind, tuple(range(count)), bundle=7)
    free = {
        node.node_id: [
            index
            for index in range(node.num_gpus if kind == "gpu" else node.num_cpus)
            if not any(s.node_id == node.node_id and s.kind == kind and index in s.indices for s in in_use)
        ]
        for node in alive
    }
    load = {node.node_id: sum(slot.node_id == node.node_id for slot in in_use) for node in alive}
    roomy = [node for node, indices in free.items() if len(indices) >= count]
    slot = plan_new_slot(lost, alive, in_use)
    if not roomy:
        assert slot is None
        return
    least = min(load[node] for node in roomy)
    chosen = next(node for node in roomy if load[node] == least)
    assert slot == Slot(chosen, kind, tuple(free[chosen][:count]), bundle=None)


def test_new_workers_spread_over_the_least_loaded_nodes() -> None:
    placement = plan_placement(by_role(actor="gpu:0-1", rollout="gpu:2"), TWO_NODES, ROLES)
    in_use = [slot for placed in placement.roles for slot in placed.slots]
    for _ in range(5):
        slot = plan_new_slot(in_use[2], TWO_NODES, in_use)
        assert slot is not None
        in_use.append(slot)
    assert [(slot.node_id, slot.indices) for slot in in_use[3:]] == [
        ("b", (0,)),
        ("b", (1,)),
        ("b", (2,)),
        ("a", (3,)),
        ("b", (3,)),
    ]


def test_a_lost_node_is_replaced_by_what_is_left_and_by_nothing_where_all_is_taken() -> None:
    placement = plan_placement(by_role(actor="gpu:0-7", rollout="gpu:8-13"), TWO_NODES, ROLES)
    actor, rollout = placement.of("actor"), placement.of("rollout")
    assert actor is not None and rollout is not None
    in_use, alive = list(rollout.slots), TWO_NODES[1:]
    found = []
    for lost in actor.slots:
        slot = plan_new_slot(lost, alive, in_use)
        found.append(slot and slot.indices)
        in_use += [slot] if slot else []
    assert found == [(6,), (7,), None, None, None, None, None, None]


def test_the_number_of_workers_is_known_where_no_node_decides_it() -> None:
    by_role = PlacementSettings(device_map={"actor": "gpu:0-3,gpu:8", "reward": "cpu:0"})
    assert [by_role.num_workers(role) for role in ("actor", "reward", "rollout")] == [5, 1, 1]
    pools = PlacementSettings(
        mesh=(
            PoolSettings(name="actor", devices=("cpu:0-5",), strategy="per_node"),
            PoolSettings(name="reward", devices=("cpu:8-9",), strategy="single"),
        )
    )
    assert [pools.num_workers(role) for role in ("actor", "reward")] == [None, 1]
