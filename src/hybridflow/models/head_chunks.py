"""How the head's logits are cut into chunks, how much of them there is at once, and the gradients that the chunks add up to.

Dimensions: T packed tokens, M targets, C targets of a chunk, D model, V vocabulary (rows of the head that are here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridflow.models.exact import ROW_BLOCK, multiply_fixed, padded_rows, uses_kernels
from hybridflow.models.head import Head, compute_product
from hybridflow.models.head_shaping import Shaped
from hybridflow.types import UNSHAPED, Shaping

# Logits of a chunk, each of which also passes over the whole weight gradient: 256 MiB of float32 on the CPU, 512 MiB on a GPU; 1 GiB of
# bfloat16 there where the passes are compiled and no float32 logits exist.
_CHUNK_LOGITS = {"cpu": 64 * 2**20, "cuda": 128 * 2**20}
_CHUNK_LOGITS_COMPILED = 512 * 2**20
# Where all logits stay for backward, large chunks take no more memory, and fewer passes over the weight's gradient; more would need
# 64-bit indices in the compiled passes.
_CHUNK_LOGITS_KEPT = 2**31 - 1
_MIN_CHUNK_TOKENS = 64
# Logits of a block: 4 MiB of float32 on the CPU, whose allocator maps and clears memory anew for much larger tensors; 64 MiB on a GPU.
_BLOCK_LOGITS = {"cpu": 2**20, "cuda": 2**24}

Passes = Literal["softmax", "fused", "compiled"]


@dataclass(frozen=True)
class ChunkSettings:
    """How one call goes through its targets.

    keep_logits_bytes: raw logits that may stay for backward.
    shaped:            what sampling changed beside the temperature; None: nothing.
    """

    head: Head
    temperature: float
    with_entropy: bool
    passes: Passes
    chunk_tokens: int
    keep_logits_bytes: int
    shaped: Shaped | None = None

    @property
    def scale(self) -> tuple[float, float | None, float]:
        """Of raw logits: factor, softcap, temperature."""
        return self.head.logit_scale, self.head.softcap, self.temperature

    @property
    def compiled(self) -> bool:
        """Whether the passes over a chunk are compiled."""
        return self.passes == "compiled"

    def iter_chunks(self, count: int) -> Iterator[slice]:
        """Slices of the targets, in order."""
        for start in range(0, count, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, count))

    def iter_blocks(self, chunk: slice, weight_VD: Tensor) -> Iterator[tuple[slice, slice]]:
        """The same of a chunk, for softmax passes over few targets at a time; and where each slice lies in the chunk."""
        tokens = choose_block_tokens(weight_VD.shape[0], on_gpu=weight_VD.device.type == "cuda")
        for start in range(chunk.start, chunk.stop, tokens):
            stop = min(start + tokens, chunk.stop)
            yield slice(start, stop), slice(start - chunk.start, stop - chunk.start)


def choose_chunk_tokens(vocab_size: int, passes: Passes, *, on_gpu: bool, keeps_all: bool = False) -> int:
    """Targets whose logits are worked on at once.

    keeps_all: the logits of all targets stay for backward.
    """
    compiled = _CHUNK_LOGITS_KEPT if keeps_all else _CHUNK_LOGITS_COMPILED
    logits = compiled if passes == "compiled" else _CHUNK_LOGITS["cuda" if on_gpu else "cpu"]
    fitting = logits // vocab_size
    return max(_MIN_CHUNK_TOKENS, fitting // _MIN_CHUNK_TOKENS * _MIN_CHUNK_TOKENS)


def choose_block_tokens(vocab_size: int, *, on_gpu: bool) -> int:
    """Targets over whose logits softmax passes go at once."""
    return max(1, _BLOCK_LOGITS["cuda" if on_gpu else "cpu"] // vocab_size)


def compute_head_bytes(
    num_targets: int,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    *,
    on_gpu: bool,
    trains: bool,
    exact: bool = False,
    shaping: Shaping = UNSHAPED,
) -> int:
    """Bytes that the head holds at once in backward at least: a chunk's logits, a block's copies of them and the weight's gradient.

    vocab_size: rows of the head that are here.
    on_gpu:     compiled passes, which write the gradient over the logits; softmax passes on the CPU, in exact numerics, and of shaped
                logits.
    trains:     the weight has a gradient, in float32 and then in its own dtype.

    Logits that are kept instead of computed again are not counted: they are taken from what is free.
    """
    total_bytes = max(4, dtype.itemsize)
    compiled = on_gpu and not exact and shaping == UNSHAPED
    chunk = choose_chunk_tokens(vocab_size, "compiled" if compiled else "softmax", on_gpu=on_gpu)
    num_targets = min(num_targets, chunk)
    # Exact numerics round products to no less than float32; the gradient lies apart then.
    raw_bytes = total_bytes if exact else dtype.itemsize
    apart_bytes = dtype.itemsize if raw_bytes > dtype.itemsize else 0
    in_blocks = exact and not on_gpu
    rows = padded_rows(num_targets) if in_blocks and not apart_bytes else num_targets
    held = rows * vocab_size * (raw_bytes + apart_bytes)
    if not compiled:
        copies = _count_softmax_copies(shaping, vocab_size) + (raw_bytes < total_bytes)
        block = min(num_targets, choose_block_tokens(vocab_size, on_gpu=on_gpu))
        padding = _count_padded(num_targets) if in_blocks else 0
        held += vocab_size * max(int(block * copies * total_bytes), padding * dtype.itemsize)
    a_weight = total_bytes + (dtype.itemsize if dtype.itemsize < total_bytes else 0)
    return held + (a_weight * vocab_size * hidden_size if trains else 0)


def _count_softmax_copies(shaping: Shaping, vocab_size: int) -> float:
    """Of a block's size, in float32, beside its raw logits in softmax passes: log-probabilities, probabilities and gradient, 3; at a cut
    that may keep many, the order of these, with their ids; with a penalty its graph. Those numbers are what the head's test counts as
    alive at the peak on a CPU, where a mask is a quarter, and an int64 is two."""
    if shaping.repetition_penalty != 1.0:
        return 6.25
    most_kept = 0 if not shaping.cuts else min(shaping.top_k or vocab_size, vocab_size)
    return max(3.0, 1.0 + 3.0 * most_kept / vocab_size)


def _count_padded(num_rows: int) -> int:
    """Rows that there are beside the gradient while `_multiply_wide` pads the last of it: zeros, and the copy with them."""
    if num_rows == padded_rows(num_rows):
        return 0
    return 2 * padded_rows(1) - (num_rows % ROW_BLOCK or ROW_BLOCK)


def take_rows(hidden_TD: Tensor, rows: Tensor | None, chunk: slice) -> Tensor:
    """The hidden states of a chunk's targets, [C, D]."""
    return hidden_TD[chunk] if rows is None else hidden_TD.index_select(0, rows[chunk])


class HeadGradients:
    """Gradients at hidden states and weight, from those at the raw logits of one chunk after another."""

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, rows: Tensor | None, needs: tuple[bool, ...], head: Head
    ) -> None:
        self._weight_VD = weight_VD
        self._rows = rows
        self._head = head
        total_dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        self.hidden_TD = torch.zeros_like(hidden_TD) if needs[0] else None
        self._total_VD = torch.zeros_like(weight_VD, dtype=total_dtype) if needs[1] else None

    @property
    def weight_VD(self) -> Tensor | None:
        """In the weight's dtype; None where it needs none."""
        return None if self._total_VD is None else self._total_VD.to(self._weight_VD.dtype)

    def add(self, chunk: slice, hidden_CD: Tensor, grad_CV: Tensor) -> None:
        """grad_CV is rounded to the weight's dtype."""
        grad_CV = grad_CV.to(self._weight_VD.dtype)
        if self.hidden_TD is not None:
            grad_CD = _multiply_wide(grad_CV, self._weight_VD, self._head).to(self.hidden_TD.dtype)
            if self._rows is None:
                self.hidden_TD[chunk] = grad_CD
            else:
                self.hidden_TD.index_copy_(0, self._rows[chunk], grad_CD)
        if self._total_VD is not None:
            _add_product(self._total_VD, grad_CV.t(), hidden_CD, self._head)


def _multiply_wide(grad_CV: Tensor, weight_VD: Tensor, head: Head) -> Tensor:
    """`compute_product`; where exact numerics pad rows to whole blocks, it copies the last rows for that, not all."""
    whole = grad_CV.shape[0] // ROW_BLOCK * ROW_BLOCK
    if not head.exact or uses_kernels(grad_CV.device) or whole in (0, grad_CV.shape[0]):
        return compute_product(grad_CV, weight_VD, head)
    return torch.cat([compute_product(part_CV, weight_VD, head) for part_CV in grad_CV.split(whole)])


def _add_product(total: Tensor, left: Tensor, right: Tensor, head: Head) -> None:
    if head.exact and uses_kernels(total.device):
        multiply_fixed(left, right, total)
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)
