"""Which rows of a table are kept: by the values of columns, by a function of the user, and each of equal rows once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hybridflow.config import ConfigError
from hybridflow.config.functions import import_named
from hybridflow.data.messages import DataError, unpack_messages
from hybridflow.data.settings import DataSettings
from hybridflow.rewards.child import Described, FunctionError, Loaded, read_parameters
from hybridflow.rewards.function import RewardFunction, choose_columns, source_hash

_DIGEST_BYTES = 16

Tell = Callable[[int], str]
"""Where a row of the table stands, e.g. `train.jsonl, line 17`."""


def match_columns(table: pa.Table, wanted: dict[str, Any]) -> np.ndarray:
    """[rows] bool: whether each column has the wanted value, or one of a list of them. Raises ConfigError for a value it cannot have."""
    keep = np.ones(table.num_rows, np.bool_)
    for name, value in wanted.items():
        _check_names(table, "keep_where", [name])
        kind = table.schema.field(name).type
        values = list(value) if isinstance(value, list | tuple) else [value]
        try:
            accepted = pa.array(values, kind)
            equal = pc.is_in(table.column(name), value_set=accepted).to_numpy()
        except (pa.ArrowException, NotImplementedError, ValueError, TypeError, OverflowError):
            accepted = None
        # Arrow cuts 1.5 to 1 for a column of whole numbers; a column of short floats has 0.1 as near as it can.
        exact = accepted is not None and (pa.types.is_floating(kind) or accepted.to_pylist() == values)
        if not exact or not values:
            raise ConfigError(
                f"data.keep_where.{name} is {value!r}, which the column '{name}' of {kind} cannot have; "
                "give one of its values or a list of them, or use data.keep_function"
            )
        keep &= equal
    return keep


def call_filter(table: pa.Table, name: str, messages_column: str | None, tell: Tell) -> np.ndarray:
    """[rows] bool: what the function of this name gives for the columns that its parameters name, row by row, in this process.

    messages_column: that is given as a list of messages. Raises ConfigError for a function that cannot be called with columns, DataError
    for a row that it raises for, or gives no true or false for.
    """
    function, columns = _load_filter(name, table.schema)
    keep: list[bool] = []
    for batch in table.select(columns).to_batches():
        for row in batch.to_pylist():
            if messages_column in row:
                row[messages_column] = unpack_messages(row[messages_column])
            keep.append(_call(function, row, name, tell, len(keep)))
    return np.array(keep, np.bool_)


def find_first(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """[rows] bool: False where an earlier row has the same values in all of the columns; told by 128 bits of a hash (BLAKE2) of them."""
    _check_names(table, "deduplicate_by", columns)
    seen: set[bytes] = set()
    keep: list[bool] = []
    for batch in table.select(columns).to_batches():
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            digest = hashlib.blake2b(json.dumps(values, default=str).encode(), digest_size=_DIGEST_BYTES).digest()
            keep.append(digest not in seen)
            seen.add(digest)
    return np.array(keep, np.bool_)


def list_filter_sources(settings: DataSettings | None, key: str = "data") -> dict[str, str]:
    """Hash of the source of the function that rows are kept by, to be recorded with a run, by its setting; empty where there is none."""
    name = settings.keep_function if settings else None
    return {f"{key}.keep_function": source_hash(name)} if name else {}


def _load_filter(name: str, schema: pa.Schema) -> tuple[RewardFunction, list[str]]:
    key = "data.keep_function"
    function: RewardFunction = import_named(name, key)
    described = Described(transport={}, per="sample", arguments={}, timeout_s=None)
    try:
        parameters = read_parameters(Loaded(function, False, described))
    except FunctionError as error:
        raise ConfigError(f"{key}: '{name}': {error}") from error
    columns = choose_columns(parameters, schema, key, ())
    if not columns:
        raise ConfigError(f"{key}: '{name}' takes no column; name columns as its parameters: {', '.join(schema.names)}")
    return function, columns


def _call(function: RewardFunction, row: dict[str, Any], name: str, tell: Tell, number: int) -> bool:
    try:
        kept = function(**row)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{tell(number)}: data.keep_function '{name}' fails on it ({reason}); mend the function"
        ) from error
    if not isinstance(kept, bool | np.bool_):
        raise DataError(f"{tell(number)}: data.keep_function '{name}' gives {kept!r} for it; give true or false")
    return bool(kept)


def _check_names(table: pa.Table, key: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in table.column_names:
            raise ConfigError(
                f"data.{key}: there is no column '{name}'; the columns are {', '.join(table.column_names)}"
            )
