"""Trainers of any layout fill the parts that generate, and a part that stays behind stops the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from processes import Place, run_ranks
from test_actor_layouts import build_worker, spec_of, tokenizer, train

from hybridflow.batch import Batch
from hybridflow.models import LoraSettings
from hybridflow.roles.actor_worker import ActorSpec
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.generator import GeneratorWorker
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.runtime.api import Seat
from hybridflow.train_engine import ParallelConfig
from hybridflow.types import SamplingParams, merge_metrics
from hybridflow.weights.probe import ProbeError, iter_moved

__all__ = ["tokenizer"]

PROMPTS = Batch.from_columns(group_id=[0, 1], prompt_tokens=[[5, 6, 7], [8, 9, 3, 4]])
SAMPLING = SamplingParams(max_new_tokens=6, samples_per_prompt=2)


def tensor_spec(tokenizer: str, parallel: ParallelConfig, lora: LoraSettings | None = None) -> ActorSpec:
    rollout = RolloutSettings(native=NativeSettings(tp=2))
    return dataclasses.replace(spec_of(tokenizer, parallel, lora), rollout=rollout)


class Told(NamedTuple):
    """What a rank has: the gap that its probe found last, what moved to it, how many boxes differ from the trainer's, and its samples."""

    gap: float
    moved: float
    num_odd: int
    tokens: list[list[int]]
    versions: set[int]


def follow(place: Place, spec: ActorSpec) -> Told:
    """Two updates, with far-off weights sent first."""
    worker = build_worker(place, spec)
    worker.refresh()
    engine = worker.rollout_engine
    assert isinstance(engine, NativeEngine) and engine.group is not None
    own = dict(engine.model.module.named_parameters())
    addresses = [weight.data_ptr() for weight in own.values()]
    with torch.no_grad():
        for name, weight in iter_moved([(name, weight.detach()) for name, weight in own.items()], seed=1):
            own[name].copy_(weight)
    train(worker, 2)
    worker.refresh()
    told = merge_metrics(worker._rollout_metrics[-2:])
    assert [weight.data_ptr() for weight in own.values()] == addresses
    whole = dict(worker.train_engine.iter_weights())
    num_odd = 0
    for name, held in engine.group.layout.tensors.items():
        box = held.placement.box(engine.group.ranks.rank)
        part = whole[name][tuple(slice(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True))]
        num_odd += not torch.allclose(part, own[name], rtol=0, atol=1e-7)
    sizes = (4,) if engine.group.ranks.rank == 0 else ()
    pieces = GeneratorWorker.rollout(worker, PROMPTS, SAMPLING, 1, sizes, None)
    assert len(pieces.objects) == 2 * len(sizes)
    samples = engine.generate(PROMPTS, SAMPLING, step=1)
    versions = set(samples.numpy("policy_version_min").tolist())
    worker.close()
    gap, moved = told["probe/max_gap"].value, told["hybrid/bytes_moved"].value
    return Told(gap, moved, num_odd, samples.pylist("tokens"), versions)


@pytest.mark.parametrize(
    ("parallel", "lora", "size"),
    [
        (ParallelConfig(shard=2), None, 2),
        (ParallelConfig(tp=2), None, 2),
        (ParallelConfig(), None, 2),
        (ParallelConfig(shard=2), LoraSettings(rank=2, alpha=4.0), 2),
        (ParallelConfig(tp=2, shard=2), None, 4),
        (ParallelConfig(sp=2, shard=4), None, 4),
    ],
    ids=str,
)
def test_every_layout_of_trainers_fills_the_parts(
    parallel: ParallelConfig, lora: LoraSettings | None, size: int, tokenizer: str, tmp_path: Path
) -> None:
    ranks = run_ranks(size, follow, tensor_spec(tokenizer, parallel, lora), directory=tmp_path, timeout_s=90.0)
    for told in ranks:
        assert told.gap < 1e-6 and told.num_odd == 0 and told.versions == {2}
        assert told.tokens == ranks[0].tokens
        # Where each trainer has everything, and where trainers are split as the rollout is but for the embedding, little or nothing moves.
        assert (told.moved == 0) == (parallel == ParallelConfig())


def stay_behind(place: Place, spec: ActorSpec, name: str) -> str:
    """What is said where one part of one weight does not arrive at rank 1."""
    worker = build_worker(place, spec)
    worker.refresh()
    engine, sync = worker.rollout_engine, worker._sync
    assert isinstance(engine, NativeEngine) and sync is not None
    part = dict(engine.model.module.named_parameters())[name]
    moved = next(weight for _, weight in iter_moved([(name, part.detach())], seed=2))
    push = sync.push

    def push_without(version: int) -> object:
        switch = push(version)
        if place.rank == 1:
            part.data.copy_(moved)
        return switch

    sync.push = push_without  # type: ignore[method-assign, assignment]
    train(worker, 1)
    with pytest.raises(ProbeError) as caught:
        worker.refresh()
    worker.close()
    return str(caught.value)


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "up_proj", "down_proj"])
def test_a_part_that_did_not_arrive_stops_the_run(name: str, tokenizer: str, tmp_path: Path) -> None:
    full = f"model.layers.0.{'self_attn' if name in ('q_proj', 'o_proj') else 'mlp'}.{name}.weight"
    spec = tensor_spec(tokenizer, ParallelConfig(shard=2))
    for message in run_ranks(2, stay_behind, spec, full, directory=tmp_path, timeout_s=60.0):
        assert message.startswith("version 1 of the weights is not the same on both sides: over ")


def receive(place: Place, spec: ActorSpec, weights: object) -> tuple[list[list[int]], int, str]:
    """Samples of a generator that is apart, from weights that it is sent; and what it says of a part that came wrong."""
    seat = Seat("rollout", place.rank, place.size, rendezvous=place.rendezvous, timeout_s=30.0)
    generator = GeneratorWorker(seat, spec.model, spec.rollout)
    first = generator.rollout(PROMPTS, SAMPLING, 0, (4,), None)
    generator.rollout(PROMPTS, SAMPLING, 1, (4,), weights)  # type: ignore[arg-type]
    name = "model.layers.1.mlp.down_proj.weight"
    carried = weights.tensors[name]  # type: ignore[attr-defined]
    spoilt = {name: dataclasses.replace(carried, data=np.zeros_like(carried.data))}
    tensors = {**weights.tensors, **spoilt}  # type: ignore[attr-defined]
    sent = dataclasses.replace(weights, version=3, tensors=tensors)  # type: ignore[type-var]
    with pytest.raises(ProbeError) as caught:
        generator.rollout(PROMPTS, SAMPLING, 2, (4,), sent)  # type: ignore[arg-type]
    tokens = first.objects[0].pylist("tokens")
    version = int(generator.rollout_engine.version)
    generator.close()
    return tokens, version, str(caught.value)


def give(place: Place, spec: ActorSpec) -> tuple[object, list[list[int]]]:
    """Weights after two steps, and samples of the model at first."""
    worker = build_worker(place, spec)
    samples = worker.rollout_engine.generate(PROMPTS, SAMPLING, step=0)
    train(worker, 2)
    weights = worker.weights()
    worker.close()
    return weights, samples.pylist("tokens")


def test_generators_apart_take_their_parts_of_what_they_are_sent(tokenizer: str, tmp_path: Path) -> None:
    ((weights, expected),) = run_ranks(1, give, spec_of(tokenizer, ParallelConfig()), directory=tmp_path)
    spec = tensor_spec(tokenizer, ParallelConfig())
    for tokens, version, message in run_ranks(2, receive, spec, weights, directory=tmp_path, timeout_s=60.0):
        assert tokens == expected and version == 3
        assert message.startswith("version 3 of the weights is not the same on both sides")
