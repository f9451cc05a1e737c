"""The actor: the policy that is trained and that generates, on the same weights."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hybridflow.algorithms import Moments, Prepared, normalize_advantages
from hybridflow.batch import Batch
from hybridflow.checkpoint import HUGGING_FACE, CheckpointWriter, ShardEntry, load_shards, write_shard
from hybridflow.config import HybridflowError
from hybridflow.models import adapter_disabled, adapter_weights, iter_base_weights, save_model
from hybridflow.observability.phases import note_in_span
from hybridflow.roles.carried import CarriedTensor, Snapshot, Weights, carry, read_parts, write_description
from hybridflow.roles.engines import RolloutSettings, build_engine, build_tensor_engine
from hybridflow.roles.generator import Generator, GeneratorWorker, Members, place_workers
from hybridflow.roles.linking import Delivery, LinkEnd, build_sending_end
from hybridflow.roles.parts import TOKENS, RowDigest, add_columns, add_columns_together, cut_columns
from hybridflow.roles.policy import ModelSpec, build_policy, describe_policy, read_config
from hybridflow.roles.probing import SyncProbe
from hybridflow.roles.shares import plan_shares, split_rows
from hybridflow.roles.weight_sync import TrainedWeights, WeightSync
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.rollout.native.parallel import plan_shards
from hybridflow.runtime.api import HELD_BY_ASKED, Group, Pieces, Runtime, Seat
from hybridflow.train_engine import Layout, TrainEngine, TrainSettings, compute_model_work, join_ranks, plan_layout
from hybridflow.train_engine.memory import PLAIN_ROWS, SampledRows, read_free
from hybridflow.train_engine.ranks import ALONE
from hybridflow.types import (
    UNSHAPED,
    BatchRef,
    Metrics,
    MetricsRef,
    Objective,
    Ref,
    RowState,
    SamplingParams,
    Shaping,
    last,
    merge_metrics,
    total,
)
from hybridflow.weights import SameStorage
from hybridflow.weights.link import Member, plan_meeting
from hybridflow.weights.transports import SwitchTimer

CHUNKS_PER_TRAINER, MAX_CHUNKS = 8, 512
"""Chunks of a step for each trainer, enough for shares of nearly equal cost, and in all: each costs the controller something."""
SHARED_SYNCS_PER_PROBE = 50
"""Where generation runs on the trainer's own weights; elsewhere each sync is probed."""
MAX_FAILED_STEPS = 5
"""Steps in a row in which every row may fail; one more stops the run."""

R = TypeVar("R")

_log = logging.getLogger(__name__)


class AllRowsFailedError(HybridflowError, RuntimeError):
    """Step after step no row came out of rollout and reward."""


@dataclass(frozen=True)
class ActorSpec:
    """All that an actor's worker is built from. rows: those that it will train on."""

    model: ModelSpec
    train: TrainSettings
    rollout: RolloutSettings
    updates_per_step: int = 1
    rows: SampledRows = PLAIN_ROWS


class ActorWorker(GeneratorWorker):
    """The policy on its device, whole or a part of it.

    Where it is whole and the engine is native, training and generation take turns on one set of weights, and switching moves no bytes;
    else generation has a copy of its own, which `refresh` fills.

    Several of these train together as `train.parallel_config` says. Verbs that say so are collectives: all ranks are called.
    """

    def __init__(self, seat: Seat, spec: ActorSpec) -> None:
        self.policy = build_policy(spec.model, seat)
        self.rollout_engine = build_engine(self.policy, spec.rollout, seat)
        self._sends_adapter = spec.model.adapter is not None
        device = self.policy.model.device
        self.ranks = join_ranks(
            rank=seat.rank, size=seat.size, rendezvous=seat.rendezvous, device=device, timeout_s=seat.timeout_s
        )
        self.train_engine = TrainEngine(self.policy.model, spec.train, self.ranks, seed=spec.model.seed, rows=spec.rows)
        self._seat, self._spec = seat, spec
        self._is_whole = self.train_engine.mesh.layout.is_whole
        self._shares_weights = shares_weights(self.train_engine.mesh.layout, spec.rollout)
        self.rollout_ranks = ALONE
        self._copied_version: int | None = None
        self._sync: WeightSync | None = None
        self._same_storage = SameStorage(device)
        self._trained: TrainedWeights | None = None
        self._end: LinkEnd | None = None
        self._stored_version = -1
        together = ALONE if self._shares_weights else self.ranks
        self._probe = SyncProbe(self.train_engine, together, seed=spec.model.seed)
        self._syncs_since_probe = SHARED_SYNCS_PER_PROBE - 1
        self._rollout_metrics: list[Metrics] = []
        self.version = 0
        self._failed_steps = 0
        self._told_failures = False
        self._description: dict[str, bytes] = {}

    def log_prob(
        self, batch: Batch | None, sizes: tuple[int, ...], temperature: float, shaping: Shaping = UNSHAPED
    ) -> Pieces[Batch]:
        """Column `trainer_logprobs` [tokens of the row] float32: of each counted token, 0.0 elsewhere.

        A collective where ranks share the model. sizes: () on a rank whose columns another one returns.
        """
        logprobs = self.train_engine.log_prob(batch, temperature, shaping)
        return cut_columns(Batch.from_columns(trainer_logprobs=logprobs), sizes)

    def reference_log_prob(
        self, batch: Batch | None, sizes: tuple[int, ...], temperature: float, shaping: Shaping = UNSHAPED
    ) -> Pieces[Batch]:
        """Column `ref_logprobs`: the same of the model without its adapter: the policy as a new adapter found it."""
        with adapter_disabled(self.policy.model):
            logprobs = self.train_engine.log_prob(batch, temperature, shaping)
        return cut_columns(Batch.from_columns(ref_logprobs=logprobs), sizes)

    def update(
        self, batch: Batch | None, update_rows: Sequence[int], prepare: Callable[[Batch], Prepared], loss: Any
    ) -> Metrics:
        """Optimizer steps over this rank's rows, then a new version of the weights. A collective.

        batch:       whole groups with all their scores, the same on all ranks of a `data` index; None where these have none.
        update_rows: how many of the rows, one after the other, belong to each step; every rank takes every step.
        """
        steps_before = self.train_engine.steps_taken
        self._make_room()
        with self.ranks.leaving_on_error():
            prepared = self._prepare(batch, prepare)
            self._watch_failures(prepared.batch if prepared else None)
            parts = prepared.batch.split(update_rows) if prepared else [None] * len(update_rows)
            metrics = [self.train_engine.update(part, loss) for part in parts]
        if self._shares_weights:
            self.rollout_engine.wake()
        # A skipped step leaves the weights, and so the policy, as they were.
        if self.train_engine.steps_taken > steps_before:
            self.version += 1
            if self._shares_weights:
                self._follow()
        at = self.train_engine.mesh.at
        # Ranks of one data index have the same rows.
        counted = [prepared.metrics] if prepared and not (at.sequence or at.tensor) else []
        version: Metrics = {} if self.ranks.rank else {"policy/version": last(self.version)}
        syncs, self._rollout_metrics = self._rollout_metrics, []
        return merge_metrics([*counted, *metrics, *syncs, version])

    def _prepare(self, batch: Batch | None, prepare: Callable[[Batch], Prepared]) -> Prepared | None:
        """The rows as the loss reads them. A collective: what advantages may be normalised by is counted over the rows of all ranks."""
        prepared = None if batch is None else prepare(batch)
        own = (prepared and prepared.moments) or Moments()
        parts = [Moments(*part) for part in self.train_engine.mesh.data.gather(own)]
        return prepared and normalize_advantages(prepared, parts)

    def _follow(self) -> None:
        """Lets the rollout know that the weights which it shares are of a new version."""
        self.rollout_engine.load_weights(self.version)
        self._tell_switch(self._same_storage.push(self.version).metrics())
        self._syncs_since_probe += 1

    def before_rollout(self) -> None:
        """Probes what generation on the trainer's own weights holds beside them: after the first sync, then once in
        `SHARED_SYNCS_PER_PROBE`."""
        if self._shares_weights and self._syncs_since_probe >= SHARED_SYNCS_PER_PROBE:
            self._syncs_since_probe = 0
            self._rollout_metrics.append(self._probe.check(self.rollout_engine, self.version))

    def after_rollout(self) -> None:
        """What it cost is told with the next update."""
        self._rollout_metrics.append(self.rollout_engine.metrics())

    def _make_room(self) -> None:
        """Lets an engine with weights of its own on this device sleep until `refresh`, which sends it the weights anew; and one that
        shares them where its cache leaves too little for training."""
        keeps_weights, device = self._spec.rollout.keeps_weights, self.policy.model.device
        if keeps_weights and not self._spec.rollout.is_remote:
            self.rollout_engine.sleep()
            self._copied_version = None
        needed = self.train_engine.layers.estimate_pass_bytes()
        if not keeps_weights and device.type == "cuda" and read_free(device) < needed:
            self.rollout_engine.sleep()

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

    def refresh(self) -> None:
        """Brings the generation's own copy of the weights, which is made at the first call, to the present version. A collective."""
        self.rollout_engine.wake()
        if self._copied_version == self.version:
            return
        with self.ranks.leaving_on_error():
            if self._sync is None and not self._spec.rollout.keeps_weights:
                self._sync = self._build_copy()
            self._send()
            self._rollout_metrics.append(self._probe.check(self.rollout_engine, self.version))
        self._copied_version = self.version

    def _build_copy(self) -> WeightSync:
        """Lets a model of its own generate, whole or a part of it; returns what fills it from the parts that are trained. A collective."""
        if self._spec.rollout.native.tp > 1:
            return self._build_part()
        copied = build_policy(self._spec.model, self._seat)
        copied.model.module.requires_grad_(False)
        engine = NativeEngine(copied.model, copied.tokenizer, self._spec.rollout.native)
        # It may lay weights side by side, and from then on they stay where they are.
        engine.prepare()
        self.rollout_engine = engine
        return WeightSync(self.train_engine, copied.model, timeout_s=self._seat.timeout_s)

    def _build_part(self) -> WeightSync:
        """The same for a part of each matrix."""
        whole, rollout = self.policy.model, self._spec.rollout
        engine, self.rollout_ranks = build_tensor_engine(
            self.policy, rollout, self.ranks, whole.device, whole.dtype, self._seat.timeout_s
        )
        self.rollout_engine = engine
        layout = plan_shards(whole.config, size=self.ranks.size, tensor=rollout.native.tp, dtype=whole.dtype)
        return WeightSync(self.train_engine, engine.model, timeout_s=self._seat.timeout_s, layout=layout)

    def _send(self) -> None:
        if self._sync is None:
            with SwitchTimer(self.policy.model.device) as timer:
                if self._sends_adapter:
                    self.rollout_engine.load_adapter(self.version, self.train_engine.iter_adapter())
                else:
                    self.rollout_engine.load_weights(self.version, self.train_engine.iter_weights())
            switch = timer.switch(self.version, self._count_sent())
        else:
            switch = self._sync.push(self.version)
            self._sync.target.check_whole()
            self.rollout_engine.load_weights(self.version)
        self._tell_switch(switch.metrics())

    def _tell_switch(self, metrics: Metrics) -> None:
        """In the run's metrics and in the trace."""
        note_in_span(metrics)
        self._rollout_metrics.append(metrics)

    def _count_sent(self) -> int:
        """Bytes of a version for an engine that has a copy."""
        model = self.policy.model
        sent = adapter_weights(model).values() if self._sends_adapter else dict(iter_base_weights(model)).values()
        return sum(weight.numel() for weight in sent) * model.dtype.itemsize

    def offer_weights(self) -> Member | None:
        """Who this worker is to generators that live apart. A collective."""
        if self._end is None:
            with self.ranks.leaving_on_error():
                sent = build_sending_end(self._seat, self.train_engine, alone=self._sends_adapter)
            self._trained, self._end = sent
        return self._end.describe()

    def push_weights(self, trainers: Members, generators: Members) -> None:
        """Sends these generators the boxes that they need of what these trainers hold. A collective of all of them, where they can meet."""
        meeting = plan_meeting(trainers, generators)
        if self._end is None or self._trained is None or meeting is None:
            return
        with self.ranks.leaving_on_error():
            self._trained.forget()
            factors = self._trained.gather_factors(self.version)
        switch = self._end.push(meeting, self.version)
        if switch is not None:
            self._tell_switch(switch.after(factors).metrics())

    def publish(
        self, sent: tuple[Members, Members, tuple[Delivery | None, ...]], wanted: bool = True
    ) -> Pieces[Weights]:
        """What rollouts of this version name: the weights, or where all generators have taken them, only what these are held to. A
        collective where the model is in parts; `wanted` from one rank.

        sent: who was to send and to take, and what each of them has taken.
        """
        trainers, generators, taken = sent
        meeting = plan_meeting(trainers, generators)
        if meeting is not None and all(delivery == Delivery(meeting.key, self.version) for delivery in taken):
            made, digest = Weights(self.version, {}, self._probe.score()), HELD_BY_ASKED
        else:
            made, digest = self.weights(wanted), None
        return Pieces((made,), (digest,)) if wanted else Pieces((), ())

    def weights(self, wanted: bool = True) -> Weights:
        """The weights as generators take them whole: an adapter merged in, or the adapter alone. A collective where the model is in parts;
        `wanted` from one rank."""
        with self.ranks.leaving_on_error():
            with SwitchTimer(self.policy.model.device) as timer:
                sent = self.train_engine.iter_adapter() if self._sends_adapter else self.train_engine.iter_weights()
                tensors = {name: CarriedTensor.of(weight) for name, weight in sent if wanted}
            # Where they were lost and are made again, they count once.
            if wanted and self.version > self._stored_version:
                num_bytes = self._count_sent()
                told = timer.switch(self.version, num_bytes).metrics() | {"hybrid/bytes_stored": total(num_bytes)}
                self._tell_switch(told)
                self._stored_version = self.version
            return Weights(self.version, tensors, self._probe.score())

    def save(self, path: Path) -> ShardEntry:
        """Writes what this rank has to write of the training state, and what an export needs beside it; returns the index entry."""
        self.train_engine.check_weights()
        write_description(self._describe(), path.parent / HUGGING_FACE)
        tensors = self._own_state()
        return write_shard(path, tensors, self._state(), self.train_engine.state_layout())

    def load(self, directory: Path) -> None:
        """Takes up this rank's part of the state that a checkpoint holds, of whichever layout; the weights' addresses stay."""
        tensors, state = load_shards(directory, "actor", self.train_engine.state_layout())
        self._load_state(tensors, state)
        self._stored_version = -1

    def snapshot(self) -> Snapshot:
        """The training state, to be kept outside this process: all of it where the model is whole, else what this rank has to write."""
        tensors, boxes = self._own_state(), self.train_engine.state_layout()
        own = {name: boxes[name] for name in tensors}
        return Snapshot(self.ranks.rank, carry(tensors), own, self._state(), self._describe())

    def restore(self, *parts: Snapshot) -> None:
        """Takes up the state of a snapshot, in all its parts."""
        self._load_state(read_parts(parts, self.train_engine.state_layout()), parts[0].state)

    def export(self, directory: Path, wanted: bool = True) -> None:
        """Writes model and tokenizer as a Hugging Face directory, which is there whole or not at all; an adapter is merged in. A collective
        where the model is in parts; `wanted` from one rank."""
        beside = directory.with_name(f".writing-{directory.name}")
        with self.ranks.leaving_on_error():
            weights = {name: weight.cpu() for name, weight in self.train_engine.iter_weights() if wanted}
            if not wanted:
                return
            shutil.rmtree(beside, ignore_errors=True)
            save_model(self.policy.model, self.policy.tokenizer, beside, weights)
            shutil.rmtree(directory, ignore_errors=True)
            beside.rename(directory)

    def close(self) -> None:
        """Ends what the engine runs outside this process, and leaves the other ranks."""
        try:
            super().close()
        finally:
            self.ranks.leave()

    def _state(self) -> dict[str, Any]:
        return {**self.train_engine.state_json(), "version": self.version, "failed_steps": self._failed_steps}

    def _load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.train_engine.load_state(tensors, state)
        self.version, self._failed_steps = state["version"], state["failed_steps"]
        self._copied_version = None
        if self._sync is not None:
            self._sync.forget()
        if self._shares_weights:
            self.rollout_engine.load_weights(self.version)

    def _own_state(self) -> dict[str, Tensor]:
        """All of the state where the model is whole, else what this rank has to write."""
        tensors = self.train_engine.state_tensors()
        names = tensors.keys() if self._is_whole else self.train_engine.owned_state()
        return {name: tensor for name, tensor in tensors.items() if name in names}

    def _describe(self) -> dict[str, bytes]:
        """What an export needs beside the weights, by file name; where the model is in parts, with that of the first rank alone."""
        if not self._description and (self._is_whole or self.ranks.rank == 0):
            self._description = describe_policy(self.policy)
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
        return self._score(batch, ActorWorker.log_prob, "trainer")

    def reference_log_prob(self, batch: BatchRef) -> BatchRef:
        """The same under the model without its adapter."""
        return self._score(batch, ActorWorker.reference_log_prob, "reference")

    def _score(self, batch: BatchRef, verb: Callable[..., Pieces[Batch]], part: str) -> BatchRef:
        tokens, drawn = batch.only(TOKENS), (self._sampling.temperature, self._sampling.shaping)
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


def shares_weights(layout: Layout, rollout: RolloutSettings) -> bool:
    """Whether trainers generate with the very weights that they train, because each has all of them and the engine takes them so."""
    return layout.is_whole and not rollout.keeps_weights and rollout.native.tp == 1


def _hand_out(calls: Sequence[tuple[Any, ...]], layout: Layout) -> list[tuple[Any, ...]]:
    """By rank the arguments of its `data` index."""
    return [calls[layout.coordinates(rank).data] for rank in range(layout.size)]
