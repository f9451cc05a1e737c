"""The nouns: records that cross a boundary between rooms. Read this file first; the rest is verbs between them.

A step of reinforcement learning in these words: a `Batch` of prompts goes to the actor, which returns a `BatchRef` naming a batch of
samples that stays where it was made; scores are further columns of the same rows, by reference too; an `Objective` names a loss over all
of these columns; an update turns it into `Metrics`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator

from hybridflow.config import Field, HybridflowError, settings

if TYPE_CHECKING:
    from hybridflow.batch import Batch

Numerics = Literal["fast", "exact"]
T_co = TypeVar("T_co", covariant=True)


class RowState(enum.IntEnum):
    """What became of a row. Only OK rows take part in baselines, denominators and losses; the others are counted.

    EMPTY: nothing was sampled. FAILED: the rollout or its reward failed. REJECTED: a filter took it out.
    """

    OK = 0
    EMPTY = 1
    FAILED = 2
    REJECTED = 3


LEAST_TEMPERATURE = 1e-6
"""Above 0, which takes the most likely token."""


@dataclass(frozen=True)
class Shaping:
    """What sampling changes in a distribution beside its temperature, in this order: `Shaping(repetition_penalty=1.1, min_p=0.05)`.

    Fields as in `SamplingParams`; the defaults change nothing.
    """

    repetition_penalty: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0

    @property
    def uncut(self) -> Shaping:
        """The same penalty, with every token possible."""
        return Shaping(repetition_penalty=self.repetition_penalty)


UNSHAPED = Shaping()
"""The model's own distribution."""


def _check_temperature(value: float) -> float:
    if 0.0 < value < LEAST_TEMPERATURE:
        raise ValueError(
            f"is {value:g}, and logits divided by it would overflow; give {LEAST_TEMPERATURE:g} or more, or 0 for the most likely token"
        )
    return value


@settings
class SamplingParams:
    """How tokens are drawn, e.g. `SamplingParams(temperature=0.7, max_new_tokens=256, samples_per_prompt=8)`."""

    temperature: Annotated[float, AfterValidator(_check_temperature)] = Field(default=1.0, ge=0.0)
    """Divides the logits before the softmax; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keeps the smallest set of tokens whose probability reaches this sum; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keeps this many of the most likely tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Keeps the tokens whose probability is at least this share of the most likely one's, before `top_k` and `top_p`; 0 keeps all."""
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    """Divides the logits of tokens that the row holds already, its prompt included, where they are above 0, and multiplies those
    below: above 1 repeats less, below 1 more; 1 changes nothing."""
    max_new_tokens: int = Field(default=128, ge=1, lt=2**31)
    """Most tokens of a response; a response cut here has finish reason 'length'."""
    stop_strings: tuple[str, ...] = ()
    """Generation stops when the response text holds one of these; the text is cut before it."""
    stop_token_ids: tuple[int, ...] = ()
    """Stops on these ids as well as on the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Goes on after an end-of-sequence id (for measurements); `stop_token_ids` still stop."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Samples drawn for each prompt: the size of a group."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Key of the draws, together with step, group, sample and position; 0 takes the run's own seed."""

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise ValueError("stop_strings holds an empty string, which every text contains; take it out")
        if any(token_id < 0 for token_id in self.stop_token_ids):
            raise ValueError(f"stop_token_ids holds {min(self.stop_token_ids)}; ids are 0 or more")

    @property
    def shaping(self) -> Shaping:
        """What is changed beside the temperature."""
        return Shaping(self.repetition_penalty, self.min_p, self.top_k, self.top_p)

    @property
    def cuts(self) -> bool:
        """Whether tokens are drawn, and not from all."""
        return self.temperature > 0 and self.shaping.cuts

    def keyed_by(self, seed: int) -> SamplingParams:
        """The same with the run's seed, unless it has one of its own."""
        return self if self.seed else replace(self, seed=seed)

    def also_stopping_on(self, token_ids: tuple[int, ...]) -> SamplingParams:
        """The same with further `stop_token_ids`."""
        return replace(self, stop_token_ids=tuple(dict.fromkeys((*self.stop_token_ids, *token_ids))))


class Reduce(enum.Enum):
    """How values of one metric from several places become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True)
class Metric:
    """A value that knows how it reduces: `Metric(0.25, weight=512, reduce=Reduce.MEAN)` is a mean over 512 things."""

    value: float
    weight: float = 1.0
    reduce: Reduce = Reduce.MEAN


Metrics = dict[str, Metric]


def mean(value: float, weight: float = 1.0) -> Metric:
    """A mean over `weight` things; means merge by weight."""
    return Metric(float(value), float(weight), Reduce.MEAN)


def total(value: float) -> Metric:
    """A sum; sums merge by adding."""
    return Metric(float(value), 1.0, Reduce.SUM)


def maximum(value: float) -> Metric:
    """A largest value."""
    return Metric(float(value), 1.0, Reduce.MAX)


def minimum(value: float) -> Metric:
    """A smallest value."""
    return Metric(float(value), 1.0, Reduce.MIN)


def last(value: float) -> Metric:
    """A reading: the latest one stands."""
    return Metric(float(value), 1.0, Reduce.LAST)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """One record from several, each name reduced as its own metrics say, in the order given.

    Sums are taken with `math.fsum`, so the order of the parts does not change a mean or a sum.
    Raises ValueError if a name comes with two ways to reduce.
    """
    by_name: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            by_name.setdefault(name, []).append(metric)
    return {name: _reduce(name, metrics) for name, metrics in by_name.items()}


def _reduce(name: str, metrics: list[Metric]) -> Metric:
    ways = {metric.reduce for metric in metrics}
    if len(ways) > 1:
        raise ValueError(f"metric '{name}' is reduced in two ways, {sorted(way.value for way in ways)}; give it one")
    (way,) = ways
    values = [metric.value for metric in metrics]
    if way is Reduce.MEAN:
        weight = math.fsum(metric.weight for metric in metrics)
        value = math.fsum(m.value * m.weight for m in metrics if m.weight) / weight if weight else math.nan
        return Metric(value, weight, way)
    if way is Reduce.SUM:
        return Metric(math.fsum(values), 1.0, way)
    if way is Reduce.LAST:
        return metrics[-1]
    return Metric(max(values) if way is Reduce.MAX else min(values), 1.0, way)


@dataclass(frozen=True)
class Box:
    """A part of a tensor, as one rank holds it: rows 128 to 255 of an embedding are `Box((256, 64), offsets=(128, 0), shape=(128, 64))`."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Mark:
    """Where the page stands: `Mark(step=12, phase="score")`."""

    step: int
    phase: str


@dataclass(frozen=True)
class Call:
    """Who was asked what, and when: `rollout.rollout (rows 0 to 63, phase 'rollout', step 12)` in errors and waits."""

    role: str
    verb: str
    mark: Mark
    rows: str = ""

    def __str__(self) -> str:
        rows = f"{self.rows}, " if self.rows else ""
        return f"{self.role}.{self.verb} ({rows}phase '{self.mark.phase}', step {self.mark.step})"


@dataclass(frozen=True, eq=False)
class Ref(Generic[T_co]):
    """Names a value that a runtime holds or will hold. Only that runtime looks into `handle` (`Runtime.get`)."""

    handle: Any
    call: Call


@dataclass(frozen=True, eq=False)
class ChunkRef:
    """Names the rows of one chunk. The parts are different columns of the same rows, so that each reader pulls only those it reads.

    `ChunkRef({"tokens": ref_a, "text": ref_b}, num_rows=64)`; a column that two parts have is the same in both.
    """

    parts: Mapping[str, Ref[Batch]]
    num_rows: int


@dataclass(frozen=True, eq=False)
class BatchRef:
    """Names a batch, chunk by chunk, whole prompt groups in each; what the page holds in place of data.

    Read by a worker, it is the chunks one below the other and their parts side by side.
    """

    chunks: tuple[ChunkRef, ...]

    @property
    def num_rows(self) -> int:
        """Rows over all chunks; known before the data is."""
        return sum(chunk.num_rows for chunk in self.chunks)

    def only(self, *parts: str) -> BatchRef:
        """The same rows with these parts alone."""
        return BatchRef(
            tuple(ChunkRef({name: chunk.parts[name] for name in parts}, chunk.num_rows) for chunk in self.chunks)
        )

    def __or__(self, other: BatchRef) -> BatchRef:
        """The same rows with the parts of both."""
        pairs = zip(self.chunks, other.chunks, strict=True)
        return BatchRef(tuple(ChunkRef({**mine.parts, **more.parts}, mine.num_rows) for mine, more in pairs))


@dataclass(frozen=True)
class MetricsRef:
    """Names the metrics of calls that may still run, one record a worker; `actor.update(a) | critic.update(b)` names both."""

    parts: tuple[Ref[tuple[Metrics, ...]], ...]

    def __or__(self, other: MetricsRef) -> MetricsRef:
        return MetricsRef(self.parts + other.parts)


@dataclass(frozen=True)
class Objective:
    """What one update minimises: a loss over columns, computed where the data is.

    batch, scores: the same rows in the same order; their columns are put side by side.
    prepare:       pure function Batch -> Prepared (advantages, filters); sees whole groups.
    loss:          a `TokenLoss` value.
    """

    batch: BatchRef | Batch
    scores: tuple[BatchRef, ...]
    prepare: Callable[[Batch], Any]
    loss: Any


@dataclass(frozen=True)
class Span:
    """One verb of one worker, as the worker's own clock saw it: `Span("actor", 1, "update", 3, "update", 1.2e9, 0.4, 5.1e8)`.

    notes: what the verb has told of itself beside its seconds, as the bytes that a switch of weights moved.
    """

    role: str
    rank: int
    verb: str
    step: int
    phase: str
    start_s: float
    duration_s: float
    peak_rss_bytes: float
    notes: Mapping[str, float] = field(default_factory=dict)


class PeerLostError(HybridflowError, RuntimeError):
    """Another rank of a gang died, left or did not answer in time: the cause is there, not here."""


@dataclass
class Recovery:
    """One death of a worker and what was done: a line of `recovery.jsonl`. Times are of the controller's clock, in seconds since 1970.

    Recovery("actor[1]", "update", 12, "its process ended (SIGKILL)", detected_s=1.7e9, restarted_s=1.7e9 + 6.1, repeated_s=1.7e9 + 6.4)

    call:        what it was doing, or '' where it had nothing to do.
    restarted_s: when its group was whole again; None where it went on without.
    repeated_s:  when the lost calls had been done again; None where there were none.
    """

    worker: str
    call: str
    step: int
    cause: str
    detected_s: float
    restarted_s: float | None = None
    repeated_s: float | None = None
