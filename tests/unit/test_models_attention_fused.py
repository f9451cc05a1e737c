"""What fused kernels are told, seen without a GPU: the operators, their gradients, and each library's own arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridflow.models import attention_flash4
from hybridflow.models.attention import AttentionForm
from hybridflow.models.attention_cudnn import _place_rows, _read_form
from hybridflow.models.attention_flash4 import Flash4
from hybridflow.models.attention_fused import KERNELS, FusedPlan
from hybridflow.models.attention_kernel import KernelRows, SavedTensors

LENGTHS = [5, 1, 9]
STARTS = torch.tensor([0, 5, 6, 15], dtype=torch.int32)


def compute_weights(query: Tensor, key: Tensor, rows: KernelRows) -> Tensor:
    """Attention's weights over all packed tokens, [H, T, T]; 0 between rows."""
    lengths = rows.cu_seqlens.diff()
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    distance = torch.arange(len(row))[:, None] - torch.arange(len(row))[None, :]
    seen = (distance >= 0) & (distance < (rows.window or rows.max_len)) & (row[:, None] == row[None, :])
    scores = torch.einsum("qhk,thk->hqt", query, key) * rows.scale
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def attend(query: Tensor, key: Tensor, value: Tensor, rows: KernelRows) -> Tensor:
    return torch.einsum("hqt,thk->qhk", compute_weights(query, key, rows), value)


class Written:
    """A kernel that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[KernelRows] = []

    def why_not(self) -> str | None:
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rows: KernelRows) -> tuple[Tensor, Tensor]:
        self.told.append(rows)
        return attend(query, key, value, rows), torch.zeros(query.shape[1], query.shape[0])

    def backward(self, grad: Tensor, saved: SavedTensors, rows: KernelRows) -> tuple[Tensor, ...]:
        self.told.append(rows)
        query, key, value = saved[:3]
        weights = compute_weights(query, key, rows)
        at_weights = torch.einsum("qhk,thk->hqt", grad, value)
        at_scores = weights * (at_weights - (at_weights * weights).sum(-1, keepdim=True)) * rows.scale
        return (
            torch.einsum("hqt,thk->qhk", at_scores, key),
            torch.einsum("hqt,qhk->thk", at_scores, query),
            torch.einsum("hqt,qhk->thk", weights, grad),
        )


@pytest.mark.parametrize(("window", "told"), [(None, 0), (3, 3), (8, 8), (9, 0), (100, 0)])
def test_both_operators_tell_the_kernel_where_rows_begin_and_how_they_attend(
    monkeypatch: pytest.MonkeyPatch, window: int | None, told: int
) -> None:
    kernel = Written()
    monkeypatch.setitem(KERNELS, "written", kernel)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(15, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    plan = FusedPlan("written", STARTS, max(LENGTHS), torch.device("cpu"))  # type: ignore[arg-type]
    grads = []
    for run in (
        lambda *qkv: plan.attend(nn.Module(), *qkv, AttentionForm(scale=0.3, window=window)),
        lambda *qkv: attend(*qkv, KernelRows(STARTS, 9, 0.3, window or 0)),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = run(*leaves)
        out.square().sum().backward()
        grads.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert [(rows.max_len, rows.scale, rows.window) for rows in kernel.told] == [(9, 0.3, told)] * 2
    assert all(torch.equal(rows.cu_seqlens, STARTS) for rows in kernel.told)


@pytest.mark.parametrize(("window", "band"), [(0, (True, None, None)), (3, (False, 2, 0))])
def test_flash_attention_4_is_told_a_window_by_its_two_sides(
    monkeypatch: pytest.MonkeyPatch, window: int, band: tuple[bool, int | None, int | None]
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        calls.append((args, kwargs))
        return 1, 2, 3, 4

    library = SimpleNamespace(_flash_attn_fwd=record, _flash_attn_bwd=record)
    monkeypatch.setattr(attention_flash4, "_interface", lambda: library)
    query, key, value, out, softmax, grad = (torch.zeros(1) + index for index in range(6))
    rows = KernelRows(STARTS, 9, 0.3, window)
    assert Flash4().forward(query, key, value, rows) == (1, 2)
    assert Flash4().backward(grad, (query, key, value, out, softmax), rows) == (1, 2, 3)
    causal, left, right = band
    expected = dict(
        cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=9, max_seqlen_k=9, softmax_scale=0.3, causal=causal,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    assert [args for args, _ in calls] == [(query, key, value), (query, key, value, out, grad, softmax)]
    assert [kwargs for _, kwargs in calls] == [{"return_lse": True, **expected}, expected]


def test_cudnn_rounds_rows_and_lengths_up_and_places_them_by_elements() -> None:
    query, key = torch.zeros(15, 4, 8), torch.zeros(15, 2, 8)
    form = _read_form(query, key, KernelRows(STARTS, 600, 0.3, 7))
    assert (form.num_rows, form.max_len, form.num_tokens) == (8, 1024, 4096)
    assert (form.num_heads, form.num_kv_heads, form.head_dim, form.scale, form.window) == (4, 2, 8, 0.3, 7)
    starts = [0, 5, 6, 15, 15, 15, 15, 15, 15]
    placed = [numbers.tolist() for numbers in _place_rows(STARTS, form)]
    assert placed == [[start * size for start in starts] for size in (32, 16, 4)] + [[5, 1, 9, 0, 0, 0, 0, 0]]
