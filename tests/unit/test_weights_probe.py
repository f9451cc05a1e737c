"""The probe passes where the weights are the same, and catches each planted fault each time, in float32 and bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch
from hybridflow.models import (
    LanguageModel,
    LoraSettings,
    Paged,
    adapter_weights,
    apply_lora,
    compute_log_softmax,
    compute_logits,
    fresh_model,
    iter_merged_weights,
)
from hybridflow.rollout import NativeEngine
from hybridflow.train_engine import compute_batch_logprobs
from hybridflow.types import Reduce
from hybridflow.weights.probe import (
    NEW_TOKENS,
    PROMPT_LENGTHS,
    TOLERANCES,
    UNSETTLED_TOKENS,
    ProbeError,
    ProbeResult,
    Tolerance,
    build_probe,
    calibrate,
    check_probe,
    compare,
    drop_unsettled,
    iter_moved,
    score_rows,
)

VOCAB = 300
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 160, "vocab_size": VOCAB, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
FAMILIES = {
    "tied": SHAPE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "biases": SHAPE | {"model_type": "qwen2", "tie_word_embeddings": False},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UPDATE = {"float32": 3e-3, "bfloat16": 0.1}
"""How far an update moves each weight, relative to its RMS."""
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    pieces = ["<pad>", "<unk>", "</s>"] + [f"w{index}" for index in range(VOCAB - 3)]
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


def build_model(family: str, dtype: str, seed: int = 0) -> LanguageModel:
    """Norms are not 1 and biases not 0, or nothing would be seen of them."""
    model = fresh_model(FAMILIES[family], seed=seed, dtype=DTYPES[dtype])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.module.parameters():
            if weight.dim() == 1:
                weight += torch.randn(weight.shape, generator=generator) * 0.1
    return model


def clone(model: LanguageModel) -> LanguageModel:
    twin = LanguageModel(copy.deepcopy(model.module))
    twin.module.requires_grad_(False)
    return twin


def take(model: LanguageModel, source: dict[str, torch.Tensor], leave_out: str = "") -> None:
    """A sync, maybe without one tensor."""
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if name != leave_out:
                weight.copy_(source[name])


def update(model: LanguageModel, scale: float, seed: int) -> None:
    take(model, dict(iter_moved(model.module.named_parameters(), seed, scale)))


def probe(trainer: LanguageModel, rollout: LanguageModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> ProbeResult:
    """As a run does it: the rollout generates, the trainer scores."""
    prompts = build_probe(tokenizer, seed)
    batch = NativeEngine(rollout, tokenizer).generate(prompts.batch, prompts.sampling, step=0)
    return compare_sides(trainer, batch, batch.arrays("rollout_logprobs"))


def compare_sides(trainer: LanguageModel, batch: Batch, rollout_logprobs: list[np.ndarray]) -> ProbeResult:
    ours = compute_batch_logprobs(trainer, batch, temperature=1.0, micro_batch_tokens=512)
    return compare(score_rows(batch, ours), score_rows(batch, rollout_logprobs), TOLERANCES[trainer.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_weights_pass_far_below_the_tolerance(
    family: str, dtype: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    for seed in SEEDS:
        model = build_model(family, dtype, seed)
        result = probe(model, clone(model), tokenizer, seed)
        check_probe(result, version=1)
        assert result.num_tokens == NEW_TOKENS * len(PROMPT_LENGTHS) - (UNSETTLED_TOKENS - PROMPT_LENGTHS[0]) - 1
        assert result.mean_gap < result.tolerance.mean / 4 and result.max_gap < result.tolerance.max / 4
        assert calibrate(result) == result.tolerance, "so that what the tests below catch, a run catches"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_one_tensor_that_a_sync_leaves_out_is_caught(
    family: str, dtype: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    old = build_model(family, dtype)
    new, rollout = clone(old), clone(old)
    update(new, UPDATE[dtype], seed=7)
    theirs = dict(new.module.named_parameters())
    missed = []
    for name in theirs:
        take(rollout, dict(old.module.named_parameters()))
        take(rollout, theirs, leave_out=name)
        if probe(new, rollout, tokenizer, seed=0).passed:
            missed.append(name)
    # The softmax takes out most of what all keys have in common.
    assert all(dtype == "bfloat16" and name.endswith(("q_proj.bias", "k_proj.bias")) for name in missed), missed
    take(rollout, theirs)
    assert probe(new, rollout, tokenizer, seed=0).passed


def test_after_moved_weights_a_tensor_is_missed_even_where_training_moves_nothing(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    trainer = build_model("tied", "bfloat16")
    rollout = clone(trainer)
    theirs = dict(trainer.module.named_parameters())
    take(rollout, dict(iter_moved(theirs.items(), seed=1)))
    assert not probe(trainer, rollout, tokenizer, seed=0).passed
    take(rollout, theirs, leave_out="model.layers.1.self_attn.q_proj.weight")
    assert not probe(trainer, rollout, tokenizer, seed=0).passed
    take(rollout, theirs)
    assert probe(trainer, rollout, tokenizer, seed=0).passed


def transpose(model: LanguageModel) -> None:
    weight = model.module.model.layers[0].self_attn.q_proj.weight
    assert weight.shape[0] == weight.shape[1]
    weight.data.copy_(weight.t().clone())


def stale_head(model: LanguageModel) -> None:
    """What vLLM on a CPU does to a tied head: the embedding is new, the head a copy of the old one."""
    old = model.head_weight.detach().clone()
    update(model, 0.1, seed=5)
    model.module.lm_head.weight = torch.nn.Parameter(old, requires_grad=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["transposed", "stale head"])
def test_a_weight_in_the_wrong_form_is_caught(
    fault: str, dtype: str, seed: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    trainer = build_model("tied", dtype, seed)
    rollout = clone(trainer)
    if fault == "stale head":
        update(trainer, 0.1, seed=5)
        stale_head(rollout)
        assert torch.equal(rollout.module.model.embed_tokens.weight, trainer.module.model.embed_tokens.weight)
    else:
        transpose(rollout)
    result = probe(trainer, rollout, tokenizer, seed)
    assert result.mean_gap > 3 * result.tolerance.mean


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_that_never_came_is_caught_merged_and_beside_the_base(
    dtype: str, seed: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    trainer = build_model("tied", dtype, seed)
    rollout = clone(trainer)
    apply_lora(trainer, LoraSettings(rank=4), seed=seed)
    beside = LanguageModel(copy.deepcopy(trainer.module))
    assert probe(trainer, rollout, tokenizer, seed).passed, "a new adapter changes nothing"
    with torch.no_grad():
        for name, weight in adapter_weights(trainer).items():
            if ".lora_B." in name:
                weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    assert not probe(trainer, rollout, tokenizer, seed).passed
    assert not probe(trainer, beside, tokenizer, seed).passed
    take(rollout, dict(iter_merged_weights(trainer)))
    assert probe(trainer, rollout, tokenizer, seed).passed
    with torch.no_grad():
        for weight, theirs in zip(adapter_weights(beside).values(), adapter_weights(trainer).values(), strict=True):
            weight.copy_(theirs)
    assert probe(trainer, beside, tokenizer, seed).passed


def score_with_cached(new: LanguageModel, cached: LanguageModel, tokens: np.ndarray, prefix: int) -> np.ndarray:
    """Log-probabilities of a row under `new`, with keys and values of its first tokens as `cached` computes them."""
    cache, ids = new.new_cache(8), torch.from_numpy(tokens.astype(np.int64))
    hidden = []
    for model, start, end in ((cached, 0, prefix), (new, prefix, len(tokens))):
        if start == end:
            continue
        cu_query = torch.tensor([0, end - start], dtype=torch.int32)
        paged = Paged(cache, torch.arange(8, dtype=torch.int32)[None], torch.tensor([end]), cu_query)
        hidden.append(model.hidden_states(ids[start:end], torch.arange(start, end), paged))
    with torch.no_grad():
        logprobs = compute_log_softmax(compute_logits(torch.cat(hidden)[:-1], new.head))
    found = logprobs.gather(1, ids[1:, None])[:, 0].float().numpy()
    return np.append(np.float32(0.0), found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_cache_of_older_weights_is_caught(dtype: str, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    old = build_model("tied", dtype, seed)
    new = clone(old)
    update(new, 0.1, seed=3)
    prompts = build_probe(VOCAB, seed)
    batch = NativeEngine(new, tokenizer).generate(prompts.batch, prompts.sampling, step=0)
    rows = batch.arrays("tokens")
    # Whole blocks of 32 are what a prefix cache keeps; the two shorter prompts have none.
    prefixes = [(len(row) - NEW_TOKENS) // 32 * 32 for row in rows]
    assert prefixes == [0, 0, 32, 64]

    def read(cached: LanguageModel) -> ProbeResult:
        scored = [score_with_cached(new, cached, row, prefix) for row, prefix in zip(rows, prefixes, strict=True)]
        return compare_sides(new, batch, scored)

    assert read(new).passed
    stale = read(old)
    assert not stale.passed and stale.prompt in (2, 3)


# --- numbers and words ----------------------------------------------------------------------------------------------


def arrays(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, np.float32) for row in rows]


def test_a_result_names_the_worst_token_and_counts_only_scored_ones() -> None:
    result = compare(
        arrays([0.0, -1.0], [0.0, -2.0, -3.0]), arrays([0.0, -1.25], [0.0, -2.0, -4.0]), Tolerance(0.5, 0.9)
    )
    assert (result.num_tokens, result.mean_gap, result.max_gap) == (3, pytest.approx(1.25 / 3), 1.0)
    assert (result.prompt, result.position, result.trainer, result.rollout) == (1, 2, -3.0, -4.0)
    assert not result.passed, "the mean is within the tolerance, the largest is not"
    with pytest.raises(
        ProbeError, match=r"version 7 .* prompt 1 is worst, at token 2: -3 and -4\. A weight was left out"
    ):
        check_probe(result, version=7)
    metrics = result.metrics()
    assert metrics["probe/max_gap"].reduce is Reduce.MAX and metrics["probe/mean_gap"].weight == 3


def test_many_small_gaps_fail_by_the_mean() -> None:
    row = [-1.0] * 10
    assert compare(arrays(row), arrays([value - 0.02 for value in row]), Tolerance(0.03, 0.1)).passed
    assert not compare(arrays(row), arrays([value - 0.02 for value in row]), Tolerance(0.01, 0.1)).passed


def test_two_tokens_of_a_hundred_may_be_rounded_far_away() -> None:
    row, near = [-1.0] * 100, [-1.001] * 98
    result = compare(arrays(row), arrays([-9.0, -20.0, *near]), Tolerance(0.01, 0.2))
    assert result.passed and (result.num_tokens, result.prompt, result.position) == (98, 0, 2)
    assert (result.mean_gap, result.max_gap) == (pytest.approx(0.001, rel=1e-4), pytest.approx(0.001, rel=1e-4))
    assert not compare(arrays(row), arrays([-9.0, -20.0, -1.3, *near[1:]]), Tolerance(0.01, 0.2)).passed


def test_the_first_tokens_of_a_row_do_not_count() -> None:
    rows = [np.arange(length, dtype=np.float32) for length in (40, 16, 5, 1, 0)]
    assert [row.tolist() for row in drop_unsettled(rows)] == [
        list(range(12, 40)),
        list(range(8, 16)),
        [2, 3, 4],
        [0],
        [],
    ]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_infinitely_far(value: float) -> None:
    for rest in ([-1.0], [-1.0] * 99):
        for ours, theirs in (([value, *rest], [-1.0, *rest]), ([value, *rest], [value, *rest])):
            assert not compare(arrays(ours), arrays(theirs), Tolerance(10.0, 10.0)).passed


def test_rows_of_other_lengths_are_no_answer() -> None:
    with pytest.raises(ValueError, match="score the same tokens"):
        compare(arrays([-1.0, -2.0]), arrays([-1.0]), Tolerance(1.0, 1.0))


@pytest.mark.parametrize("vocabulary", [20, 1000, 151_936])
def test_prompts_are_the_same_each_time_and_reach_every_part_of_the_vocabulary(vocabulary: int) -> None:
    prompts = build_probe(vocabulary, seed=4)
    assert prompts == build_probe(range(vocabulary), seed=4) != build_probe(vocabulary, seed=5)
    assert tuple(map(len, prompts.rows)) == PROMPT_LENGTHS and max(PROMPT_LENGTHS) > 64
    ids = np.concatenate(prompts.rows)
    assert ids.min() >= 0 and ids.max() < vocabulary
    parts = min(64, vocabulary)
    assert set((ids * parts // vocabulary).tolist()) == set(range(parts))
    assert prompts.batch.num_rows == len(PROMPT_LENGTHS) and prompts.sampling.ignore_eos


def test_moved_weights_are_others_of_the_same_size() -> None:
    weights = {"a": torch.ones(50, 50), "b": torch.zeros(10, dtype=torch.bfloat16)}
    moved: dict[str, torch.Tensor] = dict(iter_moved(weights.items(), seed=0))
    again: Callable[[], dict[str, torch.Tensor]] = lambda: dict(iter_moved(weights.items(), seed=0))  # noqa: E731
    assert torch.equal(moved["a"], again()["a"]) and torch.equal(weights["a"], torch.ones(50, 50))
    assert (moved["a"] - 1).std().item() == pytest.approx(0.3, rel=0.05)
    assert moved["b"].dtype == torch.bfloat16 and (moved["b"] != 0).all()


@pytest.mark.parametrize(
    ("gap", "mean", "most"), [(0.0, 0.01, 0.2), (0.02, 0.06, 0.2), (0.5, 0.1, 1.5), (3.0, 0.1, 2.0)]
)
def test_the_first_probe_says_how_much_rounding_there_is(gap: float, mean: float, most: float) -> None:
    row = [-1.0, -2.0, -3.0]
    found = calibrate(compare(arrays(row), arrays([value - gap for value in row]), TOLERANCES[torch.bfloat16]))
    assert (found.mean, found.max) == (pytest.approx(mean), pytest.approx(most))


def test_prompts_leave_room_in_a_short_context() -> None:
    assert [len(row) for row in build_probe(100, 0, context=32).rows] == [3, 16, 16, 16]
    assert [len(row) for row in build_probe(100, 0, context=80).rows] == [3, 21, 40, 56]
    assert [len(row) for row in build_probe(100, 0, context=1000).rows] == list(PROMPT_LENGTHS)
