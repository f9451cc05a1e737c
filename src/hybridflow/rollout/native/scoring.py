"""What a model makes of rows that it is given. T: packed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.models import LanguageModel, Packed, compute_logprobs, predicted_positions


@torch.no_grad()
def compute_row_logprobs(model: LanguageModel, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Of each token its log-probability at temperature 1, 0 of a row's first; all rows in one pass."""
    lengths = [len(row) for row in rows]
    ends = np.cumsum(lengths)
    cu_seqlens = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    tokens_T = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    positions_T = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
    hidden_index, token_index = predicted_positions(cu_seqlens)
    hidden_TD = model.hidden_states(tokens_T, positions_T, Packed(cu_seqlens, max(lengths)))
    targets, at = tokens_T[token_index].to(model.device), hidden_index.to(model.device)
    values_T = np.zeros(len(tokens_T), np.float32)
    values_T[token_index.numpy()] = compute_logprobs(hidden_TD, targets, model.head, rows=at)[0].float().cpu().numpy()
    return np.split(values_T, ends[:-1])
