"""How rewards and lengths are spread over the samples of a step, and how that changes over the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridflow.batch import Batch
from hybridflow.observability.report.charts import Axis, Tick, label_ticks, step_axis, step_ticks
from hybridflow.observability.report.reading import RunRecord
from hybridflow.observability.report.series import choose_range, format_number, nice_ticks
from hybridflow.observability.samples import list_steps, spread_path

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MAX_BINS = 20
MAX_LAYERS = 8
"""Different values that are shown each by itself."""
MAX_SHOWN_STEPS = 96
Column = Literal["reward", "length"]


@dataclass(frozen=True)
class Layer:
    """An area over the steps as an SVG path; opacity of its fill; label, '' where it has none."""

    path: str
    opacity: float
    label: str = ""


@dataclass(frozen=True)
class Fan:
    """How values are spread over the steps: bands of quantiles and a median, or where there are few values the share of each.

    unit: of the axis.
    """

    layers: tuple[Layer, ...]
    median: str
    unit: str
    told: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class Bin:
    """One bin: its label and the share of rows in it, early and late, in percent of the highest bin; and both in words."""

    label: str
    early: float
    late: float
    told: str


@dataclass(frozen=True)
class Spread:
    """One quantity. fan: None where only one step was kept. early, late: the steps that the histogram compares."""

    title: str
    unit: str
    fan: Fan | None
    bins: tuple[Bin, ...]
    early: int
    late: int
    rows: int


def build_spreads(record: RunRecord) -> list[Spread]:
    """Reward and length, as far as they were kept."""
    directory = record.path / "samples"
    kept = [step for step in list_steps(directory) if record.first_step <= step <= record.last_step]
    batches = _read(directory, thin(kept, MAX_SHOWN_STEPS), record)
    spreads: list[Spread | None] = [
        _build("Reward", "reward", "reward", batches, record),
        _build("Response length", "tokens", "length", batches, record),
    ]
    return [spread for spread in spreads if spread is not None]


def thin(steps: list[int], count: int) -> list[int]:
    """About evenly chosen, with the first and the last."""
    if len(steps) <= count:
        return steps
    return [steps[index] for index in np.unique(np.linspace(0, len(steps) - 1, count).astype(int))]


def _read(directory: Path, steps: list[int], record: RunRecord) -> dict[int, Batch]:
    batches: dict[int, Batch] = {}
    for step in steps:
        try:
            batch = Batch.from_parquet(spread_path(directory, step))
        except (OSError, ValueError):
            record.notes.append(f"samples/{spread_path(directory, step).name} cannot be read.")
            continue
        if {"reward", "length"} <= set(batch.column_names):
            batches[step] = batch
    return batches


def _build(title: str, unit: str, column: Column, batches: dict[int, Batch], record: RunRecord) -> Spread | None:
    values = {step: np.asarray(batch.numpy(column), np.float64) for step, batch in batches.items()}
    values = {step: row[np.isfinite(row)] for step, row in values.items()}
    values = {step: row for step, row in values.items() if row.size}
    if not values:
        return None
    early, late = min(values), max(values)
    bins = _bin(values[early], values[late], whole=column == "length")
    return Spread(title, unit, _fan(values, unit, record), bins, early, late, len(values[late]))


def _fan(values: dict[int, NDArray[np.float64]], unit: str, record: RunRecord) -> Fan | None:
    if len(values) < 2:
        return None
    distinct = np.unique(np.concatenate(list(values.values())))
    xs = step_axis(record).place(np.array(list(values)))
    if len(distinct) <= MAX_LAYERS:
        return _shares(distinct, values, xs, record)
    quantiles = np.array([np.quantile(row, QUANTILES) for row in values.values()])
    low, high = choose_range(float(quantiles.min()), float(quantiles.max()), from_zero=True)
    y = Axis(low, high, 100, flip=True)
    lines = [y.place(quantiles[:, index]) for index in range(len(QUANTILES))]
    ticks = nice_ticks(low, high, 4)
    return Fan(
        layers=(Layer(_band(xs, lines[0], lines[4]), 0.16, "middle 90 %"), Layer(_band(xs, lines[1], lines[3]), 0.34, "middle 50 %")),
        median="M" + "L".join(f"{x:.1f} {at:.1f}" for x, at in zip(xs, lines[2], strict=True)),
        unit=unit,
        told="Line: the median.",
        x_ticks=step_ticks(record),
        y_ticks=y.ticks(ticks, label_ticks(ticks, unit)),
    )  # fmt: skip


def _shares(
    distinct: NDArray[np.float64], values: dict[int, NDArray[np.float64]], xs: NDArray[np.float64], record: RunRecord
) -> Fan:
    """One layer a value, the greatest lowest, so that an area that grows upwards is a reward that does."""
    shares = np.array([[float((row == value).mean()) for value in distinct[::-1]] for row in values.values()])
    tops = np.concatenate([np.zeros((len(xs), 1)), shares.cumsum(axis=1)], axis=1)
    y = Axis(0.0, 1.0, 100, flip=True)
    ticks = nice_ticks(0.0, 1.0, 4)
    layers = tuple(
        Layer(
            _band(xs, y.place(tops[:, index]), y.place(tops[:, index + 1])),
            round(0.95 - 0.83 * index / max(len(distinct) - 1, 1), 3),
            format_number(value),
        )
        for index, value in enumerate(distinct[::-1])
    )
    return Fan(layers, "", "share", "", step_ticks(record), y.ticks(ticks, label_ticks(ticks, "share")))


def _band(xs: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> str:
    there = [f"{x:.1f} {at:.1f}" for x, at in zip(xs, high, strict=True)]
    back = [f"{x:.1f} {at:.1f}" for x, at in zip(xs[::-1], low[::-1], strict=True)]
    return "M" + "L".join([*there, *back]) + "Z"


def _bin(early: NDArray[np.float64], late: NDArray[np.float64], *, whole: bool) -> tuple[Bin, ...]:
    """The same bins for both: each value its own where there are few, else `MAX_BINS` of equal width."""
    distinct = np.unique(np.concatenate([early, late]))
    if len(distinct) <= 12:
        labels = [format_number(value) for value in distinct]
        shares = [[float((row == value).mean()) for value in distinct] for row in (early, late)]
    else:
        low, high = float(distinct[0]), float(distinct[-1])
        width = max((high - low) / MAX_BINS, 1e-12)
        if whole:
            width = float(-(-int(high - low + 1) // MAX_BINS))
            high = low + width * -(-int(high - low + 1) // int(width))
        edges = np.linspace(low, high, max(2, round((high - low) / width) + 1))
        labels = [f"{format_number(a)} to {format_number(b)}" for a, b in zip(edges[:-1], edges[1:], strict=True)]
        shares = [(np.histogram(row, edges)[0] / len(row)).tolist() for row in (early, late)]
    top = max(*shares[0], *shares[1], 1e-9)
    return tuple(
        Bin(label, round(a / top * 100, 2), round(b / top * 100, 2), f"{a:.1%} early, {b:.1%} late")
        for label, a, b in zip(labels, *shares, strict=True)
    )
