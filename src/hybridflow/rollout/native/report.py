"""What a `generate` call did: how full its steps were, and what its slowest rows cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hybridflow.types import Metrics, mean, total

TAIL = 0.1
"""Share of the rows that are the slowest."""


@dataclass
class RolloutReport:
    """Counted while the call runs.

    num_rows:       of the call.
    prefill_tokens: fed in passes over prompts, and over rows that had lost their blocks.
    beside_tokens:  of rows that decoded in these passes.
    steps:          of decoding.
    seat_steps, live_steps: places in these, and those in which a row drew a token.
    preemptions:    rows that lost their blocks to others.
    seconds, tail_seconds: of the call, and of these with at most a tenth of the rows unfinished.
    """

    num_rows: int
    prefill_tokens: int = 0
    beside_tokens: int = 0
    steps: int = 0
    seat_steps: int = 0
    live_steps: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    tail_seconds: float = 0.0
    _started_s: float = field(default_factory=time.perf_counter, repr=False)
    _tail_from_s: float | None = field(default=None, repr=False)

    def watch(self, num_unfinished: int) -> None:
        """To be told how many rows still want tokens, as that falls."""
        if self._tail_from_s is None and num_unfinished <= TAIL * self.num_rows:
            self._tail_from_s = time.perf_counter()

    def end(self, preemptions: int) -> None:
        """The call is over."""
        now_s = time.perf_counter()
        self.preemptions, self.seconds = preemptions, now_s - self._started_s
        self.tail_seconds = 0.0 if self._tail_from_s is None else now_s - self._tail_from_s

    def metrics(self) -> Metrics:
        """For the run's log; over several calls shares are of all their steps and seconds."""
        if not self.prefill_tokens:
            return {}
        seats = self.seat_steps
        # All rows may have decoded beside prompts.
        occupancy = {"speed/rollout_occupancy": mean(self.live_steps / seats, seats)} if seats else {}
        return {
            **occupancy,
            "speed/rollout_tail_share": mean(self.tail_seconds / self.seconds, self.seconds),
            "speed/rollout_preemptions": total(self.preemptions),
            "speed/rollout_prefill_tokens": total(self.prefill_tokens),
            "speed/rollout_beside_tokens": total(self.beside_tokens),
        }
