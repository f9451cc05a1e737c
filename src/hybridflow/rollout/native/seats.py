"""What decodes rows that have their prompts behind them, some steps at a time, and what it gives back.

Dimensions: B seats, S steps of a window, W blocks of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hybridflow.models import BLOCK_SIZE, LanguageModel, Paged, PagedKVCache, find_seen, penalize_repetition
from hybridflow.models.head_passes import scale_logits
from hybridflow.rollout.native.draws import compute_uniforms
from hybridflow.rollout.native.parallel import compute_raw_logits
from hybridflow.rollout.native.sampler import Drawn, sample_tokens
from hybridflow.rollout.native.sequences import Draws
from hybridflow.types import SamplingParams


@dataclass(frozen=True)
class Seats:
    """Rows as they sit down to decode.

    tokens:  [B] int64, each row's newest token, whose keys and values are not in the cache yet.
    lengths: [B] int64, tokens known, that one included.
    limits:  [B] int64, length at which a row ends.
    keys:    [B] int64, keys of their draws.
    known:   all tokens of each row, see `Sequences.histories`; None for a decoder that does not look back.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    keys: np.ndarray
    known: np.ndarray | None = None


class Window(Protocol):
    """Steps that were launched, maybe not computed yet."""

    @property
    def steps(self) -> int:
        """How many."""
        ...

    def read(self) -> Draws:
        """Arrays [S, B]; tokens are -1 where a seat was idle. Waits for the device."""
        ...


class Decoder(Protocol):
    """Feeds each seat's newest token and draws the next one, again and again; a seat whose row has ended idles.

    max_steps: most steps of one window.
    ahead:     whether a window is launched before the one before it is read.
    """

    @property
    def looks_back(self) -> bool:
        """Whether draws depend on all tokens of a row."""
        ...

    max_steps: int
    ahead: bool

    def seat(self, seats: Seats) -> None:
        """These rows from here on."""
        ...

    def launch(self, steps: int, block_tables: np.ndarray) -> Window:
        """Runs that many steps; block_tables: [B, W] int32, with blocks for all tokens that may come."""
        ...

    def stop(self, seats: np.ndarray) -> None:
        """Lets these seats idle from the next window on: their rows have ended by something that the decoder does not see."""
        ...

    def is_worth_seating(self, seated: int, live: int, waiting: int) -> bool:
        """Whether to seat anew, since only `live` of `seated` still decode and `waiting` rows have no seat."""
        ...


@dataclass(frozen=True)
class StepWindow:
    """One step that has been computed, of all seats."""

    drawn: Draws
    steps: int = 1

    def read(self) -> Draws:
        """See `Window`."""
        return self.drawn.at(np.newaxis)


class StepDecoder:
    """One step at a time through the model's own forward; serves every device and numerics."""

    max_steps, ahead = 1, False

    def __init__(self, model: LanguageModel, cache: PagedKVCache, sampling: SamplingParams) -> None:
        self._model, self._cache, self._sampling = model, cache, sampling
        self._seats: Seats | None = None
        self._seen_BV: Tensor | None = None
        self._live = np.zeros(0, np.bool_)

    @property
    def looks_back(self) -> bool:
        """See `Decoder`."""
        return self._sampling.repetition_penalty != 1.0

    def seat(self, seats: Seats) -> None:
        """See `Decoder`."""
        self._seen_BV = mark_seen(self._model, seats.known)
        self._seats = Seats(seats.tokens.copy(), seats.lengths.copy(), seats.limits, seats.keys)
        self._live = np.ones(len(seats.tokens), np.bool_)

    def launch(self, steps: int, block_tables: np.ndarray) -> StepWindow:
        """See `Decoder`."""
        seats = self._seats
        assert seats is not None and steps == 1
        at = np.flatnonzero(self._live)
        lengths = seats.lengths[at]
        width = -(-int(lengths.max()) // BLOCK_SIZE)
        paged = Paged(self._cache, torch.from_numpy(block_tables[at, :width]), torch.from_numpy(lengths))
        hidden_BD = self._model.hidden_states(torch.from_numpy(seats.tokens[at]), torch.from_numpy(lengths - 1), paged)
        seen_BV = None if self._seen_BV is None else self._seen_BV[torch.from_numpy(at)]
        drawn = draw(self._model, hidden_BD, seats.keys[at], lengths, self._sampling, seen_BV)
        if self._seen_BV is not None:
            self._seen_BV[torch.from_numpy(at), torch.from_numpy(drawn.tokens.astype(np.int64))] = True
        seats.tokens[at], seats.lengths[at] = drawn.tokens, lengths + 1
        return StepWindow(drawn.spread(at, len(self._live)))

    def stop(self, seats: np.ndarray) -> None:
        """See `Decoder`."""
        self._live[seats] = False

    def is_worth_seating(self, seated: int, live: int, waiting: int) -> bool:
        """See `Decoder`."""
        return live < seated


def mark_seen(model: LanguageModel, known: np.ndarray | None) -> Tensor | None:
    """Which tokens each row holds, [B, V] bool on the model's device, from `Seats.known`; None of None."""
    return None if known is None else find_seen(torch.from_numpy(known).to(model.device), model.vocab_size)


def draw(
    model: LanguageModel,
    hidden_BD: Tensor,
    keys: np.ndarray,
    positions: np.ndarray,
    sampling: SamplingParams,
    seen_BV: Tensor | None = None,
) -> Draws:
    """The next token after each hidden state; waits for the device.

    keys, positions: [B] int64 of the tokens to be drawn, see `compute_uniforms`.
    seen_BV:         see `mark_seen`; None where nothing is penalised.
    """
    head, greedy = model.head, sampling.temperature == 0
    raw_BV = compute_raw_logits(hidden_BD, head)
    logits_BV = scale_logits(raw_BV, head.logit_scale, head.softcap, 1.0 if greedy else sampling.temperature)
    if seen_BV is not None:
        logits_BV = penalize_repetition(logits_BV, seen_BV, sampling.repetition_penalty)
    keys_B, positions_B = torch.from_numpy(np.stack([keys, positions])).to(model.device, non_blocking=True)
    uniforms_B = None if greedy else compute_uniforms(keys_B, positions_B)
    return to_host(sample_tokens(logits_BV, uniforms_B, sampling.shaping, exact=head.exact))


def to_host(drawn: Drawn) -> Draws:
    """The same on the host; waits for the device."""
    # All numbers are exact in float64, and one copy is one wait.
    parts = torch.stack([part.double() for part in drawn if part is not None]).cpu().numpy()
    return Draws(*(part.astype(dtype) for part, dtype in zip(parts, (np.int32, np.float32, np.int32), strict=False)))
