"""A live bar on a terminal; a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridflow.types import Metric

PLAIN_LINE_EVERY_S = 5.0


class ProgressBar:
    """Shows steps done and the metrics named in `shown`: `reward/mean 0.41  train/lr 0.0003`."""

    def __init__(self, title: str, total_steps: int, shown: tuple[str, ...], *, enabled: bool) -> None:
        self._console = Console(stderr=True)
        self._title, self._total, self._shown, self._enabled = title, total_steps, shown, enabled
        self._live = enabled and self._console.is_terminal
        self._last_line_s = 0.0
        self._latest: dict[str, Metric] = {}
        columns = (
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[values]}"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=self._console, disable=not self._live)
        self._task = self._bar.add_task(title, total=total_steps, values="")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tell(self, text: str) -> None:
        """Prints a line for the user, above the bar."""
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def update(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Says that `step` steps are done. A metric that does not come with every step keeps its last value."""
        self._latest |= metrics
        metrics = self._latest
        values = "  ".join(f"{name} {metrics[name].value:.4g}" for name in self._shown if name in metrics)
        self._bar.update(self._task, completed=step, values=values)
        now_s = time.monotonic()
        if self._enabled and not self._live and (now_s - self._last_line_s > PLAIN_LINE_EVERY_S or step == self._total):
            self._last_line_s = now_s
            self._console.print(f"{self._title} step {step}/{self._total}  {values}", highlight=False, soft_wrap=True)
