"""`hybridflow export`."""

from collections.abc import Callable
from typing import Any

from hybridflow.cli.command import Command


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of an export and the function that writes it."""
    from hybridflow.flow.commands import ExportConfig, run_export

    return ExportConfig, run_export


COMMAND = Command(
    name="export",
    summary="Write a checkpoint as a Hugging Face directory that transformers loads; a LoRA checkpoint as a PEFT adapter directory.",
    examples=(
        "hybridflow export checkpoint=runs/default/first output=models/first",
        "hybridflow export checkpoint=runs/default/first/checkpoints/step_00000100 output=models/early dtype=bfloat16",
        "hybridflow export checkpoint=runs/default/lora output=models/lora merge=true",
    ),
    load=load,
    show=print,
)
