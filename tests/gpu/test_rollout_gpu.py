import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hybridflow.batch import Batch
from hybridflow.models import fresh_model
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.rollout.native.draws import compute_keys, compute_uniforms
from hybridflow.rollout.native.sampler import sample_tokens
from hybridflow.types import RowState, SamplingParams, Shaping

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

VOCAB = 2048
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "eos_token_id": 2,
}
SAMPLING = SamplingParams(max_new_tokens=100, samples_per_prompt=8, temperature=0.8)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={f"<{i}>": i for i in range(VOCAB)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<0>", eos_token="<2>")


@pytest.fixture(scope="module")
def model():
    return fresh_model(CONFIG, seed=0, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def prompts() -> Batch:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (5, 70, 33, 300, 1, 32)]
    return Batch.from_columns(group_id=list(range(6)), prompt_tokens=tokens)


def reference_logprobs(model, tokens: list[int], device: str, dtype: torch.dtype) -> np.ndarray:
    """Of each token, 0.0 at the first, from the same weights through Transformers' eager forward."""
    config = type(model.config).from_dict(model.config.to_dict())
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device, dtype).eval()
    reference.load_state_dict({name: value.to(device, dtype) for name, value in model.module.state_dict().items()})
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens], device=device)).logits[0, :-1].float() / SAMPLING.temperature
    logprobs = logits.log_softmax(-1).cpu().gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return np.append(0.0, logprobs.numpy())


def test_bfloat16_logprobs_are_as_near_to_float32_as_transformers_own(model, tokenizer, prompts):
    batch = NativeEngine(model, tokenizer).generate(prompts, SAMPLING, step=0)
    assert set(batch.pylist("state")) == {RowState.OK}
    ours, theirs = [], []
    for row in range(0, batch.num_rows, 8):
        tokens, counted = batch.arrays("tokens")[row].tolist(), batch.arrays("loss_mask")[row].astype(bool)
        expected = reference_logprobs(model, tokens, "cpu", torch.float32)[counted]
        ours.append(np.abs(batch.arrays("rollout_logprobs")[row][counted] - expected))
        theirs.append(np.abs(reference_logprobs(model, tokens, "cuda", torch.bfloat16)[counted] - expected))
    our_gap, their_gap = np.concatenate(ours), np.concatenate(theirs)
    print(
        f"gap to float32, mean and max: {our_gap.mean():.4f} {our_gap.max():.4f}; eager {their_gap.mean():.4f} {their_gap.max():.4f}"
    )
    assert our_gap.mean() < 1.3 * their_gap.mean() and our_gap.max() < 2 * their_gap.max()


def test_float32_limits_move_no_draw_but_by_rounding(tokenizer, prompts):
    model = fresh_model(CONFIG, seed=0, device="cuda", dtype=torch.float32)
    free = NativeEngine(model, tokenizer).generate(prompts, SAMPLING, step=0)
    limits = NativeSettings(kv_cache_tokens=32 * 40, max_sequences=16, prefill_tokens_per_step=64)
    limited = NativeEngine(model, tokenizer, limits).generate(prompts, SAMPLING, step=0)
    same = [a == b for a, b in zip(free.pylist("tokens"), limited.pylist("tokens"), strict=True)]
    assert np.mean(same) > 0.9


def test_draws_have_the_same_bits_as_on_the_cpu():
    keys = torch.from_numpy(compute_keys(3, 4, np.arange(1000), np.arange(1000) % 7))
    positions = torch.arange(1000)
    assert torch.equal(compute_uniforms(keys.cuda(), positions.cuda()).cpu(), compute_uniforms(keys, positions))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (40, 0.8)])
def test_sampler_agrees_with_the_cpu(top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50_000, generator=generator) * 3
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    tokens, logprobs, _ = sample_tokens(logits.cuda(), uniforms.cuda(), Shaping(top_k=top_k, top_p=top_p))
    expected_tokens, expected_logprobs, _ = sample_tokens(logits, uniforms, Shaping(top_k=top_k, top_p=top_p))
    same = tokens.cpu() == expected_tokens
    assert same.float().mean() > 0.95
    torch.testing.assert_close(logprobs.cpu()[same], expected_logprobs[same], atol=1e-4, rtol=0)


def test_the_cache_keeps_to_its_share_and_sleep_gives_it_back(model, tokenizer, prompts):
    engine = NativeEngine(model, tokenizer)
    # What the libraries take once for good is not the cache's.
    engine.generate(prompts, SAMPLING, step=0)
    engine.sleep()
    engine.wake()
    before = torch.cuda.memory_allocated()
    engine.generate(prompts, SAMPLING, step=0)
    size = engine._cache.num_bytes
    assert torch.cuda.memory_allocated() - before >= size > 0
    engine.sleep()
    assert torch.cuda.memory_allocated() == before
    engine.wake()
    assert set(engine.generate(prompts, SAMPLING, step=0).pylist("state")) == {RowState.OK}
