import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rollout.native.scheduler import Scheduler, Step, plan_num_blocks
from hybridflow.rollout.native.sequences import Finish, Sequences


class FakeCache:
    """Remembers for each slot of the cache whose token lies there, and checks what a pass would attend to."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, tuple] = {}

    def owner(self, sequence: int, position: int) -> tuple:
        table = self.scheduler.sequences
        if sequence >= table.num_rows:
            return ("prompt", sequence - table.num_rows, position)
        if position < table.prompt_length[sequence]:
            return ("prompt", sequence // table.samples, position)
        return ("row", sequence, position)

    def slot(self, sequence: int, position: int) -> int:
        size = self.scheduler.block_size
        return int(self.scheduler.block_table[sequence, position // size]) * size + position % size

    def run(self, step: Step) -> None:
        self.slots |= {target: self.slots[source] for source, target in step.copies.tolist()}
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            for position in range(start, start + count):
                self.slots[self.slot(sequence, position)] = self.owner(sequence, position)
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            for position in range(start + count):
                assert self.slots[self.slot(sequence, position)] == self.owner(sequence, position)


def simulate(lengths, samples, responses, *, num_blocks, max_sequences, prefill_tokens, block_size=4, context=64):
    """Runs a whole call with planned response lengths [rows]. returns: (steps, preemptions)."""
    sequences = Sequences([np.arange(n) for n in lengths], samples, max(responses), context)
    scheduler = Scheduler(sequences, num_blocks, block_size, max_sequences, prefill_tokens)
    cache = FakeCache(scheduler)
    ends = np.minimum(
        sequences.prompt_length[: sequences.num_rows] + responses, sequences.max_length[: sequences.num_rows]
    )
    steps = 0
    while sequences.num_unfinished:
        step = scheduler.schedule()
        cache.run(step)
        drawing = step.sequences[step.sources]
        of_group = np.where(drawing < sequences.num_rows, drawing // samples, drawing - sequences.num_rows)
        assert np.array_equal(step.rows // samples, of_group)
        complete = (step.starts + step.counts)[step.sources]
        assert np.array_equal(complete, sequences.length[step.rows]), "a token is drawn from the last one only"
        assert len(scheduler.running) <= max_sequences
        assert step.counts.max() == 1 or step.counts.sum() <= prefill_tokens
        sequences.append(step.rows, np.zeros(len(step.rows)), np.zeros(len(step.rows)))
        sequences.finish[step.rows[sequences.length[step.rows] >= ends[step.rows]]] = Finish.STOP
        scheduler.postprocess(step)
        steps += 1
        assert steps < 10_000
    assert np.array_equal(sequences.length[: sequences.num_rows], ends)
    assert scheduler.allocator.num_free == num_blocks, "every block comes back"
    return steps, scheduler.num_preemptions


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
    )


def test_enough_blocks_mean_one_prefill_and_no_preemption():
    sequences = Sequences([np.arange(5)] * 4, 3, 6, 64)
    _, most = plan_num_blocks(sequences, 4, 100)
    steps, preemptions = simulate([5] * 4, 3, np.full(12, 6), num_blocks=most, max_sequences=100, prefill_tokens=100)
    assert (steps, preemptions) == (6, 0)


def test_too_few_blocks_preempt_and_still_finish():
    sequences = Sequences([np.arange(5)] * 6, 2, 30, 64)
    least, _ = plan_num_blocks(sequences, 4, 12)
    _, preemptions = simulate([5] * 6, 2, np.full(12, 30), num_blocks=2 * least, max_sequences=12, prefill_tokens=64)
    assert preemptions > 0


def test_a_prompt_is_computed_once_and_its_full_blocks_are_shared():
    sequences = Sequences([np.arange(10)], 3, 5, 64)
    scheduler = Scheduler(sequences, 12, 4, 8, 64)
    prefill = scheduler.schedule()
    assert prefill.sequences.tolist() == [3] and prefill.counts.tolist() == [10] and prefill.rows.tolist() == [0, 1, 2]
    sequences.append(prefill.rows, np.arange(3), np.zeros(3))
    scheduler.postprocess(prefill)
    decode = scheduler.schedule()
    assert decode.sequences.tolist() == [0, 1, 2] and decode.counts.tolist() == [1, 1, 1]
    table = scheduler.block_table
    assert (table[:3, :2] == table[3, :2]).all() and len(set(table[:, 2])) == 4
    assert decode.copies.tolist() == [
        [table[3, 2] * 4 + i, table[row, 2] * 4 + i] for row in range(3) for i in range(2)
    ]
    assert scheduler.allocator.num_free == 12 - 3 - 3


def test_one_row_too_many_is_an_error_of_its_own():
    sequences = Sequences([np.arange(5)], 1, 30, 64)
    least, _ = plan_num_blocks(sequences, 4, 1)
    with pytest.raises(RuntimeError, match="cannot hold one row"):
        simulate([5], 1, np.array([30]), num_blocks=least - 2, max_sequences=1, prefill_tokens=64)
