"""Every family against Transformers' own eager attention and logits: packed, paged, head, gradients, isolation of packed rows."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.models import Packed, Paged, compute_logits, compute_logprobs, fresh_model, predicted_positions

BASE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = dict(head_dim=24, hidden_activation="gelu_pytorch_tanh")
FAMILIES = {
    "llama": dict(BASE, model_type="llama"),
    "llama_bias_yarn": dict(
        BASE,
        model_type="llama",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
    ),
    "qwen2": dict(BASE, model_type="qwen2"),
    "qwen2_window": dict(BASE, model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": dict(BASE, model_type="qwen3", head_dim=24),
    "mistral": dict(BASE, model_type="mistral", sliding_window=7),
    "gemma": dict(BASE, model_type="gemma", head_dim=24, hidden_act="gelu_pytorch_tanh", num_key_value_heads=1),
    "gemma2": dict(
        BASE,
        **GEMMA,
        model_type="gemma2",
        sliding_window=6,
        layer_types=SLIDING,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3": dict(
        BASE, **GEMMA, model_type="gemma3_text", sliding_window=9, layer_types=SLIDING, query_pre_attn_scalar=20
    ),
    "gemma3_softcap": dict(
        BASE, **GEMMA, model_type="gemma3_text", sliding_window=9, layer_types=SLIDING, final_logit_softcapping=3.0
    ),
}
LENGTHS = [1, 13, 40, 2, 7, 33, 13]


def build(name, *, tied=True, numerics="fast", dtype=torch.float32):
    return fresh_model(dict(FAMILIES[name], tie_word_embeddings=tied), seed=3, numerics=numerics, dtype=dtype)


def build_reference(model):
    """Transformers' own model with the same weights and eager attention, from its own copy of the config."""
    reference = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), attn_implementation="eager", dtype=model.dtype
    )
    reference.load_state_dict(model.module.state_dict())
    return reference.eval()


def pack(rows):
    lengths = torch.tensor([len(row) for row in rows])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return torch.cat(rows), positions, Packed(cu_seqlens, int(lengths.max()))


def draw_rows(lengths, vocab_size=97, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


def generate_paged(model, rows, pieces, late=0):
    """Hidden states of all rows, fed to the paged cache in pieces of the given sizes, over scattered blocks and a poisoned cache. Each row
    begins so many passes after the one before it, so that a pass feeds some their first tokens and some their later ones."""
    max_blocks = max(len(row) for row in rows) // 32 + 1
    cache = model.new_cache(num_blocks=len(rows) * max_blocks + 1)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    order = torch.randperm(len(rows) * max_blocks, generator=torch.Generator().manual_seed(1)) + 1
    tables = order.view(len(rows), max_blocks).int()
    done = [0] * len(rows)
    outputs = [[] for _ in rows]
    step = 0
    while any(done[i] < len(row) for i, row in enumerate(rows)):
        live = [i for i, row in enumerate(rows) if done[i] < len(row) and step >= i * late]
        new = [rows[i][done[i] : done[i] + pieces[(step - i * late) % len(pieces)]] for i in live]
        context = torch.tensor([done[i] + len(part) for i, part in zip(live, new, strict=True)])
        positions = torch.cat([torch.arange(done[i], done[i] + len(part)) for i, part in zip(live, new, strict=True)])
        lengths = torch.tensor([len(part) for part in new])
        cu_query = (
            None
            if bool((lengths == 1).all())
            else torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
        )
        hidden = model.hidden_states(torch.cat(new), positions, Paged(cache, tables[live], context, cu_query))
        for i, part in zip(live, hidden.split(lengths.tolist()), strict=True):
            outputs[i].append(part)
            done[i] += len(part)
        step += 1
    return torch.cat([torch.cat(parts) for parts in outputs])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name, tied):
    model = build(name, tied=tied)
    reference = build_reference(model)
    rows = draw_rows(LENGTHS)
    with torch.no_grad():
        expected = torch.cat([reference(input_ids=row[None]).logits[0] for row in rows])
        hidden = model.hidden_states(*pack(rows))
    logits = compute_logits(hidden, model.head)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert logits.std() > 0.1
    assert (model.head.weight is model.module.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("name", FAMILIES)
def test_paged_cache_gives_the_same_hidden_states(name, numerics):
    model = build(name, numerics=numerics)
    rows = draw_rows(LENGTHS)
    with torch.no_grad():
        packed = model.hidden_states(*pack(rows))
        for pieces, late in (([100], 0), ([1], 0), ([6, 1, 1, 9], 0), ([6, 1, 1, 9], 1)):
            paged = generate_paged(model, rows, pieces, late)
            torch.testing.assert_close(paged, packed, rtol=2e-4, atol=2e-4)
            if numerics == "exact":
                assert torch.equal(paged, packed)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_those_of_transformers(name, numerics):
    model = build(name, numerics=numerics)
    reference = build_reference(model)
    rows = draw_rows([13, 1, 40, 35])
    tokens, positions, packed = pack(rows)
    hidden_index, token_index = predicted_positions(packed.cu_seqlens)
    hidden = model.hidden_states(tokens, positions, packed)
    logprobs, _ = compute_logprobs(hidden, tokens[token_index], model.head, rows=hidden_index)
    logprobs.sum().backward()
    total = 0.0
    for row in rows:
        logits = reference(input_ids=row[None]).logits[0, :-1]
        total = total + torch.log_softmax(logits, -1).gather(1, row[1:, None]).sum()
    total.backward()
    torch.testing.assert_close(logprobs.sum(), total, rtol=1e-5, atol=1e-3)
    for (label, ours), theirs in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() < 2e-4 * scale, label


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_a_change_in_one_packed_row_moves_no_other(name, numerics):
    model = build(name, numerics=numerics)
    rows = draw_rows(LENGTHS)
    changed = [row if i != 2 else (row + 1) % 97 for i, row in enumerate(rows)]
    with torch.no_grad():
        before = model.hidden_states(*pack(rows)).split(LENGTHS)
        after = model.hidden_states(*pack(changed)).split(LENGTHS)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old, new) == (i != 2)


def test_no_gradient_leaks_between_packed_rows():
    model = build("llama")
    rows = draw_rows(LENGTHS)
    embedding = model.module.get_input_embeddings()
    captured = []
    hook = embedding.register_forward_hook(lambda module, inputs, output: captured.append(output))
    hidden = model.hidden_states(*pack(rows))
    hook.remove()
    captured[0].retain_grad()
    hidden.split(LENGTHS)[2].square().sum().backward()
    touched = captured[0].grad[0].abs().sum(-1) > 0
    assert touched.split(LENGTHS)[2].all()
    assert int(touched.sum()) == LENGTHS[2]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_bfloat16_on_the_cpu(name):
    model = build(name, dtype=torch.bfloat16)
    full = build(name)
    rows = draw_rows(LENGTHS)
    tokens, positions, packed = pack(rows)
    with torch.no_grad():
        low = compute_logits(model.hidden_states(tokens, positions, packed), model.head)
        paged = compute_logits(generate_paged(model, rows, [9, 1]), model.head)
        high = compute_logits(full.hidden_states(tokens, positions, packed), full.head)
    assert low.dtype == torch.float32
    assert (low - high).abs().mean() < 0.05 * high.std()
    assert (paged - low).abs().mean() < 0.05 * high.std()
    assert {b.dtype for b in model.module.buffers()} == {b.dtype for b in full.module.buffers()}
    hidden = model.hidden_states(tokens, positions, packed)
    compute_logprobs(hidden[:-1], tokens[1:], model.head)[0].sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.module.parameters())
