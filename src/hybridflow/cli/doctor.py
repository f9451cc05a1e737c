"""`hybridflow doctor`."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridflow.cli.command import Command, print_json


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of an examination, of which there are none, and the function that makes it."""
    from hybridflow.flow.doctor import DoctorConfig, examine

    return DoctorConfig, examine


class DoctorCommand(Command):
    """Prints text, or with `--json` one line of JSON."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """See `Command.add_options`."""
        parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")

    def choose(self, parsed: argparse.Namespace) -> Command:
        """See `Command.choose`."""
        return replace(self, show=show_json) if parsed.json else self


def show(diagnosis: Any) -> None:
    """Prints what was found, a line a finding."""
    from hybridflow.flow.doctor import format_diagnosis

    print(format_diagnosis(diagnosis), end="")


def show_json(diagnosis: Any) -> None:
    """Prints it as one line of JSON."""
    from hybridflow.flow.doctor import to_record

    print_json(to_record(diagnosis))


COMMAND = DoctorCommand(
    name="doctor",
    summary="Tell what this machine can train and generate with: devices, versions, and each backend with the reason why or why not.",
    examples=("hybridflow doctor", "hybridflow doctor --json"),
    load=load,
    show=show,
    starts_from=(),
)
