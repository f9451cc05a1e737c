"""Log-probability and entropy of targets from hidden states, chunk by chunk: the logits of a whole sequence never exist.

Dimensions: T packed tokens, M targets, D model, V vocabulary (rows of the head that are here).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.models.head import Head, check_temperature
from hybridflow.models.head_chunks import ChunkSettings, Passes, choose_chunk_tokens
from hybridflow.models.head_fused import FusedFunction
from hybridflow.models.head_passes import can_compile
from hybridflow.models.head_shaping import Shaped
from hybridflow.models.head_softmax import SoftmaxFunction

_KEPT_SHARE = 4


def compute_logprobs(
    hidden_TD: Tensor,
    targets_M: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    rows: Tensor | None = None,
    passes: Passes | None = None,
    keep_logits_bytes: int | None = None,
    shaped: Shaped | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under the head, and the entropy of the distribution if asked for.

    hidden_TD:    [M, D] hidden states, already shifted (row i predicts targets_M[i]); with `rows` [T, D].
    targets_M:    [M] int64.
    chunk_tokens: targets whose logits are worked on at once; None takes 256 MiB of float32 logits, on a GPU 512 MiB (compiled: 1 GiB, and
                  4 GiB where all of them are kept).
    rows:         [M] int64, no index twice: hidden state rows[i] predicts target i. Cheaper than `hidden_TD[rows]`, whose backward is a
                  slow scatter on the CPU.
    passes:       how a chunk's logits are read. "softmax": by `compute_log_softmax`, bit-equal to what a rollout samples from;
                  "fused": from sums that shards of the vocabulary can add up; "compiled": the same, by torch.compile. None takes
                  softmax on the CPU and in exact mode, compiled on a GPU (fused without Triton), fused for a shard on the CPU. They differ
                  by rounding.
    keep_logits_bytes: raw logits that may stay for the backward pass, which computes those of the other chunks again, bit-equal.
                  None takes a quarter of the GPU's free memory, and 0 on the CPU. Needs passes other than softmax.
    shaped:       what sampling changed beside the temperature, so that the log-probabilities are those of the distribution sampled from;
                  None: nothing. It looks at the whole vocabulary of each distribution, so it takes softmax passes on every device.
    returns:      (logprobs [M] float32, entropy [M] float32 or None), in nats, at the given temperature; float64 for a float64 head.

    Gradient reaches hidden_TD and head.weight; the weight's is summed in float32 and returned in its dtype. Over a split vocabulary
    every rank gets the same log-probabilities, entropies and gradient at hidden_TD, summed over ranks, and that of its own rows.
    """
    settings = _build_settings(
        head, targets_M.shape[0], temperature, with_entropy, passes, chunk_tokens, keep_logits_bytes, shaped,
        has_backward=torch.is_grad_enabled() and (hidden_TD.requires_grad or head.weight.requires_grad),
    )  # fmt: skip
    function = SoftmaxFunction if settings.passes == "softmax" else FusedFunction
    logprobs, entropy = function.apply(hidden_TD, head.weight, targets_M, rows, settings)
    return logprobs, entropy if with_entropy else None


def _build_settings(
    head: Head,
    num_targets: int,
    temperature: float,
    with_entropy: bool,
    passes: Passes | None,
    chunk_tokens: int | None,
    keep_logits_bytes: int | None,
    shaped: Shaped | None,
    *,
    has_backward: bool,
) -> ChunkSettings:
    check_temperature(temperature)
    device, (vocab_size, _) = head.weight.device, head.weight.shape
    passes = _select_passes(head, shaped) if passes is None else passes
    _check_passes(head, passes, keep_logits_bytes, shaped)
    if not has_backward:
        keep_logits_bytes = 0
    elif keep_logits_bytes is None:
        keep_logits_bytes = 0 if passes == "softmax" else _read_kept_bytes(device)
    if chunk_tokens is None:
        keeps_all = keep_logits_bytes >= num_targets * vocab_size * head.weight.element_size()
        chunk_tokens = choose_chunk_tokens(vocab_size, passes, on_gpu=device.type == "cuda", keeps_all=keeps_all)
    return ChunkSettings(head, temperature, with_entropy, passes, chunk_tokens, keep_logits_bytes, shaped)


def _select_passes(head: Head, shaped: Shaped | None) -> Passes:
    if shaped is not None:
        return "softmax"
    if head.weight.device.type == "cpu" or head.exact:
        return "softmax" if head.vocabulary is None else "fused"
    return "compiled" if can_compile(head.weight.device) else "fused"


def _check_passes(head: Head, passes: Passes, keep_logits_bytes: int | None, shaped: Shaped | None) -> None:
    if head.weight.shape[0] == 0:
        raise ValueError("no row of the head is on this rank; lower the tensor parallel degree, so that each has some")
    if shaped is not None and (passes != "softmax" or head.vocabulary is not None):
        raise ValueError(
            f'{shaped.shaping} needs passes "softmax" and the whole vocabulary; leave passes out, and set the tensor parallel degree to 1'
        )
    if passes == "softmax" and head.vocabulary is not None:
        raise ValueError('passes "softmax" needs the whole vocabulary, but it is split over ranks; leave passes out')
    if passes == "softmax" and keep_logits_bytes:
        raise ValueError(
            f'keep_logits_bytes is {keep_logits_bytes}, but passes "softmax" keep none; give 0 or other passes'
        )


def _read_kept_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    # What the allocator holds unused is free too.
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + idle) // _KEPT_SHARE
