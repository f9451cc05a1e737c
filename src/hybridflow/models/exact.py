"""Exact mode: arithmetic whose result for a row does not depend on the rows beside it (CPU, float32).

A matrix product takes another path, and other roundings, for few rows, for two threads, for a long contraction: padding rows to a multiple
of 8 does not suffice from a contraction of 192 on. Here every product runs as a batch of blocks of 48 rows, at least two of them: the
same small product each time, whatever the number of rows. 48 is whole tiles of oneMKL's AVX2 (6 rows) and AVX-512 kernels; in a
block of 32 the last two rows round otherwise under AVX2. Activations whose scalar tail rounds unlike their vector body (silu, gelu by
tanh) are written out in operations that do not.
Dimensions: T packed tokens, D input and E output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

ROW_BLOCK = 48
_MIN_BLOCKS = 2
# Plain gelu is not among them: erf rounds otherwise in its scalar tail.
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "relu")


def padded_rows(num_rows: int) -> int:
    """Rows after padding: whole blocks, at least two."""
    return max(_MIN_BLOCKS, -(-num_rows // ROW_BLOCK)) * ROW_BLOCK


def pad_rows(rows: Tensor) -> Tensor:
    """The rows followed by rows of zeros up to `padded_rows`."""
    extra = padded_rows(rows.shape[0]) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])]) if extra else rows


def matmul_rows(rows_TD: Tensor, matrix_DE: Tensor) -> Tensor:
    """rows @ matrix, [T, E], each row bit-equal whatever T and its place in it."""
    padded = pad_rows(rows_TD)
    blocks = padded.reshape(-1, ROW_BLOCK, padded.shape[1])
    product = torch.bmm(blocks, matrix_DE.expand(blocks.shape[0], -1, -1))
    return product.flatten(0, 1)[: rows_TD.shape[0]]


def bmm_fixed(left: Tensor, right: Tensor) -> Tensor:
    """Batched product whose entries do not depend on the size of the batch: a batch of one would take another path."""
    if left.shape[0] > 1:
        return torch.bmm(left, right)
    return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]


class _Linear(torch.autograd.Function):
    # The weight gradient sums over all rows of the micro-batch: equal for the same micro-batch, no more.
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        out = matmul_rows(rows.reshape(-1, rows.shape[-1]), weight.t())
        out = out if bias is None else out + bias
        return out.view(*rows.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        rows_grad = matmul_rows(grad, weight).view(rows.shape) if ctx.needs_input_grad[0] else None
        weight_grad = grad.t() @ rows.reshape(-1, rows.shape[-1]) if ctx.needs_input_grad[1] else None
        return rows_grad, weight_grad, grad.sum(0) if ctx.has_bias else None


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / (1.0 + torch.exp(-x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = 1.0 / (1.0 + torch.exp(-x))
        return grads[0] * (sigmoid * (1.0 + x * (1.0 - sigmoid)))


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(rows, weight, bias)


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return _Silu.apply(x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "tanh":
        raise NotImplementedError("numerics 'exact' has no gelu by erf: use gelu_pytorch_tanh, or numerics 'fast'")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))


class ExactMath(TorchFunctionMode):
    """While active, linear layers, silu and gelu of any module are computed row by row alike, backward too."""

    _own: dict[Callable[..., Any], Callable[..., Tensor]] = {F.linear: _linear, F.silu: _silu, F.gelu: _gelu}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))


def check_exact(module: PreTrainedModel) -> None:
    """Raises ValueError unless exact mode holds for this model on this machine.

    Probes each shape of linear layer with random rows: many at once against two blocks at a time, forward and backward.
    """
    settings = module.config.to_dict()
    activation = settings.get("hidden_activation") or settings.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"numerics 'exact' knows {', '.join(_ACTIVATIONS)}, not '{activation}': use numerics 'fast'")
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            kind = f"{parameter.dtype} on {parameter.device}"
            raise ValueError(f"numerics 'exact' needs float32 on the CPU, but {name} is {kind}: use numerics 'fast'")
    shapes = {tuple(layer.weight.shape) for layer in module.modules() if isinstance(layer, nn.Linear)}
    for shape in sorted(shapes):
        for contraction, features in {shape, shape[::-1]}:
            if not _is_row_invariant(contraction, features):
                raise ValueError(
                    f"numerics 'exact' does not hold here: a {contraction} x {features} product depends on its neighbours with "
                    f"{torch.get_num_threads()} threads; set OMP_NUM_THREADS=1 or use numerics 'fast'"
                )


@torch.no_grad()
def _is_row_invariant(contraction: int, features: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5 * ROW_BLOCK, contraction, generator=generator)
    matrix = torch.randn(contraction, min(features, 4096), generator=generator)
    whole = matmul_rows(rows, matrix)
    parts = (slice(start, start + 40) for start in (0, 7, 100))
    return all(torch.equal(matmul_rows(rows[part], matrix), whole[part]) for part in parts)
