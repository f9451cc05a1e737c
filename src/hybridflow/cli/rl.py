"""`hybridflow rl`."""

from collections.abc import Callable
from typing import Any

from hybridflow.cli.command import Command, print_result


def load() -> tuple[type[Any], Callable[[Any], Any]]:
    """The settings of reinforcement learning and the function that runs it."""
    from hybridflow.flow.commands import run_rl
    from hybridflow.flow.rl_job import RLConfig

    return RLConfig, run_rl


COMMAND = Command(
    name="rl",
    summary="Train a model on rewards for its own samples (reinforcement learning, GRPO).",
    examples=(
        "hybridflow rl model.path=runs/default/my-sft 'data.files=[prompts.jsonl]' reward.function=my_rewards:score",
        "hybridflow rl --config-path configs --config-name my_rl sampling.samples_per_prompt=16 run.name=first",
        "hybridflow rl --config-path runs/default/first --config-name config steps=400",
    ),
    load=load,
    show=print_result,
)
