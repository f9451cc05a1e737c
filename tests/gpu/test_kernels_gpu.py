"""The rollout's kernels compiled for a GPU, against float64 written out, Transformers' modules and the sampler in torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from hybridflow.models import fresh_model
from hybridflow.models.head_passes import scale_logits
from hybridflow.rollout.native.draws import compute_keys, compute_uniforms
from hybridflow.rollout.native.sampler import sample_tokens

sys.path.append(str(Path(__file__).parents[1] / "unit"))
import kernel_references as reference

pytest.importorskip("triton", reason="needs triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
from hybridflow.rollout.native import kernels  # noqa: E402
from hybridflow.rollout.native.layers import FusedLayers  # noqa: E402
from hybridflow.rollout.native.plans import StepPlan  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}
LENGTHS = [1, 0, 32, 33, 640, 129, 64, 163, 0, 31, 500, 257]
SHAPES = [
    (1, 1, 64, None, None),
    (8, 2, 128, None, None),
    (2, 6, 128, 100, None),
    (4, 7, 128, None, None),
    (1, 8, 64, None, 3.0),
    (3, 1, 80, None, None),
    (2, 2, 96, 33, None),
    (2, 2, 256, 130, 3.0),
    (1, 32, 128, None, None),
]


def distance(got, expected):
    """Norm of the difference over the norm; NaN never passes a comparison."""
    return ((got.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "window", "softcap"), SHAPES)
def test_attention(kv_heads, group, head_dim, window, softcap, dtype):
    cache = reference.build_cache(LENGTHS, kv_heads, head_dim, dtype, "cuda", width=22, window=window)
    query = reference.draw(len(LENGTHS), kv_heads * group, head_dim, dtype=dtype, device="cuda", seed=1, spread=2.0)
    expected = reference.attend(query, cache, head_dim**-0.5, window, softcap)
    default = kernels.plan_attention(len(LENGTHS), kv_heads, 22, head_dim * query.element_size(), 132, window)
    for splits in (1, 4):
        got = torch.full_like(query, float("nan"))
        kernels.decode_attention(
            query, *cache, scale=head_dim**-0.5, window=window, softcap=softcap, out=got,
            plan=default._replace(num_splits=splits),
        )  # fmt: skip
        assert distance(got, expected) < TOLERANCE[dtype]
        assert not got[[1, 8]].any()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "normed", "shares", "splits"),
    [
        (8, 2, 128, True, 0, 1),
        (2, 6, 128, False, 4, 4),
        (4, 7, 128, False, 0, 4),
        (3, 1, 80, True, 2, 4),
        (1, 16, 64, False, 3, 1),
    ],
)
def test_joint_attention_is_rotation_and_attention(kv_heads, group, head_dim, normed, shares, splits, dtype):
    """Against the two kernels on the same joint projection; the newest token's slot holds NaN before."""
    keys, values, tables, lengths = reference.build_cache(LENGTHS, kv_heads, head_dim, dtype, "cuda", width=22)
    heads, rows = kv_heads * group, len(LENGTHS)
    columns = (heads + 2 * kv_heads) * head_dim
    whole = reference.draw(rows, columns, dtype=dtype, device="cuda", seed=1)
    bias = reference.draw(columns, dtype=dtype, device="cuda", seed=2)
    qkv = whole
    if shares:
        qkv = reference.draw(shares, rows, columns, dtype=F32, device="cuda", seed=3)
        qkv[-1] = whole.float() - bias.float() - qkv[:-1].sum(0)
        whole = (sum(qkv[1:], start=qkv[0]) + bias.float()).to(dtype)
    cos, sin = reference.build_tables(700, head_dim, dtype, "cuda")
    gains = [reference.draw(head_dim, dtype=dtype, device="cuda", seed=s) for s in (4, 5)] if normed else [None, None]
    norms = {"query_norm": gains[0], "key_norm": gains[1], "eps": 1e-6}
    positions = (lengths.long() - 1).clamp(min=0)
    slots = tables[torch.arange(rows, device="cuda"), positions // 32].long() * 32 + positions % 32
    slots = torch.where(lengths > 0, slots, -1)
    their_keys, their_values = keys.clone(), values.clone()
    query = kernels.rotate_and_store(
        whole, cos, sin, positions, slots, their_keys, their_values, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        **norms,
    )  # fmt: skip
    expected = reference.attend(query, (their_keys, their_values, tables, lengths), head_dim**-0.5, None, None)
    live = slots[slots >= 0]
    keys[live] = values[live] = torch.nan
    arrivals = torch.zeros(rows * kv_heads, dtype=torch.int32, device="cuda")
    plan = kernels.plan_attention(rows, kv_heads, 22, head_dim * query.element_size(), 132)._replace(num_splits=splits)
    for _ in range(2):
        got = torch.full_like(query, float("nan"))
        kernels.attend_and_store(
            qkv, bias, cos, sin, keys, values, tables, lengths, arrivals, num_heads=heads, scale=head_dim**-0.5, out=got,
            plan=plan, **norms,
        )  # fmt: skip
        assert distance(got, expected) < TOLERANCE[dtype]
        assert not got[[1, 8]].any() and not arrivals.any()
    assert distance(keys[live], their_keys[live].cpu().double()) < (1e-6 if dtype == F32 else 1e-3)
    assert torch.equal(values[live], their_values[live])
    untouched = torch.ones(len(keys), dtype=torch.bool, device="cuda").index_fill_(0, live, False)
    assert torch.equal(keys[untouched].nan_to_num(7), their_keys[untouched].nan_to_num(7))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "splits", "turned"), [(1, 1, True), (32, 4, True), (33, 1, False), (64, 3, True), (150, 2, False)]
)
def test_products_of_few_rows(rows, splits, turned, dtype):
    x = reference.draw(rows, 1536 + 64, dtype=dtype, device="cuda", seed=0)[:, :1536]
    weight = reference.draw(2000, 1536, dtype=dtype, device="cuda", seed=1, spread=0.03)
    bias = reference.draw(2000, dtype=dtype, device="cuda", seed=2)
    depth = 32 if dtype == F32 else 128
    plan = kernels.ProductPlan(32, 64, depth, splits, num_warps=4, num_stages=3, turned=turned)
    got = kernels.multiply(x, weight, bias, plan)
    got = got if splits == 1 else kernels.add_shares(got, bias, dtype)
    expected = x.cpu().double() @ weight.cpu().double().T + bias.cpu().double()
    assert distance(got, expected) < TOLERANCE[dtype]
    assert distance(got, expected) < 1.1 * distance(torch.nn.functional.linear(x, weight, bias), expected) + 1e-6


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    "plan", [(32, 32, 128, 1, 4, 3, False), (64, 64, 64, 1, 4, 3, True), (128, 128, 64, 1, 8, 3, False)]
)
def test_gated_products(plan, dtype):
    x = reference.draw(75, 1536, dtype=dtype, device="cuda", seed=0)
    gate_up = reference.draw(2 * 1000, 1536, dtype=dtype, device="cuda", seed=1, spread=0.03)
    got = kernels.multiply_gated(x, gate_up, "silu", kernels.ProductPlan(*plan))
    expected = reference.gate(x.cpu().double() @ gate_up.cpu().double().T, "silu")
    assert distance(got, expected) < TOLERANCE[dtype]
    theirs = kernels.gated_act(torch.nn.functional.linear(x, gate_up), "silu")
    assert distance(got, expected) < 1.1 * distance(theirs, expected)


def test_attention_of_one_key_is_its_value():
    cache = reference.build_cache([1, 1], 2, 128, BF16, "cuda")
    query = reference.draw(2, 4, 128, dtype=BF16, device="cuda", seed=0)
    got = kernels.decode_attention(query, *cache, scale=1.0)
    values = torch.stack([cache[1][reference.find_slots(cache[2][row], 1)[0]] for row in range(2)])
    assert torch.equal(got, values.repeat_interleave(2, 1))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [896, 1024, 3584, 5120])
def test_norms(dtype, offset, width):
    hidden, residual = (reference.draw(33, width + 64, dtype=dtype, device="cuda", seed=s)[:, :width] for s in (0, 1))
    module = (Gemma2RMSNorm if offset else Qwen3RMSNorm)(width, eps=1e-6).to("cuda", dtype)
    module.weight.data = reference.draw(width, dtype=dtype, device="cuda", seed=2)
    alone = kernels.rms_norm(hidden, module.weight, 1e-6, offset=offset)
    total = hidden + residual
    after = kernels.add_rms_norm(hidden, residual, module.weight, 1e-6, offset=offset)
    assert torch.equal(residual, total)
    for got, x in ((alone, hidden), (after, total)):
        assert distance(got, reference.norm(x, module.weight, 1e-6, offset)) < TOLERANCE[dtype]
        assert dtype == F32 or (got == module(x)).float().mean() > 0.99


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dtype", "tables"), [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (28, 4, 128), (6, 1, 80), (4, 2, 256)])
def test_rotate_and_store(normed, dtype, tables, heads, kv_heads, head_dim):
    num_tokens, columns = 37, (heads + 2 * kv_heads) * head_dim
    qkv = reference.draw(num_tokens, columns + 64, dtype=dtype, device="cuda", seed=0)[:, :columns]
    cos, sin = reference.build_tables(600, head_dim, tables, "cuda")
    positions = torch.arange(num_tokens, device="cuda") * 16
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:num_tokens].cuda()
    slots[[3, 36]] = -1
    keys, values = (torch.full((128, kv_heads, head_dim), 9.0, dtype=dtype, device="cuda") for _ in range(2))
    module = Qwen3RMSNorm(head_dim, eps=1e-6).to("cuda", dtype)
    module.weight.data = reference.draw(head_dim, dtype=dtype, device="cuda", seed=1)
    gain = module.weight.data if normed else None
    query, key, value = kernels.rotate_and_store(
        qkv, cos, sin, positions, slots, keys, values, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        query_norm=gain, key_norm=gain, eps=1e-6, return_kv=True,
    )  # fmt: skip
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    parts = [x.reshape(num_tokens, -1, head_dim) for x in qkv.split(sizes, 1)]
    turned = [reference.norm(x, gain, 1e-6, 0.0) if normed else x for x in parts[:2]]
    for got, x in zip((query, key), turned, strict=True):
        assert distance(got, reference.rotate(x, cos, sin, positions)) < TOLERANCE[dtype]
    if dtype == tables and dtype != F32:
        theirs = apply_rotary_pos_emb(
            *(module(x).data if normed else x for x in parts[:2]), cos[positions], sin[positions]
        )
        share = 0.99 if normed else 1.0
        assert all((a == b).float().mean() >= share for a, b in zip((query, key), theirs, strict=True))
    assert torch.equal(value, parts[2])
    written = slots >= 0
    assert torch.equal(keys[slots[written]], key[written]) and torch.equal(values[slots[written]], value[written])
    untouched = torch.ones(128, dtype=torch.bool, device="cuda").index_fill_(0, slots[written], False)
    assert (keys[untouched] == 9).all() and (values[untouched] == 9).all()


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [3072, 4864, 130])
def test_gated_act(act, dtype, width):
    gate_up = reference.draw(65, 2 * width, dtype=dtype, device="cuda", seed=0, spread=3.0)
    got = kernels.gated_act(gate_up, act)
    assert distance(got, reference.gate(gate_up, act)) < TOLERANCE[dtype]
    x, up = gate_up.chunk(2, -1)
    theirs = (torch.nn.functional.silu(x) if act == "silu" else torch.nn.functional.gelu(x, approximate="tanh")) * up
    assert dtype == F32 or (got == theirs).float().mean() > (0.99 if act == "silu" else 0.9)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("rows", [3, 40, 100])
def test_a_planned_step_gives_what_plain_kernels_give(family, rows):
    """Eagerly, and three times over from a graph with the same bits: what one step signs in, the next finds cleared."""
    config = {
        "model_type": family, "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    model = fresh_model(config, seed=1, dtype=BF16, device="cuda")
    layers, lengths = FusedLayers(model), [0, 300, 33, *(1 + 17 * row % 500 for row in range(rows - 3))]
    *_, tables, contexts = reference.build_cache(lengths, 1, 1, F32, "cuda", width=32)
    cache = model.new_cache(int(tables.max()) + 2)
    cache.keys.normal_(), cache.values.normal_()
    positions = (contexts.long() - 1).clamp(min=0)
    slots = tables[torch.arange(rows, device="cuda"), positions // 32].long() * 32 + positions % 32
    slots[contexts == 0] = len(cache.keys[0]) - 1
    tokens = torch.arange(rows, device="cuda")
    with torch.inference_mode():
        assert layers.plan(rows, 32) != StepPlan()
        inputs = (tokens, positions, slots, tables, contexts, cache)
        plain = layers.decode_states(*inputs, StepPlan())
        keys, values = cache.keys.clone(), cache.values.clone()
        found = layers.decode_states(*inputs)
        assert distance(found[1:], plain[1:].cpu().double()) < 0.02
        live = slots[contexts > 0]
        assert distance(cache.keys[:, live], keys[:, live].cpu().double()) < 0.02
        assert distance(cache.values[:, live], values[:, live].cpu().double()) < 0.02
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layers.decode_states(*inputs)
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured[1:], found[1:])


def draw_keys(rows):
    ids = torch.arange(rows).numpy()
    return torch.from_numpy(compute_keys(3, 5, ids // 2, ids % 2)).cuda(), torch.arange(rows).cuda() * 977 % 4093


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("vocab", "temperature", "logit_scale", "softcap"),
    [(151936, 0.6, 1.0, None), (151936, 1.0, 1.0, None), (32000, 1.3, 0.0625, None), (256000, 1.0, 1.0, 30.0)],
)
def test_draws_are_those_of_the_sampler(dtype, vocab, temperature, logit_scale, softcap):
    """99 of 100 tokens are equal; the others are neighbours at a border that rounding moves."""
    keys, positions = draw_keys(200)
    raw = torch.randn(200, vocab, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)
    raw *= torch.linspace(0.5, 6.0, 200, device="cuda", dtype=dtype)[:, None] / logit_scale
    tokens, logprobs = kernels.sample(
        raw, keys, positions, temperature=temperature, greedy=False, logit_scale=logit_scale, softcap=softcap
    )
    uniforms = compute_uniforms(keys, positions)
    logp = reference.log_probabilities(raw, logit_scale, softcap, temperature)
    reference.check_draws(tokens, uniforms, logp, 1e-6)
    logits = scale_logits(raw, logit_scale, softcap, temperature)
    theirs, their_logprobs, _ = sample_tokens(logits, uniforms)
    assert (theirs == tokens).float().mean() >= 0.99
    assert (logprobs - their_logprobs)[theirs == tokens].abs().max() < 1e-4
    expected = logp.gather(1, tokens.cpu()[:, None])[:, 0]
    assert (logprobs.cpu().double() - expected).abs().max() < 1e-4


def test_frequencies_follow_the_distribution():
    raw = torch.tensor([[0.3, -1.0, 2.0, 0.0, -3.0]], device="cuda").expand(100_000, -1).contiguous()
    tokens, _ = kernels.sample(raw, *draw_keys(100_000), temperature=1.0, greedy=False)
    shares = torch.bincount(tokens, minlength=5) / 100_000
    assert (shares - raw[0].softmax(0)).abs().max() < 0.006


def test_greedy_takes_the_lowest_of_the_largest():
    keys, positions = draw_keys(64)
    raw = torch.randn(64, 151936, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(BF16)
    raw[0, [50000, 4200, 151935]] = raw[1, [17, 16]] = raw[2, 151935] = 9.0
    tokens, logprobs = kernels.sample(raw, keys, positions, temperature=0.0, greedy=True)
    assert tokens[:3].tolist() == [4200, 16, 151935]
    assert torch.equal(raw.gather(1, tokens[:, None])[:, 0], raw.amax(1))
    assert torch.equal(tokens, (raw == raw.amax(1, keepdim=True)).int().argmax(1))
    expected = torch.log_softmax(raw.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 1e-4


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_logits_that_are_not_finite_mark_the_row_and_no_other(greedy, dtype):
    keys, positions = draw_keys(7)
    raw = reference.draw(7, 151936, dtype=dtype, device="cuda", seed=0)
    raw[0, 151935] = raw[1] = torch.nan
    raw[2] = -torch.inf
    raw[3, 2] = torch.inf
    raw[4, :151935] = -torch.inf
    raw[5, 4096:8192] = torch.nan
    tokens, logprobs = kernels.sample(raw, keys, positions, temperature=1.0, greedy=greedy)
    assert ((tokens >= 0) & (tokens < 151936)).all()
    assert logprobs.isfinite().tolist() == [False, False, False, False, True, False, True]
    assert tokens[4] == 151935 and logprobs[4] == 0


def test_a_captured_step_gives_the_same_bits_on_what_it_finds_there():
    """One layer and a draw in a graph, replayed on other inputs, against the same calls without one."""
    heads, kv_heads, size, width, vocab, rows = 12, 2, 128, 1536, 151936, 32
    cache = reference.build_cache([0, 1, 33, 640] + [40 * i for i in range(28)], kv_heads, size, BF16, "cuda", width=36)
    cos, sin = reference.build_tables(1200, size, BF16, "cuda")
    keys_B, positions_B = draw_keys(rows)
    gain = reference.draw(width, dtype=BF16, device="cuda", seed=0)
    inputs = [reference.draw(rows, n, dtype=BF16, device="cuda", seed=n) for n in (width, width, 2048, 2 * 8960, vocab)]
    no_slots = torch.full((rows,), -1, dtype=torch.long, device="cuda")

    def step():
        hidden, residual, qkv, gate_up, logits = inputs
        stream = residual.clone()
        normed = kernels.add_rms_norm(hidden, stream, gain, 1e-6)
        query = kernels.rotate_and_store(
            qkv, cos, sin, positions_B % 1200, no_slots, cache[0], cache[1],
            num_heads=heads, num_kv_heads=kv_heads, head_dim=size,
        )  # fmt: skip
        attended = kernels.decode_attention(query, *cache, scale=size**-0.5)
        drawn = kernels.sample(logits, keys_B, positions_B, temperature=0.6, greedy=False)
        return [normed, stream, attended, kernels.gated_act(gate_up, "silu"), *drawn]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for turn in range(3):
        for tensor in inputs:
            tensor.copy_(tensor.roll(turn + 1, 0))
        positions_B += 1
        cache[3].copy_(cache[3].roll(1).clamp(max=33 if turn else 1000))
        cache[2].copy_(cache[2].roll(1, 0))
        graph.replay()
        expected = step()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        assert all(x.float().isfinite().all() for x in captured)
