"""The first run: a new model of a third of a million parameters learns to add, first from examples, then from rewards."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridflow.config import ConfigError, Field, load_config, settings
from hybridflow.data import DataSettings, build_character_tokenizer
from hybridflow.flow.commands import EvalConfig, run_eval, run_rl, run_sft
from hybridflow.flow.evaluation import HeldOutSettings
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig
from hybridflow.observability.run import claim_name
from hybridflow.roles.policy import ModelSettings
from hybridflow.runtime.api import RuntimeSettings
from hybridflow.runtime.placement import PlacementSettings
from hybridflow.types import Numerics

CHARACTERS = "0123456789+="
HELD_OUT = {"valid": 256, "test": 512}


@settings
class QuickstartConfig:
    """The quickstart: `hybridflow quickstart seed=1`."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Keys the split of the sums, the weights and every draw."""
    directory: str = "runs"
    """Root of all runs."""
    name: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """Name of the run, of letters, digits, `_`, `-` and `.`; null names it by date and time. A name that is there is gone on with."""
    numerics: Numerics = "fast"
    """See `hybridflow rl`."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto` takes the GPU where there is one; else cpu, cuda or cuda:1, cuda:2 and so on."""
    sft_steps: int = Field(default=2000, ge=1)
    """Most steps of supervised training; it ends when some sums come out right."""
    rl_steps: int = Field(default=800, ge=1)
    """Most steps of reinforcement learning; it ends when nearly all do."""
    stop_at: float = Field(default=0.95, gt=0, le=1)
    """Accuracy on the validation sums at which reinforcement learning ends."""
    runtime: RuntimeSettings = Field(default_factory=RuntimeSettings)
    """Where roles run."""


def run_quickstart(config: QuickstartConfig) -> dict[str, Any]:
    """SFT, then GRPO, then both models on sums that neither saw: `sft_accuracy`, `rl_accuracy`, `seconds`, `run`."""
    started_s = time.perf_counter()
    _tell(
        "A new model learns to add numbers of two digits. Answers are written last digit first: 37+48=58 stands for 85."
    )
    root = Path(config.directory) / "quickstart"
    name = config.name or _claim_name(root, f"add-{datetime.datetime.now():%Y%m%d-%H%M%S}-seed{config.seed}")
    directory = root / f"{name}-data"
    files = write_sums(directory, config.seed)
    sft = _sft_config(config, name, directory, files)
    _tell(
        f"1. Supervised fine-tuning on examples, until {sft.evaluation.stop_at:.0%} of the validation sums come out right"
    )
    run_sft(sft)
    rl = _rl_config(config, name, files)
    _tell(f"2. GRPO on rewards for right answers, until {config.stop_at:.0%} do, at the latest after step {rl.steps}")
    result = run_rl(rl)
    seconds = time.perf_counter() - started_s
    if (right := result["eval/reward_mean"]) < config.stop_at:
        _tell(
            f"{right:.1%} of the validation sums come out right: the goal of {config.stop_at:.0%} was not reached; try more rl_steps"
        )
    _tell(f"Its curves, times and samples: {result['run']}/report.html")
    _tell(f"""Try it: hybridflow generate model.path={result["run"]} 'prompts=["37+48="]' sampling.temperature=0""")
    return {
        "sft_accuracy": _accuracy(config, str(root / f"{name}-sft"), files["test"], rl),
        "rl_accuracy": _accuracy(config, result["run"], files["test"], rl),
        "seconds": round(seconds, 1),
        "run": result["run"],
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _claim_name(root: Path, stamp: str) -> str:
    with _making(root / f"{stamp}-data"):
        return claim_name(root, stamp, "-data")


@contextlib.contextmanager
def _making(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"directory: '{directory}' cannot be made ({error.strerror}); name a directory that can be written"
        ) from None


def write_sums(directory: Path, seed: int) -> dict[str, str]:
    """All sums of two numbers of two digits, split into train, valid and test files, and a tokenizer beside them.

    The answer is written last digit first, so that each digit follows from what stands before it: 37+48=58.
    """
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(sums)
    parts = {"valid": sums[: HELD_OUT["valid"]], "test": sums[HELD_OUT["valid"] : sum(HELD_OUT.values())]}
    parts["train"] = sums[sum(HELD_OUT.values()) :]
    with _making(directory):
        directory.mkdir(parents=True, exist_ok=True)
    build_character_tokenizer(CHARACTERS).save_pretrained(directory / "tokenizer")
    files = {part: directory / f"{part}.jsonl" for part in parts}
    for part, file in files.items():
        file.write_text("".join(_lines(parts[part])))
    return {part: str(file) for part, file in files.items()}


def _lines(sums: Iterable[tuple[int, int]]) -> Iterable[str]:
    return (json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]}) + "\n" for a, b in sums)


def _sft_config(config: QuickstartConfig, name: str, directory: Path, files: dict[str, str]) -> SFTConfig:
    overrides = [
        f"model.tokenizer={_quoted(directory / 'tokenizer')}",
        f"run.name={name}-sft",
        f"steps={config.sft_steps}",
    ]
    return _with_common(
        load_config(SFTConfig, config_name="quickstart_sft", overrides=overrides + _common(config, files)), config
    )


def _rl_config(config: QuickstartConfig, name: str, files: dict[str, str]) -> RLConfig:
    overrides = [
        f"model.path={_quoted(Path(config.directory) / 'quickstart' / f'{name}-sft')}",
        f"run.name={name}",
        f"steps={config.rl_steps}",
        f"evaluation.stop_at={config.stop_at}",
    ]
    return _with_common(
        load_config(RLConfig, config_name="quickstart_rl", overrides=overrides + _common(config, files)), config
    )


def _common(config: QuickstartConfig, files: dict[str, str]) -> list[str]:
    return [
        f"data.files=[{_quoted(files['train'])}]",
        f"evaluation.data.files=[{_quoted(files['valid'])}]",
        f"run.directory={_quoted(config.directory)}",
        f"seed={config.seed}",
        f"numerics={config.numerics}",
        f"model.device={config.device}",
    ]


def _with_common(config: Any, quickstart: QuickstartConfig) -> Any:
    return dataclasses.replace(config, runtime=quickstart.runtime)


def _quoted(path: str | Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _accuracy(config: QuickstartConfig, model: str, file: str, rl: RLConfig) -> float:
    result = run_eval(
        EvalConfig(
            model=ModelSettings(path=model, device=config.device),
            evaluation=HeldOutSettings(
                data=DataSettings(files=(file,), prompt_column="prompt"), sampling=rl.evaluation.sampling
            ),
            reward=rl.reward,
            numerics=config.numerics,
            # The run's roles are not those of an evaluation, which one worker does in a moment.
            runtime=dataclasses.replace(config.runtime, placement=PlacementSettings()),
        )
    )
    return round(float(result["eval/reward_mean"]), 4)
