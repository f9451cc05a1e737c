import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import SAMPLED, build_letters, draw_prompts
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch
from hybridflow.models import Packed, compute_logprobs, fresh_model, predicted_positions
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.types import RowState, SamplingParams

VOCAB = SAMPLED["vocab_size"]
CONFIG = SAMPLED
# Around the borders of the cache's blocks of 32 tokens, which responses of 8 tokens cross.
LENGTHS = [5, 70, 33, 58, 1, 32]
SAMPLING = SamplingParams(max_new_tokens=8, samples_per_prompt=3, temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_letters()


@pytest.fixture(scope="module")
def exact_model():
    return fresh_model(CONFIG, seed=1, numerics="exact")


@pytest.fixture
def own_model():
    """A model that the test may change."""
    return fresh_model(CONFIG, seed=1)


@pytest.fixture(scope="module")
def prompts() -> Batch:
    return draw_prompts(LENGTHS)


@pytest.fixture(scope="module")
def unlimited(exact_model, tokenizer, prompts) -> Batch:
    return NativeEngine(exact_model, tokenizer).generate(prompts, SAMPLING, step=3)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_sequences": 2},
        {"prefill_tokens_per_step": 7},
        {"kv_cache_tokens": 5 * 32},
        {"kv_cache_tokens": 11 * 32, "max_sequences": 6, "prefill_tokens_per_step": 40},
    ],
    ids=str,
)
def test_no_limit_changes_a_bit_in_exact_mode(exact_model, tokenizer, prompts, unlimited, limits):
    limited = NativeEngine(exact_model, tokenizer, NativeSettings(**limits))
    assert limited.generate(prompts, SAMPLING, step=3).equals(unlimited)
    has_room_for_one_row = limits == {"kv_cache_tokens": 5 * 32}
    assert (limited.report.beside_tokens > 0) != has_room_for_one_row, "rows decode beside prompts"


def test_the_company_of_other_prompts_and_samples_changes_no_bit_in_exact_mode(
    exact_model, tokenizer, prompts, unlimited
):
    engine = NativeEngine(exact_model, tokenizer)
    alone = [engine.generate(prompts.slice(i, i + 1), SAMPLING, step=3) for i in reversed(range(len(LENGTHS)))]
    assert Batch.concat(alone[::-1]).equals(unlimited)
    fewer = engine.generate(prompts, dataclasses.replace(SAMPLING, samples_per_prompt=2), step=3)
    assert fewer.equals(unlimited.filter(np.arange(unlimited.num_rows) % 3 < 2))


def test_a_preempted_row_comes_back_as_it_would_have_been(exact_model, tokenizer, prompts, monkeypatch):
    sampling = SamplingParams(max_new_tokens=75, samples_per_prompt=2, ignore_eos=True)
    two = prompts.slice(0, 2)
    free = NativeEngine(exact_model, tokenizer).generate(two, sampling, step=0)
    engine = NativeEngine(exact_model, tokenizer, NativeSettings(kv_cache_tokens=8 * 32))
    preemptions = []
    finish = engine._finish
    monkeypatch.setattr(engine, "_finish", lambda *a: preemptions.append(a[2].scheduler.num_preemptions) or finish(*a))
    assert engine.generate(two, sampling, step=0).equals(free)
    assert preemptions[0] > 0


def test_the_trainer_computes_the_very_same_logprobs_in_exact_mode(exact_model, tokenizer, prompts, unlimited):
    tokens, offsets = unlimited.ragged("tokens").values, unlimited.ragged("tokens").offsets
    positions = torch.cat([torch.arange(int(n)) for n in offsets.diff()])
    attention = Packed(offsets.int(), int(offsets.diff().max()))
    hidden = exact_model.hidden_states(tokens.long(), positions, attention)
    hidden_index, token_index = predicted_positions(offsets.int())
    logprobs, _ = compute_logprobs(hidden[hidden_index], tokens.long()[token_index], exact_model.head, temperature=0.9)
    expected = torch.zeros(len(tokens)).index_put((token_index,), logprobs.detach())
    counts = unlimited.ragged("loss_mask").values.bool()
    assert torch.equal(unlimited.ragged("rollout_logprobs").values[counts], expected[counts])


def test_a_groups_prompt_is_computed_once(exact_model, tokenizer, prompts, monkeypatch):
    fed = []
    forward = exact_model.hidden_states
    monkeypatch.setattr(exact_model, "hidden_states", lambda t, p, a: fed.append(len(t)) or forward(t, p, a))
    sampling = SamplingParams(max_new_tokens=4, samples_per_prompt=3, ignore_eos=True)
    NativeEngine(exact_model, tokenizer).generate(prompts, sampling, step=0)
    assert fed == [sum(LENGTHS), 18, 18, 18]


@pytest.mark.parametrize("limits", [{}, {"max_sequences": 3}, {"kv_cache_tokens": 9 * 32}], ids=str)
def test_what_prompts_begin_with_is_computed_once(exact_model, tokenizer, limits, monkeypatch):
    rng = np.random.default_rng(1)
    begin = rng.integers(3, VOCAB, 70)
    tokens = [np.concatenate([begin[:n], rng.integers(3, VOCAB, 9)]).astype(np.int32) for n in (70, 70, 40, 70, 10)]
    batch = Batch.from_columns(group_id=list(range(5)), prompt_tokens=tokens)
    alone = [NativeEngine(exact_model, tokenizer).generate(batch.slice(i, i + 1), SAMPLING, step=0) for i in range(5)]
    fed = []
    compute = exact_model.hidden_states
    monkeypatch.setattr(exact_model, "hidden_states", lambda *a: fed.append(len(a[0])) or compute(*a))
    found = NativeEngine(exact_model, tokenizer, NativeSettings(**limits)).generate(batch, SAMPLING, step=0)
    assert found.equals(Batch.concat(alone))
    if not limits:
        # The first prompt and the short one whole; then what follows the blocks that are there, and their six rows' newest tokens.
        assert fed[:2] == [79 + 19, (79 - 64) + (49 - 32) + (79 - 64) + 6]


def test_limits_hold(exact_model, tokenizer, prompts, monkeypatch):
    shapes = []
    forward = exact_model.hidden_states
    monkeypatch.setattr(
        exact_model, "hidden_states", lambda t, p, a: shapes.append((len(t), len(a.context_lens))) or forward(t, p, a)
    )
    limits = NativeSettings(kv_cache_tokens=300, max_sequences=4, prefill_tokens_per_step=16)
    engine = NativeEngine(exact_model, tokenizer, limits)
    engine.generate(prompts, SAMPLING, step=0)
    assert engine._cache.num_blocks == 9
    assert max(tokens for tokens, _ in shapes) <= 16 and max(rows for tokens, rows in shapes if tokens == rows) <= 6


def test_a_cache_that_cannot_hold_one_row_is_refused_with_the_remedy(exact_model, tokenizer, prompts):
    engine = NativeEngine(exact_model, tokenizer, NativeSettings(kv_cache_tokens=96))
    with pytest.raises(
        ValueError, match="96 tokens and the longest row may need 128; raise rollout.native.kv_cache_tokens"
    ):
        engine.generate(prompts, SAMPLING, step=0)


def test_it_runs_on_the_trainers_weights_and_leaves_the_module_as_it_was(own_model, tokenizer, prompts):
    engine = NativeEngine(own_model, tokenizer)
    before = engine.generate(prompts, SAMPLING, step=0)
    own_model.module.train()
    addresses = [parameter.data_ptr() for parameter in own_model.module.parameters()]
    with torch.no_grad():
        for parameter in own_model.module.parameters():
            parameter.mul_(1.1)
    engine.load_weights(1)
    after = engine.generate(prompts, SAMPLING, step=0)
    assert own_model.module.training
    assert [parameter.data_ptr() for parameter in own_model.module.parameters()] == addresses
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in own_model.module.parameters())
    assert after.pylist("tokens") != before.pylist("tokens") and after.pylist("policy_version_min") == [1] * 18
    fresh = NativeEngine(own_model, tokenizer).generate(prompts, SAMPLING, step=0)
    versions = ["policy_version_min", "policy_version_max"]
    assert fresh.drop(versions).equals(after.drop(versions))


def test_weights_that_are_not_finite_fail_rows_and_raise_nothing(own_model, tokenizer, prompts):
    with torch.no_grad():
        own_model.head_weight[7].fill_(float("nan"))
    batch = NativeEngine(own_model, tokenizer).generate(prompts, SAMPLING, step=0)
    assert set(batch.pylist("state")) == {RowState.FAILED}
    assert all("not finite" in error for error in batch.pylist("rollout_error"))
    assert set(batch.lengths("tokens")) == {0}


def test_a_cache_full_of_nan_from_former_rows_reaches_nobody(exact_model, tokenizer, prompts, unlimited):
    engine = NativeEngine(exact_model, tokenizer)
    engine.generate(prompts, SAMPLING, step=0)
    with torch.inference_mode():
        engine._cache.keys.fill_(float("nan"))
        engine._cache.values.fill_(float("nan"))
    assert engine.generate(prompts, SAMPLING, step=3).equals(unlimited)


def test_generation_refuses_company(exact_model, tokenizer, prompts, monkeypatch):
    engine = NativeEngine(exact_model, tokenizer)
    forward = exact_model.hidden_states

    def interfere(*arguments):
        for verb in (engine.sleep, lambda: engine.load_weights(1), lambda: engine.generate(prompts, SAMPLING, step=0)):
            with pytest.raises(RuntimeError, match="while the rollout engine is generating"):
                verb()
        return forward(*arguments)

    monkeypatch.setattr(exact_model, "hidden_states", interfere)
    engine.generate(prompts, SamplingParams(max_new_tokens=2), step=0)


def test_sleep_frees_the_cache(exact_model, tokenizer, prompts):
    engine = NativeEngine(exact_model, tokenizer)
    engine.generate(prompts, SAMPLING, step=0)
    engine.sleep()
    assert engine._cache is None


def test_fast_mode_agrees_with_exact_mode_within_rounding(own_model, tokenizer, prompts, unlimited):
    engine = NativeEngine(own_model, tokenizer, NativeSettings(kv_cache_tokens=11 * 32))
    fast = engine.generate(prompts, SAMPLING, step=3)
    same = [a == b for a, b in zip(fast.pylist("tokens"), unlimited.pylist("tokens"), strict=True)]
    assert np.mean(same) > 0.9
    kept = np.array(same)
    torch.testing.assert_close(
        fast.filter(kept).ragged("rollout_logprobs").values.clone(),
        unlimited.filter(kept).ragged("rollout_logprobs").values.clone(),
        atol=1e-4,
        rtol=0,
    )


def test_the_report_says_how_full_steps_were_and_what_the_slowest_rows_cost(exact_model, tokenizer):
    batch = Batch.from_columns(group_id=list(range(10)), prompt_tokens=[[5, 6, 7]] * 10)
    engine = NativeEngine(exact_model, tokenizer)
    assert engine.metrics() == {}
    sampling = SamplingParams(max_new_tokens=11, ignore_eos=True)
    start = engine._start

    def start_with_limits(*args):
        job = start(*args)
        job.sequences.max_length[:10] = 3 + np.array([3] * 9 + [11])
        return job

    engine._start = start_with_limits
    engine.generate(batch, sampling, step=0)
    report = engine.report
    # Ten rows draw two tokens each after the prompt's, then one alone eight more.
    assert (report.prefill_tokens, report.steps, report.live_steps) == (30, 10, 28)
    assert 28 <= report.seat_steps <= 100 and report.preemptions == 0
    assert 0.2 < report.tail_seconds / report.seconds < 1.0
    told = engine.metrics()
    assert told["speed/rollout_occupancy"].value == pytest.approx(28 / report.seat_steps)
    assert told["speed/rollout_prefill_tokens"].value == 30


def test_the_report_counts_what_decodes_and_ends_beside_prompts(exact_model, tokenizer):
    """Ten short rows draw all of their tokens beside the chunks of a prompt that leaves its row one token."""
    lengths = [5] * 10 + [159]
    batch = Batch.from_columns(group_id=list(range(11)), prompt_tokens=[[5] * length for length in lengths])
    engine = NativeEngine(exact_model, tokenizer, NativeSettings(prefill_tokens_per_step=20))
    engine.generate(batch, SamplingParams(max_new_tokens=3, ignore_eos=True), step=0)
    told = engine.metrics()
    assert "speed/rollout_occupancy" not in told
    assert told["speed/rollout_prefill_tokens"].value == 209 and told["speed/rollout_beside_tokens"].value == 20
    assert engine.report.tail_seconds > 0.2 * engine.report.seconds


@pytest.mark.parametrize("tokens", [None, 64, 96, 160])
def test_a_row_as_long_as_the_engine_says_fits(exact_model, tokenizer, tokens):
    engine = NativeEngine(exact_model, tokenizer, NativeSettings(kv_cache_tokens=tokens))
    longest = engine.longest_row
    assert longest == (160 if tokens is None else tokens - 32)
    for prompt in (1, longest // 2, longest - 1):
        batch = Batch.from_columns(group_id=[0], prompt_tokens=[[5] * prompt])
        found = engine.generate(batch, SamplingParams(max_new_tokens=longest - prompt, ignore_eos=True), step=0)
        assert len(found.arrays("tokens")[0]) == longest
