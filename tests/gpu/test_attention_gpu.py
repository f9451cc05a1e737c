"""Every packed attention that is there, against float64 written out, in both directions; documents stay apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from hybridflow.models.attention import AttentionForm, AttentionPlan
from hybridflow.models.attention_fused import KERNELS, FusedPlan, why_not_fused
from hybridflow.models.attention_varlen import VarlenPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DEVICE = torch.device("cuda")
LENGTHS = [1, 300, 17, 129, 64, 2, 511, 1000]
STARTS = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
HEADS = {"8 of 2": (8, 2, 64), "6 of 6": (6, 6, 128), "12 of 1": (12, 1, 128)}
WINDOWS = [None, 1, 50, 4096]
# bfloat16 keeps 8 bits; a gradient at a key sums over up to a thousand queries.
TOLERANCE = 2e-2


def build_plan(name: str, head_size: int) -> AttentionPlan:
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32)
    if name == "torch":
        return VarlenPlan(cu_seqlens, max(LENGTHS), DEVICE)
    reason = why_not_fused(name, DEVICE, torch.bfloat16, head_size)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return FusedPlan(name, cu_seqlens, max(LENGTHS), DEVICE)


def draw(heads: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv_heads, size = HEADS[heads]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(LENGTHS), count, size) for count in (num_heads, num_kv_heads, num_kv_heads)]
    return tuple(torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)


def attend_by_hand(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    group = query.shape[1] // key.shape[1]
    outs = []
    for start, end in pairwise(STARTS):
        q = query[start:end]
        k, v = (x[start:end].repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("qhk,thk->hqt", q, k) * form.scale
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        hidden = (distance < 0) | (distance >= (form.window or end))
        outs.append(torch.einsum("hqt,thk->qhk", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(outs)


def run(attend, tensors: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    out.backward(grad.to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", [*KERNELS, "torch"])
def test_output_and_gradients_are_those_of_float64(name: str, heads: str, window: int | None) -> None:
    # A window of 1 has no gradient at queries and keys: nothing to be relative to.
    tensors, form = draw(heads), AttentionForm(scale=0.1, window=window)
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    plan = build_plan(name, HEADS[heads][2])
    expected = run(lambda *qkv: attend_by_hand(*qkv, form), tuple(tensor.double() for tensor in tensors), grad)
    found = run(lambda *qkv: plan.attend(nn.Module(), *qkv, form), tuple(t.to(DEVICE) for t in tensors), grad)
    for what, ours, theirs in zip(("output", "query", "key", "value"), found, expected, strict=True):
        error = (ours.cpu().double() - theirs).abs().max() / theirs.abs().max().clamp(min=0.1)
        assert error < TOLERANCE, f"{what}: {error:.2e}"


@pytest.mark.parametrize("name", [*KERNELS, "torch"])
def test_a_document_does_not_see_another(name: str) -> None:
    tensors, form = [tensor.to(DEVICE) for tensor in draw("6 of 6")], AttentionForm(scale=0.1)
    start, end = STARTS[1], STARTS[2]
    plan = build_plan(name, 128)
    before = plan.attend(nn.Module(), *tensors, form)
    for tensor in tensors:
        tensor[start:end] = tensor[start:end] * 3 + 1
    after = plan.attend(nn.Module(), *tensors, form)
    moved = (before != after).flatten(1).any(1).cpu()
    assert moved[start:end].all()
    assert not moved[:start].any() and not moved[end:].any()


@pytest.mark.parametrize("name", KERNELS)
def test_a_compiled_layer_is_compiled_once_for_all_batches(name: str) -> None:
    build_plan(name, 64)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    attend = torch.compile(
        lambda plan, *qkv: plan.attend(nn.Module(), *qkv, AttentionForm(0.1)) * 2, backend=counter, dynamic=True
    )
    generator = torch.Generator(DEVICE).manual_seed(0)
    for lengths in ([64, 900], [33, 700, 12, 5], [2000, 48]):
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        query, key = (
            torch.randn(sum(lengths), count, 64, generator=generator, device=DEVICE).bfloat16() for count in (4, 2)
        )
        plan = FusedPlan(name, starts, max(lengths), DEVICE)
        found = attend(plan, query, key, key)
        expected = 2 * plan.attend(nn.Module(), query, key, key, AttentionForm(0.1))
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1
