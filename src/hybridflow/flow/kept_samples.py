"""Some samples of some steps, kept for the report."""

from __future__ import annotations

import logging

from hybridflow.observability.phases import phase
from hybridflow.observability.run import RunDirectory
from hybridflow.observability.samples import SampleFiles, Tokenizer, add_pieces, plan_rows
from hybridflow.roles.actor import Actor
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import Runtime
from hybridflow.types import BatchRef

_log = logging.getLogger(__name__)


class KeptSamples:
    """Writes down a few rows of some steps. Nothing is kept before the run is open.

    samples_per_prompt: of the batches that come.
    """

    def __init__(
        self,
        run: RunDirectory,
        runtime: Runtime,
        reward: RewardModel,
        tokenizer: Tokenizer,
        *,
        num_steps: int,
        samples_per_prompt: int,
    ) -> None:
        self._run, self._runtime, self._reward, self._tokenizer = run, runtime, reward, tokenizer
        self._num_steps, self._samples_per_prompt = num_steps, samples_per_prompt
        self._trained: BatchRef | None = None

    def score(self, step: int, batch: BatchRef, actor: Actor) -> None:
        """Lets the actor score the rows to keep of the step under the weights as they are now; waits for no reward."""
        self._trained = None
        if rows := self._plan(step, batch, is_last=False):
            with phase("report"):
                self._trained = actor.log_prob(self._reward.take(batch, rows))

    def write(self, step: int, rewarded: BatchRef, *, is_last: bool = False) -> None:
        """Writes the rows to keep of the step, with the actor's scores where it was asked for them."""
        rows = self._plan(step, rewarded, is_last=is_last)
        if not rows:
            return
        # A phase of its own: the update lies between the two, and a phase is as long as from its first call to its last.
        with phase("write"):
            samples, spread = self._runtime.get(self._reward.cut(rewarded, rows, self._trained))
            try:
                self._files().write(step, add_pieces(samples, self._tokenizer), spread)
            except OSError as error:
                # A run does not fail by what only its report shows.
                _log.warning("step %s: its samples were not kept for the report (%s)", step, error)

    def _files(self) -> SampleFiles:
        # Where they are is sure once the run is open.
        return SampleFiles(self._run.samples, self._num_steps)

    def _plan(self, step: int, batch: BatchRef, *, is_last: bool) -> list[int]:
        """Rows of the step to keep; none where it is not one to keep."""
        is_asked = self._run.is_open and self._run.settings.report
        is_due = is_asked and self._files().is_due(step, is_last=is_last)
        return plan_rows(batch.num_rows, self._samples_per_prompt) if is_due else []
