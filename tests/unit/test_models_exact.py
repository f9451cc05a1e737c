"""Exact mode: one row's log-probabilities and activation gradients are bit-equal alone, packed, in any split, and from the paged cache."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from hybridflow.models import (
    Packed,
    Paged,
    compute_log_softmax,
    compute_logits,
    compute_logprobs,
    fresh_model,
    predicted_positions,
)
from hybridflow.models.exact import ExactMath, check_exact, matmul_rows

WIDTHS = {
    128: dict(hidden_size=128, intermediate_size=344, num_attention_heads=4, num_key_value_heads=2),
    576: dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3),
}
GEMMA2 = dict(
    model_type="gemma2",
    head_dim=24,
    sliding_window=37,
    layer_types=["sliding_attention", "full_attention"],
    attn_logit_softcapping=4.0,
    final_logit_softcapping=3.0,
    query_pre_attn_scalar=20,
)


def build(width=128, vocab_size=97, **family):
    config = dict(model_type="llama", vocab_size=vocab_size, num_hidden_layers=2, initializer_range=0.1)
    return fresh_model({**config, **WIDTHS[width], **family}, seed=1, numerics="exact")


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw_rows(lengths, vocab_size=97):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def score(model, rows, *, backward=False):
    """Per row: log-probabilities, entropies and, with `backward`, the gradient at the embedding's output."""
    tokens = torch.cat(rows)
    lengths = torch.tensor([len(row) for row in rows])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    embedded = []
    hook = model.module.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: embedded.append(output)
    )
    with torch.set_grad_enabled(backward):
        hidden = model.hidden_states(tokens, positions, Packed(cu_seqlens, int(lengths.max())))
        index, token_index = predicted_positions(cu_seqlens)
        logprobs, entropy = compute_logprobs(
            hidden, tokens[token_index], model.head, rows=index, temperature=0.7, with_entropy=True, chunk_tokens=64
        )
    hook.remove()
    sizes = (lengths - 1).tolist()
    if not backward:
        return list(zip(logprobs.split(sizes), entropy.split(sizes), strict=True))
    embedded[0].retain_grad()
    weights = torch.cat([torch.linspace(-1, 2, size) for size in sizes])
    ((logprobs + 0.01 * entropy) * weights).sum().backward()
    grads = embedded[0].grad[0, : tokens.shape[0]].split(lengths.tolist())
    return list(zip(logprobs.detach().split(sizes), entropy.detach().split(sizes), grads, strict=True))


def assert_bit_equal(left, right):
    for a, b in zip(left, right, strict=True):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_length_alone_equals_packed(width, num_threads):
    model = build(width)
    rows = draw_rows(range(1, 71) if num_threads == 1 else [1, 7, 16, 31, 33, 70])
    alone = range(0, len(rows), 1 if width == 128 else 5)
    with threads(num_threads):
        packed = score(model, rows)
        assert_bit_equal(score(model, rows[::-1])[::-1], packed)
        for i in alone:
            assert_bit_equal(score(model, [rows[i]]), [packed[i]])


@pytest.mark.parametrize("family", [{}, GEMMA2], ids=["llama", "gemma2"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_gradients_at_activations_do_not_depend_on_the_micro_batch(num_threads, family):
    model = build(**family)
    rows = draw_rows([12, 1, 70, 33, 32, 31, 8, 9, 64, 2, 65] if num_threads == 1 else [12, 1, 65, 33])
    with threads(num_threads):
        whole = score(model, rows, backward=True)
        for size in (1, 4):
            split = [
                part for i in range(0, len(rows), size) for part in score(model, rows[i : i + size], backward=True)
            ]
            assert_bit_equal(split, whole)


def test_gradients_at_activations_at_width_576():
    model = build(576)
    rows = draw_rows([12, 70, 33, 8])
    whole = score(model, rows, backward=True)
    assert_bit_equal([score(model, [row], backward=True)[0] for row in rows], whole)


def test_weight_gradients_repeat():
    model = build()
    rows = draw_rows([12, 40, 33])
    runs = []
    for _ in range(2):
        model.module.zero_grad()
        score(model, rows, backward=True)
        runs.append([parameter.grad.clone() for parameter in model.module.parameters()])
    assert_bit_equal([runs[0]], [runs[1]])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("family", [{}, GEMMA2], ids=["llama", "gemma2"])
def test_sampling_from_the_cache_gives_the_trainer_its_numbers(family, num_threads):
    """A group shares its prompt's full blocks; each sample then decodes by itself, among more or fewer others."""
    model = build(**family)
    (prompt,) = draw_rows([45])
    responses = draw_rows([30, 3, 14, 22] if num_threads == 1 else [9, 3, 4, 2])
    cache = model.new_cache(64)
    with threads(num_threads), torch.no_grad():
        prompt_paged = Paged(
            cache, torch.tensor([[7, 3]], dtype=torch.int32), torch.tensor([45]), torch.tensor([0, 45]).int()
        )
        last = model.hidden_states(prompt, torch.arange(45), prompt_paged)[-1:]
        tables = torch.tensor([[7, 10 + i, 20 + i] for i in range(4)], dtype=torch.int32)
        filled = torch.arange(45 - 32)
        cache.copy_slots((3 * 32 + filled).repeat(4), (tables[:, 1:2].long() * 32 + filled).flatten())
        first = compute_log_softmax(compute_logits(last, model.head, 0.7))
        sampled = [[first[0, response[0]]] for response in responses]
        for step in range(max(map(len, responses)) - 1):
            live = [i for i, response in enumerate(responses) if step + 1 < len(response)]
            tokens = torch.stack([responses[i][step] for i in live])
            context = torch.full((len(live),), 46 + step)
            hidden = model.hidden_states(tokens, context - 1, Paged(cache, tables[live], context))
            logprobs = compute_log_softmax(compute_logits(hidden, model.head, 0.7))
            for row, i in enumerate(live):
                sampled[i].append(logprobs[row, responses[i][step + 1]])
        trained = score(model, [torch.cat([prompt, response]) for response in responses])
    for got, (logprobs, _) in zip(sampled, trained, strict=True):
        assert torch.equal(torch.stack(got), logprobs[44:])


@pytest.mark.parametrize("contraction", [17, 192, 1024, 3000])
def test_matmul_rows_does_not_see_its_neighbours(contraction):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, contraction, generator=generator)
    matrix = torch.randn(contraction, 131, generator=generator)
    for count in (1, 2):
        with threads(count):
            whole = matmul_rows(rows, matrix)
            for start, length in ((0, 1), (299, 1), (5, 8), (31, 64), (77, 200)):
                assert torch.equal(matmul_rows(rows[start : start + length], matrix), whole[start : start + length])
    torch.testing.assert_close(whole, rows @ matrix, rtol=1e-4, atol=2e-4)


def elementwise_gradient(function, x):
    x = x.clone().requires_grad_()
    out = function(x)
    out.backward(torch.linspace(0.5, 1.5, x.shape[0])[:, None].expand_as(x))
    return out.detach(), x.grad


@pytest.mark.parametrize("function", [F.silu, lambda x: F.gelu(x, approximate="tanh")], ids=["silu", "gelu_tanh"])
def test_activations_of_any_number_of_rows_are_alike(function):
    """torch's own silu rounds its last few elements otherwise than the rest."""
    x = 3 * torch.randn(400, 29, generator=torch.Generator().manual_seed(0))
    with ExactMath():
        out, grad = elementwise_gradient(function, x)
        upstream = torch.linspace(0.5, 1.5, 400)
        for row in range(0, 400, 3):
            alone = x[row : row + 1].clone().requires_grad_()
            result = function(alone)
            result.backward(upstream[row].expand_as(alone))
            assert torch.equal(result[0], out[row])
            assert torch.equal(alone.grad[0], grad[row])
    plain_out, plain_grad = elementwise_gradient(function, x)
    torch.testing.assert_close((out, grad), (plain_out, plain_grad), rtol=1e-5, atol=1e-6)


def test_linear_layers_of_any_number_of_rows_are_alike():
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(300, 70)
    x = torch.randn(200, 300, generator=generator)
    upstream = torch.randn(200, 70, generator=generator)

    def run(part):
        rows = x[part].clone().requires_grad_()
        layer.zero_grad()
        out = layer(rows[None])[0]
        out.backward(upstream[part])
        return out.detach(), rows.grad, layer.weight.grad.clone(), layer.bias.grad.clone()

    with ExactMath():
        out, grad, *weight_grads = run(slice(0, 200))
        for part in (slice(0, 1), slice(50, 53), slice(100, 107), slice(3, 150)):
            part_out, part_grad, *_ = run(part)
            assert torch.equal(part_out, out[part]) and torch.equal(part_grad, grad[part])
    plain = run(slice(0, 200))
    torch.testing.assert_close((out, grad, *weight_grads), plain, rtol=1e-4, atol=1e-4)


def test_exact_mode_is_refused_where_it_does_not_hold():
    model = build()
    with pytest.raises(ValueError, match="bfloat16"):
        fresh_model(model.config, seed=0, numerics="exact", dtype=torch.bfloat16)
    for activation in ("quick_gelu", "gelu"):
        with pytest.raises(ValueError, match=f"not '{activation}'"):
            build(hidden_act=activation)
    check_exact(model.module)
