"""Curves as SVG paths and the labels around them. A drawing is 1000 wide and 100 high; the page stretches it. Labels stand in percent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.observability.report.names import Name, name_metric
from hybridflow.observability.report.reading import RunRecord, Series
from hybridflow.observability.report.series import (
    BYTE_UNITS,
    choose_range,
    downsample,
    format_number,
    format_value,
    nice_ticks,
    running_mean,
    smoothing_width,
)

PLACES = 512
"""Places on the axis of a curve: its extremes within each are drawn."""
MAX_DOTS = 60
"""Values that are drawn as dots, too."""
MAX_BARS = 60
"""Bars of the chart of phases."""
DIGITS = 5
"""Of a value in a tooltip."""
NUM_COLORS = 10
"""Colours of phases, `.p0` to `.p9` in page.css; further phases begin again."""


@dataclass(frozen=True)
class Tick:
    """A label at a place of an axis, in percent from the left or the top."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A linear scale with its ticks; `flip` for one that rises upwards."""

    low: float
    high: float
    size: float
    flip: bool = False

    def place(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Where values stand in a drawing of `size`; the middle where the axis has one value."""
        span = self.high - self.low
        share = (values - self.low) / span if span else np.full(len(values), 0.5)
        return (1 - share if self.flip else share) * self.size

    def ticks(self, values: Iterable[float], labels: Iterable[str]) -> tuple[Tick, ...]:
        """Labels at values."""
        at = self.place(np.array(list(values))) * (100 / self.size)
        return tuple(Tick(round(float(place), 3), label) for place, label in zip(at, labels, strict=True))


@dataclass(frozen=True)
class Chart:
    """A metric's curve. raw: every value, or extremes of neighbours. smooth: running mean, or where there are few values, dots at each.

    first, latest: formatted values. bad: how many values were not finite. points: for the tooltip, see `_points`.
    """

    metric: str
    name: Name
    raw: str
    smooth: str
    dots: str
    width: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[float, ...]
    first: str
    latest: str
    count: int
    bad: int
    points: dict[str, Any]


def build_chart(metric: str, series: Series, record: RunRecord) -> Chart:
    """The curve of one metric over the steps of the run."""
    name = name_metric(metric)
    buckets = downsample(series, record.first_step, record.last_step, PLACES)
    x, finite = step_axis(record), np.isfinite(series.values)
    count, bad = int(finite.sum()), int((~finite).sum())
    if not len(buckets.steps):
        empty = Chart(metric, name, "", "", "", 1, (), (), (), "", "never finite", 0, bad, {})
        return empty
    low, high = choose_range(float(buckets.low.min()), float(buckets.high.max()), from_zero=True)
    if name.unit == "share":
        high = min(high, 1.0) if buckets.high.max() <= 1.0 else high
    y = Axis(low, high, 100, flip=True)
    width = smoothing_width(count)
    # The mean runs over places, each of which may stand for several steps.
    mean = running_mean(buckets.mean, max(1, width * len(buckets.steps) // max(count, 1) | 1)) if width > 1 else None
    ticks = nice_ticks(low, high, 4)
    xs = x.place(buckets.steps)
    return Chart(
        metric=metric,
        name=name,
        raw=_extremes_path(xs, y.place(buckets.low), y.place(buckets.high), buckets.breaks),
        smooth="" if mean is None else _path(xs, y.place(mean), buckets.breaks),
        dots=_dots(xs, y.place(buckets.mean)) if mean is None and len(xs) <= MAX_DOTS else "",
        width=width,
        x_ticks=step_ticks(record),
        y_ticks=y.ticks(ticks, label_ticks(ticks, name.unit)),
        marks=start_marks(record),
        first=format_value(float(series.values[finite][0]), name.unit),
        latest=format_value(float(series.values[finite][-1]), name.unit),
        count=count,
        bad=bad,
        points=_points(buckets.steps, buckets.low, buckets.high, mean),
    )


def step_axis(record: RunRecord) -> Axis:
    """Steps from left to right."""
    return Axis(record.first_step, record.last_step, 1000)


def step_ticks(record: RunRecord, *, of_bars: bool = False) -> tuple[Tick, ...]:
    """A few round steps, few enough for a phone. of_bars: a step has a width, and its label stands in its middle."""
    axis = Axis(record.first_step - 0.5, record.last_step + 0.5, 1000) if of_bars else step_axis(record)
    ticks = [tick for tick in nice_ticks(record.first_step, record.last_step, 5) if float(tick).is_integer()]
    return axis.ticks(ticks, [format_number(tick) for tick in ticks])


def start_marks(record: RunRecord) -> tuple[float, ...]:
    """Where the run went on after a stop, in percent."""
    steps = [line.get("step", 0) for line in record.history if line.get("event") == "start"]
    inside = [step for step in steps if isinstance(step, int) and record.first_step <= step < record.last_step]
    return tuple(round(float(at) / 10, 2) for at in step_axis(record).place(np.array([s for s in inside if s > 0])))


def label_ticks(ticks: Sequence[float], unit: str) -> list[str]:
    """Labels of an axis, which say where its ticks are (of bytes, tell them apart): with the unit where that scales them, else numbers
    alone, since the unit stands above the axis."""
    labels = [format_value(tick, unit) if unit in ("bytes", "share") else format_number(tick) for tick in ticks]
    if len(ticks) < 2:
        return labels
    scale, sign = _find_scale(max(ticks, key=abs), unit)
    step = float(min(np.diff(ticks)))
    if len(set(labels)) == len(labels) and (unit == "bytes" or _are_exact(labels, ticks, scale, step)):
        return labels
    decimals = _count_decimals(step / scale)
    return [f"{tick / scale:,.{decimals}f}{sign}" for tick in ticks]


def _are_exact(labels: Sequence[str], ticks: Sequence[float], scale: float, step: float) -> bool:
    told = (float(label.split()[0].replace(",", "")) * scale for label in labels)
    return all(abs(value - tick) <= 1e-6 * step for value, tick in zip(told, ticks, strict=True))


def _count_decimals(step: float) -> int:
    """That write multiples of a step: two digits of it, or one where there is no other, since steps are 1, 2, 2.5 or 5."""
    decimals = max(0, math.ceil(-math.log10(step)))
    return decimals if math.isclose(round(step, decimals), step, rel_tol=1e-6) else decimals + 1


def _find_scale(largest: float, unit: str) -> tuple[float, str]:
    """What the numbers of an axis are divided by, and what stands behind them."""
    if unit == "bytes":
        power = min(int(math.log(max(abs(largest), 1.0), 1024)), len(BYTE_UNITS) - 1)
        return 1024.0**power, f" {BYTE_UNITS[power]}"
    return (0.01, " %") if unit == "share" else (1.0, "")


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _path(xs: NDArray[np.float64], ys: NDArray[np.float64], breaks: NDArray[np.bool_]) -> str:
    words = []
    for index, (x, y, broken) in enumerate(zip(xs, ys, breaks, strict=True)):
        words.append(f"{'M' if index == 0 or broken else 'L'}{_number(x)} {_number(y)}")
    return "".join(words)


def _extremes_path(
    xs: NDArray[np.float64], lows: NDArray[np.float64], highs: NDArray[np.float64], breaks: NDArray[np.bool_]
) -> str:
    words: list[str] = []
    for index, (x, low, high, broken) in enumerate(zip(xs, lows, highs, breaks, strict=True)):
        # Up in one place and down in the next, so that the line between them is short.
        first, second = (low, high) if index % 2 else (high, low)
        words.append(f"{'M' if index == 0 or broken else 'L'}{_number(x)} {_number(first)}")
        if first != second:
            words.append(f"V{_number(second)}")
    return "".join(words)


def _dots(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> str:
    return "".join(f"M{_number(x)} {_number(y)}h0" for x, y in zip(xs, ys, strict=True))


def _points(
    steps: NDArray[np.int64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    mean: NDArray[np.float64] | None,
) -> dict[str, Any]:
    """`s` steps, `l` least and `h` greatest values there (`h` is left out where all are equal), `m` running means."""
    points: dict[str, Any] = {"s": steps.tolist(), "l": _rounded(low)}
    if (low != high).any():
        points["h"] = _rounded(high)
    if mean is not None:
        points["m"] = _rounded(mean)
    return points


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


@dataclass(frozen=True)
class Phase:
    """A phase of the steps. seconds: over the run. share: of all time that is accounted for. color: number of its colour."""

    name: str
    seconds: str
    per_step: str
    share: float
    color: int


@dataclass(frozen=True)
class Bar:
    """A part of a stacked bar, in the units of a drawing."""

    x: float
    y: float
    width: float
    height: float
    color: int


@dataclass(frozen=True)
class PhaseChart:
    """Where the time of steps goes. overlapping: phases run beside each other, and add up to more than the steps."""

    phases: tuple[Phase, ...]
    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    steps_per_bar: int
    overlapping: bool


_ORDER = ("rollout", "score", "update", "evaluate", "write", "save", "report", "export", "between", "other")


def build_phases(record: RunRecord) -> PhaseChart | None:
    """The phases of a run, None where none was timed."""
    timed = {
        name[5:-2]: series
        for name, series in record.metrics.items()
        if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"
    }
    whole = record.metrics.get("time/step_s")
    if not timed or record.last_step < 1:
        return None
    bars = min(MAX_BARS, record.last_step - record.first_step + 1)
    names = sorted(timed, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))
    seconds = {name: _per_bar(timed[name], record, bars) for name in names}
    counts = np.maximum(_per_bar(Series(*_ones(record)), record, bars), 1)
    total = sum(seconds.values(), np.zeros(bars))
    overlapping = False
    if whole is not None:
        rest = _per_bar(whole, record, bars) - total
        overlapping = bool(rest.sum() < -0.02 * total.sum())
        if not overlapping:
            names, seconds["other"] = [*names, "other"], np.maximum(rest, 0.0)
    heights = {name: values / counts for name, values in seconds.items()}
    top = max(float(sum(heights.values(), np.zeros(bars)).max()), 1e-9) * 1.05
    ticks = nice_ticks(0.0, top, 4)
    y = Axis(0.0, top, 100, flip=True)
    return PhaseChart(
        phases=_list_phases(names, seconds, record),
        bars=_stack(names, heights, top),
        x_ticks=step_ticks(record, of_bars=True),
        y_ticks=y.ticks(ticks, [format_number(tick) for tick in ticks]),
        steps_per_bar=-(-(record.last_step - record.first_step + 1) // bars),
        overlapping=overlapping,
    )


def _ones(record: RunRecord) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    steps = np.arange(record.first_step, record.last_step + 1)
    return steps, np.ones(len(steps))


def _per_bar(series: Series, record: RunRecord, bars: int) -> NDArray[np.float64]:
    places = (series.steps - record.first_step) * bars // (record.last_step - record.first_step + 1)
    sums: NDArray[np.float64] = np.bincount(places, np.nan_to_num(series.values), minlength=bars).astype(np.float64)
    return sums


def _list_phases(names: Sequence[str], seconds: dict[str, NDArray[np.float64]], record: RunRecord) -> tuple[Phase, ...]:
    """The phases of steps, then those that only phases.jsonl tells of, as saving, which belongs to no step."""
    totals = {name: float(seconds[name].sum()) for name in names}
    totals |= {name: spent for name, (spent, _) in record.phases.items() if name not in totals}
    everything = sum(totals.values()) or 1.0
    steps = record.last_step - record.first_step + 1
    return tuple(
        Phase(name, format_value(spent, "s"), format_value(spent / steps, "s"), spent / everything, color)
        for color, (name, spent) in enumerate(totals.items())
    )


def _stack(names: Sequence[str], heights: dict[str, NDArray[np.float64]], top: float) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    for place in range(len(next(iter(heights.values())))):
        width, floor = 1000 / len(heights[names[0]]), 100.0
        for color, name in enumerate(names):
            height = float(heights[name][place]) / top * 100
            floor -= height
            if height >= 0.05:
                bars.append(
                    Bar(
                        round((place + 0.06) * width, 2),
                        round(floor, 2),
                        round(width * 0.88, 2),
                        round(height, 2),
                        color,
                    )
                )
    return tuple(bars)
