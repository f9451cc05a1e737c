"""Whole runs on Ray in exact mode: more workers, another order, deaths and lost nodes change no number."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import FaultyVerb, Killer, delayed, run_on_two_nodes
from tiny_runs import (
    assert_same_rollouts,
    assert_same_run,
    metrics_of,
    read_lines,
    rl_config,
    rollouts_of,
    weights_of,
)

from hybridflow.batch import Batch
from hybridflow.flow.commands import ExportConfig, run_export, run_rl
from hybridflow.flow.rl_job import RLConfig
from hybridflow.roles.generator import GeneratorWorker

STEPS = 8
TOLERANCE = 1e-6
BY_WORKERS = {"train/micro_batches"}
"""Metrics that say how the work was split."""
RAY = ("runtime.kind=ray", "rollout.chunks=3", "runtime.call_timeout_s=120")
PLACEMENTS = {
    "colocated": 'runtime.placement.device_map={actor: "cpu:0-1"}',
    "split": 'runtime.placement.device_map={actor: "cpu:0-1", rollout: "cpu:2-3"}',
}

pytestmark = pytest.mark.timeout(400)


def config_of(task: dict[str, str], start: str, root: Path, *overrides: str) -> RLConfig:
    return rl_config(task, root, start, f"steps={STEPS}", "evaluation.every_steps=4", *overrides)


@pytest.fixture(scope="module")
def local(task: dict[str, str], start: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run in one process."""
    return str(run_rl(config_of(task, start, tmp_path_factory.mktemp("local")))["run"])


@pytest.fixture(scope="module")
def split(task: dict[str, str], start: str, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> str:
    """The run of two trainers and two generators, undisturbed."""
    root = tmp_path_factory.mktemp("split")
    return str(run_rl(config_of(task, start, root, *RAY, PLACEMENTS["split"]))["run"])


@pytest.fixture(scope="module")
def colocated(task: dict[str, str], start: str, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> str:
    """The run of two trainers that generate themselves."""
    root = tmp_path_factory.mktemp("colocated")
    return str(run_rl(config_of(task, start, root, *RAY, PLACEMENTS["colocated"]))["run"])


# Two trainers and two generators


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_more_workers_write_the_numbers_of_one_process(
    placement: str, local: str, request: pytest.FixtureRequest
) -> None:
    run: str = request.getfixturevalue(placement)
    ours, theirs = metrics_of(local), metrics_of(run)
    assert [line["step"] for line in theirs] == list(range(1, STEPS + 1))
    for line, other in zip(ours, theirs, strict=True):
        assert line.keys() == other.keys()
        for name in sorted(line.keys() - BY_WORKERS):
            assert other[name] == pytest.approx(line[name], rel=0, abs=TOLERANCE), (line["step"], name)
    for name, weight in weights_of(local).items():
        np.testing.assert_allclose(weights_of(run)[name].numpy(), weight.numpy(), rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_more_workers_sample_the_rows_of_one_process(
    placement: str, local: str, request: pytest.FixtureRequest
) -> None:
    ours, theirs = rollouts_of(local), rollouts_of(request.getfixturevalue(placement))
    assert len(ours) == len(theirs) == STEPS
    for step, (batch, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert sorted(batch.column_names) == sorted(other.column_names)
        for name in batch.column_names:
            assert_same_column(batch, other, name, tolerance=0.0 if step == 1 else TOLERANCE)


def assert_same_column(batch: Batch, other: Batch, name: str, tolerance: float) -> None:
    """The same values in the same order; numbers with a fraction within the tolerance."""
    if "float" not in str(batch.schema.field(name).type) and "double" not in str(batch.schema.field(name).type):
        assert batch.pylist(name) == other.pylist(name), name
        return
    pairs = zip(batch.pylist(name), other.pylist(name), strict=True)
    for row, (ours, theirs) in enumerate(pairs):
        np.testing.assert_allclose(
            np.asarray(theirs, float), np.asarray(ours, float), rtol=0, atol=tolerance, err_msg=f"{name}, row {row}"
        )


def test_the_two_trainers_share_the_work(split: str) -> None:
    updates = [span for span in iter_spans(split) if span["phase"] == "update" and span["role"] == "actor"]
    assert {span["rank"] for span in updates} == {0, 1}
    rollouts = [span for span in iter_spans(split) if span["phase"] == "rollout" and span["role"] == "rollout"]
    assert {span["rank"] for span in rollouts} == {0, 1}


def test_the_trace_says_what_each_switch_moved(local: str, split: str) -> None:
    own = [span["notes"] for span in iter_spans(local) if span["verb"] == "update"]
    assert [notes["hybrid/bytes_moved"] for notes in own] == [0] * STEPS
    told = [line["hybrid/bytes_moved"] for line in read_lines(Path(split) / "metrics.jsonl")]
    straight = 0
    for step in range(1, STEPS + 1):
        spans = [span for span in iter_spans(split) if span["step"] == step]
        sent, taken = (notes_of(spans, verb) for verb in ("push_weights", "pull_weights"))
        if len([span for span in spans if span["verb"] == "expect_weights"]) < 2:
            # A generator that has not started yet cannot be met: this version goes through the object store.
            assert not any(sent + taken)
            continue
        straight += 1
        assert len(sent) == len(taken) == 2
        moved = sum(notes["hybrid/bytes_moved"] for notes in sent)
        assert moved == sum(notes["hybrid/bytes_moved"] for notes in taken) > 0
        assert all(notes["hybrid/memory_before_bytes"] > 0 for notes in taken)
        # Metrics tell a switch with the update after it, so that the last one stands in the trace alone.
        assert step == STEPS or told[step] == moved
    assert straight and told[0] == 0


def notes_of(spans: list[dict[str, Any]], verb: str) -> list[dict[str, float]]:
    """What the spans of a verb tell beside their seconds, nothing where they have no notes."""
    return [span.get("notes", {}) for span in spans if span["verb"] == verb]


def iter_spans(run: str) -> list[dict[str, Any]]:
    """The spans of all steps, in the order of submission within each phase."""
    lines = read_lines(Path(run) / "phases.jsonl")
    return [{**span, "phase": line["phase"], "step": line["step"]} for line in lines for span in line["spans"]]


# Two trainers that share one model

TOGETHER = 12
SHARED = (
    f"steps={TOGETHER}",
    "numerics=fast",
    "model.dtype=float64",
    "algorithm.old_logprobs=trainer_logprobs",
    'runtime.placement.device_map={actor: "cpu:0-1"}',
)
LAYOUTS = {"{shard: 2}": 4, "{tensor_parallel_size: 2}": 8, "{sp: 2}": TOGETHER}
"""By layout the step that it goes to: sharded, split, by tokens."""


@pytest.fixture(scope="module")
def alone(task: dict[str, str], start: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same run in one process."""
    return str(run_rl(config_of(task, start, tmp_path_factory.mktemp("alone"), *SHARED))["run"])


def test_trainers_that_share_a_model_write_the_numbers_of_one_process_and_resume_in_another_layout(
    task: dict[str, str], start: str, alone: str, tmp_path: Path, ray_cluster: None
) -> None:
    """All but the last lose a worker on the way; trainers then go back to a snapshot in parts."""
    run = tmp_path / "quickstart" / "run"
    for number, (layout, steps) in enumerate(LAYOUTS.items(), start=1):
        overrides = (*RAY, *SHARED, f"train.parallel_config={layout}", f"steps={steps}")
        with Killer(run, steps=() if steps == TOGETHER else (steps - 1,), seed=0) as killer:
            run_rl(config_of(task, start, tmp_path, *overrides))
        assert len(killer.kills) == (steps != TOGETHER)
        assert len(read_lines(run / "recovery.jsonl")) == min(number, len(LAYOUTS) - 1)
    ours, theirs = metrics_of(alone), metrics_of(run)
    assert [line["step"] for line in theirs] == list(range(1, TOGETHER + 1))
    for line, other in zip(ours, theirs, strict=True):
        assert line.keys() == other.keys()
        for name in sorted(line.keys() - BY_WORKERS):
            assert other[name] == pytest.approx(line[name], rel=0, abs=TOLERANCE), (line["step"], name)
    for batch, other in zip(rollouts_of(alone), rollouts_of(run), strict=True):
        assert batch.pylist("tokens") == other.pylist("tokens")
    assert weights_of(alone).keys() == weights_of(run).keys()
    for name, weight in weights_of(alone).items():
        assert not torch.equal(weight, weights_of(start)[name].double())
        np.testing.assert_allclose(weights_of(run)[name].numpy(), weight.numpy(), rtol=0, atol=1e-6, err_msg=name)


def test_an_adapter_on_sharded_trainers_with_generators_apart_is_that_of_one_process(
    task: dict[str, str], start: str, tmp_path: Path, ray_cluster: None
) -> None:
    """Generators get merged weights from the parts, the reference is the trainers without the adapter, the export is the adapter alone."""
    lora = ("steps=3", "numerics=fast", "model.dtype=float64", "train.lora={rank: 2, alpha: 8}")
    ours = str(run_rl(config_of(task, start, tmp_path / "local", *lora))["run"])
    sharded = (*RAY, PLACEMENTS["split"], "train.parallel_config={shard: 0}")
    theirs = str(run_rl(config_of(task, start, tmp_path / "ray", *lora, *sharded))["run"])
    for line, other in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        assert line.keys() == other.keys()
        for name in sorted(line.keys() - BY_WORKERS):
            assert other[name] == pytest.approx(line[name], rel=0, abs=TOLERANCE), (line["step"], name)
    assert metrics_of(theirs)[0]["policy/kl_to_reference"] == pytest.approx(0.0, abs=1e-9)
    assert metrics_of(theirs)[-1]["policy/kl_to_reference"] > 1e-9
    weights, before = weights_of(theirs), weights_of(start)
    assert weights.keys() == before.keys()
    for name, weight in weights_of(ours).items():
        np.testing.assert_allclose(weights[name].numpy(), weight.numpy(), rtol=0, atol=1e-6, err_msg=name)
        assert torch.equal(weight, before[name].double()) == ("_proj" not in name), name
    run_export(ExportConfig(checkpoint=theirs, output=str(tmp_path / "adapter")))
    assert_adapter_makes(tmp_path / "adapter", start, weights)


def assert_adapter_makes(adapter: Path, start: str, weights: dict[str, torch.Tensor]) -> None:
    """PEFT loads the directory over the model that training began with, and merged it has these weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(Path(start) / "model", dtype=torch.float64)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    for name, weight in merged.named_parameters():
        np.testing.assert_allclose(weight.detach().numpy(), weights[name].numpy(), rtol=0, atol=1e-9, err_msg=name)


# TRAPS 24


def test_the_order_of_completion_changes_nothing(
    task: dict[str, str], start: str, split: str, tmp_path: Path, ray_cluster: None
) -> None:
    config = config_of(task, start, tmp_path, *RAY, PLACEMENTS["split"])
    with FaultyVerb(GeneratorWorker, "rollout", delayed(max_s=0.3)):
        run = run_rl(config)["run"]
    ends_s = [
        float(str(span["start_s"])) + float(str(span["duration_s"]))
        for span in iter_spans(run)
        if span["phase"] == "rollout" and span["verb"] == "rollout"
    ]
    assert any(later < earlier for earlier, later in pairwise(ends_s)), "some calls did overtake others"
    assert_same_rollouts(split, run)
    assert_same_run(split, run)


def test_members_of_a_group_are_samples_of_their_own(split: str) -> None:
    groups: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for step, batch in enumerate(rollouts_of(split)):
        for group, tokens in zip(batch.pylist("group_id"), batch.pylist("tokens"), strict=True):
            groups.setdefault((step, group), []).append(tuple(tokens))
    assert len(groups) == 6 * STEPS
    assert {len(members) for members in groups.values()} == {4}
    distinct = [len(set(members)) for members in groups.values()]
    assert sum(distinct) / len(distinct) > 3, "replicas that draw alike give a group the same sample again and again"


# Deaths


def test_random_kills_change_no_number(
    task: dict[str, str], start: str, split: str, tmp_path: Path, ray_cluster: None
) -> None:
    config = config_of(
        task, start, tmp_path, *RAY, PLACEMENTS["split"], "runtime.recovery={max_restarts: 20, max_attempts: 5}"
    )
    run = tmp_path / "quickstart" / "run"
    with Killer(run, steps=(3, 5, 7), seed=int.from_bytes(os.urandom(4))) as killer:
        run_rl(config)
    assert len(killer.kills) == 3
    assert_same_rollouts(split, run)
    assert_same_run(split, run)
    # A line is written when the work is done again, which may be after that of a later death.
    recoveries = sorted(read_lines(run / "recovery.jsonl"), key=lambda line: line["detected_s"])
    assert len(recoveries) == 3, (killer.kills, recoveries)
    for kill, recovery in zip(killer.kills, recoveries, strict=True):
        assert 0 <= recovery["detected_s"] - kill.time_s < 5, (kill, recovery)
        assert recovery["worker"].split("[")[0].split(" ")[0] in ("actor", "rollout", "reference", "reward")


@pytest.mark.parametrize("verb", ["rollout", "update"])
def test_a_node_lost_at_work_changes_no_number(
    verb: str, task: dict[str, str], start: str, split: str, tmp_path: Path
) -> None:
    config = config_of(
        task, start, tmp_path, *RAY, PLACEMENTS["split"].replace("cpu:2-3", "cpu:4-5"),
        "runtime.recovery={wait_for_node_s: 1.0}",
    )  # fmt: skip
    done = run_on_two_nodes(config, verb, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "removed").exists()
    run = tmp_path / "quickstart" / "run"
    assert_same_rollouts(split, run)
    assert_same_run(split, run)
    recoveries = read_lines(run / "recovery.jsonl")
    role = "rollout" if verb == "rollout" else "actor"
    assert any(recovery["worker"].startswith(role) for recovery in recoveries), recoveries


def test_the_rows_are_counted_once(split: str) -> None:
    """What the comparisons with `split` rest on: its own rows are each there once."""
    for batch in rollouts_of(split):
        keys = list(zip(batch.pylist("group_id"), batch.pylist("sample_id"), strict=True))
        assert len(keys) == len(set(keys)) == 6 * 4
    assert all(math.isfinite(line["policy/kl_to_reference"]) for line in metrics_of(split))
