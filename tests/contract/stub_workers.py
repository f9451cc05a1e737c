"""Tiny workers for the runtime's contracts: their answers tell which calls reached them, on which state, and in which process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.batch import Batch
from hybridflow.runtime.api import Pieces, Seat
from hybridflow.types import Metrics, mean, total

STUCK_S = 90.0
"""Longer than any test waits: a call that stays this long is one that only its worker's end ends."""


@dataclass(frozen=True)
class Reading:
    """A counter as one call found it. `history` is what has changed it since it was built or restored."""

    rank: int
    pid: int
    value: int
    history: tuple[str, ...]


class Counter:
    """Adds up what it is told.

    lives: a directory in which each life of a worker leaves a file `start-<rank>-<pid>`, before it takes `start_s` to start, and a
           file `close-<rank>-<pid>` where it is closed.
    """

    def __init__(self, seat: Seat, start: int = 0, lives: Path | None = None, start_s: float = 0.0) -> None:
        self.seat, self.value, self.lives = seat, start, lives
        self.history: list[str] = []
        self._leave("start")
        time.sleep(start_s)

    def close(self) -> None:
        self._leave("close")

    # Verbs that change the state.

    def add(self, amount: int, wait_s: float = 0.0) -> int:
        time.sleep(wait_s)
        return self._change(f"add {amount}", self.value + amount)

    def assign(self, value: int) -> int:
        self.history = []
        return self._change(f"assign {value}", value)

    def add_rows(self, *batches: Batch) -> tuple[int, int]:
        """(rank, value): adds the number of rows of all batches."""
        return self.seat.rank, self.add(sum(batch.num_rows for batch in batches))

    def add_share(self, own: Any, whole: int) -> tuple[int, Any]:
        """What one rank does in a step of a gang: it is given its own share, and its state moves by the whole."""
        self.add(whole)
        return self.seat.rank, own

    def add_share_and_stay(self, own: Any, whole: int, directory: Path) -> tuple[int, Any]:
        """The same, but each rank's first time here never ends, like that of a rank that waits in a collective."""
        self.add(whole)
        _stay_once(directory / f"rank_{self.seat.rank}")
        return self.seat.rank, own

    def add_unless_rank(self, odd_rank: int) -> int:
        """One rank fails, the others wait for it."""
        if self.seat.rank == odd_rank:
            raise ValueError("rows 3 and 4 do not fit")
        time.sleep(STUCK_S)
        return self.add(1)

    def measure(self) -> Metrics:
        return {"loss": mean(self.seat.rank, 2.0), "rows": total(3)}

    def take(self) -> int:
        return self.value

    def restore(self, value: int) -> None:
        self.history = []
        self._change(f"restore {value}", value)

    # Verbs that only read.

    def read(self, wait_s: float = 0.0, *needed: Any) -> Reading:
        time.sleep(wait_s)
        return Reading(self.seat.rank, os.getpid(), self.value, tuple(self.history))

    def seat_of(self) -> Seat:
        return self.seat

    def stay_once(self, mark: Path) -> Reading:
        """Leaves its process id in the file `mark` and never returns; where the file is there already, a plain `read`."""
        _stay_once(mark)
        return self.read()

    def stay(self, mark: Path) -> None:
        """Adds a line to the file `mark` and never returns."""
        _write_line(mark)
        time.sleep(STUCK_S)

    def die(self, mark: Path) -> None:
        """Adds a line to the file `mark` and takes its process along."""
        _write_line(mark)
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, mark: Path | None = None) -> None:
        if mark is not None:
            _write_line(mark)
        raise ValueError("row 7 has no tokens")

    def make(self, rows: int) -> Batch:
        return Batch.from_columns(group_id=list(range(rows)), tokens=[[i, i + 1] for i in range(rows)])

    def make_bytes(self, num_bytes: int, wait_s: float = 0.0) -> Batch:
        time.sleep(wait_s)
        return Batch.from_columns(tokens=[[1] * (num_bytes // 4)])

    def cut(self, rows: int) -> Pieces[Batch]:
        """Two parts of the same rows; the digest of the first are its lengths."""
        group_id = list(range(rows))
        tokens = Batch.from_columns(group_id=group_id, tokens=[[i] * (i + 1) for i in range(rows)])
        text = Batch.from_columns(group_id=group_id, text=[f"row {i}" for i in range(rows)])
        return Pieces((tokens, text), (tuple(tokens.lengths("tokens").tolist()), None))

    def cut_with(self, rows: int, weights: int) -> Pieces[Batch]:
        """The same, of a generator that is told which weights to sample from."""
        return self.cut(rows)

    def cut_rows(self, sizes: Sequence[int]) -> Pieces[Batch]:
        """A batch of each of these numbers of rows, which is its digest."""
        return Pieces(tuple(self.make(rows) for rows in sizes), tuple(sizes))

    def double(self, batch: Batch) -> Batch:
        return Batch.from_columns(double=[2 * group for group in batch.pylist("group_id")])

    def describe(self, value: Any) -> Any:
        """What arrived here: a batch as its rows and columns, all else as it is."""
        if isinstance(value, Batch):
            return {"rows": value.num_rows, "columns": sorted(value.column_names)}
        if isinstance(value, dict):
            return {name: self.describe(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.describe(item) for item in value)
        return value

    def apply(self, function: Callable[[int], int], value: int) -> int:
        return function(value)

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def _leave(self, what: str) -> None:
        if self.lives is not None:
            (self.lives / f"{what}-{self.seat.rank}-{os.getpid()}").touch()

    def _change(self, what: str, value: int) -> int:
        self.value = value
        self.history.append(what)
        return value


def _stay_once(mark: Path) -> None:
    try:
        descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.close(descriptor)
    time.sleep(STUCK_S)


def _write_line(mark: Path) -> None:
    with open(mark, "a") as file:
        file.write(f"{os.getpid()}\n")


def read_pid(mark: Path, within_s: float = 20.0) -> int:
    """The process id that the last line of the file names, as soon as there is one."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        lines = mark.read_text().splitlines(keepends=True) if mark.exists() else []
        if lines and lines[-1].endswith("\n"):
            return int(lines[-1])
        time.sleep(0.005)
    raise TimeoutError(f"no worker has written to {mark} in {within_s} s")
