"""Tests of the rollout's kernels in Triton's interpreter; test_rollout_kernels.py runs this file in a process of its own.

The interpreter multiplies half-precision matrices and rounds to bfloat16 otherwise than a GPU does (Triton 3.6), so attention is
float32 here, and float16 stands for the dtypes that round.
"""

from __future__ import annotations

import kernel_references as reference
import pytest
import torch
import triton
import triton.language as tl
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from triton.runtime import interpreter

from hybridflow.rollout.native import kernels
from hybridflow.rollout.native.draws import compute_keys, compute_uniforms
from hybridflow.rollout.native.kernels import sampling
from hybridflow.rollout.native.sampler import sample_tokens

LENGTHS = [1, 0, 32, 33, 300, 129, 64, 161]
patch_tensor = interpreter._patch_lang_tensor
F32, F16 = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def bounds_of_loops(monkeypatch):
    """NumPy 2.4 turns no array of one element into a number any more, as Triton 3.6 has it do for the bounds of a loop."""

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "window", "softcap"),
    [
        (1, 1, 64, None, None),
        (2, 6, 128, None, None),
        (2, 7, 80, 50, None),
        (1, 2, 96, None, 3.0),
        (1, 2, 256, 130, 3.0),
    ],
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_attention(kv_heads, group, head_dim, window, softcap, num_splits):
    cache = reference.build_cache(LENGTHS, kv_heads, head_dim, F32, "cpu", width=11, window=window)
    query = reference.draw(len(LENGTHS), kv_heads * group + 1, head_dim, dtype=F32, device="cpu", seed=1)[:, 1:]
    plan = kernels.AttentionPlan(num_splits, tile=64, num_warps=4, num_stages=3)
    got = kernels.decode_attention(query, *cache, scale=0.3, window=window, softcap=softcap, plan=plan)
    expected = reference.attend(query, cache, 0.3, window, softcap)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)
    assert not got[1].any()


def test_attention_writes_where_it_is_told():
    cache = reference.build_cache([40, 300], 2, 64, F32, "cpu")
    query = reference.draw(2, 4, 64, dtype=F32, device="cpu", seed=1)
    expected = kernels.decode_attention(query, *cache, scale=0.125)
    out, plan = torch.full_like(query, 7.0), kernels.AttentionPlan(3, 64, 4, 3)
    # New memory is full of NaN then.
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert kernels.decode_attention(query, *cache, scale=0.125, out=out, plan=plan) is out
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="the window is 0"):
        kernels.decode_attention(query, *cache, scale=0.125, window=0)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.decode_attention(query[:, :3], *cache, scale=0.125)


def test_splits_fill_the_machine_and_no_more():
    def splits(rows, kv_heads, blocks, window=None):
        return kernels.plan_attention(rows, kv_heads, blocks, 256, 132, window).num_splits

    assert [splits(rows, 8, 20) for rows in (1, 8, 32, 256, 1024)] == [5, 5, 2, 1, 1]
    assert splits(32, 2, 64) == 5 and splits(256, 2, 64) == 2 and splits(256, 2, 32) == 1
    # One long row among short ones must not go on alone.
    assert splits(32, 8, 32768 // 32) == 17 and splits(1, 1, 32768 // 32) == 32
    assert splits(32, 8, 32768 // 32, window=1024) == splits(32, 8, 32)


def test_every_plan_splits_between_tiles():
    plans = [
        kernels.plan_attention(rows, kv_heads, blocks, row_bytes, 132)
        for rows in range(1, 200)
        for kv_heads in (1, 2, 3, 8)
        for blocks in (20, 32, 64, 1024)
        for row_bytes in (128, 256, 512)
    ]
    assert {plan.least_keys for plan in plans} >= {128, 256, 384, 768}
    assert all(plan.least_keys % plan.tile == 0 for plan in plans)


@pytest.mark.parametrize("rows", [3, 30])
def test_attention_as_it_is_planned(rows):
    """For the multiprocessors of an H200, so that rows are split in several ways."""
    lengths = torch.randint(1, 500, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = reference.build_cache(lengths, 2, 64, F32, "cpu")
    query = reference.draw(rows, 4, 64, dtype=F32, device="cpu", seed=1)
    plan = kernels.plan_attention(rows, 2, cache[2].shape[1], 256, 132)
    got = kernels.decode_attention(query, *cache, scale=0.125, plan=plan)
    torch.testing.assert_close(got.double(), reference.attend(query, cache, 0.125, None, None), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="splits of 153 at least"):
        kernels.decode_attention(query, *cache, scale=0.125, plan=plan._replace(least_keys=153))


def test_fewer_rows_are_split_further():
    splits = {n: kernels.plan_attention(n, 1, 1024, 256, 1).num_splits for n in range(1, 31)}
    assert splits[1] == 32 and splits[5] == 7 and splits[30] == 2
    assert kernels.plan_attention(30, 8, 16, 256, 1).num_splits == 1


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(dtype, offset):
    hidden, residual = (reference.draw(7, 200, dtype=dtype, device="cpu", seed=s)[:, :144] for s in (0, 1))
    module = (Gemma2RMSNorm if offset else Qwen3RMSNorm)(144, eps=1e-5).to(dtype)
    module.weight.data = reference.draw(144, dtype=dtype, device="cpu", seed=2)
    alone = kernels.rms_norm(hidden, module.weight, 1e-5, offset=offset)
    total = hidden + residual
    after = kernels.add_rms_norm(hidden, residual, module.weight, 1e-5, offset=offset)
    assert torch.equal(residual, total)
    for got, x in ((alone, hidden), (after, total)):
        bound = 2e-6 if dtype == F32 else 2e-2
        torch.testing.assert_close(got.double(), reference.norm(x, module.weight, 1e-5, offset), rtol=bound, atol=bound)
        torch.testing.assert_close(got, module(x).data, rtol=1e-2, atol=0)
        assert dtype == F32 or (got == module(x)).float().mean() > 0.995


@pytest.mark.parametrize(("shares", "splits"), [(0, 1), (3, 3)])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "normed"), [(2, 6, 128, False), (2, 2, 64, True), (1, 16, 80, False)]
)
def test_joint_attention_is_rotation_and_attention(shares, splits, kv_heads, group, head_dim, normed):
    """Against both in float64; the newest token's slot holds NaN before."""
    cache = reference.build_cache(LENGTHS, kv_heads, head_dim, F32, "cpu", width=11)
    keys, values, tables, lengths = cache
    heads, rows = kv_heads * group, len(LENGTHS)
    columns = (heads + 2 * kv_heads) * head_dim
    shape = (shares, rows, columns) if shares else (rows, columns)
    qkv = reference.draw(*shape, dtype=F32, device="cpu", seed=1)
    bias = reference.draw(columns, dtype=F32, device="cpu", seed=2)
    cos, sin = reference.build_tables(400, head_dim, F32, "cpu")
    gains = [reference.draw(head_dim, dtype=F32, device="cpu", seed=s) for s in (3, 4)] if normed else [None, None]
    live = [row for row, length in enumerate(LENGTHS) if length]
    slots = torch.tensor([int(reference.find_slots(tables[row], LENGTHS[row])[-1]) for row in live])
    keys[slots] = values[slots] = torch.nan
    before = keys.clone(), values.clone()
    arrivals = torch.zeros(rows * kv_heads, dtype=torch.int32)
    got = kernels.attend_and_store(
        qkv, bias, cos, sin, *cache, arrivals, num_heads=heads, scale=0.3, query_norm=gains[0], key_norm=gains[1], eps=1e-6,
        plan=kernels.AttentionPlan(splits, tile=64, num_warps=4, num_stages=3),
    )  # fmt: skip
    whole = (qkv.double().sum(0) + bias if shares else qkv.double()).reshape(rows, -1, head_dim)
    parts = whole.split([heads, kv_heads, kv_heads], 1)
    positions = (lengths.long() - 1).clamp(min=0)
    normed_parts = [x if g is None else reference.norm(x, g, 1e-6, 0.0) for x, g in zip(parts, gains, strict=False)]
    query, key = (reference.rotate(x, cos, sin, positions) for x in normed_parts)
    torch.testing.assert_close(keys[slots].double(), key[live], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(values[slots].double(), parts[2][live], rtol=1e-5, atol=1e-5)
    others = torch.ones(len(keys), dtype=torch.bool).index_fill_(0, slots, False)
    assert all(torch.equal(x[others].nan_to_num(), y[others].nan_to_num()) for x, y in zip(cache, before, strict=False))
    torch.testing.assert_close(got.double(), reference.attend(query, cache, 0.3, None, None), rtol=0, atol=5e-5)
    assert not got[1].any() and not arrivals.any()


def test_joint_attention_names_what_does_not_fit():
    keys, values, tables, lengths = reference.build_cache([3, 4], 1, 64, F32, "cpu")
    cos, sin = reference.build_tables(4, 64, F32, "cpu")
    arrivals = torch.zeros(2, dtype=torch.int32)

    def call(qkv, cos=cos, arrivals=arrivals):
        kernels.attend_and_store(
            qkv, None, cos, sin, keys, values, tables, lengths, arrivals, num_heads=2, scale=1.0
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"the projection is \(2, 192\) and 2 rows of 2 \+ 2 \* 1 heads of 64"):
        call(torch.zeros(2, 192))
    with pytest.raises(ValueError, match="tables of 32 columns do not fit a cache of 1 heads of 64"):
        call(torch.zeros(2, 256), cos=cos[:, :32])
    with pytest.raises(ValueError, match="room for 1 arrivals and 2 rows of 1 heads need more"):
        call(torch.zeros(2, 256), arrivals=arrivals[:1])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "splits"), [(5, 1), (37, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_few_rows(turned, rows, splits, biased):
    x = reference.draw(rows, 256 + 8, dtype=F32, device="cpu", seed=0)[:, :256]
    weight = reference.draw(200, 256, dtype=F32, device="cpu", seed=1)
    bias = reference.draw(200, dtype=F32, device="cpu", seed=2) if biased else None
    plan = kernels.ProductPlan(16, 64, 64, splits, num_warps=4, num_stages=3, turned=turned)
    got = kernels.multiply(x, weight, bias, plan)
    assert got.shape == ((splits, rows, 200) if splits > 1 else (rows, 200))
    got = got if splits == 1 else kernels.add_shares(got, bias, F32)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-5)


def test_a_product_in_uneven_shares():
    """Five steps of the sum over four programs are three shares, and 10 columns of a tile are beyond the weights."""
    x = reference.draw(3, 320, dtype=F32, device="cpu", seed=0)
    weight = reference.draw(54, 320, dtype=F32, device="cpu", seed=1)
    got = kernels.multiply(x, weight, None, kernels.ProductPlan(16, 64, 64, 4, 4, 3))
    assert got.shape == (3, 3, 54)
    for share, columns in zip(got, (slice(0, 128), slice(128, 256), slice(256, 320)), strict=True):
        expected = x[:, columns].double() @ weight[:, columns].double().T
        torch.testing.assert_close(share.double(), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("turned", [False, True])
def test_gated_products(act, turned):
    x = reference.draw(37, 128, dtype=F32, device="cpu", seed=0)
    gate_up = reference.draw(2 * 70, 128, dtype=F32, device="cpu", seed=1, spread=0.2)
    got = kernels.multiply_gated(x, gate_up, act, kernels.ProductPlan(16, 32, 64, 1, 4, 3, turned))
    torch.testing.assert_close(got.double(), reference.gate(x.double() @ gate_up.double().T, act), rtol=1e-5, atol=5e-5)


def test_products_name_what_does_not_fit():
    x, weight = torch.zeros(2, 96), torch.zeros(8, 96)
    with pytest.raises(ValueError, match=r"depth=64.* does not serve inputs of 96 columns and weights \(8, 96\)"):
        kernels.multiply(x, weight, None, kernels.ProductPlan(16, 64, 64, 1, 4, 3))
    with pytest.raises(ValueError, match="gated sums have one split"):
        kernels.multiply_gated(x, weight, "silu", kernels.ProductPlan(16, 64, 32, 2, 4, 3))


def test_a_norm_of_a_sum_in_shares_rounds_it_first():
    shares = reference.draw(3, 7, 144, dtype=F32, device="cpu", seed=0)
    residual = reference.draw(7, 144, dtype=F16, device="cpu", seed=1)
    weight = reference.draw(144, dtype=F16, device="cpu", seed=2)
    apart = residual.clone()
    got = kernels.add_rms_norm(shares, residual, weight, 1e-5)
    whole = (shares[0] + shares[1] + shares[2]).half()
    assert torch.equal(got, kernels.add_rms_norm(whole, apart, weight, 1e-5)) and torch.equal(residual, apart)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dtype", "tables"), [(F32, F32), (F16, F16), (F16, F32)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (6, 1, 80), (9, 3, 96)])
def test_rotate_and_store(normed, dtype, tables, heads, kv_heads, head_dim):
    columns = (heads + 2 * kv_heads) * head_dim
    qkv = reference.draw(5, columns + 16, dtype=dtype, device="cpu", seed=0)[:, :columns]
    cos, sin = reference.build_tables(50, head_dim, tables, "cpu")
    positions, slots = torch.tensor([0, 7, 49, 13, 2]), torch.tensor([64, 3, -1, 33, 5])
    keys, values = (torch.full((96, kv_heads, head_dim), 9.0, dtype=dtype) for _ in range(2))
    gains = [reference.draw(head_dim, dtype=dtype, device="cpu", seed=s) for s in (1, 2)] if normed else [None, None]
    heads_kw = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    query, key, value = kernels.rotate_and_store(
        qkv, cos, sin, positions, slots, keys, values, **heads_kw,
        query_norm=gains[0], key_norm=gains[1], eps=1e-6, return_kv=True,
    )  # fmt: skip
    parts = [x.reshape(5, -1, head_dim) for x in qkv.split([heads * head_dim, *[kv_heads * head_dim] * 2], 1)]
    bound = 1e-5 if dtype == F32 else 5e-2
    for got, x, gain in ((query, parts[0], gains[0]), (key, parts[1], gains[1])):
        turned = x if gain is None else reference.norm(x, gain, 1e-6, 0.0)
        expected = reference.rotate(turned, cos, sin, positions)
        torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)
    if not normed and dtype == tables:
        theirs = apply_rotary_pos_emb(parts[0], parts[1], cos[positions], sin[positions])
        assert dtype == F32 or (torch.equal(query, theirs[0]) and torch.equal(key, theirs[1]))
    assert torch.equal(value, parts[2])
    written = slots >= 0
    assert torch.equal(keys[slots[written]], key[written]) and torch.equal(values[slots[written]], value[written])
    untouched = [i for i in range(96) if i not in slots.tolist()]
    assert (keys[untouched] == 9).all() and (values[untouched] == 9).all()


def test_rotate_and_store_names_what_does_not_fit():
    qkv, cache = torch.zeros(2, 4 * 64), torch.zeros(32, 1, 64)
    cos, sin = reference.build_tables(4, 64, F32, "cpu")
    at = torch.zeros(2, dtype=torch.long)
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    with pytest.raises(ValueError, match="tables have 32 columns and heads have 64"):
        kernels.rotate_and_store(qkv, cos[:, :32], sin[:, :32], at, at, cache, cache, **heads)
    with pytest.raises(ValueError, match="the projection has 192 columns"):
        kernels.rotate_and_store(qkv[:, :192], cos, sin, at, at, cache, cache, **heads)
    with pytest.raises(ValueError, match="pass both or neither"):
        kernels.rotate_and_store(qkv, cos, sin, at, at, cache, cache, **heads, key_norm=cos[0])


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_gated_act(act, dtype):
    gate_up = reference.draw(3, 2 * 1500, dtype=dtype, device="cpu", seed=0, spread=4.0)
    got = kernels.gated_act(gate_up, act)
    bound = 1e-6 if dtype == F32 else 1e-2
    torch.testing.assert_close(got.double(), reference.gate(gate_up, act), rtol=bound, atol=bound)
    x, up = gate_up.chunk(2, -1)
    theirs = (torch.nn.functional.silu(x) if act == "silu" else torch.nn.functional.gelu(x, approximate="tanh")) * up
    assert dtype == F32 or (got == theirs).float().mean() > (0.99 if act == "silu" else 0.9)
    with pytest.raises(ValueError, match="'relu' has no kernel; the kernels know silu and gelu_tanh"):
        kernels.gated_act(gate_up, "relu")


@triton.jit
def store_uniforms(keys, positions, out):
    at = tl.program_id(0)
    tl.store(out + at, sampling.compute_uniform(tl.load(keys + at), tl.load(positions + at)))


def draw_keys(rows):
    keys = torch.from_numpy(compute_keys(3, 5, torch.arange(rows).numpy() // 2, torch.arange(rows).numpy() % 2))
    return keys, torch.arange(rows) * 977 % 4093


def test_uniforms_are_those_of_the_sampler_bit_for_bit():
    keys, positions = draw_keys(64)
    out = torch.empty(64, dtype=torch.float64)
    store_uniforms[(64,)](keys, positions, out)
    assert torch.equal(out, compute_uniforms(keys, positions))
    assert 0.3 < out.mean() < 0.7 and out.unique().numel() == 64


@pytest.mark.parametrize("vocab", [11, 4096, 9001])
@pytest.mark.parametrize(("temperature", "logit_scale", "softcap"), [(1.0, 1.0, None), (0.6, 0.5, 4.0)])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_draws_invert_the_cumulative_sum(vocab, temperature, logit_scale, softcap, dtype):
    keys, positions = draw_keys(24)
    raw = reference.draw(24, vocab + 5, dtype=dtype, device="cpu", seed=0, spread=3.0)[:, :vocab]
    raw[:, 3] = -torch.inf if softcap is None else raw[:, 3]
    scaling = {"logit_scale": logit_scale, "softcap": softcap}
    tokens, logprobs = kernels.sample(raw, keys, positions, temperature=temperature, greedy=False, **scaling)
    logp = reference.log_probabilities(raw, logit_scale, softcap, temperature)
    uniforms = compute_uniforms(keys, positions)
    reference.check_draws(tokens, uniforms, logp, 1e-6)
    torch.testing.assert_close(logprobs.double(), logp.gather(1, tokens[:, None])[:, 0], rtol=0, atol=2e-5)
    theirs, *_ = sample_tokens(logp.float(), uniforms)
    assert (theirs == tokens).float().mean() > 0.95


def test_greedy_takes_the_lowest_of_the_largest():
    keys, positions = draw_keys(3)
    raw = reference.draw(3, 9001, dtype=F16, device="cpu", seed=0)
    raw[0, [5000, 4200, 8999]] = raw[1, [17, 16]] = raw[2, 9000] = 9.0
    tokens, logprobs = kernels.sample(raw, keys, positions, temperature=0.0, greedy=True)
    assert tokens.tolist() == [4200, 16, 9000]
    expected = reference.log_probabilities(raw, 1.0, None, 1.0).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_not_finite_mark_the_row_and_no_other(greedy):
    keys, positions = draw_keys(6)
    raw = reference.draw(6, 5000, dtype=F32, device="cpu", seed=0)
    raw[0, 4999] = raw[1] = torch.nan
    raw[2] = -torch.inf
    raw[3, 2] = torch.inf
    raw[4, :4999] = -torch.inf
    tokens, logprobs = kernels.sample(raw, keys, positions, temperature=1.0, greedy=greedy)
    assert ((tokens >= 0) & (tokens < 5000)).all()
    assert logprobs.isfinite().tolist() == [False, False, False, False, True, True]
    assert tokens[4] == 4999 and logprobs[4] == 0
