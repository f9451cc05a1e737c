"""What a rollout records of each token is what the trainer computes of it, under every way of sampling."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from sampling_reference import shape_reference
from tiny_models import SAMPLED, build_letters, draw_prompts
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hybridflow.algorithms.losses import PolicyLoss
from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.models import LanguageModel, fresh_model
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.rollout.base import check_prompts
from hybridflow.train_engine import OptimizerSettings, TrainEngine, TrainSettings, compute_batch_logprobs
from hybridflow.types import RowState, SamplingParams

CONFIG = SAMPLED
LENGTHS = [5, 40, 33, 1]
WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "temperature": 1.2},
    "min-p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.4},
    "repetition wanted": {"repetition_penalty": 0.8, "temperature": 0.9},
    "all together": {"temperature": 1.1, "repetition_penalty": 1.2, "min_p": 0.02, "top_k": 12, "top_p": 0.95},
    "stop strings": {"stop_strings": ("ab", "abc", "k", "de"), "repetition_penalty": 1.2},
    "n": {"samples_per_prompt": 7, "repetition_penalty": 1.1},
    "abort": {"repetition_penalty": 1.3, "temperature": 0.8, "top_p": 0.9},
}
LIMITS = [
    {"max_sequences": 2},
    {"prefill_tokens_per_step": 7},
    {"kv_cache_tokens": 6 * 32, "max_sequences": 6, "prefill_tokens_per_step": 40},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_letters()


@pytest.fixture(scope="module", params=["exact", "fast"])
def model(request) -> LanguageModel:
    return fresh_model(CONFIG, seed=1, numerics=request.param)


@pytest.fixture(scope="module")
def exact_model() -> LanguageModel:
    return fresh_model(CONFIG, seed=1, numerics="exact")


@pytest.fixture(scope="module")
def prompts() -> Batch:
    return draw_prompts(LENGTHS)


def build_sampling(way: str) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 14, "samples_per_prompt": 3, "seed": 5, **WAYS[way]})


def generate(model: LanguageModel, tokenizer: Any, prompts: Batch, way: str, **limits: Any) -> Batch:
    """The rollout; where it is to be aborted, by a call in its sixth pass."""
    engine = NativeEngine(model, tokenizer, NativeSettings(**limits))
    if way != "abort":
        return engine.generate(prompts, build_sampling(way), step=3)
    passes, forward = [], model.hidden_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model, "hidden_states", lambda *a: passes.append(1) or (len(passes) == 6 and engine.abort()) or forward(*a)
        )
        return engine.generate(prompts, build_sampling(way), step=3)


def score(model: LanguageModel, batch: Batch, sampling: SamplingParams) -> np.ndarray:
    scores = compute_batch_logprobs(
        model, batch, temperature=sampling.temperature, micro_batch_tokens=90, shaping=sampling.shaping
    )
    return np.concatenate(scores)


@pytest.mark.parametrize("way", WAYS)
def test_the_trainer_computes_what_the_rollout_records(model, tokenizer, prompts, way):
    batch = generate(model, tokenizer, prompts, way)
    recorded = batch.ragged("rollout_logprobs").values.numpy()
    scores = score(model, batch, build_sampling(way))
    assert np.count_nonzero(recorded) > 30
    if model.numerics == "exact":
        np.testing.assert_array_equal(recorded, scores)
    else:
        np.testing.assert_allclose(recorded, scores, atol=5e-6, rtol=0)
    reasons = set(batch.pylist("finish_reason"))
    assert reasons >= {"stop strings": {"stop"}, "abort": {"abort"}}.get(way, set())
    assert batch.num_rows == len(LENGTHS) * build_sampling(way).samples_per_prompt


@pytest.mark.parametrize("way", WAYS)
def test_what_is_recorded_is_the_distribution_written_out_in_float64(exact_model, tokenizer, prompts, way):
    sampling = build_sampling(way)
    config = copy.deepcopy(exact_model.config)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    reference.load_state_dict(exact_model.module.state_dict())
    batch = generate(exact_model, tokenizer, prompts, way)
    columns = [batch.pylist(name) for name in ("tokens", "loss_mask", "rollout_logprobs")]
    for tokens, mask, logprobs in list(zip(*columns, strict=True))[:: sampling.samples_per_prompt]:
        with torch.no_grad():
            logits = reference(torch.tensor([tokens]), use_cache=False).logits[0].double()
        for t in np.flatnonzero(mask):
            shaping = sampling.shaping
            expected, *_ = shape_reference(list(logits[t - 1]), tokens[:t], tokens[t], sampling.temperature, shaping)
            assert logprobs[t] == pytest.approx(float(expected), abs=2e-5), (way, t)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_update_after_a_rollout_has_a_ratio_of_one(model, tokenizer, prompts, way):
    sampling, is_exact = build_sampling(way), model.numerics == "exact"
    batch = generate(model, tokenizer, prompts, way)
    rng = np.random.default_rng(1)
    advantages = [rng.normal(size=len(row)).astype(np.float32) for row in batch.pylist("tokens")]
    optimizer = OptimizerSettings(lr=0.0)
    # Rows that begin alike are computed together in fast numerics.
    settings = TrainSettings(micro_batch_tokens=100, share_prompts=not is_exact, optimizer=optimizer)
    loss = PolicyLoss(temperature=sampling.temperature, shaping=sampling.shaping)
    metrics = TrainEngine(copy.deepcopy(model), settings).update(batch.with_column("advantages", advantages), loss)
    found = [metrics[f"policy/{name}"].value for name in ("ratio_mean", "ratio_max", "logprob_gap_max")]
    assert found == ([1.0, 1.0, 0.0] if is_exact else pytest.approx([1.0, 1.0, 0.0], abs=1e-5))


@pytest.mark.parametrize("way", [way for way in WAYS if build_sampling(way).cuts])
def test_a_trainer_of_other_rounding_computes_no_jump_at_the_border(exact_model, tokenizer, prompts, way):
    """A rollout on weights that are a little other ones: the trainer is as far from it as where nothing is cut."""
    sampling = dataclasses.replace(build_sampling(way), samples_per_prompt=100)
    other, generator = fresh_model(CONFIG, seed=1), torch.Generator().manual_seed(0)
    for weight in other.module.parameters():
        weight.data.mul_(1 + 1e-4 * torch.randn(weight.shape, generator=generator))
    batch = NativeEngine(other, tokenizer).generate(prompts, sampling, step=3)
    counts, mask = batch.ragged("kept_counts").values.numpy(), batch.ragged("loss_mask").values.numpy() == 1
    assert counts[mask].min() >= 1 and not counts[~mask].any() and (way == "top-k" or len(set(counts[mask])) > 5)
    gaps = np.abs(score(exact_model, batch, sampling) - batch.ragged("rollout_logprobs").values.numpy())
    free = dataclasses.replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    uncut = np.abs(score(exact_model, batch, free) - score(other, batch, free))
    # A token more or less at the border moves the others of its row by up to a tenth.
    assert 0 < gaps.max() <= 2 * uncut.max() < 0.015


def test_a_second_update_of_a_step_keeps_as_many_and_the_drawn_one(model, tokenizer, prompts):
    sampling = build_sampling("top-p")
    batch = generate(model, tokenizer, prompts, "top-p")
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight in moved.module.parameters():
            weight.mul_(1.3)
    scores, mask = score(moved, batch, sampling), batch.ragged("loss_mask").values.numpy() == 1
    alone = batch.ragged("kept_counts").values.numpy() == 1
    assert np.isfinite(scores).all() and (scores[mask & alone] == 0.0).all() and (scores[mask & ~alone] < 0.0).all()


def test_a_row_that_failed_has_no_counts_and_one_that_was_aborted_has_its_own(model, tokenizer):
    prompts = Batch.from_columns(group_id=[0, 1], prompt_tokens=[[3, 4], [10**6]])
    batch = NativeEngine(model, tokenizer).generate(prompts, build_sampling("top-p"), step=0)
    states, counts = batch.pylist("state"), batch.pylist("kept_counts")
    assert states == [RowState.OK] * 3 + [RowState.FAILED] * 3 and counts[3:] == [[]] * 3
    with pytest.raises(ConfigError, match=r"the prompts have columns \['kept_counts'\], which the rollout writes"):
        check_prompts(prompts.with_column("kept_counts", [[1], [1]]))
    aborted = generate(model, tokenizer, draw_prompts(LENGTHS), "abort")
    for row, mask in zip(aborted.pylist("kept_counts"), aborted.pylist("loss_mask"), strict=True):
        assert [count > 0 for count in row] == [bool(counts) for counts in mask]


def test_rows_that_do_not_say_among_how_many_tokens_they_were_drawn_are_refused(exact_model, tokenizer, prompts):
    sampling = build_sampling("top-p")
    batch = generate(exact_model, tokenizer, prompts, "top-p")
    row = next(row for row, mask in enumerate(batch.pylist("loss_mask")) if any(mask))
    with pytest.raises(ValueError, match=rf"row {row}: 'kept_counts' does not say .*native engine"):
        score(exact_model, batch.drop(["kept_counts"]), sampling)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_no_limit_changes_a_bit_of_a_penalised_rollout(exact_model, tokenizer, prompts, limits):
    free = generate(exact_model, tokenizer, prompts, "all together")
    assert generate(exact_model, tokenizer, prompts, "all together", **limits).equals(free)


def test_the_most_likely_token_is_that_of_the_penalised_logits(exact_model, tokenizer, prompts):
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5, top_k=2, min_p=0.5, max_new_tokens=14)
    batch = NativeEngine(exact_model, tokenizer).generate(prompts, sampling, step=0)
    # A certain choice is recorded by its probability in the whole distribution, that of temperature 1 with the penalty.
    whole = dataclasses.replace(sampling, temperature=1.0, top_k=0, min_p=0.0)
    np.testing.assert_array_equal(score(exact_model, batch, whole), batch.ragged("rollout_logprobs").values.numpy())
    greedy = dataclasses.replace(sampling, repetition_penalty=1.0)
    plain = NativeEngine(exact_model, tokenizer).generate(prompts, greedy, step=0)
    repeats = [sum(len(row) - len(set(row)) for row in rows.pylist("tokens")) for rows in (batch, plain)]
    assert repeats[0] < repeats[1]
    assert batch.pylist("state") == [RowState.OK] * len(LENGTHS)
    assert "kept_counts" not in batch and "kept_counts" not in generate(exact_model, tokenizer, prompts, "temperature")
