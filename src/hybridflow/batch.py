"""The table that crosses every boundary: one row per sequence, ragged columns, on Apache Arrow.

    Batch.from_columns(group_id=[7, 7], tokens=[[1, 5, 9], [1, 5]], loss_mask=[[0, 1, 1], [0, 1]], state=[0, 0])

A `Batch` never changes; every verb returns another one that shares memory with it where it can. Its chunks are Arrow
record batches of one schema, each with at least one row and, as the rollout makes them, with whole prompt groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hybridflow.columns import Ragged, check_columns, list_offsets, list_values, one_array, refuse_nulls, to_arrow

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, init=False)
class Batch:
    """An immutable table of sequences in chunks; the module's docstring has an example.

    Numbers leave through `ragged`, `tensor`, `numpy` and `arrays`. While the rows lie in one chunk these are views of
    the Arrow buffers, else copies; read-only either way (`ReadOnlyTensor`, numpy's own flag). Nulls never
    reach a tensor. A pickle carries the rows of this Batch alone, also where it is a slice; under protocol 5 (Ray) its
    buffers are read in place.
    """

    schema: pa.Schema
    chunks: tuple[pa.RecordBatch, ...]

    def __init__(self, schema: pa.Schema, chunks: Iterable[pa.RecordBatch]) -> None:
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "chunks", tuple(chunk for chunk in chunks if chunk.num_rows))

    @classmethod
    def from_columns(cls, **columns: Any) -> Batch:
        """One chunk from whole columns, copied (an Arrow array is shared).

        A column is a list or array of scalars or strings, a list of 1-D arrays, tensors or lists (ragged), a 2-D array
        (ragged of one length), a `Ragged` or an Arrow array. Ragged numbers become list<int32>, list<float32> or, from
        booleans, list<uint8>; those of `COLUMN_TYPES` become what stands there, checked.
        Raises ValueError naming column and row.
        """
        arrays = {name: to_arrow(name, values) for name, values in columns.items()}
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns must have one number of rows, these have {sizes}; pass one value per row")
        batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
        return cls(batch.schema, (check_columns(batch),))

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None) -> Batch:
        """One chunk from dicts of the same keys; `schema` names and types the columns where there may be no rows."""
        names = list(rows[0]) if schema is None and rows else ([] if schema is None else schema.names)
        for index, row in enumerate(rows):
            if set(row) != set(names):
                odd = sorted(set(row) ^ set(names))
                raise ValueError(
                    f"row {index} differs in the keys {odd}; give every row the same keys, with None for no value"
                )
        if schema is None:
            return cls.from_columns(**{name: [row[name] for row in rows] for name in names})
        arrays = [to_arrow(field.name, [row[field.name] for row in rows], field.type) for field in schema]
        return cls(schema, (check_columns(pa.RecordBatch.from_arrays(arrays, schema=schema)),))

    @property
    def num_rows(self) -> int:
        """Rows over all chunks."""
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows' values, over all columns."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names in the order of the schema."""
        return tuple(self.schema.names)

    def __len__(self) -> int:
        return self.num_rows

    def __contains__(self, name: object) -> bool:
        return name in self.schema.names

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name}: {field.type}" for field in self.schema)
        return f"Batch({self.num_rows} rows in {len(self.chunks)} chunks; {columns})"

    def equals(self, other: Batch) -> bool:
        """The same rows, columns and types, in whatever chunks."""
        same: bool = self._table().equals(other._table())
        return same

    def column(self, name: str) -> pa.ChunkedArray:
        """The column as Arrow keeps it, one array per chunk."""
        self._check_names((name,))
        return pa.chunked_array([chunk.column(name) for chunk in self.chunks], type=self.schema.field(name).type)

    def pylist(self, name: str) -> list[Any]:
        """The column as Python values; a ragged row is a list."""
        values: list[Any] = self.column(name).to_pylist()
        return values

    def ragged(self, name: str) -> Ragged:
        """A list column as read-only values and offsets; the values are a view while the rows lie in one chunk."""
        from hybridflow.readonly import readonly_view

        array = self._list_array(name)
        return Ragged(readonly_view(list_values(array)), readonly_view(pa.array(list_offsets(array))))

    def tensor(self, name: str) -> Tensor:
        """A column of numbers without nulls as a read-only tensor [rows]; a view while the rows lie in one chunk."""
        from hybridflow.readonly import readonly_view

        array = self._combined(name)
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            raise TypeError(f"column '{name}' is {array.type}, not a number a row; read it by ragged() or pylist()")
        refuse_nulls(name, array)
        return readonly_view(array)

    def numpy(self, name: str) -> np.ndarray:
        """A column of one value a row as a read-only array [rows]; a null number reads as NaN, strings as objects."""
        column = self._combined(name)
        if pa.types.is_nested(column.type):
            raise TypeError(f"column '{name}' is {column.type}; read it by arrays(), ragged() or pylist()")
        array: np.ndarray = column.to_numpy(zero_copy_only=False)
        array.flags.writeable = False
        return array

    def arrays(self, name: str) -> list[np.ndarray]:
        """A list column as one read-only array per row, each a view."""
        rows: list[np.ndarray] = []
        for chunk in self.select((name,)).chunks:
            array = Batch(chunk.schema, (chunk,))._list_array(name)
            rows += np.split(list_values(array).to_numpy(), list_offsets(array)[1:-1])
        return rows

    def lengths(self, name: str) -> np.ndarray:
        """Number of values in each row of a list column, int64 [rows]."""
        return np.diff(list_offsets(self._list_array(name)))

    def slice(self, start: int, stop: int) -> Batch:
        """Rows start to stop - 1, sharing memory; both must lie in 0..num_rows."""
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"slice {start}:{stop} does not lie in a batch of {self.num_rows} rows; clamp it first")
        return Batch(self.schema, self._iter_slices(start, stop))

    def take(self, indices: Any) -> Batch:
        """The rows at `indices` (integers, repeats allowed), in their order, as one chunk of its own memory."""
        wanted = np.asarray(indices)
        if wanted.size == 0:
            return Batch(self.schema, ())
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise TypeError(f"take() wants row numbers, not {wanted.dtype} {wanted.shape}; use filter() for a mask")
        outside = wanted[(wanted < 0) | (wanted >= self.num_rows)]
        if outside.size:
            raise IndexError(f"row {outside[0]} does not exist in a batch of {self.num_rows} rows; rows count from 0")
        return Batch(self.schema, self._table().take(pa.array(wanted)).combine_chunks().to_batches())

    def filter(self, keep: Any) -> Batch:
        """The rows where the mask `keep` [rows] is True."""
        mask = np.asarray(keep)
        if mask.shape != (self.num_rows,) or mask.dtype != np.bool_:
            raise TypeError(f"filter() wants {self.num_rows} booleans, not {mask.dtype} {mask.shape}; see take()")
        return self.take(np.flatnonzero(mask))

    def split(self, parts: int | Sequence[int]) -> list[Batch]:
        """Consecutive parts sharing memory: so many (larger first), or of the given sizes, which use every row."""
        if isinstance(parts, int):
            if parts < 1:
                raise ValueError(f"cannot split into {parts} parts; ask for 1 or more")
            parts = [self.num_rows // parts + (i < self.num_rows % parts) for i in range(parts)]
        if sum(parts) != self.num_rows or min(parts, default=0) < 0:
            raise ValueError(f"the sizes {list(parts)} do not add up to {self.num_rows} rows; place every row")
        ends = np.cumsum([0, *parts]).tolist()
        return [self.slice(start, stop) for start, stop in zip(ends[:-1], ends[1:], strict=True)]

    def repeat(self, times: int) -> Batch:
        """Each row `times` times in a row (a group's samples stay adjacent), chunk by chunk."""
        return Batch(self.schema, (c.take(pa.array(np.repeat(np.arange(c.num_rows), times))) for c in self.chunks))

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """The rows of all, in order, sharing memory: the chunks are put side by side. The columns must be the same."""
        if not batches:
            raise ValueError("concat() of no batches has no columns; pass at least one Batch, which may have no rows")
        names = batches[0].schema.names
        for index, batch in enumerate(batches):
            if set(batch.schema.names) != set(names):
                odd = sorted(set(batch.schema.names) ^ set(names))
                raise ValueError(f"batch {index} differs from batch 0 in the columns {odd}; drop() them")
        ordered = [batch.select(names) for batch in batches]
        try:
            # A column of nulls alone (an `answer` that no row has) takes the type it has elsewhere.
            schema = pa.unify_schemas([batch.schema for batch in ordered], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"batches differ in the type of a column: {error}; give it one type") from error
        return cls(schema, (chunk.cast(schema) for batch in ordered for chunk in batch.chunks))

    def with_column(self, name: str, values: Any) -> Batch:
        """This batch with one column more, or with that one replaced; `values` as in `from_columns`, one per row."""
        if len(values) != self.num_rows:
            raise ValueError(f"column '{name}' has {len(values)} values for {self.num_rows} rows; pass one per row")
        array = to_arrow(name, values)
        return self._with_batch(Batch(pa.schema([(name, array.type)]), pa.table({name: array}).to_batches()))

    def merge(self, other: Batch) -> Batch:
        """The same rows with the columns of both; the chunks are this batch's. A column in both is an error."""
        twice = [name for name in other.schema.names if name in self.schema.names]
        if twice:
            raise ValueError(f"the columns {twice} are in both batches; drop() them from one")
        if other.num_rows != self.num_rows:
            raise ValueError(f"cannot merge {self.num_rows} rows with {other.num_rows}; both must have the same rows")
        return self._with_batch(other)

    def select(self, names: Iterable[str]) -> Batch:
        """These columns, in this order."""
        names = list(names)
        self._check_names(names)
        return Batch(pa.schema([self.schema.field(name) for name in names]), (c.select(names) for c in self.chunks))

    def drop(self, names: Iterable[str]) -> Batch:
        """All columns but these."""
        names = tuple(names)
        self._check_names(names)
        return self.select(name for name in self.schema.names if name not in names)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file, one row group per chunk; it replaces one of that name only when it is whole."""
        from hybridflow.batch_file import write_parquet

        write_parquet(path, self.schema, self.chunks)

    @classmethod
    def from_parquet(cls, path: str | os.PathLike[str]) -> Batch:
        """Read a Parquet file that anybody may have written, one chunk per row group.

        Only numbers, strings, booleans and lists and structs of them are read, nothing is executed; the columns of
        `COLUMN_TYPES` are checked. Raises ValueError naming the file, the column and the row.
        """
        from hybridflow.batch_file import read_parquet

        return cls(*read_parquet(path))

    def __reduce_ex__(self, protocol: Any) -> Any:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.schema) as writer:
            for chunk in self.chunks:
                writer.write_batch(chunk)
        # Arrow's buffers pickle out of band under protocol 5, so Ray's readers map them instead of copying.
        return _from_ipc, (sink.getvalue(),)

    def _table(self) -> pa.Table:
        return pa.Table.from_batches(self.chunks, self.schema)

    def _combined(self, name: str) -> pa.Array:
        return one_array(name, self.column(name))

    def _list_array(self, name: str) -> pa.ListArray:
        array = self._combined(name)
        if not pa.types.is_list(array.type):
            raise TypeError(f"column '{name}' is {array.type}, not a list; read it by tensor(), numpy() or pylist()")
        refuse_nulls(name, array)
        return array

    def _iter_slices(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        for chunk in self.chunks:
            if start < chunk.num_rows and stop > 0:
                yield chunk.slice(max(start, 0), min(stop, chunk.num_rows) - max(start, 0))
            start, stop = start - chunk.num_rows, stop - chunk.num_rows

    def _with_batch(self, other: Batch) -> Batch:
        names = [n for n in self.schema.names if n not in other.schema.names]
        kept = [self.schema.field(n) for n in names]
        schema = pa.schema([*kept, *other.schema])
        pieces = other.split([chunk.num_rows for chunk in self.chunks])
        chunks = []
        for chunk, piece in zip(self.chunks, pieces, strict=True):
            arrays = [*(chunk.column(n) for n in names), *(piece._combined(n) for n in other.schema.names)]
            chunks.append(check_columns(pa.RecordBatch.from_arrays(arrays, schema=schema)))
        return Batch(schema, chunks)

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.schema.names:
                raise KeyError(f"the batch has no column '{name}'; it has {self.schema.names}")


def _from_ipc(buffer: pa.Buffer) -> Batch:
    with pa.ipc.open_stream(buffer) as reader:
        return Batch(reader.schema, list(reader))
