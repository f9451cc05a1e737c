"""The quickstart, cut short: it runs, says what it promises, and writes the same numbers in one process and on Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.flow.quickstart import QuickstartConfig, run_quickstart, write_sums
from hybridflow.runtime.api import RuntimeSettings


def numbers_of(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(("time/", "memory/", "speed/", "controller/", "recovery/", "hybrid/", "probe/"))
        }
        for line in lines
    ]


@pytest.mark.timeout(400)
def test_one_process_and_ray_write_the_same_numbers(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {}
    for kind in ("local", "ray"):
        config = QuickstartConfig(
            seed=3, directory=str(tmp_path), name=kind, numerics="exact", sft_steps=3, rl_steps=2, runtime=RuntimeSettings(kind=kind)
        )  # fmt: skip
        results[kind] = run_quickstart(config)
        assert set(results[kind]) == {"sft_accuracy", "rl_accuracy", "seconds", "run"}
        told, report = capsys.readouterr().err, Path(results[kind]["run"]) / "report.html"
        assert "after step 2\n" in told and "the goal of 95% was not reached" in told
        assert f"samples: {report}\n" in told and report.exists()
    assert results["local"]["sft_accuracy"] == results["ray"]["sft_accuracy"]
    for suffix in ("-sft", ""):
        local, ray = (tmp_path / "quickstart" / f"{kind}{suffix}" for kind in ("local", "ray"))
        assert numbers_of(local) == numbers_of(ray)
        ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (local, ray))
        assert sum(weight.numel() for weight in ours.values()) <= 3_000_000
        assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_the_sums_are_right_and_held_apart(tmp_path: Path) -> None:
    files = write_sums(tmp_path, seed=5)
    rows = {part: [json.loads(line) for line in Path(file).read_text().splitlines()] for part, file in files.items()}
    for part in rows.values():
        for row in part:
            left, right = row["prompt"].removesuffix("=").split("+")
            assert int(row["answer"][::-1]) == int(left) + int(right)
    prompts = [row["prompt"] for part in rows.values() for row in part]
    assert len(set(prompts)) == len(prompts) == 8100
