"""The layout of ranks: who computes what and who stores what, as a plan before launch and as live groups after it.

Two views of the same ranks, `tensor` fastest in both. Computing: data x sequence x tensor; ranks of one `data` index have the same rows,
those along `sequence` each a part of the packed tokens, those along `tensor` the same tokens and a part of each matrix. Storing:
replicate x shard x tensor, where replicate x shard is data x sequence in one line; weights, gradients and moments are split over `shard`.
"""

from __future__ import annotations

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
            f"{_KEY}.shard: {shard} does not divide the {data * config.sp} trainers of dp * sp; "
            "set it to 0 for all, 1 for none, or a divisor"
        )
    return Layout(data=data, sequence=config.sp, tensor=config.tp, shard=shard)


def check_heads(layout: Layout, num_heads: int, num_kv_heads: int) -> None:
    """Raises ConfigError where attention heads cannot be split like this.

    Along `tensor` every rank holds whole query and kv heads. Along `sequence` what is left of the query heads is split again; kv heads are
    split, or repeated where they are fewer than the degree.
    """
    for name, count in (("attention heads", num_heads), ("key-value heads", num_kv_heads)):
        if count % layout.tensor:
            raise ConfigError(
                f"{_KEY}.tp: {layout.tensor} does not divide the model's {count} {name}; set it to a divisor"
            )
    heads, kv_heads = num_heads // layout.tensor, num_kv_heads // layout.tensor
    if heads % layout.sequence:
        raise ConfigError(
            f"{_KEY}.sp: {layout.sequence} does not divide the {heads} attention heads of a rank; set it to a divisor"
        )
    if kv_heads % layout.sequence and layout.sequence % kv_heads:
        raise ConfigError(
            f"{_KEY}.sp: {layout.sequence} neither divides the {kv_heads} key-value heads of a rank nor is a multiple of them; "
            "set it to one that does"
        )


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
    if layout.shard == 1 and layout.tensor == 1:
        return None
    names = tuple(axis for axis in _STORAGE if layout.degree(axis) > 1)
    groups = [ranks.build_group(layout.partition(axis)) for axis in names]
    if len(names) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    cube = torch.arange(layout.size).reshape([layout.degree(axis) for axis in names])
    return DeviceMesh.from_group(groups, device_type, mesh=cube, mesh_dim_names=names)
