"""The actor: the policy that is trained and that generates, on the same weights."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.algorithms import Prepared
from hybridflow.batch import Batch
from hybridflow.checkpoint import HUGGING_FACE, ShardEntry, load_shards, write_shard
from hybridflow.config import HybridflowError
from hybridflow.models import save_description, save_model
from hybridflow.roles.generator import Generator, GeneratorWorker, RolloutSettings
from hybridflow.roles.policy import ModelSpec
from hybridflow.runtime.api import Runtime
from hybridflow.train_engine import TrainEngine, TrainSettings
from hybridflow.types import (
    BatchRef,
    Metrics,
    MetricsRef,
    Objective,
    Ref,
    RowState,
    SamplingParams,
    last,
    merge_metrics,
)

MAX_FAILED_STEPS = 5
"""Steps in a row in which every row may fail; one more stops the run."""

_log = logging.getLogger(__name__)


class AllRowsFailedError(HybridflowError, RuntimeError):
    """Step after step no row came out of rollout and reward."""


@dataclass(frozen=True)
class ActorSpec:
    """All that an actor's worker is built from."""

    model: ModelSpec
    train: TrainSettings
    rollout: RolloutSettings
    updates_per_step: int = 1


class ActorWorker(GeneratorWorker):
    """The policy on its device. Training and generation take turns on one set of weights; switching moves no bytes."""

    def __init__(self, spec: ActorSpec) -> None:
        super().__init__(spec.model, spec.rollout)
        self.train_engine = TrainEngine(self.policy.model, spec.train)
        self.updates_per_step = spec.updates_per_step
        self.version = 0
        self._failed_steps = 0
        self._told_failures = False

    def log_prob(self, batch: Batch, temperature: float) -> Batch:
        """Column `trainer_logprobs` [tokens of the row] float32: of each counted token, 0.0 elsewhere."""
        return Batch.from_columns(trainer_logprobs=self.train_engine.log_prob(batch, temperature))

    def update(
        self, batch: Batch, scores: tuple[Batch, ...], prepare: Callable[[Batch], Prepared], loss: Any
    ) -> Metrics:
        """Optimizer steps over the rows in `updates_per_step` parts of whole groups, then a new version of the weights."""
        for columns in scores:
            batch = batch.merge(columns)
        prepared = prepare(batch)
        self._watch_failures(prepared.batch)
        parts = prepared.batch.split_groups(self.updates_per_step)
        metrics = [self.train_engine.update(part, loss) for part in parts]
        # A skipped step leaves the weights, and so the policy, as they were.
        if any(not part["train/skipped_steps"].value for part in metrics):
            self.version += 1
            self.rollout_engine.load_weights(self.version)
        return merge_metrics([prepared.metrics, *metrics, {"policy/version": last(self.version)}])

    def _watch_failures(self, batch: Batch) -> None:
        """Tells of failed rows once, and stops where for several steps there was no other row."""
        failed = batch.numpy("state") == RowState.FAILED
        self._failed_steps = self._failed_steps + 1 if batch.num_rows and failed.all() else 0
        if not failed.any():
            return
        row = int(failed.argmax())
        named = [name for name in ("rollout_error", "reward_error") if name in batch]
        reasons = [batch.slice(row, row + 1).pylist(name)[0] for name in named]
        why = next((reason for reason in reasons if reason), "no reason was given")
        if self._failed_steps > MAX_FAILED_STEPS:
            raise AllRowsFailedError(
                f"every row has failed in {self._failed_steps} steps in a row; the last step's row {row} says: {why}"
            )
        if not self._told_failures:
            _log.warning(
                "%d of %d rows failed; row %d: %s; rows/failed counts them", failed.sum(), failed.size, row, why
            )
            self._told_failures = True

    def save(self, path: Path) -> ShardEntry:
        """Writes the whole training state to one shard file, what an export needs beside it, and returns the index entry."""
        self.train_engine.check_weights()
        save_description(self.policy.model, self.policy.tokenizer, path.parent / HUGGING_FACE)
        state = {**self.train_engine.state_json(), "version": self.version}
        return write_shard(path, self.train_engine.state_tensors(), state)

    def load(self, directory: Path) -> None:
        """Takes up the state that a checkpoint holds; the weights' addresses stay."""
        tensors, state = load_shards(directory, "actor")
        self.train_engine.load_state(tensors, state)
        self.version = state["version"]
        self.rollout_engine.load_weights(self.version)

    def export(self, directory: Path) -> None:
        """Writes model and tokenizer as a Hugging Face directory, which is there whole or not at all."""
        beside = directory.with_name(f".writing-{directory.name}")
        shutil.rmtree(beside, ignore_errors=True)
        save_model(self.policy.model, self.policy.tokenizer, beside)
        shutil.rmtree(directory, ignore_errors=True)
        beside.rename(directory)


class Actor(Generator):
    """Verbs of the actor on the page. Each returns at once."""

    def __init__(self, runtime: Runtime, spec: ActorSpec, sampling: SamplingParams) -> None:
        self._actor_worker = runtime.place("actor", ActorWorker, spec)
        super().__init__(runtime, self._actor_worker, spec.rollout, sampling)

    def log_prob(self, batch: BatchRef) -> BatchRef:
        """Log-probabilities of the sampled tokens under the weights as they are now."""
        chunks = (
            self._runtime.submit(self._actor_worker, ActorWorker.log_prob, chunk, self._sampling.temperature)
            for chunk in batch.chunks
        )
        return BatchRef(tuple(chunks), batch.chunk_rows)

    def update(self, objective: Objective) -> MetricsRef:
        """Trains on the objective; later rollouts use the new weights."""
        metrics = self._runtime.submit(
            self._actor_worker, ActorWorker.update, objective.batch, objective.scores, objective.prepare, objective.loss
        )  # fmt: skip
        return MetricsRef((metrics,))

    def save(self, path: Path) -> Ref[ShardEntry]:
        """Writes the training state beside the worker, to a path that controller and worker share."""
        return self._runtime.submit(self._actor_worker, ActorWorker.save, path)

    def load(self, directory: Path) -> Ref[None]:
        """Takes up a checkpoint's state."""
        return self._runtime.submit(self._actor_worker, ActorWorker.load, directory)

    def export(self, directory: Path) -> Ref[None]:
        """Writes the model as a Hugging Face directory."""
        return self._runtime.submit(self._actor_worker, ActorWorker.export, directory)
