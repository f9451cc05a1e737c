"""How prompts are shared out over replicas of several workers each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.roles.engines import RolloutSettings, plan_replicas
from hybridflow.roles.generator import Generator, GeneratorWorker
from hybridflow.roles.parts import TEXT, TOKENS
from hybridflow.rollout import NativeSettings
from hybridflow.types import Call, Ref, SamplingParams


@dataclass
class Workers:
    """A group of so many, that does nothing."""

    size: int
    role: str = "rollout"


@dataclass
class CallingRuntime:
    """Takes down what teams of workers are called with; a reference names the call, the place in the team and the piece."""

    calls: list[tuple[str, list[tuple[Any, ...]]]] = field(default_factory=list)

    def submit_team_pieces(
        self,
        group: Workers,
        verb: Callable[..., Any],
        counts: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        rows: str = "",
    ) -> tuple[tuple[Ref[Any], ...], ...]:
        assert verb is GeneratorWorker.rollout and group.size % len(args) == 0 and len(counts) == len(args)
        self.calls.append((rows, list(args)))
        at = len(self.calls) - 1
        call = Call("rollout", "rollout", None, rows)  # type: ignore[arg-type]
        return tuple(tuple(Ref((at, place, i), call) for i in range(count)) for place, count in enumerate(counts))


def roll_out(num_prompts: int, size: int, tp: int, chunks: int = 1, chunks_wanted: int = 1) -> tuple[Any, Any]:
    runtime = CallingRuntime()
    settings = RolloutSettings(native=NativeSettings(tp=tp), chunks=chunks)
    sampling = SamplingParams(samples_per_prompt=3)
    generator = Generator(runtime, Workers(size), settings, sampling, chunks_wanted)  # type: ignore[arg-type]
    prompts = Batch.from_columns(group_id=list(range(num_prompts)), prompt_tokens=[[5]] * num_prompts)
    return runtime.calls, generator.rollout(prompts, step=2)


def test_ranks_of_a_replica_get_the_same_prompts_and_the_first_returns_the_rows() -> None:
    calls, batch = roll_out(num_prompts=7, size=4, tp=2, chunks=2)
    assert [rows for rows, _ in calls] == ["rows 0 to 5", "rows 6 to 11", "rows 12 to 17", "rows 18 to 20"]
    given = [[part.pylist("group_id") for part, *_ in args] for _, args in calls]
    assert given == [[own, own] for own in ([0, 1], [2, 3], [4, 5], [6])]
    assert [[sizes for *_, sizes, _ in args] for _, args in calls] == [[(rows,), ()] for rows in (6, 6, 6, 3)]
    assert [chunk.num_rows for chunk in batch.chunks] == [6, 6, 6, 3]
    makers = [(chunk.parts[TOKENS].handle, chunk.parts[TEXT].handle) for chunk in batch.chunks]
    assert makers == [((at, 0, 0), (at, 0, 1)) for at in range(4)]


def test_chunks_of_a_call_keep_the_order_of_the_prompts() -> None:
    _, batch = roll_out(num_prompts=6, size=4, tp=2, chunks_wanted=4)
    assert [chunk.num_rows for chunk in batch.chunks] == [6, 3, 6, 3]
    assert [chunk.parts[TOKENS].handle for chunk in batch.chunks] == [(0, 0, 0), (0, 0, 2), (1, 0, 0), (1, 0, 2)]


@pytest.mark.parametrize(("num_prompts", "rows"), [(1, "rows 0 to 2"), (0, "no rows")])
def test_a_replica_for_which_no_prompt_is_left_is_not_called(num_prompts: int, rows: str) -> None:
    calls, batch = roll_out(num_prompts, size=6, tp=2)
    ((told, args),) = calls
    assert told == rows and len(batch.chunks) == 1
    assert [part.num_rows for part, *_ in args] == [num_prompts, num_prompts]
    assert [sizes for *_, sizes, _ in args] == [(3 * num_prompts,), ()]


def test_workers_that_make_no_whole_replicas_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        roll_out(num_prompts=1, size=3, tp=2)
    message = "rollout.native.tp: 2 takes 2 workers or a multiple, and 3 generate; set it to a divisor of their number"
    assert str(caught.value) == message
    split = plan_replicas(RolloutSettings(native=NativeSettings(tp=4)), 8)
    assert (split.data, split.tensor) == (2, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_is_closed_before_its_ranks_part_and_they_part_whatever_it_does(fails: bool) -> None:
    """Nccl waits, when ranks part, for every captured graph that holds its collectives."""
    said: list[str] = []

    class Closing:
        def close(self) -> None:
            said.append("closed")
            if fails:
                raise OSError("the server is gone")

        def leave(self) -> None:
            said.append("left")

    worker = object.__new__(GeneratorWorker)
    worker._end, worker.rollout_engine, worker.rollout_ranks = None, Closing(), Closing()  # type: ignore[assignment]
    with pytest.raises(OSError, match="gone") if fails else contextlib.nullcontext():
        worker.close()
    assert said == ["closed", "left"]
