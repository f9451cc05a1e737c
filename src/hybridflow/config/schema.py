"""What a settings class allows: its keys, its nested classes, and the key nearest to a misspelt one."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import AliasChoices, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_NEAR = 0.6
_SAME_WORD = 0.8


def fields(cls: Any) -> dict[str, FieldInfo]:
    """The fields of a settings class, with resolved annotations and descriptions."""
    declared: dict[str, FieldInfo] = cls.__pydantic_fields__
    return declared


def spellings(cls: Any) -> dict[str, str]:
    """Every name that a key of the class may be written by, and the field's own: `{"tp": "tp", "tensor_parallel_size": "tp"}`."""
    return {spelling: name for name, field in fields(cls).items() for spelling in (name, *_other_names(field))}


def _other_names(field: FieldInfo) -> tuple[str, ...]:
    alias = field.validation_alias
    return tuple(str(choice) for choice in alias.choices) if isinstance(alias, AliasChoices) else ()


def find_twin(cls: type, path: tuple[str, ...], values: Any) -> str | None:
    """The other spelling by which `values` set the key at `path` too, or None."""
    for part in path[:-1]:
        values = values[int(part) if isinstance(values, list | tuple) else part]
    for owner in classes_at(cls, path[:-1]):
        names = spellings(owner)
        twins = [key for key in values if key != path[-1] and path[-1] in names and names.get(key) == names[path[-1]]]
        if twins:
            return str(twins[0])
    return None


def is_settings(annotation: Any) -> bool:
    """Whether `annotation` is a class made by `@settings`."""
    return (
        isinstance(annotation, type)
        and dataclasses.is_dataclass(annotation)
        and "__pydantic_fields__" in vars(annotation)
    )


def iter_settings(annotation: Any) -> Iterator[type]:
    """The settings classes that a mapping at this annotation may stand for, through unions and `Annotated`."""
    if is_settings(annotation):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from iter_settings(member)
    elif typing.get_origin(annotation) is typing.Annotated:
        yield from iter_settings(typing.get_args(annotation)[0])


def accepts(field: FieldInfo, value: Any) -> bool:
    """Whether a plain value, as YAML gives it, may stand at this field."""
    try:
        TypeAdapter(field.rebuild_annotation()).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True


def own_path(cls: type, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path with each key under its field's own name."""
    names = [
        {part: own for owner in classes_at(cls, path[:depth]) for part, own in spellings(owner).items()}
        for depth in range(len(path))
    ]
    return tuple(known.get(part, part) for known, part in zip(names, path, strict=True))


def iter_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key below `cls` in every spelling, sections before their contents."""
    for name, own in spellings(cls).items():
        yield prefix + name
        for child in iter_settings(fields(cls)[own].annotation):
            yield from iter_keys(child, f"{prefix}{name}.")


def classes_at(cls: type, path: tuple[str, ...]) -> tuple[type, ...]:
    """The settings classes at a dotted path below `cls`, items of tuples and mappings counted as one level."""
    found: tuple[Any, ...] = (cls,)
    for part in path:
        found = tuple(child for annotation in found for child in _step(annotation, part))
    return tuple(child for annotation in found for child in iter_settings(annotation))


def field_at(cls: type, path: tuple[str, ...]) -> FieldInfo | None:
    """The field at a dotted path below `cls`, or None where there is none."""
    for owner in classes_at(cls, path[:-1]):
        if path[-1] in spellings(owner):
            return fields(owner)[spellings(owner)[path[-1]]]
    return None


def default_at(cls: type, path: tuple[str, ...]) -> Any:
    """What the key at a dotted path is where it is left out, whether its section is given or not; PydanticUndefined where it must be set.

    A section's field may have an object for a default that differs from the section's class; the outermost such object decides.
    """
    default: Any = PydanticUndefined
    for depth, part in enumerate(path, start=1):
        names = spellings(type(default)) if is_settings(type(default)) else {}
        if part in names:
            default = vars(default)[names[part]]
        else:
            field = field_at(cls, path[:depth])
            default = PydanticUndefined if field is None else field.get_default(call_default_factory=True)
    return default


def is_known(cls: type, key: str) -> bool:
    """Whether the dotted `key` names a setting, or something inside a setting that is a free mapping."""
    path = tuple(key.split("."))
    if field_at(cls, path) is not None:
        return True
    return any(
        (field := field_at(cls, path[:length])) is not None and _holds_mapping(field.annotation)
        for length in range(1, len(path))
    )


def nearest(word: str, choices: list[str]) -> str | None:
    """The choice most like `word`, or None if none is alike."""
    return next(iter(difflib.get_close_matches(word, choices, n=1, cutoff=_NEAR)), None)


def nearest_key(cls: type, path: tuple[str, ...]) -> str | None:
    """The dotted key that was probably meant by the unknown `path`.

    First a sibling that is nearly the same word, then a key of the same name elsewhere, then whatever is alike.
    """
    section = "".join(f"{part}." for part in path[:-1])
    siblings = [name for owner in classes_at(cls, path[:-1]) for name in spellings(owner)]
    sibling = nearest(path[-1], siblings)
    if sibling and difflib.SequenceMatcher(None, sibling, path[-1]).ratio() >= _SAME_WORD:
        return section + sibling
    everywhere = list(iter_keys(cls))
    namesakes = [key for key in everywhere if key.rpartition(".")[2] == path[-1]]
    if namesakes:
        return max(namesakes, key=lambda key: difflib.SequenceMatcher(None, key, ".".join(path)).ratio())
    if sibling:
        return section + sibling
    by_name = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    alike = nearest(path[-1], list(by_name))
    return by_name[alike] if alike else _nearest_whole(path, section if siblings else "", everywhere)


def _nearest_whole(path: tuple[str, ...], section: str, everywhere: list[str]) -> str | None:
    """The whole key that is most like the path. Below a section that there is, without its name, by which all keys there are alike."""
    inside = [key.removeprefix(section) for key in everywhere if key.startswith(section)]
    near = nearest(".".join(path).removeprefix(section), inside)
    return None if near is None else section + near


def _step(annotation: Any, part: str) -> Iterator[Any]:
    if is_settings(annotation):
        if part in spellings(annotation):
            yield fields(annotation)[spellings(annotation)[part]].annotation
        return
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for member in members:
            yield from _step(member, part)
    elif origin is typing.Annotated:
        yield from _step(members[0], part)
    elif origin in (tuple, list) and part.isdigit():
        yield members[0]
    elif origin is dict:
        yield members[1]


def _holds_mapping(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(_holds_mapping(member) for member in typing.get_args(annotation))
    return annotation is dict or typing.get_origin(annotation) is dict or annotation is Any
