"""From trainers that share a model to the whole copies that they generate from: layouts of the live engine, and the transports between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
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


class WeightSync:
    """Fills this rank's copy of the model from the parts of all ranks. Every rank has one and calls `push`.

    engine:    whose weights go out, sharded or split; they keep their addresses, so this is built once.
    model:     the copy, filled in place: the trained adapter is merged into its weights, or where it has an adapter of its own, only that
               is filled, and its weights have to be the trained model's base already.
    timeout_s: bound of each wait.
    layout:    which box of each weight every rank's copy holds; None: they are whole.
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
        free_gathered(engine.model)
        self._engine, self._timeout_s, self._bucket_bytes = engine, timeout_s, bucket_bytes
        adapter, copied = adapter_weights(engine.model), adapter_weights(model)
        if copied:
            self._factors = None
            self.target = TargetWeights(copied)
            self._transport = self._connect(adapter, self._find_masters(adapter), self.target)
            return
        live = {plain_name(name): weight for name, weight in engine.model.module.named_parameters()}
        base = {name: weight for name, weight in live.items() if name not in adapter}
        self._factors = self._build_factors(adapter)
        parts = self._build_parts(base)
        self.target = TargetWeights(dict(model.module.named_parameters()))
        self._transport = self._connect(base, parts, self.target, layout)

    @property
    def plan(self) -> WeightPlan:
        """Of the base, merged, or of the adapter alone."""
        return self._transport.plan

    def push(self, version: int) -> Switch:
        """Brings the copy to this version; a collective. Returns when the trained weights may change again."""
        free_gathered(self._engine.model)
        if self._factors is None:
            return self._transport.push(version)
        # The small factor of each update is needed whole by every shard of its matrix.
        first = self._factors.transport.push(version)
        switch = self._transport.push(version)
        moved, seconds = first.bytes_moved + switch.bytes_moved, first.seconds + switch.seconds
        return replace(switch, bytes_moved=moved, seconds=seconds, memory_before=first.memory_before)

    def forget(self) -> None:
        """Takes an older version next, as after a restored snapshot."""
        self.target.forget()
        if self._factors is not None:
            self._factors.target.forget()

    def _build_factors(self, adapter: Mapping[str, Parameter]) -> _Factors | None:
        """None without an adapter. A collective."""
        factors = {name: weight for name, weight in adapter.items() if ".lora_A." in name}
        if not factors:
            return None
        masters = self._find_masters(factors)
        whole = {
            name: torch.empty(weight.shape, dtype=torch.float32, device=local_part(weight).device)
            for name, weight in factors.items()
        }
        target = TargetWeights(whole)
        return _Factors(target, self._connect(factors, masters, target))

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

    def _connect(
        self,
        weights: Mapping[str, Parameter],
        parts: Mapping[str, Source],
        target: TargetWeights,
        layout: WeightLayout | None = None,
    ) -> CollectiveTransport:
        mesh = self._engine.mesh
        source = build_source_layout(weights, mesh.layout)
        dtypes = {name: buffer.dtype for name, buffer in target.buffers.items()}
        wanted = layout or build_layout(shapes_of(target.buffers), {}, dtypes, mesh.world.size)
        made = plan_weights(source, wanted, self._bucket_bytes)
        # The transport sees by itself where one group is all ranks.
        has_parts = bool(made.groups) and len(made.groups[0]) < mesh.world.size
        gang = Gang(
            mesh.world.rank,
            mesh.world.size,
            self._engine.model.device,
            self._timeout_s,
            group=mesh.world.group,
            gathering=mesh.world.build_group(made.groups) if has_parts else None,
        )
        return CollectiveTransport(made, (source, wanted), gang, parts, target)


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
