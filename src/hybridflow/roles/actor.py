"""The actor on the page: the policy that is trained and that generates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.batch import Batch
from hybridflow.checkpoint import CheckpointWriter, ShardEntry
from hybridflow.roles.actor_worker import ActorSpec, ActorWorker, shares_weights
from hybridflow.roles.carried import Snapshot, Weights
from hybridflow.roles.generator import Generator, GeneratorWorker, place_workers
from hybridflow.roles.parts import TOKENS, RowDigest, add_columns, add_columns_together
from hybridflow.roles.policy import read_config
from hybridflow.roles.shares import plan_shares, split_rows
from hybridflow.rollout import NativeSettings
from hybridflow.runtime.api import Group, Pieces, Runtime
from hybridflow.train_engine import Layout, compute_model_work, plan_layout
from hybridflow.types import BatchRef, MetricsRef, Objective, Ref, SamplingParams, Shaping

CHUNKS_PER_TRAINER, MAX_CHUNKS = 8, 512
"""Chunks of a step for each trainer, enough for shares of nearly equal cost, and in all: each costs the controller something."""

R = TypeVar("R")


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
        if spec.rollout.lora == "adapter":
            spec = replace(spec, model=replace(spec.model, adapter=spec.train.lora))
        # Trainers that do not generate start no engine but the one that costs nothing.
        idle = replace(spec.rollout, engine="native", native=NativeSettings())
        trained = replace(spec, rollout=idle) if separate_rollout else spec
        self._trainers = runtime.place_gang("actor", ActorWorker, trained)
        self._separate = place_workers(runtime, spec.model, spec.rollout) if separate_rollout else None
        chunks_wanted = min(CHUNKS_PER_TRAINER * self._trainers.size, MAX_CHUNKS) if self._trainers.size > 1 else 1
        super().__init__(runtime, self._separate or self._trainers, spec.rollout, sampling, chunks_wanted)
        self._parallel_config = spec.train.parallel_config
        self._layout = plan_layout(self._parallel_config, self._trainers.size)
        self._is_whole = self._layout.is_whole
        self._has_copy = self._separate is None and not shares_weights(self._layout, spec.rollout)
        self._keeps_weights = spec.rollout.keeps_weights
        self._copy_is_old = self._has_copy
        self._updates, self._work = spec.updates_per_step, compute_model_work(read_config(spec.model.settings))
        self._snapshot_every, self._num_updates = snapshot_every_steps, 0
        self.last_snapshot: tuple[Ref[Snapshot], ...] | None = None
        # What generators say of the last weights that went straight to them.
        self._pulled: Ref[Any] | None = None
        if spec.train.lora is not None and spec.train.lora.path is not None:
            # Generators have loaded its base alone.
            self._publish_weights()

    def rollout(self, prompts: Batch, *, step: int, sampling: SamplingParams | None = None) -> BatchRef:
        """See `Generator.rollout`; from the weights as they are after the calls so far."""
        if self._copy_is_old:
            self._runtime.broadcast(self._trainers, ActorWorker.refresh)
            self._copy_is_old = False
        return super().rollout(prompts, step=step, sampling=sampling)

    def log_prob(self, batch: BatchRef) -> BatchRef:
        """Log-probabilities of the sampled tokens under the weights as they are now."""
        return self._score(batch, ActorWorker.log_prob, "trainer", self._sampling.shaping)

    def reference_log_prob(self, batch: BatchRef) -> BatchRef:
        """Those under the model without its adapter, cut nowhere, as `Reference.log_prob`."""
        return self._score(batch, ActorWorker.reference_log_prob, "reference", self._sampling.shaping.uncut)

    def _score(self, batch: BatchRef, verb: Callable[..., Pieces[Batch]], part: str, shaping: Shaping) -> BatchRef:
        tokens, drawn = batch.only(TOKENS), (self._sampling.temperature, shaping)
        if self._is_whole and self._layout.sequence == 1:
            return add_columns(self._runtime, self._trainers, verb, tokens, part, *drawn)
        places = [self._layout.coordinates(rank) for rank in range(self._layout.size)]
        shares = [(at.data, not (at.sequence or at.tensor)) for at in places]
        return add_columns_together(self._runtime, self._trainers, verb, tokens, part, shares, *drawn)

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

    def save(self, writer: CheckpointWriter) -> tuple[Ref[ShardEntry], ...]:
        """Writes the training state beside the workers, to paths that controller and workers share; the entries to commit."""
        if self._pulled is not None:
            # A trainer that writes would keep generators waiting for weights that it has offered, longer than they wait for the living.
            self._runtime.get(self._pulled)
        if self._is_whole:
            return (self._runtime.submit(self._trainers, ActorWorker.save, writer.shard_path("actor", 0)),)
        paths = [(writer.shard_path("actor", rank),) for rank in range(self._layout.size)]
        return self._runtime.submit_all(self._trainers, ActorWorker.save, paths)

    def load(self, directory: Path) -> Ref[tuple[None, ...]]:
        """Takes up a checkpoint's state."""
        loaded = self._runtime.broadcast(self._trainers, ActorWorker.load, directory, replaces=True)
        # The directory may be gone when a trainer dies.
        self._take_snapshot()
        self._publish_weights()
        return loaded

    def export(self, directory: Path) -> Ref[None]:
        """Writes the model as a Hugging Face directory."""
        return self._from_one(ActorWorker.export, directory)

    def _take_snapshot(self) -> None:
        if not self._snapshot_every:
            return
        verbs = ActorWorker.snapshot, ActorWorker.restore
        if self._is_whole:
            one = self._runtime.snapshot(self._trainers, *verbs)
            self.last_snapshot = self.last_snapshot if one is None else (one,)
        else:
            self.last_snapshot = self._runtime.snapshot_all(self._trainers, *verbs) or self.last_snapshot

    def _publish_weights(self) -> None:
        """Rollouts from here on name the weights as they are after the calls so far, or bring their trainers' copies to these."""
        if self._separate is not None:
            self._weights = self._send_weights(self._separate)
        self._copy_is_old = self._has_copy

    def _send_weights(self, generators: Group[GeneratorWorker]) -> Ref[Weights]:
        """Straight to generators that take boxes of them; where not all have got them, they lie in the object store."""
        ask = self._runtime.ask
        sent: tuple[Any, Any, Any] = (), (), ()
        if not self._keeps_weights:
            trainers = ask(self._trainers, ActorWorker.offer_weights)
            both = trainers, ask(generators, GeneratorWorker.expect_weights, trainers)
            ask(self._trainers, ActorWorker.push_weights, *both)
            sent = (*both, ask(generators, GeneratorWorker.pull_weights, *both))
            self._pulled = sent[2]
        if self._is_whole:
            return self._runtime.submit_pieces(self._trainers, ActorWorker.publish, 1, sent)[0]
        wanted = [rank == 0 for rank in range(self._layout.size)]
        counts, calls = [int(here) for here in wanted], [(sent, here) for here in wanted]
        return self._runtime.submit_all_pieces(self._trainers, ActorWorker.publish, counts, calls)[0][0]

    def _from_one(self, verb: Callable[..., R], *args: Any) -> Ref[R]:
        """Something that one rank makes: any of them where each has the whole model, else the first, while all meet in gathering it."""
        if self._is_whole:
            return self._runtime.submit(self._trainers, verb, *args)
        calls = [(*args, rank == 0) for rank in range(self._layout.size)]
        return self._runtime.submit_all(self._trainers, verb, calls)[0]

    def _split_chunks(
        self, objective: Objective, batch: BatchRef, digests: Sequence[RowDigest], size: int
    ) -> list[tuple[Any, ...]]:
        layout = plan_layout(self._parallel_config, size)
        shares = plan_shares(digests, size=layout.data, updates=self._updates, work=self._work)
        chosen = [tuple(batch.chunks[index] for index in share.chunks) for share in shares]
        calls = [
            (BatchRef(chunks) if chunks else None, share.update_rows, objective.prepare, objective.loss)
            for chunks, share in zip(chosen, shares, strict=True)
        ]
        return _hand_out(calls, layout)

    def _split_rows(
        self, objective: Objective, batch: Batch, _: Sequence[RowDigest], size: int
    ) -> list[tuple[Any, ...]]:
        layout = plan_layout(self._parallel_config, size)
        parts = split_rows(batch, size=layout.data, updates=self._updates, work=self._work)
        calls = [
            (rows if rows.num_rows else None, update_rows, objective.prepare, objective.loss)
            for rows, update_rows in parts
        ]
        return _hand_out(calls, layout)


def _hand_out(calls: Sequence[tuple[Any, ...]], layout: Layout) -> list[tuple[Any, ...]]:
    """By rank the arguments of its `data` index."""
    return [calls[layout.coordinates(rank).data] for rank in range(layout.size)]
