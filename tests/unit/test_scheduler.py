"""The scheduler's decisions when workers and nodes die, in a world without processes."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from simulated import PAIR, Ledger, Process, World, build_scheduler, deal, mix, put_into, slots

from hybridflow.config import ConfigError
from hybridflow.runtime.api import RecoverySettings, Seat, WorkerError, WorkersLostError
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
    "meet": 2,
    "add": 3,
    "assign": 1,
    "share": 3,
    "hand": 3,
    "snapshot": 3,
    "get": 4,
    "drop": 3,
    "fail": 1,
    "die": 4,
    "lose": 1,
}


def draw_history(seed: int, *, max_lost: int = 1, length: int = 24, weights: Mapping[str, int] = WEIGHTS) -> list[Op]:
    """The page of this seed. Where copies are made everything survives the loss of one node."""
    rng = random.Random(seed)
    kinds = rng.choices(list(weights), list(weights.values()), k=length)
    ops = [
        Op(kind, rng.choice(("gang", "pool")), label, tuple(rng.randrange(1000) for _ in range(4)))
        for label, kind in enumerate(kinds)
    ]
    lost = [op for op in ops if op.kind == "lose"]
    return [Op("add", "gang", -2, (0, 0, 0, 0)), *(op for op in ops if op not in lost[max_lost:])]


@dataclass(frozen=True)
class Known:
    """A result that the page holds: what it must be (None: an error), and its digest if it is a piece."""

    ref: Ref[Any]
    value: int | None
    digest: int | None = None


@dataclass
class Page:
    """Runs lines on a scheduler, and on two plain numbers that say what each result must be."""

    world: World
    runtime: Scheduler
    groups: dict[str, Any]
    states: dict[str, int] = field(default_factory=lambda: {"gang": 0, "pool": 0})
    known: list[Known] = field(default_factory=list)
    taken: list[Known] = field(default_factory=list)
    handed: list[tuple[Ref[Any], int]] = field(default_factory=list)
    in_parts: bool = False

    def run(self, op: Op) -> None:
        role, group = op.role, self.groups[op.role]
        inputs = self.choose(op)
        refs, values = [known.ref for known in inputs], [known.value for known in inputs]
        match op.kind:
            case "read":
                ref = self.runtime.submit(group, Ledger.read, op.label, *refs)
                self.note(ref, mix("read", self.states[role], op.label, *values), values)
            case "cut":
                for piece, ref in enumerate(self.runtime.submit_pieces(group, Ledger.cut, 2, op.label, 2, *refs)):
                    self.note(ref, mix("cut", self.states[role], op.label, piece, *values), values, is_piece=True)
            case "meet":
                self.meet(op, refs, values)
            case "pair":
                self.pair(op, refs, values)
            case "fail":
                self.note(self.runtime.submit(group, Ledger.fail), 0, [None])
            case "add":
                self.states[role] = mix("add", self.states[role], op.label, *values)
                self.note(self.runtime.broadcast(group, Ledger.add, op.label, *refs), self.states[role])
            case "assign":
                self.states[role] = mix("assign", op.label, *values)
                ref = self.runtime.broadcast(group, Ledger.assign, op.label, *refs, replaces=True)
                self.note(ref, self.states[role])
            case "share":
                self.share(op)
            case "hand":
                self.hand(op)
            case "snapshot":
                self.snapshot()
            case "get" if self.known:
                self.check(self.known[op.numbers[0] % len(self.known)])
            case "drop" if self.known:
                del self.known[op.numbers[0] % len(self.known)]
            case "die":
                self.world.later(op.numbers[0] % 12, partial(self.die, op))
            case "lose":
                node_id = NODES[op.numbers[1] % 3]
                self.world.later(op.numbers[0] % 12, partial(self.world.lose, node_id, op.numbers[2] % 3))

    def choose(self, op: Op) -> list[Known]:
        """Two results at most. What fails is for reads alone, since a change that cannot be made ends the run."""
        there = [known for known in self.known if known.value is not None or op.kind in ("read", "cut", "meet", "pair")]
        return [there[number % len(there)] for number in op.numbers[2 : 2 + op.numbers[1] % 3] if there]

    def meet(self, op: Op, refs: Sequence[Ref[Any]], values: Sequence[int | None]) -> None:
        """Something of each rank of the gang, unless that could have become smaller meanwhile."""
        if not self.in_parts:
            return
        counts = tuple((number + op.label) % 3 for number in range(self.groups["gang"].size))
        args = [(op.label, rank, count, *refs) for rank, count in enumerate(counts)]
        made = self.runtime.submit_all_pieces(self.groups["gang"], Ledger.meet, counts, args)
        assert tuple(map(len, made)) == counts
        for rank, pieces in enumerate(made):
            for piece, ref in enumerate(pieces):
                value = mix("meet", self.states["gang"], op.label, rank, piece, *values)
                self.note(ref, value, values, is_piece=True)

    def pair(self, op: Op, refs: Sequence[Ref[Any]], values: Sequence[int | None]) -> None:
        """Something of two neighbours of the gang, unless that could have become smaller meanwhile."""
        if not self.in_parts:
            return
        counts = tuple((number + op.label) % 3 for number in range(PAIR))
        args = [(op.label, place, count, *refs) for place, count in enumerate(counts)]
        made = self.runtime.submit_team_pieces(self.groups["gang"], Ledger.pair, counts, args)
        assert tuple(map(len, made)) == counts
        for place, pieces in enumerate(made):
            for piece, ref in enumerate(pieces):
                value = mix("pair", self.states["gang"], op.label, place, piece, *values)
                self.note(ref, value, values, is_piece=True)

    def snapshot(self) -> None:
        gang, state = self.groups["gang"], self.states["gang"]
        if self.in_parts:
            parts = self.runtime.snapshot_all(gang, Ledger.take, Ledger.restore) or ()
        else:
            one = self.runtime.snapshot(gang, Ledger.take, Ledger.restore)
            parts = () if one is None else (one,)
        self.taken += [Known(part, state) for part in parts]

    def share(self, op: Op) -> None:
        """The newest pieces, three at most, dealt to the workers."""
        described = [known for known in self.known if known.digest is not None][-3:]
        refs = tuple(known.ref for known in described)
        self.states[op.role] = mix("share", self.states[op.role], op.label, *(known.digest for known in described))
        ref = self.runtime.scatter(self.groups[op.role], Ledger.share, partial(deal, op.label, refs), refs)
        self.note(ref, self.states[op.role])

    def hand(self, op: Op) -> None:
        """Something of the gang that lies with the pool, and is used there twice: at once, and after whatever comes in between."""
        gang, pool = self.groups["gang"], self.groups["pool"]
        (handed,) = self.runtime.submit_pieces(gang, Ledger.hand, 1, op.label, self.runtime.ask(pool, Ledger.token_of))
        self.handed.append((handed, mix("hand", self.states["gang"], op.label)))
        for ref, value in {self.handed[-1], self.handed[op.numbers[0] % len(self.handed)]}:
            used = self.runtime.submit(pool, Ledger.use, op.label, ref)
            self.note(used, mix("use", self.states["pool"], op.label, value))

    def note(self, ref: Ref[Any], value: int, inputs: Sequence[int | None] = (), *, is_piece: bool = False) -> None:
        fails = None in inputs
        self.known.append(Known(ref, None if fails else value, mix(value) if is_piece and not fails else None))

    def die(self, op: Op) -> None:
        alive = self.world.alive()
        for process in alive[op.numbers[1] % max(len(alive), 1) :][:1]:
            self.world.die(process, answered=op.numbers[2] % 3)

    def check(self, known: Known) -> None:
        if known.value is None:
            with pytest.raises(WorkerError) as caught:
                self.runtime.get(known.ref)
            if isinstance(caught.value, WorkersLostError):
                raise caught.value
            assert "row 7 has no tokens" in str(caught.value)
            return
        found = self.runtime.get(known.ref)
        assert set(found if isinstance(found, tuple) else [found]) == {known.value}, f"{known.ref.call} is another"


def play(
    world: World, ops: list[Op], recovery: RecoverySettings | None = None, roles: Mapping[str, Sequence[str]] = ROLES
) -> Page:
    """Runs a whole history, and looks at every result that is still known at its end."""
    runtime = build_scheduler(world, recovery, **roles)
    page = Page(world, runtime, {"gang": runtime.place_gang("gang", Ledger), "pool": runtime.place("pool", Ledger)})
    # A gang that goes on smaller cannot make what was asked of all its ranks.
    page.in_parts = len(world.spares) == 3 and sum(op.kind == "lose" for op in ops) <= 1
    for op in ops:
        page.run(op)
    # A snapshot may go with its node, since its moment does not come again.
    for known in [*page.known, *(page.taken if all(op.kind != "lose" for op in ops) else ())]:
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


def world_of(seed: int, copies: str | None = None) -> World:
    """A world of this seed, with or without free slots, with early or late copies."""
    world = World(slots("D", "D", "D")[: seed % 4], seed=seed)
    world.copies = copies or ("early", "late")[seed // 4 % 2]
    world.meets = {"gang"} if seed // 8 % 2 else set()
    return world


@pytest.mark.parametrize("tens", range(20))
def test_deaths_change_no_result(tens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        world = world_of(seed)
        put_into(monkeypatch, world)
        play(world, draw_history(seed))


@pytest.mark.parametrize("tens", range(10))
def test_deaths_change_no_result_of_teams(tens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gang of two teams, which make calls of their own beside those of all, and of single workers."""
    for seed in range(10 * tens, 10 * tens + 10):
        # Three free slots, so that the gang stays as large as it is; half of the worlds let ranks wait for each other.
        world = world_of(4 * seed + 3)
        put_into(monkeypatch, world)
        ops = draw_history(4 * seed + 3, weights={**WEIGHTS, "pair": 8})
        play(world, ops, roles={"gang": ("A", "A", "B", "B"), "pool": ("B", "C")})


@pytest.mark.parametrize(("copies", "may_end"), [("early", 0), ("late", 0), ("never", 20), ("none", 20)])
def test_only_where_too_much_is_lost_the_run_ends(copies: str, may_end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = 0
    for seed in range(40):
        world = world_of(seed, copies)
        put_into(monkeypatch, world)
        try:
            play(world, draw_history(seed, max_lost=3))
        except WorkersLostError:
            ended += 1
    assert min(may_end, 1) <= ended <= may_end


# One case each.


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Answers come at once; node D has three free slots."""
    world = World(slots("D", "D", "D"))
    put_into(monkeypatch, world)
    return world


def turns(runtime: Scheduler, count: int = 6) -> None:
    """As many turns of the loop as everything that may go now needs."""
    for _ in range(count):
        runtime._pump(0.01)


def holding(name: str, *numbers: int) -> Callable[[Process, str], bool]:
    """Keeps orders of this name back, at these processes, or at all."""
    return lambda process, order: order == name and (not numbers or process.number in numbers)


def nothing(process: Process, order: str) -> bool:
    """Keeps nothing back."""
    return False


def added(state: int, *labels: int) -> int:
    """The state after these changes."""
    for label in labels:
        state = mix("add", state, label)
    return state


def keeper_of(ref: Ref[Any]) -> str:
    """The node that keeps a result."""
    node_id: str = ref.handle.task.results[0].node_id
    return node_id


def snapshot(runtime: Scheduler, gang: Any) -> Ref[int]:
    """A snapshot that counts from here on."""
    taken = runtime.snapshot(gang, Ledger.take, Ledger.restore)
    assert taken is not None
    runtime.get(taken)
    turns(runtime)
    return taken


def started(world: World, since: int) -> list[str]:
    """What the processes created after so many others were told, the first of them."""
    return [name for number, name in world.sent if number == since and name != "start"]


def test_all_who_are_there_answer_and_a_worker_that_was_replaced_since_has_not(world: World) -> None:
    runtime = build_scheduler(world, pool=("A", "B"))
    pool = runtime.place("pool", Ledger)
    asked = runtime.ask(pool, Ledger.token_of)
    first, second = runtime.get(asked)
    assert second == first + 1
    world.hold = holding("read", 1)
    kept = runtime.submit(pool, Ledger.read, 1), runtime.submit(pool, Ledger.read, 2)
    late = runtime.ask(pool, Ledger.token_of)
    turns(runtime)
    assert not runtime.is_there(late)
    world.die(world.processes[1])
    # What a dead worker is asked is not asked again, and nobody waits for its successor.
    assert runtime.get(late) == (first, None) and runtime.get(asked) == (first, None)
    world.hold = nothing
    runtime.get(kept)
    turns(runtime)
    assert runtime.get(asked) == (first, None)
    assert runtime.get(runtime.ask(pool, Ledger.token_of)) == (first, second + 1)


def test_what_was_asked_is_not_asked_again_when_a_node_goes(world: World) -> None:
    runtime = build_scheduler(world, pool=("A", "B"))
    pool = runtime.place("pool", Ledger)
    asked = runtime.ask(pool, Ledger.token_of)
    first, second = runtime.get(asked)
    world.hold = holding("read", 1)
    kept = runtime.submit(pool, Ledger.read, 1), runtime.submit(pool, Ledger.read, 2)
    turns(runtime)
    world.lose("B")
    world.hold = nothing
    runtime.get(kept)
    turns(runtime)
    assert sum(name == "token_of" for _, name in world.sent) == 2
    assert runtime.get(asked) == (first, None)


def test_what_lies_with_a_worker_that_died_is_made_again_from_the_state_of_its_time(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"), pool=("B", "C"))
    gang, pool = runtime.place_gang("gang", Ledger), runtime.place("pool", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    (handed,) = runtime.submit_pieces(gang, Ledger.hand, 1, 7, runtime.ask(pool, Ledger.token_of))
    value, tokens = runtime.get(handed)
    assert (value, len(tokens)) == (mix("hand", added(0, 1), 7), 2)
    changed = runtime.broadcast(gang, Ledger.add, 2)
    runtime.get(changed)
    world.die(world.alive("pool")[0])
    turns(runtime)
    # Nothing needs it so far.
    assert sum(name == "hand" for _, name in world.sent) == 1
    used = [runtime.submit(pool, Ledger.use, label, handed) for label in range(4)]
    assert runtime.get(tuple(used)) == tuple(mix("use", 0, label, value) for label in range(4))
    assert runtime.get(handed) == (value, ())
    assert set(runtime.get(runtime.broadcast(gang, Ledger.add, 3))) == {added(0, 1, 2, 3)}
    assert sum(name == "hand" for _, name in world.sent) == 2


def test_a_snapshot_does_not_count_before_all_ranks_have_reported_the_change_before_it(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.get(runtime.broadcast(gang, Ledger.add, 1))
    world.hold = holding("add", 1)
    change = runtime.broadcast(gang, Ledger.add, 2)
    taken = runtime.snapshot(gang, Ledger.take, Ledger.restore)
    turns(runtime)
    assert taken is not None
    assert not runtime.is_there(taken)
    world.die(world.processes[1])
    world.hold = nothing
    assert runtime.get(change) == (added(0, 1, 2),) * 2
    assert runtime.get(taken) == added(0, 1, 2)


def test_a_snapshot_before_any_change_can_be_started_from(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    snapshot(runtime, gang)
    world.die(world.processes[0])
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 1)) == (added(0, 1),) * 2


def test_each_part_of_a_snapshot_leaves_a_copy_of_its_own(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    world.copies = "late"
    taken = runtime.snapshot_all(gang, Ledger.take, Ledger.restore)
    assert taken is not None
    assert runtime.get(taken) == (added(0, 1),) * 2
    assert runtime.snapshot_all(gang, Ledger.take, Ledger.restore) is None, "it is not copied yet"
    world.copies = "early"
    turns(runtime)
    since = len(world.processes)
    world.lose("B")
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 2)) == (added(0, 1, 2),) * 2
    assert [name for number, name in world.sent if number >= since and name != "start"][:2] == ["restore", "restore"]
    assert runtime.get(taken) == (added(0, 1),) * 2


def test_a_read_in_which_ranks_meet_is_made_again_by_all_of_them(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    world.hold = holding("meet", 1)
    made = runtime.submit_all_pieces(gang, Ledger.meet, (0, 2), [(7, 0, 0), (7, 1, 2)])
    turns(runtime)
    since = len(world.sent)
    world.hold = nothing
    world.die(world.processes[1])
    assert runtime.get(made[1]) == tuple(mix("meet", added(0, 1), 7, 1, piece) for piece in range(2))
    assert sum(name == "meet" for _, name in world.sent[since:]) == 2


def test_a_gang_that_became_smaller_cannot_make_what_was_asked_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    put_into(monkeypatch, world)
    runtime = build_scheduler(world, gang=("A", "B"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    world.hold = holding("meet", 1)
    made = runtime.submit_all(gang, Ledger.meet, [(7, rank, 0) for rank in range(2)])
    turns(runtime)
    world.hold = nothing
    world.lose("B")
    with pytest.raises(WorkersLostError, match=r"gang.meet .* was to be made by 2 workers together, and 1 are left"):
        runtime.get(made)


def start_teams(world: World, *nodes: str) -> tuple[Scheduler, Any]:
    runtime = build_scheduler(world, gang=nodes)
    gang = runtime.place_gang("gang", Ledger)
    runtime.get(runtime.broadcast(gang, Ledger.add, 1))
    return runtime, gang


def pair_up(runtime: Scheduler, gang: Any, *labels: int) -> list[Ref[int]]:
    """Calls on teams; of each what the first worker of the team returns."""
    return [
        runtime.submit_team_pieces(gang, Ledger.pair, (1, 0), [(label, 0, 1), (label, 1, 0)])[0][0] for label in labels
    ]


def paired(*labels: int) -> tuple[int, ...]:
    """What that is."""
    return tuple(mix("pair", added(0, 1), label, 0, 0) for label in labels)


def made_by(world: World, since: int, name: str = "pair") -> list[int]:
    """The processes that were given such calls, in order."""
    return [number for number, sent in world.sent[since:] if sent == name]


@pytest.mark.parametrize("slow", range(4))
def test_a_team_that_is_done_takes_the_calls_of_one_that_is_slow(slow: int, world: World) -> None:
    runtime, gang = start_teams(world, "A", "A", "A", "A")
    since, world.hold = len(world.sent), holding("pair", slow)
    made = pair_up(runtime, gang, 5, 6, 7, 8)
    late = slow // PAIR
    others = tuple(ref for number, ref in enumerate(made) if number != late)
    assert runtime.get(others) == tuple(value for n, value in enumerate(paired(5, 6, 7, 8)) if n != late)
    fast = [PAIR * (1 - late), PAIR * (1 - late) + 1]
    assert made_by(world, since) == [0, 1, 2, 3, *fast, *fast]
    assert not runtime.is_there(made[late])
    world.hold = nothing
    assert runtime.get(tuple(made)) == paired(5, 6, 7, 8)


def test_a_call_goes_to_a_team_whose_workers_are_all_free_and_nothing_overtakes_it(world: World) -> None:
    runtime, gang = start_teams(world, "A", "A", "A", "A")
    world.hold = holding("read")
    reads = [runtime.submit(gang, Ledger.read, label) for label in range(3)]
    turns(runtime)
    since = len(world.sent)
    (made,) = pair_up(runtime, gang, 5)
    later = runtime.submit(gang, Ledger.read, 9)
    turns(runtime)
    assert not made_by(world, since) and not made_by(world, since, "read"), (
        "one worker of a team is free, which is none"
    )
    world.hold = holding("read", 0, 1)
    assert runtime.get(made) == paired(5)[0] and runtime.get(later) == mix("read", added(0, 1), 9)
    assert made_by(world, since) == [2, 3]
    world.hold = nothing
    assert runtime.get(tuple(reads)) == tuple(mix("read", added(0, 1), label) for label in range(3))


def test_all_ranks_come_to_what_they_share_in_one_order(world: World) -> None:
    """Ranks that waited for each other in two orders would wait for good."""
    world.meets = {"gang"}
    runtime, gang = start_teams(world, "A", "A", "A", "A")
    made = pair_up(runtime, gang, 5, 6, 7)
    together = runtime.submit_all(gang, Ledger.meet, [(8, rank, 0) for rank in range(4)])
    made += pair_up(runtime, gang, 9)
    change = runtime.broadcast(gang, Ledger.add, 2)
    assert runtime.get(change) == (added(0, 1, 2),) * 4
    assert runtime.get(tuple(made)) == paired(5, 6, 7, 9) and len(runtime.get(together)) == 4
    assert len(world.processes) == 4, "none was taken to be dead"


@pytest.mark.parametrize(("held", "num_again"), [((0, 1, 2, 3), 3), (None, 1)])
@pytest.mark.parametrize("dead", range(4))
def test_what_teams_are_at_when_a_worker_dies_is_made_again_by_any(
    dead: int, held: tuple[int, ...] | None, num_again: int, world: World
) -> None:
    """held: workers that do nothing before the death; None: the dead one alone, whose neighbour has answered then."""
    runtime, gang = start_teams(world, "A", "A", "A", "A")
    world.hold = holding("pair", *(held or (dead,)))
    made = pair_up(runtime, gang, 5, 6, 7)
    turns(runtime)
    since = len(world.sent)
    world.die(world.processes[dead])
    assert runtime.get(tuple(made)) == paired(5, 6, 7)
    again = made_by(world, since)
    assert len(again) == PAIR * num_again and all(number >= 4 for number in again)


def test_a_teams_result_that_its_node_took_along_is_made_again(world: World) -> None:
    runtime, gang = start_teams(world, "A", "A", "B", "B")
    made = pair_up(runtime, gang, 5, 6)
    assert runtime.get(tuple(made)) == paired(5, 6)
    world.lose("B")
    assert runtime.get(tuple(made)) == paired(5, 6)


def test_an_error_in_a_team_is_told_at_once_and_leaves_the_other_teams_calls(world: World) -> None:
    runtime, gang = start_teams(world, "A", "A", "A", "A")
    world.hold = holding("pair", 2, 3)
    wrong = runtime.submit_team_pieces(gang, Ledger.pair, (1, 0), [(5, 1, 1), (5, 1, 0)])[0][0]
    (right,) = pair_up(runtime, gang, 6)
    begun_s = world.clock.now_s
    with pytest.raises(WorkerError, match="worker 0 got what was for place 1"):
        runtime.get(wrong)
    assert world.clock.now_s - begun_s < 1, "what another team is at explains nothing"
    world.hold = nothing
    assert runtime.get(right) == paired(6)[0]


def test_a_silent_worker_of_a_team_is_replaced_with_its_gang(world: World) -> None:
    runtime, gang = start_teams(world, "A", "A", "A", "A")
    world.hold = holding("pair", 3)
    made = pair_up(runtime, gang, 5, 6, 7)
    assert runtime.get(tuple(made)) == paired(5, 6, 7)
    assert [process.alive for process in world.processes[:4]] == [False] * 4


def test_a_gang_that_has_lost_a_team_goes_on_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    put_into(monkeypatch, world)
    runtime, gang = start_teams(world, "A", "A", "B", "B")
    world.hold = holding("pair")
    made = pair_up(runtime, gang, 5, 6, 7)
    turns(runtime)
    world.hold = nothing
    world.lose("B")
    assert runtime.get(tuple(made)) == paired(5, 6, 7)
    assert gang.size == 2


def test_a_gang_that_is_no_whole_number_of_teams_cannot_make_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    put_into(monkeypatch, world)
    runtime, gang = start_teams(world, "A", "A", "A", "B")
    world.hold = holding("pair")
    made = pair_up(runtime, gang, 5, 6)
    turns(runtime)
    world.hold = nothing
    world.lose("B")
    with pytest.raises(
        WorkersLostError, match=r"gang.pair .* is made by teams of 2 workers, and 3 are left; start .* multiple of 2"
    ):
        runtime.get(tuple(made))


class Pair(Ledger):
    """One of two workers that share a model."""

    def __init__(self, seat: Seat) -> None:
        if seat.size != 2:
            raise ConfigError(f"shard: 2 does not divide the {seat.size} trainers")
        super().__init__(seat)


def test_a_gang_whose_layout_takes_no_fewer_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    put_into(monkeypatch, world)
    runtime = build_scheduler(world, gang=("A", "B"))
    gang = runtime.place_gang("gang", Pair)
    runtime.broadcast(gang, Ledger.add, 1)
    taken = runtime.snapshot_all(gang, Ledger.take, Ledger.restore)
    assert taken is not None
    assert runtime.get(taken) == (added(0, 1),) * 2
    turns(runtime)
    world.lose("B")
    with pytest.raises(
        WorkersLostError, match="gang cannot go on with what is left: shard: 2 does not divide the 1 tr"
    ):
        runtime.get(runtime.broadcast(gang, Ledger.add, 2))
    assert all(map(runtime.is_there, taken)), "the run can be taken up from it"


def test_a_node_that_goes_with_the_newest_snapshot_leaves_its_copy(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"))
    gang = runtime.place_gang("gang", Ledger)
    for label in (1, 2):
        runtime.broadcast(gang, Ledger.add, label)
        taken = snapshot(runtime, gang)
    count = len(world.processes)
    world.lose(keeper_of(taken))
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 3)) == (added(0, 1, 2, 3),) * 2
    assert started(world, count) == ["restore", "add"]


@pytest.mark.parametrize("copies", ["never", "none"])
def test_a_node_that_goes_with_the_only_copy_of_a_state_ends_the_run(copies: str, world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"))
    world.copies = copies
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    taken = snapshot(runtime, gang)
    world.lose(keeper_of(taken))
    change = runtime.broadcast(gang, Ledger.add, 2)
    with pytest.raises(WorkersLostError, match="the state of gang is lost"):
        runtime.get(change)


def test_a_snapshot_that_goes_while_it_is_copied_never_counts(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    snapshot(runtime, gang)
    world.copies = "late"
    runtime.broadcast(gang, Ledger.add, 2)
    taken = snapshot(runtime, gang)
    world.lose(keeper_of(taken))
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 3)) == (added(0, 1, 2, 3),) * 2


def test_a_copy_that_fails_before_its_nodes_end_is_known_does_not_make_the_snapshot_count(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    snapshot(runtime, gang)
    world.copies = "late"
    runtime.broadcast(gang, Ledger.add, 2)
    taken = snapshot(runtime, gang)
    # Its workers have nothing to do, so their end is found at the next look, and that of the copy before.
    world.lose(keeper_of(taken))
    runtime._pump(0.0)
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 3)) == (added(0, 1, 2, 3),) * 2


def test_a_snapshot_that_is_lost_is_told_to_who_asks_for_it(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"))
    world.copies = "late"
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    taken = snapshot(runtime, gang)
    world.lose(keeper_of(taken))
    turns(runtime)
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 2)) == (added(0, 1, 2),) * 2
    before_s = world.clock.now_s
    with pytest.raises(WorkerError, match="gang.take"):
        runtime.get(taken)
    assert world.clock.now_s - before_s < 60


def test_the_last_snapshot_lost_while_the_gang_goes_back_to_it_ends_the_run(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"), pool=("B",))
    world.copies = "none"
    gang, _ = runtime.place_gang("gang", Ledger), runtime.place("pool", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    turns(runtime)
    runtime.submit(gang, Ledger.read)
    assert keeper_of(snapshot(runtime, gang)) == "B"
    world.hold = holding("add")
    change = runtime.broadcast(gang, Ledger.add, 2)
    turns(runtime)
    # The death on A is found first, and the gang has left B when the end of B is known.
    world.hold = lambda process, name: name == "describe" and process.role == "gang"
    world.die(world.processes[0])
    world.lose("B")
    world.later(20, partial(setattr, world, "hold", nothing))
    before_s = world.clock.now_s
    with pytest.raises(WorkersLostError, match="the state of gang is lost"):
        runtime.get(change)
    assert world.clock.now_s - before_s < 60


def test_a_copy_slower_than_a_step_keeps_what_came_since_the_snapshot_before(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    world.copies = "late"
    taken = []
    for label in range(1, 5):
        runtime.get(runtime.broadcast(gang, Ledger.add, label))
        taken.append(runtime.snapshot(gang, Ledger.take, Ledger.restore))
        turns(runtime)
    assert [ref is not None for ref in taken] == [True, False, False, False]
    world.copies = "early"
    turns(runtime)
    count = len(world.processes)
    world.die(world.processes[0])
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 5)) == (added(0, 1, 2, 3, 4, 5),) * 2
    assert started(world, count) == ["restore", "add", "add", "add", "add"]


def test_a_read_whose_input_has_failed_does_not_block_its_group(world: World) -> None:
    runtime = build_scheduler(world, one=("A",), other=("A",))
    one, other = runtime.place("one", Ledger), runtime.place("other", Ledger)
    bad = runtime.submit(one, Ledger.fail)
    before = runtime.submit(other, Ledger.read, 1, bad)
    with pytest.raises(WorkerError, match="row 7 has no tokens"):
        runtime.get(bad)
    after = runtime.submit(other, Ledger.read, 2, bad)
    change = runtime.broadcast(other, Ledger.add, 3)
    for read in (before, after):
        with pytest.raises(WorkerError, match="row 7 has no tokens"):
            runtime.get(read)
    assert runtime.get(change) == (added(0, 3),)
    assert open_books(runtime) == {}


def test_what_is_there_can_be_had_after_the_workers_are_lost(world: World) -> None:
    runtime = build_scheduler(world, RecoverySettings(max_restarts=0), gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    taken = snapshot(runtime, gang)
    world.hold = holding("add")
    change = runtime.broadcast(gang, Ledger.add, 2)
    turns(runtime)
    world.die(world.processes[0])
    for _ in range(2):
        with pytest.raises(WorkersLostError, match="max_restarts is 0"):
            runtime.get(change)
    world.slow_fetches = 3
    assert runtime.is_there(taken)
    assert runtime.get(taken) == added(0, 1)


@pytest.mark.parametrize("is_gang", [False, True])
@pytest.mark.parametrize("labels", [(), (1, 2)])
def test_a_read_that_lost_its_input_sees_the_state_it_was_sent_for(
    labels: tuple[int, ...], is_gang: bool, world: World
) -> None:
    runtime = build_scheduler(world, group=("A", "A"), maker=("B", "C"))
    group = (runtime.place_gang if is_gang else runtime.place)("group", Ledger)
    maker = runtime.place("maker", Ledger)
    made = runtime.submit(maker, Ledger.read, 7)
    for label in labels:
        runtime.broadcast(group, Ledger.add, label)
    runtime.get(made)
    turns(runtime)
    world.hold = lambda process, name: name == "read" and process.role == "group"
    read = runtime.submit(group, Ledger.read, 8, made)
    change = runtime.broadcast(group, Ledger.add, 9)
    turns(runtime)
    world.lose(keeper_of(made))
    world.hold = nothing
    assert runtime.get(read) == mix("read", added(0, *labels), 8, mix("read", 0, 7))
    assert runtime.get(change) == (added(0, *labels, 9),) * 2


def test_two_ranks_that_die_at_once_are_replaced_together(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A", "B"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    snapshot(runtime, gang)
    world.hold = holding("add", 0, 2)
    change = runtime.broadcast(gang, Ledger.add, 2)
    turns(runtime)
    for number in (0, 2):
        world.die(world.processes[number])
    assert runtime.get(change) == (added(0, 1, 2),) * 3
    assert len(world.processes) == 6


def test_a_gang_survives_a_death_during_its_restart(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    for label in (1, 2):
        runtime.broadcast(gang, Ledger.add, label)
        snapshot(runtime, gang)
    world.hold = holding("start", 2, 3)
    world.die(world.processes[0])
    change = runtime.broadcast(gang, Ledger.add, 3)
    turns(runtime)
    assert len(world.processes) == 4
    world.die(world.processes[2])
    world.hold = nothing
    assert runtime.get(change) == (added(0, 1, 2, 3),) * 2
    assert started(world, 4) == ["restore", "add"]


def test_a_snapshot_that_a_restart_has_not_come_to_yet_stays_where_it_was_taken(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    snapshot(runtime, gang)
    change = runtime.broadcast(gang, Ledger.add, 2)
    runtime.get(change)
    world.hold = holding("start", 2, 3)
    world.die(world.processes[0])
    # Two deaths, one after the other, before the gang has started again.
    for victim in (2, 4):
        while len(world.processes) <= victim:
            runtime._pump(0.0)
        world.die(world.processes[victim])
    assert runtime.get(runtime.submit(gang, Ledger.state_of)) == added(0, 1, 2)
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 3)) == (added(0, 1, 2, 3),) * 2


def test_a_death_while_changes_wait_to_be_repeated_repeats_each_once(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"), maker=("B", "C"))
    gang, maker = runtime.place_gang("gang", Ledger), runtime.place("maker", Ledger)
    made = runtime.submit(maker, Ledger.read, 7)
    runtime.broadcast(gang, Ledger.add, 1)
    runtime.broadcast(gang, Ledger.add, 2, made)
    last = runtime.broadcast(gang, Ledger.add, 3)
    runtime.get(last)
    world.hold = holding("read")
    world.lose(keeper_of(made))
    world.die(world.processes[0])
    turns(runtime, 200)
    count = len(world.processes)
    world.die(world.alive("gang")[0])
    turns(runtime, 200)
    world.hold = nothing
    value = mix("add", mix("add", added(0, 1), 2, mix("read", 0, 7)), 3)
    assert runtime.get(runtime.submit(gang, Ledger.state_of)) == value
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 4)) == (added(value, 4),) * 2
    assert len([name for number, name in world.sent if number >= count and name == "add"]) == 2 * 4


@pytest.mark.parametrize("is_gang", [True, False])
def test_a_group_without_a_free_place_goes_on_smaller(is_gang: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    put_into(monkeypatch, world)
    runtime = build_scheduler(world, group=("B", "A", "A"), maker=("C",))
    group = (runtime.place_gang if is_gang else runtime.place)("group", Ledger)
    maker = runtime.place("maker", Ledger)
    refs = runtime.submit_pieces(maker, Ledger.cut, 4, 5, 4)
    digests = [mix(mix("cut", 0, 5, piece)) for piece in range(4)]
    runtime.get(runtime.broadcast(group, Ledger.add, 1))
    world.lose("B")
    before_s = world.clock.now_s
    state = added(0, 1)
    # The first is under way when the worker is found gone, the second is made by those that are left.
    for label in (2, 3):
        state = mix("share", state, label, *digests)
        change = runtime.scatter(group, Ledger.share, partial(deal, label, refs), refs)
        assert runtime.get(change) == (state,) * 2
        assert 10 <= world.clock.now_s - before_s < 20
    assert len(world.alive("group")) == 2


def test_a_worker_that_starts_late_makes_every_change(world: World) -> None:
    runtime = build_scheduler(world, pool=("A", "B"))
    world.hold = holding("start", 1)
    pool = runtime.place("pool", Ledger)
    change = runtime.broadcast(pool, Ledger.add, 1)
    runtime.broadcast(pool, Ledger.assign, 2, replaces=True)
    turns(runtime)
    world.hold = nothing
    assert runtime.get(change) == (added(0, 1),) * 2


def test_a_change_that_was_under_way_when_another_replaced_the_state_still_ends(world: World) -> None:
    runtime = build_scheduler(world, pool=("A", "B"))
    pool = runtime.place("pool", Ledger)
    turns(runtime)
    world.hold = holding("add", 1)
    change = runtime.broadcast(pool, Ledger.add, 1)
    runtime.broadcast(pool, Ledger.assign, 2, replaces=True)
    turns(runtime)
    world.die(world.processes[1])
    assert runtime.get(change) == (added(0, 1),) * 2


def test_a_worker_that_comes_back_waits_for_what_its_past_was_made_of(world: World) -> None:
    runtime = build_scheduler(world, pool=("A", "A"), maker=("B", "C"))
    pool, maker = runtime.place("pool", Ledger), runtime.place("maker", Ledger)
    made = runtime.submit(maker, Ledger.read, 7)
    runtime.get(runtime.broadcast(pool, Ledger.add, 1, made))
    world.hold = holding("read")
    world.lose(keeper_of(made))
    turns(runtime, 200)
    world.die(world.processes[0])
    turns(runtime, 200)
    world.hold = nothing
    state = mix("add", 0, 1, mix("read", 0, 7))
    assert runtime.get(runtime.broadcast(pool, Ledger.add, 2)) == (added(state, 2),) * 2
    assert runtime.get(made) == mix("read", 0, 7)


def test_weights_that_went_with_a_node_are_made_again_for_what_was_made_with_them(world: World) -> None:
    runtime = build_scheduler(world, gang=("B", "C"), pool=("B", "C"))
    gang, pool = runtime.place_gang("gang", Ledger), runtime.place("pool", Ledger)
    weights = runtime.submit(gang, Ledger.state_of)
    runtime.broadcast(pool, Ledger.assign, 1, weights, replaces=True)
    rollout = runtime.submit(pool, Ledger.read, 2)
    runtime.get(rollout)
    runtime.broadcast(pool, Ledger.add, 3)
    turns(runtime)
    assert keeper_of(weights) == keeper_of(rollout) == "B"
    world.lose("B")
    state = mix("assign", 1, 0)
    assert runtime.get(runtime.broadcast(pool, Ledger.add, 4)) == (added(state, 3, 4),) * 2
    assert runtime.get(rollout) == mix("read", state, 2)


def test_reads_from_before_and_after_a_replaced_state_are_both_made_again(world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "B"))
    gang = runtime.place_gang("gang", Ledger)
    runtime.broadcast(gang, Ledger.add, 1)
    world.copies = "late"
    early = runtime.submit(gang, Ledger.read, 2)
    runtime.get(early)
    runtime.snapshot(gang, Ledger.take, Ledger.restore)
    middle = runtime.submit(gang, Ledger.read, 3)
    runtime.broadcast(gang, Ledger.add, 4)
    late = runtime.submit(gang, Ledger.read, 5)
    runtime.get(late)
    runtime.get(runtime.broadcast(gang, Ledger.assign, 6, replaces=True))
    world.copies = "early"
    turns(runtime)
    world.lose(keeper_of(early))
    reads = runtime.get((early, middle, late))
    assert reads == (mix("read", added(0, 1), 2), mix("read", added(0, 1), 3), mix("read", added(0, 1, 4), 5))
    assert runtime.get(runtime.broadcast(gang, Ledger.add, 7)) == (added(mix("assign", 6), 7),) * 2


def test_a_change_may_lose_each_of_its_workers_once_but_none_of_them_again(world: World) -> None:
    runtime = build_scheduler(world, RecoverySettings(max_attempts=2), gang=("A", "A"))
    gang = runtime.place_gang("gang", Ledger)
    world.hold = holding("add")
    change = runtime.broadcast(gang, Ledger.add, 1)
    for rank in (0, 1):
        turns(runtime)
        world.die(world.alive("gang")[rank])
        turns(runtime)
    world.die(world.alive("gang")[0])
    with pytest.raises(WorkersLostError, match="the same call has lost its worker 2 times"):
        runtime.get(change)


def test_deaths_count_within_their_window_alone(world: World) -> None:
    recovery = RecoverySettings(max_restarts=2, window_s=100.0)
    runtime = build_scheduler(world, recovery, pool=("A", "A"))
    pool = runtime.place("pool", Ledger)

    def lose_one() -> int:
        world.die(world.alive("pool")[0])
        turns(runtime, 200)
        return runtime.get(runtime.submit(pool, Ledger.read, 1))

    assert [lose_one() for _ in range(2)] == [mix("read", 0, 1)] * 2
    world.clock.now_s += 101.0
    assert [lose_one() for _ in range(2)] == [mix("read", 0, 1)] * 2
    with pytest.raises(WorkersLostError, match="death 3 within 100 s"):
        lose_one()
    assert runtime.metrics()["recovery/deaths"].value == 5


# Memory.


def run_steps(runtime: Scheduler, world: World, count: int, *, colocated: bool, deaths_every: int) -> list[int]:
    """As many steps as a run makes, and the calls that are held after each 50."""
    gang, pool = runtime.place_gang("gang", Ledger), runtime.place("pool", Ledger)
    weights, held = None, []
    for step in range(1, count + 1):
        maker = gang if colocated else pool
        refs = runtime.submit_pieces(maker, Ledger.cut, 2, step, 2, weights)
        scores = runtime.submit(pool, Ledger.read, step, refs[1])
        change = runtime.scatter(gang, Ledger.share, partial(deal, step, refs), refs)
        runtime.snapshot(gang, Ledger.take, Ledger.restore)
        weights = None if colocated else runtime.submit(gang, Ledger.state_of)
        if deaths_every and step % deaths_every == 0:
            world.die(world.alive()[step % len(world.alive())])
        runtime.get((change, scores))
        if step % 50 == 0:
            del refs, scores, change
            turns(runtime)
            gc.collect()
            held.append(sum(isinstance(item, Task) for item in gc.get_objects()))
    return held


@pytest.mark.parametrize("deaths_every", [0, 7])
@pytest.mark.parametrize("colocated", [False, True])
def test_a_long_run_holds_no_more_than_a_short_one(colocated: bool, deaths_every: int, world: World) -> None:
    runtime = build_scheduler(world, gang=("A", "A"), pool=("B", "B"))
    held = run_steps(runtime, world, 500, colocated=colocated, deaths_every=deaths_every)
    assert held[-1] <= held[0] + 3
