"""A live bar on a terminal; a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hybridflow.types import Metric

PLAIN_LINE_EVERY_S = 5.0
SPEED_OVER_S = 3600.0
"""Steps of how long ago count for the ETA; it needs two of them, and a step may take many minutes."""
ECHO_COLUMNS = 3
"""Left free at the end of the line: the `^C` that a terminal echoes would go on in the next line, and leave this one on screen."""
MIN_BAR_COLUMNS = 10


def plan_cells(widths: Sequence[int], importance: Sequence[int], room: int) -> list[int]:
    """Places of the cells that a line of `room` columns holds, in their order, with a column between neighbours.

    Cells are taken as `importance` lists their places; none is taken after the first that does not fit.
    """
    kept: list[int] = []
    for place in importance:
        if sum(widths[other] + 1 for other in kept) + widths[place] > room:
            break
        kept.append(place)
    return sorted(kept)


class _Line(Progress):
    """Each task in one line, at any width: `first-run ━━━━━━━━━━ 12/60 0:00:31 eta 0:02:04  reward/mean 0.41  train/lr 0.0003`.

    Where there is little room, metrics go from the end, then the elapsed time, the bar and the name; the step and the ETA stay.
    """

    def get_renderables(self) -> Iterator[RenderableType]:
        """Lines for the terminal's width of now."""
        return (_build_line(task, self.console.width - ECHO_COLUMNS) for task in self.tasks)


def _build_line(task: Task, room: int) -> Table:
    name = Text(task.description, style="bold")
    name.truncate(room // 4, overflow="ellipsis")
    steps = Text(f"{task.completed:.0f}/{task.total:.0f}", style="progress.download")
    elapsed = TimeElapsedColumn().render(task)
    eta = Text.assemble("eta ", TimeRemainingColumn().render(task))
    texts = [name, steps, elapsed, eta, *(Text(f" {value}") for value in task.fields["values"])]
    bar_columns = max(MIN_BAR_COLUMNS, room // 8)
    cells: list[RenderableType] = [*texts[:1], BarColumn(bar_columns).render(task), *texts[1:]]
    widths = [cell_len(text.plain) for text in texts]
    widths.insert(1, bar_columns)
    kept = plan_cells(widths, (2, 4, 0, 1, 3, *range(5, len(cells))), room)
    line = Table.grid(padding=(0, 1))
    line.add_row(*(cells[place] for place in kept))
    return line


class ProgressBar:
    """Shows steps done and the metrics named in `shown`, the most wanted first: `reward/mean 0.41  train/lr 0.0003`.

    console: where it is shown; None is the standard error.
    """

    def __init__(
        self, title: str, total_steps: int, shown: tuple[str, ...], *, enabled: bool, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._title, self._total, self._shown, self._enabled = title, total_steps, shown, enabled
        self._live = enabled and self._console.is_terminal
        self._last_line_s = 0.0
        self._latest: dict[str, Metric] = {}
        self._bar = _Line(console=self._console, disable=not self._live, speed_estimate_period=SPEED_OVER_S)
        self._task = self._bar.add_task(title, total=total_steps, values=())

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A bar without a step tells nothing once it stands still.
        self._bar.live.transient = not self._bar.tasks[self._task].completed
        self._bar.stop()

    def tell(self, text: str) -> None:
        """Prints a line for the user, above the bar."""
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def update(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Says that `step` steps are done. A metric that does not come with every step keeps its last value."""
        self._latest |= metrics
        metrics = self._latest
        values = [f"{name} {metrics[name].value:.4g}" for name in self._shown if name in metrics]
        self._bar.update(self._task, completed=step, values=values)
        now_s = time.monotonic()
        if self._enabled and not self._live and (now_s - self._last_line_s > PLAIN_LINE_EVERY_S or step == self._total):
            self._last_line_s = now_s
            line = "  ".join((f"{self._title} step {step}/{self._total}", *values))
            self._console.print(line, highlight=False, soft_wrap=True)
