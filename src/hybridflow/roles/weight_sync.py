"""What trainers send, whole or in parts: layouts of the live engine, and the transports to the copies that they generate from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from hybridflow.models import LanguageModel, adapter_weights, plain_name
from hybridflow.train_engine import Layout, TrainEngine
from hybridflow.train_engine.sharding import compute_cuts, free_gathered, local_part, read_splits
from hybridflow.weights import (
    BUCKET_BYTES,
    CollectiveTransport,
    Cut,
    Gang,
    MergedPart,
    Source,
    Switch,
    TargetWeights,
    WeightLayout,
    WeightPlan,
    build_layout,
)
from hybridflow.weights.plan import plan_weights


class _Factors(NamedTuple):
    """Whole copies of the adapter's factors A, in float32, and what fills them."""

    target: TargetWeights
    transport: CollectiveTransport


class TrainedWeights:
    """This rank's parts of what a training engine sends. Every rank has one.

    engine:    whole, sharded or split; its weights keep their addresses, so this is built once.
    alone:     sends the tensors of the trained adapter alone; else all weights, the adapter merged into them as they are read.
    timeout_s: bound of each wait for another trainer.
    layout:    which box of each tensor every trainer has; `parts` are this one's.
    """

    def __init__(self, engine: TrainEngine, *, alone: bool, timeout_s: float, bucket_bytes: int = BUCKET_BYTES) -> None:
        free_gathered(engine.model)
        self._engine, self._timeout_s, self._bucket_bytes = engine, timeout_s, bucket_bytes
        adapter = adapter_weights(engine.model)
        live = {plain_name(name): weight for name, weight in engine.model.module.named_parameters()}
        sent = adapter if alone else {name: weight for name, weight in live.items() if name not in adapter}
        self._factors = None if alone else self._build_factors(adapter)
        self.layout = build_source_layout(sent, engine.mesh.layout)
        self.parts = self._find_masters(adapter) if alone else self._build_parts(sent)

    def gather_factors(self, version: int) -> Switch | None:
        """Makes the parts ready to be read; a collective. What it took where an adapter is merged: None where nothing moves."""
        free_gathered(self._engine.model)
        # The small factor of each update is needed whole by every shard of its matrix.
        return None if self._factors is None else self._factors.transport.push(version)

    def forget(self) -> None:
        """Takes an older version next, as after a restored snapshot."""
        if self._factors is not None:
            self._factors.target.forget()

    def _build_factors(self, adapter: Mapping[str, Parameter]) -> _Factors | None:
        """None without an adapter. A collective."""
        factors = {name: weight for name, weight in adapter.items() if ".lora_A." in name}
        if not factors:
            return None
        whole = {
            name: torch.empty(weight.shape, dtype=torch.float32, device=local_part(weight).device)
            for name, weight in factors.items()
        }
        source, target = build_source_layout(factors, self._engine.mesh.layout), TargetWeights(whole)
        layouts = source, build_layout(shapes_of(whole), {}, torch.float32, source.size)
        masters = self._find_masters(factors)
        transport = connect_trainers(self._engine, layouts, masters, target, self._timeout_s, self._bucket_bytes)
        return _Factors(target, transport)

    def _find_masters(self, names: Iterable[str]) -> dict[str, Source]:
        return {name: self._engine.optimizer.weights[name].master for name in names}

    def _build_parts(self, base: Mapping[str, Parameter]) -> dict[str, Source]:
        """This rank's part of each weight, those that an adapter changes computed as they are read."""
        parts: dict[str, Source] = {name: local_part(weight) for name, weight in base.items()}
        if self._factors is None:
            return parts
        scale, _ = self._engine.state_json()["adapter"]
        trained = self._engine.optimizer.weights
        for name, lora_A in self._factors.target.buffers.items():
            layer = name.removesuffix(".lora_A.weight")
            lora_B = trained[f"{layer}.lora_B.weight"].master
            parts[f"{layer}.weight"] = MergedPart(local_part(base[f"{layer}.weight"]), lora_A, lora_B, scale)
        return parts


class WeightSync:
    """Fills this rank's copy of the model from the parts of all ranks. Every rank has one and calls `push`.

    model:  the copy, filled in place: the trained adapter is merged into its weights, or where it has an adapter of its own, only that
            is filled, and its weights have to be the trained model's base already.
    layout: which box of each weight every rank's copy holds; None: they are whole.

    The rest is that of `TrainedWeights`.
    """

    def __init__(
        self,
        engine: TrainEngine,
        model: LanguageModel,
        *,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
        layout: WeightLayout | None = None,
    ) -> None:
        copied = adapter_weights(model)
        self._trained = TrainedWeights(engine, alone=bool(copied), timeout_s=timeout_s, bucket_bytes=bucket_bytes)
        self.target = TargetWeights(copied or dict(model.module.named_parameters()))
        size = engine.mesh.world.size
        layouts = self._trained.layout, layout or build_replica_layout(self.target.buffers).repeat(size)
        self._transport = connect_trainers(engine, layouts, self._trained.parts, self.target, timeout_s, bucket_bytes)

    @property
    def plan(self) -> WeightPlan:
        """Of the base, merged, or of the adapter alone."""
        return self._transport.plan

    def push(self, version: int) -> Switch:
        """Brings the copy to this version; a collective. Returns when the trained weights may change again."""
        first = self._trained.gather_factors(version)
        return self._transport.push(version).after(first)

    def forget(self) -> None:
        """Takes an older version next, as after a restored snapshot."""
        self.target.forget()
        self._trained.forget()


def connect_trainers(
    engine: TrainEngine,
    layouts: tuple[WeightLayout, WeightLayout],
    parts: Mapping[str, Source],
    target: TargetWeights,
    timeout_s: float,
    bucket_bytes: int,
) -> CollectiveTransport:
    """The transport between the ranks of a training engine, each of which has something to fill. A collective."""
    world = engine.mesh.world
    made = plan_weights(*layouts, bucket_bytes)
    # The transport sees by itself where one group is all ranks.
    has_parts = bool(made.groups) and len(made.groups[0]) < world.size
    gathering = world.build_group(made.groups) if has_parts else None
    gang = Gang(world.rank, world.size, engine.model.device, timeout_s, group=world.group, gathering=gathering)
    return CollectiveTransport(made, layouts, gang, parts, target)


def build_replica_layout(weights: Mapping[str, Tensor]) -> WeightLayout:
    """Of a rank that holds these whole."""
    return build_layout(shapes_of(weights), {}, {name: weight.dtype for name, weight in weights.items()}, 1)


def build_source_layout(weights: Mapping[str, Parameter], layout: Layout) -> WeightLayout:
    """Which box of each live parameter every rank holds."""
    cuts = {}
    for name, weight in weights.items():
        splits = read_splits(weight)
        by_rank = [compute_cuts(splits, layout, rank) for rank in range(layout.size)]
        cuts[name] = [
            Cut(split.dim, layout.degree(split.axis), tuple(ranks[place][2] for ranks in by_rank))
            for place, split in enumerate(splits)
        ]
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    return build_layout(shapes_of(weights), cuts, dtypes, layout.size)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Whole shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
