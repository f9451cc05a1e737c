"""From a failed check to one sentence a person can act on: the key, the value and the remedy."""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from hybridflow.config import schema

Path = tuple[str, ...]

_MAX_VALUE_CHARS = 80
_TOO_LARGE = 2**63
_OF_PYDANTIC = re.compile(r" after validation, not .*")
_WORDS = re.compile(r"\^\(?([\w|-]+)\)?\$")
_PLAIN = re.compile(r"[\w./*-]{1,40}")
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_WANTED = {
    "bool_type": "true or false",
    "callable_type": "a function",
    "dataclass_type": "a section of keys",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "none_required": "null",
    "path_type": "a path",
    "string_type": "a string",
    "tuple_type": "a list",
}


def explain_all(error: ValidationError, cls: type, values: Any, root: str = "") -> str:
    """One sentence a line for each wrong key of `values`, which was checked against `cls`.

    root: put before each key, for a class that is constructed by itself.
    """
    by_path: dict[Path, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_real_path(details, values), []).append(details)
    return "\n".join(_explain(cls, path, group, root, values) for path, group in by_path.items())


def explain_huge(checked: Any) -> str:
    """One sentence a line for each whole number of a settings object that 64 bits do not hold: it would overflow far from here."""
    told = [(path, ".".join(path), number) for path, number in _iter_huge(checked, ())]
    rule = "must be less than 2**63"
    return "\n".join(
        f"{key} is {shown(number)} and {rule}; {_remedy(type(checked), path, key)}" for path, key, number in told
    )


def _iter_huge(value: Any, path: Path) -> Iterator[tuple[Path, int]]:
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        yield path, value
    elif schema.is_settings(type(value)):
        for name in schema.fields(type(value)):
            yield from _iter_huge(vars(value)[name], (*path, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _iter_huge(item, (*path, str(index)))


def _real_path(details: ErrorDetails, values: Any) -> Path:
    """The keys of an error's location, without the names of union members that pydantic puts among them."""
    location, path, node = details["loc"], [], values
    names_itself = details["type"] in _UNKNOWN + _MISSING
    for place, part in enumerate(location):
        if _holds(node, part):
            node = node[part]
        elif not (names_itself and place == len(location) - 1):
            continue
        path.append(str(part))
    return tuple(path)


def _holds(node: Any, part: str | int) -> bool:
    if isinstance(node, list | tuple):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, dict) and part in node


def _explain(cls: type, path: Path, group: list[ErrorDetails], root: str, values: Any) -> str:
    first = group[0]
    key = ".".join((root, *path)) if root else ".".join(path)
    kind = first["type"]
    if kind in _UNKNOWN:
        twin = schema.find_twin(cls, path, values)
        if twin is not None:
            other = ".".join((*key.split(".")[:-1], twin))
            return f"{key} and {other} are two names of one setting, and both are set; keep one"
        return explain_unknown(cls, path, shown(first["input"]), root)
    if kind in _MISSING and isinstance(first["loc"][-1], int):
        return f"{key} is not set, and its list must have at least {first['loc'][-1] + 1} items; add it"
    if kind in _MISSING:
        return f"{key} is required and not set; {_remedy(cls, path, key)}"
    if kind == "value_error":
        return _after_key(key, str(first["ctx"]["error"]))
    if kind in ("literal_error", "enum"):
        return f"{key} is {shown(first['input'])}; {_choice(first['input'], first['ctx']['expected'])}"
    if kind == "string_pattern_mismatch" and (words := _WORDS.fullmatch(first["ctx"]["pattern"])):
        return f"{key} is {shown(first['input'])}; {_choice(first['input'], words[1].replace('|', ', '))}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _explain_tag(key, first["ctx"])
    if kind == "dataclass_type" and isinstance(first["input"], bool | int | float | str):
        return f"{key} is {shown(first['input'])} and must be a section of keys; {_first_key(cls, path, key, first['input'])}"
    rule = " or ".join(dict.fromkeys(_rule(details) for details in group))
    if kind in ("list_type", "tuple_type") and len(group) == 1 and _fits_as_item(cls, path, first["input"]):
        return f"{key} is {shown(first['input'])} and must be a list; write it as one, '{key}=[{first['input']}]'"
    about = _about(cls, path) if kind == "string_pattern_mismatch" else ""
    return f"{key or 'the configuration'} is {shown(first['input'])} and must {rule}; {_remedy(cls, path, key)}{about}"


def _after_key(key: str, sentence: str) -> str:
    """A sentence that says what the key `is` goes on from it."""
    joint = " " if sentence.startswith("is ") else ": "
    return f"{key}{joint}{sentence}" if key else sentence


def _first_key(cls: type, path: Path, key: str, value: Any) -> str:
    """`write train.lora.rank=8`: the section's first key that is no section, with the value that was given where that fits."""
    for owner in schema.classes_at(cls, path):
        for name, field in schema.fields(owner).items():
            if not any(schema.iter_settings(field.annotation)):
                return f"write {_first_that_fits(f'{key}.{name}', field, value)}"
    return "correct it or leave it out"


def _first_that_fits(key: str, field: FieldInfo, value: Any) -> str:
    for candidate, text in ((value, shown(value)), ([value], f"[{shown(value)}]")):
        if schema.accepts(field, candidate):
            return f"{key}={text}"
    return f"its keys, such as {key}"


def _fits_as_item(cls: type, path: Path, value: Any) -> bool:
    """Whether a list of this one word would do, written without quotes."""
    field = schema.field_at(cls, path)
    return (
        field is not None
        and isinstance(value, str)
        and bool(_PLAIN.fullmatch(value))
        and schema.accepts(field, [value])
    )


def _explain_tag(key: str, context: dict[str, Any]) -> str:
    """The sentence for a section of several kinds whose deciding key is wrong or not there."""
    tag = key + "." + context["discriminator"].strip("'")
    if "tag" not in context:
        return f"{tag} is required and not set; it says which kind {key} is"
    return f"{tag} is {shown(context['tag'])}; {_choice(context['tag'], context['expected_tags'])}"


def explain_unknown(cls: type, path: Path, value: str, root: str = "") -> str:
    """The sentence for a key that `cls` does not have; it names the key that was probably meant."""
    lead = f"{root}." if root else ""
    start = f"unknown key '{lead}{'.'.join(path)}' (value {value})"
    near = schema.nearest_key(cls, path)
    if near:
        return f"{start}: the nearest key is '{lead}{near}'; correct it or take it out"
    known = sorted({name for owner in schema.classes_at(cls, path[:-1]) for name in schema.fields(owner)})
    place = f"'{'.'.join(path[:-1])}'" if path[:-1] else "the configuration"
    if not known:
        return f"{start}: {place} has no keys to set; take it out"
    return f"{start}: the keys of {place} are {', '.join(known)}; take it out or use one of these"


def _choice(value: Any, expected: str) -> str:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    near = schema.nearest(value, choices) if isinstance(value, str) else None
    return f"write one of {', '.join(choices)}" + (f" (the nearest is {near})" if near else "")


def _rule(details: ErrorDetails) -> str:
    """What pydantic asks for, to go after 'must': 'be a number', 'be greater than 0', 'have at least 1 item'."""
    if details["type"] in _WANTED:
        return f"be {_WANTED[details['type']]}"
    return _OF_PYDANTIC.sub("", details["msg"].partition(" should ")[2]) or f"be valid ({details['msg']})"


def _remedy(cls: type, path: Path, key: str) -> str:
    if not path or schema.field_at(cls, path) is None:
        return "correct the value"
    default = schema.default_at(cls, path)
    if default is PydanticUndefined:
        return f"set {key}{_about(cls, path)}"
    if schema.is_settings(type(default)):
        return "correct it or leave it out"
    return f"correct it or leave it at its default, {shown(default)}"


def _about(cls: type, path: Path) -> str:
    """What the field says of itself, in parentheses."""
    field = schema.field_at(cls, path) if path else None
    return f" ({' '.join(field.description.split()).rstrip('.')})" if field is not None and field.description else ""


def shown(value: Any) -> str:
    """A value as a message shows it: as YAML writes it where that is short, and never long."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
