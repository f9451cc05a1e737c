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
        ("updates", ["gpus=x"], "gpus=x: gpus=x is not a whole number from 0 up; write one, such as 1"),
        ("updates", ["rows=8", "gpus=-1"], "rows=8,gpus=-1: gpus=-1 is not a whole number from 0 up; write one, such as 1"),
        ("updates", ["shape=nix"], "shape=nix: shape=nix is none of qwen3-0.6b, qwen2.5-0.5b, .*, tiny; write one of them"),
        ("updates", ["updates=1"], "updates=1, rows=256, gpus=1: the first probe comes with the second update, .*; write at least 2"),
        ("decode", ["temperature=nan"], "temperature=nan: temperature=nan is not a number from 0 up; write one, such as 1.0"),
        ("long_tail", ["rows=3,shape=tiny,rows=4"], "rows=3,shape=tiny,rows=4: rows is set twice; write it once"),
        ("rl_step", ["side=ours"], "side=ours: side=ours is none of hybridflow, trl; write one of them"),
        ("weight_switch", ["cases=same+nix"], "cases=same\\+nix: 'nix' is none of replicas, .*; write one or several"),
        ("decode_tensor", ["degrees=1+x"], "degrees=1\\+x: 'x' is none of 1, 2, 4, 8; write one or several"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_one_sentence(
    name: str, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit, match=sentence):
        importlib.import_module(name).main()


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
