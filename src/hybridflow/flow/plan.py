"""What a run would do and where, found by running its page for two steps on a runtime that runs nothing."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from hybridflow.batch import Batch
from hybridflow.config import ConfigError
from hybridflow.flow import rl, sft
from hybridflow.flow.evaluation import EvaluationSettings
from hybridflow.flow.job import CheckpointSettings, DataSource
from hybridflow.flow.rl_job import RLConfig, RLJob, read_rl_inputs
from hybridflow.flow.sft_job import SFTConfig, SFTJob, read_sft_inputs
from hybridflow.observability.graph import (
    Edge,
    Graph,
    Lane,
    Node,
    cut_next_step,
    drop_implied,
    format_svg,
    format_text,
    merge_equal,
)
from hybridflow.observability.phases import set_step
from hybridflow.rewards import RewardSettings
from hybridflow.roles.engines import RolloutSettings
from hybridflow.roles.policy import ModelSettings, resolve_device
from hybridflow.roles.trainers import check_training, describe_layout, describe_memory
from hybridflow.runtime.api import RuntimeSettings
from hybridflow.runtime.placement import (
    Inventory,
    Placement,
    RolePlacement,
    assume_nodes,
    describe_total,
    find_shortage,
    plan_placement,
)
from hybridflow.runtime.recording import RecordedCall, RecordedGroup, RecordingRuntime, find_nodes
from hybridflow.runtime.start import runs_in_process
from hybridflow.train_engine import PLAIN_ROW_MEMORY, RowMemory, TrainSettings, get_available_backends
from hybridflow.types import BatchRef, MetricsRef, Numerics

MAX_NODES_SHOWN = 8
"""Nodes told one by one; the others are counted."""


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    facts: what is known of it beforehand, by name, `{"a step": "64 prompts × 8 samples = 512 rows, trained in 2 updates"}`.
    nodes: what it would run on.
    graph: the calls of a step; its lanes are the roles and where they live.
    assumed: what of it is not here, a line each, `not here: the cluster has 0 GPUs; these devices were assumed`; empty where all is.
    """

    command: str
    facts: Mapping[str, str]
    nodes: str
    graph: Graph
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Site:
    """Where workers would live; `placement` None is this process. `assumed`: see `Plan`."""

    inventory: Inventory = ()
    placement: Placement | None = None
    assumed: tuple[str, ...] = ()

    def runtime(self) -> RecordingRuntime:
        """A recording runtime with as many workers of each role."""
        placed = self.placement.roles if self.placement else ()
        workers = {role.role: len(role.slots) for role in placed}
        return RecordingRuntime(workers, keeps_snapshots=self.placement is not None)


class _PlannedRL(RLJob):
    """Two steps of the page, and nothing between them."""

    def steps(self) -> Iterator[int]:
        """See `Job.steps`."""
        return _iter_two_steps(self.prompts, self.num_steps)

    def after_step(self, step: int, metrics: MetricsRef, batch: BatchRef, scores: dict[str, BatchRef]) -> None:
        """There is nothing to write down."""


class _PlannedSFT(SFTJob):
    """Two steps of the page, and nothing between them."""

    def steps(self) -> Iterator[int]:
        """See `Job.steps`."""
        return _iter_two_steps(self.rows, self.num_steps)

    def close_step(self, step: int, metrics: MetricsRef) -> None:
        """There is nothing to write down."""


def _iter_two_steps(data: DataSource, num_steps: int) -> Iterator[int]:
    # The second tells what of the first it waits for.
    for step in range(1, min(num_steps, 2) + 1):
        if data.exhausted:
            return
        set_step(step)
        yield step


def plan_rl(config: RLConfig) -> Plan:
    """The plan of a run of reinforcement learning. Raises ConfigError for what is wrong, as the run would, but assumes devices and a
    rollout engine that are not here."""
    inputs = read_rl_inputs(config, assume_installed=True)
    site = _find_site(config.runtime, inputs.rollout)
    runtime = site.runtime()
    _record(lambda: rl.train(_PlannedRL(config, inputs, runtime)))
    samples = config.sampling.samples_per_prompt
    rows = f"{_count(config.prompts_per_step, 'prompt')} × {_count(samples, 'sample')}"
    facts = {
        "run": str(inputs.run.path),
        "data": inputs.prompts.describe(),
        "steps": _describe_steps(config.steps, config.evaluation),
        "a step": f"{rows} = {_count(config.prompts_per_step * samples, 'row')}, {_count(config.updates_per_step, 'update')}",
        "engine": inputs.engine,
        "evaluation": _describe_evaluation(config.evaluation, inputs.held_out),
        "checkpoints": _describe_checkpoints(config.checkpoint),
        **_describe_trainers(config.model, config.train, config.runtime, config.numerics, site, inputs.expected),
    }
    return _build_plan("rl", facts, site, runtime, _describe_devices(config.model, config.reference, config.reward))


def plan_sft(config: SFTConfig) -> Plan:
    """The plan of a run of supervised fine-tuning. Raises ConfigError for what is wrong, as the run would, but assumes devices and a
    rollout engine that are not here."""
    inputs = read_sft_inputs(config, assume_installed=True)
    site = _find_site(config.runtime, inputs.rollout)
    runtime = site.runtime()
    _record(lambda: sft.train(_PlannedSFT(config, inputs, runtime)))
    facts = {
        "run": str(inputs.run.path),
        "data": inputs.rows.describe(),
        "steps": _describe_steps(config.steps, config.evaluation),
        "a step": f"{_count(config.rows_per_step, 'row')}, 1 update",
        **({} if inputs.held_out is None else {"engine": inputs.engine}),
        "evaluation": _describe_evaluation(config.evaluation, inputs.held_out),
        "checkpoints": _describe_checkpoints(config.checkpoint),
        **_describe_trainers(config.model, config.train, config.runtime, config.numerics, site),
    }
    devices = _describe_devices(config.model, None, config.reward or RewardSettings())
    return _build_plan("sft", facts, site, runtime, devices)


def _record(page: Callable[[], None]) -> None:
    # In a context of its own, so that the page's steps are not those of whoever asks for a plan.
    contextvars.copy_context().run(page)


def _find_site(settings: RuntimeSettings, rollout: RolloutSettings) -> _Site:
    assumed = _find_absent(rollout)
    if runs_in_process(settings):
        return _Site(assumed=assumed)
    inventory = find_nodes(settings)
    if missing := find_shortage(settings.placement, inventory):
        told = f"not here: the cluster has {describe_total(missing, inventory)}; these devices were assumed"
        assumed, inventory = (told, *assumed), assume_nodes(settings.placement)
    return _Site(inventory, plan_placement(settings.placement, inventory, settings.placement.roles()), assumed)


def _find_absent(rollout: RolloutSettings) -> tuple[str, ...]:
    """What to tell of an engine that is not on this machine."""
    if not rollout.keeps_weights or rollout.is_remote:
        return ()
    backend = get_available_backends()[rollout.engine]
    told = f"not here: rollout.engine={rollout.engine} was assumed, but {backend.reason}, and a run is refused until it is there; "
    return () if backend else (f"{told}{backend.remedy}",)


def _build_plan(
    command: str, facts: Mapping[str, str], site: _Site, runtime: RecordingRuntime, devices: Mapping[str, str]
) -> Plan:
    lanes = tuple(_build_lane(group, site, devices[group.role]) for group in runtime.groups)
    graph = build_graph(runtime.calls, lanes, {group.role: group.size for group in runtime.groups})
    nodes = [
        f"{node.address} ({node.num_gpus} GPUs{f', {node.num_cpus} CPUs' if node.num_cpus else ''})"
        for node in site.inventory
    ]
    return Plan(command, facts, "; ".join(_shorten(nodes)) or "all roles in this process", graph, site.assumed)


def build_graph(calls: Sequence[RecordedCall], lanes: tuple[Lane, ...], sizes: Mapping[str, int]) -> Graph:
    """Calls of two steps as the graph of the first, with those of the second that wait for it. `sizes`: workers of each role."""
    nodes = tuple(_build_node(call, sizes[call.call.role]) for call in calls)
    reads = [Edge(source, call.number) for call in calls for source in call.inputs]
    order = [Edge(source, call.number, "order") for call in calls for source in call.after]
    return cut_next_step(drop_implied(merge_equal(Graph(lanes, nodes, (*reads, *order)))))


def _build_node(recorded: RecordedCall, size: int) -> Node:
    call = recorded.call
    workers = "" if size == 1 else f"{'any' if recorded.on == 'one' else recorded.on} of {size}"
    named = re.fullmatch(r"rows (\d+) to (\d+)", call.rows)
    num_rows = int(named[2]) - int(named[1]) + 1 if named else recorded.num_rows
    return Node(recorded.number, call.role, call.verb, call.mark.phase, num_rows, workers, later=call.mark.step > 1)


def _build_lane(group: RecordedGroup, site: _Site, device: str) -> Lane:
    count = f"{_count(group.size, 'worker')}{', one gang' if group.gang and group.size > 1 else ''}"
    if site.placement is None:
        return Lane(group.role, (count, device))
    placed = site.placement.of(group.role)
    return Lane(
        group.role, (count, *describe_slots(placed, site.inventory)) if placed else (count, "left to Ray", device)
    )


def describe_slots(placed: RolePlacement, inventory: Inventory) -> list[str]:
    """The devices node by node, numbered over each: `gpu:0-3 of 10.0.0.1`; where there is one node, it goes without saying."""
    addresses = {node.node_id: f" of {node.address}" if len(inventory) > 1 else "" for node in inventory}
    lines = []
    for node_id in dict.fromkeys(slot.node_id for slot in placed.slots):
        slots = [slot for slot in placed.slots if slot.node_id == node_id]
        indices = sorted(index for slot in slots for index in slot.indices)
        lines.append(f"{slots[0].kind}:{_format_ranges(indices)}{addresses[node_id]}")
    return [*_shorten(lines), placed.dtype] if placed.dtype else _shorten(lines)


def _shorten(nodes: list[str]) -> list[str]:
    more = len(nodes) - MAX_NODES_SHOWN
    return [*nodes[:MAX_NODES_SHOWN], f"{_count(more, 'more node')}"] if more > 0 else nodes


def _format_ranges(indices: Sequence[int]) -> str:
    """`0-3,8` of 0, 1, 2, 3, 8."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _describe_devices(model: ModelSettings, reference: ModelSettings | None, reward: RewardSettings) -> dict[str, str]:
    """What each role runs on where the placement does not say."""
    own = resolve_device(model.device)
    return {
        "actor": own,
        "rollout": own,
        "reference": resolve_device((reference or model).device),
        "reward": "inline" if reward.inline else _count(reward.workers, "process", "processes"),
    }


def _describe_trainers(
    model: ModelSettings,
    train: TrainSettings,
    settings: RuntimeSettings,
    numerics: Numerics,
    site: _Site,
    expected: RowMemory = PLAIN_ROW_MEMORY,
) -> dict[str, str]:
    """How the trainers share the model, and what each needs."""
    placed = site.placement.of("actor") if site.placement else None
    kind = settings.placement.kind("actor") if site.placement else None
    layout = check_training(model, train, numerics, len(placed.slots) if placed else 1, kind)
    if layout is None:
        return {}
    dtype = settings.placement.dtype("actor")
    memory = describe_memory(model, train, layout, kind, dtype, numerics=numerics, expected=expected)
    return ({"layout": describe_layout(layout)} if layout.size > 1 else {}) | {"memory": memory}


def _describe_steps(steps: int, evaluation: EvaluationSettings) -> str:
    goal = f", or until an evaluation reaches {evaluation.stop_at:g}" if evaluation.stop_at is not None else ""
    return f"{steps}{goal}"


def _describe_evaluation(settings: EvaluationSettings, held_out: Batch | None) -> str:
    if held_out is None:
        return "none"
    samples = _count(settings.sampling.samples_per_prompt, "sample")
    return f"{_count(held_out.num_rows, 'prompt')} × {samples}, {_describe_times(settings.every_steps)}"


def _describe_checkpoints(settings: CheckpointSettings) -> str:
    return f"{_describe_times(settings.every_steps)}; the newest {settings.keep} are kept"


def _describe_times(every_steps: int) -> str:
    return f"every {_count(every_steps, 'step')} and after the last" if every_steps else "after the last step"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_plan(plan: Plan, *, graph: bool) -> str:
    """The plan as text, with the calls of a step if `graph`."""
    facts = _format_table([[name, fact] for name, fact in plan.facts.items()])
    roles = _format_table([[lane.role, lane.details[0], ", ".join(lane.details[1:])] for lane in plan.graph.lanes])
    parts = [f"{plan.command}\n{facts}", f"placement: {plan.nodes}\n{roles}"]
    parts += [f"calls of a step\n\n{format_text(plan.graph)}"] if graph else []
    parts += ["".join(f"{line}\n" for line in plan.assumed)] if plan.assumed else []
    return "\n".join(parts)


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"  {line}".rstrip() + "\n" for line in lines)


def save_svg(plan: Plan, path: Path) -> None:
    """Draws the calls of a step. Raises ConfigError where the file cannot be written."""
    try:
        path.write_text(format_svg(plan.graph, f"A step of {plan.command}: {plan.facts['a step']}"))
    except OSError as error:
        raise ConfigError(
            f"--svg: '{path}' cannot be written ({error.strerror}); name a file in a directory that is there"
        ) from None
