"""Curves of bounded size: extremes by place on the axis, running means, ticks. B: buckets, N: values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridflow.observability.report.reading import Series


@dataclass(frozen=True)
class Buckets:
    """A curve by places on its axis; places without a value are left out.

    steps:      [B] first step of each place.
    low, high:  [B] extremes of its finite values. mean: [B] their mean.
    breaks:     [B] True where the place before holds a value that was not finite, so that no line is drawn to it.
    """

    steps: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]
    breaks: NDArray[np.bool_]


def downsample(series: Series, first: int, last: int, count: int) -> Buckets:
    """At most `count` places over the steps first to last; no extreme is lost."""
    places = (series.steps - first) * count // max(last - first + 1, 1)
    finite = np.isfinite(series.values)
    ends = np.cumsum(~finite)[finite]
    values, places, steps = series.values[finite], places[finite], series.steps[finite]
    starts = np.flatnonzero(np.diff(places, prepend=-1)) if len(places) else np.empty(0, np.int64)
    if not len(starts):
        empty = np.empty(0)
        return Buckets(starts, empty, empty, empty, np.empty(0, np.bool_))
    counts = np.diff(np.append(starts, len(values)))
    return Buckets(
        steps=steps[starts],
        low=np.minimum.reduceat(values, starts),
        high=np.maximum.reduceat(values, starts),
        mean=np.add.reduceat(values, starts) / counts,
        breaks=np.diff(ends[starts], prepend=0) > 0,
    )


def running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean over `width` neighbours (an odd number), of fewer at the ends, where those there are share the window on both sides."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    half = np.minimum(np.minimum(at, at[::-1]), width // 2)
    return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)


def smoothing_width(count: int) -> int:
    """Over how many steps a curve of so many is smoothed: an odd number, 1 where there are too few to hide a trend."""
    return 1 if count < 40 else 2 * (count // 80) + 3


def choose_range(low: float, high: float, *, from_zero: bool) -> tuple[float, float]:
    """Ends of an axis that shows low to high, with some room; never empty. from_zero: where nothing is below 0.

    Values that differ by rounding alone are equal: no label could tell them apart.
    """
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        return (0.0 if low >= 0 and from_zero else low - room), high + room
    room = (high - low) * 0.05
    floor = 0.0 if from_zero and low >= 0 and low < 0.4 * high else low - room
    return floor, high + room


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers within low to high, about `count` of them and no two equal: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks = [round(index * step, 12) if step > 1e-9 else index * step for index in range(first, first + 2 * count + 2)]
    return list(dict.fromkeys(tick for tick in ticks if tick <= high + step * 1e-9))


BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_value(value: float, unit: str = "") -> str:
    """A number of three or four digits with its unit: `1.25 k tokens`, `634 MiB`, `81.2 %`."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "bytes":
        return _scaled(value, 1024.0, BYTE_UNITS)
    if unit == "share":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return format_duration(value)
    if unit == "reward":
        return format_number(value)
    number = format_number(value)
    return f"{number} {unit}" if unit else number


def format_number(value: float) -> str:
    """`0`, `0.0312`, `1.5`, `12,345`, `1.2e-07`."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e7 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """`0.28 ms`, `42.1 s`, `12 min 5 s`, `3 h 20 min`."""
    if abs(seconds) < 0.1:
        return f"{format_number(round(seconds * 1000, 3))} ms"
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    # Three digits of 1,000 to 1,023 would be written with an exponent.
    return f"{value:.0f} {units[power]}" if abs(value) >= 100 else f"{value:.3g} {units[power]}"
