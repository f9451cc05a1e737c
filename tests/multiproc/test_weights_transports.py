"""Weights between real processes: bit-equal whatever the layouts, versions that rise, memory that does not, and breaks that are told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Place, run_ranks
from torch import Tensor

from hybridflow.algorithms.losses import SFTLoss
from hybridflow.batch import Batch
from hybridflow.models import LoraSettings, fresh_model
from hybridflow.roles.weight_sync import WeightSync
from hybridflow.train_engine import OptimizerSettings, ParallelConfig, TrainEngine, TrainSettings, join_ranks
from hybridflow.types import PeerLostError
from hybridflow.weights import (
    CollectiveTransport,
    Gang,
    LayoutError,
    MergedPart,
    TargetWeights,
    TornWeightsError,
    VersionError,
    WeightLayout,
    plan_rollout,
    plan_trainers,
    read_tensor_dims,
)
from hybridflow.weights.plan import WeightPlan, plan_weights

STYLES = {
    "layers.*.q_proj": "colwise",
    "layers.*.up_proj": "colwise",
    "layers.*.gate_proj": "colwise",
    "layers.*.down_proj": "rowwise",
}
SHAPES: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (43, 16), "norm.weight": (16,), "lm_head.weight": (43, 16)}
for _layer in range(3):
    SHAPES |= {
        f"layers.{_layer}.self_attn.q_proj.weight": (16, 16), f"layers.{_layer}.self_attn.q_proj.bias": (16,),
        f"layers.{_layer}.mlp.gate_proj.weight": (28, 16), f"layers.{_layer}.mlp.up_proj.weight": (28, 16),
        f"layers.{_layer}.mlp.down_proj.weight": (16, 28), f"layers.{_layer}.q_norm.weight": (5,),
    }  # fmt: skip
DIMS = read_tensor_dims(SHAPES, STYLES)
BUCKET_BYTES = 3000
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Route:
    """From where to where: `Route(4, {"shard": 2, "tensor": 2}, ranks=(0, 1, 2, 3), tensor=2)`."""

    size: int
    trainers: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    tensor: int = 1
    gathers: bool | None = None

    @property
    def layouts(self) -> tuple[WeightLayout, WeightLayout]:
        source = plan_trainers(SHAPES, DIMS, **dict(self.trainers), size=self.size)
        return source, plan_rollout(SHAPES, DIMS, ranks=self.ranks, size=self.size, tensor=self.tensor)


def trainers(**degrees: int) -> tuple[tuple[str, int], ...]:
    return tuple(degrees.items())


ROUTES: dict[int, dict[str, Route]] = {
    2: {
        "shard 2 to a replica on one of them": Route(2, trainers(shard=2), (1,)),
        "shard 2 to 2 replicas": Route(2, trainers(shard=2), (0, 1)),
        "shard 2 to 2 replicas, message by message": Route(2, trainers(shard=2), (0, 1), gathers=False),
        "shard 2 to tensor 2": Route(2, trainers(shard=2), (0, 1), tensor=2),
        "tensor 2 to 2 replicas": Route(2, trainers(tensor=2), (0, 1)),
        "tensor 2 to tensor 2": Route(2, trainers(tensor=2), (0, 1), tensor=2),
        "one to another": Route(2, trainers(), (1,)),
    },
    4: {
        "shard 2 x tensor 2 to 4 replicas": Route(4, trainers(shard=2, tensor=2), (0, 1, 2, 3)),
        "shard 2 x tensor 2 to 2 of tensor 2": Route(4, trainers(shard=2, tensor=2), (0, 1, 2, 3), tensor=2),
        "replicate 2 x shard 2 to 4 replicas": Route(4, trainers(replicate=2, shard=2), (0, 1, 2, 3)),
        "replicate 2 x shard 2 to tensor 4": Route(4, trainers(replicate=2, shard=2), (0, 1, 2, 3), tensor=4),
        "shard 2 to two others": Route(4, trainers(shard=2), (2, 3)),
        "shard 2 to tensor 2 of others": Route(4, trainers(shard=2), (3, 2), tensor=2),
        "shard 3 to one other": Route(4, trainers(shard=3), (3,)),
    },
}  # fmt: skip


def build_whole(version: int) -> dict[str, Tensor]:
    """All weights of a version, in float32, the same in every process."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut(layout: WeightLayout, rank: int, whole: Mapping[str, Tensor], device: str = "cpu") -> dict[str, Tensor]:
    """A rank's own parts, where it has any."""
    parts = {}
    for name, held in layout.tensors.items():
        box = held.placement.box(rank)
        part = whole[name][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))]
        parts[name] = part.clone().to(device)
    return parts if any(part.numel() for part in parts.values()) else {}


def build_buffers(layout: WeightLayout, rank: int, device: str = "cpu") -> dict[str, Tensor]:
    """Storages full of NaN, so that what never arrives is seen."""
    boxes = {name: (held.placement.box(rank).shape, held.dtype) for name, held in layout.tensors.items()}
    return {
        name: torch.full(shape, torch.nan, dtype=dtype, device=device)
        for name, (shape, dtype) in boxes.items()
        if all(shape)
    }


def list_wrong(layout: WeightLayout, rank: int, buffers: Mapping[str, Tensor], version: int) -> list[str]:
    """Tensors that are not the version's, bit for bit."""
    wrong, whole = [], build_whole(version)
    for name, part in cut(layout, rank, whole).items():
        if part.numel() and not torch.equal(buffers[name].cpu(), part.to(torch.bfloat16)):
            wrong.append(name)
    return wrong


class Party:
    """One rank of a route, with what it trains and what it fills."""

    def __init__(
        self, route: Route, rank: int, gathering: dist.ProcessGroup | None = None, device: str = "cpu"
    ) -> None:
        self.layouts, self.rank = route.layouts, rank
        self.plan = plan_weights(*self.layouts, BUCKET_BYTES)
        self.sources = cut(self.layouts[0], rank, build_whole(0), device)
        buffers = build_buffers(self.layouts[1], rank, device)
        self.target = TargetWeights(buffers) if buffers else None
        gang = Gang(rank, route.size, torch.device(device), TIMEOUT_S, gathering=gathering)
        self.transport = CollectiveTransport(
            self.plan, self.layouts, gang, self.sources, self.target, gathers=route.gathers
        )

    def train(self, version: int) -> None:
        for name, part in cut(self.layouts[0], self.rank, build_whole(version)).items():
            self.sources[name].copy_(part)

    def sync(self, version: int) -> Any:
        return self.transport.push(version) if self.sources else self.transport.pull()

    def list_wrong(self, version: int) -> list[str]:
        return [] if self.target is None else list_wrong(self.layouts[1], self.rank, self.target.buffers, version)


def join(place: Place, device: str = "cpu") -> Any:
    return join_ranks(
        rank=place.rank, size=place.size, rendezvous=place.rendezvous, device=torch.device(device), timeout_s=TIMEOUT_S
    )


def build_gathering(made: WeightPlan, rank: int) -> dist.ProcessGroup | None:
    groups = [dist.new_group(list(group)) for group in made.groups]
    return next((group for group, ranks in zip(groups, made.groups, strict=True) if rank in ranks), None)


def follow_routes(
    place: Place, routes: list[Route], kind: str = "cpu"
) -> list[tuple[list[str], list[int | None], int]]:
    """For each route: what was wrong after either of two versions, the versions at hand, and the bytes that came."""
    device = "cpu" if kind == "cpu" else f"cuda:{place.rank}"
    ranks, found = join(place, device), []
    for route in routes:
        party = Party(
            route, place.rank, build_gathering(plan_weights(*route.layouts, BUCKET_BYTES), place.rank), device
        )
        wrong, versions = [], []
        for version in (1, 2):
            party.train(version)
            switch = party.sync(version)
            assert switch.version == version
            wrong += party.list_wrong(version)
            versions.append(party.target.version if party.target else None)
        found.append((wrong, versions, switch.bytes_moved))
    ranks.leave()
    return found


@pytest.mark.parametrize("size", ROUTES)
def test_every_route_brings_the_bits_of_the_whole_model(size: int, tmp_path: Path) -> None:
    routes = ROUTES[size]
    by_rank = run_ranks(size, follow_routes, list(routes.values()), directory=tmp_path, timeout_s=60.0)
    check_routes(routes, by_rank)


def check_routes(routes: Mapping[str, Route], by_rank: list[Any]) -> None:
    """The bits of both versions on every rank that wants them, by the least of bytes."""
    assert all(found is not None for found in by_rank), "a rank died; its error is above"
    size = len(by_rank)
    for index, (name, route) in enumerate(routes.items()):
        found = [results[index] for results in by_rank]
        assert [wrong for wrong, _, _ in found] == [[]] * size, name
        assert [versions for _, versions, _ in found] == [
            [1, 2] if r in route.ranks else [None, None] for r in range(size)
        ]
        received = plan_weights(*route.layouts, BUCKET_BYTES).received
        assert [moved for _, _, moved in found] == received.tolist(), name


def test_the_routes_take_both_ways_and_several_buckets() -> None:
    plans = {
        name: plan_weights(*route.layouts, BUCKET_BYTES) for routes in ROUTES.values() for name, route in routes.items()
    }
    assert plans["replicate 2 x shard 2 to 4 replicas"].groups == ((0, 1), (2, 3))
    assert plans["shard 2 to 2 replicas"].groups and not plans["shard 2 to two others"].groups
    assert all(len(made.buckets) > 2 for name, made in plans.items() if made.bytes_moved > 4 * BUCKET_BYTES)


def push_many(place: Place, route: Route) -> tuple[list[int], list[float], list[str]]:
    ranks, party = join(place), Party(route, place.rank)
    versions, memory, wrong = [], [], []
    for version in range(1, 21):
        party.train(version)
        switch = party.sync(version)
        versions.append(switch.version)
        memory.append(switch.memory_after)
        wrong += party.list_wrong(version)
    ranks.leave()
    return versions, memory, wrong


def test_twenty_versions_in_a_row_take_no_more_memory_than_five(tmp_path: Path) -> None:
    route = Route(4, trainers(shard=2), (2, 3))
    for versions, memory, wrong in run_ranks(4, push_many, route, directory=tmp_path):
        assert versions == list(range(1, 21)) and wrong == []
        assert memory[-1] - memory[4] < 4 * 2**20


def refuse(place: Place) -> list[str]:
    """What is said where a rank offers an older version, or has another plan; and whether what was there stays."""
    ranks, route, said = join(place), Route(2, trainers(), (1,)), []
    party = Party(route, place.rank)
    party.train(5)
    party.sync(5)
    try:
        party.sync(4)
    except VersionError as error:
        said.append(str(error))
    if party.target is not None:
        party.target.check_whole()
        party.target.forget()
    party.train(4)
    party.sync(4)
    said += party.list_wrong(4)
    other = Party(Route(2, trainers(), (1,)), place.rank)
    other.plan = plan_weights(*other.layouts, BUCKET_BYTES + place.rank)
    gang = Gang(place.rank, 2, torch.device("cpu"), TIMEOUT_S)
    other.transport = CollectiveTransport(other.plan, other.layouts, gang, other.sources, other.target)
    try:
        other.sync(6)
    except LayoutError as error:
        said.append(str(error))
    ranks.leave()
    return said


def test_an_older_version_and_another_plan_are_refused_by_all(tmp_path: Path) -> None:
    for rank, (older, differs) in enumerate(run_ranks(2, refuse, directory=tmp_path)):
        assert older.startswith("version 4 of the weights was offered, but version 5 is here already")
        assert differs.startswith(f"ranks [{1 - rank}] have another plan than rank {rank}")


def break_off(place: Place) -> dict[str, Any]:
    """Rank 1 of the trainers dies in the middle of its second version."""
    join(place)
    party = Party(Route(3, trainers(shard=2), (2,)), place.rank)
    party.train(1)
    party.sync(1)
    party.train(2)
    if place.rank == 1:
        start = party.transport._start

        def die_at_third_bucket(bound: Any, calls: list[int] = []) -> Any:  # noqa: B006
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return start(bound)

        party.transport._start = die_at_third_bucket  # type: ignore[method-assign]
    started_s, found = time.monotonic(), {}
    try:
        party.sync(2)
    except PeerLostError as error:
        found["error"] = str(error)
    found["seconds"] = time.monotonic() - started_s
    if party.target is not None:
        found |= {"version": party.target.version, "wrong": party.list_wrong(1)}
        try:
            party.target.check_whole()
        except TornWeightsError as error:
            found["torn"] = str(error)
    return found


def test_a_sender_that_dies_in_the_middle_is_named_and_leaves_no_half_version_unseen(tmp_path: Path) -> None:
    _, dead, receiver = run_ranks(3, break_off, directory=tmp_path)
    assert dead is None
    assert receiver["error"].startswith(
        "rank 2 lost rank 1, which died, left or did not answer in time, while it waited for bucket"
    )
    assert "of version 2" in receiver["error"] and receiver["seconds"] < TIMEOUT_S + 5
    assert receiver["version"] == 1
    assert receiver["wrong"] and "version 2 broke off on its way in, over version 1" in receiver["torn"]


# --- adapters -------------------------------------------------------------------------------------------------------


def merge(place: Place) -> dict[str, Any]:
    """Shards of a matrix and of its adapter on two ranks, to a whole merged matrix on each."""
    ranks, shapes = join(place), {"layers.0.mlp.up_proj.weight": (28, 16), "norm.weight": (16,)}
    source = plan_trainers(shapes, {}, shard=2)
    target = plan_rollout(shapes, {}, ranks=(0, 1), size=2)
    base, lora_A, lora_B, norm = build_adapted()
    rows = slice(14 * place.rank, 14 * place.rank + 14)
    parts = {
        "layers.0.mlp.up_proj.weight": MergedPart(base[rows], lora_A, lora_B[rows], scale=2.0),
        "norm.weight": norm[8 * place.rank :][:8],
    }
    held = TargetWeights(build_buffers(target, place.rank))
    gang = Gang(place.rank, 2, torch.device("cpu"), TIMEOUT_S)
    made = plan_weights(source, target, 400)
    CollectiveTransport(made, (source, target), gang, parts, held).push(1)
    assert torch.equal(base, build_adapted()[0]) and len(made.buckets) > 2
    ranks.leave()
    return {name: buffer.float().numpy() for name, buffer in held.buffers.items()}


def build_adapted() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix with its adapter, and a norm."""
    generator = torch.Generator().manual_seed(0)
    base, lora_A, lora_B, norm = (
        torch.randn(shape, generator=generator) for shape in ((28, 16), (4, 16), (28, 4), (16,))
    )
    return base.bfloat16(), lora_A, lora_B, norm.bfloat16()


def test_an_adapter_arrives_merged_and_rounded_once(tmp_path: Path) -> None:
    base, lora_A, lora_B, norm = build_adapted()
    exact = base.double() + 2.0 * lora_B.double() @ lora_A.double()
    for buffers in run_ranks(2, merge, directory=tmp_path):
        merged = torch.from_numpy(buffers["layers.0.mlp.up_proj.weight"])
        # Half a step of bfloat16, and what float32 adds to it.
        assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
        assert torch.equal(torch.from_numpy(buffers["norm.weight"]), norm.float())


# --- live training engines ------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LIVE: dict[str, tuple[int, dict[str, int], LoraSettings | None]] = {
    "shard 2": (2, {"shard": 0}, None),
    "shard 2, adapter": (2, {"shard": 0}, LoraSettings(rank=4)),
    "tensor 2": (2, {"tp": 2}, None),
    "replicate 2, shard 2": (4, {"shard": 2}, None),
    "shard 2, tensor 2": (4, {"tp": 2, "shard": 2}, None),
    "replicate 2, shard 2, adapter": (4, {"shard": 2}, LoraSettings(rank=3)),
}


def sync_live(place: Place, names: list[str]) -> list[dict[str, Any]]:
    """After each of two optimizer steps, how far the copy is from the weights as they are gathered one by one."""
    ranks, found = join(place), []
    for name in names:
        _, parallel, lora = LIVE[name]
        settings = TrainSettings(
            micro_batch_tokens=32,
            optimizer=OptimizerSettings(lr=1e-2),
            parallel_config=ParallelConfig(**parallel),
            lora=lora,
        )
        engine = TrainEngine(fresh_model(CONFIG, seed=0, dtype=torch.bfloat16), settings, ranks)
        copied = fresh_model(CONFIG, seed=9, dtype=torch.bfloat16)
        sync = WeightSync(engine, copied, timeout_s=TIMEOUT_S, bucket_bytes=8192)
        gaps, moved = [], []
        for version in (1, 2):
            rows = [np.arange(3 + place.rank // parallel.get("tp", 1), 30, dtype=np.int32)]
            masks = [np.append(0, np.ones(len(rows[0]) - 1)).astype(np.uint8)]
            batch = Batch.from_columns(tokens=rows, loss_mask=masks, state=np.zeros(1, np.int8))
            engine.update(batch, SFTLoss())
            switch = sync.push(version)
            moved.append(switch.bytes_moved)
            own = dict(copied.module.named_parameters())
            whole = {weight: value.detach().clone() for weight, value in engine.iter_weights()}
            assert own.keys() == whole.keys()
            gaps.append(max(float((own[n] - whole[n]).abs().max() / whole[n].abs().max()) for n in whole))
        changed = sum(
            not torch.equal(own[n], w)
            for n, w in fresh_model(CONFIG, seed=0, dtype=torch.bfloat16).module.named_parameters()
        )
        found.append({"gaps": gaps, "moved": moved, "changed": changed, "metrics": sorted(switch.metrics())})
    ranks.leave()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_live_engine_fills_the_copy_with_what_it_would_gather_one_by_one(size: int, tmp_path: Path) -> None:
    names = [name for name, (ranks, _, _) in LIVE.items() if ranks == size]
    by_rank = run_ranks(size, sync_live, names, directory=tmp_path, timeout_s=90.0)
    assert all(found is not None for found in by_rank), "a rank died; its error is above"
    for results in by_rank:
        for name, found in zip(names, results, strict=True):
            # A product of a shard's rows may round otherwise than the whole one's: one step of bfloat16.
            assert max(found["gaps"]) <= (2**-8 if "adapter" in name else 0.0), name
            assert found["changed"] >= 14 and min(found["moved"]) > 0
            assert found["metrics"] == [
                "hybrid/bytes_moved", "hybrid/memory_after_bytes", "hybrid/memory_before_bytes", "hybrid/memory_peak_bytes",
                "hybrid/switch_ms",
            ]  # fmt: skip
