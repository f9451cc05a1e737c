"""What benchmarks are asked on their command line, and the lines of JSON that they print."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch

FAILURES = (
    ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, OSError, LookupError, ArithmeticError, MemoryError,
)  # fmt: skip
"""What a measurement may die of, another library's mistakes included, without taking the ones after it along."""

Case = TypeVar("Case")


def one_of(default: str, *others: str) -> Any:
    """The field of a case that is one of these."""
    return dataclasses.field(default=default, metadata={"choices": dict.fromkeys((default, *others))})


def parse_case(kind: type[Case], text: str) -> Case:
    """Settings from `key=value,key=value`, in the types of their defaults; what is not named keeps its default.

    kind: a dataclass, every field with a default that is a number, a string, or `one_of` several.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    pairs = [word.split("=", 1) for word in text.split(",")] if text else []
    for name, *value in pairs:
        if name not in fields or not value:
            raise SystemExit(
                f"{text}: '{'='.join([name, *value])}' is no setting; write key=value of {', '.join(fields)}"
            )
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SystemExit(f"{text}: {twice} is set twice; write it once")
    return kind(**{name: _read_value(fields[name], value, text) for name, value in pairs})


def _read_value(field: dataclasses.Field[Any], value: str, text: str) -> Any:
    """What a setting's text says, by its default."""
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise SystemExit(f"{text}: {field.name}={value} is none of {', '.join(choices)}; write one of them")
    if isinstance(field.default, str):
        return value
    try:
        number = type(field.default)(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        wanted = "a number" if isinstance(field.default, float) else "a whole number"
        raise SystemExit(f"{text}: {field.name}={value} is not {wanted} from 0 up; write one, such as {field.default}")
    return number


def parse_cases(kind: type[Case]) -> list[Case]:
    """The cases of the command line, one a word."""
    return [parse_case(kind, text) for text in sys.argv[1:]]


def parse_whole_line(kind: type[Case]) -> Case:
    """The one case of a command line, its settings in one word or in several; the defaults where there is none."""
    return parse_case(kind, ",".join(sys.argv[1:]))


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """For options in place of cases; the benchmark's docstring, as it is written, is their help."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def list_given(case: Any, always: Collection[str] = ()) -> dict[str, Any]:
    """The settings of a case that are not the defaults, and those that are always told."""
    return {
        field.name: value
        for field in dataclasses.fields(case)
        if (value := getattr(case, field.name)) != field.default or field.name in always
    }


def split_words(name: str, text: str, among: Collection[str]) -> list[str]:
    """The words of a setting that is several of these, `one+another`."""
    words = text.split("+")
    for word in words:
        if word not in among:
            raise SystemExit(
                f"{name}={text}: '{word}' is none of {', '.join(among)}; write one or several, with + between"
            )
    return words


def print_line(values: dict[str, Any]) -> None:
    """One line of JSON, at once."""
    print(json.dumps(values), flush=True)


def print_cases(
    cases: Iterable[Case], measure: Callable[[Case], dict[str, Any]], always: Collection[str] = ("side", "shape")
) -> bool:
    """Each case and what was measured as a line of JSON, or the error that ended it; returns whether one did."""
    failed = False
    for case in cases:
        try:
            result = measure(case)
        except FAILURES as error:
            traceback.print_exc()
            failed, result = True, {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        print_line({**list_given(case, always), **result, "torch": torch.__version__})
        free_memory()
    return failed


def free_memory() -> None:
    """Gives back what the last measurement held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
