"""What every command has: its help, its options, and the way from its arguments to checked settings."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SHIPPED = Path(__file__).parent.parent / "configs"

_OVERRIDES = """\
overrides:
  a.b=value          set a key; a list is a.b=[1,2], null is a.b=null, quote what holds , ( ) or =: 'a.b="x=y"'
  group=name         take group/name.yaml, where the configuration has such a group
  +a.b=value         add a key that is not in the YAML        ++a.b=value    set it, there or not
  ~a.b               take a key out of the YAML, so that its default holds
"""


@dataclass(frozen=True)
class Command:
    """One command, e.g. `hybridflow rl`.

    load: imports what the command needs; returns its settings class and the function that takes such settings.
    show: writes what that function returned to standard output.
    starts_from: shipped configurations that it may start from; None is the one of its name, () where there is nothing to set.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    load: Callable[[], tuple[type[Any], Callable[[Any], Any]]]
    show: Callable[[Any], None]
    starts_from: tuple[str, ...] | None = None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds options that this command alone has."""

    def choose(self, parsed: argparse.Namespace) -> "Command":
        """The command that its own options ask for; what was read of them is taken out of `parsed`."""
        return self


class Parser(argparse.ArgumentParser):
    """Answers a wrong argument in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def build_parser(command: Command) -> Parser:
    """The parser of one command's arguments."""
    shipped = (command.name,) if command.starts_from is None else command.starts_from
    starts_from = " or ".join(f"{name}.yaml" for name in shipped)
    examples = "".join(f"  {example}\n" for example in command.examples)
    parser = Parser(
        prog=f"hybridflow {command.name}",
        description=command.summary,
        epilog=f"{_OVERRIDES}\nexamples:\n{examples}\nstarts from {starts_from} in {SHIPPED}"
        if shipped
        else f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_configuration(parser, shown=bool(shipped))
    command.add_options(parser)
    return parser


def _add_configuration(parser: Parser, *, shown: bool) -> None:
    helps = {
        "overrides": "changes to the configuration, see below",
        "--config-path": "your folder of YAML; the shipped one is searched after it",
        "--config-name": "the YAML to start from (default: the one that has the command's name)",
        "--print-config": "show every key with its meaning and its value, all defaults filled in, and stop",
    }
    told = helps if shown else dict.fromkeys(helps, argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=told["overrides"])
    parser.add_argument("--config-path", metavar="DIR", help=told["--config-path"])
    parser.add_argument("--config-name", metavar="NAME", help=told["--config-name"])
    parser.add_argument("--print-config", action="store_true", help=told["--print-config"])


def run(command: Command, parsed: argparse.Namespace) -> None:
    """Load the command's settings from its parsed arguments and do what it says."""
    # Pydantic, Hydra and what the command needs take longer to import than `--help` may run.
    from hybridflow.config import describe_config, load_config

    command = command.choose(parsed)
    settings_class, function = command.load()
    source = {
        "config_path": parsed.config_path,
        "config_name": parsed.config_name or command.name,
        "overrides": parsed.overrides,
    }
    if parsed.print_config:
        print(describe_config(settings_class, **source), end="")
    else:
        command.show(function(load_config(settings_class, **source)))


def print_json(result: dict[str, Any]) -> None:
    """One line of JSON; a number that is not finite becomes null."""
    print(json.dumps({key: _finite(value) for key, value in result.items()}), flush=True)


def print_result(result: dict[str, Any]) -> None:
    """One line of JSON: where a run's files are, and the few of its last metrics that tell how it went."""
    told = ("run", "model", "sft/loss", "reward/mean", "eval/reward_mean", "policy/kl_to_reference")
    print_json({name: result[name] for name in told if name in result})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
