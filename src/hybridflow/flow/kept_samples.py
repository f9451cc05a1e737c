"""Some samples of some steps, kept for the report."""

from __future__ import annotations

import logging

from hybridflow.batch import Batch
from hybridflow.observability.phases import phase
from hybridflow.observability.run import RunDirectory
from hybridflow.observability.samples import SampleFiles, Tokenizer, add_pieces, plan_rows
from hybridflow.roles.actor import Actor
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import Runtime
from hybridflow.types import BatchRef, Ref

_log = logging.getLogger(__name__)


class KeptSamples:
    """Takes a few of a step's rows before the trainer changes, and writes them down after. Nothing is kept before the run is open.

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
        self._files = SampleFiles(run.samples, num_steps)
        self._samples_per_prompt = samples_per_prompt
        self._taken: tuple[BatchRef, Ref[Batch]] | None = None

    def take(self, step: int, scored: BatchRef, actor: Actor | None = None, *, is_last: bool = False) -> None:
        """Chooses the step's rows, where it is one to keep.

        actor: scores them under the weights as they are now; None leaves that out.
        """
        self._taken = None
        rows = plan_rows(scored.num_rows, self._samples_per_prompt)
        if not (self._run.is_open and self._run.settings.report and rows and self._files.is_due(step, is_last=is_last)):
            return
        with phase("report"):
            samples, spread = self._reward.take(scored, rows)
            self._taken = samples if actor is None else samples | actor.log_prob(samples), spread

    def write(self, step: int) -> None:
        """Writes what was taken of the step, if it was."""
        if self._taken is None:
            return
        samples, spread = self._taken
        # A phase of its own: the update lies between the two, and a phase is as long as from its first call to its last.
        with phase("write"):
            shown, rewards = self._runtime.get(self._reward.cut(samples)), self._runtime.get(spread)
            try:
                self._files.write(step, add_pieces(shown, self._tokenizer), rewards)
            except OSError as error:
                # A run does not fail by what only its report shows.
                _log.warning("step %s: its samples were not kept for the report (%s)", step, error)
        self._taken = None
