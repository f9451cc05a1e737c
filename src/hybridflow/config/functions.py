"""Functions of the user that a setting names: `pkg.mod:fn` or `path/to/file.py:fn`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.config.errors import ConfigError
from hybridflow.config.schema import nearest


@dataclass(frozen=True)
class FunctionName:
    """Where a function is: `FunctionName("rewards/mine.py", "near_miss", is_file=True)`, from the working directory, or in a module."""

    place: str
    name: str
    is_file: bool


def read_function_name(text: str, key: str, known: Iterable[str] = ()) -> FunctionName:
    """What the value of the setting `key` names; imports nothing. Raises ConfigError, also for a file that is not there.

    known: names that the setting takes beside these forms, to be told.
    """
    place, _, name = text.rpartition(":")
    if not (place and name):
        others = ", ".join(known)
        forms = f"pkg.mod:fn, path/to/file.py:fn or one of {others}" if others else "pkg.mod:fn or path/to/file.py:fn"
        raise ConfigError(f"{key}: '{text}' names no function; write {forms}")
    is_file = place.endswith(".py") or os.sep in place
    if is_file and not os.path.isfile(place):
        raise ConfigError(f"{key}: there is no file '{place}' (seen from {os.getcwd()}); correct the path in '{text}'")
    return FunctionName(place, name, is_file)


def import_named(text: str, key: str) -> Any:
    """What the value of the setting `key` names, imported into this process. Raises ConfigError."""
    named = read_function_name(text, key)
    module = _load_file(named.place, text, key) if named.is_file else _import_module(named.place, text, key)
    if named.name not in vars(module):
        near = nearest(named.name, list(vars(module)))
        remedy = f"did you mean '{near}'" if near else "name a function of that module"
        raise ConfigError(f"{key}: '{named.place}' has no '{named.name}'; {remedy}")
    return vars(module)[named.name]


def _import_module(name: str, text: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{key}: '{text}' cannot be imported ({error}): install the module or put its directory on PYTHONPATH"
        ) from error


def _load_file(path: str, text: str, key: str) -> ModuleType:
    module = ModuleType("hybridflow_user_file")
    module.__file__ = path
    # Dataclasses look their module up. Afterwards it is not among these: cloudpickle then sends its functions by value, to workers that
    # have no such file.
    sys.modules[module.__name__] = module
    try:
        # Not through Python's cache of compiled files, which takes one for unchanged that was rewritten to the same length within a second.
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except Exception as error:
        raise ConfigError(
            f"{key}: '{text}' cannot be loaded ({type(error).__name__}: {error}); correct the file"
        ) from error
    finally:
        del sys.modules[module.__name__]
    return module
