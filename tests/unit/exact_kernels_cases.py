"""Tests of exact mode's kernels in Triton's interpreter; test_exact_kernels.py runs this file in a process of its own.

In float32: the interpreter multiplies half-precision matrices otherwise than a GPU does (Triton 3.6). Its products are NumPy's of whole
tiles, of one shape always, so that what must be bit-equal on a GPU is so here too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from hybridflow.models import (
    Packed,
    Paged,
    compute_log_softmax,
    compute_logits,
    compute_logprobs,
    exact,
    exact_kernels,
    fresh_model,
    head_chunks,
    predicted_positions,
)
from hybridflow.models import model as model_module
from hybridflow.models.attention_exact_gpu import ExactKernelPlan, plan_key_tiles, plan_query_tiles
from hybridflow.models.exact_kernels import products
from hybridflow.rollout.native.sampler import sample_tokens
from hybridflow.types import Shaping

patch_tensor = interpreter._patch_lang_tensor
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def bounds_of_loops(monkeypatch):
    """NumPy 2.4 turns no array of one element into a number any more, as Triton 3.6 has it do for the bounds of a loop."""

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture
def on_kernels(monkeypatch):
    """Exact mode as on a GPU."""
    for module in (exact, model_module, head_chunks):
        monkeypatch.setattr(module, "uses_kernels", lambda device: True)
    monkeypatch.setattr(exact, "_check_gpu", lambda device: None)
    # Minutes in the interpreter; test_products looks at the same.
    monkeypatch.setattr(exact, "_is_row_invariant", lambda *args: True)
    # torch's own silu rounds alike on a GPU, but not in the scalar tail of a CPU's vectors.
    monkeypatch.setitem(exact.ExactMath._own, F.silu, lambda x, inplace=False: exact._Silu.apply(x))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("contraction", "columns"), [(64, 64), (48, 70), (130, 17)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products(contraction, columns, transposed):
    rows, bias = draw(150, contraction), draw(columns, seed=2)
    matrix = draw(columns, contraction, seed=1).t() if transposed else draw(contraction, columns, seed=1)
    got = exact_kernels.multiply_rows(rows, matrix, bias)
    torch.testing.assert_close(got.double(), rows.double() @ matrix.double() + bias.double(), rtol=0, atol=4e-5)
    for part in (slice(0, 1), slice(149, 150), slice(63, 66), slice(7, 140)):
        assert torch.equal(exact_kernels.multiply_rows(rows[part], matrix, bias), got[part])
    total = draw(150, columns, seed=3)
    expected = total.double() + rows.double() @ matrix.double()
    exact_kernels.add_product(total, rows, matrix)
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=4e-5)
    got = exact_kernels.multiply(matrix.t(), rows.t())
    torch.testing.assert_close(got.double(), matrix.t().double() @ rows.t().double(), rtol=0, atol=4e-5)


def test_an_order_that_follows_the_number_of_rows_is_seen(monkeypatch):
    """A planted fault: for few rows the contraction is walked in other steps, as a library would."""
    rows, matrix = draw(150, 256), draw(256, 70, seed=1)
    whole = exact_kernels.multiply_rows(rows, matrix)
    plain = products._TILES[torch.float32]
    launch = products._launch

    def choose_by_rows(left, *args, **options):
        tile = plain._replace(depth=16) if left.shape[0] < 16 else plain
        monkeypatch.setitem(products._TILES, torch.float32, tile)
        launch(left, *args, **options)

    monkeypatch.setattr(products, "_launch", choose_by_rows)
    assert torch.equal(exact_kernels.multiply_rows(rows[:40], matrix), whole[:40])
    assert not torch.equal(exact_kernels.multiply_rows(rows[:3], matrix), whole[:3])


@pytest.mark.parametrize("width", [1, 17, 128, 5000])
def test_reductions_along_rows(width):
    x = draw(6, width)
    checks = {
        exact_kernels.sum_rows: lambda rows: rows.double().sum(-1, keepdim=True),
        exact_kernels.log_softmax_rows: lambda rows: rows.double().log_softmax(-1),
        exact_kernels.cumulate_rows: lambda rows: rows.double().cumsum(-1),
    }
    for function, reference in checks.items():
        got = function(x)
        torch.testing.assert_close(got.double(), reference(x), rtol=0, atol=3e-4 if width > 4096 else 2e-5)
        assert all(torch.equal(function(x[i : i + 1]), got[i : i + 1]) for i in range(6))


def test_log_softmax_of_rows_that_are_not_finite():
    x = draw(4, 5000)
    x[0, 4999], x[1, 3], x[2, :] = float("nan"), float("inf"), float("-inf")
    x[3, 1:] = float("-inf")
    got = exact_kernels.log_softmax_rows(x)
    assert got[:3].isnan().any(1).all()
    assert got[3, 0] == 0 and (got[3, 1:] == float("-inf")).all()


def attend_plainly(query, key, value, lengths, scale, window):
    """In the dtype of its arguments, with autograd."""
    outs = []
    group = query.shape[1] // key.shape[1]
    for q, k, v in zip(*(rows.split(lengths) for rows in (query, key, value)), strict=True):
        at = torch.arange(len(q))
        sees = at[:, None] >= at[None, :]
        if window:
            sees &= at[:, None] - at[None, :] < window
        scores = torch.einsum("qhk,chk->hqc", q, k.repeat_interleave(group, 1)) * scale
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqc,chk->qhk", weights, v.repeat_interleave(group, 1)))
    return torch.cat(outs)


def attend_exactly(query, key, value, lengths, scale, window, grad=None):
    """(output, gradients) by the kernels."""
    plan = ExactKernelPlan.packed(np.array(lengths), CPU)
    form = exact_kernels.Form(scale, window)
    tiles = plan.tiles(query, key)
    out, log_sum = exact_kernels.attend(query, key, value, tiles, form)
    if grad is None:
        return out, ()
    return out, exact_kernels.attend_backward(grad, (query, key, value, out, log_sum), tiles, plan.key_tiles(key), form)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "window"), [(2, 1, 64, 0), (3, 1, 24, 0), (4, 2, 16, 9)])
def test_attention_over_packed_rows(heads, kv_heads, size, window):
    lengths = [1, 70, 8]
    total = sum(lengths)
    query, grad = (draw(total, heads, size, seed=seed) for seed in (0, 3))
    key, value = (draw(total, kv_heads, size, seed=seed) for seed in (1, 2))
    out, gradients = attend_exactly(query, key, value, lengths, 0.3, window, grad)
    doubles = [x.double().requires_grad_() for x in (query, key, value)]
    expected = attend_plainly(*doubles, lengths, 0.3, window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    for got, want in zip(gradients, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-5)
    starts = np.cumsum(lengths) - lengths
    for start, length in zip(starts, lengths, strict=True):
        part = slice(start, start + length)
        alone, own = attend_exactly(query[part], key[part], value[part], [length], 0.3, window, grad[part])
        assert torch.equal(alone, out[part])
        assert all(torch.equal(x, y[part]) for x, y in zip(own, gradients, strict=True))


def test_tiles_hold_each_token_once_and_begin_at_multiples():
    firsts, counts, owners = np.array([5, 0, 31]), np.array([9, 16, 1]), np.array([7, 3, 4])
    tiles = plan_query_tiles(firsts, counts, owners, 4)
    tokens = np.concatenate([np.arange(first, first + count) for _, first, _, count in tiles])
    assert tokens.tolist() == list(range(26))
    assert tiles.tolist()[:3] == [[7, 0, 5, 4], [7, 4, 9, 4], [7, 8, 13, 1]] and tiles.tolist()[-1] == [4, 25, 31, 1]
    blocks = plan_key_tiles(np.array([0, 9]), np.array([9, 4]), 4)
    assert blocks.tolist() == [[0, 0, 4, 9], [4, 4, 4, 9], [8, 8, 1, 9], [9, 0, 4, 4]]


CONFIG = dict(
    model_type="qwen3", vocab_size=61, num_hidden_layers=2, initializer_range=0.1, hidden_size=40, intermediate_size=48,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)  # fmt: skip
QWEN2 = dict(CONFIG, model_type="qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1)


def score(model, rows, *, backward=False):
    """Log-probabilities and entropies of each row's tokens; with `backward` the gradient at the embedding's output too."""
    tokens, lengths = torch.cat(rows), [len(row) for row in rows]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)]).int()
    embedded = []
    hook = model.module.get_input_embeddings().register_forward_hook(lambda *args: embedded.append(args[2]))
    with torch.set_grad_enabled(backward):
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = model.hidden_states(tokens, positions, Packed(cu_seqlens, max(lengths)))
        index, token_index = predicted_positions(cu_seqlens)
        logprobs, entropy = compute_logprobs(
            hidden, tokens[token_index], model.head, rows=index, temperature=0.7, with_entropy=True, chunk_tokens=32
        )
    hook.remove()
    sizes = [length - 1 for length in lengths]
    parts = [logprobs.detach().split(sizes), entropy.detach().split(sizes)]
    if backward:
        embedded[0].retain_grad()
        upstream = torch.cat([torch.linspace(-1, 2, size) for size in sizes])
        ((logprobs + 0.01 * entropy) * upstream).sum().backward()
        parts.append(embedded[0].grad[0].split(lengths))
    return list(zip(*parts, strict=True))


def draw_rows(lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 61, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("config", [CONFIG, QWEN2], ids=["qwen3", "qwen2"])
def test_a_models_rows_and_gradients_are_bit_equal_alone_and_packed(config, on_kernels, monkeypatch):
    model = fresh_model(config, seed=1, numerics="exact")
    rows = draw_rows([2, 35])
    packed = score(model, rows, backward=True)
    grads = [weight.grad.clone() for weight in model.module.parameters()]
    model.module.zero_grad()
    for row, expected in zip(rows, packed, strict=True):
        (alone,) = score(model, [row], backward=True)
        assert all(torch.equal(a, b) for a, b in zip(alone, expected, strict=True))
    plain = fresh_model(config, seed=1)
    for found, expected in zip(packed, score(plain, rows, backward=True), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    for found, weight in zip(grads, plain.module.parameters(), strict=True):
        torch.testing.assert_close(found, weight.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("config", [CONFIG, QWEN2], ids=["qwen3", "qwen2"])
def test_chunked_prefill_and_decoding_give_the_trainers_bits(config, on_kernels):
    model = fresh_model(config, seed=1, numerics="exact")
    rows = draw_rows([39, 14])
    cache = model.new_cache(8)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    tables = torch.tensor([[6, 2], [1, 3]], dtype=torch.int32)
    states = [[], []]
    with torch.no_grad():
        # Two chunks of the prompt, the second beside a decoding row, then token by token.
        plan = [(0, 20, 0, 7), (20, 13, 7, 1), *[(33 + i, 1, 8 + i, 1) for i in range(4)]]
        for first, count, other, others in plan:
            context = torch.tensor([first + count, other + others])
            tokens = torch.cat([rows[0][first : first + count], rows[1][other : other + others]])
            positions = torch.cat([torch.arange(first, first + count), torch.arange(other, other + others)])
            cu_query = torch.tensor([0, count, count + others]).int()
            hidden = model.hidden_states(tokens, positions, Paged(cache, tables, context, cu_query))
            for kept, part in zip(states, hidden.split([count, others]), strict=True):
                kept.append(part)
        trained = score(model, rows)
        for row, kept, (expected, _) in zip(rows, states, trained, strict=True):
            hidden = torch.cat(kept)[:-1]
            logp = compute_log_softmax(compute_logits(hidden, model.head, 0.7), exact=True)
            found = logp.gather(1, row[1 : len(hidden) + 1, None])[:, 0]
            assert torch.equal(found, expected[: len(hidden)])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7)])
def test_a_row_is_drawn_alike_alone_and_among_others(top_k, top_p, on_kernels):
    logits, uniforms = draw(9, 3001) * 3, torch.rand(9, dtype=torch.float64)
    tokens, logprobs, _ = sample_tokens(logits, uniforms, Shaping(top_k=top_k, top_p=top_p), exact=True)
    for i in range(9):
        one = sample_tokens(logits[i : i + 1], uniforms[i : i + 1], Shaping(top_k=top_k, top_p=top_p), exact=True)
        assert one[0] == tokens[i] and one[1] == logprobs[i]
    plain_tokens, plain_logprobs, _ = sample_tokens(logits, uniforms, Shaping(top_k=top_k, top_p=top_p))
    assert torch.equal(tokens, plain_tokens)
    torch.testing.assert_close(logprobs, plain_logprobs, rtol=0, atol=1e-5)


def test_exact_kernels_are_refused_where_they_do_not_hold():
    assert "bfloat16 or float32 on a GPU, not float16 on cuda" in exact.why_not_exact("qwen3", "cuda", "float16")
    assert "float32 on the CPU" in exact.why_not_exact("qwen3", "cpu", "bfloat16")
    assert "not for gemma2" in exact.why_not_exact("gemma2", "cuda", "bfloat16")
    assert exact.why_not_exact("qwen2", "cuda", "bfloat16") is None
    assert exact.why_not_exact("gemma2", "cpu", "float32") is None
    with pytest.raises(TypeError, match="bfloat16 or float32, not torch.float64"):
        exact_kernels.multiply_rows(draw(2, 3).double(), draw(3, 2).double())
    with pytest.raises(ValueError, match="up to 32 query heads of a kv head, not 33"):
        attend_exactly(draw(2, 33, 16), draw(2, 1, 16), draw(2, 1, 16), [2], 1.0, 0)
