from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rollout.native.decoding import Decoding
from hybridflow.rollout.native.prefixes import find_shared_prefixes
from hybridflow.rollout.native.report import RolloutReport
from hybridflow.rollout.native.scheduler import Scheduler, plan_num_blocks
from hybridflow.rollout.native.seats import Seats
from hybridflow.rollout.native.sequences import Draws, Finish, Sequences


class FakeCache:
    """Remembers for each slot of the cache whose token lies there, and checks what a pass would attend to."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, tuple] = {}

    def owner(self, sequence: int, position: int) -> tuple:
        """What its keys and values depend on: all tokens up to it."""
        table = self.scheduler.sequences
        row = sequence if sequence < table.num_rows else None
        if row is not None and position >= table.prompt_length[row]:
            return (row, position)
        return (None, table.tokens[sequence, : position + 1].tobytes())

    def slot(self, blocks: np.ndarray, position: int) -> int:
        size = self.scheduler.block_size
        return int(blocks[position // size]) * size + position % size

    def copy(self, copies: np.ndarray) -> None:
        self.slots |= {target: self.slots[source] for source, target in copies.tolist()}

    def feed(self, sequences: np.ndarray, tables: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        rows = list(zip(sequences, tables, starts, counts, strict=True))
        for sequence, blocks, start, count in rows:
            for position in range(start, start + count):
                self.slots[self.slot(blocks, position)] = self.owner(sequence, position)
        for sequence, blocks, start, count in rows:
            for position in range(start + count):
                assert self.slots[self.slot(blocks, position)] == self.owner(sequence, position)


@dataclass(frozen=True)
class FakeWindow:
    steps: int
    tokens: np.ndarray

    def read(self) -> Draws:
        return Draws(self.tokens, np.zeros(self.tokens.shape, np.float32))


class FakeDecoder:
    """Feeds the cache at launch, as a device that works in the order of launches; ends the rows that it can see ending."""

    looks_back = False

    def __init__(self, cache: FakeCache, ends: np.ndarray, unseen: np.ndarray, max_steps: int, ahead: bool) -> None:
        self.cache, self.ends, self.unseen = cache, ends, unseen
        self.max_steps, self.ahead = max_steps, ahead
        self.num_steps = self.num_idle = 0

    def seat(self, seats: Seats) -> None:
        assert len(seats.tokens) <= self.cache.scheduler.max_sequences
        # Keys are the rows' own numbers here.
        self.rows, self.lengths, self.limits = seats.keys, seats.lengths.copy(), seats.limits
        self.live = np.ones(len(self.rows), np.bool_)
        assert np.array_equal(seats.tokens, self.rows), "each row goes on from its own newest token"

    def launch(self, steps: int, block_tables: np.ndarray) -> FakeWindow:
        assert 1 <= steps <= self.max_steps
        tokens = np.full((steps, len(self.rows)), -1, np.int32)
        for step in range(steps):
            at = np.flatnonzero(self.live)
            self.cache.feed(self.rows[at], block_tables[at], self.lengths[at] - 1, np.ones(len(at), np.int64))
            tokens[step, at] = self.rows[at]
            self.lengths[at] += 1
            seen = (self.lengths >= self.ends[self.rows]) & ~self.unseen[self.rows]
            self.live &= ~(seen | (self.lengths >= self.limits))
            self.num_steps += 1
            self.num_idle += len(self.rows) - len(at)
        return FakeWindow(steps, tokens)

    def stop(self, seats: np.ndarray) -> None:
        self.live[seats] = False

    def is_worth_seating(self, seated: int, live: int, waiting: int) -> bool:
        return live < (seated if waiting else seated // 2)


class FakeStops:
    def __init__(self, ends: np.ndarray) -> None:
        self.ends = ends

    def mark_finished(self, sequences: Sequences, rows: np.ndarray) -> None:
        sequences.finish[rows[sequences.length[rows] >= self.ends[rows]]] = Finish.STOP


def simulate(
    lengths, samples, responses, *, num_blocks, max_sequences, prefill_tokens, block_size=4, context=64,
    max_steps=1, ahead=False, unseen=None, begin=1, beside=0,
):  # fmt: skip
    """Runs a whole call with planned response lengths [rows]. Prompts of two tokens and more differ from token `begin` on at the
    latest. beside: see `Scheduler`. returns: (passes, preemptions)."""
    prompts = [np.where(np.arange(n) < begin, 7, 1000 * (index + 1) + np.arange(n)) for index, n in enumerate(lengths)]
    sequences = Sequences(prompts, samples, max(responses), context)
    scheduler = Scheduler(sequences, num_blocks, block_size, max_sequences, prefill_tokens, beside)
    cache = FakeCache(scheduler)
    num_rows = sequences.num_rows
    ends = np.minimum(sequences.prompt_length[:num_rows] + responses, sequences.max_length[:num_rows])
    stops = FakeStops(ends)
    decoder = FakeDecoder(cache, ends, np.zeros(num_rows, np.bool_) if unseen is None else unseen, max_steps, ahead)
    report = RolloutReport(num_rows)
    decoding = Decoding(scheduler, stops, decoder, np.arange(num_rows), report)
    passes = 0
    while sequences.num_unfinished:
        step = scheduler.schedule_prefill()
        cache.copy(scheduler.take_copies())
        assert len(scheduler.running) <= max_sequences
        if step is None:
            decoding.run(lambda: False)
        else:
            cache.feed(step.sequences, scheduler.block_table[step.sequences], step.starts, step.counts)
            drawing = step.sequences[step.sources]
            of_group = np.where(drawing < num_rows, drawing // samples, drawing - num_rows)
            assert np.array_equal(step.rows // samples, of_group)
            complete = (step.starts + step.counts)[step.sources]
            assert np.array_equal(complete, sequences.length[step.rows]), "a token is drawn from the last one only"
            assert step.counts.sum() <= prefill_tokens
            riding = step.sequences[: step.num_beside]
            assert (step.counts[: step.num_beside] == 1).all() and np.isin(riding, step.rows).all()
            assert sequences.length[riding].sum() <= beside
            sequences.append(step.rows, Draws(step.rows, np.zeros(len(step.rows))))
            stops.mark_finished(sequences, step.rows)
            scheduler.postprocess(step.sequences, step.counts, step.rows)
        passes += 1
        assert passes < 10_000
    assert not scheduler._prefixes._computing and not scheduler._prefixes._block_of
    assert np.array_equal(sequences.length[:num_rows], ends)
    for row in range(num_rows):
        assert (sequences.tokens[row, sequences.prompt_length[row] : ends[row]] == row).all()
    assert scheduler.allocator.num_free == num_blocks, "every block comes back"
    assert (report.steps, report.seat_steps - report.live_steps) == (decoder.num_steps, decoder.num_idle)
    return passes - 1 + decoder.num_steps, scheduler.num_preemptions


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_limits_serve_every_row_from_its_own_tokens(data):
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    samples = data.draw(st.integers(1, 4))
    responses = np.array(
        data.draw(st.lists(st.integers(1, 30), min_size=len(lengths) * samples, max_size=len(lengths) * samples))
    )
    max_sequences = data.draw(st.integers(1, 8))
    sequences = Sequences([np.arange(n) for n in lengths], samples, max(responses), 64)
    least, most = plan_num_blocks(sequences, 4, max_sequences)
    simulate(
        lengths,
        samples,
        responses,
        num_blocks=data.draw(st.integers(least, most)),
        max_sequences=max_sequences,
        prefill_tokens=data.draw(st.integers(1, 40)),
        max_steps=data.draw(st.sampled_from([1, 3, 8])),
        ahead=data.draw(st.booleans()),
        begin=data.draw(st.sampled_from([1, 9, 64])),
        beside=data.draw(st.sampled_from([0, 30, 10_000])),
        unseen=np.array(data.draw(st.lists(st.booleans(), min_size=len(responses), max_size=len(responses)))),
    )


def test_enough_blocks_mean_one_prefill_and_no_preemption():
    sequences = Sequences([np.arange(5)] * 4, 3, 6, 64)
    _, most = plan_num_blocks(sequences, 4, 100)
    steps, preemptions = simulate([5] * 4, 3, np.full(12, 6), num_blocks=most, max_sequences=100, prefill_tokens=100)
    assert (steps, preemptions) == (1 + 5, 0)


def test_rows_decode_beside_the_chunks_of_a_long_prompt():
    # The first prompt's row draws in the pass that completes it, then beside each of the second's six chunks of 7, then by itself.
    limits = dict(num_blocks=64, max_sequences=2, prefill_tokens=8)
    steps, _ = simulate([8, 40], 1, np.array([12, 2]), beside=100, **limits)
    assert steps == 1 + 6 + 5
    steps, _ = simulate([8, 40], 1, np.array([12, 2]), **limits)
    assert steps == 1 + 5 + 11


def test_rows_that_hold_much_wait_for_the_prompts():
    limits = dict(num_blocks=64, max_sequences=2, prefill_tokens=8)
    # The row holds 9 tokens when the chunks begin and 11 at the third of them: 7 + 7 + 8 + 8 + 8 + 2.
    steps, _ = simulate([8, 40], 1, np.array([12, 2]), beside=10, **limits)
    assert steps == 1 + 6 + 9


def test_too_few_blocks_preempt_and_still_finish():
    sequences = Sequences([np.arange(5)] * 6, 2, 30, 64)
    least, _ = plan_num_blocks(sequences, 4, 12)
    _, preemptions = simulate([5] * 6, 2, np.full(12, 30), num_blocks=2 * least, max_sequences=12, prefill_tokens=64)
    assert preemptions > 0


def test_a_prompt_is_computed_once_and_its_full_blocks_are_shared():
    sequences = Sequences([np.arange(10)], 3, 5, 64)
    scheduler = Scheduler(sequences, 12, 4, 8, 64)
    prefill = scheduler.schedule_prefill()
    assert prefill.sequences.tolist() == [3] and prefill.counts.tolist() == [10] and prefill.rows.tolist() == [0, 1, 2]
    sequences.append(prefill.rows, Draws(np.arange(3), np.zeros(3)))
    scheduler.postprocess(prefill.sequences, prefill.counts, prefill.rows)
    assert scheduler.schedule_prefill() is None
    assert scheduler.running.tolist() == [0, 1, 2]
    table = scheduler.block_table
    assert (table[:3, :2] == table[3, :2]).all() and len(set(table[:, 2])) == 4
    assert scheduler.take_copies().tolist() == [
        [table[3, 2] * 4 + i, table[row, 2] * 4 + i] for row in range(3) for i in range(2)
    ]
    assert scheduler.allocator.num_free == 12 - 3 - 3


def test_one_row_too_many_is_an_error_of_its_own():
    sequences = Sequences([np.arange(5)], 1, 30, 64)
    least, _ = plan_num_blocks(sequences, 4, 1)
    with pytest.raises(RuntimeError, match="cannot hold one row"):
        simulate([5], 1, np.array([30]), num_blocks=least - 2, max_sequences=1, prefill_tokens=64)


def test_what_prompts_begin_with_is_found_block_by_block():
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4], [7], [1, 2, 9, 9, 9], [2, 1, 3, 4, 5]]
    numbers = find_shared_prefixes([np.array(prompt, np.int32) for prompt in prompts], 2)
    first, second = numbers[0]
    assert numbers == [(first, second), (first, second), (first,), (), (first,), ()]


def test_prompts_that_begin_alike_wait_for_one_and_share_its_blocks():
    begin = list(range(10))
    prompts = [np.array(begin + [100 + i] * 3) for i in range(3)] + [np.array([5] * 9)]
    sequences = Sequences(prompts, 1, 5, 64)
    scheduler = Scheduler(sequences, 40, 4, 8, 64)
    step = scheduler.schedule_prefill()
    assert step.sequences.tolist() == [4, 7] and step.counts.tolist() == [13, 9]
    sequences.append(step.rows, Draws(np.zeros(2), np.zeros(2)))
    scheduler.postprocess(step.sequences, step.counts, step.rows)
    step = scheduler.schedule_prefill()
    assert step.sequences.tolist() == [5, 6] and step.starts.tolist() == [8, 8] and step.counts.tolist() == [5, 5]
    table = scheduler.block_table
    assert (table[4:7, :2] == table[4, :2]).all() and len(set(table[4:7, 2])) == 3
    # 4 + 3 of the first two, and each one of their own for the token to come; 2 + 2 of the others.
    assert scheduler.allocator.num_free == 40 - (4 + 3) - 2 - 2 * 2
