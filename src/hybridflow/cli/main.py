"""`hybridflow COMMAND ...`. Exit codes: 0 done, 1 the run failed, 2 a wrong argument or setting, 130 interrupted."""

import argparse
import difflib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from hybridflow import __version__
from hybridflow.cli import doctor, export, generate, plan, quickstart, report, rl, sft
from hybridflow.cli import eval as eval_command
from hybridflow.cli.command import Command, Parser, build_parser, run

_MODULES = (sft, rl, generate, eval_command, export, report, plan, quickstart, doctor)
COMMANDS: dict[str, Command] = {module.COMMAND.name: module.COMMAND for module in _MODULES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A wrong setting is told in one sentence on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        return _without_command(words)
    # A reward or advantage function of the user lies beside where the command is called, as with `python -m`.
    sys.path.insert(0, os.getcwd())
    if threading.current_thread() is threading.main_thread():
        # As Ctrl-C: workers and files are closed on the way out.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(COMMANDS[words[0]], words[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left; without this, Python complains once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(command: Command, words: Sequence[str]) -> int:
    # Intermixed, so that options may stand between overrides.
    parsed = build_parser(command).parse_intermixed_args(words)
    from hybridflow.config import ConfigError, HybridflowError  # imports slowly, and --help has returned by now

    try:
        run(command, parsed)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _without_command(words: list[str]) -> int:
    parser = _top_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"the nearest is '{near[0]}'" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"error: unknown command '{words[0]}'; {hint}", file=sys.stderr)
        return 2
    parser.parse_args(words)
    parser.error("an option before the command; write the command first")


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS))
    lines = "".join(f"  {command.name:<{width}}  {command.summary}\n" for command in COMMANDS.values())
    parser = Parser(
        prog="hybridflow",
        usage="hybridflow COMMAND [KEY=VALUE ...] [options]",
        description="Post-training of large language models, from a laptop CPU to a GPU cluster.",
        epilog=f"commands:\n{lines}\n`hybridflow COMMAND --help` shows a command's options and examples, "
        "`hybridflow COMMAND --print-config` every key with its meaning.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    return parser
