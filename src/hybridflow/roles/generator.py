"""A policy that only generates: the half of the actor that needs no optimizer."""

from __future__ import annotations

from contextlib import nullcontext

from hybridflow.batch import Batch
from hybridflow.observability.phases import note_in_span
from hybridflow.roles.carried import Weights
from hybridflow.roles.engines import RolloutSettings, build_generator, plan_replicas
from hybridflow.roles.linking import Delivery, LinkEnd, build_receiving_end
from hybridflow.roles.parts import cut_rollout, name_parts, name_rows
from hybridflow.roles.policy import ModelSpec
from hybridflow.roles.probing import ReceivedProbe
from hybridflow.rollout import NativeEngine
from hybridflow.runtime.api import Group, Pieces, Runtime, Seat
from hybridflow.train_engine import Ranks
from hybridflow.types import BatchRef, ChunkRef, Ref, SamplingParams
from hybridflow.weights import TornWeightsError
from hybridflow.weights.link import Member, plan_meeting

Members = tuple[Member | None, ...]
"""All workers of a group by rank, as they are to the other side of a link."""


class GeneratorWorker:
    """A model on its device, whole or a part of it, and the engine that samples from it.

    rollout_ranks: that generate with one model between them; `ALONE` where this worker has it whole.
    """

    rollout_ranks: Ranks
    _end: LinkEnd | None

    def __init__(self, seat: Seat, model: ModelSpec, rollout: RolloutSettings) -> None:
        # The policy itself is not kept: an engine with weights of its own has no need of it.
        self.rollout_engine, self.rollout_ranks = build_generator(model, rollout, seat)
        self._received, self._keeps_base = ReceivedProbe(), model.adapter is not None
        self._taken_version: int | None = None
        self._seat, self._end = seat, None

    def rollout(
        self, prompts: Batch, sampling: SamplingParams, step: int, sizes: tuple[int, ...], weights: Weights | None
    ) -> Pieces[Batch]:
        """Samples of each prompt, group by group, in chunks of these numbers of rows; the step keys the draws.

        A collective of `rollout_ranks`, all with the same prompts.

        sizes:   () on a rank whose samples another one returns.
        weights: those to sample from; None: those that the worker has.
        """
        with self.rollout_ranks.leaving_on_error():
            if weights is not None and weights.version != self._taken_version:
                self._take(weights)
            self.before_rollout()
            samples = self.rollout_engine.generate(prompts, sampling, step=step)
            self.after_rollout()
        return cut_rollout(samples, sizes) if sizes else Pieces((), ())

    def expect_weights(self, trainers: Members) -> Member | None:
        """Who this worker is to these trainers; None where one of them is not there, or its engine takes no boxes of weights."""
        if None in trainers or not isinstance(self.rollout_engine, NativeEngine):
            return None
        if self._end is None:
            self._end = build_receiving_end(self._seat, self.rollout_engine)
        return self._end.describe()

    def pull_weights(self, trainers: Members, generators: Members) -> Delivery | None:
        """Takes the version that these trainers send to these generators; None where it has not come whole. The next rollout probes it.

        A collective of all of them, where they can meet; a rollout loads weights anew after it, since they may be half of an older version.
        """
        meeting = plan_meeting(trainers, generators)
        if self._end is None or meeting is None:
            return None
        self._taken_version = None
        switch = self._end.pull(meeting)
        if switch is None:
            return None
        note_in_span(switch.metrics())
        return Delivery(meeting.key, switch.version)

    def _take(self, weights: Weights) -> None:
        if weights.tensors:
            self._load(weights)
        elif self._end is None or not self._end.holds(weights.version):
            raise TornWeightsError(
                f"version {weights.version} of the weights was to be here and is not whole; please report it"
            )
        else:
            self.rollout_engine.load_weights(weights.version)
        self._received.check(self.rollout_engine, weights.scores, weights.version)
        # After the check: weights that failed it are taken and checked again by the next call.
        self._taken_version = weights.version

    def _load(self, weights: Weights) -> None:
        """Weights that lie in the object store, over whatever a link has left."""
        given = ((name, carried.tensor()) for name, carried in weights.tensors.items())
        with nullcontext() if self._end is None else self._end.filling(weights.version):
            if self._keeps_base:
                self.rollout_engine.load_adapter(weights.version, given)
            else:
                self.rollout_engine.load_weights(weights.version, given)

    def before_rollout(self) -> None:
        """Nothing; what a worker that also trains sees to first. The verb is called as this class's function, so it has no override."""

    def after_rollout(self) -> None:
        """The same, once the samples are there."""

    def close(self) -> None:
        """Ends what the engine runs outside this process, and leaves the ranks that generate with it, or send it weights."""
        try:
            if self._end is not None:
                self._end.close()
            self.rollout_engine.close()
        finally:
            self.rollout_ranks.leave()


class Generator:
    """Verbs of a generating role on the page. Each returns at once.

    group:         with `rollout.native.tp` a gang, of which so many neighbours generate with one model between them.
    chunks_wanted: into about how many chunks a step's rows are cut, so that others can share them out.
    """

    def __init__(
        self,
        runtime: Runtime,
        group: Group[GeneratorWorker],
        rollout: RolloutSettings,
        sampling: SamplingParams,
        chunks_wanted: int = 1,
    ) -> None:
        self._runtime, self._generators = runtime, group
        self._calls_per_worker, self._sampling, self._chunks_wanted = rollout.chunks, sampling, chunks_wanted
        self._weights: Ref[Weights] | None = None
        self._replicas = plan_replicas(rollout, group.size)

    def rollout(self, prompts: Batch, *, step: int, sampling: SamplingParams | None = None) -> BatchRef:
        """`samples_per_prompt` samples of each prompt; `sampling` stands in for the role's own (evaluation)."""
        chosen = sampling or self._sampling
        num_calls = min(self._calls_per_worker * self._replicas.data, max(prompts.num_rows, 1))
        chunks: list[ChunkRef] = []
        first_row = 0
        for part in prompts.split(num_calls):
            sizes = self._plan_chunks(part.num_rows, num_calls, chosen.samples_per_prompt)
            label = name_rows(first_row, sum(sizes))
            chunks += name_parts(self._submit(part, chosen, step, sizes, label), sizes)
            first_row += sum(sizes)
        return BatchRef(tuple(chunks))

    def _submit(
        self, prompts: Batch, sampling: SamplingParams, step: int, sizes: tuple[int, ...], rows: str
    ) -> tuple[Ref[Batch], ...]:
        """A call on whichever worker is free, or replica of several, of which the first returns the samples."""
        count, others = 2 * len(sizes), self._replicas.tensor - 1
        if not others:
            args = (prompts, sampling, step, sizes, self._weights)
            return self._runtime.submit_pieces(self._generators, GeneratorWorker.rollout, count, *args, rows=rows)
        calls = [(prompts, sampling, step, told, self._weights) for told in (sizes, *[()] * others)]
        counts = [count, *[0] * others]
        return self._runtime.submit_team_pieces(self._generators, GeneratorWorker.rollout, counts, calls, rows)[0]

    def _plan_chunks(self, num_prompts: int, num_calls: int, samples: int) -> tuple[int, ...]:
        """Rows of each chunk of one call: whole groups, as even as they come."""
        count = max(min(self._chunks_wanted // num_calls, num_prompts), 1)
        return tuple(samples * (num_prompts // count + (index < num_prompts % count)) for index in range(count))


def place_generator(
    runtime: Runtime, model: ModelSpec, rollout: RolloutSettings, sampling: SamplingParams
) -> Generator:
    """A generator on workers of its own."""
    return Generator(runtime, place_workers(runtime, model, rollout), rollout, sampling)


def place_workers(runtime: Runtime, model: ModelSpec, rollout: RolloutSettings) -> Group[GeneratorWorker]:
    """Workers that only generate; a gang where several share a model."""
    place = runtime.place_gang if rollout.native.tp > 1 else runtime.place
    return place("rollout", GeneratorWorker, model, rollout)
