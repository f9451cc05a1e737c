"""Sums of a loss over the micro-batches of one mini-batch, kept on the device until one wait at the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridflow.algorithms.losses import LossSum
from hybridflow.types import Metric, Metrics, Reduce

_WEIGHT_TOLERANCE = 1e-4


class LossTotals:
    """Adds up the `LossSum` of each micro-batch; `denominator` is what the whole mini-batch is divided by."""

    def __init__(self, denominator: float) -> None:
        self.denominator = denominator
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

    def read(self, *readings: Tensor) -> list[float]:
        """Waits for the device, once; returns the mean loss, and the scalar `readings` with it.

        Raises ValueError where the loss's weights do not add up to the denominator: then it counted by another mask.
        """
        width = self._parts[0].numel()
        flat = torch.cat([*self._parts, *(reading.detach().double().reshape(1) for reading in readings)]).tolist()
        split = len(self._parts) * width
        self._values = [flat[start : start + width] for start in range(0, split, width)]
        total, weight = (sum(part[column] for part in self._values) for column in (0, 1))
        if not abs(weight - self.denominator) <= _WEIGHT_TOLERANCE * self.denominator:
            raise ValueError(
                f"the loss's weights add up to {weight:.9g}, but loss_mask gives {self.denominator:.9g} over the mini-batch; "
                "a loss has to sum over mask_T with weights_T and return the sum of these weights"
            )
        return [total / self.denominator, *flat[split:]]

    def metrics(self) -> Metrics:
        """The loss's metrics over the mini-batch, each reduced as it says; call `read` first."""
        columns = range(2, 2 + 2 * len(self._names), 2)
        return {
            name: _reduce([(part[column], part[column + 1]) for part in self._values], reduce)
            for (name, reduce), column in zip(self._names, columns, strict=True)
        }


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
