"""Which rank holds which box of which tensor: of the trainers, and of the rollout. Plain records and numbers, no process group.

Ranks are numbered over all that take part: trainers, and rollout processes apart from them where there are some.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.config import HybridflowError
from hybridflow.types import Box

VOCABULARY = ("embed_tokens", "lm_head")
KV_PROJECTIONS = ("k_proj", "v_proj")
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}

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

    def repeat(self, times: int) -> Placement:
        """See `WeightLayout.repeat`."""
        return Placement(self.global_shape, np.tile(self.offsets, (times, 1)), np.tile(self.shape, (times, 1)))

    def among(self, first: int, size: int) -> Placement:
        """See `WeightLayout.among`."""
        rows = ((first, size - first - len(self.shape)), (0, 0))
        return Placement(self.global_shape, np.pad(self.offsets, rows), np.pad(self.shape, rows))


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor in a layout: who has which box of it, and in which type."""

    placement: Placement
    dtype: torch.dtype


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

    def repeat(self, times: int) -> WeightLayout:
        """Of so many replicas, one after the other, what this layout says of one."""
        held = {name: Held(held.placement.repeat(times), held.dtype) for name, held in self.tensors.items()}
        return WeightLayout(times * self.size, held)

    def among(self, first: int, size: int) -> WeightLayout:
        """The same ranks numbered from `first` among `size`, of whom the others hold nothing."""
        held = {name: Held(held.placement.among(first, size), held.dtype) for name, held in self.tensors.items()}
        return WeightLayout(size, held)

    def write(self) -> str:
        """What `read_layout` takes: JSON, compressed, since tensors of a kind are written alike."""
        tensors = {
            name: [
                str(held.dtype),
                held.placement.global_shape,
                held.placement.offsets.tolist(),
                held.placement.shape.tolist(),
            ]
            for name, held in self.tensors.items()
        }
        return base64.b85encode(zlib.compress(json.dumps({"size": self.size, "tensors": tensors}).encode())).decode()

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
    """Tensors without cuts are whole on each rank of `ranks`."""
    held = {}
    for name, shape in shapes.items():
        dtype = dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]
        held[name] = Held(compute_placement(shape, cuts.get(name, ()), size, ranks), dtype)
    return WeightLayout(size, held)


def read_layout(written: str) -> WeightLayout:
    """What `WeightLayout.write` has written, on another rank."""
    found = json.loads(zlib.decompress(base64.b85decode(written)))
    tensors = {}
    for name, (dtype, global_shape, offsets, shape) in found["tensors"].items():
        boxes = [np.array(rows, np.int64).reshape(found["size"], len(global_shape)) for rows in (offsets, shape)]
        tensors[name] = Held(Placement(tuple(global_shape), *boxes), _DTYPES[dtype])
    return WeightLayout(found["size"], tensors)


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
