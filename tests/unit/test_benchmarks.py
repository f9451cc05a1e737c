"""Benchmarks run by hand: what they import is there, and the commands that the docs give are ones that they take."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
COMMAND = re.compile(r"python benchmarks/(\w+)\.py((?:\s+(?:--[\w-]+|[a-z_]+=[^\s`]+))+)")

OPTIONAL = {"accelerate", "datasets", "liger_kernel", "ray", "triton", "trl", "vllm"}
"""What a benchmark may import that an environment for tests need not have."""


def iter_commands() -> Iterator[tuple[str, str]]:
    """Each benchmark of the docs with a case or an option that it is given there."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name, words in COMMAND.findall(page.read_text()):
            yield from ((name, word) for word in words.split())


def list_names(file: Path) -> set[str]:
    """What a file of the repository defines or imports at its top."""
    body = ast.parse(file.read_text()).body
    names = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    stored = (node for line in body for node in ast.walk(line) if isinstance(node, ast.Name))
    return names | {node.id for node in stored if isinstance(node.ctx, ast.Store)}


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_is_there(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        wanted = {alias.name for alias in node.names}
        near = [directory / f"{node.module}.py" for directory in (file.parent, ROOT / "tests" / "e2e")]
        if (found := next(filter(Path.is_file, near), None)) is not None:
            assert wanted <= list_names(found), f"{found} lacks {wanted - list_names(found)}"
        elif node.module.startswith("hybridflow"):
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if error.name not in ("triton", "vllm"):
                    raise
                continue
            lacking = [name for name in wanted if not hasattr(module, name) and not find_spec(f"{node.module}.{name}")]
            assert not lacking, f"{node.module} lacks {lacking}"
        else:
            root = node.module.partition(".")[0]
            assert root in OPTIONAL or find_spec(root), f"{node.module} is neither here nor installed"


@pytest.mark.parametrize(("name", "word"), sorted(set(iter_commands())))
def test_a_benchmark_takes_what_the_docs_give_it(name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if word.startswith("--"):
        assert f'"{word}"' in (ROOT / "benchmarks" / f"{name}.py").read_text()
        return
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module, cases = importlib.import_module(name), importlib.import_module("cases")
    kind = module.Run if hasattr(module, "Run") else module.Case
    given = word.removesuffix(",shape=...")
    case = cases.parse_case(kind, given)
    assert {pair.split("=")[0] for pair in given.split(",")} >= cases.list_given(case).keys()


def test_a_case_says_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cases, long_tail = importlib.import_module("cases"), importlib.import_module("long_tail")
    case = cases.parse_case(long_tail.Case, "rows=3,shape=tiny")
    assert (case.rows, case.seats, cases.list_given(case)) == (3, 12, {"shape": "tiny", "rows": 3})
    for text in ("rowz=3", "rows"):
        with pytest.raises(SystemExit, match=f"'{text}' is no setting; write key=value of shape, rows, seats"):
            cases.parse_case(long_tail.Case, text)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("updates", ["gpus=x"], "gpus=x: gpus=x is not a whole number from 1 to 999999999; write one, such as 1"),
        ("updates", ["rows=8", "gpus=-1"], "rows=8,gpus=-1: gpus=-1 is not a whole number from 1 to .*; write one, such as 1"),
        ("updates", ["shape=nix"], "shape=nix: shape=nix is none of qwen3-0.6b, qwen2.5-0.5b, .*, tiny; write one of them"),
        ("updates", ["updates=1"], "updates=1: updates=1 is not a whole number from 2 to .*; write one, such as 50"),
        ("updates", ["rows=6"], "rows=6: rows=6 is no multiple of the 4 samples of a prompt; write one, such as rows=32"),
        ("updates", ["prompt=0"], "prompt=0 is not a whole number from 1 to .*; write one, such as 128"),
        ("updates", ["load=7"], "load=7 is none of 1, 0; write one of them"),
        ("updates", ["engine=vllm"], "engine=vllm: vLLM is not installed; pip install vllm, or write engine=native"),
        ("decode", ["temperature=nan"], "temperature=nan: temperature=nan is not a number from 0 to .*; write one, such as 1.0"),
        ("decode", ["temperature=1_0"], "temperature=1_0 is not a number from 0 to .*; write one, such as 1.0"),
        *(
            ("decode", [f"prompt={text}"], f"prompt={text} is not a length, or a range such as 100-1024, .*; write one, such as 128")
            for text in ("a", "", "-5", "5-", "0", "1-2-3", "10-5", "9" * 5000)
        ),
        *(
            ("decode", [f"rows={text}"], f"rows={re.escape(text)} is not a whole number from 1 to .*; write one, such as 256")
            for text in ("0", "1_0", "+4", " 4", "4\n", "\u0664", "4.0", "1e3", "9" * 5000)
        ),
        ("decode", ["samples=0"], "samples=0 is not a whole number from 1 to .*; write one, such as 1"),
        ("decode", ["rows=7,samples=2"], "rows=7 is no multiple of the 2 samples of a prompt; write one, such as rows=16"),
        ("decode", ["logprobs=7"], "logprobs=7 is none of 1, 0; write one of them"),
        ("decode_tensor", ["split=2"], "split=2 is none of 1, 0; write one of them"),
        ("decode_tensor", ["degrees=1+x"], "degrees=1\\+x: 'x' is none of 1, 2, 4, 8; write one or several"),
        ("long_tail", ["rows=3,shape=tiny,rows=4"], "rows=3,shape=tiny,rows=4: rows is set twice; write it once"),
        ("long_tail", ["seats=0"], "seats=0 is not a whole number from 1 to .*; write one, such as 12"),
        ("race_trl", ["steps=0"], "steps=0 is not a whole number from 1 to .*; write one, such as 20"),
        ("race_trl", ["paged=2"], "paged=2 is none of 0, 1; write one of them"),
        ("rl_step", ["side=ours"], "side=ours: side=ours is none of hybridflow, trl; write one of them"),
        ("rl_step", ["steps=1", "rows=1"], "rows=1: 'rows=1' is no setting; write key=value of side, shape, prompts"),
        ("train_scaling", ["tp=0"], "tp=0 is not a whole number from 1 to .*; write one, such as 1"),
        ("train_speed", ["rows=2000-200"], "rows=2000-200 is not a length, or a range such as 100-1024, .*; write one, such as 8192"),
        ("train_speed", ["checkpointing=half"], "checkpointing=half is none of none, selective, full, auto; write one of them"),
        ("weight_switch", ["rounds=0"], "rounds=0 is not a whole number from 1 to .*; write one, such as 7"),
        ("weight_switch", ["cases=same+nix"], "cases=same\\+nix: 'nix' is none of replicas, .*; write one or several"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_one_sentence(
    name: str, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "find_spec", lambda _: None, raising=False)
    with pytest.raises(SystemExit, match=sentence):
        module.main()


@pytest.mark.parametrize(
    "name", [file.stem for file in BENCHMARKS if re.search("import .*parse_(case|whole)", file.read_text())]
)
def test_help_tells_settings_that_are_taken(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        module.main()
    told, _, settings = capsys.readouterr().out.partition("Settings:\n")
    assert ended.value.code is None and told.startswith(module.__doc__)
    words = [line.split()[0] for line in settings.splitlines()]
    kind = module.Run if hasattr(module, "Run") else module.Case
    assert importlib.import_module("cases").parse_case(kind, ",".join(words)) == kind()


def test_a_failed_case_is_a_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("sys.argv", ["long_tail.py", "rows=1", "rows=2"])
    long_tail = importlib.import_module("long_tail")
    for failing, code in ((1, 1), (3, 0)):
        monkeypatch.setattr(long_tail, "measure", lambda case, failing=failing: {"whole_s": 1 / (case.rows - failing)})
        with pytest.raises(SystemExit) as ended:
            long_tail.main()
        first, second = map(json.loads, capsys.readouterr().out.splitlines())
        assert ended.value.code == code and "whole_s" in second
        assert first.get("error") == ("ZeroDivisionError: division by zero" if code else None)
