"""Gradients summed over ranks, in buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.train_engine.ranks import Ranks

BUCKET_BYTES = 32 * 2**20


def sum_gradients(gradients: Sequence[Tensor], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replaces each tensor by its sum over ranks, in place; every rank gives tensors of the same forms in the same order.

    Collectives: one for each bucket of `plan_buckets`. Nothing waits for the device.
    """
    for bucket in plan_buckets([(gradient.dtype, gradient.nbytes) for gradient in gradients], bucket_bytes):
        _sum_bucket(gradients[bucket], ranks)


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


def _sum_bucket(gradients: Sequence[Tensor], ranks: Ranks) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    ranks.sum_(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))
