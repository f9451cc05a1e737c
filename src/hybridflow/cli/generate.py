"""`hybridflow generate`."""

import json
from collections.abc import Callable
from typing import Any

from hybridflow.cli.command import Command

SHOWN = ("prompt", "response", "finish_reason", "rollout_error")


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of generation and the function that samples."""
    from hybridflow.flow.commands import GenerateConfig, run_generate

    return GenerateConfig, run_generate


def print_samples(samples: Any) -> None:
    """One line of JSON a sample."""
    columns = [samples.pylist(name) for name in SHOWN]
    for row in zip(*columns, strict=True):
        print(
            json.dumps(
                {name: value for name, value in zip(SHOWN, row, strict=True) if value is not None}, ensure_ascii=False
            )
        )


COMMAND = Command(
    name="generate",
    summary="Sample responses to prompts from a model; one line of JSON each.",
    examples=(
        "hybridflow generate model.path=runs/default/first 'prompts=[\"12+34=\"]'",
        "hybridflow generate model.path=models/tiny 'data.files=[prompts.jsonl]' sampling.temperature=0 output=samples.parquet",
    ),
    load=load,
    show=print_samples,
)
