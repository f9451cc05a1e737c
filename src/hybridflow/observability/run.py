"""A run's directory: what was asked for, on what it ran, and what came out.

runs/<project>/<name>/
    config.yaml        the resolved configuration
    environment.json   versions, git commit, hardware, the rollout engine and why
    metrics.jsonl      one line a step; `time/`, `memory/`, `speed/`, `controller/` and `recovery/` differ, all else repeats
    phases.jsonl       one line a phase of each step, from the workers' spans
    recovery.jsonl     one line a worker that died: who, doing what, and when its work was done again
    history.jsonl      one line a start of the run and one an end: when, at which step, which settings changed there, what ended it
    samples/           what the report shows of some steps' samples, see samples.py
    report.html        all of this as a page, see report/
    rollouts/          one Parquet file a step
    tensorboard/       event files
    checkpoints/       see checkpoint/
    model/             the result, a Hugging Face directory
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config import ConfigError, Field, settings
from hybridflow.observability.phases import phase_times
from hybridflow.observability.samples import remove_after
from hybridflow.types import Metric, Recovery, Span

RECORDED_PACKAGES = ("hybridflow", "torch", "transformers", "pyarrow", "safetensors", "numpy", "ray", "vllm", "sglang")


@settings
class RunSettings:
    """Where a run writes, and what of it."""

    directory: str = "runs"
    """Root of all runs."""
    project: str = Field(default="default", pattern=r"^\w[\w.-]*$")
    """Directory of related runs under the root; of letters, digits, `_`, `-` and `.`."""
    name: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """Directory of this run, named as `project` is; give one to be able to resume. null names it by date and time."""
    tensorboard: bool = True
    """Writes TensorBoard event files."""
    save_rollouts_every: int = Field(default=1, ge=0)
    """Steps between rollout files; 0 writes none."""
    report: bool = True
    """Writes `report.html` at the end, and keeps for it 16 samples of each of about 48 steps, which the trainer scores once more."""
    progress: bool = True
    """Shows a live progress bar on a terminal, and a line every few seconds elsewhere."""


class RunDirectory:
    """Writes into one run's directory. `hold` is the only call that creates it; `open` comes after it."""

    def __init__(self, settings: RunSettings, kind: str) -> None:
        self.settings = settings
        self._root = Path(settings.directory) / settings.project
        self._stamp = f"{kind}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        # A name that nobody gave is a new one: a run is gone on with by a name that was given.
        free = (name for name in iter_names(self._stamp) if not os.path.exists(self._root / name))
        self.path = self._root / (settings.name or next(free))
        self.is_open = False
        self._checkpoints_seen = self._list_checkpoints()
        self._writer: Any = None
        self._lock: int | None = None

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Where its result is."""
        return self.path / "model"

    @property
    def samples(self) -> Path:
        """Where samples are kept for the report."""
        return self.path / "samples"

    @property
    def has_begun(self) -> bool:
        """Whether steps were written down here."""
        path = self.path / "metrics.jsonl"
        return path.is_file() and path.stat().st_size > 0

    def open(
        self, config_yaml: str, *, resume_step: int, sources: Mapping[str, str], engine: str | None
    ) -> dict[str, tuple[Any, Any]]:
        """Creates the directory, or goes on in one: lines of steps after `resume_step` are cut off, they come again.

        returns: settings that may change numbers and are others than before `resume_step`, with the old and the new value.

        sources: what identifies the user's own code, `{"reward": "sha256 of its source"}`.
        engine:  which one generates, and why; None where nothing is generated.
        """
        config = self.path / "config.yaml"
        changed = (
            _compare(_read_settings(config), yaml.safe_load(config_yaml)) if resume_step and config.is_file() else {}
        )
        config.write_text(config_yaml)
        environment = {**describe_environment(), "rollout_engine": engine, "sources": dict(sources)}
        (self.path / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
        for name in ("metrics.jsonl", "phases.jsonl"):
            _cut_after(self.path / name, resume_step)
        remove_after(self.samples, resume_step)
        start = {"event": "start", "at_s": time.time(), "step": resume_step}
        self._append("history.jsonl", start | ({"changed": changed} if changed else {}))
        self.is_open = True
        if self.settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # imports slowly, and only here

            self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=resume_step + 1)
        return changed

    def _list_checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("step_*"))

    def hold(self) -> None:
        """Makes the directory and holds it against other processes, as long as this one lives. `path` is sure from here on: a run without
        a name takes another where one that started in the same second came first.

        Raises ConfigError where another one holds it, or has saved a step since this one looked for the newest.
        """
        try:
            if self.settings.name is None:
                self.path = self._root / claim_name(self._root, self._stamp)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise ConfigError(
                f"run.directory: '{self.path}' cannot be made ({error.strerror}); name a directory that can be written"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.name: '{self.path}' is written by another process now; give run.name another value, or wait for it to end"
            ) from None
        if self._list_checkpoints() != self._checkpoints_seen:
            raise ConfigError(
                f"run.name: another process has saved steps in '{self.path}' while this one started; start it again to go on from there"
            )

    def log_metrics(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Appends a step's line; a value that is not finite is written as null."""
        values = {name: metric.value for name, metric in sorted(metrics.items())}
        self._append("metrics.jsonl", {"step": step, **{n: v if math.isfinite(v) else None for n, v in values.items()}})
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def last_values(self) -> dict[str, float | None]:
        """The latest value of every metric of the run, over all its steps."""
        values: dict[str, float | None] = {}
        path = self.path / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            values |= json.loads(line)
        return {name: value for name, value in sorted(values.items()) if name != "step"}

    def log_phases(self, spans: list[Span]) -> None:
        """Appends one line for each phase of each step among the spans: its seconds, and what its workers did."""
        for step, name in dict.fromkeys((span.step, span.phase) for span in spans):
            inside = [span for span in spans if (span.step, span.phase) == (step, name)]
            seconds = phase_times(inside)[name]
            self._append(
                "phases.jsonl", {"step": step, "phase": name, "seconds": seconds, "spans": [_tell(s) for s in inside]}
            )

    def log_recoveries(self, recoveries: Iterable[Recovery]) -> None:
        """Appends one line for each death that was made good."""
        for recovery in recoveries:
            self._append("recovery.jsonl", asdict(recovery))

    def log_end(self, step: int, error: str | None) -> None:
        """Appends how this start of the run ended, after how many steps; error: None where it did all that it was to do."""
        self._append("history.jsonl", {"event": "end", "at_s": time.time(), "step": step, "error": error})

    def rollout_path(self, step: int) -> Path | None:
        """Where this step's samples are to be written; None where the settings do not ask for them."""
        every = self.settings.save_rollouts_every
        return self.path / "rollouts" / f"step_{step:08d}.parquet" if every > 0 and step % every == 0 else None

    def close(self) -> None:
        """Flushes what is buffered."""
        if self._writer:
            self._writer.close()
        if self._lock is not None:
            os.close(self._lock)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with open(self.path / name, "a") as file:
            file.write(json.dumps(record) + "\n")


def _tell(span: Span) -> dict[str, Any]:
    """A span as `phases.jsonl` has it, with its notes where it has any."""
    told = {key: value for key, value in asdict(span).items() if key not in ("step", "phase", "notes")}
    return told | ({"notes": dict(span.notes)} if span.notes else {})


def iter_names(stamp: str) -> Iterator[str]:
    """`stamp`, then `stamp-2`, `stamp-3` and so on."""
    return (stamp if number == 1 else f"{stamp}-{number}" for number in itertools.count(1))


def claim_name(root: Path, stamp: str, ending: str = "") -> str:
    """The first of the stamp's names whose directory, the name and `ending`, was not there; it is made, so that no other process has it."""
    root.mkdir(parents=True, exist_ok=True)
    for name in iter_names(stamp):
        with contextlib.suppress(FileExistsError):
            (root / f"{name}{ending}").mkdir()
            break
    return name


def _read_settings(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigError(
            f"run.name: '{path}' cannot be read as YAML, so what changed since cannot be told; mend or delete it"
        ) from None


def _compare(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by dotted key, but for those that change no number: how far to go, what to keep, and where."""
    before, after = dict(_iter_leaves(before)), dict(_iter_leaves(after))
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and key.split(".")[0] not in ("steps", "run", "checkpoint", "runtime")
    }


def _iter_leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield ".".join(path), node
        return
    for key, item in node.items():
        yield from _iter_leaves(item, (*path, str(key)))


def _cut_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(line + "\n" for line in kept))
    os.replace(beside, path)


def _step_of(line: str) -> float:
    """The step of a line; a half-written last line (the process was killed) counts as never written."""
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


def describe_environment() -> dict[str, Any]:
    """Versions, git commit and hardware of this process."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": {name: version for name in RECORDED_PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "command": sys.argv,
        "cpu_count": os.cpu_count(),
        "gpus": gpus,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
