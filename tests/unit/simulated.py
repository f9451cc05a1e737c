"""A world without processes: a `Transport` whose hosts live here, whose answers come when a test or a seed says so, and where all may die.

Time is simulated too: a turn that brings an answer takes `TURN_S`, one that brings none as long as it may wait. So a history is the same
at each run, and no test sleeps.
"""

from __future__ import annotations

import itertools
import pickle
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hybridflow.runtime import deaths, dispatcher, repairs, scheduler
from hybridflow.runtime.api import HELD_BY_ASKED, Pieces, RecoverySettings, RuntimeSettings, Seat
from hybridflow.runtime.host import Describe, Host, Run, Start
from hybridflow.runtime.placement import Placement, PlacementSettings, RolePlacement, Slot
from hybridflow.runtime.scheduler import Scheduler
from hybridflow.runtime.transport import Died, InputLost, ObjectLostError

TURN_S = 0.01
MAX_TURNS = 10_000
CONTROLLER_NODE = "controller"
"""Where copies go; it is never lost."""

PAIR = 2
"""Workers of a team."""

TOKENS = itertools.count()

Answer = bytes | Died | InputLost


class HangError(AssertionError):
    """The scheduler has waited for more turns than any history needs."""


# What workers do: a state is one number that depends on everything that ever changed it.


def mix(*parts: Any) -> int:
    """One number that another order, a missing part or a part too many changes."""
    return zlib.crc32(repr(parts).encode())


def flat(inputs: Iterable[Any]) -> list[Any]:
    """Results of a change count once, whatever the number of workers that made it."""
    return [value[0] if isinstance(value, tuple) else value for value in inputs]


class Ledger:
    """A worker whose state is the history of its changes, as one number."""

    def __init__(self, seat: Seat, start: int = 0) -> None:
        self.seat, self.state = seat, start
        self.token = next(TOKENS)

    def close(self) -> None:
        """Nothing was started."""

    def add(self, label: int, *inputs: Any) -> int:
        self.state = mix("add", self.state, label, *flat(inputs))
        return self.state

    def assign(self, label: int, *inputs: Any) -> int:
        self.state = mix("assign", label, *flat(inputs))
        return self.state

    def share(self, label: int, rank: int, size: int, digests: tuple[int, ...], *own: int) -> int:
        """A change by the digests of all shares; each worker makes sure that its own share came."""
        if [mix(value) for value in own] != list(digests[rank::size]):
            raise ValueError(f"worker {self.seat.rank} did not get share {rank} of {size}: {own}")
        self.state = mix("share", self.state, label, *digests)
        return self.state

    def read(self, label: int = 0, *inputs: Any) -> int:
        return mix("read", self.state, label, *flat(inputs))

    def cut(self, label: int, count: int, *inputs: Any) -> Pieces[int]:
        values = tuple(mix("cut", self.state, label, piece, *flat(inputs)) for piece in range(count))
        return Pieces(values, tuple(mix(value) for value in values))

    def meet(self, label: int, rank: int, count: int, *inputs: Any) -> Pieces[int]:
        """A read in which the ranks meet; each makes sure that it got its own arguments."""
        if rank != self.seat.rank:
            raise ValueError(f"worker {self.seat.rank} got what was for {rank}")
        values = tuple(mix("meet", self.state, label, rank, piece, *flat(inputs)) for piece in range(count))
        return Pieces(values, tuple(mix(value) for value in values))

    def pair(self, label: int, place: int, count: int, *inputs: Any) -> Pieces[int]:
        """A read in which two neighbours meet, whoever they are; each makes sure that it got its own arguments."""
        if place != self.seat.rank % PAIR:
            raise ValueError(f"worker {self.seat.rank} got what was for place {place}")
        values = tuple(mix("pair", self.state, label, place, piece, *flat(inputs)) for piece in range(count))
        return Pieces(values, tuple(mix(value) for value in values))

    def token_of(self) -> int:
        """Of this life of the worker."""
        return self.token

    def hand(self, label: int, tokens: tuple[int | None, ...]) -> Pieces[tuple[int, tuple[int, ...]]]:
        """Something that lies with all who were asked for their tokens, or where one is not there with itself."""
        there = () if None in tokens else tuple(token for token in tokens if token is not None)
        handed = mix("hand", self.state, label), there
        return Pieces((handed,), (HELD_BY_ASKED if there else None,))

    def use(self, label: int, handed: tuple[int, tuple[int, ...]]) -> int:
        """Makes sure that this worker has it."""
        value, tokens = handed
        if tokens and self.token not in tokens:
            raise ValueError(f"what lies with {tokens} is not with {self.token}")
        return mix("use", self.state, label, value)

    def state_of(self) -> int:
        return self.state

    def rank_of(self, *inputs: Any) -> tuple[int, int]:
        return self.seat.rank, self.seat.size

    def fail(self) -> None:
        raise ValueError("row 7 has no tokens")

    def take(self) -> int:
        return self.state

    def restore(self, *parts: int) -> None:
        """From one part, or from those of all ranks, which hold the same here."""
        (self.state,) = set(parts)


def deal(label: int, refs: tuple[Any, ...], digests: Sequence[int], size: int) -> list[tuple[Any, ...]]:
    """The `split` of `Ledger.share`: whole digests, and every `size`-th reference."""
    return [(label, rank, size, tuple(digests), *refs[rank::size]) for rank in range(size)]


# Where they do it.


@dataclass(eq=False)
class Item:
    """An object in the store."""

    node_id: str
    value: Any = None


@dataclass(eq=False)
class Letter:
    """One order on its way; it is its own key.

    answer:  what came of it, which the controller has not seen yet.
    has_met: whether all ranks were there at once, for a change in which they meet.
    """

    process: Process
    order: Any
    data: bytes
    inputs: tuple[Item, ...]
    objects: tuple[Item, ...]
    answer: Answer | None = None
    has_met: bool = False

    @property
    def name(self) -> str:
        """`describe`, `start`, `close`, or the name of a verb."""
        return self.order.verb.__name__ if isinstance(self.order, Run) else type(self.order).__name__.lower()

    @property
    def meeting(self) -> Any:
        """Of a change, its place among those of its group; of a read in which ranks meet, its name and label; else None."""
        if not isinstance(self.order, Run):
            return None
        return (self.name, self.order.skeleton[0]) if self.name in ("meet", "pair") else self.order.position

    @property
    def num_meeting(self) -> int:
        """How many meet in it."""
        return PAIR if self.name == "pair" else self.process.size


@dataclass(eq=False)
class Process:
    """A host, and the orders that were sent to it, oldest first. `size`: workers of its group when it started."""

    number: int
    role: str
    slot: Slot
    host: Host
    letters: deque[Letter] = field(default_factory=deque)
    alive: bool = True
    size: int = 0

    @property
    def node_id(self) -> str:
        return self.slot.node_id


@dataclass(eq=False)
class Copying:
    """A copy on its way to another node."""

    source: Item
    copy: Item


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    time = process_time = monotonic


class World:
    """The simulated `Transport`.

    spares: slots that nobody has, for workers of lost nodes.
    seed:   orders are carried out and answered in this random order; None: at once, but for what `hold` keeps back.
    hold:   orders that are not begun, by process and name.
    meets:  roles whose workers make no change (but restoring) before all of them have come to it, as in a collective.
    copies: "early": copies are there at the next turn; "late": at some turn (or, without a seed, where `copies` is set to "early");
            "never": they fail; "none": there is no other node.
    """

    def __init__(self, spares: Sequence[Slot] = (), seed: int | None = None) -> None:
        self.clock = Clock()
        self.processes: list[Process] = []
        self.lost_nodes: set[str] = set()
        self.copies = "early"
        self.hold: Callable[[Process, str], bool] = lambda process, name: False
        self.meets: set[str] = set()
        self.slow_fetches = 0
        self.turn = 0
        self.sent: list[tuple[int, str]] = []
        self.spares = list(spares)
        self._moved: dict[Slot, Slot] = {}
        self._random = random.Random(seed) if seed is not None else None
        self._events: list[tuple[int, Callable[[], None]]] = []

    # What a test does.

    def alive(self, role: str | None = None) -> list[Process]:
        """Processes that live, oldest first."""
        return [process for process in self.processes if process.alive and role in (None, process.role)]

    def die(self, process: Process, answered: int = 0) -> None:
        """Ends a process. Of what it has done and not answered yet, the first `answered` answers still come."""
        process.alive = False
        for number, letter in enumerate(process.letters):
            if letter.answer is None or number >= answered:
                letter.answer = Died("killed")

    def lose(self, node_id: str, answered: int = 0) -> None:
        """Takes a node away, with all that lives and lies there."""
        self.lost_nodes.add(node_id)
        for process in self.alive():
            if process.node_id == node_id:
                self.die(process, answered)

    def later(self, turns: int, event: Callable[[], None]) -> None:
        """Lets something happen at the beginning of a turn to come."""
        self._events.append((self.turn + turns, event))

    def is_quiet(self) -> bool:
        """Whether nothing more will happen."""
        return not self._events

    # What the scheduler does.

    def create(self, role: str, slot: Slot | None) -> Process:
        assert slot is not None
        process = Process(len(self.processes), role, slot, Host(slot.node_id, slot.node_id))
        process.alive = slot.node_id not in self.lost_nodes
        self.processes.append(process)
        return process

    def send(
        self, handle: Process, order: bytes, inputs: Sequence[Item], num_objects: int
    ) -> tuple[Letter, tuple[Item, ...]]:
        objects = tuple(Item(handle.node_id) for _ in range(num_objects))
        letter = Letter(handle, pickle.loads(order), order, tuple(inputs), objects)
        if not handle.alive:
            letter.answer = Died("dead")
        handle.letters.append(letter)
        if isinstance(letter.order, Start):
            handle.size = letter.order.seat.size
        if not isinstance(letter.order, Describe):
            self.sent.append((handle.number, letter.name))
        return letter, objects

    def poll(self, keys: list[Any], timeout_s: float) -> list[tuple[Any, Answer]]:
        self.turn += 1
        if self.turn > MAX_TURNS:
            raise HangError(f"{self.turn} turns")
        for event in [event for turn, event in self._events if turn <= self.turn]:
            event()
        self._events = [(turn, event) for turn, event in self._events if turn > self.turn]
        answers = [*self._answer_letters(set(keys)), *self._answer_copies(keys)]
        self.clock.now_s += TURN_S if answers else max(timeout_s, TURN_S)
        return answers

    def fetch(self, objects: Sequence[Item], timeout_s: float) -> list[Any] | None:
        for item in objects:
            if item.node_id in self.lost_nodes:
                raise ObjectLostError(item)
        if self.slow_fetches or self._is_late(0.2):
            self.slow_fetches = max(self.slow_fetches - 1, 0)
            self.clock.now_s += timeout_s
            return None
        return [item.value for item in objects]

    def kill(self, handle: Process) -> None:
        handle.alive = False
        handle.letters.clear()

    def copy(self, item: Item, node_id: str) -> tuple[Copying, Item, str] | None:
        if self.copies == "none" or node_id == CONTROLLER_NODE:
            return None
        copying = Copying(item, Item(CONTROLLER_NODE))
        return copying, copying.copy, CONTROLLER_NODE

    def node_is_lost(self, node_id: str) -> bool:
        return node_id in self.lost_nodes

    def find_slot(self, slot: Slot, *, share: bool) -> Slot | None:
        slot = self._moved.get(slot, slot)
        if slot.node_id not in self.lost_nodes:
            return slot
        self.spares = [spare for spare in self.spares if spare.node_id not in self.lost_nodes]
        used = [process.slot for process in self.alive()]
        free = self.spares[:1] or (used[:1] if share else [])
        if not free:
            return None
        self.spares = self.spares[1:]
        self._moved[slot] = free[0]
        return free[0]

    def close(self) -> None:
        """Nothing was opened."""

    # How orders become answers.

    def _is_late(self, chance: float) -> bool:
        return self._random is not None and self._random.random() < chance

    def _answer_letters(self, keys: set[Any]) -> list[tuple[Letter, Answer]]:
        processes = [process for process in self.processes if process.letters]
        if self._random is not None:
            self._random.shuffle(processes)
        answers = []
        for process in processes:
            self._work(process)
            while process.letters and process.letters[0].answer is not None and not self._is_late(0.4):
                letter = process.letters.popleft()
                if letter in keys and letter.answer is not None:
                    answers.append((letter, letter.answer))
        return answers

    def _work(self, process: Process) -> None:
        for letter in process.letters:
            if letter.answer is None:
                if not process.alive or self.hold(process, letter.name) or self._is_late(0.4):
                    return
                if not self._has_met(letter):
                    return
                letter.answer = self._carry_out(letter)

    def _has_met(self, letter: Letter) -> bool:
        process, meeting = letter.process, letter.meeting
        if letter.has_met or meeting is None or letter.name == "restore" or process.role not in self.meets:
            return True
        first = [next((each for each in p.letters if each.answer is None), None) for p in self.alive(process.role)]
        there = [each for each in first if each is not None and each.meeting == meeting and each.name == letter.name]
        if len(there) == letter.num_meeting:
            for each in there:
                each.has_met = True
        return letter.has_met

    def _carry_out(self, letter: Letter) -> Answer:
        lost = [item for item in letter.inputs if item.node_id in self.lost_nodes]
        if lost:
            return InputLost(lost[0])
        answer = letter.process.host.answer(letter.data, *(item.value for item in letter.inputs))
        if not letter.objects:
            return bytes(answer)
        for item, value in zip(letter.objects, answer, strict=False):
            item.value = value
        return bytes(answer[-1])

    def _answer_copies(self, keys: Sequence[Any]) -> list[tuple[Copying, Answer]]:
        answers: list[tuple[Copying, Answer]] = []
        for key in keys:
            if not isinstance(key, Copying):
                continue
            if self.copies == "never" or key.source.node_id in self.lost_nodes:
                answers.append((key, Died("it could not be copied")))
            elif self.copies == "early" or (self._random is not None and not self._is_late(0.8)):
                key.copy.value = key.source.value
                answers.append((key, b""))
        return answers


# How a scheduler is put into it.


def slots(*node_ids: str) -> tuple[Slot, ...]:
    """One slot for each."""
    return tuple(Slot(node_id, "cpu", (number,)) for number, node_id in enumerate(node_ids))


def put_into(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Gives the scheduler the world's time."""
    for module in (deaths, dispatcher, repairs, scheduler):
        monkeypatch.setattr(module, "time", world.clock)


def build_scheduler(world: World, recovery: RecoverySettings | None = None, **roles: Sequence[str]) -> Scheduler:
    """A scheduler with these roles on these nodes."""
    placed = tuple(
        RolePlacement(role, role, tuple(Slot(node, "cpu", (10 * n + i,)) for i, node in enumerate(nodes)))
        for n, (role, nodes) in enumerate(roles.items())
    )
    settings = RuntimeSettings(
        kind="ray",
        recovery=recovery or RecoverySettings(max_restarts=1000, max_attempts=1000),
        placement=PlacementSettings(bind_numa=False),
    )
    return Scheduler(world, settings, Placement(placed))
