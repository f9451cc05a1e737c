"""Trainers of one layout take up what those of another left: checkpoints, snapshots and weights, in whole and in parts."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Place, run_ranks
from torch import Tensor

from hybridflow.algorithms import SFTLoss, keep_all
from hybridflow.batch import Batch
from hybridflow.checkpoint import CheckpointWriter, ShardEntry, open_checkpoint
from hybridflow.flow.quickstart import write_sums
from hybridflow.models import LoraSettings
from hybridflow.roles.actor_worker import ActorSpec, ActorWorker
from hybridflow.roles.carried import Snapshot, Weights, read_parts, write_snapshot
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.generator import GeneratorWorker
from hybridflow.roles.policy import ModelSettings, ModelSpec
from hybridflow.roles.shares import split_rows
from hybridflow.rollout import NativeSettings
from hybridflow.runtime.api import Seat
from hybridflow.train_engine import OptimizerSettings, ParallelConfig, TrainSettings, compute_model_work
from hybridflow.types import RowState, SamplingParams, merge_metrics
from hybridflow.weights.probe import ProbeError

MODEL = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = (9, 17, 4, 22, 6)


def spec_of(
    tokenizer: str, parallel: ParallelConfig, lora: LoraSettings | None = None, *, alone: bool = False
) -> ActorSpec:
    """alone: the adapter is sent beside the base, as `Actor` writes it into the spec."""
    model = ModelSettings(config=MODEL, tokenizer=tokenizer, device="cpu", dtype="float64")
    train = TrainSettings(
        parallel_config=parallel, lora=lora, micro_batch_tokens=30, optimizer=OptimizerSettings(lr=1e-3)
    )
    spec = ModelSpec(model, "fast", seed=3, threads=1, adapter=lora if alone else None)
    return ActorSpec(spec, train, RolloutSettings(lora="adapter" if alone else "merged"))


def build_worker(place: Place, spec: ActorSpec) -> ActorWorker:
    return ActorWorker(Seat("actor", place.rank, place.size, rendezvous=place.rendezvous, timeout_s=30.0), spec)


def train(worker: ActorWorker, steps: int) -> None:
    """Steps on the same rows, split as the facade does."""
    draws = np.random.default_rng(7)
    tokens = [draws.integers(3, 12, length).astype(np.int32) for length in LENGTHS]
    rows = Batch.from_columns(
        tokens=tokens,
        loss_mask=[(np.arange(length) >= 2).astype(np.uint8) for length in LENGTHS],
        state=np.full(len(LENGTHS), RowState.OK, np.int8),
    )
    layout = worker.train_engine.mesh.layout
    work = compute_model_work(worker.policy.model.config)
    shares = split_rows(rows, size=layout.data, updates=1, work=work)
    own, update_rows = shares[layout.coordinates(worker.ranks.rank).data]
    for _ in range(steps):
        worker.update(own if own.num_rows else None, update_rows, keep_all, SFTLoss())


def run_part(
    place: Place, spec: ActorSpec, load: Path | None, steps: int, paths: tuple[Path, ...]
) -> tuple[ShardEntry, Snapshot, Weights]:
    """A checkpoint in, some steps, a checkpoint out; what this rank's snapshot holds, and the weights that a rollout would get."""
    worker = build_worker(place, spec)
    if load is not None:
        worker.load(load)
    train(worker, steps)
    entry = worker.save(paths[place.rank])
    taken = worker.snapshot()
    weights = worker.weights(place.rank == 0)
    tensors = tensors_in(weights)
    worker.refresh()
    copied = dict(worker.rollout_engine.model.module.named_parameters())
    if tensors and worker.train_engine.settings.lora is None:
        assert copied.keys() == tensors.keys()
        assert all(torch.equal(copied[name].detach(), tensors[name]) for name in tensors)
    worker.close()
    return entry, taken, weights


def run(
    root: Path, size: int, spec: ActorSpec, load: Path | None = None, steps: int = 0
) -> tuple[Path, list[Snapshot], dict[str, Tensor]]:
    root.mkdir()
    with CheckpointWriter(root, 1) as writer:
        paths = tuple(writer.shard_path("actor", rank) for rank in range(size))
        results = run_ranks(size, run_part, spec, load, steps, paths, directory=root, timeout_s=60.0)
        return (
            writer.commit([entry for entry, _, _ in results], {}),
            [part for _, part, _ in results],
            tensors_in(results[0][2]),
        )


def tensors_in(weights: Weights) -> dict[str, Tensor]:
    return {name: carried.tensor() for name, carried in weights.tensors.items()}


def tensors_of(path: Path) -> dict[str, Tensor]:
    return open_checkpoint(path).load_tensors("actor")


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(theirs[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
        elif tolerance == 0.0:
            assert torch.equal(theirs[name], tensor), name


def refresh_without(place: Place, spec: ActorSpec) -> tuple[str, dict[str, float]]:
    """What the worker says where one sync sends nothing; before that, what a sync reports."""
    worker = build_worker(place, spec)
    worker.refresh()
    train(worker, 2)
    worker.refresh()
    told = {name: metric.value for name, metric in merge_metrics(worker._rollout_metrics).items()}
    sync = worker._sync
    assert sync is not None
    switch = sync.push(worker.version)
    sync.push = lambda version: switch  # type: ignore[method-assign]
    train(worker, 2)
    with pytest.raises(ProbeError) as caught:
        worker.refresh()
    worker.close()
    return str(caught.value), told


def refresh_ruined(place: Place, spec: ActorSpec) -> str:
    """What the worker says of weights that are not finite."""
    worker = build_worker(place, spec)
    worker.refresh()
    train(worker, 1)
    with torch.no_grad():
        next(iter(worker.train_engine.optimizer.weights.values())).master.fill_(float("nan"))
    worker.version += 1
    with pytest.raises(ProbeError) as caught:
        worker.refresh()
    worker.close()
    return str(caught.value)


def test_weights_that_nothing_can_be_generated_with_stop_the_run(tokenizer: str, tmp_path: Path) -> None:
    messages = run_ranks(
        2, refresh_ruined, spec_of(tokenizer, ParallelConfig(shard=2)), directory=tmp_path, timeout_s=60.0
    )
    for message in messages:
        assert message.startswith("version 2 of the weights cannot be generated with: prompt 0 of the probe failed (")
        assert "are not finite" in message


def probe_alone(place: Place, spec: ActorSpec) -> dict[str, float]:
    """What one rank's probe finds before a rollout that reaches no other rank, in an engine with little room."""
    small = dataclasses.replace(spec, rollout=RolloutSettings(native=NativeSettings(kv_cache_tokens=64)))
    worker = build_worker(place, small)
    train(worker, 1)
    if place.rank == 0:
        worker.before_rollout()
        scores = worker.weights().scores
        assert len(scores.rows) == len(scores.logprobs)
    told = {name: metric.value for name, metric in merge_metrics(worker._rollout_metrics).items()}
    worker.close()
    return told


@pytest.mark.parametrize("parallel", [ParallelConfig(sp=2), ParallelConfig()], ids=str)
def test_a_rank_with_the_whole_model_probes_it_by_itself(
    parallel: ParallelConfig, tokenizer: str, tmp_path: Path
) -> None:
    first, second = run_ranks(2, probe_alone, spec_of(tokenizer, parallel), directory=tmp_path, timeout_s=60.0)
    assert first["probe/max_gap"] < 1e-6 and "probe/max_gap" not in second


def send_weights(place: Place, spec: ActorSpec) -> Weights:
    """What a generator of its own is given after two steps."""
    worker = build_worker(place, spec)
    train(worker, 2)
    weights = worker.weights(place.rank == 0)
    worker.close()
    return weights


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4.0)], ids=["all weights", "adapter"])
def test_a_generator_holds_what_it_is_sent_to_its_trainer(
    lora: LoraSettings | None, tokenizer: str, tmp_path: Path
) -> None:
    spec = spec_of(tokenizer, ParallelConfig(shard=2), lora)
    weights, _ = run_ranks(2, send_weights, spec, directory=tmp_path, timeout_s=60.0)
    prompts = Batch.from_columns(group_id=[0], prompt_tokens=[[5, 6, 7]])
    sampling = SamplingParams(max_new_tokens=4)
    generator = GeneratorWorker(Seat("rollout", 0, 1), spec.model, RolloutSettings())
    generator.rollout(prompts, sampling, 0, (1,), weights)
    assert generator.rollout_engine.version == 2
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        carried = weights.tensors[name]
        spoilt = {name: dataclasses.replace(carried, data=np.zeros_like(carried.data))}
        sent = dataclasses.replace(weights, version=3, tensors={**weights.tensors, **spoilt})
        with pytest.raises(ProbeError, match="version 3 of the weights is not the same on both sides"):
            generator.rollout(prompts, sampling, 1, (1,), sent)
        generator.rollout(prompts, sampling, 1, (1,), weights)


def follow_updates(place: Place, spec: ActorSpec, updates: int) -> tuple[list[set[int]], int, list[float]]:
    """Versions in the samples after each update, how many of them were probed, and MiB in use after each."""
    worker = build_worker(place, spec)
    prompts = Batch.from_columns(group_id=[0, 1], prompt_tokens=[[5, 6, 7], [8, 9, 3, 4]])
    sampling = SamplingParams(max_new_tokens=6, samples_per_prompt=2)
    versions, memory, probed = [], [], 0
    for step in range(updates):
        worker.refresh()
        samples = worker.rollout_engine.generate(prompts, sampling, step=step)
        versions.append(set(samples.numpy("policy_version_min")) | set(samples.numpy("policy_version_max")))
        probed += sum("probe/max_gap" in told for told in worker._rollout_metrics)
        train(worker, 1)
        memory.append(read_rss() / 2**20)
    worker.close()
    return versions, probed, memory


def read_rss() -> int:
    """Bytes resident, after what Python and the allocator can give back."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.timeout(300)
def test_fifty_updates_leave_no_stale_token_and_no_memory(tokenizer: str, tmp_path: Path) -> None:
    spec = spec_of(tokenizer, ParallelConfig(shard=2))
    for versions, probed, memory in run_ranks(2, follow_updates, spec, 50, directory=tmp_path, timeout_s=240.0):
        assert versions == [{version} for version in range(50)]
        assert probed == 50
        # A copy of this model is 0.2 MiB; forty of them would be 8.
        assert memory[-1] - memory[9] < 6.0, memory


@pytest.mark.parametrize("parallel", [ParallelConfig(shard=2), ParallelConfig(tp=2)], ids=str)
def test_a_copy_that_stays_behind_stops_the_run(parallel: ParallelConfig, tokenizer: str, tmp_path: Path) -> None:
    spec = spec_of(tokenizer, parallel)
    for message, told in run_ranks(2, refresh_without, spec, directory=tmp_path, timeout_s=60.0):
        assert message.startswith("version 4 of the weights is not the same on both sides: over ")
        assert told["probe/max_gap"] < 1e-9 and told["hybrid/switch_ms"] > 0
        # Each rank gets the half that it has not: float64.
        assert told["hybrid/bytes_moved"] > 8 * 1000


@pytest.mark.parametrize("alone", [False, True], ids=["merged", "adapter"])
def test_an_adapter_that_never_came_stops_the_run_in_either_form(alone: bool, tokenizer: str, tmp_path: Path) -> None:
    spec = spec_of(tokenizer, ParallelConfig(shard=2), LoraSettings(rank=2, alpha=4.0), alone=alone)
    for message, told in run_ranks(2, refresh_without, spec, directory=tmp_path, timeout_s=60.0):
        assert message.startswith("version 4 of the weights is not the same on both sides: over ")
        assert told["probe/max_gap"] < 1e-6
        # The half that a rank has not, in float64: of two layers' seven pairs of rank 2, 464 values a layer and rank, or of all weights.
        moved = told["hybrid/bytes_moved"]
        assert moved == 8 * 2 * 2 * 464 / 2 if alone else moved > 8 * 15_000 / 2


def test_a_generator_takes_an_adapter_beside_its_base(tokenizer: str, tmp_path: Path) -> None:
    lora = LoraSettings(rank=2, alpha=4.0)
    sent = {}
    for alone in (False, True):
        spec = spec_of(tokenizer, ParallelConfig(shard=2), lora, alone=alone)
        sent[alone], _ = run_ranks(2, send_weights, spec, directory=tmp_path, timeout_s=60.0)
    assert all(".lora_" in name for name in sent[True].tensors) and len(sent[True].tensors) == 2 * 2 * 7
    sizes = {alone: sum(tensor.data.nbytes for tensor in weights.tensors.values()) for alone, weights in sent.items()}
    assert sizes[True] < sizes[False] / 4
    prompts = Batch.from_columns(group_id=[0], prompt_tokens=[[5, 6, 7]])
    rows = {}
    for alone, weights in sent.items():
        spec = spec_of(tokenizer, ParallelConfig(shard=2), lora, alone=alone)
        generator = GeneratorWorker(Seat("rollout", 0, 1), spec.model, spec.rollout)
        made = generator.rollout(prompts, SamplingParams(max_new_tokens=16), 0, (1,), weights)
        rows[alone] = made.objects[0].arrays("rollout_logprobs")[0]
        nothing = {
            name: dataclasses.replace(carried, data=np.zeros_like(carried.data))
            for name, carried in weights.tensors.items()
            if ".lora_B." in name
        }
        if alone:
            # As where an adapter never came: B is what it was at the start.
            lost = dataclasses.replace(weights, version=3, tensors={**weights.tensors, **nothing})
            with pytest.raises(ProbeError, match="version 3 of the weights is not the same on both sides"):
                generator.rollout(prompts, SamplingParams(max_new_tokens=4), 1, (1,), lost)
    # float64, so the two forms differ by the order of sums alone.
    np.testing.assert_allclose(rows[True], rows[False], atol=1e-6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("sums")
    write_sums(directory, seed=0)
    return str(directory / "tokenizer")


@pytest.fixture(scope="module")
def four(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Snapshot], dict[str, Tensor]]:
    """What four ranks left after two steps, each with half of the storage of half of the matrices."""
    root = tmp_path_factory.mktemp("four") / "run"
    return run(root, 4, spec_of(tokenizer, ParallelConfig(tp=2, shard=2)), steps=2)


def test_a_checkpoint_of_four_ranks_is_read_by_one_by_two_and_back(
    four: tuple[Path, list[Snapshot], dict[str, Tensor]], tokenizer: str, tmp_path: Path
) -> None:
    path, _, _ = four
    files = open_checkpoint(path).manifest.files
    assert sum(name.endswith(".safetensors") for name in files) == 4
    saved = tensors_of(path)
    assert saved["model/model.embed_tokens.weight"].dtype == torch.float64
    one, _, _ = run(tmp_path / "one", 1, spec_of(tokenizer, ParallelConfig()), load=path)
    assert_equal(saved, tensors_of(one))
    two, _, _ = run(tmp_path / "two", 2, spec_of(tokenizer, ParallelConfig(shard=2)), load=one)
    assert_equal(saved, tensors_of(two))
    back, _, _ = run(tmp_path / "back", 4, spec_of(tokenizer, ParallelConfig(shard=0)), load=two)
    assert_equal(saved, tensors_of(back))


def test_every_layout_goes_on_as_one_process_does(
    four: tuple[Path, list[Snapshot], dict[str, Tensor]], tokenizer: str, tmp_path: Path
) -> None:
    alone, _, _ = run(tmp_path / "alone", 1, spec_of(tokenizer, ParallelConfig()), steps=3)
    path, _, gathered = four
    assert set(gathered) == {name.removeprefix("model/") for name in tensors_of(path) if name.startswith("model/")}
    for name, weight in gathered.items():
        assert torch.equal(weight, tensors_of(path)[f"model/{name}"]), name
    for size, parallel in ((2, ParallelConfig(tp=2)), (2, ParallelConfig(sp=2, shard=2))):
        root = tmp_path / f"tp{parallel.tp}"
        resumed, _, _ = run(root, size, spec_of(tokenizer, parallel), load=path, steps=1)
        assert_equal(tensors_of(alone), tensors_of(resumed), tolerance=1e-10)


def test_the_parts_of_a_snapshot_are_the_checkpoint(
    four: tuple[Path, list[Snapshot], dict[str, Tensor]], tmp_path: Path
) -> None:
    path, parts, _ = four
    with CheckpointWriter(tmp_path / "rescued", 1) as writer:
        entries = [write_snapshot(part, writer.shard_path("actor", part.rank)) for part in parts]
        rescued = writer.commit(entries, {})
    assert_equal(tensors_of(path), tensors_of(rescued))
    assert (rescued / "actor" / "huggingface" / "config.json").is_file()
    boxes = parts[3].boxes
    ours = read_parts(parts[::-1], boxes)
    assert all(torch.equal(ours[name], carried.tensor()) for name, carried in parts[3].tensors.items())


def test_an_adapter_is_saved_alone_and_merged_for_others(tokenizer: str, tmp_path: Path) -> None:
    lora = LoraSettings(rank=2)
    path, _, merged = run(tmp_path / "lora", 2, spec_of(tokenizer, ParallelConfig(shard=2), lora), steps=2)
    names = [name for name in tensors_of(path) if name.startswith("model/")]
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert "actor/huggingface/adapter_config.json" in open_checkpoint(path).manifest.files
    again, _, alone = run(tmp_path / "alone", 1, spec_of(tokenizer, ParallelConfig(), lora), load=path)
    assert_equal(tensors_of(path), tensors_of(again))
    assert_equal(merged, alone, tolerance=1e-12)
    _, _, plain = run(tmp_path / "base", 1, spec_of(tokenizer, ParallelConfig()))
    moved = [name for name in plain if not torch.equal(plain[name], merged[name])]
    assert moved and all("_proj" in name for name in moved)
