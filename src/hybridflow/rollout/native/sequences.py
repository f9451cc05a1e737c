"""What is known of every sequence of one `generate` call, as arrays over sequences.

Dimensions: R rows, P prompts, W tokens of the longest row.
"""

from __future__ import annotations

import enum
import zlib
from typing import NamedTuple

import numpy as np


class Finish(enum.IntEnum):
    """Why a row has no further token. FAILED rows report the finish reason 'abort' and their error."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    FAILED = 4


class Draws(NamedTuple):
    """One sampled token of each of B rows, or of S steps of these.

    tokens:   [B] int32.
    logprobs: [B] float32.
    num_kept: [B] int32, among how many tokens each was drawn; None where none are cut.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    num_kept: np.ndarray | None = None

    def at(self, index: int | np.ndarray | None) -> Draws:
        """Those of one step, or of some rows; None: as one step of several."""
        return Draws(self.tokens[index], self.logprobs[index], None if self.num_kept is None else self.num_kept[index])

    def spread(self, places: np.ndarray, size: int) -> Draws:
        """Over so many rows, these at the places given; the others have no token, which is -1."""
        tokens, logprobs, kept = np.full(size, -1, np.int32), np.zeros(size, np.float32), None
        tokens[places], logprobs[places] = self.tokens, self.logprobs
        if self.num_kept is not None:
            kept = np.zeros(size, np.int32)
            kept[places] = self.num_kept
        return Draws(tokens, logprobs, kept)


class Sequences:
    """Rows 0 to R-1, group by group (row = group * samples + sample), then the P prompts: prompt of group g is R + g.

    A prompt is a sequence of its own because it is computed once, for all rows of its group.

    tokens:        [R + P, W] int32; a row's prompt and what was sampled so far.
    logprobs:      [R, W] float32; value t speaks of token t, 0.0 on the prompt.
    num_kept:      [R, W] int32, among how many tokens token t was drawn, 0 on the prompt; None where sampling cuts none.
    length:        [R + P] int64, tokens known.
    prompt_length: [R + P] int64.
    max_length:    [R + P] int64, length at which a row ends.
    finish:        [R] int8, a `Finish`.
    checksum:      of all tokens that were sampled, in their order.

    Pages of arrays over tokens that no row has reached cost no memory.
    """

    def __init__(
        self, prompts: list[np.ndarray], samples: int, max_new_tokens: int, context: int, *, cuts: bool = False
    ) -> None:
        self.samples = samples
        self.num_rows = len(prompts) * samples
        lengths_P = np.array([len(prompt) for prompt in prompts], np.int64)
        self.prompt_length = np.concatenate([np.repeat(lengths_P, samples), lengths_P])
        self.length = self.prompt_length.copy()
        self.max_length = np.minimum(self.prompt_length + max_new_tokens, context)
        self.tokens = np.zeros((len(self.length), int(self.max_length.max(initial=0))), np.int32)
        self.logprobs = np.zeros((self.num_rows, self.tokens.shape[1]), np.float32)
        self.num_kept = np.zeros(self.logprobs.shape, np.int32) if cuts else None
        self.finish = np.zeros(self.num_rows, np.int8)
        self.checksum = 0
        for group, prompt in enumerate(prompts):
            self.tokens[group * samples : (group + 1) * samples, : len(prompt)] = prompt
            self.tokens[self.num_rows + group, : len(prompt)] = prompt

    def append(self, rows: np.ndarray, drawn: Draws) -> None:
        """Adds one sampled token to each of these rows."""
        at = self.length[rows]
        self.tokens[rows, at] = drawn.tokens
        self.logprobs[rows, at] = drawn.logprobs
        assert (self.num_kept is None) == (drawn.num_kept is None), "counts come where sampling cuts, and nowhere else"
        if self.num_kept is not None and drawn.num_kept is not None:
            self.num_kept[rows, at] = drawn.num_kept
        self.length[rows] += 1
        self.checksum = zlib.crc32(drawn.tokens.astype(np.int32).tobytes(), self.checksum)

    def last_tokens(self, rows: np.ndarray) -> np.ndarray:
        """The newest token of each of these rows. returns: [rows] int32."""
        return self.tokens[rows, self.length[rows] - 1]

    def histories(self, rows: np.ndarray) -> np.ndarray:
        """All tokens of each of these rows, [rows, tokens of the longest] int64; a shorter one is filled up with its first."""
        lengths = self.length[rows]
        width = int(lengths.max(initial=1))
        tokens = self.tokens[rows, :width].astype(np.int64)
        return np.where(np.arange(width) < lengths[:, None], tokens, tokens[:, :1])

    def unfinished(self) -> np.ndarray:
        """Rows that still want tokens, ascending."""
        return np.flatnonzero(self.finish == Finish.NONE)

    @property
    def num_unfinished(self) -> int:
        """Rows that still want tokens."""
        return int(np.count_nonzero(self.finish == Finish.NONE))
