"""`phase(name)`: the one instrument of the page. It marks every call made inside it; workers time themselves."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

from hybridflow.types import Call, Mark, Metrics, Span

_mark: ContextVar[Mark] = ContextVar("hybridflow_mark", default=Mark(0, "setup"))
_notes: ContextVar[dict[str, float] | None] = ContextVar("hybridflow_notes", default=None)


def current_mark() -> Mark:
    """The step and phase that the page is in."""
    return _mark.get()


def set_step(step: int) -> None:
    """Says that what follows belongs to this step."""
    _mark.set(Mark(step, "between"))


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks the calls made inside with `name`.

    Calls return before the work is done, so no clock runs here: the times of a phase are those of its workers' spans.
    """
    token = _mark.set(Mark(_mark.get().step, name))
    try:
        yield
    finally:
        _mark.reset(token)


def note_in_span(metrics: Metrics) -> None:
    """Puts this rank's values beside the seconds of the verb that runs now; outside a verb it does nothing."""
    notes = _notes.get()
    if notes is not None:
        notes.update({name: metric.value for name, metric in metrics.items()})


class SpanTimer:
    """Times one verb inside a worker: `with SpanTimer(call) as timer: ...`, then `timer.span`."""

    def __init__(self, call: Call, rank: int = 0) -> None:
        self._call, self._rank = call, rank
        self.span: Span

    def __enter__(self) -> SpanTimer:
        self._start_s = time.time()
        self._clock_s = time.perf_counter()
        self._notes: dict[str, float] = {}
        self._token = _notes.set(self._notes)
        return self

    def __exit__(self, *_: object) -> None:
        duration_s = time.perf_counter() - self._clock_s
        _notes.reset(self._token)
        call = self._call
        self.span = Span(
            call.role,
            self._rank,
            call.verb,
            call.mark.step,
            call.mark.phase,
            self._start_s,
            duration_s,
            peak_rss_bytes(),
            self._notes,
        )


def peak_rss_bytes() -> float:
    """The most memory this process has had resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def phase_times(spans: list[Span]) -> dict[str, float]:
    """Seconds of each phase: from its first span's start to its last span's end, by the workers' clocks."""
    times: dict[str, tuple[float, float]] = {}
    for span in spans:
        first, last = times.get(span.phase, (span.start_s, span.start_s))
        times[span.phase] = (min(first, span.start_s), max(last, span.start_s + span.duration_s))
    return {name: end - start for name, (start, end) in times.items()}
