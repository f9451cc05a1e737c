"""The actor: the policy that is trained and that generates, on the same weights."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.algorithms import Prepared
from hybridflow.batch import Batch
from hybridflow.checkpoint import HUGGING_FACE, ShardEntry, load_shards, write_shard
from hybridflow.config import HybridflowError
from hybridflow.models import save_description, save_model
from hybridflow.roles.carried import Snapshot, Weights, carry
from hybridflow.roles.generator import Generator, GeneratorWorker, RolloutSettings
from hybridflow.roles.parts import TOKENS, add_columns, cut_columns
from hybridflow.roles.policy import ModelSpec, read_hidden_size
from hybridflow.roles.shares import RowDigest, plan_shares, split_rows
from hybridflow.runtime.api import Pieces, Runtime, Seat
from hybridflow.train_engine import TrainEngine, TrainSettings, join_ranks
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

CHUNKS_PER_TRAINER, MAX_CHUNKS = 8, 512
"""Chunks of a step for each trainer, enough for shares of nearly equal cost, and in all: each costs the controller something."""
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
    """The policy on its device. Training and generation take turns on one set of weights; switching moves no bytes.

    Several of these are replicas: each trains on its share of the rows, and their gradients are summed.
    """

    def __init__(self, seat: Seat, spec: ActorSpec) -> None:
        super().__init__(seat, spec.model, spec.rollout)
        device = self.policy.model.device
        self.ranks = join_ranks(
            rank=seat.rank, size=seat.size, rendezvous=seat.rendezvous, device=device, timeout_s=seat.timeout_s
        )
        self.train_engine = TrainEngine(self.policy.model, spec.train, self.ranks)
        self.version = 0
        self._failed_steps = 0
        self._told_failures = False
        self._description: dict[str, bytes] = {}

    def log_prob(self, batch: Batch, sizes: tuple[int, ...], temperature: float) -> Pieces[Batch]:
        """Column `trainer_logprobs` [tokens of the row] float32: of each counted token, 0.0 elsewhere."""
        return cut_columns(Batch.from_columns(trainer_logprobs=self.train_engine.log_prob(batch, temperature)), sizes)

    def update(
        self, batch: Batch | None, update_rows: Sequence[int], prepare: Callable[[Batch], Prepared], loss: Any
    ) -> Metrics:
        """Optimizer steps over this rank's rows, then a new version of the weights.

        batch:       whole groups with all their scores; None where this rank has none.
        update_rows: how many of the rows, one after the other, belong to each step; every rank takes every step.
        """
        steps_before = self.train_engine.steps_taken
        with self.ranks.leaving_on_error():
            prepared = None if batch is None else prepare(batch)
            self._watch_failures(prepared.batch if prepared else None)
            parts = prepared.batch.split(update_rows) if prepared else [None] * len(update_rows)
            metrics = [self.train_engine.update(part, loss) for part in parts]
        # A skipped step leaves the weights, and so the policy, as they were.
        if self.train_engine.steps_taken > steps_before:
            self.version += 1
            self.rollout_engine.load_weights(self.version)
        counted = [prepared.metrics] if prepared else []
        version: Metrics = {} if self.ranks.rank else {"policy/version": last(self.version)}
        return merge_metrics([*counted, *metrics, version])

    def _watch_failures(self, batch: Batch | None) -> None:
        """Tells of failed rows once, and stops where for several steps there was no other row on any rank."""
        failed = batch.numpy("state") == RowState.FAILED if batch is not None else None
        own = [0.0, 0.0] if failed is None else [float(failed.sum()), float(failed.size)]
        num_failed, num_rows = map(sum, zip(*self.ranks.gather(own), strict=True))
        self._failed_steps = self._failed_steps + 1 if num_rows and num_failed == num_rows else 0
        if batch is None or failed is None or not failed.any():
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

    def weights(self) -> Weights:
        """The weights as generators take them."""
        return Weights(self.version, carry(dict(self.policy.model.module.named_parameters())))

    def save(self, path: Path) -> ShardEntry:
        """Writes the whole training state to one shard file, what an export needs beside it, and returns the index entry."""
        self.train_engine.check_weights()
        save_description(self.policy.model, self.policy.tokenizer, path.parent / HUGGING_FACE)
        return write_shard(path, self.train_engine.state_tensors(), self._state())

    def load(self, directory: Path) -> None:
        """Takes up the state that a checkpoint holds; the weights' addresses stay."""
        tensors, state = load_shards(directory, "actor")
        self._load_state(tensors, state)

    def snapshot(self) -> Snapshot:
        """The whole training state, to be kept outside this process."""
        return Snapshot(carry(self.train_engine.state_tensors()), self._state(), self._describe())

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a snapshot's state."""
        self._load_state({name: carried.tensor() for name, carried in snapshot.tensors.items()}, snapshot.state)

    def export(self, directory: Path) -> None:
        """Writes model and tokenizer as a Hugging Face directory, which is there whole or not at all."""
        beside = directory.with_name(f".writing-{directory.name}")
        shutil.rmtree(beside, ignore_errors=True)
        save_model(self.policy.model, self.policy.tokenizer, beside)
        shutil.rmtree(directory, ignore_errors=True)
        beside.rename(directory)

    def close(self) -> None:
        """Leaves the other ranks."""
        self.ranks.leave()

    def _state(self) -> dict[str, Any]:
        return {**self.train_engine.state_json(), "version": self.version, "failed_steps": self._failed_steps}

    def _load_state(self, tensors: Any, state: Any) -> None:
        self.train_engine.load_state(tensors, state)
        self.version, self._failed_steps = state["version"], state["failed_steps"]
        self.rollout_engine.load_weights(self.version)

    def _describe(self) -> dict[str, bytes]:
        if not self._description:
            with tempfile.TemporaryDirectory() as directory:
                save_description(self.policy.model, self.policy.tokenizer, directory)
                self._description = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
        return self._description


class Actor(Generator):
    """Verbs of the actor on the page. Each returns at once.

    It generates on the trainers themselves, or with `separate_rollout` on workers of their own. A rollout there names the weights that it
    is to be sampled from, as it names its prompts: so it can be made again by any worker at any time.

    snapshot_every_steps: updates between snapshots of the training state; 0 takes none.
    """

    def __init__(
        self,
        runtime: Runtime,
        spec: ActorSpec,
        sampling: SamplingParams,
        *,
        separate_rollout: bool = False,
        snapshot_every_steps: int = 0,
    ) -> None:
        self._trainers = runtime.place_gang("actor", ActorWorker, spec)
        self._separate = (
            runtime.place("rollout", GeneratorWorker, spec.model, spec.rollout) if separate_rollout else None
        )
        chunks_wanted = min(CHUNKS_PER_TRAINER * self._trainers.size, MAX_CHUNKS) if self._trainers.size > 1 else 1
        super().__init__(runtime, self._separate or self._trainers, spec.rollout, sampling, chunks_wanted)
        self._updates, self._hidden_size = spec.updates_per_step, read_hidden_size(spec.model.settings)
        self._snapshot_every, self._num_updates = snapshot_every_steps, 0
        self.last_snapshot: Ref[Snapshot] | None = None

    def log_prob(self, batch: BatchRef) -> BatchRef:
        """Log-probabilities of the sampled tokens under the weights as they are now."""
        tokens, verb = batch.only(TOKENS), ActorWorker.log_prob
        return add_columns(self._runtime, self._trainers, verb, tokens, "trainer", self._sampling.temperature)

    def update(self, objective: Objective) -> MetricsRef:
        """Trains on the objective; later rollouts use the new weights."""
        described: tuple[Ref[Batch], ...] = ()
        if isinstance(objective.batch, Batch):
            split = functools.partial(self._split_rows, objective, objective.batch)
        else:
            batch = functools.reduce(lambda left, right: left | right, objective.scores, objective.batch.only(TOKENS))
            split = functools.partial(self._split_chunks, objective, batch)
            described = tuple(chunk.parts[TOKENS] for chunk in batch.chunks)
        metrics = self._runtime.scatter(self._trainers, ActorWorker.update, split, described)
        self._num_updates += 1
        if self._snapshot_every and self._num_updates % self._snapshot_every == 0:
            # Before the weights are published: they can then be made again from the snapshot alone.
            self._take_snapshot()
        self._publish_weights()
        return MetricsRef((metrics,))

    def save(self, path: Path) -> Ref[ShardEntry]:
        """Writes the training state beside the worker, to a path that controller and worker share."""
        return self._runtime.submit(self._trainers, ActorWorker.save, path)

    def load(self, directory: Path) -> Ref[tuple[None, ...]]:
        """Takes up a checkpoint's state."""
        loaded = self._runtime.broadcast(self._trainers, ActorWorker.load, directory, replaces=True)
        # The directory may be gone when a trainer dies.
        self._take_snapshot()
        self._publish_weights()
        return loaded

    def export(self, directory: Path) -> Ref[None]:
        """Writes the model as a Hugging Face directory."""
        return self._runtime.submit(self._trainers, ActorWorker.export, directory)

    def _take_snapshot(self) -> None:
        if self._snapshot_every:
            taken = self._runtime.snapshot(self._trainers, ActorWorker.snapshot, ActorWorker.restore)
            self.last_snapshot = taken or self.last_snapshot

    def _publish_weights(self) -> None:
        """Rollouts from here on name the weights as they are after the calls so far."""
        if self._separate is not None:
            self._weights = self._runtime.submit(self._trainers, ActorWorker.weights)

    def _split_chunks(
        self, objective: Objective, batch: BatchRef, digests: Sequence[RowDigest], size: int
    ) -> list[tuple[Any, ...]]:
        shares = plan_shares(digests, size=size, updates=self._updates, hidden_size=self._hidden_size)
        chosen = [tuple(batch.chunks[index] for index in share.chunks) for share in shares]
        return [
            (BatchRef(chunks) if chunks else None, share.update_rows, objective.prepare, objective.loss)
            for chunks, share in zip(chosen, shares, strict=True)
        ]

    def _split_rows(
        self, objective: Objective, batch: Batch, _: Sequence[RowDigest], size: int
    ) -> list[tuple[Any, ...]]:
        parts = split_rows(batch, size=size, updates=self._updates, hidden_size=self._hidden_size)
        return [
            (rows if rows.num_rows else None, update_rows, objective.prepare, objective.loss)
            for rows, update_rows in parts
        ]
