"""The contract's tests are worth something: for each promise that the fake engine breaks, one of them fails."""

import fake_engine
import numpy as np
import pytest
import test_rollout_contract as contract
from tiny_stories import MISSING, STORIES, write_stories
from transformers import AutoTokenizer

pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason=MISSING)

CATCHES = {
    "logprobs before temperature": (
        "test_logprobs_are_those_of_the_distribution_sampled_from",
        (0.7, 0, 1.0, 0.0, 1.0),
    ),
    "top-p before top-k": ("test_logprobs_are_those_of_the_distribution_sampled_from", (0.9, 20, 0.7, 0.0, 1.0)),
    "greedy draws": ("test_temperature_zero_takes_the_most_likely_token",),
    "one seed for a group": ("test_same_key_same_samples_and_other_step_seed_or_sample_another",),
    "seed of the call": ("test_same_key_same_samples_and_other_step_seed_or_sample_another",),
    "first stop id alone": ("test_stop_ids_of_sampling_and_model_all_stop",),
    "model's ids in spite of ignore_eos": (
        "test_all_end_of_sequence_ids_of_the_generation_config_stop_unless_ignored",
    ),
    "stop token dropped": ("test_stop_ids_of_sampling_and_model_all_stop",),
    "text not cut": ("test_stop_strings_cut_the_text_and_keep_the_tokens",),
    "runs past the context": ("test_the_context_limit_ends_a_row",),
    "raises for a bad prompt": ("test_a_prompt_that_cannot_be_served_fails_alone",),
    "old version": ("test_the_version_of_the_weights_is_on_every_row",),
    "deaf to abort": ("test_abort_ends_all_rows_with_what_they_have",),
    "generates asleep": ("test_sleep_takes_generation_away_and_wake_gives_it_back",),
    "stale prefixes": ("test_prefixes_computed_with_old_weights_are_not_used_again",),
    "one tensor kept": ("test_new_weights_take_the_place_of_every_old_one", np.nan),
    "head kept": ("test_update_after_update_leaves_nothing_of_the_last_one",),
    "takes what it gets": ("test_weights_that_are_not_the_models_are_refused_by_name", "one is missing"),
    "min-p after top-p": ("test_logprobs_are_those_of_the_distribution_sampled_from", (1.2, 0, 0.8, 0.2, 1.0)),
    "penalty by the response alone": (
        "test_logprobs_are_those_of_the_distribution_sampled_from",
        (1.0, 0, 1.0, 0.0, 1.3),
    ),
    "scores a token late": ("test_given_rows_are_scored_as_the_model_scores_them",),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = write_stories(tmp_path_factory.mktemp("model") / "stories")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = [tokenizer(text)["input_ids"] for text in contract.TEXTS]
    return {
        "directory": directory,
        "tokenizer": tokenizer,
        "reference": contract.read_reference(directory),
        "prompts": contract.make_prompts(tokens),
    }


def test_every_fault_has_its_test():
    assert set(CATCHES) == set(fake_engine.FAULTS)


@pytest.mark.parametrize("fault", CATCHES)
def test_a_broken_promise_turns_its_test_red(fault, world, tmp_path):
    name, *values = CATCHES[fault]
    test = contract.__dict__[name]
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        _call(test, values, world, tmp_path, fault)


def _call(test, values, world, tmp_path, fault):
    engine = fake_engine.FakeEngine(world["directory"], fault)
    kind = contract.Kind(lambda directory: fake_engine.FakeEngine(directory, fault))
    fixtures = world | {"engine": engine, "changeable": engine, "kind": kind, "tmp_path": tmp_path}
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    flat = [*values[0]] if values and isinstance(values[0], tuple) else values
    given = dict(zip([name for name in names if name not in fixtures], flat, strict=True))
    test(**given, **{name: fixtures[name] for name in names if name in fixtures})
