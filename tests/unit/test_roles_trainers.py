"""What is wrong with how trainers share a model is told before any of them starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from hybridflow.config import ConfigError, check_config
from hybridflow.models import LoraSettings
from hybridflow.models.families import UnsupportedModelError
from hybridflow.roles.policy import ModelSettings, read_config
from hybridflow.roles.trainers import check_training, describe_layout, describe_memory
from hybridflow.train_engine import Layout, ParallelConfig, RowMemory, TrainSettings, estimate_row_memory
from hybridflow.types import Numerics, SamplingParams

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 1000, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    """A directory with a config.json and no weights."""
    directory = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("qwen3", **SHAPE).save_pretrained(directory)
    return ModelSettings(path=str(directory), device="cpu", dtype="float32")


def settings_of(**parallel: Any) -> TrainSettings:
    return TrainSettings(parallel_config=ParallelConfig(**parallel))


def test_the_layout_follows_from_the_trainers_placed(model: ModelSettings) -> None:
    found = check_training(model, settings_of(tp=2, shard=0), "fast", 8)
    assert found == Layout(data=4, sequence=1, tensor=2, shard=4)
    assert check_training(model, settings_of(tp=2), "fast", None) is None, "the cluster will tell how many there are"
    assert check_training(model, settings_of(), "exact", 3) == Layout(data=3)


@pytest.mark.parametrize(
    ("parallel", "size", "numerics", "message"),
    [
        ({"tp": 2}, 3, "fast", "train.parallel_config: tp=2 and sp=1 need a multiple of 2 trainers, but there are 3"),
        ({"dp": 3}, 2, "fast", "train.parallel_config.dp: 3 does not fit 2 trainers"),
        ({"shard": 3}, 4, "fast", "train.parallel_config.shard: 3 does not divide the 4 trainers"),
        ({"tp": 4}, 4, "fast", "train.parallel_config.tp: 4 does not divide the model's 6 attention heads"),
        ({"tp": 3}, 3, "fast", "train.parallel_config.tp: 3 does not divide the model's 2 key-value heads"),
        ({"sp": 4}, 4, "fast", "train.parallel_config.sp: 4 does not divide the 6 attention heads of a rank"),
        ({"shard": 0}, 2, "exact", "numerics: 'exact' holds where every trainer has the whole model"),
        ({"tp": 2}, 2, "exact", "numerics: 'exact' holds where every trainer has the whole model"),
        ({"sp": 2}, 2, "exact", "numerics: 'exact' holds where every trainer has the whole model"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    parallel: dict[str, int], size: int, numerics: Numerics, message: str, model: ModelSettings
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_training(model, settings_of(**parallel), numerics, size)
    assert str(caught.value).startswith(message)
    assert "; " in str(caught.value), "a remedy follows"


def test_an_adapter_is_not_split_over_matrices(model: ModelSettings) -> None:
    train = TrainSettings(parallel_config=ParallelConfig(tp=2), lora=LoraSettings())
    with pytest.raises(ConfigError, match=r"train.lora: .* train.parallel_config.tp is 2; set tp=1"):
        check_training(model, train, "fast", None)


@pytest.mark.parametrize(
    ("train", "numerics", "message"),
    [
        ({"gradient_checkpointing": "full"}, "exact", "train.gradient_checkpointing is full, but numerics 'exact'"),
        ({"compile": True}, "exact", "train.compile is true, but numerics 'exact'"),
        (
            {"share_prompts": True},
            "exact",
            "train.share_prompts is true, but numerics 'exact' computes each row by itself",
        ),
        ({"liger": True}, "exact", "train.liger is true, but numerics 'exact' computes norms by kernels of its own"),
        ({"liger": True}, "fast", "train.liger is true, but its kernels need a GPU"),
        (
            {"lora": {"target_modules": ["q_proj", "nope"]}},
            "fast",
            "train.lora.target_modules: 'nope' is no linear layer",
        ),
        ({"activation_offload": True}, "fast", "train.activation_offload is true, but the model is not on a GPU"),
        (
            {"offload": "optimizer"},
            "fast",
            "train.offload is optimizer, but the model is not on a GPU: what it would move is in the host's memory",
        ),
    ],
)
def test_what_the_layers_cannot_do_is_told_before_launch(
    train: dict[str, Any], numerics: Numerics, message: str, model: ModelSettings
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_training(model, check_config(TrainSettings, train), numerics, 1)
    assert str(caught.value).startswith(message)
    assert "; " in str(caught.value), "a remedy follows"


def test_parameters_on_the_host_need_shards(model: ModelSettings) -> None:
    train = TrainSettings(offload="parameters", parallel_config=ParallelConfig(shard=0))
    assert check_training(model, train, "fast", 2, "gpu") == Layout(data=2, shard=2)
    with pytest.raises(ConfigError, match="^train.offload: 'parameters' keeps shards .* over 1 makes none; place more"):
        check_training(model, train, "fast", 1, "gpu")


def test_nobody_is_sent_for_trainers_that_the_model_cannot_use(model: ModelSettings) -> None:
    with pytest.raises(ConfigError, match=r"tp: 3 does not divide the model's 2 key-value heads; .* set it to 1 or 2$"):
        check_training(model, settings_of(tp=3), "fast", 1)


@pytest.mark.parametrize("family", ["gpt2", "nope"])
def test_a_family_that_is_not_served_is_named(family: str, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.save_pretrained(tmp_path)
    other = ModelSettings(config={"model_type": family}, tokenizer=str(tmp_path), device="cpu")
    with pytest.raises(
        UnsupportedModelError, match=f"model family '{family}' is not supported; hybridflow serves Llama"
    ):
        read_config(other)


def test_the_placement_says_where_activations_are(model: ModelSettings) -> None:
    train = TrainSettings(activation_offload=True, gradient_checkpointing="full")
    assert check_training(model, train, "fast", 2, "gpu") == Layout(data=2)
    with pytest.raises(ConfigError, match="the model is not on a GPU"):
        check_training(model, train, "fast", 2, "cpu")


def test_checkpointing_by_true_or_false_names_the_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing.*none.*selective.*full.*auto"):
        check_config(TrainSettings, {"gradient_checkpointing": True})


def test_a_layout_and_its_memory_are_told(model: ModelSettings) -> None:
    assert describe_layout(Layout(data=4, tensor=2, shard=2)) == (
        "data 4 × sequence 1 × tensor 2; weights in 2 shards, 2 copies"
    )
    assert describe_layout(Layout()) == "data 1 × sequence 1 × tensor 1; weights whole, 1 copy"
    train = TrainSettings(gradient_checkpointing="none", micro_batch_tokens=2**20)
    whole = describe_memory(model, train, Layout(), None, None)
    total, _, parts = whole.partition(" GiB a trainer (")
    told = [part.split() for part in parts.rstrip(")").split(", ")]
    numbers = [float(number) / (1024 if unit == "MiB" else 1) for _, number, unit in told]
    assert {name: unit for name, _, unit in told}["weights"] == "MiB" and numbers[0] > 0
    assert [part.split()[0] for part in parts.split(", ")] == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "backward",
    ]
    assert float(total) == pytest.approx(sum(numbers), abs=0.3) and numbers[3] > 1.0
    halved = float(describe_memory(model, train, Layout(sequence=2), None, None).split()[0])
    assert halved < 0.7 * float(total)


def test_memory_counts_how_rows_are_drawn_and_what_they_share(model: ModelSettings) -> None:
    sampling = SamplingParams(repetition_penalty=1.2, samples_per_prompt=8, max_new_tokens=200)
    train, apart = TrainSettings(gradient_checkpointing="none"), TrainSettings(share_prompts=False)
    rows = estimate_row_memory(train, "fast", sampling, 100)
    assert rows == RowMemory(sampling.shaping, (99 + 8 * 300) / (99 + 8 * 201))
    assert estimate_row_memory(train, "fast", sampling, None) == estimate_row_memory(train, "fast", sampling, 200)
    unshared = estimate_row_memory(apart, "fast", sampling, 100)
    assert unshared == estimate_row_memory(train, "exact", sampling, 100) == RowMemory(sampling.shaping)
    shared = RowMemory(keys_per_token=rows.keys_per_token)
    told = [
        describe_memory(model, train, Layout(), None, None, expected=each) for each in (RowMemory(), shared, unshared)
    ]
    activations, backward = zip(*((line.split(", ")[3], line.split(", ")[4]) for line in told), strict=True)
    assert activations[0] == activations[2] != activations[1] and backward[0] != backward[2]
