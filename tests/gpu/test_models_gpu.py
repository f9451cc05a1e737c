"""Models on a GPU: flash attention over packed rows, the padded fallback, the paged cache and the head, against float32 on the CPU."""

import pytest
import torch

from hybridflow.models import (
    Packed,
    Paged,
    compute_log_softmax,
    compute_logits,
    compute_logprobs,
    fresh_model,
    predicted_positions,
)
from hybridflow.models.attention_fused import FusedPlan, choose_fused
from hybridflow.models.attention_padded import PaddedPlan
from hybridflow.models.attention_varlen import VarlenPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
BASE = dict(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    initializer_range=0.05,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
SLIDING = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "llama": dict(BASE, model_type="llama"),
    "qwen3": dict(BASE, model_type="qwen3"),
    "mistral": dict(BASE, model_type="mistral", sliding_window=50),
    "gemma2": dict(BASE, model_type="gemma2", sliding_window=40, layer_types=SLIDING, attn_logit_softcapping=5.0),
    "gemma3": dict(BASE, model_type="gemma3_text", sliding_window=40, layer_types=SLIDING),
}
LENGTHS = [1, 300, 17, 129, 64, 2, 511]


def draw_packed():
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), torch.tensor(LENGTHS).cumsum(0)]).int()
    tokens = torch.randint(0, 1000, (sum(LENGTHS),), generator=generator)
    return tokens, torch.cat([torch.arange(length) for length in LENGTHS]), Packed(cu_seqlens, max(LENGTHS))


def score(model):
    tokens, positions, packed = draw_packed()
    model.module.zero_grad()
    hidden = model.hidden_states(tokens, positions, packed)
    hidden_index, token_index = (x.to(model.device) for x in predicted_positions(packed.cu_seqlens))
    logprobs, _ = compute_logprobs(
        hidden, tokens.to(model.device)[token_index], model.head, rows=hidden_index, chunk_tokens=256
    )
    logprobs.sum().backward()
    grads = torch.cat([parameter.grad.float().flatten().cpu() for parameter in model.module.parameters()])
    return logprobs.detach().float().cpu(), grads, packed.plans


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_against_float32_on_the_cpu(name):
    """bf16 on the GPU is as near to float32 as bf16 on the CPU is; float32 on the GPU is near to rounding."""
    truth, truth_grads, _ = score(fresh_model(FAMILIES[name], seed=0))
    rounded, rounded_grads, _ = score(fresh_model(FAMILIES[name], seed=0, dtype=torch.bfloat16))
    low, low_grads, plans = score(fresh_model(FAMILIES[name], seed=0, dtype=torch.bfloat16, device="cuda"))
    kind = (
        PaddedPlan
        if name == "gemma2"
        else FusedPlan
        if choose_fused(torch.device("cuda"), torch.bfloat16, 64)
        else VarlenPlan
    )
    assert [type(plan) for plan in plans.values()] == [kind]
    assert (low - truth).abs().mean() < 1.5 * (rounded - truth).abs().mean()
    assert (low_grads - truth_grads).norm() < 1.5 * (rounded_grads - truth_grads).norm()
    full, full_grads, plans = score(fresh_model(FAMILIES[name], seed=0, device="cuda"))
    assert [type(plan) for plan in plans.values()] == [PaddedPlan]
    torch.testing.assert_close(full, truth, rtol=1e-4, atol=1e-4)
    assert (full_grads - truth_grads).norm() < 1e-3 * truth_grads.norm()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("late", [0, 1], ids=["together", "first tokens beside later ones"])
def test_decode_from_the_paged_cache_equals_the_packed_pass(name, dtype, late):
    model = fresh_model(FAMILIES[name], seed=0, dtype=dtype, device="cuda")
    tokens, positions, packed = draw_packed()
    with torch.no_grad():
        hidden = model.hidden_states(tokens, positions, packed)
        expected = compute_log_softmax(compute_logits(hidden, model.head)).split(LENGTHS)
    rows = tokens.split(LENGTHS)
    cache = model.new_cache(len(rows) * 16 + 1)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    tables = (torch.randperm(len(rows) * 16, generator=torch.Generator().manual_seed(0)) + 1).view(len(rows), 16).int()
    tolerance = 2e-3 if dtype == torch.float32 else 0.3
    done = [0] * len(rows)
    pieces = (20, 40, *[1] * 8)
    for step in range(len(pieces) + late * (len(rows) - 1)):
        live = [i for i, row in enumerate(rows) if done[i] < len(row) and 0 <= step - i * late < len(pieces)]
        new = [rows[i][done[i] : done[i] + pieces[step - i * late]] for i in live]
        sizes = [len(part) for part in new]
        starts = [done[i] for i in live]
        context = torch.tensor(starts) + torch.tensor(sizes)
        where = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        cu_query = (
            torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32) if max(sizes) > 1 else None
        )
        hidden = model.hidden_states(torch.cat(new), where, Paged(cache, tables[live], context, cu_query))
        got = compute_log_softmax(compute_logits(hidden, model.head)).split(sizes)
        for i, start, size, part in zip(live, starts, sizes, got, strict=True):
            assert (part - expected[i][start : start + size]).abs().max() < tolerance
            done[i] += size


def test_the_head_holds_no_logits_of_all_tokens():
    num_rows, vocab_size, chunk = 16384, 50000, 1024
    hidden = torch.randn(num_rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model_head = fresh_model(FAMILIES["llama"], seed=0).head
    head = type(model_head)(weight)
    targets = torch.randint(0, vocab_size, (num_rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compute_logprobs(hidden, targets, head, chunk_tokens=chunk, keep_logits_bytes=0)[0].sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 6 * chunk * vocab_size * 4 < 0.4 * num_rows * vocab_size * 4
    reference = hidden.detach().float() @ weight.detach().float().t()
    p = torch.softmax(reference, -1)
    p[torch.arange(num_rows, device="cuda"), targets] -= 1
    torch.testing.assert_close(weight.grad.float(), -(p.t() @ hidden.detach().float()), rtol=0.05, atol=2.0)
