"""A policy that only generates: the half of the actor that needs no optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config import Field, HybridflowError, settings
from hybridflow.models import LanguageModel
from hybridflow.roles.carried import Weights
from hybridflow.roles.parts import cut_rollout, name_parts, name_rows
from hybridflow.roles.policy import ModelSpec, build_policy
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.runtime.api import Group, Pieces, Runtime, Seat
from hybridflow.types import BatchRef, ChunkRef, Ref, SamplingParams


@settings
class RolloutSettings:
    """How samples are generated."""

    native: NativeSettings = Field(default_factory=NativeSettings)
    """Limits of the native engine."""
    chunks: int = Field(default=1, ge=1)
    """Calls that each generating worker's part of a step is split into; with more than one, scoring starts while later ones still
    generate, and a worker that is done early takes from the others (Ray)."""


class WeightsError(HybridflowError, ValueError):
    """Weights that were sent do not fit the model that they are for."""


@torch.no_grad()
def copy_weights(model: LanguageModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Takes up a trainer's weights, rounded to this model's own type; the addresses stay."""
    own = dict(model.module.named_parameters())
    there = set()
    for name, weight in weights:
        there.add(name)
        if name in own:
            own[name].copy_(weight)
    odd = sorted(set(own) ^ there)
    if odd:
        raise WeightsError(
            f"weight '{odd[0]}' is not on both sides ({len(odd)} such); give actor and rollout one model"
        )


class GeneratorWorker:
    """A model on its device and the engine that samples from it."""

    def __init__(self, seat: Seat, model: ModelSpec, rollout: RolloutSettings) -> None:
        self.policy = build_policy(model, seat)
        self.rollout_engine = NativeEngine(self.policy.model, self.policy.tokenizer, rollout.native)

    def rollout(
        self, prompts: Batch, sampling: SamplingParams, step: int, sizes: tuple[int, ...], weights: Weights | None
    ) -> Pieces[Batch]:
        """Samples of each prompt, group by group, in chunks of these numbers of rows; the step keys the draws.

        weights: those to sample from; None: those that the worker has.
        """
        if weights is not None and weights.version != self.rollout_engine.version:
            copy_weights(self.policy.model, ((name, carried.tensor()) for name, carried in weights.tensors.items()))
            self.rollout_engine.load_weights(weights.version)
        return cut_rollout(self.rollout_engine.generate(prompts, sampling, step=step), sizes)

    def close(self) -> None:
        """Nothing runs outside this process."""


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
