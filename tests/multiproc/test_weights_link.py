"""Weights to generators that live apart, between real processes: every bit, in buckets, and what a member leaves that dies midway."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Place, run_ranks
from test_actor_layouts import spec_of, train
from test_weights_transports import (
    BUCKET_BYTES,
    DIMS,
    SHAPES,
    build_buffers,
    build_whole,
    cut,
    list_wrong,
    trainers,
)
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.flow.quickstart import write_sums
from hybridflow.models import LoraSettings, adapter_weights
from hybridflow.roles.actor_worker import ActorSpec, ActorWorker
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.generator import GeneratorWorker
from hybridflow.roles.linking import Delivery, LinkEnd
from hybridflow.rollout import NativeSettings
from hybridflow.runtime.api import HELD_BY_ASKED, Seat
from hybridflow.train_engine import ParallelConfig
from hybridflow.types import SamplingParams, merge_metrics
from hybridflow.weights import TargetWeights, TornWeightsError, plan_rollout, plan_trainers
from hybridflow.weights.link import Meeting, Member, plan_meeting

# Who meets where


def member(token: str, **changes: Any) -> Member:
    known = Member(token, "10.0.0.1", int(token, 36), "cuda", f"file:///tmp/{token}", 29500)
    return dataclasses.replace(known, **changes)


def test_all_members_come_to_the_same_meeting_and_one_that_was_replaced_to_another() -> None:
    first = plan_meeting((member("a"), member("b")), (member("c"),))
    assert first == Meeting(first.key if first else "", "file:///tmp/a", ("a", "b", "c"), 2, (0, 0, 0))
    again = plan_meeting((member("a"), member("b")), (member("d"),))
    assert first is not None and again is not None and first.key != again.key
    far = plan_meeting((member("a"),), (member("c", address="10.0.0.2"),))
    assert far is not None and (far.rendezvous, far.nodes) == ("tcp://10.0.0.1:29500", (0, 1))


def test_who_cannot_meet_does_not() -> None:
    pair = (member("a"),), (member("b"),)
    met = plan_meeting(*pair)
    assert met is not None
    assert plan_meeting(pair[0], (None,)) is None
    assert plan_meeting(pair[0], (member("b"), None)) is None
    assert plan_meeting(pair[0], (member("b", pid=pair[0][0].pid),)) is None, "one process waits for itself"
    assert plan_meeting(pair[0], (member("b", device="cpu"),)) is None
    assert plan_meeting(pair[0], (member("b", broken=met.key),)) is None
    assert plan_meeting(pair[0], (member("b", broken="another"),)) == met
    assert plan_meeting((), ()) is None


# Boxes over a link


@dataclass(frozen=True)
class Route:
    """From how many trainers, split how, to how many generators of a tensor-parallel degree."""

    degrees: tuple[tuple[str, int], ...]
    num_generators: int
    tensor: int = 1

    @property
    def num_trainers(self) -> int:
        return int(np.prod([degree for _, degree in self.degrees]))

    def build_end(self, rank: int, device: str = "cpu") -> tuple[LinkEnd, dict[str, Tensor]]:
        """The end of this rank, and what it trains or fills; storages are full of NaN."""
        seat, on = Seat("any"), torch.device(device)
        if rank < self.num_trainers:
            layout = plan_trainers(SHAPES, DIMS, **dict(self.degrees))
            held = cut(layout, rank, build_whole(0), device)
            return LinkEnd(seat, on, layout, sources=held, target=None, bucket_bytes=BUCKET_BYTES), held
        layout = plan_rollout(SHAPES, DIMS, ranks=range(self.tensor), size=self.tensor, tensor=self.tensor)
        held = build_buffers(layout, (rank - self.num_trainers) % self.tensor, device)
        end = LinkEnd(seat, on, layout, sources={}, target=TargetWeights(held), bucket_bytes=BUCKET_BYTES)
        return end, held

    def train(self, rank: int, held: dict[str, Tensor], version: int) -> None:
        """The version at a trainer; NaN at a generator."""
        if rank >= self.num_trainers:
            for buffer in held.values():
                buffer.fill_(torch.nan)
            return
        layout = plan_trainers(SHAPES, DIMS, **dict(self.degrees))
        for name, part in cut(layout, rank, build_whole(version)).items():
            held[name].copy_(part)

    def list_wrong(self, rank: int, held: dict[str, Tensor], version: int) -> list[str]:
        """Tensors of a generator that are not the version's."""
        if rank < self.num_trainers:
            return []
        layout = plan_rollout(SHAPES, DIMS, ranks=range(self.tensor), size=self.tensor, tensor=self.tensor)
        return list_wrong(layout, (rank - self.num_trainers) % self.tensor, held, version)


ROUTES = {
    "one to one": Route(trainers(), 1),
    "shard 2 to one": Route(trainers(shard=2), 1),
    "shard 2 to two": Route(trainers(shard=2), 2),
    "tensor 2 to one": Route(trainers(tensor=2), 1),
    "tensor 2 to two": Route(trainers(tensor=2), 2),
    "replicate 2 to two": Route(trainers(replicate=2), 2),
    "shard 2 to one of tensor 2": Route(trainers(shard=2), 2, tensor=2),
    "tensor 2 to one of tensor 2": Route(trainers(tensor=2), 2, tensor=2),
    "one to three": Route(trainers(), 3),
    "shard 3 to one": Route(trainers(shard=3), 1),
}
TAKE_PART = max(route.num_trainers + route.num_generators for route in ROUTES.values())


class Board:
    """Where processes tell each other what the controller would."""

    def __init__(self, place: Place, size: int) -> None:
        self._rank, self._size = place.rank, size
        self._store = dist.FileStore(place.rendezvous.removeprefix("file://") + "-board", size)

    def gather(self, subject: str, told: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """What each rank has told, by rank."""
        self._store.set(f"{subject}/{self._rank}", json.dumps(told))
        return [json.loads(self._store.get(f"{subject}/{rank}")) for rank in ranks or range(self._size)]

    def meet(self, subject: str, own: Member | None, num_trainers: int, ranks: Sequence[int]) -> tuple[Any, Any]:
        """The members on either side."""
        told = self.gather(subject, own and dataclasses.asdict(own), ranks)
        members = tuple(None if fields is None else Member(**fields) for fields in told)
        return members[:num_trainers], members[num_trainers:]


def follow_links(place: Place, routes: list[Route], kind: str = "cpu") -> list[dict[str, Any]]:
    """What each rank of a route saw of two versions; nothing of the ranks that have no part in it."""
    board, found = Board(place, place.size), []
    device = "cpu" if kind == "cpu" else f"cuda:{place.rank}"
    for index, route in enumerate(routes):
        size = route.num_trainers + route.num_generators
        if place.rank >= size:
            found.append({})
            continue
        end, held = route.build_end(place.rank, device)
        told: dict[str, Any] = {"wrong": [], "versions": [], "moved": []}
        links = []
        for version in (1, 2):
            sides = board.meet(f"{index}/{version}", end.describe(), route.num_trainers, range(size))
            meeting = plan_meeting(*sides)
            assert meeting is not None
            route.train(place.rank, held, version)
            is_trainer = place.rank < route.num_trainers
            switch = end.push(meeting, version) if is_trainer else end.pull(meeting)
            assert switch is not None
            told["wrong"] += route.list_wrong(place.rank, held, version)
            told["versions"].append(switch.version if is_trainer or end.holds(version) else None)
            told["moved"].append(switch.bytes_moved)
            links.append(end._link)
        assert links[0] is links[1] and end._transport is not None
        told["buckets"] = [bucket.num_bytes for bucket in end._transport._buckets]
        board.gather(f"{index}/done", None, range(size))
        end.close()
        found.append(told)
    return found


def test_two_updates_bring_the_bits_of_the_whole_model_in_buckets(tmp_path: Path) -> None:
    check_links(ROUTES, run_ranks(TAKE_PART, follow_links, list(ROUTES.values()), directory=tmp_path, timeout_s=90.0))


def check_links(routes: Mapping[str, Route], by_rank: list[Any]) -> None:
    """The bits of both versions on every generator, over one link, in buckets, by bytes that both sides tell alike."""
    assert all(found is not None for found in by_rank), "a rank died; its error is above"
    whole = sum(2 * int(np.prod(shape)) for shape in SHAPES.values())
    for index, (name, route) in enumerate(routes.items()):
        size = route.num_trainers + route.num_generators
        found = [results[index] for results in by_rank[:size]]
        assert [told["wrong"] for told in found] == [[]] * size, name
        assert [told["versions"] for told in found] == [[1, 2]] * size, name
        assert max(max(told["buckets"]) for told in found) <= BUCKET_BYTES, name
        assert len(found[0]["buckets"]) > 2, name
        sent, taken = found[: route.num_trainers], found[route.num_trainers :]
        if route.tensor == 1:
            assert [told["moved"] for told in taken] == [[whole, whole]] * route.num_generators, name
        # Each byte is told of once on either side, and where trainers are alike they share the sending.
        assert sum(told["moved"][0] for told in sent) == sum(told["moved"][0] for told in taken), name
        assert (
            max(told["moved"][0] for told in sent) < 0.7 * sum(told["moved"][0] for told in sent) or len(sent) == 1
        ), name


# Deaths in the middle


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def break_off(place: Place, route: Route, dying: int) -> dict[str, Any]:
    """One rank dies in the middle of the second version; then the others meet without it, where there are some left on both sides."""
    messages, board = Messages(), Board(place, place.size)
    logging.getLogger("hybridflow.roles.linking").addHandler(messages)
    end, held = route.build_end(place.rank)
    ranks, is_trainer = list(range(place.size)), place.rank < route.num_trainers

    def move(subject: str, version: int) -> Any:
        left = sum(rank < route.num_trainers for rank in ranks)
        meeting = plan_meeting(*board.meet(subject, end.describe(), left, ranks))
        if meeting is None:
            return "nowhere"
        route.train(place.rank, held, version)
        return end.push(meeting, version) if is_trainer else end.pull(meeting)

    assert move("first", 1).version == 1
    if place.rank == dying:
        die_at_third(end)
    started_s = time.monotonic()
    assert move("second", 2) is None
    found: dict[str, Any] = {"seconds": time.monotonic() - started_s, "texts": list(messages.texts)}
    ranks.remove(dying)
    board.gather("broken", None, ranks)
    if not is_trainer:
        with pytest.raises(TornWeightsError) as caught:
            end.holds(2)
        found["torn"] = str(caught.value)
        with end.filling(2):
            layout = plan_rollout(SHAPES, DIMS, ranks=range(1), size=1)
            for name, part in cut(layout, 0, build_whole(2)).items():
                held[name].copy_(part)
        found["filled"] = end.holds(2) and not route.list_wrong(place.rank, held, 2)
    if dying >= route.num_trainers and route.num_generators > 1:
        switch = move("third", 3)
        found["third"] = switch.version, route.list_wrong(place.rank, held, 3)
    board.gather("done", None, ranks)
    return found


def die_at_third(end: LinkEnd) -> None:
    """Kills the process when it begins with its third bucket."""
    assert end._transport is not None
    start, calls = end._transport._start, []

    def die(bound: Any) -> Any:
        calls.append(bound)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(bound)

    end._transport._start = die  # type: ignore[method-assign]


def test_a_generator_that_dies_in_the_middle_is_named_and_the_rest_meet_again(tmp_path: Path) -> None:
    route = Route(trainers(shard=2), 2)
    *sides, dead = run_ranks(4, break_off, route, 3, directory=tmp_path, timeout_s=60.0)
    assert dead is None
    for rank, found in enumerate(sides):
        assert found["seconds"] < 20.0
        (text,) = found["texts"]
        assert text.startswith("weights go through the object store until the lost member is replaced: ")
        assert f"rank {rank} lost " in text and "of version 2" in text
        assert found["third"] == (3, [])
    assert sum("lost rank 3, which died" in found["texts"][0] for found in sides[:2]) >= 1
    assert "version 2 broke off on its way in" in sides[2]["torn"] and sides[2]["filled"]


def test_a_trainer_that_dies_in_the_middle_leaves_no_half_version_unseen(tmp_path: Path) -> None:
    route = Route(trainers(shard=2), 1)
    other, dead, generator = run_ranks(3, break_off, route, 1, directory=tmp_path, timeout_s=60.0)
    assert dead is None and other["seconds"] < 20.0 and generator["seconds"] < 20.0
    assert "rank 2 lost rank 1, which died" in generator["texts"][0]
    assert "version 2 broke off on its way in" in generator["torn"] and generator["filled"]


# Live trainers and generators

PROMPTS = Batch.from_columns(group_id=[0, 1], prompt_tokens=[[5, 6, 7], [8, 9, 3, 4]])
SAMPLING = SamplingParams(max_new_tokens=6, samples_per_prompt=2)


def live(place: Place, spec: ActorSpec, num_trainers: int) -> dict[str, Any]:
    """Two updates, each published and generated from as the facade does it; then one of which a generator says nothing."""
    board, is_trainer = Board(place, place.size), place.rank < num_trainers
    side = (place.rank, num_trainers) if is_trainer else (place.rank - num_trainers, place.size - num_trainers)
    role = "actor" if is_trainer else "rollout"
    seat = Seat(role, *side, rendezvous=f"{place.rendezvous}-{role}", timeout_s=30.0)
    worker = ActorWorker(seat, spec) if is_trainer else GeneratorWorker(seat, spec.model, spec.rollout)
    found: dict[str, Any] = {"published": [], "digests": [], "rows": []}
    for version in (1, 2, 3):
        if isinstance(worker, ActorWorker):
            train(worker, 1)
        own = worker.offer_weights() if isinstance(worker, ActorWorker) else worker.expect_weights(())
        sides = board.meet(f"{version}/members", own, num_trainers, range(place.size))
        taken = None
        if isinstance(worker, ActorWorker):
            worker.push_weights(*sides)
        else:
            taken = worker.pull_weights(*sides)
        if version == 3 and place.rank == place.size - 1:
            taken = None
        told = board.gather(f"{version}/taken", taken and dataclasses.asdict(taken))[num_trainers:]
        deliveries = tuple(None if fields is None else Delivery(**fields) for fields in told)
        path = Path(place.rendezvous.removeprefix("file://") + f"-{version}")
        if isinstance(worker, ActorWorker):
            made = worker.publish((*sides, deliveries), place.rank == 0)
            found["published"] += [(weights.version, len(weights.tensors)) for weights in made.objects]
            found["digests"] = [*found["digests"], *made.digests]
            whole = worker.weights(place.rank == 0)
            if place.rank == 0:
                torch.save((made.objects[0], whole), path)
            board.gather(f"{version}/saved", None)
        else:
            board.gather(f"{version}/saved", None)
            named, whole = torch.load(path, weights_only=False)
            samples = worker.rollout(PROMPTS, SAMPLING, version, (4,), named).objects[0]
            found["rows"].append(set(samples.numpy("policy_version_min").tolist()))
            found["wrong"] = list_differing(worker, {name: carried.tensor() for name, carried in whole.tensors.items()})
    found["told"] = {name: m.value for name, m in merge_metrics(worker._rollout_metrics).items()} if is_trainer else {}
    board.gather("done", None)
    worker.close()
    return found


def list_differing(worker: GeneratorWorker, whole: dict[str, Tensor]) -> list[str]:
    """Tensors at the generator that are not its box of the whole."""
    engine: Any = worker.rollout_engine
    own = adapter_weights(engine.model) or dict(engine.model.module.named_parameters())
    assert own.keys() == whole.keys()
    wrong = []
    for name, weight in own.items():
        expected = whole[name]
        if engine.group is not None:
            box = engine.group.layout.tensors[name].placement.box(engine.group.ranks.rank)
            expected = expected[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))]
        if not torch.equal(weight.detach(), expected):
            wrong.append(name)
    return wrong


LIVE = {
    "shard 2 to two": (ParallelConfig(shard=2), 2, 1, None, False),
    "tensor 2 to one": (ParallelConfig(tp=2), 1, 1, None, False),
    "two whole ones to one of tensor 2": (ParallelConfig(), 2, 2, None, False),
    "shard 2 to one, the adapter alone": (ParallelConfig(shard=2), 1, 1, LoraSettings(rank=2, alpha=4.0), True),
}


@pytest.mark.parametrize("name", LIVE)
def test_generators_sample_from_what_came_over_the_link(name: str, tokenizer: str, tmp_path: Path) -> None:
    parallel, count, tp, lora, alone = LIVE[name]
    spec = spec_of(tokenizer, parallel, lora, alone=alone)
    settings = RolloutSettings(lora="adapter" if alone else "merged", native=NativeSettings(tp=tp))
    spec = dataclasses.replace(spec, rollout=settings)
    by_rank = run_ranks(2 + count, live, spec, 2, directory=tmp_path, timeout_s=100.0)
    assert all(found is not None for found in by_rank), "a rank died; its error is above"
    first, second, *generators = by_rank
    # What one generator has not told of lies in the object store.
    assert first["published"][:2] == [(1, 0), (2, 0)] and first["published"][2][1] > 0 and second["published"] == []
    assert first["digests"] == [HELD_BY_ASKED, HELD_BY_ASKED, None]
    for found in generators:
        assert found["rows"] == [{1}, {2}, {3}] and found["wrong"] == []
    moved = [
        found["told"]["hybrid/bytes_moved"] - found["told"].get("hybrid/bytes_stored", 0) for found in (first, second)
    ]
    assert min(moved) > 0 and max(moved) < 1.5 * min(moved), "both trainers send"


def test_an_object_that_is_made_again_counts_once(tokenizer: str, tmp_path: Path) -> None:
    (told,) = run_ranks(1, store_twice, spec_of(tokenizer, ParallelConfig()), directory=tmp_path)
    assert told[0] == told[1] > 8 * 15_000 and told[2] == 2 * told[0]


def store_twice(place: Place, spec: ActorSpec) -> list[float]:
    """Bytes told of after a version was stored, after it was stored again, and after the next one."""
    worker, metrics, told = ActorWorker(Seat("actor"), spec), [], []
    for steps in (1, 0, 1):
        train(worker, steps)
        worker._rollout_metrics = []
        worker.weights()
        metrics += worker._rollout_metrics
        told.append(merge_metrics(metrics)["hybrid/bytes_stored"].value)
    worker.close()
    return told


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("sums")
    write_sums(directory, seed=0)
    return str(directory / "tokenizer")
