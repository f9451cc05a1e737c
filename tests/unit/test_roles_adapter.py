"""An adapter on its way from trainer to generator, merged and alone: what is asked for, what travels, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms import SFTLoss, keep_all
from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.flow.quickstart import write_sums
from hybridflow.models import (
    AdapterForm,
    LoraSettings,
    adapter_weights,
    apply_lora,
    fresh_model,
    load_tokenizer,
    read_form,
    save_adapter,
)
from hybridflow.models.adapter_files import read_adapter
from hybridflow.roles.actor import Actor
from hybridflow.roles.actor_worker import ActorSpec
from hybridflow.roles.engines import RolloutSettings, check_lora_sync
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.rollout import NativeEngine, NativeSettings
from hybridflow.rollout.adapters import ServedAdapter, written_adapter
from hybridflow.rollout.base import WeightsError
from hybridflow.rollout.vllm import VllmSettings
from hybridflow.runtime.inprocess import InProcessRuntime
from hybridflow.train_engine import OptimizerSettings, TrainSettings
from hybridflow.types import BatchRef, Objective, SamplingParams

pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")

MODEL: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.2,
}  # fmt: skip
LORA = LoraSettings(rank=2, alpha=4.0)
SAMPLING = SamplingParams(max_new_tokens=12, samples_per_prompt=2, seed=5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("sums")
    write_sums(directory, seed=1)
    return str(directory / "tokenizer")


def build_spec(tokenizer: str, form: str, lora: LoraSettings, numerics: str = "fast") -> ActorSpec:
    model = ModelSettings(config=MODEL, tokenizer=tokenizer, device="cpu", dtype="float32")
    train = TrainSettings(lora=lora, optimizer=OptimizerSettings(lr=1e-2))
    spec = ModelSpec(model, numerics, seed=3, threads=1)  # type: ignore[arg-type]
    return ActorSpec(spec, train, RolloutSettings(engine="native", lora=form))  # type: ignore[arg-type]


def generate(actor: Actor, step: int) -> BatchRef:
    prompts = Batch.from_columns(group_id=[0, 1], prompt_tokens=[[5, 6, 7], [8, 9, 3, 4]])
    return actor.rollout(prompts, step=step)


def find_gap(actor: Actor, runtime: InProcessRuntime, samples: BatchRef) -> float:
    """How far the log-probabilities of what was sampled are from those of the trainer as it is."""
    ours = runtime.get(actor.log_prob(samples)).arrays("trainer_logprobs")
    pairs = zip(ours, runtime.get(samples).arrays("rollout_logprobs"), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


@pytest.mark.parametrize(("form", "numerics"), [("merged", "fast"), ("adapter", "fast"), ("adapter", "exact")])
def test_generators_follow_the_trainer_and_are_sent_what_the_form_says(
    form: str, numerics: str, tokenizer: str
) -> None:
    runtime = InProcessRuntime()
    actor = Actor(runtime, build_spec(tokenizer, form, LORA, numerics), SAMPLING, separate_rollout=True)
    first, moved = generate(actor, 0), []
    for step in range(3):
        samples = generate(actor, step)
        gap = find_gap(actor, runtime, samples)
        assert gap == 0.0 if numerics == "exact" else gap < 1e-5
        assert set(runtime.get(samples).pylist("policy_version_min")) == {step}
        metrics = runtime.get(actor.update(Objective(samples, (), keep_all, SFTLoss())))
        moved.append(metrics["hybrid/bytes_moved"].value if "hybrid/bytes_moved" in metrics else 0)
    # Told with the update after. float32 of two layers' seven pairs of rank 2, 464 values a layer and rank, or of all weights.
    assert moved[0] == 0 and moved[1] == moved[2]
    assert moved[1] == 4 * 2 * 2 * 464 if form == "adapter" else moved[1] > 4 * 15_000
    assert find_gap(actor, runtime, first) > 0.01


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_the_first_rollout_has_the_adapter_that_training_goes_on_from(
    form: str, tokenizer: str, tmp_path: Path
) -> None:
    model = fresh_model(MODEL | {"vocab_size": 16}, seed=0)
    apply_lora(model, LORA, seed=0)
    with torch.no_grad():
        for weight in adapter_weights(model).values():
            weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    save_adapter(model, tmp_path)
    runtime = InProcessRuntime()
    spec = build_spec(tokenizer, form, LoraSettings(path=str(tmp_path)))
    actor = Actor(runtime, spec, SAMPLING, separate_rollout=True)
    assert find_gap(actor, runtime, generate(actor, 0)) < 1e-5
    # Which is not the base alone.
    plain = Actor(runtime, build_spec(tokenizer, form, LORA), SAMPLING, separate_rollout=True)
    assert find_gap(actor, runtime, generate(plain, 0)) > 0.1


@pytest.mark.parametrize(
    ("settings", "lora", "message"),
    [
        (RolloutSettings(lora="adapter"), None, "sends the adapter of train.lora, which is not set"),
        (RolloutSettings(lora="adapter", engine="sglang"), LORA, "sglang, which is given whole weights"),
        (RolloutSettings(lora="adapter", native=NativeSettings(tp=2)), LORA, "native.tp is 2"),
        (RolloutSettings(lora="adapter", vllm=VllmSettings(sleep_level=2)), LORA, "drops the base"),
        (RolloutSettings(lora="adapter"), LoraSettings(rank=600), "its rank is 600, and engines take 512 at most"),
    ],
    ids=["no adapter", "sglang", "tensor parallel", "sleep level", "rank"],
)
def test_what_cannot_be_sent_alone_is_refused(
    settings: RolloutSettings, lora: LoraSettings | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_lora_sync(settings, lora)
    check_lora_sync(dataclasses.replace(settings, lora="merged"), lora)


def test_an_adapter_directory_holds_what_was_sent_until_it_was_read() -> None:
    model = fresh_model(MODEL | {"vocab_size": 16}, seed=0)
    apply_lora(model, LoraSettings(rank=9, alpha=4.5, rslora=True), seed=0)
    weights = {name: weight.detach() for name, weight in adapter_weights(model).items()}
    served = ServedAdapter(AdapterForm(9, 4.5, True, "all-linear"), {name: w.shape for name, w in weights.items()})
    assert served.max_rank == 16
    with written_adapter(served, weights.items()) as (directory, is_finite):
        assert is_finite
        form, there = read_form(directory, "x"), read_adapter(directory, "x")
        assert (form.rank, form.scale) == (9, 1.5)
        assert there.keys() == weights.keys() and all(torch.equal(there[name], weights[name]) for name in weights)
    assert not Path(directory).exists()
    for wrong in (dict(list(weights.items())[1:]), weights | {"a.lora_A.weight": torch.zeros(9, 2)}):
        with pytest.raises(WeightsError, match="is not on both sides"), written_adapter(served, wrong.items()):
            pass
    with pytest.raises(ValueError, match="built without an adapter"), written_adapter(None, weights.items()):
        pass


def test_the_native_engine_takes_an_adapter_only_where_the_model_has_one(tokenizer: str) -> None:
    model = fresh_model(MODEL | {"vocab_size": 16}, seed=0)
    engine = NativeEngine(model, load_tokenizer(tokenizer))
    with pytest.raises(ValueError, match="has no adapter"):
        engine.load_adapter(1, [])
    apply_lora(model, LORA, seed=0)
    sent = {name: torch.randn_like(weight) for name, weight in adapter_weights(model).items()}
    engine.load_adapter(2, sent.items())
    assert engine.version == 2 and all(torch.equal(w, sent[name]) for name, w in adapter_weights(model).items())
    with pytest.raises(WeightsError, match="is not on both sides"):
        engine.load_adapter(3, list(sent.items())[:-1])
