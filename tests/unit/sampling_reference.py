"""How sampling shapes one distribution, in float64, token by token: what tests of rollout and trainer hold both to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hybridflow.types import Shaping


def shape_reference(
    logits: Sequence[Tensor], history: Iterable[int], drawn: int, temperature: float, shaping: Shaping
) -> tuple[Tensor, Tensor, int]:
    """(log-probability of the drawn token, entropy, tokens kept), with gradient.

    logits: one float64 scalar for each token of the vocabulary.
    """
    logits = list(logits)
    for token in set(history):
        factor = shaping.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    logits = [logit / temperature for logit in logits]
    kept = sorted({*find_kept(torch.stack(logits).softmax(0).tolist(), shaping), drawn})
    logp = torch.stack([logits[token] for token in kept]).log_softmax(0)
    return logp[kept.index(drawn)], -(logp.exp() * logp).sum(), len(kept)


def find_kept(probs: Sequence[float], shaping: Shaping) -> list[int]:
    """Ids that can be drawn, from one distribution's probabilities."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = [token for token in order if probs[token] >= shaping.min_p * probs[order[0]]]
    order = order[: shaping.top_k or None]
    mass, kept = math.fsum(probs[token] for token in order), []
    for token in order:
        if math.fsum(probs[other] for other in kept) >= shaping.top_p * mass:
            break
        kept.append(token)
    return kept
