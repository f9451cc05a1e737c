"""`hybridflow quickstart`."""

from collections.abc import Callable
from typing import Any

from hybridflow.cli.command import Command, print_json


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of the quickstart and the function that runs it."""
    from hybridflow.flow.quickstart import QuickstartConfig, run_quickstart

    return QuickstartConfig, run_quickstart


COMMAND = Command(
    name="quickstart",
    summary="Build a small model that learns to add, by SFT and then by GRPO; a few minutes on a CPU.",
    examples=(
        "hybridflow quickstart",
        "hybridflow quickstart seed=1 runtime.kind=ray",
    ),
    load=load,
    show=print_json,
)
