"""Gradients summed over ranks, in buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.train_engine.ranks import Ranks

BUCKET_BYTES = 32 * 2**20


def sum_gradients(masters: Sequence[Tensor], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replaces `grad` of each master by its sum over ranks; one that no rank's gradient reached keeps None.

    Collectives: one for the flags of what was reached, and one for each bucket of `plan_buckets`. Nothing waits for the device.
    """
    if ranks.size == 1:
        return
    reached = torch.tensor([master.grad is not None for master in masters], dtype=torch.int32)
    ranks.sum_(reached)
    gradients = [_own_gradient(master) for master, count in zip(masters, reached.tolist(), strict=True) if count]
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


def _own_gradient(master: Tensor) -> Tensor:
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def _sum_bucket(gradients: Sequence[Tensor], ranks: Ranks) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    ranks.sum_(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))
