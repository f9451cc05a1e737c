"""Which sequences run in the next step, and in which blocks of the KV cache. A pure planner: numpy only.

The order of rows is the order of everything: the lowest waiting row is admitted first, the highest running row (the
youngest) is preempted first. So the lowest unfinished row always moves on, and no order of completion can starve one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridflow.rollout.native.blocks import BlockAllocator
from hybridflow.rollout.native.prefixes import PrefixBlocks, find_shared_prefixes
from hybridflow.rollout.native.sequences import Finish, Sequences

_NO_COPIES = np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class Step:
    """One forward pass.

    Prompts of 5 and 7 tokens, two rows each: sequences [4, 5], counts [5, 7], rows [0, 1, 2, 3], sources [0, 0, 1, 1].

    sequences: [B] sequence numbers; each is fed `counts` [B] tokens, from `starts` [B] on.
    rows:      rows that draw a token, each from the last token fed of `sequences[sources]`.
    num_beside: the first so many sequences are rows that decode beside the others: each is fed the one token that it drew last.
    """

    sequences: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    sources: np.ndarray
    num_beside: int = 0


class Scheduler:
    """Continuous batching over a bounded number of blocks.

    Invariants: a running row and an opened prompt hold all blocks that the tokens they are about to be fed need;
    a row shares its prompt's full blocks and has its own copy of the last partial one; prompts that begin alike share
    the full blocks of what they have in common, which one of them computes first; at most `max_sequences` rows run; a
    pass over prompts feeds at most `prefill_tokens` tokens; a finished row holds nothing.

    max_held_beside: rows that are ready to decode go along in a pass over prompts, which so reads the weights once for both, where they
        hold so many tokens or fewer in all and are at most half of the pass; else all of them wait.
    """

    def __init__(
        self,
        sequences: Sequences,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        prefill_tokens: int,
        max_held_beside: int = 0,
    ) -> None:
        self.sequences = sequences
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.prefill_tokens = prefill_tokens
        self.max_held_beside = max_held_beside
        self.allocator = BlockAllocator(num_blocks)
        self.num_preemptions = 0
        prompts = [
            sequences.tokens[at, : sequences.length[at]] for at in range(sequences.num_rows, len(sequences.length))
        ]
        numbers = find_shared_prefixes(prompts, block_size)
        self._prefixes = PrefixBlocks(numbers, num_blocks)
        self._begins_alike = np.array([bool(shared) for shared in numbers], np.bool_)
        total = len(sequences.length)
        width = int(self._blocks_for(sequences.max_length).max(initial=1))
        self.block_table = np.zeros((total, width), np.int32)
        self.num_blocks = np.zeros(total, np.int64)
        self.cached = np.zeros(total, np.int64)
        """[R + P] tokens whose keys and values lie in the cache."""
        self.running = np.zeros(0, np.int64)
        """Rows that hold blocks, ascending."""
        self._copies = _NO_COPIES

    def schedule_prefill(self) -> Step | None:
        """The next pass over prompts and over rows to be computed again, with rows that decode beside them; None where all that runs is
        ready to decode."""
        self._admit()
        return self._plan_prefill()

    def take_copies(self) -> np.ndarray:
        """Token slots of the cache to be copied before anything else runs; to be asked after each `schedule_prefill`.

        returns: [n, 2] int64, from and to.
        """
        copies, self._copies = self._copies, _NO_COPIES
        return copies

    def reserve(self, steps: int) -> bool:
        """Gives every running row the blocks that it may fill in so many steps; False, and nothing given, where too few are free."""
        rows = self.running
        # The last token of a row is never fed.
        ends = np.minimum(self.sequences.length[rows] + steps - 1, self.sequences.max_length[rows] - 1)
        lacking = np.maximum(self._blocks_for(ends) - self.num_blocks[rows], 0)
        if lacking.sum() > self.allocator.num_free:
            return False
        self._give_blocks(rows, lacking)
        return True

    def make_room_for_one_step(self) -> None:
        """Gives every running row the block of its next token, taking those of others where too few are free; fewer may run then."""
        while not self.reserve(1):
            self._evict(keep=-1)

    def postprocess(self, sequences: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> None:
        """Books what was computed and gives back the blocks of finished rows and groups.

        sequences, counts: [B] that were fed so many tokens each.
        rows:              those that have drawn.
        """
        self.cached[sequences] += counts
        for prompt in self._begin_alike(sequences[sequences >= self.sequences.num_rows]):
            if self.cached[prompt] == self.sequences.length[prompt]:
                self._prefixes.add(prompt - self.sequences.num_rows, self.block_table[prompt])
        done = rows[self.sequences.finish[rows] != Finish.NONE]
        if done.size:
            self._release(done[self.num_blocks[done] > 0])
            self._close_groups(np.unique(done // self.sequences.samples))

    def _plan_prefill(self) -> Step | None:
        candidates = np.concatenate([self.running, self._opened_prompts()])
        pending = self.sequences.length[candidates] - self.cached[candidates]
        # A row that is ready to decode has one token to be fed.
        wanting = pending > np.where(candidates < self.sequences.num_rows, 1, 0)
        candidates, pending = candidates[wanting], pending[wanting]
        if not candidates.size:
            return None
        before = np.cumsum(pending) - pending
        beside = self._reserve_beside()
        counts = np.clip(self.prefill_tokens - len(beside) - before, 0, pending)
        chosen = counts > 0
        fed = np.concatenate([beside, candidates[chosen]])
        complete = np.append(np.ones(len(beside), np.bool_), (counts == pending)[chosen])
        counts = np.append(np.ones_like(beside), counts[chosen])
        rows, sources = self._drawing_rows(fed, complete)
        return Step(fed, self.cached[fed], counts, rows, sources, len(beside))

    def _reserve_beside(self) -> np.ndarray:
        """Running rows that decode in a pass over prompts, with blocks for their next tokens: all that are ready, or none where that does
        not pay or blocks lack."""
        table, rows = self.sequences, self.running
        ready = rows[table.length[rows] - self.cached[rows] == 1]
        pays = table.length[ready].sum() <= self.max_held_beside and 2 * len(ready) <= self.prefill_tokens
        if not ready.size or not pays or not self.reserve(1):
            return ready[:0]
        return ready

    def _drawing_rows(self, sequences: np.ndarray, complete: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A completed row draws for itself, a completed prompt for those rows of its group that have no token yet."""
        table, samples = self.sequences, self.sequences.samples
        sources = np.flatnonzero(complete)
        is_prompt = sequences[sources] >= table.num_rows
        first = np.where(is_prompt, (sequences[sources] - table.num_rows) * samples, sequences[sources])
        repeats = np.where(is_prompt, samples, 1)
        sources = np.repeat(sources, repeats)
        rows = np.repeat(first, repeats) + _counts_up(repeats)
        fresh = (table.length[rows] == table.prompt_length[rows]) & (table.finish[rows] == Finish.NONE)
        wanted = fresh | ~np.repeat(is_prompt, repeats)
        return rows[wanted], sources[wanted]

    def _admit(self) -> None:
        """Gives blocks to waiting rows, lowest first, and to those prompts of theirs that are not computed yet."""
        if len(self.running) >= self.max_sequences:
            return
        waiting = self.sequences.finish == Finish.NONE
        waiting[self.running] = False
        rows = np.flatnonzero(waiting)
        if not rows.size:
            return
        rows = rows[: self._count_admissible(rows)]
        prompts = self._prompts_of(rows)
        ready = self._share_prefixes(np.unique(prompts[self.num_blocks[prompts] == 0]))
        self._give_blocks(ready, self._blocks_for(self.sequences.length[ready]) - self.num_blocks[ready])
        self._start(rows[self.cached[prompts] == self.sequences.length[prompts]])

    def _share_prefixes(self, prompts: np.ndarray) -> np.ndarray:
        """Gives prompts the blocks that are there of what they begin with.

        returns: those that can be computed now; the others wait for a prompt that begins alike.
        """
        waiting = []
        for prompt in self._begin_alike(prompts):
            blocks = self._prefixes.match(prompt - self.sequences.num_rows)
            if blocks is None:
                waiting.append(prompt)
                continue
            self.block_table[prompt, : len(blocks)] = blocks
            self.allocator.share(blocks)
            self.num_blocks[prompt] = len(blocks)
            self.cached[prompt] = len(blocks) * self.block_size
            self._prefixes.begin(prompt - self.sequences.num_rows)
        return np.setdiff1d(prompts, waiting) if waiting else prompts

    def _begin_alike(self, prompts: np.ndarray) -> list[int]:
        alike: list[int] = prompts[self._begins_alike[prompts - self.sequences.num_rows]].tolist()
        return alike

    def _count_admissible(self, rows: np.ndarray) -> int:
        """How many of the waiting rows, from the first, have a seat, blocks and room in the next prefill.

        One block is left free for every row that may still grow: a row admitted into the last block would be the
        next one preempted.
        """
        table, prompts = self.sequences, self._prompts_of(rows)
        leads = np.diff(prompts, prepend=-1) != 0
        held = self._starting_blocks(rows)
        needed = held - table.prompt_length[rows] // self.block_size
        needed += np.where(leads & (self.num_blocks[prompts] == 0), self._blocks_for(table.length[prompts]), 0)
        spare = np.count_nonzero(self._longest_blocks(self.running) > self.num_blocks[self.running])
        costs = np.cumsum(needed + (self._longest_blocks(rows) > held))
        fits = int(np.count_nonzero(costs <= self.allocator.num_free - spare))
        if not fits and not len(self.running):
            self._make_room(int(needed[0]), keep=int(prompts[0]))
            fits = 1
        missing = table.length[prompts] - self.cached[prompts]
        tokens = np.where(missing > 0, np.where(leads, missing, 0), table.length[rows] - table.prompt_length[rows] - 1)
        in_prefill = int(np.count_nonzero(np.cumsum(tokens) - tokens < self.prefill_tokens))
        return min(fits, in_prefill, self.max_sequences - len(self.running))

    def _start(self, rows: np.ndarray) -> None:
        """Lets rows run whose prompt is computed: they share its full blocks and copy what lies in its last one."""
        if not rows.size:
            return
        size, prompts = self.block_size, self._prompts_of(rows)
        full, rest = np.divmod(self.sequences.prompt_length[rows], size)
        width = int(full.max())
        shared = self.block_table[prompts, :width]
        self.block_table[rows, :width] = shared
        self.allocator.share(shared[np.arange(width) < full[:, None]])
        self.num_blocks[rows] = full
        self._give_blocks(rows, self._starting_blocks(rows) - full)
        self.cached[rows] = self.sequences.prompt_length[rows]
        ends = np.stack([self.block_table[prompts, full - (rest == 0)], self.block_table[rows, full]], axis=1) * size
        self._copies = np.repeat(ends, rest, axis=0) + _counts_up(rest)[:, None]
        self.running = np.sort(np.concatenate([self.running, rows]))

    def _prompts_of(self, rows: np.ndarray) -> np.ndarray:
        return self.sequences.num_rows + rows // self.sequences.samples

    def _starting_blocks(self, rows: np.ndarray) -> np.ndarray:
        """Blocks in which a row starts, those of its prompt and room for its first sampled token included."""
        table = self.sequences
        return self._blocks_for(np.maximum(table.length[rows], table.prompt_length[rows] + 1))

    def _longest_blocks(self, rows: np.ndarray) -> np.ndarray:
        # The last token of a row is never fed, so it needs no room.
        return self._blocks_for(self.sequences.max_length[rows] - 1)

    def _make_room(self, count: int, keep: int) -> None:
        while self.allocator.num_free < count:
            self._evict(keep)

    def _evict(self, keep: int) -> None:
        """Takes the blocks of the youngest prompt that no running row uses, else of the youngest running row."""
        idle = np.setdiff1d(self._opened_prompts(), np.append(self._prompts_of(self.running), keep))
        if idle.size:
            self._release(idle[-1:])
        elif len(self.running) > 1:
            self._release(self.running[-1:])
            self.num_preemptions += 1
        else:
            raise RuntimeError(f"{self.allocator.num_blocks} KV blocks cannot hold one row; raise kv_cache_tokens")

    def _give_blocks(self, sequences: np.ndarray, counts: np.ndarray) -> None:
        owners = np.repeat(sequences, counts)
        self.block_table[owners, self.num_blocks[owners] + _counts_up(counts)] = self.allocator.allocate(len(owners))
        self.num_blocks[sequences] += counts

    def _release(self, sequences: np.ndarray) -> None:
        if not sequences.size:
            return
        held = np.arange(self.block_table.shape[1]) < self.num_blocks[sequences, None]
        self._prefixes.remove(self.allocator.release(self.block_table[sequences][held]))
        for prompt in self._begin_alike(sequences[sequences >= self.sequences.num_rows]):
            self._prefixes.give_up(prompt - self.sequences.num_rows)
        self.num_blocks[sequences] = 0
        self.cached[sequences] = 0
        self.running = self.running[self.num_blocks[self.running] > 0]

    def _close_groups(self, groups: np.ndarray) -> None:
        finish = self.sequences.finish.reshape(-1, self.sequences.samples)
        closed = groups[(finish[groups] != Finish.NONE).all(axis=1)]
        self._release(self.sequences.num_rows + closed)

    def _opened_prompts(self) -> np.ndarray:
        first = self.sequences.num_rows
        return first + np.flatnonzero(self.num_blocks[first:])

    def _blocks_for(self, tokens: np.ndarray) -> np.ndarray:
        return -(-tokens // self.block_size)


def _counts_up(counts: np.ndarray) -> np.ndarray:
    """0 to n - 1 for each n: [2, 3] gives [0, 1, 0, 1, 2]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def plan_num_blocks(sequences: Sequences, block_size: int, max_sequences: int) -> tuple[int, int]:
    """Blocks for a `Scheduler`: (at least, for every row to run alone; at most, more would change nothing)."""
    rows = sequences.unfinished()
    if not rows.size:
        return 0, 0
    prompt_length = sequences.prompt_length[rows]
    prompt_blocks = -(-prompt_length // block_size)
    own = -(-np.maximum(sequences.max_length[rows] - 1, prompt_length + 1) // block_size) - prompt_length // block_size
    _, first = np.unique(rows // sequences.samples, return_index=True)
    most = np.sort(own)[::-1][:max_sequences].sum() + np.sort(prompt_blocks[first])[::-1][:max_sequences].sum()
    return int((prompt_blocks + own).max()), int(most)
