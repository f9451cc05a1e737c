"""Which rank holds which box of which tensor: of the trainers, and of the rollout. Plain records and numbers, no process group.

Ranks are numbered over all that take part: trainers, and rollout processes apart from them where there are some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.config import HybridflowError
from hybridflow.types import Box

VOCABULARY = ("embed_tokens", "lm_head")
KV_PROJECTIONS = ("k_proj", "v_proj")
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Joint matrices that rollout engines keep, as `fuse` takes them."""

Ints = NDArray[np.int64]


class LayoutError(HybridflowError, ValueError):
    """Layouts that no plan can lead from one to the other."""


@dataclass(frozen=True)
class Cut:
    """A dimension cut over ranks as torch.chunk cuts it: `Cut(dim=0, degree=2, index=(0, 1, 0, 1))`, of four ranks two with each part.

    index: by rank which part it holds.
    """

    dim: int
    degree: int
    index: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Placement:
    """The box of one tensor that each rank holds.

    offsets, shape: [ranks, dims]; a rank that holds nothing has a 0 in its shape.
    """

    global_shape: tuple[int, ...]
    offsets: Ints
    shape: Ints

    @property
    def counts(self) -> Ints:
        """[ranks] elements of each rank's box."""
        return self.shape.prod(axis=1)

    def box(self, rank: int) -> Box:
        """One rank's."""
        return Box(self.global_shape, tuple(self.offsets[rank].tolist()), tuple(self.shape[rank].tolist()))


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor in a layout: who has which box of it, in which type, and where it lies in whose storage.

    buffer: name of the storage that the box is a part of; with a storage of its own the tensor's name.
    at:     [ranks, dims] where in that storage the box begins: rows 8 to 11 of a joint matrix are at (8, 0).
    """

    placement: Placement
    dtype: torch.dtype
    buffer: str
    at: Ints


@dataclass(frozen=True, eq=False)
class WeightLayout:
    """All tensors by the names of the plain model, each once (a tied weight too), over `size` ranks."""

    size: int
    tensors: Mapping[str, Held]

    def select(self, names: Collection[str]) -> WeightLayout:
        """These tensors alone, such as those of an adapter; LayoutError for a name that is not there."""
        missing = sorted(set(names) - set(self.tensors))
        if missing:
            raise LayoutError(
                f"tensor '{missing[0]}' is not in the layout ({len(missing)} such); give names that it has"
            )
        return WeightLayout(self.size, {name: held for name, held in self.tensors.items() if name in names})

    def compute_bytes(self) -> Ints:
        """[ranks] bytes that each rank holds."""
        sizes = [held.placement.counts * held.dtype.itemsize for held in self.tensors.values()]
        return np.sum(sizes, axis=0, dtype=np.int64) if sizes else np.zeros(self.size, np.int64)


def compute_placement(
    global_shape: Sequence[int], cuts: Sequence[Cut], size: int, ranks: Sequence[int] | None = None
) -> Placement:
    """The boxes that remain after cutting up dimensions one after the other; a later cut cuts what an earlier one has left.

    ranks: those that hold anything; None: all.

    Invariants of each cut, as of torch.chunk: over all indices the parts fill what is cut, in order, without overlap; all but the last that
    is not empty are of one length, and those after it are empty, at the end.
    """
    if not global_shape:
        raise LayoutError("a tensor without dimensions has no boxes; give it one dimension of length 1")
    shape = np.tile(np.array(global_shape, np.int64), (size, 1))
    offsets = np.zeros_like(shape)
    for cut in cuts:
        length = -(-shape[:, cut.dim] // cut.degree)
        start = np.minimum(np.array(cut.index) * length, shape[:, cut.dim])
        offsets[:, cut.dim] += start
        shape[:, cut.dim] = np.minimum(length, shape[:, cut.dim] - start)
    if ranks is not None:
        shape[np.setdiff1d(np.arange(size), ranks)] = 0
    return Placement(tuple(global_shape), offsets, shape)


def build_layout(
    shapes: Mapping[str, Sequence[int]],
    cuts: Mapping[str, Sequence[Cut]],
    dtypes: Mapping[str, torch.dtype] | torch.dtype,
    size: int,
    ranks: Sequence[int] | None = None,
) -> WeightLayout:
    """A layout in which each tensor has a storage of its own; those without cuts are whole on each rank of `ranks`."""
    held = {}
    for name, shape in shapes.items():
        dtype = dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]
        placement = compute_placement(shape, cuts.get(name, ()), size, ranks)
        held[name] = Held(placement, dtype, name, np.zeros_like(placement.offsets))
    return WeightLayout(size, held)


def read_tensor_dims(
    names: Iterable[str], tensor_plan: Mapping[str, str], vocabulary: Collection[str] = VOCABULARY
) -> dict[str, int]:
    """Along which dimension tensor parallel splits a weight, for those that it splits.

    tensor_plan: a family's own, `{"layers.*.mlp.up_proj": "colwise"}`: by rows for column-wise, with the bias; by columns for row-wise,
                 whose bias is whole. What else it says leaves a weight whole.
    vocabulary:  ends of the modules that are split over the vocabulary whatever the plan says of them.
    """
    dims = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        styles = [style for pattern, style in tensor_plan.items() if fnmatchcase(module, f"*{pattern}")]
        if module.rpartition(".")[2] in vocabulary or "colwise" in styles:
            dims[name] = 0
        elif "rowwise" in styles and kind == "weight":
            dims[name] = 1
    return dims


def plan_trainers(
    shapes: Mapping[str, Sequence[int]],
    tensor_dims: Mapping[str, int],
    *,
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    dtype: torch.dtype = torch.float32,
    size: int | None = None,
) -> WeightLayout:
    """What ranks 0 to replicate * shard * tensor - 1 hold while training, `tensor` fastest: parts of matrices, and of these the rows of
    each shard (FSDP2).

    size: of all ranks, where more take part than train; None: these alone.
    """
    count = replicate * shard * tensor
    everyone = np.arange(size or count)
    at_tensor, at_shard = tuple((everyone % tensor).tolist()), tuple((everyone // tensor % shard).tolist())
    by_rows = [Cut(0, shard, at_shard)]
    cuts = {
        name: [Cut(tensor_dims[name], tensor, at_tensor), *by_rows] if name in tensor_dims else by_rows
        for name in shapes
    }
    return build_layout(shapes, cuts, dtype, size or count, range(count))


def plan_rollout(
    shapes: Mapping[str, Sequence[int]],
    tensor_dims: Mapping[str, int],
    *,
    ranks: Sequence[int],
    size: int,
    tensor: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    num_kv_heads: int | None = None,
) -> WeightLayout:
    """What rollout replicas hold: each `tensor` ranks, one after the other in `ranks`, have one copy of the model between them.

    num_kv_heads: of the model; where there are fewer than `tensor`, several ranks hold the same head. None: they are as many or more.
    """
    if len(ranks) % tensor:
        raise LayoutError(
            f"{len(ranks)} rollout ranks are no multiple of a tensor-parallel degree of {tensor}; give as many as the replicas need"
        )
    at = np.zeros(size, np.int64)
    at[list(ranks)] = np.arange(len(ranks)) % tensor
    repeated = None if num_kv_heads is None or num_kv_heads >= tensor else num_kv_heads
    cuts = {}
    for name, dim in tensor_dims.items():
        if repeated is not None and name.split(".")[-2] in KV_PROJECTIONS:
            cuts[name] = [Cut(dim, repeated, tuple((at * repeated // tensor).tolist()))]
        else:
            cuts[name] = [Cut(dim, tensor, tuple(at.tolist()))]
    return build_layout(shapes, cuts, dtype, size, ranks)


def fuse(layout: WeightLayout, joint: Mapping[str, Sequence[str]] = FUSED) -> WeightLayout:
    """The same boxes in joint storages, those of each rank one below the other: `{"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}`.

    A storage is named after its first part: `layers.0.mlp.gate_proj.weight` lies in `layers.0.mlp.gate_up_proj.weight`.
    """
    tensors = dict(layout.tensors)
    for whole, parts in joint.items():
        for first in [name for name in layout.tensors if _rename(name, parts[0], whole) != name]:
            rows = np.zeros(layout.size, np.int64)
            for name in (_rename(first, parts[0], part) for part in parts):
                held = layout.select([name]).tensors[name]
                at = held.at.copy()
                at[:, 0] = rows
                rows = rows + held.placement.shape[:, 0]
                tensors[name] = replace(held, buffer=_rename(first, parts[0], whole), at=at)
    return WeightLayout(layout.size, tensors)


def _rename(name: str, module: str, other: str) -> str:
    """The name with one module's path, `mlp.gate_proj`, in place of another's; as it is without it."""
    return f".{name}".replace(f".{module}.", f".{other}.")[1:]


def compute_buffer_shapes(layout: WeightLayout, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each storage that a rank needs for its boxes, by the storage's name."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for held in layout.tensors.values():
        if not held.placement.counts[rank]:
            continue
        ends = tuple((held.at[rank] + held.placement.shape[rank]).tolist())
        before = found.get(held.buffer, (ends, held.dtype))[0]
        found[held.buffer] = (tuple(map(max, ends, before)), held.dtype)
    return found
