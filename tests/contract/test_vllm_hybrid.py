"""A trainer and vLLM: after every update vLLM's log-probabilities are the trainer's, and where a part stays old, they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_stories import MISSING, STORIES, write_stories

from hybridflow.algorithms import SFTLoss
from hybridflow.batch import Batch
from hybridflow.config import load_config
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig
from hybridflow.models import load_model, load_tokenizer
from hybridflow.rollout.vllm import VllmEngine, build_vllm_engine
from hybridflow.train_engine import OptimizerSettings, TrainEngine, TrainSettings
from hybridflow.types import RowState, SamplingParams
from hybridflow.weights.probe import TOLERANCES, ProbeError, build_probe, check_probe, compare

vllm = pytest.importorskip("vllm", reason="vllm is not installed; make test-vllm has an environment with it")
pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason=MISSING)

TEXTS = ("Once upon a time", "Lily and Tom went to the park. They saw a", "The dog", "Tom had a red ball")
SAMPLING = SamplingParams(max_new_tokens=24, samples_per_prompt=4, seed=7)
TOLERANCE = 1e-4
_kept: list[VllmEngine] = []


def keep(engine: VllmEngine) -> VllmEngine:
    # The end of one takes along the process groups that all of a process share.
    _kept.append(engine)
    return engine


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"tied": write_stories(root / "tied"), "untied": write_stories(root / "untied", tied=False)}


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


def probe(trainer: TrainEngine, engine: VllmEngine) -> None:
    """What a run does after a sync: raises ProbeError where the two sides differ by more than rounding."""
    prompts = build_probe(engine.model.vocab_size, seed=3)
    samples = engine.generate(prompts.batch, prompts.sampling, step=0)
    ours, theirs = trainer.log_prob(samples, 1.0), samples.arrays("rollout_logprobs")
    check_probe(compare(ours, theirs, TOLERANCES[torch.float32]), engine.version)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_ten_updates_reach_vllm_whole(directories, prompts, kind):
    engine, trainer = keep(build_vllm_engine(directories[kind])), build_trainer(directories[kind])
    first = engine.generate(prompts, SAMPLING, step=0)
    assert find_gap(trainer, first) < TOLERANCE
    for gap in iter_gaps(trainer, engine, prompts, 10):
        assert gap < TOLERANCE
        probe(trainer, engine)
    assert find_gap(trainer, first) > 0.1


def test_a_head_that_stays_on_its_first_weights_is_seen_at_once(directories, prompts, stale_heads):
    engine, trainer = keep(build_vllm_engine(directories["tied"])), build_trainer(directories["tied"])
    assert find_gap(trainer, engine.generate(prompts, SAMPLING, step=0)) < TOLERANCE
    for gap in iter_gaps(trainer, engine, prompts, 2):
        assert gap > 10 * TOLERANCE
        with pytest.raises(ProbeError, match="is not the same on both sides"):
            probe(trainer, engine)


def test_prefixes_that_are_kept_over_an_update_are_seen(directories, monkeypatch):
    long = load_tokenizer(directories["tied"])("Once upon a time, there was a little cat. " * 12)["input_ids"]
    prompts = Batch.from_columns(group_id=[0, 1], prompt_tokens=[long, long[:-3]])
    engine, trainer = keep(build_vllm_engine(directories["tied"])), build_trainer(directories["tied"])
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
    engine = build_vllm_engine(directories["tied"], own_process=True, has_weights=False)
    trainer = build_trainer(directories["tied"])
    try:
        assert find_gap(trainer, engine.generate(prompts, SAMPLING, step=0)) > 1.0
        assert max(iter_gaps(trainer, engine, prompts, 2)) < TOLERANCE
    finally:
        engine.close()


def test_vllm_leaves_the_trainers_random_state_alone(directories):
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    keep(build_vllm_engine(directories["untied"]))
    assert torch.equal(torch.random.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])


def test_a_run_generates_with_vllm(directories, tmp_path):
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
            *("algorithm.drop_constant_groups=false", "train.optimizer.lr=1e-3", "model.device=cpu"),
            f"run={{directory: {tmp_path}, tensorboard: false, progress: false, save_rollouts_every: 1}}",
        ],
    )
    run = Path(run_rl(config, reward_function=count_spaces)["run"])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["policy/logprob_gap_max"] for line in metrics if "policy/logprob_gap_max" in line]
    assert len(gaps) == 3 and max(gaps) < TOLERANCE
    versions = [Batch.from_parquet(path).pylist("policy_version_min") for path in sorted(run.rglob("*.parquet"))]
    assert [set(rows) for rows in versions] == [{0}, {1}, {2}]


def count_spaces(response: str, **_: object) -> float:
    """A reward that differs between samples."""
    return response.count(" ") / 10
