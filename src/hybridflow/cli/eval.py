"""`hybridflow eval`."""

from collections.abc import Callable
from typing import Any

from hybridflow.cli.command import Command, print_json


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of an evaluation and the function that runs it."""
    from hybridflow.flow.commands import EvalConfig, run_eval

    return EvalConfig, run_eval


COMMAND = Command(
    name="eval",
    summary="Measure a model's mean reward on held-out rows.",
    examples=(
        "hybridflow eval model.path=runs/default/first 'evaluation.data.files=[test.jsonl]' reward.function=my_rewards:score",
        "hybridflow eval --config-path configs --config-name my_eval model.path=models/tiny output=scored.parquet",
    ),
    load=load,
    show=print_json,
)
