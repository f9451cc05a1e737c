"""`hybridflow sft`."""

from collections.abc import Callable
from typing import Any

from hybridflow.cli.command import Command, print_result


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of supervised fine-tuning and the function that runs it."""
    from hybridflow.flow.commands import run_sft
    from hybridflow.flow.sft_job import SFTConfig

    return SFTConfig, run_sft


COMMAND = Command(
    name="sft",
    summary="Train a model on prompts and responses (supervised fine-tuning).",
    examples=(
        "hybridflow sft model.path=models/tiny 'data.files=[train.jsonl]' steps=200",
        "hybridflow sft --config-path configs --config-name my_sft train.optimizer.lr=1e-4",
        "hybridflow sft model.path=models/tiny 'data.files=[train.jsonl]' --print-config",
    ),
    load=load,
    show=print_result,
)
