"""What each command of the command line does, as a function of its settings."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybridflow.batch import Batch
from hybridflow.checkpoint import export_checkpoint, newest_checkpoint, open_checkpoint
from hybridflow.checkpoint.manifest import MANIFEST
from hybridflow.config import ConfigError, Field, HybridflowError, settings
from hybridflow.data import DataSettings, chat_stop_ids, read_prompts
from hybridflow.flow import rl, sft
from hybridflow.flow.evaluation import Evaluator, HeldOutSettings, read_held_out
from hybridflow.flow.job import Job, check_placed_models, model_spec, resolve_engine
from hybridflow.flow.rl_job import RLConfig, RLJob, read_rl_inputs
from hybridflow.flow.sft_job import SFTConfig, SFTJob, read_sft_inputs
from hybridflow.rewards import RewardSettings
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.generator import place_generator
from hybridflow.roles.policy import ModelSettings, read_tokenizer
from hybridflow.roles.reward_model import RewardModel
from hybridflow.runtime.api import RuntimeSettings, WorkersLostError
from hybridflow.runtime.start import open_runtime
from hybridflow.types import Numerics, SamplingParams


@settings
class GenerateConfig:
    """Samples from a model: `hybridflow generate model.path=runs/... prompts=["12+34="]`."""

    model: ModelSettings
    """Which model."""
    prompts: tuple[str, ...] = ()
    """Texts to continue."""
    data: DataSettings | None = None
    """Rows whose prompts are continued, after `prompts`, each once and in the order of the files (`shuffle` says nothing here)."""
    output: str | None = None
    """File for the samples, `NAME.parquet`; null prints them alone."""
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    """How responses are drawn."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Who generates."""
    numerics: Numerics = "fast"
    """See `hybridflow rl`."""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """Where it runs."""


@settings
class EvalConfig:
    """A model's mean reward on held-out rows: `hybridflow eval model.path=runs/... evaluation.data.files=[test.jsonl]`."""

    model: ModelSettings
    """Which model."""
    evaluation: HeldOutSettings
    """On what."""
    reward: RewardSettings
    """What a response is worth."""
    output: str | None = None
    """File for the scored samples, `NAME.parquet`; null writes none."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Who generates."""
    numerics: Numerics = "fast"
    """See `hybridflow rl`."""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """Where it runs."""


@settings
class ExportConfig:
    """A checkpoint as a Hugging Face directory: `hybridflow export checkpoint=runs/p/n output=model`.

    A LoRA checkpoint becomes a PEFT adapter directory, or with `merge=true` a whole model.
    """

    checkpoint: str
    """A checkpoint's directory, or a run's, whose newest whole checkpoint is taken."""
    output: str
    """Directory to write; must hold neither a model nor an adapter yet."""
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16)$")
    """Numbers of the written weights; `auto` keeps those of training."""
    merge: bool = False
    """Of a LoRA checkpoint, writes the whole model with the adapter merged in instead of the adapter alone."""
    base: str | None = None
    """With `merge`, directory of the adapter's base model; null takes the one that the checkpoint names."""


def run_rl(
    config: RLConfig,
    *,
    reward_function: Callable[..., Any] | None = None,
    advantage_function: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Trains by reinforcement learning; returns the run's directory and its last metrics."""
    inputs = read_rl_inputs(config, reward_function=reward_function, advantage_function=advantage_function)
    with (
        open_runtime(config.runtime) as runtime,
        contextlib.closing(RLJob(config, inputs, runtime)) as job,
        _ending(job),
        _rescuing(job),
    ):
        rl.train(job)
    return job.result()


def run_sft(config: SFTConfig, *, reward_function: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Trains on examples; returns the run's directory and its last metrics."""
    inputs = read_sft_inputs(config, reward_function=reward_function)
    with (
        open_runtime(config.runtime) as runtime,
        contextlib.closing(SFTJob(config, inputs, runtime)) as job,
        _ending(job),
        _rescuing(job),
    ):
        sft.train(job)
    return job.result()


@contextlib.contextmanager
def _ending(job: Job) -> Iterator[None]:
    """Lets the job know what ended it, if anything did."""
    try:
        yield
    except BaseException as error:
        job.end(error)
        raise
    job.end(None)


@contextlib.contextmanager
def _rescuing(job: Job) -> Iterator[None]:
    """Saves what outlived workers that are lost for good, and says how to go on."""
    try:
        yield
    except WorkersLostError as error:
        try:
            step = job.rescue()
        except (OSError, HybridflowError) as second:
            raise WorkersLostError(f"{error}; and no checkpoint could be written: {second}") from None
        if step is not None:
            left = f"step {step} is saved in {job.run.checkpoints}, and the same command goes on from there"
        elif newest_checkpoint(job.run.checkpoints) is not None:
            left = f"the last checkpoint stands in {job.run.checkpoints}, and the same command goes on from there"
        else:
            left = "no step is saved, and the same command starts anew"
        raise WorkersLostError(f"{error}; {left}") from None


def run_generate(config: GenerateConfig) -> Batch:
    """Samples of every prompt, as a batch; also written to `output` if given."""
    check_placed_models(config.runtime.placement, ("rollout",), {"rollout": config.model}, config.numerics)
    rollout, _ = resolve_engine(config.model, config.rollout, config.runtime, config.numerics, "rollout")
    rollout.check_sampling(config.sampling, "sampling")
    if not config.prompts and config.data is None:
        raise ConfigError('prompts: nothing to continue; give prompts=["..."] or data.files=[...]')
    _check_output(config.output)
    tokenizer = read_tokenizer(config.model)
    prompts = read_prompts(config.data, tokenizer, texts=config.prompts)
    sampling = config.sampling.also_stopping_on(chat_stop_ids(tokenizer, config.data))
    model = model_spec(config.model, config.runtime, config.numerics, seed=0)
    with open_runtime(config.runtime) as runtime:
        generator = place_generator(runtime, model, rollout, sampling)
        samples = runtime.get(generator.rollout(prompts, step=0))
    _write(samples, config.output)
    return samples


def run_eval(config: EvalConfig, *, reward_function: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Mean reward and counts over the held-out rows."""
    check_placed_models(config.runtime.placement, ("rollout", "reward"), {"rollout": config.model}, config.numerics)
    rollout, _ = resolve_engine(config.model, config.rollout, config.runtime, config.numerics, "rollout")
    rollout.check_sampling(config.evaluation.sampling, "evaluation.sampling")
    _check_output(config.output)
    tokenizer = read_tokenizer(config.model)
    prompts = read_held_out(config.evaluation, tokenizer, config.reward, reward_function)
    if prompts is None:
        raise ConfigError("evaluation.data: nothing to evaluate on; give evaluation.data.files=[...]")
    model = model_spec(config.model, config.runtime, config.numerics, seed=0)
    with open_runtime(config.runtime) as runtime:
        generator = place_generator(runtime, model, rollout, config.evaluation.sampling)
        reward = RewardModel(runtime, config.reward, reward_function)
        evaluator = Evaluator(config.evaluation, prompts, tokenizer, generator, reward, runtime)
        samples, metrics = evaluator.run(step=0)
        if config.output is not None:
            with _writing(config.output, "a file"):
                runtime.get(reward.write(samples, Path(config.output).absolute()))
    return {"rows": samples.num_rows, **{name: metric.value for name, metric in metrics.items()}}


def _check_output(output: str | None) -> None:
    if output is None:
        return
    with _writing(output, "a file"):
        if Path(output).is_dir():
            raise ConfigError(
                f"output: '{output}' is a directory; name a file, such as {Path(output) / 'samples.parquet'}"
            )
        if not Path(output).absolute().parent.is_dir():
            raise ConfigError(
                f"output: the directory of '{output}' does not exist; make it, or name a file in one that does"
            )
        if Path(output).suffix.lower() != ".parquet":
            raise ConfigError(
                f"output: '{output}' has no name that ends in .parquet, and samples are written as Parquet alone; give one that has"
            )
        _try_file(Path(output).absolute().parent, Path(output).name)


def _check_free(output: str) -> None:
    if not output:
        raise ConfigError("output: '' is no directory; name one")
    with _writing(output, "a directory"):
        _check_holds_nothing(Path(output))
        directory = Path(output).absolute()
        _try_file(next(path for path in (directory, *directory.parents) if path.exists()))


def _try_file(directory: Path, name: str = "") -> None:
    """Makes and removes a file there; its name is as long as that of one called `name` while that is not whole yet."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=name):
        pass


@contextlib.contextmanager
def _writing(output: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = os.strerror(error.errno) if error.errno else error
        raise ConfigError(
            f"output: '{output}' cannot be written ({told}); name {what} in a directory that can be"
        ) from None


def _check_holds_nothing(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output: '{output}' is a file; name a directory")
    for file in ("checkpoints", "metrics.jsonl"):
        if (output / file).exists():
            raise ConfigError(f"output: '{output}' is a run's directory (it holds {file}); name one of its own")
    for file, what in (("adapter_config.json", "an adapter"), ("config.json", "a model")):
        if (output / file).exists():
            raise ConfigError(f"output: '{output}' holds {what} already ({file}); name a directory that does not")


def _write(samples: Batch, output: str | None) -> None:
    if output is not None:
        with _writing(output, "a file"):
            samples.to_parquet(output)


def run_export(config: ExportConfig) -> str:
    """Writes the checkpoint's weights with its configuration and tokenizer as a Hugging Face directory; returns it."""
    _check_free(config.output)
    if config.base is not None and not config.merge:
        raise ConfigError("base: is for merge=true alone; set that, or leave base out")
    source = Path(config.checkpoint)
    if not source.is_dir():
        raise ConfigError(f"checkpoint: '{source}' is no directory; give a checkpoint's directory or a run's")
    is_run = (source / "checkpoints").is_dir()
    found = is_run or (source / MANIFEST).is_file()
    checkpoint = (newest_checkpoint(source / "checkpoints") if is_run else open_checkpoint(source)) if found else None
    if checkpoint is None:
        raise ConfigError(f"checkpoint: '{source}' holds no whole checkpoint; give a checkpoint's directory or a run's")
    export_checkpoint(checkpoint, Path(config.output), config.dtype, merge=config.merge, base=config.base)
    return config.output
