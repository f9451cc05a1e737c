"""Values from JSON and Parquet files, each with the line it stood on."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.config import ConfigError
from hybridflow.data.messages import BadRow

CHUNK_ROWS = 8192

_JSON = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_JSON, *(f"{suffix}.gz" for suffix in _JSON), ".parquet")

Numbered = tuple[int, Any]
"""Line and value, or line and BadRow, e.g. `(17, {"prompt": "2+2="})`; lines count from 1."""


def find_files(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The files that paths and globs name, each glob's in alphabetical order. Raises ConfigError for none, twice one, an unknown kind."""
    found: list[str] = []
    for pattern in map(os.path.expanduser, patterns):
        matches = (
            [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        )
        if not matches:
            raise ConfigError(f"data.files: '{pattern}' names no file (seen from {os.getcwd()}); correct the path")
        found += matches
    real = [os.path.realpath(path) for path in found]
    for index, path in enumerate(found):
        if real[index] in real[:index]:
            raise ConfigError(f"data.files: '{path}' is named twice and its rows would count twice; name it once")
        if not path.endswith(_SUFFIXES):
            raise ConfigError(f"data.files: '{path}' is of no kind that can be read; give {', '.join(_SUFFIXES)}")
    return tuple(found)


def compute_fingerprint(files: tuple[str, ...], kept: np.ndarray | None = None) -> str:
    """sha256 over the content of the files, in order; where they lie and what they are called does not count.

    kept: [rows, 2] int32 places of the rows that filters keep, which count too; None for all.
    """
    whole = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    if kept is not None:
        whole.update(kept.tobytes())
    return whole.hexdigest()


def iter_json(path: str) -> Iterator[list[Numbered]]:
    """The values of a JSONL file, or of a list in a JSON file, in chunks. Raises ConfigError for a file that cannot be read at all."""
    values = _iter_json_values(path)
    while chunk := list(islice(values, CHUNK_ROWS)):
        yield chunk


def iter_parquet(path: str) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """The rows of a Parquet file in chunks, each with its rows' places, from 1. Raises ConfigError for a file that cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            first = 1
            for batch in file.iter_batches(CHUNK_ROWS):
                yield np.arange(first, first + batch.num_rows), pa.Table.from_batches([batch])
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _iter_json_values(path: str) -> Iterator[Numbered]:
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            if path.removesuffix(".gz").endswith(".json") and file.peek(4096).lstrip()[:1] == b"[":
                yield from _parse_list(path, file.read())
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parse(line)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _parse_list(path: str, text: bytes) -> Iterator[Numbered]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    for number, value in enumerate(values, 1):
        yield number, _require_object(value)


def _parse(line: bytes) -> Any:
    try:
        return _require_object(json.loads(line))
    except (ValueError, RecursionError) as error:
        return BadRow(f"it is not JSON ({error})")


def _require_object(value: Any) -> Any:
    return value if isinstance(value, dict) else BadRow(f"it is {type(value).__name__}, not an object")


def _unreadable(path: str, error: BaseException) -> ConfigError:
    reason = " ".join(str(error).split())
    return ConfigError(f"data.files: '{path}' cannot be read: {reason}; mend the file or take it out")
