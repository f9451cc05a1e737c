"""A policy that only generates: the half of the actor that needs no optimizer."""

from __future__ import annotations

from hybridflow.batch import Batch
from hybridflow.roles.carried import Weights
from hybridflow.roles.engines import RolloutSettings, build_engine
from hybridflow.roles.parts import cut_rollout, name_parts, name_rows
from hybridflow.roles.policy import ModelSpec, build_policy
from hybridflow.roles.probing import ReceivedProbe
from hybridflow.rollout import NativeEngine
from hybridflow.runtime.api import Group, Pieces, Runtime, Seat
from hybridflow.types import BatchRef, ChunkRef, Ref, SamplingParams


class GeneratorWorker:
    """A model on its device and the engine that samples from it."""

    def __init__(self, seat: Seat, model: ModelSpec, rollout: RolloutSettings) -> None:
        # The policy itself is not kept: an engine with weights of its own has no need of it.
        self.rollout_engine = build_engine(build_policy(model, seat), rollout, seat)
        self._received = ReceivedProbe()

    def rollout(
        self, prompts: Batch, sampling: SamplingParams, step: int, sizes: tuple[int, ...], weights: Weights | None
    ) -> Pieces[Batch]:
        """Samples of each prompt, group by group, in chunks of these numbers of rows; the step keys the draws.

        weights: those to sample from; None: those that the worker has.
        """
        if weights is not None and weights.version != self.rollout_engine.version:
            given = ((name, carried.tensor()) for name, carried in weights.tensors.items())
            self.rollout_engine.load_weights(weights.version, given)
            self._check_received(weights)
        self.before_rollout()
        samples = self.rollout_engine.generate(prompts, sampling, step=step)
        self.after_rollout()
        return cut_rollout(samples, sizes)

    def _check_received(self, weights: Weights) -> None:
        # Another engine has the weights in a model of its own.
        if isinstance(self.rollout_engine, NativeEngine):
            self._received.check(self.rollout_engine.model, weights.scores, weights.version)

    def before_rollout(self) -> None:
        """Nothing; what a worker that also trains sees to first. The verb is called as this class's function, so it has no override."""

    def after_rollout(self) -> None:
        """The same, once the samples are there."""

    def close(self) -> None:
        """Ends what the engine runs outside this process."""
        self.rollout_engine.close()


class Generator:
    """Verbs of a generating role on the page. Each returns at once.

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

    def rollout(self, prompts: Batch, *, step: int, sampling: SamplingParams | None = None) -> BatchRef:
        """`samples_per_prompt` samples of each prompt; `sampling` stands in for the role's own (evaluation)."""
        chosen = sampling or self._sampling
        num_calls = min(self._calls_per_worker * self._generators.size, max(prompts.num_rows, 1))
        chunks: list[ChunkRef] = []
        first_row = 0
        for part in prompts.split(num_calls):
            sizes = self._plan_chunks(part.num_rows, num_calls, chosen.samples_per_prompt)
            label = name_rows(first_row, sum(sizes))
            refs = self._runtime.submit_pieces(
                self._generators,
                GeneratorWorker.rollout,
                2 * len(sizes),
                part,
                chosen,
                step,
                sizes,
                self._weights,
                rows=label,
            )
            chunks += name_parts(refs, sizes)
            first_row += sum(sizes)
        return BatchRef(tuple(chunks))

    def _plan_chunks(self, num_prompts: int, num_calls: int, samples: int) -> tuple[int, ...]:
        """Rows of each chunk of one call: whole groups, as even as they come."""
        count = max(min(self._chunks_wanted // num_calls, num_prompts), 1)
        return tuple(samples * (num_prompts // count + (index < num_prompts % count)) for index in range(count))


def place_generator(
    runtime: Runtime, model: ModelSpec, rollout: RolloutSettings, sampling: SamplingParams
) -> Generator:
    """A generator on workers of its own."""
    return Generator(runtime, runtime.place("rollout", GeneratorWorker, model, rollout), rollout, sampling)
