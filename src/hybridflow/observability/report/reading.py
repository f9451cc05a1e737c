"""Reads a run's directory, in whatever state its run left it: what is missing or damaged is told, and the rest is read."""

from __future__ import annotations

import fcntl
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

State = Literal["finished", "failed", "interrupted", "running", "vanished", "unknown"]

MAX_LISTED = 50
"""Deaths and starts that are kept one by one."""


@dataclass(frozen=True)
class Series:
    """One metric. steps: [N] int64, rising. values: [N] float64, NaN where the run wrote that it was not finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """How the run stands. error: what ended it, where the run itself could still say so."""

    state: State
    error: str = ""


@dataclass
class RunRecord:
    """What a directory holds of a run.

    num_steps: of its metrics. planned_steps: of its configuration, None where that is not known.
    phases:    seconds and steps of each, over the run.
    notes:     what is missing or cannot be read, a sentence each.
    """

    path: Path
    outcome: Outcome = field(default_factory=lambda: Outcome("unknown"))
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    phases: dict[str, tuple[float, int]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    num_recoveries: int = 0
    first_step: int = 0
    last_step: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> Literal["rl", "sft", "run"]:
        """Of which command it is, by its configuration, else by its metrics; `run` where neither tells."""
        if "algorithm" in self.config or "prompts_per_step" in self.config or "reward/mean" in self.metrics:
            return "rl"
        return "sft" if "rows_per_step" in self.config or "sft/loss" in self.metrics else "run"

    @property
    def planned_steps(self) -> int | None:
        """See the class."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None


def read_run(path: Path) -> RunRecord:
    """Everything but the samples, which `rollouts` and `spreads` read when they show them."""
    record = RunRecord(path)
    record.config_text = _read_text(record, "config.yaml")
    record.config = _parse_config(record)
    record.environment = _parse_environment(record)
    _read_metrics(record)
    _read_phases(record)
    record.history = list(_iter_lines(record, "history.jsonl", told=True))
    deaths = list(_iter_lines(record, "recovery.jsonl", told=False))
    record.num_recoveries, record.recoveries = len(deaths), deaths[:MAX_LISTED]
    record.outcome = _find_outcome(record)
    return record


def _read_text(record: RunRecord, name: str) -> str:
    try:
        return (record.path / name).read_text(errors="replace")
    except FileNotFoundError:
        record.notes.append(f"{name} is not there.")
    except OSError as error:
        record.notes.append(f"{name} cannot be read ({error.strerror}).")
    return ""


def _parse_config(record: RunRecord) -> dict[str, Any]:
    try:
        config = yaml.safe_load(record.config_text)
    except yaml.YAMLError:
        record.notes.append("config.yaml is not YAML; it is shown as it is.")
        return {}
    return config if isinstance(config, dict) else {}


def _parse_environment(record: RunRecord) -> dict[str, Any]:
    text = _read_text(record, "environment.json")
    try:
        environment = json.loads(text) if text else {}
    except ValueError:
        record.notes.append("environment.json is not whole.")
        return {}
    return environment if isinstance(environment, dict) else {}


def _iter_lines(record: RunRecord, name: str, *, told: bool, cut: str = "") -> Iterator[dict[str, Any]]:
    """The records of a file of lines. What cannot be read is counted in a note; a last line without an end is one being written.

    told: whether it is told that the file is not there.
    cut:  what comes from this text on is left out of each line, and the record is closed there.
    """
    try:
        file = open(record.path / name, errors="replace")  # noqa: SIM115 (closed below; the try is about opening alone)
    except OSError:
        if told:
            record.notes.append(f"{name} is not there.")
        return
    damaged = 0
    with file:
        for line in file:
            if not line.endswith("\n"):
                break
            at = line.find(cut) if cut else -1
            try:
                parsed = json.loads(line if at < 0 else line[:at] + "}")
            except ValueError:
                parsed = None
            if isinstance(parsed, dict):
                yield parsed
            else:
                damaged += 1
    if damaged:
        record.notes.append(f"{name}: {damaged} line{'s' * (damaged != 1)} cannot be read and are left out.")


def _read_metrics(record: RunRecord) -> None:
    steps: dict[str, array[int]] = {}
    values: dict[str, array[float]] = {}
    last = 0
    for line in _iter_lines(record, "metrics.jsonl", told=True):
        step = line.pop("step", None)
        if not isinstance(step, int) or isinstance(step, bool) or step <= last:
            continue
        record.first_step, last = record.first_step or step, step
        for name, value in line.items():
            if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
                steps.setdefault(name, array("q")).append(step)
                values.setdefault(name, array("d")).append(_to_float(value))
    record.last_step = last
    record.metrics = {
        name: Series(np.frombuffer(steps[name], np.int64), np.frombuffer(values[name], np.float64)) for name in values
    }


def _to_float(value: float | None) -> float:
    try:
        number = float("nan") if value is None else float(value)
    except OverflowError:
        return float("nan")
    return number if abs(number) != float("inf") else float("nan")


def _read_phases(record: RunRecord) -> None:
    # Of a line only its head is needed, and its spans grow with the workers.
    for line in _iter_lines(record, "phases.jsonl", told=True, cut=', "spans": ['):
        name, seconds = line.get("phase"), line.get("seconds")
        if isinstance(name, str) and isinstance(seconds, (int, float)):
            before, count = record.phases.get(name, (0.0, 0))
            record.phases[name] = (before + float(seconds), count + 1)


def _find_outcome(record: RunRecord) -> Outcome:
    last = record.history[-1] if record.history else {}
    if last.get("event") == "end":
        error = last.get("error")
        if error is None:
            return Outcome("finished")
        return Outcome("interrupted") if error == "interrupted" else Outcome("failed", str(error))
    if _is_held(record.path / ".lock"):
        return Outcome("running")
    if last:
        return Outcome("vanished")
    return Outcome("finished" if (record.path / "model" / "config.json").exists() else "unknown")


def _is_held(lock: Path) -> bool:
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
