"""Sums of a loss over the micro-batches and ranks of one mini-batch, kept on the device until one wait at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from hybridflow.algorithms.losses import LossSum
from hybridflow.train_engine.mesh import Mesh
from hybridflow.train_engine.ranks import check_same
from hybridflow.train_engine.sharding import SplitAxis
from hybridflow.types import Metric, Metrics, Reduce

_WEIGHT_TOLERANCE = 1e-4
_NOTHING: Mapping[str, Tensor] = {}
_NO_CHECKSUMS: Mapping[tuple[SplitAxis, ...], Tensor] = {}


class LossTotals:
    """Adds up the `LossSum` of each micro-batch; `denominator` is what the whole mini-batch, of all ranks, is divided by."""

    def __init__(self, denominator: float, mesh: Mesh) -> None:
        self.denominator = denominator
        self._mesh = mesh
        self._names: list[tuple[str, Reduce]] = []
        self._parts: list[Tensor] = []
        self._values: list[list[float]] = []

    def add(self, loss_sum: LossSum) -> None:
        """Takes one micro-batch's sums; nothing is waited for."""
        names = [(name, metric.reduce) for name, metric in loss_sum.metrics.items()]
        if self._parts and names != self._names:
            raise ValueError(
                f"a loss gave the metrics {names}, and {self._names} before; give the same for every micro-batch"
            )
        self._names = names
        pairs = [(loss_sum.total, loss_sum.weight), *((m.value, m.weight) for m in loss_sum.metrics.values())]
        self._parts.append(torch.stack([scalar.detach().double() for pair in pairs for scalar in pair]))

    def read(
        self, same: Mapping[str, Tensor] = _NOTHING, checksums: Mapping[tuple[SplitAxis, ...], Tensor] = _NO_CHECKSUMS
    ) -> list[float]:
        """Waits for the device, once, and then for the other ranks, in one collective; returns the mean loss and the scalars `same`.

        same:      by name, what has to be the same on every rank; DriftError where it is not.
        checksums: of the weights, see `AdamW.compute_checksums`: the same on all ranks at one place along these axes.
        Raises ValueError where the loss's weights do not add up to the denominator: then it counted by another mask.
        """
        own = self._read_device([*same.values(), *checksums.values()])
        by_rank = self._mesh.world.gather(own)
        for column, name in enumerate(same, start=2):
            check_same(name, [numbers[column] for numbers in by_rank])
        for column, axes in enumerate(checksums, start=2 + len(same)):
            ranks = self._find_ranks(axes)
            check_same("the checksum of the weights", [by_rank[rank][column] for rank in ranks], ranks)
        # Ranks along `tensor` have all computed the same loss; one of them speaks.
        speaking = [by_rank[rank] for rank in self._find_ranks(("tensor",))]
        total, weight = (sum(numbers[column] for numbers in speaking) for column in (0, 1))
        if not abs(weight - self.denominator) <= _WEIGHT_TOLERANCE * self.denominator:
            raise ValueError(
                f"the loss's weights add up to {weight:.9g}, but loss_mask gives {self.denominator:.9g} over the mini-batch; "
                "a loss has to sum over mask_T with weights_T and return the sum of these weights"
            )
        return [total / self.denominator, *own[2 : 2 + len(same)]]

    def metrics(self) -> Metrics:
        """The loss's metrics over this rank's tokens, each reduced as it says; call `read` first. None on ranks that repeat another's.

        A sum or an extreme of nothing is NaN, and left out where other ranks have theirs.
        """
        metrics: Metrics = {}
        if self._mesh.at.tensor:
            return metrics
        for column, (name, reduce) in zip(range(2, 2 + 2 * len(self._names), 2), self._names, strict=True):
            pairs = [(part[column], part[column + 1]) for part in self._values]
            if self._mesh.tokens.size == 1 or reduce is Reduce.MEAN or any(weight for _, weight in pairs):
                metrics[name] = _reduce(pairs, reduce)
        return metrics

    def _find_ranks(self, axes: Sequence[SplitAxis]) -> list[int]:
        """The ranks that are at this one's place along these axes."""
        layout, at = self._mesh.layout, asdict(self._mesh.at)
        places = [asdict(layout.coordinates(rank)) for rank in range(layout.size)]
        return [rank for rank, place in enumerate(places) if all(place[axis] == at[axis] for axis in axes)]

    def _read_device(self, readings: Iterable[Tensor]) -> list[float]:
        """This rank's sum and weight of the loss, and the readings."""
        # Where shards are kept by the host, the gradient norm is there too.
        device = self._parts[0].device if self._parts else torch.device("cpu")
        scalars = [reading.detach().double().reshape(1).to(device) for reading in readings]
        flat = torch.cat([*self._parts, *scalars]).tolist()
        width = 2 + 2 * len(self._names)
        split = len(self._parts) * width
        self._values = [flat[start : start + width] for start in range(0, split, width)]
        return [*(sum(part[column] for part in self._values) for column in (0, 1)), *flat[split:]]


def _reduce(pairs: list[tuple[float, float]], reduce: Reduce) -> Metric:
    weight = sum(weight for _, weight in pairs)
    values = [value for value, weight in pairs if weight] or [math.nan]
    match reduce:
        case Reduce.MEAN:
            return Metric(sum(value for value, _ in pairs) / weight if weight else math.nan, weight, reduce)
        case Reduce.SUM:
            return Metric(sum(values), 1.0, reduce)
        case Reduce.MAX:
            return Metric(max(values), 1.0, reduce)
        case Reduce.MIN:
            return Metric(min(values), 1.0, reduce)
        case Reduce.LAST:
            return Metric(values[-1], 1.0, reduce)
