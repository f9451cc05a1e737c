"""Kinds of fault that no room's own tests hold, and what docs/traps.md says of all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import planted_faults
import pytest
import torch
from planted_faults import FAULTS, ROOT, Fault

from hybridflow.algorithms import PolicyGradient, PolicyGradientSettings, SFTLoss, keep_all
from hybridflow.batch import Batch
from hybridflow.checkpoint import CheckpointWriter
from hybridflow.config import schema
from hybridflow.data import build_character_tokenizer
from hybridflow.flow.commands import EvalConfig, ExportConfig, GenerateConfig
from hybridflow.flow.quickstart import QuickstartConfig
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig
from hybridflow.models import LanguageModel, fresh_model
from hybridflow.models.families import FAMILIES
from hybridflow.rewards import RewardSettings
from hybridflow.roles.actor import Actor
from hybridflow.roles.actor_worker import ActorSpec
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.failures import MAX_FAILED_STEPS, AllRowsFailedError
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.roles.reward_model import RewardWorker
from hybridflow.rollout import NativeEngine
from hybridflow.rollout.base import build_rollout_batch
from hybridflow.runtime.api import Seat
from hybridflow.runtime.inprocess import InProcessRuntime
from hybridflow.train_engine import TrainSettings, compute_batch_logprobs
from hybridflow.types import Objective, RowState, SamplingParams

TOKENIZER = build_character_tokenizer("0123456789+=")
MODEL: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "vocab_size": len(TOKENIZER),
}  # fmt: skip
# What one device cannot meet, and what is not here yet: critics and several turns.
ELSEWHERE = {2, 4, 5, 13, 17, 22, 23, 25, 29, 32}


def build_model(seed: int, *, tied: bool) -> LanguageModel:
    """Weights of one dimension too are its own."""
    model = fresh_model(MODEL | {"tie_word_embeddings": tied}, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator) if weight.dim() == 1 else 0.0
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("poison", [torch.nan, 0.25])
def test_new_weights_take_the_place_of_every_old_one(poison: float, tied: bool) -> None:
    trained, copied = build_model(1, tied=tied), build_model(2, tied=tied)
    copied.module.requires_grad_(False)
    engine = NativeEngine(copied, TOKENIZER)
    engine.load_weights(
        1, ((name, torch.full_like(weight, poison)) for name, weight in copied.module.named_parameters())
    )
    prompts = Batch.from_columns(group_id=[0, 1], prompt_tokens=[[1, 5, 6, 7], [1, 8]])
    sampling = SamplingParams(max_new_tokens=12, samples_per_prompt=2)
    engine.generate(prompts, sampling, step=0)
    engine.load_weights(2, trained.module.named_parameters())
    samples = engine.generate(prompts, sampling, step=0)
    ours = compute_batch_logprobs(trained, samples, temperature=1.0, micro_batch_tokens=512)
    for row, theirs, mask in zip(ours, samples.arrays("rollout_logprobs"), samples.arrays("loss_mask"), strict=True):
        assert mask.any()
        np.testing.assert_allclose(theirs[mask == 1], row[mask == 1], atol=1e-5)


def test_the_loss_is_of_the_distribution_that_is_sampled_from() -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2)
    loss = PolicyGradient(PolicyGradientSettings(), sampling).loss
    assert (loss.temperature, loss.shaping) == (0.7, sampling.shaping)
    assert loss.shaping != SamplingParams().shaping


def test_sampled_tokens_count_and_no_other() -> None:
    """Of a row that was cut off all sampled tokens count, the last among them; an end in the prompt is none of the response."""
    end = TOKENIZER.eos_token_id
    prompts = Batch.from_columns(group_id=[3, 4], prompt_tokens=[[1, end, 5], [1]])
    tokens = [np.array(row, np.int32) for row in ([1, end, 5, 6, 7], [1, end, 5, 6, end], [1, end], [1])]
    rows = build_rollout_batch(
        prompts, 2, tokens=tokens, logprobs=[np.full(len(row), -1.0, np.float32) for row in tokens], version=0,
        prompt_lengths=np.array([3, 3, 1, 1]), responses=["12", "1", "", ""], errors=[None] * 4,
        finish_reasons=["length", "stop", "stop", "abort"],
    )  # fmt: skip
    assert rows.pylist("loss_mask") == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1], [0]]
    assert rows.pylist("state") == [RowState.OK, RowState.OK, RowState.OK, RowState.EMPTY]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_all_that_a_sync_has_to_send(family: str) -> None:
    """A buffer that a checkpoint holds would stay behind at every generator; none of the families served has one."""
    module = fresh_model(MODEL | {"model_type": family, "head_dim": 8}, seed=0).module
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert module.state_dict().keys() == parameters


def test_a_failed_row_is_a_0_of_an_evaluation() -> None:
    ok, failed = int(RowState.OK), int(RowState.FAILED)
    rows = Batch.from_columns(
        reward=[1.0, None, 0.5, None], state=np.array([ok, ok, ok, failed], np.int8), loss_mask=[[0, 1], [0, 1], [0, 1], []],
        rollout_error=[None, None, None, "no room"], reward_error=[None, "it raised", None, "not scored"],
    )  # fmt: skip
    worker = RewardWorker(Seat("reward", 0, 1), RewardSettings(function="exact_match"), None)
    found = worker.summarize(rows)
    assert (found.mean, found.num_rows, found.num_failed) == (0.375, 4, 2)
    nothing = worker.summarize(rows.slice(0, 0))
    assert (nothing.mean, nothing.num_rows, nothing.num_failed) == (0.0, 0, 0)


def test_an_end_that_was_sampled_is_kept_and_counts() -> None:
    stops = (4, 5, 6)
    engine = NativeEngine(build_model(1, tied=True), TOKENIZER)
    prompts = Batch.from_columns(group_id=[0], prompt_tokens=[[1, 5, 6]])
    sampling = SamplingParams(max_new_tokens=20, samples_per_prompt=16, stop_token_ids=stops)
    rows = engine.generate(prompts, sampling, step=0)
    ends = set()
    for tokens, mask, reason in zip(*map(rows.pylist, ("tokens", "loss_mask", "finish_reason")), strict=True):
        assert mask == [0] * 3 + [1] * (len(tokens) - 3)
        assert (reason == "stop") == (tokens[-1] in {*stops, TOKENIZER.eos_token_id})
        ends.add(tokens[-1])
    assert len(ends & set(stops)) > 1


def test_every_setting_is_read_somewhere() -> None:
    """By its name, so that of two settings of one name one may still be passed over."""
    trees = (RLConfig, SFTConfig, GenerateConfig, EvalConfig, ExportConfig, QuickstartConfig)
    named = {schema.own_path(tree, tuple(key.split(".")))[-1] for tree in trees for key in schema.iter_keys(tree)}
    nodes = (node for path in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert len(named) > 100
    assert named - read == set()


def test_steps_of_failed_rows_are_counted_over_a_resume(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    settings = ModelSettings(config=MODEL, tokenizer=str(tmp_path / "tokenizer"), device="cpu", dtype="float32")
    spec = ActorSpec(ModelSpec(settings, "fast", seed=0, threads=1), TrainSettings(), RolloutSettings(engine="native"))
    failed = Batch.from_columns(
        group_id=[0],
        tokens=[[1, 5]],
        loss_mask=[[0, 1]],
        state=np.array([RowState.FAILED], np.int8),
        rollout_error=["no room"],
    )

    def train(actor: Actor, steps: int) -> None:
        for _ in range(steps):
            runtime.get(actor.update(Objective(failed, (), keep_all, SFTLoss())))

    runtime = InProcessRuntime()
    first, second = (Actor(runtime, spec, SamplingParams()) for _ in range(2))
    train(first, MAX_FAILED_STEPS)
    with CheckpointWriter(tmp_path / "checkpoints", MAX_FAILED_STEPS) as writer:
        path = writer.commit(runtime.get(first.save(writer)), {})
    runtime.get(second.load(path))
    with pytest.raises(AllRowsFailedError, match=f"failed in {MAX_FAILED_STEPS + 1} steps in a row.*no room"):
        train(second, 1)


# The table.


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.told}")
def test_a_fault_can_still_be_planted_where_the_table_says(fault: Fault) -> None:
    count = (ROOT / fault.source).read_text().count(fault.old)
    assert count == 1, f"correct tests/planted_faults.py: '{fault.old}' stands {count} times in {fault.source}"
    assert fault.old != fault.new
    assert is_there(fault.test), fault.test


def is_there(test: str) -> bool:
    """Whether `unit/test_batch.py::test_split` names a test."""
    path, _, name = test.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and (not name or re.search(rf"^def {name}\(", file.read_text(), re.MULTILINE) is not None)


def test_every_kind_that_one_device_can_meet_has_faults_and_the_others_are_told() -> None:
    page = (ROOT / "docs" / "traps.md").read_text()
    told = [int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)]
    assert told == list(range(1, 36))
    assert {fault.kind for fault in FAULTS} >= set(told) - ELSEWHERE
    assert {int(number) for number in re.findall(r"^\| \*\*(\d+)\*\* \|", page, re.MULTILINE)} == ELSEWHERE


def test_the_page_shows_the_table_and_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "traps.md").read_text()
    assert planted_faults.read_table() in page, (
        "put what `python tests/planted_faults.py --table` prints into docs/traps.md"
    )
    named = re.findall(r"`((?:unit|contract|multiproc|e2e|gpu)/\w+\.py(?:::\w+)?)`", page)
    assert len(named) > len(FAULTS)
    assert [test for test in named if not is_there(test)] == []
