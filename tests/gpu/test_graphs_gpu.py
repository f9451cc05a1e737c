"""Decoding by captured graphs gives what decoding step by step gives, whatever runs beside it and whatever changes in between."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch
from hybridflow.models import LanguageModel, fresh_model
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.types import RowState, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCAB = 1000
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"head_dim": None},
    "llama": {"num_key_value_heads": 4},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 64},
    "mistral": {"sliding_window": 40},
}
LENGTHS = [5, 70, 33, 58, 1, 32, 64, 200]
SAMPLING = SamplingParams(max_new_tokens=90, samples_per_prompt=4, temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    pieces = ["<pad>", "<unk>", "</s>"] + [f"w{i} " for i in range(VOCAB - 3)]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def prompts() -> Batch:
    return make_prompts(LENGTHS)


def make_prompts(lengths: list[int]) -> Batch:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
    return Batch.from_columns(group_id=[40 + i for i in range(len(lengths))], prompt_tokens=tokens)


def build_model(family: str = "qwen3", dtype: torch.dtype = torch.float32) -> LanguageModel:
    values = {name: value for name, value in (CONFIG | FAMILIES[family]).items() if value is not None}
    model = fresh_model({"model_type": family, **values}, seed=1, dtype=dtype, device="cuda")
    model.module.requires_grad_(False)
    return model


def compare(found: Batch, expected: Batch, tolerance: float = 1e-3, share: float = 0.9) -> None:
    """Rounding may move a draw; until one has moved, tokens are equal and log-probabilities close."""
    equal = 0
    columns = ("tokens", "rollout_logprobs")
    pairs = [zip(found.arrays(name), expected.arrays(name), strict=True) for name in columns]
    for row, ((ours, theirs), (our_logprobs, their_logprobs)) in enumerate(zip(*pairs, strict=True)):
        length = min(len(ours), len(theirs))
        differing = np.flatnonzero(ours[:length] != theirs[:length])
        until = int(differing[0]) if differing.size else length
        assert np.abs(our_logprobs[:until] - their_logprobs[:until]).max(initial=0.0) < tolerance
        equal += len(ours) == len(theirs) and not differing.size
        if "kept_counts" in found:
            counts = [batch.arrays("kept_counts")[row][:until] for batch in (found, expected)]
            assert np.mean(counts[0] == counts[1]) > 0.9 if until else True, f"row {row} tells of other cuts"
    assert equal >= share * found.num_rows, f"{equal} of {found.num_rows} rows are equal"


def build_slow(model: LanguageModel, tokenizer: PreTrainedTokenizerFast) -> NativeEngine:
    return NativeEngine(model, tokenizer, NativeSettings(cuda_graphs=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_as_it_does_step_by_step(
    family: str, tokenizer: PreTrainedTokenizerFast, prompts: Batch
) -> None:
    model = build_model(family)
    expected = build_slow(model, tokenizer).generate(prompts, SAMPLING, step=3)
    engine = NativeEngine(model, tokenizer)
    compare(engine.generate(prompts, SAMPLING, step=3), expected)
    assert expected.num_rows == 32 and len(set(expected.pylist("finish_reason"))) >= 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=60, temperature=0.0, samples_per_prompt=1),
        SamplingParams(max_new_tokens=60, temperature=1.3, samples_per_prompt=4, top_k=20, top_p=0.9),
        SamplingParams(max_new_tokens=60, temperature=1.2, samples_per_prompt=4, min_p=0.05),
        SamplingParams(max_new_tokens=60, samples_per_prompt=4, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=60, temperature=0.0, repetition_penalty=1.5),
        SamplingParams(
            max_new_tokens=60, samples_per_prompt=4, repetition_penalty=0.8, min_p=0.02, top_k=50, top_p=0.95
        ),
        SamplingParams(max_new_tokens=60, samples_per_prompt=4, stop_token_ids=tuple(range(100, 160))),
        SamplingParams(max_new_tokens=60, samples_per_prompt=4, stop_strings=("w12", "w3 w")),
        SamplingParams(max_new_tokens=1, samples_per_prompt=2),
        SamplingParams(max_new_tokens=9, samples_per_prompt=2, ignore_eos=True),
    ],
    ids=str,
)
def test_every_way_of_sampling_and_stopping(
    sampling: SamplingParams, tokenizer: PreTrainedTokenizerFast, prompts: Batch
) -> None:
    model = build_model()
    expected = build_slow(model, tokenizer).generate(prompts, sampling, step=1)
    found = NativeEngine(model, tokenizer).generate(prompts, sampling, step=1)
    compare(found, expected)
    if not sampling.ignore_eos:
        same = [a == b for a, b in zip(found.pylist("finish_reason"), expected.pylist("finish_reason"), strict=True)]
        assert np.mean(same) >= 0.9
    texts = [a == b for a, b in zip(found.pylist("response"), expected.pylist("response"), strict=True)]
    assert np.mean(texts) >= 0.9


@pytest.mark.parametrize(
    "shape",
    [{"repetition_penalty": 1.4}, {"top_p": 0.9, "min_p": 0.02}, {"top_p": 0.7, "repetition_penalty": 0.9}],
    ids=str,
)
def test_a_shape_comes_and_goes_between_calls_and_is_the_trainers(
    shape: dict[str, Any], tokenizer: PreTrainedTokenizerFast, prompts: Batch
) -> None:
    from hybridflow.train_engine.logprobs import compute_batch_logprobs

    model = build_model()
    engine = NativeEngine(model, tokenizer, NativeSettings(max_sequences=12))
    plain = engine.generate(prompts, SAMPLING, step=3)
    shaped = dataclasses.replace(SAMPLING, **shape)
    for _ in range(2):
        found = engine.generate(prompts, shaped, step=3)
        compare(found, build_slow(model, tokenizer).generate(prompts, shaped, step=3))
        assert ("kept_counts" in found) == shaped.cuts
        scores = compute_batch_logprobs(model, found, temperature=0.9, micro_batch_tokens=4096, shaping=shaped.shaping)
        gaps = np.abs(np.concatenate(scores) - np.concatenate(found.arrays("rollout_logprobs")))
        assert gaps.max() < 1e-3 and sum(map(np.count_nonzero, scores)) > 1000
        compare(engine.generate(prompts, SAMPLING, step=3), plain)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_sequences": 3},
        {"kv_cache_tokens": 26 * 32, "max_sequences": 20},
        {"prefill_tokens_per_step": 50, "max_sequences": 9},
    ],
    ids=str,
)
def test_limits_change_no_row(limits: dict[str, int], tokenizer: PreTrainedTokenizerFast, prompts: Batch) -> None:
    model = build_model()
    expected = NativeEngine(model, tokenizer).generate(prompts, SAMPLING, step=3)
    engine = NativeEngine(model, tokenizer, NativeSettings(**limits))  # type: ignore[arg-type]
    compare(engine.generate(prompts, SAMPLING, step=3), expected)


def test_graphs_survive_weights_written_in_place(tokenizer: PreTrainedTokenizerFast, prompts: Batch) -> None:
    model, other = build_model(), build_model()
    engine = NativeEngine(model, tokenizer)
    before = engine.generate(prompts, SAMPLING, step=3)
    assert engine._graphs is not None
    captured = set(engine._graphs._graphs.values())
    generator = torch.Generator("cuda").manual_seed(3)
    with torch.no_grad():
        for ours, theirs in zip(model.module.parameters(), other.module.parameters(), strict=True):
            change = torch.randn(ours.shape, generator=generator, device="cuda") * 0.05
            ours.add_(change)
            theirs.add_(change)
    engine.load_weights(1)
    found = engine.generate(prompts, SAMPLING, step=3)
    assert captured <= set(engine._graphs._graphs.values())
    compare(found, NativeEngine(other, tokenizer).generate(prompts, SAMPLING, step=3), share=1.0, tolerance=1e-6)
    assert not found.equals(before)
    assert set(found.numpy("policy_version_min")) == {1}


def test_calls_of_other_sizes_follow_each_other(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model()
    engine = NativeEngine(model, tokenizer)
    for lengths, tokens in (([5], 3), ([1500, 20], 400), ([7] * 50, 20), ([40, 3], 5)):
        sampling = SamplingParams(max_new_tokens=tokens, samples_per_prompt=3)
        batch = make_prompts(lengths)
        compare(
            engine.generate(batch, sampling, step=0), build_slow(model, tokenizer).generate(batch, sampling, step=0)
        )


def test_sleep_gives_the_cache_back_and_wake_changes_nothing(
    tokenizer: PreTrainedTokenizerFast, prompts: Batch
) -> None:
    engine = NativeEngine(build_model(), tokenizer)
    first = engine.generate(prompts, SAMPLING, step=3)
    engine.sleep()
    empty = torch.cuda.memory_allocated()
    engine.wake()
    engine.generate(prompts, SAMPLING, step=3)
    assert torch.cuda.memory_allocated() > empty + engine._cache.num_bytes  # type: ignore[union-attr]
    engine.sleep()
    assert torch.cuda.memory_allocated() == empty
    engine.wake()
    compare(engine.generate(prompts, SAMPLING, step=3), first, share=1.0, tolerance=1e-6)


def test_weights_that_are_not_finite_fail_rows(tokenizer: PreTrainedTokenizerFast, prompts: Batch) -> None:
    model = build_model()
    with torch.no_grad():
        model.module.base_model.norm.weight.fill_(float("nan"))  # type: ignore[union-attr, operator]
    found = NativeEngine(model, tokenizer).generate(prompts, SAMPLING, step=0)
    assert set(found.numpy("state")) == {int(RowState.FAILED)}


def test_abort_ends_all_rows_with_what_they_have(tokenizer: PreTrainedTokenizerFast, prompts: Batch) -> None:
    engine = NativeEngine(build_model(), tokenizer)
    sampling = SamplingParams(max_new_tokens=1800, samples_per_prompt=8, ignore_eos=True)
    engine.generate(prompts, SamplingParams(max_new_tokens=8, samples_per_prompt=8, ignore_eos=True), step=0)
    threading.Timer(0.3, engine.abort).start()
    found = engine.generate(prompts, sampling, step=0)
    lengths = np.array([len(row) for row in found.arrays("tokens")]) - np.repeat(LENGTHS, 8)
    assert lengths.max() < 1800 and set(found.pylist("finish_reason")) == {"abort"}


@pytest.mark.parametrize("limits", [{}, {"prefill_tokens_per_step": 50}], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_bfloat16_log_probabilities_are_near_those_of_float32(
    family: str, limits: dict[str, int], tokenizer: PreTrainedTokenizerFast, prompts: Batch
) -> None:
    rounded, exact = build_model(family, torch.bfloat16), build_model(family)
    with torch.no_grad():
        for ours, theirs in zip(exact.module.parameters(), rounded.module.parameters(), strict=True):
            ours.copy_(theirs)
    engine = NativeEngine(rounded, tokenizer, NativeSettings(**limits))  # type: ignore[arg-type]
    found = engine.generate(prompts, SAMPLING, step=3)
    from hybridflow.train_engine.logprobs import compute_batch_logprobs

    truth = np.concatenate(compute_batch_logprobs(exact, found, temperature=0.9, micro_batch_tokens=4096))
    gap = np.abs(np.concatenate(found.arrays("rollout_logprobs")) - truth)[
        np.concatenate(found.arrays("loss_mask")) > 0
    ]
    assert gap.mean() < 0.03 and gap.max() < 0.5
