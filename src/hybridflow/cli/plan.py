"""`hybridflow plan`."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.cli.command import Command


def load_rl() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of reinforcement learning and the function that plans it."""
    from hybridflow.flow.plan import plan_rl
    from hybridflow.flow.rl_job import RLConfig

    return RLConfig, plan_rl


def load_sft() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of supervised fine-tuning and the function that plans it."""
    from hybridflow.flow.plan import plan_sft
    from hybridflow.flow.sft_job import SFTConfig

    return SFTConfig, plan_sft


LOADS = {"rl": load_rl, "sft": load_sft}


class PlanCommand(Command):
    """Takes the arguments of the command that it plans, whose name may stand before them."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """See `Command.add_options`."""
        parser.usage = "hybridflow plan [rl | sft] [KEY=VALUE ...] [options]"
        parser.add_argument("--graph", action="store_true", help="print the calls of a step and what each waits for")
        parser.add_argument("--svg", metavar="FILE", type=Path, help="draw them, too")

    def choose(self, parsed: argparse.Namespace) -> Command:
        """The command planned is the first word, else what --config-name says where that is one, else `rl`."""
        first = [word for word in parsed.overrides[:1] if "=" not in word and not word.startswith("~")]
        if first and first[0] not in LOADS:
            from hybridflow.config import ConfigError  # imports slowly

            raise ConfigError(f"'{first[0]}' is no command that can be planned; write one of {', '.join(LOADS)}")
        parsed.overrides = parsed.overrides[len(first) :]
        name = next((word for word in (*first, parsed.config_name) if word in LOADS), "rl")
        return replace(
            self, name=name, load=LOADS[name], show=lambda plan: show(plan, graph=parsed.graph, svg=parsed.svg)
        )


def show(plan: Any, *, graph: bool, svg: Path | None) -> None:
    """Prints the plan, with its graph if wanted, and draws it where a file is named."""
    from hybridflow.flow.plan import format_plan, save_svg

    if svg is not None:
        save_svg(plan, svg)
    print(format_plan(plan, graph=graph), end="")


COMMAND = PlanCommand(
    name="plan",
    summary="Show where roles would live and what a step would do, without running it.",
    examples=(
        "hybridflow plan rl model.path=models/tiny 'data.files=[prompts.jsonl]' reward.function=my_rewards:score --graph",
        "hybridflow plan --config-path configs --config-name my_rl --graph --svg step.svg",
        "hybridflow plan sft model.path=models/tiny 'data.files=[train.jsonl]' runtime.kind=ray",
    ),
    load=load_rl,
    show=print,
    starts_from=tuple(LOADS),
)
