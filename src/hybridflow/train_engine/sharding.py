"""Sharding: FSDP2 over a model's layers, and which part of each weight a rank holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from hybridflow.models import LanguageModel
from hybridflow.train_engine.mesh import Layout, Mesh
from hybridflow.types import Box

SplitAxis = Literal["tensor", "shard"]


@dataclass(frozen=True)
class Split:
    """One way in which a weight is cut up over ranks: `Split(dim=0, axis="shard")`."""

    dim: int
    axis: SplitAxis


def compute_box(global_shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """The box that remains after cutting up dimensions one after the other.

    cuts: (dim, degree, index) each; a later one cuts what an earlier one has left, as FSDP2 does with the parts of tensor parallel.

    Invariants, as of `torch.chunk`: over all indices the boxes of a cut fill what is cut, in order, without overlap; all but the last that
    is not empty are of one length, and those after it are empty, at the end.
    """
    offsets, shape = [0] * len(global_shape), list(global_shape)
    for dim, degree, index in cuts:
        length = -(-shape[dim] // degree)
        start = min(index * length, shape[dim])
        offsets[dim] += start
        shape[dim] = min(length, shape[dim] - start)
    return Box(tuple(global_shape), tuple(offsets), tuple(shape))


def read_splits(weight: Tensor) -> tuple[Split, ...]:
    """How a live weight is split, in the order of the cuts; nothing where it is whole on each rank."""
    if not isinstance(weight, DTensor):
        return ()
    names = weight.device_mesh.mesh_dim_names or ()
    found = {
        name: Split(dim % weight.dim(), "tensor" if name == "tensor" else "shard")
        for name, placement in zip(names, weight.placements, strict=True)
        if (dim := _split_dim(placement)) is not None
    }
    return tuple(found[name] for name in ("tensor", "shard") if name in found)


def _split_dim(placement: Any) -> int | None:
    # Strided shards have a `dim` too, and are no kind of Shard in every version of torch.
    return None if placement.is_replicate() else int(placement.dim)


def compute_cuts(splits: Sequence[Split], layout: Layout, rank: int) -> list[tuple[int, int, int]]:
    """The cuts of `compute_box` that leave this rank's part."""
    at = layout.coordinates(rank)
    index = {"tensor": at.tensor, "shard": at.shard}
    return [(split.dim, layout.degree(split.axis), index[split.axis]) for split in splits]


def owns_box(splits: Sequence[Split], layout: Layout, rank: int) -> bool:
    """Whether this rank is the one to write its part: of the ranks that hold the same, the first."""
    at, axes = layout.coordinates(rank), {split.axis for split in splits}
    first_along_tensor = "tensor" in axes or at.tensor == 0
    return first_along_tensor and at.replicate == 0 and ("shard" in axes or at.shard == 0)


def local_part(weight: Tensor) -> Tensor:
    """This rank's part of a weight or gradient: its own storage, without gradient."""
    if isinstance(weight, DTensor):
        with torch.no_grad():
            return weight.to_local()
    return weight.detach()


def gather_whole(part: Tensor, global_shape: Sequence[int], splits: Sequence[Split], mesh: Mesh) -> Tensor:
    """The whole tensor from the parts of all ranks, on each; they all call. The part itself where it is not split."""
    cuts = compute_cuts(splits, mesh.layout, mesh.world.rank)
    for index, split in reversed(list(enumerate(splits))):
        whole = compute_box(global_shape, cuts[:index]).shape
        part = _gather_dim(part, split, whole[split.dim], mesh)
    return part


def _gather_dim(part: Tensor, split: Split, length: int, mesh: Mesh) -> Tensor:
    ranks = mesh.tensor if split.axis == "tensor" else mesh.shard
    longest = -(-length // ranks.size)
    padded = part.new_zeros([*part.shape[: split.dim], longest, *part.shape[split.dim + 1 :]])
    padded.narrow(split.dim, 0, part.shape[split.dim]).copy_(part)
    return torch.cat(ranks.gather_tensors(padded), dim=split.dim).narrow(split.dim, 0, length)


def apply_sharding(
    model: LanguageModel, mesh: Mesh, *, reshard_after_forward: bool, offload_parameters: bool = False
) -> None:
    """Splits weights and their gradients over the `shard` axis: each decoder layer together, and what is outside the layers.

    Trained bfloat16 weights become float32 shards, which are their own masters; computing stays in the model's dtype. Gradients are
    summed in float32 (float64) over `shard` and `replicate`, never averaged: the loss is divided once, by its count over all ranks.
    From here on passes go through `model.run`, which gathers embedding, final norm and head; a tied embedding is one weight there.
    """
    shard = functools.partial(
        _shard_module,
        mesh=mesh.device_mesh(*(("replicate", "shard") if mesh.layout.replicate > 1 else ("shard",))),
        precision=_build_precision(model.dtype),
        offload=CPUOffloadPolicy(pin_memory=model.device.type != "cpu") if offload_parameters else OffloadPolicy(),
    )
    for layer in decoder_layers(model):
        shard(layer, reshard_after_forward=reshard_after_forward)
    # What is outside the layers is needed again at once in backward.
    shard(model.module, reshard_after_forward=False)
    # FSDP2 gathers what lies outside the layers around named methods of the root alone; `model.run` is the way in.
    model.module.run_pass = MethodType(_run_pass, model.module)
    register_fsdp_forward_method(model.module, "run_pass")
    model.runner = model.module.run_pass


def decoder_layers(model: LanguageModel) -> list[nn.Module]:
    """The layers whose weights travel together."""
    return list(model.module.base_model.layers)


def iter_sharded(model: LanguageModel) -> Iterator[FSDPModule]:
    """The modules that `apply_sharding` has made; none in a model that is whole."""
    return (module for module in model.module.modules() if isinstance(module, FSDPModule))


def free_gathered(model: LanguageModel) -> None:
    """Frees what passes without a backward have left whole; the next pass gathers the weights as they are then."""
    for module in iter_sharded(model):
        module.reshard()


def set_last_backward(model: LanguageModel, is_last: bool) -> None:
    """Whether the coming backward is the last of a mini-batch: gradients cross `replicate` there alone."""
    for module in iter_sharded(model):
        module.set_requires_all_reduce(is_last, recurse=False)


def _build_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    # Inputs are left alone: what a layer gets is what it gets in one process.
    if dtype in (torch.float32, torch.float64):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _shard_module(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool,
) -> None:
    _hold_masters(module)
    sharded = fully_shard(
        module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=offload
    )
    # Gloo can neither average nor multiply while it sums.
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(1.0)


def _hold_masters(module: nn.Module) -> None:
    """Trained bfloat16 weights in float32, which FSDP2 keeps its gradients in too. Layer by layer: the whole model might not fit."""
    # New parameters, one for all places of a tied weight: the type of a DTensor does not change with its data.
    held: dict[Parameter, Parameter] = {}
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            if weight.requires_grad and weight.dtype == torch.bfloat16:
                if weight not in held:
                    held[weight] = Parameter(weight.detach().float())
                setattr(part, name, held[weight])


def _run_pass(_: nn.Module, forward: Callable[[], Any]) -> Any:
    return forward()
