"""What benchmarks are asked on their command line, and the lines of JSON that they print."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
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


class Lengths(str):
    """Tokens of a row: `512`, or `100-1024` for uniform in between; a string, so that it is printed as it was written."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most."""
        least, _, most = self.partition("-")
        return int(least), int(most or least)


FORMS = {
    int: ("a whole number", r"\d+", 999_999_999),
    float: ("a number", r"\d+(\.\d+)?", 999_999_999),
    Lengths: ("a length, or a range such as 100-1024,", r"\d+(-\d+)?", 131_072),
}
"""By the type of a default what is asked for, how it is written, and up to what; lengths up to the positions of `shapes.SHAPES`."""


def one_of(default: Any, *others: Any) -> Any:
    """The field of a case that is one of these."""
    choices = {str(choice): choice for choice in (default, *others)}
    return dataclasses.field(default=default, metadata={"choices": choices})


def at_least(least: int, default: int) -> Any:
    """The field of a case that is a whole number from `least` up."""
    return dataclasses.field(default=default, metadata={"least": least})


def check_groups(rows: int, samples: int) -> None:
    """Rows are whole groups of samples of one prompt. Raises ValueError."""
    if rows % samples:
        raise ValueError(
            f"rows={rows} is no multiple of the {samples} samples of a prompt; write one, such as rows={8 * samples}"
        )


def parse_case(kind: type[Case], text: str) -> Case:
    """Settings from `key=value,key=value`, in the types of their defaults; what is not named keeps its default.

    kind: a dataclass, every field with a default that is a number, a string, `Lengths`, or `one_of` several; ValueErrors of its
    `__post_init__` are told. A whole number is at least 1, or where its default is 0 at least 0, if it is not `at_least` another.
    Asked for `--help`, prints the docstring of the script and the settings, and ends.
    """
    if {"-h", "--help"} & set(text.split(",")):
        _print_help(kind)
        raise SystemExit
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
    try:
        return kind(**{name: _read_value(fields[name], value) for name, value in pairs})
    except ValueError as error:
        raise SystemExit(f"{text}: {error}") from None


def _read_value(field: dataclasses.Field[Any], value: str) -> Any:
    """What a setting's text says, by its default. Raises ValueError."""
    if choices := field.metadata.get("choices"):
        if value not in choices:
            raise ValueError(f"{field.name}={value} is none of {', '.join(choices)}; write one of them")
        return choices[value]
    if (form := type(field.default)) is str:
        return value
    wanted, pattern, most = FORMS[form]
    least = field.metadata.get("least", 0 if form is float or field.default == 0 else 1)
    numbers = [least, *map(float, value.split("-")), most] if re.fullmatch(pattern, value, re.ASCII) else []
    if not numbers or numbers != sorted(numbers):
        asked = f"{wanted} from {least} to {most}"
        raise ValueError(f"{field.name}={value} is not {asked}; write one, such as {field.default}")
    return form(value)


def _print_help(kind: type[Any]) -> None:
    """The docstring of the script, and its settings with their defaults."""
    print(sys.modules[kind.__module__].__doc__, "Settings:", sep="\n")
    for field in dataclasses.fields(kind):
        _, *others = field.metadata.get("choices", [""])
        print(f"    {field.name}={field.default}" + (f" (or {', '.join(others)})" if others else ""))


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
