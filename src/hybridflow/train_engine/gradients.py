"""Gradients summed over ranks, in buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.train_engine.ranks import Ranks

BUCKET_BYTES = 32 * 2**20


def sum_gradients(gradients: Sequence[Tensor], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replaces each tensor by its sum over ranks, in place; every rank gives contiguous tensors of the same forms in the same order.

    Collectives: one for each bucket of `plan_buckets`. Nothing waits for the device. A tensor that is a bucket is summed where it lies; the
    others go through one buffer, since what a collective has been given may be held until it has run, and the host is far ahead.
    """
    buckets = [gradients[run] for run in plan_buckets([(g.dtype, g.nbytes) for g in gradients], bucket_bytes)]
    buffers = {bucket[0].dtype: 0 for bucket in buckets}
    for bucket in buckets:
        buffers[bucket[0].dtype] = max(buffers[bucket[0].dtype], 0 if len(bucket) == 1 else _count(bucket))
    staging = {dtype: gradients[0].new_empty(count, dtype=dtype) for dtype, count in buffers.items()}
    for bucket in buckets:
        if len(bucket) == 1:
            ranks.sum_(bucket[0])
        else:
            _sum_bucket(bucket, staging[bucket[0].dtype][: _count(bucket)], ranks)


def plan_buckets(sizes: Sequence[tuple[torch.dtype, int]], max_bytes: int) -> list[slice]:
    """Runs of neighbours that travel together.

    sizes: type and bytes of each tensor.

    Invariants: the runs follow one another and hold all tensors; each is of one type and of at most `max_bytes`, unless it is one
    tensor; two neighbouring runs of one type would be larger together.
    """
    buckets: list[slice] = []
    room = 0
    for index, (dtype, num_bytes) in enumerate(sizes):
        if buckets and num_bytes <= room and dtype == sizes[index - 1][0]:
            buckets[-1] = slice(buckets[-1].start, index + 1)
            room -= num_bytes
        else:
            buckets.append(slice(index, index + 1))
            room = max_bytes - num_bytes
    return buckets


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _sum_bucket(gradients: Sequence[Tensor], flat: Tensor, ranks: Ranks) -> None:
    torch.cat([gradient.reshape(-1) for gradient in gradients], out=flat)
    ranks.sum_(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))
