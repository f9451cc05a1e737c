"""Batches as Parquet files: written whole or not at all, read without trusting who wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.columns import COLUMN_TYPES, cast, check_columns, is_plain, one_array


def write_parquet(path: str | os.PathLike[str], schema: pa.Schema, chunks: Iterable[pa.RecordBatch]) -> None:
    """Write one row group per chunk, with checksums; a file of that name is replaced only when the new one is whole."""
    unfinished = Path(f"{os.fspath(path)}.writing")
    with pq.ParquetWriter(unfinished, schema, write_page_checksum=True) as writer:
        for chunk in chunks:
            writer.write_batch(chunk, row_group_size=chunk.num_rows)
    unfinished.replace(path)


def read_parquet(path: str | os.PathLike[str]) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """The schema and one record batch per row group; types, nulls and lengths are checked, nothing is executed.

    Raises ValueError naming the file, the column and the row (or row group, where its bytes are damaged).
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = pa.schema([_check_field(field) for field in file.schema_arrow])
            chunks: list[pa.RecordBatch] = []
            for group in range(file.num_row_groups):
                table = _read_group(file, group)
                chunks.append(_convert_rows(table, schema, first_row=sum(chunk.num_rows for chunk in chunks)))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{os.fspath(path)} is not a batch that can be read: {error}") from error
    return schema, chunks


def _check_field(field: pa.Field) -> pa.Field:
    if not is_plain(field.type):
        raise ValueError(f"column '{field.name}' is {field.type}; a batch keeps numbers, strings, lists and structs")
    return pa.field(field.name, COLUMN_TYPES.get(field.name, field.type))


def _read_group(file: pq.ParquetFile, group: int) -> pa.Table:
    try:
        return file.read_row_group(group)
    except (pa.ArrowException, OSError):
        # Arrow says what is damaged but not where: one column at a time tells.
        for name in file.schema_arrow.names:
            try:
                file.read_row_group(group, columns=[name])
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"column '{name}', row group {group}: {error}") from error
        raise


def _convert_rows(table: pa.Table, schema: pa.Schema, first_row: int) -> pa.RecordBatch:
    table.validate(full=True)
    arrays = [
        cast(field.name, one_array(field.name, table.column(index)), field.type, first_row)
        for index, field in enumerate(schema)
    ]
    return check_columns(pa.RecordBatch.from_arrays(arrays, schema=schema), first_row)
