"""Which function a reward is, how it travels to its process, and which columns it is given."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa

from hybridflow.config import ConfigError
from hybridflow.config.functions import read_function_name
from hybridflow.rewards import builtin
from hybridflow.rewards.child import Parameters, Transport

RewardFunction = Callable[..., Any]
"""Called with columns of one row by keyword; gives a finite number."""

BUILTIN = {
    "exact_match": builtin.__file__,
    "gsm8k": builtin.__file__,
    "format_match": builtin.__file__,
    "math_equal": str(Path(builtin.__file__).with_name("math_equality.py")),
}
"""Rewards that come with hybridflow, and the file of each."""
SCORED_COLUMNS = (
    "prompt",
    "response",
    "tokens",
    "loss_mask",
    "rollout_logprobs",
    "prompt_id",
    "group_id",
    "sample_id",
    "policy_version_min",
    "policy_version_max",
    "finish_reason",
    "state",
)
"""What a row has when it is scored, beside the data's own columns."""


def carry_function(function: RewardFunction) -> Transport:
    """How a live function reaches its process: by cloudpickle."""
    return {"pickle": base64.b64encode(cloudpickle.dumps(function)).decode()}


def describe_transport(name: str, key: str = "reward.function") -> Transport:
    """How the function of this name reaches its process. Raises ConfigError naming the setting `key`.

    name: `pkg.mod:fn`, `path/to/file.py:fn` (from the working directory) or one of `BUILTIN`.
    """
    if name in BUILTIN:
        # By file: importing the package would make each start of a process several times slower.
        return {"file": BUILTIN[name], "name": name}
    named = read_function_name(name, key, BUILTIN)
    if named.is_file:
        return {"file": os.path.abspath(named.place), "name": named.name}
    return {"module": named.place, "name": named.name}


def source_hash(function: RewardFunction | str) -> str:
    """sha256 of the source, to be recorded with a run.

    A function that has a name to import it by: the whole file, so that what it calls in there counts too; a live one: its own source, or
    its pickled form where it has none (a console).
    """
    if isinstance(function, str):
        return hashlib.sha256(_source_file(describe_transport(function)).read_bytes()).hexdigest()
    try:
        source = inspect.getsource(function).encode()
    except (OSError, TypeError):
        source = cloudpickle.dumps(function)
    return hashlib.sha256(source).hexdigest()


def check_columns(parameters: Parameters, columns: Iterable[str], key: str) -> None:
    """Raise ConfigError, naming the setting `key`, if the function asks for a column that rows do not have."""
    there = sorted(set(columns))
    missing = [name for name in parameters["required"] if name not in there]
    if missing:
        raise ConfigError(
            f"{key}: its parameter '{missing[0]}' is no column; the columns are {', '.join(there)}: "
            "rename the parameter, or give it a default"
        )


def choose_columns(parameters: Parameters, schema: pa.Schema, key: str, arguments: Iterable[str]) -> list[str]:
    """The columns that the function is given: those it names, and with `**` each other one of scalars, but for its `arguments`.

    Raises ConfigError for one that is not there, or that holds what cannot travel as JSON (times).
    """
    check_columns(parameters, schema.names, key)
    named = {*parameters["required"], *parameters["optional"]}
    for field in schema:
        if field.name in named and not _is_json(field.type):
            raise ConfigError(
                f"{key}: its parameter '{field.name}' is a column of {field.type}, and a reward is given numbers, text, "
                "and lists and structs of them; convert the column to text"
            )
    return [
        field.name
        for field in schema
        if field.name not in arguments
        and (
            field.name in named
            or (parameters["takes_rest"] and _is_json(field.type) and not pa.types.is_nested(field.type))
        )
    ]


def _is_json(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_json(kind.value_type)
    tests = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_string,
        pa.types.is_large_string,
    )
    return pa.types.is_null(kind) or any(test(kind) for test in tests)


def _source_file(transport: Transport) -> Path:
    if "file" in transport:
        return Path(transport["file"])
    try:
        spec = importlib.util.find_spec(transport["module"])
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"reward.function: there is no module '{transport['module']}'; correct it, or add its place to PYTHONPATH"
        )
    return Path(spec.origin)
