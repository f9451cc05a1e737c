"""From YAML and overrides to a checked settings object, and back to YAML."""

import dataclasses
import enum
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from hybridflow.config import schema
from hybridflow.config.errors import ConfigError
from hybridflow.config.explain import explain_all, explain_huge

T = TypeVar("T")

_COMMENT_WIDTH = 120
_EXPONENT = re.compile(r"[-+]?[0-9._]+[eE][-+]?[0-9]+$")
_STAND_INS: tuple[Any, ...] = ("???", ["???"], 1, 0.5, True, {})


def load_config(
    cls: type[T], *, config_name: str, config_path: str | Path | None = None, overrides: Sequence[str] = ()
) -> T:
    """Compose a configuration as Hydra does and check it: `load_config(RLConfig, config_name="rl", overrides=["seed=1"])`.

    config_path: a directory of YAML, searched before the shipped one; None for the shipped one alone.
    overrides:   `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`, as on the command line.
    Raises ConfigError, one sentence a line for each thing that is wrong.
    """
    # Hydra takes longer to import than `--help` may run.
    from hybridflow.config.composition import compose_values

    values = compose_values(cls, config_path=config_path, config_name=config_name, overrides=overrides)
    return check_config(cls, values)


def describe_config(
    cls: type[Any], *, config_name: str, config_path: str | Path | None = None, overrides: Sequence[str] = ()
) -> str:
    """The configuration that `load_config` would load, all defaults filled in, as YAML with what each key means as a comment above it.

    What is still to be set stays `???`.
    """
    from hybridflow.config.composition import MISSING, compose_values, iter_missing

    values = compose_values(
        cls, config_path=config_path, config_name=config_name, overrides=overrides, keep_missing=True
    )
    missing = list(iter_missing(values))
    for path in missing:
        _stand_in(cls, values, path)
    plain = to_plain(check_config(cls, values))
    for path in missing:
        *above, last = schema.own_path(cls, path)
        _descend(plain, above)[_key(last, _descend(plain, above))] = MISSING
    return _comment(cls.__doc__, "") + "".join(_iter_commented(cls, plain, ()))


def _iter_commented(cls: type, section: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The lines of the section at `path`, each key below its comment."""
    indent = "  " * len(path)
    for key, value in section.items():
        below = (*path, key)
        field = schema.field_at(cls, below)
        yield _comment(field.description if field else None, indent)
        if isinstance(value, Mapping) and schema.classes_at(cls, below):
            yield f"{indent}{key}:\n"
            yield from _iter_commented(cls, value, below)
        else:
            yield textwrap.indent(to_yaml({key: value}), indent)


def _comment(text: str | None, indent: str) -> str:
    lead = f"{indent}# "
    return "".join(
        f"{lead}{line}\n" for line in textwrap.wrap(text or "", _COMMENT_WIDTH - len(lead), break_on_hyphens=False)
    )


def _stand_in(cls: type, values: Any, path: tuple[str, ...]) -> None:
    """Puts something that is allowed there in place of a `???`, so that all else can be checked."""
    owner, field = _descend(values, path[:-1]), schema.field_at(cls, path)
    if field is not None and not field.is_required():
        del owner[path[-1]]
    elif field is not None:
        owner[path[-1]] = next(value for value in _STAND_INS if schema.accepts(field, value))


def _descend(node: Any, path: Sequence[str]) -> Any:
    for part in path:
        node = node[_key(part, node)]
    return node


def _key(part: str, node: Any) -> str | int:
    return int(part) if isinstance(node, list) else part


def check_config(cls: type[T], values: Mapping[str, Any]) -> T:
    """The settings object that plain values (of YAML or JSON) describe. Raises ConfigError, one sentence a line.

    What a section's keys leave out is as in the object that its field has for a default, else as its class says.
    """
    filled = _fill(cls, json.loads(json.dumps(values, default=_refuse)), ())
    try:
        # As JSON, because that alone lets a mapping stand for a section and a list for a tuple while numbers stay strict.
        checked: T = TypeAdapter(cls).validate_json(json.dumps(filled))
    except ValidationError as error:
        raise ConfigError(explain_all(error, cls, filled)) from None
    if huge := explain_huge(checked):
        raise ConfigError(huge)
    return checked


def _fill(cls: type, node: Any, path: tuple[str, ...]) -> Any:
    """Plain values, each section with what its keys leave out and its field's object has otherwise than its class.

    Pydantic drops a field's default as soon as one key is given.
    """
    if isinstance(node, list):
        return [_fill(cls, item, (*path, str(index))) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kinds = schema.classes_at(cls, path)
    if len(kinds) > 1 or (not kinds and schema.field_at(cls, path) is None):
        return node  # Of several classes pydantic finds the one that is meant; a free mapping leaves nothing out.
    given = {key: _fill(cls, item, (*path, key)) for key, item in node.items()}
    default = schema.default_at(cls, path)
    if kinds != (type(default),):
        return given
    names = {schema.spellings(kinds[0]).get(key) for key in given}
    own = {
        name: vars(default)[name]
        for name, field in schema.fields(kinds[0]).items()
        if name not in names and vars(default)[name] != field.get_default(call_default_factory=True)
    }
    return given | to_plain(own)


def to_plain(value: Any) -> Any:
    """A settings object, or anything inside one, as mappings, lists and scalars; a function becomes its import path."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return value


def to_yaml(value: Any) -> str:
    """A settings object as YAML that `load_config` reads back to an equal object.

    A function is written as its import path, so an object that holds one comes back with the path in its place.
    """
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
        """Quotes what is a number to OmegaConf alone, as `1e3` and `0E0`."""

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    written: str = yaml.dump(_escape(to_plain(value)), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**20)
    return written


def _escape(value: Any) -> Any:
    """Keep a literal `${`, and backslashes before one, from being read as a reference when the YAML is composed again."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _refuse(value: Any) -> NoReturn:
    raise ConfigError(
        f"the configuration holds {value!r}, a {type(value).__name__}; write it as a string, number, list or mapping"
    )
