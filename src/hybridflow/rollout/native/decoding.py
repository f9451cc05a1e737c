"""Rows from their first sampled token to their last: windows of steps, the next one launched before the last one is read.

Dimensions: B seats, S steps of a window.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridflow.rollout.native.report import RolloutReport
from hybridflow.rollout.native.scheduler import Scheduler
from hybridflow.rollout.native.seats import Decoder, Seats, Window
from hybridflow.rollout.native.sequences import Finish
from hybridflow.rollout.native.stopping import StopRules


class Decoding:
    """Decodes the running rows of one `generate` call until it pays to seat others.

    What a window gives is booked while the next one runs. Blocks that a row gives back when it is booked as done may go to another row
    at once: the device does its work in the order of launches, and only later launches read or write them for the new owner.
    """

    def __init__(
        self, scheduler: Scheduler, stops: StopRules, decoder: Decoder, keys: np.ndarray, report: RolloutReport
    ) -> None:
        self._scheduler, self._stops, self._decoder, self._keys = scheduler, stops, decoder, keys
        self._report = report
        self._sequences = scheduler.sequences

    def run(self, is_ended: Callable[[], bool]) -> None:
        """Until other rows should be seated, nothing is left to do, or the call is ended; all that was launched is booked."""
        # It may take the blocks of running rows, so it comes before these are seated.
        steps = self._reserve_first()
        rows = self._scheduler.running.copy()
        self._seat(rows)
        under_way: Window | None = None
        while steps and not is_ended():
            launched = self._decoder.launch(steps, self._scheduler.block_table[rows])
            if under_way is not None:
                self._book(rows, under_way)
            under_way = launched
            if not self._decoder.ahead:
                self._book(rows, under_way)
                under_way = None
            steps = 0 if self._is_over(rows) else self._reserve_next(under_way)
        if under_way is not None:
            self._book(rows, under_way)

    def _seat(self, rows: np.ndarray) -> None:
        table = self._sequences
        tokens, known = table.last_tokens(rows), table.histories(rows) if self._decoder.looks_back else None
        self._decoder.seat(
            Seats(tokens.astype(np.int64), table.length[rows], table.max_length[rows], self._keys[rows], known)
        )

    def _reserve_first(self) -> int:
        """Steps of the first window: as many as there are blocks for without taking any from a row, at least one."""
        steps = self._count_steps(0)
        while steps > 1 and not self._scheduler.reserve(steps):
            steps //= 2
        if steps <= 1:
            self._scheduler.make_room_for_one_step()
            return 1
        return steps

    def _reserve_next(self, under_way: Window | None) -> int:
        """Steps of the next window; 0 where no row can use one, or blocks lack."""
        before = under_way.steps if under_way is not None else 0
        steps = self._count_steps(before)
        return steps if steps and self._scheduler.reserve(before + steps) else 0

    def _count_steps(self, under_way: int) -> int:
        rows = self._scheduler.running
        wanted = self._sequences.max_length[rows] - self._sequences.length[rows] - under_way
        return max(min(self._decoder.max_steps, int(wanted.max(initial=0))), 0)

    def _is_over(self, rows: np.ndarray) -> bool:
        live = int(np.count_nonzero(self._sequences.finish[rows] == Finish.NONE))
        waiting = self._sequences.num_unfinished - live
        return not live or self._decoder.is_worth_seating(len(rows), live, waiting)

    def _book(self, rows: np.ndarray, window: Window) -> None:
        drawn_SB = window.read()
        tokens_SB = drawn_SB.tokens
        before = self._sequences.length[rows]
        for step, tokens_B in enumerate(tokens_SB):
            at = np.flatnonzero((tokens_B >= 0) & (self._sequences.finish[rows] == Finish.NONE))
            self._sequences.append(rows[at], drawn_SB.at(step).at(at))
            self._stops.mark_finished(self._sequences, rows[at])
        self._report.steps += window.steps
        self._report.seat_steps += tokens_SB.size
        self._report.live_steps += int(np.count_nonzero(tokens_SB >= 0))
        self._report.watch(self._sequences.num_unfinished)
        counts = self._sequences.length[rows] - before
        moved = np.flatnonzero(counts)
        self._decoder.stop(moved[self._sequences.finish[rows[moved]] != Finish.NONE])
        self._scheduler.postprocess(rows[moved], counts[moved], rows[moved])
