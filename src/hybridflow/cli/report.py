"""`hybridflow report`."""

import argparse
from collections.abc import Callable
from typing import Any

from hybridflow.cli.command import Command


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of a report and the function that writes it."""
    from hybridflow.flow.report import ReportConfig, run_report

    return ReportConfig, run_report


class ReportCommand(Command):
    """Takes the run's directory as a word of its own."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """See `Command.add_options`."""
        parser.usage = "hybridflow report RUN [output=FILE]"

    def choose(self, parsed: argparse.Namespace) -> Command:
        """See `Command.choose`; a first word that sets no key is the run."""
        if not (parsed.overrides or parsed.config_name):
            from hybridflow.config import ConfigError  # imports slowly

            raise ConfigError(
                "no run is named; write hybridflow report RUN, such as hybridflow report runs/default/first"
            )
        first = [word for word in parsed.overrides[:1] if not word.startswith(("run=", "output=", "+", "~"))]
        parsed.overrides = [f"run={_quote(word)}" for word in first] + parsed.overrides[len(first) :]
        return self


def _quote(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


COMMAND = ReportCommand(
    name="report",
    summary="Write a run's report: one HTML file with its curves, times, samples and settings.",
    examples=(
        "hybridflow report runs/default/first",
        "hybridflow report runs/default/first output=first.html",
    ),
    load=load,
    show=print,
    starts_from=(),
)
