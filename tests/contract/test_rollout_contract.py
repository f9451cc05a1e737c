"""What every rollout engine promises, asked of each engine on a real model; the reference is Hugging Face's eager forward in float32."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine
from tiny_stories import MISSING, STORIES, write_stories
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_engines import build_vllm, connect_vllm

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.models import load_model, load_tokenizer
from hybridflow.rollout import NativeEngine, RolloutEngine
from hybridflow.rollout.base import WeightsError
from hybridflow.types import RowState, SamplingParams

TEXTS = ["Once upon a time", "Lily and Tom went to the park. They saw a", "The dog"]
TOLERANCE = 2e-5
PERIOD, COMMA = 426, 432

pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason=MISSING)


@dataclass(frozen=True)
class Kind:
    """How an engine is built, and what it promises. exact: the same key gives the same bits. package: what has to be installed.

    shapes: whether its log-probabilities are those after top-k and top-p; one that does not tell these refuses min-p and penalties.
    """

    build: Callable[[Path], RolloutEngine]
    exact: bool = True
    shapes: bool = True
    package: str | None = None


def build_native(directory: Path) -> RolloutEngine:
    return NativeEngine(load_model(directory), load_tokenizer(directory))


def build_sglang(directory: Path) -> RolloutEngine:
    from hybridflow.rollout.sglang import SglangSettings, build_sglang_engine

    return build_sglang_engine(directory, SglangSettings(mem_fraction_static=0.1))


ENGINES = {
    "native": Kind(build_native),
    "fake": Kind(FakeEngine),
    "vllm": Kind(build_vllm, exact=False, package="vllm"),
    "vllm_service": Kind(connect_vllm, exact=False, package="vllm"),
    "sglang": Kind(build_sglang, exact=False, shapes=False, package="sglang"),
}


@pytest.fixture(params=ENGINES, scope="module")
def kind(request) -> Kind:
    chosen = ENGINES[request.param]
    if chosen.package is not None and find_spec(chosen.package) is None:
        pytest.skip(f"{chosen.package} is not installed")
    return chosen


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_stories(tmp_path_factory.mktemp("model") / "stories")


@pytest.fixture(scope="module")
def build_engine(kind) -> Callable[[Path], RolloutEngine]:
    return kind.build


@pytest.fixture(scope="module")
def engine(kind, build_engine, directory) -> Iterator[RolloutEngine]:
    engine = build_engine(directory)
    yield engine
    # On a CPU vLLM's end would take along the process groups of others in this process.
    if kind.package is not None and torch.cuda.is_available():
        engine.close()


@pytest.fixture
def changeable(engine, reference) -> Iterator[RolloutEngine]:
    """The engine of all tests, with its first weights given back at the end."""
    yield engine
    engine.load_weights(0, reference.named_parameters())


@pytest.fixture(scope="module")
def reference(directory):
    return read_reference(directory)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> Batch:
    return make_prompts([tokenizer(text)["input_ids"] for text in TEXTS])


def read_reference(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def build_other(directory: Path, seed: int = 0):
    """Another model of the same shape: every weight of the first one moved a little."""
    model = read_reference(directory)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                0.1 * weight.std() * torch.randn(weight.shape, generator=generator) if weight.ndim > 1 else 0.01
            )
    return model


def make_prompts(tokens: list[list[int]]) -> Batch:
    count = len(tokens)
    columns = {"prompt_id": list(range(count)), "group_id": [100 + 7 * i for i in range(count)]}
    return Batch.from_columns(
        **columns, prompt_tokens=tokens, prompt=[f"p{i}" for i in range(count)], answer=[f"a{i}" for i in range(count)]
    )


@torch.inference_mode()
def reference_logits(reference, tokens: list[int]) -> np.ndarray:
    """Row t: logits of token t (row 0 is nobody's), float64."""
    logits = reference(torch.tensor([tokens])).logits[0].double().numpy()
    return np.concatenate([np.zeros_like(logits[:1]), logits[:-1]])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def filtered(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """-inf below a share of the greatest probability, then outside top-k, then outside the nucleus of what is left."""
    order = np.argsort(-logits)
    order = order[np.exp(logits[order] - logits.max()) >= min_p][: top_k or None]
    probs = np.exp(log_softmax(logits[order]))
    kept = order[np.cumsum(probs) - probs < top_p]
    result = np.full_like(logits, -np.inf)
    result[kept] = logits[kept]
    return result


def penalized(logits: np.ndarray, history: list[int], penalty: float) -> np.ndarray:
    """Logits of the tokens that came before, prompt included, divided by the penalty, or multiplied where they are below 0."""
    result = logits.copy()
    for token in set(history):
        result[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return result


def check_logprobs(batch: Batch, reference) -> None:
    """All sampled tokens, which were drawn at temperature 1, have the reference's log-probabilities."""
    assert batch.pylist("state") == [RowState.OK] * batch.num_rows
    for row in rows_of(batch):
        logits = log_softmax(reference_logits(reference, row["tokens"]))
        for t in np.flatnonzero(row["loss_mask"]):
            assert row["rollout_logprobs"][t] == pytest.approx(logits[t][row["tokens"][t]], abs=TOLERANCE)


def assert_same(batch: Batch, other: Batch, *, exact: bool) -> None:
    """Equal, log-probabilities to a tolerance unless bits are promised."""
    if exact:
        assert batch.equals(other)
        return
    assert batch.drop(["rollout_logprobs"]).equals(other.drop(["rollout_logprobs"]))
    ours, theirs = (part.ragged("rollout_logprobs").values for part in (batch, other))
    assert np.abs(ours.numpy() - theirs.numpy()).max(initial=0.0) < TOLERANCE


def rows_of(batch: Batch) -> list[dict]:
    return [
        dict(zip(batch.column_names, row, strict=True))
        for row in zip(*map(batch.pylist, batch.column_names), strict=True)
    ]


def test_rows_come_group_by_group_with_their_prompts_columns(engine, prompts, tokenizer):
    batch = engine.generate(prompts, SamplingParams(max_new_tokens=12, samples_per_prompt=3), step=4)
    assert batch.pylist("group_id") == [100] * 3 + [107] * 3 + [114] * 3
    assert batch.pylist("sample_id") == [0, 1, 2] * 3
    assert batch.pylist("answer") == ["a0"] * 3 + ["a1"] * 3 + ["a2"] * 3
    assert "prompt_tokens" not in batch.column_names
    prompt_of_row = [prompt for prompt in prompts.pylist("prompt_tokens") for _ in range(3)]
    for row, prompt in zip(rows_of(batch), prompt_of_row, strict=True):
        start = len(prompt)
        assert row["tokens"][:start] == prompt
        assert row["loss_mask"] == [0] * start + [1] * (len(row["tokens"]) - start)
        assert len(row["rollout_logprobs"]) == len(row["tokens"]) and row["rollout_logprobs"][:start] == [0.0] * start
        assert len(row["tokens"]) == start + 12 and row["finish_reason"] == "length" and row["state"] == RowState.OK
        assert row["response"] == tokenizer.decode(row["tokens"][start:], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "penalty"),
    [
        (1.0, 0, 1.0, 0.0, 1.0), (0.7, 0, 1.0, 0.0, 1.0), (1.3, 5, 1.0, 0.0, 1.0), (1.0, 0, 0.8, 0.0, 1.0), (0.9, 20, 0.7, 0.0, 1.0),
        (1.2, 0, 1.0, 0.05, 1.0), (1.2, 0, 0.8, 0.2, 1.0), (1.0, 0, 1.0, 0.0, 1.3), (0.8, 30, 0.95, 0.01, 1.15),
    ],
)  # fmt: skip
def test_logprobs_are_those_of_the_distribution_sampled_from(
    kind, engine, prompts, reference, temperature, top_k, top_p, min_p, penalty
):
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, max_new_tokens=40, samples_per_prompt=2
    )  # fmt: skip
    if not kind.shapes and (min_p > 0.0 or penalty != 1.0):
        with pytest.raises(ConfigError, match="rollout.engine=native"):
            engine.generate(prompts, sampling, step=0)
        return
    if not kind.shapes:
        top_k, top_p = 0, 1.0
    for row in rows_of(engine.generate(prompts, sampling, step=0)):
        raw = reference_logits(reference, row["tokens"])
        for t in np.flatnonzero(row["loss_mask"]):
            logits = penalized(raw[t], row["tokens"][:t], penalty) / temperature
            expected = log_softmax(filtered(logits, top_k, top_p, min_p))[row["tokens"][t]]
            assert row["rollout_logprobs"][t] == pytest.approx(expected, abs=TOLERANCE)


def test_temperature_zero_takes_the_most_likely_token(engine, prompts, reference):
    for row in rows_of(engine.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=40), step=0)):
        logits = reference_logits(reference, row["tokens"])
        for t in np.flatnonzero(row["loss_mask"]):
            assert logits[t][row["tokens"][t]] >= logits[t].max() - 1e-4
            assert row["rollout_logprobs"][t] == pytest.approx(log_softmax(logits[t])[row["tokens"][t]], abs=TOLERANCE)


def test_draws_follow_the_models_distribution(engine, reference):
    prompt = [1, 403, 407, 261, 378]
    batch = engine.generate(make_prompts([prompt]), SamplingParams(max_new_tokens=1, samples_per_prompt=1000), step=0)
    drawn = np.bincount([tokens[-1] for tokens in batch.pylist("tokens")], minlength=512) / 1000
    expected = np.exp(log_softmax(reference_logits(reference, [*prompt, 0])[-1]))
    likely = expected > 0.002
    assert np.abs(drawn - expected)[likely].max() < 4 * np.sqrt(expected.max() / 1000)
    assert drawn[~likely].sum() == pytest.approx(expected[~likely].sum(), abs=0.03)


def test_same_key_same_samples_and_other_step_seed_or_sample_another(engine, prompts):
    sampling = SamplingParams(max_new_tokens=16, samples_per_prompt=4)
    first = engine.generate(prompts, sampling, step=1).pylist("tokens")
    assert engine.generate(prompts, sampling, step=1).pylist("tokens") == first
    assert engine.generate(prompts, sampling, step=2).pylist("tokens") != first
    other_seed = SamplingParams(max_new_tokens=16, samples_per_prompt=4, seed=1)
    assert engine.generate(prompts, other_seed, step=1).pylist("tokens") != first
    for group in range(3):
        assert len({tuple(tokens) for tokens in first[4 * group : 4 * group + 4]}) == 4


def test_parts_of_a_batch_on_replicas_seeded_alike_give_what_one_engine_gives(engine, prompts):
    sampling = SamplingParams(max_new_tokens=16, samples_per_prompt=2)
    whole = engine.generate(prompts, sampling, step=1)
    parts = [engine.generate(part, sampling, step=1) for part in prompts.split([1, 2])]
    assert Batch.concat(parts).pylist("tokens") == whole.pylist("tokens")


def test_stop_ids_of_sampling_and_model_all_stop(engine, prompts):
    sampling = SamplingParams(max_new_tokens=60, samples_per_prompt=4, stop_token_ids=(PERIOD, COMMA), seed=3)
    rows = rows_of(engine.generate(prompts, sampling, step=0))
    assert {row["tokens"][-1] for row in rows if row["finish_reason"] == "stop"} >= {PERIOD, COMMA}
    for row in rows:
        sampled = np.array(row["tokens"])[np.array(row["loss_mask"]) == 1]
        assert not set(sampled[:-1].tolist()) & {PERIOD, COMMA, 2}
        assert row["finish_reason"] == ("stop" if sampled[-1] in (PERIOD, COMMA, 2) else "length")


def test_all_end_of_sequence_ids_of_the_generation_config_stop_unless_ignored(
    kind, engine, prompts, directory, tmp_path
):
    directory = shutil.copytree(directory, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [PERIOD, COMMA]}))
    sampling = SamplingParams(max_new_tokens=40, samples_per_prompt=4)
    ignoring = SamplingParams(max_new_tokens=40, samples_per_prompt=4, ignore_eos=True)
    stopping = kind.build(directory)
    whole = engine.generate(prompts, sampling, step=0)
    assert_same(stopping.generate(prompts, ignoring, step=0), whole, exact=kind.exact)
    free = rows_of(whole)
    rows = rows_of(stopping.generate(prompts, sampling, step=0))
    for row, whole in zip(rows, free, strict=True):
        assert whole["tokens"][: len(row["tokens"])] == row["tokens"]
        assert (row["finish_reason"] == "stop") == (row["tokens"][-1] in (PERIOD, COMMA)) and row["loss_mask"][-1] == 1
    assert {row["tokens"][-1] for row in rows} >= {PERIOD, COMMA}


def test_stop_strings_cut_the_text_and_keep_the_tokens(engine, prompts):
    sampling = SamplingParams(max_new_tokens=80, samples_per_prompt=4)
    free = rows_of(engine.generate(prompts, sampling, step=0))
    strings = (". She", "was a", "\n")
    stopping = SamplingParams(max_new_tokens=80, samples_per_prompt=4, stop_strings=strings)
    rows = rows_of(engine.generate(prompts, stopping, step=0))
    assert sum(row["finish_reason"] == "stop" for row in rows) >= 3
    for row, whole in zip(rows, free, strict=True):
        assert whole["tokens"][: len(row["tokens"])] == row["tokens"]
        found = [whole["response"].find(string) for string in strings if string in whole["response"]]
        assert row["response"] == whole["response"][: min(found, default=None)]
        assert len(row["tokens"]) == len(whole["tokens"]) or row["finish_reason"] == "stop"


def test_the_context_limit_ends_a_row(engine, tokenizer):
    tokens = (tokenizer("Once upon a time, there was a cat. " * 60)["input_ids"])[:505]
    (row,) = rows_of(engine.generate(make_prompts([tokens]), SamplingParams(ignore_eos=True), step=0))
    assert len(row["tokens"]) == 512 and row["finish_reason"] == "length" and row["state"] == RowState.OK


def test_a_prompt_that_cannot_be_served_fails_alone(engine):
    tokens = [[1, 403], list(range(3, 503)) + [5] * 12, [], [1, 9999]]
    rows = rows_of(
        engine.generate(make_prompts(tokens), SamplingParams(max_new_tokens=4, samples_per_prompt=2), step=0)
    )
    assert [row["state"] for row in rows] == [RowState.OK] * 2 + [RowState.FAILED] * 6
    assert [row["rollout_error"] is None for row in rows] == [True] * 2 + [False] * 6
    assert (
        "512" in rows[2]["rollout_error"]
        and "no tokens" in rows[4]["rollout_error"]
        and "tokenizer" in rows[6]["rollout_error"]
    )
    assert all(row["tokens"] == [] and row["response"] == "" and row["finish_reason"] == "abort" for row in rows[2:])


def test_no_prompts_give_no_rows_with_all_columns(engine, prompts):
    empty = engine.generate(prompts.slice(0, 0), SamplingParams(), step=0)
    assert empty.num_rows == 0
    assert set(empty.column_names) == set(
        engine.generate(prompts, SamplingParams(max_new_tokens=1), step=0).column_names
    )


def test_columns_and_groups_that_would_be_overwritten_are_refused(engine, prompts):
    with pytest.raises(ValueError, match="'response'"):
        engine.generate(prompts.with_column("response", ["x"] * 3), SamplingParams(), step=0)
    with pytest.raises(ValueError, match="group_id 5 comes twice"):
        engine.generate(prompts.with_column("group_id", [5, 6, 5]), SamplingParams(), step=0)


def test_the_version_of_the_weights_is_on_every_row(changeable, prompts, reference):
    changeable.load_weights(7, reference.named_parameters())
    batch = changeable.generate(prompts, SamplingParams(max_new_tokens=2, samples_per_prompt=2), step=0)
    assert batch.pylist("policy_version_min") == batch.pylist("policy_version_max") == [7] * 6


def test_weights_that_are_not_finite_fail_rows_and_raise_nothing(changeable, prompts, reference):
    changeable.load_weights(
        1, ((name, torch.full_like(weight, torch.nan)) for name, weight in reference.named_parameters())
    )
    batch = changeable.generate(prompts, SamplingParams(max_new_tokens=4), step=0)
    assert batch.pylist("state") == [RowState.FAILED] * 3 and set(batch.lengths("tokens")) == {0}
    assert all(batch.pylist("rollout_error")), print(batch.pylist("rollout_error"))


@pytest.mark.parametrize("poison", [torch.nan, 0.25])
def test_new_weights_take_the_place_of_every_old_one(changeable, prompts, directory, reference, poison):
    sampling = SamplingParams(max_new_tokens=24, samples_per_prompt=2)
    changeable.load_weights(
        1, ((name, torch.full_like(weight, poison)) for name, weight in reference.named_parameters())
    )
    changeable.generate(prompts, sampling, step=0)
    other = build_other(directory)
    changeable.load_weights(2, other.named_parameters())
    check_logprobs(changeable.generate(prompts, sampling, step=0), other)


def test_given_rows_are_scored_as_the_model_scores_them(engine, tokenizer, reference):
    rows = [tokenizer(text)["input_ids"] for text in (*TEXTS, "Once upon a time, there was a little cat. " * 5)]
    rows.append(rows[0][:1])
    scores = engine.score(rows)
    if scores is None:
        pytest.skip("this engine does not tell")
    assert scores.dtype == torch.float32
    for row, logprobs in zip(rows, scores.logprobs, strict=True):
        expected = log_softmax(reference_logits(reference, row))[np.arange(len(row)), row]
        expected[0] = 0.0
        np.testing.assert_allclose(logprobs, expected, atol=TOLERANCE)


def test_update_after_update_leaves_nothing_of_the_last_one(changeable, prompts, directory):
    for version in range(1, 5):
        other = build_other(directory, seed=version)
        changeable.load_weights(version, reversed(list(other.named_parameters())))
        check_logprobs(changeable.generate(prompts, SamplingParams(max_new_tokens=12), step=version), other)


def test_prefixes_computed_with_old_weights_are_not_used_again(changeable, tokenizer, directory, reference):
    long = make_prompts([tokenizer("Once upon a time, there was a little cat. " * 12)["input_ids"]])
    sampling = SamplingParams(max_new_tokens=4, samples_per_prompt=2, ignore_eos=True)
    for _ in range(2):
        check_logprobs(changeable.generate(long, sampling, step=0), reference)
    other = build_other(directory)
    changeable.load_weights(1, other.named_parameters())
    check_logprobs(changeable.generate(long, sampling, step=0), other)


@pytest.mark.parametrize("fault", ["one is missing", "one too many", "one of another shape"])
def test_weights_that_are_not_the_models_are_refused_by_name(changeable, prompts, reference, fault):
    weights = dict(reference.named_parameters())
    name = "model.layers.3.self_attn.o_proj.weight"
    if fault == "one is missing":
        del weights[name]
    elif fault == "one of another shape":
        weights[name] = weights[name].T
    else:
        name = "model.layers.7.self_attn.o_proj.weight"
        weights[name] = weights["model.layers.3.self_attn.o_proj.weight"]
    with pytest.raises(WeightsError, match=name):
        changeable.load_weights(1, weights.items())
    changeable.load_weights(2, reference.named_parameters())
    check_logprobs(changeable.generate(prompts, SamplingParams(max_new_tokens=4), step=0), reference)


def test_abort_ends_all_rows_with_what_they_have(engine, prompts):
    result: list[Batch] = []
    sampling = SamplingParams(max_new_tokens=120, samples_per_prompt=2, ignore_eos=True)
    thread = threading.Thread(target=lambda: result.append(engine.generate(prompts, sampling, step=0)))
    thread.start()
    while thread.is_alive():
        thread.join(0.01)
        engine.abort()
    rows = rows_of(result[0])
    assert len(rows) == 6 and "abort" in {row["finish_reason"] for row in rows}
    for row in rows:
        assert row["state"] == (RowState.OK if sum(row["loss_mask"]) else RowState.EMPTY)
    whole = rows_of(engine.generate(prompts, sampling, step=0))
    for row, full in zip(rows, whole, strict=True):
        assert full["finish_reason"] == "length" and full["tokens"][: len(row["tokens"])] == row["tokens"]


def test_sleep_takes_generation_away_and_wake_gives_it_back(kind, engine, prompts):
    sampling = SamplingParams(max_new_tokens=8, samples_per_prompt=2)
    before = engine.generate(prompts, sampling, step=0)
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"wake\(\)"):
        engine.generate(prompts, sampling, step=0)
    engine.wake()
    assert_same(engine.generate(prompts, sampling, step=0), before, exact=kind.exact)
