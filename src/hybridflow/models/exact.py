"""Exact mode: arithmetic whose result for a row does not depend on the rows beside it.

On the CPU (float32) a matrix product takes another path, and other roundings, for few rows, for two threads, for a long contraction:
padding rows to a multiple of 8 does not suffice from a contraction of 192 on. Here every product runs as a batch of blocks of 48 rows, at
least two of them: the same small product each time, whatever the number of rows. 48 is whole tiles of oneMKL's AVX2 (6 rows) and AVX-512
kernels; in a block of 32 the last two rows round otherwise under AVX2. Activations whose scalar tail rounds unlike their vector body (silu,
gelu by tanh) are written out in operations that do not.
On a GPU (bfloat16, float32) products and reductions along rows are kernels of our own (`exact_kernels`): the libraries choose theirs, and
with them the order of sums, by the number of rows. What acts on single elements is torch's: one formula for every element.
Dimensions: T packed tokens, D input and E output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
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
# The kernels know no softcap, and of norms those that multiply by a column of factors.
_KERNEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float32")}
_FIRST_CAPABILITY = (8, 0)


def uses_kernels(device: torch.device) -> bool:
    """Whether exact arithmetic runs by `exact_kernels` there."""
    return device.type == "cuda"


def padded_rows(num_rows: int) -> int:
    """Rows after padding: whole blocks, at least two."""
    return max(_MIN_BLOCKS, -(-num_rows // ROW_BLOCK)) * ROW_BLOCK


def pad_rows(rows: Tensor) -> Tensor:
    """The rows followed by rows of zeros up to `padded_rows`."""
    extra = padded_rows(rows.shape[0]) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])]) if extra else rows


def matmul_rows(
    rows_TD: Tensor, matrix_DE: Tensor, bias_E: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """rows @ matrix + bias, [T, E], each row bit-equal whatever T and its place in it.

    dtype: of the result; None takes that of the rows. On a GPU sums are float32 and rounded to it once.
    """
    if uses_kernels(rows_TD.device):
        from hybridflow.models import exact_kernels

        return exact_kernels.multiply_rows(rows_TD, matrix_DE, bias_E, dtype)
    product = _multiply_blocks(rows_TD, matrix_DE)
    product = product if bias_E is None else product + bias_E
    return product if dtype is None else product.to(dtype)


def _multiply_blocks(rows_TD: Tensor, matrix_DE: Tensor) -> Tensor:
    padded = pad_rows(rows_TD)
    blocks = padded.reshape(-1, ROW_BLOCK, padded.shape[1])
    product = torch.bmm(blocks, matrix_DE.expand(blocks.shape[0], -1, -1))
    return product.flatten(0, 1)[: rows_TD.shape[0]]


def sum_rows(x: Tensor) -> Tensor:
    """Sum over the last dimension, which stays with size 1; the order of a row's sum is the same in any company."""
    if uses_kernels(x.device):
        from hybridflow.models import exact_kernels

        return exact_kernels.sum_rows(x)
    return x.sum(-1, keepdim=True)


def log_softmax_rows(logits_TV: Tensor) -> Tensor:
    """Log-softmax over the last of two dimensions, each row by itself."""
    if uses_kernels(logits_TV.device):
        from hybridflow.models import exact_kernels

        return exact_kernels.log_softmax_rows(logits_TV)
    return torch.log_softmax(logits_TV, dim=-1)


def cumulate_rows(x_TV: Tensor) -> Tensor:
    """Cumulative sums over the last of two dimensions, each row by itself."""
    if uses_kernels(x_TV.device):
        from hybridflow.models import exact_kernels

        return exact_kernels.cumulate_rows(x_TV)
    return x_TV.cumsum(dim=-1)


def multiply_fixed(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """left @ right, the same bits for the same operands, or added in place to `total` (float32) where that is given: for gradients of
    weights, which sum over all rows of a micro-batch."""
    if not uses_kernels(left.device):
        return left @ right if total is None else total.addmm_(left, right)
    from hybridflow.models import exact_kernels

    if total is None:
        return exact_kernels.multiply(left, right)
    exact_kernels.add_product(total, left, right)
    return total


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
        out = matmul_rows(rows.reshape(-1, rows.shape[-1]), weight.t(), bias)
        return out.view(*rows.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        flat = rows.reshape(-1, rows.shape[-1])
        rows_grad = matmul_rows(grad, weight).view(rows.shape) if ctx.needs_input_grad[0] else None
        weight_grad = multiply_fixed(grad.contiguous().t(), flat) if ctx.needs_input_grad[1] else None
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


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return sum_rows(x) / x.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] / ctx.shape[-1]).expand(ctx.shape)


class _ScaleRows(torch.autograd.Function):
    """Rows times a factor each: autograd's own gradient of the factors is a sum whose order follows the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(x, factors)
        return x * factors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, factors = ctx.saved_tensors
        return grads[0] * factors, sum_rows(grads[0] * x)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(rows, weight, bias)


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return F.silu(x) if uses_kernels(x.device) else _Silu.apply(x)


def _mean(x: Tensor, dim: int | None = None, keepdim: bool = False, **rest: Any) -> Tensor:
    if uses_kernels(x.device) and dim in (-1, x.dim() - 1) and keepdim and not rest:
        return _Mean.apply(x)
    return torch.mean(x, dim, keepdim, **rest)


def _multiply(x: Any, factor: Any, **rest: Any) -> Tensor:
    if isinstance(x, Tensor) and isinstance(factor, Tensor) and uses_kernels(x.device) and _scales_rows(x, factor):
        return _ScaleRows.apply(x, factor)
    return torch.mul(x, factor, **rest)


def _scales_rows(x: Tensor, factor: Tensor) -> bool:
    return x.dtype == factor.dtype and factor.shape == (*x.shape[:-1], 1) and factor.requires_grad


def _matmul(left: Tensor, right: Tensor, **rest: Any) -> Tensor:
    if uses_kernels(left.device) and left.shape[-1] == 1 and left.dim() == right.dim():
        # Positions times frequencies: nothing is summed.
        return left * right
    return torch.matmul(left, right, **rest)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if uses_kernels(x.device):
        return F.gelu(x, approximate=approximate)
    if approximate != "tanh":
        raise NotImplementedError("numerics 'exact' has no gelu by erf: use gelu_pytorch_tanh, or numerics 'fast'")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))


class ExactMath(TorchFunctionMode):
    """While active, linear layers, silu, gelu and norms of any module are computed row by row alike, backward too."""

    _own: dict[Callable[..., Any], Callable[..., Tensor]] = {
        F.linear: _linear, F.silu: _silu, F.gelu: _gelu, Tensor.mean: _mean, torch.mean: _mean,
        Tensor.mul: _multiply, torch.mul: _multiply, Tensor.matmul: _matmul, torch.matmul: _matmul,
    }  # fmt: skip

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))


def why_not_exact(model_type: str, device_type: str, dtype: str) -> str | None:
    """Why exact mode does not hold for a family on such a device in such numbers, to be read after "numerics 'exact'"; None where it does.

    device_type: "cpu" or "cuda"; dtype: "float32" or another.
    """
    if device_type not in _DTYPES or dtype not in _DTYPES[device_type]:
        return f"needs float32 on the CPU, or bfloat16 or float32 on a GPU, not {dtype} on {device_type}"
    if device_type == "cuda" and model_type not in _KERNEL_FAMILIES:
        return f"holds on a GPU for {', '.join(_KERNEL_FAMILIES)}, not for {model_type}"
    return None


def check_exact(module: PreTrainedModel) -> None:
    """Raises ValueError unless exact mode holds for this model on this machine.

    Probes each shape of linear layer with random rows: many at once against few at a time, forward and backward.
    """
    settings = module.config.to_dict()
    activation = settings.get("hidden_activation") or settings.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"numerics 'exact' knows {', '.join(_ACTIVATIONS)}, not '{activation}': use numerics 'fast'")
    for name, weight in module.named_parameters():
        fault = why_not_exact(module.config.model_type, weight.device.type, str(weight.dtype).removeprefix("torch."))
        if fault is not None:
            raise ValueError(f"numerics 'exact' {fault} (which is where {name} is): use numerics 'fast'")
    if uses_kernels(module.device):
        _check_gpu(module.device)
    layers = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    shapes = {tuple(weight.shape) for weight in layers}
    for shape in sorted(shapes):
        for contraction, features in {shape, shape[::-1]}:
            if not _is_row_invariant(contraction, features, module.device, layers[0].dtype):
                raise ValueError(
                    f"numerics 'exact' does not hold here: a {contraction} x {features} product depends on its neighbours with "
                    f"{torch.get_num_threads()} threads; set OMP_NUM_THREADS=1 or use numerics 'fast'"
                )


def _check_gpu(device: torch.device) -> None:
    if find_spec("triton") is None:
        raise ValueError(
            "numerics 'exact' computes by Triton on a GPU, and triton is not installed: use numerics 'fast'"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        raise ValueError(
            f"numerics 'exact' needs a GPU of capability 8.0, not {'.'.join(map(str, capability))}: use numerics 'fast'"
        )


@torch.no_grad()
def _is_row_invariant(contraction: int, features: int, device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5 * ROW_BLOCK, contraction, generator=generator).to(device, dtype)
    matrix = torch.randn(contraction, min(features, 4096), generator=generator).to(device, dtype)
    whole = matmul_rows(rows, matrix)
    parts = [slice(start, start + 40) for start in (0, 7, 100)]
    parts += [slice(200, 201)] if uses_kernels(device) else []
    return all(torch.equal(matmul_rows(rows[part], matrix), whole[part]) for part in parts)
