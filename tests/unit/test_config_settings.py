"""Settings classes: frozen, strict, and constructed from Python with sentences for errors."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter

from hybridflow.config import AliasChoices, ConfigError, Field, check_config, settings, to_yaml


@settings
class Inner:
    """A section."""

    rate: float = Field(default=0.5, gt=0.0, le=1.0)
    """Fraction of rows."""
    names: tuple[str, ...] = ()
    """Names."""
    size: int = 3
    """Rows."""


@settings
class Outer:
    """A root."""

    path: str
    """Directory of the model."""
    inner: Inner = Field(default_factory=Inner)
    """A section."""
    on: bool = False
    """Whether."""
    kind: Literal["fast", "exact"] = "fast"
    """How."""
    function: str | Callable[..., Any] | None = None
    """Import path or function."""
    where: Path = Path(".")
    """A place."""

    def __post_init__(self) -> None:
        if self.kind == "exact" and self.on:
            raise ValueError("on is true while kind is 'exact'; set on=false")


def test_values_are_kept_and_only_widened() -> None:
    inner = Inner(rate=1, names=["a", "b"])  # type: ignore[arg-type]
    assert inner == Inner(rate=1.0, names=("a", "b"), size=3)
    assert type(inner.rate) is float
    assert Outer(path="x", function=len).function is len


@settings
class Degrees:
    """Keys with a second name."""

    tp: int = Field(default=1, ge=1, validation_alias=AliasChoices("tp", "tensor_parallel_size"))
    """Along matrices."""
    sp: int = Field(default=1, ge=1, validation_alias=AliasChoices("sp", "sequence_parallel_size"))
    """Along sequences."""


@settings
class Layered:
    """A section with second names."""

    degrees: Degrees = Field(default_factory=Degrees)
    """How."""


def test_a_key_may_be_written_by_its_second_name_and_is_written_out_by_its_own() -> None:
    read = check_config(Layered, {"degrees": {"tensor_parallel_size": 4, "sp": 2}})
    assert read == Layered(degrees=Degrees(tp=4, sp=2))
    assert dataclasses.replace(read.degrees, tp=8) == Degrees(tp=8, sp=2)
    assert to_yaml(read) == "degrees:\n  tp: 4\n  sp: 2\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"tensor_parallel_size": 4, "tp": 4},
            "degrees.tensor_parallel_size and degrees.tp are two names of one setting, and both are set; keep one",
        ),
        (
            {"tensor_parallel": 4},
            "unknown key 'degrees.tensor_parallel' (value 4): the nearest key is 'degrees.tensor_parallel_size'; "
            "correct it or take it out",
        ),
        (
            {"pp": 4},
            "unknown key 'degrees.pp' (value 4): the keys of 'degrees' are sp, tp; take it out or use one of these",
        ),
        (
            {"sequence_parallel_size": 0},
            "degrees.sequence_parallel_size is 0 and must be greater than or equal to 1; "
            "correct it or leave it at its default, 1",
        ),
    ],
)
def test_a_wrong_second_name_is_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(Layered, {"degrees": values})
    assert str(caught.value) == message


def test_a_settings_object_cannot_change() -> None:
    with pytest.raises((AttributeError, TypeError, ValueError)):
        Inner().size = 4  # type: ignore[misc]
    assert hash(Inner(names=("a",))) == hash(Inner(names=("a",)))


def test_it_copies_and_travels() -> None:
    outer = Outer(path="x", inner=Inner(size=7))
    assert pickle.loads(pickle.dumps(outer)) == copy.deepcopy(outer) == outer
    assert dataclasses.replace(outer, on=True).inner.size == 7
    with pytest.raises(ConfigError, match="Outer.on"):
        dataclasses.replace(outer, on=3)  # type: ignore[arg-type]


def test_docstrings_are_descriptions() -> None:
    schema = TypeAdapter(Inner).json_schema()
    assert schema["properties"]["rate"]["description"] == "Fraction of rows."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "3"}, "Inner.size is '3' and must be a whole number; correct it or leave it at its default, 3"),
        ({"size": 3.0}, "Inner.size is 3.0 and must be a whole number; correct it or leave it at its default, 3"),
        ({"size": True}, "Inner.size is true and must be a whole number; correct it or leave it at its default, 3"),
        ({"rate": "0.5"}, "Inner.rate is '0.5' and must be a number; correct it or leave it at its default, 0.5"),
        ({"rate": False}, "Inner.rate is false and must be a number; correct it or leave it at its default, 0.5"),
        ({"rate": 0}, "Inner.rate is 0 and must be greater than 0; correct it or leave it at its default, 0.5"),
        (
            {"rate": float("nan")},
            "Inner.rate is nan and must be a finite number; correct it or leave it at its default, 0.5",
        ),
        ({"names": ["a", 1]}, "Inner.names.1 is 1 and must be a string; correct the value"),
        ({"names": "a"}, "Inner.names is 'a' and must be a list; write it as one, 'Inner.names=[a]'"),
        ({"sise": 3}, "unknown key 'Inner.sise' (value 3): the nearest key is 'Inner.size'; correct it or take it out"),
    ],
)
def test_a_wrong_value_is_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Inner(**values)
    assert str(caught.value) == message


def test_a_wrong_section_is_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"^Outer.path is required and not set; set Outer.path \(Directory of the model\)$"
    ):
        Outer()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^Outer.function is 3 and must be a string or be a function; correct it"):
        Outer(path="x", function=3)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=r"^Outer.inner is \{'size': 3\} and must be an instance of Inner; correct it or leave it out$",
    ):
        Outer(path="x", inner={"size": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Outer: on is true while kind is 'exact'; set on=false$"):
        Outer(path="x", on=True, kind="exact")


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'ray', 'hydra', 'omegaconf', 'numpy', 'pyarrow', 'yaml'}"
    code = f"import sys, hybridflow.config; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
