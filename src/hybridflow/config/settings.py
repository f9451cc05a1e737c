"""The decorator that makes a class of typed settings."""

import functools
from typing import Any, TypeVar, dataclass_transform

from pydantic import AliasChoices as AliasChoices
from pydantic import ConfigDict, ValidationError
from pydantic import Field as Field
from pydantic.dataclasses import dataclass

from hybridflow.config import schema
from hybridflow.config.errors import ConfigError
from hybridflow.config.explain import explain_all

T = TypeVar("T")

_RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def settings(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass of checked settings, with keyword arguments only.

    Nothing is converted except a whole number where a float is meant, and a list where a tuple is meant; NaN and
    infinity are refused. The string below an attribute is its description. Ranges and required fields:
    `lr: float = Field(default=1e-3, gt=0)`, `path: str` (write `default=`, or type checkers take the field for required).
    A key with a second name is declared so, its own name first: `tp: int = Field(default=1,
    validation_alias=AliasChoices("tp", "tensor_parallel_size"))`; what is written out has its own name.
    A check over several fields goes into `__post_init__` and raises ValueError with one sentence.
    Constructing one with a wrong value raises `ConfigError`.
    """
    checked: type[Any] = dataclass(frozen=True, kw_only=True, config=_RULES)(cls)
    # Pydantic reads the strings of the class itself alone.
    for base in filter(schema.is_settings, cls.__mro__[1:]):
        for name, field in schema.fields(base).items():
            own = schema.fields(checked)[name]
            own.description = own.description or field.description
    construct = checked.__init__

    @functools.wraps(construct)
    def __init__(self: Any, **values: Any) -> None:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        try:
            construct(self, **values)
        except ValidationError as error:
            raise ConfigError(explain_all(error, checked, values, root=checked.__name__)) from None

    checked.__init__ = __init__
    return checked
