"""Random workers of a run are killed at random moments: what is lost, and how long it takes until the work is done again.

    python benchmarks/chaos.py --steps 60 --kills 20 --output chaos.json

Runs a tiny model twice on this machine in exact mode, with two trainers and two generators: once undisturbed, once with SIGKILLs. Prints
the report as JSON; exits with 1 where the two runs differ in a weight, a metric or a row.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from cases import build_parser

# The tests' tiny run and their killer: what CI does with 3 kills is done here with many.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

from faults import Kill, Killer
from tiny_runs import metrics_of, read_lines, rl_config, rollouts_of, train_start, weights_of, write_task

from hybridflow.batch import Batch
from hybridflow.flow.commands import run_rl
from hybridflow.flow.rl_job import RLConfig

PLACEMENT = '{actor: "cpu:0-1", rollout: "cpu:2-3"}'


def main() -> None:
    """Runs, compares and prints."""
    arguments = _parse()
    with tempfile.TemporaryDirectory() as directory:
        report = measure(Path(directory), arguments.steps, arguments.kills, arguments.seed)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output is not None:
        Path(arguments.output).write_text(text + "\n")
    sys.exit(0 if is_equal(report) else 1)


def _parse() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20, help="at most steps - 3")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of steps, moments and workers")
    parser.add_argument("--output", help="file for the report")
    return parser.parse_args()


def measure(directory: Path, steps: int, kills: int, seed: int) -> dict[str, Any]:
    """The report of one undisturbed and one disturbed run."""
    task = write_task(directory / "sums")
    start = train_start(task, directory / "start")
    seconds = {}
    runs = {name: directory / name / "quickstart" / "run" for name in ("undisturbed", "killed")}
    killer = Killer(runs["killed"], plan_steps(steps, kills), seed)
    for name in runs:
        config = build_config(task, start, directory / name, steps, kills)
        started_s = time.perf_counter()
        if name == "killed":
            with killer:
                run_rl(config)
        else:
            run_rl(config)
        seconds[name] = round(time.perf_counter() - started_s, 1)
    return {
        "steps": steps,
        "seed": seed,
        "seconds": seconds,
        **compare(runs["undisturbed"], runs["killed"]),
        **describe_deaths(killer.kills, read_lines(runs["killed"] / "recovery.jsonl")),
        "restore_s": spread(iter_restores(runs["killed"])),
    }


def build_config(task: dict[str, str], start: str, root: Path, steps: int, kills: int) -> RLConfig:
    """The tests' run, with as many restarts as there are kills."""
    return rl_config(
        task, root, start, f"steps={steps}", "evaluation.every_steps=20", "runtime.kind=ray", "runtime.num_cpus=4",
        "rollout.chunks=3", f"runtime.placement.device_map={PLACEMENT}",
        f"runtime.recovery={{max_restarts: {2 * kills}, max_attempts: 10}}",
    )  # fmt: skip


def plan_steps(steps: int, kills: int) -> list[int]:
    """The steps in which a worker is killed: spread evenly, from the third to the last but one."""
    if not 1 <= kills <= steps - 3:
        raise SystemExit(
            f"--kills: {kills} kills do not fit into {steps} steps, one a step from step 3; give 1 to {steps - 3}"
        )
    return [3 + index * (steps - 3) // kills for index in range(kills)]


def compare(undisturbed: Path, killed: Path) -> dict[str, Any]:
    """Rows lost and doubled, and whether anything at all differs."""
    ours, theirs = rollouts_of(undisturbed), rollouts_of(killed)
    wanted, found = (
        Counter(key for step, batch in enumerate(batches) for key in iter_keys(step, batch))
        for batches in (ours, theirs)
    )
    weights, others = weights_of(undisturbed), weights_of(killed)
    return {
        "rows": wanted.total(),
        "rows_lost": (wanted - found).total(),
        "rows_doubled": sum(count - 1 for count in found.values()),
        "rows_equal": len(ours) == len(theirs) and all(a.equals(b) for a, b in zip(ours, theirs, strict=True)),
        "metrics_equal": metrics_of(undisturbed) == metrics_of(killed),
        "weights_bit_equal": weights.keys() == others.keys()
        and all(torch.equal(weights[n], others[n]) for n in weights),
    }


def iter_keys(step: int, batch: Batch) -> Iterable[tuple[int, int, int]]:
    """What makes a row one of its own: step, group and sample."""
    return zip([step] * batch.num_rows, batch.pylist("group_id"), batch.pylist("sample_id"), strict=True)


def describe_deaths(kills: list[Kill], recoveries: list[dict[str, Any]]) -> dict[str, Any]:
    """Who was killed when, and the seconds from death to detection, from there to the restart and to the repeated work."""
    deaths = [describe_death(kill, recovery) for kill, recovery in pair_up(kills, recoveries)]
    return {
        "kills": len(kills),
        "recoveries": len(recoveries),
        "kills_by_role": dict(Counter(death["role"] for death in deaths)),
        "kills_by_phase": dict(Counter(death["phase"] for death in deaths)),
        "death_to_detection_s": spread(death["death_to_detection_s"] for death in deaths),
        "detection_to_restart_s": spread(death["detection_to_restart_s"] for death in deaths),
        "detection_to_repeat_s": spread(death["detection_to_repeat_s"] for death in deaths),
        "deaths": deaths,
    }


def pair_up(kills: list[Kill], recoveries: list[dict[str, Any]]) -> list[tuple[Kill, dict[str, Any]]]:
    """Each kill with its recovery, by process id."""
    by_pid = {found[1]: recovery for recovery in recoveries if (found := re.search(r"pid (\d+)", recovery["worker"]))}
    return [(kill, by_pid[str(kill.pid)]) for kill in kills if str(kill.pid) in by_pid]


def describe_death(kill: Kill, recovery: dict[str, Any]) -> dict[str, Any]:
    """One row of the report."""
    worker, phase = re.match(r"[\w\[\]]+", recovery["worker"]), re.search(r"phase '(\w+)'", recovery["call"])
    name = worker[0] if worker else recovery["worker"]
    detected_s = recovery["detected_s"]
    return {
        "worker": name,
        "role": name.split("[")[0],
        "step": kill.step,
        "phase": phase[1] if phase else "idle",
        "call": recovery["call"],
        "cause": recovery["cause"],
        "death_to_detection_s": round(detected_s - kill.time_s, 3),
        "detection_to_restart_s": since(detected_s, recovery["restarted_s"]),
        "detection_to_repeat_s": since(detected_s, recovery["repeated_s"]),
    }


def since(begun_s: float, ended_s: float | None) -> float | None:
    """Seconds between, or None for what never came."""
    return None if ended_s is None else round(ended_s - begun_s, 3)


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median and maximum of those that are there."""
    known = [value for value in values if value is not None]
    return {"median": round(statistics.median(known), 4), "max": max(known)} if known else None


def iter_restores(run: Path) -> Iterable[float]:
    """Seconds of each trainer's way back to a snapshot, once its process was there."""
    for line in read_lines(run / "phases.jsonl"):
        yield from (round(span["duration_s"], 4) for span in line["spans"] if span["verb"] == "restore")


def is_equal(report: dict[str, Any]) -> bool:
    """Whether nothing was lost, doubled or changed."""
    return (
        report["rows_lost"] == report["rows_doubled"] == 0
        and report["rows_equal"]
        and report["metrics_equal"]
        and report["weights_bit_equal"]
    )


if __name__ == "__main__":
    main()
