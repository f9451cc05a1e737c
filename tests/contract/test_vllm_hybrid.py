"""A trainer and vLLM: after every update vLLM's log-probabilities are the trainer's, and where a part stays old, they are not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_stories import MISSING, STORIES, write_stories
from vllm_engines import SETTINGS, build_vllm, connect_vllm, keep
from vllm_server import ON_GPU, start_server

from hybridflow.algorithms import SFTLoss
from hybridflow.batch import Batch
from hybridflow.config import ConfigError, load_config
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig
from hybridflow.models import (
    LoraSettings,
    adapter_weights,
    iter_base_weights,
    load_model,
    load_tokenizer,
    resolve_lora,
    save_model,
)
from hybridflow.roles.carried import CarriedTensor, Weights
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.generator import GeneratorWorker
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.roles.probing import SyncProbe
from hybridflow.rollout import RolloutEngine
from hybridflow.rollout.adapters import ServedAdapter
from hybridflow.rollout.base import WeightsError
from hybridflow.rollout.vllm import RECEIVER, VllmEngine, VllmSettings
from hybridflow.rollout.vllm_service import connect_vllm_service
from hybridflow.runtime.api import Seat
from hybridflow.train_engine import OptimizerSettings, TrainEngine, TrainSettings
from hybridflow.train_engine.ranks import ALONE
from hybridflow.types import RowState, SamplingParams
from hybridflow.weights.probe import TOLERANCES, ProbeError, build_probe, check_probe, compare, iter_moved

vllm = pytest.importorskip("vllm", reason="vllm is not installed; make test-vllm has an environment with it")
pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason=MISSING)

TEXTS = ("Once upon a time", "Lily and Tom went to the park. They saw a", "The dog", "Tom had a red ball")
SAMPLING = SamplingParams(max_new_tokens=24, samples_per_prompt=4, seed=7)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {"tied": write_stories(root / "tied"), "untied": write_stories(root / "untied", tied=False)}
    model = load_model(found["tied"])
    save_model(model, load_tokenizer(found["tied"]), root / "moved", dict(iter_moved(iter_base_weights(model), seed=1)))
    return found | {"moved": root / "moved"}


@pytest.fixture(scope="module")
def prompts(directories) -> Batch:
    tokenizer = load_tokenizer(directories["tied"])
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    return Batch.from_columns(group_id=list(range(len(tokens))), prompt_tokens=tokens)


@pytest.fixture
def stale_heads() -> Iterator[None]:
    """vLLM as it comes: a tied head is multiplied by its copy from the start."""
    import vllm._custom_ops as operators

    import hybridflow.rollout.vllm_worker  # noqa: F401 its import mends this, and comes once

    operators._supports_onednn = True
    yield
    operators._supports_onednn = False


LORA = LoraSettings(rank=4, alpha=8.0)
needs_float32 = pytest.mark.skipif(ON_GPU, reason="vLLM's kernels for adapters have no float32 on a GPU")


def build_trainer(directory: Path) -> TrainEngine:
    settings = TrainSettings(optimizer=OptimizerSettings(lr=1e-3), micro_batch_tokens=400)
    return TrainEngine(load_model(directory), settings)


def find_gap(trainer: TrainEngine, samples: Batch) -> float:
    """The largest difference between the two sides' log-probabilities of the sampled tokens."""
    assert samples.pylist("state") == [RowState.OK] * samples.num_rows
    ours, theirs = trainer.log_prob(samples, 1.0), samples.arrays("rollout_logprobs")
    return max(float(np.abs(one - other).max()) for one, other in zip(ours, theirs, strict=True))


def iter_gaps(trainer: TrainEngine, engine: VllmEngine, prompts: Batch, updates: int) -> Iterator[float]:
    """Updates on the engine's own samples; after each the gap of new samples, of the new version."""
    for version in range(1, updates + 1):
        samples = engine.generate(prompts, SAMPLING, step=version)
        trainer.update(samples, SFTLoss())
        engine.load_weights(version, trainer.iter_weights())
        samples = engine.generate(prompts, SAMPLING, step=version)
        assert set(samples.pylist("policy_version_min")) == {version}
        yield find_gap(trainer, samples)


def probe(trainer: TrainEngine, engine: RolloutEngine) -> None:
    """What a run does after a sync: raises ProbeError where the two sides differ by more than rounding."""
    prompts = build_probe(trainer.model.config.vocab_size, seed=3)
    samples = engine.generate(prompts.batch, prompts.sampling, step=0)
    ours, theirs = trainer.log_prob(samples, 1.0), samples.arrays("rollout_logprobs")
    check_probe(compare(ours, theirs, TOLERANCES[torch.float32]), engine.version)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_ten_updates_reach_vllm_whole(directories, prompts, kind):
    engine, trainer = build_vllm(directories[kind]), build_trainer(directories[kind])
    first = engine.generate(prompts, SAMPLING, step=0)
    assert find_gap(trainer, first) < TOLERANCE
    for gap in iter_gaps(trainer, engine, prompts, 10):
        assert gap < TOLERANCE
        probe(trainer, engine)
    assert find_gap(trainer, first) > 0.1


@pytest.mark.skipif(ON_GPU, reason="oneDNN's copy is vLLM's on a CPU")
def test_a_head_that_stays_on_its_first_weights_is_seen_at_once(directories, prompts, stale_heads):
    engine, trainer = build_vllm(directories["tied"]), build_trainer(directories["tied"])
    assert find_gap(trainer, engine.generate(prompts, SAMPLING, step=0)) < TOLERANCE
    for gap in iter_gaps(trainer, engine, prompts, 2):
        assert gap > 10 * TOLERANCE
        with pytest.raises(ProbeError, match="is not the same on both sides"):
            probe(trainer, engine)


def test_prefixes_that_are_kept_over_an_update_are_seen(directories, monkeypatch):
    long = load_tokenizer(directories["tied"])("Once upon a time, there was a little cat. " * 12)["input_ids"]
    prompts = Batch.from_columns(group_id=[0, 1], prompt_tokens=[long, long[:-3]])
    engine, trainer = build_vllm(directories["tied"]), build_trainer(directories["tied"])
    monkeypatch.setattr(engine, "_drop_prefixes", lambda: None)
    assert min(iter_gaps(trainer, engine, prompts, 2)) > 10 * TOLERANCE
    probe(trainer, engine)
    trainer.update(engine.generate(prompts, SAMPLING, step=3), SFTLoss())
    engine.load_weights(3, trainer.iter_weights())
    with pytest.raises(ProbeError):
        probe(trainer, engine)
    monkeypatch.undo()
    assert max(iter_gaps(trainer, engine, prompts, 2)) < TOLERANCE


def test_vllm_in_a_process_of_its_own_takes_weights_too(directories, prompts):
    engine = build_vllm(directories["tied"], own_process=True, has_weights=False)
    trainer = build_trainer(directories["tied"])
    try:
        assert find_gap(trainer, engine.generate(prompts, SAMPLING, step=0)) > 1.0
        assert max(iter_gaps(trainer, engine, prompts, 2)) < TOLERANCE
    finally:
        engine.close()


def build_adapted(directory: Path) -> tuple[TrainEngine, ServedAdapter]:
    """A trainer of an adapter, and what vLLM has to know of it."""
    pytest.importorskip("peft", reason="peft is an extra; pip install 'hybridflow[lora]'")
    settings = TrainSettings(optimizer=OptimizerSettings(lr=3e-3), micro_batch_tokens=400, lora=LORA)
    trainer = TrainEngine(load_model(directory), settings, seed=1)
    shapes = {name: weight.shape for name, weight in adapter_weights(trainer.model).items()}
    return trainer, ServedAdapter(resolve_lora(LORA), shapes)


def follow_adapter(trainer: TrainEngine, engine: RolloutEngine, prompts: Batch, updates: int) -> None:
    """After each update the adapter alone is sent, and the probe holds; not before, and not where it does not come."""
    for version in range(1, updates + 1):
        trainer.update(engine.generate(prompts, SAMPLING, step=version), SFTLoss())
        with pytest.raises(ProbeError, match="is not the same on both sides"):
            probe(trainer, engine)
        engine.load_adapter(version, trainer.iter_adapter())
        probe(trainer, engine)
        samples = engine.generate(prompts, SAMPLING, step=version)
        assert set(samples.pylist("policy_version_min")) == {version} and find_gap(trainer, samples) < TOLERANCE


@needs_float32
@pytest.mark.parametrize("own_process", [False, True], ids=["in this process", "in its own"])
def test_an_adapter_alone_reaches_vllm(directories, prompts, own_process):
    trainer, adapter = build_adapted(directories["tied"])
    engine = build_vllm(directories["tied"], own_process=own_process, adapter=adapter)
    try:
        assert find_gap(trainer, engine.generate(prompts, SAMPLING, step=0)) < TOLERANCE
        follow_adapter(trainer, engine, prompts, 3)
        assert own_process or len(engine._llm.llm_engine.list_loras()) == 1
        with pytest.raises(WeightsError, match="is not on both sides"):
            engine.load_adapter(4, list(trainer.iter_adapter())[1:])
    finally:
        if own_process:
            engine.close()


@needs_float32
def test_prefixes_of_an_older_adapter_are_not_used(directories):
    """Prompts of several cache blocks, whose keys and values the adapter changes."""
    long = load_tokenizer(directories["tied"])("Once upon a time, there was a little cat. " * 12)["input_ids"]
    prompts = Batch.from_columns(group_id=[0, 1], prompt_tokens=[long, long[:-3]])
    trainer, adapter = build_adapted(directories["tied"])
    follow_adapter(trainer, build_vllm(directories["tied"], adapter=adapter), prompts, 2)


def pack_weights(trainer: TrainEngine, version: int, sent: Iterable[tuple[str, torch.Tensor]]) -> Weights:
    tensors = {name: CarriedTensor.of(weight.clone()) for name, weight in sent}
    return Weights(version, tensors, SyncProbe(trainer, ALONE, seed=3).score())


@pytest.mark.parametrize("form", ["merged", pytest.param("adapter", marks=needs_float32)])
def test_a_generator_holds_vllm_to_what_the_trainer_makes_of_the_probe(directories, prompts, form):
    """An adapter, sent in either form to generators that live apart; then one that comes too late."""
    trainer, _ = build_adapted(directories["tied"])
    model = ModelSettings(path=str(directories["tied"]), device="cuda" if ON_GPU else "cpu", dtype="float32")
    spec = ModelSpec(model, "fast", seed=1, threads=1, adapter=LORA if form == "adapter" else None)
    generator = GeneratorWorker(Seat("rollout"), spec, RolloutSettings(engine="vllm", vllm=SETTINGS, lora=form))
    keep(generator.rollout_engine)
    iter_sent = trainer.iter_adapter if form == "adapter" else trainer.iter_weights
    for version in (0, 1):
        weights = pack_weights(trainer, version, iter_sent())
        (tokens, _) = generator.rollout(prompts, SAMPLING, version, (16,), weights).objects
        ours = trainer.log_prob(tokens.with_column("state", [RowState.OK] * 16), 1.0)
        pairs = zip(ours, tokens.arrays("rollout_logprobs"), strict=True)
        assert max(float(np.abs(one - other).max()) for one, other in pairs) < TOLERANCE
        old = pack_weights(trainer, 2, iter_sent())
        trainer.update(tokens, SFTLoss())
    late = dataclasses.replace(old, scores=pack_weights(trainer, 2, ()).scores)
    with pytest.raises(ProbeError, match="version 2 of the weights is not the same on both sides"):
        generator.rollout(prompts, SAMPLING, 2, (16,), late)


@needs_float32
def test_an_adapter_alone_reaches_a_server(directories, prompts):
    """Whose base is another one first, and comes once."""
    trainer, adapter = build_adapted(directories["tied"])
    url = start_server(directories["moved"], RECEIVER, adapter_rank=adapter.max_rank)
    engine = connect_vllm_service(directories["tied"], VllmSettings(url=url, timeout_s=60.0), adapter)
    assert find_gap(trainer, engine.generate(prompts, SAMPLING, step=0)) > 0.1
    engine.load_weights(0, iter_base_weights(trainer.model))
    assert find_gap(trainer, engine.generate(prompts, SAMPLING, step=0)) < TOLERANCE
    follow_adapter(trainer, engine, prompts, 3)
    longest = build_probe(512, seed=3).rows[-1]
    rows = Batch.from_columns(
        tokens=[np.array(longest, np.int32)],
        loss_mask=[(np.arange(len(longest)) > 0).astype(np.uint8)],
        state=[RowState.OK],
    )
    np.testing.assert_allclose(engine.score([longest]).logprobs[0], trainer.log_prob(rows, 1.0)[0], atol=TOLERANCE)
    models = [model["id"] for model in engine._service.get("/v1/models")["data"]]
    assert len(models) == 2 and engine._loaded in models


def test_a_server_that_takes_no_adapter_says_how_to_start_it(directories):
    trainer, adapter = build_adapted(directories["tied"])
    engine = connect_vllm(directories["tied"])
    engine.adapter = adapter
    with pytest.raises(
        ConfigError, match="rollout.lora: .* --enable-lora --max-lora-rank 8, or set rollout.lora=merged"
    ):
        engine.load_adapter(1, trainer.iter_adapter())


def test_vllm_leaves_the_trainers_random_state_alone(directories):
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    build_vllm(directories["untied"])
    assert torch.equal(torch.random.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("lora", [None, "merged", "adapter"])
def test_a_run_generates_with_vllm(directories, tmp_path, lora):
    adapter = [] if lora is None else ["train.lora={rank: 4, alpha: 8}", f"rollout.lora={lora}"]
    rounded = ON_GPU and lora == "adapter"
    lines = [{"prompt": text, "answer": "a"} for text in TEXTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config(
        RLConfig,
        config_name="rl",
        overrides=[
            *(f"model.path={directories['tied']}", f"data.files=[{tmp_path / 'prompts.jsonl'}]", "rollout.engine=vllm"),
            *(
                "steps=3",
                "prompts_per_step=4",
                "sampling.samples_per_prompt=4",
                "sampling.max_new_tokens=16",
                "numerics=fast",
            ),
            *(
                "algorithm.drop_constant_groups=false",
                "train.optimizer.lr=1e-3",
                f"model.dtype={'bfloat16' if rounded else 'float32'}",
            ),
            f"rollout.vllm={{gpu_memory_utilization: {SETTINGS.gpu_memory_utilization}, enforce_eager: {SETTINGS.enforce_eager}}}",
            *adapter,
            f"run={{directory: {tmp_path}, tensorboard: false, progress: false, save_rollouts_every: 1}}",
        ],
    )
    run = Path(run_rl(config, reward_function=count_spaces)["run"])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["policy/logprob_gap_max"] for line in metrics if "policy/logprob_gap_max" in line]
    assert len(gaps) == 3 and max(gaps) < (TOLERANCES[torch.bfloat16].max if rounded else TOLERANCE)
    # float32; an adapter of rank 4 at five layers' matrices, whose inputs and outputs are 1,732 values a layer, else all weights.
    moved = {line["hybrid/bytes_moved"] for line in metrics if "hybrid/bytes_moved" in line}
    assert moved == (
        {(2 if rounded else 4) * 5 * 4 * 1732} if lora == "adapter" else {4 * count_weights(directories["tied"])}
    )
    versions = [
        Batch.from_parquet(path).pylist("policy_version_min") for path in sorted((run / "rollouts").glob("*.parquet"))
    ]
    assert [set(rows) for rows in versions] == [{0}, {1}, {2}]


def count_weights(directory: Path) -> int:
    return sum(weight.numel() for weight in load_model(directory).module.parameters())


def count_spaces(response: str, **_: object) -> float:
    """A reward that differs between samples."""
    return response.count(" ") / 10
