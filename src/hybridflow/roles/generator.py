"""A policy that only generates: the half of the actor that needs no optimizer."""

from __future__ import annotations

from hybridflow.batch import Batch
from hybridflow.config import Field, settings
from hybridflow.roles.policy import ModelSpec, build_policy
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.runtime.api import Runtime, Worker
from hybridflow.types import BatchRef, SamplingParams


@settings
class RolloutSettings:
    """How samples are generated."""

    native: NativeSettings = Field(default_factory=NativeSettings)
    """Limits of the native engine."""
    chunks: int = Field(default=1, ge=1)
    """Calls that a step's prompts are split into; with more than one, scoring starts while later ones still generate (Ray)."""


class GeneratorWorker:
    """A model on its device and the engine that samples from it."""

    def __init__(self, model: ModelSpec, rollout: RolloutSettings) -> None:
        self.policy = build_policy(model)
        self.rollout_engine = NativeEngine(self.policy.model, self.policy.tokenizer, rollout.native)

    def rollout(self, prompts: Batch, sampling: SamplingParams, step: int) -> Batch:
        """Samples of each prompt, group by group; the step keys the draws."""
        return self.rollout_engine.generate(prompts, sampling, step=step)

    def close(self) -> None:
        """Nothing runs outside this process."""


class Generator:
    """Verbs of a generating role on the page. Each returns at once."""

    def __init__(
        self, runtime: Runtime, worker: Worker[GeneratorWorker], rollout: RolloutSettings, sampling: SamplingParams
    ) -> None:
        self._runtime, self._worker = runtime, worker
        self._max_chunks, self._sampling = rollout.chunks, sampling

    def rollout(self, prompts: Batch, *, step: int, sampling: SamplingParams | None = None) -> BatchRef:
        """`samples_per_prompt` samples of each prompt; `sampling` stands in for the role's own (evaluation)."""
        chosen = sampling or self._sampling
        parts = prompts.split(min(self._max_chunks, max(prompts.num_rows, 1)))
        chunks = (self._runtime.submit(self._worker, GeneratorWorker.rollout, part, chosen, step) for part in parts)
        return BatchRef(tuple(chunks), tuple(part.num_rows * chosen.samples_per_prompt for part in parts))


def place_generator(
    runtime: Runtime, model: ModelSpec, rollout: RolloutSettings, sampling: SamplingParams
) -> Generator:
    """A generator on a worker of its own."""
    return Generator(runtime, runtime.place("generator", GeneratorWorker, model, rollout), rollout, sampling)
