"""The actor in its processes: the policy that is trained and that generates, on the same weights or with a copy of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridflow.algorithms import Moments, Prepared, normalize_advantages
from hybridflow.batch import Batch
from hybridflow.checkpoint import HUGGING_FACE, ShardEntry, load_shards, write_shard
from hybridflow.models import adapter_disabled, adapter_weights, iter_base_weights, save_model
from hybridflow.observability.phases import note_in_span
from hybridflow.roles.carried import CarriedTensor, Snapshot, Weights, carry, read_parts, write_description
from hybridflow.roles.engines import RolloutSettings, build_engine, build_tensor_engine
from hybridflow.roles.failures import FailureWatch
from hybridflow.roles.generator import GeneratorWorker, Members
from hybridflow.roles.linking import Delivery, LinkEnd, build_sending_end
from hybridflow.roles.parts import cut_columns
from hybridflow.roles.policy import ModelSpec, build_policy, describe_policy
from hybridflow.roles.probing import SyncProbe
from hybridflow.roles.weight_sync import TrainedWeights, WeightSync
from hybridflow.rollout import NativeEngine
from hybridflow.rollout.native.parallel import plan_shards
from hybridflow.runtime.api import HELD_BY_ASKED, Pieces, Seat
from hybridflow.train_engine import Layout, TrainEngine, TrainSettings, join_ranks
from hybridflow.train_engine.memory import PLAIN_ROW_MEMORY, RowMemory, read_free
from hybridflow.train_engine.ranks import ALONE
from hybridflow.types import UNSHAPED, Metrics, Shaping, last, merge_metrics, total
from hybridflow.weights import SameStorage
from hybridflow.weights.link import Member, plan_meeting
from hybridflow.weights.transports import SwitchTimer

SHARED_SYNCS_PER_PROBE = 50
"""Where generation runs on the trainer's own weights; elsewhere each sync is probed."""


@dataclass(frozen=True)
class ActorSpec:
    """All that an actor's worker is built from. expected: see `TrainEngine`."""

    model: ModelSpec
    train: TrainSettings
    rollout: RolloutSettings
    updates_per_step: int = 1
    expected: RowMemory = PLAIN_ROW_MEMORY


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
        self.train_engine = TrainEngine(
            self.policy.model, spec.train, self.ranks, seed=spec.model.seed, expected=spec.expected
        )
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
        self._failures = FailureWatch(self.ranks)
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
        """Column `ref_logprobs`, as `log_prob`, of the model without its adapter: the policy as a new adapter found it."""
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
            self._failures.check(prepared.batch if prepared else None)
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
        return {**self.train_engine.state_json(), "version": self.version, "failed_steps": self._failures.failed_steps}

    def _load_state(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.train_engine.load_state(tensors, state)
        self.version, self._failures.failed_steps = state["version"], state["failed_steps"]
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


def shares_weights(layout: Layout, rollout: RolloutSettings) -> bool:
    """Whether trainers generate with the very weights that they train, because each has all of them and the engine takes them so."""
    return layout.is_whole and not rollout.keeps_weights and rollout.native.tp == 1
