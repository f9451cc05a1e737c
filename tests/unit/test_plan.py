"""What a step is going to do, found by running the page on a runtime that runs nothing."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from hybridflow.cli.main import main
from hybridflow.config import ConfigError, load_config
from hybridflow.flow.commands import run_rl
from hybridflow.flow.kept_samples import KeptSamples
from hybridflow.flow.plan import Plan, describe_slots, format_plan, plan_rl, plan_sft
from hybridflow.flow.quickstart import write_sums
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig
from hybridflow.observability.phases import current_mark, phase
from hybridflow.roles.trainers import describe_memory
from hybridflow.runtime.api import Pieces, RuntimeSettings, Seat
from hybridflow.runtime.placement import NodeInventory, PlacementSettings, PoolSettings, plan_placement
from hybridflow.runtime.recording import RecordingRuntime, find_nodes
from hybridflow.train_engine import Layout, RowMemory, get_available_backends
from hybridflow.types import UNSHAPED, BatchRef, ChunkRef, MetricsRef, Shaping

TINY = (
    "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}"
)
ON_RAY = ("runtime.kind=ray", "+runtime.num_cpus=8")


class Toy:
    """A worker that must never be built."""

    def __init__(self, seat: Seat) -> None:
        raise AssertionError("a plan builds no worker")

    def make(self, count: int) -> Pieces[int]:
        raise AssertionError("a plan calls no verb")

    def read(self, *values: object) -> int:
        raise AssertionError("a plan calls no verb")

    def change(self, *values: object) -> int:
        raise AssertionError("a plan calls no verb")

    def close(self) -> None: ...


def split(given: object, digests: object, size: int) -> list[tuple[object, ...]]:
    raise AssertionError("a plan has no digests to split by")


def test_inputs_are_the_calls_whose_results_are_named() -> None:
    runtime = RecordingRuntime()
    group = runtime.place("toy", Toy)
    tokens, text = runtime.submit_pieces(group, Toy.make, 2, 8, rows="rows 0 to 7")
    batch = BatchRef((ChunkRef({"tokens": tokens, "text": text}, 8),))
    other = runtime.submit(group, Toy.read, 1)
    runtime.submit(group, Toy.read, batch, [{"deep": other}])
    runtime.submit(group, Toy.read, MetricsRef((other,)))
    assert [call.inputs for call in runtime.calls] == [(), (), (1, 2), (2,)]
    assert [call.call.verb for call in runtime.calls] == ["make", "read", "read", "read"]
    assert runtime.calls[0].call.rows == "rows 0 to 7"


def test_a_change_waits_for_what_was_to_see_the_state_before_and_reads_wait_for_the_change() -> None:
    runtime = RecordingRuntime({"toy": 3})
    group, other = runtime.place_gang("toy", Toy), runtime.place("other", Toy)
    with phase("one"):
        first = runtime.submit(group, Toy.read)
        runtime.submit(other, Toy.read)
        runtime.submit(group, Toy.read)
    with phase("two"):
        runtime.broadcast(group, Toy.change, 1)
        runtime.scatter(group, Toy.change, functools.partial(split, 1), [first])
        runtime.submit(group, Toy.read)
        runtime.snapshot(group, Toy.read, Toy.change)
        runtime.broadcast(group, Toy.change)
    assert [call.after for call in runtime.calls] == [(), (), (), (1, 3), (4,), (5,), (5,), (6, 7)]
    assert [call.on for call in runtime.calls] == ["one", "one", "one", "each", "each", "one", "one", "each"]
    assert runtime.calls[4].inputs == (1,)
    assert [call.call.mark.phase for call in runtime.calls] == ["one"] * 3 + ["two"] * 5
    assert [(placed.role, placed.size, placed.gang) for placed in runtime.groups] == [
        ("toy", 3, True),
        ("other", 1, False),
    ]


def test_calls_of_a_team_share_what_all_its_workers_name() -> None:
    runtime = RecordingRuntime({"toy": 4})
    gang = runtime.place_gang("toy", Toy)
    first = runtime.submit(gang, Toy.read)
    made = runtime.submit_team_pieces(gang, Toy.make, (2, 0), [(first,), (1,)], "rows 0 to 7")
    assert [len(refs) for refs in made] == [2, 0] and {ref.handle for refs in made for ref in refs} == {2}
    assert (runtime.calls[1].on, runtime.calls[1].inputs, runtime.calls[1].call.rows) == (2, (1,), "rows 0 to 7")


def test_the_inputs_of_a_scatter_are_what_its_split_holds_and_what_it_waits_for() -> None:
    runtime = RecordingRuntime()
    group = runtime.place_gang("toy", Toy)
    first, second = (runtime.submit(group, Toy.read) for _ in range(2))
    batch = BatchRef((ChunkRef({"tokens": second}, 5),))
    runtime.scatter(group, Toy.change, functools.partial(split, batch), [first])
    assert (runtime.calls[-1].inputs, runtime.calls[-1].num_rows) == ((2, 1), 5)
    with pytest.raises(
        TypeError, match=r"the split of toy.change hides what it refers to; make it a functools.partial"
    ):
        runtime.scatter(group, Toy.change, lambda digests, size: [(batch,)], [first])


def test_nothing_can_be_got_from_a_plan() -> None:
    runtime = RecordingRuntime()
    ref = runtime.submit(runtime.place("toy", Toy), Toy.read)
    with pytest.raises(
        TypeError, match=r"a plan runs nothing, so toy.read \(phase '\w+', step \d+\) has no result to get"
    ):
        runtime.get(ref)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with sums to learn and a tokenizer."""
    directory = tmp_path_factory.mktemp("sums")
    files = write_sums(directory, seed=0)
    lines = Path(files["train"]).read_text().splitlines(keepends=True)
    (directory / "few.jsonl").write_text("".join(lines[:40]))
    return directory


def common(task: Path) -> list[str]:
    return [
        f"+model.config={TINY}", f"+model.tokenizer={task / 'tokenizer'}", f"data.files=[{task / 'few.jsonl'}]", "steps=9",
        f"evaluation.data.files=[{task / 'valid.jsonl'}]", "evaluation.max_prompts=8", "evaluation.stop_at=0.9",
        f"run={{directory: {task / 'runs'}, name: first, tensorboard: false, progress: false}}",
    ]  # fmt: skip


def rl_words(task: Path, *more: str) -> list[str]:
    return [*common(task), "model.path=null", "prompts_per_step=6", "sampling.samples_per_prompt=4", *more]


def plan_of_rl(task: Path, *more: str) -> Plan:
    return plan_rl(load_config(RLConfig, config_name="quickstart_rl", overrides=rl_words(task, *more)))


def calls_of(plan: Plan) -> str:
    return format_plan(plan, graph=True).split("calls of a step\n\n")[1]


def test_the_page_in_one_process(task: Path) -> None:
    plan = plan_of_rl(task)
    assert format_plan(plan, graph=False) == (
        "rl\n"
        f"  run          {task / 'runs'}/quickstart/first\n"
        "  data         40 rows\n"
        "  steps        9, or until an evaluation reaches 0.9\n"
        "  a step       6 prompts × 4 samples = 24 rows, 2 updates\n"
        "  engine       native: on a CPU it uses the trainer's own weights, and nothing else is faster\n"
        "  evaluation   8 prompts × 1 sample, every 20 steps and after the last\n"
        "  checkpoints  every 50 steps and after the last; the newest 2 are kept\n"
        f"  memory       {plan.facts['memory']}\n"
        "\n"
        "placement: all roles in this process\n"
        "  actor   1 worker  cpu\n"
        "  reward  1 worker  2 processes\n"
    )
    assert calls_of(plan) == (
        "phase rollout\n"
        "  1  actor.rollout  24 rows\n"
        "phase score\n"
        "  2  reward.score   24 rows    reads 1 actor.rollout\n"
        "phase update\n"
        "  3  actor.update   24 rows    reads 1 actor.rollout, 2 reward.score\n"
        "next step\n"
        "     actor.rollout  24 rows    after 3 actor.update\n"
    )


def test_the_page_on_trainers_and_generators_apart(task: Path) -> None:
    devices = '{actor: "cpu:0-1", rollout: "cpu:2-4", reference: "cpu:0-1", reward: "cpu:6"}'
    plan = plan_of_rl(task, *ON_RAY, f"+runtime.placement.device_map={devices}", "algorithm.kl_coefficient=0.01")
    assert format_plan(plan, graph=False).split("placement: ")[1] == (
        f"this machine ({find_nodes(RuntimeSettings())[0].num_gpus} GPUs, 8 CPUs)\n"
        "  actor      2 workers, one gang  cpu:0-1\n"
        "  rollout    3 workers            cpu:2-4\n"
        "  reward     1 worker             cpu:6\n"
        "  reference  2 workers            cpu:0-1\n"
    )
    assert calls_of(plan) == (
        "phase rollout\n"
        "   1  rollout.rollout ×3      24 rows  any of 3\n"
        "phase score\n"
        "   2  reward.score ×3         24 rows             reads 1 rollout.rollout\n"
        "   3  reference.log_prob ×3   24 rows  any of 2   reads 1 rollout.rollout\n"
        "phase update\n"
        "   4  actor.update            24 rows  each of 2  reads 1 rollout.rollout, 2 reward.score, 3 reference.log_prob\n"
        "   5  actor.snapshot                   any of 2   after 4 actor.update\n"
        "   6  actor.offer_weights              each of 2  after 4 actor.update\n"
        "   7  rollout.expect_weights           each of 3  reads 6 actor.offer_weights\n"
        "   8  actor.push_weights               each of 2  reads 6 actor.offer_weights, 7 rollout.expect_weights\n"
        "   9  rollout.pull_weights             each of 3  reads 6 actor.offer_weights, 7 rollout.expect_weights\n"
        "  10  actor.publish                    any of 2   reads 6 actor.offer_weights, 7 rollout.expect_weights, 9 rollout.pull_weights\n"
        "next step\n"
        "      rollout.rollout ×3      24 rows  any of 3   reads 10 actor.publish\n"
        "      actor.update            24 rows  each of 2  after 5 actor.snapshot, 8 actor.push_weights\n"
    )


def test_the_memory_is_that_of_rows_drawn_as_the_sampling_says(task: Path) -> None:
    words = "train.gradient_checkpointing=none", "data.max_tokens=20", "sampling.max_new_tokens=10"
    config = load_config(RLConfig, config_name="quickstart_rl", overrides=rl_words(task, *words))
    keys_per_token = (19 + 4 * 30) / (19 + 4 * 11)
    for more, shaping in ((), UNSHAPED), (("+sampling.repetition_penalty=1.2",), Shaping(1.2)):
        by_hand = describe_memory(
            config.model, config.train, Layout(), None, None, expected=RowMemory(shaping, keys_per_token)
        )
        assert plan_of_rl(task, *words, *more).facts["memory"] == by_hand


def test_trainers_that_share_a_model(task: Path) -> None:
    """Four trainers, two of which have the same rows: they refresh copies to generate from, and meet in what they score and keep."""
    plan = plan_of_rl(
        task, *ON_RAY, '+runtime.placement.device_map={actor: "cpu:0-3"}', "+algorithm.old_logprobs=trainer_logprobs",
        "+train.parallel_config={tensor_parallel_size: 2, shard: 0}",
    )  # fmt: skip
    assert plan.facts["layout"] == "data 2 × sequence 1 × tensor 2; weights in 2 shards, 1 copy"
    assert "MiB" in plan.facts["memory"]
    assert calls_of(plan) == (
        "phase rollout\n"
        "  1  actor.refresh              each of 4\n"
        "  2  actor.rollout ×4  24 rows  any of 4   after 1 actor.refresh\n"
        "phase score\n"
        "  3  reward.score ×4   24 rows             reads 2 actor.rollout\n"
        "  4  actor.log_prob    24 rows  each of 4  reads 2 actor.rollout\n"
        "phase update\n"
        "  5  actor.update      24 rows  each of 4  reads 2 actor.rollout, 3 reward.score, 4 actor.log_prob\n"
        "  6  actor.snapshot             each of 4  after 5 actor.update\n"
        "next step\n"
        "     actor.refresh              each of 4  after 6 actor.snapshot\n"
    )


def test_shaped_samples_need_trainers_with_the_whole_vocabulary(task: Path) -> None:
    placed = (*ON_RAY, '+runtime.placement.device_map={actor: "cpu:0-3"}', "+sampling.repetition_penalty=1.2")
    assert plan_of_rl(task, *placed).facts["layout"].startswith("data 4")
    told = r"^sampling.repetition_penalty=1.2: the trainer needs .* train.parallel_config.tp=2 splits the vocabulary; set tp to 1"
    with pytest.raises(ConfigError, match=told):
        plan_of_rl(task, *placed, "+train.parallel_config={tensor_parallel_size: 2, shard: 0}")
    with pytest.raises(
        ConfigError, match=r"^sampling.repetition_penalty: 1.2 counts the prompt, and SGLang penalises by the response"
    ):
        plan_of_rl(task, *placed, "rollout.engine=sglang")


def test_an_adapter_in_float32_is_not_for_vllm_on_a_gpu(task: Path) -> None:
    words = (*ON_RAY, '+runtime.placement.device_map={actor: "gpu:0"}', "rollout.engine=vllm", "rollout.lora=adapter")
    adapted = (*words, "+train.lora={rank: 4}")
    assert plan_of_rl(task, *adapted, "model.dtype=bfloat16").facts["engine"].startswith("vllm")
    with pytest.raises(
        ConfigError, match=r"^rollout.lora: 'adapter' .* no float32 on a GPU; set model.dtype=bfloat16, or"
    ):
        plan_of_rl(task, *adapted, "model.dtype=float32")


def test_what_the_report_keeps_is_scored_before_the_update_and_waits_for_no_reward(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptSamples, "_plan", lambda self, step, batch, *, is_last: [0, 1, 4, 5])
    graph = plan_of_rl(task, "steps=1").graph
    called = {node.key: f"{node.phase} {node.role}.{node.verb}" for node in graph.nodes}
    rows = {called[node.key]: node.num_rows for node in graph.nodes}
    assert rows["report actor.log_prob"] == 4 and rows["score reward.score"] == 24
    assert {(called[edge.source], called[edge.target], edge.kind) for edge in graph.edges} == {
        ("rollout actor.rollout", "report reward.take", "data"),
        ("report reward.take", "report actor.log_prob", "data"),
        ("rollout actor.rollout", "score reward.score", "data"),
        ("rollout actor.rollout", "update actor.update", "data"),
        ("score reward.score", "update actor.update", "data"),
        ("report actor.log_prob", "update actor.update", "order"),
    }


def test_a_run_of_one_step_has_no_next(task: Path) -> None:
    assert "next step" not in calls_of(plan_of_rl(task, "steps=1"))


def test_supervised_fine_tuning(task: Path) -> None:
    words = [
        *common(task),
        "rows_per_step=16",
        "model.path=null",
        *ON_RAY,
        '+runtime.placement.device_map={actor: "cpu:0-2"}',
    ]
    plan = plan_sft(
        load_config(
            SFTConfig,
            config_name="quickstart_sft",
            overrides=[word.replace("+model.path", "model.path") for word in words],
        )
    )
    assert plan.facts["a step"] == "16 rows, 1 update"
    assert [(lane.role, *lane.details) for lane in plan.graph.lanes] == [
        ("actor", "3 workers, one gang", "cpu:0-2"),
        ("reward", "1 worker", "left to Ray", "2 processes"),
    ]
    assert calls_of(plan) == (
        "phase update\n"
        "  1  actor.update    16 rows  each of 3\n"
        "  2  actor.snapshot           any of 3   after 1 actor.update\n"
        "next step\n"
        "     actor.update    16 rows  each of 3  after 2 actor.snapshot\n"
    )


def test_the_calls_are_those_that_a_run_makes(task: Path) -> None:
    words = rl_words(
        task,
        "steps=1",
        "evaluation={data: null, stop_at: null}",
        "reward.inline=true",
        "rollout.chunks=3",
        "numerics=exact",
    )
    config = load_config(RLConfig, config_name="quickstart_rl", overrides=[*words, "algorithm.kl_coefficient=0.01"])
    nodes = plan_rl(config).graph.nodes
    run = Path(run_rl(config)["run"])
    phases = [json.loads(line) for line in (run / "phases.jsonl").read_text().splitlines()]
    ran = [
        (span["role"], span["verb"], told["phase"])
        for told in phases
        for span in told["spans"]
        if told["phase"] in ("rollout", "score", "update")
    ]
    planned = [(node.role, node.verb, node.phase) for node in nodes for _ in range(node.count)]
    assert len(planned) == 10 and sorted(ran) == sorted(planned)


def test_a_plan_leaves_nothing_behind(task: Path) -> None:
    before = sorted(task.rglob("*")), current_mark()
    plan_of_rl(task, "run.name=second")
    assert (sorted(task.rglob("*")), current_mark()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sampling.temperature=0"], "sampling.temperature: 0 draws the same sample for a whole group"),
        (["reward.function=null"], "reward.function: "),
        (["+runtime.placement.device_map={aktor: 'cpu:0'}"], "runtime.placement.device_map.aktor: 'aktor' is not a role of this run"),
        ([*ON_RAY, "+runtime.placement.device_map={actor: 'cpu:0-1'}", "train.parallel_config.shard=3"], "train.parallel_config.shard: 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_as_the_run_would(task: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of_rl(task, *words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("devices", "nodes", "actor"),
    [
        ("gpu:0-7", "an assumed node (8 GPUs, 2 CPUs)", "8 workers, one gang  gpu:0-7"),
        (
            "gpu:0-11",
            "assumed node 1 (8 GPUs, 2 CPUs); assumed node 2 (8 GPUs, 2 CPUs)",
            "12 workers, one gang  gpu:0-7 of assumed node 1, gpu:0-3 of assumed node 2",
        ),
    ],
)
def test_devices_that_are_not_here_are_assumed_and_said_to_be(
    task: Path, monkeypatch: pytest.MonkeyPatch, devices: str, nodes: str, actor: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    placed = f"+runtime.placement.device_map={{actor: '{devices}', reward: 'cpu:1'}}"
    plan = plan_of_rl(task, *ON_RAY, placed, "+train.parallel_config.shard=0")
    count = actor.split()[0]
    assert plan.facts["layout"] == f"data {count} × sequence 1 × tensor 1; weights in {count} shards, 1 copy"
    assert "gradient_checkpointing" in plan.facts["memory"]
    text = format_plan(plan, graph=True)
    assert f"\nplacement: {nodes}\n  actor   {actor}\n" in text
    assert text.endswith("\n\nnot here: the cluster has 0 GPUs; these devices were assumed\n")


def test_cores_that_are_not_here_are_assumed_too_and_the_run_refuses_them(task: Path) -> None:
    words = rl_words(task, *ON_RAY, "+runtime.placement.device_map={actor: 'cpu:7-8'}")
    config = load_config(RLConfig, config_name="quickstart_rl", overrides=words)
    assert plan_rl(config).assumed == ("not here: the cluster has 8 CPUs; these devices were assumed",)
    with pytest.raises(ConfigError, match=r"'cpu:7-8' asks for 2 CPUs up to cpu:8, but the cluster has 8 CPUs"):
        plan_placement(config.runtime.placement, find_nodes(config.runtime), ("actor",))
    assert plan_of_rl(task, *ON_RAY, "+runtime.placement.device_map={actor: 'cpu:6-7'}").assumed == ()


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line adds to the import path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("own_path")
@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([], "prompts_per_step: 32"),
        (["rl"], "prompts_per_step: 32"),
        (["sft"], "rows_per_step: 32"),
        (["--config-name", "sft"], "rows_per_step: 32"),
        (
            ["sft", "--config-name", "quickstart_sft", "steps=9", "evaluation.data.files=[b.jsonl]"],
            "rows_per_step: 256",
        ),
        (
            ["--config-name", "quickstart_rl", "steps=9", "evaluation={data: {files: [b]}, stop_at: 1}"],
            "prompts_per_step: 64",
        ),
    ],
)
def test_the_command_planned_is_the_first_word_or_the_configuration_of_that_name(
    words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, "++model.path=m", "data.files=[a.jsonl]", "--print-config"]) == 0
    assert f"\n{key}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("own_path")
def test_the_graph_is_printed_and_drawn_when_asked_for(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config-name", "quickstart_rl", *rl_words(task)]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("rl\n  run ") and "calls of a step" not in plain
    assert main([*words, "--graph", "--svg", str(task / "step.svg")]) == 0
    assert capsys.readouterr().out.startswith(f"{plain}\ncalls of a step\n\nphase rollout\n")
    root = ET.parse(task / "step.svg").getroot()
    boxes = root.findall("{http://www.w3.org/2000/svg}g[@class='node']")
    assert [box[0].text for box in boxes] == [
        "actor.rollout, phase 'rollout', call 1, 24 rows",
        "reward.score, phase 'score', call 2, 24 rows",
        "actor.update, phase 'update', call 3, 24 rows",
        "actor.rollout, in the next step, 24 rows",
    ]


@pytest.mark.usefixtures("own_path")
def test_a_drawing_that_cannot_be_written_is_told_in_one_line(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config-name", "quickstart_rl", *rl_words(task), "--svg", str(task / "nowhere" / "step.svg")]
    assert main(words) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.endswith(
        "step.svg' cannot be written (No such file or directory); name a file in a directory that is there\n"
    )


def test_devices_are_told_node_by_node() -> None:
    nodes = (NodeInventory("a", "10.0.0.1", 8, 32), NodeInventory("b", "10.0.0.2", 8, 32))
    settings = PlacementSettings(
        mesh=(
            PoolSettings(name="train", devices=("gpu:0-3", "gpu:6-9"), roles=("actor",), dtype="bfloat16"),
            PoolSettings(name="reward", devices=("cpu:40-47",), strategy="per_node"),
        )
    )
    placement = plan_placement(settings, nodes, ("actor", "reward"))
    told = [describe_slots(placed, nodes) for placed in placement.roles]
    assert told == [["gpu:0-3,6-7 of 10.0.0.1", "gpu:0-1 of 10.0.0.2", "bfloat16"], ["cpu:8-15 of 10.0.0.2"]]


def test_of_many_nodes_a_few_are_told() -> None:
    nodes = tuple(NodeInventory(f"n{index}", f"10.0.0.{index}", 8, 32) for index in range(20))
    settings = PlacementSettings(device_map={"actor": "gpu:4-159"})
    told = describe_slots(plan_placement(settings, nodes, ("actor",)).roles[0], nodes)
    assert [told[0], *told[-2:]] == ["gpu:4-7 of 10.0.0.0", "gpu:0-7 of 10.0.0.7", "12 more nodes"]


@pytest.mark.slow
def test_a_cluster_that_would_be_joined_is_looked_at(ray_cluster: None) -> None:
    ray = pytest.importorskip("ray")
    (node,) = find_nodes(RuntimeSettings(kind="ray", address="auto"))
    assert node.num_cpus == ray.cluster_resources()["CPU"] and node.address.count(".") == 3


def test_a_precision_for_a_role_without_a_model_is_refused(task: Path) -> None:
    mesh = "[{name: reward, devices: ['cpu:0'], dtype: bfloat16}]"
    with pytest.raises(ConfigError, match=r"the pool of 'reward' sets dtype=bfloat16, and 'reward' has no model"):
        plan_of_rl(task, *ON_RAY, f"+runtime.placement.mesh={mesh}")


@pytest.mark.skipif(get_available_backends()["vllm"].available, reason="vLLM is here")
def test_an_engine_that_is_not_here_is_assumed_and_said_to_be_and_the_run_refuses_it(task: Path) -> None:
    words = rl_words(task, *ON_RAY, "+runtime.placement.device_map={actor: 'cpu:0', rollout: 'cpu:1'}")
    config = load_config(RLConfig, config_name="quickstart_rl", overrides=[*words, "+rollout.engine=vllm"])
    plan = plan_rl(config)
    assert plan.facts["engine"] == "vllm: as rollout.engine says"
    assert format_plan(plan, graph=True).endswith(
        "\nnot here: rollout.engine=vllm was assumed, but vllm is not installed, and a run is refused until it is there; pip install "
        "vllm, or set rollout.vllm.url to a server that runs elsewhere\n"
    )
    with pytest.raises(ConfigError, match=r"rollout.engine: 'vllm' is not installed; pip install vllm"):
        run_rl(config)
    served = load_config(
        RLConfig,
        config_name="quickstart_rl",
        overrides=[*words, "+rollout={engine: vllm, vllm: {url: 'http://h:8000'}}"],
    )
    assert plan_rl(served).assumed == ()
