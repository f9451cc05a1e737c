"""What is wrong with how trainers share a model is told before any of them starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hybridflow.config import ConfigError, check_config
from hybridflow.models import LoraSettings
from hybridflow.roles.policy import ModelSettings
from hybridflow.roles.trainers import check_training, describe_layout, describe_memory
from hybridflow.train_engine import Layout, ParallelConfig, TrainSettings
from hybridflow.types import Numerics

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
    assert check_training(model, settings_of(tp=7), "fast", None) is None, "the cluster will tell how many there are"
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
    numbers = [float(part.split()[1]) for part in parts.rstrip(")").split(", ")]
    assert [part.split()[0] for part in parts.split(", ")] == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
    ]
    assert float(total) == pytest.approx(sum(numbers), abs=0.3) and numbers[3] > 1.0
    halved = float(describe_memory(model, train, Layout(sequence=2), None, None).split()[0])
    assert halved < 0.7 * float(total)
