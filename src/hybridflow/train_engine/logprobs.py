"""Log-probabilities of packed rows: the one path that training, `log_prob` and the reference take.

Dimensions: T packed tokens, M scored tokens, D model.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.models import LanguageModel, Shaped, compute_logprobs
from hybridflow.train_engine.mesh import Mesh
from hybridflow.train_engine.micro_batches import (
    compute_model_work,
    compute_row_costs,
    pad_plan,
    plan_micro_batches,
)
from hybridflow.train_engine.packing import PackedRows, Rows, build_shaped, pack_rows, read_rows
from hybridflow.train_engine.ranks import ALONE, Ranks
from hybridflow.train_engine.segments import GroupsOfPass, RowGroup, add_up, find_groups
from hybridflow.types import UNSHAPED, Shaping


def build_micro_batches(
    model: LanguageModel,
    rows: Rows,
    scored: NDArray[np.bool_],
    wanted: NDArray[np.bool_],
    max_tokens: int,
    in_step: Ranks = ALONE,
    *,
    share: bool = False,
) -> tuple[GroupsOfPass, ...]:
    """Micro-batches of the wanted rows [S], by their numbers in the batch. A collective of the ranks in step.

    scored:  [sum of lengths] bool, the tokens whose log-probability is wanted.
    in_step: ranks that pass through their micro-batches together, because each pass gathers weights from all of them: all get as many,
             the last ones without rows where rows run out.
    share:   rows that begin alike go together, and what they begin with is computed once.
    """
    index = np.flatnonzero(wanted).tolist()
    groups = (
        find_groups(rows.tokens, rows.offsets, scored, index, max_tokens)
        if share
        else [RowGroup((row,)) for row in index]
    )
    work = compute_model_work(model.config)
    lengths = add_up(groups, rows.lengths, lambda tokens: tokens.astype(np.float64)).astype(np.int64)
    costs = add_up(groups, rows.lengths, lambda tokens: compute_row_costs(tokens, work))
    plan = plan_micro_batches(lengths, costs, max_tokens)
    count = int(max(numbers[0] for numbers in in_step.gather([len(plan)])))
    if count > len(plan):
        plan = pad_plan(plan_micro_batches(lengths, costs, max_tokens, min_parts=count), count)
    return tuple(GroupsOfPass(tuple(groups[at] for at in part.rows), part.num_tokens) for part in plan)


def find_ranks_in_step(mesh: Mesh) -> Ranks:
    """The ranks that pass through their micro-batches together."""
    return mesh.data if mesh.layout.shard > 1 else ALONE


def compute_packed_logprobs(
    model: LanguageModel,
    packed: PackedRows,
    *,
    temperature: float,
    with_entropy: bool,
    keep_logits_bytes: int | None = None,
    shaped: Shaped | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability, and entropy if asked for, of each scored token: [M] each, with gradient where autograd is on.

    keep_logits_bytes, shaped: see `compute_logprobs`; shaped logits are not kept.
    """

    def forward() -> tuple[Tensor, Tensor | None]:
        return compute_logprobs(
            model.hidden_states(packed.tokens_T, packed.positions_T, packed.attention),
            packed.targets_M,
            model.head,
            temperature=temperature,
            with_entropy=with_entropy,
            rows=packed.hidden_index_M,
            keep_logits_bytes=keep_logits_bytes if shaped is None else None,
            shaped=shaped,
        )

    return model.run(forward)


@torch.no_grad()
def compute_batch_logprobs(
    model: LanguageModel,
    batch: Batch | None,
    *,
    temperature: float,
    micro_batch_tokens: int,
    only_masked: bool = True,
    mesh: Mesh | None = None,
    share_prompts: bool = False,
    shaping: Shaping = UNSHAPED,
) -> list[NDArray[np.float32]]:
    """Log-probability of the tokens of each row under the model as it is: float32, aligned to `tokens`, 0.0 at its first token.

    batch:       this rank's rows; None where it has none.
    temperature: divides the logits, above 0: that of the sampling, so that a ratio starts at 1.
    only_masked: True: tokens with `loss_mask` 1 in rows that are OK, 0.0 elsewhere (the head is a large part of the work of a
                 small model with a large vocabulary). False: every token but the first, in every row.
    mesh:        the ranks that share the model: all call together, those of one `data` index with the same rows, and get the values of
                 these. None: alone, or with a whole model each.
    share_prompts: computes once what rows begin with up to the first scored token.
    shaping:     what the sampling changed beside the temperature; the values are then those of the distribution sampled from.

    The path is that of training: same packing, same head. Rows that the update would use get the same micro-batches here, so
    the numbers equal the training forward's bit for bit; in exact mode they do whatever else is in the batch.
    """
    model.module.eval()
    sequence, in_step = (ALONE, ALONE) if mesh is None else (mesh.sequence, find_ranks_in_step(mesh))
    rows = read_rows(batch)
    scored = rows.loss_mask if only_masked else np.ones_like(rows.loss_mask)
    wanted = rows.count_masked() > 0 if only_masked else rows.lengths > 1
    parts, places = [], []
    plan = build_micro_batches(model, rows, scored, wanted, micro_batch_tokens, in_step, share=share_prompts)
    for micro_batch in plan:
        packed = pack_rows(rows, micro_batch.groups, scored, model.device, sequence)
        shaped = build_shaped(rows, packed, shaping, model.device)
        scores, _ = compute_packed_logprobs(model, packed, temperature=temperature, with_entropy=False, shaped=shaped)
        parts.append(scores)
        places.append(packed.places_M)
    values = np.zeros(rows.tokens.shape, dtype=np.float32)
    if parts:
        values[np.concatenate(places)] = torch.cat(parts).float().cpu().numpy()
    # Each value is on one rank, and 0 on the others.
    sequence.sum_(torch.from_numpy(values))
    return np.split(values, rows.offsets[1:])[:-1]
