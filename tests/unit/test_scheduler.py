"""The scheduler's decisions when workers and nodes die, in a world without processes."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from simulated import Ledger, Process, World, build_scheduler, deal, flat, mix, put_into, slots

from hybridflow.runtime.api import RecoverySettings, WorkerError, WorkersLostError
from hybridflow.runtime.scheduler import Scheduler
from hybridflow.runtime.tasks import Task
from hybridflow.types import Ref

ROLES = {"gang": ("A", "A", "B"), "pool": ("B", "C")}
NODES = ("A", "B", "C")


# Random histories: what the page asks for comes out as if nothing had died.


@dataclass(frozen=True)
class Op:
    """One line of a random page. The numbers choose among what is there when it runs, so lines can be left out."""

    kind: str
    role: str
    label: int
    numbers: tuple[int, ...]


WEIGHTS = {
    "read": 5,
    "cut": 3,
    "add": 3,
    "assign": 1,
    "share": 3,
    "snapshot": 3,
    "get": 4,
    "drop": 3,
    "die": 4,
    "lose": 1,
}


def draw_history(seed: int, length: int = 24) -> list[Op]:
    """The page of this seed; it loses one node at most, which everything survives where copies are made."""
    rng = random.Random(seed)
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=length)
    ops = [
        Op(kind, rng.choice(("gang", "pool")), label, tuple(rng.randrange(1000) for _ in range(4)))
        for label, kind in enumerate(kinds)
    ]
    lost = [op for op in ops if op.kind == "lose"]
    return [Op("add", "gang", -2, (0, 0, 0, 0)), *(op for op in ops if op not in lost[1:])]


@dataclass
class Page:
    """Runs lines on a scheduler, and on two plain numbers that say what each result must be."""

    world: World
    runtime: Scheduler
    groups: dict[str, Any]
    states: dict[str, int] = field(default_factory=lambda: {"gang": 0, "pool": 0})
    known: list[tuple[Ref[Any], Any, int | None]] = field(default_factory=list)

    def run(self, op: Op) -> None:
        role, group = op.role, self.groups[op.role]
        inputs = self.choose(op)
        refs, values = [known[0] for known in inputs], [known[1] for known in inputs]
        match op.kind:
            case "read":
                ref = self.runtime.submit(group, Ledger.read, op.label, *refs)
                self.note(ref, mix("read", self.states[role], op.label, *values))
            case "cut":
                pieces = self.runtime.submit_pieces(group, Ledger.cut, 2, op.label, 2, *refs)
                for piece, ref in enumerate(pieces):
                    value = mix("cut", self.states[role], op.label, piece, *values)
                    self.note(ref, value, mix(value))
            case "add":
                self.states[role] = mix("add", self.states[role], op.label, *values)
                self.note(self.runtime.broadcast(group, Ledger.add, op.label, *refs), self.states[role])
            case "assign":
                self.states[role] = mix("assign", op.label, *values)
                self.note(self.runtime.broadcast(group, Ledger.assign, op.label, *refs, replaces=True), self.states[role])
            case "share":
                self.share(op)
            case "snapshot":
                taken = self.runtime.snapshot(self.groups["gang"], Ledger.take, Ledger.restore)
                if taken is not None:
                    self.note(taken, self.states["gang"])
            case "get" if self.known:
                self.check(self.known[op.numbers[0] % len(self.known)])
            case "drop" if self.known:
                del self.known[op.numbers[0] % len(self.known)]
            case "die":
                self.world.later(op.numbers[0] % 12, partial(self.die, op))
            case "lose":
                self.world.later(op.numbers[0] % 12, partial(self.world.lose, NODES[op.numbers[1] % 3], op.numbers[2] % 3))

    def choose(self, op: Op) -> list[tuple[Ref[Any], Any, int | None]]:
        if not self.known:
            return []
        return [self.known[number % len(self.known)] for number in op.numbers[2 : 2 + op.numbers[1] % 3]]

    def share(self, op: Op) -> None:
        """All described pieces of the pool of results, three at most, dealt to the ranks."""
        described = [known for known in self.known if known[2] is not None][-3:]
        refs = tuple(known[0] for known in described)
        self.states[op.role] = mix("share", self.states[op.role], op.label, *(known[2] for known in described))
        ref = self.runtime.scatter(self.groups[op.role], Ledger.share, partial(deal, op.label, refs), refs)
        self.note(ref, self.states[op.role])

    def note(self, ref: Ref[Any], value: Any, digest: int | None = None) -> None:
        self.known.append((ref, value, digest))

    def die(self, op: Op) -> None:
        alive = self.world.alive()
        self.world.die(alive[op.numbers[1] % len(alive)], answered=op.numbers[2] % 3)

    def check(self, known: tuple[Ref[Any], Any, int | None]) -> None:
        ref, value, _ = known
        found = self.runtime.get(ref)
        assert set(found if isinstance(found, tuple) else [found]) == {value}, f"{ref.call} gave another result"


def play(world: World, ops: list[Op], recovery: RecoverySettings | None = None) -> Page:
    """Runs a whole history, and looks at every result that is still known at its end."""
    runtime = build_scheduler(world, recovery, **ROLES)
    page = Page(world, runtime, {"gang": runtime.place_gang("gang", Ledger), "pool": runtime.place("pool", Ledger)})
    for op in ops:
        page.run(op)
    for known in page.known:
        page.check(known)
    settle(world, runtime)
    for role, group in page.groups.items():
        assert set(runtime.get(runtime.broadcast(group, Ledger.add, -1))) == {mix("add", page.states[role], -1)}
    settle(world, runtime)
    assert open_books(runtime) == {}
    return page


def settle(world: World, runtime: Scheduler) -> None:
    """Turns until nothing is under way and all have their places."""
    while True:
        runtime._pump(1.0)
        books = runtime._dispatcher
        workers = [worker for group in books.groups for worker in group.workers]
        if not books.flying and not books.copying and all(w.ready for w in workers) and world.is_quiet():
            return


def open_books(runtime: Scheduler) -> dict[str, Any]:
    """Whatever the books still hold of calls that are over."""
    books = runtime._dispatcher
    found: dict[str, Any] = {"flying": books.flying, "copying": books.copying, "failed": books.failed}
    for group in books.groups:
        queued = [str(task.call) for segment in group.segments for task in segment.tasks()]
        found[f"queue of {group.role}"] = queued
        found[f"replays of {group.role}"] = group.replays
        found[f"busy workers of {group.role}"] = [w.label for w in group.workers if w.attempts or w not in group.free]
    return {name: what for name, what in found.items() if what}


def world_of(seed: int) -> World:
    """A world of this seed, with or without free slots, with early or late copies."""
    world = World(slots("D", "D", "D")[: seed % 4], seed=seed)
    world.copies = ("early", "late")[seed // 4 % 2]
    return world


@pytest.mark.parametrize("tens", range(30))
def test_deaths_change_no_result(tens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        world = world_of(seed)
        put_into(monkeypatch, world)
        play(world, draw_history(seed))
