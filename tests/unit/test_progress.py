"""The progress bar as terminals show it: what stays on a narrow one, and what is left when it ends."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from hybridflow.observability.progress import ECHO_COLUMNS, ProgressBar, plan_cells
from hybridflow.types import Metric, last

CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
SHOWN = ("sft/loss", "eval/reward_mean", "train/lr", "time/step_s")
METRICS: dict[str, Metric] = {
    "sft/loss": last(0.98754), "eval/reward_mean": last(0.070312), "train/lr": last(0.001), "time/step_s": last(1.2345),
}  # fmt: skip


def terminal(width: int) -> Console:
    return Console(width=width, file=StringIO(), force_terminal=True)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def last_line(width: int, name: str, total: int) -> str:
    """What stands on a terminal after two steps."""
    console = terminal(width)
    with ProgressBar(name, total, SHOWN, enabled=True, console=console) as bar:
        bar.update(1, METRICS)
        bar.update(2, METRICS)
    return CONTROL.sub("", written(console)).rstrip("\n").splitlines()[-1].rsplit("\r", 1)[-1]


@pytest.mark.parametrize("name", ["quickstart-sft", "a-run-of-which-the-name-tells-all-that-is-special-about-it"])
@pytest.mark.parametrize("total", [60, 1_000_000])
@pytest.mark.parametrize(
    ("width", "num_metrics"), [(30, 0), (60, 0), (80, 1), (100, 2), (140, 4), (200, 4)]
)  # fmt: skip
def test_step_and_eta_stay_and_metrics_are_whole(width: int, num_metrics: int, total: int, name: str) -> None:
    line = last_line(width, name, total)
    assert len(line) <= width - ECHO_COLUMNS
    assert re.search(rf"(^| )2/{total} .*eta (\d+|-):[\d-]+:[\d-]+( |$)", line)
    values = re.split(r" {2,}", line.rstrip())[1:]
    assert (
        values == ["sft/loss 0.9875", "eval/reward_mean 0.07031", "train/lr 0.001", "time/step_s 1.234"][: len(values)]
    )
    if name == "quickstart-sft" and total == 60:
        assert len(values) == num_metrics
    if width >= 60:
        assert line.startswith(f"{name} " if len(name) <= (width - ECHO_COLUMNS) // 4 else name[:10])


def test_cells_are_taken_by_importance_and_none_after_the_first_that_does_not_fit() -> None:
    assert plan_cells([3, 4, 5], (2, 0, 1), room=14) == [0, 1, 2]
    assert plan_cells([3, 4, 5], (2, 0, 1), room=13) == [0, 2]
    assert plan_cells([3, 9, 1], (0, 1, 2), room=8) == [0]


def test_slow_steps_have_an_eta(monkeypatch: pytest.MonkeyPatch) -> None:
    console, now_s = terminal(100), [0.0]
    console.get_time = lambda: now_s[0]  # type: ignore[method-assign]
    with ProgressBar("slow", 5, SHOWN, enabled=True, console=console) as bar:
        for step in (1, 2, 3):
            now_s[0] += 600.0
            bar.update(step, METRICS)
    assert "3/5 0:30:00 eta 0:20:00" in CONTROL.sub("", written(console))


def test_a_bar_without_a_step_leaves_nothing() -> None:
    console = terminal(80)
    with ProgressBar("done", 60, SHOWN, enabled=True, console=console) as bar:
        bar.tell("nothing is left to do")
    assert written(console).endswith("\r\x1b[1A\x1b[2K")
    assert "0/60" not in CONTROL.sub("", written(console)).rsplit("\n", 1)[-1]


def test_a_file_gets_plain_lines_in_full() -> None:
    console = Console(width=40, file=StringIO(), force_terminal=False)
    with ProgressBar("run", 1, SHOWN, enabled=True, console=console) as bar:
        bar.update(1, METRICS)
    assert (
        written(console)
        == "run step 1/1  sft/loss 0.9875  eval/reward_mean 0.07031  train/lr 0.001  time/step_s 1.234\n"
    )
