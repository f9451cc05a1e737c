"""Exact mode on a GPU: a row's bits are its own, alone, packed, in chunks, decoded; rollout and trainer are one; gradients repeat."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hybridflow.algorithms.losses import PolicyLoss
from hybridflow.batch import Batch
from hybridflow.data import build_character_tokenizer
from hybridflow.models import Packed, Paged, compute_logprobs, exact, fresh_model, predicted_positions
from hybridflow.models.attention_exact_gpu import ExactKernelPlan
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.train_engine import OptimizerSettings, TrainEngine, TrainSettings, compute_batch_logprobs
from hybridflow.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
if torch.cuda.is_available():
    from hybridflow.models import exact_kernels

SMALL = dict(
    model_type="qwen3", vocab_size=2001, hidden_size=256, intermediate_size=520, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, initializer_range=0.1, tie_word_embeddings=True,
)  # fmt: skip
QWEN3 = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
QWEN2 = dict(
    model_type="qwen2", vocab_size=2048, hidden_size=384, intermediate_size=640, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
KINDS = {
    "qwen3-0.6b": (QWEN3, torch.bfloat16),
    "small": (SMALL, torch.bfloat16),
    "qwen2": (QWEN2, torch.bfloat16),
    "small float32": (SMALL, torch.float32),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """As in a run; whatever a library would do in an order of its own raises."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    config, dtype = KINDS[request.param]
    return fresh_model(config, seed=0, device="cuda", dtype=dtype, numerics="exact")


def draw_rows(model, lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, model.vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def score(model, rows):
    """Each row's log-probabilities by the training path."""
    tokens, lengths = torch.cat(rows), [len(row) for row in rows]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)]).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = model.hidden_states(tokens, positions, Packed(cu_seqlens, max(lengths)))
    index, token_index = predicted_positions(cu_seqlens)
    logprobs, _ = compute_logprobs(hidden, tokens[token_index].cuda(), model.head, rows=index.cuda(), temperature=0.7)
    return logprobs.split([length - 1 for length in lengths])


def test_products_do_not_see_their_neighbours():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for contraction, columns in ((1024, 3072), (3072, 1024), (520, 2001)):
            rows = torch.randn(1000, contraction, generator=generator).to("cuda", dtype)
            weight = torch.randn(columns, contraction, generator=generator).to("cuda", dtype)
            for matrix in (weight.t(), weight.t().contiguous()):
                whole = exact_kernels.multiply_rows(rows, matrix, dtype=torch.float32)
                expected = rows.double() @ matrix.double()
                gap = (whole.double() - expected).abs().max() / expected.abs().max()
                assert gap < 1e-4, (dtype, contraction, columns, gap)
                for first, count in ((0, 1), (999, 1), (127, 2), (64, 64), (3, 900)):
                    part = exact_kernels.multiply_rows(rows[first : first + count], matrix, dtype=torch.float32)
                    assert torch.equal(part, whole[first : first + count]), (dtype, contraction, columns, first, count)


@pytest.mark.parametrize("width", [128, 1024, 2001, 151936])
def test_reductions_do_not_see_their_neighbours(width):
    x = torch.randn(300, width, device="cuda")
    for function in (exact_kernels.sum_rows, exact_kernels.log_softmax_rows, exact_kernels.cumulate_rows):
        whole = function(x)
        for first, count in ((0, 1), (299, 1), (17, 3), (1, 250)):
            assert torch.equal(function(x[first : first + count]), whole[first : first + count]), function
    torch.testing.assert_close(exact_kernels.log_softmax_rows(x), x.double().log_softmax(-1).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [520, 3072])
def test_what_torch_does_by_elements_does_not_see_its_neighbours(width, dtype):
    x = (3 * torch.randn(200, width, device="cuda")).to(dtype)
    for function in (F.silu, torch.exp, torch.rsqrt, torch.cos, lambda rows: F.gelu(rows, approximate="tanh")):
        whole = function(x)
        for first, count in ((0, 1), (199, 1), (17, 3), (1, 150)):
            part = function(x[first : first + count].clone())
            assert torch.equal(part.nan_to_num(), whole[first : first + count].nan_to_num()), function


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "window"), [(16, 8, 128, 0), (7, 1, 64, 0), (4, 2, 80, 50)])
def test_attention_and_its_gradients(heads, kv_heads, size, window, dtype):
    """Against float64, and each row alone against packed."""
    lengths = [300, 1, 64, 129]
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), n, size) for n in (heads, kv_heads, kv_heads, heads)]
    query, key, value, grad = (torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes)
    form = exact_kernels.Form(size**-0.5, window)

    def run(part, own_lengths):
        rows = [x[part].contiguous() for x in (query, key, value)]
        plan = ExactKernelPlan.packed(np.array(own_lengths), query.device)
        tiles = plan.tiles(*rows[:2])
        out, log_sum = exact_kernels.attend(*rows, tiles, form)
        saved = (*rows, out, log_sum)
        return out, *exact_kernels.attend_backward(grad[part], saved, tiles, plan.key_tiles(rows[1]), form)

    whole = run(slice(None), lengths)
    ends = np.cumsum(lengths)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-5
    for end, length in zip(ends, lengths, strict=True):
        part = slice(int(end - length), int(end))
        alone = run(part, [length])
        assert all(torch.equal(a, b[part]) for a, b in zip(alone, whole, strict=True))
        doubles = [x[part].double().requires_grad_() for x in (query, key, value)]
        q, (k, v) = doubles[0], (x.repeat_interleave(heads // kv_heads, 1) for x in doubles[1:])
        at = torch.arange(length, device="cuda")
        sees = (at[:, None] >= at) & ((at[:, None] - at < window) if window else True)
        scores = (torch.einsum("qhk,chk->hqc", q, k) * form.scale).masked_fill(~sees, float("-inf"))
        expected = torch.einsum("hqc,chk->qhk", scores.softmax(-1), v)
        gradients = torch.autograd.grad(expected, doubles, grad[part].double())
        for got, want in zip(alone, (expected, *gradients), strict=True):
            assert (got.double() - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


def test_a_row_alone_is_the_row_in_a_batch_and_among_others(model):
    lengths = [int(n) for n in np.random.default_rng(0).integers(2, 200, 63)] + [700]
    rows = draw_rows(model, lengths)
    packed = score(model, rows)
    shuffled = score(model, rows[::-1])[::-1]
    pairs = [score(model, rows[i : i + 2]) for i in range(0, 8, 2)]
    for i, expected in enumerate(packed):
        assert torch.equal(shuffled[i], expected), i
        if i < 8 or i == 63:
            assert torch.equal(score(model, [rows[i]])[0], expected), i
        if i < 8:
            assert torch.equal(pairs[i // 2][i % 2], expected), i


@torch.no_grad()
def test_prefill_in_chunks_gives_the_same_bits(model):
    (row,) = draw_rows(model, [300])
    (expected,) = score(model, [row])
    for chunk in (1, 37, 128):
        cache = model.new_cache(12)
        tables = torch.randperm(12, generator=torch.Generator().manual_seed(chunk))[None, :10].int()
        states = []
        for first in range(0, 300 if chunk > 1 else 80, chunk):
            last = min(first + chunk, 300)
            paged = Paged(cache, tables, torch.tensor([last]), torch.tensor([0, last - first]).int())
            states.append(model.hidden_states(row[first:last], torch.arange(first, last), paged))
        hidden = torch.cat(states)[:299]
        targets = row[1 : len(hidden) + 1].cuda()
        found, _ = compute_logprobs(hidden, targets, model.head, temperature=0.7)
        assert torch.equal(found, expected[: len(found)]), chunk


def generate(model, settings, samples=4, prompts=6, seed=0, **shape):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, model.vocab_size, length).astype(np.int32) for length in (5, 70, 33, 300, 2, 32)]
    batch = Batch.from_columns(group_id=list(range(prompts)), prompt_tokens=tokens[:prompts])
    sampling = SamplingParams(
        max_new_tokens=40, samples_per_prompt=samples, temperature=0.8, seed=seed, ignore_eos=True, **shape
    )
    return NativeEngine(model, build_character_tokenizer("0123456789"), settings).generate(batch, sampling, step=0)


def test_the_engine_samples_the_same_bits_under_any_limits_and_they_are_the_trainers(model):
    free = generate(model, NativeSettings(kv_cache_tokens=64 * 1024))
    limited = generate(model, NativeSettings(kv_cache_tokens=32 * 40, max_sequences=5, prefill_tokens_per_step=48))
    assert free.pylist("tokens") == limited.pylist("tokens")
    assert free.pylist("rollout_logprobs") == limited.pylist("rollout_logprobs")
    trained = compute_batch_logprobs(model, free, temperature=0.8, micro_batch_tokens=512)
    mask = free.ragged("loss_mask").values.numpy().astype(bool)
    sampled = free.ragged("rollout_logprobs").values.numpy()[mask]
    assert mask.sum() == 6 * 4 * 40 and np.isfinite(sampled).all()
    assert np.array_equal(sampled, np.concatenate(trained)[mask])


@pytest.mark.parametrize(
    "shape",
    [{"repetition_penalty": 1.3}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 0.9}],
    ids=str,
)
def test_shaped_samples_have_the_trainers_bits(model, shape):
    free = generate(model, NativeSettings(kv_cache_tokens=64 * 1024), **shape)
    limited = generate(
        model, NativeSettings(kv_cache_tokens=32 * 40, max_sequences=5, prefill_tokens_per_step=48), **shape
    )
    assert free.pylist("tokens") == limited.pylist("tokens")
    shaping = SamplingParams(**shape).shaping
    scores = compute_batch_logprobs(model, free, temperature=0.8, micro_batch_tokens=512, shaping=shaping)
    assert np.array_equal(free.ragged("rollout_logprobs").values.numpy(), np.concatenate(scores))


@pytest.mark.parametrize("kind", ["small", "qwen2"])
def test_the_first_ratio_is_one_and_updates_repeat_bit_for_bit(kind):
    config, dtype = KINDS[kind]
    ends = []
    for _ in range(2):
        model = fresh_model(config, seed=0, device="cuda", dtype=dtype, numerics="exact")
        engine = TrainEngine(model, TrainSettings(micro_batch_tokens=700, optimizer=OptimizerSettings(lr=1e-3)))
        samples = generate(model, NativeSettings(kv_cache_tokens=64 * 1024))
        advantages = [np.full(len(row), (-1.0) ** i, np.float32) for i, row in enumerate(samples.pylist("tokens"))]
        batch = samples.with_column("advantages", advantages)
        loss = PolicyLoss(temperature=0.8, old_logprobs="rollout_logprobs")
        metrics = engine.update(batch, loss)
        assert metrics["policy/ratio_max"].value == 1.0 and metrics["policy/kl_to_rollout"].value == 0.0
        assert metrics["train/grad_norm"].value > 0
        second = engine.update(batch, loss)
        assert second["policy/ratio_max"].value > 1.0
        ends.append([weight.detach().clone() for weight in model.module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_gradients_are_near_those_of_fast_numerics():
    found = {}
    for numerics in ("fast", "exact"):
        torch.use_deterministic_algorithms(numerics == "exact")
        model = fresh_model(SMALL, seed=0, device="cuda", dtype=torch.float32, numerics=numerics)
        rows = draw_rows(model, [100, 37, 250])
        tokens, cu_seqlens = torch.cat(rows), torch.tensor([0, 100, 137, 387]).int()
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        hidden = model.hidden_states(tokens, positions, Packed(cu_seqlens, 250))
        index, token_index = predicted_positions(cu_seqlens)
        logprobs, entropy = compute_logprobs(
            hidden, tokens[token_index].cuda(), model.head, rows=index.cuda(), with_entropy=True
        )
        (logprobs.mean() + 0.1 * entropy.mean()).backward()
        found[numerics] = [weight.grad for weight in model.module.parameters()]
    for fast, own in zip(*found.values(), strict=True):
        assert (fast - own).norm() < 1e-3 * fast.norm()


def test_an_order_that_follows_the_number_of_rows_is_seen():
    """A planted fault: torch's own product instead of the kernel."""
    model = fresh_model(QWEN3 | {"num_hidden_layers": 4}, seed=0, device="cuda", dtype=torch.bfloat16, numerics="exact")
    rows = draw_rows(model, [40, 300, 900, 2, 64, 500])
    kept = dict(exact.ExactMath._own)
    try:
        del exact.ExactMath._own[F.linear]
        packed = score(model, rows)
        assert not all(
            torch.equal(score(model, [row])[0], expected) for row, expected in zip(rows, packed, strict=True)
        )
    finally:
        exact.ExactMath._own.update(kept)


def test_families_that_the_kernels_do_not_serve_are_refused():
    gemma = dict(SMALL, model_type="gemma2")
    with pytest.raises(ValueError, match="holds on a GPU for llama, mistral, qwen2, qwen3, not for gemma2"):
        fresh_model(gemma, seed=0, device="cuda", dtype=torch.bfloat16, numerics="exact")
    with pytest.raises(ValueError, match="not float16 on cuda"):
        fresh_model(SMALL, seed=0, device="cuda", dtype=torch.float16, numerics="exact")
