"""The layout of ranks: who computes what and who stores what, as a plan before launch and as live groups after it.

Two views of the same ranks, `tensor` fastest in both. Computing: data x sequence x tensor; ranks of one `data` index have the same rows,
those along `sequence` each a part of the packed tokens, those along `tensor` the same tokens and a part of each matrix. Storing:
replicate x shard x tensor, where replicate x shard is data x sequence in one line; weights, gradients and moments are split over `shard`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from hybridflow.config import AliasChoices, ConfigError, Field, settings
from hybridflow.train_engine.ranks import Ranks

Axis = Literal["world", "tokens", "data", "sequence", "tensor", "replicate", "shard"]
_STORAGE: tuple[Axis, ...] = ("replicate", "shard", "tensor")
_KEY = "train.parallel_config"


@settings
class ParallelConfig:
    """How trainers share one model, e.g. `ParallelConfig(tp=2, shard=0)`; a degree of 1 costs nothing."""

    tp: int = Field(default=1, ge=1, validation_alias=AliasChoices("tp", "tensor_parallel_size"))
    """Tensor parallel: trainers that hold a part of each matrix, and work on the same tokens."""
    sp: int = Field(default=1, ge=1, validation_alias=AliasChoices("sp", "sequence_parallel_size"))
    """Sequence parallel: trainers that hold a part of the packed tokens; attention exchanges heads for tokens between them."""
    dp: int | None = Field(default=None, ge=1, validation_alias=AliasChoices("dp", "data_parallel_size"))
    """Data parallel: groups of trainers with rows of their own. null takes all trainers / (tp * sp); a number has to agree with that."""
    shard: int = Field(default=1, ge=0, validation_alias=AliasChoices("shard", "shard_size"))
    """Over how many of the dp * sp trainers weights, gradients and optimizer state are split (FSDP2). 1 keeps them whole on each (DDP),
    0 splits over all; in between, as many whole copies as fit (HSDP)."""


@dataclass(frozen=True)
class Coordinates:
    """Where a rank is: `Coordinates(data=1, sequence=0, tensor=1, replicate=0, shard=2)`."""

    data: int
    sequence: int
    tensor: int
    replicate: int
    shard: int


@dataclass(frozen=True)
class Layout:
    """Degrees along the axes: `Layout(data=2, sequence=2, tensor=2, shard=4)` is of 8 ranks, with one copy of the weights."""

    data: int = 1
    sequence: int = 1
    tensor: int = 1
    shard: int = 1

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.data * self.sequence * self.tensor

    @property
    def replicate(self) -> int:
        """How many ranks hold the same weights."""
        return self.data * self.sequence // self.shard

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all weights and all of the optimizer."""
        return self.shard == 1 and self.tensor == 1

    def degree(self, axis: Axis) -> int:
        """How many ranks there are along the axis; `tokens` is data x sequence."""
        return self._shape(axis)[1]

    def coordinates(self, rank: int) -> Coordinates:
        """Where this rank is."""
        return Coordinates(
            data=self._index("data", rank),
            sequence=self._index("sequence", rank),
            tensor=self._index("tensor", rank),
            replicate=self._index("replicate", rank),
            shard=self._index("shard", rank),
        )

    def partition(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups that differ along this axis alone, each ascending."""
        outer, degree, inner = self._shape(axis)
        cube = np.arange(self.size).reshape(outer, degree, inner).transpose(0, 2, 1).reshape(-1, degree)
        return tuple(tuple(group) for group in cube.tolist())

    def _index(self, axis: Axis, rank: int) -> int:
        _, degree, inner = self._shape(axis)
        return rank // inner % degree

    def _shape(self, axis: Axis) -> tuple[int, int, int]:
        """Ranks outside, along and inside the axis."""
        inner = {
            "world": 1,
            "tokens": self.tensor,
            "data": self.sequence * self.tensor,
            "sequence": self.tensor,
            "tensor": 1,
            "replicate": self.shard * self.tensor,
            "shard": self.tensor,
        }[axis]
        degree = {
            "world": self.size,
            "tokens": self.data * self.sequence,
            "data": self.data,
            "sequence": self.sequence,
            "tensor": self.tensor,
            "replicate": self.replicate,
            "shard": self.shard,
        }[axis]
        return self.size // (degree * inner), degree, inner


def plan_layout(config: ParallelConfig, size: int) -> Layout:
    """The layout of `size` trainers; ConfigError names the key that does not fit them."""
    model = config.tp * config.sp
    if size == 1 and (needed := compute_least_trainers(config)) > 1:
        raise ConfigError(_explain_alone(config, needed))
    if size % model:
        raise ConfigError(
            f"{_KEY}: tp={config.tp} and sp={config.sp} need a multiple of {model} trainers, but there are {size}; "
            "lower one of them or place more trainers"
        )
    data = size // model
    if config.dp is not None and config.dp != data:
        raise ConfigError(
            f"{_KEY}.dp: {config.dp} does not fit {size} trainers with tp={config.tp} and sp={config.sp}; set it to {data} or leave it out"
        )
    shard = config.shard or data * config.sp
    if data * config.sp % shard:
        raise ConfigError(
            f"{_KEY}.shard: {shard} does not divide the {_count_trainers(data * config.sp)} of dp * sp; "
            "set it to 0 for all, 1 for none, or a divisor"
        )
    return Layout(data=data, sequence=config.sp, tensor=config.tp, shard=shard)


def compute_least_trainers(config: ParallelConfig) -> int:
    """The smallest number of trainers that the degrees fit: `tp=2, shard=3` takes 6."""
    shard = config.shard or 1
    return config.tp * config.sp * (config.dp or shard // math.gcd(shard, config.sp))


def _explain_alone(config: ParallelConfig, needed: int) -> str:
    degrees = {"tp": config.tp, "sp": config.sp, "dp": config.dp, "shard": config.shard}
    asked = " and ".join(f"{name}={degree}" for name, degree in degrees.items() if degree and degree > 1)
    return (
        f"{_KEY}: {asked} takes {needed} trainers or a multiple, but there is 1 trainer; more need runtime.kind=ray with "
        f'runtime.placement.device_map={{actor: "gpu:0-{needed - 1}"}} (or cpu:0-{needed - 1})'
    )


def _count_trainers(count: int) -> str:
    return f"{count} trainer{'' if count == 1 else 's'}"


def check_heads(layout: Layout, num_heads: int, num_kv_heads: int) -> None:
    """Raises ConfigError where attention heads cannot be split like this.

    Along `tensor` every rank holds whole query and kv heads. Along `sequence` what is left of the query heads is split again; kv heads are
    split, or repeated where they are fewer than the degree.
    """
    for name, count in (("attention heads", num_heads), ("key-value heads", num_kv_heads)):
        if count % layout.tensor:
            fitting = [degree for degree in _divisors(num_heads) if num_kv_heads % degree == 0]
            raise ConfigError(
                f"{_KEY}.tp: {layout.tensor} does not divide the model's {count} {name}; with {num_heads} attention heads and "
                f"{num_kv_heads} key-value heads, set it to {_join_or(fitting)}"
            )
    heads, kv_heads = num_heads // layout.tensor, num_kv_heads // layout.tensor
    fitting = [degree for degree in _divisors(heads) if kv_heads % degree == 0 or degree % kv_heads == 0]
    if layout.sequence not in fitting:
        why = (
            f"does not divide the {heads} attention heads of a rank"
            if heads % layout.sequence
            else f"neither divides the {kv_heads} key-value heads of a rank nor is a multiple of them"
        )
        raise ConfigError(
            f"{_KEY}.sp: {layout.sequence} {why}; with {heads} attention heads and {kv_heads} key-value heads a rank, "
            f"set it to {_join_or(fitting)}"
        )


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def _join_or(degrees: list[int]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, degrees)
    return f"{', '.join(others)} or {last}" if others else last


class Mesh:
    """The live ranks of a layout, by axis; from `build_mesh`. An axis of degree 1 has no group and its collectives are the identity.

    layout, at: the plan, and where this rank is in it.
    tokens:     data x sequence: the ranks that see different tokens of one mini-batch with the same part of each matrix.
    """

    def __init__(self, layout: Layout, axes: dict[Axis, Ranks], root: DeviceMesh | None = None) -> None:
        self.layout = layout
        self.world, self.tokens, self.data, self.sequence, self.tensor, self.replicate, self.shard = (
            axes[axis] for axis in get_args(Axis)
        )
        self.at = layout.coordinates(self.world.rank)
        self._root = root

    def device_mesh(self, *axes: Axis) -> DeviceMesh:
        """torch's mesh of one or more of `replicate`, `shard`, `tensor`, of degrees above 1, in this order; all are parts of one."""
        if self._root is None or any(self.layout.degree(axis) == 1 for axis in axes):
            raise ValueError(
                f"no device mesh of {axes} in {self.layout}: a degree of 1 has none; see the degrees beforehand"
            )
        return self._root if self._root.mesh_dim_names == axes else self._root[axes]


def build_mesh(ranks: Ranks, layout: Layout, device: torch.device) -> Mesh:
    """Makes the groups of all axes; every rank calls, with the same layout."""
    if ranks.size != layout.size:
        raise ValueError(f"{layout} is of {layout.size} ranks, but there are {ranks.size}; plan it for these")
    made: dict[tuple[tuple[int, ...], ...], Ranks] = {}
    axes: dict[Axis, Ranks] = {}
    for axis in get_args(Axis):
        parts = layout.partition(axis)
        if parts not in made:
            made[parts] = ranks.split(parts)
        axes[axis] = made[parts]
    return Mesh(layout, axes, _build_device_mesh(ranks, layout, device.type))


def _build_device_mesh(ranks: Ranks, layout: Layout, device_type: str) -> DeviceMesh | None:
    if layout.is_whole:
        return None
    names = tuple(axis for axis in _STORAGE if layout.degree(axis) > 1)
    groups = [ranks.build_group(layout.partition(axis)) for axis in names]
    if len(names) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    cube = torch.arange(layout.size).reshape([layout.degree(axis) for axis in names])
    return DeviceMesh.from_group(groups, device_type, mesh=cube, mesh_dim_names=names)
