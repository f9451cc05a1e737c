"""Log-probabilities of packed rows: the one path that training, `log_prob` and the reference take.

Dimensions: T packed tokens, M scored tokens, D model.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.models import LanguageModel, compute_logprobs
from hybridflow.train_engine.micro_batches import MicroBatch, compute_row_costs, plan_micro_batches
from hybridflow.train_engine.packing import PackedRows, Rows, pack_rows, read_rows


def plan_rows(model: LanguageModel, rows: Rows, wanted: NDArray[np.bool_], max_tokens: int) -> tuple[MicroBatch, ...]:
    """Micro-batches of the wanted rows [S]; their `rows` are row numbers of the batch."""
    index = np.flatnonzero(wanted)
    lengths = rows.lengths[index]
    plan = plan_micro_batches(lengths, compute_row_costs(lengths, model.head.weight.shape[1]), max_tokens)
    return tuple(MicroBatch(tuple(index[list(part.rows)].tolist()), part.num_tokens, part.cost) for part in plan)


def compute_packed_logprobs(
    model: LanguageModel, packed: PackedRows, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability, and entropy if asked for, of each scored token: [M] each, with gradient where autograd is on."""
    hidden_TD = model.hidden_states(packed.tokens_T, packed.positions_T, packed.attention)
    return compute_logprobs(
        hidden_TD,
        packed.targets_M,
        model.head,
        temperature=temperature,
        with_entropy=with_entropy,
        rows=packed.hidden_index_M,
    )


@torch.no_grad()
def compute_batch_logprobs(
    model: LanguageModel, batch: Batch, *, temperature: float, micro_batch_tokens: int, only_masked: bool = True
) -> list[NDArray[np.float32]]:
    """Log-probability of the tokens of each row under the model as it is: float32, aligned to `tokens`, 0.0 at its first token.

    temperature: divides the logits, above 0: that of the sampling, so that a ratio starts at 1.
    only_masked: True: tokens with `loss_mask` 1 in rows that are OK, 0.0 elsewhere (the head is a large part of the work of a
                 small model with a large vocabulary). False: every token but the first, in every row.

    The path is that of training: same packing, same head. Rows that the update would use get the same micro-batches here, so
    the numbers equal the training forward's bit for bit; in exact mode they do whatever else is in the batch.
    """
    model.module.eval()
    rows = read_rows(batch)
    scored = rows.loss_mask if only_masked else np.ones_like(rows.loss_mask)
    wanted = rows.count_masked() > 0 if only_masked else rows.lengths > 1
    parts, places = [], []
    for micro_batch in plan_rows(model, rows, wanted, micro_batch_tokens):
        packed = pack_rows(rows, micro_batch.rows, scored, model.device)
        parts.append(compute_packed_logprobs(model, packed, temperature=temperature, with_entropy=False)[0])
        places.append(packed.places_M)
    values = np.zeros(rows.tokens.shape, dtype=np.float32)
    if parts:
        values[np.concatenate(places)] = torch.cat(parts).float().cpu().numpy()
    return np.split(values, rows.offsets[1:])[:-1]
