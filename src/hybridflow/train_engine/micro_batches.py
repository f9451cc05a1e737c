"""What rows cost, and which go into which micro-batch: pure functions of row lengths and the model's shape."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from hybridflow.models.families import FAMILIES
from hybridflow.train_engine.memory import read_shape


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together: `MicroBatch(rows=(0, 3, 4), num_tokens=1893, cost=2410.5)`."""

    rows: tuple[int, ...]
    num_tokens: int
    cost: float


@dataclass(frozen=True)
class ModelWork:
    """What tokens cost in a model, in multiply-adds: `ModelWork(matrices=595_984_384, attention=4096, windows=(None,) * 28)`.

    matrices:  of one token in the matrices of all layers and in the head.
    attention: of one pair of tokens, one of which sees the other, in one layer.
    windows:   of each layer, how many tokens a token sees at most, itself included; None sees all before it.
    """

    matrices: int
    attention: int
    windows: tuple[int | None, ...]


def compute_model_work(config: PretrainedConfig) -> ModelWork:
    """The work of a model of one of our families, from its configuration alone."""
    shape = read_shape(config)
    matrices = shape.num_layers * shape.layer_weights + shape.hidden_size * shape.vocab_size
    return ModelWork(matrices, 2 * shape.num_heads * shape.head_dim, _read_windows(config.to_dict()))


def _read_windows(values: dict[str, Any]) -> tuple[int | None, ...]:
    window = values.get("sliding_window")
    alike = "sliding_attention" if FAMILIES[values["model_type"]].windowed else "full_attention"
    kinds = values.get("layer_types") or [alike] * values["num_hidden_layers"]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def compute_row_costs(lengths: NDArray[np.int64], work: ModelWork) -> NDArray[np.float64]:
    """Arithmetic of each row, in units of one token's matrix products.

    lengths: [S] tokens of each row.
    returns: [S] float64, `length + pairs * attention / matrices`, where a layer's pairs are those of a token and one that it sees: causal
             attention, within the layer's window. Forward and backward alike, so neither is named.

    Invariants: the cost of no token is 0; a longer row costs more; no row costs less than its pieces together; without attention the
    cost is the length; a layer with a window of a row's length or more costs what one without costs.
    Every token counts at the head, also those that are not scored, since only lengths are known where ranks share the rows of a batch.
    """
    lengths_f = lengths.astype(np.float64)
    pairs = np.zeros_like(lengths_f)
    for window, layers in Counter(work.windows).items():
        seen = lengths_f if window is None else np.minimum(lengths_f, window)
        pairs += layers * (seen * (seen + 1) / 2 + (lengths_f - seen) * seen)
    return lengths_f + pairs * (work.attention / work.matrices)


def plan_micro_batches(
    lengths: NDArray[np.int64], costs: NDArray[np.float64], max_tokens: int, min_parts: int = 1
) -> tuple[MicroBatch, ...]:
    """Packs rows into as few micro-batches as the token budget allows here, or `min_parts`, balanced by cost.

    lengths: [S] tokens of each row, at least 1.
    costs:   [S] cost of each row, above 0 and not falling with its length.

    Invariants:
    - every row is in exactly one micro-batch, and none is empty;
    - a micro-batch holds at most `max_tokens` tokens, unless it is one row that is longer by itself;
    - no better balance is one move away: where one micro-batch is heavier than another by more than the cost of its own
      shortest row, that row does not fit into the other;
    - there are at most `2 * sum(min(lengths, max_tokens)) / max_tokens + 1` micro-batches, or `min_parts` where that is more;
    - there are at least `min_parts`, or one a row, unless rows that fit into fewer happen not to fit when spread over so many;
    - the plan depends on the arguments alone. Rows ascend inside a micro-batch, and micro-batches come heaviest first
      (equal ones by first row), so that too large a budget fails at once and the allocator's blocks serve what follows.

    Longest row first into the lightest micro-batch with room (LPT of Graham, 1969, under a capacity); one more
    micro-batch is added until all rows fit.

    Ranks that pass through their micro-batches in step need as many each: those with fewer than the most plan again with that many as
    `min_parts`, and `pad_plan` adds what they still lack.
    """
    if max_tokens < 1:
        raise ValueError(f"micro-batches are planned with a budget of {max_tokens} tokens; give at least 1")
    if lengths.size == 0:
        return ()
    if int(lengths.min()) < 1:
        raise ValueError(f"row {int(lengths.argmin())} has {int(lengths.min())} tokens; plan rows of at least 1 token")
    order = np.lexsort((np.arange(lengths.size), -lengths)).tolist()
    num_parts = -(-int(np.minimum(lengths, max_tokens).sum()) // max_tokens)
    while (parts := _place(order, lengths.tolist(), costs.tolist(), max_tokens, num_parts)) is None:
        num_parts += 1
    if num_parts < min_parts:
        parts = _place(order, lengths.tolist(), costs.tolist(), max_tokens, min_parts) or parts
    plan = [_build_micro_batch(part, lengths, costs) for part in parts if part]
    return tuple(sorted(plan, key=lambda micro_batch: (-micro_batch.cost, micro_batch.rows[0])))


def pad_plan(plan: tuple[MicroBatch, ...], count: int) -> tuple[MicroBatch, ...]:
    """The plan with micro-batches without rows at its end, `count` in all, or as it is where it has that many."""
    return plan + (MicroBatch((), 0, 0.0),) * (count - len(plan))


def _place(
    order: list[int], lengths: list[int], costs: list[float], max_tokens: int, num_parts: int
) -> list[list[int]] | None:
    """Rows of each part, or None if a row finds no room."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    tokens = [0] * num_parts
    lightest = [(0.0, part) for part in range(num_parts)]
    for row in order:
        full = []
        while lightest and (tokens[lightest[0][1]] and tokens[lightest[0][1]] + lengths[row] > max_tokens):
            full.append(heapq.heappop(lightest))
        if not lightest:
            return None
        cost, part = lightest[0]
        heapq.heapreplace(lightest, (cost + costs[row], part))
        parts[part].append(row)
        tokens[part] += lengths[row]
        for entry in full:
            heapq.heappush(lightest, entry)
    return parts


def _build_micro_batch(part: list[int], lengths: NDArray[np.int64], costs: NDArray[np.float64]) -> MicroBatch:
    rows = sorted(part)
    return MicroBatch(tuple(rows), int(lengths[rows].sum()), float(costs[rows].sum()))
