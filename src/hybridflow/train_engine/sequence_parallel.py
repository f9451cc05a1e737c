"""Ulysses attention: between the ranks of an axis, tokens are split everywhere but inside attention, where heads are.

Dimensions: T packed tokens (of this rank outside attention, of all ranks inside), H query heads, N kv heads, K head size, P ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.models.attention import AttentionForm, AttentionPlan
from hybridflow.train_engine.ranks import Ranks


class UlyssesPlan:
    """Attention over tokens that lie split over the ranks of an axis, as an attention plan around that of all tokens.

    inner: over all T tokens of the micro-batch, in the order of ranks.
    axis:  each rank calls with 1 / P of the tokens, as many on each, and all heads. P divides H.

    An all-to-all gives each rank all tokens of H / P query heads and of the kv heads that these share; another one brings their output
    back. Source: DeepSpeed-Ulysses, arXiv:2309.14509. Differs from it where P does not divide N: each kv head is sent P / gcd(N, P) times,
    and its gradient is the sum over the copies. Layers compile around the exchange, which meets in forward, in backward, and where layers
    are computed again.
    """

    def __init__(self, inner: AttentionPlan, axis: Ranks) -> None:
        if axis.group is None:
            raise ValueError(f"rank {axis.rank} of {axis.size} has no group to attend with; join the ranks first")
        self.inner = inner
        self.group_name: str = axis.group.group_name
        # A compiled layer takes the length of a tuple as fixed, and a number as one that may vary.
        self._ranks = tuple(range(axis.size))

    def attend(
        self, module: nn.Module, query_THK: Tensor, key_TNK: Tensor, value_TNK: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attention output [T, H, K] of this rank's tokens."""
        degree = len(self._ranks)
        copies = count_kv_copies(key_TNK.shape[1], degree)
        rows = query_THK, _repeat_heads(key_TNK, copies), _repeat_heads(value_TNK, copies)
        query, key, value = _exchange([_split_heads(part, degree) for part in rows], self.group_name, degree)
        out = self.inner.attend(module, query, key, value, form)
        (joined,) = _exchange([out], self.group_name, degree)
        return _join_heads(joined, degree)


def count_kv_copies(num_kv_heads: int, degree: int) -> int:
    """How often each kv head is repeated, in place, so that a split over `degree` ranks gives each those of its query heads.

    The fewest, which divides the group of query heads of a kv head wherever `degree` divides the query heads. So a rank's query heads fall
    into equal groups again, one for each of its kv heads.
    """
    return degree // math.gcd(num_kv_heads, degree)


def _repeat_heads(rows_TNK: Tensor, copies: int) -> Tensor:
    if copies == 1:
        return rows_TNK
    return rows_TNK.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2)


def _split_heads(rows_THK: Tensor, degree: int) -> Tensor:
    """[P * T, H / P, K]: of every rank's heads, this rank's tokens."""
    return rows_THK.unflatten(1, (degree, -1)).transpose(0, 1).flatten(0, 1)


def _join_heads(rows_THK: Tensor, degree: int) -> Tensor:
    """The reverse, once the heads of all ranks are here."""
    return rows_THK.unflatten(0, (degree, -1)).transpose(0, 1).flatten(1, 2)


# An operator of its own: the compiler computes no collective of torch's again, so under full checkpointing it would keep what each layer
# exchanges, as much again as what the layers' inputs and the work of one take.
@torch.library.custom_op("hybridflow::exchange", mutates_args=())
def _exchange(parts: list[Tensor], group_name: str, degree: int) -> list[Tensor]:
    """Part p of each tensor, split by rows into `degree` equal parts, goes to rank p, and what rank p sent here becomes part p."""
    # All are under way before the first is waited for.
    coming = [
        torch.ops._c10d_functional.all_to_all_single(part.contiguous(), sizes, sizes, group_name)
        for part, sizes in [(part, [part.shape[0] // degree] * degree) for part in parts]
    ]
    return [torch.ops._c10d_functional.wait_tensor(part) for part in coming]


@_exchange.register_fake
def _(parts: list[Tensor], group_name: str, degree: int) -> list[Tensor]:
    return [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.group_name, ctx.degree = inputs


def _exchange_back(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    """A permutation that is its own inverse, hence its own adjoint."""
    return _exchange(grads, ctx.group_name, ctx.degree), None, None


_exchange.register_autograd(_exchange_back, setup_context=_keep_group)
