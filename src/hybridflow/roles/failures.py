"""Rows that failed in rollout or reward: told of once, and a stop where step after step there are no others."""

from __future__ import annotations

import logging

from hybridflow.batch import Batch
from hybridflow.config import HybridflowError
from hybridflow.train_engine import Ranks
from hybridflow.types import RowState

MAX_FAILED_STEPS = 5
"""Steps in a row in which every row may fail; one more stops the run."""

_log = logging.getLogger(__name__)


class AllRowsFailedError(HybridflowError, RuntimeError):
    """Step after step no row came out of rollout and reward."""


class FailureWatch:
    """Looks at the rows of each step on their way to the update.

    ranks:        those that train together.
    failed_steps: steps in a row, up to the last one, in which every row failed on all ranks; part of the training state.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.failed_steps = 0
        self._ranks, self._has_told = ranks, False

    def check(self, batch: Batch | None) -> None:
        """Counts a step with this rank's rows, None where it has none; AllRowsFailedError where it is one too many. A collective."""
        failed = batch.numpy("state") == RowState.FAILED if batch is not None else None
        own = [0.0, 0.0] if failed is None else [float(failed.sum()), float(failed.size)]
        num_failed, num_rows = map(sum, zip(*self._ranks.gather(own), strict=True))
        self.failed_steps = self.failed_steps + 1 if num_rows and num_failed == num_rows else 0
        if batch is None or failed is None or not failed.any():
            return
        row = int(failed.argmax())
        why = _find_reason(batch, row)
        if self.failed_steps > MAX_FAILED_STEPS:
            raise AllRowsFailedError(
                f"every row has failed in {self.failed_steps} steps in a row; the last step's row {row} says: {why}"
            )
        if not self._has_told:
            _log.warning(
                "%d of %d rows failed; row %d: %s; rows/failed counts them", failed.sum(), failed.size, row, why
            )
            self._has_told = True


def _find_reason(batch: Batch, row: int) -> str:
    named = [name for name in ("rollout_error", "reward_error") if name in batch]
    reasons = [batch.slice(row, row + 1).pylist(name)[0] for name in named]
    return next((reason for reason in reasons if reason), "no reason was given")
