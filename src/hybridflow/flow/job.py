"""What every run shares: its steps, its files, its evaluations, and where it goes on after a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.checkpoint import Checkpoint, CheckpointWriter, newest_checkpoint, open_checkpoint, prune
from hybridflow.checkpoint.manifest import MANIFEST
from hybridflow.config import ConfigError, Field, settings
from hybridflow.config.explain import shown
from hybridflow.flow.evaluation import EvaluationSettings, Evaluator
from hybridflow.observability.phases import phase, phase_times, set_step
from hybridflow.observability.progress import ProgressBar
from hybridflow.observability.report import write_report
from hybridflow.observability.run import RunDirectory, RunSettings
from hybridflow.roles.actor import Actor
from hybridflow.roles.carried import Snapshot, write_snapshot
from hybridflow.roles.engines import RolloutSettings, check_lora_sync, resolve_rollout
from hybridflow.roles.failures import AllRowsFailedError
from hybridflow.roles.policy import ModelSettings, ModelSpec, check_model, resolve_numbers
from hybridflow.roles.trainers import check_training
from hybridflow.runtime.api import Runtime, RuntimeSettings
from hybridflow.runtime.placement import PlacementSettings, check_roles
from hybridflow.runtime.start import runs_in_process, worker_threads
from hybridflow.train_engine import TrainSettings
from hybridflow.types import BatchRef, Metrics, MetricsRef, Numerics, Ref, Span, last, maximum


@settings
class CheckpointSettings:
    """When state is saved, how much is kept, and whether a run goes on."""

    every_steps: int = Field(default=50, ge=0)
    """Steps between checkpoints; one more follows the last step. 0 saves after the last step alone."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    resume_mode: str = Field(default="auto", pattern="^(auto|never|path)$")
    """`auto` goes on from the run's newest whole checkpoint, `never` starts anew, `path` goes on from `resume_path`."""
    resume_path: str | None = None
    """Checkpoint directory for `resume_mode: path`."""


class DataSource(Protocol):
    """Where the run's rows come from: it has a place to go on from, and may end."""

    @property
    def exhausted(self) -> bool: ...

    def metrics(self) -> Metrics: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _SafePoint:
    """A finished step that a run can be taken up from without its workers."""

    step: int
    snapshot: tuple[Ref[Snapshot], ...]
    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What every run needs that is read and checked before any worker starts. engine: which one generates, and why."""

    run: RunDirectory
    resume_from: Checkpoint | None
    tokenizer: PreTrainedTokenizerBase
    held_out: Batch | None
    rollout: RolloutSettings
    engine: str
    reward_function: Callable[..., Any] | None
    sources: dict[str, str]


class Job:
    """One run. The loop iterates `steps()` and tells `after_step` what came of each.

    shown:    metrics that the progress bar shows.
    engine:   which one generates, and why; None where nothing is generated.
    starting: told before the first step, while workers start; None where there is nothing to wait for.
    """

    def __init__(
        self,
        *,
        kind: str,
        inputs: RunInputs,
        config_yaml: str,
        num_steps: int,
        checkpoint: CheckpointSettings,
        evaluation: EvaluationSettings,
        runtime: Runtime,
        actor: Actor,
        evaluator: Evaluator | None,
        data: DataSource,
        shown: tuple[str, ...],
        engine: str | None,
        starting: str | None,
    ) -> None:
        self.run, self.runtime, self.actor = inputs.run, runtime, actor
        self.num_steps, self._kind = num_steps, kind
        self._checkpoint, self._evaluation, self._evaluator, self._data = checkpoint, evaluation, evaluator, data
        self._resume_from, self._config_yaml, self._sources = inputs.resume_from, config_yaml, inputs.sources
        self._last_evaluation: float | None = None
        self._starting, self._engine = starting, engine
        self._shown = shown
        self._safe: list[_SafePoint] = []
        self._told_skipped = False
        self._done_steps = 0
        self._saved_step = 0
        self._all_failed = True

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do, from 1. Ends early when an evaluation reaches its goal or the data ends."""
        self.run.hold()
        self._progress = ProgressBar(
            self.run.path.name, self.num_steps, self._shown, enabled=self.run.settings.progress
        )
        if self._engine is not None:
            self._progress.tell(f"rollout engine {self._engine}")
        if self._starting is not None:
            self._progress.tell(self._starting)
        done_steps = self._resume()
        self._done_steps = done_steps
        begun = self.run.has_begun
        changed = self.run.open(self._config_yaml, resume_step=done_steps, sources=self._sources, engine=self._engine)
        if begun and not done_steps:
            self._progress.tell(f"{self.run.path}: no checkpoint is there; beginning anew at step 1")
        if done_steps:
            left = self.num_steps - done_steps
            todo = "nothing is left to do" if left <= 0 or self._ended() else _describe_left(left)
            self._progress.tell(f"{self.run.path}: going on after step {done_steps}; {todo}")
            if changed:
                told = ", ".join(f"{key} {shown(old)} -> {shown(new)}" for key, (old, new) in changed.items())
                self._progress.tell(f"{self.run.path}: other settings since step {done_steps}: {told}")
        with self._progress:
            self._step_started_s, self._is_first = time.perf_counter(), True
            for step in range(done_steps + 1, self.num_steps + 1):
                if self._ended():
                    break
                set_step(step)
                yield step
        if self._all_failed and self._done_steps > done_steps:
            raise AllRowsFailedError(
                f"every row has failed in each of {self._done_steps - done_steps} steps, and nothing was trained; the column "
                f"'rollout_error' or 'reward_error' in {self.run.path / 'rollouts'} says why"
            )
        with phase("export"):
            self.runtime.get(self.actor.export(self.run.model))
        self.run.log_phases(self.runtime.spans())
        self.run.log_recoveries(self.runtime.recoveries(unfinished=True))

    def close_step(self, step: int, metrics: MetricsRef) -> None:
        """Waits for the step's metrics, evaluates and saves when due, and writes it all down."""
        values: Metrics = dict(self.runtime.get(metrics))
        values |= self._data.metrics()
        is_last = self._data.exhausted or step == self.num_steps
        values |= self._evaluate(step, is_last)
        spans = self.runtime.spans()
        # A snapshot of the step before may end after that step was closed.
        own = [span for span in spans if span.step == step]
        values |= {f"time/{name}_s": last(seconds) for name, seconds in phase_times(own).items()}
        values |= self._time_step(values, spans, own) | self.runtime.metrics()
        self.run.log_phases(spans)
        self.run.log_recoveries(self.runtime.recoveries())
        self.run.log_metrics(step, values)
        self._done_steps = step
        self._note_safe_point(step)
        if is_last or self._ended() or _due(step, self._checkpoint.every_steps):
            self.save(step)
        rows = {name: metric.value for name, metric in values.items() if name.startswith("rows/")}
        self._all_failed &= 0 < rows.get("rows/failed", 0) == sum(rows.values())
        self._tell_skipped(step, values)
        self._progress.update(step, values)

    def save(self, step: int) -> None:
        """A checkpoint of all state after `step` steps."""
        with phase("save"), CheckpointWriter(self.run.checkpoints, step) as writer:
            entries = self.runtime.get(self.actor.save(writer))
            writer.commit(entries, self._state(step))
        prune(self.run.checkpoints, keep=self._checkpoint.keep)
        self._saved_step = step

    def rescue(self) -> int | None:
        """After workers were lost for good: a checkpoint of the last finished step, from the snapshot that outlived them.

        returns: its step; None where there is no newer state than the last checkpoint's.
        """
        self.run.log_recoveries(self.runtime.recoveries(unfinished=True))
        saved = newest_checkpoint(self.run.checkpoints)
        for safe in reversed(self._safe):
            if all(map(self.runtime.is_there, safe.snapshot)) and (saved is None or saved.step < safe.step):
                with CheckpointWriter(self.run.checkpoints, safe.step) as writer:
                    parts = self.runtime.get(safe.snapshot)
                    paths = [writer.shard_path("actor", 0 if len(parts) == 1 else part.rank) for part in parts]
                    writer.commit(list(map(write_snapshot, parts, paths)), safe.state)
                return safe.step
        return None

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "kind": self._kind,
            "step": step,
            "last_evaluation": self._last_evaluation,
            "data": self._data.state(),
        }

    def _note_safe_point(self, step: int) -> None:
        """Keeps the controller's state beside the snapshot that was taken in this step, if there was one, and the one before it, which is
        there for certain."""
        snapshot = self.actor.last_snapshot
        if snapshot is not None and (not self._safe or snapshot is not self._safe[-1].snapshot):
            self._safe = [*self._safe[-1:], _SafePoint(step, snapshot, self._state(step))]

    def result(self) -> dict[str, Any]:
        """Where the run is and its last metrics."""
        return {"run": str(self.run.path), "model": str(self.run.model), **self.run.last_values()}

    def end(self, error: BaseException | None) -> None:
        """Writes down what ended the run, None where it did what it was to do, and its report. Nothing where it never began to write."""
        if not self.run.is_open:
            return
        if isinstance(error, KeyboardInterrupt):
            self._progress.tell(self._describe_stop())
        told = (
            None
            if error is None
            else str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
        )
        try:
            self.run.log_end(self._done_steps, told)
            if self.run.settings.report:
                write_report(self.run.path)
        except Exception as problem:  # noqa: BLE001 (a run does not fail by its report, nor hide what it failed by)
            self._progress.tell(f"{self.run.path}: no report was written ({type(problem).__name__}: {problem})")

    def _describe_stop(self) -> str:
        """What a run that is interrupted leaves."""
        saved, every = self._saved_step, self._checkpoint.every_steps
        told = f"{self.run.path}: stopped after step {self._done_steps}"
        if self.run.settings.name is None:
            return f"{told}; a run without a name (run.name) is not gone on with" + (
                f", but checkpoint.resume_path can name its checkpoint of step {saved}" if saved else ""
            )
        if saved:
            return f"{told}; the same command goes on after step {saved}, the newest that was saved"
        return f"{told}, and none was saved: the same command begins anew (checkpoint.every_steps={every})"

    def close(self) -> None:
        """Ends what the run holds open; the workers end with the runtime."""
        self.run.close()

    def _evaluate(self, step: int, is_last: bool) -> Metrics:
        if self._evaluator is None or not (is_last or _due(step, self._evaluation.every_steps)):
            return {}
        scored, metrics = self._evaluator.run(step)
        self._last_evaluation = metrics["eval/reward_mean"].value
        self.after_evaluation(step, scored, is_last=is_last or self._ended())
        return metrics

    def after_evaluation(self, step: int, scored: BatchRef, *, is_last: bool) -> None:
        """Told the samples of each evaluation, with their rewards."""

    def _tell_skipped(self, step: int, values: Metrics) -> None:
        """Says once that there was nothing to learn from, which no curve shows."""
        if self._told_skipped or not values["train/skipped_steps"].value:
            return
        self._told_skipped = True
        rejected, failed = (values[f"rows/{state}"].value for state in ("rejected", "failed"))
        self._progress.tell(
            f"step {step}: an optimizer step was skipped, {rejected:.0f} rows were rejected (groups of equal rewards) and "
            f"{failed:.0f} failed; train/skipped_steps counts such steps"
        )

    def _ended(self) -> bool:
        """Whether there is no more to do before `num_steps`: the data has ended, or an evaluation has reached its goal."""
        goal, reached = self._evaluation.stop_at, self._last_evaluation
        return self._data.exhausted or (goal is not None and reached is not None and reached >= goal)

    def _time_step(self, values: Metrics, spans: list[Span], own: list[Span]) -> Metrics:
        now_s = time.perf_counter()
        seconds, self._step_started_s = now_s - self._step_started_s, now_s
        if self._is_first:
            # It begins with its first call: before that, workers start. Their clocks may be other nodes'.
            since_first_call_s = time.time() - min((span.start_s for span in own), default=0.0)
            seconds = since_first_call_s if 0 < since_first_call_s < seconds else seconds
        self._is_first = False
        peak = max((span.peak_rss_bytes for span in spans), default=0.0)
        times = {"time/step_s": last(seconds), "memory/peak_rss_bytes": maximum(peak)}
        if "train/tokens" in values:
            times["speed/trained_tokens_per_s"] = last(values["train/tokens"].value / seconds)
        return times

    def _resume(self) -> int:
        checkpoint = self._resume_from
        if checkpoint is None:
            return 0
        self.runtime.get(self.actor.load(checkpoint.path))
        self._data.load_state(checkpoint.state["data"])
        self._last_evaluation = checkpoint.state["last_evaluation"]
        self._saved_step = checkpoint.step
        return checkpoint.step


def find_run(
    settings: RunSettings, kind: str, checkpoint: CheckpointSettings
) -> tuple[RunDirectory, Checkpoint | None]:
    """The run's directory, not yet made, and the checkpoint to go on from; asked before any worker starts.

    A run that is there is gone on with or left alone, never written over.
    """
    run, mode, path = RunDirectory(settings, kind), checkpoint.resume_mode, checkpoint.resume_path
    if (mode == "path") != (path is not None):
        raise ConfigError(
            f"checkpoint.resume_path is {shown(path)} while checkpoint.resume_mode is '{mode}'; "
            "set both, resume_mode=path and resume_path=<checkpoint directory>, or neither"
        )
    if mode != "auto" and run.checkpoints.is_dir() and any(run.checkpoints.glob("step_*")):
        raise ConfigError(
            f"run.name: '{run.path}' holds checkpoints and resume_mode is '{mode}'; give run.name another value, "
            "or set resume_mode=auto to go on with it"
        )
    if path is not None and not (Path(path) / MANIFEST).is_file():
        raise ConfigError(
            f"checkpoint.resume_path: '{path}' holds no {MANIFEST}; give the directory of a checkpoint, <run>/checkpoints/step_<number>"
        )
    found = (
        open_checkpoint(Path(path))
        if path is not None
        else newest_checkpoint(run.checkpoints)
        if mode == "auto"
        else None
    )
    if found is not None and found.state["kind"] != kind:
        raise ConfigError(
            f"run.name: '{found.path}' is of a run of '{found.state['kind']}', which '{kind}' cannot go on with; "
            "give run.name another value, and model.path that run's directory to start from its result"
        )
    return run, found


def check_placed_models(
    placement: PlacementSettings, roles: tuple[str, ...], models: dict[str, ModelSettings], numerics: Numerics
) -> None:
    """Raises ConfigError for a placed role that this run does not have, and for what is wrong with a role's model where it is placed.

    roles:  all that the run may place.
    models: of the roles that have one.
    """
    check_roles(placement, roles)
    for role in [role for role in roles if role not in models and placement.dtype(role) is not None]:
        raise ConfigError(
            f"runtime.placement.mesh: the pool of '{role}' sets dtype={placement.dtype(role)}, and '{role}' has no model; leave dtype out"
        )
    for role, model in models.items():
        key = "reference" if role == "reference" else "model"
        check_model(model, numerics, key, placement.kind(role), placement.dtype(role))
    if numerics == "exact" and placement.separates("rollout") and "actor" in models:
        _check_alike(placement, models)
    if not placement.separates("rollout") and placement.dtype("rollout") not in (None, placement.dtype("actor")):
        raise ConfigError(
            f"runtime.placement: 'rollout' asks for {placement.dtype('rollout')} on the actor's own devices, where it generates with the "
            "actor's weights; leave its dtype out, or give it devices of its own"
        )


def _check_alike(placement: PlacementSettings, models: dict[str, ModelSettings]) -> None:
    actor, rollout = (
        resolve_numbers(models[role], placement.kind(role), placement.dtype(role)) for role in ("actor", "rollout")
    )
    if actor != rollout:
        raise ConfigError(
            f"numerics: 'exact' asks for generators whose numbers are the trainers', but 'rollout' is in {rollout[1]} on {rollout[0]} and "
            f"'actor' in {actor[1]} on {actor[0]}; place them alike, or set numerics=fast"
        )


def check_trainers(model: ModelSettings, train: TrainSettings, runtime: RuntimeSettings, numerics: Numerics) -> None:
    """Raises ConfigError for what can be seen to be wrong with how the trainers share the model, before any of them starts."""
    if runs_in_process(runtime):
        check_training(model, train, numerics, 1)
        return
    placement = runtime.placement
    check_training(model, train, numerics, placement.num_workers("actor"), placement.kind("actor"))


def resolve_engine(
    model: ModelSettings,
    rollout: RolloutSettings,
    runtime: RuntimeSettings,
    numerics: Numerics,
    role: str = "actor",
    train: TrainSettings | None = None,
    assume_installed: bool = False,
    cuts: bool = False,
) -> tuple[RolloutSettings, str]:
    """The rollout's settings with the engine that generates, and which and why. Raises ConfigError for one that cannot be had.

    role:             that has the model, and generates unless the placement gives `rollout` devices of its own.
    train:            how the model is trained, if it is.
    assume_installed: an engine that the settings name counts as installed, as a plan for other machines wants it.
    cuts:             samples that are trained on are drawn by `min_p`, `top_k` or `top_p`.
    """
    lora = train.lora if train else None
    check_lora_sync(rollout, lora)
    if runs_in_process(runtime):
        resolved, choice = resolve_rollout(
            model, rollout, numerics, 1, None, assume_installed=assume_installed, cuts=cuts
        )
        return resolved, str(choice)
    placement = runtime.placement
    generating = "rollout" if placement.separates("rollout") else role
    if numerics == "exact" and lora is not None and rollout.lora == "merged" and placement.separates("rollout"):
        raise ConfigError(
            "numerics: 'exact' does not hold where 'rollout' has devices of its own and gets the adapter of train.lora merged in, which "
            "rounds otherwise than the trainers' adapter beside its base; set rollout.lora=adapter, take 'rollout' out of the placement, "
            "or set numerics=fast"
        )
    resolved, choice = resolve_rollout(
        model,
        rollout,
        numerics,
        placement.num_workers(generating),
        placement.kind(generating),
        assume_installed=assume_installed,
        cuts=cuts,
    )
    return resolved, str(choice)


def describe_start(runtime: RuntimeSettings) -> str | None:
    """`starting 2 trainers`; None where all roles run in this process, as a placement alone does not change."""
    if runtime.kind == "local" and (runtime.placement.device_map or runtime.placement.mesh):
        return "runtime.placement is left aside: runtime.kind is local, which runs all roles in this process; set runtime.kind=ray for it"
    if runs_in_process(runtime):
        return None
    count = runtime.placement.num_workers("actor")
    return "starting trainers" if count is None else f"starting {count} trainer{'' if count == 1 else 's'}"


def model_spec(settings: ModelSettings, runtime: RuntimeSettings, numerics: Numerics, seed: int) -> ModelSpec:
    """What a worker of this run builds its model from."""
    return ModelSpec(settings, numerics, seed, worker_threads(runtime, numerics))


def train_over(train: TrainSettings, total_steps: int) -> TrainSettings:
    """The settings with the run's own number of optimizer steps where the schedule names none.

    A run that is shorter than its warm-up ends inside it.
    """
    if train.schedule.kind == "constant" or train.schedule.total_steps:
        return train
    return replace(
        train, schedule=replace(train.schedule, total_steps=max(total_steps, train.schedule.warmup_steps + 1))
    )


def _describe_left(steps: int) -> str:
    return "1 step is left" if steps == 1 else f"{steps} steps are left"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
