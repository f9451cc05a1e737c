"""The command line: help, arguments, exit codes, and what is printed where."""

import functools
import itertools
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow import __version__
from hybridflow.cli.command import Command, print_json
from hybridflow.cli.main import COMMANDS, main
from hybridflow.config import ConfigError, Field, load_config, settings, to_yaml

NAMES = ("sft", "rl", "generate", "eval", "export", "report", "plan", "quickstart", "doctor")


@settings
class Toy:
    """A toy."""

    steps: int = Field(default=3, ge=1)
    """Steps."""
    name: str = "toy"
    """Name."""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command whose function is given, on a configuration of its own."""
    (tmp_path / "toy.yaml").write_text("steps: 5\n")
    (tmp_path / "other.yaml").write_text("defaults: [toy, _self_]\nname: other\n")

    def run(function: Callable[[Toy], Any], *words: str) -> int:
        command = Command("toy", "Plays.", ("hybridflow toy steps=2",), lambda: (Toy, function), print_json)
        monkeypatch.setitem(COMMANDS, "toy", command)
        monkeypatch.setattr(sys, "path", [*sys.path])
        return main(["toy", "--config-path", str(tmp_path), *words])

    return run


def describe(config: Toy) -> dict[str, Any]:
    return {"steps": config.steps, "name": config.name, "loss": float("nan"), "parts": {"gap": float("inf")}}


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, "-m", "hybridflow", "--help"], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert shown.returncode == 0
    assert all(f"\n  {name} " in shown.stdout for name in NAMES)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_every_command_has_help_with_examples_without_heavy_imports() -> None:
    code = (
        "import sys, contextlib\n"
        "from hybridflow.cli.main import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main([name, '--help'])\n"
        "print(sorted({'torch', 'transformers', 'ray', 'hydra', 'pydantic', 'numpy', 'pyarrow'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("[]\n")
    for name in NAMES:
        assert f"usage: hybridflow {name} " in done.stdout
        assert f"\nexamples:\n  hybridflow {name}" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"hybridflow {__version__}\n")


def test_a_command_gets_its_settings(toy: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert toy(describe, "name=a", "--config-name", "other", "steps=7") == 0
    assert json.loads(capsys.readouterr().out) == {"steps": 7, "name": "a", "loss": None, "parts": {"gap": None}}


def test_print_config_runs_nothing(toy: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(config: Toy) -> None:
        raise AssertionError("ran")

    assert toy(refuse, "--print-config", "+name=b") == 0
    assert capsys.readouterr().out == "# A toy.\n# Steps.\nsteps: 5\n# Name.\nname: b\n"


def test_a_wrong_setting_is_one_line_and_exit_code_2(
    toy: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy(describe, "stepz=7") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: unknown key 'stepz' (value 7): the nearest key is 'steps'; correct it or take it out\n"
    assert toy(describe, "steps=0", "name=3") == 2
    assert [line.split(" ")[:2] for line in capsys.readouterr().err.splitlines()] == [
        ["error:", "steps"],
        ["error:", "name"],
    ]


def test_a_setting_found_wrong_while_running_is_told_alike(
    toy: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def complain(config: Toy) -> None:
        raise ConfigError("name: 'toy' is taken; name another")

    assert toy(complain) == 2
    assert capsys.readouterr().err == "error: name: 'toy' is taken; name another\n"


def test_an_interrupt_is_quiet(toy: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(config: Toy) -> None:
        raise KeyboardInterrupt

    assert toy(interrupt) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_failed_run_is_not_hidden(toy: Callable[..., int]) -> None:
    def fail(config: Toy) -> None:
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        toy(fail)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rll"], "error: unknown command 'rll'; the nearest is 'rl'\n"),
        (["xyz"], f"error: unknown command 'xyz'; the commands are {', '.join(NAMES)}\n"),
    ],
)
def test_an_unknown_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rl", "--config-nam", "x"], "error: unrecognized arguments: --config-nam; see hybridflow rl --help\n"),
        (["rl", "--config-name"], "error: argument --config-name: expected one argument; see hybridflow rl --help\n"),
        (["--print-config", "rl"], "error: unrecognized arguments: --print-config rl; see hybridflow --help\n"),
    ],
)
def test_an_unknown_option(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err == message


def test_without_a_command_it_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "from hybridflow.cli import main as cli\n"
        "cli.run = lambda command, parsed: print('line\\n' * 1_000_000)\n"
        "sys.exit(cli.main(['rl']))\n"
    )
    program = '"$0" -c "$1" | head -n 1; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", program, sys.executable, code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "line\n", "")


REQUIRED = {
    "sft": ["model.path=m", "data.files=[a.jsonl]"],
    "rl": ["model.path=m", "data.files=[a.jsonl]"],
    "generate": ["model.path=m"],
    "eval": ["model.path=m", "evaluation.data.files=[a.jsonl]"],
    "report": ["run=x"],
    "export": ["checkpoint=c", "output=o"],
    "plan": ["model.path=m", "data.files=[a.jsonl]"],
    "quickstart": [],
    "doctor": [],
}


@pytest.mark.parametrize("name", NAMES)
def test_every_command_starts_from_its_shipped_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main([name, *REQUIRED[name], "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    assert main([name, "--config-path", str(tmp_path), "--config-name", "again", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", ["rl", "sft", "eval", "generate", "quickstart", "export"])
def test_every_printed_key_has_what_it_means_above_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, *REQUIRED[name], "--print-config"]) == 0
    printed = capsys.readouterr().out
    config = load_config(COMMANDS[name].load()[0], config_name=name, overrides=REQUIRED[name])
    assert yaml.safe_load(printed) == yaml.safe_load(to_yaml(config))
    keys = [pair for pair in itertools.pairwise(printed.splitlines()) if re.match(r" *\w+:", pair[1])]
    assert len(keys) == len(re.findall(r"^ *\w+:", to_yaml(config), re.MULTILINE))
    indents = [(re.match(" *# ", above), re.match(" *", key)) for above, key in keys]
    assert all(above and key and above[0] == f"{key[0]}# " for above, key in indents)
    assert max(map(len, printed.splitlines())) <= 120
    if name == "rl":  # A key of the section's own class, and one of the class that it extends.
        assert "  # Steps between evaluations; 0 evaluates after the last step alone.\n  every_steps: 0\n" in printed
        assert "  # Takes the first this many rows; 0 takes all.\n  max_prompts: 0\n" in printed


@pytest.mark.parametrize(
    ("name", "word", "key", "default"),
    [
        ("eval", "evaluation.sampling.max_new_tokens=5", "evaluation.sampling.temperature", 0.0),
        ("rl", "evaluation.sampling.max_new_tokens=5", "evaluation.sampling.temperature", 0.0),
        ("rl", "~sampling.samples_per_prompt", "sampling.samples_per_prompt", 8),
        ("sft", "~train.optimizer.lr", "train.optimizer.lr", 1e-5),
    ],
)
def test_a_section_that_is_given_in_part_has_the_commands_defaults_for_the_rest(
    capsys: pytest.CaptureFixture[str], name: str, word: str, key: str, default: float
) -> None:
    assert main([name, *REQUIRED[name], word, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert functools.reduce(lambda node, part: node[part], key.split("."), printed) == default


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("sft", ["data.files"]),
        ("rl", ["data.files"]),
        ("plan", ["data.files"]),
        ("eval", ["evaluation.data.files"]),
        ("export", ["checkpoint", "output"]),
        ("generate", []),
        ("quickstart", []),
    ],
)
def test_a_configuration_is_printed_before_all_of_it_is_set(
    name: str, missing: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main([name, "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    found = {key: functools.reduce(lambda node, part: node[part], key.split("."), printed) for key in missing}
    assert found == dict.fromkeys(missing, "???")
    assert str(printed).count("???") == len(missing)


def test_help_names_the_configuration_that_a_command_starts_from(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(name: str) -> str:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        return capsys.readouterr().out

    assert "\nstarts from sft.yaml in /" in help_of("sft") and "quickstart_" not in help_of("sft")
    assert "\nstarts from rl.yaml or sft.yaml in /" in help_of("plan") and "plan [rl | sft] " in help_of("plan")
    assert "--print-config  " in help_of("quickstart") and "every key with its meaning" in help_of("quickstart")
    assert "overrides:" in help_of("sft") and "[KEY=VALUE ...]" in help_of("sft")
    told = help_of("doctor")
    assert "--json" in told and not any(word in told for word in ("KEY=VALUE", "overrides", "--config-name", ".yaml"))


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("rl", "lr=1", "unknown key 'lr' (value 1): the nearest key is 'train.optimizer.lr'"),
        (
            "rl",
            "train.optimizer.lrr=1",
            "unknown key 'train.optimizer.lrr' (value 1): the nearest key is 'train.optimizer.lr'",
        ),
        ("sft", "train.lora=8", "train.lora is 8 and must be a section of keys; write train.lora.rank=8"),
        ("sft", "model=m", "model is 'm' and must be a section of keys; write model.path='m'"),
        ("sft", "data=a.jsonl", "data is 'a.jsonl' and must be a section of keys; write data.files=['a.jsonl']"),
        (
            "sft",
            "train.parallel_config.pp=2",
            "unknown key 'train.parallel_config.pp' (value 2): the keys of 'train.parallel_config' are dp, shard, sp, tp; ",
        ),
        (
            "sft",
            "train.gradient_checkpointing=true",
            "train.gradient_checkpointing is true, but it is one of none, selective, full, auto; write full",
        ),
        ("rl", "train.optimizer.lr=fast", "train.optimizer.lr is 'fast' and must be a number"),
        ("sft", "numerics=exakt", "numerics is 'exakt'; write one of fast, exact (the nearest is exact)"),
        ("quickstart", "seed=-1", "seed is -1 and must be greater than or equal to 0"),
    ],
)
def test_a_misspelt_key_of_a_real_command(
    name: str, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, *REQUIRED[name], word, "--print-config"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}")
    assert shown.count("\n") == 1
