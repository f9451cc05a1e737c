"""Five hundred wrong configurations: each is told in one sentence that names the key, the value and a remedy; none is taken in silence.

What may stand at a key is written out below, beside what the settings classes say: a mutation is wrong where this table says so.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.cli.main import main
from hybridflow.config import ConfigError, check_config
from hybridflow.config.load import to_plain
from hybridflow.flow.commands import EvalConfig, ExportConfig, GenerateConfig
from hybridflow.flow.quickstart import QuickstartConfig
from hybridflow.flow.rl_job import RLConfig
from hybridflow.flow.sft_job import SFTConfig

Path_ = tuple[str, ...]

# `?` behind a kind: or null. A range is [least, most], ( and ) leave the end out; `words` are the only texts.
MODEL = """
path text?; config map?; adapter text?; tokenizer text?; device words auto cpu cuda cuda:0 cuda:11
dtype words auto float32 bfloat16 float64; trust_remote_code flag
"""
DATA = """
files texts+; format words auto text chat; prompt_column text; response_column text; messages_column text; rename textmap
template_arguments map; trained_turns words all last marked; max_tokens int [2,inf)?; on_long_row words drop truncate error
truncation_side words auto left right; min_tokens int [1,inf)?; keep_where map; keep_function text?; deduplicate_by texts
on_bad_row words error skip; shuffle flag; epochs int [1,inf)?
"""
SAMPLING = """
temperature real [0.01,inf)|0; top_p real (0,1]; top_k int [0,inf); min_p real [0,1]; repetition_penalty real [0.01,100]
max_new_tokens int [1,2147483648); stop_strings filled; stop_token_ids ids; ignore_eos flag; samples_per_prompt int [1,inf); seed seed
"""
NATIVE = """
kv_cache_tokens int [32,inf)?; kv_memory_fraction real (0,1]; max_sequences int [1,inf); cuda_graphs flag
prefill_tokens_per_step int [1,inf); tp int [1,inf)
"""
REWARD = """
function text?; timeout_s real (0,inf); workers int [1,inf); startup_timeout_s real (0,inf); max_memory_bytes int [1,inf)?; inline flag
concurrency int [1,inf); per words sample batch
"""
ALGORITHM = """
clip_low real [0,1); clip_high real [0,inf); kl_coefficient real [0,inf); kl_estimator words k1 k2 k3; report_kl flag
entropy_coefficient real [0,inf); old_logprobs words rollout_logprobs trainer_logprobs; drop_constant_groups flag; advantage_function text?
clip_dual real (1,inf)?; normalization words token_mean sequence_mean constant; kl_in_reward real [0,inf)
scale words group_std batch_std none
"""
TRAIN = """
micro_batch_tokens int [1,inf); share_prompts flag; activation_offload flag; liger flag; offload words none optimizer parameters
reshard_after_forward flag; max_skipped_steps int [0,inf); gradient_checkpointing words none selective full auto
parallel_config.tp int [1,inf); parallel_config.sp int [1,inf); parallel_config.dp int [1,inf)?; parallel_config.shard int [0,inf)
optimizer.lr real [0,inf); optimizer.eps real (0,inf); optimizer.weight_decay real [0,inf); optimizer.max_grad_norm real [0,inf)
schedule.kind words constant linear cosine; schedule.min_lr_ratio real [0,1]
"""
CHECKPOINT = "every_steps int [0,inf); keep int [1,inf); resume_mode words auto never path; resume_path text?"
RUNTIME = """
kind words local ray; address text?; num_cpus int [1,inf)?; placement.bind_numa flag; recovery.max_restarts int [0,inf)
recovery.window_s real (0,inf); recovery.max_attempts int [1,inf); recovery.snapshot_every_steps int [0,inf)
recovery.wait_for_node_s real [0,inf); call_timeout_s real (0,inf); start_timeout_s real (0,inf); threads_per_worker int [0,1024]
"""
RUN = "directory text; project name; name name?; tensorboard flag; save_rollouts_every int [0,inf); progress flag"
HELD_OUT = "max_prompts int [0,inf)"
EVALUATION = "max_prompts int [0,inf); every_steps int [0,inf); stop_at real (-inf,inf)?"
ROLLOUT = "engine words auto native vllm sglang; lora words merged adapter; chunks int [1,inf)"


@dataclass(frozen=True)
class Tree:
    """A command's settings: its class, a configuration that is right, what may stand at its keys, and its sections that may be null."""

    settings: type
    right: dict[str, Any]
    kinds: dict[Path_, str]
    nullable: frozenset[str]


def build_tree(settings: type, right: dict[str, Any], nullable: str = "", **tables: str) -> Tree:
    """tables: by section, dots as `__`; `own` has the keys at the top."""
    kinds: dict[Path_, str] = {}
    for section, table in tables.items():
        above = () if section == "own" else tuple(section.split("__"))
        for entry in re.split(r";|\n", table.strip()):
            key, _, kind = entry.strip().partition(" ")
            kinds[above + tuple(key.split("."))] = kind
    return Tree(settings, right, kinds, frozenset(nullable.split()))


MODEL_HERE, DATA_HERE = {"path": "models/tiny"}, {"files": ["train.jsonl"]}
COMMON = {"model": MODEL, "sampling": SAMPLING, "rollout": ROLLOUT, "rollout__native": NATIVE, "runtime": RUNTIME}
TREES = {
    "rl": build_tree(
        RLConfig, {"model": MODEL_HERE, "data": DATA_HERE}, "reference evaluation.data train.lora", **COMMON, data=DATA,
        own="steps int [1,inf); prompts_per_step int [1,inf); updates_per_step int [1,inf); seed seed; numerics words fast exact",
        reward=REWARD, algorithm=ALGORITHM, train=TRAIN, evaluation=EVALUATION, evaluation__sampling=SAMPLING, checkpoint=CHECKPOINT,
        run=RUN,
    ),
    "sft": build_tree(
        SFTConfig, {"model": MODEL_HERE, "data": DATA_HERE}, "reward evaluation.data train.lora",
        **{key: table for key, table in COMMON.items() if key != "sampling"}, data=DATA,
        own="steps int [1,inf); rows_per_step int [1,inf); seed seed; numerics words fast exact",
        train=TRAIN, evaluation=EVALUATION, evaluation__sampling=SAMPLING, checkpoint=CHECKPOINT, run=RUN,
    ),
    "generate": build_tree(
        GenerateConfig, {"model": MODEL_HERE, "prompts": ["a"]}, "data", **COMMON,
        own="prompts texts; output text?; numerics words fast exact",
    ),
    "eval": build_tree(
        EvalConfig, {"model": MODEL_HERE, "evaluation": {"data": DATA_HERE}, "reward": {"function": "m:f"}}, "evaluation.data",
        **{key: table for key, table in COMMON.items() if key != "sampling"}, own="output text?; numerics words fast exact",
        evaluation=HELD_OUT, evaluation__sampling=SAMPLING, evaluation__data=DATA, reward=REWARD,
    ),
    "export": build_tree(
        ExportConfig, {"checkpoint": "runs/a", "output": "out"},
        own="checkpoint text; output text; dtype words auto float32 bfloat16; merge flag; base text?",
    ),
    "quickstart": build_tree(
        QuickstartConfig, {},
        own="seed seed; directory text; name name?; numerics words fast exact; device words auto cpu cuda cuda:0 cuda:11; "
        "sft_steps int [1,inf); rl_steps int [1,inf); stop_at real (0,1]",
        runtime=RUNTIME,
    ),
}  # fmt: skip

POOL: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, -7, 64, 10**6, 2**31, 2**63, 10**30, -(10**30), 0.5, 1.0, 1.5, -0.5, 1e-9, 1e30, -0.0,
    math.nan, math.inf, -math.inf, "", " ", "text", "1", "0.5", "true", "null", "nan", "1e-4", "auto", "none", "cuda:x", "../up", "a b",
    "a" * 300, [], [1], ["a"], [None], [["a"]], [-1], [""], [1, "a"], {}, {"a": 1}, {"a": {"b": 2}}, {"a": "b"}, [{"a": 1}],
)  # fmt: skip


def allows(kind: str, value: Any) -> bool:
    """Whether the value may stand where this kind is wanted."""
    if kind.endswith("?"):
        return value is None or allows(kind[:-1], value)
    name, _, rest = kind.partition(" ")
    if name == "flag":
        return isinstance(value, bool)
    if name in ("int", "real", "seed"):
        return _allows_number(name, rest or "[0,9223372036854775808)", value)
    if name in ("text", "name", "words"):
        fits = {
            "text": lambda: True,
            "name": lambda: re.fullmatch(r"\w[\w.-]*", value),
            "words": lambda: value in rest.split(),
        }
        return isinstance(value, str) and bool(fits[name]())
    if name in ("map", "textmap"):
        return isinstance(value, dict) and (name == "map" or all(isinstance(item, str) for item in value.values()))
    return isinstance(value, list) and _allows_items(name, value)


def _allows_number(name: str, ranges: str, value: Any) -> bool:
    if (
        isinstance(value, bool)
        or not isinstance(value, int if name != "real" else int | float)
        or not math.isfinite(value)
    ):
        return False
    span, _, besides = ranges.partition("|")
    low, high = span[1:-1].split(",")
    above = float(low) <= value if span[0] == "[" else float(low) < value
    below = value <= float(high) if span[-1] == "]" else value < float(high)
    # A whole number that no 64 bits hold is not meant.
    return ((above and below) or besides == str(value)) and (name == "real" or abs(value) < 2**63)


def _allows_items(name: str, value: list[Any]) -> bool:
    if name == "ids":
        return all(_allows_number("int", "[0,inf)", item) for item in value)
    texts = all(isinstance(item, str) for item in value)
    return texts and (bool(value) or name != "texts+") and ("" not in value or name != "filled")


@dataclass(frozen=True)
class Wrong:
    """A configuration that must be refused, and what the sentence must speak of: the key, as a pattern, and the value."""

    command: str
    values: dict[str, Any]
    key: str
    value: Any


def put(values: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    """A copy with the value at the path."""
    changed = copy.deepcopy(values)
    node = changed
    for part in path[:-1]:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[path[-1]] = value
    return changed


def sections(tree: Tree) -> list[Path_]:
    return sorted({path[:depth] for path in tree.kinds for depth in range(1, len(path))})


def change_value(tree: Tree, draw: random.Random) -> tuple[Path_, Any]:
    """A value of another type, or out of range."""
    path = draw.choice(sorted(tree.kinds))
    wrong = [value for value in POOL if not allows(tree.kinds[path], value)]
    return path, draw.choice(wrong)


def misspell_key(tree: Tree, draw: random.Random) -> tuple[Path_, Any]:
    """A key with a letter too few, too many, or two that changed places."""
    known = (
        {path[-1] for path in tree.kinds} | {part for path in tree.kinds for part in path} | {"tensor_parallel_size"}
    )
    while True:
        path = draw.choice(sorted(tree.kinds))
        word, at = path[-1], draw.randrange(len(path[-1]))
        misspelt = draw.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :],
            )
        )
        if misspelt and misspelt not in known and len(word) > 2:
            return (*path[:-1], misspelt), 1


def move_key(tree: Tree, draw: random.Random) -> tuple[Path_, Any]:
    """A key that stands in a section that is not its own, or a key that nobody has."""
    path = draw.choice(sorted(tree.kinds))
    place = draw.choice([(), *sections(tree)])
    word = draw.choice((path[-1], "no_such_key", "learning_rate_of_the_model", "__class__", "0"))
    taken = any(other[: len(place) + 1] == (*place, word) for other in tree.kinds) or word in KNOWN_ELSEWHERE.get(
        ".".join(place), ()
    )
    return move_key(tree, draw) if taken or _is_free(tree, place) else ((*place, word), 1)


KNOWN_ELSEWHERE = {
    "": ("path", "dtype"),
    "reference": tuple(MODEL.split()),
    "rollout": ("native", "vllm", "sglang"),
    "train": ("compile", "lora"),
    "train.optimizer": ("betas",),
}


def _is_free(tree: Tree, place: Path_) -> bool:
    return tree.kinds.get(place, "").startswith(("map", "textmap"))


def replace_section(tree: Tree, draw: random.Random) -> tuple[Path_, Any]:
    """A value where a section of keys should be."""
    place = draw.choice(sections(tree) or [("no_section",)])
    values = [
        value
        for value in POOL
        if not isinstance(value, dict) and (value is not None or ".".join(place) not in tree.nullable)
    ]
    return place, draw.choice(values)


def nest_value(tree: Tree, draw: random.Random) -> tuple[Path_, Any]:
    """A key below a value, as if it were a section."""
    path = draw.choice([path for path in sorted(tree.kinds) if not _is_free(tree, path)])
    return (*path, "value"), 1


CHANGES = (change_value, change_value, change_value, misspell_key, move_key, replace_section, nest_value)


def make(number: int) -> Wrong:
    draw = random.Random(number)
    command = sorted(TREES)[number % len(TREES)]
    tree = TREES[command]
    path, value = draw.choice(CHANGES)(tree, draw)
    # A section that is wrong as a whole is named by itself.
    named = path if path[:-1] not in tree.kinds else path[:-1]
    return Wrong(command, put(tree.right, path, value), ".".join(named), value)


def check_sentence(message: str, wrong: Wrong, told: str) -> None:
    assert "\n" not in message and len(message) < 600, told
    assert re.search(rf"(^|[\s'.]){re.escape(wrong.key)}([\s':.]|$)", message), told
    assert re.search(
        r"[;:] (the nearest key is|the keys of|correct|leave|set|write|give|take|keep|use|add|ids are|one of)", message
    ), told
    short = isinstance(wrong.value, str | int) and not isinstance(wrong.value, bool) and len(str(wrong.value)) < 60
    if short and wrong.value != "":
        assert str(wrong.value) in message, told


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_each_wrong_configuration_is_one_sentence(first: int) -> None:
    for number in range(first, first + 100):
        wrong = make(number)
        with pytest.raises(ConfigError) as caught:
            check_config(TREES[wrong.command].settings, wrong.values)
        check_sentence(
            str(caught.value), wrong, f"{number}, {wrong.command} {wrong.key}={wrong.value!r}: {caught.value}"
        )


def iter_right(tree: Tree) -> Iterator[tuple[Path_, Any]]:
    for path, kind in sorted(tree.kinds.items()):
        for value in POOL:
            if allows(kind, value):
                yield path, value


@pytest.mark.parametrize("command", sorted(TREES))
def test_what_the_table_allows_is_taken_as_it_is(command: str) -> None:
    """Else the refusals above would prove nothing."""
    tree, taken = TREES[command], 0
    for path, value in iter_right(tree):
        node = to_plain(check_config(tree.settings, put(tree.right, path, value)))
        for part in path:
            node = node[part]
        # A whole number where a real one is meant becomes that.
        wanted = float(value) if tree.kinds[path].startswith("real") and value is not None else value
        assert (node, type(node)) == (wanted, type(wanted)), (path, value)
        taken += 1
    assert taken > 30


@pytest.mark.parametrize("command", sorted(TREES))
def test_a_key_that_is_given_leaves_the_defaults_of_all_others(command: str) -> None:
    """E.g. `evaluation.sampling.max_new_tokens=5` does not end greedy decoding."""
    tree = TREES[command]
    whole = to_plain(check_config(tree.settings, tree.right))
    leaves = list(iter_leaves(whole))
    assert len(leaves) > 4
    for path, value in leaves:
        assert to_plain(check_config(tree.settings, put(tree.right, path, value))) == whole, path


def iter_leaves(values: Any, above: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if not isinstance(values, dict) or not values:
        yield above, values
        return
    for key, value in values.items():
        yield from iter_leaves(value, (*above, key))


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_command_line_says_the_same_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(first, first + 20):
        wrong = make(number)
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(wrong.values))
        code = main([wrong.command, "--config-path", str(tmp_path), "--config-name", "mine"])
        shown = capsys.readouterr()
        told = f"{number}: {shown.err}"
        assert (code, shown.out) == (2, ""), told
        assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, told
        assert wrong.key.split(".")[-1] in shown.err, told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]


def is_right(tree: Tree, values: Any, above: Path_ = ()) -> bool:
    """Whether the table allows all of a parsed file."""
    if above in tree.kinds:
        return allows(tree.kinds[above], values)
    known = [path for path in tree.kinds if path[: len(above)] == above]
    return (
        bool(known)
        and isinstance(values, dict)
        and all(is_right(tree, value, (*above, str(key))) for key, value in values.items())
    )


TEXT = """\
model:
  path: models/tiny
data:
  files: [a.jsonl, b.jsonl]
  max_tokens: 512   # both together
steps: 20
train:
  optimizer: {lr: 1.0e-4, eps: 1.0e-8}
run: {name: first, tensorboard: false}
"""


def break_text(number: int) -> bytes:
    draw = random.Random(number)
    text = bytearray(TEXT.encode())
    at = draw.randrange(len(text))
    change = draw.randrange(4)
    if change == 0:
        text[at : at + 1] = draw.choice(
            (b"\t", b"\xff", b"\x00", b"[", b"{", b"'", b'"', b": ", b"- ", b"*", b"&", b"%", b"@", b"`", b"|")
        )
    elif change == 1:
        del text[at : at + draw.randrange(1, 12)]
    elif change == 2:
        text[at:at] = draw.choice(
            (b"  ", b"\n", b"]", b"}", b"${x}", b"???", b"!!python/object:os.system ", b"<<: ", b"\xc3", b",", b"#")
        )
    else:
        del text[at:]
    return bytes(text)


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_a_file_with_bytes_changed_is_refused_in_a_sentence_or_still_right(tmp_path: Path, first: int) -> None:
    from hybridflow.config import load_config

    for number in range(first, first + 30):
        content = break_text(number)
        (tmp_path / "mine.yaml").write_bytes(content)
        try:
            load_config(SFTConfig, config_name="mine", config_path=tmp_path)
        except ConfigError as error:
            message = str(error)
            assert message and all(len(line) < 600 for line in message.splitlines()), (number, message)
            assert all("; " in line or ": the nearest key is" in line for line in message.splitlines()), (
                number,
                message,
            )
        else:
            parsed = yaml.safe_load(content)
            assert "model" in parsed and "data" in parsed and is_right(TREES["sft"], parsed), (number, content)


def test_the_table_speaks_of_nearly_all_keys() -> None:
    """Keys of no simple kind are tested by themselves: mappings of devices, numbers or words in one key."""
    keys = {path for command in ("rl", "sft") for path in TREES[command].kinds}
    plain = to_plain(check_config(RLConfig, TREES["rl"].right))
    leaves = {".".join(path) for path in _iter_leaves(plain)}
    missing = leaves - {".".join(path) for path in keys}
    assert len(missing) < 0.3 * len(leaves), json.dumps(sorted(missing))


def _iter_leaves(node: Any, above: Path_ = ()) -> Iterator[Path_]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _iter_leaves(value, (*above, key))
        else:
            yield (*above, key)
